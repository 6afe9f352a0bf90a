"""Which of a trainer's arguments mean something to a zeroth-order run; the others are refused, where they were given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer

from zo2core import OptionError

# Arguments of gradients and of models that are whole in memory, which have to be as they are by default.
_AT_DEFAULT: Mapping[str, str] = {
    "optim": "the estimator of ZOArguments takes the optimizer's place",
    "optim_args": "the estimator of ZOArguments takes the optimizer's place",
    "optim_target_modules": "leave it out: all parameters are trained",
    "adam_beta1": "the estimator of ZOArguments takes the optimizer's place",
    "adam_beta2": "the estimator of ZOArguments takes the optimizer's place",
    "adam_epsilon": "the estimator of ZOArguments takes the optimizer's place",
    "max_grad_norm": "leave it out: there is no gradient whose norm could be clipped; an estimator that makes "
    "Clipped(estimator=MeZOSGD(...), value=...) clips projected gradients",
    "neftune_noise_alpha": "the forward has to give the same loss twice",
    "auto_find_batch_size": "set per_device_train_batch_size, or ZOArguments(micro_batch_size=...)",
    "torch_compile": "leave it out: layers run one at a time",
    "use_liger_kernel": "leave it out: it replaces the model's forward",
    "fp16_full_eval": "pass fp16=True, or open the model with precision='mixed'",
    "bf16_full_eval": "pass bf16=True, or open the model with precision='mixed'",
    "disable_dropout": "leave it out: forwards run without dropout, as in MeZO",
    "predict_with_generate": "save the model and generate with zo2adapters.generate, or zo2 generate",
    "model_init_kwargs": "pass what open_checkpoint gives, with its options",
    "deepspeed": "leave it out: the weights are streamed as ZOArguments(memory=...) says",
    "fsdp": "leave it out: the weights are streamed as ZOArguments(memory=...) says",
    "sync_ref_model": "the reference is the base checkpoint, and stays it",
    "chat_template_path": "give the tokenizer its template: a template that adds tokens needs other weights",
}
_OFF: Mapping[str, object] = {"max_grad_norm": 0}  # turns off what does not exist here
_ABSENT: Mapping[str, str] = {  # of the trainer's own constructor
    "model_init": "pass model",
    "optimizers": "the estimator of ZOArguments takes the optimizer's place; lr_scheduler_type names the schedule",
    "optimizer_cls_and_kwargs": "the estimator of ZOArguments takes the optimizer's place",
    "peft_config": "pass model=open_checkpoint(model, adapter=Adapter(config=peft_config))",
    "quantization_config": "leave it out: weights are in 16 or 32 bits",
    "ref_model": "leave it out: the reference is the base checkpoint, streamed once",
}

# TRL's trainers that were tried, and were seen to take the steps of the monolithic loop.
_OF_TRL = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "TPOTrainer")
_GENERATES = "generates text during training, for which the model would have to be whole in memory"
_NOT_OF_TRL: Mapping[str, str] = {
    "GRPOTrainer": _GENERATES,
    "RLOOTrainer": _GENERATES,
    "DistillationTrainer": f"{_GENERATES}, and so does its teacher",
    "KTOTrainer": "calls the model with a second batch within one loss",
}


def require_supported_trainer(kind: type) -> None:
    """Refuse a trainer of TRL's whose training step does more than call the model with a batch.

    Args:
        kind: The class with the mixin, or one that is derived from it.

    Raises:
        OptionError: naming TRL's class.
    """
    for base in kind.__mro__:
        is_of_trl = base.__module__.split(".")[0] == "trl" and issubclass(base, Trainer)
        if is_of_trl and not base.__name__.startswith("_") and base.__name__ not in _OF_TRL:
            known = _NOT_OF_TRL.get(base.__name__)
            raise OptionError(
                base.__name__,
                found="a trainer that was not tried with zeroth-order steps" if known is None else f"a trainer that {known}",
                expected=f"transformers' Trainer, or one of TRL's {', '.join(_OF_TRL)}",
                remedy="use one of these, or write the loss as a function for CalledForward and step the engine by hand",
            )


def head_for(kind: type) -> str:
    """The head, as ``open_checkpoint`` takes it, of the model that a trainer's class is for."""
    is_reward = any(base.__module__.split(".")[0] == "trl" and base.__name__ == "RewardTrainer" for base in kind.__mro__)
    return "sequence-classification" if is_reward else "causal-lm"


def require_supported(args: Any, options: Mapping[str, Any], *, own: frozenset[str] = frozenset()) -> None:
    """Refuse what was asked of a trainer and cannot be heeded.

    Args:
        args: A trainer's arguments, ``transformers.TrainingArguments`` or made from it.
        options: What else its constructor was given.
        own: Names among them that have their usual meaning.

    Raises:
        OptionError: naming the argument.
    """
    for name, remedy in _ABSENT.items():
        given = options.get(name)
        if name not in own and given is not None and given != (None, None):
            raise OptionError(name, found=f"a {type(given).__name__}", expected="none", remedy=remedy)
    defaults = {field.name: _default(field) for field in dataclasses.fields(args)}
    for name, remedy in _AT_DEFAULT.items():
        given = getattr(args, name, None)
        if (
            name in own
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
