"""Graphs that blocks keep from their forward to their backward pass, where memory allows, so that no forward is repeated.

Autograd saves activations and weights for a block's backward pass. The activations stay in memory. The memory of the weights
is overwritten by later blocks; in the backward pass the block's modules have its weights again, perhaps at another address.
So a saved weight is kept as a name and an offset, and looked up when the backward pass runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.autograd.graph import saved_tensors_hooks


class _Weight(NamedTuple):
    """A saved tensor that is a weight, or a view of one."""

    name: str
    offset: int  # from the weight's first element, in bytes
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class _Activation(NamedTuple):
    """A saved tensor that is not a weight."""

    tensor: torch.Tensor  # detached, so that the graph does not refer to itself
    version: int  # torch's version counter when it was saved


_Saved: TypeAlias = _Weight | _Activation


class ForwardGraph(Protocol):
    """The tensors that autograd saves for the backward pass of one forward."""

    def recorded(self) -> AbstractContextManager[object]:
        """Return a context within which autograd saves tensors here."""


class DroppedGraph:
    """A graph whose backward pass never runs: no tensor is saved, so that the forward needs no more memory than without."""

    def recorded(self) -> AbstractContextManager[object]:
        """See the contract."""
        return saved_tensors_hooks(_drop, _never)


def _drop(tensor: torch.Tensor) -> None:
    """Save nothing."""


def _never(saved: None) -> torch.Tensor:
    raise AssertionError("the backward pass of a dropped graph never runs")


class KeptGraph:
    """The tensors that autograd saves for the backward pass of one forward.

    Args:
        weights: The segment's weights by name, both during the forward and during the backward pass.
        inputs: The segment's inputs, which are kept in any case.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        self._weights = weights
        self._ranges = sorted((weight.data_ptr(), weight.nbytes, name) for name, weight in weights.items())
        self._starts = [start for start, _, _ in self._ranges]
        self._inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self._storages: dict[int, int] = {}  # bytes by address

    @property
    def nbytes(self) -> int:
        """Bytes that the graph keeps in memory, without weights and inputs."""
        return sum(nbytes for address, nbytes in self._storages.items() if address not in self._inputs)

    def recorded(self) -> AbstractContextManager[object]:
        """See the contract."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        address = tensor.data_ptr()
        if after := bisect_right(self._starts, address):
            start, nbytes, name = self._ranges[after - 1]
            if address < start + nbytes:
                return _Weight(name, address - start, tensor.dtype, tensor.size(), tensor.stride())
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage.nbytes()
        return _Activation(tensor.detach(), tensor._version)

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if isinstance(saved, _Weight):
            weight = self._weights[saved.name]
            start = weight.storage_offset() * weight.itemsize + saved.offset
            view = torch.empty(0, dtype=saved.dtype, device=weight.device)
            return view.set_(weight.untyped_storage(), start // saved.dtype.itemsize, saved.size, saved.stride)
        # With these hooks autograd does not check this itself.
        assert saved.tensor._version == saved.version, "a tensor that backward reads was changed in place"
        return saved.tensor


class _Block(NamedTuple):
    """A kept graph."""

    values: Sequence[Any]  # flattened outputs of the block, connected to the graph
    inputs: dict[int, torch.Tensor]  # leaves of the graph, by their index in the block's flattened input


class KeptGraphs:
    """The graphs of a sweep's last blocks, for each of its streams.

    Args:
        weights: For each segment, its modules' weights since its last visit, by name.
        budget: Most bytes that all graphs together may take.
        sizes: Size of each stream in any unit; a graph's memory is assumed to be proportional to it.
    """

    def __init__(self, weights: Sequence[Mapping[str, torch.Tensor]], budget: int, sizes: Sequence[int]) -> None:
        self._weights = weights
        self._left = budget
        self._sizes = sizes
        self._largest = 0.0  # most bytes that a block's graph took for each unit of size
        self._kept: dict[tuple[int, int], _Block] = {}  # by block and stream

    def graph(self, block: int, stream: int, blocks: int, inputs: Iterable[torch.Tensor]) -> ForwardGraph:
        """Make the graph of the next forward, which is kept if it fits together with those of all later blocks.

        Args:
            block: Index of the block's segment.
            stream: Index of the stream; the streams of a block run in order.
            blocks: Number of blocks that still have to run, this one included.
            inputs: The block's inputs, which are kept in any case.
        """
        return KeptGraph(self._weights[block], inputs) if self._fits(stream, blocks) else DroppedGraph()

    def offer(
        self,
        graph: ForwardGraph,
        block: int,
        stream: int,
        blocks: int,
        values: Sequence[Any],
        inputs: dict[int, torch.Tensor],
    ) -> bool:
        """Keep a graph, or drop it if it is too large.

        Args:
            graph: Graph of the forward that ran.
            block: Index of the block's segment.
            stream: Index of the stream.
            blocks: Number of blocks that still have to run, this one included.
            values: Flattened outputs of the block, connected to the graph.
            inputs: Leaves of the graph, by their index in the block's flattened input.

        Returns:
            Whether it was kept.
        """
        if not isinstance(graph, KeptGraph):
            return False
        self._largest = max(self._largest, graph.nbytes / max(self._sizes[stream], 1))
        if not self._fits(stream, blocks):
            return False
        self._left -= graph.nbytes
        self._kept[block, stream] = _Block(values, inputs)
        return True

    def pop(self, block: int, stream: int) -> _Block | None:
        """Remove a graph and return it; None if it was not kept."""
        return self._kept.pop((block, stream), None)

    def clear(self) -> None:
        """Drop all graphs."""
        self._kept.clear()

    def _fits(self, stream: int, blocks: int) -> bool:
        sizes = (blocks - 1) * sum(self._sizes) + sum(self._sizes[stream:])
        return sizes * self._largest <= self._left
