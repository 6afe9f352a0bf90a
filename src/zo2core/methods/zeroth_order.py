"""Zeroth-order steps, which need only forwards: a step is one sweep of evaluations and one record in the journal.

The weights change when they are next visited: that visit replays the record.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from zo2core.errors import OptionError
from zo2core.estimators import direction_seeds, learning_rate
from zo2core.journal import Journal
from zo2core.methods.open_step import OpenStep
from zo2core.profiling import Sweep
from zo2core.protocols import Forward, Objective, ZOEstimator
from zo2core.sources.base_digests import BaseDigests
from zo2core.sweep.microbatch import rows_of_group, rows_to_shard
from zo2core.sweep.objective import MicroBatches, batches_of, losses_as_tensors, split_batches
from zo2core.sweep.update_loss import UpdateLoss
from zo2core.sweep.visitor import Groups
from zo2core.types import Batch, Evaluation, Lane, LaneUse, RowGroup, StepResult
from zo2core.workers import Plan, Workers


class Sweeps(Protocol):
    """The methods of the runner that the zeroth-order method calls."""

    def prepared(self, batches: Iterable[Batch], forward: Forward) -> Iterator[Batch]:
        """Yield the batches on the device, checked by their forward."""

    def sweep(self, groups: Groups, forward: Forward | None = None) -> list[list[torch.Tensor]]:
        """Visit all segments once, and return the head's outputs, one list for each evaluation. None runs the model."""

    def offload_kept(self, step: int) -> None:
        """Offload blocks that stay on the device, if their bytes on disk are many versions behind, before a step."""

    def ended(self, sweep: Sweep) -> Mapping[Lane, LaneUse]:
        """Record that a step ended, and return the use of each lane in it."""


