"""The runner: the parts of one run, and the sweeps that methods make over its segments.

Steps change a state, which is in memory, on disk, or in the journal. ``load`` sets values of it,
``snapshot`` returns all on which later steps depend, and ``restore`` continues from that. A kind of
steps that cannot do one of these refuses it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeAlias

import torch

from zo2core.errors import JournalError, OptionError
from zo2core.estimators.factors import FactorStore
from zo2core.estimators.perturbation import Perturbation, StackedModel
from zo2core.journal.journal import Journal
from zo2core.journal.snapshots import Snapshot, Snapshots
from zo2core.kernels.programs import Trajectory
from zo2core.optimizers.states import form_of, require_finite, unusable_state
from zo2core.planning.memory import MemoryPolicy, Replay, RunSpec
from zo2core.planning.speeds import WriteBackPolicy
from zo2core.profiling import Sweep, Timeline, Trace, TraceRecorder
from zo2core.protocols import (
    BlockModel,
    BlockSource,
    CounterNoise,
    Device,
    Forward,
    NoiseGenerator,
    Scheduler,
    ZOEstimator,
)
from zo2core.shared import SharedBase
from zo2core.sources.segment_store import BaseDigests
from zo2core.sources.slot_file import Generations
from zo2core.sweep.activations import StreamActivations
from zo2core.sweep.gradient_visitor import GradientVisitor, StoredParameters, TrainedParameters
from zo2core.sweep.microbatch import grouped
from zo2core.sweep.perturbers import (
    CounterPerturber,
    DrawnPerturber,
    FactorPerturber,
    Groups,
    Perturber,
    WorkBuffer,
)
from zo2core.sweep.visitor import ExclusiveUse, SegmentVisitor, UpdateLoss, Visits, watched
from zo2core.types import (
    Batch,
    BlockLayout,
    Commit,
    Evaluation,
    ParameterSpec,
    StepResult,
    Update,
    require_tensors,
)
from zo2core.workers.agreement import sync_snapshots
from zo2core.workers.workers import Workers

Trained: TypeAlias = TrainedParameters | StoredParameters
StepBatch: TypeAlias = Batch | Sequence[Batch]  # of a step: one, or several that count as one


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of ``Engine``, which describes them."""

    journal: Journal | Path | str | None = None
    run: Path | str | None = None
    provenance: Mapping[str, Any] | None = None
    device: Device | str = "cpu"
    memory: MemoryPolicy = MemoryPolicy()  # noqa: RUF009 - frozen
    write_back: WriteBackPolicy | None = None
    commit_every: int | None = None
    micro_batch_size: int | None = None
    overlap: bool = True
    replay: Replay = "auto"
    trace: Trace | Path | str | None = None
    spill: Path | str | None = None
    workers: Workers | None = None
    shared: SharedBase | None = None
    source: BlockSource | None = None
    scheduler: Scheduler | None = None
    timeline: Timeline | None = None


