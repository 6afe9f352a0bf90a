"""Where optimizer states are: in host memory, or in the segments' stores beside the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from zo2core.errors import CheckpointError
from zo2core.protocols import BlockUpdate, Store
from zo2core.types import BlockLayout, StateSpec


class OptimizerStates(Protocol):
    """Gives an optimizer the states of a segment."""

    def begin(self, step: int) -> None:
        """Forget the states that do not outlive the turn before this 0-based step."""

    def of(self, segment: int, store: Store) -> dict[str, torch.Tensor]:
        """The states of a segment by name, which the optimizer changes in place. See ``BlockUpdate.apply``.

        Args:
            segment: Index of the segment.
            store: The segment's stored tensors.
        """


class _Zeros(dict[str, torch.Tensor]):
    """States that are zero, and take memory only once they are asked for.

    Args:
        specs: The states.
    """

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        super().__init__()
        self.specs = {spec.name: spec for spec in specs}

    def __missing__(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        self[name] = state = torch.zeros(spec.shape, dtype=spec.stored_dtype)
        return state


class StateMemory:
    """States in host memory. Those of a segment are zero before its first step.

    Args:
        update: The optimizer.
        layouts: Segments in visiting order.
    """

    def __init__(self, update: BlockUpdate, layouts: Sequence[BlockLayout]) -> None:
        self._turn = update.turn
        self._specs = [update.states(layout) for layout in layouts]
        self._states: dict[int, _Zeros] = {}  # by segment

    def begin(self, step: int) -> None:
        """Free all states at the beginning of a turn. See the contract."""
        if self._turn is not None and step % self._turn == 0:
            self._states.clear()

    def of(self, segment: int, store: Store) -> dict[str, torch.Tensor]:
        """The states in memory. See the contract."""
        return self._states.setdefault(segment, _Zeros(self._specs[segment]))

    def state_dict(self) -> dict[int, dict[str, torch.Tensor]]:
        """The states by segment and name, which are not copied."""
        return {segment: dict(states) for segment, states in self._states.items() if states}

    def load_state_dict(self, state: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Continue with copies of these states.

        Raises:
            CheckpointError: if they belong to another optimizer or model; nothing is changed then.
        """
        loaded: dict[int, _Zeros] = {}
        for segment, states in state.items():
            kept = loaded[segment] = _Zeros(self._specs[segment])
            for name, value in states.items():
                spec = kept.specs.get(name)
                if spec is None or (tuple(value.shape), value.dtype) != (spec.shape, spec.stored_dtype):
                    raise CheckpointError(
                        "state",
                        found=f"{name}, an optimizer state of segment {segment}",
                        expected="a state of this optimizer and model",
                        remedy="load the state of a run of the same model, optimizer and precision",
                    )
                kept[name] = value.clone()
        self._states = loaded


class StatesInStores:
    """States in the segments' stores, after the parameters.

    Args:
        layouts: Segments in visiting order, with their states.
        read: Called with the index of a segment before its states are used; on return its store has them.
    """

    def __init__(self, layouts: Sequence[BlockLayout], read: Callable[[int], object]) -> None:
        self._layouts = layouts
        self._read = read

    def begin(self, step: int) -> None:
        """Do nothing: all states are kept. See the contract."""

    def of(self, segment: int, store: Store) -> dict[str, torch.Tensor]:
        """Views of the store. See the contract."""
        self._read(segment)
        layout = self._layouts[segment]
        stored = store[len(layout.parameters) :]
        return {spec.name: view.view(spec.shape) for spec, view in zip(layout.states, stored, strict=True)}


def state_bytes(update: BlockUpdate, layouts: Sequence[BlockLayout]) -> int:
    """The most bytes that an optimizer's states take: of all segments, or of the largest one if they last for a turn."""
    sizes = [sum(spec.nbytes for spec in update.states(layout)) for layout in layouts]
    return sum(sizes) if update.turn is None else max(sizes)


def copied_state(value: Any) -> Any:
    """Copy a state's tensors, which may lie in a file.

    Args:
        value: Nested mappings and lists of tensors and other values, which are kept.
    """
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: copied_state(inner) for key, inner in value.items()}
    return [copied_state(inner) for inner in value] if isinstance(value, list) else value
