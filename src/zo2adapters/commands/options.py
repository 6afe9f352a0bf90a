"""The options of commands, which command lines and recipes fill in: their help, their completion,
and errors that name them.

An error is one typed line, which names the option that was probably meant.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import inspect
import itertools
import json
import os
import re
import shutil
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, get_args, get_origin

from zo2adapters.commands.guarded_stream import STREAMS
from zo2adapters.tasks.option_tree import (
    SECTIONS,
    Option,
    declared,
    docstrings,
    filled,
    kinds_of,
    named_values,
)
from zo2adapters.trainers.recipe import OPTIONS, yaml_kind
from zo2core.errors import (
    DeviceError,
    JournalError,
    MemoryBudgetError,
    OptionError,
    OutputError,
    ZO2Error,
    reason,
    system_error,
)
from zo2core.ranges import counted

_DESCRIPTION = (
    "Fine-tune language models that are larger than memory, block by block: by gradients or "
    "zeroth-order steps."
)
_KINDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
_NUMBERS = {int: "a whole number", float: "a number"}
_SECTION = re.compile(rf"^--(?:{'|'.join(SECTIONS)})[.]")  # --method.lr is --lr
_MOST_LISTED = 20  # options that a message lists
# similarity above which a name is a misspelling; below it, a name contained in the unknown one is
# better
_ALIKE = 0.75

# What a recipe may write for a switch: the words for a bool that PyYAML takes in YAML 1.1.
_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}

_NOWHERE = {"adam_epsilon", "lr_scheduler_kwargs"}  # options of other trainers that none here does
_QUALIFIERS = {
    "",
    "per",
    "device",
    "train",
    "eval",
    "max",
    "total",
    "num",
    "global",
    "gpu",
    "model",
    "output",
    "input",
}


class Command:
    """A subcommand: a dataclass whose fields are its options."""

    first_options: ClassVar[str] = ""  # fields that its help lists, or lists first; by default all
    # slow modules, imported after its options were checked and before it starts
    needs: ClassVar[tuple[str, ...]] = ()

    takes_recipe: ClassVar[bool] = False  # whether its first argument may be a recipe

    given: frozenset[str] = frozenset()  # fields that the command line gives

    @classmethod
    def read_line(cls, name: str, arguments: Sequence[str]) -> tuple[Values, Values]:
        """The values of a command line, and those of the recipe at its start."""
        return line_values(name, cls, arguments), {}

    def saved_command(self) -> Self | None:
        """The command with the options of the run to continue, which are then its defaults; None
        for a new run.
        """
        return None

    def check(self) -> None:
        """Refuse options that depend on neither model nor data nor machine, before anything slow is
        imported.
        """

    def run(self) -> None:
        """Run the command."""
        raise NotImplementedError

    def after_interruption(self) -> str | None:
        """One line once a signal has stopped it: what was written so far, or how to continue."""
        return None


class Written(NamedTuple):
    """How an option is written, where that is not its field's name with hyphens: a mark in the
    annotation of the field.
    """

    name: str | None = None
    aliases: tuple[str, ...] = ()  # further names, with hyphens


Values: TypeAlias = Mapping[str, Any]  # of options, by field
POSITIONAL = "positional"  # mark of a field that is no option, but an argument


class OptionField(NamedTuple):
    """A field of a command's dataclass, or of a group of options in it."""

    owner: type  # the dataclass that has the field
    field: str
    name: str  # on the command line, with underscores
    flag: str  # on the command line, such as --batch-size
    type: Any  # without marks
    default: Any = None  # MISSING: the option is required
    aliases: tuple[str, ...] = ()  # further names, with hyphens
    is_positional: bool = False
    option: Option | None = None  # what is declared beside it; None: it is no option of a run

    @property
    def flags(self) -> tuple[str, ...]:
        """All that it can be called by on the command line, and for a switch what turns it off."""
        negation = (f"--no-{self.flag.removeprefix('--')}",) if self.type is bool else ()
        return () if self.is_positional else (self.flag, *self.aliases, *negation)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of which a value is one."""
        return kinds_of(self.type)

    @property
    def named(self) -> dict[str, Any]:
        """The values that have a name, such as those of an enumeration."""
        return named_values(self.type)

    @property
    def items(self) -> tuple[Any, ...]:
        """The types of the items, if a value is several texts; the last one is an ellipsis if there
        may be any number.
        """
        return next((get_args(kind) for kind in self.kinds if get_origin(kind) is tuple), ())

    @property
    def written(self) -> str:
        """How the option is written, with the kind of its value, such as ``--steps INT``."""
        if self.is_positional:
            return self.field.upper() + (" ..." if self.items else "")
        kind = "" if self.type is bool else f" {self.kind}"
        return ", ".join(self.flags) + kind

    @property
    def kind(self) -> str:
        """The kind of its value, such as ``INT`` or ``auto|FLOAT``."""
        if self.items:
            return " ".join("..." if item is Ellipsis else _KINDS[item] for item in self.items)
        return "|".join([*self.named, *(_KINDS[kind] for kind in self.kinds if kind in _KINDS)])


def option_fields(command: Any) -> list[OptionField]:
    """The options of a command, and where it has groups of options, those of each."""
    return list(_fields(command))


def _fields(command: Any) -> Iterator[OptionField]:
    """Yield the fields of a command and of its groups."""
    for one in declared(command):
        written = next((mark for mark in one.marks if isinstance(mark, Written)), Written())
        name = written.name or one.name
        yield OptionField(
            owner=one.owner,
            field=one.name,
            name=name,
            flag=f"--{name.replace('_', '-')}",
            type=one.type,
            default=one.default,
            aliases=written.aliases,
            is_positional=POSITIONAL in one.marks,
            option=one.option,
        )


def option_names(command: Any) -> list[str]:
    """The names of a command's options, with underscores; no positional arguments."""
    return [option.name for option in option_fields(command) if not option.is_positional]


