"""What runners of weights that first-order steps change have in common: sweeps always see the present weights."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from zo2core.build import Parts
from zo2core.engine.runner import Runner
from zo2core.errors import CheckpointError, OptionError
from zo2core.protocols import BlockModel, DifferentiableModel
from zo2core.sweep.gradient_visitor import GradientVisits, TrainedWeights
from zo2core.sweep.kept_inputs import KeptInputs
from zo2core.sweep.memory_limit import MemoryLimit
from zo2core.sweep.trained_parameters import PresentVersion, PresentVisits, PresentWeights


class Trained(PresentVersion, TrainedWeights, Protocol):
    """Trained weights: their present values, and the gradients that are added to them."""


TrainedT = TypeVar("TrainedT", bound=Trained)


class PresentRunner(Runner, Generic[TrainedT]):
    """Evaluates and exports a model with the present values of its trained parameters.

    Args:
        model: The model.
        parts: Parts of the run, which the runner closes, also if its construction fails.
        trained: Makes the trained parameters.

    Raises:
        ZO2Error: as ``trained`` raises it.
    """

    def __init__(self, model: BlockModel, parts: Parts, trained: Callable[[], TrainedT]) -> None:
        try:
            self._trained = trained()
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

    @property
    @abstractmethod
    def _values(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of each trained parameter, by name."""

    def require_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse values of other parameters than the trained ones.

        Raises:
            CheckpointError: if a name, a shape or a dtype differs.
        """
        expected = self._values
        if {name: (value.shape, value.dtype) for name, value in parameters.items()} != expected:
            raise CheckpointError(
                "state",
                found=f"{len(parameters)} parameters that are not all the engine's",
                expected=f"the {len(expected)} trained parameters",
                remedy="load the state of a run of the same model, adapter and precision",
            )

    def _close_refused(self) -> None:
        """Close a runner whose construction fails, and remove a journal that was just created."""
        self._use.close()
        self._parts.opened.__exit__(*sys.exc_info())

    def _gradient_visits(
        self, leaves: Sequence[Mapping[str, torch.Tensor]], inputs: KeptInputs[torch.UntypedStorage]
    ) -> GradientVisits:
        """What makes the visitors of first-order steps.

        Args:
            leaves: For each segment, its modules' trained parameters by name.
            inputs: The inputs that blocks keep.
        """
        parts = self._parts
        return GradientVisits(
            layouts=self._model.layouts,
            present=self._present_weights,
            trained=self._trained,
            leaves=leaves,
            weights=parts.work_buffer.bound,
            inputs=inputs,
            limit=MemoryLimit(parts.host_limit),
            streams=parts.device.streams,
            timeline=parts.timeline,
        )


def require_differentiable(model: BlockModel) -> None:
    """Refuse a model whose segments have no leaves for gradients.

    Raises:
        OptionError: naming it.
    """
    if not isinstance(model, DifferentiableModel):
        raise OptionError(
            "model",
            found=f"a {type(model).__name__}, which has no `leaves`",
            expected="a DifferentiableModel",
            remedy="add this method to the model, or use ZOEngine",
        )
