"""Refusals of options that follow from what is declared beside them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from zo2adapters.tasks.option_tree import (
    Effect,
    MethodName,
    Option,
    declared,
    flag,
    is_met,
    leaves,
    shown,
)
from zo2adapters.tasks.registry import names_model_loss
from zo2core.errors import OptionError


class _Asked(NamedTuple):
    """Options that are there, by name."""

    declared: Mapping[str, Option]
    values: Mapping[str, Any]
    changed: Mapping[str, str]  # values that are not the default, as text


def require_valid(
    options: object,
    *,
    given: Collection[str] = (),
    only: Collection[str] | None = None,
    has_adapter: bool = False,
) -> None:
    """Refuse what is declared beside the options: values out of range, options without an effect,
    and options that exclude each other.

    Args:
        options: The options.
        given: Names of options that were given, and so should have an effect; those with another
            value than the default were.
        only: Names of the options that are checked; None: all.
        has_adapter: Whether an adapter is trained that is no option.
    """
    of_run = {
        one.name: one.option
        for one in declared(options)
        if one.option is not None and (only is None or one.name in only)
    }
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
    _require_effect(asked, given, has_adapter=has_adapter)
    for name, option in of_run.items():
        if option.check is not None and values[name] not in option.unchecked:
            option.check(name, values[name])


def _require_compatible(asked: _Asked) -> None:
    """Refuse options that exclude each other."""
    pairs = (
        (name, other, expected)
        for name, option in asked.declared.items()
        for other, expected in option.excludes.items()
    )
    for name, other, expected in pairs:
        if name in asked.changed and other in asked.changed:
            is_switch = asked.values[other] is True
            beside = flag(other) if is_switch else f"{flag(other)} {asked.changed[other]}"
            found = f"{asked.changed[name]} with {beside}"
            raise OptionError(name, found, expected, "leave one of the two out")


def _is_off(value: object) -> bool:
    """Whether an option is left out by a value."""
    return value is None or value is False or value == ()


def _require_effect(asked: _Asked, given: Collection[str], *, has_adapter: bool) -> None:
    """Refuse options that have no effect beside the others.

    Args:
        asked: The options.
        given: Names of options that were given, whatever their values are.
        has_adapter: Whether an adapter is trained that is no option.
    """
    wanted = {
        name: shown(value)
        for name, value in asked.values.items()
        if name in asked.changed or (name in given and not _is_off(value))
    }
    if "method" in asked.values:
        _require_method(asked, wanted, has_adapter=has_adapter)
    for name, value in wanted.items():
        needs = asked.declared[name].needs
        if needs and not any(is_met(need, asked.values, asked.changed) for need in needs):
            needed = " or ".join(map(flag, needs))
            raise OptionError(name, value, needed, "pass it, or leave this out")


def _require_method(asked: _Asked, wanted: Mapping[str, str], *, has_adapter: bool) -> None:
    """Refuse options that have no effect with the method."""
    method = asked.values["method"]
    trains_adapter = has_adapter or bool({"adapter", "lora_rank"} & asked.changed.keys())
    for name, value in wanted.items():
        effect = asked.declared[name].effect
        if not effect.applies(method, trains_adapter=trains_adapter):
            alone = trains_adapter and effect.applies(method, trains_adapter=False)
            beside = " and an adapter" if alone else ""
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
