"""A trainer's loss as an objective of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zo2adapters.models.called_forward import CalledForward
from zo2adapters.models.hf import HFBlockModel
from zo2core import Batch
from zo2core.errors import OptionError


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
