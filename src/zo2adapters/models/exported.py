"""The exported model of a run: whether it is there."""

from __future__ import annotations

from pathlib import Path

from zo2core import OutputError


def holds_model(directory: Path) -> bool:
    """Whether a model was exported to a directory already; an empty one holds none.

    Raises:
        OutputError: if there is something else.
    """
    if not (directory.exists() or directory.is_symlink()) or (directory.is_dir() and not any(directory.iterdir())):
        return False
    if (directory / "config.json").is_file() and any(directory.glob("*.safetensors")):
        return True
    raise OutputError(
        directory,
        found="something that is no whole model",
        expected="the exported model, an empty directory, or nothing",
        remedy="move it away and give the command again: the model is written anew",
    )
