"""The replayer: evaluations and exports of a model that is never whole in its device's memory."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Self

import torch

from zo2core.beside import Learned, StackedModel
from zo2core.build import Parts, build
from zo2core.checkpoint import WrittenOtherwise, require_unused, write_checkpoint
from zo2core.errors import OptionError
from zo2core.journal import Journal
from zo2core.kernels.encoding import decoded
from zo2core.planning import DevicePlan, HostPlan, MemoryPolicy, Replay
from zo2core.profiling import Trace, TraceRecorder
from zo2core.protocols import BlockModel, Device, Forward, NoiseGenerator, Objective
from zo2core.sources.shared import SharedSource
from zo2core.sweep.evaluation_loop import evaluate, evaluate_objective, fill_sweeps
from zo2core.sweep.exclusive_use import ExclusiveUse
from zo2core.sweep.microbatch import require_tensors
from zo2core.sweep.perturber import choose_perturber
from zo2core.sweep.stacked_visitor import StackedVisitor
from zo2core.sweep.turn_visitor import TurnVisitor
from zo2core.sweep.visitor import SegmentVisitor
from zo2core.types import Batch, Evaluation, EvaluationResult, ParameterSpec, saved_form
from zo2core.updates import Trajectory
from zo2core.workers import Workers

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
        workers: Others that evaluate the same weights, and take batches in turns with this one; None: there are none.

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
        workers: Workers | None = None,
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
            workers=workers,
        )
        self._take(model, parts)

    def _take(self, model: BlockModel, parts: Parts) -> None:
        self._model, self._parts = model, parts
        self._recorder = TraceRecorder(parts.timeline, parts.trace)
        self._landing = parts.landing
        parts.opened.callback(self._recorder.flush)
        self._use = ExclusiveUse(type(self).__name__)

    @property
    def workers(self) -> Workers | None:
        """Others that work on the same run; None: there are none."""
        return self._parts.workers

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

    def evaluate(self, batches: Iterable[Batch], forward: Objective | None = None) -> EvaluationResult:
        """Evaluate the present weights, unperturbed; as many batches share a sweep as activations may take memory.

        Args:
            batches: What the forward takes. With the model's own, a batch counts by its labelled tokens.
            forward: What to evaluate; by default the model's loss.

        Returns:
            The mean loss over labelled tokens, and each batch's; of an objective, what it makes of all batches together.

        Raises:
            BatchError: if the model cannot take a batch, or there is none.
            OptionError: if the forward is no objective, or ends in no number.
            WorkerError: if another worker is silent, or has other batches.
        """
        self._use.require_open()
        if forward is None and isinstance(self._model, Objective):
            forward = self._model
        if forward is not None:
            return evaluate_objective(
                partial(self.forwards, forward=forward), batches, self._parts.micro_batch_size, forward
            )
        return evaluate(self.forwards, batches, self._parts.micro_batch_size, self._parts.workers)

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
        for group in self._filled(batches, forward):
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
        yield from self._present(range(len(self._model.layouts)))

    def learned(self) -> Generator[tuple[str, Learned], None, None]:
        """Yield what a run beside the activations has learned of every trained parameter, in visiting order.

        Yields:
            Name, and what was learned: valid until the next is asked for.

        Raises:
            OptionError: if directions are in the weights, where nothing is kept apart.
        """
        factors = self._parts.factors
        if factors is None:
            raise OptionError(
                "perturbation",
                found="directions in the weights, in which what was learned is not kept apart",
                expected="directions of low rank, beside the activations",
                remedy="export the model instead",
            )
        with closing(self._visited(range(len(self._model.layouts)))) as visited:
            for spec, view in visited:
                if not spec.frozen:
                    yield spec.name, factors.learned(spec, view)

    def _present(self, segments: Iterable[int]) -> Generator[tuple[str, torch.Tensor], None, None]:
        factors = self._parts.factors
        with closing(self._visited(segments)) as visited:
            for spec, view in visited:
                weights = view if spec.encoding is None else decoded(spec, view)
                present = weights if factors is None or spec.frozen else factors.present(spec, weights)
                yield spec.name, present.view(spec.shape)

    def _visited(self, segments: Iterable[int]) -> Generator[tuple[ParameterSpec, torch.Tensor], None, None]:
        """Parameters of segments that are brought to the present version, and their bytes on the host."""
        self._use.require_open()
        with self._use.begun():
            parts, visitor = self._parts, self._visitor([])
            try:
                for index in segments:
                    with parts.scheduler.replayed(visitor, index) as bucket:
                        yield from zip(self._model.layouts[index].parameters, bucket.views, strict=True)
                        if isinstance(parts.source, SharedSource):
                            parts.source.require_version(self.version)
            finally:
                parts.noise.retain(visitor.seeds)
                self._recorder.flush()

    def export(self, directory: Path | str) -> None:
        """Write the model at the present version: a directory that ``from_pretrained`` loads, or what the model writes.

        Args:
            directory: Must not exist, or be empty. It appears whole or not at all.

        Raises:
            OutputError: if the directory is in use or cannot be written.
        """
        self._use.require_open()
        require_unused(Path(directory))
        if isinstance(self._model, WrittenOtherwise):
            written, layouts = self._model.written, enumerate(self._model.layouts)
            segments = [i for i, layout in layouts if any(spec.name in written for spec in layout.parameters)]
            with closing(self._present(segments)) as tensors:
                self._model.write(Path(directory), tensors)
            return
        model, specs = self._model, [spec.decoded for layout in self._model.layouts for spec in layout.parameters]
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

    def _filled(self, batches: Iterable[Batch], forward: Forward | None) -> Iterator[list[Batch]]:
        """Batches, prepared, as many a sweep as activations may take memory."""
        self._use.require_open()
        forward = self._model if forward is None else forward
        prepared = (forward.prepared(self._on_device(batch)) for batch in batches)
        for group in fill_sweeps(prepared, forward, self._parts.activation_bytes - self._parts.activations.room_bytes):
            self._use.require_open()
            yield group

    def _sweep(self, groups: Groups, forward: Forward | None = None) -> list[list[torch.Tensor]]:
        """Visit all segments once. Returns what the head gave, a list an evaluation."""
        parts = self._parts
        with self._use.begun():
            visitor = self._visitor(groups, forward)
            try:
                parts.scheduler.sweep(visitor, range(len(self._model.layouts)))
                if isinstance(parts.source, SharedSource):
                    parts.source.require_version(self.version)
            except BaseException:
                self._recorder.flush()  # what it moved is not the next step's
                raise
            finally:
                visitor.finish()
                parts.noise.retain(visitor.seeds)
        return visitor.outputs

    def _visitor(self, groups: Groups, forward: Forward | None = None) -> SegmentVisitor | StackedVisitor | TurnVisitor:
        parts, evaluations = self._parts, [evaluation for evaluation, _ in groups]
        trajectory = Trajectory(parts.journal.updates, self.version, evaluations, *self._perturbation())
        way: Forward = self._model if forward is None else forward
        if parts.factors is not None:
            assert isinstance(self._model, StackedModel), "other models were refused"
            return StackedVisitor(
                self._model,
                way,
                parts.factors,
                trajectory,
                groups,
                buffer=parts.work_buffer,
                activations=parts.activations,
                streams=parts.device.streams,
                timeline=parts.timeline,
                worker=parts.worker,
            )
        visitor = SegmentVisitor(
            self._model.layouts,
            way,
            choose_perturber(parts.noise, parts.work_buffer, parts.worker, trajectory),
            groups,
            activations=parts.activations,
            streams=parts.device.streams,
            timeline=parts.timeline,
            landing=self._landing,
        )
        if isinstance(parts.source, SharedSource):
            return TurnVisitor(visitor, parts.source, self._model.layouts, self.version)
        return visitor

    def _perturbation(self) -> tuple[float, bool]:
        """Perturbation scale, and whether evaluations walk from one to the next; without steps nothing is perturbed."""
        return 1.0, True

    def _on_device(self, batch: Batch) -> Batch:
        require_tensors(batch)
        return {key: value.to(self._parts.device.torch_device) for key, value in batch.items()}
