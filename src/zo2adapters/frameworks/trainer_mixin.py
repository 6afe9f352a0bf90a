"""Zeroth-order training in ``transformers.Trainer`` and trainers derived from it.

The trainer keeps its loop, data, schedules, logs, evaluation, callbacks and checkpoints. Its model is the skeleton of a
checkpoint that is never whole in memory. A training step is a step of ``Engine``, an evaluation step a part of a sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from zo2adapters.frameworks.arguments import ZOArguments
from zo2adapters.frameworks.saved_run import JOURNAL, read_journal, save_run, write_token_ids
from zo2adapters.frameworks.streamed_trainer import EngineStepsMixin
from zo2adapters.frameworks.swept_batches import TrainerLoss
from zo2adapters.models.hf import HFBlockModel
from zo2core import Batch, Engine, Journal
from zo2core.errors import OptionError

_SAVED, _VERSION = "ZOTrainerMixin", "version"  # keys of the number of steps in the journal, in a trainer's state


class ZOTrainerMixin(EngineStepsMixin):
    """Gives a Hugging Face trainer zeroth-order steps: ``class ZOTrainer(ZOTrainerMixin, Trainer): pass``.

    Made for ``transformers.Trainer``, for TRL's ``SFTTrainer``, ``DPOTrainer``, ``RewardTrainer`` and ``TPOTrainer``, and
    for trainers of your own whose ``compute_loss`` calls the model with one batch. TRL's other trainers are refused: GRPO,
    RLOO and distillation generate text with the model, KTO calls it with a second batch.

    If the trainer's loss is the model's own, over labelled tokens, a step is ``engine.step(batch)``, bit for bit. Any other
    ``compute_loss`` runs when the sweep visits the head. DPO's reference is the base checkpoint, whose log-probabilities are
    computed in a sweep at the start.

    Args:
        model: A model directory, a hub id, or a model from ``open_checkpoint``. ``bf16=True`` or ``fp16=True`` in ``args``
            opens it in mixed precision.
        args: The trainer's arguments.
        zo: Arguments of the zeroth-order run.
        options: Other options of the trainer, by name.

    Raises:
        OptionError: if an argument or one of TRL's trainers is not supported in zeroth-order runs, or the model has another
            precision than the arguments ask for. ``max_grad_norm`` has no effect: there is no gradient to clip.
        ZO2Error: as ``open_checkpoint`` and ``Engine`` say.
    """

    def __init__(
        self, model: HFBlockModel | Path | str, args: Any = None, *, zo: ZOArguments | None = None, **options: Any
    ) -> None:
        self.zo = ZOArguments() if zo is None else zo
        self._engine: Engine | None = None
        self._journal = Journal()
        self._projected_grad: float | None = None
        super().__init__(model, args, options)

    @property
    def engine(self) -> Engine:
        """Engine that takes the steps, at the present version."""
        if self._engine is None:
            args, zo = self.args, self.zo
            if zo.device is not None and torch.device(zo.device).type != args.device.type:
                raise OptionError(
                    "device",
                    found=f"{zo.device}, while the trainer uses {args.device}",
                    expected="the same kind of device",
                    remedy="leave it out, or pass use_cpu=True",
                )
            self._engine = zo.open_engine(
                self.block_model,
                self._journal,
                lr=self._present_lr,
                weight_decay=args.weight_decay,
                seed=args.seed,
                device=str(args.device),
            )
        return self._engine

    def rewind(self, journal: Journal) -> None:
        """Continue from another version of the run: the last step of ``journal``, which may be ``journal.until(step)``."""
        if self._engine is not None:
            self._engine.close()
        self._engine, self._journal, self._accumulated = None, journal, []

    def _take_step(self, batches: list[Batch], num_items: Any) -> float:
        """Take a zeroth-order step. See the base class."""
        result = self.engine.step(batches, self._loss(num_items))
        self._projected_grad = math.sqrt(math.fsum(grad * grad for grad in result.projected_grads))
        return result.loss

    @property
    def _operations(self) -> int:
        """Two for each evaluation; there is no backward pass."""
        updates = self.engine.journal.updates
        return 2 * len(updates[-1].evaluations) if updates else 0

    def _loss(self, num_items: Any) -> TrainerLoss | None:
        """Objective of a step; None: the model's own loss."""
        if not self.zo.trainer_loss and self._uses_model_loss():
            return None
        return self._trainer_loss(num_items)

    def _uses_model_loss(self) -> bool:
        """Whether ``compute_loss`` gives the model's own loss: the mean over labelled tokens."""
        if self.compute_loss_func is not None or self.label_smoother is not None:
            return False
        method = type(self).compute_loss
        if method is Trainer.compute_loss:
            return True
        is_sft = f"{method.__module__}.{method.__qualname__}" == "trl.trainer.sft_trainer.SFTTrainer.compute_loss"
        return is_sft and self.args.loss_type == "nll" and not self.aux_loss_enabled

    @contextmanager
    def _reference(self) -> Iterator[Engine]:
        """The base checkpoint, without the steps taken so far."""
        if self.engine.version == 0:
            yield self.engine
            return
        journal = self.engine.journal
        self.rewind(journal)  # closes the engine: only one engine at a time uses the model
        with Engine(
            self.block_model, journal=journal.until(0), device=str(self.args.device), memory=self.zo.memory
        ) as replayer:
            yield replayer

    def _write(self, directory: Path, *, is_checkpoint: bool, write_others: Callable[[Path], None] = lambda _: None) -> None:
        """Write the journal and, if it is asked for or this is no checkpoint, the model. See the base class."""
        weights = self.zo.export_checkpoints or not is_checkpoint

        def write(written: Path) -> None:
            if weights:
                write_token_ids(self.model, written)
            write_others(written)

        save_run(self.engine, directory, weights=weights, write_others=write)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # A second call of train counts global_step from 0 again.
        self.state.stateful_callbacks[_SAVED] = {"args": {}, "attributes": {_VERSION: self.engine.version}}
        super()._save_checkpoint(model, trial)

    def _load(self, checkpoint: Path) -> None:
        self.rewind(_saved_journal(checkpoint))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        return self._projected_grad


def _saved_journal(checkpoint: Path) -> Journal:
    """The journal of a trainer's checkpoint, which must end at the step in the trainer's state."""
    path, version = checkpoint / TRAINER_STATE_NAME, None
    if path.is_file():
        state = TrainerState.load_from_json(str(path))
        saved = state.stateful_callbacks.get(_SAVED, {"attributes": {_VERSION: state.global_step}})
        version = int(saved["attributes"][_VERSION])
    return read_journal(checkpoint / JOURNAL, version)
