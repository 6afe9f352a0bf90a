"""This process of a run: its place among the workers that ``torchrun`` started, and the memory that
it keeps.

Note: freed memory. By default glibc returns large blocks to the system as soon as they are freed,
and the system zeroes their pages again when they are next allocated: several hundred thousand pages
a step. If freed memory is kept, the next step's activations reuse it without page faults. The
setting applies to the whole process, so the command ``zo2 train`` makes it and the library never
does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from zo2adapters.tasks.option_tree import Change, Option, flag, leaves, plain
from zo2core.errors import OptionError, WorkerError, without_effect
from zo2core.io.process_memory import set_malloc
from zo2core.ranges import require_whole

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel
    from zo2adapters.tasks.rows import Rows
    from zo2adapters.trainers.options import Storage
    from zo2core import HostPlan, Workers

_SHARE = 0.9  # share of the free memory that the workers of a host use together


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How workers that torchrun started share the work."""

    split: Annotated[str, Option("output", Change.CALL)] = "auto"
    """How workers split a step: by directions, by rows, or by both, such as 2x3 for two groups of
    directions with three workers each that split the rows. auto minimizes the work of the busiest
    worker. Splitting by directions gives exactly the result of one worker. With blocks each worker
    has a part of the model, and micro-batches pass from one to the next.
    """

    def require_workers(self) -> None:
        """Refuse to split steps of a process that works alone, and processes of other launchers."""
        _require_torchrun_for_several()
        if self.split != "auto" and torchrun_rank() is None:
            raise without_effect(
                "split", self.split, "workers of torchrun --nproc-per-node N -m zo2adapters ..."
            )

    def require_no_shards(self, otherwise: str) -> None:
        """Refuse to split the directions or rows of a command that has no steps."""
        if self.split not in ("auto", "blocks"):
            raise OptionError("split", self.split, f"{otherwise}, or blocks", "pass one of these")
        self.require_workers()

    @contextmanager
    def stages(self) -> Iterator[Workers | None]:
        """Connect this process to the others, if they divide the blocks; else None."""
        if self.split == "auto":
            yield None
            return
        with self.workers() as workers:
            yield workers

    @contextmanager
    def workers(self) -> Iterator[Workers | None]:
        """Connect this process to the other workers; None if it works alone."""
        from zo2core import Workers

        self.require_workers()
        if torchrun_rank() is None:
            yield None
            return
        with Workers.from_torchrun(split=self.split) as workers:
            yield workers


def _require_torchrun_for_several() -> None:
    """Refuse a process that was meant to be one of several, and cannot find the others.

    Each would take all steps by itself. Processes that SLURM's srun or mpirun started are left
    alone: they may be runs that have nothing to do with each other.

    Note: what accelerate's launcher sets. On GPUs it starts torchrun's workers. On a CPU it starts
    one process whatever ``--num_processes`` says; above 1 it sets MASTER_ADDR, and never WORLD_SIZE
    (``prepare_simple_launcher_cmd_env``).
    """
    if torchrun_rank() is not None:
        return
    size = os.environ.get("WORLD_SIZE", "1")
    launched = {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys()
    if size.isdecimal() and int(size) > 1:
        where = "WORLD_SIZE"
        found = f"{size} processes without the variables of torchrun"
        otherwise = "unset WORLD_SIZE for a process that works alone"
    elif launched:
        where = "accelerate launch"
        found = "one process where several were asked for"
        size = "N"
        otherwise = "leave accelerate out for a process that works alone"
    else:
        return
    raise OptionError(
        where,
        found,
        "workers that torchrun started",
        f"run torchrun --standalone --nproc-per-node {size} -m zo2adapters ..., or {otherwise}",
    )


def torchrun_rank() -> int | None:
    """Rank of this process among those that ``torchrun`` started; None without ``torchrun``."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def is_first(workers: Workers | None) -> bool:
    """Whether this process is the worker that prints, and writes files that are written once."""
    return workers is None or workers.rank == 0


def worker_trace(trace: Path | None, workers: Workers | None) -> Path | None:
    """File for a worker's trace: each worker has its own."""
    if trace is None or is_first(workers):
        return trace
    assert workers is not None
    return trace.with_name(f"{trace.stem}.worker-{workers.rank}{trace.suffix}")


# options of this machine, or of this worker's files, which workers need not share
_OF_MACHINE = {
    *("model", "data", "architecture", "output", "resume", "run_directory", "trace", "report_to"),
    *("memory", "device", "device_memory", "activation_memory"),
    *("snapshot_every", "write_back_every", "write_limit_tb"),
}
_FILES = {"evaluation", "adapter"}  # files that may lie elsewhere, but not be left out


def require_same_command(name: str, command: Any, workers: Workers | None) -> None:
    """Refuse a worker whose command, or an option that was given to any, is not the first one's.

    Args:
        name: Name of the command.
        command: Its options, of which it knows which were given.
        workers: All of them; None: this process works alone.
    """
    if workers is None or workers.size == 1:
        return
    values = {option: _told(option, value) for option, value, _ in leaves(command)}
    given = sorted(command.given & values.keys() - _OF_MACHINE)
    told = workers.all_gather([name, given, values], "commands")
    compared = sorted({option for _, options, _ in told for option in options})
    require_alike(
        {"command": Told(f"zo2 {name}", name)}
        | {
            option: Told(f"{flag(option)} {its[option]}", its[option])
            for option in compared
            if option in its  # not of another command, which is refused by its name
        }
        for name, _, its in told
    )


def _told(option: str, value: object) -> str:
    """What an option's value is to other workers."""
    if value in (None, ()):
        return "left out"
    return "given" if option in _FILES else str(plain(value))


class Told(NamedTuple):
    """What a worker tells the others that it has."""

    shown: str  # in messages
    compared: str  # what has to be the same on all


_NONE = Told("none", "")


def require_alike(told: Iterable[Mapping[str, Told]]) -> None:
    """Refuse workers of which something is not what the first one has.

    Args:
        told: What each worker has, in the order of ranks: by names, which are the same on all. The
            first difference counts, so what causes others comes first.

    Raises:
        WorkerError: the same on all workers, with both values and the ranks that have the other.
    """
    of_workers = list(told)
    for what in dict.fromkeys(name for one in of_workers for name in one):
        first, *others = (one.get(what, _NONE) for one in of_workers)
        found = next((other for other in others if other.compared != first.compared), None)
        if found is not None:
            ranks = [rank for rank, one in enumerate(others, 1) if one.compared == found.compared]
            raise WorkerError(
                f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}",
                found.shown,
                f"{first.shown}, as worker 0 has it",
                "start all workers with the same command, model and rows",
            )


