"""The loss that a trainer computes, as an objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zo2adapters.models.called_forward import CalledForward
from zo2adapters.models.hf import HFBlockModel
from zo2core import Batch, OptionError


class TrainerLoss(CalledForward):
    """A function from the model and a batch to a loss, 0-d. See ``Objective``.

    Args:
        model: The model.
        loss: Takes the model and a batch, as a trainer's ``compute_loss``.
        adds_up: Whether the losses of a step's batches are shares of one mean, to be added; else the step's is their mean.
    """

    def __init__(self, model: HFBlockModel, loss: Callable[[Any, dict[str, Any]], torch.Tensor], *, adds_up: bool) -> None:
        super().__init__(model, loss)
        self._adds_up = adds_up

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """Leave the batch whole. See the contract.

        Raises:
            OptionError: if it is to be cut: only its author knows how.
        """
        if rows is not None:
            raise OptionError(
                "micro_batch_size",
                found=f"{rows}, beside a loss that the trainer computes",
                expected="none",
                remedy="lower per_device_train_batch_size and raise gradient_accumulation_steps",
            )
        return [batch]

    def loss(self, outputs: Sequence[torch.Tensor], micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Join the losses of a step's batches, in float64 if there are several. See the contract."""
        if len(outputs) == 1:
            return outputs[0]
        summed = torch.stack([loss.double() for loss in outputs]).sum()
        return (summed if self._adds_up else summed / len(outputs)).to(outputs[0].dtype)
