"""Factories of visitors: a run's is chosen once, when the run is built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zo2core.protocols import Forward, Visitor
from zo2core.sweep.perturber import Perturber
from zo2core.sweep.visitor import Groups, SegmentVisitor, SegmentVisits
from zo2core.types import Evaluation
from zo2core.updates import Trajectory


class SweepVisitor(Visitor, Protocol):
    """The visitor of one sweep, with the sweep's results."""

    @property
    def outputs(self) -> list[list[torch.Tensor]]:
        """The head's outputs, one list for each evaluation, once the head was visited."""

    @property
    def seeds(self) -> Collection[int]:
        """Seeds of the directions that the sweep draws."""

    def finish(self) -> None:
        """Wait until nothing uses the sweep's memory any more, however the sweep ended."""


class Visits(Protocol):
    """Makes the visitor of a sweep."""

    def visitor(self, version: int, groups: Groups, forward: Forward) -> SweepVisitor:
        """Make the visitor of one sweep."""


@dataclass(frozen=True, kw_only=True)
class WeightVisits(SegmentVisits):
    """Makes visitors that perturb weights in the work buffer."""

    trajectory: Callable[[int, Sequence[Evaluation | None]], Trajectory]  # to a version and through evaluations
    perturber: Callable[[Trajectory], Perturber]

    def visitor(self, version: int, groups: Groups, forward: Forward) -> SegmentVisitor:
        """Make the visitor of one sweep. See the contract."""
        trajectory = self.trajectory(version, [evaluation for evaluation, _ in groups])
        return SegmentVisitor(self, forward, self.perturber(trajectory), groups)
