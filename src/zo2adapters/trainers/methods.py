"""The methods of a run, zeroth-order and first-order steps: their engine, memory, snapshots,
warnings and messages.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.models.footprint import (
    backward_bytes,
    expected_held_bytes,
    forward_bytes,
)
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_model import PeftBlockModel
from zo2adapters.tasks.generation import plan_generation
from zo2adapters.tasks.registry import function_file
from zo2adapters.trainers.metrics import Results, best_step
from zo2adapters.trainers.options import Execution, TrainOptions, require_shareable
from zo2adapters.trainers.process import local_device, worker_trace
from zo2adapters.trainers.run_directory import RunDirectory
from zo2adapters.trainers.run_inputs import LargestBatch, RowShapes, RunStart
from zo2core import (
    BlockUpdate,
    DevicePlan,
    Engine,
    EngineOptions,
    FirstOrder,
    HostPlan,
    Journal,
    LossScaling,
    MemoryPolicy,
    SegmentKind,
    SequentialNoise,
    SharedBase,
    StepResult,
    Update,
    Workers,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.build import RunInputs, request_of
from zo2core.encodings.decoding import decoded
from zo2core.errors import CheckpointError, DivergenceError, NonFiniteLossError, OptionError
from zo2core.estimators.factors import kept_bytes_a_step
from zo2core.io.direct_file import whole_pages
from zo2core.methods.first_order import TRAINED_COPIES, AtSnapshot, trained_bytes
from zo2core.optimizers.registry import OPTIMIZERS
from zo2core.optimizers.states import state_bytes
from zo2core.planning.memory import Machine, RunRequest, free_memory, plan
from zo2core.planning.speeds import RESUME_SECONDS, MeasuredSpeeds, kept_blocks, terabytes_written
from zo2core.ranges import counted, parse_size, require_whole
from zo2core.sweep.activations import IN_TRANSIT
from zo2core.sweep.gradient_visitor import gradient_bytes
from zo2core.types import divide_tied, packed_bytes, shown_bytes, trained

# bytes of a new run's memory that a process may need which resumes it
KEPT_FREE = 16 << 20

LARGEST_SHARE = 0.02  # cost of a snapshot, at most, as a share of the time since the last one


class SnapshotPolicy:
    """Says when a snapshot is due."""

    def __init__(self, every: int | None, clock: Callable[[], float]) -> None:
        self.every = every
        # steps between two snapshots, if ``every`` is None: what the disk may be written
        self.least = 1
        self._clock = clock
        self._cost: float | None = None  # seconds that the last snapshot took
        self._taken = clock()

    def is_due(self, step: int) -> bool:
        """Whether a snapshot is due after this number of steps."""
        if self.every is not None:
            return step % self.every == 0
        return step % self.least == 0 and (
            self._cost is None or self._clock() - self._taken >= interval(self._cost)
        )

    def take(self, write: Callable[[], None]) -> None:
        """Write a snapshot, and measure its cost."""
        began = self._clock()
        write()
        self._taken = self._clock()
        self._cost = self._taken - began


def interval(cost: float) -> float:
    """Seconds between two snapshots, each of which takes so many: a resumed run repeats no more
    than that.

    Fewer seconds would write more to the disk: without this limit small snapshots were taken at
    almost every step.
    """
    return max(RESUME_SECONDS, cost / LARGEST_SHARE)


class StepMemory(NamedTuple):
    """Memory for the activations and logits of a step."""

    nbytes: int  # bytes to reserve
    least: int  # least bytes that a device needs


class RunMethod(ABC):
    """How the steps of a run are taken: their engine, memory, snapshots and messages."""

    has_gradient: bool  # whether steps differentiate the objective
    forwards: int  # cost of a step, in forward passes of its batch
    learning_rates: Sequence[float]  # candidates of ``zo2 tune`` if the user gives none
    few_learning_rates: Sequence[float]  # candidates of a run that is too short to try all of these
    # whether activations without room wait elsewhere: on the disk, or of a device in host memory
    spills: bool
    # steps between two commits of blocks that change on disk; None: none do
    commit_every: int | None = None
    write_back: WriteBackPolicy | None = None  # of zeroth-order steps

    def __init__(self, start: RunStart) -> None:
        self.options = start.options
        self.shared = start.shared
        self.workers = start.workers
        self.kept_free = 0 if start.resumes else KEPT_FREE

    @abstractmethod
    def steps(self) -> ZerothOrder | FirstOrder:
        """How the engine makes the steps."""

    @abstractmethod
    def needed_bytes(self, model: HFBlockModel, largest: LargestBatch) -> StepMemory:
        """Expected memory of a step on the largest batch."""

    def reserved_bytes(
        self, model: HFBlockModel, shapes: RowShapes, *, together: bool = True
    ) -> StepMemory:
        """Memory to reserve for activations: what the user gives, or what a step needs, a batch of
        an evaluation, and prompts that are continued, all of them ``together`` or one at a time.
        """
        needed = self.needed_bytes(model, shapes.largest)
        given = self.options.storage.activation_memory
        if given is not None:
            return needed._replace(nbytes=parse_size(given))
        beside = [
            plan_generation(
                model.config,
                evaluations=1,
                rows=prompts.rows,
                prompt_tokens=prompts.tokens,
                new_tokens=prompts.new_tokens,
                allowed=None if together else 0,
                measured=model.forward_peaks,
            ).nbytes
            for prompts in shapes.prompts
        ]
        if shapes.largest_evaluated is not None:
            beside.append(self._evaluated_bytes(model, shapes.largest_evaluated))
        most = max(beside, default=0)
        return StepMemory(max(needed.nbytes, most), max(needed.least, most))

    def micro_batches(self, largest: LargestBatch) -> list[tuple[int, int]]:
        """Rows and tokens of a batch's micro-batches, the longest first."""
        return largest.micro_batches(self.options.batching.micro_batch_size)

    def logits(self, model: HFBlockModel, rows: int, largest: LargestBatch) -> int | None:
        """Tokens of so many rows whose logits are in memory at a time; None: all."""
        if function_file(self.options.objective) is not None:  # which gets all of them
            return None
        labelled = None if largest.predictions is None else rows * largest.predictions
        limits = [limit for limit in (model.chunk, labelled) if limit is not None]
        return min(limits, default=None)

    def _evaluated_bytes(self, model: HFBlockModel, largest: LargestBatch) -> int:
        """Expected memory of a micro-batch of an evaluation."""
        rows, tokens = self.micro_batches(largest)[0]
        running = forward_bytes(
            model.config,
            rows,
            tokens,
            loss_chunk=self.logits(model, rows, largest),
            measured=model.forward_peaks,
        )
        return expected_held_bytes(model.config, rows, tokens) + running

    def policy(self, activations: int, least: int | None = None) -> MemoryPolicy:
        """The memory that the run may use; a shared base has the limits of its runs."""
        storage = self.options.storage
        policy = MemoryPolicy(
            activations=activations,
            least_activations=least if self.spills else None,
            steps=self.options.steps,
            kept_free=self.kept_free,
        )
        if self.shared is not None:
            return policy
        return replace(policy, host=storage.memory, device=storage.device_memory)

    def engine(
        self,
        model: HFBlockModel,
        memory: StepMemory,
        journal: Journal,
        provenance: Mapping[str, Any],
        execution: Execution,
    ) -> Engine:
        """The run's engine, at the step from which the run continues.

        Args:
            model: The run's model.
            memory: What is reserved for activations.
            journal: The run's journal, which stays the caller's.
            provenance: What the run's result depends on, as JSON values.
            execution: How this process executes the run.
        """
        options = self.options
        return Engine(
            model,
            self.steps(),
            journal=journal,
            run=options.output if self.has_gradient else None,
            device=local_device(options.storage.device, self.workers),
            memory=self.policy(*memory),
            micro_batch_size=options.batching.micro_batch_size,
            options=EngineOptions(
                provenance=provenance,
                write_back=self.write_back,
                commit_every=self.commit_every,
                matmul_precision=options.model_options.matmul_precision,
                trace=worker_trace(execution.trace, self.workers),
                workers=self.workers,
                source=self.shared,
            ),
        )

    def open(self, model: HFBlockModel, activations: int) -> Engine:
        """Open an engine on the base, on the run's device and within its limits; other engines of
        the model must be closed.
        """
        return self._opened(model, activations, StepWeights(), self.workers)

    def _opened(
        self,
        model: HFBlockModel,
        activations: int,
        weights: StepWeights,
        workers: Workers | None,
    ) -> Engine:
        """Open an engine that takes no steps, on the run's device and within its limits."""
        return Engine(
            model,
            weights.method,
            journal=weights.journal,
            device=local_device(self.options.storage.device, workers),
            memory=self.policy(activations),
            micro_batch_size=self.options.batching.micro_batch_size,
            options=EngineOptions(
                matmul_precision=self.options.model_options.matmul_precision,
                workers=workers,
                source=self.shared,
            ),
        )

    def request(self, model: HFBlockModel, memory: StepMemory, *, rows: int = 1) -> RunRequest:
        """What the plan of a run that has taken no steps depends on, with so many rows in a
        batch.
        """
        write_back = self.write_back if self.options.storage.device == "cpu" else None
        inputs = RunInputs(
            model=model,
            method=self.steps(),
            run=self.options.output,
            memory=self.policy(*memory),
            options=EngineOptions(
                commit_every=self.commit_every, write_back=write_back, workers=self.workers
            ),
        )
        return request_of(inputs)

    @abstractmethod
    def first_step(self, journal: Journal) -> int:
        """The earliest step from which the run may continue.

        Later steps of the journal are repeated.
        """

    def storage(
        self, model: HFBlockModel, host: HostPlan, device: DevicePlan | None, every: int | None
    ) -> str:
        """A line that says where the weights are kept and what the run writes; ``every``: see
        ``writes``.
        """
        limits = self.options.storage
        streaming = (
            ""
            if host.buckets is None
            else f"; blocks are streamed from disk, {host.buckets} at a time"
        )
        memory = f"Memory: {_used(host, limits.memory)}{streaming}."
        if device is not None:
            memory += (
                f" Memory of {limits.device}: {_used(device, limits.device_memory)}; "
                f"{device.kept} blocks stay on it."
            )
        return f"{memory} Disk writes: {self.writes(every, model, host)}."

    @abstractmethod
    def writes(self, every: int | None, model: HFBlockModel, host: HostPlan) -> str:
        """What the run writes, in words; ``every`` are the steps after which a zeroth-order run
        writes a block back.
        """

    @abstractmethod
    def after_step(self, engine: Engine, report: StepResult) -> list[str]:
        """Do what is due after a step, and return messages, a line each."""

    def snapshot_bytes(self, engine: Engine) -> int:
        """Bytes of snapshots that this process has written."""
        return 0

    def at_step(self, engine: Engine, model: HFBlockModel, activations: int, step: int) -> Engine:
        """The model at an earlier step, for evaluation and export. The engine is closed."""
        weights = weights_at(engine.journal, step, self.options.output)
        room = min(activations, engine.activation_bytes)
        return self._opened(model, room, weights, workers=None)  # by the first worker alone

    def before_recording(self, engine: Engine, results: Results) -> None:
        """Prepare for writing an evaluation of the current step to the journal."""
        return

    def explained(self, error: Exception, engine: Engine) -> Exception:
        """The error with which a run ends after a step raised ``error``."""
        return error

    def verdict(self, journal: Journal) -> str | None:
        """A line that says if a journal's steps have destroyed the model, else None."""
        return None

    def how_to_continue(self, engine: Engine) -> str:
        """Commands that continue an interrupted run, and that export its model."""
        return (
            f"stopped after {counted(engine.version, 'step')}; to continue the run, or to export "
            "the model at this step:\n"
            f"  {self.options.resume_command}\n"
            f"  zo2 export --run {self.options.output} --at {engine.version} --output DIR"
        )


