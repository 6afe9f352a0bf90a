"""First-order steps in runs that can be resumed: each step is recorded in a journal, and a run resumes from a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zo2core.build import RunOptions, SharedSegments
from zo2core.engine.backprop_engine import BackpropEngine, trained_copies
from zo2core.journal import Journal
from zo2core.optimizers import OptimizerFactory
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import Device, DifferentiableModel, Forward
from zo2core.types import Batch, Commit, GradientStepResult
from zo2core.workers import Workers


class DurableBackpropEngine(BackpropEngine):
    """A ``BackpropEngine`` that resumes a run from its last snapshot.

    Steps that the journal has beyond that snapshot are repeated. Their losses and gradient norms must be the same again;
    they are not recorded a second time.

    Args:
        model, optimizer, clip, device, memory, micro_batch_size, overlap, trace, workers, shared: As for
            ``BackpropEngine``.
        directory: Directory of the run, with its snapshots. Inputs of blocks that have no room in memory are in a temporary
            file there, without a name.
        journal: Journal of the run, or its path; a missing file is created.
        method: The optimizer and its options, as JSON values. The journal records them, and other values are refused.
        lr: Learning rate of a 0-based step, set in the optimizer before the step.
        provenance: Other values that decide the run, as JSON values. The journal records them, and other values are refused.

    Raises:
        JournalError: if the journal is damaged, or belongs to another run.
        CheckpointError: if there are snapshots, but all are damaged.
        ZO2Error: as for ``BackpropEngine``.
    """

    def __init__(
        self,
        model: DifferentiableModel,
        optimizer: OptimizerFactory,
        *,
        directory: Path,
        journal: Journal | Path | str,
        method: Mapping[str, Any],
        lr: Callable[[int], float],
        provenance: Mapping[str, Any] | None = None,
        clip: float | None = None,
        device: Device | str = "cpu",
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        micro_batch_size: int | None = None,
        overlap: bool = True,
        trace: Trace | Path | str | None = None,
        workers: Workers | None = None,
        shared: SharedSegments | None = None,
    ) -> None:
        options = RunOptions(
            journal=journal,
            device=device,
            memory=memory,
            micro_batch_size=micro_batch_size,
            trace=trace,
            overlap=overlap,
            provenance=provenance,
            method=method,
            trained_copies=trained_copies(workers),
            workers=workers,
            shared=shared,
        )
        self._open(model, optimizer, clip, options, directory)
        self._lr = lr
        self._resume(directory)

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None = None) -> GradientStepResult:
        """Take one first-order step, at the rate of ``lr``. See the base class."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr(self.steps)
        return super().step(batch, forward)

    def _commit(self, loss: float, norm: float) -> None:
        """Record a step in the journal before a parameter changes, or compare a repeated step with its record."""
        self._record(Commit(self.steps, loss, norm, self._lr(self.steps)))
