"""The table of the options of ``zo2 train``, from which refusals, changes at a resume and recipes
follow.

A recipe is the options as a YAML file, one line an option.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, get_args, get_type_hints

import yaml

from zo2adapters.tasks.registry import names_model_loss
from zo2adapters.trainers.optimization import ZEROTH_ORDER, MethodName
from zo2core.errors import OptionError, system_error
from zo2core.io.durable import open_regular
from zo2core.ranges import (
    LARGEST_WHOLE,
    EstimatorName,
    OptimizerName,
    parse_size,
    require_number,
    require_whole,
)

if TYPE_CHECKING:
    from zo2adapters.trainers.options import TrainOptions

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
    methods: tuple[MethodName, ...]
    of_adapters: bool = True  # also where one of these methods trains an adapter

    def applies(self, method: MethodName, *, trains_adapter: bool) -> bool:
        """Whether the option has an effect on a run."""
        is_any = self.of_adapters or not trains_adapter or method in ZEROTH_ORDER
        return method in self.methods and is_any


class Option(NamedTuple):
    """An option's row."""

    section: str  # of the recipe
    change: Change
    effect: Effect
    check: Check | None  # refuses values out of range; None and auto are not checked


_METHODS: tuple[MethodName, ...] = get_args(MethodName)
_OF_ALL: tuple[MethodName, ...] = get_args(OptimizerName)  # train all parameters by gradients
_ANY = Effect("any method", _METHODS)
_ZEROTH = Effect("--method zeroth-order or mezo", ("zeroth-order", "mezo"))
_ESTIMATED = Effect("--method zeroth-order", ("zeroth-order",))
_GRADIENTS = Effect("a first-order --method", ("lora", *_OF_ALL))
_FULL = Effect("a first-order --method of all parameters", _OF_ALL, of_adapters=False)
_WRITES = Effect("a method that changes the weights", _METHODS, of_adapters=False)
_ADAMW = Effect("--method lora or adamw", ("lora", "adamw"))
_FULL_ADAMW = Effect("--method adamw and no adapter", ("adamw",), of_adapters=False)
_SGD = Effect("--method sgd", ("sgd",))
_BADAM = Effect("--method badam", ("badam",))
# options on which the effects of others depend
DECIDING = ("method", "adapter", "lora_rank")
_NEVER = Change.NEVER
_BRANCH = Change.BRANCH
_RESUME = Change.RESUME
_MOVED = Change.MOVED
_CALL = Change.CALL


def _whole(least: int, most: int = LARGEST_WHOLE, otherwise: str = "") -> Check:
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
        raise OptionError(option, repr(value), "8 or 32", "pass one of them")