def parse_command(name: str, options: Any, arguments: Sequence[str]) -> Any:
    """The command of a command line."""
    return command_of(name, options, *options.read_line(name, arguments))


def command_of(name: str, options: Any, line: Values, recipe: Values = MappingProxyType({})) -> Any:
    """The command with these options; those of a recipe, or of a run to continue, are their
    defaults.
    """
    command = filled_in(name, options, line, recipe=recipe)
    saved = command.saved_command()
    if saved is None:
        return command
    return filled_in(name, options, line, recipe=recipe, default=saved)


def filled_in(
    name: str,
    options: Any,
    line: Values,
    *,
    recipe: Values = MappingProxyType({}),
    default: Any = None,
) -> Any:
    """Fill in a command's options. Those that are not given are a default's, where there is one.

    What an option of the command line makes of no effect is not counted as given by the recipe,
    which may have all options of a run.
    """
    values = {**recipe, **line}
    deciding = {one.field for one in option_fields(options) if one.option and one.option.decides}
    given = line.keys() if line.keys() & deciding else values.keys()
    missing = [
        option._replace(aliases=()).written
        for option in option_fields(options)
        if option.default is MISSING and option.field not in values
    ]
    if missing and default is None:
        found = ", ".join(f"no {written.partition(' ')[0]}" for written in missing)
        raise _refused(found, " and ".join(missing), f"see zo2 {name} --help")
    command = filled(options if default is None else default, values)
    return with_given(command, {*given, *getattr(default, "given", ())})


def with_given(command: Any, given: Iterable[str]) -> Any:
    """The command, which knows that these options were given."""
    vars(command)["given"] = frozenset(given)  # no option, and no field: a changed copy has none
    return command


