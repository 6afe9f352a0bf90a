"""Base of the mixins for Hugging Face trainers, whose model is never whole in memory.

The trainer's model is the skeleton of a checkpoint: its config and class without weights. Evaluation and DPO's reference
run as sweeps of an engine, which has the weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from zo2adapters.frameworks.saved_run import save_files, write_token_ids
from zo2adapters.frameworks.supported import (
    TRL_SUPPORTED,
    autocast_of,
    head_for,
    open_for,
    require_supported,
    require_supported_trainer,
)
from zo2adapters.frameworks.swept_batches import SweptBatches, TrainerLoss
from zo2adapters.models.called_forward import CalledForward
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_model import Adapter
from zo2core import Batch, Engine
from zo2core.errors import OptionError

_Trainer: Any = object  # the type checker's stand-in for the trainer that the mixin is combined with

_FLASH_ATTENTION_KEYS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # they follow from positions


class StreamedTrainerMixin(_Trainer):  # type: ignore[misc]
    """Opens a trainer's model as segments, evaluates it in sweeps, and saves it."""

    trl_trainers: Sequence[str] = TRL_SUPPORTED  # names of TRL's trainers that it supports

    def __init__(
        self,
        model: HFBlockModel | Path | str,
        args: Any,
        options: Mapping[str, Any],
        *,
        adapter: Adapter | None = None,
        supported: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        require_supported_trainer(type(self), self.trl_trainers)
        if not isinstance(args, TrainingArguments):
            raise OptionError(
                "args",
                found=f"a {type(args).__name__}",
                expected="TrainingArguments",
                remedy="pass args=TrainingArguments(...)",
            )
        require_supported(args, options, supported)
        if getattr(args, "precompute_ref_log_probs", None) is False:  # DPO would load the whole reference model
            setattr(args, "precompute_ref_log_probs", True)  # noqa: B010 - arguments of other trainers do not have it
        self._accumulated: list[Batch] = []  # batches of an unfinished step, with gradient accumulation
        self.block_model = open_for(model, autocast_of(args), head_for(type(self)), adapter=adapter)
        self._swept: SweptBatches | None = None
        skeleton: Any = self.block_model.skeleton
        skeleton.state_dict = _no_weights
        skeleton.save_pretrained = self._save_pretrained
        skeleton.push_to_hub = _refuse_to_push
        super().__init__(model=skeleton, args=args, **options)

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """Engine that has the present weights."""

    @abstractmethod
    def _take_step(self, batches: list[Batch], num_items: Any) -> float:
        """Take a step with all its batches, and return its loss."""

    @abstractmethod
    def _reference(self) -> AbstractContextManager[Engine]:
        """The weights that training started from."""

    @property
    @abstractmethod
    def _operations(self) -> int:
        """Floating-point operations of a step for each parameter and token."""

    def _write(self, directory: Path, *, is_checkpoint: bool, write_others: Callable[[Path], None] = lambda _: None) -> None:
        """Write the run's files of a checkpoint, or the model alone."""

        def write(written: Path) -> None:
            self.engine.export(written)
            write_token_ids(self.model, written)
            if is_checkpoint:
                self._write_state(written)
            write_others(written)

        save_files(directory, write)

    def _write_state(self, directory: Path) -> None:
        """Write what training needs besides the model to continue. By default nothing."""

    @abstractmethod
    def _load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._load(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self._load(Path(self.state.best_model_checkpoint))

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train. Batches of a step that an earlier call left unfinished are dropped."""
        self._accumulated = []
        return super().train(*arguments, **options)

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> torch.Tensor:
        """Collect a step's batches; with the last of them, take the step."""
        self._accumulated.append(batch_tensors(self._prepare_inputs(inputs)))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._accumulated = self._accumulated, []
        self._set_mode(training=True)
        return torch.tensor(self._take_step(batches, num_items_in_batch), device=self.args.device)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,  # noqa: FBT001
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate, with as many batches per sweep as fit in the memory for activations."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        predict = partial(super().prediction_step, prediction_loss_only=loss_only, ignore_keys=ignore_keys)
        self._set_mode(training=False)
        swept = self._swept_batches(dataloader, predict, self.engine, keeps_logits=not loss_only)
        outer, self._swept = self._swept, swept
        try:
            return super().evaluation_loop(swept, description, loss_only, ignore_keys, metric_key_prefix)
        finally:
            self._swept = outer

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,  # noqa: FBT001
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Loss, logits and labels of the batch, from the sweep in which it was processed."""
        if self._swept is not None:
            return self._swept.output
        predict = partial(super().prediction_step, prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys)
        forward = CalledForward(self.block_model, predict)
        [[output]] = self.engine.forwards([batch_tensors(self._prepare_inputs(inputs))], forward)
        return output

    def compute_ref_log_probs(self, model: Any, inputs: Batch) -> Any:
        """DPO's reference log-probabilities of one batch, in the running sweep or else in a sweep for this batch."""
        if model is not self.model:
            return super().compute_ref_log_probs(model, inputs)
        with self._reference() as reference:
            forward = CalledForward(self.block_model, self.compute_ref_log_probs)
            [[output]] = reference.forwards([batch_tensors(inputs)], forward)
        return output

    def _swept_batches(self, loader: Any, call: Callable[..., Any], replayer: Engine, *, keeps_logits: bool) -> SweptBatches:
        forward = CalledForward(self.block_model, call, keeps_logits=keeps_logits)
        return SweptBatches(loader, replayer, forward, batch_tensors, self.accelerator.gradient_state)

    def _set_mode(self, *, training: bool) -> None:
        """Set the flag by which trainers name metrics. The modules stay in evaluation mode, without dropout, as in MeZO."""
        self.model.training = training

    def floating_point_ops(self, inputs: Any) -> int:
        """Operations of a step on these inputs."""
        tokens: int = inputs[getattr(self.model, "main_input_name", "input_ids")].numel()
        return (
            self._operations * tokens * sum(spec.numel for layout in self.block_model.layouts for spec in layout.parameters)
        )

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        directory, output = Path(self.args.output_dir if output_dir is None else output_dir), Path(self.args.output_dir)
        is_checkpoint = directory.parent == output and directory.name.startswith("checkpoint-")
        self._write(directory, is_checkpoint=is_checkpoint, write_others=self._write_settings)

    def _save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Write the model at the present version, in place of ``model.save_pretrained``."""
        self._write(Path(save_directory), is_checkpoint=False)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the engine moves its segments."""

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        return dict(super()._build_accelerator_args(**options, device_placement=False))  # the engine places the weights

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator without autocast: the engine computes in the precision in which the model was opened."""
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp, self.accelerator.scaler = False, None

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        loader = DataLoader(dataset, batch_size=batch_size, collate_fn=self.data_collator, shuffle=False)
        with self._reference() as reference:
            swept = self._swept_batches(loader, self.compute_ref_log_probs, reference, keeps_logits=False)
            chosen, rejected = zip(*(swept.output for _ in swept), strict=True)
        dataset = dataset.add_column("ref_chosen_logps", torch.cat(chosen).float().cpu().numpy())
        return dataset.add_column("ref_rejected_logps", torch.cat(rejected).float().cpu().numpy())

    def _write_settings(self, directory: Path) -> None:
        """Write the tokenizer and the trainer's arguments into a directory."""
        if self.processing_class is not None:
            self.processing_class.save_pretrained(directory)
        torch.save(self.args, directory / "training_args.bin")

    def _trainer_loss(self, num_items: Any) -> TrainerLoss:
        """The trainer's loss as an objective."""
        adds_up = self.loss_is_scaled_for_ga
        if adds_up is None:
            adds_up = (self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None
        return TrainerLoss(self.block_model, partial(self.compute_loss, num_items_in_batch=num_items), adds_up=adds_up)


class EngineStepsMixin(StreamedTrainerMixin):
    """A mixin whose engine takes the steps itself, at the learning rate of the trainer's schedule."""

    optimizer: Any

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer whose learning rate the schedule sets. The engine takes the steps."""
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD([torch.zeros(0, requires_grad=True)], lr=self.args.learning_rate)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> None:
        return None

    def _present_lr(self, step: int) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def _no_weights(*_: Any, **__: Any) -> dict[str, torch.Tensor]:
    """The state dict of the skeleton, which has no weights."""
    return {}


def _refuse_to_push(*_: Any, **__: Any) -> None:
    raise OptionError(
        "model.push_to_hub", found="a model without weights", expected="a saved model", remedy="use trainer.push_to_hub()"
    )


def batch_tensors(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without the entries for flash attention, which follow from the positions."""
    return {key: value for key, value in inputs.items() if key not in _FLASH_ATTENTION_KEYS}
