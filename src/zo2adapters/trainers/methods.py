"""The methods of a run, zeroth-order and first-order steps: their memory, snapshots, warnings and messages."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.engines import (
    Opening,
    memory_policy,
    open_engine,
    parameters_at,
    replayer,
    request_of_run,
    require_shareable,
    reserved_bytes,
    snapshot_bytes,
    step_memory,
    stored_layouts,
    written_bytes,
)
from zo2adapters.trainers.metrics import best_step, criteria_of
from zo2adapters.trainers.options import Resources, TrainedState, TrainOptions
from zo2adapters.trainers.run_inputs import BatchShape
from zo2core import AtSnapshot, BlockLayout, DevicePlan, Engine, HostPlan, Journal, SharedBase, StepResult, Update, ZO2Error
from zo2core.checkpoint.snapshots import Snapshots
from zo2core.errors import DivergenceError, OptionError
from zo2core.estimators import ESTIMATORS
from zo2core.factors import kept_bytes_a_step
from zo2core.guard import best_step as best_guarded_step
from zo2core.optimizers import OPTIMIZERS
from zo2core.planning.memory import Machine, plan
from zo2core.planning.speeds import RESUME_SECONDS, MeasuredSpeeds, terabytes_written
from zo2core.ranges import counted, parse_size
from zo2core.types import shown_bytes

LARGEST_SHARE = 0.02  # cost of a snapshot, at most, as a share of the time since the last one


class SnapshotPolicy:
    """Says when a snapshot is due."""

    def __init__(self, every: int | None, clock: Callable[[], float]) -> None:
        self.every = every
        self.least = 1  # steps between two snapshots, if ``every`` is None: what the disk may be written
        self._clock = clock
        self._cost: float | None = None  # seconds that the last snapshot took
        self._taken = clock()

    def is_due(self, step: int) -> bool:
        """Whether a snapshot is due after this number of steps."""
        if self.every is not None:
            return step % self.every == 0
        if step % self.least:
            return False
        return self._cost is None or self._clock() - self._taken >= interval(self._cost)

    def take(self, write: Callable[[], None]) -> None:
        """Write a snapshot, and measure its cost."""
        began = self._clock()
        write()
        self._taken = self._clock()
        self._cost = self._taken - began


def interval(cost: float) -> float:
    """Seconds between two snapshots, each of which takes so many: a resumed run repeats no more than that.

    Fewer seconds would write more to the disk: without this limit small snapshots were taken at almost every step.
    """
    return max(RESUME_SECONDS, cost / LARGEST_SHARE)


LEAST_APPLIED = 0.5  # share of the weights that an update should change
LEAST_FALL = 0.1  # share of the loss by which all steps together should lower it
JUDGED_AFTER = 20  # steps after which the step size is judged

_FEWEST_STEPS = 100  # shorter runs are not expected to learn, and are not judged


def destroyed(updates: Sequence[Update]) -> str | None:
    """Warning that the steps have destroyed the model; None if they have not.

    Directions are independent and of unit variance, so each weight has moved by the root of the sum of squares. Weights are
    below 1, so a model whose weights have moved by more than 1 is destroyed, whatever its loss.
    """
    moved = math.sqrt(sum((update.lr * grad) ** 2 for update in updates for grad in update.projected_grads))
    losses = [update.losses[0] for update in updates]
    share = max(len(losses) // 10, 1)
    first, last = fmean(losses[:share]), fmean(losses[-share:])
    if moved <= 1 and last <= first + abs(first) + 1:
        return None
    changes = f"each weight moved by {moved:.2g}, and the loss went from {first:.4g} to {last:.4g}"
    return f"{changes}: the steps were too large and destroyed the model; zo2 tune finds an --lr that does not diverge"


def rounded_away(result: StepResult, options: TrainOptions) -> str | None:
    """Warning that a step's update changed fewer than half of the weights; None if it changed more, or was not measured."""
    if result.share_applied is None or result.share_applied >= LEAST_APPLIED:
        return None
    name, _, back = options.model_options.transfer_dtype.partition("-")
    remedy = f"--precision mixed:transfer={name}" if back else "--precision mixed, or --dtype float32"
    return (
        f"step {result.step}: the update changed {result.share_applied:.0%} of the stored weights; the "
        f"others rounded back to their old values; keep them in float32 ({remedy}), or raise --lr"
    )


