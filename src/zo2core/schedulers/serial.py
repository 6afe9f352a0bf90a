"""One thing after the other: the oracle that every other scheduler is compared with."""

from __future__ import annotations

from collections.abc import Sequence

from zo2core.protocols import BlockSource, Device, Visitor
from zo2core.types import Bucket


class SerialScheduler:
    """Uploads, replays, evaluates and offloads segment by segment.

    Args:
        source: Where segments come from. Belongs to the caller.
        device: Where they are computed on.
    """

    def __init__(self, source: BlockSource, device: Device) -> None:
        self._source = source
        self._device = device

    def sweep(self, visitor: Visitor, order: Sequence[int]) -> None:
        """Visit the segments in this order. See the contract."""
        held: list[tuple[Bucket, int | None]] = []  # resident segments stay acquired until the sweep has ended
        try:
            for position, index in enumerate(order):
                bucket = self._source.acquire(index)
                version: int | None = None
                try:
                    for following in order[position + 1 : position + 2]:
                        self._source.prefetch(following)
                    store = self._device.upload(bucket, self._source.layouts[index])
                    replayed = visitor.replay(index, store, bucket.version)
                    if replayed != bucket.version:
                        self._device.offload(store, bucket)
                    version = replayed
                    visitor.evaluate(index, store)
                finally:
                    if self._source.layouts[index].resident:
                        held.append((bucket, version))
                    else:
                        self._source.release(bucket, version)
        finally:
            for bucket, version in held:
                self._source.release(bucket, version)
