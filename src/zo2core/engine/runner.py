"""The runner: it owns the parts of a run, sweeps over its segments, evaluates and exports, for any method."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
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
from zo2core.sweep.watched_visitor import WatchedVisitor
from zo2core.types import Batch, Evaluation, EvaluationResult, Lane, LaneUse, ParameterSpec, require_tensors, saved_form
from zo2core.workers import Workers


class Runner:
    """Sweeps over a model's segments, for any method.

    Args:
        model: A model that is divided into embedding, blocks and head.
        parts: Parts of the run, which the runner closes.
    """

    def __init__(self, model: BlockModel, parts: Parts) -> None:
        self._model, self._parts = model, parts
        self._recorder = TraceRecorder(parts.timeline, parts.trace)
        parts.opened.callback(self._recorder.flush)
        self._use = ExclusiveUse(type(self).__name__)
        self._watch: Callable[[int, int], object] | None = None
        self._offloaded = 0  # version at which the blocks that stay on the device were last offloaded

    @property
    def workers(self) -> Workers:
        """The workers of the run."""
        return self._parts.workers

    @property
    def version(self) -> int:
        """Present version of the weights: the number of updates in the journal."""
        return len(self._parts.journal.updates)

    @property
    def journal(self) -> Journal:
        """The journal of all steps so far."""
        return self._parts.journal

    @property
    def host_plan(self) -> HostPlan | None:
        """Plan of host memory; None if the caller passed the parts."""
        return self._parts.host_plan

    @property
    def activation_bytes(self) -> int:
        """Bytes reserved for activations in the memory in which forwards run."""
        return self._parts.activation_bytes

    @property
    def device_plan(self) -> DevicePlan | None:
        """Plan of device memory; None if the device computes in host memory, or the caller passed the parts."""
        return self._parts.device_plan

    def watch(self, visited: Callable[[int, int], object] | None) -> None:
        """Have a function called after each visit of a sweep, such as one that draws a progress bar.

        Args:
            visited: Called in the thread of the sweep, with the number of the sweep's visits so far and of all. On a device
                with its own memory the visit's work may not have ended yet. None: nothing is called.
        """
        self._watch = visited

    def evaluate(self, batches: Iterable[Batch], forward: Objective | None = None) -> EvaluationResult:
        """Evaluate the present weights; memory for activations limits the number of batches in a sweep.

        Args:
            batches: Inputs of the forward. The model's loss weights a batch by its labelled tokens.
            forward: The objective to evaluate; by default the model's loss.

        Returns:
            The mean loss over labelled tokens, and the loss of each batch; for an objective, its loss of all batches.

        Raises:
            BatchError: if the model cannot take a batch, or there is no batch.
            OptionError: if the forward is not an objective, or its result is not a number.
            WorkerError: if another worker does not answer, or has other batches.
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
        """Run batches with the present weights; memory for activations limits the number of batches in a sweep.

        Args:
            batches: Inputs of ``forward``, taken as sweeps run.
            forward: Runs the segments; by default the model, whose head returns losses.

        Yields:
            The head's output for each batch, in order, one list for each sweep.

        Raises:
            BatchError: if the model cannot take a batch.
        """
        for group in self._filled(batches, forward):
            with self._recorder.sweep("evaluation"):
                [outputs] = self.sweep([(None, group)], forward)
            yield outputs

    def forwards_at(self, groups: Groups, forward: Forward) -> list[list[torch.Tensor]]:
        """Run batches at several evaluations in one sweep, whatever memory they take.

        Args:
            groups: Evaluations, each with the inputs of ``forward`` to run at it; None instead of an evaluation stands for
                the present weights. Only a ``ZOEngine`` with an open step has evaluations.
            forward: Runs the segments. One with ``stacked`` and ``heads`` runs low-rank evaluations as one batch.

        Returns:
            The head's output for each batch, one list for each group.

        Raises:
            BatchError: if the forward cannot take a batch.
            OptionError: if an evaluation is not one of the open step, or is for a group of rows only.
        """
        self._use.require_open()
        merged: dict[Evaluation | None, list[Batch]] = {}  # a sweep has each evaluation once
        for at, batches in groups:
            merged.setdefault(at, []).extend(batches)
        prepared = [(at, list(self.prepared(batches, forward))) for at, batches in self._path_through([*merged.items()])]
        with self._recorder.sweep("evaluation"):
            outputs = self.sweep(prepared, forward)
        left = {at: iter(of_evaluation) for (at, _), of_evaluation in zip(prepared, outputs, strict=True)}
        return [list(islice(left[at], len(batches))) for at, batches in groups]

    def _path_through(self, groups: Groups) -> Groups:
        """The groups, and before them those through which weights are perturbed in place."""
        if any(at is not None for at, _ in groups):
            raise OptionError(
                "at", found="a replayer, which has no evaluations", expected="a ZOEngine", remedy="leave it out"
            )
        return groups

    def flush(self) -> None:
        """Bring every segment to the present version. The write-back policy decides what is written to disk."""
        self._use.require_open()
        with self._recorder.sweep("flush"):
            self.sweep([])

    def parameters_now(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield every parameter at the present version, one at a time, in visiting order.

        Yields:
            Name and tensor, with its shape and dtype, on the CPU: a view, valid until the next one, and not to be changed.
        """
        yield from self._present(range(len(self._model.layouts)))

    def learned(self) -> Generator[tuple[str, Learned], None, None]:
        """Yield the learned change of every trained parameter of a low-rank run, in visiting order.

        Yields:
            Name, and the change, which is valid until the next one.

        Raises:
            OptionError: if perturbations are dense, since weights then include their changes.
        """
        factors = self._parts.factors
        if factors is None:
            raise OptionError(
                "perturbation",
                found="dense perturbations, with which weights include their changes",
                expected="low-rank perturbations, whose changes are separate from the weights",
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
        """Bring segments to the present version, and yield their parameters with their bytes on the host."""
        self._use.require_open()
        with self._use.locked():
            parts = self._parts
            visitor = parts.visits.visitor(self.version, [], self._model)
            try:
                for index in segments:
                    with parts.scheduler.replayed(visitor, index) as bucket:
                        parameters = self._model.layouts[index].parameters
                        yield from zip(parameters, bucket.views[: len(parameters)], strict=True)
            finally:
                parts.noise.retain(visitor.seeds)
                self._recorder.flush()

    def export(
        self,
        directory: Path | str,
        *,
        files: Mapping[str, Path | bytes] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        """Write the model at the present version: a directory that ``from_pretrained`` loads, or the model's own format.

        Args:
            directory: A directory that does not exist or is empty. It appears whole or not at all.
            files: Further files of the directory: content, or path of the file to copy, by name. None: no further files.
            progress: Called with the bytes of each parameter once it is written. None: nothing is called.

        Raises:
            OutputError: if the directory is in use or cannot be written.
        """
        self._use.require_open()
        files = {} if files is None else files
        require_unused(Path(directory))
        if isinstance(self._model, CustomExport):
            exported, layouts = self._model.exported_parameters, enumerate(self._model.layouts)
            segments = [i for i, layout in layouts if any(spec.name in exported for spec in layout.parameters)]
            with closing(_counted(self._present(segments), progress)) as tensors:
                self._model.write(Path(directory), tensors, files)
            return
        model, specs = self._model, [spec.decoded for layout in self._model.layouts for spec in layout.parameters]
        form = saved_form(model)
        with closing(_counted(self.parameters_now(), progress)) as tensors:  # releases its bucket even if the write fails
            companions = {**model.companions, **files}
            write_checkpoint(Path(directory), specs, tensors, companions, dtype=model.export_dtype, form=form)

    def close(self) -> None:
        """Stop all work, and close everything that was opened. May be called twice."""
        self._use.close()
        self._parts.opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def note_evaluation(self, results: Mapping[str, float]) -> None:
        """Record the results of an evaluation of the present weights in the journal, after the base's digests.

        Args:
            results: Numbers by name.

        Raises:
            JournalError: if they cannot be written.
        """
        self._parts.base_digests.note(self._parts.journal)
        self._parts.journal.note_evaluation(self.version, results)

    def prepared(self, batches: Iterable[Batch], forward: Forward) -> Iterator[Batch]:
        """Yield the batches on the device, checked by their forward. For methods.

        Raises:
            BatchError: if the forward cannot take a batch.
        """
        for batch in batches:
            require_tensors(batch)
            yield forward.prepared({key: value.to(self._parts.device.torch_device) for key, value in batch.items()})

    def sweep(self, groups: Groups, forward: Forward | None = None) -> list[list[torch.Tensor]]:
        """Visit all segments once. For methods.

        Args:
            groups: The evaluations to make, each with its prepared batches. Empty for a sweep that only replays.
            forward: Runs the segments; None is the model.

        Returns:
            The head's outputs, one list for each evaluation.
        """
        with self._use.locked():
            visitor = self._parts.visits.visitor(self.version, groups, self._model if forward is None else forward)
            return self._run(visitor, range(len(self._model.layouts)))

    def run(self, visitor: SweepVisitor, order: Sequence[int]) -> list[list[torch.Tensor]]:
        """Visit segments in an order. For methods that make their own visitors.

        Args:
            visitor: Visitor of the sweep.
            order: Indices of segments; a block may occur more than once.

        Returns:
            The head's outputs, one list for each evaluation.
        """
        with self._use.locked():
            return self._run(visitor, order)

    def _run(self, visitor: SweepVisitor, order: Sequence[int]) -> list[list[torch.Tensor]]:
        parts = self._parts
        try:
            watched = visitor if self._watch is None else WatchedVisitor(visitor, len(order), self._watch)
            parts.scheduler.sweep(watched, order)
        except BaseException:
            self._recorder.flush()  # its transfers do not count for the next step
            raise
        finally:
            visitor.finish()
            parts.noise.retain(visitor.seeds)
        return visitor.outputs

    def offload_kept(self, step: int) -> None:
        """Offload blocks that stay on the device, if they are due to be written back, before a step. For methods."""
        every = self._parts.source.write_back_every
        if every is not None and step > self._offloaded + every:
            with self._use.locked():
                self._parts.scheduler.release_all()
            self._offloaded = step - 1

    def ended(self, sweep: Sweep) -> Mapping[Lane, LaneUse]:
        """Record that a step ended, and return the use of each lane in it. For methods."""
        return self._recorder.ended(sweep)

    def _filled(self, batches: Iterable[Batch], forward: Forward | None) -> Iterator[list[Batch]]:
        """Prepare batches, and group them by sweep."""
        self._use.require_open()
        forward = self._model if forward is None else forward
        allowed = self._parts.activation_bytes - self._parts.activations.staging_bytes
        for group in fill_sweeps(self.prepared(batches, forward), forward, allowed):
            self._use.require_open()
            yield group


def _counted(
    tensors: Generator[tuple[str, torch.Tensor], None, None], progress: Callable[[int], object] | None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the same tensors, and report the bytes of each once the next is asked for."""
    with closing(tensors):
        for name, tensor in tensors:
            yield name, tensor
            if progress is not None:
                progress(tensor.nbytes)
