"""All parameters of a model, which change where they are stored: in the backward pass, one segment after the other.

The gradients of one segment are in memory at a time. Those of parameters that several segments share wait for the backward
pass of the segment that owns them. What a step does with a segment's gradients is up to its method.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from zo2core.errors import ClosedError, OptionError
from zo2core.protocols import Store
from zo2core.sweep.visitor import SweepVisitor
from zo2core.types import BlockLayout, ParameterSpec


class SegmentStep(Protocol):
    """What a sweep does with the gradients of each segment."""

    def complete(self, segment: int, gradients: dict[str, torch.Tensor]) -> None:
        """Check a segment's gradients, and clip and convert them as need be. If it raises, no weight has changed."""

    def update(
        self, segment: int, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], store: Store
    ) -> bool:
        """Change a segment's weights in place; returns whether it has changed them."""


class _Owned(NamedTuple):
    """A trained parameter, and where it is."""

    segment: int
    position: int  # in the segment's store
    spec: ParameterSpec


class StoredParameters:
    """The trained parameters of all segments, their gradients, and the versions of the segments."""

    version = 0  # segments are always at their present version: there is none that all of them share

    def __init__(self, layouts: Sequence[BlockLayout]) -> None:
        owned = [
            _Owned(segment, position, spec)
            for segment, layout in enumerate(layouts)
            for position, spec in enumerate(layout.parameters)
        ]
        for one in owned:
            _require_trainable(one.spec)
        self._layouts = layouts
        self._owned = {one.spec.name: one for one in sorted(owned, key=lambda one: one.spec.index)}
        self._names = {
            segment: [one.spec.name for one in owned if one.segment == segment] for segment in {one.segment for one in owned}
        }
        self._versions: dict[int, int] = {}  # that segments have to have; 0 if there is none
        self._gradients: dict[str, torch.Tensor] = {}
        self._summed: set[str] = set()  # those whose gradients have memory of their own
        self._completed: dict[str, torch.Tensor] = {}  # gradients of the segment that is updated next
        self._updated: Collection[int] = ()
        self._step: SegmentStep | None = None
        self._next: int | None = None  # version after the next update; None: the next number

    @property
    def names(self) -> Collection[str]:
        """Names of the trained parameters, in registration order."""
        return self._owned

    @property
    def forms(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each trained parameter, by name."""
        return {name: (torch.Size(one.spec.shape), one.spec.dtype) for name, one in self._owned.items()}

    def load(self, values: Mapping[str, torch.Tensor], sweep: Callable[[SweepVisitor], object]) -> None:
        """Replace the weights of all segments, in a sweep. See the contract."""
        sweep(_Loading(self, values))

    @property
    def segments(self) -> Sequence[int]:
        """The segments that own trained parameters, in visiting order."""
        return sorted(self._names)

    def names_of(self, segment: int) -> Sequence[str]:
        """Names of a segment's own trained parameters."""
        return self._names.get(segment, ())

    @property
    def updated(self) -> Collection[int]:
        """Segments that are updated in the backward pass of the present sweep."""
        return self._updated

    def expect(self, updated: Collection[int], step: SegmentStep, version: int | None = None) -> None:
        """Say what the next sweep does."""
        self._updated, self._step, self._next = updated, step, version

    def begin_at(self, versions: Mapping[int, int]) -> None:
        """Expect the versions that segments have on disk."""
        self._versions = dict(versions)

    def begin_sweep(self) -> None:
        """Forget the gradients of a sweep that failed."""
        self.clear_gradients()

    def replay(self, index: int, store: Store, version: int) -> int:
        """Return the version: a store always holds the present weights."""
        if version != self._versions.get(index, 0):
            raise ClosedError(
                self._layouts[index].name,
                found=f"weights of version {version}: an update was interrupted, or written bytes are damaged",
                expected=f"version {self._versions.get(index, 0)}",
                remedy="open the run again, which resumes from what was saved whole; if this is repeated, begin it anew",
            )
        return version

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
    def complete(self, index: int) -> None:
        """Have the step check a segment's gradients, which are all there. See the contract."""
        if index in self._updated:
            assert self._step is not None, "a sweep with gradients has a step"
            names = [name for name in self._names[index] if name in self._gradients]
            self._summed.difference_update(names)
            self._completed = {name: self._gradients.pop(name) for name in names}
            self._step.complete(index, self._completed)

    @torch.no_grad()
    def update(self, index: int, store: Store, version: int) -> int:
        """Have the step change a segment's weights, and free its gradients. See the contract."""
        if index not in self._updated:
            return version
        assert self._step is not None, "a sweep with gradients has a step"
        weights = {name: self._shaped(name, store) for name in self._names[index]}
        gradients, self._completed = self._completed, {}
        if self._step.update(index, weights, gradients, store):
            version = version + 1 if self._next is None else self._next
            self._versions[index] = version
        return version

    def set_values(self, index: int, store: Store, version: int, values: Mapping[str, torch.Tensor]) -> int:
        """Replace a segment's weights; returns its new version."""
        for name in self.names_of(index):
            self._shaped(name, store).copy_(values[name])
        self._versions[index] = version + 1
        return version + 1

    def clear_gradients(self) -> None:
        """Free all gradients."""
        self._gradients.clear()
        self._summed.clear()
        self._completed = {}

    def _shaped(self, name: str, store: Store) -> torch.Tensor:
        _, position, spec = self._owned[name]
        return store[position].view(spec.shape)


class _Loading:
    """A visitor that replaces the weights of all segments."""

    def __init__(self, parameters: StoredParameters, values: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._values = values
        self.outputs: list[list[torch.Tensor]] = []
        self.seeds = ()

    @torch.no_grad()
    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Replace a segment's weights. See the contract."""
        commit(self._parameters.set_values(index, store, version, self._values))

    def replay(self, index: int, store: Store, version: int) -> int:
        """Do nothing. See the contract."""
        return version

    def finish(self) -> None:
        """Do nothing: there is no second thread."""


def _require_trainable(spec: ParameterSpec) -> None:
    """Refuse a parameter that cannot be trained where it is stored."""
    if spec.frozen or spec.encoding is not None:
        raise OptionError(
            "model",
            found=f"{spec.name}, which is {'frozen' if spec.encoding is None else 'quantised'}",
            expected="a model all of whose parameters are trained",
            remedy="open it without an adapter and not quantised, or train an adapter by FirstOrder",
        )
    if spec.is_low_bit:
        raise OptionError(
            "transfer_dtype",
            found=f"{spec.transfer_dtype} for {spec.name}",
            expected="weights that travel as they are stored",
            remedy="leave it out",
        )
