"""The engine of first-order steps of all parameters: each segment is updated in the backward pass, where it is stored."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zo2core.build import RunOptions, build, kept_inputs
from zo2core.checkpoint import Snapshot, Snapshots
from zo2core.engine.commits import record
from zo2core.engine.present_runner import require_differentiable
from zo2core.engine.stored_runner import StoredRunner
from zo2core.errors import OptionError
from zo2core.journal import Journal
from zo2core.methods.fused_backprop import FusedBackprop, GradientPolicy
from zo2core.optimizers import StateMemory, StatesInStores, state_bytes
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import BlockModel, BlockUpdate, Device, DifferentiableModel, Forward
from zo2core.sources import StreamedSource
from zo2core.sweep.gradient_memory import GradientMemory
from zo2core.types import Batch, BlockLayout, Commit, GradientStepResult

_GRADIENT_COPIES = 2  # of a segment's gradients: as autograd gives them, and summed, converted or clipped


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Where a run that can be resumed is kept.

    Args:
        directory: Directory of the run, with its snapshots.
        journal: Journal of the run, or its path; a missing file is created.
        provenance: Other values that decide the run, as JSON values. The journal records them, and other values are refused.
    """

    directory: Path
    journal: Journal | Path | str
    provenance: Mapping[str, Any] | None = None