class ZerothOrder:
    """The zeroth-order method (MeZO, arXiv 2305.17333, Algorithm 1, for any estimator).

    Args:
        estimator: Lists the evaluations of a step, and computes its update from their losses.
        seed: Seed of the run; the directions of a step depend only on it and on the step.
        sweeps: Runs the sweeps.
        model: The default forward of a step.
        journal: Receives the record of each step.
        workers: Workers that share the steps.
        base_digests: Digests of the base, which are recorded in the journal with the first step.
        update_loss: Measures the share of weights that an update changes.
        micro_batch_size: Rows of a micro-batch; None does not split batches.
    """

    def __init__(
        self,
        estimator: ZOEstimator,
        *,
        seed: int,
        sweeps: Sweeps,
        model: Forward,
        journal: Journal,
        workers: Workers,
        base_digests: BaseDigests,
        update_loss: UpdateLoss,
        micro_batch_size: int | None,
    ) -> None:
        self._estimator = estimator
        self._seed = seed
        self._sweeps = sweeps
        self._model = model
        self._journal = journal
        self._workers = workers
        self._base_digests = base_digests
        self._update_loss = update_loss
        self._micro_batch_size = micro_batch_size
        self._open_step: OpenStep | None = None
        self._first_version = self._version

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None, *, seed: int | None) -> StepResult:
        """Take a step on a batch. See ``ZOEngine.step``."""
        open_step = self._begin(seed)
        try:
            batches = batches_of(batch)
            is_model_loss = forward is None and not isinstance(self._model, Objective)
            groups = dict.fromkeys(evaluation.rows for evaluation in open_step.evaluations)
            if not is_model_loss and any(groups):
                raise OptionError(
                    "forward",
                    found="an objective, with a direction for each group of rows",
                    expected="the model's own loss",
                    remedy="leave it out, or evaluate every direction on all rows with MultiQueryRGE",
                )
            open_step = self._planned(open_step, batches, shards_rows=is_model_loss and not any(groups))
            forward = self._model if forward is None else forward
            return self._take(*self._evaluated(open_step, batches, list(groups), forward, is_model_loss=is_model_loss))
        finally:
            self._open_step = None

    def ask(self, *, seed: int | None) -> tuple[Evaluation, ...]:
        """Start a step whose losses the caller computes. See ``ZOEngine.ask``."""
        self._open_step = self._planned(self._begin(seed), [], shards_rows=False)
        return self._open_step.local

    def path_to(self, at: Evaluation) -> tuple[Evaluation, ...]:
        """Return the evaluations of a sweep that runs batches at one of the open step's evaluations, which comes last.

        Raises:
            OptionError: if no step is open, the evaluation is not part of it, or is for a group of rows only.
        """
        if at.rows is not None:
            raise OptionError(
                "estimator",
                found="a direction for each group of rows, and batches that are not divided into groups",
                expected="step(batch), which divides them",
                remedy="use MultiQueryRGE to compute the losses yourself",
            )
        return self._require_open_step().path_to(at)

    def path_through(
        self, asked: Sequence[Evaluation], batches: Mapping[Evaluation | None, Sequence[Batch]]
    ) -> list[tuple[Evaluation | None, Sequence[Batch]]]:
        """Return the evaluations of a sweep through several of the open step's, in their order, with their batches.

        Raises:
            OptionError: as ``path_to`` does.
        """
        path = max((self.path_to(at) for at in asked), key=len, default=())
        return [(at, batches.get(at, ())) for at in path if self._estimator.perturb_in_place or at in batches]

    def tell(self, losses: Iterable[float | torch.Tensor]) -> StepResult:
        """Take the step that ``ask`` began. See ``ZOEngine.tell``."""
        return self._take(self._require_open_step(), losses_as_tensors(losses))

    @property
    def _version(self) -> int:
        return len(self._journal.updates)

    def _begin(self, seed: int | None) -> OpenStep:
        """Start a step, with all evaluations on this worker. An open step is dropped."""
        self._open_step, started, step = None, time.perf_counter(), self._version
        lr = learning_rate(self._estimator, step)
        listed = self._estimator.evaluations(step, direction_seeds(self._seed, step, seed))
        evaluations = tuple(evaluation.validated() for evaluation in listed)
        self._sweeps.offload_kept(step)
        self._update_loss.begin(step)
        return OpenStep(step, lr, evaluations, started, Plan.alone(len(evaluations)))

    def _planned(self, open_step: OpenStep, batches: Sequence[Batch], *, shards_rows: bool) -> OpenStep:
        """Shard a step among the workers."""
        digest = self._workers.digest(batches) if batches else None
        plan = self._workers.plan(open_step.evaluations, rows_to_shard(batches) if shards_rows else None)
        return open_step._replace(plan=plan, batch=digest)

    def _evaluated(
        self,
        open_step: OpenStep,
        batches: Sequence[Batch],
        groups: Sequence[RowGroup | None],
        forward: Forward,
        *,
        is_model_loss: bool,
    ) -> tuple[OpenStep, list[torch.Tensor]]:
        """Compute this worker's losses in one sweep."""
        open_step, local_batches = open_step.sharded(batches)
        if open_step.has_no_loss:
            if self._version == self._first_version:
                self._sweeps.sweep([])  # the first sweep computes the base's digests
            return open_step, losses_as_tensors([0.0] * len(open_step.indices))
        micro_batches: dict[RowGroup | None, MicroBatches] = {}
        prepared: dict[RowGroup | None, list[Batch]] = {}
        for group in groups:
            rows = local_batches if group is None else [rows_of_group(batch, group) for batch in local_batches]
            micro_batches[group] = split_batches(rows, self._micro_batch_size, None if is_model_loss else forward)
            prepared[group] = list(self._sweeps.prepared(micro_batches[group].batches, forward))
        in_place = bool(self._estimator.perturb_in_place)
        swept = open_step.groups(lambda evaluation: prepared[evaluation.rows], in_place=in_place)
        outputs = self._sweeps.sweep(swept, forward)
        local = zip(open_step.local, outputs[len(outputs) - len(open_step.indices) :], strict=True)
        return open_step, [micro_batches[evaluation.rows].loss(of_evaluation) for evaluation, of_evaluation in local]

    def _take(self, open_step: OpenStep, losses: Sequence[torch.Tensor]) -> StepResult:
        """Take a step: gather the losses of all workers, and append its record to the journal."""
        open_step.require_all(losses)
        evaluations = open_step.evaluations
        gathered = self._workers.gathered(
            open_step.plan,
            evaluations,
            losses,
            tokens=open_step.tokens,
            journal=self._journal.checksum,
            batch=open_step.batch,
        )
        for evaluation, loss in zip(evaluations, gathered, strict=True):
            evaluation.require_finite(loss, step=open_step.step)
        past = self._journal.updates
        update = self._estimator.update(open_step.step, evaluations, gathered, open_step.lr, past).validated()
        self._base_digests.note(self._journal)
        self._journal.append(update)
        self._open_step = None
        sweep = Sweep.of_step(open_step.step, open_step.started, time.perf_counter())
        lanes = self._sweeps.ended(sweep)
        return StepResult.of(update, sweep.done - open_step.started, lanes, self._update_loss.share_applied(update))

    def _require_open_step(self) -> OpenStep:
        if self._open_step is None:
            raise OptionError("at", found="no open step", expected="a step that ask() started", remedy="call ask() before")
        return self._open_step
