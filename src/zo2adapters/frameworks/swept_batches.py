"""A data loader that yields batches with the model's output for them, computed for several batches in one sweep.

A trainer's loss as an objective of an engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import find_batch_size

from zo2adapters.models.called_forward import CalledForward
from zo2adapters.models.hf import HFBlockModel
from zo2core import Batch, Engine, Forward
from zo2core.errors import OptionError


class SweptBatches:
    """Yields the batches of a data loader; ``output`` has the model's output for the batch that was yielded last.

    All batches of a sweep, as many as fit in the memory for activations, are read before the first of them is yielded. So
    accelerate has to ask this loader, and not the wrapped one, whether the data has ended.
    """

    def __init__(
        self,
        loader: Any,
        replayer: Engine,
        forward: Forward,
        tensors: Callable[[Any], Batch],
        state: Any,
    ) -> None:
        self._loader = loader
        self._replayer = replayer
        self._forward = forward
        self._tensors = tensors
        self._state = state
        self.output: Any = None  # the model's output for the batch that was yielded last
        self.end_of_dataloader = False  # whether the batch that was yielded last is the loader's last one
        self.remainder = -1  # rows of an incomplete last batch that count; -1: all of them

    def __iter__(self) -> Iterator[Any]:
        source: Iterable[Any] = getattr(self._loader, "base_dataloader", self._loader)
        pending: deque[tuple[Any, bool]] = deque()  # batches that were read, and whether each is the last one

        def batches() -> Iterator[Batch]:
            for batch, is_last in _with_last(source):
                pending.append((batch, is_last))
                yield self._tensors(batch)

        self._state._add_dataloader(self)
        try:
            for outputs in self._replayer.forwards(batches(), self._forward):
                for self.output in outputs:
                    batch, self.end_of_dataloader = pending.popleft()
                    if self.end_of_dataloader:
                        self.remainder = _rows_that_count(self._loader, batch)
                    # A copy, because callers may change the output in place.
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
    """Number of rows in the last batch, as accelerate counts them to drop the losses of repeated rows."""
    whole = getattr(loader, "total_batch_size", None)
    if whole is None or getattr(getattr(loader, "batch_sampler", None), "drop_last", False):
        return -1
    if isinstance(loader.dataset, IterableDataset):
        rows = find_batch_size(last)  # type: ignore[no-untyped-call]
        return -1 if rows is None else int(rows) % int(whole)
    return len(loader.dataset) % int(whole)


def _with_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Each batch, and whether it is the last one."""
    previous: list[Any] = []
    for batch in batches:
        if previous:
            yield previous.pop(), False
        previous.append(batch)
    for batch in previous:
        yield batch, True


class TrainerLoss(CalledForward):
    """A trainer's ``compute_loss`` as an ``Objective``."""

    def __init__(self, model: HFBlockModel, loss: Callable[[Any, dict[str, Any]], torch.Tensor], *, adds_up: bool) -> None:
        super().__init__(model, loss)
        self._adds_up = adds_up

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """Leave the batch whole. See the contract."""
        if rows is not None:
            raise OptionError(
                "micro_batch_size",
                found=f"{rows}, with a loss that the trainer computes",
                expected="None",
                remedy="lower per_device_train_batch_size and raise gradient_accumulation_steps",
            )
        return [batch]

    def loss(self, outputs: Sequence[torch.Tensor], micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Join the losses of a step's batches, in float64 if there are several. See the contract."""
        if len(outputs) == 1:
            return outputs[0]
        summed = torch.stack([loss.double() for loss in outputs]).sum()
        return (summed if self._adds_up else summed / len(outputs)).to(outputs[0].dtype)