def too_small(updates: Sequence[Update], options: TrainOptions) -> str | None:
    """Warning that all steps of the run together can hardly lower the loss; None if they can.

    To first order an update of ``lr * g`` along a direction lowers the batch's loss by ``lr * g`` times the slope there.
    The slope is computed from the losses, since g may have been clipped or divided. An estimator that evaluates
    one side of each direction, such as FZOO, gives no slope, and is not judged.
    """
    if options.steps < _FEWEST_STEPS or not ESTIMATORS[options.optimization.estimator].multi_query.is_two_sided:
        return None
    fall, loss = options.steps * median(map(_promised_fall, updates)), updates[0].losses[0]
    if fall >= LEAST_FALL * abs(loss):
        return None
    return (
        f"after {counted(len(updates), 'step')}: at this rate, all {options.steps} steps lower the loss of {loss:.3g} by at "
        f"most {fall:.1g}; lr {options.optimization.rate:g} is far too small, and zo2 tune finds a better one"
    )


def _promised_fall(update: Update) -> float:
    """Expected fall of the loss by an update, from the slopes between both sides of its directions."""
    sides = zip(update.losses[::2], update.losses[1::2], update.projected_grads, strict=True)
    return sum(update.lr * grad * (plus - minus) / (2 * update.zo_eps) for plus, minus, grad in sides)


def diverged(error: ZO2Error, updates: Sequence[Update], options: TrainOptions) -> DivergenceError:
    """The error that ended a run, with commands to find a smaller learning rate and to continue with it."""
    best = best_guarded_step(updates)
    return DivergenceError(
        error.where,
        found=error.found,
        expected=error.expected,
        remedy=f"find a learning rate below {options.optimization.rate:g} that does not diverge, with this run's batch size "
        f"and directions: zo2 tune --model {options.model} --data {options.data} --output TRIALS; then continue from "
        f"step {best}, the best so far: {options.resume_command} --from-step {best} --output NEW --lr RATE",
        best_step=best,
    )


_NEGLIGIBLE = 0.01  # terabytes in 1,000 steps, which wear no disk out


def storage(host: HostPlan, device: DevicePlan | None, limits: Resources, disk_writes: str) -> str:
    """A line that says where a run's weights are kept and what it writes."""
    streaming = "" if host.buckets is None else f"; blocks are streamed from disk, {host.buckets} at a time"
    memory = f"Memory: {shown_bytes(host.nbytes)} of {shown_bytes(host.budget)} {_kind(limits.memory)}{streaming}."
    if device is not None:
        used = f"{shown_bytes(device.nbytes)} of {shown_bytes(device.budget)} {_kind(limits.device_memory)}"
        memory += f" Memory of {limits.device}: {used}; {device.kept} blocks stay on it."
    return f"{memory} Disk writes: {disk_writes}."


def _kind(limit: str) -> str:
    """What a plan's budget is: memory that is free, or what the options allow."""
    return "free" if limit == "auto" else "allowed"


def disk_writes(options: TrainOptions, every: int | None, layouts: Sequence[BlockLayout]) -> str:
    """What a zeroth-order run writes of its weights."""
    if every is not None:
        written = terabytes_written(layouts, every)
        what = "negligible" if written < _NEGLIGIBLE else f"each block every {every} steps"
        return f"{what}, {_terabytes(written)}"
    return "negligible" if options.optimization.rank is None else _period_writes(options, layouts)


