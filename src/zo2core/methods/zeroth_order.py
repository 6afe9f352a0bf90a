"""Zeroth-order steps, which need only forwards: a step is one sweep of evaluations and one record
in the journal.

The weights change when they are next visited: that visit replays the record.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zo2core.errors import OptionError
from zo2core.estimators.perturbation import Perturbation
from zo2core.estimators.two_point import direction_seeds, learning_rate
from zo2core.methods.states import RunState
from zo2core.protocols import Forward, NoiseGenerator, ZOEstimator
from zo2core.run import Run, StepBatch
from zo2core.sweep import microbatch
from zo2core.sweep.perturbers import Groups
from zo2core.types import Batch, Evaluation, RowGroup, StepResult, Update
from zo2core.workers.workers import Split


@dataclass(frozen=True)
class ZerothOrder:
    """The zeroth-order method (MeZO, arXiv 2305.17333, Algorithm 1, for any estimator).

    Args:
        estimator: Lists the evaluations of a step, and computes its update from their losses. None
            takes no steps, and replays those of the journal.
        perturbation: ``DensePerturbation()``, the default of a new run, or
            ``LowRankPerturbation(rank=...)``. None: the journal's.
        noise: Draws z. None: the generator that the journal names, else the one that the estimator
            or the perturbation needs, else ``SequentialNoise``, which draws MeZO's numbers.
        seed: Seed of the run; the directions of a step depend only on it and on the step.

    Raises:
        OptionError: if ``estimator`` is not an estimator, or is a class.
    """

    estimator: ZOEstimator | None
    perturbation: Perturbation | None = None
    noise: NoiseGenerator | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        estimator = self.estimator
        if estimator is None or (
            not isinstance(estimator, type) and callable(getattr(estimator, "evaluations", None))
        ):
            return
        raise OptionError(
            "estimator",
            found=repr(estimator)[:80],
            expected="an estimator, such as MeZOSGD(lr=1e-6, zo_eps=1e-3)",
            remedy=(
                "pass an estimator, or Engine(model), which evaluates and exports a model without "
                "one"
            ),
        )


class OpenStep(NamedTuple):
    """A step that was started, and whose losses are not known yet."""

    step: int  # 0-based
    lr: float
    evaluations: tuple[Evaluation, ...]  # of all workers
    started: float  # ``time.perf_counter``, in seconds
    split: Split  # of the step among the workers
    indices: range  # of this worker's evaluations among all
    batch: int | None  # digest of the batch; None: it is not known

    @property
    def local(self) -> tuple[Evaluation, ...]:
        """The evaluations of this worker."""
        return self.evaluations[self.indices.start : self.indices.stop]

    def path_to(self, evaluation: Evaluation) -> tuple[Evaluation, ...]:
        """The evaluations up to this one, through which weights are perturbed in place."""
        if evaluation.rows is not None:
            raise OptionError(
                "estimator",
                found="a direction for each group of rows, and batches that are not divided into "
                "groups",
                expected="step(batch), which divides them",
                remedy="use MultiQueryRGE to compute the losses yourself",
            )
        if evaluation not in self.evaluations:
            expected = "an evaluation that ask() returned"
            raise OptionError("at", repr(evaluation), expected, "pass an evaluation of this step")
        return self.evaluations[: self.evaluations.index(evaluation) + 1]


class JournalState(RunState):
    """The state that zeroth-order steps change: the journal, from which weights are replayed."""

    refusal = (
        "a run whose state is its journal",
        "a run of first-order steps",
        "copy the journal; for other weights, begin a run of a checkpoint with them",
    )

    @property
    def version(self) -> int:
        """Number of steps in the journal."""
        return len(self._run.journal.updates)

    def commit(self, update: Update) -> None:
        """Take a step: append its record to the journal."""
        self._run.append(update)


class ZerothOrderSteps:
    """Takes zeroth-order steps, whose state is the journal."""

    def __init__(self, run: Run, estimator: ZOEstimator, seed: int, state: JournalState) -> None:
        self._run = run
        self._estimator = estimator
        self._seed = seed
        self._state = state
        self._open_step: OpenStep | None = None
        self._first_version = state.version

    def step(self, batch: StepBatch, forward: Forward | None, *, seed: int | None) -> StepResult:
        """Take a step on a batch. See ``Engine.step``."""
        self._open_step = None
        run = self._run
        batches = microbatch.batches_of(batch)
        forward, objective = microbatch.with_objective(forward, run.model)
        open_step = self._begin(seed, batches, shards_rows=objective is None)
        groups = list(dict.fromkeys(evaluation.rows for evaluation in open_step.evaluations))
        if objective is not None and any(groups):
            raise OptionError(
                "forward",
                found="an objective, with a direction for each group of rows",
                expected="the model's own loss",
                remedy="leave it out, or evaluate every direction on all rows with MultiQueryRGE",
            )
        tokens = 0  # of this worker's rows, if workers share them
        if open_step.split.parts > 1:
            batches = self._local_rows(open_step, batches)
            tokens = sum(map(microbatch.labelled_tokens, batches))
            if tokens == 0:
                return self._take(open_step, self._losses_of_no_rows(open_step))
        micro_batches = {
            group: microbatch.split_batches(
                microbatch.rows_of_groups(batches, group), run.micro_batch_size, objective
            )
            for group in groups
        }
        outputs = self._evaluate(open_step, micro_batches, forward)
        losses = [
            micro_batches[evaluation.rows].loss(of_evaluation)
            for evaluation, of_evaluation in zip(open_step.local, outputs, strict=True)
        ]
        return self._take(open_step, losses, tokens)

    def _local_rows(self, open_step: OpenStep, batches: Sequence[Batch]) -> list[Batch]:
        """This worker's rows of each batch."""
        local: list[Batch] = []
        for batch in batches:
            rows = open_step.split.rows(self._run.workers.rank, len(batch["labels"]))
            local.append(microbatch.rows_of(batch, rows.start, rows.stop))
        return local

    def _losses_of_no_rows(self, open_step: OpenStep) -> list[torch.Tensor]:
        """The losses of a worker without a labelled token."""
        if self._state.version == self._first_version:
            # the first sweep computes the base's digests
            self._run.bring_to(self._state.version)
        return microbatch.losses_as_tensors([0.0] * len(open_step.indices))

    def _evaluate(
        self,
        open_step: OpenStep,
        micro_batches: Mapping[RowGroup | None, microbatch.MicroBatches],
        forward: Forward,
    ) -> list[list[torch.Tensor]]:
        """Run this worker's evaluations in one sweep; returns the head's outputs for each.

        Where weights are perturbed in place, the sweep passes the evaluations of the workers
        before, without batches.
        """
        prepared = {
            group: list(self._run.prepared(of_group.batches, forward))
            for group, of_group in micro_batches.items()
        }
        indices = open_step.indices
        first = 0 if self._estimator.perturb_in_place else indices.start
        swept = [
            (evaluation, prepared[evaluation.rows] if number in indices else ())
            for number, evaluation in enumerate(open_step.evaluations[first : indices.stop], first)
        ]
        outputs = self._run.evaluate(self._state.version, swept, forward)
        return outputs[len(outputs) - len(indices) :]

    def ask(self, *, seed: int | None) -> tuple[Evaluation, ...]:
        """Start a step whose losses the caller computes. See ``Engine.ask``."""
        self._open_step = self._begin(seed, [], shards_rows=False)
        return self._open_step.local

    def path_through(self, groups: Groups) -> Groups:
        """The evaluations of a sweep through some of the open step's, in its order, with their
        batches.
        """
        batches = dict(groups)
        path = max(
            (
                self._require_open_step().path_to(evaluation)
                for evaluation in batches
                if evaluation is not None
            ),
            key=len,
            default=(),
        )
        passed = [
            evaluation
            for evaluation in path
            if self._estimator.perturb_in_place or evaluation in batches
        ]
        return [
            *((None, of_none) for evaluation, of_none in groups if evaluation is None),
            *((evaluation, batches.get(evaluation, ())) for evaluation in passed),
        ]

    def tell(self, losses: Iterable[float | torch.Tensor]) -> StepResult:
        """Take the step that ``ask`` began. See ``Engine.tell``."""
        return self._take(self._require_open_step(), microbatch.losses_as_tensors(losses))

    def _begin(self, seed: int | None, batches: Sequence[Batch], *, shards_rows: bool) -> OpenStep:
        """Start a step, and divide it among the workers. An open step is dropped."""
        self._open_step = None
        started = time.perf_counter()
        step = self._state.version
        workers = self._run.workers
        lr = learning_rate(self._estimator, step)
        listed = self._estimator.evaluations(step, direction_seeds(self._seed, step, seed))
        evaluations = tuple(evaluation.validated() for evaluation in listed)
        self._run.offload_kept(step)
        self._run.update_loss.begin(step)
        rows = None
        if shards_rows and not any(evaluation.rows for evaluation in evaluations):
            rows = microbatch.rows_to_shard(batches)
        digest = workers.digest(batches) if batches else None
        split = workers.split_of(len(evaluations), rows)
        return OpenStep(
            step=step,
            lr=lr,
            evaluations=evaluations,
            started=started,
            split=split,
            indices=split.evaluations(workers.rank, len(evaluations)),
            batch=digest,
        )

    def _take(
        self, open_step: OpenStep, losses: Sequence[torch.Tensor], tokens: int = 0
    ) -> StepResult:
        """Take a step: gather the losses of all workers, and append its record to the journal."""
        run = self._run
        evaluations = open_step.evaluations
        expected = len(open_step.indices)
        if len(losses) != expected:
            raise OptionError(
                "losses",
                found="1 loss" if len(losses) == 1 else f"{len(losses)} losses",
                expected=f"{expected}, one for each evaluation that ask() returned",
                remedy="pass all losses in one call, in the order of the evaluations",
            )
        context = (
            run.journal.checksum,
            [tuple(at) for at in evaluations],
            open_step.batch,
            tuple(open_step.split),
        )
        gathered = run.workers.gathered(
            open_step.split, len(evaluations), losses, tokens=tokens, context=context
        )
        for evaluation, loss in zip(evaluations, gathered, strict=True):
            evaluation.require_finite(loss, step=open_step.step)
        past = run.journal.updates
        update = self._estimator.update(
            open_step.step, evaluations, gathered, open_step.lr, past
        ).validated()
        self._state.commit(update)
        self._open_step = None
        return run.step_result(update, open_step.started)

    def _require_open_step(self) -> OpenStep:
        if self._open_step is None:
            raise OptionError(
                "at", "no open step", "a step that ask() started", "call ask() before"
            )
        return self._open_step
