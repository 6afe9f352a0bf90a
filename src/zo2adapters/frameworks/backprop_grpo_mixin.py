"""Policy gradients in TRL's ``GRPOTrainer``: text is generated, and the adapter trained, over blocks that stream."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from zo2adapters.frameworks.backprop_trainer_mixin import BackpropTrainerMixin
from zo2adapters.models.called_forward import CalledForward
from zo2adapters.tasks.generation import Generation
from zo2adapters.tasks.next_token import Sampling
from zo2core.errors import OptionError

_IN_MEMORY = "leave it out: it needs the whole model in memory"
_ONE_UPDATE = "leave it out: completions serve one update, whose own log-probabilities are the old ones"
_SAMPLING = "leave it out: tokens are sampled by temperature and top_p alone"
_REFUSED: Mapping[str, tuple[object, str]] = {  # arguments: the only value that is supported, and what to do
    "use_vllm": (False, f"{_IN_MEMORY}, in vLLM"),
    "use_transformers_continuous_batching": (False, _IN_MEMORY),
    "beta": (0.0, "leave it out: a penalty for leaving the reference is not built"),
    "num_iterations": (1, _ONE_UPDATE),
    "cast_lm_head_to_fp32": (False, "open the model with precision='mixed' or in float32"),
    "top_k": (0, _SAMPLING),
    "min_p": (None, _SAMPLING),
    "repetition_penalty": (1.0, _SAMPLING),
    "generation_kwargs": (None, _SAMPLING),
    "cache_implementation": (None, "leave it out: keys and values are kept as they are"),
}
_REFUSED_OPTIONS = ("tools", "rollout_func", "environment_factory")


class BackpropGRPOMixin(BackpropTrainerMixin):
    """GRPO with an adapter: ``class FirstOrderGRPOTrainer(BackpropGRPOMixin, trl.GRPOTrainer): pass``.

    Completions of all prompts of a step are generated together, one token a sweep. Loss, options, rewards, advantages and
    metrics are TRL's. With the same completions, losses, gradients and adapters are, bit for bit, those of TRL's trainer
    with the whole model and peft. A token's random number follows from the trainer's seed, the step and the row, so the
    completions differ from those that ``generate`` samples.

    Args:
        model, args, peft_config, memory, options: As for ``BackpropTrainerMixin``.

    Raises:
        OptionError: if an argument needs vLLM or the whole model in memory, or is not supported for another reason.
        ZO2Error: as for ``BackpropTrainerMixin``.
    """

    trl_trainers = ("GRPOTrainer",)

    def __init__(self, model: Any, args: Any = None, **options: Any) -> None:
        for name, (supported, remedy) in _REFUSED.items():
            value = getattr(args, name, supported)
            if value != supported and (value or supported):
                raise OptionError(name, found=repr(value), expected=repr(supported), remedy=remedy)
        for name in _REFUSED_OPTIONS:
            if options.get(name) is not None:
                remedy = "leave it out: only single answers are generated"
                raise OptionError(name, found=f"a {type(options[name]).__name__}", expected="none", remedy=remedy)
        accumulated = getattr(args, "gradient_accumulation_steps", 1)
        generations = getattr(args, "steps_per_generation", None) or accumulated
        if generations > accumulated:
            raise OptionError(
                "steps_per_generation",
                found=str(generations),
                expected=f"at most gradient_accumulation_steps, {accumulated}",
                remedy=_ONE_UPDATE,
            )
        super().__init__(model, args, **options)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Collect a step's batches; with the last of them, take the step. See the base class."""
        self._set_mode(training=True)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step += 1  # TRL's count of batches, by which it knows when to generate
        return loss

    def _prepare_inputs(self, inputs: Any) -> dict[str, torch.Tensor]:
        """Generate and score completions when it is time. Entries for images and tools, which are None, are left out."""
        prepared = super()._prepare_inputs(inputs)
        return {key: value for key, value in prepared.items() if isinstance(value, torch.Tensor)}

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any, num_generations: int, **_: Any
    ) -> tuple[list[list[int]], None]:
        """Continue all prompts together with the present adapter."""
        sampling = Sampling(temperature=self.temperature, top_p=self.top_p, seed=self.args.seed + self._step)
        engine = self.engine
        generation = Generation(
            engine,
            self.block_model,
            max_new_tokens=self.max_completion_length,
            sampling=sampling,
            eos_token_ids=self.eos_token_ids,
            pad_token_id=self._tokenizer.pad_token_id,
            allowed=engine.activation_bytes,
        )
        return generation.continuations(prompt_ids)[0], None

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted, since the inputs are prompts without their completions: 0, as TRL reports it."""
        return 0

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate batch by batch: completions of each are generated first."""
        self._set_mode(training=False)
        return Trainer.evaluation_loop(self, *arguments, **options)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,  # noqa: FBT001
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Loss of a batch of prompts, after their completions were generated and scored."""
        forward = CalledForward(self.block_model, partial(self.compute_loss, num_items_in_batch=None))
        [[loss]] = self.engine.forwards([self._prepare_inputs(inputs)], forward)
        return loss.mean().detach(), None, None
