"""Paths of directories to write, which are refused before torch is imported."""

from __future__ import annotations

from pathlib import Path

from zo2core.errors import OutputError


def refuse_used(directory: Path) -> None:
    """Refuse an output path that exists, unless it is an empty directory."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() or directory.is_symlink():
        expected = "a path that does not exist yet, or an empty directory"
        remedy = "choose another output directory, or remove this one"
        raise OutputError(directory, "something at this path", expected, remedy)
