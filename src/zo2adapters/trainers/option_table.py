"""The table of the options of ``zo2 train``, from which refusals, changes at a resume and the recipe's sections follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_args

from zo2adapters.tasks.registry import names_model_loss
from zo2core.errors import OptionError
from zo2core.names import OptimizerName
from zo2core.ranges import LARGEST, parse_size, require_number, require_whole

OptionsT = TypeVar("OptionsT")
Check: TypeAlias = Callable[[str, Any], None]  # of an option's name and value

MOST_ROWS = 1 << 16  # largest batch: each row is a Python object, however much memory there is
MOST_QUERIES = 1 << 16


class Change(Enum):
    """When an option of a run may change."""

    NEVER = "fixed at the start"
    BRANCH = "may change in a branch"
    RESUME = "may change at a resume, and in a branch"
    MOVED = "path of what the run has a digest of, and may have moved"
    CALL = "belongs to the command, and is not saved with the run"


class Effect(NamedTuple):
    """With which methods an option has an effect."""

    needs: str  # for messages
    methods: tuple[OptimizerName | None, ...]  # None: zeroth-order steps
    of_adapters: bool = True  # also where one of these methods trains an adapter

    def applies(self, method: OptimizerName | None, *, trains_adapter: bool) -> bool:
        """Whether the option has an effect on a run."""
        return method in self.methods and (self.of_adapters or method is None or not trains_adapter)


class Option(NamedTuple):
    """An option's row."""

    section: str  # of the recipe
    change: Change
    effect: Effect
    check: Check | None  # refuses values out of range; None and auto are not checked


_GRADIENTS: tuple[OptimizerName, ...] = get_args(OptimizerName)
_ANY = Effect("any method", (None, *_GRADIENTS))
_ZEROTH = Effect("no --method", (None,))
_METHOD = Effect("--method", _GRADIENTS)
_FULL = Effect("--method and no adapter", _GRADIENTS, of_adapters=False)
_WRITES = Effect("no adapter", (None, *_GRADIENTS), of_adapters=False)
_ADAMW = Effect("--method adamw", ("adamw",))
_FULL_ADAMW = Effect("--method adamw and no adapter", ("adamw",), of_adapters=False)
_SGD = Effect("--method sgd", ("sgd",))
_BADAM = Effect("--method badam", ("badam",))
_NEVER, _BRANCH, _RESUME, _MOVED, _CALL = Change.NEVER, Change.BRANCH, Change.RESUME, Change.MOVED, Change.CALL


def _whole(least: int, most: int = LARGEST, otherwise: str = "") -> Check:
    return partial(require_whole, least=least, most=most, otherwise=otherwise)


def _number(**bounds: Any) -> Check:
    return partial(require_number, **bounds)


def _size(option: str, value: Any) -> None:
    parse_size(value, option=option)


def _rates(option: str, value: Any) -> None:
    for rate in value if isinstance(value, tuple) else (value,):
        require_number(option, rate, least=0, below=1)


def _bits(option: str, value: Any) -> None:
    if value not in (8, 32):
        raise OptionError(option, found=repr(value), expected="8 or 32", remedy="pass one of them")


