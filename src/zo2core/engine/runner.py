"""The runner: it owns the parts of a run, sweeps over its segments, evaluates and exports. It knows no method."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Self

import torch

from zo2core.build import Parts
from zo2core.checkpoint import CustomExport, require_unused, write_checkpoint
from zo2core.errors import OptionError
from zo2core.journal import Journal
from zo2core.kernels.encoding import decoded
from zo2core.perturbation import Learned
from zo2core.planning import DevicePlan, HostPlan
from zo2core.profiling import Sweep, TraceRecorder
from zo2core.protocols import BlockModel, Forward, Objective
from zo2core.sweep.evaluation_loop import evaluate, evaluate_objective, fill_sweeps
from zo2core.sweep.exclusive_use import ExclusiveUse
from zo2core.sweep.visitor import Groups
from zo2core.sweep.visits import SweepVisitor
from zo2core.types import Batch, EvaluationResult, Lane, LaneUse, ParameterSpec, require_tensors, saved_form
from zo2core.workers import Workers


class Runner:
    """Sweeps over a model's segments, whatever method takes steps with it.

    Args:
        model: Cut into embedding, blocks and head.
        parts: Parts of the run; closed with the runner.
    """

    def __init__(self, model: BlockModel, parts: Parts) -> None:
        self._model, self._parts = model, parts
        self._recorder = TraceRecorder(parts.timeline, parts.trace)
        parts.opened.callback(self._recorder.flush)
        self._use = ExclusiveUse(type(self).__name__)
        self._settled = 0  # version at which what stays on the device was last brought back

    @property
    def workers(self) -> Workers:
        """The workers of the run, as this one of them sees them; often it is alone."""
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
    def activation_bytes(self) -> int:
        """Bytes reserved for activations in the memory in which forwards run."""
        return self._parts.activation_bytes

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
                [outputs] = self.sweep([(None, group)], forward)
            yield outputs

    def flush(self) -> None:
        """Bring every segment to the present version. What reaches the disk is up to the write-back policy."""
        self._use.require_open()
        with self._recorder.sweep("flush"):
            self.sweep([])

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
            parts = self._parts
            visitor = parts.visits.visitor(self.version, [], self._model)
            try:
                for index in segments:
                    with parts.scheduler.replayed(visitor, index) as bucket:
                        yield from zip(self._model.layouts[index].parameters, bucket.views, strict=True)
                        parts.require_version(self.version)
            finally:
                parts.noise.retain(visitor.seeds)
                self._recorder.flush()

    def export(self, directory: Path | str, *, files: Mapping[str, Path | bytes] | None = None) -> None:
        """Write the model at the present version: a directory that ``from_pretrained`` loads, or what the model writes.

        Args:
            directory: Must not exist, or be empty. It appears whole or not at all.
            files: Further files of the directory: name to content, or to the file to copy. None: there are none.

        Raises:
            OutputError: if the directory is in use or cannot be written.
        """
        self._use.require_open()
        files = {} if files is None else files
        require_unused(Path(directory))
        if isinstance(self._model, CustomExport):
            exported, layouts = self._model.exported_parameters, enumerate(self._model.layouts)
            segments = [i for i, layout in layouts if any(spec.name in exported for spec in layout.parameters)]
            with closing(self._present(segments)) as tensors:
                self._model.write(Path(directory), tensors, files)
            return
        model, specs = self._model, [spec.decoded for layout in self._model.layouts for spec in layout.parameters]
        form = saved_form(model)
        with closing(self.parameters_now()) as tensors:  # lets go of its bucket, also when writing fails
            companions = {**model.companions, **files}
            write_checkpoint(Path(directory), specs, tensors, companions, dtype=model.export_dtype, form=form)

    def close(self) -> None:
        """Stop all work and close what the engine opened. May be called twice."""
        self._use.close()
        self._parts.opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def note_evaluation(self, results: Mapping[str, float]) -> None:
        """Keep the results of an evaluation of the present weights in the journal, behind what was learned of the base.

        Args:
            results: Numbers by name.

        Raises:
            JournalError: if they cannot be written.
        """
        self._parts.base_digests.note(self._parts.journal)
        self._parts.journal.note_evaluation(self.version, results)

    def prepared(self, batches: Iterable[Batch], forward: Forward) -> Iterator[Batch]:
        """Batches on the device, checked by the forward that will run them. For methods.

        Raises:
            BatchError: if the forward cannot take a batch.
        """
        for batch in batches:
            require_tensors(batch)
            yield forward.prepared({key: value.to(self._parts.device.torch_device) for key, value in batch.items()})

    def sweep(self, groups: Groups, forward: Forward | None = None) -> list[list[torch.Tensor]]:
        """Visit all segments once. For methods.

        Args:
            groups: The evaluations to make, each with the prepared batches to run at it; empty only brings every segment to
                the present version.
            forward: Runs the segments; None is the model itself.

        Returns:
            What the head gave, a list an evaluation.
        """
        with self._use.begun():
            visitor = self._parts.visits.visitor(self.version, groups, self._model if forward is None else forward)
            return self._run(visitor, range(len(self._model.layouts)))

    def run(self, visitor: SweepVisitor, order: Sequence[int]) -> list[list[torch.Tensor]]:
        """Visit segments in an order. For methods that make their visitors.

        Args:
            visitor: The visitor of this sweep.
            order: Segments; a block may be in it more than once.

        Returns:
            What the head gave, a list an evaluation.
        """
        with self._use.begun():
            return self._run(visitor, order)

    def _run(self, visitor: SweepVisitor, order: Sequence[int]) -> list[list[torch.Tensor]]:
        parts = self._parts
        try:
            parts.scheduler.sweep(visitor, order)
            parts.require_version(self.version)
        except BaseException:
            self._recorder.flush()  # what it moved is not the next step's
            raise
        finally:
            visitor.finish()
            parts.noise.retain(visitor.seeds)
        return visitor.outputs

    def settle(self, step: int) -> None:
        """Before a step, now and then, bring back what stays on the device, so that it can be written back. For methods."""
        every = self._parts.source.write_back_every
        if every is not None and step > self._settled + every:
            with self._use.begun():
                self._parts.scheduler.settle()
            self._settled = step - 1

    def ended(self, sweep: Sweep) -> Mapping[Lane, LaneUse]:
        """Record that a step has ended; what every lane did for it. For methods."""
        return self._recorder.ended(sweep)

    def _filled(self, batches: Iterable[Batch], forward: Forward | None) -> Iterator[list[Batch]]:
        """Batches, prepared, as many a sweep as activations may take memory."""
        self._use.require_open()
        forward = self._model if forward is None else forward
        room = self._parts.activation_bytes - self._parts.activations.room_bytes
        for group in fill_sweeps(self.prepared(batches, forward), forward, room):
            self._use.require_open()
            yield group
