"""Graphs that blocks keep from their forward to their backward, where memory allows, so that no forward is repeated.

What autograd saves for a block's backward are activations and weights. The activations stay. The weights lie in memory that
later blocks fill in between; when the sweep comes back to the block, its modules read its weights again, though perhaps from
another place. So a saved weight is kept as a name and a place within it, and read there when its backward runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

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

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within this context, autograd saves tensors here."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

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
        self._size = sum(sizes)
        self._sizes = sizes
        self._largest = 0.0  # bytes of a block's graph for each unit of size, the most that was seen
        self._kept: dict[tuple[int, int], _Block] = {}  # by block and stream
        self._keeps = False  # the block that runs now

    def record(self, block: int, given: Iterable[torch.Tensor]) -> KeptGraph:
        """The graph of a forward that runs next, to be recorded and then kept or dropped.

        Args:
            block: Index of the block's segment.
            given: Tensors that are kept in any case.
        """
        return KeptGraph(self._weights[block], given)

    def offer(
        self, graph: KeptGraph, block: int, stream: int, blocks: int, values: Sequence[Any], inputs: dict[int, torch.Tensor]
    ) -> bool:
        """Keep a graph if those of this block and of all later ones fit, for all streams; a block's are kept together.

        Args:
            graph: Recorded during the forward.
            block: Index of the block's segment.
            stream: Index of the stream; a block's come in order.
            blocks: Number of blocks that still have to run, this one included.
            values: What the block gave, connected to the graph.
            inputs: Leaves of the graph, by their place in what the block was given.

        Returns:
            Whether it was kept.
        """
        if stream == 0:
            self._largest = max(self._largest, graph.nbytes / max(self._sizes[0], 1))
            self._keeps = blocks * self._size * self._largest <= self._left
        if self._keeps:
            self._left -= graph.nbytes
            self._kept[block, stream] = _Block(values, inputs)
        return self._keeps

    def pop(self, block: int, stream: int) -> _Block | None:
        """A kept graph, which is then the caller's; None if it was not kept."""
        return self._kept.pop((block, stream), None)

    def clear(self) -> None:
        """Drop all graphs."""
        self._kept.clear()