def _used(planned: HostPlan | DevicePlan, limit: str) -> str:
    """Bytes of a plan, of what is free or of what the options allow."""
    return (
        f"{shown_bytes(planned.nbytes)} of {shown_bytes(planned.budget)} "
        f"{'free' if limit == 'auto' else 'allowed'}"
    )


def _per_1000_steps(nbytes: float) -> str:
    """What is written, from the bytes of a step."""
    return f"{shown_bytes(1000 * nbytes)} in 1,000 steps"


LEAST_APPLIED = 0.5  # share of the weights that an update should change
LEAST_FALL = 0.1  # share of the loss by which all steps together should lower it
JUDGED_AFTER = 20  # steps after which the step size is judged
_FEWEST_STEPS = 100  # shorter runs are not expected to learn, and are not judged
_NEGLIGIBLE = 1e7  # bytes a step, which wear no disk out
# of the free memory that generation may take if it needs more; the other rows then wait
_GENERATION_SHARE = 0.5


class ZerothOrderRun(RunMethod):
    """A run of zeroth-order steps. See ``RunMethod``."""

    has_gradient = False
    learning_rates = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
    few_learning_rates = (1e-6, 1e-5, 1e-4, 1e-3)

    def __init__(self, start: RunStart) -> None:
        super().__init__(start)
        options = start.options
        self.estimator = options.estimator()  # refuses what cannot be combined
        self.forwards, storage = options.optimization.evaluations, options.storage
        self.spills = storage.device != "cpu"
        self.write_back = WriteBackPolicy(
            directory=options.output,
            every=None if storage.write_back_every == "never" else storage.write_back_every,
            snapshot_every=storage.snapshot_every,
            terabytes_per_1000_steps=storage.write_limit_tb,
        )
        self._warned_of_rounding = False

    def steps(self) -> ZerothOrder:
        """By the estimator, with the perturbations of the options."""
        optimization = self.options.optimization
        noise = optimization.generator()
        perturbation = optimization.perturbation
        return ZerothOrder(
            self.estimator, noise=noise, perturbation=perturbation, seed=self.options.seed
        )

    def needed_bytes(self, model: HFBlockModel, largest: LargestBatch) -> StepMemory:
        """Activations of all forwards of a step, or keys and values of what is generated."""
        options, optimization = self.options, self.options.optimization
        streams, stacked = optimization.evaluations, optimization.stacked
        micro_batches = self.micro_batches(largest)
        rows = sum(count for count, _ in micro_batches)
        tokens = micro_batches[0][1]
        running = micro_batches[0][0]
        loss_rows = optimization.loss_rows(rows)
        measured = model.forward_peaks
        passes = -(-streams // stacked)
        adapter = 0
        if isinstance(model, PeftBlockModel):
            adapter = model.adapter_bytes(running * stacked, passes * len(micro_batches))
        held = [
            times * expected_held_bytes(model.config, count * stacked, length)
            for (count, length), times in Counter(micro_batches).items()
        ]
        forward = forward_bytes(
            model.config,
            running * stacked,
            tokens,
            loss_chunk=self.logits(model, running * stacked, largest),
            loss_rows=loss_rows if optimization.per_row else running,
            measured=measured,
        )
        nbytes = adapter + passes * sum(held) + forward
        longest = expected_held_bytes(model.config, running * stacked, tokens)
        least = adapter + IN_TRANSIT * longest + forward
        if (new_tokens := options.rewards.new_tokens) is not None:
            shape = {
                "evaluations": streams,
                "rows": rows,
                "prompt_tokens": tokens,
                "new_tokens": new_tokens,
            }
            needed, fewest = (
                plan_generation(model.config, **shape, allowed=most, measured=measured).nbytes
                for most in (None, 0)
            )
            nbytes = adapter + min(needed, max(fewest, round(_GENERATION_SHARE * free_memory())))
            least = max(least, nbytes)  # keys and values stay on a device
        if optimization.rank is None:
            return StepMemory(nbytes, least)
        # bytes of one column of the factors of a segment's matrices, which are in memory twice
        columns = max(
            sum(
                spec.shape[0] * spec.dtype.itemsize
                for spec in layout.used
                if len(spec.shape) == 2 and not spec.frozen
            )
            for layout in model.layouts
        )
        return StepMemory(
            nbytes + 2 * columns * optimization.rank * stacked * -(-rows // loss_rows), least
        )

    def request(self, model: HFBlockModel, memory: StepMemory, *, rows: int = 1) -> RunRequest:
        """As for any method, with the noise of the perturbations and writes of blocks."""
        optimization = self.options.optimization
        device = "cpu" if self.options.storage.device == "cpu" else "cuda"
        return replace(
            super().request(model, memory),
            noise=optimization.generator() or SequentialNoise(model.layouts, device),
            perturbation=optimization.perturbation,
            takes_steps=True,
            perturb_in_place=bool(self.estimator.perturb_in_place),
            directions=rows
            if optimization.per_row and optimization.queries == 1
            else optimization.queries,
        )

    def first_step(self, journal: Journal) -> int:
        """The journal's end."""
        return journal.version

    def writes(self, every: int | None, model: HFBlockModel, host: HostPlan) -> str:
        """Blocks, or factors of finished periods."""
        storage, perturbation = self.options.storage, self.options.optimization.perturbation
        if every is not None:
            nbytes = 1e9 * terabytes_written(model.layouts, every)
            what = "negligible" if nbytes < _NEGLIGIBLE else f"each block every {every} steps"
            return f"{what}, {_per_1000_steps(nbytes)}"
        if self.options.optimization.rank is None:
            return "negligible"
        if storage.write_back_every == "never":
            return "no factors of finished periods, because of --write-back-every never"
        limit = None if storage.write_limit_tb is None else storage.write_limit_tb * 1e9
        nbytes = kept_bytes_a_step(perturbation, model.layouts, limit)
        what = "factors of finished periods"
        return (
            f"{what}, {_per_1000_steps(nbytes)}"
            if nbytes
            else f"no {what}, because of --write-limit-tb"
        )

    def after_step(self, engine: Engine, report: StepResult) -> list[str]:
        """Warnings, each of which is given once."""
        updates = engine.journal.updates
        lines = []
        if (
            not self._warned_of_rounding
            and report.share_applied is not None
            and report.share_applied < LEAST_APPLIED
        ):
            self._warned_of_rounding = True
            name, _, back = self.options.model_options.transfer_dtype.partition("-")
            remedy = f"--transfer-dtype {name}" if back else "--precision mixed, or --dtype float32"
            lines.append(
                f"step {report.step}: the update changed {report.share_applied:.0%} of the stored "
                "weights; the "
                f"others rounded back to their old values; keep them in float32 ({remedy}), or "
                "raise --lr"
            )
        if len(updates) == JUDGED_AFTER and (small := self._too_small(updates)) is not None:
            lines.append(small)
        return lines

    def _too_small(self, updates: Sequence[Update]) -> str | None:
        """Warning that all steps of the run together can hardly lower the loss; None if they can.

        To first order an update of ``lr * g`` along a direction lowers the batch's loss by ``lr *
        g`` times the slope there. The slope is computed from the losses, since g may have been
        clipped or divided. An estimator that evaluates one side of each direction, such as FZOO,
        gives no slope, and is not judged.
        """
        from zo2core.estimators.registry import ESTIMATORS

        steps = self.options.steps
        optimization = self.options.optimization
        if steps < _FEWEST_STEPS or not ESTIMATORS[optimization.estimator].multi_query.is_two_sided:
            return None

        def fall(update: Update) -> float:
            sides = zip(
                update.losses[::2], update.losses[1::2], update.projected_grads, strict=True
            )
            return sum(
                update.lr * grad * (plus - minus) / (2 * update.zo_eps)
                for plus, minus, grad in sides
            )

        expected = steps * median(map(fall, updates))
        loss = updates[0].losses[0]
        if expected >= LEAST_FALL * abs(loss):
            return None
        return (
            f"after {counted(len(updates), 'step')}: at this rate, all {steps} steps lower the "
            f"loss of {loss:.3g} by at "
            f"most {expected:.1g}; lr {optimization.rate:g} is far too small, and zo2 tune finds "
            "a better one"
        )

    def explained(self, error: Exception, engine: Engine) -> Exception:
        """With commands to find a smaller rate and go on from the best step; unchanged without a
        guard.
        """
        from zo2core.estimators.guard import best_step as best_guarded_step

        options = self.options
        updates = engine.journal.updates
        is_guarded = options.optimization.guard and engine.version > 0
        if not isinstance(
            error, (DivergenceError, NonFiniteLossError) if is_guarded else DivergenceError
        ):
            return error
        best = best_guarded_step(updates)
        remedy = (
            f"find a learning rate below {options.optimization.rate:g} that does not diverge, "
            "with this run's batch "
            f"size and directions: zo2 tune --method {options.optimization.method} "
            f"--model {options.model} --data {options.data} --output TRIALS; then continue "
            f"from step {best}, the best so far: {options.resume_command} --from-step {best} "
            "--output NEW --lr RATE"
        )
        return DivergenceError(error.where, error.found, error.expected, remedy, best_step=best)

    def verdict(self, journal: Journal) -> str | None:
        """Judge by how far the weights have moved.

        Directions are independent and of unit variance, so each weight has moved by the root of the
        sum of squares. Weights are below 1, so a model whose weights have moved by more than 1 is
        destroyed, whatever its loss.
        """
        updates = journal.updates
        moved = math.sqrt(
            sum((update.lr * grad) ** 2 for update in updates for grad in update.projected_grads)
        )
        losses = [update.losses[0] for update in updates]
        share = max(len(losses) // 10, 1)
        first = fmean(losses[:share])
        last = fmean(losses[-share:])
        if moved <= 1 and last <= first + abs(first) + 1:
            return None
        changes = (
            f"each weight moved by {moved:.2g}, and the loss went from {first:.4g} to {last:.4g}"
        )
        return (
            f"{changes}: the steps were too large and destroyed the model; zo2 tune finds an --lr "
            "that does not diverge"
        )


# Forward passes that a step costs: one, one more on the way back, and gradients of inputs, which
# cost another one; those of all weights cost a fourth. A sweep before that measures the norm of all
# gradients costs as much again.
ADAPTER_FORWARDS, FULL_FORWARDS = 3, 4

WRITE_BUDGET_TB = 1.2
"""Terabytes that 1,000 steps may write without --write-limit-tb: a hundredth of what a consumer SSD
bears in a year. One of 1 TB is rated for about 600 TB in its five years, which are 120 a year.
"""

_ADAPTER_RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
_FEW_ADAPTER_RATES = (3e-4, 1e-3, 3e-3)


class GradientRun(RunMethod):
    """First-order steps: of an adapter, or of all parameters in memory or in blocks on disk.

    See ``RunMethod``.
    """

    has_gradient = True

    def __init__(self, start: RunStart) -> None:
        super().__init__(start)
        options = start.options
        first_order, every = options.optimization, options.storage.snapshot_every
        optimizer = first_order.optimizer
        assert optimizer is not None, "it is what chose this class"
        options.learning_rate()  # refuses a warm-up that is too long
        self.of_adapter = options.trains_adapter_alone
        self.streams = first_order.stream_blocks and not self.of_adapter
        self.spills = not self.streams
        self.commit_every = (every or 1) if self.streams else None
        self._policy = SnapshotPolicy(every, time.perf_counter)
        if options.model_options.trains_adapter:
            self.learning_rates, self.few_learning_rates = _ADAPTER_RATES, _FEW_ADAPTER_RATES
        else:
            self.learning_rates = OPTIMIZERS[optimizer].learning_rates
            self.few_learning_rates = self.learning_rates[1:-1]
        self.forwards = ADAPTER_FORWARDS
        if not self.of_adapter:
            self.forwards = FULL_FORWARDS * (2 if first_order.measures_gradients else 1)

    @cached_property
    def update(self) -> BlockUpdate | None:
        """The optimizer of all parameters; None: an adapter is trained."""
        options = self.options
        if self.of_adapter:
            return None
        return options.optimization.block_update(
            weight_decay=options.optimization.weight_decay,
            base_lr=options.optimization.base_learning_rate(options.scheduled_steps),
            seed=options.seed % (1 << 62),
        )

    @property
    def turn(self) -> int | None:
        """Steps of a segment's turn; None: all are changed by each step."""
        return None if self.update is None else self.update.turn

    @property
    def measures_gradients(self) -> bool:
        """Whether a sweep measures the gradients before another one applies them."""
        return self.update is not None and self.options.optimization.measures_gradients

    def steps(self) -> FirstOrder:
        """By the optimizer."""
        asked = self.options.optimization
        rate = self.options.learning_rate()
        lr = self.options.optimization.rate
        if self.update is not None:
            scaling = LossScaling() if asked.loss_scaling else None
            return FirstOrder(
                self.update,
                lr=rate,
                clip=asked.max_grad_norm,
                clip_per=asked.max_grad_norm_per,
                clip_value=asked.max_grad_value,
                scaling=scaling,
                divide_states=asked.divide_states,
            )
        assert asked.optimizer is not None, "it is what chose this class"
        optimizer = OPTIMIZERS[asked.optimizer].of_adapter
        assert optimizer is not None, "other methods were refused with an adapter"
        given = {
            "lr": lr,
            "weight_decay": self.options.optimization.weight_decay,
            **asked.optimizer_options,
        }
        recorded = {"name": asked.optimizer, **given, "max_grad_norm": asked.max_grad_norm}
        return FirstOrder(
            partial(optimizer, **given), lr=rate, clip=asked.max_grad_norm, options=recorded
        )

    def needed_bytes(self, model: HFBlockModel, largest: LargestBatch) -> StepMemory:
        """The inputs of blocks, one segment's graph, and what adapter or tied weights take."""
        micro_batches = self.micro_batches(largest)
        rows, tokens = micro_batches[0]
        blocks = sum(layout.kind is SegmentKind.BLOCK for layout in model.layouts)
        beside = model.adapter_bytes(rows, 1) if isinstance(model, PeftBlockModel) else 0
        if self.update is not None:
            # gradients of tied weights, one for each micro-batch, wait for the last segment that
            # uses the weights
            tied, _ = divide_tied(model.layouts)
            beside += len(micro_batches) * packed_bytes(tied)
            if model.chunk:
                # the gradient of a chunk, before it is added to that of the others
                beside += sum(spec.nbytes for spec in model.layouts[-1].used)
            if self.update.turn is not None:
                # in another segment's turn they have no gradient
                most, first = (
                    sum(trained_bytes(self.update, part))
                    for part in (model.layouts, model.layouts[:1])
                )
                beside = max(beside + first - most, 0)
        held = sum(
            times * expected_held_bytes(model.config, count, length)
            for (count, length), times in Counter(micro_batches).items()
        )
        chunk = self.logits(model, rows, largest)
        backward = backward_bytes(
            model.config, rows, tokens, loss_chunk=chunk, measured=model.pass_peaks
        )
        return StepMemory(
            gradient_bytes(held, backward, blocks) + beside,
            gradient_bytes(held, backward, 0) + beside,
        )

    def engine(
        self,
        model: HFBlockModel,
        memory: StepMemory,
        journal: Journal,
        provenance: Mapping[str, Any],
        execution: Execution,
    ) -> Engine:
        """The engine, which is closed and refused if the best step, which is to be exported, has no
        snapshot.
        """
        if self.update is not None:
            if self.streams:
                self._require_few_writes(model, memory)
            else:
                self._policy.least = self._least_interval(model)
        engine = super().engine(model, memory, journal, provenance, execution)
        best = None if self.streams else self._best(engine)
        if best is not None and best < engine.version and best not in (0, *engine.snapshots.steps):
            engine.close()
            found = (
                f"it beside a run whose best evaluation so far is of step {best}, of which no "
                "snapshot was kept"
            )
            expected = (
                f"it from the beginning of a run with --method {self.options.optimization.method}"
            )
            raise OptionError("keep_best", found, expected, "leave it out")
        return engine

    def first_step(self, journal: Journal) -> int:
        """The first snapshot's, as a later one may prove damaged; 0 where only open files say what
        was committed.
        """
        if self.streams:
            return 0
        return min(RunDirectory(self.options.output).snapshots(journal).steps, default=0)

    def writes(self, every: int | None, model: HFBlockModel, host: HostPlan) -> str:
        """Snapshots and how often they are taken, or blocks that change."""
        if not self.streams:
            every = self._policy.every
            what = "adapter" if self.of_adapter else "weights"
            often = "at most one a minute" if every is None else f"one every {every} steps"
            return (
                f"snapshots of {what} and optimizer, {shown_bytes(self.snapshot_size(model))} "
                f"each, {often}"
            )
        assert self.update is not None, "blocks of all parameters stream"
        turn = self.turn
        every = self.commit_every
        what = (
            "changed blocks with their states, a commit every "
            f"{'step' if every == 1 else f'{every} steps'}"
        )
        what = what if turn is None else f"one block every {turn} steps"
        return f"{what}, {_per_1000_steps(self.written(model, host.buckets))}"

    def after_step(self, engine: Engine, report: StepResult) -> list[str]:
        """Take a snapshot if one is due, at the end, and where one is missing of the best step."""
        step = engine.version
        is_last = engine.version == self.options.steps
        if self.streams:
            if is_last:
                engine.commit()
            return []
        # clocks differ between workers
        is_due = self._policy.is_due(step)
        if self.workers is not None:
            is_due = self.workers.all_gather(is_due)[0]
        if is_last or is_due or step == self._best(engine):
            self._take_snapshot(engine)
        return []

    def snapshot_bytes(self, engine: Engine) -> int:
        """Bytes of snapshots that this process has written."""
        return 0 if self.streams else int(engine.snapshots.written)

    def before_recording(self, engine: Engine, results: Results) -> None:
        """Take a snapshot of what is now the best step."""
        evaluations = {**engine.journal.evaluations, engine.version: results}
        if not self.streams and self.options.keep_best and best_step(evaluations) == engine.version:
            self._take_snapshot(engine)

    def how_to_continue(self, engine: Engine) -> str:
        """From which snapshot or commit."""
        stopped = f"stopped after {counted(engine.version, 'step')};"
        resume = self.options.resume_command
        if self.streams:
            return (
                f"{stopped} the run goes on from the commit of step {engine.committed}:\n  {resume}"
            )
        last = engine.snapshots.last or 0
        exported = "adapter" if self.of_adapter else "model"
        export = f"zo2 export --run {self.options.output} --at {last} --output DIR"
        return (
            f"{stopped} to go on from the snapshot of step {last}, or to get its {exported}:\n  "
            f"{resume}\n  {export}"
        )

    def snapshot_size(self, model: HFBlockModel) -> int:
        """Largest size of a snapshot: what is trained, without its gradients, and the optimizer's
        state.
        """
        if self.update is None:
            return (TRAINED_COPIES - 1) * sum(spec.nbytes for spec in trained(model.layouts))
        return sum(layout.nbytes for layout in model.layouts) + state_bytes(
            self.update, model.layouts
        )

    def written(self, model: HFBlockModel, buckets: int | None) -> float:
        """Bytes that a step of a run over blocks that change on disk writes on average."""
        assert self.update is not None, "blocks of all parameters stream"
        assert self.commit_every is not None, "they are committed"
        layouts = self.request(model, StepMemory(1, 1)).on_disk
        sizes = [whole_pages(layout.nbytes) for layout in layouts if layout.parameters]
        if self.turn is not None:
            return sum(sizes) / len(sizes) / self.turn
        if self.commit_every == 1:
            return sum(sizes)
        blocks = [whole_pages(layout.nbytes) for layout in layouts if not layout.resident]
        seldom = (
            sum(sizes) - sum(blocks) + sum(blocks[: kept_blocks(buckets or 0, self.commit_every)])
        )
        return sum(sizes) - seldom + seldom / self.commit_every

    def _best(self, engine: Engine) -> int | None:
        """The best step so far, if it is to be exported."""
        return best_step(engine.journal.evaluations) if self.options.keep_best else None

    def _take_snapshot(self, engine: Engine) -> None:
        if engine.version in (0, engine.snapshots.last):  # the base is that of step 0
            return
        best = self._best(engine)
        self._policy.take(lambda: engine.take_snapshot(keep=() if best is None else (best,)))

    def _least_interval(self, model: HFBlockModel) -> int:
        """Least steps between two snapshots, of which each writes all weights and states, within
        the limit of writes.
        """
        limit, every = self.options.storage.write_limit_tb, self._policy.every
        if limit is None:
            return 1
        least = math.ceil(self.snapshot_size(model) / (limit * 1e9))
        if every is not None:
            require_whole(
                "snapshot_every",
                every,
                least,
                otherwise=f", for the {limit:g} TB of --write-limit-tb",
            )
        return least

    def _require_few_writes(self, model: HFBlockModel, memory: StepMemory) -> None:
        """Refuse a run that writes more than a disk bears, unless the user allows it."""
        given, steps = self.options.storage.write_limit_tb, self.options.steps
        limit = WRITE_BUDGET_TB if given is None else given
        host = plan(self.request(model, memory), Machine(), MeasuredSpeeds(model.weights)).host_plan
        nbytes = self.written(model, host.buckets)
        if 1000 * nbytes > limit * 1e12:
            turns = self.turn is not None
            remedy = (
                "--switch-every" if turns else "--snapshot-every, where memory has room for blocks"
            )
            found = (
                f"{'none, which is ' if given is None else ''}{limit:g}, and a run that writes "
                f"{_per_1000_steps(nbytes)}, {shown_bytes(steps * nbytes)} in its {steps}"
            )
            remedy = (
                f"pass --write-limit-tb {1000 * nbytes / 1e12:.2g} to allow it, or raise {remedy}"
            )
            raise OptionError(
                "write_limit_tb",
                found,
                "a limit that the run keeps to: writing wears disks out",
                remedy,
            )


def method_of(start: RunStart) -> ZerothOrderRun | GradientRun:
    """The method that the options of a run name.

    A rate of auto stands for any rate.
    """
    options = start.options
    if start.shared is not None:
        require_shareable(options)
    if options.optimization.lr == "auto":
        start = replace(start, options=options.with_rate(1.0))
    return ZerothOrderRun(start) if options.optimization.optimizer is None else GradientRun(start)


def checked_method(start: RunStart) -> ZerothOrderRun | GradientRun:
    """The method of a run, whose options that depend on neither model nor data are checked."""
    start.options.require_valid()
    start.options.require_packages()
    return method_of(start)


class StepWeights(NamedTuple):
    """From what an engine makes the weights of a step: without both they are the base's."""

    journal: Journal | None = None  # the updates until the step
    method: AtSnapshot | None = None  # a snapshot of a first-order run


def weights_at(journal: Journal, step: int, directory: Path) -> StepWeights:
    """The weights after so many steps.

    Updates cannot be undone, so that the weights are made from the base.
    """
    if journal.is_replayable:
        return StepWeights(journal=journal if step == journal.version else journal.until(step))
    if step == 0:  # where the parameters are those that the run began with
        return StepWeights(method=AtSnapshot(step, None))
    state = RunDirectory(directory).snapshots(journal).read(step).state
    # refused if incomplete
    return StepWeights(method=AtSnapshot(step, state.get("parameters", {})))


def base_model(options: TrainOptions) -> HFBlockModel:
    """Open the model of a base, without an adapter."""
    base = replace(options.model_options.without_adapter(), precision=options.precision_asked())
    return base.opened(resolve_directory(options.model), seed=options.seed)


def open_shared_base(options: TrainOptions) -> SharedBase:
    """Open the base of runs with these options. See ``base_model``."""
    require_shareable(options)
    storage = options.storage
    memory = MemoryPolicy(host=storage.memory, device=storage.device_memory)
    return SharedBase(base_model(options), device=storage.device, memory=memory)


_CHUNK = 1 << 20  # elements read at once


def require_finite_base(model: HFBlockModel) -> None:
    """Refuse a checkpoint with a weight that is not finite.

    Called when a loss is not finite, to find the cause.
    """
    for spec in (spec for layout in model.layouts for spec in layout.parameters):
        # encoded parameters are read whole
        length = _CHUNK if spec.encoding is None else max(spec.stored_numel, 1)
        for start in range(0, spec.stored_numel, length):
            values = torch.empty(min(length, spec.stored_numel - start), dtype=spec.stored_dtype)
            model.weights.read_into(spec.name, values, start)
            values = values if spec.encoding is None else decoded(spec, values)
            non_finite = (~values.isfinite()).nonzero()
            if len(non_finite):
                index = int(non_finite[0])
                found = f"{values[index].item()} at element {start + index}"
                remedy = "download the checkpoint again, or choose a dtype with a larger range"
                where = f"{model.weights.origin(spec.name)}: {spec.name}"
                raise CheckpointError(where, found, "finite weights in the checkpoint", remedy)
