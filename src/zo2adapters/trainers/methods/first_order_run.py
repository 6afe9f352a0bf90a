"""Runs of first-order steps, which resume from snapshots: what they share, and those that train an adapter."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial

import torch

from zo2adapters.models.footprint import expected_held_bytes, forward_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds.block_model import PeftBlockModel
from zo2adapters.trainers.batch_shapes import BatchShape
from zo2adapters.trainers.evaluations import best_step, criteria_of
from zo2adapters.trainers.lr_schedules import LearningRate
from zo2adapters.trainers.methods.run_method import Opening, RunMethod, limits
from zo2adapters.trainers.methods.snapshot_policy import SnapshotPolicy
from zo2adapters.trainers.options import Order, TrainOptions
from zo2adapters.trainers.run_directory import JOURNAL
from zo2adapters.trainers.run_notices import storage
from zo2adapters.trainers.run_plan import measured_forward_seconds
from zo2adapters.trainers.worker_options import local_device, worker_trace
from zo2core import (
    AtSnapshot,
    BlockUpdate,
    Engine,
    FirstOrder,
    HostPlan,
    Journal,
    MemoryPolicy,
    SegmentKind,
    SharedBase,
    StepResult,
)
from zo2core.checkpoint import Snapshots
from zo2core.errors import OptionError
from zo2core.methods.first_order import TRAINED_COPIES, trained_bytes
from zo2core.optimizers import OPTIMIZERS
from zo2core.planning.host_budget import parse_size
from zo2core.sweep.gradient_memory import gradient_bytes
from zo2core.types import divide_tied, packed_bytes, shown_bytes, trained

FORWARDS = 3  # that a step costs: one, one more on the way back, and gradients of inputs, which cost another one


class GradientRun(RunMethod):
    """First-order steps, whose runs resume from snapshots. See ``RunMethod``."""

    has_gradient = True
    snapshot_of: str  # what a snapshot has, for messages
    exported: str  # what an export is

    def __init__(self, options: TrainOptions, shared: SharedBase | None = None) -> None:
        super().__init__(options, shared)
        optimization = options.optimization
        steps = options.steps if options.schedule_steps is None else options.schedule_steps
        self._lr = LearningRate(
            peak=optimization.rate, decay=optimization.decay, warmup_steps=optimization.warmup_steps, steps=steps
        )
        self._policy = SnapshotPolicy(options.storage.snapshot_every, time.perf_counter)

    @property
    def update(self) -> BlockUpdate | None:
        """The optimizer of all parameters; None: an adapter is trained."""
        return None

    def step_seconds(self, model: HFBlockModel, shape: BatchShape) -> float:
        """Forwards, as none is saved by a graph that is kept. See the contract."""
        return self.forwards * measured_forward_seconds(model, shape, running=self.options.batching.micro_batch_size)

    def losses(self, journal: Journal) -> list[float]:
        """The losses of the journal's commits. See the contract."""
        return [commit.loss for commit in journal.commits]

    def reserved_bytes(self, model: HFBlockModel, longest: int, sequences: int) -> tuple[int, int]:
        """Memory for the input of each block, and for one segment's graph. See the contract."""
        batching, given = self.options.batching, self.options.storage.activation_memory
        rows, tokens = batching.shape(batching.batch_size * sequences, longest)
        kept, least = reserved_bytes(model, rows, tokens, batching.micro_batch_size, self.update)
        return kept if given is None else parse_size(given), least

    def first_step(self, journal: Journal) -> int:
        """The first snapshot's: a later one may prove damaged. See the contract."""
        steps = Snapshots(self.options.output, journal.chain, journal.require_version).steps
        return min(steps, default=0)

    def storage(self, engine: Engine, host: HostPlan, model: HFBlockModel) -> str:
        """Where blocks are, and what is written. See the contract."""
        return storage(host, engine.device_plan, self.options.storage, self.writes(None, model, host))

    @abstractmethod
    def snapshot_bytes(self, model: HFBlockModel) -> int:
        """Size of a snapshot."""

    def writes(self, every: int | None, model: HFBlockModel, host: HostPlan) -> str:
        """How large snapshots are, and how often they are taken: no block is written. See the contract."""
        every, size = self._policy.every, shown_bytes(self.snapshot_bytes(model))
        often = "at most one a minute" if every is None else f"one every {every} steps"
        return f"snapshots of {self.snapshot_of}, {size} each, {often}"

    def after_step(self, engine: Engine, report: StepResult) -> list[str]:
        """Take a snapshot if one is due, at the end, and where one is missing of the best step. See the contract."""
        step = engine.version
        is_best = self.options.keep_best and step == best_step(criteria_of(engine.journal.evaluations))
        is_due = engine.workers.all_gather(self._policy.is_due(step))[0]  # clocks differ between workers
        if step == self.options.steps or is_best or is_due:
            self._take_snapshot(engine)
        return []

    def before_recording(self, engine: Engine, loss: float) -> None:
        """Take a snapshot of what is now the best step. See the contract."""
        losses = {**criteria_of(engine.journal.evaluations), engine.version: loss}
        if self.options.keep_best and best_step(losses) == engine.version:
            self._take_snapshot(engine)

    def at_step(self, engine: Engine, model: HFBlockModel, activations: int, step: int) -> Engine:
        """The parameters of the step's snapshot. See the contract."""
        return Engine(
            model,
            AtSnapshot(step, parameters_at(engine.snapshots, step)),
            micro_batch_size=self.options.batching.micro_batch_size,
            device=local_device(self.options.storage.device, None),
            memory=self._memory(min(activations, engine.activation_bytes), None),
            shared=self.shared,
        )

    def how_to_continue(self, engine: Engine) -> str:
        """From which snapshot. See the contract."""
        output, last = self.options.output, engine.snapshots.last or 0
        return (
            f"stopped after {engine.version} steps; "
            f"to go on from the snapshot of step {last}, or to get its {self.exported}:\n"
            f"  {self.options.resume_command}\n"
            f"  zo2 export --run {output} --at {last} --output DIR"
        )

    def _take_snapshot(self, engine: Engine) -> None:
        if engine.version in (0, engine.snapshots.last):  # the base is that of step 0
            return
        best = best_step(criteria_of(engine.journal.evaluations)) if self.options.keep_best else None
        self._policy.take(lambda: engine.take_snapshot(keep=() if best is None else (best,)))

    def _with_best_step(self, engine: Engine) -> Engine:
        """The engine, which is closed and refused if the best step, which is to be exported, has no snapshot."""
        best = best_step(criteria_of(engine.journal.evaluations)) if self.options.keep_best else None
        if best is not None and best < engine.version and best not in (0, *engine.snapshots.steps):
            engine.close()
            found = f"it beside a run whose best evaluation so far is of step {best}, of which no snapshot was kept"
            raise self._refusal("keep_best", found, "it from the beginning of a run")
        return engine

    def _memory(self, activations: int, least: int | None) -> MemoryPolicy:
        return MemoryPolicy(**limits(self.options, self.shared), activations=activations, least_activations=least)

    def _refusal(self, option: str, found: str, expected: str) -> OptionError:
        expected = f"{expected} with --method {self.options.first_order.method}"
        return OptionError(option, found=found, expected=expected, remedy="leave it out")