class Runner:
    """The parts of one run, which ``build`` opens one after the other.

    It knows no method: a method makes sweeps with it.
    """

    recorder: TraceRecorder
    journal: Journal
    is_kept: bool  # whether steps are recorded in the journal
    workers: Workers
    device: Device
    # its ``perturb_in_place`` is not None; None for a run without zeroth-order steps
    estimator: ZOEstimator | None
    perturbation: Perturbation
    noise: NoiseGenerator
    factors: FactorStore | None = None  # of low-rank perturbations; None for dense ones
    update_loss: UpdateLoss

    # Where segments and activations are: planned, passed by the caller, or shared with other runs.
    spec: RunSpec | None = None  # None if the caller passed the source, or it is shared
    source: BlockSource | None = None  # None if it is shared with other runs
    scheduler: Scheduler
    base_digests: BaseDigests  # empty if the caller passed the source
    generations: Generations | None = None  # segments on disk that change at each step
    activations: StreamActivations
    activation_bytes: int  # for activations in the memory in which forwards run
    spare_bytes: Callable[[], int]  # further bytes there that the present plan leaves over
    work_buffer: WorkBuffer
    helper: ThreadPoolExecutor | None = None  # a second thread that perturbs, on the CPU
    visits: Visits  # makes the visitors of sweeps that run the present or perturbed weights
    trained: Trained | None  # by first-order steps; None: weights are the journal's

    def __init__(self, model: BlockModel, options: RunOptions, opened: ExitStack) -> None:
        self.model, self.options = model, options
        self.opened = opened  # closes what was opened for the run, and nothing of the caller's
        self.use = ExclusiveUse("Engine")
        # called after each visit, with the visits so far and of all
        self.watch: Callable[[int, int], object] | None = None
        # version at which the blocks that stay on the device were last offloaded
        self._offloaded = 0

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """The segments as they are stored."""
        return self.model.layouts if self.spec is None else self.spec.layouts

    @property
    def perturb_in_place(self) -> bool:
        """Whether weights are perturbed in place from one evaluation to the next."""
        return self.estimator is not None and bool(self.estimator.perturb_in_place)

    @property
    def write_back_every(self) -> int | None:
        """Versions that a segment may be ahead of its bytes on disk; None: segments are never
        written.
        """
        return None if self.source is None else self.source.write_back_every

    @property
    def waiting_bytes(self) -> int:
        """Host memory for inputs that have no room where forwards run, on a device with its own
        memory.
        """
        return (
            sys.maxsize
            if self.spec is None
            else self.spec.waiting_bytes + max(self.spec.host_plan.spare, 0)
        )

    @property
    def host_limit(self) -> int | None:
        """Resident bytes that the process may have; None where the plan does not say."""
        plan = None if self.spec is None else self.spec.host_plan
        return plan.budget if plan is not None and plan.parts and self.device.in_place else None

    def prepared(self, batches: Iterable[Batch], forward: Forward) -> Iterator[Batch]:
        """Yield the batches on the device, checked by their forward."""
        for batch in batches:
            require_tensors(batch)
            yield forward.prepared(
                {key: value.to(self.device.torch_device) for key, value in batch.items()}
            )

    def filled(self, batches: Iterable[Batch], forward: Forward) -> Iterator[list[Batch]]:
        """Prepare batches, and group them by sweep, as memory for activations allows."""
        self.use.require_open()
        prepared = self.prepared(batches, forward)
        for group, *_ in grouped(
            prepared, forward, lambda held, running: held + running <= self.activation_bytes
        ):
            self.use.require_open()
            yield group

    def sweep(self, version: int, groups: Groups, forward: Forward) -> list[list[torch.Tensor]]:
        """Visit all segments once; returns the head's outputs, one list for each evaluation."""
        with self.use.locked():
            return self._run(
                SegmentVisitor(self.visits, version, groups, forward), range(len(self.layouts))
            )

    def run(
        self, visitor: SegmentVisitor | GradientVisitor, order: Sequence[int]
    ) -> list[list[torch.Tensor]]:
        """Visit segments in an order, in which a block may occur more than once, by a method's own
        visitor.
        """
        with self.use.locked():
            return self._run(visitor, order)

    def _run(
        self, visitor: SegmentVisitor | GradientVisitor, order: Sequence[int]
    ) -> list[list[torch.Tensor]]:
        try:
            visit = (
                visitor.visit
                if self.watch is None
                else watched(visitor.visit, len(order), self.watch)
            )
            self.scheduler.sweep(visit, order)
        except BaseException:
            self.recorder.flush()  # its transfers do not count for the next step
            raise
        finally:
            visitor.finish()
            self.noise.retain(visitor.seeds)
        return visitor.outputs

    def perturber(self, version: int, evaluations: Sequence[Evaluation | None]) -> Perturber:
        """Make what brings weights to a version and perturbs them in one sweep, by where what is
        trained is.
        """
        model, noise, buffer = self.model, self.noise, self.work_buffer
        if self.trained is not None:
            self.trained.begin_sweep()
            return self.trained
        zo_eps = 1.0 if self.estimator is None else self.estimator.zo_eps
        in_place = self.estimator is None or self.perturb_in_place
        trajectory = Trajectory(self.journal.updates, version, evaluations, zo_eps, in_place)
        if self.factors is not None:
            assert isinstance(model, StackedModel), "other models were refused"
            return FactorPerturber(model, self.factors, buffer, self.helper, trajectory)
        if isinstance(noise, CounterNoise):
            return CounterPerturber(noise, buffer, self.helper, trajectory)
        return DrawnPerturber(noise, buffer, self.helper, trajectory)

    def parameters_at(
        self, version: int, segments: Iterable[int]
    ) -> Generator[tuple[ParameterSpec, torch.Tensor], None, None]:
        """Bring segments to a version, and yield their parameters with their bytes on the host."""
        self.use.require_open()
        with self.use.locked():
            visitor = SegmentVisitor(self.visits, version, [], self.model)
            try:
                for index in segments:
                    with self.scheduler.replayed(visitor.replay, index) as bucket:
                        parameters = self.model.layouts[index].parameters
                        yield from zip(parameters, bucket.views[: len(parameters)], strict=True)
            finally:
                self.noise.retain(visitor.seeds)
                self.recorder.flush()

    def append(self, record: Update | Commit) -> None:
        """Append a step's record to the journal, after the base's digests."""
        self.base_digests.note(self.journal)
        self.journal.append(record)

    def step_result(self, record: Update | Commit, started: float) -> StepResult:
        """The result of a step that began at a time of ``time.perf_counter``, and has ended."""
        sweep = Sweep.of_step(record.step, started, time.perf_counter())
        lanes, seconds = self.recorder.ended(sweep), sweep.done - started
        if isinstance(record, Commit):
            loss, norm = record.loss, record.grad_norm
            return StepResult(
                record.step, loss, (loss,), (), (), record.lr, seconds, lanes, grad_norm=norm
            )
        losses, grads, seeds = record.losses, record.projected_grads, record.seeds
        share = self.update_loss.share_applied(record)
        return StepResult(
            record.step, losses[0], losses, grads, seeds, record.lr, seconds, lanes, share
        )

    def offload_kept(self, step: int) -> None:
        """Offload blocks that stay on the device, if they are due to be written back, before a
        step.
        """
        if self.write_back_every is not None and step > self._offloaded + self.write_back_every:
            with self.use.locked():
                self.scheduler.release_all()
            self._offloaded = step - 1

    def close(self) -> None:
        """Stop all work, and close everything that was opened. May be called twice."""
        self.use.close()
        self.opened.close()


