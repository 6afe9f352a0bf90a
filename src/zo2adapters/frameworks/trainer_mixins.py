"""Mixins that take streamed steps in ``transformers.Trainer`` and trainers derived from it.

The trainer keeps its loop, data, schedules, logs, evaluation, callbacks and checkpoints. Its model
is the skeleton of a checkpoint: its config and class without weights. A training step is a step of
``Engine``, which has the weights; evaluation and DPO's reference run in its sweeps.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoConfig, Trainer, TrainerState

from zo2adapters.frameworks import arguments
from zo2adapters.frameworks.arguments import ZOArguments
from zo2adapters.frameworks.saved_run import JOURNAL, read_journal, save_files, write_token_ids
from zo2adapters.models.adapter_files import WEIGHTS_FILE, read_values
from zo2adapters.models.hf import CalledForward, HFBlockModel
from zo2adapters.models.library_names import names_of, require_attributes
from zo2adapters.models.peft_adapter import Adapter
from zo2adapters.models.peft_model import PeftBlockModel
from zo2adapters.tasks.generation import Generation, Sampling
from zo2core import (
    LOMO,
    AdaLOMO,
    Batch,
    BlockUpdate,
    Engine,
    FirstOrder,
    Journal,
    MemoryPolicy,
    TorchOptimizer,
)
from zo2core.errors import OptionError
from zo2core.journal.journal import copy_journal
from zo2core.journal.snapshots import Snapshot, Snapshots

with names_of("transformers"):
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_pt_utils import find_batch_size

# the type checker's stand-in for the trainer that the mixin is combined with
_Trainer: Any = object

# they follow from positions
_FLASH_ATTENTION_KEYS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
# as in transformers.Trainer
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
# keys of the number of steps in the journal, in a trainer's state
_SAVED, _VERSION = "ZOTrainerMixin", "version"


class StreamedTrainerMixin(_Trainer):  # type: ignore[misc]
    """Opens a trainer's model as segments, evaluates it in sweeps, and saves it."""

    # names of TRL's trainers that it supports
    trl_trainers: Sequence[str] = arguments.TRL_SUPPORTED
    # of what is not supported, other than those of all mixins
    remedies: Mapping[str, str | None] = MappingProxyType({})

    def __init__(
        self,
        model: HFBlockModel | Path | str,
        args: Any,
        options: Mapping[str, Any],
        adapter: Any = None,
    ) -> None:
        args = arguments.given_or_default(args, type(self), model)
        arguments.require_supported(
            type(self), args, options, trainers=self.trl_trainers, remedies=self.remedies
        )
        args = arguments.with_precomputed_reference(args, options)
        self.block_model = arguments.open_model(model, args, type(self), adapter)
        arguments.require_router_loss(self.block_model, args)
        self._engine: Engine | None = None
        # batches of an unfinished step, with gradient accumulation
        self._accumulated: list[Batch] = []
        self._swept: SweptBatches | None = None  # batches of the evaluation that is running
        skeleton: Any = self.block_model.skeleton
        skeleton.state_dict = lambda *_, **__: {}
        skeleton.save_pretrained = lambda save_directory, **_: self._write(
            Path(save_directory), is_checkpoint=False
        )
        skeleton.push_to_hub = _refuse_to_push
        super().__init__(model=skeleton, args=args, **options)

    @property
    def engine(self) -> Engine:
        """Engine that takes the steps, with the present weights."""
        if self._engine is None:
            self._engine = self._open_engine()
        return self._engine

    @abstractmethod
    def _open_engine(self) -> Engine:
        """Open the engine of the run."""

    @abstractmethod
    def _reference(self) -> AbstractContextManager[Engine]:
        """The weights that training started from."""

    @property
    @abstractmethod
    def _operations(self) -> int:
        """Floating-point operations of a step for each parameter and token."""

    def _write_state(self, directory: Path) -> None:
        """Write what training needs to continue besides the model and the trainer's files.

        By default nothing.
        """

    @abstractmethod
    def _load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint."""

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        self._load(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self._load(Path(self.state.best_model_checkpoint))

    def train(self, *arguments: Any, **options: Any) -> Any:
        """Train. Batches of a step that an earlier call left unfinished are dropped."""
        self._accumulated = []
        return super().train(*arguments, **options)

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Collect a step's batches; with the last of them, take the step."""
        # Trainers name metrics by this flag. The modules stay in evaluation mode, without dropout,
        # as in MeZO.
        self.model.training = True
        self._accumulated.append(batch_tensors(self._prepare_inputs(inputs)))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches = self._accumulated
        self._accumulated = []
        return torch.tensor(
            self._take_step(batches, self._loss(num_items_in_batch)), device=self.args.device
        )

    @abstractmethod
    def _take_step(self, batches: list[Batch], loss: TrainerLoss | None) -> float:
        """Take a step with all its batches, and return its loss."""

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate, by default on the rows that the trainer was made with.

        For other rows DPO computes the reference's log-probabilities first. TRL refuses that once
        training has begun, where it has no reference model; here the reference can be had.
        """
        if not getattr(self, "precompute_ref_logps", False) or self.ref_model is not None:
            return super().evaluate(*arguments, **options)
        self.ref_model: Any = self.model  # for which TRL looks; the log-probabilities are ours
        try:
            return super().evaluate(*arguments, **options)
        finally:
            self.ref_model = None

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,  # noqa: FBT001
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate, with as many batches per sweep as fit in the memory for activations."""
        loss_only = (
            self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        )
        predict = partial(
            super().prediction_step, prediction_loss_only=loss_only, ignore_keys=ignore_keys
        )
        forward = CalledForward(self.block_model, predict, keeps_logits=not loss_only)
        self.model.training = False
        outer = self._swept
        self._swept = SweptBatches(dataloader, self.engine, forward)
        try:
            return super().evaluation_loop(
                self._swept, description, loss_only, ignore_keys, metric_key_prefix
            )
        finally:
            self._swept = outer

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,  # noqa: FBT001 - the Trainer's signature
        ignore_keys: Any = None,
    ) -> Any:
        """Loss, logits and labels of the batch, from the sweep in which it was processed."""
        if self._swept is not None:
            return self._swept.output
        return self._predicted(
            inputs, prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys
        )

    def _predicted(self, inputs: Any, **options: Any) -> Any:
        """Loss, logits and labels of a batch, in a sweep for this batch."""
        return self._output(
            self.engine, partial(super().prediction_step, **options), self._prepare_inputs(inputs)
        )

    def _output(self, engine: Engine, call: Callable[..., Any], inputs: Batch) -> Any:
        """What a function of the model returns for a batch."""
        [[output]] = engine.forwards([batch_tensors(inputs)], CalledForward(self.block_model, call))
        return output

    def compute_ref_log_probs(self, model: Any, inputs: Batch) -> Any:
        """DPO's reference log-probabilities of one batch, in the running sweep or else in a sweep
        for this batch.
        """
        if model is not self.model:
            return super().compute_ref_log_probs(model, inputs)
        with self._reference() as reference:
            return self._output(reference, self.compute_ref_log_probs, inputs)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        loader = DataLoader(
            dataset, batch_size=batch_size, collate_fn=self.data_collator, shuffle=False
        )
        forward = CalledForward(self.block_model, self.compute_ref_log_probs)
        with self._reference() as reference:
            swept = SweptBatches(loader, reference, forward)
            chosen, rejected = zip(*(swept.output for _ in swept), strict=True)
        dataset = dataset.add_column("ref_chosen_logps", torch.cat(chosen).float().cpu().numpy())
        return dataset.add_column("ref_rejected_logps", torch.cat(rejected).float().cpu().numpy())

    def floating_point_ops(self, inputs: Any) -> int:
        """Operations of a step on these inputs."""
        parameters = sum(
            spec.numel for layout in self.block_model.layouts for spec in layout.parameters
        )
        tokens: int = inputs[getattr(self.model, "main_input_name", "input_ids")].numel()
        return self._operations * tokens * parameters

    def _save(
        self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None
    ) -> None:
        directory = Path(self.args.output_dir if output_dir is None else output_dir)
        output = Path(self.args.output_dir)
        is_checkpoint = directory.parent == output and directory.name.startswith("checkpoint-")
        self._write(directory, is_checkpoint=is_checkpoint, with_settings=True)

    def _write(self, directory: Path, *, is_checkpoint: bool, with_settings: bool = False) -> None:
        """Write a checkpoint, or the model alone; on request, with the tokenizer and the trainer's
        arguments.
        """

        def write(written: Path) -> None:
            if is_checkpoint and not self._exports_checkpoints:
                written.mkdir()
            else:
                self.engine.export(written)
                write_token_ids(self.model, written)
            if is_checkpoint:
                self._write_state(written)
            if with_settings:
                if self.processing_class is not None:
                    self.processing_class.save_pretrained(written)
                torch.save(self.args, written / "training_args.bin")

        save_files(directory, write)

    @property
    def _exports_checkpoints(self) -> bool:
        """Whether checkpoints have the weights."""
        return True

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the engine moves its segments."""

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        # the engine places the weights
        return dict(super()._build_accelerator_args(**options, device_placement=False))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator without autocast: the engine computes in the precision in which
        the model was opened.
        """
        super().create_accelerator_and_postprocess()
        require_attributes(self.accelerator, "native_amp", "scaler")
        self.accelerator.native_amp, self.accelerator.scaler = False, None

    def _loss(self, num_items: Any) -> TrainerLoss | None:
        """The trainer's loss as the objective of a step."""
        adds_up = getattr(self, "loss_is_scaled_for_ga", None)  # a trainer may say so
        if adds_up is None:
            adds_up = (
                self.model_accepts_loss_kwargs and num_items is not None
            ) or self.compute_loss_func is not None
        return TrainerLoss(
            self.block_model,
            partial(self.compute_loss, num_items_in_batch=num_items),
            adds_up=adds_up,
        )