def _period_writes(options: TrainOptions, layouts: Sequence[BlockLayout]) -> str:
    """What a low-rank run writes of finished periods."""
    if options.storage.write_back_every == "never":
        return "no factors of finished periods, because of --write-back-every never"
    limit = options.storage.write_limit_tb
    most = None if limit is None else limit * 1e9
    nbytes = kept_bytes_a_step(options.optimization.perturbation, layouts, most)
    what = "factors of finished periods"
    return f"{what}, {_terabytes(nbytes / 1e9)}" if nbytes else f"no {what}, because of --write-limit-tb"


def _terabytes(count: float) -> str:
    return f"{shown_bytes(1e12 * count)} in 1,000 steps"


class RunMethod(ABC):
    """How the steps of a run are taken: memory, snapshots and messages."""

    has_gradient: bool  # whether steps differentiate the objective
    forwards: int  # cost of a step, in forward passes of its batch
    learning_rates: Sequence[float]  # candidates of ``zo2 tune`` if the user gives none
    few_learning_rates: Sequence[float]  # candidates of a run that is too short to try all of these

    def __init__(self, options: TrainOptions, shared: SharedBase | None = None) -> None:
        self.options, self.shared = options, shared

    @abstractmethod
    def losses(self, journal: Journal) -> list[float]:
        """The loss of each step of a journal, before its update."""

    @abstractmethod
    def reserved_bytes(self, model: HFBlockModel, longest: BatchShape) -> tuple[int, int]:
        """Bytes to reserve for activations of the largest batch, and the least bytes that a device needs."""

    def engine(self, opening: Opening) -> Any:
        """The run's engine, at the step from which the run continues."""
        return open_engine(self.options, opening)

    @abstractmethod
    def first_step(self, journal: Journal) -> int:
        """The earliest step from which the run may continue. Later steps of the journal are repeated."""

    def storage(self, engine: Any, host: HostPlan, model: HFBlockModel) -> str:
        """A line that says where the weights are kept and what the run writes."""
        every = getattr(engine, "write_back_every", None)
        return storage(host, engine.device_plan, self.options.storage, self.writes(every, model, host))

    @abstractmethod
    def writes(self, every: int | None, model: HFBlockModel, host: HostPlan) -> str:
        """What the run writes, in words; ``every`` are the steps after which a zeroth-order run writes a block back."""

    @abstractmethod
    def after_step(self, engine: Any, report: StepResult) -> list[str]:
        """Do what is due after a step, and return messages, a line each."""

    def snapshot_bytes(self, engine: Any) -> int:
        """Bytes of snapshots that this process has written."""
        return 0

    @abstractmethod
    def at_step(self, engine: Any, model: HFBlockModel, activations: int, step: int) -> Engine:
        """The model at an earlier step, for evaluation and export. The engine is closed."""

    def before_recording(self, engine: Any, loss: float) -> None:
        """Prepare for writing the loss of an evaluation of the current step to the journal."""
        return

    def explained(self, error: ZO2Error, engine: Any) -> ZO2Error:
        """The error with which a run ends after a step raised ``error``."""
        return error

    def verdict(self, journal: Journal) -> str | None:
        """A line that says if a journal's steps have destroyed the model, else None."""
        return None

    def how_to_continue(self, engine: Any) -> str:
        """Commands that continue an interrupted run, and that export its model."""
        return (
            f"stopped after {counted(engine.version, 'step')}; to continue the run, or to export the model at this step:\n"
            f"  {self.options.resume_command}\n"
            f"  zo2 export --run {self.options.output} --output DIR"
        )


