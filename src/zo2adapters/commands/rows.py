"""``zo2 rows``: write a benchmark as files of rows for training, for choosing the best step, and for testing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from zo2adapters.commands.options import Command
from zo2core.ranges import LARGEST, counted, require_whole

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
        from zo2core.checkpoint import require_unused
        from zo2core.checkpoint.writer import new_directory

        require_unused(self.output)
        files = self.files()
        with new_directory(self.output) as partial:
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
        files = {"train": parts.train, "dev": parts.dev, "test": parts.test}
        if self.shots is not None:
            files["in-context"] = with_demonstrations(parts.test, parts.train, self.shots)
        return {f"{name}.jsonl": b"".join(map(_line, rows)) for name, rows in files.items()}


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + NEWLINE
