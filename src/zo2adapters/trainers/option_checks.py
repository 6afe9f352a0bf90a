"""Refusals of options that follow from what is declared beside them, and of pairs that exclude each
other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from zo2adapters.tasks.option_tree import Effect, MethodName, Option, declared, flag, leaves, shown
from zo2adapters.tasks.registry import names_model_loss
from zo2core.errors import OptionError

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


class _Asked(NamedTuple):
    """Options that are there, by name."""

    declared: Mapping[str, Option]
    values: Mapping[str, Any]
    changed: Mapping[str, str]  # values that are not the default, as text


def require_valid(options: object, *, given: Collection[str] = ()) -> None:
    """Refuse what is declared beside the options: values out of range, options without an effect,
    and options that exclude each other.

    Args:
        options: The options.
        given: Names of options that were given, and so should have an effect; those with another
            value than the default were.
    """
    of_run = {one.name: one.option for one in declared(options) if one.option is not None}
    values = {name: value for name, value, _ in leaves(options) if name in of_run}
    changed = {
        name: shown(value)
        for name, value, default in leaves(options)
        if name in of_run and value != default
    }
    if names_model_loss(changed.get("objective", "loss")):
        changed.pop("objective", None)
    asked = _Asked(of_run, values, changed)
    _require_compatible(asked)
    _require_effect(asked, given)
    for name, option in of_run.items():
        if option.check is not None and values[name] not in option.unchecked:
            option.check(name, values[name])


def _require_compatible(asked: _Asked) -> None:
    """Refuse options that exclude each other."""
    for name, other, expected in EXCLUDED:
        if name in asked.changed and other in asked.changed:
            is_switch = asked.values[other] is True
            beside = flag(other) if is_switch else f"{flag(other)} {asked.changed[other]}"
            found = f"{asked.changed[name]} with {beside}"
            raise OptionError(name, found, expected, "leave one of the two out")


_OFF = (None, False, ())  # values by which an option is left out


def _require_effect(asked: _Asked, given: Collection[str]) -> None:
    """Refuse options that have no effect beside the others.

    Args:
        asked: The options.
        given: Names of options that were given, whatever their values are.
    """
    wanted = {
        name: shown(value)
        for name, value in asked.values.items()
        if name in asked.changed or (name in given and value not in _OFF)
    }
    for name, value in wanted.items():
        needs = asked.declared[name].needs
        if needs and not asked.changed.keys() & set(needs):
            needed = " or ".join(map(flag, needs))
            raise OptionError(name, value, needed, "pass it, or leave this out")
    if "method" not in asked.values:
        return
    method = asked.values["method"]
    trains_adapter = bool({"adapter", "lora_rank"} & asked.changed.keys())
    for name, value in wanted.items():
        effect = asked.declared[name].effect
        if not effect.applies(method, trains_adapter=trains_adapter):
            beside = " and an adapter" if trains_adapter and method != "lora" else ""
            found = f"{value} with --method {method}{beside}"
            raise _without_effect(name, found, effect, method)


def _without_effect(name: str, found: str, effect: Effect, method: MethodName) -> OptionError:
    """The error about an option that has no effect with a method."""
    remedy = f"pass --method {effect.methods[0]}, or leave one of the two out"
    if method in effect.methods:
        remedy = "leave one of the two out"
    elif name == "max_grad_norm":
        remedy = "pass --clip-grad for zeroth-order steps, or another --method"
    return OptionError(name, found, f"{effect.needs}: it has no effect otherwise", remedy)
