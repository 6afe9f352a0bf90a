"""Trainers and trainers' arguments that are supported; others are refused if they are set.

Opens the model of a trainer in the precision that the trainer's arguments ask for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.models.head_model import HFHeadModel
from zo2adapters.models.heads import CAUSAL_LM
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_model import Adapter
from zo2adapters.models.precision import Precision
from zo2core.errors import CheckpointError, OptionError

# Arguments for gradients and for models that are whole in memory. They must have their default values. Values are remedies.
_AT_DEFAULT: Mapping[str, str] = {
    "optim": "leave it out: the estimator of ZOArguments replaces the optimizer",
    "optim_args": "leave it out: the estimator of ZOArguments replaces the optimizer",
    "optim_target_modules": "leave it out: all parameters are trained",
    "adam_beta1": "leave it out: the estimator of ZOArguments replaces the optimizer",
    "adam_beta2": "leave it out: the estimator of ZOArguments replaces the optimizer",
    "adam_epsilon": "leave it out: the estimator of ZOArguments replaces the optimizer",
    "max_grad_norm": "leave it out: there is no gradient whose norm could be clipped; an estimator that makes "
    "Clipped(estimator=MeZOSGD(...), value=...) clips projected gradients",
    "neftune_noise_alpha": "leave it out: forwards must be deterministic",
    "auto_find_batch_size": "set per_device_train_batch_size, or ZOArguments(micro_batch_size=...)",
    "torch_compile": "leave it out: layers run one at a time",
    "use_liger_kernel": "leave it out: it replaces the model's forward",
    "fp16_full_eval": "pass fp16=True, or open the model with precision='mixed'",
    "bf16_full_eval": "pass bf16=True, or open the model with precision='mixed'",
    "disable_dropout": "leave it out: forwards run without dropout, as in MeZO",
    "predict_with_generate": "save the model and generate with zo2adapters.generate, or zo2 generate",
    "model_init_kwargs": "pass a model from open_checkpoint, with its options",
    "deepspeed": "leave it out: the weights are streamed as ZOArguments(memory=...) says",
    "fsdp": "leave it out: the weights are streamed as ZOArguments(memory=...) says",
    "sync_ref_model": "leave it out: the reference is always the base checkpoint",
    "chat_template_path": "set the tokenizer's template instead: templates that add tokens need other weights",
}
_OFF: Mapping[str, object] = {"max_grad_norm": 0}  # values that turn an unsupported feature off
_ABSENT: Mapping[str, str] = {  # options of the trainer's constructor that must be absent, with remedies
    "model_init": "pass model",
    "optimizers": "leave it out: the estimator of ZOArguments replaces the optimizer; lr_scheduler_type names the schedule",
    "optimizer_cls_and_kwargs": "leave it out: the estimator of ZOArguments replaces the optimizer",
    "peft_config": "pass model=open_checkpoint(model, adapter=Adapter(config=peft_config))",
    "quantization_config": "leave it out: weights are in 16 or 32 bits",
    "ref_model": "leave it out: the reference is the base checkpoint, streamed once",
}

# The same for the mixins of first-order steps: what these support (None), and what to do about the rest.
FIRST_ORDER: Mapping[str, str | None] = {
    **dict.fromkeys(("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm")),
    "auto_find_batch_size": "set per_device_train_batch_size, and gradient_accumulation_steps for larger batches",
    "disable_dropout": "leave it out: forwards run without dropout",
    "deepspeed": "leave it out: the weights are streamed as memory=MemoryPolicy(...) says",
    "fsdp": "leave it out: the weights are streamed as memory=MemoryPolicy(...) says",
    "optimizers": "leave it out: optim names the optimizer, and lr_scheduler_type the schedule",
}

# TRL's trainers whose steps are tested to equal those of the monolithic loop.
TRL_SUPPORTED = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "TPOTrainer")
_GENERATES = "generates text during training, for which the model would have to be whole in memory"
_TRL_UNSUPPORTED: Mapping[str, str] = {
    "GRPOTrainer": f"{_GENERATES}, but with BackpropGRPOMixin",
    "RLOOTrainer": _GENERATES,
    "DistillationTrainer": f"{_GENERATES}, and so does its teacher",
    "KTOTrainer": "calls the model with a second batch within one loss",
}


def require_supported_trainer(kind: type, supported: Sequence[str] = TRL_SUPPORTED) -> None:
    """Refuse a trainer of TRL's whose training step does more than call the model with one batch."""
    for base in kind.__mro__:
        is_of_trl = base.__module__.split(".")[0] == "trl" and issubclass(base, Trainer)
        if is_of_trl and not base.__name__.startswith("_") and base.__name__ not in supported:
            obstacle = _TRL_UNSUPPORTED.get(base.__name__, "has not been tested with streamed steps")
            raise OptionError(
                base.__name__,
                found=f"a trainer that {obstacle}",
                expected=f"transformers' Trainer, or one of TRL's {', '.join(supported)}",
                remedy="use one of these, or write the loss as a function for CalledForward and call the engine's step",
            )


