"""First-order steps in runs that can be resumed: each step is recorded in a journal, and a run resumes from a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from zo2core.build import RunOptions, SharedSegments
from zo2core.checkpoint import Snapshot, Snapshots
from zo2core.engine.backprop_engine import BackpropEngine, trained_copies
from zo2core.engine.commits import record
from zo2core.journal import Journal
from zo2core.optimizers import OptimizerFactory
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import Device, DifferentiableModel
from zo2core.types import Commit
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
        self.snapshots = Snapshots(directory, self.journal.chain, self.journal.require_version)
        try:
            self.snapshots.clear_partial()
            newest = self.workers.sync_snapshots(self.snapshots)
            if newest is not None:
                self.load_state_dict(newest.state)
        except BaseException:
            self._close_refused()
            raise

    @property
    def version(self) -> int:
        """Number of steps taken; fewer than the journal has while steps after a snapshot are repeated."""
        return self.steps

    def take_snapshot(self, *, keep: Collection[int] = ()) -> None:
        """Write a snapshot of the present step durably, and delete all older ones but the newest of them.

        Args:
            keep: Steps whose snapshots are kept as well.

        Raises:
            OutputError: if it cannot be written.
            WorkerError: if another worker has other parameters.
        """
        self._use.require_open()
        state = self.state_dict()
        self.workers.require_same("trained parameters", self.workers.digest([state["parameters"]]))
        self.snapshots.write(Snapshot(self.steps, state), keep=keep)

    def _begin_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr(self.steps)

    def _commit(self, loss: float, norm: float) -> None:
        """Record a step in the journal before a parameter changes, or compare a repeated step with its record.

        A process that dies after this has not lost the step: it is repeated from the last snapshot.

        Raises:
            JournalError: if the record cannot be written, or a repeated step differs from its record.
        """
        record(self.journal, self._parts.base_digests, Commit(self.steps, loss, norm, self._lr(self.steps)))
