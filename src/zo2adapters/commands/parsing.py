"""Parsing of command lines and recipes: errors are one typed line, which names the option that was probably meant."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Protocol, get_args, get_origin, runtime_checkable

from zo2adapters.commands.option_fields import OptionField, option_fields, option_names
from zo2adapters.trainers.option_table import OPTIONS, SECTIONS
from zo2core.errors import OptionError

_NUMBERS = {int: "a whole number", float: "a number"}
_WHERE = "command line"
_SECTION = re.compile(rf"^--(?:{'|'.join(SECTIONS)})[.]")  # --method.lr is --lr
_MOST_LISTED = 20  # options that a message lists
_ALIKE = 0.75  # similarity above which a name is a misspelling; below it, a name contained in the unknown one is better

# Options of other trainers that are called otherwise here, and would not be recognised or taken for another one.
_OTHER_NAMES: dict[str, str | None] = {  # None: nothing here does the same
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": None,
    "bf16": "dtype",
    "cutoff_len": "sequence_length",
    "epochs": "steps",
    "eval_steps": "evaluate_every",
    "fp16": "dtype",
    "gradient_accumulation_steps": "micro_batch_size",
    "lora_r": "lora_rank",
    "lr_scheduler_kwargs": None,
    "lr_scheduler_type": "decay",
    "max_completion_length": "max_new_tokens",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "load_best_model_at_end": "keep_best",
    "num_epochs": "steps",
    "num_train_epochs": "steps",
    "optim": "method",
    "packing": "pack",
    "save_steps": "snapshot_every",
    "target_modules": "lora_targets",
    "warmup_ratio": "warmup_steps",
}
_QUALIFIERS = {"", "per", "device", "train", "eval", "max", "total", "num", "global", "gpu", "model", "output", "input"}


class Command(Protocol):
    """A dataclass whose fields are a subcommand's options."""

    def run(self) -> None:
        """Run the command."""


@runtime_checkable
class Resumable(Protocol):
    """A command that may continue a run, whose options are then its defaults."""

    def saved_command(self) -> Command | None:
        """The command with the options of the run to continue; None for a new run."""


@runtime_checkable
class TakesRecipe(Protocol):
    """A command whose first argument may be a recipe."""

    @classmethod
    def with_recipe(cls, arguments: Sequence[str]) -> list[str]:
        """Replace a recipe at the start of the arguments by the options in it."""


def parse_command(name: str, options: Any, arguments: Sequence[str]) -> Any:
    """Fill in a command's options; those of a run to continue are their defaults."""
    command = parse_options(name, options, arguments)
    if isinstance(command, Resumable) and (saved := command.saved_command()) is not None:
        command = parse_options(name, options, arguments, default=saved)
    return command


def parse_options(name: str, options: Any, arguments: Sequence[str], *, default: Any = None) -> Any:
    """Fill in a command's options. Those that are not given are a default's, where there is one."""
    listed, known = list(option_fields(options)), option_names(options)
    arguments = [_with_hyphens(argument) for argument in arguments]
    flags = {"--"}.union(*(option.flags for option in listed))
    for flag in (argument.partition("=")[0] for argument in arguments):
        if flag.startswith("--") and flag not in flags:
            words = unknown_option(flag.removeprefix("--"), known, f"zo2 {name}", prefix="--")
            raise OptionError(_WHERE, found=f"the unknown option {flag[:80]}", **words)
    see = f"see zo2 {name} --help"
    try:
        parsed, stray = _parser(listed).parse_known_args(arguments)
    except argparse.ArgumentError as error:
        flag = str(error.argument_name).partition("/")[0]
        no_value = error.message.startswith("expected")
        found, expected = (f"no value after {flag}", "a value") if no_value else (f"a value after {flag}", "none")
        raise OptionError(_WHERE, found=found, expected=expected, remedy=see) from None
    if stray:
        expected, remedy = f"options of zo2 {name}, which begin with --", see
        if "run" in known and (Path(stray[0]) / "journal.jsonl").is_file():
            expected, remedy = f"an option before it; did you mean --run {stray[0]}", f"write --run {stray[0]}"
        raise OptionError(_WHERE, found=f"the word {stray[0][:80]} without an option", expected=expected, remedy=remedy)
    given = vars(parsed)
    values = {option.field: _value(option, given[option.field], see) for option in listed if option.field in given}
    missing = [
        option._replace(aliases=()).written for option in listed if option.default is MISSING if option.field not in values
    ]
    if missing and default is None:
        found = ", ".join(f"no {written.partition(' ')[0]}" for written in missing)
        raise OptionError(_WHERE, found=found, expected=" and ".join(missing), remedy=see)
    return _filled(options if default is None else default, values)


