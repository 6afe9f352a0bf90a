"""Mixins that take streamed steps in ``transformers.Trainer`` and trainers derived from it.

The trainer keeps its loop, data, schedules, logs, evaluation, callbacks and checkpoints. Its model
is the skeleton of a checkpoint: its config and class without weights. A training step is a step of
``Engine``, which has the weights; evaluation and DPO's reference run in its sweeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from zo2adapters.frameworks import arguments
from zo2adapters.frameworks.arguments import StreamedArguments
from zo2adapters.frameworks.saved_run import save_files
from zo2adapters.frameworks.trainer_steps import STEPS, ZerothOrderTrainerSteps
from zo2adapters.models.hf import CalledForward, HFBlockModel
from zo2adapters.models.library_names import names_of, require_attributes
from zo2adapters.models.peft_adapter import Adapter
from zo2adapters.models.peft_model import PeftBlockModel
from zo2adapters.tasks.generation import Generation, Sampling
from zo2core import Batch, Engine, Journal
from zo2core.errors import OptionError
from zo2core.ranges import OF_ADAPTERS

with names_of("transformers"):
    from transformers.trainer_pt_utils import find_batch_size

# the type checker's stand-in for the trainer that the mixin is combined with
_Trainer: Any = object

# they follow from positions
_FLASH_ATTENTION_KEYS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


class StreamedTrainerMixin(_Trainer):  # type: ignore[misc]
    """Takes streamed steps in a Hugging Face trainer: ``class StreamedTrainer(StreamedTrainerMixin,
    Trainer): pass``.

    Made for ``transformers.Trainer``, for TRL's ``SFTTrainer``, ``DPOTrainer``, ``RewardTrainer``
    and ``TPOTrainer``, and for trainers of your own whose ``compute_loss`` calls the model with one
    batch. TRL's other trainers are refused: RLOO and distillation generate text with the model, KTO
    calls it with a second batch, and GRPO has ``StreamedGRPOMixin``. Modules run in evaluation
    mode, without dropout. With gradient accumulation all batches of a step run through a block
    before the next block comes. The method of ``streamed`` says what is trained, and how:

    - ``lora``, the default, and ``adamw`` or ``sgd`` of a model with an adapter train the adapter
      by gradients, over a base that is only read. Losses, gradients and adapters are, bit for bit,
      those of the trainer with the whole model and peft. The optimizer is the trainer's. DPO's
      reference is the model with the adapter that training started from.
    - ``adamw``, ``sgd``, ``lomo``, ``adalomo`` and ``badam`` without an adapter train all
      parameters by gradients; with ``adamw``, ``optim`` may name another optimizer whose state
      belongs to single parameters. ``max_grad_norm``, which trainers set to 1, takes a second
      backward pass; 0 turns it off. Checkpoints have the state from which training goes on.
    - ``lora+lomo`` trains an adapter by the trainer's optimizer and the base under it by LOMO, in
      one step. ``base_lr`` follows the trainer's schedule, as its learning rate does. Models and
      checkpoints have the base in ``base/``, and the adapter in ``adapter/``.
    - ``zeroth-order`` and ``mezo`` take no gradient. If the trainer's loss is the model's own, over
      labelled tokens, a step is ``engine.step(batch)``, bit for bit. Any other ``compute_loss``
      runs when the sweep visits the head. DPO's reference is the base checkpoint.

    Args:
        model: A model directory, a hub id, or a model from ``open_checkpoint``. ``bf16=True`` or
            ``fp16=True`` in ``args`` opens it in mixed precision.
        args: The trainer's arguments.
        streamed: The method and its options; by default those of ``default_arguments``.
        peft_config: With a first-order method and a path: the adapter's config, or ``Adapter``.
        options: Other options of the trainer, by name.

    Raises:
        OptionError: if an argument or one of TRL's trainers is not supported with the method, there
            is no adapter for ``lora`` or there are two, or the model has another precision than the
            arguments ask for.
        ZO2Error: as ``open_checkpoint`` and ``Engine`` say.
    """

    default_arguments = StreamedArguments()
    # names of TRL's trainers that it supports
    trl_trainers: Sequence[str] = arguments.TRL_SUPPORTED
    # of what is not supported, other than with the method alone
    remedies: Mapping[str, str | None] = MappingProxyType({})
    optimizer: Any

    def __init__(
        self,
        model: HFBlockModel | Path | str,
        args: Any = None,
        *,
        streamed: StreamedArguments | None = None,
        peft_config: Any = None,
        **options: Any,
    ) -> None:
        streamed = self.default_arguments if streamed is None else streamed
        kind = arguments.kind_of(streamed, has_adapter=_has_adapter(model, peft_config))
        if kind.has_adapter:
            _require_one_adapter(model, peft_config)
        else:
            options["peft_config"] = peft_config
        args = arguments.given_or_default(args, type(self), model)
        arguments.require_supported(
            type(self),
            args,
            options,
            trainers=self.trl_trainers,
            remedies={**STEPS[kind].remedies, **self.remedies},
        )
        options.pop("peft_config", None)
        args = arguments.with_optimizer(args, streamed.method)
        args = arguments.with_precomputed_reference(args, options)
        if peft_config is not None and not isinstance(peft_config, Adapter):
            trains_base = kind is arguments.Kind.BOTH
            peft_config = Adapter(config=peft_config, seed=args.seed, trains_base=trains_base)
        self.block_model = arguments.open_model(model, args, type(self), peft_config)
        arguments.require_trainable_base(self.block_model, kind)
        arguments.require_router_loss(self.block_model, args)
        self._method = STEPS[kind](self, streamed, self.block_model)
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
        self._method.begin()

    @property
    def engine(self) -> Engine:
        """Engine that takes the steps, with the present weights."""
        return self._method.engine

    def rewind(self, journal: Journal) -> None:
        """Continue from another version of a zeroth-order run: the last step of ``journal``, which
        may be ``journal.until(step)``.
        """
        if not isinstance(self._method, ZerothOrderTrainerSteps):
            expected = "a run of zeroth-order steps, which are replayed"
            found = f"a run of {self._method.streamed.method}"
            raise OptionError("rewind", found, expected, "pass resume_from_checkpoint to train")
        self._method.rewind(journal)
        self._accumulated = []

    def create_optimizer(self, *arguments_of_trainer: Any) -> Any:
        """Create the optimizer; where the engine takes the steps, one whose learning rate the
        schedule sets.
        """
        if self.optimizer is None:
            self.optimizer = self._method.optimizer()
        return (
            super().create_optimizer(*arguments_of_trainer)
            if self.optimizer is None
            else self.optimizer
        )

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return None if self._method.takes_steps else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self._method.takes_steps:
            return self._method.grad_norm
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that decay."""
        return self._method.decaying()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._method.before_checkpoint()
        super()._save_checkpoint(model, trial)

    def _load(self, checkpoint: Path) -> None:
        self._accumulated = []
        self._method.load(checkpoint)

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
            self._method.take(batches, self._loss(num_items_in_batch)), device=self.args.device
        )

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
        with self._method.reference() as reference:
            return self._output(reference, self.compute_ref_log_probs, inputs)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        loader = DataLoader(
            dataset, batch_size=batch_size, collate_fn=self.data_collator, shuffle=False
        )
        forward = CalledForward(self.block_model, self.compute_ref_log_probs)
        with self._method.reference() as reference:
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
        return self._method.operations * tokens * parameters

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
            if is_checkpoint and not self._method.exports_checkpoints:
                written.mkdir()
            else:
                self._method.export(written, directory)
            if is_checkpoint:
                self._method.write_state(written)
            if with_settings:
                if self.processing_class is not None:
                    self.processing_class.save_pretrained(written)
                torch.save(self.args, written / "training_args.bin")

        save_files(directory, write)
        self._method.after_write(directory)

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
        """The trainer's loss as the objective of a step; None: it is the model's own."""
        if self._method.is_models_own_loss():
            return None
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


