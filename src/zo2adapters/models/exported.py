"""The exported model: whether it is there, and what it takes from the base."""

from __future__ import annotations

from pathlib import Path

from zo2adapters.models.hf import HFBlockModel
from zo2core import CheckpointError, OutputError, Replayer


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


def export(engine: Replayer, model: HFBlockModel, directory: Path) -> None:
    """Write the model at the engine's version, as ``Replayer.export`` does; say so if it is the base that is gone.

    Raises:
        CheckpointError: if a file of the base that belongs into the directory is not there any more.
        OutputError: if the directory is in use or cannot be written.
    """
    _require_companions(model)
    try:
        engine.export(directory)
    except OutputError:
        _require_companions(model)
        raise


def _require_companions(model: HFBlockModel) -> None:
    for content in model.companions.values():
        if isinstance(content, Path) and not content.is_file():
            raise CheckpointError(
                content,
                found="no such file any more",
                expected="the base checkpoint, as it was when it was opened",
                remedy="put the base back and give the command again",
            )
