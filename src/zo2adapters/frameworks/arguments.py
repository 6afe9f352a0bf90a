"""Arguments of streamed steps in other frameworks, from the tree of options, and arguments of
trainers: which are supported, while others are refused if they are set.

Opens the model of a trainer in the precision that the trainer's arguments ask for.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
from transformers import Trainer, TrainingArguments

from zo2adapters.models.architecture import Precision
from zo2adapters.models.batches import ROUTERS
from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.models.hf import HFBlockModel, HFHeadModel
from zo2adapters.models.library_names import names_of, require_attributes
from zo2adapters.models.peft_adapter import Adapter
from zo2adapters.models.peft_model import PeftBlockModel
from zo2adapters.tasks.option_tree import (
    BOTH,
    ZEROTH,
    MethodName,
    Option,
    Refusal,
    declared,
    docstrings,
    kinds_of,
    named_values,
    refuse,
)
from zo2adapters.trainers.optimization import (
    DEFAULT_RATES,
    BlockUpdates,
    FirstOrderSteps,
    StepSize,
    ZerothOrderSteps,
    optimizer_of,
)
from zo2adapters.trainers.option_checks import require_valid
from zo2adapters.trainers.options import (
    ActivationMemory,
    ChosenDevice,
    MemoryLimits,
    MicroBatches,
    Seeded,
)
from zo2core import (
    BlockModel,
    BlockUpdate,
    Engine,
    EngineOptions,
    FirstOrder,
    Journal,
    LossScaling,
    MemoryPolicy,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.errors import CheckpointError, OptionError
from zo2core.ranges import OF_ADAPTERS, NormGroup

with names_of("transformers"):
    from transformers.training_args import OptimizerNames


ArgumentsT = TypeVar("ArgumentsT", bound=type)
_FLAG = re.compile(r"--([a-z][a-z-]*)")


def documented(arguments: ArgumentsT) -> ArgumentsT:
    """Give a dataclass the docstrings of its fields as those of its arguments, and as their help
    for ``HfArgumentParser``; and a signature with plain types.
    """
    texts = docstrings(arguments)
    lines = [str(inspect.getdoc(arguments)), "", "Args:"]
    for field in dataclasses.fields(arguments):
        named = _FLAG.sub(lambda flag: flag[1].replace("-", "_"), texts[field.name])
        text = " ".join(named.split())
        field.metadata = MappingProxyType({"help": text.replace("%", "%%")})
        wrap = textwrap.TextWrapper(96, initial_indent="    ", subsequent_indent=" " * 8)
        lines += wrap.wrap(f"{field.name}: {text}")
    arguments.__doc__ = "\n".join(lines)
    hints = get_type_hints(arguments)  # without what is declared beside the types
    signature = inspect.signature(arguments)
    parameters = [one.replace(annotation=hints[one.name]) for one in signature.parameters.values()]
    described: Any = arguments
    described.__signature__ = signature.replace(parameters=parameters, return_annotation=None)
    return arguments


@documented
@dataclass(frozen=True, kw_only=True)
class MethodArguments(MicroBatches, ActivationMemory, MemoryLimits, BlockUpdates, ZerothOrderSteps):
    """How a framework's steps are taken, as the options of ``zo2 train`` say it.

    A subclass with another ``estimator_of`` has an estimator of its own.
    """

    write_back: WriteBackPolicy | None = None
    """With zeroth-order steps: when changed segments are written to disk, in the folder
    .zo2-scratch of its directory; by default never. The files serve one process only: a resumed run
    replays its journal, since its checkpoint may be of an earlier step than the files.
    """

    def __post_init__(self) -> None:
        """Take names for what has one, such as ``noise="gaussian"``, and refuse what is invalid."""
        for one in declared(self):
            names = named_values(one.type) if len(kinds_of(one.type)) == 1 else {}
            value = one.default
            if names and value not in names.values():
                expected = f"one of {', '.join(sorted(names))}"
                is_named = isinstance(value, str) and value in names
                refuse(Refusal(not is_named, one.name, repr(value)[:80], expected, "pass one"))
                object.__setattr__(self, one.name, names[value])
        require_valid(self)
        if self.optimizer is None:
            self.require_consistent()
        whole = self.per_row and self.queries == 1
        expected = "at least 2, among which the rows of a batch are divided"
        writes = self.optimizer is not None and self.write_back is not None
        policy = f"a policy with --method {self.method}"
        refuse(
            Refusal(whole, "queries", "1 with per_row", expected, "pass queries=4, or so"),
            Refusal(writes, "write_back", policy, ZEROTH.needs),
        )

    def memory_policy(self) -> MemoryPolicy:
        """How much memory the process may use."""
        policy = MemoryPolicy(host=self.memory, device=self.device_memory)
        if self.activation_memory is None:
            return policy
        return replace(policy, activations=self.activation_memory)

    def open_zeroth_order(
        self,
        model: BlockModel,
        journal: Journal,
        *,
        lr: Callable[[int], float],
        weight_decay: float,
        seed: int,
        device: str,
    ) -> Engine:
        """The engine of a run, at the last step of its journal.

        Args:
            model: The model.
            journal: The run's journal, in memory.
            lr: Maps a 0-based step to its learning rate.
            weight_decay: MeZO's weight decay.
            seed: Seed of the run's directions.
            device: Device to compute on.

        Raises:
            ZO2Error: as ``Engine`` says.
        """
        write_back = self.write_back
        if write_back is not None:
            # files of an earlier engine do not belong to this version of the run
            write_back = replace(write_back, directory=Path(write_back.directory) / ".zo2-scratch")
            shutil.rmtree(write_back.directory, ignore_errors=True)
        return Engine(
            model,
            ZerothOrder(
                self.estimator_of(lr, weight_decay),
                noise=self.generator(),
                perturbation=self.perturbation,
                seed=seed,
            ),
            journal=journal,
            device=device,
            memory=self.memory_policy(),
            micro_batch_size=self.micro_batch_size,
            options=EngineOptions(write_back=write_back),
        )

    def open_first_order(
        self,
        model: BlockModel,
        update: BlockUpdate | None,
        *,
        lr: Callable[[int], float],
        clip: float | None,
        clip_per: NormGroup = "all",
        device: str,
    ) -> Engine:
        """The engine of a run.

        Args:
            model: The model.
            update: The optimizer of all parameters; None: the framework's optimizer changes the
                parameters of an adapter.
            lr: Maps a 0-based step to its learning rate.
            clip: Largest 2-norm of all gradients together; None does not clip. That of an adapter
                is the framework's.
            clip_per: Which gradients ``clip`` takes together.
            device: Device to compute on.

        Raises:
            ZO2Error: as ``Engine`` says.
        """
        method = FirstOrder(None)
        if update is not None:
            scaling = LossScaling() if self.loss_scaling else None
            method = FirstOrder(
                update,
                lr=lr,
                clip=clip,
                clip_per=clip_per,
                clip_value=self.max_grad_value,
                scaling=scaling,
            )
        return Engine(
            model,
            method,
            device=device,
            memory=self.memory_policy(),
            micro_batch_size=self.micro_batch_size,
        )


@documented
@dataclass(frozen=True, kw_only=True)
class StreamedArguments(MethodArguments):
    """What a trainer's own arguments do not say of a streamed run.

    Learning rate, its schedule, weight decay, clipping by norm, seed and device are arguments of
    the trainer, and so is an adapter's config. With ``lora`` or ``adamw``, ``optim`` names the
    optimizer. A subclass with another ``estimator_of`` has an estimator of its own.
    """

    trainer_loss: Annotated[bool, Option("method", effect=ZEROTH)] = False
    """With zeroth-order steps: whether to call the trainer's compute_loss in training even if it
    gives the model's own loss. It then also computes the trainer's training metrics, which needs
    all logits.
    """
    export_checkpoints: Annotated[bool, Option("output", effect=ZEROTH)] = True
    """With zeroth-order steps: whether checkpoints have the weights as well as the journal. Without
    weights a checkpoint takes a few hundred bytes per step; resuming and loading the best model
    need only the journal.
    """


@documented
@dataclass(frozen=True, kw_only=True)
class LightningArguments(FirstOrderSteps, MethodArguments, StepSize, ChosenDevice, Seeded):
    """How a ``StreamedLightningModule`` is trained, as the options of ``zo2 train`` say it.

    The learning rate is a number. A subclass with another ``estimator_of`` has an estimator of its
    own.
    """

    def __post_init__(self) -> None:
        """Fill in the method's learning rate, and refuse what is invalid."""
        if self.lr is None:
            object.__setattr__(self, "lr", DEFAULT_RATES.get(self.method))
        super().__post_init__()
        self.require_sane()


