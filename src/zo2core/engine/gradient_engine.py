"""What engines of first-order steps share: steps, their records in the journal, and snapshots from which runs resume."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zo2core.build import Parts, RunOptions, build, kept_inputs
from zo2core.checkpoint import Snapshot, Snapshots
from zo2core.engine.present_runner import PresentRunner, TrainedT
from zo2core.errors import JournalError, OptionError
from zo2core.methods.backprop import Backprop
from zo2core.methods.fused_backprop import FusedBackprop
from zo2core.optimizers import unusable_state
from zo2core.protocols import BlockModel, DifferentiableModel, Forward
from zo2core.sweep.gradient_visitor import GradientVisits
from zo2core.sweep.memory_limit import MemoryLimit
from zo2core.types import Batch, Commit, GradientStepResult
from zo2core.workers import sync_snapshots


class GradientEngine(PresentRunner[TrainedT]):
    """Takes first-order steps by the method that a subclass makes.

    Args:
        model: The model.
        options: Options of the run.
        trained: As for ``PresentRunner``.
        spill: Directory for inputs of blocks that have no room in memory.

    Raises:
        OptionError: if the model cannot be differentiated segment by segment.
        ZO2Error: as ``build`` and ``trained`` raise it.
    """

    _method: Backprop | FusedBackprop
    snapshots: Snapshots  # of a run that is kept

    def __init__(
        self,
        model: DifferentiableModel,
        options: RunOptions,
        trained: Callable[[BlockModel, Parts], TrainedT],
        spill: Path | str,
    ) -> None:
        _require_differentiable(model)
        super().__init__(model, build(model, None, options), trained)
        self._inputs = kept_inputs(self._parts, spill)

    @property
    def version(self) -> int:
        """Number of steps taken; fewer than the journal has while steps after a snapshot are repeated."""
        return self.steps

    @property
    def steps(self) -> int:
        """Number of steps taken, including those before ``load_state_dict``."""
        return self._method.steps

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None = None) -> GradientStepResult:
        """Take one first-order step: one sweep forward and backward, and the optimizer's update.

        Args:
            batch: Input of the forward; for the model's loss, with labels. Several batches count as one: the loss is the
                mean over the labelled tokens of all. All pass a block before the next block is visited.
            forward: Computes a number that ``torch.autograd`` can differentiate; by default the model, which computes its
                loss.

        Returns:
            The result of the step.

        Raises:
            BatchError: if the model cannot take the batch.
            NonFiniteLossError: if the loss or a gradient is not finite.
            OptionError: if the loss has no gradient, or blocks are connected by more than their outputs.
            CheckpointError: if a block cannot be read.
            ScratchError: if inputs of blocks have no room in memory, and cannot be written to disk.
            JournalError: if the record cannot be written, or a repeated step differs from its record.
            WorkerError: if another worker is silent, or has another batch.
            BusyError, ClosedError: during an iteration over ``parameters_now``, or after ``close``.
            In all these cases the step was not taken, unless the engine trains all parameters and the message says that
            segments had been changed: then it is closed.
        """
        self._use.require_open()
        return self._method.step(batch, forward)

    def take_snapshot(self, *, keep: Collection[int] = ()) -> None:
        """Write a snapshot of the present step durably, and delete all older ones but the newest of them.

        Args:
            keep: Steps whose snapshots are kept as well.

        Raises:
            OptionError: if the engine has no directory of a run, or commits its segments on disk instead.
            OutputError: if it cannot be written.
            WorkerError: if another worker has other parameters.
        """
        self._use.require_open()
        state = self.state_dict()
        if not hasattr(self, "snapshots"):
            raise OptionError(
                "take_snapshot",
                found=f"a {type(self).__name__} without a directory of its run",
                expected="one that keeps its run",
                remedy="use DurableBackpropEngine, or FullBackpropEngine with run=RunRecord(...)",
            )
        self.workers.require_same("trained parameters", self.workers.digest([state["parameters"]]))
        self.snapshots.write(Snapshot(self.steps, state), keep=keep)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state on which later steps depend: the parameters, the optimizer's state and the number of steps.

        Another engine of the same model and optimizer continues from it with the same bits.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a state that ``state_dict`` returned.

        Args:
            state: State of an engine of the same model and the same optimizer.

        Raises:
            CheckpointError: if it is of another model or optimizer; nothing is changed then.
        """

    def _require_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state without the parameters of this engine, or without the number of steps and the rest."""
        missing = {"steps", "parameters", "optimizer"} - (state.keys() if isinstance(state, Mapping) else set())
        if missing:
            raise unusable_state(f"a state without {', '.join(sorted(missing))}")
        if type(state["steps"]) is not int or state["steps"] < 0:
            raise unusable_state(f"{state['steps']!r:.40} as the number of steps")
        self._require_parameters(state["parameters"])

    def _resume(self, directory: Path) -> None:
        """Keep snapshots in a directory, and load the newest, if there is one. Closes the engine if that fails."""
        self.snapshots = Snapshots(directory, self.journal.chain, self.journal.require_version)
        with self._closed_if_refused():
            self.snapshots.clear_partial()
            newest = sync_snapshots(self.snapshots, self.workers)
            if newest is not None:
                self.load_state_dict(newest.state)

    def _record(self, commit: Commit) -> None:
        """Record a step in the journal, or compare a repeated step with its record.

        A process that dies after this has not lost the step: it is repeated from what was saved last.

        Raises:
            JournalError: if the record cannot be written, or a repeated step differs from its record.
        """
        journal = self.journal
        if commit.step == journal.version:
            self._parts.base_digests.note(journal)
            journal.append(commit)
        elif journal.commits[commit.step] != commit:
            recorded = journal.commits[commit.step]
            raise JournalError(
                f"{journal.name}, step {commit.step}",
                found=f"loss {commit.loss!r}, gradient norm {commit.grad_norm!r} and lr {commit.lr!r} in the repeated step",
                expected=f"loss {recorded.loss!r}, gradient norm {recorded.grad_norm!r} and lr {recorded.lr!r}, as before",
                remedy="resume with the same machine, torch, transformers and number of threads",
            )

    def _gradient_visits(self, leaves: Sequence[Mapping[str, torch.Tensor]]) -> GradientVisits:
        """What makes the visitors of first-order steps.

        Args:
            leaves: For each segment, its modules' trained parameters by name.
        """
        parts = self._parts
        return GradientVisits(
            layouts=self._model.layouts,
            present=self._present_weights,
            trained=self._trained,
            leaves=leaves,
            weights=parts.work_buffer.bound,
            inputs=self._inputs,
            limit=MemoryLimit(parts.host_limit),
            streams=parts.device.streams,
            timeline=parts.timeline,
        )


def _require_differentiable(model: BlockModel) -> None:
    """Refuse a model whose segments have no leaves for gradients."""
    if not isinstance(model, DifferentiableModel):
        raise OptionError(
            "model",
            found=f"a {type(model).__name__}, which has no `leaves`",
            expected="a DifferentiableModel",
            remedy="add this method to the model, or use ZOEngine",
        )
