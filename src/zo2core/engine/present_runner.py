"""Runners of weights that first-order steps change: an adapter's in memory, or all of them where they are stored."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from zo2core.build import Parts, RunOptions, SharedSegments, build
from zo2core.engine.runner import Runner
from zo2core.optimizers import form_of, require_finite, unusable_state
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import BlockModel, Device
from zo2core.sweep.gradient_visitor import TrainedWeights
from zo2core.sweep.stored_parameters import StoredParameters
from zo2core.sweep.trained_parameters import PresentVersion, PresentVisits, PresentWeights, TrainedParameters
from zo2core.sweep.visits import SweepVisitor


class Trained(PresentVersion, TrainedWeights, Protocol):
    """Trained weights: their present values, and the gradients that are added to them."""

    @property
    def forms(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each trained parameter, by name."""

    def load(self, values: Mapping[str, torch.Tensor], sweep: Callable[[SweepVisitor], object]) -> None:
        """Replace all values.

        Args:
            values: The values of all trained parameters, by name.
            sweep: Runs a visitor over all segments, where values are stored.
        """


TrainedT = TypeVar("TrainedT", bound=Trained)


class PresentRunner(Runner, Generic[TrainedT]):
    """Evaluates and exports a model with the present values of its trained parameters.

    Args:
        model: The model.
        parts: Parts of the run, which the runner closes, also if its construction fails.
        trained: Makes the trained parameters: ``in_memory`` or ``where_stored``.

    Raises:
        ZO2Error: as ``trained`` raises it.
    """

    def __init__(self, model: BlockModel, parts: Parts, trained: Callable[[BlockModel, Parts], TrainedT]) -> None:
        try:
            self._trained = trained(model, parts)
        except BaseException:
            parts.opened.__exit__(*sys.exc_info())  # a journal that was just created is removed
            raise
        self._present_weights = PresentWeights(self._trained, parts.work_buffer)
        visits = PresentVisits(
            layouts=model.layouts,
            trained=self._trained,
            weights=self._present_weights,
            activations=parts.activations,
            streams=parts.device.streams,
            timeline=parts.timeline,
            update_loss=parts.update_loss,
        )
        super().__init__(model, parts._replace(visits=visits))

    def load_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of the trained parameters.

        Args:
            parameters: Values by name, as in the ``state_dict`` of an engine.

        Raises:
            CheckpointError: if they belong to other parameters, or are not finite; nothing is changed then.
        """
        self._require_parameters(parameters)
        self._trained.load(parameters, lambda visitor: self.run(visitor, range(len(self._model.layouts))))

    def _require_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse values of other parameters than the trained ones."""
        if not isinstance(parameters, Mapping):
            raise unusable_state(f"a {type(parameters).__name__} as parameters")
        forms = {name: (tuple(shape), dtype) for name, (shape, dtype) in self._trained.forms.items()}
        if {name: form_of(value) for name, value in parameters.items()} != forms:
            raise unusable_state(f"{len(parameters)} parameters that are not all of the {len(forms)} trained ones")
        for name, value in parameters.items():
            require_finite(name, value)

    @contextmanager
    def _closed_if_refused(self) -> Iterator[None]:
        """Close a runner whose construction fails, and remove a journal that was just created."""
        try:
            yield
        except BaseException:
            self._use.close()
            self._parts.opened.__exit__(*sys.exc_info())
            raise


def in_memory(model: BlockModel, parts: Parts) -> TrainedParameters:
    """Trained parameters that stay in memory, such as an adapter's, over a base that is only read."""
    return TrainedParameters(model.layouts, model.weights, parts.device.torch_device)


def where_stored(model: BlockModel, parts: Parts) -> StoredParameters:
    """All parameters, whose only present values are in the segments' buckets."""
    return StoredParameters(parts.layouts)


class SnapshotReplayer(PresentRunner[Trained]):
    """Evaluates and exports a model with the parameters of a snapshot, and never trains it.

    Args:
        model: The model of the run, opened with the same options.
        step: Number of steps taken when the snapshot was taken.
        parameters: Values of the trained parameters, by name; None: the initial values of the run.
        device, memory, micro_batch_size, trace, shared: As for ``Replayer``.

    Raises:
        CheckpointError: if the values belong to other parameters.
        ZO2Error: as for ``Replayer``.
    """

    def __init__(
        self,
        model: BlockModel,
        step: int,
        parameters: Mapping[str, torch.Tensor] | None,
        *,
        device: Device | str = "cpu",
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        micro_batch_size: int | None = None,
        trace: Trace | Path | str | None = None,
        shared: SharedSegments | None = None,
    ) -> None:
        trains_all = not any(spec.frozen for layout in model.layouts for spec in layout.parameters)
        options = RunOptions(
            device=device,
            memory=memory,
            micro_batch_size=micro_batch_size,
            trace=trace,
            stays_in_memory=trains_all and parameters is not None,
            shared=shared,
        )
        super().__init__(model, build(model, None, options), where_stored if trains_all else in_memory)
        self._step = step
        if parameters is not None:
            with self._closed_if_refused():
                self.load_parameters(parameters)

    @property
    def version(self) -> int:
        """Number of steps that the parameters have taken."""
        return self._step