class EngineStepsMixin(StreamedTrainerMixin):
    """A mixin whose engine takes the steps itself, at the learning rate of the trainer's
    schedule.
    """

    _grad_norm: float | None = None  # of the last step
    optimizer: Any

    def _take_step(self, batches: list[Batch], loss: TrainerLoss | None) -> float:
        """Take a step. See the base class."""
        result = self.engine.step(batches, loss)
        self._grad_norm = result.grad_norm
        if self._grad_norm is None:
            self._grad_norm = math.sqrt(math.fsum(grad * grad for grad in result.projected_grads))
        return result.loss

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the optimizer whose learning rate the schedule sets.

        The engine takes the steps.
        """
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(
                [torch.zeros(0, requires_grad=True)], lr=self.args.learning_rate
            )
        return self.optimizer

    def _present_lr(self, step: int) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _clip_grad_norm(self, model: nn.Module) -> None:
        return None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        return self._grad_norm


class ZOTrainerMixin(EngineStepsMixin):
    """Gives a Hugging Face trainer zeroth-order steps: ``class ZOTrainer(ZOTrainerMixin, Trainer):
    pass``.

    Made for ``transformers.Trainer``, for TRL's ``SFTTrainer``, ``DPOTrainer``, ``RewardTrainer``
    and ``TPOTrainer``, and for trainers of your own whose ``compute_loss`` calls the model with one
    batch. TRL's other trainers are refused: GRPO, RLOO and distillation generate text with the
    model, KTO calls it with a second batch.

    If the trainer's loss is the model's own, over labelled tokens, a step is
    ``engine.step(batch)``, bit for bit. Any other ``compute_loss`` runs when the sweep visits the
    head. DPO's reference is the base checkpoint, whose log-probabilities are computed in a sweep at
    the start.

    Args:
        model: A model directory, a hub id, or a model from ``open_checkpoint``. ``bf16=True`` or
            ``fp16=True`` in ``args`` opens it in mixed precision.
        args: The trainer's arguments.
        zo: Arguments of the zeroth-order run.
        options: Other options of the trainer, by name.

    Raises:
        OptionError: if an argument or one of TRL's trainers is not supported in zeroth-order runs,
            or the model has another precision than the arguments ask for. ``max_grad_norm`` has no
            effect: there is no gradient to clip.
        ZO2Error: as ``open_checkpoint`` and ``Engine`` say.
    """

    def __init__(
        self,
        model: HFBlockModel | Path | str,
        args: Any = None,
        *,
        zo: ZOArguments | None = None,
        **options: Any,
    ) -> None:
        self.zo = ZOArguments() if zo is None else zo
        self._journal = Journal()
        super().__init__(model, args, options)
        self._loss_was = self._loss_parts()

    def _open_engine(self) -> Engine:
        args, zo = self.args, self.zo
        if zo.device is not None and torch.device(zo.device).type != args.device.type:
            found = f"{zo.device}, while the trainer uses {args.device}"
            raise OptionError(
                "device", found, "the same kind of device", "leave it out, or pass use_cpu=True"
            )
        return zo.open_engine(
            self.block_model,
            self._journal,
            lr=self._present_lr,
            weight_decay=args.weight_decay,
            seed=args.seed,
            device=str(args.device),
        )

    def rewind(self, journal: Journal) -> None:
        """Continue from another version of the run: the last step of ``journal``, which may be
        ``journal.until(step)``.
        """
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self._journal = journal
        self._accumulated = []

    @property
    def _operations(self) -> int:
        """Two for each evaluation; there is no backward pass."""
        updates = self.engine.journal.updates
        return 2 * len(updates[-1].evaluations) if updates else 0

    def _loss(self, num_items: Any) -> TrainerLoss | None:
        """The trainer's loss; None if it is the model's own, the mean over labelled tokens."""
        return None if self._is_models_own_loss() else super()._loss(num_items)

    def _is_models_own_loss(self) -> bool:
        """Whether the trainer's loss is that of ``engine.step``, as trainer and model are now: what
        decides may change from step to step.
        """
        method = type(self).compute_loss
        has_routers = self.block_model.routers.are_asked_for
        # Of several batches ``Trainer`` adds up the losses of routers, which are means.
        sums_routers = has_routers and self.args.gradient_accumulation_steps > 1
        is_own = method is Trainer.compute_loss and not sums_routers
        name = f"{method.__module__}.{method.__qualname__}"
        if name == "trl.trainer.sft_trainer.SFTTrainer.compute_loss":
            # It leaves out the loss of routers that a model adds, and adds its own.
            adds_routers = self.aux_loss_enabled or has_routers
            is_own = self.args.loss_type == "nll" and not adds_routers
        has_other = (
            self.zo.trainer_loss
            or "compute_loss" in vars(self)
            or self.compute_loss_func is not None
            or self.label_smoother is not None
        )
        is_replaced = self.block_model.is_loss_replaced or self._loss_parts() != self._loss_was
        return is_own and not has_other and not is_replaced

    def _loss_parts(self) -> Sequence[object]:
        """The model's forward, and whether the trainer divides a loss by the tokens of all batches
        of a step.
        """
        return self.block_model.skeleton.forward, self.model_accepts_loss_kwargs

    @contextmanager
    def _reference(self) -> Iterator[Engine]:
        """The base checkpoint, without the steps taken so far."""
        if self.engine.version == 0:
            yield self.engine
            return
        journal = self.engine.journal
        self.rewind(journal)  # closes the engine: only one engine at a time uses the model
        base = journal.until(0)
        device = str(self.args.device)
        with Engine(
            self.block_model, journal=base, device=device, memory=self.zo.memory
        ) as reference:
            yield reference

    @property
    def _exports_checkpoints(self) -> bool:
        return self.zo.export_checkpoints

    def _write(self, directory: Path, **options: Any) -> None:
        """Write the journal last: a kill between weights and journal leaves the earlier journal
        whole.
        """
        super()._write(directory, **options)
        copy_journal(self.engine.journal, directory / JOURNAL)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # A second call of train counts global_step from 0 again.
        self.state.stateful_callbacks[_SAVED] = {
            "args": {},
            "attributes": {_VERSION: self.engine.version},
        }
        super()._save_checkpoint(model, trial)

    def _load(self, checkpoint: Path) -> None:
        """Continue from the journal, which must end at the step in the trainer's state."""
        path = checkpoint / TRAINER_STATE_NAME
        version = None
        if path.is_file():
            state = TrainerState.load_from_json(str(path))
            saved = state.stateful_callbacks.get(
                _SAVED, {"attributes": {_VERSION: state.global_step}}
            )
            version = int(saved["attributes"][_VERSION])
        self.rewind(read_journal(checkpoint / JOURNAL, version))


