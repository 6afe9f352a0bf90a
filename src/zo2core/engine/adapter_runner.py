"""Runners of a base that is only read and parameters that stay in memory: an adapter, mostly."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from zo2core.build import Parts, RunOptions, build
from zo2core.engine.runner import Runner
from zo2core.errors import CheckpointError
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import BlockModel, Device
from zo2core.sweep.trained_parameters import PresentVisits, PresentWeights, TrainedParameters


class AdapterRunner(Runner):
    """Evaluates and exports a base with the present values of parameters that stay in memory.

    Args:
        model: Cut into embedding, blocks and head, with an adapter.
        parts: Parts of the run; closed with the runner, and also if it is refused.

    Raises:
        OptionError: if a block owns a trained parameter, or nothing is trained.
        CheckpointError: if the values cannot be read.
    """

    def __init__(self, model: BlockModel, parts: Parts) -> None:
        try:
            self._trained = TrainedParameters(model.layouts, model.weights, parts.device.torch_device)
        except BaseException:
            parts.opened.__exit__(*sys.exc_info())  # a journal that was just begun is taken back
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
        """Close a runner whose construction fails; a journal that was just begun is taken back."""
        self._use.close()
        self._parts.opened.__exit__(*sys.exc_info())

    def require_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse values of other parameters than those that are trained here.

        Raises:
            CheckpointError: if a name, a shape or a dtype differs.
        """
        expected = {name: (value.shape, value.dtype) for name, value in self._trained.parameters.items()}
        if {name: (value.shape, value.dtype) for name, value in parameters.items()} != expected:
            raise CheckpointError(
                "state",
                found=f"{len(parameters)} parameters that are not all the engine's",
                expected=f"the {len(expected)} parameters that are trained",
                remedy="load the state of a run of the same model and adapter",
            )

    def load_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Give the trained parameters other values.

        Args:
            parameters: By name, as ``state_dict`` of an engine has them.

        Raises:
            CheckpointError: if they are other parameters; nothing was changed then.
        """
        self.require_parameters(parameters)
        with torch.no_grad():
            for name, value in parameters.items():
                self._trained.parameters[name].copy_(value)


class SnapshotReplayer(AdapterRunner):
    """A model with an adapter as a snapshot has it: evaluated and exported, never trained.

    Args:
        model: Opened as the run opened it.
        step: Number of steps taken when the snapshot was taken.
        parameters: Values of the trained parameters, by name; None: those that the run began with.
        device, memory, micro_batch_size, trace: as for ``Replayer``.

    Raises:
        CheckpointError: if the values are of another adapter.
        ZO2Error: as ``Replayer`` says.
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
    ) -> None:
        options = RunOptions(device=device, memory=memory, micro_batch_size=micro_batch_size, trace=trace)
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
        """The number of steps that the parameters have taken."""
        return self._step