def _with_hyphens(argument: str) -> str:
    """An argument with its option as it is called, such as ``--weight-decay=0`` for ``--method.weight_decay=0``."""
    flag, equals, value = argument.partition("=")
    return _SECTION.sub("--", flag).replace("_", "-") + equals + value if flag.startswith("--") else argument


def _parser(listed: Iterable[OptionField]) -> argparse.ArgumentParser:
    """A parser that splits a command line into options and their texts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in listed:
        names, several = (option.flag, *option.aliases), "*" if option.takes_several else None
        if option.is_positional:
            parser.add_argument(option.field, nargs=several or "?", default=argparse.SUPPRESS)
        elif option.type is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(*names, dest=option.field, default=argparse.SUPPRESS, action=action)
        else:
            parser.add_argument(*names, dest=option.field, default=argparse.SUPPRESS, nargs=several)
    return parser


def _value(option: OptionField, given: Any, see: str) -> Any:
    """The value of an option for which a text, a list of texts, or whether it is on, is given."""
    if isinstance(given, bool):
        return given
    if given in ("None", ["None"]) and NoneType in option.kinds:
        return None
    if not option.takes_several:
        return _converted(given, option.kinds, option, see)
    kind, *more = next(get_args(kind) for kind in option.kinds if get_origin(kind) is tuple)
    if Ellipsis not in more and len(given) != 1 + len(more):
        found, expected = f"{len(given)} values after {option.flag}", f"{1 + len(more)} values"
        raise OptionError(_WHERE, found=found, expected=expected, remedy=see)
    return tuple(_converted(text, (kind,), option, see) for text in given)


def _converted(text: str, kinds: Sequence[Any], option: OptionField, see: str) -> Any:
    """A text as a value of one of some kinds: a name, a number, a path or a text."""
    named = option.named
    if text in named:
        return named[text]
    for kind in (kind for kind in kinds if kind in {int, float, str, Path}):
        with contextlib.suppress(ValueError):
            return kind(text)
    found = f"{text!r:.80} as {option.name.upper() if option.is_positional else option.flag}"
    if numbers := [words for kind, words in _NUMBERS.items() if kind in kinds]:
        remedy = f"write it in digits, such as {'1000' if int in kinds else '1e-3'}"
        raise OptionError(_WHERE, found=found, expected=" or ".join([*numbers, *named]), remedy=remedy)
    choices = sorted(named)
    near = next((choice for choice in choices if choice.startswith(text)), None) or nearest_name(text, choices)
    expected = f"one of {', '.join(choices)}" + ("" if near is None else f"; did you mean {near}")
    raise OptionError(
        _WHERE, found=found, expected=expected, remedy=see if near is None else f"write {near} if that is meant"
    )


def _filled(options: Any, values: Mapping[str, Any]) -> Any:
    """Options with values in them and in their groups; a class is made with them."""
    is_new, given = isinstance(options, type), dict[str, Any]()
    for option in fields(options):
        if option.default_factory is not MISSING:
            group = option.default_factory() if is_new else getattr(options, option.name)
            given[option.name] = _filled(group, values)
        elif option.name in values:
            given[option.name] = values[option.name]
    return options(**given) if is_new else replace(options, **given)


def recipe_arguments(values: Mapping[Any, object], *, where: str, options: Any) -> list[str]:
    """Convert a recipe to arguments of the command line of ``zo2 train``, which then checks their values."""
    known, arguments, seen = option_names(options), list[str](), set[str]()
    for key, value in _flat(values, where):
        name, found = str(key).replace("-", "_"), f"the key {str(key)[:80]}"
        if name not in known:
            raise OptionError(where, found=found, **unknown_option(name, known, "zo2 train"))
        if name in seen:
            raise OptionError(where, found=f"{found} twice", expected="each option once", remedy="remove one of the two")
        seen.add(name)
        flag = name.replace("_", "-")
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if not all(item is None or isinstance(item, (str, int, float, Path, Enum)) for item in items):
            expected = "a single value, or a list of single values"
            raise OptionError(
                where, found=f"a {type(value).__name__} as {key}", expected=expected, remedy="see zo2 train --help-all"
            )
        if isinstance(value, (list, tuple)) and any(item is None or isinstance(item, bool) for item in items):
            found = f"{value!r} as {key}"
            raise OptionError(where, found=found, expected="texts or numbers", remedy="write each text between quotes")
        texts = [str(item.value if isinstance(item, Enum) else item) for item in items]
        if any("\0" in text for text in texts):
            expected = "text without NUL, which no path can have"
            raise OptionError(where, found=f"NUL in the value of {key}", expected=expected, remedy="correct the value")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, tuple)):
            arguments += [f"--{flag}", *texts]
        else:
            arguments.append(f"--{flag}={texts[0]}")
    return arguments


def _flat(values: Mapping[Any, object], where: str) -> Iterator[tuple[Any, object]]:
    """Keys and values of a recipe, which may have them in sections."""
    for key, value in values.items():
        if key not in SECTIONS or not isinstance(value, Mapping):
            yield key, value
            continue
        for name, of_section in value.items():
            option = OPTIONS.get(str(name).replace("-", "_"))
            if option is not None and option.section != key:
                found, expected = f"{name} in the section {key}", f"it in the section {option.section}"
                raise OptionError(where, found=found, expected=expected, remedy="move it there")
            yield name, of_section


def unknown_option(name: str, known: Iterable[str], command: str, *, prefix: str = "") -> dict[str, str]:
    """What an error about an unknown option expects and advises: the nearest option, or all of them."""
    names = list(known)
    nearest = nearest_name(name.replace("-", "_"), names)
    shown = [prefix + (known_name.replace("_", "-") if prefix else known_name) for known_name in names]
    if nearest is None:
        listed, every = ("", "-all") if len(shown) > _MOST_LISTED else (f": {', '.join(shown)}", "")
        return {"expected": f"an option of {command}{listed}", "remedy": f"see {command} --help{every}"}
    suggestion = shown[names.index(nearest)]
    return {
        "expected": f"an option of {command}; did you mean {suggestion}",
        "remedy": f"write {suggestion}, or leave it out",
    }


def nearest_name(name: str, names: Iterable[str]) -> str | None:
    """The known name that a user who wrote another one most likely meant; None if there is no similar one.

    A name is spelled alike, abbreviates the unknown one (``lr`` for ``learning_rate``), or stands after words that only
    qualify it (``batch_size`` in ``per_device_train_batch_size``).
    """
    known = list(names)
    if name in _OTHER_NAMES and _OTHER_NAMES[name] in (None, *known):
        return _OTHER_NAMES[name]
    alike = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
    if alike:
        return alike[0]
    words = name.split("_")
    initials = "".join(word[:1] for word in words)
    if len(words) > 1 and initials in known:
        return initials
    contained = [other for other in known if name.endswith(f"_{other}")]
    contained = [other for other in contained if {*name.removesuffix(other).split("_")} <= _QUALIFIERS]
    return max(contained, key=len, default=None)