class FullBackpropTrainerMixin(EngineStepsMixin):
    """Trains all parameters by gradients: ``class FullTrainer(FullBackpropTrainerMixin, Trainer):
    pass``.

    ``optim`` names the optimizer, as for any trainer: ``lomo``, ``adalomo``, or one of torch's
    whose state belongs to single parameters. Losses and weights are, bit for bit, those of the
    trainer with the whole model. With gradient accumulation all batches of a step run through a
    block before the next block comes. Modules run in evaluation mode, without dropout.
    ``max_grad_norm``, which trainers set to 1, takes a second backward pass; 0 turns it off.
    Checkpoints have the model, the state from which training goes on, and the trainer's own files.

    Args:
        model: A model directory, a hub id, or a model from ``open_checkpoint``. ``bf16=True`` or
            ``fp16=True`` in ``args`` opens it in mixed precision.
        args: The trainer's arguments.
        memory: How much memory the process may use.
        options: Other options of the trainer, by name.

    Raises:
        OptionError: if an argument is not supported.
        ZO2Error: as ``open_checkpoint`` and ``Engine`` say.
    """

    remedies = arguments.FULL
    _operations = 8  # two forward passes, and the gradients of activations and weights

    def __init__(
        self,
        model: HFBlockModel | Path | str,
        args: Any = None,
        *,
        memory: MemoryPolicy = MemoryPolicy(),
        **options: Any,
    ) -> None:
        self._memory = memory
        super().__init__(model, args, options)

    def _open_engine(self) -> Engine:
        args = self.args
        method = FirstOrder(self._update(), lr=self._present_lr, clip=args.max_grad_norm or None)
        return Engine(self.block_model, method, device=str(args.device), memory=self._memory)

    def _update(self) -> BlockUpdate:
        """The optimizer that the arguments name."""
        args = self.args
        if args.optim in {"lomo", "adalomo"}:
            return (LOMO if args.optim == "lomo" else AdaLOMO)(weight_decay=args.weight_decay)
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
        decaying = frozenset(self.get_decay_parameter_names(self.model))

        def make(named: list[tuple[str, nn.Parameter]]) -> Any:
            groups = (
                {
                    "params": [value for name, value in named if name in decaying],
                    "weight_decay": args.weight_decay,
                },
                {
                    "params": [value for name, value in named if name not in decaying],
                    "weight_decay": 0.0,
                },
            )
            return kind([group for group in groups if group["params"]], **options)

        return TorchOptimizer(make, by_name=True)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that decay, as the trainer chooses them from the whole model."""
        with torch.device("meta"):
            whole = type(self.block_model.skeleton)(
                AutoConfig.for_model(**self.block_model.config.to_dict())
            )
        names: list[str] = Trainer.get_decay_parameter_names(self, whole)
        return names

    @contextmanager
    def _reference(self) -> Iterator[Engine]:
        """The base checkpoint, before the first step."""
        if self.engine.version > 0:
            steps = self.engine.version
            found = (
                f"a reference that is needed after {steps} steps, when the base's weights have "
                "changed"
            )
            expected = "reference log-probabilities that are computed before the first step"
            raise OptionError(
                "ref_model",
                found,
                expected,
                "pass these rows as eval_dataset when the trainer is made, or train an adapter",
            )
        yield self.engine

    def _write_state(self, directory: Path) -> None:
        """Write weights, optimizer states and the number of steps."""
        _snapshots(directory).write(Snapshot(self.engine.version, self.engine.state_dict()))

    def _load(self, checkpoint: Path) -> None:
        snapshots = _snapshots(checkpoint)
        self.engine.load_state_dict(snapshots.read(max(snapshots.steps, default=0)).state)


class BackpropTrainerMixin(StreamedTrainerMixin):
    """Trains an adapter by gradients: ``class FirstOrderTrainer(BackpropTrainerMixin, Trainer):
    pass``.

    Made for the same trainers as ``ZOTrainerMixin``. Losses, gradients and adapters are, bit for
    bit, those of the trainer with the whole model and peft. The optimizer is the trainer's; the
    base is only read. With gradient accumulation all batches of a step run through a block before
    the next block is loaded. Modules run in evaluation mode, without dropout. Checkpoints have the
    adapter as peft writes it and the trainer's own files. DPO's reference is the model with the
    adapter that training started from.

    Args:
        model: A model directory, a hub id, or what ``open_checkpoint(model, adapter=...)``
            returned.
        args: The trainer's arguments.
        peft_config: The adapter's config, or ``Adapter``; None where ``model`` was opened with one.
        memory: How much memory the process may use.
        options: Other options of the trainer, by name.

    Raises:
        OptionError: if there is no adapter or there are two, or an argument is not supported.
        ZO2Error: as ``open_checkpoint`` and ``Engine`` say.
    """

    remedies = arguments.ADAPTER
    _operations = 6  # two forward passes, and the gradients of activations

    def __init__(
        self,
        model: HFBlockModel | Path | str,
        args: Any = None,
        *,
        peft_config: Any = None,
        memory: MemoryPolicy = MemoryPolicy(),
        **options: Any,
    ) -> None:
        if (peft_config is None) == isinstance(model, (str, Path)):
            found = "none" if peft_config is None else f"one with an opened {type(model).__name__}"
            expected = "an adapter's config with a path, and none with an opened model"
            remedy = (
                "pass model=PATH, peft_config=LoraConfig(...), or model=open_checkpoint(PATH, "
                "adapter=...) alone"
            )
            raise OptionError("peft_config", found, expected, remedy)
        args = arguments.given_or_default(args, type(self), model)
        if peft_config is not None and not isinstance(peft_config, Adapter):
            peft_config = Adapter(config=peft_config, seed=args.seed)
        self._memory = memory
        # the adapter's parameters when training began, by name
        self._initial: dict[str, torch.Tensor] = {}
        super().__init__(model, args, options, peft_config)
        skeleton: Any = self.block_model.skeleton
        skeleton.parameters = lambda recurse=True: iter(self.engine.parameters.values())
        skeleton.named_parameters = lambda *_, **__: iter(self.engine.parameters.items())

    def _open_engine(self) -> Engine:
        engine = Engine(
            self.block_model, FirstOrder(None), device=str(self.args.device), memory=self._memory
        )
        self._initial = _copies(engine)
        return engine

    def _take_step(self, batches: list[Batch], loss: TrainerLoss | None) -> float:
        """Add the step's gradients to those of the adapter: the trainer's optimizer takes the
        step.
        """
        if callable(to_training := getattr(self.optimizer, "train", None)):
            # schedule-free optimizers
            to_training()
        return self.engine.gradients(batches, loss)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the adapter's parameters that decay: those of neither biases nor norms."""
        return [name for name in self.engine.parameters if not _NO_DECAY.search(name.lower())]

    @contextmanager
    def _reference(self) -> Iterator[Engine]:
        engine = self.engine
        present = _copies(engine)
        engine.load_parameters(self._initial)
        try:
            yield engine
        finally:
            engine.load_parameters(present)

    def _load(self, checkpoint: Path) -> None:
        """Load the adapter of a checkpoint."""
        model, engine = self.block_model, self.engine
        assert isinstance(model, PeftBlockModel), "the constructor has required an adapter"
        values = read_values(
            checkpoint / WEIGHTS_FILE, model.adapter.parameters, model.adapter.tensors
        )
        engine.load_parameters({name: values[name] for name in engine.parameters})


