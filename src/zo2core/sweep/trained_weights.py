"""Weights that first-order steps train, and their gradients: an adapter's in memory, or all of a
model, where they are stored.

An adapter's few parameters are the only place of their present values. A segment that owns some of
them holds copies, whose version its bucket records; to bring the segment to the present version is
to copy them again.

All parameters change in the backward pass, one segment after the other. One segment's gradients are
in memory at a time. Those of parameters that several segments share wait for the backward pass of
the segment that owns them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import nn

from zo2core.errors import ClosedError, OptionError
from zo2core.kernels.programs import Trajectory
from zo2core.protocols import Store, Stores, TensorReader
from zo2core.sweep.fused_step import FusedStep
from zo2core.sweep.perturbers import Perturber, WorkBuffer
from zo2core.types import BlockLayout, ParameterSpec


class _Parameter(NamedTuple):
    """A parameter, and where it is."""

    segment: int
    position: int  # in the segment's store
    spec: ParameterSpec


def _parameters(layouts: Sequence[BlockLayout]) -> list[_Parameter]:
    """All parameters, in registration order."""
    owned = [
        _Parameter(segment, position, spec)
        for segment, layout in enumerate(layouts)
        for position, spec in enumerate(layout.parameters)
    ]
    return sorted(owned, key=lambda parameter: parameter.spec.index)


class TrainedWeights(Perturber, ABC):
    """The present weights, which no sweep perturbs, and their gradients."""

    # segments that are updated in the backward pass of the present sweep
    updated: Collection[int] = ()

    @property
    @abstractmethod
    def forms(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each trained parameter, by name, in registration order."""

    @abstractmethod
    def load(self, values: Mapping[str, torch.Tensor], sweep: Callable[[], object]) -> None:
        """Replace all values; those that are in segments, by calling a sweep over all of them."""

    @abstractmethod
    def begin_sweep(self) -> None:
        """Prepare for a sweep, however the one before ended."""

    def for_sweep(self, trajectory: Trajectory) -> Self:
        """The present weights for a sweep: no update is replayed, and nothing is perturbed."""
        self.begin_sweep()
        return self

    @abstractmethod
    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add to a parameter's gradient, in its dtype, as ``torch.autograd`` accumulates."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """Free all gradients."""

    def perturb(self, index: int, stores: Stores, evaluation: int) -> None:
        """Load trained weights into the work buffer."""
        self.buffer.load(index, stores)

    def complete(self, index: int) -> dict[str, torch.Tensor]:
        """Return the gradients of a segment's own parameters, which are all there, checked, clipped
        and converted; none where the segment is not updated in this sweep.

        If it raises, nothing has changed.
        """
        return {}

    def update(
        self, index: int, store: Store, version: int, gradients: Mapping[str, torch.Tensor]
    ) -> int:
        """Change a segment's stored weights, if this sweep updates it; returns the new version."""
        return version


