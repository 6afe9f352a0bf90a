"""``zo2 train --task``: a benchmark's rows, scores before, training with the best step kept, and the score after."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zo2adapters.commands.evaluate import Evaluate
from zo2adapters.commands.rows import WriteRows
from zo2adapters.trainers.options import precision_of_run
from zo2adapters.trainers.run_directory import MODEL, OPTIONS, require_new
from zo2adapters.trainers.sharing import own_rank
from zo2core import OptionError

if TYPE_CHECKING:
    from zo2adapters.commands.train import Train


def run_task(command: Train) -> None:
    """Do all of it.

    The rows stand beside the run, in a directory of its name with ``.rows``.

    Args:
        command: Names the task; its ``data`` is the benchmark's directory, or None for the hub.

    Raises:
        OptionError: if an option does not go with a task.
        ZO2Error: as the commands raise it that this one consists of; a run that was refused leaves no rows.
    """
    assert command.task is not None, "asked for"
    _require_consistent(command)
    assert command.output is not None, "just required"
    assert command.model is not None
    rows = command.output.with_name(f"{command.output.name}.rows")
    require_new(command.output)
    WriteRows(task=command.task, output=rows, data=command.data, shots=command.shots, seed=command.seed).run()
    try:
        _score(command, command.model, rows / "test.jsonl", "zero-shot")
        if command.shots is not None:
            _score(command, command.model, rows / "in-context.jsonl", f"with {command.shots} demonstrations")
        training = replace(command, task=None, shots=None, data=rows / "train.jsonl", evaluation=rows / "dev.jsonl")
        replace(training, keep_best=True).run()
    except Exception:  # whatever it is, it is raised again
        if not (command.output / OPTIONS).exists():
            shutil.rmtree(rows)
        raise
    _score(command, str(command.output / MODEL), rows / "test.jsonl", "fine-tuned")


def _require_consistent(command: Train) -> None:
    for option, found, expected in (
        ("resume", command.resume, "none: --resume alone goes on, with the rows that are there"),
        ("evaluation", command.evaluation, "none: the task has its own rows to choose a step by"),
        ("head", command.head if command.takes_labels else None, "none: the task's rows have candidates"),
        ("beta", command.beta, "none: the task's rows have candidates"),
        ("adapter", command.adapter, "none: write the rows with zo2 rows, and train on them"),
    ):
        if found is not None:
            raise OptionError(option, found=f"{found} beside --task", expected=expected, remedy="leave it out")
    if own_rank() is not None:
        raise OptionError(
            "task",
            found=f"{command.task} under torchrun",
            expected="rows that are there when workers start",
            remedy="write them with zo2 rows, and train on those",
        )
    for option in ("model", "output"):
        if getattr(command, option) is None:
            raise OptionError(f"--{option}", found="nothing", expected="a value", remedy="see zo2 train --help")


def _score(command: Train, model: str, rows: Path, name: str) -> None:
    """Print what a model scores on rows."""
    storage = command.storage
    exported = model != command.model
    exact = command.optimization.exact_mezo or command.optimization.rank is not None
    print(f"{name}: ", end="", flush=True)
    Evaluate(
        model=model,
        data=rows,
        batching=command.batching,
        architecture=command.architecture,
        dtype="auto" if exported or command.precision == "mixed" else command.dtype,
        precision=precision_of_run(command.precision, exact_mezo=exact, on_cpu=storage.device == "cpu"),
        memory=storage.memory,
        device=storage.device,
        device_memory=storage.device_memory,
    ).run()
