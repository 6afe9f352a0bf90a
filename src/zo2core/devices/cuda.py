"""A CUDA GPU as compute device: page-locked host memory of exact size, and copies in the order of one stream.

Not yet run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

from zo2core.errors import DeviceError
from zo2core.memory import anonymous_memory
from zo2core.protocols import Store
from zo2core.types import BlockLayout, Bucket


class CudaDevice:
    """Uploads segments into memory on the GPU: one slot for all blocks, one for each resident segment.

    Args:
        index: Of the GPU.

    Raises:
        DeviceError: if there is no such GPU.
    """

    def __init__(self, index: int = 0) -> None:
        count = torch.cuda.device_count()
        if not 0 <= index < count:
            raise DeviceError(
                f"cuda:{index}",
                found=f"{count} CUDA device(s)",
                expected="that GPU and a torch built for CUDA",
                remedy="pass device='cpu', or install torch for CUDA",
            )
        self._torch_device = torch.device("cuda", index)
        self._registered: list[torch.Tensor] = []
        self._slots: dict[int | None, torch.Tensor] = {}  # resident segment, or None: the blocks' one
        self._bytes_moved = 0

    @property
    def torch_device(self) -> torch.device:
        """The GPU."""
        return self._torch_device

    @property
    def bytes_moved(self) -> int:
        """Bytes uploaded and offloaded since construction."""
        return self._bytes_moved

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked memory of exactly this size.

        torch's own allocator would round up to a power of two (pytorch issue 150517): 576 GiB instead of 324 for the
        blocks of OPT-175B.

        Raises:
            DeviceError: if the memory cannot be locked.
        """
        arena = torch.frombuffer(anonymous_memory(nbytes), dtype=torch.uint8)
        code = _cudart().cudaHostRegister(arena.data_ptr(), arena.numel(), 0)
        if int(code) != 0:
            raise DeviceError(
                str(self._torch_device),
                found=f"cudaHostRegister failed with code {int(code)} for {nbytes} bytes",
                expected="as much host memory that may be locked",
                remedy="free memory, or raise the limit that `ulimit -l` shows",
            )
        self._registered.append(arena)
        return arena[:nbytes]

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate uninitialised memory on the GPU."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._torch_device)

    def upload(self, bucket: Bucket, layout: BlockLayout) -> Store:
        """Copy a bucket into its slot, whole."""
        key = bucket.segment if layout.resident else None
        slot = self._slots.get(key)
        if slot is None or slot.numel() < layout.nbytes:
            slot = self._slots[key] = self.empty(layout.nbytes)
        slot[: layout.nbytes].copy_(bucket.data)  # waits: the bucket may be given back, and overwritten, at any time
        self._bytes_moved += layout.nbytes
        return layout.views(slot)

    def offload(self, store: Store, bucket: Bucket) -> None:
        """Copy a store's bytes back, parameter by parameter, and wait: the bucket may be read on return."""
        for parameter, view in zip(store, bucket.views, strict=True):
            view.copy_(parameter)
            self._bytes_moved += view.nbytes

    def close(self) -> None:
        """Unlock and give back all memory."""
        self._slots.clear()
        while self._registered:
            _cudart().cudaHostUnregister(self._registered.pop().data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
