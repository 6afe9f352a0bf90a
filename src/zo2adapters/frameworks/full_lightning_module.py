"""First-order steps of all parameters in Lightning: a module with manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zo2adapters.frameworks.manual_steps_module import ManualStepsModule
from zo2adapters.models.hf import HFBlockModel
from zo2core import BlockUpdate, Engine, FirstOrder, LossScaling, MemoryPolicy
from zo2core.errors import CheckpointError

_STATE = "full_backprop_engine"  # key of the engine's state in a checkpoint


class FullBackpropLightningModule(ManualStepsModule):
    """Trains all parameters by gradients, each block updated as soon as its gradients are there.

    ``Trainer().fit(FullBackpropLightningModule(open_checkpoint("model"), LOMO(), lr=1e-3), loader)``. The loader's batches
    are what the model's forward takes. A training step is ``engine.step(batch)``, bit for bit. Lightning's precision,
    accelerator and strategy apply to other models: leave them at one device in 32 bits, and open the model in the precision
    to compute in. Lightning's checkpoints have weights and optimizer states; ``export`` writes the model.

    Args:
        model: Model from ``open_checkpoint``, without an adapter.
        update: The optimizer: ``LOMO()``, ``TorchOptimizer(...)``, ``BAdam(...)``.
        lr: Peak learning rate.
        lr_lambda: Maps a 0-based step to a factor of ``lr``; None: constant.
        clip: Largest 2-norm of all gradients together; None does not clip.
        clip_value: Largest absolute value of a gradient's elements; None does not clip them.
        scaling: How the loss is scaled; None does not scale it.
        device, memory, micro_batch_size: As for ``Engine``.

    Logs:
        ``train_loss`` at each step, ``val_loss`` after each validation: the mean over labelled tokens.

    Raises:
        MissingPackageError: on import, if Lightning is not installed.
        ZO2Error: as ``Engine`` says.
    """

    clipping_remedy = "leave it out, and pass clip=... to the module"

    def __init__(
        self,
        model: HFBlockModel,
        update: BlockUpdate,
        *,
        lr: float,
        lr_lambda: Callable[[int], float] | None = None,
        clip: float | None = None,
        clip_value: float | None = None,
        scaling: LossScaling | None = None,
        device: str = "cpu",
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__(lr, lr_lambda)
        self._engine = Engine(
            model,
            FirstOrder(update, lr=self._present_lr, clip=clip, clip_value=clip_value, scaling=scaling),
            device=device,
            memory=memory,
            micro_batch_size=micro_batch_size,
        )

    @property
    def engine(self) -> Engine:
        """The engine that takes the steps, with the present weights."""
        return self._engine

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add weights, optimizer states and the number of steps to a checkpoint."""
        checkpoint[_STATE] = self.engine.state_dict()

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint.

        Raises:
            CheckpointError: if it is missing, or of another model or optimizer.
        """
        if _STATE not in checkpoint:
            raise CheckpointError(
                "the checkpoint",
                found="no weights and optimizer states",
                expected="those of a run of all parameters",
                remedy="pass a checkpoint that this module saved",
            )
        self.engine.load_state_dict(checkpoint[_STATE])
