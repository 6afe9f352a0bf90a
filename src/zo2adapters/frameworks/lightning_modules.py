"""A Lightning module whose model is no ``nn.Module`` in memory, but streamed by an engine."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zo2adapters.frameworks.arguments import (
    Kind,
    LightningArguments,
    kind_of,
    require_trainable_base,
)
from zo2adapters.frameworks.saved_run import JOURNAL, read_journal
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_model import PeftBlockModel
from zo2adapters.optional_package import optional_package
from zo2adapters.tasks.option_tree import BOTH, Refusal, refuse
from zo2core import Batch, BlockUpdate, Engine, Forward, Journal
from zo2core.errors import CheckpointError, JournalError, OptionError, ZO2Warning
from zo2core.optimizers.registry import OPTIMIZERS

lightning = optional_package("lightning.pytorch", install="zo2core[lightning]")
CombinedLoader: Any = optional_package(
    "lightning.pytorch.utilities", install="zo2core[lightning]"
).CombinedLoader

_VERSION = "journal.version"  # key of the number of steps in a checkpoint
# arguments of which a made optimizer has its own
_OF_OPTIMIZERS = {"weight_decay", "betas", "momentum", "state_bits", "delayed_update"}
_STATE = "full_backprop_engine"  # key of the engine's state in a checkpoint
_CLIPPING = (
    "leave it out: LightningArguments(max_grad_norm=...) clips the gradients of all parameters, "
    "and clip_grad=... those that zeroth-order steps project"
)


class StreamedLightningModule(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Trains a model in Lightning's loop:
    ``Trainer().fit(StreamedLightningModule(open_checkpoint("model"), LightningArguments(lr=1e-4)),
    loader)``.

    The loader's batches are what the model's forward takes, or lists of such batches, which are one
    step in one pass over the blocks. The method of the arguments says what is trained, and how. All
    parameters are trained by manual optimization: a training step is ``engine.step(batch)``, bit
    for bit. With a first-order method the adapter of the model is trained by automatic
    optimization: losses, gradients and adapters are those of the whole model with peft, bit for
    bit, and gradient clipping is Lightning's. Lightning's precision, accelerator and strategy apply
    to weights that are whole in memory: leave them at one CPU or GPU in 32 bits, and open the model
    in the precision to compute in. Lightning's checkpoints have the run's journal after
    zeroth-order steps, weights and optimizer states where all parameters are trained by gradients,
    and else the adapter; ``export`` writes the model.

    Args:
        model: Model from ``open_checkpoint``; with ``lora`` one with an adapter, and with
            ``lora+lomo`` one whose ``Adapter`` has ``trains_base=True``.
        arguments: The method and its options.
        lr_lambda: Maps a 0-based step to a factor of the learning rate; None: constant.
        optimizer: With a first-order method: what takes the place of the method's optimizer. A
            ``BlockUpdate`` for all parameters; for an adapter a function of its parameters, such as
            ``partial(torch.optim.RAdam, lr=1e-4)``.
        forward: With an adapter: ends in a number that can be differentiated; by default the model
            itself, which ends in its loss.

    Logs:
        ``train_loss`` at each step, ``val_loss`` after each validation: the mean over labelled
        tokens. A subclass whose ``validation_step`` does not call this one's logs its own
        evaluation, and no ``val_loss``.

    Raises:
        MissingPackageError: on import, if Lightning is not installed.
        OptionError: if the model has an adapter that the method does not train, or an option has no
            effect with the method.
        ZO2Error: as ``Engine`` says, at the first step.
    """

    def __init__(
        self,
        model: HFBlockModel,
        arguments: LightningArguments,
        *,
        lr_lambda: Callable[[int], float] | None = None,
        optimizer: BlockUpdate
        | Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
        | None = None,
        forward: Forward | None = None,
    ) -> None:
        super().__init__()
        self.block_model = model
        self.arguments = arguments
        self._lr_lambda = lr_lambda
        self._optimizer = optimizer
        self._forward = forward
        self._journal = Journal()
        self._engine: Engine | None = None
        self._to_evaluate: list[Batch] = []
        has_adapter = isinstance(model, PeftBlockModel)
        kind = kind_of(arguments, has_adapter=has_adapter)
        require_trainable_base(model, kind)
        self._kind = kind
        self.automatic_optimization = kind is Kind.ADAPTER
        unused = "no such option: zeroth-order steps have an estimator"
        refuse(
            Refusal(
                kind is Kind.ZEROTH_ORDER and optimizer is not None, "optimizer", "one", unused
            ),
            Refusal(
                kind.trains_all and not isinstance(optimizer, BlockUpdate | None),
                "optimizer",
                f"a {type(optimizer).__name__}",
                "a BlockUpdate, since all parameters are trained",
                "pass LOMO(), or TorchOptimizer(...)",
            ),
            Refusal(
                kind is Kind.BOTH and optimizer is not None,
                "optimizer",
                "one",
                f"none with {BOTH}: AdamW trains the adapter, and LOMO the base",
                "leave it out, or take steps of Engine",
            ),
            Refusal(
                kind is Kind.ADAPTER and arguments.max_grad_norm is not None,
                "max_grad_norm",
                str(arguments.max_grad_norm),
                "none with an adapter, whose gradients Lightning clips",
                "pass Trainer(gradient_clip_val=...)",
            ),
            *(
                Refusal(
                    optimizer is not None and getattr(arguments, field.name) != field.default,
                    field.name,
                    str(getattr(arguments, field.name)),
                    "none beside an optimizer, which has options of its own",
                    "give it to the optimizer",
                )
                for field in fields(arguments)
                if field.name in _OF_OPTIMIZERS
            ),
            Refusal(
                kind is not Kind.ADAPTER and forward is not None,
                "forward",
                "one",
                "an adapter and a first-order method",
                "leave it out",
            ),
        )
        if kind is Kind.ADAPTER:
            # Names of modules have no dots.
            parameters = self.engine.parameters.items()
            self.adapter = nn.ParameterDict(
                {name.replace(".", "/"): value for name, value in parameters}
            )

    @property
    def engine(self) -> Engine:
        """The engine that runs the model, at the present weights."""
        if self._engine is None:
            self._engine = self._open()
        return self._engine

    def _open(self) -> Engine:
        arguments = self.arguments
        if self._kind is Kind.ZEROTH_ORDER:
            return arguments.open_zeroth_order(
                self.block_model,
                self._journal,
                lr=self._present_lr,
                weight_decay=arguments.weight_decay,
                seed=arguments.seed,
                device=arguments.device,
            )
        return arguments.open_first_order(
            self.block_model,
            self._block_update() if self._kind.trains_all else None,
            lr=self._present_lr,
            clip=arguments.max_grad_norm,
            clip_per=arguments.max_grad_norm_per,
            device=arguments.device,
        )

    def _block_update(self) -> BlockUpdate:
        """The optimizer of all parameters."""
        arguments = self.arguments
        if isinstance(self._optimizer, BlockUpdate):
            return self._optimizer
        return arguments.block_update(
            weight_decay=arguments.weight_decay,
            base_lr=self._present_base_lr if self._kind is Kind.BOTH else None,
            seed=arguments.seed,
        )

    def _present_lr(self, step: int) -> float:
        return float(self.optimizers().param_groups[0]["lr"])

    def _present_base_lr(self, step: int) -> float:
        return float(self.optimizers().param_groups[1]["lr"])

    def configure_optimizers(self) -> Any:
        """Create the optimizer and its schedule; where the engine takes the steps, one whose
        learning rate the schedule sets.
        """
        optimizer = self._made_optimizer()
        if self._lr_lambda is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_lambda)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def _made_optimizer(self) -> torch.optim.Optimizer:
        arguments = self.arguments
        if self._kind is not Kind.ADAPTER:
            rates = [arguments.rate]
            if arguments.base_lr is not None:
                rates.append(arguments.base_lr)
            return torch.optim.SGD(
                [{"params": [torch.zeros(0, requires_grad=True)], "lr": rate} for rate in rates]
            )
        parameters = list(self.engine.parameters.values())
        if self._optimizer is not None:
            make: Any = self._optimizer
            made: torch.optim.Optimizer = make(parameters)
            return made
        assert arguments.optimizer is not None, "else steps are zeroth-order"
        kind = OPTIMIZERS[arguments.optimizer].of_adapter
        assert kind is not None, "kind_of has refused other methods"
        return kind(
            parameters,
            lr=arguments.rate,
            weight_decay=arguments.weight_decay,
            **arguments.optimizer_options,
        )

    def training_step(self, batch: Batch | Sequence[Batch], batch_idx: int) -> torch.Tensor:
        """Take a step.

        The gradients of an adapter are taken here, in one pass, and handed out when Lightning asks
        for them.
        """
        if self._kind is Kind.ADAPTER:
            return self._loss_with_gradients(batch)
        result = self.engine.step(batch)
        self.optimizers().step()  # Lightning counts steps by it
        schedule = self.lr_schedulers()
        if schedule is not None:
            schedule.step()
        self.log("train_loss", result.loss, prog_bar=True)
        return torch.tensor(result.loss)

    def _loss_with_gradients(self, batch: Batch | Sequence[Batch]) -> torch.Tensor:
        parameters = list(self.engine.parameters.values())
        for parameter in parameters:
            parameter.grad = None
        loss = self.engine.gradients(batch, self._forward)
        gradients = [parameter.grad for parameter in parameters]
        self.log("train_loss", loss, prog_bar=True)
        differentiable_step: Any = _StepWithGradients  # its apply is untyped
        differentiable: torch.Tensor = differentiable_step.apply(loss, gradients, *parameters)
        return differentiable

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint what the engine has: the journal and its number of steps, or weights,
        optimizer states and the number of steps.
        """
        if self._kind.trains_all:
            checkpoint[_STATE] = self.engine.state_dict()
        if self._kind is Kind.ZEROTH_ORDER:
            checkpoint[JOURNAL] = self.engine.journal.excerpt(0).decode()
            # global_step counts from 0 again when another Trainer goes on
            checkpoint[_VERSION] = self.engine.version

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from what a checkpoint has of the engine.

        Raises:
            JournalError: if the journal is missing or damaged, or has another number of steps than
                was saved.
            CheckpointError: if the state is missing, or of another model or optimizer.
        """
        remedy = "pass a checkpoint that this module saved"
        if self._kind.trains_all:
            if _STATE not in checkpoint:
                found = "no weights and optimizer states"
                expected = "those of a run of all parameters"
                raise CheckpointError("the checkpoint", found, expected, remedy)
            self.engine.load_state_dict(checkpoint[_STATE])
        if self._kind is Kind.ZEROTH_ORDER:
            if JOURNAL not in checkpoint:
                expected = "the journal of a zeroth-order run"
                raise JournalError("the checkpoint", "no journal", expected, remedy)
            self._load_journal(checkpoint)

    def _load_journal(self, checkpoint: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / JOURNAL).write_text(checkpoint[JOURNAL], encoding="utf-8")
            version = checkpoint.get(_VERSION, checkpoint["global_step"])
            journal = read_journal(
                Path(directory) / JOURNAL, int(version), name=f"{JOURNAL} in the checkpoint"
            )
        if self._engine is not None:
            self._engine.close()
        self._engine, self._journal = None, journal

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
        is_clipped = is_fitting and not self.automatic_optimization
        clipping = trainer.gradient_clip_val or None if is_clipped else None
        for name, found, expected, remedy in (
            ("precision", trainer.precision, "32-true", precision),
            ("devices", trainer.world_size, "1", precision),
            ("accumulate_grad_batches", accumulated, "1", lists),
            ("gradient_clip_val", clipping, "None", _CLIPPING),
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
