"""Benchmarks: ``zo2 rows`` writes one's rows; ``zo2 train --task`` also scores the model, trains it and scores it again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from zo2adapters.commands.evaluate import Evaluate
from zo2adapters.commands.options import Command
from zo2adapters.trainers.model_options import RunModelOptions, precision_of_run
from zo2adapters.trainers.options import Resources, RunOptions
from zo2adapters.trainers.run_directory import MODEL, OPTIONS, require_new
from zo2adapters.trainers.worker_options import torchrun_rank
from zo2core.errors import OptionError
from zo2core.io.durable import read_regular
from zo2core.ranges import LARGEST, counted, require_whole

if TYPE_CHECKING:
    from zo2adapters.commands.train import Train

NEWLINE = b"\n"  # ends each row, and occurs nowhere else: JSON escapes it


@dataclass(frozen=True, kw_only=True)
class WriteRows(Command):
    """Write a benchmark's rows, such as sst2's, as files, with the prompts of MeZO's experiments."""

    needs: ClassVar = ("zo2adapters.tasks.benchmarks",)

    task: str
    """Name of the benchmark: boolq, cb, copa, drop, mrpc, multirc, qnli, qqp, record, rte, squad, sst2, wic, winogrande,
    wnli or wsc."""
    output: Path
    """Directory for train.jsonl, dev.jsonl and test.jsonl. It must not exist, or be empty."""
    data: Path | None = None
    """Directory with train.jsonl and validation.jsonl (or val, dev, valid), in the benchmark's own format or that of the
    package datasets. By default datasets fetches the rows from the Hugging Face hub."""
    train_rows: int = 1000
    """Most rows to train on."""
    dev_rows: int = 500
    """Most rows to choose the best step with. They are other rows of the training file, at most a quarter of a small one."""
    test_rows: int = 1000
    """Most rows to test on, taken from the held-out file."""
    shots: int | None = None
    """Number of training rows with answers that precede each test row in another file, in-context.jsonl. By default that
    file is not written."""
    seed: int = 0
    """Seed with which rows are sampled."""

    def run(self) -> None:
        """Write the files, and print how many rows each has."""
        from zo2core.checkpoint.shards import new_directory

        with new_directory(self.output) as partial:
            files = self.files()
            for name, content in files.items():
                (partial / name).write_bytes(content)
        self.print_summary(files)

    def print_summary(self, files: Mapping[str, bytes]) -> None:
        """Print the directory of the files, and how many rows each has."""
        counts = ", ".join(f"{counted(content.count(NEWLINE), 'row')} in {name}" for name, content in files.items())
        print(f"{self.output}: {counts}")

    def files(self) -> dict[str, bytes]:
        """The content of each file, by its name."""
        from zo2adapters.tasks.benchmarks import Sizes, benchmark_of, benchmark_rows, with_demonstrations

        benchmark = benchmark_of(self.task)
        for name in ("train_rows", "dev_rows", "test_rows"):
            require_whole(name, getattr(self, name), 1, LARGEST)
        require_whole("seed", self.seed, -LARGEST, LARGEST)
        sizes = Sizes(self.train_rows, self.dev_rows, self.test_rows)
        parts = benchmark_rows(benchmark, self.data, sizes, seed=self.seed)
        named = {"train": parts.train, "dev": parts.dev, "test": parts.test}
        if self.shots is not None:
            named["in-context"] = with_demonstrations(parts.test, parts.train, self.shots)
        lines = {
            name: [json.dumps(row, ensure_ascii=False).encode() + NEWLINE for row in rows] for name, rows in named.items()
        }
        return {f"{name}.jsonl": b"".join(of_file) for name, of_file in lines.items()}


def run_task(command: Train, train: Callable[[Path, Path], object]) -> None:
    """Write the benchmark's rows, score the model, train it, and score the result.

    The rows are in a directory with the run's name and the suffix ``.rows``. Rows left by a process that was killed before
    the run started are reused if they are the same.
    """
    model, output, task = command.model, command.output, command.task
    assert model is not None
    assert output is not None
    assert task is not None
    rows = output.with_name(f"{output.name}.rows")
    require_new(output)
    writer = WriteRows(task=task, output=rows, data=command.data, shots=command.shots, seed=command.seed)
    files = writer.files() if rows.is_dir() else {}
    is_there = bool(files) and {path.name for path in rows.iterdir()} == files.keys()
    if is_there := is_there and all(read_regular(rows / name) == content for name, content in files.items()):
        writer.print_summary(files)
    else:
        writer.run()
    try:
        _score(command, model, rows / "test.jsonl", "zero-shot")
        if command.shots is not None:
            _score(command, model, rows / "in-context.jsonl", f"with {command.shots} demonstrations")
        train(rows / "train.jsonl", rows / "dev.jsonl")
    except BaseException:  # raised again
        if not is_there and not (output / OPTIONS).exists():
            shutil.rmtree(rows)
        raise
    _score(command, str(output / MODEL), rows / "test.jsonl", "fine-tuned")


def require_consistent(task: str, options: RunOptions) -> None:
    """Refuse options that cannot be combined with a benchmark."""
    model_options, chosen = options.model_options, "because the task has its own rows to choose the best step with"
    for option, found, why in (
        ("evaluation", options.evaluation, chosen),
        ("eval_split", options.eval_split, chosen),
        ("head", model_options.head if options.takes_labels else None, "because the rows have candidates"),
        ("beta", options.beta, "because the rows have candidates, not preferences"),
        (model_options.adapter_option, model_options.adapter_name, "but rows of zo2 rows to train an adapter"),
    ):
        if found is not None:
            raise OptionError(option, found=f"{found} with --task", expected=f"none, {why}", remedy="leave it out")
    if torchrun_rank() is not None:
        expected, remedy = "rows that exist when the workers start", "write them with zo2 rows, and pass them as --data"
        raise OptionError("task", found=f"{task} under torchrun", expected=expected, remedy=remedy)


def _score(command: Train, model: str, rows: Path, name: str) -> None:
    """Print the score of a model on rows."""
    storage, model_options = command.storage, command.model_options
    exported = model != command.model
    exact = command.optimization.exact_mezo or command.optimization.rank is not None
    print(f"{name}: ", end="", flush=True)
    Evaluate(
        model=model,
        data=rows,
        batching=command.batching,
        model_options=RunModelOptions(
            architecture=model_options.architecture,
            dtype="auto" if exported or model_options.precision == "mixed" else model_options.dtype,
            precision=precision_of_run(model_options.precision, exact_mezo=exact, on_cpu=storage.device == "cpu"),
        ),
        resources=Resources(memory=storage.memory, device=storage.device, device_memory=storage.device_memory),
    ).run()
