"""The engine: a replayer that takes zeroth-order steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from zo2core.beside import Perturbation
from zo2core.build import adopt, build
from zo2core.engine.replayer import Replayer
from zo2core.errors import OptionError, OutrunError
from zo2core.estimators import direction_seeds, groups_of_rows, learning_rate
from zo2core.journal import Journal
from zo2core.planning import ACTIVATIONS, MemoryPolicy, Replay, WriteBackPolicy
from zo2core.profiling import Sweep, Timeline, Trace
from zo2core.protocols import BlockModel, BlockSource, Device, Forward, NoiseGenerator, Objective, Scheduler, ZOEstimator
from zo2core.sweep.microbatch import deal_rows, require_tensors, rows_to_deal
from zo2core.sweep.objective import batches_of, cut, losses_as_tensors, require_number
from zo2core.sweep.open_step import OpenStep
from zo2core.types import Batch, Evaluation, StepResult
from zo2core.workers import Workers, batch_digest


class ZOEngine(Replayer):
    """Zeroth-order fine-tuning, segment by segment: a ``Replayer`` that also takes steps.

    Args:
        model: Cut into embedding, blocks and head; of an adapter, or your own.
        estimator: What to evaluate, and what the losses say about the weights.
        device, memory, micro_batch_size, overlap, replay, trace: as for ``Replayer``.
        noise: Draws z; by default what the journal was begun with, else ``SequentialNoise``, MeZO's numbers.
        journal: Updates so far and to come: a journal, or the path of one, which is made if it is not there. None keeps the
            updates in memory. A journal with updates continues its run.
        seed: Of the run: each step's directions depend on it and on the step only.
        write_back: When changed segments are written to disk. None: never; a resumed run replays the whole journal.
        provenance: What of the caller's decides the run, as JSON values: the journal keeps it and refuses another one.
        perturbation: ``InWeights()``, the default of a new run, or ``BesideActivations(rank=...)``.
        workers: Others that work on the same run; None: there are none.

    Raises:
        OptionError: if the estimator is none, or a class.
        ZO2Error: as ``Replayer`` says, and if the directory of ``write_back`` cannot be written to.
    """

    def __init__(
        self,
        model: BlockModel,
        estimator: ZOEstimator,
        *,
        device: Device | str = "cpu",
        noise: NoiseGenerator | None = None,
        journal: Journal | Path | str | None = None,
        seed: int = 0,
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        write_back: WriteBackPolicy | None = None,
        micro_batch_size: int | None = None,
        overlap: bool = True,
        replay: Replay = "auto",
        trace: Trace | Path | str | None = None,
        provenance: Mapping[str, Any] | None = None,
        perturbation: Perturbation | None = None,
        workers: Workers | None = None,
    ) -> None:
        _require_estimator(estimator)
        parts = build(
            model,
            estimator,
            journal=journal,
            device=device,
            noise=noise,
            memory=memory,
            micro_batch_size=micro_batch_size,
            trace=trace,
            overlap=overlap,
            replay=replay,
            seed=seed,
            write_back=write_back,
            provenance=provenance,
            perturbation=perturbation,
            workers=workers,
        )
        self._take(model, parts)
        self._train(estimator, seed)

    @classmethod
    def from_parts(  # noqa: D417 - five arguments share a line
        cls,
        model: BlockModel,
        estimator: ZOEstimator,
        *,
        source: BlockSource,
        device: Device,
        noise: NoiseGenerator,
        scheduler: Scheduler | None = None,
        journal: Journal | Path | str | None = None,
        seed: int = 0,
        activations: int | str = ACTIVATIONS,
        micro_batch_size: int | None = None,
        trace: Trace | Path | str | None = None,
        timeline: Timeline | None = None,
        provenance: Mapping[str, Any] | None = None,
        workers: Workers | None = None,
    ) -> Self:
        """An engine of parts that the caller made. They stay the caller's: nothing closes them, not even a refusal.

        Args:
            model, estimator: These and all that is not said here are as in the constructor.
            source, device, noise: Where the model's segments live and are computed on, and what draws z.
            scheduler: Of this source and this device; by default an ``OverlappedScheduler``.
            journal, seed, micro_batch_size, trace, provenance, workers: As the constructor takes them.
            activations: Bytes, or a size, that an evaluation's activations may take at a time.
            timeline: What the parts note their work in, if they do: the engine takes the spans from it.

        Raises:
            OptionError: if the source holds other segments than the model has, or an option is out of its range.
            JournalError, OutputError: as in the constructor.
        """
        _require_estimator(estimator)
        parts = adopt(
            model,
            estimator,
            source=source,
            scheduler=scheduler,
            device=device,
            noise=noise,
            journal=journal,
            seed=seed,
            activations=activations,
            micro_batch_size=micro_batch_size,
            trace=trace,
            timeline=timeline,
            provenance=provenance,
            workers=workers,
        )
        engine = cls.__new__(cls)
        engine._take(model, parts)
        engine._train(estimator, seed)
        return engine

    def _train(self, estimator: ZOEstimator, seed: int) -> None:
        self._estimator = estimator
        self._seed = seed
        self._open_step: OpenStep | None = None
        self._first_version = self.version  # of this object's steps
        self._settled = 0  # version at which what stays on the device was last brought back

    @property
    def write_back_every(self) -> int | None:
        """Steps that a segment may be ahead of its bytes on disk; None: it is never written."""
        return self._parts.source.write_back_every

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None = None, *, seed: int | None = None) -> StepResult:
        """Take one zeroth-order step: one sweep that evaluates, then one record in the journal.

        The weights follow when they are next visited; ``evaluate``, ``parameters_now`` and ``export`` see them.

        Args:
            batch: What the forward takes; for the model's own, with labels. Several are run one after the other and count as
                one batch, as with gradient accumulation: the model's loss is the mean over the labelled tokens of all.
            forward: Ends in the number to make smaller: an ``Objective``, or any forward whose head gives a 0-d tensor, for
                one batch that is not cut into micro-batches; by default the model itself, whose head gives its loss.
            seed: Of the (first) direction; drawn from the run's seed if None.

        Returns:
            The step's report.

        Raises:
            BatchError: if the model cannot take the batch.
            NonFiniteLossError: if a loss or a projected gradient is not finite.
            OptionError: if the learning rate of this step, the seed, or the micro-batch size for this forward, is out of its
                range, or what the forward ends in is no number.
            JournalError: if the record cannot be written, or is none that the weights can bear.
            WorkerError: if another worker is silent, or works on another step.
            CheckpointError, ScratchError: if a block cannot be read, or could not be written back.
            BusyError, ClosedError: during an iteration over ``parameters_now``, or after ``close``.
            In all these cases the step was not taken. OutputError, if the trace cannot be written, comes after the step.
        """
        begun = self._begin(seed)
        try:
            batches = batches_of(batch)
            way = self._model if forward is None else forward
            is_own = forward is None and not isinstance(way, Objective)
            groups = groups_of_rows(self._estimator)
            begun = self._shared_out(begun, batches, deals_rows=is_own and groups is None)
            if not begun.places:
                return self.tell([])
            if groups is not None:
                return self.tell(self._losses_of_rows(batch, groups, begun, way, is_own=is_own))
            begun, own = begun.dealt(batches)
            self._open_step = begun
            if begun.says_nothing:
                if self.version == self._first_version:
                    self._sweep([])  # all the same: the first sweep notes what the base is
                return self.tell([0.0] * len(begun.places))
            pieces = cut(own, self._parts.micro_batch_size, None if is_own else way)
            prepared = [way.prepared(self._on_device(piece)) for piece in pieces.batches]
            outputs = self._sweep(begun.swept(lambda place: prepared, walks=self._estimator.perturb_in_place), way)
            return self.tell([pieces.loss(outputs_of_pieces) for outputs_of_pieces in outputs if outputs_of_pieces])
        except OutrunError:
            workers = self._parts.workers
            if workers is None or not workers.has_deadline or begun.plan is None:
                raise
            self._open_step = begun._replace(plan=begun.plan.without_share())  # it went on without this worker
            return self.tell([])
        finally:
            self._open_step = None

    def _losses_of_rows(
        self, batch: object, groups: int, begun: OpenStep, way: Forward, *, is_own: bool
    ) -> list[torch.Tensor]:
        """Evaluate each direction, both sides in turn, on its own rows."""
        if not is_own or self._parts.micro_batch_size is not None:
            raise OptionError(
                "micro_batch_size" if is_own else "forward",
                found="given, with a direction for each group of rows",
                expected="the model's own loss of whole rows",
                remedy="leave it out, or evaluate every direction on all rows with MultiQueryRGE",
            )
        dealt = [way.prepared(self._on_device(rows)) for rows in deal_rows(batch, groups)]
        sides = len(begun.evaluations) // groups
        swept = begun.swept(lambda place: [dealt[place // sides]], walks=self._estimator.perturb_in_place)
        return [require_number(loss) for losses in self._sweep(swept, way) for loss in losses]

    def ask(self, *, seed: int | None = None) -> tuple[Evaluation, ...]:
        """Begin a step whose losses the caller makes, from as many sweeps as they take: ``forwards(at=...)``, then ``tell``.

        Args:
            seed: Of the (first) direction; drawn from the run's seed if None.

        Returns:
            The evaluations to be made here: the step's, or this worker's share of them. A step that was begun before and not
            told is given up.

        Raises:
            OptionError: if the learning rate of this step, or the seed, is out of its range, or workers have no share.
            BusyError, ClosedError: as in ``step``.
        """
        return self._shared_out(self._begin(seed), [], deals_rows=False).own

    def _begin(self, seed: int | None) -> OpenStep:
        """Begin a step; all of it is this worker's as yet."""
        self._use.require_open()
        self._open_step, began, step = None, time.perf_counter(), self.version
        lr = learning_rate(self._estimator, step)
        listed = self._estimator.evaluations(step, direction_seeds(self._seed, step, seed))
        evaluations = tuple(evaluation.validated() for evaluation in listed)
        self._settle(step)
        self._landing.begin(step)
        self._open_step = begun = OpenStep(step, lr, evaluations, began)
        return begun

    def _shared_out(self, begun: OpenStep, batches: Sequence[Batch], *, deals_rows: bool) -> OpenStep:
        """Leave to other workers what is theirs of a step."""
        workers = self._parts.workers
        if workers is not None:
            for batch in batches:
                require_tensors(batch)
            plan = workers.plan(begun.evaluations, rows_to_deal(batches) if deals_rows else None)
            if self.version > self._first_version and workers.is_decided:  # the first sweep notes what the base is
                plan = plan.without_share()
            begun = begun._replace(plan=plan, batch=batch_digest(batches) if batches else None)
        self._open_step = begun
        return begun

    def forwards(
        self, batches: Iterable[Batch], forward: Forward | None = None, *, at: Evaluation | None = None
    ) -> Iterator[list[torch.Tensor]]:
        """Run the present weights, or those of an evaluation, with as many batches a sweep as activations may take memory.

        Args:
            batches: What ``forward`` takes; more are taken up only as sweeps run.
            forward: Runs the segments; by default the model itself, whose head gives losses.
            at: One of the evaluations that ``ask`` returned; None runs the weights unperturbed.

        Yields:
            What the head gave for each batch, in order, a list a sweep.

        Raises:
            BatchError: if the model cannot take a batch.
            OptionError: if no step was begun, the evaluation is none of its, or the estimator deals rows to its evaluations.
        """
        if at is None:
            yield from super().forwards(batches, forward)
            return
        if groups_of_rows(self._estimator) is not None:
            raise OptionError(
                "estimator",
                found="a direction for each group of rows, and batches that are not dealt",
                expected="step(batch), which deals them",
                remedy="use MultiQueryRGE where the losses are your own",
            )
        *way, _ = self._require_open_step().way_to(at)
        for group in self._filled(batches, forward):
            *_, outputs = self._sweep([*((evaluation, ()) for evaluation in way), (at, group)], forward)
            yield outputs

    def tell(self, losses: Iterable[float | torch.Tensor]) -> StepResult:
        """Take the step that ``ask`` began: one record in the journal.

        Args:
            losses: One for each evaluation, in the order in which ``ask`` returned them: numbers, or 0-d tensors, in whose
                dtype the projected gradients are then computed. Those of other workers are waited for.

        Returns:
            The step's report.

        Raises:
            OptionError: if no step was begun, or there are more or fewer losses.
            NonFiniteLossError, JournalError, WorkerError: as in ``step``. In these cases the step was not taken.
        """
        self._use.require_open()
        begun, told = self._require_open_step(), losses_as_tensors(losses)
        begun.require_all(told)
        journal, evaluations, ranks = self._parts.journal, begun.evaluations, tuple[int, ...]()
        if self._parts.workers is not None:
            assert begun.plan is not None, "a step is shared out before it is told"
            evaluations, told, ranks = self._parts.workers.told(
                begun.plan, evaluations, told, tokens=begun.tokens, journal=journal, batch=begun.batch
            )
        for evaluation, loss in zip(evaluations, told, strict=True):
            evaluation.require_finite(loss, step=begun.step)
        update = self._estimator.update(begun.step, evaluations, told, begun.lr, journal.updates).validated()
        if ranks:
            update = replace(update, workers=ranks)
        self._parts.base_digests.note(journal)
        journal.append(update)
        self._open_step = None
        sweep = Sweep.of_step(begun.step, begun.began, time.perf_counter())
        return StepResult.of(update, sweep.done - begun.began, self._recorder.ended(sweep), self._landing.share(update))

    def _require_open_step(self) -> OpenStep:
        if self._open_step is None:
            raise OptionError("at", found="no step", expected="one that ask() began", remedy="call ask() before")
        return self._open_step

    def _perturbation(self) -> tuple[float, bool]:
        return self._estimator.zo_eps, self._estimator.perturb_in_place

    def _settle(self, step: int) -> None:
        """Bring back what stays on the device, now and then, so that it can be written back at the last step's version."""
        every = self.write_back_every
        if every is not None and step > self._settled + every:
            with self._use.begun():
                self._parts.scheduler.settle()
            self._settled = step - 1


def _require_estimator(estimator: object) -> None:
    """Refuse what is no estimator, before a journal is begun with it."""
    if isinstance(estimator, type) or not callable(getattr(estimator, "evaluations", None)):
        raise OptionError(
            "estimator",
            found=repr(estimator)[:80],
            expected="an estimator, such as MeZOSGD(lr=1e-6, zo_eps=1e-3)",
            remedy="pass one; Replayer evaluates and exports a model without an estimator",
        )