_ROWS: Sequence[tuple[str, str, Change, Effect, Check | None]] = [
    ("model", "model architecture adapter", _MOVED, _ANY, None),
    ("model", "head dtype precision adapter_frozen lora_targets", _NEVER, _ANY, None),
    ("model", "transfer_dtype", _NEVER, _ZEROTH, None),
    ("model", "lora_rank lora_alpha", _NEVER, _ANY, _whole(1)),
    ("data", "data", _MOVED, _ANY, None),
    ("data", "prompt_template text_column prompt_column completion_column label_column messages_column", _NEVER, _ANY, None),
    ("data", "labels train_on too_long rendered_at pack", _NEVER, _ANY, None),
    ("data", "batch_size", _NEVER, _ANY, _whole(1, MOST_ROWS)),
    ("data", "micro_batch_size loss_chunk", _NEVER, _ANY, _whole(1)),
    ("data", "sequence_length", _NEVER, _ANY, _whole(2)),
    ("method", "method objective", _NEVER, _ANY, None),
    ("method", "beta", _NEVER, _ANY, _number(above=0)),
    ("method", "stream_blocks loss_scaling", _NEVER, _FULL, None),
    ("method", "max_grad_value", _NEVER, _FULL, _number(above=0)),
    ("method", "switch_every", _NEVER, _BADAM, _whole(1)),
    ("method", "delayed_update", _NEVER, _FULL_ADAMW, None),
    ("method", "state_bits", _NEVER, _FULL_ADAMW, _bits),
    ("method", "betas", _NEVER, _ADAMW, _rates),
    ("method", "momentum", _NEVER, _SGD, _rates),
    ("method", "max_grad_norm", _NEVER, _METHOD, _number(above=0)),
    ("method", "estimator fitness per_row guard", _BRANCH, _ZEROTH, None),
    ("method", "zo_eps", _BRANCH, _ZEROTH, _number(above=0)),
    ("method", "queries", _BRANCH, _ZEROTH, _whole(1, MOST_QUERIES)),
    ("method", "clip_grad clip_median", _BRANCH, _ZEROTH, None),
    ("method", "noise exact_mezo rank period stack reward max_new_tokens temperature top_p", _NEVER, _ZEROTH, None),
    ("method", "reward_seconds reward_memory max_drift", _RESUME, _ZEROTH, None),
    ("schedule", "steps", _RESUME, _ANY, _whole(1)),
    ("schedule", "lr", _BRANCH, _ANY, _number(above=0)),
    ("schedule", "decay warmup_steps weight_decay", _BRANCH, _ANY, None),
    ("schedule", "seed", _NEVER, _ANY, _whole(-LARGEST, LARGEST)),
    ("memory", "memory device_memory activation_memory", _RESUME, _ANY, _size),
    ("memory", "device", _NEVER, _ANY, None),
    ("memory", "snapshot_every", _RESUME, _ANY, _whole(1)),
    ("memory", "write_back_every", _RESUME, _ZEROTH, _whole(1, otherwise=", or auto or never")),
    ("memory", "write_limit_tb", _RESUME, _WRITES, _number(above=0)),
    ("evaluate", "evaluation", _MOVED, _ANY, None),
    ("evaluate", "eval_split", _NEVER, _ANY, _number(above=0, below=1, remedy="pass a share such as 0.1")),
    ("evaluate", "evaluate_every", _BRANCH, _ANY, _whole(1)),
    ("evaluate", "samples", _NEVER, _ANY, _whole(0, MOST_ROWS)),
    ("output", "keep_best report_to", _RESUME, _ANY, None),
    ("output", "output task shots resume from_step runs trace verify_base split", _CALL, _ANY, None),
]
SECTIONS = list(dict.fromkeys(section for section, *_ in _ROWS))  # of a recipe, in order
OPTIONS = {
    name: Option(section, change, effect, check) for section, names, change, effect, check in _ROWS for name in names.split()
}
# Options whose value has settings after a colon, such as adamw:betas=0.9,0.95, or settings alone, and the field of each. The
# setting without a name is a number in place of another value.
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "columns": {key: f"{key}_column" for key in ("text", "prompt", "completion", "label", "messages")},
    "train_on": {"rendered_at": "rendered_at"},
    "precision": {"transfer": "transfer_dtype"},
    "objective": {"beta": "beta"},
    "method": {
        key: key
        for key in (
            "betas",
            "momentum",
            "switch_every",
            "state_bits",
            "delayed_update",
            "stream_blocks",
            "loss_scaling",
        )
    },
    "clip": {"norm": "max_grad_norm", "value": "max_grad_value", "projected": "clip_grad", "median": "clip_median"},
    "estimator": {"exact": "exact_mezo", "fitness": "fitness"},
    "rank": {"period": "period", "stack": "stack"},
    "reward_options": {
        "max_new_tokens": "max_new_tokens",
        "temperature": "temperature",
        "top_p": "top_p",
        "seconds": "reward_seconds",
        "memory": "reward_memory",
        "max_drift": "max_drift",
    },
    "memory": {"activations": "activation_memory"},
    "evaluation": {"": "eval_split"},
}
SETTING_OF = {name: (option, key) for option, settings in SETTINGS.items() for key, name in settings.items()}