class Kind(Enum):
    """What steps train, and how."""

    ZEROTH_ORDER = "all parameters, or an adapter, without gradients"
    ADAPTER = "an adapter, by gradients"
    FULL = "all parameters, by gradients"
    BOTH = "an adapter and the base under it, by gradients"

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained by gradients."""
        return self in (Kind.ADAPTER, Kind.BOTH)

    @property
    def trains_all(self) -> bool:
        """Whether all parameters are trained by gradients."""
        return self in (Kind.FULL, Kind.BOTH)


def kind_of(arguments: MethodArguments, *, has_adapter: bool) -> Kind:
    """What a method trains of a model, with an adapter or without one."""
    if arguments.optimizer is None:
        return Kind.ZEROTH_ORDER
    if arguments.trains_both:
        arguments.require_base_lr()
        require_valid(arguments, has_adapter=True)
        return Kind.BOTH
    if has_adapter and arguments.optimizer not in OF_ADAPTERS:
        expected = f"lora, or {' or '.join(OF_ADAPTERS)}, for an adapter"
        raise OptionError(
            "method", arguments.method, expected, "leave the adapter out, or pass lora"
        )
    require_valid(arguments, has_adapter=has_adapter)
    return Kind.ADAPTER if has_adapter or arguments.method == "lora" else Kind.FULL


def require_trainable_base(model: HFBlockModel, kind: Kind) -> None:
    """Refuse a model whose base is trained beside an adapter, or only read, as the method is
    not.
    """
    trains_base = isinstance(model, PeftBlockModel) and model.adapter.trains_base
    found = "a base that is only read" if isinstance(model, PeftBlockModel) else "no adapter"
    opened = "open_checkpoint(model, adapter=Adapter(config=..., trains_base=True))"
    refuse(
        Refusal(
            kind is Kind.BOTH and not trains_base,
            "model",
            found,
            f"an adapter and a base that are both trained by {BOTH}",
            f"pass {opened}",
        ),
        Refusal(
            kind is not Kind.BOTH and trains_base,
            "model",
            "a base that is trained beside its adapter",
            "one that is only read",
            f"pass method={BOTH!r}, or leave trains_base out",
        ),
    )


# Arguments for gradients and for models that are whole in memory, which must have their default
# values, and options of a trainer's constructor, which must be absent. Values are remedies. This
# table is for zeroth-order steps.
_ESTIMATOR = "leave it out: a zeroth-order method has an estimator in place of the optimizer"
_STREAMED = "leave it out: the weights are streamed as StreamedArguments(memory=...) says"
_REMEDIES: Mapping[str, str] = {
    **dict.fromkeys(
        ("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon"), _ESTIMATOR
    ),
    "optim_target_modules": "leave it out: all parameters are trained",
    "max_grad_norm": (
        "leave it out: there is no gradient whose norm could be clipped; "
        "StreamedArguments(clip_grad=...) clips projected gradients"
    ),
    "neftune_noise_alpha": "leave it out: forwards must be deterministic",
    "auto_find_batch_size": (
        "set per_device_train_batch_size, or StreamedArguments(micro_batch_size=...)"
    ),
    "torch_compile": "leave it out: layers run one at a time",
    "use_liger_kernel": "leave it out: it replaces the model's forward",
    "fp16_full_eval": "pass fp16=True, or open the model with precision='mixed'",
    "bf16_full_eval": "pass bf16=True, or open the model with precision='mixed'",
    "disable_dropout": "leave it out: forwards run without dropout, as in MeZO",
    "predict_with_generate": "save the model, then use zo2adapters.generate or zo2 generate",
    **dict.fromkeys(("deepspeed", "fsdp"), _STREAMED),
    "sync_ref_model": "leave it out: the reference is always the base checkpoint",
    "chat_template_path": (
        "pass a file that ends in .jinja or .j2: a template of another tokenizer, which adds "
        "tokens, needs other weights"
    ),
    "model_init": "pass model",
    "optimizers": f"{_ESTIMATOR}; lr_scheduler_type names the schedule",
    "optimizer_cls_and_kwargs": _ESTIMATOR,
    "peft_config": "pass model=open_checkpoint(model, adapter=Adapter(config=peft_config))",
    "quantization_config": "leave it out: weights are in 16 or 32 bits",
    "ref_model": "leave it out: the reference is the base checkpoint, streamed once",
}
_OFF: Mapping[str, object] = {"max_grad_norm": 0}  # values that turn an unsupported feature off

# The same for first-order steps: what these support (None), and what to do about the
# rest.
_FIRST_ORDER: Mapping[str, str | None] = {
    **dict.fromkeys(
        ("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm")
    ),
    "auto_find_batch_size": (
        "set per_device_train_batch_size, and gradient_accumulation_steps for larger batches"
    ),
    "disable_dropout": "leave it out: forwards run without dropout",
    "optimizers": "leave it out: optim names the optimizer, and lr_scheduler_type the schedule",
}
FULL: Mapping[str, str | None] = {
    **_FIRST_ORDER,
    "optimizer_cls_and_kwargs": _FIRST_ORDER["optimizers"],
}
OF_ADAPTER_CONFIG: Mapping[str, str | None] = {
    "optim_target_modules": "leave it out: the adapter's config names the modules",
}
ADAPTER: Mapping[str, str | None] = {
    **_FIRST_ORDER,
    **OF_ADAPTER_CONFIG,
    "optimizer_cls_and_kwargs": None,
    "ref_model": (
        "leave it out: the reference is the model with the adapter that training starts from"
    ),
    "sync_ref_model": (
        "leave it out: the reference is always the model with the adapter that training starts from"
    ),
}
_IN_MEMORY = "leave it out: it needs the whole model in memory"
ONE_UPDATE = (
    "leave it out: completions serve one update, whose own log-probabilities are the old ones"
)
_SAMPLING = "leave it out: tokens are sampled by temperature and top_p alone"
GRPO: Mapping[str, str | None] = {
    "use_vllm": f"{_IN_MEMORY}, in vLLM",
    "use_transformers_continuous_batching": _IN_MEMORY,
    "beta": "leave it out: a penalty for leaving the reference is not built",
    "num_iterations": ONE_UPDATE,
    "cast_lm_head_to_fp32": "open the model with precision='mixed' or in float32",
    **dict.fromkeys(("top_k", "min_p", "repetition_penalty", "generation_kwargs"), _SAMPLING),
    "cache_implementation": "leave it out: keys and values are kept as they are",
    **dict.fromkeys(
        ("tools", "rollout_func", "environment_factory"),
        "leave it out: only single answers are generated",
    ),
}

# TRL's trainers whose steps are tested to equal those of the monolithic loop.
TRL_SUPPORTED = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "TPOTrainer")
_GENERATES = "generates text during training, for which the model would have to be whole in memory"
_TRL_UNSUPPORTED: Mapping[str, str] = {
    "GRPOTrainer": f"{_GENERATES}, but with StreamedGRPOMixin",
    "RLOOTrainer": _GENERATES,
    "DistillationTrainer": f"{_GENERATES}, and so does its teacher",
    "KTOTrainer": "calls the model with a second batch within one loss",
}

# Methods of trainers that the mixins replace. Under another name the trainer's own would run.
REPLACED: Mapping[str, tuple[str, ...]] = {
    "Trainer": (
        *("_build_accelerator_args", "_clip_grad_norm", "_get_grad_norm", "_load_best_model"),
        *("_load_from_checkpoint", "_move_model_to_device", "_prepare_inputs", "_save"),
        *("_save_checkpoint", "create_accelerator_and_postprocess", "create_optimizer"),
        *("evaluate", "evaluation_loop", "floating_point_ops", "get_decay_parameter_names"),
        *("prediction_step", "train", "training_step"),
    ),
    "DPOTrainer": ("_precompute_ref_logps", "compute_ref_log_probs"),
    "GRPOTrainer": ("_generate_single_turn",),
}


def _trl_trainers(kind: type) -> list[str]:
    """Names of TRL's trainers that a class is derived from."""
    classes = [
        base
        for base in kind.__mro__
        if base.__module__.split(".")[0] == "trl" and issubclass(base, Trainer)
    ]
    return [base.__name__ for base in classes if not base.__name__.startswith("_")]


