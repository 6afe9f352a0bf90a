"""Options of workers that ``torchrun`` started, and the values that they have to agree on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zo2adapters.trainers.run_directory import OPTIONS
from zo2core.errors import without_effect
from zo2core.ranges import require_whole

_SHARE = 0.9  # share of the free memory that the workers of a host use together

if TYPE_CHECKING:
    from zo2adapters.trainers.options import Storage
    from zo2core import Workers


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How workers that torchrun started share the work."""

    split: str = "auto"
    """How workers split a step: by directions, by rows, or by both, such as 2x3 for two groups of directions with three
    workers each that split the rows. auto minimizes the work of the busiest worker. Splitting by directions gives exactly
    the result of one worker."""

    @contextmanager
    def workers(self) -> Iterator[Workers | None]:
        """Connect this process to the other workers; None if it works alone."""
        from zo2core import Workers

        if torchrun_rank() is None:
            if self.split != "auto":
                raise without_effect("split", self.split, "workers of torchrun --nproc-per-node N -m zo2adapters ...")
            yield None
            return
        with Workers.from_torchrun(split=self.split) as workers:
            yield workers


def torchrun_rank() -> int | None:
    """Rank of this process among those that ``torchrun`` started; None without ``torchrun``."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def is_first(workers: Workers | None) -> bool:
    """Whether this process is the worker that prints, and writes files that are written once."""
    return workers is None or workers.rank == 0


def worker_directory(output: Path) -> Path:
    """Directory for this process's journal: the run's directory, or one next to it for all but the host's first worker.

    It is named after the local rank, which stays the same when hosts join or leave.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if torchrun_rank() is not None else 0
    return output if local_rank == 0 else output.with_name(f"{output.name}.worker-{local_rank}")


def directory_to_resume(output: Path) -> Path:
    """Directory to read a run's options from: the worker's directory, or the run's if the worker has none yet."""
    directory = worker_directory(output)
    return directory if (directory / OPTIONS).exists() else output


def holds_run(output: Path) -> bool:
    """Whether there is a run that this process can resume or join."""
    return (directory_to_resume(output) / OPTIONS).exists()


def worker_trace(trace: Path | None, workers: Workers | None) -> Path | None:
    """File for a worker's trace: each worker has its own."""
    if trace is None or is_first(workers):
        return trace
    assert workers is not None
    return trace.with_name(f"{trace.stem}.worker-{workers.rank}{trace.suffix}")


def require_same_steps(steps: int, workers: Workers | None) -> None:
    """Refuse a number of steps that differs from the first worker's: workers would wait for each other forever."""
    agreed = steps if workers is None else workers.all_gather(steps)[0]
    require_whole("steps", steps, agreed, agreed, otherwise=", the steps of the first worker")


def storage_of_one(storage: Storage, workers: Workers | None) -> Storage:
    """Storage of a run that one of several workers executes alone: its own device and its part of the free memory."""
    from zo2core.planning.memory import free_memory, resident_memory

    if workers is None:
        return storage
    neighbours, memory = workers.neighbours, storage.memory
    if memory == "auto" and neighbours > 1:
        memory = str(resident_memory() + int(_SHARE * free_memory() / neighbours))
    return replace(storage, device=local_device(storage.device, workers), memory=memory)


def local_device(device: str, workers: Workers | None) -> str:
    """Device of this process: each worker of a host has its own GPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if workers is not None and device == "cuda" else device


def device_kinds(device: str, workers: Workers | None) -> str:
    """Kinds of the devices of all workers."""
    kind = device.partition(":")[0]
    return kind if workers is None else "+".join(sorted({*workers.all_gather(kind)}))
