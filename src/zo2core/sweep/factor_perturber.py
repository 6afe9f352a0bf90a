"""Low-rank perturbations: factors are brought to the present version, and streams that are stacked run as one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor

import torch

from zo2core.factors import FactorStore
from zo2core.kernels.encoding import decode
from zo2core.perturbation import PerturbedParameter, StackedForward, StackedModel
from zo2core.protocols import Forward, Stores
from zo2core.sweep.visitor import Groups, Perturber, Stream
from zo2core.sweep.work_buffer import WorkBuffer, can_be_read, is_encoded
from zo2core.types import ParameterSpec
from zo2core.updates import Trajectory


class FactorPerturber(Perturber):
    """Perturbs beside the activations; weights are only read."""

    def __init__(
        self,
        model: StackedModel,
        factors: FactorStore,
        buffer: WorkBuffer,
        worker: Executor | None,
        trajectory: Trajectory,
        groups: Groups,
        forward: Forward,
    ) -> None:
        super().__init__(buffer)
        self._model, self._factors, self._worker, self._trajectory = model, factors, worker, trajectory
        self._stacks = list(_stacks(forward, groups, factors.most_streams))
        evaluations = trajectory.evaluations
        self._perturbations = [
            factors.perturbations([evaluations[group] for group in stack.groups], trajectory.zo_eps)
            for stack in self._stacks
        ]
        self._locations = {  # segment and position in its store, by name
            spec.name: (index, position)
            for index, layout in enumerate(model.layouts)
            for position, spec in enumerate(layout.parameters)
        }
        factors.begin_sweep()

    @property
    def version(self) -> int:
        """The present version. See ``Perturber``."""
        return self._trajectory.version

    def streams(self, groups: Groups) -> Sequence[Sequence[Stream]]:
        """Have each stack run with perturbations of its own. See ``Perturber``."""
        return [[stack] for stack in self._stacks]

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring the segment's factors to the present version; its weights stay as they are."""
        for spec, theta in zip(self._model.layouts[index].parameters, stores[index], strict=True):
            if not spec.frozen:
                self._factors.advance(spec, theta, self._trajectory.updates, self._trajectory.version)
        return version

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Let the forward read all of a segment's weights. See ``Perturber``."""
        used = self._model.layouts[index].used
        self._model.bind(index, {spec.name: self._readable(index, spec, self._weights(spec, stores)) for spec in used})

    def perturb(self, index: int, stores: Stores, evaluation: int) -> None:
        """Add the perturbations of a stack beside the activations. See ``Perturber``."""
        perturbed: dict[str, PerturbedParameter] = {
            spec.name: self._factors.perturbed(spec, self._weights(spec, stores), self._perturbations[evaluation])
            for spec in self._model.layouts[index].used
            if not spec.frozen
        }
        self._model.perturb(index, perturbed, len(self._stacks[evaluation].groups))

    def finish(self) -> None:
        """Remove the perturbations from the model, which another engine may use next."""
        self._model.perturb(0, {}, 1)

    def _weights(self, spec: ParameterSpec, stores: Stores) -> torch.Tensor:
        owner, position = self._locations[spec.name]
        return stores[owner][position]

    def _readable(self, index: int, spec: ParameterSpec, theta: torch.Tensor) -> torch.Tensor:
        """Return the tensor from which modules read a parameter: its store, or the work buffer, filled for this visit."""
        if can_be_read(spec, theta) and not self._factors.forms(spec):
            return theta.view(spec.shape)
        weight = self.buffer.bound[index][spec.name]
        if is_encoded(spec, theta):
            decode(spec, theta, weight, self._worker)
            theta = weight
        elif not self._factors.forms(spec):
            weight.copy_(theta.view(spec.shape))
        if self._factors.forms(spec):
            self._factors.form(spec, theta, weight, self._worker)
        return weight


def _stacks(forward: Forward, groups: Groups, most_streams: int | None) -> Iterator[Stream]:
    """Stack the evaluations of each micro-batch, at most so many at a time; those that cannot be stacked run alone."""
    if not isinstance(forward, StackedForward):
        yield from (Stream(batch, [batch], [group]) for group, (_, batches) in enumerate(groups) for batch in batches)
        return
    for number in range(max((len(batches) for _, batches in groups), default=0)):
        streams = [(group, batches[number]) for group, (_, batches) in enumerate(groups) if number < len(batches)]
        most = len(streams) if most_streams is None else most_streams
        for start in range(0, len(streams), most):
            part = streams[start : start + most]
            batches = [batch for _, batch in part]
            stacked = batches[0] if len(part) == 1 else forward.stacked(batches)
            if stacked is not None:
                yield Stream(stacked, batches, [group for group, _ in part])
            else:
                yield from (Stream(batch, [batch], [group]) for group, batch in part)
