"""States of optimizers: in memory or beside the weights on disk, and the checks of those that are
loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zo2core.errors import CheckpointError
from zo2core.optimizers.torch_optimizer import OptimizerFactory
from zo2core.protocols import BlockUpdate, Store
from zo2core.types import BlockLayout, StateSpec


class _StatesFromZero(dict[str, torch.Tensor]):
    """States by name, each of which is made as zeros when it is first asked for."""

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        super().__init__()
        self.specs = {spec.name: spec for spec in specs}

    def __missing__(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        self[name] = state = torch.zeros(spec.shape, dtype=spec.stored_dtype)
        return state


class StateMemory:
    """States in host memory. Those of a segment are zero before its first step."""

    def __init__(self, update: BlockUpdate, layouts: Sequence[BlockLayout]) -> None:
        self._turn = update.turn
        self._specs = [update.states(layout) for layout in layouts]
        self._states: dict[int, _StatesFromZero] = {}  # by segment

    def begin(self, step: int) -> None:
        """Forget all states if a turn begins at this 0-based step.

        A turn is the ``update.turn`` steps for which one segment is trained; None: states are never
        forgotten.
        """
        if self._turn is not None and step % self._turn == 0:
            self._states.clear()

    def of(self, segment: int, store: Store) -> dict[str, torch.Tensor]:
        """The states of a segment by name, which the optimizer changes in place.

        See ``BlockUpdate.apply``.
        """
        return self._states.setdefault(segment, _StatesFromZero(self._specs[segment]))

    def state_dict(self) -> dict[int, dict[str, torch.Tensor]]:
        """The states by segment and name, which are not copied."""
        return {segment: dict(states) for segment, states in self._states.items() if states}

    def load_state_dict(self, state: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Continue with copies of these states."""
        loaded: dict[int, _StatesFromZero] = {}
        if not isinstance(state, Mapping):
            raise unusable_state(f"a {type(state).__name__} as optimizer states")
        for segment, states in state.items():
            is_segment = type(segment) is int and segment in range(len(self._specs))
            if not is_segment or not isinstance(states, Mapping):
                raise unusable_state(f"optimizer states of segment {segment}")
            of_segment = loaded[segment] = _StatesFromZero(self._specs[segment])
            for name, value in states.items():
                spec = of_segment.specs.get(name)
                if spec is None or form_of(value) != (spec.shape, spec.stored_dtype):
                    raise unusable_state(f"{name}, an optimizer state of segment {segment}")
                require_finite(name, value)
                of_segment[name] = value.clone()
        self._states = loaded


class StatesInStores:
    """States in the segments' stores, after the parameters."""

    def __init__(self, layouts: Sequence[BlockLayout], read: Callable[[int], object]) -> None:
        self._layouts = layouts
        self._read = read

    def begin(self, step: int) -> None:
        """Do nothing: all states are kept."""

    def of(self, segment: int, store: Store) -> dict[str, torch.Tensor]:
        """Views of the store by name, which the optimizer changes in place."""
        self._read(segment)
        layout = self._layouts[segment]
        stored = store[len(layout.parameters) :]
        return {
            spec.name: view.view(spec.shape)
            for spec, view in zip(layout.states, stored, strict=True)
        }


def state_bytes(update: BlockUpdate, layouts: Sequence[BlockLayout]) -> int:
    """The most bytes that an optimizer's states take: of all segments, or of the largest one if
    they last for a turn.
    """
    sizes = [sum(spec.nbytes for spec in update.states(layout)) for layout in layouts]
    return sum(sizes) if update.turn is None else max(sizes)


def unusable_state(found: str) -> CheckpointError:
    """The error about a state of another run, or a forged one."""
    return CheckpointError(
        "state",
        found=found,
        expected="a state of this optimizer and model",
        remedy="load the state of a run of the same model, adapter, optimizer and precision",
    )


def form_of(value: object) -> tuple[tuple[int, ...], torch.dtype] | type:
    """Shape and dtype of a tensor; the type of anything else."""
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def require_finite(name: str, value: object) -> None:
    """Refuse tensors with infinite numbers or NaN, which no step leaves behind."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.isfinite().all():
        raise unusable_state(f"{name} with values that are not finite")


def require_optimizer_state(
    state: Any, factory: OptimizerFactory, parameters: Sequence[nn.Parameter]
) -> None:
    """Compare a state of ``torch.optim`` with that of the factory's own optimizer after a step on
    zeros.
    """
    zeros = [nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
    for parameter in zeros:
        parameter.grad = torch.zeros_like(parameter)
    with torch.random.fork_rng(devices=[]):
        expected_optimizer = factory(zeros)
        expected_optimizer.step()
    expected = expected_optimizer.state_dict()
    try:
        states = dict(state["state"])
        groups = list(map(_kind_of_group, state["param_groups"]))
        has_same_groups = groups == list(map(_kind_of_group, expected["param_groups"]))
        if not has_same_groups or states.keys() - expected["state"].keys():
            raise unusable_state("the state of an optimizer with other options or parameters")
        for index, entries in states.items():
            forms = {name: form_of(value) for name, value in expected["state"][index].items()}
            for name, value in entries.items():
                if name not in forms or (
                    forms[name] != form_of(value) and type(None) not in (forms[name], type(value))
                ):
                    raise unusable_state(f"{name}, a state of parameter {index}")
                require_finite(f"{name} of parameter {index}", value)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise unusable_state(f"no state of an optimizer ({type(error).__name__})") from error


def _kind_of_group(group: Mapping[str, Any]) -> tuple[list[int], dict[str, object]]:
    """What tells optimizers apart: parameters, options and flags.

    Schedules change the numbers, and add initial ones.
    """
    kinds = {
        name: _kind(value)
        for name, value in group.items()
        if name != "params" and not name.startswith("initial_")
    }
    return list(group["params"]), kinds


def _kind(option: Any) -> object:
    """What two values of an option have in common: numbers are alike if they are finite."""
    if isinstance(option, list | tuple):
        return [_kind(item) for item in option]
    is_number = isinstance(option, int | float | torch.Tensor) and not isinstance(option, bool)
    return math.isfinite(option) if is_number else repr(option)


def copied_state(value: Any) -> Any:
    """Copy a state's tensors, which may lie in a file."""
    return tree_map_only(torch.Tensor, torch.clone, value)