class StreamedGRPOMixin(StreamedTrainerMixin):
    """GRPO with an adapter: ``class StreamedGRPOTrainer(StreamedGRPOMixin, trl.GRPOTrainer):
    pass``.

    Completions of all prompts of a step are generated together, one token a sweep. Loss, options,
    rewards, advantages and metrics are TRL's. With the same completions, losses, gradients and
    adapters are, bit for bit, those of TRL's trainer with the whole model and peft. A token's
    random number follows from the trainer's seed, the step and the row, so the completions differ
    from those that ``generate`` samples.

    Args:
        model, args, streamed, peft_config, options: As for ``StreamedTrainerMixin``.

    Raises:
        OptionError: if an argument needs vLLM or the whole model in memory, or is not supported for
            another reason.
        ZO2Error: as for ``StreamedTrainerMixin``.
    """

    trl_trainers = ("GRPOTrainer",)
    remedies = arguments.GRPO

    def __init__(
        self,
        model: Any,
        args: Any = None,
        *,
        streamed: StreamedArguments | None = None,
        **options: Any,
    ) -> None:
        if streamed is not None and streamed.optimizer not in OF_ADAPTERS:
            expected = "lora, or another method that trains an adapter by gradients"
            raise OptionError("method", streamed.method, expected, "leave it out")
        accumulated = getattr(args, "gradient_accumulation_steps", 1)
        generations = getattr(args, "steps_per_generation", None) or accumulated
        if generations > accumulated:
            expected = f"at most gradient_accumulation_steps, {accumulated}"
            raise OptionError(
                "steps_per_generation", str(generations), expected, arguments.ONE_UPDATE
            )
        super().__init__(model, args, streamed=streamed, **options)

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


class ZOTrainerMixin(StreamedTrainerMixin):
    """A ``StreamedTrainerMixin`` whose method is by default ``zeroth-order``."""

    default_arguments = StreamedArguments(method="zeroth-order")


class FullBackpropTrainerMixin(StreamedTrainerMixin):
    """A ``StreamedTrainerMixin`` whose method is by default ``adamw``, for all parameters."""

    default_arguments = StreamedArguments(method="adamw")


BackpropTrainerMixin = StreamedTrainerMixin  # whose method is by default lora
BackpropGRPOMixin = StreamedGRPOMixin


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


def _has_adapter(model: object, peft_config: object) -> bool:
    """Whether an adapter is trained, that of the model or a new one."""
    return peft_config is not None or isinstance(model, PeftBlockModel)


def _require_one_adapter(model: object, peft_config: object) -> None:
    """Refuse a path without an adapter's config, and an opened model with another one."""
    if (peft_config is None) == isinstance(model, (str, Path)):
        found = "none" if peft_config is None else f"one with an opened {type(model).__name__}"
        expected = "an adapter's config with a path, and none with an opened model"
        remedy = (
            "pass model=PATH, peft_config=LoraConfig(...), or model=open_checkpoint(PATH, "
            "adapter=...) alone"
        )
        raise OptionError("peft_config", found, expected, remedy)


def _refuse_to_push(*_: Any, **__: Any) -> None:
    raise OptionError(
        "model.push_to_hub", "no weights", "a saved model", "use trainer.push_to_hub()"
    )