def given_or_default(args: Any, kind: type, model: object) -> TrainingArguments:
    """A trainer's arguments; if there are none, those that the trainer makes itself then."""
    if args is None:
        trl = _trl_trainers(kind)
        if not trl:
            return TrainingArguments("tmp_trainer")
        trainer: Any = next(base for base in kind.__mro__ if base.__name__ == trl[0])
        config = vars(sys.modules[trainer.__module__])[f"{trl[0].removesuffix('Trainer')}Config"]
        path = model.config._name_or_path if isinstance(model, HFBlockModel) else str(model)
        args = config(f"{path.split('/')[-1]}-{trainer._name}")
    if not isinstance(args, TrainingArguments):
        raise OptionError(
            "args",
            f"a {type(args).__name__}",
            "TrainingArguments",
            "pass args=TrainingArguments(...)",
        )
    return args


def _is_template_file(path: Any) -> bool:
    """Whether TRL takes a chat template from a file, and leaves model and tokens as they are."""
    return isinstance(path, str) and os.path.isfile(path) and path.endswith((".jinja", ".j2"))


def with_precomputed_reference(args: Any, options: Mapping[str, Any]) -> Any:
    """The arguments with which DPO computes the reference's log-probabilities beforehand, instead
    of loading a whole reference model. The caller's stay as they are.

    TRL does so for rows of text alone.
    """
    if getattr(args, "precompute_ref_log_probs", None) is not False:
        return args
    row: Any = next(iter(options.get("train_dataset") or ()), {})
    if isinstance(row, Mapping) and {"image", "images"} & row.keys():
        expected = "rows of text, whose reference log-probabilities are computed before training"
        raise OptionError("train_dataset", "rows with images", expected, "leave the images out")
    args = copy.copy(args)
    args.precompute_ref_log_probs = True
    return args


