"""Lightning modules whose model is no ``nn.Module`` in memory, but streamed by an engine.

All share evaluation in common sweeps, and refusals of what has no effect. ``ZOLightningModule`` and
``FullBackpropLightningModule`` have manual optimization, at a learning rate that Lightning sets;
``BackpropLightningModule`` leaves the optimizer of an adapter to Lightning.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zo2adapters.frameworks.arguments import ZOArguments
from zo2adapters.frameworks.saved_run import JOURNAL, read_journal
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.optional_package import optional_package
from zo2core import (
    Batch,
    BlockUpdate,
    Engine,
    FirstOrder,
    Forward,
    Journal,
    LossScaling,
    MemoryPolicy,
)
from zo2core.errors import CheckpointError, JournalError, OptionError, ZO2Warning

lightning = optional_package("lightning.pytorch", install="zo2core[lightning]")
CombinedLoader: Any = optional_package(
    "lightning.pytorch.utilities", install="zo2core[lightning]"
).CombinedLoader

_VERSION = "journal.version"  # key of the number of steps in a checkpoint
_STATE = "full_backprop_engine"  # key of the engine's state in a checkpoint


class StreamedLightningModule(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A module whose model is no ``nn.Module`` in memory, but streamed by an engine."""

    # what to do in place of Trainer(gradient_clip_val); None: it is supported
    clipping_remedy: str | None = None

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        super().__init__()
        self._open_engine = open_engine
        self._engine: Engine | None = None
        self._to_evaluate: list[Batch] = []

    @property
    def engine(self) -> Engine:
        """The engine that runs the model, at the present weights."""
        if self._engine is None:
            self._engine = self._open_engine()
        return self._engine

    def configure_callbacks(self) -> list[Any]:
        """Refuse options of Lightning's Trainer that concern a model that is whole in memory.

        This hook runs before Lightning's own check of manual optimization, whose remedy is
        automatic optimization.
        """
        trainer = self.trainer
        is_fitting = self.trainer.state.fn == "fit"
        precision = (
            "leave it out; open_checkpoint(precision=...) says in which precision the model runs"
        )
        lists = (
            "leave it out, and have the loader give lists of batches: a step takes all batches of "
            "a list at once"
        )
        accumulated = trainer.accumulate_grad_batches if is_fitting else 1
        clipping = (
            trainer.gradient_clip_val or None if is_fitting and self.clipping_remedy else None
        )
        for name, found, expected, remedy in (
            ("precision", trainer.precision, "32-true", precision),
            ("devices", trainer.world_size, "1", precision),
            ("accumulate_grad_batches", accumulated, "1", lists),
            ("gradient_clip_val", clipping, "None", str(self.clipping_remedy)),
        ):
            if str(found) != expected:
                raise OptionError(f"Trainer({name})", str(found), expected, remedy)
        return []

    def on_train_start(self) -> None:
        """Warn if a resumed epoch repeats batches, as it does with a data loader that cannot
        restore its position.
        """
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        is_in_epoch = (
            self.trainer.fit_loop.restarting
            and progress.current.ready > 0
            and not progress.is_last_batch
        )
        loaders = CombinedLoader(self.trainer.train_dataloader, "sequential").flattened
        if is_in_epoch and not all(hasattr(loader, "load_state_dict") for loader in loaders):
            warnings.warn(
                f"the checkpoint was saved after {progress.current.ready} batches of an epoch, "
                "and the data loader has no "
                "load_state_dict, so it gives the epoch's first batches again: the steps are not "
                "those of an uninterrupted "
                "run. Resume from a checkpoint at the end of an epoch, or train with a loader "
                "that has state_dict and "
                "load_state_dict, such as torchdata's StatefulDataLoader",
                ZO2Warning,
                stacklevel=2,
            )

    def on_validation_epoch_start(self) -> None:
        """Forget the batches of a validation that was broken off."""
        self._to_evaluate = []

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Keep the batch: all of them share sweeps at the end.

        A subclass that evaluates by itself need not call it.
        """
        self._to_evaluate.append(batch)

    def on_validation_epoch_end(self) -> None:
        """Evaluate the batches that were kept, as many a sweep as activations may take memory, and
        log ``val_loss``.
        """
        batches = self._to_evaluate
        self._to_evaluate = []
        if not batches:
            return
        self.log("val_loss", self.engine.evaluate(batches).loss, prog_bar=True)

    def export(self, directory: Path | str) -> None:
        """Write the model, as ``from_pretrained`` loads it. See ``Engine.export``."""
        self.engine.export(directory)


class ManualStepsModule(StreamedLightningModule):
    """A module whose training step is a step of its engine."""

    def __init__(
        self, open_engine: Callable[[], Engine], lr: float, lr_lambda: Callable[[int], float] | None
    ) -> None:
        super().__init__(open_engine)
        self.automatic_optimization = False
        self._lr, self._lr_lambda = lr, lr_lambda

    def configure_optimizers(self) -> Any:
        """Create the optimizer whose learning rate the schedule sets.

        The engine takes the steps.
        """
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


class ZOLightningModule(ManualStepsModule):
    """Trains a model in Lightning's loop:
    ``Trainer().fit(ZOLightningModule(open_checkpoint("model"), lr=1e-6), loader)``.

    The loader's batches are what the model's forward takes. A training step is
    ``engine.step(batch)``, bit for bit. Lightning's precision, accelerator and strategy apply to
    weights that are whole in memory: leave them at one CPU or GPU in 32 bits, and open the model in
    the precision to compute in. Lightning's checkpoints have the run's journal instead of weights,
    a few hundred bytes per step; ``export`` writes the model.

    Args:
        model: Model from ``open_checkpoint``.
        lr: Peak learning rate.
        lr_lambda: Maps a 0-based step to a factor of ``lr``; None: constant.
        weight_decay: Weight decay of MeZO's update.
        seed: Seed of the run's directions.
        zo: Other arguments of the zeroth-order run; ``device`` is the CPU by default.

    Logs:
        ``train_loss`` at each step, ``val_loss`` after each validation: the mean over labelled
        tokens. A subclass whose ``validation_step`` does not call this one's logs its own
        evaluation, and no ``val_loss``.

    Raises:
        MissingPackageError: on import, if Lightning is not installed.
        ZO2Error: as ``Engine`` says, at the first step.
    """

    clipping_remedy = (
        "leave it out: there is no gradient; Clipped(...) in ZOArguments clips projected gradients"
    )

    def __init__(
        self,
        model: HFBlockModel,
        *,
        lr: float,
        lr_lambda: Callable[[int], float] | None = None,
        weight_decay: float = 0.0,
        seed: int = 0,
        zo: ZOArguments | None = None,
    ) -> None:
        self.zo = ZOArguments() if zo is None else zo
        super().__init__(
            lambda: self.zo.open_engine(
                model,
                self._journal,
                lr=self._present_lr,
                weight_decay=weight_decay,
                seed=seed,
                device="cpu",
            ),
            lr,
            lr_lambda,
        )
        self._journal = Journal()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the journal and its number of steps to a checkpoint."""
        checkpoint[JOURNAL] = self.engine.journal.excerpt(0).decode()
        # global_step counts from 0 again when another Trainer goes on
        checkpoint[_VERSION] = self.engine.version

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from the journal in a checkpoint.

        Raises:
            JournalError: if it is missing or damaged, or has another number of steps than was
                saved.
        """
        if JOURNAL not in checkpoint:
            expected = "the journal of a zeroth-order run"
            raise JournalError(
                "the checkpoint", "no journal", expected, "pass a checkpoint that this module saved"
            )
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / JOURNAL).write_text(checkpoint[JOURNAL], encoding="utf-8")
            version = checkpoint.get(_VERSION, checkpoint["global_step"])
            journal = read_journal(
                Path(directory) / JOURNAL, int(version), name=f"{JOURNAL} in the checkpoint"
            )
        if self._engine is not None:
            self._engine.close()
        self._engine, self._journal = None, journal


class FullBackpropLightningModule(ManualStepsModule):
    """Trains all parameters by gradients, each block updated as soon as its gradients are there.

    ``Trainer().fit(FullBackpropLightningModule(open_checkpoint("model"), LOMO(), lr=1e-3),
    loader)``. The loader's batches are what the model's forward takes. A training step is
    ``engine.step(batch)``, bit for bit. Lightning's precision, accelerator and strategy apply to
    other models: leave them at one device in 32 bits, and open the model in the precision to
    compute in. Lightning's checkpoints have weights and optimizer states; ``export`` writes the
    model.

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
        ``train_loss`` at each step, ``val_loss`` after each validation: the mean over labelled
        tokens.

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
        memory: MemoryPolicy = MemoryPolicy(),
        micro_batch_size: int | None = None,
    ) -> None:
        method = FirstOrder(
            update, lr=self._present_lr, clip=clip, clip_value=clip_value, scaling=scaling
        )
        engine = Engine(
            model, method, device=device, memory=memory, micro_batch_size=micro_batch_size
        )
        super().__init__(lambda: engine, lr, lr_lambda)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add weights, optimizer states and the number of steps to a checkpoint."""
        checkpoint[_STATE] = self.engine.state_dict()

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint.

        Raises:
            CheckpointError: if it is missing, or of another model or optimizer.
        """
        if _STATE not in checkpoint:
            found, expected = "no weights and optimizer states", "those of a run of all parameters"
            raise CheckpointError(
                "the checkpoint", found, expected, "pass a checkpoint that this module saved"
            )
        self.engine.load_state_dict(checkpoint[_STATE])