class BackpropGRPOMixin(BackpropTrainerMixin):
    """GRPO with an adapter: ``class FirstOrderGRPOTrainer(BackpropGRPOMixin, trl.GRPOTrainer):
    pass``.

    Completions of all prompts of a step are generated together, one token a sweep. Loss, options,
    rewards, advantages and metrics are TRL's. With the same completions, losses, gradients and
    adapters are, bit for bit, those of TRL's trainer with the whole model and peft. A token's
    random number follows from the trainer's seed, the step and the row, so the completions differ
    from those that ``generate`` samples.

    Args:
        model, args, peft_config, memory, options: As for ``BackpropTrainerMixin``.

    Raises:
        OptionError: if an argument needs vLLM or the whole model in memory, or is not supported for
            another reason.
        ZO2Error: as for ``BackpropTrainerMixin``.
    """

    trl_trainers = ("GRPOTrainer",)
    remedies = arguments.GRPO

    def __init__(self, model: Any, args: Any = None, **options: Any) -> None:
        accumulated = getattr(args, "gradient_accumulation_steps", 1)
        generations = getattr(args, "steps_per_generation", None) or accumulated
        if generations > accumulated:
            expected = f"at most gradient_accumulation_steps, {accumulated}"
            raise OptionError(
                "steps_per_generation", str(generations), expected, arguments.ONE_UPDATE
            )
        super().__init__(model, args, **options)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Collect a step's batches; with the last of them, take the step. See the base class."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step += 1  # TRL's count of batches, by which it knows when to generate
        return loss

    def _prepare_inputs(self, inputs: Any) -> dict[str, torch.Tensor]:
        """Generate and score completions when it is time.

        Entries for images and tools, which are None, are left out.
        """
        prepared = super()._prepare_inputs(inputs)
        return {key: value for key, value in prepared.items() if isinstance(value, torch.Tensor)}

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        **_: Any,
    ) -> tuple[list[list[int]], None]:
        """Continue all prompts together with the present adapter."""
        generation = Generation(
            self.engine,
            self.block_model,
            max_new_tokens=self.max_completion_length,
            sampling=Sampling(
                temperature=self.temperature, top_p=self.top_p, seed=self.args.seed + self._step
            ),
            eos_token_ids=self.eos_token_ids,
            pad_token_id=self._tokenizer.pad_token_id,
            allowed=self.engine.activation_bytes,
        )
        return generation.continuations(prompt_ids)[0], None

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted, since the inputs are prompts without their completions: 0, as TRL reports
        it.
        """
        return 0

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate batch by batch: completions of each are generated first."""
        self.model.training = False
        return Trainer.evaluation_loop(self, *arguments, **options)

    def _predicted(self, inputs: Any, **_: Any) -> Any:
        """Loss of a batch of prompts, after their completions were generated and scored."""
        call = partial(self.compute_loss, num_items_in_batch=None)
        return (
            self._output(self.engine, call, self._prepare_inputs(inputs)).mean().detach(),
            None,
            None,
        )