def require_supported(
    kind: type,
    args: Any,
    options: Mapping[str, Any],
    *,
    trainers: Sequence[str],
    remedies: Mapping[str, str | None],
) -> None:
    """Refuse TRL's trainers whose step is not a call of the model with one batch, and arguments
    that are not supported.
    """
    _require_trainer(kind, trainers)
    for name, remedy in {**_REMEDIES, **remedies}.items():
        if remedy is not None:
            _require_no_option(name, options.get(name), remedy)
            _require_default(name, args, remedy)
    if args.world_size > 1 or args.n_gpu > 1:
        found = f"{args.world_size} processes, {args.n_gpu} GPUs"
        expected = "one process and at most one GPU"
        raise OptionError(
            "args", found, expected, "start one process, with one GPU in CUDA_VISIBLE_DEVICES"
        )


def with_optimizer(args: TrainingArguments, method: MethodName) -> TrainingArguments:
    """The arguments with the optimizer of a method; adapters and adamw leave it to ``optim``. The
    caller's stay as they are.
    """
    if method == BOTH or optimizer_of(method) in (None, "adamw"):
        return args
    if args.optim != method:
        _require_default("optim", args, f"leave it out: {method} is the optimizer")
    if method not in list(OptimizerNames):
        return args
    args = copy.copy(args)
    args.optim = OptimizerNames(method)
    return args