def lacking(asked: str, part: str, expected: str) -> OptionError:
    """The error for an operation that needs a part which an engine does not have."""
    return OptionError(asked, f"an engine without {part}", expected, "pass it to the engine")


class Steps:
    """Takes the steps of a run, and has the state that they change: by default a journal, whose
    steps are replayed.
    """

    # Found, expected and remedy of the error for what its state does not support.
    refusal: ClassVar[tuple[str, str, str]] = (
        "a run whose state is its journal",
        "a run of first-order steps",
        "copy the journal; for other weights, begin a run of a checkpoint with them",
    )
    snapshots: Snapshots | None = None  # of first-order steps that are kept

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def version(self) -> int:
        """Number of steps taken."""
        return len(self._runner.journal.updates)

    def step(self, batch: StepBatch, forward: Forward | None, *, seed: int | None) -> StepResult:
        """Take a step. See ``Engine.step``."""
        raise lacking("step", "a method", "ZerothOrder or FirstOrder")

    def load(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of the trained parameters."""
        self.refuse("load_parameters")

    def snapshot(self) -> dict[str, Any]:
        """All on which later steps depend."""
        self.refuse("state_dict")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a snapshot."""
        self.refuse("load_state_dict")

    def refuse(self, asked: str) -> NoReturn:
        """Raise an error for an operation that this kind of state does not support."""
        found, expected, remedy = self.refusal
        raise OptionError(asked, found, expected, remedy)

    def require_snapshots(self, asked: str) -> Snapshots:
        """The snapshots of a run that is kept."""
        if self.snapshots is None:
            raise lacking(
                asked, "snapshots", "FirstOrder(...) with run=..., and without commit_every"
            )
        return self.snapshots

    def take_snapshot(self, keep: Collection[int]) -> None:
        """Write a snapshot of the present step durably, and delete all older ones but the newest of
        them.
        """
        snapshots, workers = self.require_snapshots("take_snapshot"), self._runner.workers
        state = self.snapshot()
        workers.require_same("trained parameters", workers.digest([state["parameters"]]))
        snapshots.write(Snapshot(self.version, state), keep=keep)


class TrainedSteps(Steps):
    """First-order steps, and the parameters that they train.

    A step that was lost with its process is repeated.
    """

    refusal = (
        "an engine that takes no steps",
        "FirstOrder(optimizer)",
        "pass a method to the engine",
    )
    version = 0

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        assert runner.trained is not None, "it was built"
        self.trained: Trained = runner.trained

    def resume(self, directory: Path) -> None:
        """Keep snapshots in the directory of a run, and continue from the newest."""
        journal = self._runner.journal
        self.snapshots = Snapshots(directory, journal.chain, journal.require_version)
        self.snapshots.clear_partial()
        newest = sync_snapshots(self.snapshots, self._runner.workers)
        if newest is not None:
            self.restore(newest.state)

    def record(self, commit: Commit) -> None:
        """Record a step in the journal, or compare a repeated step with its record."""
        runner, journal = self._runner, self._runner.journal
        if not runner.is_kept:
            return
        if commit.step == journal.version:
            runner.append(commit)
        elif (recorded := journal.commits[commit.step]) != commit:
            raise JournalError(
                f"{journal.name}, step {commit.step}",
                found=f"loss {commit.loss!r}, gradient norm {commit.grad_norm!r} and lr "
                f"{commit.lr!r} in the repeated step",
                expected=f"loss {recorded.loss!r}, gradient norm {recorded.grad_norm!r} and lr "
                f"{recorded.lr!r}, as before",
                remedy="resume with the same machine, torch, transformers and number of threads",
            )

    def load(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of the trained parameters."""
        self.require(parameters)
        self.trained.load(parameters, lambda: self._runner.sweep(0, [], self._runner.model))

    def require(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse values of other parameters than the trained ones, and values that are not
        finite.
        """
        if not isinstance(parameters, Mapping):
            raise unusable_state(f"a {type(parameters).__name__} as parameters")
        forms = dict(self.trained.forms)
        if {name: form_of(value) for name, value in parameters.items()} != forms:
            raise unusable_state(
                f"{len(parameters)} parameters that are not all of the {len(forms)} trained ones"
            )
        for name, value in parameters.items():
            require_finite(name, value)
