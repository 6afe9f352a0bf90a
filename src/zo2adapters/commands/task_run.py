"""``zo2 train --task``: write a benchmark's rows, score the model, train it and keep the best step, and score it again."""

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
from zo2core.errors import OptionError
from zo2core.io.durable import read_regular


@dataclass(frozen=True, kw_only=True)
class BenchmarkRun:
    """The arguments of a run on a benchmark."""

    task: str  # name of the benchmark
    model: str  # directory or hub id of the model
    output: Path  # directory of the run
    data: Path | None  # directory of the benchmark's files; None downloads them from the hub
    shots: int | None  # demonstrations of the in-context score; None leaves that score out
    options: RunOptions


def run_task(command: BenchmarkRun, *, train: Callable[[Path, Path], object]) -> None:
    """Write the benchmark's rows, score the model, train it, and score the result.

    The rows are in a directory with the run's name and the suffix ``.rows``. Rows left by a process that was killed before
    the run started are reused if they are the same.
    """
    rows = command.output.with_name(f"{command.output.name}.rows")
    require_new(command.output)
    writer = WriteRows(task=command.task, output=rows, data=command.data, shots=command.shots, seed=command.options.seed)
    is_there = rows.exists() and _holds(rows, writer.files())
    if is_there:
        writer.print_summary(writer.files())
    else:
        writer.run()
    try:
        _score(command, command.model, rows / "test.jsonl", "zero-shot")
        if command.shots is not None:
            _score(command, command.model, rows / "in-context.jsonl", f"with {command.shots} demonstrations")
        train(rows / "train.jsonl", rows / "dev.jsonl")
    except BaseException:  # raised again
        if not is_there and not (command.output / OPTIONS).exists():
            shutil.rmtree(rows)
        raise
    _score(command, str(command.output / MODEL), rows / "test.jsonl", "fine-tuned")


def _holds(directory: Path, files: Mapping[str, bytes]) -> bool:
    """Whether a directory contains exactly these files, byte for byte."""
    if not directory.is_dir() or {path.name for path in directory.iterdir()} != files.keys():
        return False
    return all(read_regular(directory / name) == content for name, content in files.items())


def require_consistent(task: str, options: RunOptions) -> None:
    """Refuse options that cannot be combined with a benchmark."""
    for option, found, expected in (
        ("evaluation", options.evaluation, "none, because the task has its own rows to choose the best step with"),
        ("eval_split", options.eval_split, "none, because the task has its own rows to choose the best step with"),
        ("head", options.model_options.head if options.takes_labels else None, "none, because the rows have candidates"),
        ("beta", options.beta, "none, because the rows have candidates, not preferences"),
        (
            options.model_options.adapter_option,
            options.model_options.adapter_name,
            "none: to train an adapter, write the rows with zo2 rows first",
        ),
    ):
        if found is not None:
            raise OptionError(option, found=f"{found} with --task", expected=expected, remedy="leave it out")
    if torchrun_rank() is not None:
        raise OptionError(
            "task",
            found=f"{task} under torchrun",
            expected="rows that exist when the workers start",
            remedy="write them with zo2 rows, and pass them as --data",
        )


def _score(command: BenchmarkRun, model: str, rows: Path, name: str) -> None:
    """Print the score of a model on rows."""
    options, storage, model_options = command.options, command.options.storage, command.options.model_options
    exported = model != command.model
    exact = options.optimization.exact_mezo or options.optimization.rank is not None
    print(f"{name}: ", end="", flush=True)
    Evaluate(
        model=model,
        data=rows,
        batching=options.batching,
        model_options=RunModelOptions(
            architecture=model_options.architecture,
            dtype="auto" if exported or model_options.precision == "mixed" else model_options.dtype,
            precision=precision_of_run(model_options.precision, exact_mezo=exact, on_cpu=storage.device == "cpu"),
        ),
        resources=Resources(memory=storage.memory, device=storage.device, device_memory=storage.device_memory),
    ).run()
