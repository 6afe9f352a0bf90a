"""Zeroth-order steps in ``transformers.Trainer``, and in the trainers that are made from it.

The trainer keeps its loop, data, schedules, logs, evaluation, callbacks and checkpoints. Its model is the skeleton of a
checkpoint that is never whole in memory; a training step is a step of ``ZOEngine``, an evaluation step a part of a sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from zo2adapters.frameworks.arguments import ZOArguments
from zo2adapters.frameworks.opening import open_for
from zo2adapters.frameworks.saved_run import JOURNAL, read_journal, save_run, write_token_ids
from zo2adapters.frameworks.supported import autocast_of, head_for, require_supported, require_supported_trainer
from zo2adapters.frameworks.swept_batches import SweptBatches
from zo2adapters.frameworks.trainer_loss import TrainerLoss
from zo2adapters.models.called_forward import CalledForward
from zo2adapters.models.hf import HFBlockModel
from zo2core import Batch, Journal, OptionError, Replayer, Runner, ZOEngine

_Beside: Any = object  # the trainer that stands beside the mixin, whose attributes are its own

_SAVED, _VERSION = "ZOTrainerMixin", "version"  # under which a trainer's state keeps the number of steps in the journal

_OF_FLASH_ATTENTION = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # positions say the same


class ZOTrainerMixin(_Beside):  # type: ignore[misc]
    """Makes a trainer of Hugging Face's one of zeroth order: ``class ZOTrainer(ZOTrainerMixin, Trainer): pass``.

    Made for ``transformers.Trainer``, for TRL's ``SFTTrainer``, ``DPOTrainer``, ``RewardTrainer`` and ``TPOTrainer``, and
    for trainers of your own whose ``compute_loss`` calls the model with one batch. TRL's other trainers are refused: GRPO,
    RLOO and distillation generate text with the model, KTO calls it with a second batch.

    Where the trainer's loss is the model's own, over labelled tokens, a step is ``engine.step(batch)``, bit for bit. Any
    other ``compute_loss`` runs in the head's visit. DPO's reference is the base checkpoint, whose log-probabilities are
    streamed once, at the start.

    Args:
        model: A model directory, a hub id, or what ``open_checkpoint`` gives. ``bf16=True`` or ``fp16=True`` in ``args``
            opens it in mixed precision.
        args: The trainer's arguments.
        zo: What a zeroth-order run takes beyond them.
        options: The trainer's other options, by name.

    Raises:
        OptionError: if an argument asks for what a zeroth-order run cannot do, the trainer is one of TRL's that cannot work,
            or the model's precision is another one. ``max_grad_norm`` has no effect: there is no gradient to clip.
        ZO2Error: as ``open_checkpoint`` and ``ZOEngine`` say.
    """

    optimizer: Any

    def __init__(
        self, model: HFBlockModel | Path | str, args: Any = None, *, zo: ZOArguments | None = None, **options: Any
    ) -> None:
        require_supported_trainer(type(self))
        if not isinstance(args, TrainingArguments):
            raise OptionError(
                "args", found=f"a {type(args).__name__}", expected="the trainer's arguments", remedy="pass them by name"
            )
        require_supported(args, options)
        if getattr(args, "precompute_ref_log_probs", None) is False:  # DPO would load the reference whole
            setattr(args, "precompute_ref_log_probs", True)  # noqa: B010 - no other trainer's arguments have it
        self.zo = ZOArguments() if zo is None else zo
        self.block_model = open_for(model, autocast_of(args), head_for(type(self)))
        self._engine: ZOEngine | None = None
        self._journal = Journal()
        self._waiting: list[Batch] = []  # of a step, with gradient accumulation
        self._swept: SweptBatches | None = None
        self._projected_grad: float | None = None
        skeleton: Any = self.block_model.skeleton
        skeleton.state_dict = _no_weights
        skeleton.save_pretrained = self._save_pretrained
        skeleton.push_to_hub = _refuse_to_push
        super().__init__(model=skeleton, args=args, **options)

    @property
    def engine(self) -> ZOEngine:
        """The engine that takes the steps, at the present version."""
        if self._engine is None:
            args, zo = self.args, self.zo
            if zo.device is not None and torch.device(zo.device).type != args.device.type:
                raise OptionError(
                    "device",
                    found=f"{zo.device} beside the trainer's {args.device}",
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
        """Go on from another version of the run: that of its journal, or of ``journal.until(step)``."""
        if self._engine is not None:
            self._engine.close()
        self._engine, self._journal, self._waiting = None, journal, []

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train. What an earlier call left of a step that it did not take is forgotten."""
        self._waiting = []
        return super().train(*arguments, **options)

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> torch.Tensor:
        """Take a zeroth-order step; with gradient accumulation, at the last of its batches."""
        self._waiting.append(_tensors(self._prepare_inputs(inputs)))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        self._set_mode(training=True)
        result = self.engine.step(batches, self._loss(num_items_in_batch))
        self._projected_grad = math.sqrt(math.fsum(grad * grad for grad in result.projected_grads))
        return torch.tensor(result.loss, device=self.args.device)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,  # noqa: FBT001
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate with as many batches a sweep as activations may take memory."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        predict = partial(super().prediction_step, prediction_loss_only=loss_only, ignore_keys=ignore_keys)
        self._set_mode(training=False)
        swept = self._swept_batches(dataloader, predict, self.engine, keeps_logits=not loss_only)
        before, self._swept = self._swept, swept
        try:
            return super().evaluation_loop(swept, description, loss_only, ignore_keys, metric_key_prefix)
        finally:
            self._swept = before

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,  # noqa: FBT001
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """What the sweep made of the batch: loss, logits and labels."""
        if self._swept is not None:
            return self._swept.output
        predict = partial(super().prediction_step, prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys)
        forward = CalledForward(self.block_model, predict)
        [[output]] = self.engine.forwards([_tensors(self._prepare_inputs(inputs))], forward)
        return output

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make what the schedule of the learning rate is told to; the engine takes the steps."""
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD([torch.zeros(0, requires_grad=True)], lr=self.args.learning_rate)
        return self.optimizer

    def compute_ref_log_probs(self, model: Any, inputs: Batch) -> Any:
        """DPO's log-probabilities of the reference, for one batch: of a model in a sweep, or in one of its own."""
        if model is not self.model:
            return super().compute_ref_log_probs(model, inputs)
        with self._reference() as reference:
            forward = CalledForward(self.block_model, self.compute_ref_log_probs)
            [[output]] = reference.forwards([_tensors(inputs)], forward)
        return output

    def floating_point_ops(self, inputs: Any) -> int:
        """Two operations a parameter, token and evaluation: there is no backward pass."""
        tokens: int = inputs[getattr(self.model, "main_input_name", "input_ids")].numel()
        parameters = sum(spec.numel for layout in self.block_model.layouts for spec in layout.parameters)
        return 2 * parameters * tokens * self._evaluations()

    def _evaluations(self) -> int:
        updates = self.engine.journal.updates
        return len(updates[-1].evaluations) if updates else 0

    def _loss(self, num_items: Any) -> TrainerLoss | None:
        """What a step makes smaller; None is the model's own loss."""
        if not self.zo.trainer_loss and self._has_the_models_loss():
            return None
        adds_up = self.loss_is_scaled_for_ga
        if adds_up is None:
            adds_up = (self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None
        return TrainerLoss(self.block_model, partial(self.compute_loss, num_items_in_batch=num_items), adds_up=adds_up)

    def _has_the_models_loss(self) -> bool:
        """Whether ``compute_loss`` gives the model's own loss: the mean over labelled tokens."""
        if self.compute_loss_func is not None or self.label_smoother is not None:
            return False
        computes = type(self).compute_loss
        if computes is Trainer.compute_loss:
            return True
        is_sft = f"{computes.__module__}.{computes.__qualname__}" == "trl.trainer.sft_trainer.SFTTrainer.compute_loss"
        return is_sft and self.args.loss_type == "nll" and not self.aux_loss_enabled

    def _swept_batches(self, loader: Any, call: Callable[..., Any], replayer: Runner, *, keeps_logits: bool) -> SweptBatches:
        forward = CalledForward(self.block_model, call, keeps_logits=keeps_logits)
        return SweptBatches(loader, replayer, forward, _tensors, self.accelerator.gradient_state)

    @contextmanager
    def _reference(self) -> Iterator[Runner]:
        """The base checkpoint, whatever steps were taken."""
        if self.engine.version == 0:
            yield self.engine
            return
        journal = self.engine.journal
        self.rewind(journal)  # one at a time uses the model
        with Replayer(self.block_model, journal.until(0), device=str(self.args.device), memory=self.zo.memory) as replayer:
            yield replayer

    def _present_lr(self, step: int) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _set_mode(self, *, training: bool) -> None:
        """What trainers ask for the name of their metrics. Its modules stay as in evaluation, as in MeZO: no dropout."""
        self.model.training = training

    def _save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """What ``model.save_pretrained`` means here: the model at the present version."""
        self._write(Path(save_directory), weights=True)

    def _write(self, directory: Path, *, weights: bool, write_others: Callable[[Path], None] = lambda _: None) -> None:
        def write(written: Path) -> None:
            if weights:
                write_token_ids(self.model, written)
            write_others(written)

        save_run(self.engine, directory, weights=weights, write_others=write)

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        directory = Path(self.args.output_dir if output_dir is None else output_dir)
        is_checkpoint = directory.parent == Path(self.args.output_dir) and directory.name.startswith("checkpoint-")

        def write_others(written: Path) -> None:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(written)
            torch.save(self.args, written / "training_args.bin")

        self._write(directory, weights=self.zo.export_checkpoints or not is_checkpoint, write_others=write_others)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Beside global_step, which a second call of train counts from 0 again.
        self.state.stateful_callbacks[_SAVED] = {"args": {}, "attributes": {_VERSION: self.engine.version}}
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.rewind(_saved_journal(Path(resume_from_checkpoint)))

    def _load_best_model(self) -> None:
        self.rewind(_saved_journal(Path(self.state.best_model_checkpoint)))

    def _clip_grad_norm(self, model: nn.Module) -> None:
        return None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        return self._projected_grad

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the engine moves its segments."""

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        return dict(super()._build_accelerator_args(**options, device_placement=False))  # the engine places the weights

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which is not to cast: the engine computes in the precision in which the model was opened."""
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp, self.accelerator.scaler = False, None

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        loader = DataLoader(dataset, batch_size=batch_size, collate_fn=self.data_collator, shuffle=False)
        with self._reference() as reference:
            swept = self._swept_batches(loader, self.compute_ref_log_probs, reference, keeps_logits=False)
            chosen, rejected = zip(*(swept.output for _ in swept), strict=True)
        dataset = dataset.add_column("ref_chosen_logps", torch.cat(chosen).float().cpu().numpy())
        return dataset.add_column("ref_rejected_logps", torch.cat(rejected).float().cpu().numpy())


def _saved_journal(checkpoint: Path) -> Journal:
    """The journal of a trainer's checkpoint, held against the step that the trainer's state names."""
    path, version = checkpoint / TRAINER_STATE_NAME, None
    if path.is_file():
        state = TrainerState.load_from_json(str(path))
        saved = state.stateful_callbacks.get(_SAVED, {"attributes": {_VERSION: state.global_step}})
        version = int(saved["attributes"][_VERSION])
    return read_journal(checkpoint / JOURNAL, version)


def _no_weights(*_: Any, **__: Any) -> dict[str, torch.Tensor]:
    """The skeleton's state: it has no weights, so what reads them finds none."""
    return {}


def _refuse_to_push(*_: Any, **__: Any) -> None:
    raise OptionError(
        "model.push_to_hub", found="a model without weights", expected="a saved one", remedy="use trainer.push_to_hub()"
    )


def _tensors(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch without what flash attention alone would read: the same follows from positions."""
    return {key: value for key, value in inputs.items() if key not in _OF_FLASH_ATTENTION}
