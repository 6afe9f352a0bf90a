"""The table of the options of ``zo2 train``: when each may change, and with which method it has an effect."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from zo2core.errors import OptionError
from zo2core.optimizers import OPTIMIZERS, OptimizerName

OptionsT = TypeVar("OptionsT")


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


class Row(NamedTuple):
    """An option's row."""

    change: Change
    effect: Effect


_GRADIENTS: tuple[OptimizerName, ...] = tuple(OPTIMIZERS)
_ANY = Effect("any method", (None, *_GRADIENTS))
_ZEROTH = Effect("no --method", (None,))
_METHOD = Effect("--method", _GRADIENTS)
_FULL = Effect("--method and no adapter", _GRADIENTS, of_adapters=False)
_WRITES = Effect("no adapter", (None, *_GRADIENTS), of_adapters=False)
_ADAMW = Effect("--method adamw", ("adamw",))
_FULL_ADAMW = Effect("--method adamw and no adapter", ("adamw",), of_adapters=False)
_SGD = Effect("--method sgd", ("sgd",))
_BADAM = Effect("--method badam", ("badam",))

_NAMES: dict[tuple[Change, Effect], str] = {
    (Change.RESUME, _ANY): "steps keep_best report_to memory device_memory snapshot_every activation_memory",
    (Change.RESUME, _ZEROTH): "reward_seconds reward_memory max_drift write_back_every",
    (Change.RESUME, _WRITES): "write_limit_tb",
    (Change.MOVED, _ANY): "model data evaluation architecture adapter",
    (Change.BRANCH, _ANY): "lr weight_decay decay warmup_steps evaluate_every",
    (Change.BRANCH, _ZEROTH): "estimator fitness queries per_row zo_eps perturb_in_place clip_grad clip_median guard",
    (Change.NEVER, _ZEROTH): "noise exact_mezo rank period stack reward max_new_tokens temperature top_p transfer_dtype",
    (Change.NEVER, _ANY): "seed device dtype precision head objective beta method samples eval_split eval_seed "
    "adapter_frozen lora_rank lora_targets lora_alpha batch_size micro_batch_size loss_chunk pack sequence_length "
    "prompt_template text_column prompt_column completion_column label_column messages_column labels train_on too_long "
    "rendered_at",
    (Change.NEVER, _METHOD): "max_grad_norm",
    (Change.NEVER, _FULL): "max_grad_value stream_blocks loss_scaling",
    (Change.NEVER, _ADAMW): "betas eps",
    (Change.NEVER, _FULL_ADAMW): "delayed_update state_bits",
    (Change.NEVER, _SGD): "momentum nesterov",
    (Change.NEVER, _BADAM): "switch_every",
    (Change.CALL, _ANY): "task shots output resume from_step runs plan json trace verify_base scheduler split",
    (Change.CALL, _ZEROTH): "replay",
}
ROWS = {name: Row(*row) for row, names in _NAMES.items() for name in names.split()}


def changed(saved: OptionsT, given: object, change: Change) -> OptionsT:
    """A run's options, with those of one kind as a command gives them.

    Args:
        saved: The run's options, or a group of them.
        given: The command, or the same group of it. A path that it leaves out, or that the run has not, is the run's.
        change: The kind of the options that are replaced.
    """
    values: dict[str, Any] = {}
    for name, (before, now) in _pairs(saved, given).items():
        if is_dataclass(before):
            values[name] = changed(before, now, change)
        elif name in ROWS and ROWS[name].change is change and (change is not Change.MOVED or None not in (before, now)):
            values[name] = now
    return replace(saved, **values)  # type: ignore[type-var]


def require_unchanged(saved: dict[str, Any], given: dict[str, Any], *changes: Change, remedy: str) -> None:
    """Refuse options that differ from a run's and may not change.

    Args:
        saved: The run's options as JSON values, in their groups.
        given: The options that a command gives, likewise.
        changes: The kinds of options that may differ.
        remedy: What to do beside leaving the option out.

    Raises:
        OptionError: naming the option.
    """
    for name, before in saved.items():
        if isinstance(before, dict):
            require_unchanged(before, given[name], *changes, remedy=remedy)
        elif name in ROWS and ROWS[name].change not in changes and given[name] != before:
            raise OptionError(
                name,
                found=json.dumps(given[name]),
                expected=f"{json.dumps(before)}, as in the run, whose result depends on it",
                remedy=f"leave it out, {remedy}",
            )


def require_effect(options: object, method: OptimizerName | None, *, trains_adapter: bool) -> None:
    """Refuse options that have no effect on a run.

    Args:
        options: The options of a run or a plan, in their groups.
        method: The optimizer of first-order steps; None: steps are zeroth-order.
        trains_adapter: Whether an adapter is trained.

    Raises:
        OptionError: naming the option.
    """
    for name, (value, default) in _pairs(options, type(options)).items():
        if is_dataclass(value):
            require_effect(value, method, trains_adapter=trains_adapter)
        elif name in ROWS and value != default and not ROWS[name].effect.applies(method, trains_adapter=trains_adapter):
            beside = "without --method" if method is None else f"with --method {method}"
            texts = value if isinstance(value, tuple) else [getattr(value, "value", value)]
            raise OptionError(
                name,
                found=f"{' '.join(map(str, texts))} {beside}{' and an adapter' if trains_adapter else ''}",
                expected=f"{ROWS[name].effect.needs}: it has no effect otherwise",
                remedy="pass --method, or --clip-grad, which clips zeroth-order steps"
                if method is None and name.startswith("max_grad")
                else "leave one of the two out",
            )


def _pairs(options: Any, other: object) -> dict[str, tuple[Any, Any]]:
    """The values of options and, where there are any, of others, by the name of the field."""
    return {option.name: (getattr(options, option.name), getattr(other, option.name, None)) for option in fields(options)}