# Pairs of options that exclude each other, and what the first one needs instead.
EXCLUDED: Sequence[tuple[str, str, str]] = [
    ("eval_split", "evaluation", "one source of rows to evaluate on"),
    ("lora_rank", "adapter", "one adapter: --lora-rank starts a new one, --adapter takes that of a file"),
    ("samples", "head", "a causal language model"),
    ("reward", "head", "a causal language model"),
    ("pack", "head", "a causal language model"),
    ("per_row", "head", "a causal language model"),
    ("objective", "head", "the model's own loss"),
    ("beta", "head", "the model's own loss"),
    ("reward", "objective", "one objective"),
    ("reward", "method", "zeroth-order steps; GRPO needs TRL's trainer"),
    ("micro_batch_size", "reward", "none: rows run at a time as memory allows"),
    ("per_row", "objective", "loss, which each row has separately"),
    ("per_row", "pack", "padded rows, whose losses can be told apart"),
    ("per_row", "micro_batch_size", "whole batches"),
    ("pack", "micro_batch_size", "whole batches, because packed rows run together"),
    ("rank", "snapshot_every", "no snapshots, because no weights change"),
    ("exact_mezo", "rank", "gaussian or rademacher noise, whose factors are drawn in any order"),
    ("delayed_update", "stream_blocks", "none: the host computes all of a step"),
    ("keep_best", "stream_blocks", "none: only the last committed weights are kept"),
    ("device", "stream_blocks", "cpu: blocks are computed on in host memory"),
]
# Options that have an effect only beside one of others.
NEEDED: Sequence[tuple[str, Sequence[str]]] = [
    ("lora_targets", ["lora_rank"]),
    ("lora_alpha", ["lora_rank"]),
    ("adapter_frozen", ["adapter", "lora_rank"]),
    ("period", ["rank"]),
    ("stack", ["rank"]),
    ("keep_best", ["evaluation", "eval_split"]),
    ("evaluate_every", ["evaluation", "eval_split"]),
]


def leaves(options: object) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and default of each option, also in groups."""
    for option in fields(options):  # type: ignore[arg-type]
        value = getattr(options, option.name)
        if is_dataclass(value):
            yield from leaves(value)
        else:
            yield option.name, value, option.default


def require_valid(options: object) -> None:
    """Refuse what the table refuses: values out of range, options without an effect, and options that exclude each other."""
    values = {name: (value, default) for name, value, default in leaves(options) if name in OPTIONS}
    given = {name: _shown(value) for name, (value, default) in values.items() if value != default}
    if names_model_loss(given.get("objective", "loss")):
        given.pop("objective", None)
    method = values["method"][0] if "method" in values else None
    trains_adapter = bool({"adapter", "lora_rank"} & given.keys())
    for name, other, expected in EXCLUDED:
        if name in given and other in given:
            found = f"{given[name]} with {flag(other)} {given[other]}".removesuffix(" True")
            raise OptionError(name, found=found, expected=expected, remedy="leave one of the two out")
    for name, others in NEEDED:
        if name in given and not given.keys() & set(others):
            needed = " or ".join(dict.fromkeys(map(flag, others)))
            remedy = "pass it, or leave this out"
            if SETTING_OF.get(name, ("",))[0] in others:
                needed, remedy = f"{needed} with a value, too", "write it before a colon, or leave this out"
            raise OptionError(name, found=given[name], expected=needed, remedy=remedy)
    if "method" in values:
        beside = "without --method" if method is None else f"with --method {method}"
        for name, value in given.items():
            if not OPTIONS[name].effect.applies(method, trains_adapter=trains_adapter):
                clips = method is None and name == "max_grad_norm"
                remedy = (
                    "pass --method, or --clip projected=1, for zeroth-order steps" if clips else "leave one of the two out"
                )
                expected = f"{OPTIONS[name].effect.needs}: it has no effect otherwise"
                found = f"{value} {beside}{' and an adapter' if trains_adapter else ''}"
                raise OptionError(name, found=found, expected=expected, remedy=remedy)
    for name, (value, _) in values.items():
        check = OPTIONS[name].check
        unchecked = (None, "auto", "never") if name != "activation_memory" else (None,)
        if check is not None and value not in unchecked:
            check(name, value)


def flag(name: str) -> str:
    """An option as it is written on the command line, or which setting of an option a field is."""
    option, key = SETTING_OF.get(name, (name, ""))
    written = f"--{option.replace('_', '-')}"
    return f"{key} of {written}" if key else written


def section_of(option: str) -> str | None:
    """The section of an option in recipes; None: there is no such option."""
    row = OPTIONS.get(next(iter(SETTINGS[option].values())) if option in SETTINGS else option)
    return None if row is None else row.section


def setting_text(main: object, settings: Mapping[str, object]) -> str:
    """An option's value with its settings as text; without a value None is passed."""
    texts = {
        key: ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value for key, value in settings.items()
    }
    written = ",".join(f"{key}={value}" for key, value in texts.items())
    return written if main is None else f"{main}:{written}"


