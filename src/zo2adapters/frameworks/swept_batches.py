"""A data loader whose batches have been through the model: as many a sweep as activations may take memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import find_batch_size

from zo2core import Batch, Forward, Runner


class SweptBatches:
    """Gives a data loader's batches one by one, each with what the model's sweep made of it in ``output``.

    It reads ahead: a sweep's batches are taken from the loader before the first of them is given. So it is this loader that
    accelerate has to ask where the data ends, not the one that it reads from.

    Args:
        loader: The data loader, whose other attributes this one has, too.
        replayer: What runs the sweeps.
        forward: What ends in the output.
        tensors: What of a batch the forward takes.
        state: Accelerate's ``GradientState``.
    """

    def __init__(
        self,
        loader: Any,
        replayer: Runner,
        forward: Forward,
        tensors: Callable[[Any], Batch],
        state: Any,
    ) -> None:
        self._loader = loader
        self._replayer = replayer
        self._forward = forward
        self._tensors = tensors
        self._state = state
        self.output: Any = None  # of the batch that was given last
        self.end_of_dataloader = False  # whether the batch that was given last is the loader's last one
        self.remainder = -1  # rows of an incomplete last batch that count; -1: all of them

    def __iter__(self) -> Iterator[Any]:
        source: Iterable[Any] = getattr(self._loader, "base_dataloader", self._loader)
        taken: deque[tuple[Any, bool]] = deque()

        def batches() -> Iterator[Batch]:
            for batch, is_last in _with_last(source):
                taken.append((batch, is_last))
                yield self._tensors(batch)

        self._state._add_dataloader(self)
        try:
            for outputs in self._replayer.forwards(batches(), self._forward):
                for self.output in outputs:
                    batch, self.end_of_dataloader = taken.popleft()
                    if self.end_of_dataloader:
                        self.remainder = _rows_that_count(self._loader, batch)
                    # What left a sweep belongs to whoever gets it, also to be changed in place.
                    self.output = tree_map_only(torch.Tensor, torch.Tensor.clone, self.output)
                    yield batch
        finally:
            self.end_of_dataloader = False
            self._state._remove_dataloader(self)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _rows_that_count(loader: Any, last: Any) -> int:
    """As accelerate counts the rows of a loader's last batch, by which losses that were repeated for a whole one are cut."""
    whole = getattr(loader, "total_batch_size", None)
    if whole is None or getattr(getattr(loader, "batch_sampler", None), "drop_last", False):
        return -1
    if isinstance(loader.dataset, IterableDataset):
        rows = find_batch_size(last)  # type: ignore[no-untyped-call]
        return -1 if rows is None else int(rows) % int(whole)
    return len(loader.dataset) % int(whole)


def _with_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last one."""
    before: list[Any] = []
    for batch in batches:
        if before:
            yield before.pop(), False
        before.append(batch)
    for batch in before:
        yield batch, True
