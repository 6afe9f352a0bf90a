"""Choice of the source of a run's segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zo2core.profiling.timeline import Timeline
from zo2core.protocols import BlockSource, TensorReader
from zo2core.sources.base_digests import BaseDigests
from zo2core.sources.pinned import PinnedSource
from zo2core.sources.slot_file import SlotFile
from zo2core.sources.streamed import StreamedSource
from zo2core.types import BlockLayout


def open_source(
    weights: TensorReader,
    layouts: Sequence[BlockLayout],
    host_memory: Callable[[int], torch.Tensor],
    *,
    buckets: int | None,
    scratch: SlotFile | None,
    write_back_every: int | None,
    base_digests: BaseDigests,
    timeline: Timeline,
) -> BlockSource:
    """Open the source.

    The source takes ownership of ``scratch``, which is closed if it cannot be opened.
    """
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
