"""The engine: a runner that takes zeroth-order steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zo2core.build import GivenParts, Parts, RunOptions, adopt, build
from zo2core.engine.runner import Runner
from zo2core.errors import OptionError
from zo2core.journal import Journal
from zo2core.methods import ZerothOrder
from zo2core.perturbation import Perturbation
from zo2core.planning import ACTIVATIONS, MemoryPolicy, Replay, WriteBackPolicy
from zo2core.profiling import Timeline, Trace
from zo2core.protocols import BlockModel, BlockSource, Device, Forward, NoiseGenerator, Scheduler, ZOEstimator
from zo2core.types import Batch, Evaluation, StepResult
from zo2core.workers import Workers


class ZOEngine(Runner):
    """Zeroth-order fine-tuning, segment by segment: a ``Runner`` with the method ``ZerothOrder``.

    Args:
        model: Cut into embedding, blocks and head; of an adapter, or your own.
        estimator: What to evaluate, and what the losses say about the weights.
        device, memory, micro_batch_size, overlap, replay, trace: as for ``Replayer``.
        noise: Draws z; by default what the journal was begun with, else what the estimator or the
            perturbation needs, else ``SequentialNoise``, MeZO's numbers.
        journal: Updates so far and to come: a journal, or the path of one, which is made if it is not there. None keeps the
            updates in memory. A journal with updates continues its run.
        seed: Seed of the run: each step's directions depend on it and on the step only.
        write_back: When changed segments are written to disk. None: never; a resumed run replays the whole journal.
        provenance: What of the caller's decides the run, as JSON values: the journal keeps it and refuses another one.
        perturbation: ``DensePerturbation()``, the default of a new run, or ``LowRankPerturbation(rank=...)``.
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
        options = RunOptions(
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
        parts = build(model, estimator, options)
        super().__init__(model, parts)
        self._method = _zeroth_order(self, model, seed, parts)

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
    ) -> ZOEngine:
        """An engine of parts that the caller made. They stay the caller's: nothing closes them, not even a refusal.

        Args:
            model, estimator: These and all that is not said here are as in the constructor.
            source, device, noise: Where the model's segments live and are computed on, and what draws z.
            scheduler: Scheduler of this source and this device; by default an ``OverlappedScheduler``.
            journal, seed, micro_batch_size, trace, provenance, workers: As the constructor takes them.
            activations: Bytes, or a size, that an evaluation's activations may take at a time.
            timeline: What the parts note their work in, if they do: the engine takes the spans from it.

        Raises:
            OptionError: if the source holds other segments than the model has, or an option is out of its range.
            JournalError, OutputError: as in the constructor.
        """
        _require_estimator(estimator)
        given = GivenParts(
            source=source, scheduler=scheduler, device=device, noise=noise, activations=activations, timeline=timeline
        )
        options = RunOptions(
            journal=journal,
            seed=seed,
            micro_batch_size=micro_batch_size,
            trace=trace,
            provenance=provenance,
            workers=workers,
        )
        return _OfParts(model, seed, adopt(model, estimator, given, options))

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
            seed: Seed of the (first) direction; drawn from the run's seed if None.

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
        self._use.require_open()
        return self._method.step(batch, forward, seed=seed)

    def ask(self, *, seed: int | None = None) -> tuple[Evaluation, ...]:
        """Begin a step whose losses the caller makes, from as many sweeps as they take: ``forwards(at=...)``, then ``tell``.

        Args:
            seed: Seed of the (first) direction; drawn from the run's seed if None.

        Returns:
            The evaluations to be made here: the step's, or this worker's share of them. A step that was begun before and not
            told is given up.

        Raises:
            OptionError: if the learning rate of this step, or the seed, is out of its range, or workers have no share.
            BusyError, ClosedError: as in ``step``.
        """
        self._use.require_open()
        return self._method.ask(seed=seed)

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
        *passed, _ = self._method.path_to(at)
        for group in self._filled(batches, forward):
            *_, outputs = self.sweep([*((evaluation, ()) for evaluation in passed), (at, group)], forward)
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
        return self._method.tell(losses)


class _OfParts(ZOEngine):
    """An engine whose parts are not built for it."""

    def __init__(self, model: BlockModel, seed: int, parts: Parts) -> None:
        Runner.__init__(self, model, parts)
        self._method = _zeroth_order(self, model, seed, parts)


def _zeroth_order(runner: Runner, model: BlockModel, seed: int, parts: Parts) -> ZerothOrder:
    assert parts.estimator is not None, "it was required"
    return ZerothOrder(
        parts.estimator,
        seed=seed,
        sweeps=runner,
        model=model,
        journal=parts.journal,
        workers=parts.workers,
        base_digests=parts.base_digests,
        update_loss=parts.update_loss,
        micro_batch_size=parts.micro_batch_size,
    )


def _require_estimator(estimator: object) -> None:
    """Refuse what is no estimator, before a journal is begun with it."""
    if isinstance(estimator, type) or not callable(getattr(estimator, "evaluations", None)):
        raise OptionError(
            "estimator",
            found=repr(estimator)[:80],
            expected="an estimator, such as MeZOSGD(lr=1e-6, zo_eps=1e-3)",
            remedy="pass one; Replayer evaluates and exports a model without an estimator",
        )
