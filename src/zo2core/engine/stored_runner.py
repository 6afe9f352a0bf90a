"""Runners of weights that change where they are stored: each segment's bucket has the only copy of the present weights."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from zo2core.build import Parts, RunOptions, build
from zo2core.engine.runner import Runner
from zo2core.errors import CheckpointError, OptionError
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import BlockModel, Device, Store
from zo2core.sweep.stored_parameters import StoredParameters
from zo2core.sweep.trained_parameters import PresentVisits, PresentWeights


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


class StoredRunner(Runner):
    """Evaluates and exports a model whose weights change in memory, where they are stored.

    Args:
        model: Cut into embedding, blocks and head. All its parameters are trained.
        parts: Parts of the run; closed with the runner, and also if it is refused.

    Raises:
        OptionError: if a parameter is frozen or quantised, or travels in another dtype than it is stored in.
    """

    def __init__(self, model: BlockModel, parts: Parts) -> None:
        try:
            _require_trainable(model)
            self._parameters = StoredParameters(model.layouts)
        except BaseException:
            parts.opened.__exit__(*sys.exc_info())  # a journal that was just begun is taken back
            raise
        self._present_weights = PresentWeights(self._parameters, parts.work_buffer)
        visits = PresentVisits(
            layouts=model.layouts,
            trained=self._parameters,
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
        """Refuse weights of another model.

        Raises:
            CheckpointError: if a name, a shape or a dtype differs.
        """
        specs = [spec for layout in self._model.layouts for spec in layout.parameters]
        expected = {spec.name: (spec.shape, spec.dtype) for spec in specs}
        if {name: (tuple(value.shape), value.dtype) for name, value in parameters.items()} != expected:
            raise CheckpointError(
                "state",
                found=f"{len(parameters)} parameters that are not all the model's",
                expected=f"the {len(expected)} parameters of the model",
                remedy="load the state of a run of the same model and precision",
            )

    def load_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights.

        Args:
            parameters: All parameters by name, as ``state_dict`` of an engine has them.

        Raises:
            CheckpointError: if they are of another model; nothing was changed then.
        """
        self.require_parameters(parameters)
        self.run(_Loading(self._parameters, parameters), range(len(self._model.layouts)))

    def weights(self) -> dict[str, torch.Tensor]:
        """The present weights by name, on the host: views of the memory that the next step changes."""
        return dict(self.parameters_now())


class StoredSnapshotReplayer(StoredRunner):
    """A model with the weights of a snapshot: evaluated and exported, never trained.

    Args:
        model: Opened as the run opened it.
        step: Number of steps taken when the snapshot was taken.
        parameters: All parameters by name; None: those of the checkpoint.
        device, memory, micro_batch_size, trace: As for ``Replayer``.

    Raises:
        CheckpointError: if the weights are of another model.
        ZO2Error: As for ``Replayer``.
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
        options = RunOptions(
            device=device,
            memory=memory,
            micro_batch_size=micro_batch_size,
            trace=trace,
            stays_in_memory=parameters is not None,
        )
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
        """The number of steps that the weights have taken."""
        return self._step


def _require_trainable(model: BlockModel) -> None:
    """Refuse a model that has parameters which cannot be trained where they are stored."""
    for layout in model.layouts:
        for spec in layout.parameters:
            if spec.frozen or spec.encoding is not None:
                raise OptionError(
                    "model",
                    found=f"{spec.name}, which is {'frozen' if spec.encoding is None else 'quantised'}",
                    expected="a model all of whose parameters are trained",
                    remedy="open it without an adapter and not quantised, or train an adapter with BackpropEngine",
                )
            if spec.is_low_bit:
                raise OptionError(
                    "transfer_dtype",
                    found=f"{spec.transfer_dtype} for {spec.name}",
                    expected="weights that travel as they are stored",
                    remedy="leave it out",
                )