class SweptBatches:
    """Yields the batches of a data loader; ``output`` has the model's output for the batch that was
    yielded last.

    All batches of a sweep, as many as fit in the memory for activations, are read before the first
    of them is yielded.
    """

    def __init__(self, loader: Any, engine: Engine, forward: CalledForward) -> None:
        self.output: Any = None
        self._loader = loader
        self._engine = engine
        self._forward = forward
        self._outputs: deque[Any] = deque()  # for batches that were read from the sweeps

    def __iter__(self) -> Iterator[Any]:
        base = getattr(self._loader, "base_dataloader", None)
        if base is None:
            batches: Any = self._in_sweeps(self._loader)
        else:  # accelerate's loader knows which batch is the last one, and reads one ahead
            self._loader.base_dataloader = _Source(base, self._in_sweeps(base))
            batches = self._loader
        try:
            for batch in batches:
                self.output = self._outputs.popleft()
                yield batch
        finally:
            if base is not None:
                self._loader.base_dataloader = base

    def _in_sweeps(self, source: Any) -> Iterator[Any]:
        """Yield the batches of a loader once their outputs are there."""
        pending: deque[Any] = deque()  # batches that were read

        def batches() -> Iterator[Batch]:
            for batch in source:
                pending.append(batch)
                yield batch_tensors(batch)
                if source is not self._loader and isinstance(source.dataset, IterableDataset):
                    # Rows of the last batch that count, as in accelerate's loader for such data
                    # when it places batches.
                    self._loader.remainder = find_batch_size(batch)  # type: ignore[no-untyped-call]

        for outputs in self._engine.forwards(batches(), self._forward):
            for output in outputs:
                # A copy, because callers may change the output in place.
                self._outputs.append(tree_map_only(torch.Tensor, torch.Tensor.clone, output))
                yield pending.popleft()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Source:
    """A data loader whose batches come from elsewhere."""

    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self._loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class TrainerLoss(CalledForward):
    """A trainer's ``compute_loss`` as an ``Objective``."""

    def __init__(
        self,
        model: HFBlockModel,
        loss: Callable[[Any, dict[str, Any]], torch.Tensor],
        *,
        adds_up: bool,
    ) -> None:
        super().__init__(model, loss)
        self._adds_up = adds_up

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """Leave the batch whole."""
        if rows is not None:
            found = f"{rows}, with a loss that the trainer computes"
            remedy = "lower per_device_train_batch_size and raise gradient_accumulation_steps"
            raise OptionError("micro_batch_size", found, "None", remedy)
        return [batch]

    def loss(self, outputs: Sequence[torch.Tensor], micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Join the losses of a step's batches, in float64 if there are several."""
        if len(outputs) == 1:
            return outputs[0]
        summed = torch.stack([loss.double() for loss in outputs]).sum()
        return (summed if self._adds_up else summed / len(outputs)).to(outputs[0].dtype)


def batch_tensors(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without the entries for flash attention, which follow from the positions."""
    return {key: value for key, value in inputs.items() if key not in _FLASH_ATTENTION_KEYS}


def _copies(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.parameters.items()}


def _snapshots(directory: Path) -> Snapshots:
    """The snapshot in a trainer's checkpoint, which has no journal beside it."""
    return Snapshots(directory, lambda step: 0, lambda step, name: None)


def _refuse_to_push(*_: Any, **__: Any) -> None:
    raise OptionError(
        "model.push_to_hub", "no weights", "a saved model", "use trainer.push_to_hub()"
    )
