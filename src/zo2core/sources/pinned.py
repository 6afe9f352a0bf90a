"""Every segment resident in host memory, in one exact-size arena, filled straight from the checkpoint on first use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from zo2core.errors import ClosedError
from zo2core.protocols import TensorReader
from zo2core.types import BlockLayout, Bucket, aligned

_READERS = 4  # threads; one buffered reader does not reach a disk's rate


class PinnedSource:
    """Host memory for the whole model, page-locked where the device needs that for fast copies.

    Nothing is read until a segment is first asked for; no tensor is held twice.

    Args:
        weights: The base checkpoint. Belongs to the caller.
        layouts: Segments in visiting order.
        host_memory: Allocates the arena: ``Device.host_memory``.
    """

    def __init__(
        self,
        weights: TensorReader,
        layouts: Sequence[BlockLayout],
        host_memory: Callable[[int], torch.Tensor],
    ) -> None:
        self._weights = weights
        self._layouts = tuple(layouts)
        arena = host_memory(sum(layout.nbytes for layout in self._layouts))
        self._buckets: list[Bucket] = []
        offset = 0
        for index, layout in enumerate(self._layouts):
            data = arena[offset : offset + layout.nbytes]
            self._buckets.append(Bucket(index, data, layout.views(data), version=0))
            offset += aligned(layout.nbytes)
        self._filling: dict[int, list[Future[None]]] = {}
        self._filled: set[int] = set()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(_READERS, thread_name_prefix="zo2-read")

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """Segments in visiting order."""
        return self._layouts

    def prefetch(self, index: int) -> None:
        """Start reading a segment that was not read yet."""
        with self._lock:
            if self._pool is None:
                raise ClosedError("PinnedSource", found="a closed source", expected="an open one", remedy="open it again")
            if index in self._filled or index in self._filling:
                return
            tensors = zip(self._layouts[index].parameters, self._buckets[index].views, strict=True)
            self._filling[index] = [self._pool.submit(self._weights.read_into, spec.name, view) for spec, view in tensors]

    def acquire(self, index: int) -> Bucket:
        """Wait until a segment is read. See the contract."""
        self.prefetch(index)
        if index in self._filling:
            # All reads end before the first failure is reported: none may write into the bucket later.
            failures = [future.exception() for future in self._filling.pop(index)]
            for failure in failures:
                if failure is not None:
                    raise failure
            self._filled.add(index)
        return self._buckets[index]

    def release(self, bucket: Bucket, version: int | None) -> None:
        """Note the bytes' version. Lost bytes are read anew from the checkpoint, at version 0."""
        if version is None:
            self._filled.discard(bucket.segment)
        self._buckets[bucket.segment] = bucket._replace(version=version or 0)

    def close(self) -> None:
        """Wait for reads under way and give the arena back."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        self._filling.clear()
        self._buckets.clear()
