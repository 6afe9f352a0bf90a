"""Saves a model in a trainer's checkpoint, and reads the journal of one.

Note: Saving into a directory again. The new files are written into a temporary directory inside it
and renamed from there. So a kill at any moment leaves a whole model, the earlier or the new one,
and a whole journal. One rename decides which weights are used: that of ``model.safetensors``, or of
the index. The index's shards are in place by then, under names that the earlier index does not use.
The next save removes what a killed process left.

An adapter and the base that was trained with it are two folders, which no single rename replaces.
The earlier adapter is removed first, and the new one put in place last: a kill may leave no
adapter, or neither, but never one beside another base.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from transformers import PreTrainedModel

from zo2adapters.models.adapter_files import CONFIG_FILE
from zo2adapters.models.model_files import ADAPTER_FOLDER
from zo2core import Journal
from zo2core.build import JOURNAL as JOURNAL
from zo2core.errors import JournalError, OutputError, system_errors_as
from zo2core.io.durable import sync_path
from zo2core.ranges import counted

# keys of a model's config
_SET_BY_TRAINERS = ("pad_token_id", "bos_token_id", "eos_token_id", "problem_type")
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARDS = "model*.safetensors"
_PARTIAL = ".model.partial-"


def save_files(directory: Path, write: Callable[[Path], None]) -> None:
    """Write files into a directory that may have other files; files are replaced once all new ones
    are written.
    """
    expected, remedy = "a directory that can be written", "free space or choose another directory"
    with system_errors_as(OutputError, directory, expected=expected, remedy=remedy):
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)
        _remove_unused_shards(directory)
        with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=directory) as enclosure:
            written = Path(enclosure) / "model"
            write(written)
            _put_in_place(written, directory, replaced=Path(enclosure))


def _put_in_place(written: Path, directory: Path, *, replaced: Path) -> None:
    """Move all files of a directory into another one; one rename replaces the earlier weights by
    the new ones.
    """
    for path in written.rglob("*"):
        if path.is_file():
            sync_path(path)
    decisive = [written / name for name in (_SINGLE, _INDEX) if (written / name).exists()]
    _use_free_names(written, directory)
    adapter = directory / ADAPTER_FOLDER
    # of another model, a folder of this name is the user's own
    if (written / ADAPTER_FOLDER).is_dir() and adapter.is_dir():
        adapter.rename(replaced / ADAPTER_FOLDER)
        sync_path(directory)
    for path in sorted(written.iterdir(), key=lambda path: path.name == ADAPTER_FOLDER):
        if path not in decisive:
            _replace(path, directory / path.name, replaced)
    sync_path(directory)  # shards are durable before the index that names them
    for path in decisive:
        path.replace(directory / path.name)
    # Loaders prefer model.safetensors to an index, so the one of an earlier save is removed first,
    # and then its shards.
    for name in {_SINGLE, _INDEX} - {path.name for path in decisive}:
        (directory / name).unlink(missing_ok=True)
    sync_path(directory)
    _remove_unused_shards(directory)


def _replace(path: Path, target: Path, replaced: Path) -> None:
    if target.is_dir():  # a rename replaces empty directories only
        target.rename(replaced / target.name)
    path.replace(target)


def _use_free_names(written: Path, directory: Path) -> None:
    """If earlier shards have the names of new ones, rename the new shards and update their
    index.
    """
    index = written / _INDEX
    shards = _shards_of(index)
    if not any((directory / shard).exists() for shard in shards):
        return
    for shard in shards:
        (written / shard).rename(written / shard.replace("model-", "model-new-", 1))
    index.write_bytes(index.read_bytes().replace(b': "model-', b': "model-new-'))
    sync_path(index)


def _remove_unused_shards(directory: Path) -> None:
    """Remove unused weights: of an earlier model, or of a save that was killed."""
    if (directory / _SINGLE).exists():
        (directory / _INDEX).unlink(missing_ok=True)
        used = {_SINGLE}
    else:
        used = _shards_of(directory / _INDEX)
    for path in directory.glob(_SHARDS):
        if path.name not in used:
            path.unlink()


def _shards_of(index: Path) -> set[str]:
    """Files that an index names; none if it is damaged, since then no model can be loaded
    from it.
    """
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return set()


def write_token_ids(model: PreTrainedModel, directory: Path) -> None:
    """Add the values that a trainer sets in the config to an exported model: special tokens, and
    the kind of labels.
    """
    configs = (
        ("config.json", model.config),
        ("generation_config.json", getattr(model, "generation_config", None)),
    )
    for name, config in configs:
        path = directory / name
        if config is None or not path.exists():
            continue
        values = json.loads(path.read_bytes())
        ids = {key: getattr(config, key, None) for key in _SET_BY_TRAINERS}
        completed = values | {key: value for key, value in ids.items() if value is not None}
        if completed != values:
            path.write_text(json.dumps(completed, indent=2) + "\n", encoding="utf-8")


def name_base(adapter: Path, base: Path) -> None:
    """Name the base that belongs to an exported adapter in its config."""
    path = adapter / CONFIG_FILE
    values = json.loads(path.read_bytes()) | {"base_model_name_or_path": str(base.resolve())}
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_journal(path: Path, version: int | None, *, name: str | None = None) -> Journal:
    """Read the journal of a checkpoint into memory.

    It was written at once, so an incomplete journal is damaged.
    """
    where = path if name is None else name

    def damaged(found: str, expected: str) -> JournalError:
        return JournalError(
            where, found, expected, "restore the checkpoint from a copy, or resume from another one"
        )

    if not path.is_file():
        found = "no file"
        raise JournalError(
            where,
            found,
            "the journal of a zeroth-order run",
            "pass a checkpoint that this trainer saved",
        )
    try:
        journal = Journal(path)
    except JournalError as error:
        where = error.where.replace(str(path), str(where))
        raise damaged(error.found, error.expected) from error
    with closing(journal):
        steps = len(journal.updates)
        if journal.torn or journal.header is None:
            last = "a last record that is cut or damaged" if journal.torn else "an empty file"
            raise damaged(f"{last}, after {counted(steps, 'step')}", "whole records")
        if version is not None and steps != version:
            raise damaged(counted(steps, "step"), f"{version}, as when the checkpoint was saved")
        return journal.until(steps)
