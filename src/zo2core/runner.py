"""The runner: the parts of one run, and the sweeps that methods make over its segments."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing

import torch

from zo2core.factors import FactorStore
from zo2core.journal import Journal
from zo2core.perturbation import Perturbation
from zo2core.planning.run_spec import RunSpec
from zo2core.profiling import Sweep, TraceRecorder
from zo2core.protocols import BlockModel, BlockSource, Device, Forward, NoiseGenerator, Scheduler, ZOEstimator
from zo2core.sources.loader import BaseDigests
from zo2core.sources.slot_file import Generations
from zo2core.sweep.activations import StreamActivations
from zo2core.sweep.exclusive_use import ExclusiveUse
from zo2core.sweep.gradient_visitor import GradientVisitor
from zo2core.sweep.microbatch import grouped
from zo2core.sweep.trained import StoredParameters, TrainedParameters
from zo2core.sweep.visitor import Groups, SegmentVisitor, UpdateLoss, Visits, WatchedVisitor
from zo2core.sweep.work_buffer import WorkBuffer
from zo2core.types import Batch, BlockLayout, Commit, ParameterSpec, StepResult, Update, require_tensors
from zo2core.workers import Workers


class Runner:
    """The parts of one run, which ``build`` opens one after the other. It knows no method: a method makes sweeps with it."""

    recorder: TraceRecorder
    journal: Journal
    is_kept: bool  # whether steps are recorded in the journal
    workers: Workers
    device: Device
    estimator: ZOEstimator | None  # its ``perturb_in_place`` is not None; None for a run without zeroth-order steps
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
    visits: Visits  # makes the visitors of sweeps that run the present or perturbed weights
    trained: TrainedParameters | StoredParameters | None  # by first-order steps; None: weights are the journal's

    def __init__(self, model: BlockModel, opened: ExitStack, *, micro_batch_size: int | None) -> None:
        self.model = model
        self.opened = opened  # closes what was opened for the run, and nothing of the caller's
        self.micro_batch_size = micro_batch_size  # rows; None does not split batches
        self.use = ExclusiveUse("Engine")
        self.watch: Callable[[int, int], object] | None = None  # called after each visit, with the visits so far and of all
        self._offloaded = 0  # version at which the blocks that stay on the device were last offloaded

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
        """Versions that a segment may be ahead of its bytes on disk; None: segments are never written."""
        return None if self.source is None else self.source.write_back_every

    @property
    def waiting_bytes(self) -> int:
        """Host memory for inputs that have no room where forwards run, on a device with its own memory."""
        return sys.maxsize if self.spec is None else self.spec.waiting_bytes + max(self.spec.host_plan.spare, 0)

    @property
    def host_limit(self) -> int | None:
        """Resident bytes that the process may have; None where the plan does not say."""
        plan = None if self.spec is None else self.spec.host_plan
        return plan.budget if plan is not None and plan.parts and self.device.in_place else None

    def prepared(self, batches: Iterable[Batch], forward: Forward) -> Iterator[Batch]:
        """Yield the batches on the device, checked by their forward."""
        for batch in batches:
            require_tensors(batch)
            yield forward.prepared({key: value.to(self.device.torch_device) for key, value in batch.items()})

    def filled(self, batches: Iterable[Batch], forward: Forward) -> Iterator[list[Batch]]:
        """Prepare batches, and group them by sweep, as memory for activations allows."""
        self.use.require_open()
        prepared = self.prepared(batches, forward)
        for group, *_ in grouped(prepared, forward, lambda held, running: held + running <= self.activation_bytes):
            self.use.require_open()
            yield group

    def sweep(self, version: int, groups: Groups, forward: Forward) -> list[list[torch.Tensor]]:
        """Visit all segments once; returns the head's outputs, one list for each evaluation."""
        with self.use.locked():
            return self._run(SegmentVisitor(self.visits, version, groups, forward), range(len(self.layouts)))

    def run(self, visitor: SegmentVisitor | GradientVisitor, order: Sequence[int]) -> list[list[torch.Tensor]]:
        """Visit segments in an order, in which a block may occur more than once, by a method's own visitor."""
        with self.use.locked():
            return self._run(visitor, order)

    def _run(self, visitor: SegmentVisitor | GradientVisitor, order: Sequence[int]) -> list[list[torch.Tensor]]:
        try:
            watched = visitor if self.watch is None else WatchedVisitor(visitor, len(order), self.watch)
            self.scheduler.sweep(watched, order)
        except BaseException:
            self.recorder.flush()  # its transfers do not count for the next step
            raise
        finally:
            visitor.finish()
            self.noise.retain(visitor.seeds)
        return visitor.outputs

    def parameters_at(
        self, version: int, segments: Iterable[int]
    ) -> Generator[tuple[ParameterSpec, torch.Tensor], None, None]:
        """Bring segments to a version, and yield their parameters with their bytes on the host."""
        self.use.require_open()
        with self.use.locked():
            visitor = SegmentVisitor(self.visits, version, [], self.model)
            try:
                for index in segments:
                    with self.scheduler.replayed(visitor, index) as bucket:
                        parameters = self.model.layouts[index].parameters
                        yield from zip(parameters, bucket.views[: len(parameters)], strict=True)
            finally:
                self.noise.retain(visitor.seeds)
                self.recorder.flush()

    def step_result(self, record: Update | Commit, started: float) -> StepResult:
        """The result of a step that began at a time of ``time.perf_counter``, and has ended."""
        sweep = Sweep.of_step(record.step, started, time.perf_counter())
        lanes, seconds = self.recorder.ended(sweep), sweep.done - started
        if isinstance(record, Commit):
            loss, norm = record.loss, record.grad_norm
            return StepResult(record.step, loss, (loss,), (), (), record.lr, seconds, lanes, grad_norm=norm)
        losses, grads, seeds = record.losses, record.projected_grads, record.seeds
        share = self.update_loss.share_applied(record)
        return StepResult(record.step, losses[0], losses, grads, seeds, record.lr, seconds, lanes, share)

    def offload_kept(self, step: int) -> None:
        """Offload blocks that stay on the device, if they are due to be written back, before a step."""
        if self.write_back_every is not None and step > self._offloaded + self.write_back_every:
            with self.use.locked():
                self.scheduler.release_all()
            self._offloaded = step - 1

    def close(self) -> None:
        """Stop all work, and close everything that was opened. May be called twice."""
        self.use.close()
        self.opened.close()


def counted(
    tensors: Generator[tuple[str, torch.Tensor], None, None], progress: Callable[[int], object] | None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the same tensors, and report the bytes of each once the next is asked for."""
    with closing(tensors):
        for name, tensor in tensors:
            yield name, tensor
            if progress is not None:
                progress(tensor.nbytes)
