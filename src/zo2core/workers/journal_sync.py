"""Journal sync: before a run starts, every worker appends what the longest journal has more."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from zo2core.errors import WorkerError
from zo2core.io.direct_file import byte_view
from zo2core.journal import Journal
from zo2core.protocols import NoiseGenerator
from zo2core.types import BlockLayout
from zo2core.workers.exchange import Exchange

CHUNK_BYTES = 1 << 18  # most bytes of records in one all-gather


def sync_journals(journal: Journal, exchange: Exchange) -> None:
    """Append the records that the longest journal of the workers has and this one lacks.

    Args:
        journal: This worker's journal; it may be empty.
        exchange: All-gathers with the other workers.

    Raises:
        WorkerError: if a journal belongs to another run: its steps are not the first steps of the longest journal.
        JournalError: if a record cannot be written.
    """
    version, has_header = journal.version, journal.header is not None
    summary = {"version": version, "started": has_header, "digests": len(journal.base_digests)}
    summaries = exchange.all_gather("journals", summary)
    started = [rank for rank, summary in summaries.items() if summary["started"]]
    if not started:
        return
    longest = max(started, key=lambda rank: (summaries[rank]["version"], summaries[rank]["digests"], -rank))
    versions = {rank: summary["version"] for rank, summary in summaries.items()}
    lines, chains = b"", [0]
    if longest == exchange.rank:
        lines = journal.excerpt(min(versions.values()))
        chains = [journal.chain(step) or 0 for step in versions.values()]
    expected = exchange.all_gather("checksums", {"chains": chains, "bytes": len(lines)})[longest]
    found = exchange.all_gather("beginnings", {"chain": journal.chain(version) if has_header else None})
    for (rank, step), chain in zip(versions.items(), expected["chains"], strict=True):
        if found[rank]["chain"] not in (None, chain):
            raise WorkerError(
                f"worker {rank}",
                found=f"a journal of {step} steps that does not belong to worker {longest}'s run",
                expected=f"the first {step} steps of its {versions[longest]}",
                remedy="start all workers with the same command, or move that worker's run directory away",
            )
    offsets = range(0, expected["bytes"], CHUNK_BYTES)
    chunks = [exchange.gather(lines[offset : offset + CHUNK_BYTES], "records")[longest] for offset in offsets]
    if longest != exchange.rank:
        journal.take_excerpt(b"".join(chunks))


def require_agreement(
    journal: Journal,
    noise: NoiseGenerator,
    layouts: Sequence[BlockLayout],
    device: torch.device,
    exchange: Exchange,
) -> None:
    """Refuse a journal (header, steps, digests of the base) or noise that differs from rank 0's.

    Torch's normal numbers, which MeZO draws, differ between kinds of processors: the same record would give another update.

    Raises:
        JournalError: if the headers differ, with each difference.
        WorkerError: if the steps or the noise differ.
    """
    version = journal.version
    base = sorted(journal.base_digests.items())
    drawn = _noise_checksum(noise, layouts, device) if exchange.size > 1 else 0
    local = {"header": journal.header, "version": version, "chain": journal.chain(version), "base": base, "noise": drawn}
    states = exchange.all_gather("headers", local)
    first = states[0]
    if first["header"] is not None:
        journal.begin(first["header"])
    for rank, state in states.items():
        if any(state[key] != first[key] for key in ("version", "chain", "base")):
            raise WorkerError(
                f"worker {rank}",
                found=f"a journal of {state['version']} steps that differs from worker 0's",
                expected=f"its {first['version']} steps",
                remedy="start all workers with the same command and the same run",
            )
        if state["noise"] != first["noise"]:
            raise WorkerError(
                f"worker {rank}",
                found=f"a machine that draws other {noise.name} noise than worker 0's",
                expected="the same numbers on all machines",
                remedy="use counter-based noise (PhiloxNoise; no --exact-mezo), or machines of one kind",
            )


def _noise_checksum(noise: NoiseGenerator, layouts: Sequence[BlockLayout], device: torch.device) -> int:
    """A checksum over the first numbers that this machine draws."""
    first = min((spec for layout in layouts for spec in layout.parameters if not spec.frozen), key=lambda spec: spec.index)
    start, stop = noise.chunks(first)[0]
    drawn = torch.empty(stop - start, dtype=first.dtype, device=device)
    noise.fill(drawn, 0, first)
    noise.retain(())
    return zlib.crc32(byte_view(drawn.cpu()))
