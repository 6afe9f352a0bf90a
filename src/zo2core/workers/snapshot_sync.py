"""Snapshot sync: before a first-order run resumes, every worker gets the newest snapshot that one of them has."""

from __future__ import annotations

from zo2core.checkpoint import Snapshot, Snapshots
from zo2core.workers.exchange import Exchange
from zo2core.workers.journal_sync import CHUNK_BYTES


def sync_snapshots(snapshots: Snapshots, exchange: Exchange) -> Snapshot | None:
    """Return the newest snapshot of all workers; one that this worker lacks is written to its directory.

    Args:
        snapshots: This worker's snapshots, of a journal that is already in sync.
        exchange: All-gathers with the other workers.

    Raises:
        CheckpointError: if this worker has snapshots, but all are damaged.
        OutputError: if another worker's snapshot cannot be written.
    """
    newest = snapshots.newest()
    content = b"" if newest is None else snapshots.content(newest.step)
    step = -1 if newest is None else newest.step
    summaries = exchange.all_gather("snapshots", {"step": step, "digest": snapshots.digest(content), "bytes": len(content)})
    owner = max(summaries, key=lambda rank: (summaries[rank]["step"], -rank))
    if all(summary == summaries[owner] for summary in summaries.values()):
        return newest
    offsets, is_owner = range(0, summaries[owner]["bytes"], CHUNK_BYTES), owner == exchange.rank
    chunks = [
        exchange.gather(content[offset : offset + CHUNK_BYTES] if is_owner else b"", "snapshot")[owner] for offset in offsets
    ]
    return newest if is_owner else snapshots.receive(summaries[owner]["step"], b"".join(chunks))
