"""How workers begin: all journals are brought in line with the longest one, and nothing else crosses the network."""

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

PIECE = 1 << 18  # bytes of records that are told at a time


def sync_journals(journal: Journal, exchange: Exchange) -> None:
    """Append to a journal what the longest one of the workers has more.

    Args:
        journal: This worker's; it may not have begun.
        exchange: Exchange of the workers.

    Raises:
        WorkerError: if a journal is of another run, or does not begin as the longest one does.
        JournalError: if a record cannot be written.
    """
    version, is_begun = len(journal.updates), journal.header is not None
    told = exchange.all_gather("journals", {"version": version, "begun": is_begun, "digests": len(journal.base_digests)})
    begun = [rank for rank, own in told.items() if own["begun"]]
    if not begun:
        return
    longest = max(begun, key=lambda rank: (told[rank]["version"], told[rank]["digests"], -rank))
    versions = {rank: own["version"] for rank, own in told.items()}
    raw, chains = b"", [0]
    if longest == exchange.rank:
        raw = journal.excerpt(min(versions.values()))
        chains = [journal.chain(at) or 0 for at in versions.values()]
    shown = exchange.all_gather("checksums", {"chains": chains, "bytes": len(raw)})[longest]
    own = exchange.all_gather("beginnings", {"chain": journal.chain(version) if is_begun else None})
    for (rank, at), chain in zip(versions.items(), shown["chains"], strict=True):
        if own[rank]["chain"] not in (None, chain):
            raise WorkerError(
                f"worker {rank}",
                found=f"a journal of {at} steps that is none of worker {longest}'s run",
                expected=f"the first {at} steps of its {versions[longest]}",
                remedy="start all workers with the same command, or move that worker's run directory away",
            )
    pieces = [exchange.gather(raw[at : at + PIECE], "records")[longest] for at in range(0, shown["bytes"], PIECE)]
    if longest != exchange.rank:
        journal.take_excerpt(b"".join(pieces))


def require_agreement(
    journal: Journal,
    noise: NoiseGenerator,
    layouts: Sequence[BlockLayout],
    device: torch.device,
    exchange: Exchange,
) -> None:
    """Refuse a journal that is not rank 0's: header, steps, or what is known of the base; and noise that is not rank 0's.

    Torch's own normal numbers, which MeZO draws, differ between kinds of processors: the same record would then be another
    update.

    Raises:
        JournalError: if the headers differ; each difference is spelled out.
        WorkerError: if the steps or the noise do.
    """
    version = len(journal.updates)
    known = sorted(journal.base_digests.items())
    drawn = _noise_checksum(noise, layouts, device) if exchange.size > 1 else 0  # a worker alone agrees with itself
    own = {"header": journal.header, "version": version, "chain": journal.chain(version), "base": known, "noise": drawn}
    said = exchange.all_gather("headers", own)
    if said[0]["header"] is not None:
        journal.begin(said[0]["header"])
    for rank, own in said.items():
        if any(own[key] != said[0][key] for key in ("version", "chain", "base")):
            raise WorkerError(
                f"worker {rank}",
                found=f"a journal of {own['version']} steps that is not worker 0's",
                expected=f"its {said[0]['version']} steps",
                remedy="start all workers with the same command and the same run",
            )
        if own["noise"] != said[0]["noise"]:
            raise WorkerError(
                f"worker {rank}",
                found=f"a machine that draws other {noise.name} noise than worker 0's",
                expected="the same numbers on all machines",
                remedy="draw counter-based noise: PhiloxNoise, or no --exact-mezo; or take machines of one kind",
            )


def _noise_checksum(noise: NoiseGenerator, layouts: Sequence[BlockLayout], device: torch.device) -> int:
    """A checksum over the first numbers that this machine draws."""
    first = min((spec for layout in layouts for spec in layout.parameters if not spec.frozen), key=lambda spec: spec.index)
    start, stop = noise.chunks(first)[0]
    drawn = torch.empty(stop - start, dtype=first.dtype, device=device)
    noise.fill(drawn, 0, first)
    noise.retain(())
    return zlib.crc32(byte_view(drawn.cpu()))
