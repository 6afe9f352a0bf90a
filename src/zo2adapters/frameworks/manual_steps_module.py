"""Lightning modules whose steps an engine takes: with manual optimization, and a learning rate that Lightning sets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from zo2adapters.frameworks.streamed_lightning_module import StreamedLightningModule
from zo2core import Batch, Engine
from zo2core.errors import OptionError


class ManualStepsModule(StreamedLightningModule):
    """A module whose training step is a step of its engine."""

    clipping_remedy: str  # what to do in place of Trainer(gradient_clip_val)

    def __init__(self, lr: float, lr_lambda: Callable[[int], float] | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._lr, self._lr_lambda = lr, lr_lambda

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """Engine that takes the steps, with the present weights."""

    def configure_callbacks(self) -> list[Any]:
        """Refuse options of Lightning's Trainer that need automatic optimization.

        This hook runs before Lightning's own check, whose remedy is automatic optimization, which is not supported here.
        """
        self.require_whole_steps()
        clipping = self.trainer.gradient_clip_val or None
        if self.trainer.state.fn == "fit" and clipping is not None:
            raise OptionError(
                "Trainer(gradient_clip_val)", found=str(clipping), expected="None", remedy=self.clipping_remedy
            )
        return []

    def configure_optimizers(self) -> Any:
        """Create the optimizer whose learning rate the schedule sets. The engine takes the steps."""
        optimizer = torch.optim.SGD([torch.zeros(0, requires_grad=True)], lr=self._lr)
        if self._lr_lambda is None:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_lambda)]

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Take a step."""
        result = self.engine.step(batch)
        self.optimizers().step()  # Lightning counts steps by it
        schedule = self.lr_schedulers()
        if schedule is not None:
            schedule.step()
        self.log("train_loss", result.loss, prog_bar=True)
        return torch.tensor(result.loss)

    def _present_lr(self, step: int) -> float:
        return float(self.optimizers().param_groups[0]["lr"])
