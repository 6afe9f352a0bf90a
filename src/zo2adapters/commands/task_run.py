"""``zo2 train --task``: a benchmark's rows, scores before, training with the best step kept, and the score after."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zo2adapters.commands.evaluate import Evaluate
from zo2adapters.commands.rows import WriteRows
from zo2adapters.trainers.model_options import RunModelOptions, precision_of_run
from zo2adapters.trainers.options import Resources, RunOptions
from zo2adapters.trainers.run_directory import MODEL, OPTIONS, require_new
from zo2adapters.trainers.worker_options import torchrun_rank
from zo2core import OptionError
from zo2core.io.durable import read_regular


@dataclass(frozen=True, kw_only=True)
class BenchmarkRun:
    """What a run on a benchmark needs."""

    task: str  # name of the benchmark
    model: str  # directory or hub id of the model
    output: Path  # directory of the run
    data: Path | None  # directory of the benchmark's files; None: the hub
    shots: int | None  # demonstrations of the in-context score; None: no such score
    options: RunOptions


def run_task(command: BenchmarkRun, *, train: Callable[[Path, Path], object]) -> None:
    """Write the benchmark's rows, score the model, train it, and score the result.

    The rows stand beside the run, in a directory of its name with ``.rows``. Rows that an earlier process wrote there, which
    was killed before the run began, are used again if they are the same.

    Args:
        command: The benchmark, the model and the options of the run.
        train: Trains on a file of rows, with another one to evaluate on, and keeps the best step.

    Raises:
        ZO2Error: as the commands raise it that this one consists of; a run that was refused leaves no rows.
    """
    rows = command.output.with_name(f"{command.output.name}.rows")
    require_new(command.output)
    writer = WriteRows(task=command.task, output=rows, data=command.data, shots=command.shots, seed=command.options.seed)
    is_there = rows.exists() and _holds(rows, writer.files())
    if is_there:
        writer.tell(writer.files())
    else:
        writer.run()
    try:
        _score(command, command.model, rows / "test.jsonl", "zero-shot")
        if command.shots is not None:
            _score(command, command.model, rows / "in-context.jsonl", f"with {command.shots} demonstrations")
        train(rows / "train.jsonl", rows / "dev.jsonl")
    except BaseException:  # whatever it is, it is raised again
        if not is_there and not (command.output / OPTIONS).exists():
            shutil.rmtree(rows)
        raise
    _score(command, str(command.output / MODEL), rows / "test.jsonl", "fine-tuned")


def _holds(directory: Path, files: Mapping[str, bytes]) -> bool:
    """Whether a directory holds these files, byte for byte, and nothing else."""
    if not directory.is_dir() or {path.name for path in directory.iterdir()} != files.keys():
        return False
    return all(read_regular(directory / name) == content for name, content in files.items())


def require_consistent(task: str, options: RunOptions) -> None:
    """Refuse options that do not go with a benchmark.

    Args:
        task: Name of the benchmark.
        options: The run's options.

    Raises:
        OptionError: naming the option.
    """
    for option, found, expected in (
        ("evaluation", options.evaluation, "none: the task has its own rows to choose a step by"),
        ("head", options.model_options.head if options.takes_labels else None, "none: the task's rows have candidates"),
        ("beta", options.beta, "none: the task's rows have candidates"),
        ("adapter", options.model_options.adapter, "none: write the rows with zo2 rows, and train on them"),
    ):
        if found is not None:
            raise OptionError(option, found=f"{found} beside --task", expected=expected, remedy="leave it out")
    if torchrun_rank() is not None:
        raise OptionError(
            "task",
            found=f"{task} under torchrun",
            expected="rows that are there when workers start",
            remedy="write them with zo2 rows, and train on those",
        )


def _score(command: BenchmarkRun, model: str, rows: Path, name: str) -> None:
    """Print what a model scores on rows."""
    options, storage, told = command.options, command.options.storage, command.options.model_options
    exported = model != command.model
    exact = options.optimization.exact_mezo or options.optimization.rank is not None
    print(f"{name}: ", end="", flush=True)
    Evaluate(
        model=model,
        data=rows,
        batching=options.batching,
        model_options=RunModelOptions(
            architecture=told.architecture,
            dtype="auto" if exported or told.precision == "mixed" else told.dtype,
            precision=precision_of_run(told.precision, exact_mezo=exact, on_cpu=storage.device == "cpu"),
        ),
        resources=Resources(memory=storage.memory, device=storage.device, device_memory=storage.device_memory),
    ).run()
