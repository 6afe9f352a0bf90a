"""Runners of weights that change where they are stored: each segment's bucket has the only copy of the present weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from zo2core.build import Parts, RunOptions, build
from zo2core.engine.present_runner import PresentRunner
from zo2core.errors import OptionError
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import BlockModel, Device, Store
from zo2core.sweep.stored_parameters import StoredParameters


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


class StoredRunner(PresentRunner[StoredParameters]):
    """Evaluates and exports a model whose weights change in memory, where they are stored.

    Args:
        model: Cut into embedding, blocks and head. All its parameters are trained.
        parts: Parts of the run; closed with the runner, and also if it is refused.

    Raises:
        OptionError: if a parameter is frozen or quantised, or travels in another dtype than it is stored in.
    """

    def __init__(self, model: BlockModel, parts: Parts) -> None:
        def stored() -> StoredParameters:
            _require_trainable(model)
            return StoredParameters(parts.layouts)

        super().__init__(model, parts, stored)

    @property
    def _values(self) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        specs = [spec for layout in self._model.layouts for spec in layout.parameters]
        return {spec.name: (torch.Size(spec.shape), spec.dtype) for spec in specs}

    def load_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights.

        Args:
            parameters: All parameters by name, as ``state_dict`` of an engine has them.

        Raises:
            CheckpointError: if they are of another model; nothing was changed then.
        """
        self.require_parameters(parameters)
        self.run(_Loading(self._trained, parameters), range(len(self._model.layouts)))

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
