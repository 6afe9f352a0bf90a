"""Graphs that blocks keep from their forward to their backward, where memory allows, so that no forward is repeated.

What autograd saves for a block's backward are activations and weights. The activations stay. The weights lie in memory that
later blocks fill in between; when the sweep comes back to the block, its modules read its weights again, though perhaps from
another place. So a saved weight is kept as a name and a place within it, and read there when its backward runs.
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
    offset: int  # from the weight's beginning, in bytes
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class _Activation(NamedTuple):
    """A saved tensor of the graph's own."""

    tensor: torch.Tensor  # detached, so that no graph holds itself
    version: int  # of its memory when it was saved


_Saved: TypeAlias = _Weight | _Activation


class ForwardGraph(Protocol):
    """What autograd saves for the backward of one forward."""

    def recorded(self) -> AbstractContextManager[object]:
        """A context within which autograd saves tensors here."""


class DroppedGraph:
    """A graph whose backward never runs: nothing is kept, so that the forward takes no more memory than it would without."""

    def recorded(self) -> AbstractContextManager[object]:
        """See the contract."""
        return saved_tensors_hooks(_drop, _never)


def _drop(tensor: torch.Tensor) -> None:
    """Keep nothing of a tensor."""


def _never(saved: None) -> torch.Tensor:
    raise AssertionError("the backward of a graph that was dropped never runs")


class KeptGraph:
    """What autograd saves for the backward of one forward.

    Args:
        weights: What the segment's modules read, by name, both when the forward runs and when its backward does.
        given: Tensors that are kept in any case.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], given: Iterable[torch.Tensor]) -> None:
        self._weights = weights
        places = sorted((weight.data_ptr(), weight.nbytes, name) for name, weight in weights.items())
        self._places = places
        self._starts = [start for start, _, _ in places]
        self._given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self._storages: dict[int, int] = {}  # bytes by address

    @property
    def nbytes(self) -> int:
        """Bytes that the graph keeps in memory besides weights and what is kept in any case."""
        return sum(nbytes for address, nbytes in self._storages.items() if address not in self._given)

    def recorded(self) -> AbstractContextManager[object]:
        """See the contract."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        address = tensor.data_ptr()
        if place := bisect_right(self._starts, address):
            start, nbytes, name = self._places[place - 1]
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
        # Hooks take over autograd's own check.
        assert saved.tensor._version == saved.version, "a tensor that backward reads was changed in place"
        return saved.tensor


class _Block(NamedTuple):
    """A graph that was kept."""

    values: Sequence[Any]  # what the block gave, connected to the graph
    inputs: dict[int, torch.Tensor]  # leaves of the graph, by their place in what the block was given


class KeptGraphs:
    """The graphs of a sweep's last blocks, for each of its streams.

    Args:
        weights: What each segment's modules read since it was visited last, by name.
        room: Bytes that graphs may take in all.
        sizes: For each stream, its size in any unit: graphs are taken to be proportional to it.
    """

    def __init__(self, weights: Sequence[Mapping[str, torch.Tensor]], room: int, sizes: Sequence[int]) -> None:
        self._weights = weights
        self._left = room
        self._sizes = sizes
        self._largest = 0.0  # bytes of a block's graph for each unit of size, the most that was seen
        self._kept: dict[tuple[int, int], _Block] = {}  # by block and stream

    def graph(self, block: int, stream: int, blocks: int, given: Iterable[torch.Tensor]) -> ForwardGraph:
        """The graph of a forward that runs next: to be kept if those of all later blocks fit beside it, for all streams.

        Args:
            block: Index of the block's segment.
            stream: Index of the stream; a block's come in order.
            blocks: Number of blocks that still have to run, this one included.
            given: Tensors that are kept in any case.
        """
        return KeptGraph(self._weights[block], given) if self._fits(stream, blocks) else DroppedGraph()

    def offer(
        self,
        graph: ForwardGraph,
        block: int,
        stream: int,
        blocks: int,
        values: Sequence[Any],
        inputs: dict[int, torch.Tensor],
    ) -> bool:
        """Keep a graph, or drop it if it proves too large.

        Args:
            graph: Graph of the forward that ran.
            block: Index of the block's segment.
            stream: Index of the stream.
            blocks: Number of blocks that still have to run, this one included.
            values: What the block gave, connected to the graph.
            inputs: Leaves of the graph, by their place in what the block was given.

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
        """A kept graph, which is then the caller's; None if it was not kept."""
        return self._kept.pop((block, stream), None)

    def clear(self) -> None:
        """Drop all graphs."""
        self._kept.clear()

    def _fits(self, stream: int, blocks: int) -> bool:
        sizes = (blocks - 1) * sum(self._sizes) + sum(self._sizes[stream:])
        return sizes * self._largest <= self._left
