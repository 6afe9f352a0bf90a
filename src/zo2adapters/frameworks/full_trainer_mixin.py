"""First-order training of all parameters in ``transformers.Trainer`` and trainers derived from it.

The trainer keeps its loop, data, schedule, logs, evaluation, callbacks and checkpoints. Forward, backward and update run in
``Engine``, which updates each block as soon as its gradients are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, Trainer

from zo2adapters.frameworks.streamed_trainer import EngineStepsMixin
from zo2adapters.frameworks.supported import FIRST_ORDER
from zo2adapters.models.hf import HFBlockModel
from zo2core import LOMO, AdaLOMO, Batch, BlockUpdate, Engine, FirstOrder, MemoryPolicy, TorchOptimizer
from zo2core.checkpoint import Snapshot, Snapshots
from zo2core.errors import OptionError

_SUPPORTED: Mapping[str, str | None] = {
    **FIRST_ORDER,
    "optimizer_cls_and_kwargs": FIRST_ORDER["optimizers"],
    "peft_config": "leave it out: all parameters are trained; BackpropTrainerMixin trains an adapter",
}


class FullBackpropTrainerMixin(EngineStepsMixin):
    """Trains all parameters by gradients: ``class FullTrainer(FullBackpropTrainerMixin, Trainer): pass``.

    ``optim`` names the optimizer, as for any trainer: ``lomo``, ``adalomo``, or one of torch's whose state belongs to single
    parameters. Losses and weights are, bit for bit, those of the trainer with the whole model. With gradient accumulation
    all batches of a step run through a block before the next block comes. Modules run in evaluation mode, without dropout.
    ``max_grad_norm``, which trainers set to 1, takes a second backward pass; 0 turns it off. Checkpoints have the model, the
    state from which training goes on, and the trainer's own files.

    Args:
        model: A model directory, a hub id, or a model from ``open_checkpoint``. ``bf16=True`` or ``fp16=True`` in ``args``
            opens it in mixed precision.
        args: The trainer's arguments.
        memory: How much memory the process may use.
        options: Other options of the trainer, by name.

    Raises:
        OptionError: if an argument is not supported.
        ZO2Error: as ``open_checkpoint`` and ``Engine`` say.
    """

    _operations = 8  # two forward passes, and the gradients of activations and weights

    def __init__(
        self,
        model: HFBlockModel | Path | str,
        args: Any = None,
        *,
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        **options: Any,
    ) -> None:
        self._memory = memory
        self._engine: Engine | None = None
        self._grad_norm: float | None = None
        super().__init__(model, args, options, supported=_SUPPORTED)

    @property
    def engine(self) -> Engine:
        """Engine that takes the steps, with the present weights."""
        if self._engine is None:
            args = self.args
            self._engine = Engine(
                self.block_model,
                FirstOrder(self._update(), lr=self._present_lr, clip=args.max_grad_norm or None),
                device=str(args.device),
                memory=self._memory,
            )
        return self._engine

    def _update(self) -> BlockUpdate:
        """The optimizer that the arguments name."""
        args = self.args
        if args.optim == "lomo":
            return LOMO(weight_decay=args.weight_decay)
        if args.optim == "adalomo":
            return AdaLOMO(weight_decay=args.weight_decay)
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
        decaying = frozenset(self.get_decay_parameter_names(self.model))

        def make(named: list[tuple[str, nn.Parameter]]) -> Any:
            groups = (
                {"params": [value for name, value in named if name in decaying], "weight_decay": args.weight_decay},
                {"params": [value for name, value in named if name not in decaying], "weight_decay": 0.0},
            )
            return kind([group for group in groups if group["params"]], **options)

        return TorchOptimizer(make, by_name=True)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that decay, as the trainer chooses them from the whole model."""
        with torch.device("meta"):
            whole = type(self.block_model.skeleton)(AutoConfig.for_model(**self.block_model.config.to_dict()))
        names: list[str] = Trainer.get_decay_parameter_names(self, whole)
        return names

    def _take_step(self, batches: list[Batch], num_items: Any) -> float:
        """Take a step. See the base class."""
        result = self.engine.step(batches, self._trainer_loss(num_items))
        assert result.grad_norm is not None, "a first-order step has one"
        self._grad_norm = result.grad_norm
        return result.loss

    @contextmanager
    def _reference(self) -> Iterator[Engine]:
        """The base checkpoint, before the first step."""
        if self.engine.version > 0:
            raise OptionError(
                "ref_model",
                found=f"a reference that is needed after {self.engine.version} steps, when the base's weights have changed",
                expected="reference log-probabilities that are computed before the first step",
                remedy="pass precompute_ref_log_probs=True, or train an adapter",
            )
        yield self.engine

    def _write_state(self, directory: Path) -> None:
        """Write weights, optimizer states and the number of steps."""
        engine = self.engine
        _snapshots(directory).write(Snapshot(engine.version, engine.state_dict()))

    def _load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint."""
        snapshots = _snapshots(checkpoint)
        step = max(snapshots.steps, default=0)
        self.engine.load_state_dict(snapshots.read(step).state)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        return self._grad_norm


def _snapshots(directory: Path) -> Snapshots:
    """The snapshot in a trainer's checkpoint, which has no journal beside it."""
    return Snapshots(directory, lambda step: 0, lambda step, name: None)