def _require_trainer(kind: type, trainers: Sequence[str]) -> None:
    """Refuse trainers that lack what is replaced, and TRL's trainers that are not among these."""
    for base in kind.__mro__:
        if issubclass(base, Trainer) and base.__module__.startswith(("transformers.", "trl.")):
            require_attributes(base, *REPLACED.get(base.__name__, ()))
    for name in _trl_trainers(kind):
        if name not in trainers:
            found = (
                "a trainer that "
                f"{_TRL_UNSUPPORTED.get(name, 'has not been tested with streamed steps')}"
            )
            expected = f"transformers' Trainer, or one of TRL's {', '.join(trainers)}"
            other = (
                "use one of these, or write the loss as a function for CalledForward and call the "
                "engine's step"
            )
            raise OptionError(name, found, expected, other)


def _require_no_option(name: str, option: object, remedy: str) -> None:
    """Refuse an argument of a trainer's constructor, unless it is None."""
    if option is not None and option != (None, None):
        raise OptionError(name, f"a {type(option).__name__}", "no such option", remedy)


def _require_default(name: str, args: Any, remedy: str) -> None:
    """Refuse a field of a trainer's arguments, if they have it, that is not as by default."""
    field = next((field for field in dataclasses.fields(args) if field.name == name), None)
    if field is None:
        return
    value = getattr(args, name)
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    is_off = not (value or default) or value == _OFF.get(name)
    is_template = name == "chat_template_path" and _is_template_file(value)
    if value != default and not is_off and not is_template:
        raise OptionError(name, repr(value), f"the default, {default!r}", remedy)


