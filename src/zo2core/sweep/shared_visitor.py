"""A visitor of several runs at once: each segment of a base comes once, and every run visits it with its own visitor.

The base is only read. What a run has beside it, such as an adapter's parameters, is in memory of the run's own, and so is
their version: a run's visitor cannot tell that others share its segments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import torch

from zo2core.errors import OptionError
from zo2core.kernels.encoding import decode
from zo2core.protocols import BlockModel, Device, Replaying, Store, Visitor
from zo2core.sources.segment_store import BaseDigests, SegmentDigest
from zo2core.sweep.perturbers import named_views
from zo2core.types import BlockLayout, ParameterSpec, SegmentKind, flat_views, packed_bytes


class RunSegments:
    """A run's segments: the base's parameters, which all runs read, and the run's own ones."""

    def __init__(
        self, model: BlockModel, base: BlockModel, device: Device, digests: BaseDigests, *, changes_base: bool
    ) -> None:
        self._model, self._digests = model, digests
        self._checked: set[int] = set()
        if [layout.kind for layout in model.layouts] != [layout.kind for layout in base.layouts]:
            raise _other_base(f"{len(model.layouts)} segments", f"the {len(base.layouts)} segments of the shared base")
        # For each parameter: its position in the base, or own memory.
        self._sources: list[list[int | torch.Tensor]] = []
        self._versions: list[int | None] = [None] * len(base.layouts)  # of own memory; None: it has to be read
        for index, layout in enumerate(model.layouts):
            shared = _positions(model, base, index, changes_base=changes_base)
            own = [spec for spec in layout.parameters if spec.name not in shared]
            sources: dict[str, int | torch.Tensor] = {**shared, **named_views(own, device.empty(packed_bytes(own)))}
            self._sources.append([sources[spec.name] for spec in layout.parameters])

    def views(self, index: int, shared: Store) -> tuple[torch.Tensor, ...]:
        """Return a segment's parameters in the order of the run's layout, given those of the base."""
        return tuple(shared[source] if isinstance(source, int) else source for source in self._sources[index])

    def visit(self, visitor: Visitor, index: int, shared: Store) -> None:
        """Let the run's visitor visit a segment."""
        store, version = self._at_version(index, shared)

        def commit(committed: int) -> None:
            self._versions[index] = committed

        visitor.visit(index, store, version, commit)
        if self._versions[index] is None:
            self._versions[index] = version  # nothing was committed, so nothing was changed

    def replay(self, visitor: Replaying, index: int, shared: Store) -> None:
        """Let the run's visitor bring a segment to the present version."""
        store, version = self._at_version(index, shared)
        self._versions[index] = visitor.replay(index, store, version)

    def check(self, index: int, shared: Store, digest: str) -> None:
        """Compare the digest of a segment's base with that of the run, when the run first uses it."""
        layout = self._model.layouts[index]
        if index in self._checked or not self._digests.wants(layout):
            return
        self._checked.add(index)
        if not all(isinstance(source, int) for source in self._sources[index]):
            views = self._at_version(index, shared)[0]
            self._versions[index] = 0
            if any(view.device.type != "cpu" for view in views):
                return  # a run alone computes the digest of this segment when it continues
            own = SegmentDigest(views)
            for number, view in enumerate(views):
                own.add(number, 0, view.numel())
            digest = own.value()
        if digest:
            self._digests.check(layout, digest, self._model.weights)

    def _at_version(self, index: int, shared: Store) -> tuple[tuple[torch.Tensor, ...], int]:
        """A segment's parameters and their version. The version is unknown until the visitor has said it."""
        views, version = self.views(index, shared), self._versions[index]
        if version is None:
            for spec, source in zip(self._model.layouts[index].parameters, self._sources[index], strict=True):
                if not isinstance(source, int):
                    values = torch.empty(spec.stored_numel, dtype=spec.stored_dtype)
                    self._model.weights.read_into(spec.name, values)
                    source.copy_(values)
            version = 0
        self._versions[index] = None
        return views, version


class BlockDecoder:
    """Decodes a block's encoded weights once for all runs."""

    def __init__(self, layouts: Sequence[BlockLayout], memory: torch.Tensor, helper: Executor | None) -> None:
        self._layouts, self._memory, self._helper = layouts, memory, helper

    @torch.no_grad()
    def decoded(self, index: int, store: Store) -> Store:
        """Return a segment's parameters, of which a block's are decoded."""
        layout, memory, decoded = self._layouts[index], self._memory, list(store)
        if layout.kind is not SegmentKind.BLOCK:  # embedding and head are decoded by each run, if at all
            return store
        views = iter(flat_views([spec.decoded for spec in layout.parameters if spec.encoding is not None], memory))
        for position, spec in enumerate(layout.parameters):
            if spec.encoding is not None:
                decoded[position] = next(views)
                decode(spec, store[position], decoded[position], self._helper)
        return decoded


