"""The few parameters that an optimizer changes. They stay in memory, and are copied into their segments at each visit.

Only the optimizer's parameters have the present values. A segment that owns some of them holds copies, whose version its
bucket records; to bring the segment to the present version is to copy them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from zo2core.errors import OptionError
from zo2core.protocols import Forward, Store, Stores, TensorReader
from zo2core.sweep.perturber import Perturber
from zo2core.sweep.visitor import Groups, SegmentVisitor, SegmentVisits, SweepVisitor
from zo2core.sweep.work_buffer import WorkBuffer
from zo2core.types import BlockLayout, Evaluation


class TrainedParameters:
    """The values and gradients of the trained parameters, and the version of the copies in segments."""

    def __init__(self, layouts: Sequence[BlockLayout], weights: TensorReader, device: torch.device) -> None:
        trained = [
            (index, position, spec)
            for index, layout in enumerate(layouts)
            for position, spec in enumerate(layout.parameters)
            if not spec.frozen
        ]
        trained.sort(key=lambda entry: entry[2].index)
        in_blocks = [spec.name for index, _, spec in trained if not layouts[index].resident]
        if in_blocks or not trained:
            raise OptionError(
                "model",
                found=f"{in_blocks[0]}, a trained parameter of a block" if in_blocks else "no trained parameter",
                expected="trained parameters that stay in memory, such as an adapter's, and blocks that are only read",
                remedy="open the model with an adapter, or train all parameters",
            )
        self.version = 0  # version of the segments' copies; it rises with each sweep
        self.parameters: dict[str, nn.Parameter] = {}  # by name, in registration order
        self._owned: dict[int, list[tuple[int, nn.Parameter]]] = {}  # by segment: position in its store, and the parameter
        for index, position, spec in trained:
            values = torch.empty(spec.shape, dtype=spec.dtype)
            weights.read_into(spec.name, values.view(-1))
            parameter = nn.Parameter(values.to(device))
            self.parameters[spec.name] = parameter
            self._owned.setdefault(index, []).append((position, parameter))

    @property
    def names(self) -> Collection[str]:
        """Names of the trained parameters, in registration order."""
        return self.parameters

    @property
    def forms(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each trained parameter, by name."""
        return {name: (parameter.shape, parameter.dtype) for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor], sweep: Callable[[SweepVisitor], object]) -> None:
        """Replace all values, without a sweep: segments copy them when they are visited. See the contract."""
        for name, value in values.items():
            self.parameters[name].copy_(value)

    @property
    def updated(self) -> Collection[int]:
        """No segments: the optimizer changes the parameters after the sweep."""
        return ()

    def begin_sweep(self) -> None:
        """Raise the version, so that segments copy the values again: not every optimizer marks what it has changed."""
        self.version += 1

    def replay(self, index: int, store: Store, version: int) -> int:
        """Copy the present values into a segment."""
        if index not in self._owned or version == self.version:
            return version
        for position, parameter in self._owned[index]:
            store[position].copy_(parameter.detach().view(-1))
        return self.version

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add to a parameter's gradient, in its dtype, as ``torch.autograd`` accumulates."""
        parameter = self.parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        else:
            parameter.grad += gradient.to(parameter.dtype)

    def complete(self, index: int) -> None:
        """Do nothing: gradients are complete when the sweep has ended."""

    def update(self, index: int, store: Store, version: int) -> int:
        """Change nothing: the optimizer changes the parameters after the sweep."""
        return version

    def clear_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None


class TrainedWeights(Protocol):
    """What gradients are added to, and what changes with them: parameters in memory, or those of stored segments."""

    @property
    def version(self) -> int:
        """The present version of the segments."""

    @property
    def names(self) -> Collection[str]:
        """Names of the trained parameters, in registration order."""

    @property
    def updated(self) -> Collection[int]:
        """Segments that are updated in the backward pass of the present sweep."""

    def begin_sweep(self) -> None:
        """Prepare for a sweep."""

    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment's store to the present version; returns its new version."""

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add to a parameter's gradient, in its dtype, as ``torch.autograd`` accumulates."""

    def complete(self, index: int) -> None:
        """Accept that all gradients of a segment's own parameters have been added. If it raises, nothing has changed.

        A parameter that several segments use belongs to the first of them, whose backward pass is the last.
        """

    def update(self, index: int, store: Store, version: int) -> int:
        """Change a segment's stored weights, if this sweep updates it; returns the new version."""


class PresentWeights(Perturber):
    """A perturber without perturbations: it loads the present weights into the work buffer."""

    def __init__(self, trained: TrainedWeights, buffer: WorkBuffer) -> None:
        super().__init__(buffer)
        self.trained = trained

    @property
    def version(self) -> int:
        """The present version."""
        return self.trained.version

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment's store to the present version. See ``Perturber``."""
        return self.trained.replay(index, stores[index], version)

    def perturb(self, index: int, stores: Stores, before: Evaluation | None, evaluation: Evaluation | None) -> None:
        """Load trained weights into the work buffer. See ``Perturber``."""
        assert (before, evaluation) == (None, None), "nothing is perturbed"
        self._buffer.load(index, stores)


@dataclass(frozen=True, kw_only=True)
class PresentVisits(SegmentVisits):
    """Makes the visitors of evaluations, exports and flushes, which run the present weights."""

    weights: PresentWeights

    def visitor(self, version: int, groups: Groups, forward: Forward) -> SegmentVisitor:
        """Make the visitor of one sweep. See the contract."""
        self.weights.trained.begin_sweep()
        return SegmentVisitor(self, forward, self.weights, groups)
