"""First-order steps of an adapter in Lightning's Trainer, with automatic optimization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zo2adapters.frameworks.streamed_lightning_module import StreamedLightningModule
from zo2adapters.models.hf import HFBlockModel
from zo2core import Batch, Engine, FirstOrder, Forward, MemoryPolicy


class BackpropLightningModule(StreamedLightningModule):
    """Trains an adapter by gradients, over a base that is only read.

    ``Trainer().fit(BackpropLightningModule(model, partial(torch.optim.AdamW, lr=2e-4)), loader)``, where ``model`` is what
    ``open_checkpoint(path, adapter=...)`` returned. The loader's batches are what the model's forward takes, or lists of
    such batches, whose gradients are accumulated in one pass over the blocks. Optimizer, schedule, gradient clipping, logs
    and checkpoints are Lightning's; losses, gradients and adapters are those of the whole model with peft, bit for bit.
    Leave precision, accelerator and strategy at one device in 32 bits, and open the model in the precision to compute in.

    Args:
        model: A model with an adapter.
        optimizer: Called with the adapter's parameters.
        schedule: Called with the optimizer; returns a schedule of torch's, which takes a step after each of the optimizer's.
            None: the learning rate is constant.
        forward: Ends in a number that can be differentiated; by default the model itself, which ends in its loss.
        device, memory, micro_batch_size: As for ``Engine``.

    Logs:
        ``train_loss`` at each step, ``val_loss`` after each validation: the mean over labelled tokens.

    Raises:
        MissingPackageError: as this is imported, if Lightning is not installed.
        ZO2Error: as ``Engine`` says.
    """

    def __init__(
        self,
        model: HFBlockModel,
        optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
        *,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        forward: Forward | None = None,
        device: str = "cpu",
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self._engine = Engine(model, FirstOrder(None), device=device, memory=memory, micro_batch_size=micro_batch_size)
        self._optimizer, self._schedule, self._forward = optimizer, schedule, forward
        # Names of modules have no dots.
        self.adapter = nn.ParameterDict({name.replace(".", "/"): value for name, value in self._engine.parameters.items()})

    @property
    def engine(self) -> Engine:
        """The engine that takes the gradients."""
        return self._engine

    def configure_callbacks(self) -> list[Any]:
        """Refuse gradient accumulation by Lightning.

        Raises:
            OptionError: if it is asked for.
        """
        self.require_whole_steps()
        return []

    def configure_optimizers(self) -> Any:
        """The optimizer and its schedule."""
        optimizer = self._optimizer(list(self.engine.parameters.values()))
        if self._schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self._schedule(optimizer), "interval": "step"}]

    def training_step(self, batch: Batch | Sequence[Batch], batch_idx: int) -> torch.Tensor:
        """The loss of a batch. Its gradients are taken here, in one pass, and handed out when Lightning asks for them."""
        parameters = list(self.engine.parameters.values())
        kept = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            loss = self.engine.gradients(batch, self._forward)
            gradients = [parameter.grad for parameter in parameters]
        finally:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient
        self.log("train_loss", loss, prog_bar=True)
        taken: Any = _Taken  # its apply is untyped
        differentiable: torch.Tensor = taken.apply(loss, gradients, *parameters)
        return differentiable


class _Taken(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, loss: float, gradients: list[torch.Tensor | None], *parameters: nn.Parameter) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.tensor(loss, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        [scale] = outer
        taken = [None if gradient is None else gradient * scale.to(gradient) for gradient in ctx.gradients]
        return None, None, *taken
