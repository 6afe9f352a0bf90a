"""Which of a trainer's arguments mean something to a zeroth-order run; the others are refused, where they were given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from zo2core import OptionError

# Arguments of gradients and of models that are whole in memory, which have to be as they are by default.
_AT_DEFAULT: Mapping[str, str] = {
    "optim": "the estimator of ZOArguments takes the optimizer's place",
    "optim_args": "the estimator of ZOArguments takes the optimizer's place",
    "optim_target_modules": "leave it out: all parameters are trained",
    "adam_beta1": "the estimator of ZOArguments takes the optimizer's place",
    "adam_beta2": "the estimator of ZOArguments takes the optimizer's place",
    "adam_epsilon": "the estimator of ZOArguments takes the optimizer's place",
    "max_grad_norm": "clip projected gradients: an estimator that makes Clipped(estimator=MeZOSGD(...), value=...)",
    "neftune_noise_alpha": "the forward has to give the same loss twice",
    "auto_find_batch_size": "set per_device_train_batch_size, or ZOArguments(micro_batch_size=...)",
    "torch_compile": "leave it out: layers run one at a time",
    "use_liger_kernel": "leave it out: it replaces the model's forward",
    "fp16_full_eval": "pass fp16=True, or open the model with precision='mixed'",
    "bf16_full_eval": "pass bf16=True, or open the model with precision='mixed'",
    "model_init_kwargs": "pass what open_checkpoint gives, with its options",
    "deepspeed": "leave it out: the weights are streamed as ZOArguments(memory=...) says",
    "fsdp": "leave it out: the weights are streamed as ZOArguments(memory=...) says",
    "sync_ref_model": "the reference is the base checkpoint, and stays it",
    "chat_template_path": "give the tokenizer its template: a template that adds tokens needs other weights",
}
_ABSENT: Mapping[str, str] = {  # of the trainer's own constructor
    "model_init": "pass model",
    "optimizers": "the estimator of ZOArguments takes the optimizer's place; lr_scheduler_type names the schedule",
    "optimizer_cls_and_kwargs": "the estimator of ZOArguments takes the optimizer's place",
    "peft_config": "leave it out: all parameters are trained",
    "quantization_config": "leave it out: weights are in 16 or 32 bits",
    "ref_model": "leave it out: the reference is the base checkpoint, streamed once",
}


def require_heeded(args: Any, options: Mapping[str, Any]) -> None:
    """Refuse what was asked of a trainer and cannot be heeded.

    Args:
        args: A trainer's arguments, ``transformers.TrainingArguments`` or made from it.
        options: What else its constructor was given.

    Raises:
        OptionError: naming the argument.
    """
    for name, remedy in _ABSENT.items():
        given = options.get(name)
        if given is not None and given != (None, None):
            raise OptionError(name, found=f"a {type(given).__name__}", expected="none", remedy=remedy)
    defaults = {field.name: _default(field) for field in dataclasses.fields(args)}
    for name, remedy in _AT_DEFAULT.items():
        given = getattr(args, name, None)
        is_absent = given is None or given is False or given in ([], {}, "")
        if name in defaults and not is_absent and given != defaults[name]:
            raise OptionError(name, found=repr(given), expected=repr(defaults[name]), remedy=remedy)
    if args.world_size > 1 or args.n_gpu > 1:
        raise OptionError(
            "args",
            found=f"{args.world_size} processes, {args.n_gpu} GPUs",
            expected="one process, and one GPU at most",
            remedy="make one GPU visible with CUDA_VISIBLE_DEVICES, and start one process",
        )


def autocast_of(args: Any) -> torch.dtype | None:
    """The 16 bits that a trainer's arguments ask to compute in; None: the weights' own dtype."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else None


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
