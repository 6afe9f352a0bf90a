"""Decides which blocks keep their graphs from forward to backward pass: as many of the last ones as fit in memory."""

from __future__ import annotations

from collections.abc import Sequence

from zo2core.sweep.block_graph import BlockGraph


class GraphRoom:
    """The memory for the graphs of a sweep's last blocks, for all of its streams."""

    def __init__(self, nbytes: int, sizes: Sequence[int]) -> None:
        self._left = nbytes
        self._sizes = sizes
        self._largest = 0.0  # bytes of a block's graph for each unit of size, the most so far

    def has_room(self, stream: int, blocks: int) -> bool:
        """Whether the graph of a forward that runs next fits beside those of all later blocks, for all streams."""
        sizes = (blocks - 1) * sum(self._sizes) + sum(self._sizes[stream:])
        return sizes * self._largest <= self._left

    def take(self, graph: BlockGraph, stream: int, blocks: int) -> None:
        """Take the memory of a graph whose forward ran, or drop its activations if it proves too large."""
        nbytes = graph.memory()
        self._largest = max(self._largest, nbytes / max(self._sizes[stream], 1))
        if self.has_room(stream, blocks):
            self._left -= nbytes
        else:
            graph.drop()