def require_same_inputs(
    model: HFBlockModel,
    place: object,
    rows: Mapping[str, tuple[object, Rows]],
    workers: Workers | None,
) -> None:
    """Refuse workers whose model or rows are not those of the first one.

    Args:
        model: The opened model.
        place: Where it is, as the option ``model`` names it.
        rows: By option, where rows are, and the rows.
        workers: All workers; None: this process works alone.
    """
    if workers is None or workers.size == 1:
        return
    named = f"--model {place}"
    own = {"weights": _of_digest(f"{named} with weights", model.weights.fingerprint)}
    for name, digest in model.base_files.digests().items():
        own[name] = _of_digest(f"{named} with {name}", digest)
    for option, (path, read) in rows.items():
        own[option] = _of_digest(f"{flag(option)} {path}", read.sha256 or read.digest())
    told = workers.all_gather(own, "files")
    require_alike({name: Told(*values) for name, values in one.items()} for one in told)


def _of_digest(what: str, digest: str) -> Told:
    return Told(f"{what} of digest {digest[:12]}", digest)


def require_same_steps(steps: int, workers: Workers | None) -> None:
    """Refuse a number of steps that differs from the first worker's: workers would wait for each
    other forever.
    """
    agreed = steps if workers is None else workers.all_gather(steps)[0]
    require_whole("steps", steps, agreed, agreed, otherwise=", the steps of the first worker")


def storage_of_one(storage: Storage, workers: Workers | None) -> Storage:
    """Storage of a run that one of several workers executes alone: its own device and its part of
    the free memory.
    """
    from zo2core.planning.memory import free_memory, resident_memory

    if workers is None:
        return storage
    neighbours, memory = workers.neighbours, storage.memory
    if memory == "auto" and neighbours > 1:
        memory = str(resident_memory() + int(_SHARE * free_memory() / neighbours))
    return replace(storage, device=local_device(storage.device, workers), memory=memory)


def local_device(device: str, workers: Workers | None) -> str:
    """Device of this process: each worker of a host has its own GPU."""
    return (
        f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        if workers is not None and device == "cuda"
        else device
    )


def device_kinds(device: str, workers: Workers | None) -> str:
    """Kinds of the devices of all workers."""
    kind = device.partition(":")[0]
    return kind if workers is None else "+".join(sorted({*workers.all_gather(kind)}))


# constants of malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = -1  # glibc converts it to the largest size
# bytes of the largest block that is kept; larger blocks are returned to the system
LARGEST_KEPT = 1 << 30
# where graphs take all spare memory: the largest value that glibc accepts before 2.35
SMALL = 1 << 25
_RETURNED = 1 << 20  # bytes of the smallest block that is returned at once

KEPT = "memory kept by the allocator"


def with_kept_memory(plan: HostPlan, activation_bytes: int) -> HostPlan:
    """Add the freed memory that the process keeps: as much as activations and logits need, once
    more.

    Most of it was in use before, so the peak hardly rises; but it is fragmented, and not every
    allocation fits into it.
    """
    from zo2core.planning.memory import MemoryPart

    kept = activation_bytes if activation_bytes <= plan.spare else 0
    part = MemoryPart(KEPT if kept else f"{KEPT}: none, returned to the system", kept)
    return replace(plan, parts=(*plan.parts, part))


def keeps_memory(plan: HostPlan) -> bool:
    """Whether the plan has room for freed memory that is kept."""
    return any(part.name == KEPT and part.nbytes > 0 for part in plan.parts)


def keep_freed_memory(largest: int = LARGEST_KEPT) -> bool:
    """Tell glibc to keep freed memory for this process. Other C libraries are left alone."""
    is_set = any(set_malloc(_M_MMAP_THRESHOLD, size) for size in (largest, SMALL))
    return is_set and set_malloc(_M_TRIM_THRESHOLD, _NEVER)


def return_freed_memory_at_once() -> bool:
    """Tell glibc to return freed blocks to the system, but for small ones.

    What it keeps from one part of a pass adds to what the next part takes: a run that was planned
    at 893 MB had a peak of 997 MB, and one of 857 MB with this.
    """
    is_set = set_malloc(_M_MMAP_THRESHOLD, _RETURNED)
    return is_set and set_malloc(_M_TRIM_THRESHOLD, _RETURNED)
