"""Which source a run's segments come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zo2core.io.shared_memory import SharedMemory
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import BlockSource, TensorReader
from zo2core.sources.base_digests import BaseDigests
from zo2core.sources.pinned import PinnedSource
from zo2core.sources.scratch import Scratch
from zo2core.sources.shared import SharedSource
from zo2core.sources.streamed import StreamedSource
from zo2core.types import BlockLayout


def open_source(
    weights: TensorReader,
    layouts: Sequence[BlockLayout],
    host_memory: Callable[[int], torch.Tensor],
    *,
    buckets: int | None,
    shared: SharedMemory | None,
    scratch: Scratch | None,
    write_back_every: int | None,
    base_digests: BaseDigests,
    timeline: Timeline,
) -> BlockSource:
    """Open the source.

    Args:
        weights: The base checkpoint.
        layouts: Segments in visiting order, as they lie in it.
        host_memory: Allocates its memory.
        buckets: Number of buckets for streamed blocks; None: all blocks are in memory.
        shared: Memory that workers of this host have together; None: the source has its own.
        scratch: Files that segments were written back to.
        write_back_every: Versions that a segment may be ahead of its bytes on disk; None: it is never written.
        base_digests: What the base's segments have to be.
        timeline: Every read and write is noted there.

    What is shared and the files belong to the source, and are closed if none comes of it.
    """
    assert shared is None or scratch is None, "what is shared is not written back"
    try:
        if shared is not None:
            return SharedSource(weights, layouts, shared, base_digests=base_digests, timeline=timeline)
        if buckets is None:
            return PinnedSource(
                weights,
                layouts,
                host_memory,
                scratch=scratch,
                write_back_every=write_back_every,
                base_digests=base_digests,
                timeline=timeline,
            )
        return StreamedSource(
            weights,
            layouts,
            host_memory,
            buckets=buckets,
            scratch=scratch,
            write_back_every=write_back_every,
            base_digests=base_digests,
            timeline=timeline,
        )
    except BaseException:
        for own in (shared, scratch):
            if own is not None:
                own.close()
        raise