class RunSweep:
    """What one run does in a shared sweep."""

    def __init__(self, segments: RunSegments, visitor: Visitor, order: Sequence[int]) -> None:
        self.segments, self.visitor, self.order = segments, visitor, tuple(order)
        self.error: Exception | None = None  # which ended it


class SweepEnded(Exception):  # noqa: N818 - no error
    """No run is left in a sweep."""


class SharedVisitor:
    """Visits segments for several runs, whose orders begin alike. A run that fails ends alone."""

    def __init__(
        self, sweeps: Sequence[RunSweep], layouts: Sequence[BlockLayout], decoder: BlockDecoder, digests: BaseDigests
    ) -> None:
        self._sweeps, self._layouts, self._decoder, self._digests = sweeps, layouts, decoder, digests
        self._position = 0

    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Let each run visit a segment. See the contract."""
        commit(version)
        here = [sweep for sweep in self._sweeps if sweep.error is None and self._position < len(sweep.order)]
        self._position += 1
        if not here:
            raise SweepEnded
        digest = self._digests.known(self._layouts[index])
        decoded = self._decoder.decoded(index, store)
        for sweep in here:
            try:
                sweep.segments.check(index, store, digest)
                sweep.segments.visit(sweep.visitor, index, decoded)
            except Exception as error:  # of one run: it ends alone, and raises it
                sweep.error = error

    def replay(self, index: int, store: Store, version: int) -> int:
        """Do nothing: the base does not change. See the contract."""
        return version


class RunReplay:
    """Brings one run's part of a segment to the present version."""

    def __init__(self, segments: RunSegments, visitor: Replaying) -> None:
        self._segments, self._visitor = segments, visitor

    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring the run's part to the present version; the base does not change. See the contract."""
        self._segments.replay(self._visitor, index, store)
        return version


def _positions(model: BlockModel, base: BlockModel, index: int, *, changes_base: bool) -> dict[str, int]:
    """Find the base's parameters in a segment of a run, and refuse those that are not the base's, or that would change.

    An adapter may give a parameter another name, but it neither moves it nor puts parameters of its own into blocks.
    """
    layout, shared = model.layouts[index], base.layouts[index]
    by_name = {spec.name: position for position, spec in enumerate(shared.parameters)}
    files = {_file(base, spec) for spec in shared.parameters}
    renamed = [spec for spec in layout.parameters if spec.name not in by_name and _file(model, spec) in files]
    names = {spec.name for spec in layout.parameters}
    left = [position for position, spec in enumerate(shared.parameters) if spec.name not in names]
    positions = {spec.name: by_name[spec.name] for spec in layout.parameters if spec.name in by_name}
    positions.update(zip((spec.name for spec in renamed), left, strict=False))
    for spec in layout.parameters:
        if spec.name in positions:
            expected = shared.parameters[positions[spec.name]]
            _require_same(spec, expected, _file(model, spec), _file(base, expected))
            if changes_base and not spec.frozen:
                raise OptionError(
                    "shared",
                    found=f"a run that would change {spec.name}",
                    expected="runs that only read the base",
                    remedy="train an adapter, or pass perturbation=LowRankPerturbation(rank=...)",
                )
        elif not layout.resident or spec in renamed:
            raise _other_base(spec.name, f"only the parameters that {shared.name} has")
    return positions


def _file(model: BlockModel, spec: ParameterSpec) -> str:
    """The file of a parameter, by one path however the model was named."""
    return os.path.realpath(model.weights.origin(spec.name))


def _require_same(spec: ParameterSpec, shared: ParameterSpec, file: str, shared_file: str) -> None:
    """Refuse a parameter that is not the base's."""
    names = ("shape", "dtype", "encoding", "transfer_dtype")
    attributes = {name: (getattr(spec, name), getattr(shared, name)) for name in names} | {"file": (file, shared_file)}
    for name, (found, expected) in attributes.items():
        if found != expected:
            raise _other_base(f"{spec.name} of {name} {found}", f"{name} {expected}, as in the shared base")


def _other_base(found: str, expected: str) -> OptionError:
    return OptionError("shared", found=found, expected=expected, remedy="open the run's model as the shared base was opened")