class ZerothOrderRun(RunMethod):
    """A run of zeroth-order steps. See ``RunMethod``."""

    has_gradient = False
    learning_rates = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
    few_learning_rates = (1e-6, 1e-5, 1e-4, 1e-3)

    def __init__(self, options: TrainOptions, shared: SharedBase | None = None) -> None:
        super().__init__(options, shared)
        options.estimator()  # refuses what cannot be combined
        self.forwards = options.optimization.evaluations
        self._warned_of_rounding = False

    def losses(self, journal: Journal) -> list[float]:
        """Those of each step's first evaluation. See the contract."""
        return [update.losses[0] for update in journal.updates]

    def reserved_bytes(self, model: HFBlockModel, longest: BatchShape) -> tuple[int, int]:
        """Memory for the activations of all forwards of a step. See the contract."""
        options, given = self.options, self.options.storage.activation_memory
        micro_rows, generated = options.batching.micro_batch_size, options.rewards.new_tokens
        nbytes, least = step_memory(model, longest, options.optimization, micro_rows, new_tokens=generated)
        return nbytes if given is None else parse_size(given), least

    def first_step(self, journal: Journal) -> int:
        """The journal's end. See the contract."""
        return journal.version

    def writes(self, every: int | None, model: HFBlockModel, host: HostPlan) -> str:
        """Blocks, or factors of finished periods. See the contract."""
        return disk_writes(self.options, every, model.layouts)

    def after_step(self, engine: Any, report: StepResult) -> list[str]:
        """Warnings, each of which is given once. See the contract."""
        updates, rounding = engine.journal.updates, None if self._warned_of_rounding else rounded_away(report, self.options)
        self._warned_of_rounding |= rounding is not None
        small = too_small(updates, self.options) if len(updates) == JUDGED_AFTER else None
        return [warning for warning in (rounding, small) if warning is not None]

    def at_step(self, engine: Any, model: HFBlockModel, activations: int, step: int) -> Engine:
        """The base with the updates up to the step, since later updates cannot be undone. See the contract."""
        until = engine.journal.until(step)
        return replayer(self.options, model, activations, None, journal=until, shared=self.shared)

    def explained(self, error: ZO2Error, engine: Any) -> ZO2Error:
        """The error with commands to continue from the best step; unchanged without a guard. See the contract."""
        if isinstance(error, DivergenceError) or (self.options.optimization.guard and engine.version):
            return diverged(error, engine.journal.updates, self.options)
        return error

    def verdict(self, journal: Journal) -> str | None:
        """A warning if the weights have moved too far. See the contract."""
        return destroyed(journal.updates)


# Forward passes that a step costs: one, one more on the way back, and gradients of inputs, which cost another one; those
# of all weights cost a fourth. A sweep before that measures the norm of all gradients costs as much again.
ADAPTER_FORWARDS, FULL_FORWARDS = 3, 4

WRITE_BUDGET_TB = 1.2
"""Terabytes that 1,000 steps may write without --write-limit-tb: a hundredth of what a consumer SSD bears in a year. One of
1 TB is rated for about 600 TB in its five years, which are 120 a year."""

_ADAPTER_RATES, _FEW_ADAPTER_RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3), (3e-4, 1e-3, 3e-3)