def line_values(name: str, options: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """The values of a command line, by field."""
    listed = option_fields(options)
    see = f"see zo2 {name} --help"
    written = [_with_hyphens(argument) for argument in arguments]
    _refuse_former(written)
    try:
        parsed, stray = _parser(listed, see).parse_known_args(written)
    except argparse.ArgumentError as error:
        if isinstance(error.__context__, OptionError):  # of a value
            raise error.__context__ from None
        called = str(error.argument_name).partition("/")[0]
        if error.message.startswith("expected"):
            raise _refused(f"no value after {called}", "a value", see) from None
        raise _refused(f"a value after {called}", "none", see) from None
    _refuse_stray(name, options, listed, stray)
    values = vars(parsed)
    for option in listed:
        if isinstance(items := values.get(option.field), list):
            values[option.field] = _several(option, items, see)
    return values


def _several(option: OptionField, items: list[Any], see: str) -> tuple[Any, ...] | None:
    """The values of an option that takes several, as many as it has."""
    if items == [None]:
        return None
    if option.items[-1] is not Ellipsis and len(items) != len(option.items):
        count = counted(len(items), "value")
        raise _refused(f"{count} after {option.flag}", f"{len(option.items)} values", see)
    return tuple(items)


# Settings that were written in the value of an option before each became an option of its own:
# the option, and each setting with its present name where that differs; ! marks switches.
_FORMER: Mapping[str, str] = {
    "columns": "text=text_column prompt=prompt_column completion=completion_column "
    "label=label_column messages=messages_column",
    "train-on": "rendered_at",
    "precision": "transfer=transfer_dtype",
    "objective": "beta",
    "method": "betas momentum switch_every state_bits delayed_update! stream_blocks! loss_scaling!",
    "clip": "norm=max_grad_norm value=max_grad_value projected=clip_grad median=clip_median",
    "estimator": "exact!=method=mezo fitness",
    "rank": "period stack",
    "reward-options": "max_new_tokens temperature top_p seconds=reward_seconds "
    "memory=reward_memory max_drift",
    "memory": "activations=activation_memory",
    "evaluation": "=eval_split",
}


def _refuse_former(arguments: Sequence[str]) -> None:
    """Refuse values with settings, as earlier versions had them, with the options of today."""
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        called, equals, value = argument.partition("=")
        text = value if equals else following
        names = _FORMER.get(called.removeprefix("--"), "")
        present = _in_present_options(called, text, names) if called.startswith("--") else None
        if present is not None:
            raise _refused(f"{text!r:.80} as {called}", "each option by itself", f"write {present}")


def _in_present_options(called: str, text: str, names: str) -> str | None:
    """A value with former settings as it is written today; None: it has none."""
    pairs = [word.partition("=")[::2] for word in names.split()]
    present = {key.rstrip("!"): name or key.rstrip("!") for key, name in pairs}
    if "" in present:  # a number in place of another value
        with contextlib.suppress(ValueError):
            return f"--{present['']} {float(text):g}".replace("_", "-")
        return None
    switches = (rf"{key[:-1]}(?=,|$)" for key, _ in pairs if key.endswith("!"))
    starts = "|".join([*(f"{key}=" for key in present), *switches])
    found = re.fullmatch(rf"(?:([^=]*?):)?((?:{starts}).*)", text) if pairs else None
    if found is None:
        return None
    written = [] if found[1] in (None, "mezo") else [f"{called} {found[1]}"]
    for part in re.split(rf",(?={starts})", found[2]):
        key, _, value = part.partition("=")
        option = f"--{present[key].replace('_', '-').replace('=', ' ')}"
        written.append(f"{option} {value.replace(',', ' ')}".rstrip())
    return " ".join(written)


def _refuse_stray(
    name: str, options: Any, listed: Sequence[OptionField], stray: Sequence[str]
) -> None:
    """Refuse words that are no option and belong to none."""
    see = f"see zo2 {name} --help"
    for word in stray:
        called = word.partition("=")[0]
        if called.startswith("--"):
            raise unknown_option(
                "command line", f"the unknown option {called[:80]}", called, listed, f"zo2 {name}"
            )
    if stray and "run" in option_names(options) and (Path(stray[0]) / "journal.jsonl").is_file():
        expected = f"an option before it; did you mean --run {stray[0]}"
        see = f"write --run {stray[0]}"
        raise _refused(f"the word {stray[0][:80]} without an option", expected, see)
    if stray:
        raise _refused(
            f"the word {stray[0][:80]} without an option",
            f"options of zo2 {name}, which begin with --",
            see,
        )


def _refused(found: str, expected: str, remedy: str) -> OptionError:
    """The error of a command line."""
    return OptionError("command line", found, expected, remedy)


def _with_hyphens(argument: str) -> str:
    """An argument with its option as it is called, such as ``--weight-decay=0`` for
    ``--method.weight_decay=0``.
    """
    called, equals, value = argument.partition("=")
    return (
        _SECTION.sub("--", called).replace("_", "-") + equals + value
        if called.startswith("--")
        else argument
    )


def _parser(listed: Iterable[OptionField], see: str) -> argparse.ArgumentParser:
    """A parser of a command line; ``see`` is what an error advises."""
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    for option in listed:
        convert = partial(_converted, option, see)
        count = "*" if option.items else None
        if option.is_positional:
            parser.add_argument(option.field, type=convert, nargs=count or "?")
        elif option.type is bool:
            parser.add_argument(
                option.flag, dest=option.field, action=argparse.BooleanOptionalAction
            )
        else:
            parser.add_argument(*option.flags, dest=option.field, type=convert, nargs=count)
    return parser


def _converted(option: OptionField, see: str, text: str) -> Any:
    """A text as a value of one of an option's kinds: a name, a number, a path or a text."""
    if text is argparse.SUPPRESS:
        # argparse converts the default of a missing positional argument, too
        return text
    kinds = {*option.kinds, *option.items}
    if text in option.named:
        return option.named[text]
    if text == "None" and NoneType in kinds:
        return None
    for kind in (kind for kind in (int, float, str, Path) if kind in kinds):
        with contextlib.suppress(ValueError):
            return kind(text)
    raise _no_value_of(option, see, text)


def _no_value_of(option: OptionField, see: str, text: str) -> OptionError:
    """The error about a text that is no value of an option."""
    kinds = {*option.kinds, *option.items}
    found = f"{text!r:.80} as {option.name.upper() if option.is_positional else option.flag}"
    numbers = [words for kind, words in _NUMBERS.items() if kind in kinds]
    if numbers:
        remedy = f"write it in digits, such as {'1000' if int in kinds else '1e-3'}"
        return _refused(found, " or ".join([*numbers, *option.named]), remedy)
    choices = sorted(option.named)
    begun = (choice for choice in choices if choice.startswith(text))
    near = next(begun, None) or nearest_name(text, choices)
    remedy = see if near is None else f"write {near} if that is meant"
    return _refused(found, f"one of {', '.join(choices)}{_meant(near)}", remedy)


def _meant(near: str | None) -> str:
    return "" if near is None else f"; did you mean {near}"


def recipe_values(recipe: Mapping[Any, object], *, where: str, options: Any) -> dict[str, Any]:
    """The values of a recipe, by field."""
    listed = {option.name: option for option in option_fields(options)}
    values = dict[str, Any]()
    for key, value in _flat(recipe, where, listed):
        name = str(key).replace("-", "_")
        if name not in listed:
            found = f"the key {str(key)[:80]}"
            raise unknown_option(where, found, name, listed.values(), "zo2 train")
        option = listed[name]
        if option.field in values:
            raise OptionError(
                where, f"the key {name} twice", "each option once", "remove one of the two"
            )
        try:
            values[option.field] = _recipe_value(option, key, value, where)
        except OptionError as error:
            raise OptionError(where, error.found, error.expected, error.remedy) from error
    return values


def _recipe_value(option: OptionField, key: object, value: object, where: str) -> Any:
    """A value of a recipe as the option's field has it."""
    if option.type is bool or isinstance(value, bool):
        return _switched(option, key, value, where)
    see = "see zo2 train --help-all"
    _require_written(option, key, value, where)
    texts = [_item_text(item) for item in _items(value)]
    _refuse_former([option.flag, *texts[:1]])
    items = [_converted(option, see, text) for text in texts]
    return _several(option, items, see) if option.items else items[0]


def _require_written(option: OptionField, key: object, value: object, where: str) -> None:
    """Refuse a value of a recipe that cannot be written on a command line."""
    is_list = isinstance(value, (list, tuple))
    items = _items(value)
    if not all(item is None or isinstance(item, (str, int, float, Path, Enum)) for item in items):
        found = f"{yaml_kind(value)} as {key}"
        expected = "a single value, or a list of single values"
        raise OptionError(where, found, expected, "see zo2 train --help-all")
    if len(items) > 1 and not option.items:
        found = f"{len(items)} values as {key}"
        raise OptionError(where, found, "a single value", "write one of them")
    if is_list and any(item is None or isinstance(item, bool) for item in items):
        found = f"{json.dumps(value)} as {key}"
        raise OptionError(where, found, "texts or numbers", "write each text between quotes")
    if any("\0" in _item_text(item) for item in items):
        found = f"NUL in the value of {key}"
        expected = "text without NUL, which no path can have"
        raise OptionError(where, found, expected, "correct the value")


def _items(value: object) -> Sequence[object]:
    """The values of a list of a recipe, or its single value."""
    return value if isinstance(value, (list, tuple)) else [value]


def _item_text(item: object) -> str:
    return str(item.value if isinstance(item, Enum) else item)


def _switched(option: OptionField, key: object, value: object, where: str) -> object:
    """A value of a recipe, which is a bool if the option is a switch, and else none.

    Args:
        option: The option.
        key: What the recipe calls it.
        value: As the recipe has it; a bool may be a text there, such as on.
        where: The recipe.
    """
    if option.type is bool:
        switch = _SWITCHES.get(str(value).lower())
        if switch is None:
            found = f"{value!r:.80} as {key}"
            remedy = f"write {key}: true, or {key}: false"
            raise OptionError(where, found, "true or false", remedy)
        return switch
    if isinstance(value, bool):
        found = f"{str(value).lower()} as {key}"
        remedy = "write such a value, or leave it out"
        raise OptionError(where, found, f"a value, as in {option.written}", remedy)
    return value


def _flat(
    values: Mapping[Any, object], where: str, listed: Mapping[str, OptionField]
) -> Iterator[tuple[Any, object]]:
    """Keys and values of a recipe, which may have them in sections."""
    for key, value in values.items():
        if key not in SECTIONS or not isinstance(value, Mapping):
            yield key, value
            continue
        for name, of_section in value.items():
            known = listed.get(str(name).replace("-", "_"))
            if known is not None and known.option is not None and known.option.section != key:
                expected = f"it in the section {known.option.section}"
                found = f"{name} in the section {key}"
                raise OptionError(where, found, expected, "move it there")
            yield name, of_section


def unknown_option(
    where: str, found: str, name: str, listed: Iterable[OptionField], command: str
) -> OptionError:
    """The error about an unknown option, which names the nearest option, or all of them; as flags
    if ``name`` is one.
    """
    is_flag = name.startswith("--")
    known = [option for option in listed if not option.is_positional]
    written = {option.name: option.flag if is_flag else option.name for option in known}
    names = ", ".join(written.values())
    former = _FORMER.get(name.removeprefix("--").replace("_", "-"))
    if former is not None:
        present = [word.rpartition("=")[2].rstrip("!") for word in former.split()]
        expected = ", ".join(written[one] for one in present if one in written)
        return OptionError(where, found, f"{expected}: each is an option", "write these instead")
    elsewhere = {one: OPTIONS[one].elsewhere for one in written if one in OPTIONS}
    nearest = nearest_name(name.removeprefix("--").replace("-", "_"), written, elsewhere)
    if nearest is None:
        every, text = ("-all", "") if len(known) > _MOST_LISTED else ("", f": {names}")
        expected = f"an option of {command}{text}"
        remedy = f"see {command} --help{every}"
    else:
        expected = f"an option of {command}; did you mean {written[nearest]}"
        remedy = f"write {written[nearest]}, or leave it out"
    return OptionError(where, found, expected, remedy)


def nearest_name(
    name: str,
    names: Iterable[str],
    elsewhere: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str | None:
    """The known name that a user who wrote another one most likely meant; None if there is no
    similar one.

    A name is spelled alike, abbreviates the unknown one (``lr`` for ``learning_rate``), or stands
    after words that only qualify it (``batch_size`` in ``per_device_train_batch_size``).
    """
    known = list(names)
    for here, others in elsewhere.items():
        if name in others:
            return here
    if name in _NOWHERE:
        return None
    alike = difflib.get_close_matches(name, known, n=1, cutoff=_ALIKE)
    if alike:
        return alike[0]
    words = name.split("_")
    initials = "".join(word[:1] for word in words)
    if len(words) > 1 and initials in known:
        return initials
    contained = [other for other in known if name.endswith(f"_{other}")]
    contained = [
        other for other in contained if {*name.removesuffix(other).split("_")} <= _QUALIFIERS
    ]
    return max(contained, key=len, default=None)


_WIDEST = 125  # columns of a line
_INDENT = 6  # columns before an option's text


def require_command(name: str, commands: Sequence[str]) -> None:
    """Refuse the name of a command that there is not."""
    if name not in commands:
        near = next(iter(difflib.get_close_matches(name, commands, n=1)), None)
        raise OptionError(
            "command", repr(name), f"one of {', '.join(commands)}{_meant(near)}", "see zo2 --help"
        )


def program_help(commands: Mapping[str, type]) -> str:
    """The help of the program: its commands, and how to get the help of each."""
    lines = ["usage: zo2 COMMAND [OPTIONS]", "", *_wrapped(_DESCRIPTION, 0), "", "Commands"]
    for name, options in commands.items():
        lines += [f"  {name}", *_wrapped(inspect.getdoc(options) or "", _INDENT)]
    return "\n".join([*lines, "", "zo2 COMMAND --help lists the options of a command."])


def first_steps() -> str:
    """What one who has typed nothing but ``zo2`` does first."""
    lines = [*_wrapped(_DESCRIPTION, 0), "", "What to do first"]
    for command, effect in (
        ("zo2 demo", "a small model learns here, in a few minutes"),
        ("zo2 init --model MODEL --data FILE", "look at a model and rows, and write a recipe"),
        ("zo2 train recipe.yaml", "train as the recipe says"),
        ("zo2 chat run", "talk to the result"),
    ):
        lines.append(f"  {command:<36}{effect}")
    return "\n".join([*lines, "", "zo2 --help lists all commands."])


def command_help(name: str, options: Any, *, lists_all: bool) -> str:
    """The help of a command: the options that most people need, with ``--help-all`` also the
    others, by sections.
    """
    listed = option_fields(options)
    first = options.first_options.split()
    shown = [one for field in first for one in listed if one.field == field] or listed
    rest = [one for one in listed if one not in shown]
    lines = [
        f"usage: {_usage(name, options, listed)}",
        "",
        *_wrapped(inspect.getdoc(options) or "", 0),
        *_option_lines("Options", shown),
    ]
    if lists_all:
        for section in SECTIONS:
            of_section = [one for one in rest if _section_of(one) == section]
            lines += _option_lines(f"Options of {section}", of_section)
        others = [one for one in rest if one.option is None]
        lines += _option_lines("Further options", others)
    elif rest:
        lines += ["", f"{len(rest)} more options: zo2 {name} --help-all"]
    return "\n".join(lines)


def _option_lines(title: str, group: Sequence[OptionField]) -> list[str]:
    """The help of a group of options, if it has any."""
    lines = ["", title] if group else []
    for option in group:
        lines += [f"  {option.written}", *_wrapped(_text(option), _INDENT)]
    return lines


def _section_of(option: OptionField) -> str | None:
    """The section of an option in recipes; None: it is no option of a run."""
    return None if option.option is None else option.option.section


def _usage(name: str, options: Any, listed: list[OptionField]) -> str:
    words = [f"zo2 {name}", *(["[RECIPE.yaml]"] if options.takes_recipe else [])]
    for option in listed:
        if option.default is MISSING:
            words.append(option._replace(aliases=()).written)
        elif option.is_positional:
            words.append(f"[{option.written}]")
    return " ".join([*words, "[OPTIONS]"])


def documentation(option: OptionField) -> str:
    """The docstring below an option's field."""
    return docstrings(option.owner)[option.field]


def _text(option: OptionField) -> str:
    """The docstring below an option's field, with its default."""
    text = " ".join(documentation(option).split())
    default = option.default.value if isinstance(option.default, Enum) else option.default
    if default is MISSING:
        return f"{text} (required)"
    if default is None or default is False or default == ():
        return text
    return f"{text} (default: {_default_text(default)})"


def _default_text(default: object) -> str:
    if default is True:
        return "on"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _wrapped(text: str, indent: int) -> list[str]:
    """The paragraphs of a text as lines."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    margin = " " * indent
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    wrap = textwrap.TextWrapper(
        width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    ).wrap
    wrapped = map(wrap, paragraphs)
    return "\n\n".join("\n".join(lines) for lines in wrapped).split("\n")


def text_table(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """A table as text; numbers stand at the right of their columns, but for those whose places are
    in ``left``.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = (
        [(cell.ljust if i in left else cell.rjust)(widths[i]) for i, cell in enumerate(row)]
        for row in rows
    )
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


def completions(line: str, commands: Iterable[str], options_of: Callable[[str], Any]) -> list[str]:
    """What the last word of a command line can become; nothing where it can be any text, such as a
    path.

    Args:
        line: The command line up to the cursor, the program's name first.
        commands: The names of the commands.
        options_of: Returns the options of a command.
    """
    *words, last = f"{line}.".split()  # the dot keeps an empty last word
    last = last[:-1]
    if len(words) == 1:
        return [name for name in commands if name.startswith(last)]
    if not words or words[1] not in commands:
        return []
    listed = option_fields(options_of(words[1]))
    if last.startswith("-"):
        offered = [name for option in listed for name in option.flags]
    else:
        offered = [name for option in listed if words[-1] in option.flags for name in option.named]
    return [text for text in offered if text.startswith(last)]


_LONGEST_PATH = 300  # characters of a path that an error shows
# What the library's errors tell to write in Python, as flags.
_IN_FLAGS: Mapping[str, str] = {
    "DensePerturbation()": "dense perturbations (no --rank)",
    "LowRankPerturbation(rank=8)": "--rank 8",
    "PhiloxNoise()": "--noise gaussian",
    "PhiloxNoise(Distribution.GAUSSIAN)": "--noise gaussian",
    "PhiloxNoise(Distribution.RADEMACHER)": "--noise rademacher",
    "FirstOrder": "a first-order --method, such as lora",
    "ZerothOrder": "--method zeroth-order",
    "every=None": "--write-back-every never",
    "loss_chunk=None": "no --loss-chunk",
    "perturb_in_place=False": "--method zeroth-order",
    "precision='exact'": "--precision exact",
    "precision='mixed'": "--precision mixed",
    "weight_decay=0": "--weight-decay 0",
}
# Keys of a journal's header that an error shows, each before its value.
_HEADER_KEY = re.compile(
    r"\b(?:estimator|method|perturbation|provenance)\.[\w. -]*?\w(?= [-\d'TFN\[{]|;|\. )"
)
_QUOTED = re.compile(r"`([^`]+)`")
# Options that reduce the memory a command takes.
_MEMORY_OPTIONS = (
    "micro_batch_size",
    "loss_chunk",
    "sequence_length",
    "batch_size",
    "tokens",
    "dtype",
)
_OUT_OF_MEMORY = (
    "allocate memory",
    "out of memory",
    "bad_alloc",
    "bad allocation",
    "calculation overflowed",
)
# an extension had no memory for an exception
_NO_EXCEPTION = ("without exception set", "without setting an exception")


def as_zo2_error(error: Exception) -> ZO2Error | None:
    """Convert an error of the system to a typed error; None for an unexpected error, which is a
    defect of this program.
    """
    if isinstance(error, ZO2Error):
        return error
    message = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    if _is_of_memory(error, message):
        where = "device memory" if type(error).__name__ == "OutOfMemoryError" else "host memory"
        return MemoryBudgetError(
            where, f"none left ({message})", "enough for these options", "free memory"
        )
    if isinstance(error, RuntimeError) and "start new thread" in message:
        remedy = "raise ulimit -u, or the control group's pids.max"
        return DeviceError("threads", "that no more can be started", "a few more", remedy)
    if isinstance(error, OSError):
        return _of_system(error)
    return None


def _is_of_memory(error: Exception, message: str) -> bool:
    """Whether an error says that memory ran out."""
    match error:
        case MemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError():
            return any(words in message.lower() for words in _OUT_OF_MEMORY)
        case SystemError():
            return any(words in message for words in _NO_EXCEPTION)
        case SyntaxError():  # parsed for docstrings, imported before
            return error.filename == "<unknown>"
    return False


def _of_system(error: OSError) -> ZO2Error:
    """The typed error for an error of the system that no context has typed."""
    name = error.filename
    if name in STREAMS.values():
        expected = "an output that can be written"
        return OutputError(name, reason(error), expected, "redirect the output elsewhere")
    if isinstance(name, (str, bytes)):
        path = Path(os.fsdecode(name)[:_LONGEST_PATH])
        remedy = "check the path, its disk and your permissions"
        return system_error(OutputError, path, error, expected="a usable path", remedy=remedy)
    # A call on a descriptor; it is named by where it was made.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{frame.name} ({Path(frame.filename).name}, line {frame.lineno})"
    expected = "a call of the system that succeeds"
    remedy = "check disks, limits (ulimit -a) and permissions"
    return system_error(OutputError, where, error, expected=expected, remedy=remedy)


def error_line(error: ZO2Error, command: Any) -> str:
    """Format an error as one line, with options as flags."""
    listed = option_fields(command) if is_dataclass(command) else []
    flags = _flags_of(listed)
    where = error.where if error.is_of_path else flags.get(error.where, error.where)
    remedy = error.remedy
    if isinstance(error, MemoryBudgetError) and listed:
        names = {option.name for option in listed}
        reducing = ", ".join(flags[name] for name in _MEMORY_OPTIONS if name in names)
        remedy = "allow or free more" + (f", or reduce it with {reducing}" if reducing else "")
    line = f"{where}: found {error.found}; expected {error.expected}. What to do: {remedy}."
    line = _QUOTED.sub(
        lambda quoted: flags.get(quoted[1]) or _IN_FLAGS.get(quoted[1]) or quoted[0], line
    )
    if isinstance(error, JournalError):
        line = _HEADER_KEY.sub(lambda key: flags.get(_option_of(key[0])) or key[0], line)
    return " ".join(line.split())


def _flags_of(listed: Sequence[OptionField]) -> dict[str, str]:
    """Options as flags, by their names, those of their fields, and the library's."""
    flags = {name: option.flag for option in listed for name in (option.name, option.field)}
    rows = ((one.flag, row) for one in listed for row in (one.option, OPTIONS.get(one.name)))
    return flags | {name: flag for flag, row in rows if row is not None for name in row.library}


def _option_of(key: str) -> str:
    """The option that a journal's header has at a dotted key, such as ``estimator.lr.peak``."""
    first, *_, last = key.split(".")
    name = last.replace(" ", "_").replace("-", "_")
    return first if name == "name" else name
