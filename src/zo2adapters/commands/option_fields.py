"""The options of a command's dataclass, including those in nested groups, as the command line has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

_KINDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


class Written(NamedTuple):
    """How an option is written, where that is not its field's name with hyphens: a mark in the annotation of the field."""

    name: str | None = None
    aliases: tuple[str, ...] = ()  # further names, with hyphens
    is_positional: bool = False


POSITIONAL = Written(is_positional=True)
NO_OPTION = "no option"  # mark of a field that is set by programs only


class OptionField(NamedTuple):
    """A field of a command's dataclass, or of a group of options in it."""

    owner: type  # the dataclass that has the field
    field: str
    name: str  # on the command line, with underscores
    aliases: tuple[str, ...]  # further names, with hyphens
    type: Any  # without marks
    default: Any  # MISSING: the option is required
    is_positional: bool

    @property
    def flag(self) -> str:
        """The option on the command line, such as ``--batch-size``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def flags(self) -> tuple[str, ...]:
        """All that it can be called by on the command line."""
        negation = [f"--no-{self.flag.removeprefix('--')}"] if self.type is bool else []
        return () if self.is_positional else (self.flag, *self.aliases, *negation)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of which a value is one."""
        return get_args(self.type) if get_origin(self.type) in {Union, UnionType} else (self.type,)

    @property
    def named(self) -> dict[str, Any]:
        """The values that have a name, such as those of an enumeration."""
        literals = [value for kind in self.kinds if get_origin(kind) is Literal for value in get_args(kind)]
        members = [member for kind in self.kinds if isinstance(kind, type) and issubclass(kind, Enum) for member in kind]
        return {str(value): value for value in literals} | {str(member.value): member for member in members}

    @property
    def takes_several(self) -> bool:
        """Whether a value is several texts."""
        return any(get_origin(kind) is tuple for kind in self.kinds)

    @property
    def written(self) -> str:
        """How the option is written, with the kind of its value, such as ``--steps INT``."""
        if self.is_positional:
            return self.field.upper() + (" ..." if get_origin(self.type) is tuple else "")
        names = ", ".join([self.flag, *self.aliases])
        if self.type is bool:
            return f"{names}, --no-{self.flag.removeprefix('--')}"
        return f"{names} {_kind(self.type)}"


def option_fields(command: Any) -> Iterator[OptionField]:
    """Yield the options of a command, and where it has groups of options, those of each."""
    owner = command if isinstance(command, type) else type(command)
    hints = get_type_hints(owner, include_extras=True)
    for option in fields(command):
        if option.default_factory is not MISSING:
            yield from option_fields(option.default_factory())
            continue
        hint = hints[option.name]
        marks: list[Any] = []
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
        if NO_OPTION in marks:
            continue
        written = next((mark for mark in marks if isinstance(mark, Written)), Written())
        default = getattr(command, option.name, MISSING)
        name = written.name or option.name
        yield OptionField(owner, option.name, name, written.aliases, hint, default, written.is_positional)


def _kind(hint: Any) -> str:
    """The kind of value of an option's type, such as ``INT`` or ``auto|FLOAT``."""
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        return f"{_kind(kinds[0])} ..." if kinds[-1] is Ellipsis else " ".join(map(_kind, kinds))
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "|".join(str(member.value) for member in hint)
    return _KINDS.get(hint) or "|".join(_kind(kind) for kind in get_args(hint) if kind is not NoneType)


def option_names(command: Any) -> list[str]:
    """The names of a command's options, with underscores; no positional arguments."""
    return [option.name for option in option_fields(command) if not option.is_positional]
