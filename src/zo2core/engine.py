"""The engine: steps, evaluations and exports of a model that is never whole in its device's memory."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import torch

from zo2core.build import Parts, adopt, build
from zo2core.checkpoint import require_unused, write_checkpoint
from zo2core.estimators import direction_seeds, learning_rate
from zo2core.journal import Journal
from zo2core.planning import ACTIVATIONS, DevicePlan, HostPlan, MemoryPolicy, Replay, WriteBackPolicy
from zo2core.profiling import Sweep, Timeline, Trace, TraceRecorder
from zo2core.protocols import BlockModel, BlockSource, Device, Forward, NoiseGenerator, Scheduler, ZOEstimator, saved_form
from zo2core.sweep.evaluation_loop import evaluate, fill_sweeps
from zo2core.sweep.exclusive_use import ExclusiveUse
from zo2core.sweep.microbatch import combined_loss, labelled_tokens, require_tensors, split_rows
from zo2core.sweep.perturber import choose_perturber
from zo2core.sweep.visitor import SegmentVisitor
from zo2core.types import Batch, Evaluation, EvaluationResult, StepResult
from zo2core.updates import Trajectory

Groups = Sequence[tuple[Evaluation | None, Sequence[Batch]]]  # what a sweep evaluates: the batches of each evaluation


class Replayer:
    """A model at the version that a journal ends with: evaluated, looked at and exported, never trained.

    What the caller passes stays the caller's; what the replayer opens (paths, devices by name) it closes, and with it the
    model's checkpoint. One replayer or engine at a time uses a model: the last one made has bound its modules.

    Args:
        model: Cut into embedding, blocks and head; of an adapter, or your own.
        journal: The updates to replay: a journal that was begun, or the path of one. None is the base checkpoint as it is.
        device: "cpu", "cuda", "cuda:N" or a ``Device``.
        noise: Draws z; by default the generator that the journal was begun with.
        memory: How much memory the process may take.
        micro_batch_size: Rows of the micro-batches into which a batch is split; None: batches run whole.
        overlap: False does one thing after the other, to compare with; the bits are the same.
        replay: Who replays for a device with memory of its own: itself, "device", or "host": then nothing comes back.
        trace: Takes down what every sweep did when: a trace, or the path of a new one.

    Raises:
        OptionError: if an option is out of its range, or nothing would heed it.
        MemoryBudgetError: if not even the smallest plan fits into the memory there is.
        JournalError: if the journal belongs to another base checkpoint, another model or other noise.
        CheckpointError: if the checkpoint cannot be read.
        DeviceError, OutputError: if the device is not there or too small, or the trace cannot be made.
    """

    def __init__(
        self,
        model: BlockModel,
        journal: Journal | Path | str | None = None,
        *,
        device: Device | str = "cpu",
        noise: NoiseGenerator | None = None,
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        micro_batch_size: int | None = None,
        overlap: bool = True,
        replay: Replay = "auto",
        trace: Trace | Path | str | None = None,
    ) -> None:
        parts = build(
            model,
            None,
            journal=journal,
            device=device,
            noise=noise,
            memory=memory,
            micro_batch_size=micro_batch_size,
            trace=trace,
            overlap=overlap,
            replay=replay,
        )
        self._take(model, parts)

    def _take(self, model: BlockModel, parts: Parts) -> None:
        self._model, self._parts = model, parts
        self._recorder = TraceRecorder(parts.timeline, parts.trace)
        self._landing = parts.landing
        parts.opened.callback(self._recorder.flush)
        self._use = ExclusiveUse(type(self).__name__)

    @property
    def version(self) -> int:
        """The present version of the weights: the number of updates in the journal."""
        return len(self._parts.journal.updates)

    @property
    def journal(self) -> Journal:
        """The updates of all steps so far."""
        return self._parts.journal

    @property
    def host_plan(self) -> HostPlan | None:
        """What the run takes of host memory; None for passed parts."""
        return self._parts.host_plan

    @property
    def device_plan(self) -> DevicePlan | None:
        """What the run takes of the device's memory; None where that is host memory, and for passed parts."""
        return self._parts.device_plan

    def evaluate(self, batches: Iterable[Batch]) -> EvaluationResult:
        """Evaluate the present weights, unperturbed; as many batches share a sweep as activations may take memory.

        Args:
            batches: What the model's forward takes, with labels. A batch counts by its labelled tokens.

        Returns:
            The mean loss over labelled tokens, and each batch's.

        Raises:
            BatchError: if the model cannot take a batch, or there is none.
        """
        self._use.require_open()
        return evaluate(self.forwards, batches, self._parts.micro_batch_size)

    def forwards(self, batches: Iterable[Batch], forward: Forward | None = None) -> Iterator[list[torch.Tensor]]:
        """Run the present weights, unperturbed, with as many batches a sweep as activations may take memory.

        Args:
            batches: What ``forward`` takes; more are taken up only as sweeps run.
            forward: Runs the segments; by default the model itself, whose head gives losses.

        Yields:
            What the head gave for each batch, in order, a list a sweep.

        Raises:
            BatchError: if the model cannot take a batch.
        """
        self._use.require_open()
        forward = self._model if forward is None else forward
        prepared = (forward.prepared(self._on_device(batch)) for batch in batches)
        for group in fill_sweeps(prepared, forward, self._parts.activation_bytes - self._parts.activations.room_bytes):
            self._use.require_open()
            with self._recorder.sweep("evaluation"):
                [outputs] = self._sweep([(None, group)], forward)
            yield outputs

    def flush(self) -> None:
        """Bring every segment to the present version. What reaches the disk is up to the write-back policy."""
        self._use.require_open()
        with self._recorder.sweep("flush"):
            self._sweep([])

    def parameters_now(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield every parameter at the present version, one at a time, in visiting order.

        Yields:
            Name and tensor, of its shape and dtype, on the CPU: a view until the next is asked for, not to be changed.
        """
        self._use.require_open()
        with self._use.begun():
            visitor = self._visitor([])
            try:
                for index, layout in enumerate(self._model.layouts):
                    with self._parts.scheduler.replayed(visitor, index) as bucket:
                        for spec, view in zip(layout.parameters, bucket.views, strict=True):
                            yield spec.name, view.view(spec.shape)
            finally:
                self._parts.noise.retain(visitor.seeds)
                self._recorder.flush()

    def export(self, directory: Path | str) -> None:
        """Write the model at the present version: a directory that ``from_pretrained`` loads.

        Args:
            directory: Must not exist, or be empty. It appears whole or not at all.

        Raises:
            OutputError: if the directory is in use or cannot be written.
        """
        self._use.require_open()
        require_unused(Path(directory))
        model, specs = self._model, [spec for layout in self._model.layouts for spec in layout.parameters]
        form = saved_form(model)
        with closing(self.parameters_now()) as tensors:  # lets go of its bucket, also when writing fails
            write_checkpoint(Path(directory), specs, tensors, model.companions, dtype=model.export_dtype, form=form)

    def close(self) -> None:
        """Stop all work and close what the engine opened. May be called twice."""
        self._use.close()
        self._parts.opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _sweep(self, groups: Groups, forward: Forward | None = None) -> list[list[torch.Tensor]]:
        """Visit all segments once. Returns what the head gave, a list an evaluation."""
        with self._use.begun():
            visitor = self._visitor(groups, forward)
            try:
                self._parts.scheduler.sweep(visitor, range(len(self._model.layouts)))
            except BaseException:
                self._recorder.flush()  # what it moved is not the next step's
                raise
            finally:
                visitor.finish()
                self._parts.noise.retain(visitor.seeds)
        return visitor.outputs

    def _visitor(self, groups: Groups, forward: Forward | None = None) -> SegmentVisitor:
        parts, evaluations = self._parts, [evaluation for evaluation, _ in groups]
        trajectory = Trajectory(parts.journal.updates, self.version, evaluations, *self._perturbation())
        return SegmentVisitor(
            self._model.layouts,
            self._model if forward is None else forward,
            choose_perturber(parts.noise, parts.work_buffer, parts.worker, trajectory),
            groups,
            activations=parts.activations,
            streams=parts.device.streams,
            timeline=parts.timeline,
            landing=self._landing,
        )

    def _perturbation(self) -> tuple[float, bool]:
        """Perturbation scale, and whether evaluations walk from one to the next; without steps nothing is perturbed."""
        return 1.0, True

    def _on_device(self, batch: Batch) -> Batch:
        require_tensors(batch)
        return {key: value.to(self._parts.device.torch_device) for key, value in batch.items()}


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

    Raises:
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
    ) -> None:
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
    ) -> Self:
        """An engine of parts that the caller made. They stay the caller's: nothing closes them, not even a refusal.

        Args:
            model, estimator: These and all that is not said here are as in the constructor.
            source, device, noise: Where the model's segments live and are computed on, and what draws z.
            scheduler: Of this source and this device; by default an ``OverlappedScheduler``.
            journal, seed, micro_batch_size, trace, provenance: As the constructor takes them.
            activations: Bytes, or a size, that an evaluation's activations may take at a time.
            timeline: What the parts note their work in, if they do: the engine takes the spans from it.

        Raises:
            OptionError: if the source holds other segments than the model has, or an option is out of its range.
            JournalError, OutputError: as in the constructor.
        """
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
        )
        engine = cls.__new__(cls)
        engine._take(model, parts)
        engine._train(estimator, seed)
        return engine

    def _train(self, estimator: ZOEstimator, seed: int) -> None:
        self._estimator = estimator
        self._seed = seed
        self._settled = 0  # version at which what stays on the device was last brought back

    @property
    def write_back_every(self) -> int | None:
        """Steps that a segment may be ahead of its bytes on disk; None: it is never written."""
        return self._parts.source.write_back_every

    def step(self, batch: Batch, *, seed: int | None = None) -> StepResult:
        """Take one zeroth-order step: one sweep that evaluates, then one record in the journal.

        The weights follow when they are next visited; ``evaluate``, ``parameters_now`` and ``export`` see them.

        Args:
            batch: What the model's forward takes, with labels.
            seed: Of the (first) direction; drawn from the run's seed if None.

        Returns:
            The step's report.

        Raises:
            BatchError: if the model cannot take the batch.
            NonFiniteLossError: if a loss or a projected gradient is not finite.
            OptionError: if the learning rate of this step, or the seed, is out of its range.
            JournalError: if the record cannot be written, or is none that the weights can bear.
            CheckpointError, ScratchError: if a block cannot be read, or could not be written back.
            BusyError, ClosedError: during an iteration over ``parameters_now``, or after ``close``.
            In all these cases the step was not taken. OutputError, if the trace cannot be written, comes after the step.
        """
        self._use.require_open()
        began, step = time.perf_counter(), self.version
        lr = learning_rate(self._estimator, step)
        listed = self._estimator.evaluations(step, direction_seeds(self._seed, step, seed))
        evaluations = tuple(evaluation.validated() for evaluation in listed)
        self._settle(step)
        micro_batches = split_rows(batch, self._parts.micro_batch_size)
        tokens = [labelled_tokens(micro_batch) for micro_batch in micro_batches] if len(micro_batches) > 1 else [1]
        prepared = [self._model.prepared(self._on_device(micro_batch)) for micro_batch in micro_batches]
        self._landing.begin(step)
        outputs = self._sweep([(evaluation, prepared) for evaluation in evaluations])
        losses = [combined_loss(losses_of_parts, tokens) for losses_of_parts in outputs]
        for evaluation, loss in zip(evaluations, losses, strict=True):
            evaluation.require_finite(loss, step=step)
        update = self._estimator.update(step, evaluations, losses, lr, self._parts.journal.updates).validated()
        self._parts.base_digests.note(self._parts.journal)
        self._parts.journal.append(update)
        sweep = Sweep.of_step(step, began, time.perf_counter())
        return StepResult.of(update, sweep.done - began, self._recorder.ended(sweep), self._landing.share(update))

    def _perturbation(self) -> tuple[float, bool]:
        return self._estimator.zo_eps, self._estimator.perturb_in_place

    def _settle(self, step: int) -> None:
        """Bring back what stays on the device, now and then, so that it can be written back at the last step's version."""
        every = self.write_back_every
        if every is not None and step > self._settled + every:
            with self._use.begun():
                self._parts.scheduler.settle()
            self._settled = step - 1
