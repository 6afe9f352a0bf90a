"""The engine, which users create: a model, a method of making steps, and where the run is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from torch import nn

from zo2core.build import Method, RunInputs, open_run, require_whole_model
from zo2core.checkpoint.export import CustomExport, require_unused, write_checkpoint
from zo2core.encodings.decoding import decoded
from zo2core.errors import OptionError, without_effect
from zo2core.estimators.factors import Learned
from zo2core.journal.journal import Journal
from zo2core.journal.snapshots import Snapshots
from zo2core.kernels.matmul_precision import matmul_precision
from zo2core.methods.gradient_steps import AdapterSteps
from zo2core.methods.states import AdapterState, DiskState
from zo2core.methods.zeroth_order import ZerothOrder, ZerothOrderSteps
from zo2core.planning.memory import DevicePlan, HostPlan, MemoryPolicy
from zo2core.protocols import BlockModel, Device, Forward, Objective
from zo2core.run import EngineOptions, lacking
from zo2core.sweep.microbatch import evaluate
from zo2core.sweep.perturbers import Groups
from zo2core.types import Batch, Evaluation, EvaluationResult, StepResult, saved_form
from zo2core.workers.workers import Workers

Part = TypeVar("Part")


class Engine:
    """Trains, evaluates and exports a model that need not fit into memory, one segment at a time.

    Objects that the caller passes stay the caller's. The engine closes what it opens (paths,
    devices by name) and, unless a source is passed, the model's checkpoint. One engine at a time
    uses a model.

    A first-order step of all parameters that fails after the first update, or is interrupted there,
    leaves weights of two steps. The engine then refuses all further use.

    Args:
        model: A model that is divided into embedding, blocks and head.
        method: How steps are made: ``ZerothOrder(estimator)`` or ``FirstOrder(optimizer)``. None
            takes no steps: the engine evaluates and exports the model with all updates of the
            journal. ``AtSnapshot``: with the parameters of a snapshot.
        journal: Records the steps: a journal, or its path; a missing file is created. None: that of
            ``run``, or none on disk. A journal with updates continues its run. Without a method
            only its updates are read.
        run: Directory of a run that is kept, with its journal and, of first-order steps, its
            snapshots or weights. The run resumes from the last of them, and repeats the steps since
            with the same bits. None keeps no directory.
        device: "cpu", "cuda", "cuda:N" or a ``Device``.
        memory: Memory that the process may use, or its size ("6GiB").
        micro_batch_size: Rows of the micro-batches into which a batch is split; None does not split
            batches.
        options: Options that most runs leave as they are.

    Raises:
        BusyError: if another engine that is open uses the model or the source.
        OptionError: if an option is out of its range, or would have no effect.
        MemoryBudgetError: if not even the smallest plan fits into the memory.
        JournalError: if the journal is damaged, or belongs to another run.
        CheckpointError: if the checkpoint cannot be read, or there are snapshots, but all are
            damaged.
        DeviceError, OutputError, ScratchError: if the device is missing or too small, or a file
            cannot be written.
    """

    def __init__(
        self,
        model: BlockModel,
        method: Method | None = None,
        *,
        journal: Journal | Path | str | None = None,
        run: Path | str | None = None,
        device: Device | str = "cpu",
        memory: MemoryPolicy | int | str = MemoryPolicy(),  # noqa: B008 - frozen
        micro_batch_size: int | None = None,
        options: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    ) -> None:
        self._run, self._state, self._steps = open_run(
            RunInputs(
                model=model,
                method=ZerothOrder(None) if method is None else method,
                journal=journal,
                run=run,
                device=device,
                memory=memory if isinstance(memory, MemoryPolicy) else MemoryPolicy(host=memory),
                micro_batch_size=micro_batch_size,
                options=options,
            )
        )

    @property
    def workers(self) -> Workers:
        """The workers of the run."""
        return self._run.workers

    @property
    def is_divided(self) -> bool:
        """Whether the workers divide the model's blocks: each then has a part of the weights."""
        return self._run.division.is_divided

    @property
    def version(self) -> int:
        """Number of steps taken, including those before a state was loaded.

        It is less than the journal has while first-order steps after a snapshot are repeated.
        """
        return self._state.version

    @property
    def journal(self) -> Journal:
        """The journal of all steps so far."""
        return self._run.journal

    @property
    def host_plan(self) -> HostPlan | None:
        """Plan of host memory; None if the caller passed the source, or the base is shared."""
        plan = self._run.segments.plan
        return None if plan is None else plan.host_plan

    @property
    def device_plan(self) -> DevicePlan | None:
        """Plan of device memory; None if the device computes in host memory, too."""
        plan = self._run.segments.plan
        return None if plan is None else plan.device_plan

    @property
    def activation_bytes(self) -> int:
        """Bytes reserved for activations in the memory in which forwards run."""
        return self._run.segments.activation_bytes

    @property
    def write_back_every(self) -> int | None:
        """Steps that a segment may be ahead of its bytes on disk; None: segments are never
        written.
        """
        return self._run.segments.write_back_every

    @property
    def optimizer(self) -> Any:
        """The optimizer of an adapter, for learning rate schedules.

        The engine calls its ``step``.
        """
        return _require_part(self._state, AdapterState, "optimizer").optimizer

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """An adapter's parameters by name, in registration order, on the device.

        Only change them in place.
        """
        return MappingProxyType(
            _require_part(self._state, AdapterState, "parameters").weights.parameters
        )

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots of a first-order run that is kept."""
        return self._state.require_snapshots("snapshots")

    @property
    def committed(self) -> int:
        """The step of the last commit of segments on disk, from which the run resumes."""
        return _require_part(self._state, DiskState, "committed").committed

    def watch(self, visited: Callable[[int, int], object] | None) -> None:
        """Have a function called after each visit of a sweep, such as one that draws a progress
        bar.

        Args:
            visited: Called in the thread of the sweep, with the number of the sweep's visits so far
                and of all. On a device with its own memory the visit's work may not have ended yet.
                None: nothing is called.
        """
        self._run.progress.watch = visited

    def step(
        self,
        batch: Batch | Sequence[Batch],
        forward: Forward | None = None,
        *,
        seed: int | None = None,
    ) -> StepResult:
        """Take one step.

        A zeroth-order step is one sweep of evaluations, then one record in the journal; the weights
        change when they are next visited. A first-order step is a sweep forward and backward, and
        the optimizer's update; it is committed if that is due.

        Args:
            batch: Input of the forward; for the model's loss, with labels. Several batches count as
                one, as with gradient accumulation: the model's loss is the mean over the labelled
                tokens of all.
            forward: Computes the number to minimise: an ``Objective``, or any forward whose head
                returns a 0-d tensor, for one batch without micro-batches; by default the model,
                whose head returns its loss. First-order steps need one that ``torch.autograd`` can
                differentiate.
            seed: Seed of the first direction of a zeroth-order step; None draws it from the run's
                seed.

        Returns:
            The result of the step.

        In all cases below but the last one the step was not taken. If the message says that
        segments had been changed, the engine is closed.

        Raises:
            BatchError: if the model cannot take the batch.
            NonFiniteLossError: if a loss, a projected gradient or a gradient is not finite.
            OptionError: if the learning rate of this step, the seed, or the micro-batch size for
                this forward is out of its range, the forward's result is not a number or has no
                gradient, or the engine takes no steps.
            JournalError: if the record cannot be written, has a value that would overflow weights,
                or differs from that of the step that it repeats.
            WorkerError: if another worker does not answer, or has another batch or step.
            CheckpointError, ScratchError: if a block cannot be read, a file of the base has changed
                since it was opened, or a file cannot be written.
            BusyError, ClosedError: during an iteration over ``parameters_now``, or after ``close``.
            OutputError: if the trace cannot be written; the step was taken.
        """
        self._run.use.require_open()
        if self._steps is None:
            raise lacking("step", "a method", "ZerothOrder or FirstOrder")
        self._run.require_unchanged()
        return self._steps.step(batch, forward, seed=seed)

    def gradients(self, batch: Batch | Sequence[Batch], forward: Forward | None = None) -> float:
        """Add the gradients of a batch's loss to ``grad`` of an adapter's parameters, as
        ``loss.backward()`` does.

        A custom training loop calls ``engine.gradients(batch)``, ``optimizer.step()`` and
        ``optimizer.zero_grad()``.

        Args:
            batch: As for ``step``.
            forward: As for ``step``.

        Returns:
            The loss.

        Raises:
            ZO2Error: as for ``step``, except that a loss that is not finite is returned. All
                gradients are cleared then.
        """
        self._run.use.require_open()
        steps = _require_part(self._steps, AdapterSteps, "gradients")
        self._run.require_unchanged()
        return steps.gradients(batch, forward)

    def ask(self, *, seed: int | None = None) -> tuple[Evaluation, ...]:
        """Start a zeroth-order step whose losses the caller computes, by ``forwards_at``, and
        passes to ``tell``.

        Args:
            seed: Seed of the first direction; None draws it from the run's seed.

        Returns:
            The evaluations of the step, or this worker's part of them. A step that was started
            before is dropped.

        Raises:
            OptionError: if the learning rate of this step or the seed is out of its range, or
                workers cannot share the step.
            BusyError, ClosedError: as for ``step``.
        """
        steps = self._zeroth_order("ask")
        self._run.require_unchanged()
        return steps.ask(seed=seed)

    def tell(self, losses: Iterable[float | torch.Tensor]) -> StepResult:
        """Take the step that ``ask`` started: write its record to the journal.

        Args:
            losses: The loss of each evaluation that ``ask`` returned, in order: numbers, or 0-d
                tensors, in whose dtype the projected gradients are computed. The call waits for the
                losses of other workers.

        Returns:
            The result of the step.

        Raises:
            OptionError: if no step is open, or there are more or fewer losses.
            NonFiniteLossError, JournalError, WorkerError: as for ``step``. In these cases the step
                was not taken.
        """
        return self._zeroth_order("tell").tell(losses)

    def evaluate(
        self, batches: Iterable[Batch], forward: Objective | None = None
    ) -> EvaluationResult:
        """Evaluate the present weights; memory for activations limits the number of batches in a
        sweep.

        Args:
            batches: Inputs of the forward. The model's loss weights a batch by its labelled tokens.
            forward: The objective to evaluate; by default the model's loss, without terms that it
                adds for training alone, such as that of a mixture's routers.

        Returns:
            The mean loss over labelled tokens, and the loss of each batch; for an objective, its
            loss of all batches.

        Raises:
            BatchError: if the model cannot take a batch, or there is no batch.
            OptionError: if the forward is not an objective, or its result is not a number.
            WorkerError: if another worker does not answer, or has other batches.
        """
        run = self._run
        run.use.require_open()
        if forward is None and isinstance(run.model, Objective):
            forward = run.model
        measured: Forward = getattr(run.model, "measured", run.model)
        return evaluate(
            partial(self.forwards, forward=measured if forward is None else forward),
            batches,
            run.micro_batch_size,
            run.workers,
            forward,
        )

    def forwards(
        self,
        batches: Iterable[Batch],
        forward: Forward | None = None,
        *,
        at: Evaluation | None = None,
    ) -> Iterator[list[torch.Tensor]]:
        """Run batches with the present weights or those of an evaluation; memory for activations
        limits batches per sweep.

        Args:
            batches: Inputs of ``forward``, taken as sweeps run.
            forward: Runs the segments; by default the model, whose head returns losses.
            at: One of the evaluations that ``ask`` returned; None: unperturbed weights. Where
                weights are perturbed in place, a sweep passes all evaluations before it, too:
                ``forwards_at`` runs several in one sweep.

        Yields:
            The head's output for each batch, in order, one list for each sweep.

        Raises:
            BatchError: if the model cannot take a batch.
            OptionError: if no step is open, the evaluation is not part of it, or is for a group of
                rows only.
        """
        run = self._run.model if forward is None else forward
        for group in self._run.filled(batches, run):
            if at is None:
                with self._run.recorder.sweep("evaluation"):
                    *_, outputs = self._run.evaluate(self.version, [(at, group)], run)
            else:  # part of the open step
                path = self._zeroth_order("forwards").path_through([(at, group)])
                *_, outputs = self._run.evaluate(self.version, path, run)
            yield outputs

    def forwards_at(self, groups: Groups, forward: Forward) -> list[list[torch.Tensor]]:
        """Run batches at several evaluations in one sweep, whatever memory they take.

        Args:
            groups: Evaluations of the open step, each with the inputs of ``forward`` to run at it;
                None instead of an evaluation stands for the present weights.
            forward: Runs the segments. One with ``stacked`` and ``heads`` runs low-rank evaluations
                as one batch.

        Returns:
            The head's output for each batch, one list for each group.

        Raises:
            BatchError: if the forward cannot take a batch.
            OptionError: if an evaluation is not one of the open step, or is for a group of rows
                only.
        """
        self._run.use.require_open()
        merged: dict[Evaluation | None, list[Batch]] = {}  # a sweep has each evaluation once
        for evaluation, batches in groups:
            merged.setdefault(evaluation, []).extend(batches)
        path: Groups = [*merged.items()]
        if any(evaluation is not None for evaluation in merged):
            path = self._zeroth_order("forwards_at").path_through(path)
        prepared = [
            (evaluation, list(self._run.prepared(batches, forward))) for evaluation, batches in path
        ]
        with self._run.recorder.sweep("evaluation"):
            outputs = self._run.evaluate(self.version, prepared, forward)
        left = {
            evaluation: iter(of_evaluation)
            for (evaluation, _), of_evaluation in zip(prepared, outputs, strict=True)
        }
        return [list(islice(left[evaluation], len(batches))) for evaluation, batches in groups]

    def flush(self) -> None:
        """Bring every segment to the present version.

        The write-back policy decides what is written to disk.
        """
        self._run.use.require_open()
        with self._run.recorder.sweep("flush"):
            self._run.bring_to(self.version)

    def parameters_now(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield every parameter at the present version, one at a time, in visiting order.

        Yields:
            Name and tensor, with its shape and dtype, on the CPU: a view, valid until the next one,
            and not to be changed.
        """
        yield from self._present_parameters(range(len(self._run.segments.layouts)))

    def learned(self) -> Generator[tuple[str, Learned], None, None]:
        """Yield the learned change of every trained parameter of a low-rank run, in visiting order.

        Yields:
            Name, and the change, which is valid until the next one.

        Raises:
            OptionError: if perturbations are dense, since weights then include their changes.
        """
        factors = self._run.directions.factors
        if factors is None:
            raise OptionError(
                "perturbation",
                found="dense perturbations, with which weights include their changes",
                expected="low-rank perturbations, whose changes are separate from the weights",
                remedy="export the model instead",
            )
        with closing(
            self._run.parameters_at(self.version, range(len(self._run.segments.layouts)))
        ) as visited:
            for spec, view in visited:
                if not spec.frozen:
                    yield spec.name, factors.learned(spec, view)

    def export(
        self,
        directory: Path | str,
        *,
        files: Mapping[str, Path | bytes] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        """Write the model at the present version: a directory that ``from_pretrained`` loads, or
        the model's own format.

        Args:
            directory: A directory that does not exist or is empty. It appears whole or not at all.
            files: Further files of the directory: content, or path of the file to copy, by name.
                None: no further files.
            progress: Called with the bytes of each parameter once it is written. None: nothing is
                called.

        Raises:
            CheckpointError: if a file of the base has changed since it was opened.
            OutputError: if the directory is in use or cannot be written.
        """
        self._run.use.require_open()
        if self._run.division.is_divided:
            expected = "one process, which has all blocks: export the run once it has ended"
            raise without_effect("split", "blocks", expected)
        directory = Path(directory)
        model = self._run.model
        files = {} if files is None else files
        require_unused(directory)
        if isinstance(model, CustomExport):
            exported = model.exported_parameters
            layouts = enumerate(model.layouts)
            segments = [
                i
                for i, layout in layouts
                if any(spec.name in exported for spec in layout.parameters)
            ]
            with closing(self._present_parameters(segments, progress)) as tensors:
                model.write(directory, tensors, files)
            return
        specs = [spec.decoded for layout in model.layouts for spec in layout.parameters]
        form = saved_form(model)
        with closing(self._present_parameters(range(len(model.layouts)), progress)) as tensors:
            companions = {**model.companions, **files}
            write_checkpoint(
                directory,
                specs,
                tensors,
                companions,
                dtype=model.export_dtype,
                form=form,
                origin=model.weights.origin,
            )

    def load_parameters(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of the parameters that first-order steps train: of all of them, before the
        first step.

        Args:
            parameters: Values by name, as in ``state_dict``.

        Raises:
            CheckpointError: if they belong to other parameters, or are not finite; nothing is
                changed then.
            OptionError: if the state of the run is elsewhere, or belongs to its weights.
        """
        self._run.use.require_open()
        self._state.load(parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which later first-order steps depend: parameters, the optimizer's
        state, number of steps.

        Another engine of the same model and optimizer continues from it with the same bits. The
        parameters of an adapter are copies; all parameters of a model are not: the next step
        changes them.

        Raises:
            OptionError: if the state is the journal, or is committed on disk.
        """
        self._run.use.require_open()
        return self._state.snapshot()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a state that ``state_dict`` returned.

        Args:
            state: State of an engine of the same model and the same optimizer.

        Raises:
            CheckpointError: if it is of another model or optimizer; nothing is changed then.
        """
        self._run.use.require_open()
        self._state.restore(state)

    def take_snapshot(self, *, keep: Collection[int] = ()) -> None:
        """Write a snapshot of the present first-order step durably, and delete all older ones but
        the newest of them.

        Args:
            keep: Steps whose snapshots are kept as well.

        Raises:
            OptionError: if the engine has no directory of a run, or commits its segments on disk
                instead.
            OutputError: if it cannot be written.
            WorkerError: if another worker has other parameters.
        """
        self._run.use.require_open()
        self._state.take_snapshot(keep)

    def commit(self) -> None:
        """Commit the present step of a run with ``commit_every`` durably.

        Optimizers with turns commit at their ends only.

        Raises:
            ScratchError: if it cannot be written; the engine is closed then.
        """
        self._run.use.require_open()
        _require_part(self._state, DiskState, "commit").commit_segments()

    def note_evaluation(self, results: Mapping[str, float]) -> None:
        """Record the results of an evaluation of the present weights in the journal, after the
        base's digests.

        Args:
            results: Numbers by name.

        Raises:
            JournalError: if they cannot be written.
        """
        self._run.note_base()
        self.journal.note_evaluation(self.version, results)

    def note_measured(self, results: Mapping[str, float]) -> None:
        """Record in the journal what the step that ``ask`` started has measured beside its losses,
        before ``tell``: equal numbers in all workers.

        Args:
            results: Numbers by name.

        Raises:
            JournalError: if they cannot be written.
        """
        self._run.note_base()
        self.journal.note_measured(results)

    def close(self) -> None:
        """Stop all work, and close everything that was opened. May be called twice."""
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _present_parameters(
        self, segments: Iterable[int], progress: Callable[[int], object] | None = None
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the present parameters of segments, and report the bytes of each once the next is
        asked for.
        """
        factors = self._run.directions.factors
        require_whole_model(self._run.model)
        with closing(self._run.parameters_at(self.version, segments)) as visited:
            for spec, view in visited:
                weights = view if spec.encoding is None else decoded(spec, view)
                present = weights
                if factors is not None and not spec.frozen:
                    with matmul_precision(self._run.matmul_precision):
                        present = factors.present(spec, weights)
                yield spec.name, present.view(spec.shape)
                if progress is not None:
                    progress(present.nbytes)

    def _zeroth_order(self, operation: str) -> ZerothOrderSteps:
        self._run.use.require_open()
        return _require_part(self._steps, ZerothOrderSteps, operation)


_ADAPTER = (
    "first-order steps of an adapter",
    "FirstOrder with a function that makes an optimizer",
)
# what an engine lacks without such a part, and the method that has it
_NEEDED: Mapping[type, tuple[str, str]] = {
    ZerothOrderSteps: ("zeroth-order steps", "ZerothOrder(estimator)"),
    AdapterSteps: _ADAPTER,
    AdapterState: _ADAPTER,
    DiskState: (
        "segments that are committed on disk",
        "FirstOrder(BlockUpdate) with run and commit_every",
    ),
}


def _require_part(part: object, kind: type[Part], operation: str) -> Part:
    if isinstance(part, kind):
        return part
    raise lacking(operation, *_NEEDED[kind])
