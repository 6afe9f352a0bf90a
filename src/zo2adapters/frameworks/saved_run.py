"""What a trainer's checkpoint holds of a zeroth-order run: the journal, and the weights if they are wanted.

Note: a directory that is saved again. The new files are written into a directory of their own inside it and renamed from
there, so that a kill at any moment leaves a whole model, the earlier one or the new one, and a whole journal. One rename
decides which weights count: that of ``model.safetensors``, or of the index, whose shards are there by then under names that
the earlier index does not use. What a killed process left is removed by the next save.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from zo2core import Journal, JournalError, OutputError, Runner, copy_journal
from zo2core.errors import reason
from zo2core.io.durable import sync_path

JOURNAL = "journal.jsonl"
_TOLD = ("pad_token_id", "bos_token_id", "eos_token_id", "problem_type")  # what trainers set in a model's config
_SINGLE, _INDEX, _SHARDS = "model.safetensors", "model.safetensors.index.json", "model*.safetensors"
_PARTIAL = ".model.partial-"


def save_run(engine: Runner, directory: Path, *, weights: bool, write_others: Callable[[Path], None]) -> None:
    """Write a run's journal into a directory that may hold other things, and its weights beside it.

    The journal comes last. Between the new weights and the new journal a kill leaves the earlier journal, whole.

    Args:
        engine: The run.
        directory: Made if it is not there. An earlier model in it is replaced; without ``weights`` it is removed.
        weights: Whether the model is written, too, as ``from_pretrained`` loads it.
        write_others: Writes the other files of the checkpoint into a directory, which holds the new model if there is one.

    Raises:
        OutputError: if the directory cannot be written.
    """

    def write(written: Path) -> None:
        if weights:
            engine.export(written)
        else:
            written.mkdir()
        write_others(written)

    save_files(directory, write)
    copy_journal(engine.journal, directory / JOURNAL)


def save_files(directory: Path, write: Callable[[Path], None]) -> None:
    """Write files into a directory that may hold other things; files there are replaced once all new ones are written.

    Args:
        directory: Made if it is not there. An earlier model in it is replaced or, where none is written, removed.
        write: Writes the files into a directory, which it makes.

    Raises:
        OutputError: if the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)
        _remove_unused_shards(directory)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=directory) as enclosure:
            written = Path(enclosure) / "model"
            write(written)
            _put_in_place(written, directory, replaced=Path(enclosure))
    except OSError as error:
        raise OutputError(
            directory, found=reason(error), expected="a directory that can be written", remedy="free space or choose another"
        ) from error


def _put_in_place(written: Path, directory: Path, *, replaced: Path) -> None:
    """Move all files of a directory into another one; its weights take the place of earlier ones by one rename."""
    for path in written.rglob("*"):
        if path.is_file():
            sync_path(path)
    decisive = [written / name for name in (_SINGLE, _INDEX) if (written / name).exists()]
    _use_free_names(written, directory)
    for path in sorted(written.iterdir()):
        if path not in decisive:
            _replace(path, directory / path.name, replaced)
    sync_path(directory)  # shards are durable before the index that names them
    for path in decisive:
        path.replace(directory / path.name)
    # Loaders prefer model.safetensors to an index, so whichever was not written now goes first, and then its shards.
    for name in {_SINGLE, _INDEX} - {path.name for path in decisive}:
        (directory / name).unlink(missing_ok=True)
    sync_path(directory)
    _remove_unused_shards(directory)


def _replace(path: Path, target: Path, replaced: Path) -> None:
    if target.is_dir():  # which no rename replaces, unless it is empty
        target.rename(replaced / target.name)
    path.replace(target)


def _use_free_names(written: Path, directory: Path) -> None:
    """Rename the shards of a new model, if earlier ones have their names, and say so in its index."""
    index = written / _INDEX
    shards = _shards_of(index)
    if not any((directory / shard).exists() for shard in shards):
        return
    content = json.loads(index.read_bytes())
    renamed = {shard: shard.replace("model-", "model-new-", 1) for shard in shards}
    for shard, name in renamed.items():
        (written / shard).rename(written / name)
    content["weight_map"] = {tensor: renamed[shard] for tensor, shard in content["weight_map"].items()}
    index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    sync_path(index)


def _remove_unused_shards(directory: Path) -> None:
    """Remove weights that do not count: of an earlier model, or of a save that was killed."""
    if (directory / _SINGLE).exists():
        (directory / _INDEX).unlink(missing_ok=True)
        used = {_SINGLE}
    else:
        used = _shards_of(directory / _INDEX)
    for path in directory.glob(_SHARDS):
        if path.name not in used:
            path.unlink()


def _shards_of(index: Path) -> set[str]:
    """The files that an index names; none if it is damaged, since then there is no model to keep."""
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return set()


def write_token_ids(model: PreTrainedModel, directory: Path) -> None:
    """Add to an exported model what its trainer sets in the config: special tokens, the kind of labels.

    Args:
        model: The trainer's.
        directory: Holds ``config.json``, and perhaps ``generation_config.json``.

    Raises:
        OSError: if they cannot be written.
    """
    told = (("config.json", model.config), ("generation_config.json", getattr(model, "generation_config", None)))
    for name, config in told:
        path = directory / name
        if config is None or not path.exists():
            continue
        values = json.loads(path.read_bytes())
        own = {key: getattr(config, key) for key in _TOLD if getattr(config, key, None) is not None}
        if {**values, **own} != values:
            path.write_text(json.dumps({**values, **own}, indent=2) + "\n")


def read_journal(path: Path, version: int | None, *, name: str | None = None) -> Journal:
    """The journal of a checkpoint, in memory. It is a copy that was written at once, so it is whole or damaged.

    Args:
        path: The file.
        version: Steps that the journal held when the checkpoint was saved; None: the checkpoint does not say.
        name: What errors call the file, if it is not the path.

    Raises:
        JournalError: if there is none, it is damaged, or it holds another number of steps.
    """
    where = path if name is None else name
    remedy = "restore the checkpoint from a copy, or resume from another one"
    if not path.is_file():
        raise JournalError(
            where,
            found="no file",
            expected="the journal of a zeroth-order run",
            remedy="name a checkpoint that this trainer saved",
        )
    try:
        journal = Journal(path)
    except JournalError as error:
        place = error.where.replace(str(path), str(where))
        raise JournalError(place, found=error.found, expected=error.expected, remedy=remedy) from error
    try:
        steps = len(journal.updates)
        if journal.torn or journal.header is None:
            last = "a last record that is cut or damaged" if journal.torn else "an empty file"
            raise JournalError(where, found=f"{last}, after {steps} steps", expected="whole records", remedy=remedy)
        if version is not None and steps != version:
            raise JournalError(
                where, found=f"{steps} steps", expected=f"{version}, as when the checkpoint was saved", remedy=remedy
            )
        return journal.until(steps)
    finally:
        journal.close()
