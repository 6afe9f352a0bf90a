"""Runs of first-order steps, of an adapter or of all parameters, in memory or on disk: they resume from snapshots."""

from __future__ import annotations

import math
import time
from typing import Any

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.batch_shapes import BatchShape
from zo2adapters.trainers.engines import (
    Opening,
    memory_policy,
    open_engine,
    request_of_run,
    snapshot_bytes,
    snapshot_replayer,
    stored_layouts,
    written_bytes,
)
from zo2adapters.trainers.evaluations import best_step, criteria_of
from zo2adapters.trainers.methods.run_method import RunMethod
from zo2adapters.trainers.methods.snapshot_policy import SnapshotPolicy
from zo2adapters.trainers.options import TrainedState, TrainOptions
from zo2adapters.trainers.step_memory import reserved_bytes
from zo2core import Engine, HostPlan, Journal, SharedBase, StepResult
from zo2core.checkpoint import Snapshots
from zo2core.errors import OptionError
from zo2core.optimizers import OPTIMIZERS
from zo2core.planning.memory import Machine
from zo2core.planning.run_spec import plan
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.ranges import counted, parse_size
from zo2core.types import shown_bytes

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
        return snapshot_replayer(self.options, engine, model, activations, step, self.shared)

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
