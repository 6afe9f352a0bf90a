"""The engine: a runner that takes zeroth-order steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zo2core.build import EngineParts, Parts, RunOptions, SharedSegments, adopt, build
from zo2core.engine.runner import Runner
from zo2core.errors import OptionError
from zo2core.journal import Journal
from zo2core.methods import ZerothOrder
from zo2core.perturbation import Perturbation
from zo2core.planning import MemoryPolicy, Replay, WriteBackPolicy
from zo2core.profiling import Trace
from zo2core.protocols import BlockModel, Device, Forward, NoiseGenerator, ZOEstimator
from zo2core.sweep.visitor import Groups
from zo2core.types import Batch, Evaluation, StepResult
from zo2core.workers import Workers


class ZOEngine(Runner):
    """Zeroth-order fine-tuning, segment by segment: a ``Runner`` with the method ``ZerothOrder``.

    Args:
        model: A model that is divided into embedding, blocks and head.
        estimator: Lists the evaluations of a step, and computes its update from their losses.
        device, memory, micro_batch_size, overlap, replay, trace: As for ``Replayer``.
        noise: Draws z. None: the generator that the journal names, else the one that the estimator or the perturbation
            needs, else ``SequentialNoise``, which draws MeZO's numbers.
        journal: Records the updates: a journal, or its path; a missing file is created. None keeps the updates in memory. A
            journal with updates continues its run.
        seed: Seed of the run; the directions of a step depend only on it and on the step.
        write_back: When changed segments are written to disk. None: never; a resumed run replays the whole journal.
        provenance: Other values that decide the run, as JSON values. The journal records them, and other values are refused.
        perturbation: ``DensePerturbation()``, the default of a new run, or ``LowRankPerturbation(rank=...)``.
        workers: Workers that share the steps; None: a run of one process.
        shared: A ``SharedBase`` that other runs read, too; its device and memory are used. None: the run reads its base
            alone.

    Raises:
        OptionError: if ``estimator`` is not an estimator, or is a class.
        ZO2Error: as for ``Replayer``, and if the directory of ``write_back`` cannot be written to.
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
        shared: SharedSegments | None = None,
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
            shared=shared,
        )
        parts = build(model, estimator, options)
        super().__init__(model, parts)
        self._method = _zeroth_order(self, model, seed, parts)

    @classmethod
    def from_parts(  # noqa: D417 - six arguments share a line
        cls,
        model: BlockModel,
        estimator: ZOEstimator,
        parts: EngineParts,
        *,
        journal: Journal | Path | str | None = None,
        seed: int = 0,
        micro_batch_size: int | None = None,
        trace: Trace | Path | str | None = None,
        provenance: Mapping[str, Any] | None = None,
        workers: Workers | None = None,
    ) -> ZOEngine:
        """Make an engine of parts that the caller made. They stay the caller's, and are not closed even after an error.

        Args:
            model: A model that is divided into embedding, blocks and head.
            estimator: As for the constructor.
            parts: Parts of the caller.
            journal, seed, micro_batch_size, trace, provenance, workers: As for the constructor.

        Raises:
            OptionError: if the source has other segments than the model, or an option is out of its range.
            JournalError, OutputError: as for the constructor.
        """
        _require_estimator(estimator)
        options = RunOptions(
            journal=journal,
            seed=seed,
            micro_batch_size=micro_batch_size,
            trace=trace,
            provenance=provenance,
            workers=workers,
        )
        return _EngineOfParts(model, seed, adopt(model, estimator, parts, options))

    @property
    def write_back_every(self) -> int | None:
        """Steps that a segment may be ahead of its bytes on disk; None: segments are never written."""
        return self._parts.source.write_back_every

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None = None, *, seed: int | None = None) -> StepResult:
        """Take one zeroth-order step: one sweep of evaluations, then one record in the journal.

        The weights change when they are next visited; ``evaluate``, ``parameters_now`` and ``export`` use the new weights.

        Args:
            batch: Input of the forward; for the model's loss, with labels. Several batches count as one, as with gradient
                accumulation: the model's loss is the mean over the labelled tokens of all.
            forward: Computes the number to minimise: an ``Objective``, or any forward whose head returns a 0-d tensor, for
                one batch without micro-batches; by default the model, whose head returns its loss.
            seed: Seed of the first direction; None draws it from the run's seed.

        Returns:
            The result of the step.

        Raises:
            BatchError: if the model cannot take the batch.
            NonFiniteLossError: if a loss or a projected gradient is not finite.
            OptionError: if the learning rate of this step, the seed, or the micro-batch size for this forward is out of its
                range, or the forward's result is not a number.
            JournalError: if the record cannot be written, or has a value that would overflow weights.
            WorkerError: if another worker does not answer, or is at another step.
            CheckpointError, ScratchError: if a block cannot be read, or could not be written back.
            BusyError, ClosedError: during an iteration over ``parameters_now``, or after ``close``.
            In all these cases the step was not taken.
            OutputError: if the trace cannot be written; the step was taken.
        """
        self._use.require_open()
        return self._method.step(batch, forward, seed=seed)

    def ask(self, *, seed: int | None = None) -> tuple[Evaluation, ...]:
        """Start a step whose losses the caller computes, by any number of ``forwards(at=...)``, and passes to ``tell``.

        Args:
            seed: Seed of the first direction; None draws it from the run's seed.

        Returns:
            The evaluations of the step, or this worker's part of them. A step that was started before is dropped.

        Raises:
            OptionError: if the learning rate of this step or the seed is out of its range, or workers cannot share the step.
            BusyError, ClosedError: as for ``step``.
        """
        self._use.require_open()
        return self._method.ask(seed=seed)

    def forwards(
        self, batches: Iterable[Batch], forward: Forward | None = None, *, at: Evaluation | None = None
    ) -> Iterator[list[torch.Tensor]]:
        """Run batches with the present weights or those of an evaluation; memory for activations limits batches per sweep.

        Args:
            batches: Inputs of ``forward``, taken as sweeps run.
            forward: Runs the segments; by default the model, whose head returns losses.
            at: One of the evaluations that ``ask`` returned; None: unperturbed weights. Where weights are perturbed in
                place, a sweep passes all evaluations before it, too: ``forwards_at`` runs several in one sweep.

        Yields:
            The head's output for each batch, in order, one list for each sweep.

        Raises:
            BatchError: if the model cannot take a batch.
            OptionError: if no step is open, the evaluation is not part of it, or is for a group of rows only.
        """
        if at is None:
            yield from super().forwards(batches, forward)
            return
        for group in self._filled(batches, forward):
            *_, outputs = self.sweep(self._method.path_through([at], {at: group}), forward)
            yield outputs

    def _path_through(self, groups: Groups) -> Groups:
        asked = [at for at, _ in groups if at is not None]
        return [group for group in groups if group[0] is None] + self._method.path_through(asked, dict(groups))

    def tell(self, losses: Iterable[float | torch.Tensor]) -> StepResult:
        """Take the step that ``ask`` started: write its record to the journal.

        Args:
            losses: The loss of each evaluation that ``ask`` returned, in order: numbers, or 0-d tensors, in whose dtype the
                projected gradients are computed. The call waits for the losses of other workers.

        Returns:
            The result of the step.

        Raises:
            OptionError: if no step is open, or there are more or fewer losses.
            NonFiniteLossError, JournalError, WorkerError: as for ``step``. In these cases the step was not taken.
        """
        self._use.require_open()
        return self._method.tell(losses)


class _EngineOfParts(ZOEngine):
    """An engine of parts that the caller made."""

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
    """Refuse an object that is not an estimator, before a journal is created."""
    if isinstance(estimator, type) or not callable(getattr(estimator, "evaluations", None)):
        raise OptionError(
            "estimator",
            found=repr(estimator)[:80],
            expected="an estimator, such as MeZOSGD(lr=1e-6, zo_eps=1e-3)",
            remedy="pass an estimator, or use Replayer, which evaluates and exports a model without one",
        )