class FullBackpropEngine(StoredRunner):
    """First-order fine-tuning of all parameters of a model whose weights are in host memory.

    A step passes the segments forward and back. On the way back each segment's gradients are computed, its weights are
    updated where they are stored, and its gradients are freed before the next segment's are computed. Losses and weights are
    those of ``torch.autograd`` and the same optimizer on the whole model, bit for bit.

    A step that fails after the first update, or is interrupted there, leaves weights of two steps. The engine then refuses
    all further use.

    Args:
        model: Cut into embedding, blocks and head. All its parameters are trained.
        update: The optimizer: ``LOMO()``, ``TorchOptimizer(...)``, ``BAdam(...)``.
        lr: Learning rate, or a function of the 0-based step.
        gradients: How gradients are clipped, and the loss scaled.
        run: Where the run is kept, which resumes from its last snapshot; None keeps nothing.
        spill: Directory of a temporary file, for the inputs of blocks that have no room in memory between a step's forward
            and backward. None: the directory of the run, or else the system's for temporary files. On a GPU they are in
            host memory instead.
        device, memory, micro_batch_size, overlap, trace: As for ``Replayer``. All blocks have to fit into host memory.

    Raises:
        OptionError: if a parameter is not trained, or an option is out of its range.
        JournalError: if the journal is damaged, or belongs to another run.
        CheckpointError: if there are snapshots, but all are damaged.
        ZO2Error: As for ``Replayer``.
    """

    def __init__(
        self,
        model: DifferentiableModel,
        update: BlockUpdate,
        *,
        lr: float | Callable[[int], float],
        gradients: GradientPolicy = GradientPolicy(),  # noqa: B008 - frozen
        run: RunRecord | None = None,
        device: Device | str = "cpu",
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        spill: Path | str | None = None,
        micro_batch_size: int | None = None,
        overlap: bool = True,
        trace: Trace | Path | str | None = None,
    ) -> None:
        options = RunOptions(
            device=device,
            memory=memory,
            micro_batch_size=micro_batch_size,
            trace=trace,
            overlap=overlap,
            stays_in_memory=True,
            optimizer_bytes=state_bytes(update, model.layouts),
        )
        self._open(model, update, lr, gradients, run, options, spill)
        if run is None:
            return
        try:
            self.snapshots = Snapshots(run.directory, self.journal.chain, self.journal.require_version)
            self.snapshots.clear_partial()
            newest = self.snapshots.newest()
            if newest is not None:
                self.load_state_dict(newest.state)
        except BaseException:
            self._close_refused()
            raise

    def _open(
        self,
        model: DifferentiableModel,
        update: BlockUpdate,
        lr: float | Callable[[int], float],
        gradients: GradientPolicy,
        run: RunRecord | None,
        options: RunOptions,
        spill: Path | str | None = None,
    ) -> None:
        """Build the parts of the run that the options name, and the method."""
        require_differentiable(model)
        if gradients.loss_scaling is not None:
            _require_scalable(update, model)
        options = dataclasses.replace(options, gradient_bytes=gradient_bytes(model.layouts))
        if run is not None:
            method = {**update.options, **gradients.options}
            options = dataclasses.replace(options, journal=run.journal, provenance=run.provenance, method=method)
        parts = build(model, None, options)
        super().__init__(model, parts)
        self._update = update
        layouts, source = parts.layouts, parts.source
        is_stored = isinstance(source, StreamedSource) and any(layout.states for layout in layouts)
        self._states = StatesInStores(layouts, source.read_states) if is_stored else StateMemory(update, layouts)
        self._lr = lr if callable(lr) else _constant(lr)
        self._is_recorded = run is not None
        if spill is None:
            spill = tempfile.gettempdir() if run is None else run.directory
        inputs = kept_inputs(parts, spill)
        try:
            self._method = FusedBackprop(
                update,
                self._states,
                lr=self._lr,
                policy=gradients,
                sweeps=self,
                model=model,
                parameters=self._trained,
                visits=self._gradient_visits([model.leaves(index) for index in range(len(model.layouts))], inputs),
                micro_batch_size=options.micro_batch_size,
                commit=self._commit,
                memory=GradientMemory(budget=parts.activation_bytes, spare=parts.spare_bytes),
                versions_are_steps=options.generations is not None,
            )
        except BaseException:
            self._close_refused()
            raise

    @property
    def version(self) -> int:
        """Number of steps taken; fewer than the journal has while steps after a snapshot are repeated."""
        return self.steps

    @property
    def steps(self) -> int:
        """Number of steps taken, those before a ``load_state_dict`` among them."""
        return self._method.steps

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None = None) -> GradientStepResult:
        """Take one first-order step: one sweep forward and back in which all trained segments are updated.

        Args:
            batch: What the forward takes; for the model's own, with labels. Several are accumulated and count as one batch:
                the loss is the mean over the labelled tokens of all. All pass a block before the next block comes.
            forward: Ends in a number that ``torch.autograd`` can differentiate; by default the model itself, which ends in
                its loss.

        Returns:
            The step's report.

        Raises:
            BatchError: if the model cannot take the batch.
            NonFiniteLossError: if the loss or a gradient is not finite.
            OptionError: if the loss has no gradient, or the model's blocks cannot be differentiated one at a time.
            CheckpointError: if a block cannot be read.
            ScratchError: if inputs of blocks have no room in memory, and cannot be written to disk.
            JournalError: if the record cannot be written, or a repeated step differs from its record.
            BusyError, ClosedError: during an iteration over ``parameters_now``, or after ``close``.
            The step was not taken, unless the message says that segments had been changed: then the engine is closed.
        """
        self._use.require_open()
        try:
            return self._method.step(batch, forward)
        finally:
            if self._method.broken_at is not None:
                self._use.close()

    def take_snapshot(self, *, keep: Collection[int] = ()) -> None:
        """Write a snapshot of the present step durably, and delete all older ones but the newest of them.

        Args:
            keep: Steps whose snapshots are kept as well.

        Raises:
            OutputError: if it cannot be written.
        """
        self._use.require_open()
        self.snapshots.write(Snapshot(self.steps, self.state_dict()), keep=keep)

    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on: the weights and the optimizer's state, which are not copied, and the steps.

        The next step changes these tensors. ``load_state_dict`` of another engine of the same model and optimizer copies
        them, and continues with the same bits.
        """
        self._update.settle()
        assert isinstance(self._states, StateMemory), "states on disk are committed there"
        return {
            "steps": self.steps,
            "parameters": self.weights(),
            "optimizer": self._states.state_dict(),
            "values": self._method.values(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a copy of what ``state_dict`` returned.

        Args:
            state: State of an engine of the same model and the same optimizer.

        Raises:
            CheckpointError: if it is of another model; nothing was changed then.
        """
        self.require_parameters(state["parameters"])
        self._update.settle()
        assert isinstance(self._states, StateMemory), "states on disk are committed there"
        self._states.load_state_dict(state["optimizer"])
        self.load_parameters(state["parameters"])
        self._method.load_values(state["values"])
        self._method.steps = state["steps"]

    def _commit(self, commit: Commit) -> None:
        """Record a step whose updates are made, or compare a repeated step with its record.

        A process that dies here repeats the step from what was saved last.
        """
        if self._is_recorded:
            record(self.journal, self._parts.base_digests, commit)


def gradient_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Memory for the gradients of the largest segment.

    Args:
        layouts: Segments in visiting order.
    """
    return _GRADIENT_COPIES * max(sum(spec.nbytes for spec in layout.parameters if not spec.frozen) for layout in layouts)


def _require_scalable(update: BlockUpdate, model: BlockModel) -> None:
    """Refuse to scale gradients that stay in float16, where dividing by the scale would lose them again.

    Raises:
        OptionError: if there are any.
    """
    halves = [spec.name for layout in model.layouts for spec in layout.parameters if spec.dtype is torch.float16]
    if halves and not update.widens_gradients:
        raise OptionError(
            "loss_scaling",
            found=f"float16 gradients of {halves[0]}, which the optimizer takes as they are",
            expected="float32 gradients, into which those of the scaled loss are converted",
            remedy="open the model with precision='mixed', or use LOMO or AdaLOMO",
        )


def _constant(lr: float) -> Callable[[int], float]:
    return lambda step: lr
