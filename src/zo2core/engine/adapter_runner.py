"""Runners of a base that is only read, with trained parameters that stay in memory, such as an adapter's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from zo2core.build import Parts, RunOptions, SharedSegments, build
from zo2core.engine.runner import Runner
from zo2core.errors import CheckpointError
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import BlockModel, Device
from zo2core.sweep.trained_parameters import PresentVisits, PresentWeights, TrainedParameters


class AdapterRunner(Runner):
    """Evaluates and exports a base with the present values of its trained parameters.

    Args:
        model: A model with an adapter.
        parts: Parts of the run, which the runner closes, also if its construction fails.

    Raises:
        OptionError: if a block owns a trained parameter, or nothing is trained.
        CheckpointError: if the values cannot be read.
    """

    def __init__(self, model: BlockModel, parts: Parts) -> None:
        try:
            self._trained = TrainedParameters(model.layouts, model.weights, parts.device.torch_device)
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

    def _close_refused(self) -> None:
        """Close a runner whose construction fails, and remove a journal that was just created."""
        self._use.close()
        self._parts.opened.__exit__(*sys.exc_info())

    def require_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse values of other parameters than the trained ones.

        Raises:
            CheckpointError: if a name, a shape or a dtype differs.
        """
        expected = {name: (value.shape, value.dtype) for name, value in self._trained.parameters.items()}
        if {name: (value.shape, value.dtype) for name, value in parameters.items()} != expected:
            raise CheckpointError(
                "state",
                found=f"{len(parameters)} parameters that are not all the engine's",
                expected=f"the {len(expected)} trained parameters",
                remedy="load the state of a run of the same model and adapter",
            )

    def load_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of the trained parameters.

        Args:
            parameters: Values by name, as in the ``state_dict`` of an engine.

        Raises:
            CheckpointError: if they belong to other parameters; nothing is changed then.
        """
        self.require_parameters(parameters)
        with torch.no_grad():
            for name, value in parameters.items():
                self._trained.parameters[name].copy_(value)


class SnapshotReplayer(AdapterRunner):
    """Evaluates and exports a model with the adapter of a snapshot, and never trains it.

    Args:
        model: The model of the run, opened with the same options.
        step: Step of the snapshot.
        parameters: Values of the trained parameters, by name; None: the initial values of the run.
        device, memory, micro_batch_size, trace, shared: As for ``Replayer``.

    Raises:
        CheckpointError: if the values belong to another adapter.
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
        options = RunOptions(device=device, memory=memory, micro_batch_size=micro_batch_size, trace=trace, shared=shared)
        super().__init__(model, build(model, None, options))
        self._step = step
        if parameters is not None:
            try:
                self.load_parameters(parameters)
            except BaseException:
                self._close_refused()
                raise

    @property
    def version(self) -> int:
        """Number of steps that the parameters have taken."""
        return self._step
