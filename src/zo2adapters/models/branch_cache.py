"""A cache of the tensor values that Hugging Face's forward branches on, so that on a GPU no sweep waits for them.

A branch on a tensor's value (is any token padding?) makes the host wait for the device. Masks and positions depend on the
batch alone, so the values are the same in each forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from zo2core.errors import UnsupportedModelError

_READS = {torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.item, torch.Tensor.tolist}


class _Read(NamedTuple):
    """A read of a tensor's value by the host."""

    function: Callable[..., Any]
    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.function.__name__} of a tensor of shape {tuple(self.shape)} and {self.dtype}"


class BranchCache(TorchFunctionMode):
    """A context in which reads of tensor values return what they returned the first time, in the same order.

    Only integers and booleans are cached, since floating-point values may depend on weights. Booleans are assumed not to, in
    all that a decoder does before its first layer and after its last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cached: list[tuple[_Read, Any]] = []
        self._count = 0  # reads since the context was entered
        self._recording = True

    def __enter__(self) -> BranchCache:
        self._count = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self._recording = False  # later reads beyond those of the first pass have another cause
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _READS or args[0].is_floating_point():
            return func(*args, **(kwargs or {}))
        read = _Read(func, args[0].shape, args[0].dtype)
        index, self._count = self._count, self._count + 1
        if index < len(self._cached):
            return self._lookup(index, read)
        value = func(*args, **(kwargs or {}))
        if self._recording:
            self._cached.append((read, value))
        return value

    def _lookup(self, index: int, read: _Read) -> Any:
        expected, value = self._cached[index]
        if read != expected:
            raise UnsupportedModelError(
                f"read {index} of a tensor's value in Hugging Face's forward",
                found=str(read),
                expected=f"{expected}, as the first time",
                remedy="write an adapter for this architecture: its forward reads values in no fixed order",
            )
        return value
