"""Zeroth-order steps, which need only forwards: a step is one sweep of evaluations and one record
in the journal.

The weights change when they are next visited: that visit replays the record.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zo2core.errors import OptionError
from zo2core.estimators.perturbation import Perturbation
from zo2core.estimators.two_point import direction_seeds, learning_rate
from zo2core.protocols import Forward, NoiseGenerator, ZOEstimator
from zo2core.runner import Runner, StepBatch, Steps
from zo2core.sweep import microbatch
from zo2core.sweep.perturbers import Groups
from zo2core.types import Batch, Evaluation, RowGroup, StepResult
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

    def path_to(self, at: Evaluation) -> tuple[Evaluation, ...]:
        """The evaluations up to this one, through which weights are perturbed in place."""
        if at.rows is not None:
            raise OptionError(
                "estimator",
                found="a direction for each group of rows, and batches that are not divided into "
                "groups",
                expected="step(batch), which divides them",
                remedy="use MultiQueryRGE to compute the losses yourself",
            )
        if at not in self.evaluations:
            expected = "an evaluation that ask() returned"
            raise OptionError("at", repr(at), expected, "pass an evaluation of this step")
        return self.evaluations[: self.evaluations.index(at) + 1]


class ZerothOrderSteps(Steps):
    """Takes zeroth-order steps, whose state is the journal."""

    def __init__(self, runner: Runner, estimator: ZOEstimator, seed: int) -> None:
        super().__init__(runner)
        self._estimator, self._seed = estimator, seed
        self._open_step: OpenStep | None = None
        self._first_version = self.version

    def step(self, batch: StepBatch, forward: Forward | None, *, seed: int | None) -> StepResult:
        """Take a step on a batch. See ``Engine.step``."""
        self._open_step = None
        runner, batches = self._runner, microbatch.batches_of(batch)
        run, objective = microbatch.with_objective(forward, runner.model)
        open_step = self._begin(seed, batches, shards_rows=objective is None)
        indices = open_step.indices
        groups = list(dict.fromkeys(evaluation.rows for evaluation in open_step.evaluations))
        if objective is not None and any(groups):
            raise OptionError(
                "forward",
                found="an objective, with a direction for each group of rows",
                expected="the model's own loss",
                remedy="leave it out, or evaluate every direction on all rows with MultiQueryRGE",
            )
        tokens = 0
        if open_step.split.parts > 1:
            slices = [
                open_step.split.rows(runner.workers.rank, len(batch["labels"])) for batch in batches
            ]
            batches = [
                microbatch.rows_of(batch, rows.start, rows.stop)
                for batch, rows in zip(batches, slices, strict=True)
            ]
            tokens = sum(map(microbatch.labelled_tokens, batches))
            if tokens == 0:
                if self.version == self._first_version:
                    # the first sweep computes the base's digests
                    runner.sweep(self.version, [], runner.model)
                return self._take(open_step, microbatch.losses_as_tensors([0.0] * len(indices)))
        micro_batches: dict[RowGroup | None, microbatch.MicroBatches] = {}
        prepared: dict[RowGroup | None, list[Batch]] = {}
        for group in groups:
            rows = (
                batches
                if group is None
                else [microbatch.rows_of_group(batch, group) for batch in batches]
            )
            micro_batches[group] = microbatch.split_batches(
                rows, runner.options.micro_batch_size, objective
            )
            prepared[group] = list(runner.prepared(micro_batches[group].batches, run))
        # Where weights are perturbed in place, the sweep passes the evaluations of the workers
        # before, without batches.
        first = 0 if self._estimator.perturb_in_place else indices.start
        swept = [
            (at, prepared[at.rows] if index in indices else ())
            for index, at in enumerate(open_step.evaluations[first : indices.stop], first)
        ]
        outputs = runner.sweep(self.version, swept, run)
        local = zip(open_step.local, outputs[len(outputs) - len(indices) :], strict=True)
        losses = [
            micro_batches[evaluation.rows].loss(of_evaluation)
            for evaluation, of_evaluation in local
        ]
        return self._take(open_step, losses, tokens)

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
            (self._require_open_step().path_to(at) for at in batches if at is not None),
            key=len,
            default=(),
        )
        passed = [at for at in path if self._estimator.perturb_in_place or at in batches]
        return [
            *((None, of_none) for at, of_none in groups if at is None),
            *((at, batches.get(at, ())) for at in passed),
        ]

    def tell(self, losses: Iterable[float | torch.Tensor]) -> StepResult:
        """Take the step that ``ask`` began. See ``Engine.tell``."""
        return self._take(self._require_open_step(), microbatch.losses_as_tensors(losses))

    def _begin(self, seed: int | None, batches: Sequence[Batch], *, shards_rows: bool) -> OpenStep:
        """Start a step, and divide it among the workers. An open step is dropped."""
        self._open_step, started, step = None, time.perf_counter(), self.version
        lr, workers = learning_rate(self._estimator, step), self._runner.workers
        listed = self._estimator.evaluations(step, direction_seeds(self._seed, step, seed))
        evaluations = tuple(evaluation.validated() for evaluation in listed)
        self._runner.offload_kept(step)
        self._runner.update_loss.begin(step)
        shards_rows = shards_rows and not any(evaluation.rows for evaluation in evaluations)
        digest = workers.digest(batches) if batches else None
        split = workers.split_of(
            len(evaluations), microbatch.rows_to_shard(batches) if shards_rows else None
        )
        return OpenStep(
            step,
            lr,
            evaluations,
            started,
            split,
            split.evaluations(workers.rank, len(evaluations)),
            digest,
        )

    def _take(
        self, open_step: OpenStep, losses: Sequence[torch.Tensor], tokens: int = 0
    ) -> StepResult:
        """Take a step: gather the losses of all workers, and append its record to the journal."""
        runner, evaluations, expected = self._runner, open_step.evaluations, len(open_step.indices)
        if len(losses) != expected:
            raise OptionError(
                "losses",
                found="1 loss" if len(losses) == 1 else f"{len(losses)} losses",
                expected=f"{expected}, one for each evaluation that ask() returned",
                remedy="pass all losses in one call, in the order of the evaluations",
            )
        context = (
            runner.journal.checksum,
            [tuple(at) for at in evaluations],
            open_step.batch,
            tuple(open_step.split),
        )
        gathered = runner.workers.gathered(
            open_step.split, len(evaluations), losses, tokens=tokens, context=context
        )
        for evaluation, loss in zip(evaluations, gathered, strict=True):
            evaluation.require_finite(loss, step=open_step.step)
        past = runner.journal.updates
        update = self._estimator.update(
            open_step.step, evaluations, gathered, open_step.lr, past
        ).validated()
        runner.append(update)
        self._open_step = None
        return runner.step_result(update, open_step.started)

    def _require_open_step(self) -> OpenStep:
        if self._open_step is None:
            raise OptionError(
                "at", "no open step", "a step that ask() started", "call ask() before"
            )
        return self._open_step
