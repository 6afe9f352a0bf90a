"""What workers agree on before a run starts: the journal's records, the newest snapshot, and all
that decides the bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from zo2core.errors import WorkerError
from zo2core.io.direct_file import byte_view
from zo2core.journal.journal import Journal
from zo2core.journal.snapshots import Snapshot, Snapshots
from zo2core.protocols import NoiseGenerator
from zo2core.ranges import counted
from zo2core.types import BlockLayout
from zo2core.workers.workers import Workers, mismatch


def sync_journals(journal: Journal, workers: Workers) -> None:
    """Append the records that the longest journal of the workers has and this one lacks: the run
    continues there.
    """
    if workers.size == 1:
        return
    version = journal.version
    held = (
        [version, len(journal.base_digests), journal.chain(version)]
        if journal.header is not None
        else [-1, 0, None]
    )
    journals = workers.all_gather(held)
    longest = max(range(workers.size), key=lambda rank: (journals[rank][:2], -rank))
    if journals[longest][0] < 0:
        return
    steps = [max(length, 0) for length, *_ in journals]
    expected = workers.all_gather(
        [journal.chain(step) for step in steps] if longest == workers.rank else []
    )[longest]
    for rank, step in enumerate(steps):
        if journals[rank][2] not in (None, expected[rank]):
            raise WorkerError(
                f"worker {rank}",
                found=f"a journal of {counted(step, 'step')} that does not belong to worker "
                f"{longest}'s run",
                expected=f"the first {step} steps of its {steps[longest]}",
                remedy=(
                    "start all workers with the same command, or move that worker's run directory "
                    "away"
                ),
            )
    records = workers.broadcast(
        journal.excerpt(min(steps)) if longest == workers.rank else b"", longest
    )
    if longest != workers.rank:
        journal.take_excerpt(records)


def sync_snapshots(snapshots: Snapshots, workers: Workers) -> Snapshot | None:
    """Return the newest snapshot of all workers; one that this worker lacks is written to its
    directory.
    """
    newest = snapshots.newest()
    if workers.size == 1:
        return newest
    newest_here = [-1, ""] if newest is None else [newest.step, snapshots.digest(newest.step)]
    held = workers.all_gather(newest_here)
    owner = max(range(workers.size), key=lambda rank: (held[rank][0], -rank))
    if all(other == held[owner] for other in held):
        return newest
    step = held[owner][0]
    content = workers.broadcast(snapshots.content(step) if owner == workers.rank else b"", owner)
    return newest if owner == workers.rank else snapshots.receive(step, content)


def common_step(steps: Sequence[int], workers: Workers) -> int:
    """The newest step of which all workers have the weights, given those of which this one has
    them.

    A worker overwrites the weights of the step before only once all have committed: a segment is
    written after its gradients were added up, to which each comes after its commit. So workers that
    were killed while they committed have a step in common.
    """
    if workers.size == 1:
        return max(steps)
    of_workers = workers.all_gather(list(steps), "committed steps")
    common = set(steps).intersection(*of_workers)
    if common:
        return max(common)
    newest = [max(of_worker) for of_worker in of_workers]
    rank = newest.index(min(newest))
    raise WorkerError(
        f"worker {rank}",
        found=f"weights of step {newest[rank]}",
        expected=f"those of step {max(newest)}, as worker {newest.index(max(newest))} has",
        remedy="copy that worker's run directory to this one, or begin the run anew",
    )


def require_agreement(
    journal: Journal,
    noise: NoiseGenerator,
    layouts: Sequence[BlockLayout],
    device: torch.device,
    workers: Workers,
) -> None:
    """Refuse a journal (header, steps, digests of the base) or noise that differs from rank 0's.

    Torch's normal numbers, which MeZO draws, differ between kinds of processors: the same record
    would give another update.
    """
    if workers.size == 1:
        return
    version = journal.version
    steps = [version, journal.chain(version), sorted(journal.base_digests.items())]
    states = workers.all_gather([journal.header, steps, _noise_checksum(noise, layouts, device)])
    first_header, first_steps, first_noise = states[0]
    if first_header is not None:
        journal.begin(first_header)
    for rank, (_, steps_of_rank, drawn) in enumerate(states):
        if steps_of_rank != first_steps:
            found = f"a journal of {counted(steps_of_rank[0], 'step')} that differs from worker 0's"
            raise mismatch(rank, found, f"its {first_steps[0]} steps")
        if drawn != first_noise:
            raise WorkerError(
                f"worker {rank}",
                found=f"a machine that draws other {noise.name} noise than worker 0's",
                expected="the same numbers on all machines",
                remedy="pass `PhiloxNoise()`, or use machines of one kind",
            )


def _noise_checksum(
    noise: NoiseGenerator, layouts: Sequence[BlockLayout], device: torch.device
) -> int:
    """A checksum over the first numbers that this machine draws."""
    first = min(
        (spec for layout in layouts for spec in layout.parameters if not spec.frozen),
        key=lambda spec: spec.index,
    )
    start, stop = noise.chunks(first)[0]
    drawn = torch.empty(stop - start, dtype=first.dtype, device=device)
    noise.fill(drawn, 0, first)
    noise.retain(())
    return zlib.crc32(byte_view(drawn.cpu()))
