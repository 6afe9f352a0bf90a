"""The records of the real task's runs: a JSON file for each, from which an interrupted series continues."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from zo2core.errors import DataError, OptionError

SUFFIX = ".run.json"
EVALUATION, DEVELOPMENT = "evaluation", "development"


class Point(NamedTuple):
    """An evaluation of a model in training."""

    steps: int
    forwards: int  # forwards of a batch in steps, without evaluations
    seconds: float  # seconds of steps
    cpu_seconds: float  # CPU seconds of this process's threads in steps
    accuracy: float  # 0 to 1
    loss: float  # mean loss of the right label word, in nats


@dataclass
class Run:
    """One variant with one learning rate and one seed."""

    variant: str
    lr: float
    seed: int
    rows: str  # rows of its points: EVALUATION or DEVELOPMENT
    rows_sha256: str  # SHA-256 of the task's rows
    batch_size: int
    steps: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    squared_grads: float = 0.0  # sum of the squares of projected gradients
    grads: int = 0  # number of projected gradients
    points: list[Point] = field(default_factory=list)
    stopped: str | None = None  # reason why it cannot continue
    made_by: list[dict[str, Any]] = field(default_factory=list)  # command, machine and versions of each process

    @property
    def file_stem(self) -> str:
        """The name of the run's files, without suffixes."""
        use = "tuning-" if self.rows == DEVELOPMENT else ""
        return f"{self.variant}-{use}lr{self.lr:g}-seed{self.seed}"

    def without_steps(self) -> Run:
        """The same run before its first step."""
        return Run(self.variant, self.lr, self.seed, self.rows, self.rows_sha256, self.batch_size)

    def kept_in(self, folder: Path) -> Run:
        """Read this run from a folder, or return it unchanged if the folder does not have it.

        Raises:
            OptionError: if the folder has the run with other rows or batches.
        """
        path = folder / (self.file_stem + SUFFIX)
        if not path.exists():
            return self
        kept = read_run(path)
        if kept.without_steps() != self.without_steps():
            found = f"a run on rows {kept.rows_sha256[:8]} in batches of {kept.batch_size}"
            expected = f"rows {self.rows_sha256[:8]} in batches of {self.batch_size}"
            raise OptionError(path, found=found, expected=expected, remedy="pass another folder")
        return kept

    def values(self) -> dict[str, Any]:
        """The run as JSON values."""
        return asdict(self) | {"points": [point._asdict() for point in self.points]}

    def write(self, folder: Path) -> None:
        """Replace the run's file atomically."""
        path = folder / (self.file_stem + SUFFIX)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.values()) + "\n", encoding="utf-8")
        partial.replace(path)


def read_run(path: Path) -> Run:
    """Read a run's file.

    Raises:
        DataError: if the file is not one.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Run(**{**values, "points": [Point(**point) for point in values["points"]]})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(path, found=str(error), expected="the JSON of a run", remedy="remove the file") from error


def read_runs(folder: Path, rows: str) -> list[Run]:
    """Read all runs of a folder that were measured on these rows, ordered by name."""
    runs = [read_run(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    return [run for run in runs if run.rows == rows]


def provenance() -> dict[str, Any]:
    """The command, machine and versions of this process."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
