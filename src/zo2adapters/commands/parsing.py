"""Parsing of command lines and recipes: errors are one typed line, which names the option that was probably meant."""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from zo2adapters.commands.option_fields import option_fields, option_names
from zo2adapters.trainers.option_table import OPTIONS, SECTIONS
from zo2core.errors import OptionError

_KINDS = {"FLOAT": "a number", "INT": "a whole number", "PATH": "a path", "STR": "a text", "NONE": "none"}
_SECTION = re.compile(rf"^--(?:{'|'.join(SECTIONS)})[.]")  # --method.lr is --lr
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


def parse_options(name: str, options: Any, arguments: Sequence[str], **default: Any) -> Any:
    """Fill in a command's options."""
    import tyro

    message = io.StringIO()
    arguments = [_SECTION.sub("--", argument) for argument in arguments]
    try:
        with contextlib.redirect_stderr(message):
            return tyro.cli(
                options,
                prog=f"zo2 {name}",
                args=list(arguments),
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.EnumChoicesFromValues),
                **default,
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise _usage_error(name, options, arguments, message.getvalue()) from None


def _usage_error(name: str, options: Any, arguments: Sequence[str], message: str) -> OptionError:
    """Turn tyro's message, a box of many lines, into an error of one line."""
    lines = [line.strip("│╭╮╰╯ \t") for line in message.splitlines()[1:]]  # the first one is the box's title
    lines = list(itertools.dropwhile(lambda line: not line.strip("─-"), lines))
    first_error = itertools.takewhile(lambda line: line.strip("─-") and line != "Got errors:", filter(None, lines))
    found = " ".join(first_error).rstrip(".:")
    known = option_names(options)
    unknown = next((argument for argument in arguments if _is_unknown(argument, known)), None)
    if unknown is not None:
        flag = unknown.partition("=")[0]
        words = unknown_option(flag.removeprefix("--"), known, f"zo2 {name}", prefix="--")
        return OptionError("command line", found=f"the unknown option {flag[:80]}", **words)
    if (plain := _plain_error(name, found, options)) is not None:
        return plain
    return OptionError("command line", found=found, expected=f"the options of zo2 {name}", remedy=f"see zo2 {name} --help")


def _plain_error(name: str, message: str, options: Any) -> OptionError | None:
    """The error of a message of tyro whose kind is known, in plain words; None for others."""
    see, where = f"see zo2 {name} --help", "command line"
    if whole := re.match(r"Error parsing (--\S+): invalid literal for int\(\) with base 10: (.*)", message):
        found, remedy = f"{whole[2][:80]} as {whole[1]}", "write it in digits, such as 1000"
        return OptionError(where, found=found, expected="a whole number", remedy=remedy)
    if number := re.match(r"Error parsing (--\S+): could not convert string to float: (.*)", message):
        found, remedy = f"{number[2][:80]} as {number[1]}", "write it in digits, such as 1e-3"
        return OptionError(where, found=found, expected="a number", remedy=remedy)
    if kind := re.match(r"Error parsing (--\S+): no type matching (\S+) could be instantiated from \[(.*)\]", message):
        kinds = (_KINDS.get(word, word) for word in re.findall(r"[\w.-]+", kind[2]))
        return OptionError(where, found=f"{kind[3][:80]} as {kind[1]}", expected=" or ".join(kinds), remedy=see)
    if choice := re.match(r"invalid choice '(.*)' for argument '(--[\w-]+).*'\. Expected one of \((.*)\)", message):
        choices = sorted({text.strip("' ") for text in choice[3].split(",")} - {"", "None"})
        begun = (word for word in choices if word.startswith(choice[1]))
        near = next(begun, None) or nearest_name(choice[1], choices)
        return OptionError(
            where,
            found=f"{choice[1][:80]!r} as {choice[2]}",
            expected=f"one of {', '.join(choices)}" + ("" if near is None else f"; did you mean {near}"),
            remedy=see if near is None else f"write {near} if that is meant",
        )
    if value := re.match(r"Missing value for argument '(--[\w-]+)", message):
        return OptionError(where, found=f"no value after {value[1]}", expected="a value", remedy=see)
    if message.startswith("Missing from "):
        flags = re.findall(r"\s(--[\w-]+)(?:,\s*-\w)? [A-Z{\[]", message)
        required = (option._replace(aliases=()).written for option in option_fields(options) if option.default is MISSING)
        missing = [text for text in required if not flags or text.partition(" ")[0] in flags]
        if missing:
            found = ", ".join(f"no {text.partition(' ')[0]}" for text in missing)
            return OptionError(where, found=found, expected=" and ".join(missing), remedy=see)
    if stray := re.match(r"Unrecognized options: (\S+)", message):
        expected, remedy = f"options of zo2 {name}, which begin with --", see
        if "run" in option_names(options) and (Path(stray[1]) / "journal.jsonl").is_file():
            expected, remedy = f"an option before it; did you mean --run {stray[1]}", f"write --run {stray[1]}"
        return OptionError(where, found=f"the word {stray[1][:80]} without an option", expected=expected, remedy=remedy)
    return None


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
        return {"expected": f"an option of {command}: {', '.join(shown)}", "remedy": f"see {command} --help"}
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


def _is_unknown(argument: str, names: Sequence[str]) -> bool:
    """Whether an argument looks like an option and is none of these."""
    name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
    known = {*names, "help", "run_directory", ""}
    return argument.startswith("--") and name not in known and name.removeprefix("no_") not in known