def head_for(kind: type) -> str:
    """Name of the head that a trainer's class needs, for ``open_checkpoint``."""
    is_reward = any(base.__module__.split(".")[0] == "trl" and base.__name__ == "RewardTrainer" for base in kind.__mro__)
    return "sequence-classification" if is_reward else "causal-lm"


def require_supported(args: Any, options: Mapping[str, Any], own: Mapping[str, str | None]) -> None:
    """Refuse arguments and options of a trainer that are not supported."""
    for name, remedy in {**_ABSENT, **own}.items():
        given = options.get(name)
        if remedy is not None and given is not None and given != (None, None):
            raise OptionError(name, found=f"a {type(given).__name__}", expected="no such option", remedy=remedy)
    defaults = {field.name: _default(field) for field in dataclasses.fields(args)}
    for name, remedy in {**_AT_DEFAULT, **own}.items():
        given = getattr(args, name, None)
        if (
            remedy is None
            or name not in defaults
            or given == defaults[name]
            or not (given or defaults[name])
            or given == _OFF.get(name)
        ):
            continue
        raise OptionError(name, found=repr(given), expected=f"the default, {defaults[name]!r}", remedy=remedy)
    if args.world_size > 1 or args.n_gpu > 1:
        raise OptionError(
            "args",
            found=f"{args.world_size} processes, {args.n_gpu} GPUs",
            expected="one process and at most one GPU",
            remedy="start one process, with one GPU in CUDA_VISIBLE_DEVICES",
        )


def autocast_of(args: Any) -> torch.dtype | None:
    """16-bit dtype that a trainer's arguments ask to compute in; None: the dtype of the weights."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else None


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


_REWARD_MODEL = (
    "To begin a reward model, save AutoModelForSequenceClassification.from_pretrained(model, num_labels=1) and pass its "
    "directory"
)
# For each dtype of autocast, or none: a trainer's arguments, and the options of open_checkpoint.
_ARGUMENTS = {
    None: "bf16=False, fp16=False",
    torch.bfloat16: "bf16=True, fp16=False",
    torch.float16: "bf16=False, fp16=True",
}
_OPTIONS = {
    None: "precision='exact'",
    torch.bfloat16: "precision='mixed', dtype='bfloat16'",
    torch.float16: "precision='mixed', dtype='float16'",
}


def open_for(
    model: HFBlockModel | Path | str, autocast: torch.dtype | None, head: str, *, adapter: Adapter | None = None
) -> HFBlockModel:
    """Open a trainer's model, or check a model that is open already."""
    if isinstance(model, (str, Path)):
        precision = "exact" if autocast is None else Precision(stored=torch.float32, computed=autocast)
        try:
            model = open_checkpoint(model, precision=precision, head=head, adapter=adapter)
        except OptionError as error:
            if autocast is None or error.where != "precision":
                raise
            half = str(autocast).removeprefix("torch.")
            remedy = f"pass {_ARGUMENTS[None]}; to compute in 16 bits, also a model from open_checkpoint with dtype={half!r}"
            raise OptionError("bf16, fp16", found=error.found, expected=error.expected, remedy=remedy) from error
        except CheckpointError as error:
            if head == CAUSAL_LM.name:
                raise
            raise CheckpointError(
                error.where, found=error.found, expected=error.expected, remedy=f"{error.remedy}. {_REWARD_MODEL}"
            ) from error
    if not isinstance(model, HFBlockModel):
        raise OptionError(
            "model",
            found=f"a {type(model).__name__}",
            expected="a model directory, a hub id, or a model from open_checkpoint",
            remedy="pass the path, since the model is not loaded as a whole",
        )
    if head != CAUSAL_LM.name and not (
        isinstance(model, HFHeadModel) and model.kind.name == head and model.config.num_labels == 1
    ):
        raise OptionError(
            "model",
            found=f"a {type(model.skeleton).__name__} with num_labels={model.config.num_labels}",
            expected=f"a reward model: opened with head={head!r}, with num_labels=1 in its config",
            remedy=_REWARD_MODEL,
        )
    if model.autocast != autocast:
        raise OptionError(
            "bf16, fp16",
            found=f"a model that computes {_precision(model.autocast)}",
            expected=f"a model that computes {_precision(autocast)}, as the arguments say",
            remedy=f"pass {_ARGUMENTS[model.autocast]}, or open the model with {_OPTIONS[autocast]}",
        )
    return model


def _precision(autocast: torch.dtype | None) -> str:
    return "in the dtype of its weights" if autocast is None else f"in {autocast} with float32 weights"