class GradientRun(RunMethod):
    """First-order steps. See ``RunMethod``."""

    has_gradient = True

    def __init__(self, options: TrainOptions, shared: SharedBase | None = None) -> None:
        super().__init__(options, shared)
        method = options.first_order.method
        assert method is not None, "it is what chose this class"
        options.learning_rate()  # refuses a warm-up that is too long
        self._streams = options.state is TrainedState.DISK
        self._policy = SnapshotPolicy(options.storage.snapshot_every, time.perf_counter)
        if options.state is TrainedState.ADAPTER:
            self.learning_rates, self.few_learning_rates = _ADAPTER_RATES, _FEW_ADAPTER_RATES
            self.forwards, self._snapshot_of, self._exported = ADAPTER_FORWARDS, "adapter and optimizer", "adapter"
        else:
            self.learning_rates = OPTIMIZERS[method].learning_rates
            self.few_learning_rates = self.learning_rates[1:-1]
            self.forwards = FULL_FORWARDS * (2 if options.first_order.measures_gradients else 1)
            self._snapshot_of, self._exported = "weights and optimizer", "model"

    def losses(self, journal: Journal) -> list[float]:
        """The losses of the journal's commits. See the contract."""
        return [commit.loss for commit in journal.commits]

    def reserved_bytes(self, model: HFBlockModel, longest: BatchShape) -> tuple[int, int]:
        """Memory for the input of each block, and for one segment's graph. See the contract."""
        options, given = self.options, self.options.storage.activation_memory
        update = None if options.state is TrainedState.ADAPTER else options.update()
        micro_rows = options.batching.micro_batch_size
        kept, least = reserved_bytes(model, longest.rows, round(longest.tokens), micro_rows, update)
        return kept if given is None else parse_size(given), least

    def engine(self, opening: Opening) -> Any:
        """The engine, which is closed and refused if the best step, which is to be exported, has no snapshot."""
        if self.options.state is not TrainedState.ADAPTER:
            self._require_alone(opening)
        if self._streams:
            self._require_few_writes(opening)
        elif self.options.state is TrainedState.MEMORY:
            self._policy.least = self._least_interval(opening.model)
        engine: Any = open_engine(self.options, opening)
        best = None if self._streams else self._best(engine)
        if best is not None and best < engine.version and best not in (0, *engine.snapshots.steps):
            engine.close()
            found = f"it beside a run whose best evaluation so far is of step {best}, of which no snapshot was kept"
            raise self._refusal("keep_best", found, "it from the beginning of a run")
        return engine

    def first_step(self, journal: Journal) -> int:
        """The first snapshot's, as a later one may prove damaged; 0 where only open files say what was committed."""
        if self._streams:
            return 0
        return min(Snapshots(self.options.output, journal.chain, journal.require_version).steps, default=0)

    def writes(self, every: int | None, model: HFBlockModel, host: HostPlan) -> str:
        """Snapshots and how often they are taken, or blocks that change. See the contract."""
        if not self._streams:
            every, adapter = self._policy.every, self.options.state is TrainedState.ADAPTER
            size = shown_bytes(snapshot_bytes(model, None if adapter else self.options.update()))
            often = "at most one a minute" if every is None else f"one every {every} steps"
            return f"snapshots of {self._snapshot_of}, {size} each, {often}"
        turn, every = self.options.update().turn, self.options.commit_every
        what = f"changed blocks with their states, a commit every {'step' if every == 1 else f'{every} steps'}"
        what = what if turn is None else f"one block every {turn} steps"
        return f"{what}, {shown_bytes(1000 * self._written(model, host))} in 1,000 steps"

    def after_step(self, engine: Any, report: StepResult) -> list[str]:
        """Take a snapshot if one is due, at the end, and where one is missing of the best step. See the contract."""
        step = engine.version
        if self._streams:
            if step == self.options.steps:
                engine.commit()
            return []
        is_due = engine.workers.all_gather(self._policy.is_due(step))[0]  # clocks differ between workers
        if step == self.options.steps or step == self._best(engine) or is_due:
            self._take_snapshot(engine)
        return []

    def snapshot_bytes(self, engine: Any) -> int:
        """Bytes of snapshots that this process has written. See the contract."""
        return 0 if self._streams else int(engine.snapshots.written)

    def before_recording(self, engine: Any, loss: float) -> None:
        """Take a snapshot of what is now the best step. See the contract."""
        losses = {**criteria_of(engine.journal.evaluations), engine.version: loss}
        if not self._streams and self.options.keep_best and best_step(losses) == engine.version:
            self._take_snapshot(engine)

    def at_step(self, engine: Any, model: HFBlockModel, activations: int, step: int) -> Engine:
        """The parameters of the step's snapshot. See the contract."""
        if self._streams:
            raise self._refusal("at", f"step {step}", "the last step, whose model is in the run's directory")
        at, most = AtSnapshot(step, parameters_at(engine.snapshots, step)), min(activations, engine.activation_bytes)
        return replayer(self.options, model, most, None, at=at, shared=self.shared)

    def how_to_continue(self, engine: Any) -> str:
        """From which snapshot or commit. See the contract."""
        stopped, resume = f"stopped after {counted(engine.version, 'step')};", self.options.resume_command
        if self._streams:
            return f"{stopped} the run goes on from the commit of step {engine.committed}:\n  {resume}"
        last = engine.snapshots.last or 0
        export = f"zo2 export --run {self.options.output} --at {last} --output DIR"
        return (
            f"{stopped} to go on from the snapshot of step {last}, or to get its {self._exported}:\n  {resume}\n  {export}"
        )

    def _best(self, engine: Any) -> int | None:
        """The best step so far, if it is to be exported."""
        return best_step(criteria_of(engine.journal.evaluations)) if self.options.keep_best else None

    def _take_snapshot(self, engine: Any) -> None:
        if engine.version in (0, engine.snapshots.last):  # the base is that of step 0
            return
        best = self._best(engine)
        self._policy.take(lambda: engine.take_snapshot(keep=() if best is None else (best,)))

    def _require_alone(self, opening: Opening) -> None:
        if opening.workers is not None:
            raise OptionError(
                "method",
                found=f"{self.options.first_order.method} of all parameters, and {opening.workers.size} workers",
                expected="one process: several with all parameters are what FSDP and DeepSpeed are for",
                remedy="start it without torchrun, or train an adapter with --lora-rank 8",
            )

    def _least_interval(self, model: HFBlockModel) -> int:
        """Least steps between two snapshots, of which each writes all weights and states, within the limit of writes."""
        stored = self.options.storage
        if stored.write_limit_tb is None:
            return 1
        nbytes = snapshot_bytes(model, self.options.update())
        least = math.ceil(nbytes / (stored.write_limit_tb * 1e9))
        if stored.snapshot_every is not None and stored.snapshot_every < least:
            found = f"{stored.snapshot_every}: {nbytes / stored.snapshot_every / 1e9:.3g} TB in 1,000 steps"
            expected = f"at least {least}, for the {stored.write_limit_tb:g} TB of --write-limit-tb"
            raise OptionError("snapshot_every", found=found, expected=expected, remedy="raise one of the two")
        return least

    def _require_few_writes(self, opening: Opening) -> None:
        """Refuse a run that writes more than a disk bears, unless the user allows it."""
        model, given = opening.model, self.options.storage.write_limit_tb
        limit = WRITE_BUDGET_TB if given is None else given
        memory = memory_policy(self.options, opening.activations)
        request = request_of_run(self.options, model, BatchShape.whole(1, 2), memory)
        nbytes = self._written(model, plan(request, Machine(), MeasuredSpeeds(model.weights)).host_plan)
        if 1000 * nbytes > limit * 1e12:
            turns = self.options.update().turn is not None
            remedy = "switch_every of --method" if turns else "--snapshot-every, where memory has room for blocks"
            raise OptionError(
                "write_limit_tb",
                found=f"{'none, which is ' if given is None else ''}{limit:g}, and a run that writes "
                f"{shown_bytes(1000 * nbytes)} in 1,000 steps, {shown_bytes(self.options.steps * nbytes)} in its "
                f"{self.options.steps}",
                expected="a limit that the run keeps to: writing wears disks out",
                remedy=f"pass --write-limit-tb {1000 * nbytes / 1e12:.2g} to allow it, or raise {remedy}",
            )

    def _written(self, model: HFBlockModel, host: HostPlan) -> float:
        options = self.options
        return written_bytes(stored_layouts(options, model), options.update(), host.buckets or 0, options.commit_every)

    def _refusal(self, option: str, found: str, expected: str) -> OptionError:
        expected = f"{expected} with --method {self.options.first_order.method}"
        return OptionError(option, found=found, expected=expected, remedy="leave it out")


def method_of(options: TrainOptions, shared: SharedBase | None = None) -> RunMethod:
    """The method that the options name; zeroth-order steps by default. A rate of auto stands for any rate."""
    if shared is not None:
        require_shareable(options)
    options = options.with_rate(1.0) if options.optimization.lr == "auto" else options
    return (ZerothOrderRun if options.first_order.method is None else GradientRun)(options, shared)
