"""First-order steps that outlive their process: each is noted in a journal, and snapshots are what a run goes on from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from zo2core.build import RunOptions
from zo2core.checkpoint import Snapshot, Snapshots
from zo2core.engine.backprop_engine import TRAINED_COPIES, BackpropEngine
from zo2core.errors import JournalError
from zo2core.journal import Journal
from zo2core.methods.backprop import OptimizerFactory
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import Device, DifferentiableModel
from zo2core.types import Commit


class DurableBackpropEngine(BackpropEngine):
    """A ``BackpropEngine`` that goes on with a run where its last snapshot was taken.

    Steps that the journal has beyond that snapshot are repeated. Their losses and gradient norms have to be the same again;
    the journal gets no second record of them.

    Args:
        model, optimizer, clip, device, memory, micro_batch_size, overlap, trace: as for ``BackpropEngine``.
        directory: Directory of the run; its snapshots are there.
        journal: Journal of the run, or the path of one, which is made if it is not there.
        method: What decides the steps beside model and batches, as JSON values: the optimizer with its options. The journal
            keeps it and refuses another one.
        lr: The learning rate of a 0-based step; the optimizer is given it before the step.
        provenance: What else of the caller's decides the run, as JSON values: the journal keeps it and refuses another one.

    Raises:
        JournalError: if the journal is damaged, or of another run.
        CheckpointError: if there are snapshots, and none is whole.
        ZO2Error: as ``BackpropEngine`` says.
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
            trained_copies=TRAINED_COPIES,
        )
        self._open(model, optimizer, clip, options)
        self._lr = lr
        self.snapshots = Snapshots(directory, self.journal.chain, self.journal.require_version)
        try:
            self.snapshots.clear_partial()
            newest = self.snapshots.newest()
            if newest is not None:
                self.load_state_dict(newest.state)
        except BaseException:
            self._close_refused()
            raise

    @property
    def version(self) -> int:
        """Steps taken: fewer than the journal has, while steps since a snapshot are repeated."""
        return self.steps

    def take_snapshot(self, *, keep: Collection[int] = ()) -> None:
        """Write a snapshot of the present step, durably; of the others the one before it is kept.

        Args:
            keep: Steps whose snapshots are kept as well.

        Raises:
            OutputError: if it cannot be written.
        """
        self._use.require_open()
        self.snapshots.write(Snapshot(self.steps, self.state_dict()), keep=keep)

    def _begin_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr(self.steps)

    def _commit(self, loss: float, norm: float) -> None:
        """Note a step in the journal, before a parameter changes; or see that it is the one that was noted before.

        A process that dies after this has not lost the step: it is repeated from the last snapshot.

        Raises:
            JournalError: if it cannot be written, or a repeated step is another one.
        """
        journal, commit = self.journal, Commit(self.steps, loss, norm, self._lr(self.steps))
        if self.steps == journal.version:
            self._parts.base_digests.note(journal)
            journal.append(commit)
        elif journal.commits[self.steps] != commit:
            known = journal.commits[self.steps]
            raise JournalError(
                f"{journal.name}, step {self.steps}",
                found=f"loss {loss!r}, gradient norm {norm!r} and lr {commit.lr!r} when the step was repeated",
                expected=f"loss {known.loss!r}, gradient norm {known.grad_norm!r} and lr {known.lr!r}, as before",
                remedy="go on where the run was begun, with the same torch and transformers and as many threads; "
                "the step was not taken",
            )
