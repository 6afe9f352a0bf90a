"""The engine of first-order steps of all parameters: each segment is updated in the backward pass, where it is stored."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zo2core.build import RunOptions
from zo2core.engine.gradient_engine import GradientEngine
from zo2core.engine.present_runner import where_stored
from zo2core.errors import OptionError
from zo2core.journal import Journal, json_object
from zo2core.methods.fused_backprop import FusedBackprop, GradientPolicy
from zo2core.optimizers import StateMemory, StatesInStores, state_bytes, unusable_state
from zo2core.planning import MemoryPolicy
from zo2core.profiling import Trace
from zo2core.protocols import BlockModel, BlockUpdate, Device, DifferentiableModel, Forward
from zo2core.sources import StreamedSource
from zo2core.sweep.gradient_memory import GradientMemory
from zo2core.sweep.stored_parameters import StoredParameters
from zo2core.types import Batch, BlockLayout, Commit, GradientStepResult


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


class FullBackpropEngine(GradientEngine[StoredParameters]):
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
            and backward; with a GPU, neither in its memory nor in host memory. None: the directory of
            the run, or else the system's for temporary files.
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
        options = dataclasses.replace(
            options_in_memory(update, model.layouts),
            device=device,
            memory=memory,
            micro_batch_size=micro_batch_size,
            trace=trace,
            overlap=overlap,
        )
        self._open(model, update, lr, gradients, run, options, spill)
        if run is not None:
            self._resume(run.directory)

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
        if gradients.loss_scaling is not None:
            _require_scalable(update, model)
        if run is not None:
            method = {**update.options, **gradients.options}
            options = dataclasses.replace(options, journal=run.journal, provenance=run.provenance, method=method)
        if spill is None:
            spill = tempfile.gettempdir() if run is None else run.directory
        super().__init__(model, options, where_stored, spill)
        self._update = update
        self._options = json_object("update", {**update.options, **gradients.options})
        parts, layouts, source = self._parts, self._parts.layouts, self._parts.source
        if isinstance(source, StreamedSource) and any(layout.states for layout in layouts):
            self._states: StatesInStores | StateMemory = StatesInStores(layouts, source.read_states)
        else:
            self._states = StateMemory(update, layouts)
        with self._closed_if_refused():
            self._method: FusedBackprop = FusedBackprop(
                update,
                self._states,
                lr=lr if callable(lr) else _constant(lr),
                policy=gradients,
                sweeps=self,
                model=model,
                parameters=self._trained,
                visits=self._gradient_visits([model.leaves(index) for index in range(len(model.layouts))]),
                micro_batch_size=options.micro_batch_size,
                commit=_keep_nothing if run is None else self._record,
                memory=GradientMemory(budget=parts.activation_bytes, spare=parts.spare_bytes),
                versions_are_steps=options.generations is not None,
            )

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None = None) -> GradientStepResult:
        """Take one first-order step, in which all trained segments are updated. See the base class."""
        try:
            return super().step(batch, forward)
        finally:
            if self._method.broken_at is not None:
                self._use.close()

    def load_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of all parameters, before the first step. See the base class.

        Raises:
            OptionError: after a step, since the optimizer's state may hold copies of the weights; or if they are on disk.
        """
        self._states_in_memory("load_parameters")
        if self.steps:
            raise OptionError(
                "load_parameters",
                found=f"a run of {self.steps} steps, whose optimizer's state belongs to its weights",
                expected="a run without steps",
                remedy="use load_state_dict, or a new engine",
            )
        super().load_parameters(parameters)

    def _states_in_memory(self, asked: str) -> StateMemory:
        """The optimizer's states; refuses a run that commits its segments on disk, whose versions are steps."""
        if self._parts.generations is not None or not isinstance(self._states, StateMemory):
            raise OptionError(
                asked,
                found=f"a {type(self).__name__}, whose weights and states are committed on disk",
                expected="an engine that keeps them in memory",
                remedy="call commit(), from which the run resumes; for other weights, begin a run of a checkpoint with them",
            )
        return self._states

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which later steps depend, which is not copied: the next step changes it.

        See the base class.
        """
        states = self._states_in_memory("state_dict")
        self._update.settle()
        return {
            "steps": self.steps,
            "parameters": dict(self.parameters_now()),
            "optimizer": states.state_dict(),
            "values": self._method.values(),
            "method": self._options,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a state. See the base class."""
        states = self._states_in_memory("load_state_dict")
        self._require_state(state)
        if state.get("method") != self._options:
            raise unusable_state(f"a state of the optimizer {state.get('method')!r:.200}")
        self._update.settle()
        self._method.load_values(state.get("values", {}))
        states.load_state_dict(state["optimizer"])
        super().load_parameters(state["parameters"])
        self._method.steps = state["steps"]


def options_in_memory(update: BlockUpdate, layouts: Sequence[BlockLayout]) -> RunOptions:
    """What a run of all parameters in memory asks for, by which it is planned.

    Args:
        update: The optimizer.
        layouts: Segments in visiting order.
    """
    gradients, states = trained_bytes(update, layouts)
    return RunOptions(gradient_bytes=gradients, optimizer_bytes=states, stays_in_memory=True)


def trained_bytes(update: BlockUpdate, layouts: Sequence[BlockLayout]) -> tuple[int, int]:
    """Memory for gradients, and for the optimizer's states: of the one segment that takes most, if states last for a turn.

    Args:
        update: The optimizer.
        layouts: Segments in visiting order.
    """
    if update.turn is None:
        return gradient_bytes(update, layouts), state_bytes(update, layouts)
    return max(((gradient_bytes(update, [layout]), state_bytes(update, [layout])) for layout in layouts), key=sum)


def gradient_bytes(update: BlockUpdate, layouts: Sequence[BlockLayout]) -> int:
    """Memory for the gradients of the largest segment, and for what the optimizer makes of them.

    While gradients are summed, there are two of each. While they are converted and clipped, there are two of one parameter
    at a time. Then the optimizer has its copies of one parameter beside the gradients of the whole segment.

    Args:
        update: The optimizer.
        layouts: Segments in visiting order.
    """
    most = 0
    for layout in layouts:
        trained = [spec for spec in layout.parameters if not spec.frozen]
        in_float32 = [4 * spec.numel for spec in trained]
        given = sum(spec.nbytes for spec in trained)
        held = max(given, sum(in_float32)) if update.widens_gradients else given
        largest = max((spec.nbytes for spec in trained), default=0)
        most = max(most, 2 * given, held + max(largest, update.copies * max(in_float32, default=0)))
    return most


def _require_scalable(update: BlockUpdate, model: BlockModel) -> None:
    """Refuse to scale gradients that stay in float16, where dividing by the scale would lose them again."""
    halves = [spec.name for layout in model.layouts for spec in layout.parameters if spec.dtype is torch.float16]
    if halves and not update.widens_gradients:
        raise OptionError(
            "loss_scaling",
            found=f"float16 gradients of {halves[0]}, which the optimizer takes as they are",
            expected="float32 gradients, into which those of the scaled loss are converted",
            remedy="open the model with precision='mixed', or use LOMO or AdaLOMO",
        )


def _keep_nothing(commit: Commit) -> None:
    """Record no step, in a run that is not kept."""


def _constant(lr: float) -> Callable[[int], float]:
    return lambda step: lr
