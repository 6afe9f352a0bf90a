"""What is kept of the real task's runs: a JSON file each, which an interrupted series goes on from."""

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

from zo2core import DataError, OptionError

SUFFIX = ".run.json"
EVALUATION, DEVELOPMENT = "evaluation", "development"


class Point(NamedTuple):
    """A look at a model in training."""

    steps: int
    forwards: int  # of a batch, those of evaluations like this one not counted
    seconds: float  # of steps
    cpu_seconds: float  # of this process during steps, all threads
    accuracy: float  # 0 to 1
    loss: float  # of the right label word, in nats


@dataclass
class Run:
    """One variant with one learning rate and one seed."""

    variant: str
    lr: float
    seed: int
    rows: str  # what its points were measured on: EVALUATION or DEVELOPMENT
    rows_sha256: str  # of the task
    batch_size: int
    steps: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    points: list[Point] = field(default_factory=list)
    stopped: str | None = None  # why it cannot go on
    made_by: list[dict[str, Any]] = field(default_factory=list)  # command, machine and versions of each process

    @property
    def file_stem(self) -> str:
        """Name of its files, without suffixes."""
        use = "tuning-" if self.rows == DEVELOPMENT else ""
        return f"{self.variant}-{use}lr{self.lr:g}-seed{self.seed}"

    def begun(self) -> Run:
        """The same run at its beginning."""
        return Run(self.variant, self.lr, self.seed, self.rows, self.rows_sha256, self.batch_size)

    def kept_in(self, folder: Path) -> Run:
        """What a folder has of this run already; the run itself, if that is nothing.

        Raises:
            OptionError: if the folder has it on other rows or in other batches.
        """
        path = folder / (self.file_stem + SUFFIX)
        if not path.exists():
            return self
        kept = read_run(path)
        if kept.begun() != self.begun():
            found = f"a run on rows {kept.rows_sha256[:8]} in batches of {kept.batch_size}"
            expected = f"rows {self.rows_sha256[:8]} in batches of {self.batch_size}"
            raise OptionError(path, found=found, expected=expected, remedy="choose another folder")
        return kept

    def values(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self) | {"points": [point._asdict() for point in self.points]}

    def write(self, folder: Path) -> None:
        """Replace the run's file, whole or not at all."""
        path = folder / (self.file_stem + SUFFIX)
        beside = path.with_suffix(".partial")
        beside.write_text(json.dumps(self.values()) + "\n", encoding="utf-8")
        beside.replace(path)


def read_run(path: Path) -> Run:
    """Read a run's file.

    Raises:
        DataError: if it is none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Run(**{**values, "points": [Point(**point) for point in values["points"]]})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(path, found=str(error), expected="the JSON of a run", remedy="remove the file") from error


def read_runs(folder: Path, rows: str) -> list[Run]:
    """All runs in a folder that were measured on these rows, by name."""
    runs = [read_run(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    return [run for run in runs if run.rows == rows]


def provenance() -> dict[str, Any]:
    """How the present process was called, where, and with what versions."""
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
