"""Help texts from docstrings, as paragraphs that fill their lines.

tyro takes the docstring below a field as its help, but keeps the line break before an indented line, and all lines of such a
docstring but the first are indented. It prints ``help`` in a field's metadata unchanged.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from zo2adapters.commands.parsing import TakesRecipe


def reflow_help(options: Any) -> None:
    """Unwrap the docstrings of a dataclass's fields, including fields of its bases and of dataclasses among its fields.

    Args:
        options: The dataclass; the metadata of its fields is changed.
    """
    docstrings: dict[str, str] = {}
    for base in reversed(options.__mro__):
        docstrings |= _docstrings(base) if is_dataclass(base) else {}  # type: ignore[arg-type]
    for option in fields(options):
        if option.name in docstrings:
            paragraphs = inspect.cleandoc(docstrings[option.name]).split("\n\n")
            text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
            option.metadata = MappingProxyType({**option.metadata, "help": text})
        if option.default_factory is not MISSING:
            group = type(option.default_factory())
            # As tyro would find it, after it has read the sources, which takes as long as all else of a command line.
            text = " ".join((inspect.getdoc(group) or "").split("\n\n")[0].split())
            option.metadata = MappingProxyType({"help": text, **option.metadata})
            reflow_help(group)


def short_help(prog: str, options: Any) -> str:
    """Format the help of the options that the dataclass names in ``first_options``.

    Args:
        prog: The command's name, such as ``zo2 train``.
        options: The dataclass, after ``reflow_help``.
    """
    width = min(shutil.get_terminal_size().columns, 125)
    texts = dict(_help_of(options))
    takes_recipe = "[RECIPE.yaml] " if issubclass(options, TakesRecipe) else ""
    lines = [f"usage: {prog} {takes_recipe}[OPTIONS]", "", *textwrap.wrap(inspect.getdoc(options) or "", width), ""]
    for name in options.first_options:
        lines.append(f"  --{name.replace('_', '-')}")
        lines += textwrap.wrap(texts[name], width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    rest = sum(name not in options.first_options for name in texts)
    return "\n".join([*lines, "", f"{rest} more options: {prog} --help-all"])


def _help_of(options: Any) -> Iterator[tuple[str, str]]:
    """Yield each option's name and help text, with its default.

    Args:
        options: A dataclass, or an instance, whose values are the defaults.
    """
    for option in fields(options):
        if option.default_factory is not MISSING:
            yield from _help_of(option.default_factory())
        else:
            default = getattr(options, option.name, None)
            default = default.value if isinstance(default, Enum) else default
            yield option.name, option.metadata["help"] + ("" if default in (None, MISSING) else f" (default: {default})")


@functools.cache  # reading a class's source takes some milliseconds, and groups of options repeat in a command
def _docstrings(options: type) -> dict[str, str]:
    """The docstring below each field of a class, by the field's name."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: docstring.value.value
        for field, docstring in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
        if isinstance(docstring.value.value, str)
    }
