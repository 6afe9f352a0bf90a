"""Perturbers apply updates and write perturbed weights: one for noise drawn into memory, one for counter-based noise.

What first-order steps train is not perturbed: the third one only loads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TypeVar

import torch

from zo2core.kernels.dispatch import triton_kernels
from zo2core.protocols import Stores
from zo2core.sweep.work_buffer import ParameterView, WorkBuffer
from zo2core.types import Evaluation, Perturb, Program
from zo2core.updates import Trajectory, compile_moves

# Note: Second thread. Starting work on it takes tens of microseconds, so smaller segments stay on one thread.
PARALLEL_FROM = 1 << 17


P = TypeVar("P", bound=Perturb | Program)


class Perturber(ABC):
    """Changes weights during one sweep: applies updates to the stores, and writes perturbed weights to the work buffer."""

    seeds: Collection[int] = ()  # of the directions that this sweep draws

    def __init__(self, buffer: WorkBuffer) -> None:
        self._buffer = buffer

    @property
    @abstractmethod
    def version(self) -> int:
        """The present version of the weights, at which segments are after ``replay``."""

    @abstractmethod
    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment's store to the present version; its bytes are final for this sweep when this returns.

        The work buffer may then hold weights of the first evaluation already.
        """

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Let the forward read a segment's frozen weights. Called once a visit."""
        self._buffer.load_frozen(index, stores)

    @abstractmethod
    def perturb(self, index: int, stores: Stores, before: Evaluation | None, evaluation: Evaluation | None) -> None:
        """Write the weights of a segment's next evaluation to the work buffer."""

    def finish(self) -> None:  # noqa: B027 - a perturber without a thread of its own has nothing to wait for
        """Wait until the second thread no longer uses the memory, however the sweep ended."""


class TrajectoryPerturber(Perturber):
    """A perturber that replays a trajectory's updates and perturbs along its evaluations."""

    seeds: set[int]

    def __init__(self, buffer: WorkBuffer, worker: ThreadPoolExecutor | None, trajectory: Trajectory) -> None:
        super().__init__(buffer)
        self._worker = worker
        self._trajectory = trajectory
        self._parallel_from = PARALLEL_FROM
        first = trajectory.evaluations[0] if trajectory.evaluations else None
        self._first = first if first is not None and first.shift != 0 else None  # prepared during the replay
        # All segments share programs, so that each is encoded for the kernels once.
        self._moves: dict[tuple[Evaluation | None, Evaluation | None], Program] = {}
        self.seeds = {evaluation.seed for evaluation in trajectory.evaluations if evaluation is not None}

    @property
    def version(self) -> int:
        """The present version. See ``Perturber``."""
        return self._trajectory.version

    def _kernels(self, index: int) -> ModuleType | None:
        """Kernels that change a segment's parameters in one launch; None if each is changed by itself."""
        views = self._buffer.segments[index]
        if self._buffer.is_low_bit[index] or any(view.unrounded is not None for view in views):
            return None
        found = [triton_kernels(view.work) for view in views if view.spec.dtype is not torch.float64]
        return found[0] if found and len(found) == len(views) and all(found) else None

    def _move(self, before: Evaluation | None, evaluation: Evaluation | None) -> Program:
        """Return the program that leads from one evaluation's weights to those of the next."""
        if (before, evaluation) not in self._moves:
            self._moves[before, evaluation] = compile_moves(before, evaluation, self._trajectory.zo_eps)
        return self._moves[before, evaluation]


def in_one_launch(
    views: Iterable[ParameterView], program_of: Callable[[ParameterView], P]
) -> list[tuple[P, list[ParameterView]]]:
    """Divide parameters into those that one launch changes: they share a program and a dtype."""
    groups: dict[tuple[int, torch.dtype], tuple[P, list[ParameterView]]] = {}
    for view in views:
        program = program_of(view)
        groups.setdefault((id(program), view.spec.dtype), (program, []))[1].append(view)
    return list(groups.values())