_ROWS: Sequence[tuple[str, str, Change, Effect, Check | None]] = [
    ("model", "model architecture adapter", _MOVED, _ANY, None),
    ("model", "head dtype precision adapter_frozen lora_targets", _NEVER, _ANY, None),
    ("model", "transfer_dtype", _NEVER, _ZEROTH, None),
    ("model", "lora_rank lora_alpha", _NEVER, _ANY, _whole(1)),
    ("data", "data", _MOVED, _ANY, None),
    (
        "data",
        "prompt_template text_column prompt_column completion_column label_column messages_column",
        _NEVER,
        _ANY,
        None,
    ),
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
    ("method", "max_grad_norm", _NEVER, _GRADIENTS, _number(above=0)),
    ("method", "guard", _BRANCH, _ZEROTH, None),
    ("method", "estimator fitness per_row", _BRANCH, _ESTIMATED, None),
    ("method", "zo_eps", _BRANCH, _ZEROTH, _number(above=0)),
    ("method", "queries", _BRANCH, _ZEROTH, _whole(1, MOST_QUERIES)),
    ("method", "clip_grad clip_median", _BRANCH, _ZEROTH, None),
    ("method", "noise rank period stack", _NEVER, _ESTIMATED, None),
    ("method", "reward", _NEVER, _ZEROTH, None),
    ("method", "max_new_tokens", _NEVER, _ZEROTH, _whole(1)),
    ("method", "temperature top_p", _NEVER, _ZEROTH, None),
    # the system's timers end at some number
    ("method", "reward_seconds", _RESUME, _ZEROTH, _number(above=0, most=1e6)),
    ("method", "reward_memory", _RESUME, _ZEROTH, _size),
    ("method", "max_drift", _RESUME, _ZEROTH, _number(above=0)),
    ("schedule", "steps", _RESUME, _ANY, _whole(1)),
    ("schedule", "lr", _BRANCH, _ANY, _number(above=0)),
    ("schedule", "decay warmup_steps weight_decay", _BRANCH, _ANY, None),
    ("schedule", "seed", _NEVER, _ANY, _whole(-LARGEST_WHOLE, LARGEST_WHOLE)),
    ("memory", "memory device_memory activation_memory", _RESUME, _ANY, _size),
    ("memory", "device", _NEVER, _ANY, None),
    ("memory", "snapshot_every", _RESUME, _ANY, _whole(1)),
    ("memory", "write_back_every", _RESUME, _ZEROTH, _whole(1, otherwise=", or auto or never")),
    ("memory", "write_limit_tb", _RESUME, _WRITES, _number(above=0)),
    ("evaluate", "evaluation", _MOVED, _ANY, None),
    (
        "evaluate",
        "eval_split",
        _NEVER,
        _ANY,
        _number(above=0, below=1, remedy="pass a share such as 0.1"),
    ),
    ("evaluate", "evaluate_every", _BRANCH, _ANY, _whole(1)),
    ("evaluate", "samples", _NEVER, _ANY, _whole(0, MOST_ROWS)),
    ("output", "keep_best report_to", _RESUME, _ANY, None),
    (
        "output",
        "output task shots resume from_step runs trace verify_base split",
        _CALL,
        _ANY,
        None,
    ),
]
SECTIONS = list(dict.fromkeys(section for section, *_ in _ROWS))  # of a recipe, in order
OPTIONS = {
    name: Option(section, change, effect, check)
    for section, names, change, effect, check in _ROWS
    for name in names.split()
}


