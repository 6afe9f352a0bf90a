"""The perturber of low-rank directions beside the activations: streams that are stacked run as one
batch, and weights are only read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from zo2core.estimators.factors import FactorStore
from zo2core.estimators.perturbation import StackedForward, StackedModel
from zo2core.kernels.programs import Trajectory
from zo2core.protocols import Forward, Stores
from zo2core.sweep.perturbers import Groups, ParameterView, Perturber, Stream, WorkBuffer
from zo2core.types import Program


class FactorPerturber(Perturber):
    """Brings a segment's factors to the present version, and adds a stack's perturbations."""

    def __init__(
        self,
        model: StackedModel,
        factors: FactorStore,
        buffer: WorkBuffer,
        trajectory: Trajectory,
    ) -> None:
        super().__init__(buffer, trajectory.version)
        self._model = model
        self._factors = factors
        self._trajectory = trajectory
        self._perturbations: list[Program] = []  # of each stack
        factors.begin_sweep()

    def streams(self, groups: Groups, forward: Forward) -> Sequence[Sequence[Stream]]:
        """Have each stack run with perturbations of its own."""
        stacks = list(_stacks(forward, groups, self._factors.most_streams))
        factors = self._factors
        self._perturbations = [
            factors.perturbations(
                [groups[group][0] for group in stack.groups], self._trajectory.zo_eps
            )
            for stack in stacks
        ]
        return [[stack] for stack in stacks]

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring the segment's factors to the present version; its weights stay as they are."""
        for spec, theta in zip(self._model.layouts[index].parameters, stores[index], strict=True):
            if not spec.frozen:
                self._factors.advance(spec, theta, self._trajectory.updates, self.version)
        return version

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Let the forward read all of a segment's weights."""
        views = self.buffer.segments[index].all
        self._model.bind(index, {view.spec.name: self._readable(view, stores) for view in views})

    def perturb(self, index: int, stores: Stores, evaluation: int) -> None:
        """Add the perturbations of a stack beside the activations."""
        program = self._perturbations[evaluation]
        perturbed = {
            view.spec.name: self._factors.perturbed(view.spec, view.stored(stores), program)
            for view in self.buffer.segments[index].trained
        }
        self._model.perturb(index, perturbed, len(program.instructions))

    def finish(self) -> None:
        """Remove the perturbations from the model, which another engine may use next."""
        self._model.perturb(0, {}, 1)

    def _readable(self, view: ParameterView, stores: Stores) -> torch.Tensor:
        """Return the tensor from which modules read a parameter, with past periods if it has
        many.
        """
        theta = view.stored(stores)
        if not self._factors.forms(view.spec):
            return view.readable(theta)
        weight = view.work.view(view.spec.shape)
        if theta.dtype is not view.spec.dtype:  # codes
            view.load(theta)
            theta = weight
        self._factors.form(view.spec, theta, weight)
        return weight


def _stacks(forward: Forward, groups: Groups, most_streams: int | None) -> Iterator[Stream]:
    """Stack the evaluations of each micro-batch, at most so many at a time; those that cannot be
    stacked run alone.
    """
    for number in range(max((len(batches) for _, batches in groups), default=0)):
        streams = [
            (group, batches[number])
            for group, (_, batches) in enumerate(groups)
            if number < len(batches)
        ]
        most = len(streams) if most_streams is None else most_streams
        for start in range(0, len(streams), most):
            part = streams[start : start + most]
            batches = [batch for _, batch in part]
            stacked = (
                forward.stacked(batches)
                if len(part) > 1 and isinstance(forward, StackedForward)
                else None
            )
            if stacked is None:
                yield from (Stream(batch, [batch], [group]) for group, batch in part)
            else:
                yield Stream(stacked, batches, [group for group, _ in part])