def by_option(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of options and settings by field as values of options; None stands for what is left out."""
    written, settings = dict[str, Any](), dict[str, dict[str, Any]]()
    for name, value in values.items():
        option, key = SETTING_OF.get(name, (name, ""))
        if value is None or (key and value is False):
            continue
        if key:
            settings.setdefault(option, {})[key] = value
        else:
            written[option] = value
    return written | {option: setting_text(written.get(option), found) for option, found in settings.items()}


def _shown(value: object) -> str:
    texts = value if isinstance(value, tuple) else [getattr(value, "value", value)]
    return " ".join(map(str, texts))


def changed(saved: OptionsT, given: object, change: Change) -> OptionsT:
    """A run's options, with those of one kind as a command gives them."""
    values: dict[str, Any] = {}
    for option in fields(saved):  # type: ignore[arg-type]
        name = option.name
        before, now = getattr(saved, name), getattr(given, name, None)
        if is_dataclass(before):
            values[name] = changed(before, now, change)
        elif (
            name in OPTIONS and OPTIONS[name].change is change and (change is not Change.MOVED or None not in (before, now))
        ):
            values[name] = now
    return replace(saved, **values)  # type: ignore[type-var]


def require_unchanged(saved: dict[str, Any], given: dict[str, Any], *changes: Change, remedy: str) -> None:
    """Refuse options that differ from a run's and may not change."""
    for name, before in saved.items():
        if isinstance(before, dict):
            require_unchanged(before, given[name], *changes, remedy=remedy)
        elif name in OPTIONS and OPTIONS[name].change not in changes and given[name] != before:
            expected = f"{json.dumps(before)}, as in the run, whose result depends on it"
            raise OptionError(name, found=json.dumps(given[name]), expected=expected, remedy=f"leave it out, {remedy}")


def used_options(options: dict[str, Any]) -> dict[str, Any]:
    """Leave out the options that have no effect on a run."""
    group = options.get("first_order")
    method = group.get("method") if isinstance(group, dict) else None
    trains_adapter = options.get("adapter") is not None or options.get("lora_rank") is not None

    def used(values: dict[str, Any]) -> dict[str, Any]:
        kept = {name: used(value) if isinstance(value, dict) else value for name, value in values.items()}
        effects = {name: OPTIONS[name].effect for name in kept if name in OPTIONS and name != "method"}
        unused = {name for name, effect in effects.items() if not effect.applies(method, trains_adapter=trains_adapter)}
        return {name: value for name, value in kept.items() if name not in unused}

    return used(options)