# Pairs of options that exclude each other, and what the first one needs instead.
EXCLUDED: Sequence[tuple[str, str, str]] = [
    ("eval_split", "evaluation", "one source of rows to evaluate on"),
    (
        "lora_rank",
        "adapter",
        "one adapter: --lora-rank starts a new one, --adapter takes that of a file",
    ),
    ("samples", "head", "a causal language model"),
    ("reward", "head", "a causal language model"),
    ("pack", "head", "a causal language model"),
    ("per_row", "head", "a causal language model"),
    ("objective", "head", "the model's own loss"),
    ("beta", "head", "the model's own loss"),
    ("reward", "objective", "one objective"),
    ("micro_batch_size", "reward", "none: rows run at a time as memory allows"),
    ("per_row", "objective", "loss, which each row has separately"),
    ("per_row", "pack", "padded rows, whose losses can be told apart"),
    ("per_row", "micro_batch_size", "whole batches"),
    ("pack", "micro_batch_size", "whole batches, because packed rows run together"),
    ("rank", "snapshot_every", "no snapshots, because no weights change"),
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
    *(
        (name, ["reward"])
        for name in (
            "max_new_tokens",
            "temperature",
            "top_p",
            "reward_seconds",
            "reward_memory",
            "max_drift",
        )
    ),
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


def require_valid(options: object, *, given: Collection[str] = ()) -> None:
    """Refuse what the table refuses: values out of range, options without an effect, and options
    that exclude each other.

    Args:
        options: The options.
        given: Names of options that were given, and so should have an effect; those with another
            value than the default were.
    """
    values = {name: (value, default) for name, value, default in leaves(options) if name in OPTIONS}
    changed = {name: _shown(value) for name, (value, default) in values.items() if value != default}
    if names_model_loss(changed.get("objective", "loss")):
        changed.pop("objective", None)
    _require_compatible(values, changed)
    _require_effect(values, changed, given)
    for name, (value, _) in values.items():
        _require_in_range(name, value)


def _require_compatible(values: Mapping[str, tuple[Any, Any]], changed: Mapping[str, str]) -> None:
    """Refuse options that exclude each other. The arguments are those of ``_require_effect``."""
    for name, other, expected in EXCLUDED:
        if name in changed and other in changed:
            beside = flag(other) if values[other][0] is True else f"{flag(other)} {changed[other]}"
            found = f"{changed[name]} with {beside}"
            raise OptionError(name, found, expected, "leave one of the two out")


def _require_in_range(name: str, value: object) -> None:
    """Refuse a value that is out of the option's range; names of choices are in no range."""
    unchecked: tuple[object, ...] = (None, "auto", "never")
    if name in ("activation_memory", "reward_memory"):
        unchecked = (None,)
    check = OPTIONS[name].check
    if check is not None and value not in unchecked:
        check(name, value)


_OFF = (None, False, ())  # values by which an option is left out


def _require_effect(
    values: Mapping[str, tuple[Any, Any]], changed: Mapping[str, str], given: Collection[str]
) -> None:
    """Refuse options that have no effect beside the others.

    Args:
        values: Value and default of each option.
        changed: Values that are not the default, as text.
        given: Names of options that were given, whatever their values are.
    """
    asked = {
        name: _shown(value)
        for name, (value, _) in values.items()
        if name in changed or (name in given and value not in _OFF)
    }
    for name, others in NEEDED:
        if name in asked and not changed.keys() & set(others):
            raise _lacks_needed(name, asked[name], others)
    if "method" not in values:
        return
    method = values["method"][0]
    trains_adapter = bool({"adapter", "lora_rank"} & changed.keys())
    for name, value in asked.items():
        if not OPTIONS[name].effect.applies(method, trains_adapter=trains_adapter):
            raise _without_effect_on(name, value, method, trains_adapter=trains_adapter)


def _lacks_needed(name: str, value: str, others: Collection[str]) -> OptionError:
    """The error about an option without any of those that it needs."""
    needed = " or ".join(map(flag, others))
    return OptionError(name, value, needed, "pass it, or leave this out")


def _without_effect_on(
    name: str, value: str, method: MethodName, *, trains_adapter: bool
) -> OptionError:
    """The error about an option that has no effect with a method."""
    effect = OPTIONS[name].effect
    beside = " and an adapter" if trains_adapter and method != "lora" else ""
    remedy = f"pass --method {effect.methods[0]}, or leave one of the two out"
    if method in effect.methods:
        remedy = "leave one of the two out"
    elif name == "max_grad_norm":
        remedy = "pass --clip-grad for zeroth-order steps, or another --method"
    return OptionError(
        name,
        f"{value} with --method {method}{beside}",
        f"{effect.needs}: it has no effect otherwise",
        remedy,
    )


def flag(name: str) -> str:
    """An option as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def plain(value: object) -> Any:
    """An option's value as a recipe has it: a text, a number, a bool, None, or a list of several
    texts or numbers.
    """
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else list(value)
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _shown(value: object) -> str:
    if value is True:
        return "on"
    texts = value if isinstance(value, tuple) else [plain(value)]
    return " ".join(map(str, texts))


def described(options: Any) -> Iterator[tuple[type, str, Any, Any]]:
    """Class, name, type and default of each option, also in groups; of options with values these
    are the defaults.
    """
    owner = options if isinstance(options, type) else type(options)
    hints = get_type_hints(owner, include_extras=True)
    for option in fields(options):
        if option.default_factory is not MISSING:
            yield from described(option.default_factory())
        else:
            yield owner, option.name, hints[option.name], getattr(options, option.name, MISSING)


def filled(options: Any, values: Mapping[str, Any]) -> Any:
    """The options with these values, also in groups; a class is made with them."""
    is_new = isinstance(options, type)
    given = dict[str, Any]()
    for option in fields(options):
        if option.default_factory is not MISSING:
            group = option.default_factory() if is_new else getattr(options, option.name)
            given[option.name] = filled(group, values)
        elif option.name in values:
            given[option.name] = values[option.name]
    return options(**given) if is_new else replace(options, **given)


def changed(saved: OptionsT, given: object, change: Change) -> OptionsT:
    """A run's options, with those of one kind as a command gives them; files that neither has stay
    as they are.
    """
    before, now = (
        {name: value for name, value, _ in leaves(options)} for options in (saved, given)
    )
    names = [
        name
        for name in before
        if name in now and name in OPTIONS and OPTIONS[name].change is change
    ]
    if change is Change.MOVED:
        names = [name for name in names if None not in (before[name], now[name])]
    options: OptionsT = filled(saved, {name: now[name] for name in names})
    return options


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options as JSON by name, also those in groups."""
    listed = (
        (flat(value) if isinstance(value, dict) else {name: value})
        for name, value in options.items()
    )
    return {name: value for values in listed for name, value in values.items()}


def require_unchanged(
    saved: Mapping[str, Any], given: Mapping[str, Any], *changes: Change, remedy: str
) -> None:
    """Refuse options that differ from a run's and may not change."""
    now = flat(given)
    for name, before in flat(saved).items():
        if name in OPTIONS and OPTIONS[name].change not in changes and now[name] != before:
            expected = f"{as_written(before)}, as in the run, whose result depends on it"
            raise OptionError(name, as_written(now[name]), expected, f"leave it out, {remedy}")


def as_written(value: object) -> str:
    """An option's value as it is written on the command line, or none."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else _lowered(plain(value))


def _lowered(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def used_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as JSON by name, without those that have no effect on a run."""
    values = flat(options)
    method: Any = values.get("method")
    trains_adapter = any(values.get(name) is not None for name in ("adapter", "lora_rank"))

    # by values, not by methods
    idle = {
        "fitness": values.get("estimator") != EstimatorName.ES.value,
        "write_back_every": trains_adapter or values.get("rank") is not None,
    }
    needed = dict(NEEDED)
    there = {name for name, value in values.items() if value not in (None, False, [])}

    def is_used(name: str) -> bool:
        row = OPTIONS.get(name)
        if row is None or name == "method":
            return True
        if idle.get(name, False):
            return False
        is_alone = name in needed and not there & set(needed[name])
        return not is_alone and row.effect.applies(method, trains_adapter=trains_adapter)

    return {name: value for name, value in values.items() if is_used(name)}


RECIPE = "recipe.yaml"  # name of a run's own recipe in its directory

_HEAD = "# All options of this run. To repeat it: zo2 train recipe.yaml --output DIR\n"
_LARGEST_RECIPE = 1 << 20  # bytes


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which leaves texts as they are written and refuses a key that occurs
    twice.

    YAML 1.1 would read no and on as bools, 1:30 as 90, 010 as 8 and dates as such. Here true and
    false alone are bools, as in YAML 1.2, and numbers stay texts, which the command line reads.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML declares it
        first: [(tag, form) for tag, form in known if tag.endswith((":null", ":merge"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        """See PyYAML."""
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key} twice", key_node.start_mark
                )
            keys |= {key} if isinstance(key, Hashable) else set()
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")
)


def recipe_text(options: TrainOptions, branch: Mapping[str, Any] | None = None) -> str:
    """The recipe that repeats a run."""
    values = {
        **used_options(options.to_json()),
        "output": str(options.output.resolve()),
        **(branch or {}),
    }
    written = {name: values[name] for name in OPTIONS if values.get(name) is not None}
    text = _HEAD
    for section in SECTIONS:
        of_section = {
            name: value for name, value in written.items() if OPTIONS[name].section == section
        }
        text += (
            "\n# "
            f"{section}\n"
            f"{yaml.safe_dump(of_section, sort_keys=False, allow_unicode=True, width=1000)}"
        )
    return text


def yaml_kind(value: object) -> str:
    """What a value of a recipe is called in YAML."""
    kinds: list[tuple[type, str]] = [(dict, "a mapping"), (list, "a list"), (str, "a text")]
    return next((name for kind, name in kinds if isinstance(value, kind)), "a number")


def read_recipe(path: str | os.PathLike[str]) -> dict[object, object]:
    """Read a recipe's keys and values as YAML gives them."""
    expected, remedy = (
        "a YAML file with a line such as steps: 100 for each option",
        "correct the file",
    )
    try:
        with open_regular(path) as file:
            content = file.read(_LARGEST_RECIPE + 1)
        if len(content) > _LARGEST_RECIPE:
            raise OptionError(Path(path), "more than 1 MiB", expected, "pass another file")
        values = yaml.load(content, _Loader)  # noqa: S506 - a safe loader
    except OSError as error:
        raise system_error(
            OptionError, Path(path), error, expected=expected, remedy="check the path"
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Path(path) if mark is None else f"{path}, line {mark.line + 1}"
        # The parser's text may begin with 'found' or 'expected'.
        found = "no YAML" if error.problem is None else f"no YAML ({error.problem})"
        raise OptionError(where, found, expected, remedy) from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        found = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise OptionError(Path(path), found, expected, remedy) from error
    if not isinstance(values, dict):
        raise OptionError(
            Path(path),
            "nothing" if values is None else yaml_kind(values),
            expected,
            remedy,
        )
    return values
