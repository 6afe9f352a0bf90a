"""Steps by forwards alone: one sweep evaluates, one record in the journal is the step.

The weights follow when they are next visited: replaying the record is part of that visit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from zo2core.errors import OptionError, OutrunError
from zo2core.estimators import direction_seeds, learning_rate
from zo2core.journal import Journal
from zo2core.methods.open_step import OpenStep
from zo2core.profiling import Sweep
from zo2core.protocols import Forward, Objective, ZOEstimator
from zo2core.sources.base_digests import BaseDigests
from zo2core.sweep.microbatch import rows_of_group, rows_to_shard
from zo2core.sweep.objective import MicroBatches, batches_of, cut, losses_as_tensors
from zo2core.sweep.update_loss import UpdateLoss
from zo2core.sweep.visitor import Groups
from zo2core.types import Batch, Evaluation, Lane, LaneUse, RowGroup, StepResult
from zo2core.workers import Plan, Workers


class Sweeps(Protocol):
    """What a method asks of the runner that owns the parts."""

    def prepared(self, batches: Iterable[Batch], forward: Forward) -> Iterator[Batch]:
        """Batches on the device, checked by what runs them."""

    def sweep(self, groups: Groups, forward: Forward | None = None) -> list[list[torch.Tensor]]:
        """Visit all segments once; what the head gave, a list an evaluation. None runs the model itself."""

    def settle(self, step: int) -> None:
        """Bring back what stays on the device, if it has been there for long, before a step begins."""

    def ended(self, sweep: Sweep) -> Mapping[Lane, LaneUse]:
        """Record that a step ended, and return what every lane did for it."""


class ZerothOrder:
    """The zeroth-order method (MeZO, arXiv 2305.17333, Algorithm 1, for any estimator).

    Args:
        estimator: What to evaluate, and what the losses say about the weights.
        seed: Seed of the run: each step's directions depend on it and on the step only.
        sweeps: Makes the sweeps.
        model: Runs batches where a step is given no other forward.
        journal: Takes the record of each step.
        workers: Share the step.
        base_digests: What the first sweep reads of the base is noted in the journal with the first record.
        update_loss: Samples how much of an update the weights take.
        micro_batch_size: Rows of a micro-batch; None: batches run whole.
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
        self._first_version = self._version  # of this object's steps

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None, *, seed: int | None) -> StepResult:
        """Take a step on a batch. See ``ZOEngine.step``."""
        open_step = self._begin(seed)
        try:
            batches = batches_of(batch)
            is_own_shard = forward is None and not isinstance(self._model, Objective)
            groups = dict.fromkeys(evaluation.rows for evaluation in open_step.evaluations)
            if not is_own_shard and any(groups):
                raise OptionError(
                    "forward",
                    found="an objective, with a direction for each group of rows",
                    expected="the model's own loss",
                    remedy="leave it out, or evaluate every direction on all rows with MultiQueryRGE",
                )
            open_step = self._shared(open_step, batches, shards_rows=is_own_shard and not any(groups))
            way = self._model if forward is None else forward
            try:
                return self._take(*self._evaluated(open_step, batches, list(groups), way, is_own_shard=is_own_shard))
            except OutrunError:
                if not self._workers.has_deadline:
                    raise
                return self._take(open_step.without_shard(), [])  # the step went on without this worker
        finally:
            self._open_step = None

    def ask(self, *, seed: int | None) -> tuple[Evaluation, ...]:
        """Begin a step whose losses the caller makes. See ``ZOEngine.ask``."""
        self._open_step = self._shared(self._begin(seed), [], shards_rows=False)
        return self._open_step.own

    def path_to(self, at: Evaluation) -> tuple[Evaluation, ...]:
        """The evaluations that a sweep makes to run batches at one of the open step's, which comes last.

        Raises:
            OptionError: if no step was begun, the evaluation is none of its, or is for some rows only.
        """
        if at.rows is not None:
            raise OptionError(
                "estimator",
                found="a direction for each group of rows, and batches that are not shared out",
                expected="step(batch), which shares them out",
                remedy="use MultiQueryRGE where the losses are your own",
            )
        return self._require_open_step().path_to(at)

    def tell(self, losses: Iterable[float | torch.Tensor]) -> StepResult:
        """Take the step that ``ask`` began. See ``ZOEngine.tell``."""
        return self._take(self._require_open_step(), losses_as_tensors(losses))

    @property
    def _version(self) -> int:
        return len(self._journal.updates)

    def _begin(self, seed: int | None) -> OpenStep:
        """Begin a step, all of which is this worker's as yet. A step that was begun before and not taken is given up."""
        self._open_step, began, step = None, time.perf_counter(), self._version
        lr = learning_rate(self._estimator, step)
        listed = self._estimator.evaluations(step, direction_seeds(self._seed, step, seed))
        evaluations = tuple(evaluation.validated() for evaluation in listed)
        self._sweeps.settle(step)
        self._update_loss.begin(step)
        return OpenStep(step, lr, evaluations, began, Plan.alone(len(evaluations)))

    def _shared(self, open_step: OpenStep, batches: Sequence[Batch], *, shards_rows: bool) -> OpenStep:
        """Leave to other workers what is theirs of a step."""
        digest = self._workers.digest(batches) if batches else None
        plan = self._workers.plan(open_step.evaluations, rows_to_shard(batches) if shards_rows else None)
        if self._version > self._first_version and self._workers.is_decided:  # the first sweep notes what the base is
            plan = plan.without_shard()
        return open_step._replace(plan=plan, batch=digest)

    def _evaluated(
        self,
        open_step: OpenStep,
        batches: Sequence[Batch],
        groups: Sequence[RowGroup | None],
        forward: Forward,
        *,
        is_own_shard: bool,
    ) -> tuple[OpenStep, list[torch.Tensor]]:
        """Make this worker's losses in one sweep."""
        if not open_step.places:
            return open_step, []
        open_step, own = open_step.sharded(batches)
        if open_step.has_no_loss:
            if self._version == self._first_version:
                self._sweeps.sweep([])  # all the same: the first sweep notes what the base is
            return open_step, losses_as_tensors([0.0] * len(open_step.places))
        micro_batches: dict[RowGroup | None, MicroBatches] = {}
        prepared: dict[RowGroup | None, list[Batch]] = {}
        for group in groups:
            rows = own if group is None else [rows_of_group(batch, group) for batch in own]
            micro_batches[group] = cut(rows, self._micro_batch_size, None if is_own_shard else forward)
            prepared[group] = list(self._sweeps.prepared(micro_batches[group].batches, forward))
        swept = open_step.groups(lambda at: prepared[at.rows], in_place=bool(self._estimator.perturb_in_place))
        outputs = self._sweeps.sweep(swept, forward)
        losses = zip(open_step.own, outputs[len(outputs) - len(open_step.places) :], strict=True)
        return open_step, [micro_batches[at.rows].loss(outputs_of_micro_batches) for at, outputs_of_micro_batches in losses]

    def _take(self, open_step: OpenStep, losses: Sequence[torch.Tensor]) -> StepResult:
        """Take a step: gather all workers' losses, and append its record."""
        open_step.require_all(losses)
        evaluations, gathered, ranks = self._workers.gathered(
            open_step.plan,
            open_step.evaluations,
            losses,
            tokens=open_step.tokens,
            journal=self._journal,
            batch=open_step.batch,
        )
        for evaluation, loss in zip(evaluations, gathered, strict=True):
            evaluation.require_finite(loss, step=open_step.step)
        past = self._journal.updates
        update = self._estimator.update(open_step.step, evaluations, gathered, open_step.lr, past).validated()
        if ranks:
            update = replace(update, workers=ranks)
        self._base_digests.note(self._journal)
        self._journal.append(update)
        self._open_step = None
        sweep = Sweep.of_step(open_step.step, open_step.began, time.perf_counter())
        lanes = self._sweeps.ended(sweep)
        return StepResult.of(update, sweep.done - open_step.began, lanes, self._update_loss.share_applied(update))

    def _require_open_step(self) -> OpenStep:
        if self._open_step is None:
            raise OptionError("at", found="no step", expected="one that ask() began", remedy="call ask() before")
        return self._open_step
