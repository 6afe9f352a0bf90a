"""The autograd graph of one segment's forward, whose saved tensors are kept, or computed again for the backward pass.

Autograd saves activations and weights for a backward pass. The memory of the weights is overwritten by later segments; in
the backward pass the segment's modules have its weights again, perhaps at another address. So a saved weight is kept as a
name and an offset, and looked up in the backward pass. Activations are kept where memory allows. Otherwise the forward runs
again to compute them. That second forward ends as soon as the last activation is computed: later operations, such as a
frozen output projection, save nothing and are not repeated.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks

from zo2core.errors import OptionError

# A freed block of glibc's heap is rarely reused whole for a tensor, whose memory is aligned, so that activations lie with
# gaps between them. Measured for activations of 1 to 7 MB: 1.35 to 1.55 times their bytes after one step. With 1.5, three
# runs exceeded their memory by 6 % after several steps, with 1.6 by 2 %. Memory of 32 MiB and more is not from the heap.
_HEAP_SPREAD = 1.6
_HEAP_LARGEST = 1 << 25


class _Weight(NamedTuple):
    """A saved tensor that is a weight, or a view of one."""

    name: str
    offset: int  # from the weight's first element, in bytes
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class _Activation:
    """A saved tensor that is not a weight, or an empty slot for it. It exists as long as the graph needs it."""

    __slots__ = ("__weakref__", "_tensor", "_version", "kind")

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        self.kind = (dtype, shape)
        self._tensor: torch.Tensor | None = None
        self._version = 0

    @property
    def is_empty(self) -> bool:
        return self._tensor is None

    def fill(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()  # detached, so that the graph does not refer to itself
        self._version = tensor._version

    def empty(self) -> None:
        self._tensor = None

    def read(self) -> torch.Tensor:
        assert self._tensor is not None, "the forward of a graph runs again before its backward"
        # With hooks autograd does not check this itself.
        assert self._tensor._version == self._version, "a tensor that backward reads was changed in place"
        return self._tensor


_Saved: TypeAlias = _Weight | _Activation


class _FilledError(BaseException):
    """Ends a second forward once all saved activations are computed. No ``except Exception`` catches it."""


class BlockGraph:
    """The graph of one forward of a segment."""

    def __init__(self, weights: Mapping[str, torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        self._weights = weights
        self._inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self._storages: dict[int, tuple[int, bool]] = {}  # by address: bytes, and whether they are in host memory
        self._activations: list[weakref.ref[_Activation]] = []  # in the order in which they were saved

    def memory(self, times: float = 1.0) -> int:
        """Bytes of memory that the activations take which the forward kept, besides weights and inputs."""
        kept = (storage for address, storage in self._storages.items() if address not in self._inputs)
        return math.ceil(sum(_memory(nbytes * times, on_host=on_host) for nbytes, on_host in kept))

    def recorded(self, *, keep: bool) -> AbstractContextManager[object]:
        """Return a context in which the forward runs."""
        locate = self._weight_locator()

        def pack(tensor: torch.Tensor) -> _Saved:
            weight = locate(tensor)
            if weight is not None:
                return weight
            activation = _Activation(tensor.dtype, tensor.shape)
            if keep:
                storage = tensor.untyped_storage()
                self._storages[storage.data_ptr()] = (storage.nbytes(), storage.device.type == "cpu")
                activation.fill(tensor)
            self._activations.append(weakref.ref(activation))
            return activation

        return saved_tensors_hooks(pack, self._unpack)

    def drop(self) -> None:
        """Free the activations that were kept."""
        for reference in self._activations:
            activation = reference()
            if activation is not None:
                activation.empty()

    def restore(self, forward: Callable[[], object]) -> None:
        """Run the forward again as far as needed to restore the activations, if they were not kept."""
        activations = [reference() for reference in self._activations]
        needed = [number for number, saved in enumerate(activations) if saved is not None and saved.is_empty]
        if not needed:
            return
        locate = self._weight_locator()
        number = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal number
            if locate(tensor) is not None:
                return
            activation = activations[number]
            if activation is not None:
                if activation.kind != (tensor.dtype, tensor.shape):
                    raise _other_tensors(f"{(tensor.dtype, tensor.shape)} for {activation.kind}")
                activation.fill(tensor)
            if number == needed[-1]:
                raise _FilledError
            number += 1

        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, _unpack_never):
                forward()
        except _FilledError:
            return
        raise _other_tensors(f"{number} for {needed[-1] + 1}")

    def _weight_locator(self) -> Callable[[torch.Tensor], _Weight | None]:
        """Return a function that finds the weight in whose memory a tensor lies, by the weights' present addresses."""
        ranges = sorted((weight.data_ptr(), weight.nbytes, name) for name, weight in self._weights.items())
        starts = [start for start, _, _ in ranges]

        def locate(tensor: torch.Tensor) -> _Weight | None:
            address = tensor.data_ptr()
            if not (index := bisect_right(starts, address)):
                return None
            start, nbytes, name = ranges[index - 1]
            if address >= start + nbytes:
                return None
            return _Weight(name, address - start, tensor.dtype, tensor.size(), tensor.stride())

        return locate

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if isinstance(saved, _Activation):
            return saved.read()
        weight = self._weights[saved.name]
        start = weight.storage_offset() * weight.itemsize + saved.offset
        view = torch.empty(0, dtype=saved.dtype, device=weight.device)
        return view.set_(weight.untyped_storage(), start // saved.dtype.itemsize, saved.size, saved.stride)


def _memory(nbytes: float, *, on_host: bool) -> float:
    """Bytes of memory that an activation of so many bytes takes."""
    return nbytes * _HEAP_SPREAD if on_host and nbytes < _HEAP_LARGEST else nbytes


def _unpack_never(saved: None) -> torch.Tensor:
    raise AssertionError("a second forward is not differentiated")


def _other_tensors(found: str) -> OptionError:
    return OptionError(
        "model",
        found=f"a forward that saves other tensors for its backward when it runs again: {found}",
        expected="layers that compute the same when they run again on the same input",
        remedy="train this model by ZerothOrder, whose steps need no gradient",
    )
