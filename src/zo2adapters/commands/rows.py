"""``zo2 rows``: a benchmark as files of rows, to train on, to choose a step by, and to test on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zo2adapters.ranges import LARGEST, require_between
from zo2core.checkpoint import require_unused
from zo2core.checkpoint.writer import new_directory

NEWLINE = b"\n"  # at each row's end, and nowhere else: JSON escapes it


@dataclass(frozen=True, kw_only=True)
class WriteRows:
    """Write a benchmark's rows, such as sst2's, as files, with the prompts of MeZO's experiments."""

    task: str
    """One of boolq, cb, copa, drop, mrpc, multirc, qnli, qqp, record, rte, squad, sst2, wic, winogrande, wnli, wsc."""
    output: Path
    """Directory for train.jsonl, dev.jsonl and test.jsonl. It must not exist, or be empty."""
    data: Path | None = None
    """Directory with train.jsonl and validation.jsonl (or val, dev, valid), in the benchmark's own format or as datasets
    gives the rows. By default they are fetched from the hub, by the package datasets."""
    train_rows: int = 1000
    """Rows to train on, at most."""
    dev_rows: int = 500
    """Rows to choose a step by, at most; they are others of the training file, a quarter of it where it is small."""
    test_rows: int = 1000
    """Rows to test on, at most, of the held-out file."""
    shots: int | None = None
    """Also write in-context.jsonl: the test rows behind so many training rows with their answers."""
    seed: int = 0
    """Of the sample."""

    def run(self) -> None:
        """Write the files, and say how many rows each has."""
        require_unused(self.output)
        files = self.files()
        with new_directory(self.output) as partial:
            for name, content in files.items():
                (partial / name).write_bytes(content)
        self.tell(files)

    def tell(self, files: Mapping[str, bytes]) -> None:
        """Print where the files are, and how many rows each has."""
        counts = ", ".join(f"{content.count(NEWLINE)} rows in {name}" for name, content in files.items())
        print(f"{self.output}: {counts}")

    def files(self) -> dict[str, bytes]:
        """The content of each file, by its name.

        Raises:
            OptionError: naming the option.
            DataError: if a file of the benchmark is missing, or a row is malformed.
        """
        from zo2adapters.tasks.benchmark_rows import Sizes, benchmark_of, benchmark_rows, with_demonstrations

        benchmark = benchmark_of(self.task)
        for name in ("train_rows", "dev_rows", "test_rows"):
            require_between(name, getattr(self, name), 1, LARGEST)
        require_between("seed", self.seed, -LARGEST, LARGEST)
        sizes = Sizes(self.train_rows, self.dev_rows, self.test_rows)
        parts = benchmark_rows(benchmark, self.data, sizes, seed=self.seed)
        files = {"train": parts.train, "dev": parts.dev, "test": parts.test}
        if self.shots is not None:
            files["in-context"] = with_demonstrations(parts.test, parts.train, self.shots)
        return {f"{name}.jsonl": b"".join(map(_line, rows)) for name, rows in files.items()}


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + NEWLINE
