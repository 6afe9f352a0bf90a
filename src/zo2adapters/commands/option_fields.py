"""The options of a command's dataclass, including those in nested groups, as the command line has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

_POSITIONAL, _SUPPRESSED = "Positional", "Suppress"  # marks of tyro in the types of fields


class OptionField(NamedTuple):
    """A field of a command's dataclass, or of a group of options in it."""

    owner: type  # the dataclass that has the field
    field: str
    name: str  # on the command line, with underscores
    aliases: tuple[str, ...]  # further names, with hyphens
    type: Any  # without marks
    default: Any  # MISSING: the option is required
    is_positional: bool


def option_fields(command: Any) -> Iterator[OptionField]:
    """Yield the options of a command, and where it has groups of options, those of each.

    Args:
        command: The command's dataclass, or an instance, whose values are the defaults.
    """
    owner = command if isinstance(command, type) else type(command)
    hints = get_type_hints(owner, include_extras=True)
    for option in fields(command):
        if option.default_factory is not MISSING:
            yield from option_fields(option.default_factory())
            continue
        hint, marks = hints[option.name], ()
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
        kinds = [str(mark) for mark in marks]
        if _SUPPRESSED in kinds:
            continue
        name = next((mark.name for mark in marks if getattr(mark, "name", None)), option.name)
        aliases = next((tuple(mark.aliases) for mark in marks if getattr(mark, "aliases", None)), ())
        default = getattr(command, option.name, MISSING)
        yield OptionField(owner, option.name, name, aliases, hint, default, _POSITIONAL in kinds)


def option_names(command: Any) -> list[str]:
    """The names of a command's options, with underscores; no positional arguments.

    Args:
        command: The command's dataclass, or an instance.
    """
    return [option.name for option in option_fields(command) if not option.is_positional]
