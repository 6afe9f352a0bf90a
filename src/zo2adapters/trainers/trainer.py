"""Fine-tune a checkpoint on a JSONL file: the main job, as a library call and behind ``zo2
train``.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from zo2adapters.trainers.division import fitting_plan, read_inputs
from zo2adapters.trainers.methods import StepMemory, method_of, require_finite_base
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
from zo2adapters.trainers.model_card import ExportedModel, files_of_run
from zo2adapters.trainers.options import Execution, TrainOptions
from zo2adapters.trainers.process import (
    device_kinds,
    is_first,
    require_same_steps,
    with_kept_memory,
)
from zo2adapters.trainers.run_directory import (
    JOURNAL,
    RunDirectory,
    provenance,
    require_resumable,
    require_same_base_files,
    require_same_files,
)
from zo2adapters.trainers.run_inputs import RunInputs
from zo2adapters.trainers.run_plan import duration, first_line, planned
from zo2adapters.trainers.run_tasks import RunTasks
from zo2core import Engine, HostPlan, Journal, SharedBase, Workers
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


class Trainer:
    """One run: opens model and data, takes steps, evaluates, and exports the model."""

    def __init__(
        self,
        options: TrainOptions,
        *,
        resume: bool = False,
        quiet: bool = False,
        label: str | None = None,
        execution: Execution | None = None,
        workers: Workers | None = None,
        evaluates: bool = True,
        plans: bool = False,
        shared: SharedBase | None = None,
    ) -> None:
        options.require_valid()
        options.require_packages()
        # checks the options that depend on neither model nor data
        self._method = method_of(options, shared, workers)
        self._quiet = quiet
        self._workers = workers
        self._label = label
        execution = Execution() if execution is None else execution
        self._run = run = RunDirectory(options.output, resume=resume)
        with ExitStack() as on_error:
            on_error.callback(run.abandon)
            self._first_step = 0
            if resume:
                with closing(Journal(options.output / JOURNAL)) as journal:
                    header = journal.header
                    require_same_files(options, header)
                    self._first_step = self._method.first_step(journal)
            self._method.kept_free = 0 if resume else self._method.kept_free
            self._inputs = inputs = read_inputs(options, workers, resume=resume, digests=True)
            self.options, self._model = options, model = inputs.options, inputs.model
            self._method.options = options  # with what was chosen for this machine
            require_same_steps(options.steps, workers)
            self._task, self._evaluated, self._samples = RunTasks.of(inputs, evaluates=evaluates)
            on_error.callback(self._task.close)
            memory = self._reserved_bytes(inputs)
            self._activations = memory.nbytes
            run.begin(inputs)
            if resume:
                require_same_base_files(model, header)
            self._task.prepare(
                partial(self._method.open, model, self._activations), self._remaining_rows
            )
            devices = device_kinds(options.storage.device, workers)
            decides = provenance(inputs, devices=devices, task=self._task.provenance)
            self.plan = planned(inputs) if plans else None
            self.engine: Any = self._method.engine(model, memory, decides, execution)
            on_error.callback(self.engine.close)
            journal = self.engine.journal
            if execution.verify_base and (unknown := verified_base(model, journal, quiet=quiet)):
                journal.note_base(unknown)
            plan = self.engine.host_plan if shared is None else shared.host_plan
            assert plan is not None, "the engine has planned its memory"
            # On a device, or where graphs take what memory is spare, freed memory is not kept.
            keeps = options.storage.device == "cpu" and not self._method.has_gradient
            self.host_plan: HostPlan = with_kept_memory(plan, self._activations) if keeps else plan
            # whether memory has no room for the activations of a step once more
            self.is_tight = options.storage.device == "cpu" and self._activations > plan.spare
            if resume:
                require_resumable(options, journal)  # with what other workers have had
                run.save(options)
            on_error.pop_all()

    def _reserved_bytes(self, inputs: RunInputs) -> StepMemory:
        """Memory for activations, and the least of it that a device needs."""
        method = self._method
        shapes = inputs.shapes()
        if method.shared is not None or inputs.options.storage.device != "cpu":
            return method.reserved_bytes(inputs.model, shapes)
        neighbours = 1 if self._workers is None else self._workers.neighbours
        return fitting_plan(method, inputs.model, shapes, neighbours=neighbours).memory

    def notices(self) -> list[str]:
        """Lines about precision and data to print before the run."""
        return self._inputs.notices()

    def first_lines(self) -> list[str]:
        """Lines to print before the run: method, time, memory and disk in the first one."""
        engine = self.engine
        memory = self._method.storage(
            self._model, self._told_plan, engine.device_plan, engine.write_back_every
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
        return self._method.how_to_continue(self.engine)

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
                    require_finite_base(self._model)
            finally:
                # the directory of a run that has not started is removed, unless the run can be
                # resumed
                if not (self.engine.version or isinstance(error, _RESUMABLE)):
                    self.engine.close()
                    self._run.abandon()
            explained = self._method.explained(error, self.engine)
            if explained is error:
                raise
            raise explained from error

    def _remaining_rows(self) -> list[Any]:
        """Rows of the remaining steps and evaluations, the same for all workers."""
        data, taken = self._inputs.data, self._first_step
        taken = taken if self._workers is None else min(self._workers.all_gather(taken))
        steps = max(self.options.steps - taken, 0)
        # The steps contain a whole epoch, wherever they start in one.
        is_all = steps * self.options.batching.batch_size >= 2 * len(data)
        rows = data if is_all else chain.from_iterable(islice(self._inputs.batches(taken), steps))
        return [*rows, *(self._inputs.evaluation or ())]

    def _take_steps(self) -> None:
        options, engine = self.options, self.engine
        batches = self._inputs.batches(engine.version)
        evaluated = self._steps_evaluated()
        recorded = engine.journal.version  # earlier steps are repeated and have their rows already
        tracker = options.report_to if is_first(self._workers) else "none"
        left = self._evaluations_left(engine.version + (engine.version in evaluated))
        with (
            self._run.metrics(engine.journal) as file,
            closing(LiveMetrics(tracker, options.output, file, options.to_json())) as metrics,
            StepBar(
                self._label,
                options.steps,
                initial=engine.version,
                evaluations=left,
                quiet=self._quiet,
            ) as bar,
            sweep_bars(engine, quiet=self._quiet or self._method.shared is not None),
        ):
            snapshots = self._method.snapshot_bytes(engine)
            seconds = list[float]()
            while True:
                self._measure_if_due(evaluated, metrics, bar)
                if engine.version >= options.steps:
                    break
                rows = next(batches)
                batch = self._task.batch(rows)
                result = self._task.step(engine, rows, batch)
                lines = self._method.after_step(engine, result)
                written = snapshots
                snapshots = self._method.snapshot_bytes(engine)
                measured = {**self._task.measured, "snapshot_bytes": snapshots - written}
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
        if self._workers is None:
            return {*evaluated}
        # a worker that joined late has no metrics, and all workers evaluate together
        return {*self._workers.all_gather(evaluated)[0]}

    def _measure_if_due(
        self, evaluated: Collection[int], metrics: LiveMetrics, bar: StepBar
    ) -> None:
        """Evaluate after the present step, unless it was, and write samples, each where it is
        due.
        """
        at = self.engine.version
        is_due = self.options.is_evaluated_after(at)
        if self._evaluated is not None and is_due and at not in evaluated:
            self._evaluate(self._evaluated, metrics, bar)
        answers = at in (0, self.options.steps) or (self.options.rewards.reward and is_due)
        if answers and self._samples is not None and is_first(self._workers):
            self._samples.write(self.engine, self._run)

    def _correction(self, seconds: Sequence[float], bar: StepBar) -> str | None:
        """A line with the measured time and memory of a long run's first steps, unless the plan
        told the same.
        """
        step = statistics.median(seconds)
        used = peak_memory()
        left = (self.options.steps - self.engine.version) * step + bar.evaluation_seconds
        if self._quiet or self._label is not None or left < _LONG:
            return None
        measured = f"{duration(step)} a step"
        memory = f"peak memory {shown_bytes(used)}"
        if self.plan is not None:
            told, planned = self.plan.seconds, self._told_plan.nbytes
            is_streamed = self.host_plan.buckets is not None and not self._method.has_gradient
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
        options = self.options
        engine = self.engine
        exported = self._run.model
        if self._run.has_model():
            return exported
        best = best_step(engine.journal.evaluations) if options.keep_best else None
        step = engine.version if best is None else best
        # with the labels of the rows
        rows = None if options.takes_labels else self._inputs.data.options
        model_options = options.model_options
        written = ExportedModel(
            version=step, head=model_options.head, is_adapter=model_options.trains_adapter
        )
        files = files_of_run(
            engine.journal, written, base=options.model, options=options, rows=rows
        )
        with ExitStack() as opened:
            if step != engine.version:  # updates cannot be undone: the model is made from the base
                engine.close()
                engine = opened.enter_context(
                    self._method.at_step(engine, self._model, self._activations, step)
                )
            progress = opened.enter_context(export_bar(self._model, quiet=self._quiet))
            engine.export(exported, files=files, progress=progress)
        return exported

    def last_lines(self) -> list[str]:
        """Lines to print after the run: that the steps have destroyed the model, if they have, the
        best evaluation, and that it is the base that was exported, if nothing was better.
        """
        journal = self.engine.journal
        evaluations, last = journal.evaluations, journal.version
        lines = [self._method.verdict(journal), best_line(evaluations)]
        best = best_step(evaluations)
        if not self.options.keep_best and best not in (None, last):
            lines.append(f"{self._run.model} has the weights of the last step, {last}")
        if self.options.keep_best and best == 0 < last:
            output = self.options.output
            lines.append(
                f"{untrained_line(evaluations)}: {self._run.model} has the base's weights. To get "
                f"those of the last step: zo2 export --run {output} --at {last} --output DIR"
            )
        return [line for line in lines if line is not None]

    def close(self) -> None:
        """Close the engine and release the directory's lock. May be called twice."""
        self.engine.close()
        self._task.close()
        self._run.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _evaluations_left(self, version: int) -> int:
        """Evaluations that are still due after this number of steps."""
        return 0 if self._evaluated is None else self.options.evaluations_from(version)

    def _evaluate(
        self, evaluated: Callable[[Engine], dict[str, float]], metrics: LiveMetrics, bar: StepBar
    ) -> None:
        began = time.perf_counter()
        results = evaluated(self.engine)
        seconds = time.perf_counter() - began
        self._method.before_recording(self.engine, results)
        self.engine.note_evaluation(results)
        bar.count_evaluation(seconds, left=self._evaluations_left(self.engine.version + 1))
        self._print(bar, metrics.evaluation(self.engine.version, results, seconds))

    def _print(self, bar: StepBar, line: str) -> None:
        """Print a line above the bar, with the run's label.

        With several workers only the first one prints.
        """
        if is_first(self._workers):
            bar.write(line if self._label is None else f"{self._label}: {line}", file=sys.stderr)
