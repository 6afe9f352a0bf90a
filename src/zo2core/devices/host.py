"""The CPU as compute device: segments are computed on where they lie, nothing is copied."""

from __future__ import annotations

import torch

from zo2core.memory import anonymous_memory
from zo2core.protocols import Store
from zo2core.types import BlockLayout, Bucket


class HostDevice:
    """Computes on the buckets' own memory."""

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def bytes_moved(self) -> int:
        """0: segments are computed on where they lie."""
        return 0

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate anonymous memory of exactly this size, page-aligned. Pages take room once they are touched."""
        return torch.frombuffer(anonymous_memory(nbytes), dtype=torch.uint8)[:nbytes]

    def empty(self, nbytes: int) -> torch.Tensor:
        """The same as host memory: here they are one."""
        return self.host_memory(nbytes)

    def upload(self, bucket: Bucket, layout: BlockLayout) -> Store:
        """The bucket itself."""
        return bucket.views

    def offload(self, store: Store, bucket: Bucket) -> None:
        """Nothing: the store is the bucket."""

    def close(self) -> None:
        """Nothing: memory goes with its tensors."""
