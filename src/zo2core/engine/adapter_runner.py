"""Runners of a base that is only read, with trained parameters that stay in memory, such as an adapter's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from zo2core.build import Parts, RunOptions, SharedSegments, build
from zo2core.engine.present_runner import PresentRunner
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import BlockModel, Device
from zo2core.sweep.trained_parameters import TrainedParameters


class AdapterRunner(PresentRunner[TrainedParameters]):
    """Evaluates and exports a base with the present values of its trained parameters.

    Args:
        model: A model with an adapter.
        parts: Parts of the run, which the runner closes, also if its construction fails.

    Raises:
        OptionError: if a block owns a trained parameter, or nothing is trained.
        CheckpointError: if the values cannot be read.
    """

    def __init__(self, model: BlockModel, parts: Parts) -> None:
        device = parts.device.torch_device
        super().__init__(model, parts, lambda: TrainedParameters(model.layouts, model.weights, device))

    @property
    def _values(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        return {name: (value.shape, value.dtype) for name, value in self._trained.parameters.items()}

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
