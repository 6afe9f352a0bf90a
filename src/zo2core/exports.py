"""Names that a package exports, each imported when it is first used; and where they run at all."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zo2core.errors import UnsupportedSystemError


def require_supported_system() -> None:
    """Refuse Windows, before a module that it lacks is missed.

    Raises:
        UnsupportedSystemError: if this is Windows.
    """
    if sys.platform == "win32":
        raise UnsupportedSystemError(
            "the operating system",
            "Windows",
            "Linux or macOS",
            "install zo2core in WSL (https://learn.microsoft.com/windows/wsl), which is Linux",
        )


def exports(
    package: str, *, left_out: str = "\0"
) -> tuple[list[str], Callable[[str], Any], Callable[[], Sequence[str]]]:
    """What a package needs to import its names lazily: its ``__all__``, ``__getattr__`` and
    ``__dir__``.

    The names are those that its source imports for type checkers, ``from module import Name as
    Name``. Those that end with ``left_out`` are no part of a star import.
    """
    require_supported_system()
    itself = sys.modules[package]
    modules = {
        alias.name: str(node.module)
        for node in ast.walk(ast.parse(Path(str(itself.__file__)).read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname
    }

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(itself, name, value)
        return value

    return (
        [name for name in modules if not name.endswith(left_out)],
        get,
        lambda: sorted([*vars(itself), *modules]),
    )