_REWARD_MODEL = (
    "To begin a reward model, save AutoModelForSequenceClassification.from_pretrained(model, "
    "num_labels=1) and pass its "
    "directory"
)


def open_model(
    model: HFBlockModel | Path | str, args: TrainingArguments, kind: type, adapter: Adapter | None
) -> HFBlockModel:
    """Open the model of a trainer, in the precision that the arguments ask for, or check one that
    is open already.
    """
    autocast = _autocast(args)
    is_reward = "RewardTrainer" in _trl_trainers(kind)
    if isinstance(model, (str, Path)):
        dtype = _dtype_of_weights(args, kind, is_exact=autocast is None)
        model = _opened(model, dtype, autocast, adapter, is_reward=is_reward)
    elif getattr(args, "model_init_kwargs", None):
        found = "some with an opened model"
        remedy = "leave it out, or pass the model's path"
        raise OptionError("model_init_kwargs", found, "none, since it is open already", remedy)
    if not isinstance(model, HFBlockModel):
        raise OptionError(
            "model",
            f"a {type(model).__name__}",
            "a model directory, a hub id, or a model from open_checkpoint",
            "pass the path, since the model is not loaded as a whole",
        )
    if is_reward:
        _require_reward_model(model)
    _require_autocast(model, autocast)
    return model


def _autocast(args: TrainingArguments) -> torch.dtype | None:
    """The dtype in which the arguments let the model compute; None: that of its weights."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else None


def _opened(
    path: Path | str,
    dtype: Any,
    autocast: torch.dtype | None,
    adapter: Adapter | None,
    *,
    is_reward: bool,
) -> HFBlockModel:
    """Open a model; errors name the trainer's arguments."""
    head = "sequence-classification" if is_reward else "causal-lm"
    precision = "exact" if autocast is None else Precision(stored=torch.float32, computed=autocast)
    try:
        return open_checkpoint(path, dtype=dtype, precision=precision, head=head, adapter=adapter)
    except OptionError as error:
        if autocast is None or error.where != "precision":
            raise
        remedy = (
            f"pass {_arguments(None)}; to compute in 16 bits, also a model from "
            f"open_checkpoint with dtype={_name(autocast)!r}"
        )
        raise OptionError("bf16, fp16", error.found, error.expected, remedy) from error
    except CheckpointError as error:
        if not is_reward:
            raise
        remedy = f"{error.remedy}. {_REWARD_MODEL}"
        raise CheckpointError(error.where, error.found, error.expected, remedy) from error


