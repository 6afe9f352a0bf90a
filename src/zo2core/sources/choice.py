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
        buckets: Of blocks that come and go; None: all are in memory.
        shared: Memory that workers of this host have together; None: the source has its own.
        scratch: Files that segments were written back to. They belong to the source, and are closed if there is none.
        write_back_every: Versions that a segment may be ahead of its bytes on disk; None: it is never written.
        base_digests: What the base's segments have to be.
        timeline: Every read and write is noted there.
    """
    if shared is not None:
        assert scratch is None, "what is shared is not written back"
        return SharedSource(weights, layouts, shared, base_digests=base_digests, timeline=timeline)
    try:
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
        if scratch is not None:
            scratch.close()
        raise