class FirstOrderRun(GradientRun):
    """First-order steps of an adapter. See ``RunMethod``."""

    learning_rates = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
    few_learning_rates = (3e-4, 1e-3, 3e-3)
    forwards = FORWARDS
    snapshot_of = "adapter and optimizer"
    exported = "adapter"

    def engine(self, opening: Opening) -> Engine:
        """An engine at the last snapshot. See the contract."""
        options, execution = self.options, opening.execution
        if execution.replay != "auto":
            raise self._refusal("replay", execution.replay, "none: nothing is replayed")
        optimization, limit, method = options.optimization, options.first_order.max_grad_norm, options.first_order.method
        assert method is not None, "it is what chose this class"
        optimizer = OPTIMIZERS[method].of_adapter
        assert optimizer is not None, "others were refused with an adapter"
        rates = {"lr": optimization.rate, "weight_decay": optimization.weight_decay}
        rates |= options.first_order.optimizer_options
        engine = Engine(
            opening.model,
            FirstOrder(
                partial(optimizer, **rates),
                lr=self._lr,
                clip=limit,
                options={"name": method, **rates, "max_grad_norm": limit},
            ),
            run=options.output,
            journal=options.output / JOURNAL,
            provenance=opening.decides,
            device=local_device(options.storage.device, opening.workers),
            memory=self._memory(opening.activations, opening.least_activations),
            micro_batch_size=options.batching.micro_batch_size,
            overlap=execution.scheduler is Order.OVERLAPPED,
            trace=worker_trace(execution.trace, opening.workers),
            workers=opening.workers,
            shared=self.shared,
        )
        return self._with_best_step(engine)

    def snapshot_bytes(self, model: HFBlockModel) -> int:
        """See ``adapter_bytes``."""
        return adapter_bytes(model)


def adapter_bytes(model: HFBlockModel) -> int:
    """Largest size of a snapshot of an adapter: all that is kept of it but its gradients."""
    return (TRAINED_COPIES - 1) * sum(spec.nbytes for spec in trained(model.layouts))


def reserved_bytes(
    model: HFBlockModel, rows: int, tokens: int, micro_rows: int | None, update: BlockUpdate | None = None
) -> tuple[int, int]:
    """Memory for the inputs of blocks, for one segment's graph, and for what an adapter or tied weights take beside them.

    Args:
        model: The model, with its adapter if one is trained.
        rows: Rows of a batch.
        tokens: Tokens of a row.
        micro_rows: Rows that run at a time; None: all of a batch.
        update: The optimizer of all parameters, whose turns decide which have gradients; None: there are no turns.

    Returns:
        Bytes with the inputs of all blocks in memory, and without them.
    """
    micro_rows = rows if micro_rows is None else min(rows, micro_rows)
    blocks = sum(layout.kind is SegmentKind.BLOCK for layout in model.layouts)
    if isinstance(model, PeftBlockModel):
        beside = model.adapter_bytes(micro_rows, 1)
    else:  # gradients of tied weights, one for each micro-batch, wait for the last segment that uses the weights
        tied, _ = divide_tied(model.layouts)
        beside = -(-rows // micro_rows) * packed_bytes(tied)
        if update is not None and update.turn is not None:  # in the turn of another segment they have no gradient
            most, first = (sum(trained_bytes(update, part)) for part in (model.layouts, model.layouts[:1]))
            beside = max(beside + first - most, 0)
    held = expected_held_bytes(model.config, rows, tokens)
    running = forward_bytes(model.config, micro_rows, tokens, loss_chunk=model.loss_chunk)
    return gradient_bytes(held, running, blocks) + beside, gradient_bytes(held, running, 0) + beside


def parameters_at(snapshots: Snapshots, step: int) -> Mapping[str, torch.Tensor] | None:
    """The trained parameters after so many steps, by name; None at step 0, where they are those that the run began with.

    Raises:
        CheckpointError: if the step has no snapshot, or a damaged one.
        JournalError: if the journal has lost the step.
    """
    if step == 0:
        return None
    parameters: Mapping[str, torch.Tensor] = snapshots.read(step).state.get("parameters", {})  # refused if incomplete
    return parameters