def _require_reward_model(model: HFBlockModel) -> None:
    """Refuse a model that does not rate a text with one number."""
    has_head = isinstance(model, HFHeadModel) and model.kind.name == "sequence-classification"
    if has_head and model.config.num_labels == 1:
        return
    found = f"a {type(model.skeleton).__name__} with num_labels={model.config.num_labels}"
    expected = (
        "a reward model: opened with head='sequence-classification', with num_labels=1 in its "
        "config"
    )
    raise OptionError("model", found, expected, _REWARD_MODEL)


def _require_autocast(model: HFBlockModel, autocast: torch.dtype | None) -> None:
    """Refuse a model that computes in another dtype than the arguments say."""
    if model.autocast == autocast:
        return
    options = "precision='exact'"
    if autocast is not None:
        options = f"precision='mixed', dtype={_name(autocast)!r}"
    found = f"a model that computes {_precision(model.autocast)}"
    expected = f"a model that computes {_precision(autocast)}, as the arguments say"
    remedy = f"pass {_arguments(model.autocast)}, or open the model with {options}"
    raise OptionError("bf16, fp16", found, expected, remedy)


# What ``model_init_kwargs`` may say, besides a dtype: nothing that changes how a model is opened.
_WITHOUT_EFFECT = {"trust_remote_code": (False, None), "device_map": (None,), "use_cache": (False,)}


def _dtype_of_weights(args: TrainingArguments, kind: type, *, is_exact: bool) -> Any:
    """The dtype in which a trainer opens a path: ``Trainer`` has none, so that it is the
    checkpoint's; TRL's trainers take that of ``model_init_kwargs``, by default float32.

    Mixed precision stores float32.
    """
    init_kwargs = dict(getattr(args, "model_init_kwargs", None) or {})
    dtype = init_kwargs.pop("dtype", "float32")
    for name, value in init_kwargs.items():
        if value not in _WITHOUT_EFFECT.get(name, ()):
            found = repr(value)[:80]
            remedy = "pass a model from open_checkpoint, with its options"
            raise OptionError(f"model_init_kwargs[{name!r}]", found, "dtype alone", remedy)
    if not is_exact:
        if dtype not in ("float32", torch.float32):
            expected = "float32, whose weights are computed with in 16 bits"
            remedy = "leave it out, or pass bf16=False, fp16=False"
            raise OptionError("model_init_kwargs['dtype']", repr(dtype), expected, remedy)
        return "auto"  # ``Precision`` says it
    return dtype if _trl_trainers(kind) else "auto"


def require_router_loss(model: HFBlockModel, args: TrainingArguments) -> None:
    """Refuse a loss of routers that one of TRL's trainers will ask for, if the model has none.

    They ask for it unless their coefficient, which by default is that of the model's config, is 0.
    """
    config = model.config.get_text_config()
    name = "router_aux_loss_coef"
    if hasattr(config, ROUTERS) and hasattr(args, name):
        argument = getattr(args, name)
        coefficient = getattr(config, name, 0.0) if argument is None else argument
        if coefficient != 0.0:
            model.routers.require_recorded(name, str(coefficient), f"pass {name}=0.0")


def _arguments(autocast: torch.dtype | None) -> str:
    """A trainer's arguments for a dtype of autocast, or none."""
    return f"bf16={autocast is torch.bfloat16}, fp16={autocast is torch.float16}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _precision(autocast: torch.dtype | None) -> str:
    return (
        "in the dtype of its weights" if autocast is None else f"in {autocast} with float32 weights"
    )
