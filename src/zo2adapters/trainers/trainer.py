"""Fine-tune a checkpoint on a JSONL file: the main job, as a library call and behind ``zo2
train``.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from zo2adapters.trainers.methods import RunMethod, checked_method, require_finite_base
from zo2adapters.trainers.metrics import (
    LiveMetrics,
    StepBar,
    best_line,
    best_step,
    export_bar,
    sweep_bars,
    untrained_line,
    verified_base,
)
from zo2adapters.trainers.options import Execution, TrainOptions
from zo2adapters.trainers.preparation import prepare
from zo2adapters.trainers.process import (
    device_kinds,
    is_first,
    require_same_steps,
    with_kept_memory,
)
from zo2adapters.trainers.run_directory import (
    HeldRun,
    begin_branch,
    provenance,
    remove_files,
    require_resumable,
    require_same_base_files,
    require_same_files,
)
from zo2adapters.trainers.run_inputs import RunInputs, RunStart
from zo2adapters.trainers.run_plan import RunPlan, duration, first_line, planned
from zo2adapters.trainers.run_tasks import RunTasks
from zo2core import Engine, HostPlan
from zo2core.errors import (
    CheckpointError,
    JournalError,
    NonFiniteLossError,
    OutputError,
    ScratchError,
)
from zo2core.io.process_memory import peak_memory
from zo2core.ranges import counted
from zo2core.types import shown_bytes

# errors of a disk, after whose repair runs resume
_RESUMABLE = (CheckpointError, JournalError, OutputError, ScratchError)

_MEASURED = 3  # steps after which a plan is compared with what they took
_WRONG_TIME, _WRONG_MEMORY = 1.3, 1.1  # factors from which on a plan is corrected
_LONG = 60  # seconds that are left from which on a plan is corrected


class Display(NamedTuple):
    """What a run shows of its progress."""

    quiet: bool = False
    label: str | None = None  # name of the run, before what it prints, if several run


QUIET = Display(quiet=True)


def open_run(
    start: RunStart,
    *,
    display: Display = Display(),  # noqa: B008 - frozen
    execution: Execution | None = None,
    plans: bool = False,
) -> Trainer:
    """Open a run: a new one, or one that goes on. What fails leaves nothing of a new one.

    Args:
        start: The run.
        display: What is shown of its progress.
        execution: How this process executes it.
        plans: Whether its time and memory are planned, to be told.
    """
    execution = Execution() if execution is None else execution
    of_options = checked_method(start)
    output = start.options.output
    with ExitStack() as refused:
        if start.branch is not None:
            refused.callback(remove_files, output, begin_branch(start.branch, start.options))
            start = replace(start, resumes=True, branch=None)
        directory = HeldRun(output, resume=start.resumes)
        refused.callback(directory.abandon)
        journal = refused.enter_context(directory.journal())
        first_step = 0
        if start.resumes:
            require_same_files(start.options, journal.header)
            first_step = of_options.first_step(journal)
        prepared = prepare(start, digests=True)
        inputs, method, memory, _ = prepared
        options, model = inputs.options, inputs.model
        require_same_steps(options.steps, start.workers)
        tasks = RunTasks.of(inputs, evaluates=start.evaluates)
        refused.callback(tasks.task.close)
        directory.begin(inputs)
        if start.resumes:
            require_same_base_files(model, journal.header)
        tasks.task.prepare(
            partial(method.open, model, memory.nbytes),
            lambda: _remaining_rows(inputs, start, first_step),
        )
        devices = device_kinds(options.storage.device, start.workers)
        decides = provenance(inputs, devices=devices, task=tasks.task.provenance)
        plan = planned(prepared) if plans else None
        unknown: Mapping[str, str] = {}
        if execution.verify_base:  # of all segments: an engine may have a part of them
            unknown = verified_base(model, journal, quiet=display.quiet)
        engine = method.engine(model, memory, journal, decides, execution)
        refused.callback(engine.close)
        if unknown:
            journal.note_base(unknown)
        if start.resumes:
            require_resumable(options, journal)  # with what other workers have had
            directory.save(options)
        refused.pop_all()
        return Trainer(
            start=start,
            display=display,
            directory=directory,
            inputs=inputs,
            method=method,
            activations=memory.nbytes,
            tasks=tasks,
            plan=plan,
            engine=engine,
        )


def _remaining_rows(inputs: RunInputs, start: RunStart, first_step: int) -> list[Any]:
    """Rows of the remaining steps and evaluations, the same for all workers: at the earliest from
    this step.
    """
    options = inputs.options
    data = inputs.data
    taken = first_step
    if start.workers is not None:
        taken = min(start.workers.all_gather(taken))
    steps = max(options.steps - taken, 0)
    # The steps contain a whole epoch, wherever they start in one.
    is_all = steps * options.batching.batch_size >= 2 * len(data)
    rows = data if is_all else chain.from_iterable(islice(inputs.batches(taken), steps))
    return [*rows, *(inputs.evaluation or ())]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One open run: takes steps, evaluates, and exports the model. See ``open_run``."""

    start: RunStart
    display: Display
    directory: HeldRun
    inputs: RunInputs
    method: RunMethod
    activations: int  # bytes that are reserved for them
    tasks: RunTasks
    plan: RunPlan | None  # to be told; None: it was not planned
    engine: Engine

    @property
    def options(self) -> TrainOptions:
        """The options of the run, with what was chosen for this machine."""
        return self.inputs.options

    @property
    def _on_cpu(self) -> bool:
        return self.options.storage.device == "cpu"

    @property
    def _engine_plan(self) -> HostPlan:
        """The plan of host memory of the engine, or of the base that it shares."""
        shared = self.start.shared
        plan = self.engine.host_plan if shared is None else shared.host_plan
        assert plan is not None, "the engine has planned its memory"
        return plan

    @property
    def host_plan(self) -> HostPlan:
        """The plan of host memory, with what the allocator keeps."""
        # On a device, or where graphs take what memory is spare, freed memory is not kept.
        keeps = self._on_cpu and not self.method.has_gradient
        return with_kept_memory(self._engine_plan, self.activations) if keeps else self._engine_plan

    @property
    def is_tight(self) -> bool:
        """Whether memory has no room for the activations of a step once more."""
        return self._on_cpu and self.activations > self._engine_plan.spare

    def notices(self) -> list[str]:
        """Lines about precision and data to print before the run."""
        return self.inputs.notices()

    def first_lines(self) -> list[str]:
        """Lines to print before the run: method, time, memory and disk in the first one."""
        engine = self.engine
        memory = self.method.storage(
            self.inputs.model, self._told_plan, engine.device_plan, engine.write_back_every
        )
        line = memory if self.plan is None else f"{first_line(self.options, self.plan)} {memory}"
        return [line, *self.notices()]

    @property
    def _told_plan(self) -> HostPlan:
        """The plan of host memory, with the graphs that a first-order step keeps in spare
        memory.
        """
        is_same = self.plan is not None and self.plan.host_plan.buckets == self.host_plan.buckets
        return self.plan.host_plan if self.plan is not None and is_same else self.host_plan

    def how_to_continue(self) -> str:
        """Lines that say how to continue the interrupted run."""
        return self.method.how_to_continue(self.engine)

    def run(self) -> Path:
        """Train, evaluate and export."""
        self.train()
        return self._export()

    def train(self) -> None:
        """Take the remaining steps, with their evaluations."""
        try:
            self._take_steps()
        except Exception as error:
            # whatever ends the steps: nothing half-done stays, and the error is raised again
            try:
                if isinstance(error, NonFiniteLossError):
                    require_finite_base(self.inputs.model)
            finally:
                # the directory of a run that has not started is removed, unless the run can be
                # resumed
                if not (self.engine.version or isinstance(error, _RESUMABLE)):
                    self._close_engine()
                    self.directory.abandon()
            explained = self.method.explained(error, self.engine)
            if explained is error:
                raise
            raise explained from error

    def _take_steps(self) -> None:
        options, engine = self.options, self.engine
        batches = self.inputs.batches(engine.version)
        evaluated = self._steps_evaluated()
        recorded = engine.journal.version  # earlier steps are repeated and have their rows already
        tracker = options.report_to if is_first(self.start.workers) else "none"
        left = self._evaluations_left(engine.version + (engine.version in evaluated))
        with (
            self.directory.open_metrics(engine.journal) as file,
            closing(LiveMetrics(tracker, options.output, file, options.to_json())) as metrics,
            StepBar(
                self.display.label,
                options.steps,
                initial=engine.version,
                evaluations=left,
                quiet=self.display.quiet,
            ) as bar,
            sweep_bars(engine, quiet=self.display.quiet or self.method.shared is not None),
        ):
            snapshots = self.method.snapshot_bytes(engine)
            seconds = list[float]()
            while True:
                self._measure_if_due(evaluated, metrics, bar)
                if engine.version >= options.steps:
                    break
                rows = next(batches)
                batch = self.tasks.task.batch(rows)
                result = self.tasks.task.step(engine, rows, batch)
                lines = self.method.after_step(engine, result)
                written = snapshots
                snapshots = self.method.snapshot_bytes(engine)
                measured = {**self.tasks.task.measured, "snapshot_bytes": snapshots - written}
                is_known = result.step < recorded
                record = metrics.step(
                    engine.journal.steps[result.step], result, batch, measured, is_known=is_known
                )
                seconds.append(record["seconds"])
                if len(seconds) == _MEASURED and (correction := self._correction(seconds, bar)):
                    lines.append(correction)
                for line in lines:
                    self._print(bar, line)
                bar.count_step(record)

    def _steps_evaluated(self) -> set[int]:
        """The steps after which the journal has an evaluation: the first worker's."""
        evaluated = sorted(self.engine.journal.evaluations)
        if self.start.workers is None:
            return {*evaluated}
        # a worker that joined late has no metrics, and all workers evaluate together
        return {*self.start.workers.all_gather(evaluated)[0]}

    def _measure_if_due(
        self, evaluated: Collection[int], metrics: LiveMetrics, bar: StepBar
    ) -> None:
        """Evaluate after the present step, unless it was, and write samples, each where it is
        due.
        """
        at = self.engine.version
        is_due = self.options.is_evaluated_after(at)
        if self.tasks.evaluated is not None and is_due and at not in evaluated:
            self._evaluate(self.tasks.evaluated, metrics, bar)
        answers = at in (0, self.options.steps) or (self.options.rewards.reward and is_due)
        if answers and self.tasks.samples is not None and is_first(self.start.workers):
            self.tasks.samples.write(self.engine, self.directory)

    def _correction(self, seconds: Sequence[float], bar: StepBar) -> str | None:
        """A line with the measured time and memory of a long run's first steps, unless the plan
        told the same.
        """
        step = statistics.median(seconds)
        used = peak_memory()
        left = (self.options.steps - self.engine.version) * step + bar.evaluation_seconds
        if self.display.quiet or self.display.label is not None or left < _LONG:
            return None
        measured = f"{duration(step)} a step"
        memory = f"peak memory {shown_bytes(used)}"
        if self.plan is not None:
            told, planned = self.plan.seconds, self._told_plan.nbytes
            is_streamed = self.host_plan.buckets is not None and not self.method.has_gradient
            # Later steps then replay more updates at a time than the first ones. Memory may still
            # rise, with longer rows.
            grows = is_streamed and (self.engine.write_back_every or 1) > len(seconds)
            is_known = not math.isnan(told)
            is_right = grows or (is_known and max(step, told) <= _WRONG_TIME * min(step, told))
            if is_right and used <= _WRONG_MEMORY * planned:
                return None
            measured = f"{measured} (planned: {duration(told)})"
            memory = f"{memory} (planned: {shown_bytes(planned)})"
        return (
            f"measured in {counted(len(seconds), 'step')}: {measured}, about {duration(left)} "
            f"left; {memory}"
        )

    def _export(self) -> Path:
        """Write the model, unless an earlier process did: a directory appears whole or not at
        all.
        """
        from zo2adapters.trainers.model_card import ExportedModel, files_of_run

        options = self.options
        engine = self.engine
        exported = self.directory.model
        if self.directory.has_model():
            return exported
        best = best_step(engine.journal.evaluations) if options.keep_best else None
        step = engine.version if best is None else best
        # with the labels of the rows
        rows = None if options.takes_labels else self.inputs.data.options
        model_options = options.model_options
        written = ExportedModel(
            version=step,
            head=model_options.head,
            is_adapter=options.trains_adapter_alone,
            has_both=options.optimization.trains_both,
        )
        files = files_of_run(
            engine.journal, written, base=options.model, options=options, rows=rows
        )
        with ExitStack() as opened:
            # updates cannot be undone, and a stage has a part of the weights: the model is made
            # from the base
            if step != engine.version or engine.is_divided:
                engine.close()
                engine = opened.enter_context(
                    self.method.at_step(engine, self.inputs.model, self.activations, step)
                )
            progress = opened.enter_context(export_bar(self.inputs.model, quiet=self.display.quiet))
            engine.export(exported, files=files, progress=progress)
        return exported

    def last_lines(self) -> list[str]:
        """Lines to print after the run: that the steps have destroyed the model, if they have, the
        best evaluation, and that it is the base that was exported, if nothing was better.
        """
        journal = self.engine.journal
        evaluations, last = journal.evaluations, journal.version
        lines = [self.method.verdict(journal), best_line(evaluations)]
        best = best_step(evaluations)
        if not self.options.keep_best and best not in (None, last):
            lines.append(f"{self.directory.model} has the weights of the last step, {last}")
        if self.options.keep_best and best == 0 < last:
            output = self.options.output
            lines.append(
                f"{untrained_line(evaluations)}: {self.directory.model} has the base's weights. To "
                f"get those of the last step: zo2 export --run {output} --at {last} --output DIR"
            )
        return [line for line in lines if line is not None]

    def close(self) -> None:
        """Close the engine and release the directory's lock. May be called twice."""
        self._close_engine()
        self.tasks.task.close()
        self.directory.close()

    def _close_engine(self) -> None:
        """Close the engine and its journal."""
        self.engine.close()
        self.engine.journal.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _evaluations_left(self, version: int) -> int:
        """Evaluations that are still due after this number of steps."""
        return 0 if self.tasks.evaluated is None else self.options.evaluations_from(version)

    def _evaluate(
        self, evaluated: Callable[[Engine], dict[str, float]], metrics: LiveMetrics, bar: StepBar
    ) -> None:
        began = time.perf_counter()
        results = evaluated(self.engine)
        seconds = time.perf_counter() - began
        self.method.before_recording(self.engine, results)
        self.engine.note_evaluation(results)
        bar.count_evaluation(seconds, left=self._evaluations_left(self.engine.version + 1))
        self._print(bar, metrics.evaluation(self.engine.version, results, seconds))

    def _print(self, bar: StepBar, line: str) -> None:
        """Print a line above the bar, with the run's label.

        With several workers only the first one prints.
        """
        if is_first(self.start.workers):
            bar.write(
                line if self.display.label is None else f"{self.display.label}: {line}",
                file=sys.stderr,
            )
