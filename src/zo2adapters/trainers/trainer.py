"""Fine-tune a checkpoint on a JSONL file: the main job, as a library call and behind ``zo2 train``."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from zo2adapters.models.footprint import cache_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.row_source import saved_path
from zo2adapters.tasks.rows import training_batches
from zo2adapters.tasks.task import Task, TaskOptions, make_evaluation, make_task
from zo2adapters.trainers.allocator import with_kept_memory
from zo2adapters.trainers.engines import Opening, replayer, require_finite_base, verify_with_progress
from zo2adapters.trainers.methods import method_of
from zo2adapters.trainers.metrics import (
    LiveMetrics,
    best_step,
    criteria_of,
    criterion,
    is_due,
    progress,
    row_of_evaluation,
    shown_results,
    step_record,
    write_row,
)
from zo2adapters.trainers.model_card import files_of_run
from zo2adapters.trainers.options import Execution, TrainOptions, evaluations_due
from zo2adapters.trainers.progress_bar import StepBar, export_bar, sweep_bars
from zo2adapters.trainers.provenance import provenance, require_same_files
from zo2adapters.trainers.run_directory import (
    JOURNAL,
    METRICS,
    MODEL,
    SAMPLES,
    RunDirectory,
    header_of,
    holds_model,
    replace_file,
    require_new,
)
from zo2adapters.trainers.run_inputs import RunInputs
from zo2adapters.trainers.run_plan import first_line, planned
from zo2adapters.trainers.samples import Samples
from zo2adapters.trainers.worker_options import device_kinds, is_first, require_same_steps
from zo2core import Engine, HostPlan, Journal, SharedBase, Workers
from zo2core.errors import (
    CheckpointError,
    DivergenceError,
    JournalError,
    NonFiniteLossError,
    OptionError,
    OutputError,
    ScratchError,
)
from zo2core.io.durable import open_no_follow
from zo2core.ranges import counted

_RESUMABLE = (CheckpointError, JournalError, OutputError, ScratchError)  # errors of a disk, after whose repair runs resume


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
        method_of(options, shared)  # checks the options that depend on neither model nor data
        if resume:
            require_same_files(options, header_of(options.output / JOURNAL))
        else:
            require_new(options.output)
        self._quiet, self._resumed, self._workers = quiet, resume, workers
        self._label, self._shared = label, shared
        execution = Execution() if execution is None else execution
        self._inputs = inputs = RunInputs.read(options, workers)
        self.options, self._model = inputs.options, inputs.model
        self._method = method_of(self.options, shared)
        require_same_steps(self.options.steps, workers)
        self._task, self._evaluated = self._made_task(inputs, evaluates=evaluates)
        self._samples = self._made_samples(inputs)
        self._activations, least = self._reserved_bytes(inputs)
        tokens = inputs.tokens()
        self._run = RunDirectory(self.options, tokens, resume=resume)
        with self._abandoned_on_error():
            if resume:
                self._run.require_same_base(self.options, self._model)
            decides = self._prepared(inputs, tokens)
            self.plan = planned(inputs) if plans else None
            self.engine = self._method.engine(
                Opening(
                    model=self._model,
                    activations=self._activations,
                    least_activations=least,
                    decides=decides,
                    execution=execution,
                    workers=workers,
                    shared=shared,
                )
            )
            if execution.verify_base:
                self._verify_base(self._model)
        self.host_plan = self._host_plan()
        if resume:
            try:
                _require_steps_left(self.options, self.engine.journal.version)
                self._run.save(self.options)
            except BaseException:
                self.close()
                raise

    def _made_task(self, inputs: RunInputs, *, evaluates: bool) -> tuple[Task, Callable[[Engine], dict[str, float]] | None]:
        """The task of the run, and the function that evaluates it; None: the run is not evaluated."""
        options, model = self.options, inputs.model
        task_options = TaskOptions(
            objective=options.objective,
            pad=inputs.pad,
            batch_size=options.batching.batch_size,
            micro_batch_size=options.batching.micro_batch_size,
            beta=options.beta,
            pack=options.batching.pack,
            per_row=options.optimization.per_row,
            differentiates=self._method.has_gradient,
            rewards=options.rewards if options.rewards.reward else None,
            tokenizer=inputs.tokenizer,
            seed=options.seed,
        )
        task = make_task(model, inputs.data, task_options)
        if inputs.evaluation is None or not evaluates:
            return task, None
        return task, make_evaluation(task, model, inputs.data, inputs.evaluation, task_options)

    def _made_samples(self, inputs: RunInputs) -> Samples | None:
        """The prompts that are answered; None: the options ask for none."""
        if not self.options.samples:
            return None
        rows = inputs.data if inputs.evaluation is None else inputs.evaluation
        return Samples(inputs.model, rows, self.options.samples, inputs.tokenizer, inputs.pad)

    def _reserved_bytes(self, inputs: RunInputs) -> tuple[int, int]:
        """Memory for activations, those of generated answers included, and the least of it that a device needs."""
        options = self.options
        activations, least = self._method.reserved_bytes(inputs.model, inputs.largest)
        if options.storage.activation_memory is not None:
            return activations, least
        generated = [] if self._samples is None else [self._samples.shape]
        if inputs.evaluation is not None and inputs.evaluation.new_tokens:
            generated.append((options.batching.batch_size, inputs.longest))
        cache = max((cache_bytes(inputs.model.config, *shape) for shape in generated), default=0)
        return activations + cache, least + cache

    def _prepared(self, inputs: RunInputs, tokens: dict[str, object]) -> dict[str, Any]:
        """Prepare the task, and return the run's provenance, which has the digests of its tokens."""
        options, workers = self.options, self._workers
        open_base = partial(replayer, options, inputs.model, self._activations, workers, shared=self._shared)
        self._task.prepare(open_base, self._remaining_rows)
        return provenance(
            options,
            inputs.directory,
            tokens,
            data_sha256=self._run.checksums[saved_path(options.data)],
            sequence_length=inputs.length,
            devices=device_kinds(options.storage.device, workers),
            task=self._task.provenance,
        )

    def _host_plan(self) -> HostPlan:
        """The plan of host memory, of this run or of the shared base, with the freed memory that the process keeps."""
        plan: HostPlan | None = self.engine.host_plan if self._shared is None else self._shared.host_plan
        assert plan is not None, "the engine has planned its memory"
        if self.options.storage.device != "cpu" or self._method.has_gradient:  # graphs take what memory is spare
            return plan
        return with_kept_memory(plan, self._activations)

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        """Close the run's directory if the body raises an error; remove it if the run is new."""
        try:
            yield
        except BaseException:
            self._task.close()
            if self._resumed:
                self._run.close()
            else:
                self._run.remove()
            raise

    def notices(self) -> list[str]:
        """Lines about precision and data to print before the run."""
        return self._inputs.notices()

    @property
    def losses(self) -> list[float]:
        """The loss of each step so far, before its update."""
        return self._method.losses(self.engine.journal)

    def divergence(self) -> str | None:
        """A line that says that the steps have destroyed the model; None if they have not."""
        return self._method.verdict(self.engine.journal)

    def first_lines(self) -> list[str]:
        """Lines to print before the run: method, time, memory and disk in the first one."""
        host = self.host_plan
        if self.plan is not None and self.plan.host_plan.buckets == host.buckets:
            host = self.plan.host_plan  # with the graphs that a first-order step keeps in spare memory
        memory = self._method.storage(self.engine, host, self._model)
        line = memory if self.plan is None else f"{first_line(self.options, self.plan)} {memory}"
        return [line, *self.notices()]

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
        except DivergenceError as error:
            raise self._method.explained(error, self.engine) from error
        except NonFiniteLossError as error:
            try:
                require_finite_base(self._model, self.options.model)
            finally:
                self._remove_if_unstarted(error)
            explained = self._method.explained(error, self.engine)
            if explained is error:
                raise
            raise explained from error
        except Exception as error:
            self._remove_if_unstarted(error)
            raise

    def _remove_if_unstarted(self, error: Exception) -> None:
        """Remove the directory of a failed run, unless the run can be resumed."""
        if not (self._resumed or self.engine.version or isinstance(error, _RESUMABLE)):
            self.engine.close()
            self._run.remove()

    def _remaining_rows(self) -> list[Any]:
        """Rows of the remaining steps and evaluations, the same for all workers."""
        options, batch_size = self.options, self.options.batching.batch_size
        with closing(Journal(options.output / JOURNAL if self._resumed else None)) as journal:
            _require_steps_left(options, journal.version)
            taken = self._method.first_step(journal)
        taken = taken if self._workers is None else min(self._workers.all_gather(taken))
        batches = training_batches(self._inputs.data, batch_size=batch_size, seed=options.seed, first_step=taken)
        steps = options.steps - taken
        is_all = steps * batch_size >= 2 * len(
            self._inputs.data
        )  # the steps contain a whole epoch, wherever they start in one
        return [
            *(self._inputs.data if is_all else chain.from_iterable(islice(batches, steps))),
            *(self._inputs.evaluation or ()),
        ]

    def _take_steps(self) -> None:
        options, engine = self.options, self.engine
        batches = training_batches(
            self._inputs.data, batch_size=options.batching.batch_size, seed=options.seed, first_step=engine.version
        )
        self._run.metrics(engine.journal)
        evaluated = {*engine.journal.evaluations}
        if self._workers is not None:  # a worker that joined late has no metrics, and all workers evaluate together
            evaluated = {*self._workers.all_gather(sorted(evaluated))[0]}
        recorded = engine.journal.version  # earlier steps are repeated and have their rows already
        tracker = options.report_to if is_first(self._workers) else "none"
        with (
            closing(LiveMetrics(tracker, options.output, options.to_json())) as live,
            open(options.output / METRICS, "ab", buffering=0, opener=open_no_follow) as metrics,
            StepBar(
                evaluations=self._evaluations_left(engine.version + (engine.version in evaluated)),
                desc=self._label,
                leave=self._label is None,
                total=options.steps,
                initial=engine.version,
                disable=self._quiet,
            ) as bar,
            sweep_bars(engine, quiet=self._quiet or self._shared is not None),
        ):
            snapshots = self._method.snapshot_bytes(engine)
            while True:
                if self._evaluated is not None and is_due(options, engine.version) and engine.version not in evaluated:
                    self._evaluate(self._evaluated, metrics, live, bar)
                if engine.version in (0, options.steps) or (options.rewards.reward and is_due(options, engine.version)):
                    self._write_samples()
                if engine.version >= options.steps:
                    break
                rows = next(batches)
                batch = self._task.batch(rows)
                result = self._task.step(engine, rows, batch)
                lines = self._method.after_step(engine, result)
                written, snapshots = snapshots, self._method.snapshot_bytes(engine)
                measured = {**self._task.measured, "snapshot_bytes": snapshots - written}
                record = step_record(engine.journal.steps[result.step], result, batch, measured)
                if result.step >= recorded:
                    write_row(metrics, record)
                    live.row(record)
                for line in lines:
                    self._print(bar, line)
                bar.set_postfix_str(progress(record), refresh=False)
                bar.update()

    def _export(self) -> Path:
        """Write the model, unless an earlier process did: a directory appears whole or not at all."""
        exported = self.options.output / MODEL
        for leftover in self.options.output.glob(f".{MODEL}.partial-*"):  # by an export that was killed
            shutil.rmtree(leftover)
        if not holds_model(exported):
            best = best_step(criteria_of(self.engine.journal.evaluations)) if self.options.keep_best else None
            if best in (None, self.engine.version):
                self._write_model(self.engine, exported, self.engine.version)
            else:
                assert best is not None
                with self._at_step(best) as at_step:
                    self._write_model(at_step, exported, best)
        return exported

    def _write_model(self, runner: Engine, directory: Path, step: int) -> None:
        options, opening = self.options, self.options.model_options
        card: Any = {"head": opening.head, "is_adapter": opening.trains_adapter}
        files = files_of_run(self.engine.journal, version=step, base=options.model, options=options, **card)
        with export_bar(self._model, quiet=self._quiet) as progress:
            runner.export(directory, files=files, progress=progress)

    def best_evaluation(self) -> str | None:
        """A line about the best evaluation; None without evaluations."""
        evaluations = self.engine.journal.evaluations
        best = best_step(criteria_of(evaluations))
        if best is None:
            return None
        return f"best of {counted(len(evaluations), 'evaluation')}: step {best}, {shown_results(evaluations[best])}"

    def evaluation_losses(self) -> list[float]:
        """The number of each evaluation so far by which steps are compared. See ``criterion``."""
        return list(criteria_of(self.engine.journal.evaluations).values())

    def seconds(self) -> float:
        """Seconds of all steps so far, as metrics.jsonl has them."""
        rows = self._run.metrics(self.engine.journal)
        return math.fsum(row.get("seconds", 0.0) for row in rows)

    def _at_step(self, step: int) -> Engine:
        """The model of an earlier step. Updates cannot be undone, so it is made from the base; the engine is closed."""
        self.engine.close()
        return self._method.at_step(self.engine, self._model, self._activations, step)

    def close(self) -> None:
        """Close the engine and release the directory's lock. May be called twice."""
        self.engine.close()
        self._task.close()
        self._run.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verify_base(self, model: HFBlockModel) -> None:
        """Compare the whole base with the journal's digests, and record digests that the journal does not have yet."""
        journal = self.engine.journal
        try:
            unknown = verify_with_progress(model, journal, quiet=self._quiet)
            if unknown:
                journal.note_base(unknown)
        except BaseException:
            self.engine.close()
            raise

    def _evaluations_left(self, version: int) -> int:
        """Evaluations that are still due after this number of steps."""
        options = self.options
        return 0 if self._evaluated is None else evaluations_due(options.steps, options.evaluate_every, version=version)

    def _evaluate(
        self, evaluated: Callable[[Engine], dict[str, float]], metrics: IO[bytes], live: LiveMetrics, bar: StepBar
    ) -> None:
        began = time.perf_counter()
        results = evaluated(self.engine)
        seconds = time.perf_counter() - began
        self._method.before_recording(self.engine, criterion(results))
        self.engine.note_evaluation(results)
        bar.count_evaluation(seconds, left=self._evaluations_left(self.engine.version + 1))
        record = {**row_of_evaluation(self.engine.version, results), "evaluation_seconds": seconds}
        write_row(metrics, record)
        live.row(record)
        self._print(bar, f"step {self.engine.version}: evaluation {shown_results(results)}, {seconds:.1f} s")

    def _write_samples(self) -> None:
        """Answer the prompts of the run's samples, in the first worker alone."""
        if self._samples is not None and is_first(self._workers):
            content = self._samples.write(self.engine, self.options.output, self.engine.version)
            if content is not None:
                replace_file(self.options.output / SAMPLES, content)

    def _print(self, bar: StepBar, line: str) -> None:
        """Print a line above the bar, with the run's label. With several workers only the first one prints."""
        if is_first(self._workers):
            bar.write(line if self._label is None else f"{self._label}: {line}", file=sys.stderr)


def _require_steps_left(options: TrainOptions, taken: int) -> None:
    if options.steps < taken:
        raise OptionError(
            "steps",
            found=str(options.steps),
            expected=f"at least {taken}, the steps that the run has already taken",
            remedy=f"use zo2 export --run {options.output} --at {options.steps} to write the model of that step",
        )