class BackpropLightningModule(StreamedLightningModule):
    """Trains an adapter by gradients, over a base that is only read.

    ``Trainer().fit(BackpropLightningModule(model, partial(torch.optim.AdamW, lr=2e-4)), loader)``,
    where ``model`` is what ``open_checkpoint(path, adapter=...)`` returned. The loader's batches
    are what the model's forward takes, or lists of such batches, whose gradients are accumulated in
    one pass over the blocks. Optimizer, schedule, gradient clipping, logs and checkpoints are
    Lightning's; losses, gradients and adapters are those of the whole model with peft, bit for bit.
    Leave precision, accelerator and strategy at one device in 32 bits, and open the model in the
    precision to compute in.

    Args:
        model: A model with an adapter.
        optimizer: Called with the adapter's parameters.
        schedule: Called with the optimizer; returns a schedule of torch's, which takes a step after
            each of the optimizer's. None: the learning rate is constant.
        forward: Ends in a number that can be differentiated; by default the model itself, which
            ends in its loss.
        device, memory, micro_batch_size: As for ``Engine``.

    Logs:
        ``train_loss`` at each step, ``val_loss`` after each validation: the mean over labelled
        tokens.

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
        memory: MemoryPolicy = MemoryPolicy(),
        micro_batch_size: int | None = None,
    ) -> None:
        engine = Engine(
            model, FirstOrder(None), device=device, memory=memory, micro_batch_size=micro_batch_size
        )
        super().__init__(lambda: engine)
        self._optimizer = optimizer
        self._schedule = schedule
        self._forward = forward
        # Names of modules have no dots.
        self.adapter = nn.ParameterDict(
            {name.replace(".", "/"): value for name, value in engine.parameters.items()}
        )

    def configure_optimizers(self) -> Any:
        """The optimizer and its schedule."""
        optimizer = self._optimizer(list(self.engine.parameters.values()))
        if self._schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self._schedule(optimizer), "interval": "step"}]

    def training_step(self, batch: Batch | Sequence[Batch], batch_idx: int) -> torch.Tensor:
        """The loss of a batch.

        Its gradients are taken here, in one pass, and handed out when Lightning asks for them.
        """
        parameters = list(self.engine.parameters.values())
        for parameter in parameters:
            parameter.grad = None
        loss = self.engine.gradients(batch, self._forward)
        gradients = [parameter.grad for parameter in parameters]
        self.log("train_loss", loss, prog_bar=True)
        differentiable_step: Any = _StepWithGradients  # its apply is untyped
        differentiable: torch.Tensor = differentiable_step.apply(loss, gradients, *parameters)
        return differentiable


class _StepWithGradients(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(
        ctx: Any, loss: float, gradients: list[torch.Tensor | None], *parameters: nn.Parameter
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.tensor(loss, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        [scale] = outer
        scaled = [
            None if gradient is None else gradient * scale.to(gradient)
            for gradient in ctx.gradients
        ]
        return None, None, *scaled