class AdapterWeights(TrainedWeights):
    """The values and gradients of an adapter's parameters, and the version of the copies in
    segments.
    """

    def __init__(
        self,
        buffer: WorkBuffer,
        layouts: Sequence[BlockLayout],
        weights: TensorReader,
        device: torch.device,
        all_layouts: Sequence[BlockLayout],
    ) -> None:
        super().__init__(buffer, 0)  # the version of the segments' copies rises with each sweep
        trained = [parameter for parameter in _parameters(all_layouts) if not parameter.spec.frozen]
        in_blocks = [
            parameter.spec.name
            for parameter in trained
            if not all_layouts[parameter.segment].resident
        ]
        if in_blocks or not trained:
            found = "no trained parameter"
            if in_blocks:
                found = f"{in_blocks[0]}, a trained parameter of a block"
            raise OptionError(
                "model",
                found=found,
                expected="trained parameters that stay in memory, such as an adapter's, and blocks "
                "that are only read",
                remedy="open the model with an adapter, or train all parameters",
            )
        self.parameters: dict[str, nn.Parameter] = {}  # by name, in registration order
        # by segment: position in its store, and the parameter
        self._copies: dict[int, list[tuple[int, nn.Parameter]]] = {}
        for _, _, spec in trained:
            values = torch.empty(spec.shape, dtype=spec.dtype)
            weights.read_into(spec.name, values.view(-1))
            self.parameters[spec.name] = nn.Parameter(values.to(device))
        for segment, position, spec in _parameters(layouts):
            if not spec.frozen:
                copy = position, self.parameters[spec.name]
                self._copies.setdefault(segment, []).append(copy)

    @property
    def forms(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each trained parameter, by name, in registration order."""
        return {
            name: (parameter.shape, parameter.dtype) for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor], sweep: Callable[[], object]) -> None:
        """Replace all values, without a sweep: segments copy them when they are visited."""
        for name, value in values.items():
            self.parameters[name].copy_(value)

    def begin_sweep(self) -> None:
        """Raise the version, so that segments copy the values again: not every optimizer marks what
        it has changed.
        """
        self.version += 1

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Copy the present values into a segment, and return its new version."""
        if index not in self._copies or version == self.version:
            return version
        for position, parameter in self._copies[index]:
            stores[index][position].copy_(parameter.detach().view(-1))
        return self.version

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add to a parameter's gradient, in its dtype, as ``torch.autograd`` accumulates."""
        parameter = self.parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        else:
            parameter.grad += gradient.to(parameter.dtype)

    def keep_gradients(self, keeps: Callable[[str], bool]) -> None:
        """Free the gradients of all parameters but some, by name."""
        for name, parameter in self.parameters.items():
            if not keeps(name):
                parameter.grad = None

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of all parameters that have one, which then have none."""
        gradients = {
            name: parameter.grad
            for name, parameter in self.parameters.items()
            if parameter.grad is not None
        }
        self.clear_gradients()
        return gradients

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Set the gradients of parameters that have none."""
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient

    def clear_gradients(self) -> None:
        """Free all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None


class StoredWeights(TrainedWeights):
    """The trained parameters of all segments, their gradients, and the versions of the segments."""

    def __init__(self, buffer: WorkBuffer, layouts: Sequence[BlockLayout]) -> None:
        # segments are always at their present version: there is none that all of them share
        super().__init__(buffer, 0)
        self._layouts = layouts
        self._owned = {parameter.spec.name: parameter for parameter in _parameters(layouts)}
        for parameter in self._owned.values():
            _require_trainable(parameter.spec)
        # that segments have to have, as on disk; 0 if there is none
        self.versions: dict[int, int] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._summed: set[str] = set()  # those whose gradients have memory of their own
        # values that replace the weights in this sweep
        self._loading: Mapping[str, torch.Tensor] | None = None
        self._step: FusedStep | None = None  # of the present sweep
        self._next: int | None = None  # version after the next update; None: the next number

    @property
    def forms(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each trained parameter, by name, in registration order."""
        return {name: self._form(name) for name in self._owned}

    @property
    def segments(self) -> Sequence[int]:
        """The segments that own trained parameters, in visiting order."""
        return [segment for segment, layout in enumerate(self._layouts) if layout.parameters]

    def names_of(self, segment: int) -> Sequence[str]:
        """Names of a segment's own trained parameters."""
        return [spec.name for spec in self._layouts[segment].parameters]

    def load(self, values: Mapping[str, torch.Tensor], sweep: Callable[[], object]) -> None:
        """Replace the weights of all segments, in a sweep."""
        self._loading = values
        try:
            sweep()
        finally:
            self._loading = None

    def plan_updates(self, updated: Collection[int], step: FusedStep, version: int | None) -> None:
        """Set what the next sweep does with the gradients of these segments, and the version of a
        segment that it changes; None: the next number.
        """
        self.updated = updated
        self._step = step
        self._next = version

    def begin_sweep(self) -> None:
        """Forget the gradients of a sweep that failed."""
        self.clear_gradients()

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Return the version: a store always holds the present weights, unless others are
        loaded.
        """
        expected = self.versions.get(index, 0)
        if self._loading is not None and self.names_of(index):
            self.set_values(index, stores[index], self._loading)
            self.versions[index] = version + 1
            return version + 1
        if version != expected:
            raise ClosedError(
                self._layouts[index].name,
                found=f"weights of version {version}: an update was interrupted, or written bytes "
                "are damaged",
                expected=f"version {expected}",
                remedy="open the run again, which resumes from what was saved whole; if this is "
                "repeated, begin it anew",
            )
        return version

    def set_values(self, index: int, store: Store, values: Mapping[str, torch.Tensor]) -> None:
        """Replace a segment's weights."""
        for name in self.names_of(index):
            self._shaped(name, store).copy_(values[name])

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add to a parameter's gradient, in its dtype, as ``torch.autograd`` accumulates."""
        gradient = gradient.to(self._owned[name].spec.dtype)
        if name not in self._gradients:
            self._gradients[name] = gradient.contiguous()  # autograd may use its memory elsewhere
        elif name in self._summed:
            self._gradients[name] += gradient
        else:
            self._gradients[name] = self._gradients[name] + gradient
            self._summed.add(name)

    @torch.no_grad()
    def complete(self, index: int) -> dict[str, torch.Tensor]:
        """Add up the workers' gradients of a segment's own parameters, and check, clip and convert
        the sums.

        A parameter that several segments use belongs to the first of them, whose backward pass is
        the last.
        """
        if index not in self.updated or self._step is None:
            return {}
        names = self.names_of(index)
        gradients = {name: self._gradients.pop(name) for name in names if name in self._gradients}
        self._summed.difference_update(gradients)
        gradients = self._step.rows.summed(gradients, {name: self._form(name) for name in names})
        self._step.prepare(gradients)
        return gradients

    @torch.no_grad()
    def update(
        self, index: int, store: Store, version: int, gradients: Mapping[str, torch.Tensor]
    ) -> int:
        """Change a segment's stored weights, if this sweep updates it; returns the new version."""
        step = self._step
        if index not in self.updated or step is None or step.is_measuring:
            return version
        weights = {name: self._shaped(name, store) for name in self.names_of(index)}
        step.change(index, weights, gradients, store)
        self.versions[index] = version + 1 if self._next is None else self._next
        return self.versions[index]

    def clear_gradients(self) -> None:
        """Free all gradients."""
        self._gradients.clear()
        self._summed.clear()

    def _form(self, name: str) -> tuple[torch.Size, torch.dtype]:
        spec = self._owned[name].spec
        return torch.Size(spec.shape), spec.dtype

    def _shaped(self, name: str, store: Store) -> torch.Tensor:
        _, position, spec = self._owned[name]
        return store[position].view(spec.shape)


def _require_trainable(spec: ParameterSpec) -> None:
    """Refuse a parameter that cannot be trained where it is stored."""
    if spec.frozen or spec.encoding is not None:
        raise OptionError(
            "model",
            found=f"{spec.name}, which is {'frozen' if spec.encoding is None else 'quantised'}",
            expected="a model all of whose parameters are trained",
            remedy="open it without an adapter and not quantised, or train an adapter by "
            "`FirstOrder`",
        )
    if spec.is_low_bit:
        raise OptionError(
            "transfer_dtype",
            found=f"{spec.transfer_dtype} for {spec.name}",
            expected="weights that travel as they are stored",
            remedy="leave it out",
        )
