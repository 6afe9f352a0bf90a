"""Help texts of the program and of each command, from docstrings, in one layout; and completions of command lines."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import math
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, is_dataclass
from enum import Enum
from typing import Any

from zo2adapters.commands.options import OptionField, option_fields

_WIDEST = 125  # columns of a line
_INDENT = 6  # columns before an option's text


def program_help(description: str, commands: Mapping[str, type]) -> str:
    """The help of the program: its commands, and how to get the help of each."""
    lines = ["usage: zo2 COMMAND [OPTIONS]", "", *_wrapped(description, 0), "", "Commands"]
    for name, options in commands.items():
        lines += [f"  {name}", *_wrapped(inspect.getdoc(options) or "", _INDENT)]
    return "\n".join([*lines, "", "zo2 COMMAND --help lists the options of a command."])


def first_steps(description: str) -> str:
    """What one who has typed nothing but ``zo2`` does first."""
    lines = [*_wrapped(description, 0), "", "What to do first"]
    for command, effect in (
        ("zo2 demo", "a small model learns here, in two minutes"),
        ("zo2 init --model MODEL --data FILE", "look at a model and rows, and write a recipe"),
        ("zo2 train recipe.yaml", "train as the recipe says"),
        ("zo2 chat --run run", "talk to the result"),
    ):
        lines.append(f"  {command:<36}{effect}")
    return "\n".join([*lines, "", "zo2 --help lists all commands."])


def command_help(name: str, options: Any, *, lists_all: bool) -> str:
    """The help of a command."""
    listed = list(option_fields(options))
    order = {field: index for index, field in enumerate(options.first_options)}
    # The command's own options come first, and of these the ones that most people need.
    shown = sorted(listed, key=lambda option: order.get(option.field, len(order)) if option.owner is options else math.inf)
    if order and not lists_all:
        shown = [option for field in order for option in listed if option.field == field]
    lines = [f"usage: {_usage(name, options, listed)}", "", *_wrapped(inspect.getdoc(options) or "", 0)]
    for owner, group in itertools.groupby(shown, key=lambda option: option.owner if lists_all else options):
        heading = "Options" if owner is options else (inspect.getdoc(owner) or "").partition("\n")[0].rstrip(".")
        lines += ["", heading]
        for option in group:
            lines += [f"  {option.written}", *_wrapped(_text(option), _INDENT)]
    rest = len(listed) - len(shown)
    more = [f"{rest} more options: zo2 {name} --help-all"] if rest else []
    return "\n".join([*lines, *([""] if more else []), *more])


def _usage(name: str, options: Any, listed: list[OptionField]) -> str:
    words = [f"zo2 {name}", *(["[RECIPE.yaml]"] if options.takes_recipe else [])]
    for option in listed:
        if option.default is MISSING:
            words.append(option._replace(aliases=()).written)
        elif option.is_positional:
            words.append(f"[{option.written}]")
    return " ".join([*words, "[OPTIONS]"])


def _text(option: OptionField) -> str:
    """The docstring below an option's field, with its default."""
    text = _docstrings_of(option.owner)[option.field]
    default = option.default.value if isinstance(option.default, Enum) else option.default
    if default is MISSING:
        return f"{text} (required)"
    if default is None or default is False or default == ():
        return text
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else "on" if default is True else str(default)
    return f"{text} (default: {shown})"


def _wrapped(text: str, indent: int) -> list[str]:
    """The paragraphs of a text as lines."""
    width, margin = min(shutil.get_terminal_size().columns, _WIDEST), " " * indent
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    wrap = textwrap.TextWrapper(width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False).wrap
    wrapped = map(wrap, paragraphs)
    return "\n\n".join("\n".join(lines) for lines in wrapped).split("\n")


@functools.cache
def _docstrings_of(options: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, including fields of its bases, by the field's name."""
    docstrings: dict[str, str] = {}
    for base in reversed(options.__mro__):
        docstrings |= dict(_docstrings(base)) if is_dataclass(base) else {}
    return docstrings


def _docstrings(options: type) -> Iterator[tuple[str, str]]:
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    assert isinstance(definition, ast.ClassDef)
    for field, docstring in itertools.pairwise(definition.body):
        match field, docstring:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)


def completions(line: str, commands: Iterable[str], options_of: Callable[[str], Any]) -> list[str]:
    """What the last word of a command line can become; nothing where it can be any text, such as a path.

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
    listed = list(option_fields(options_of(words[1])))
    if last.startswith("-"):
        offered = [flag for option in listed for flag in option.flags]
    else:
        offered = [name for option in listed if words[-1] in option.flags for name in option.named]
    return [text for text in offered if text.startswith(last)]
