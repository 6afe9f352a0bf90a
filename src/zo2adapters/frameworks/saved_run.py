"""What a trainer's checkpoint holds of a zeroth-order run: the journal, and the weights if they are wanted."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedModel

from zo2core import Journal, JournalError, OutputError, Replayer, copy_journal, reason

JOURNAL = "journal.jsonl"
_TOLD = ("pad_token_id", "bos_token_id", "eos_token_id", "problem_type")  # what trainers set in a model's config
_WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")


def save_run(engine: Replayer, directory: Path, *, weights: bool) -> None:
    """Write a run's journal into a directory that may hold other things, and its weights beside it.

    The journal comes last, in one piece: a directory that has it has all.

    Args:
        engine: The run.
        directory: Made if it is not there. An earlier model in it is replaced.
        weights: Whether the model is written, too, as ``from_pretrained`` loads it.

    Raises:
        OutputError: if the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / JOURNAL).unlink(missing_ok=True)
        for pattern in _WEIGHTS:
            for stale in directory.glob(pattern):
                stale.unlink()
        if weights:
            with tempfile.TemporaryDirectory(prefix=".model.partial-", dir=directory) as enclosure:
                exported = Path(enclosure) / "model"
                engine.export(exported)
                for path in exported.iterdir():
                    if (directory / path.name).is_dir():
                        shutil.rmtree(directory / path.name)
                    path.replace(directory / path.name)
    except OSError as error:
        raise OutputError(
            directory, found=reason(error), expected="a directory that can be written", remedy="free space or choose another"
        ) from error
    copy_journal(engine.journal, directory / JOURNAL)


def write_token_ids(model: PreTrainedModel, directory: Path) -> None:
    """Take over into a saved model what its trainer has told it beside the weights: special tokens, the kind of labels.

    Args:
        model: The trainer's.
        directory: Holds ``config.json``, and perhaps ``generation_config.json``.

    Raises:
        OutputError: if they cannot be written.
    """
    told = (("config.json", model.config), ("generation_config.json", getattr(model, "generation_config", None)))
    for name, config in told:
        path = directory / name
        if config is None or not path.exists():
            continue
        values = json.loads(path.read_bytes())
        own = {key: getattr(config, key) for key in _TOLD if getattr(config, key, None) is not None}
        if {**values, **own} != values:
            try:
                path.write_text(json.dumps({**values, **own}, indent=2) + "\n")
            except OSError as error:
                raise OutputError(
                    path, found=reason(error), expected="a file that can be written", remedy="free space or choose another"
                ) from error


def read_journal(directory: Path) -> Journal:
    """The journal of a checkpoint, in memory.

    Raises:
        JournalError: if there is none, or it is damaged.
    """
    path = directory / JOURNAL
    if not path.is_file():
        raise JournalError(
            path,
            found="no file",
            expected="the journal of a zeroth-order run",
            remedy="name a checkpoint that this trainer saved",
        )
    journal = Journal(path)
    try:
        return journal.until(len(journal.updates))
    finally:
        journal.close()
