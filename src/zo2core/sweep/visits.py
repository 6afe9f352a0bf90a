"""Factories of visitors: a run's is chosen once, when the run is built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from zo2core.perturbation import FactorStore, StackedModel
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import BlockModel, Forward, Streams, Visitor
from zo2core.sweep.activation_offload import ActivationOffload
from zo2core.sweep.perturber import Perturber
from zo2core.sweep.stacked_visitor import StackedVisitor
from zo2core.sweep.update_loss import UpdateLoss
from zo2core.sweep.visitor import SegmentVisitor
from zo2core.sweep.work_buffer import WorkBuffer
from zo2core.types import Batch, Evaluation, Update
from zo2core.updates import Trajectory

Groups: TypeAlias = Sequence[tuple[Evaluation | None, Sequence[Batch]]]  # evaluations, each with the batches to run at it


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
        """The visitor of one sweep.

        Args:
            version: The present version of the weights, to which segments are brought.
            groups: The evaluations to make, each with its batches; None instead of an evaluation stands for unperturbed
                weights. Empty for a sweep that only replays.
            forward: Runs the segments.
        """


@dataclass(frozen=True, kw_only=True)
class WeightVisits:
    """Visitors that perturb weights in the work buffer."""

    model: BlockModel
    perturber: Callable[[Trajectory], Perturber]  # of one sweep
    updates: Sequence[Update]  # of the run; the list grows
    zo_eps: float
    perturb_in_place: bool
    activations: ActivationOffload
    streams: Streams
    timeline: Timeline
    update_loss: UpdateLoss

    def visitor(self, version: int, groups: Groups, forward: Forward) -> SegmentVisitor:
        """The visitor of one sweep. See the contract."""
        evaluations = [evaluation for evaluation, _ in groups]
        trajectory = Trajectory(self.updates, version, evaluations, self.zo_eps, self.perturb_in_place)
        return SegmentVisitor(
            self.model.layouts,
            forward,
            self.perturber(trajectory),
            groups,
            activations=self.activations,
            streams=self.streams,
            timeline=self.timeline,
            update_loss=self.update_loss,
        )


@dataclass(frozen=True, kw_only=True)
class StackedVisits:
    """Visitors that only read weights, and add low-rank perturbations beside the activations."""

    model: StackedModel
    factors: FactorStore
    updates: Sequence[Update]  # of the run; the list grows
    zo_eps: float
    perturb_in_place: bool
    buffer: WorkBuffer
    activations: ActivationOffload
    streams: Streams
    timeline: Timeline
    worker: Executor | None

    def visitor(self, version: int, groups: Groups, forward: Forward) -> StackedVisitor:
        """The visitor of one sweep. See the contract."""
        evaluations = [evaluation for evaluation, _ in groups]
        return StackedVisitor(
            self.model,
            forward,
            self.factors,
            Trajectory(self.updates, version, evaluations, self.zo_eps, self.perturb_in_place),
            groups,
            buffer=self.buffer,
            activations=self.activations,
            streams=self.streams,
            timeline=self.timeline,
            worker=self.worker,
        )
