"""Fine-tune a checkpoint on a JSONL file: the main job, as a library call and behind ``zo2 train``."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.batches import training_batches
from zo2adapters.tasks.registry import make_task
from zo2adapters.tasks.row_files import Rows, read_rows
from zo2adapters.tasks.task import TaskOptions
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
from zo2adapters.trainers.allocator import with_kept_memory
from zo2adapters.trainers.base_check import require_finite_base, verify_with_progress
from zo2adapters.trainers.evaluations import best_step, due_steps, is_due, losses_of, row_of_evaluation, shown_steps, told
from zo2adapters.trainers.live_metrics import LiveMetrics
from zo2adapters.trainers.methods import method_of
from zo2adapters.trainers.metrics import progress, step_record, write_row
from zo2adapters.trainers.options import Execution, TrainOptions, evaluations_due
from zo2adapters.trainers.provenance import provenance, require_same_files
from zo2adapters.trainers.run_directory import JOURNAL, METRICS, MODEL, RunDirectory, header_of, holds_model, require_new
from zo2adapters.trainers.run_engine import replayer
from zo2adapters.trainers.run_method import Opening
from zo2adapters.trainers.run_notices import notices
from zo2adapters.trainers.step_bar import StepBar
from zo2adapters.trainers.worker_options import device_kinds, is_first, require_same_steps, settled_alike
from zo2core import (
    CheckpointError,
    DivergenceError,
    Journal,
    JournalError,
    NonFiniteLossError,
    OptionError,
    OutputError,
    Runner,
    ScratchError,
    Workers,
)
from zo2core.io.durable import open_no_follow

_RESUMABLE = (CheckpointError, JournalError, OutputError, ScratchError)  # of a disk: once it is mended, the run goes on


class Trainer:
    """One run: opens model and data, steps, evaluates, exports.

    Args:
        options: The run's options.
        resume: Whether the run is in ``options.output`` already; it then goes on where its journal ends.
        quiet: Whether to show no progress bar.
        label: Stands before the progress bar, which is then gone at the end; None: the bar has none and stays.
        execution: How to work on the run; by default as fast as possible, and without a trace.
        workers: Others that work on the same run, each in a directory of its own; None: there are none.

    Raises:
        ZO2Error: of the kind that fits, for whatever of the options cannot be used; a new output directory is not left.
    """

    def __init__(
        self,
        options: TrainOptions,
        *,
        resume: bool = False,
        quiet: bool = False,
        label: str | None = None,
        execution: Execution | None = None,
        workers: Workers | None = None,
    ) -> None:
        options.require_valid()
        method_of(options)  # refuses what no model and no data could make right
        if not resume:
            require_new(options.output)
        self.options = options
        self._quiet, self._resumed, self._workers = quiet, resume, workers
        self._label = label
        execution = Execution() if execution is None else execution
        if resume:
            require_same_files(options, header_of(options.output / JOURNAL))
        directory = resolve_directory(options.model)
        model, options = settled_alike(options, workers, lambda options: options.opened(directory))
        self._model, self.options = model, options
        self._method = method_of(options)
        require_same_steps(options.steps, workers)
        tokenizer = load_tokenizer(directory)
        length = options.batching.length_for(model)
        self._pad = pad_token_id(tokenizer)
        labelled_for = model.config if options.takes_labels else None
        read_file = partial(read_rows, tokenizer=tokenizer, sequence_length=length, labelled_for=labelled_for)
        self._data = read_file(options.data)
        self._evaluation = None if options.evaluation is None else read_file(options.evaluation)
        task_options = TaskOptions(
            objective=options.objective,
            pad=self._pad,
            batch_size=options.batching.batch_size,
            micro_batch_size=options.batching.micro_batch_size,
            beta=options.beta,
            pack=options.batching.pack,
            per_row=options.optimization.per_row,
            differentiates=self._method.has_gradient,
        )
        self._task = make_task(model, self._data, task_options)
        read = [self._data, *([] if self._evaluation is None else [self._evaluation])]
        if len({rows.format for rows in read}) > 1:
            raise OptionError(
                "evaluation",
                found="rows of another kind than those to train on",
                expected="rows of one kind",
                remedy="name other rows",
            )
        longest, sequences = max(rows.longest for rows in read), max(rows.most_sequences for rows in read)
        self._activations, least = activations, least = self._method.reserved_bytes(model, longest, sequences)
        self._run = RunDirectory(options, self._tokens(), resume=resume)
        try:
            if resume:
                self._run.require_same_base(options, model)
            self._task.prepare(partial(replayer, options, model, activations, workers), self._rows_to_come)
            decides = provenance(
                options,
                directory,
                self._tokens(),
                sequence_length=length,
                devices=device_kinds(options.storage.device, workers),
                task=self._task.provenance,
            )
            self.engine = self._method.engine(
                Opening(
                    model=model,
                    activations=activations,
                    least_activations=least,
                    decides=decides,
                    execution=execution,
                    workers=workers,
                )
            )
            if execution.verify_base:
                self._verify_base(model)
        except BaseException:
            if resume:
                self._run.close()
            else:
                self._run.remove()
            raise
        assert self.engine.host_plan is not None, "the engine chose its source"
        on_host = options.storage.device == "cpu"
        self.host_plan = with_kept_memory(self.engine.host_plan, activations) if on_host else self.engine.host_plan
        if resume:
            try:
                _require_steps_to_come(options, self.engine.journal.version)
                self._run.keep(options)
            except BaseException:
                self.close()
                raise

    def notices(self) -> list[str]:
        """What a user should know of precision and data, a line each."""
        return notices(self.options, self._model, self._data)

    @property
    def losses(self) -> list[float]:
        """The loss of each step so far, before its update."""
        losses: list[float] = self._method.losses(self.engine)
        return losses

    def divergence(self) -> str | None:
        """Say if the steps left nothing of the model, in a line; None if they did not."""
        verdict: str | None = self._method.verdict(self.engine)
        return verdict

    def storage(self) -> str:
        """Where the weights live, in words."""
        told: str = self._method.storage(self.engine, self.host_plan, self._model)
        return told

    def ways_on(self) -> str:
        """How to go on with the run once it was interrupted, in lines."""
        told: str = self._method.ways_on(self.engine)
        return told

    def run(self) -> Path:
        """Train, evaluate and export.

        Returns:
            The exported model's directory.

        Raises:
            ZO2Error: as ``train`` says.
        """
        self.train()
        return self._export()

    def train(self) -> None:
        """Take the steps that are left, and evaluate on the way.

        Raises:
            ZO2Error: of the kind that fits. A new run that was refused before a step was taken, for other reasons than its
                disk, is not left: the command can be mended and given again.
        """
        try:
            self._take_steps()
        except DivergenceError as error:
            raise self._method.explained(error, self.engine) from error
        except NonFiniteLossError as error:
            try:
                require_finite_base(self._model, self.options.model)
            finally:
                self._take_back(error)
            explained = self._method.explained(error, self.engine)
            if explained is error:
                raise
            raise explained from error
        except Exception as error:  # whatever it is, it is raised again
            self._take_back(error)
            raise

    def _take_back(self, error: Exception) -> None:
        """Remove a run that was refused, unless there is something to go on from."""
        if not (self._resumed or self.engine.version or isinstance(error, _RESUMABLE)):
            self.engine.close()
            self._run.remove()

    def _rows_to_come(self) -> list[Any]:
        """The rows of the steps and evaluations to come, the same for all workers.

        Raises:
            OptionError: if more steps were taken than are asked for.
        """
        options, batch_size = self.options, self.options.batching.batch_size
        with closing(Journal(options.output / JOURNAL if self._resumed else None)) as journal:
            _require_steps_to_come(options, journal.version)
            taken = self._method.first_step(journal)
        taken = taken if self._workers is None else min(self._workers.all_gather(taken))
        batches = training_batches(self._data, batch_size=batch_size, seed=options.seed, first_step=taken)
        steps = options.steps - taken
        is_all = steps * batch_size >= 2 * len(self._data)  # they have a whole epoch, wherever in one they begin
        return [*(self._data if is_all else chain.from_iterable(islice(batches, steps))), *(self._evaluation or ())]

    def _take_steps(self) -> None:
        options, engine = self.options, self.engine
        batches = training_batches(
            self._data, batch_size=options.batching.batch_size, seed=options.seed, first_step=engine.version
        )
        evaluated = {*losses_of(self._run.metrics(engine.journal)), *engine.journal.evaluations}
        if self._workers is not None:  # whoever came late has no metrics, and all have to evaluate together
            evaluated = {*self._workers.all_gather(sorted(evaluated))[0]}
        noted = engine.journal.version  # steps before it are repeated, and have their rows
        lost = [step for step in due_steps(options, engine.journal) if step < engine.version and step not in evaluated]
        tracker = options.report_to if is_first(self._workers) else "none"
        with (
            closing(LiveMetrics(tracker, options.output, options.to_json())) as live,
            open(options.output / METRICS, "ab", buffering=0, opener=open_no_follow) as metrics,
            StepBar(
                evaluations=self._evaluations_to_come(engine.version + (engine.version in evaluated)),
                desc=self._label,
                leave=self._label is None,
                total=options.steps,
                initial=engine.version,
                unit="step",
                disable=self._quiet,
                file=sys.stderr,
                dynamic_ncols=True,
            ) as bar,
        ):
            if lost:
                self._say(bar, f"evaluations of {shown_steps(lost)} are lost: neither {JOURNAL} nor {METRICS} has them")
            while True:
                if self._evaluation is not None and is_due(options, engine.version) and engine.version not in evaluated:
                    self._evaluate(self._evaluation, metrics, live, bar)
                if engine.version >= options.steps:
                    break
                rows = next(batches)
                batch = self._task.batch(rows)
                result = self._task.step(engine, rows, batch)
                record = step_record(engine.journal.steps[result.step], result, batch)
                if result.step >= noted:
                    write_row(metrics, record)
                    live.row(record)
                for line in self._method.after_step(engine, result):
                    self._say(bar, line)
                bar.set_postfix_str(progress(record), refresh=False)
                bar.update()

    def _export(self) -> Path:
        """Write the model, if it is not there: a directory appears whole or not at all."""
        exported = self.options.output / MODEL
        for left in self.options.output.glob(f".{MODEL}.partial-*"):  # of an export that was killed, also at its very end
            shutil.rmtree(left)
        if not holds_model(exported):
            again = self._undecided() if self.options.keep_best else []
            for step in again:
                self._evaluate_again(step)
            best = best_step(self._losses()) if self.options.keep_best else None
            if best in (None, self.engine.version) and not again:
                self.engine.export(exported)
            else:
                with self._at_step(self.engine.version if best is None else best) as at_step:
                    at_step.export(exported)
        return exported

    def best_evaluation(self) -> str | None:
        """Which evaluation was best, in a line; None if there was none."""
        losses = self._losses()
        best = best_step(losses)
        return None if best is None else f"best of {len(losses)} evaluations: step {best}, loss {losses[best]:.4f}"

    def _losses(self) -> dict[int, float]:
        """The loss of each evaluation, by its step."""
        return losses_of(self._run.metrics(self.engine.journal))

    def _undecided(self) -> list[int]:
        """The evaluated steps whose results the journal does not have: of an earlier version's run, or lost."""
        journal = self.engine.journal
        return sorted({*due_steps(self.options, journal), *self._losses()} - journal.evaluations.keys())

    def _evaluate_again(self, step: int) -> None:
        """Evaluate a step that was evaluated before, and note the result in the journal."""
        assert self._evaluation is not None, "evaluations were asked for"
        with self._at_step(step) as at_step:
            results = self._task.evaluate(at_step, self._evaluation)
        self.engine.journal.note_evaluation(step, results)
        self.engine.journal.close()  # the engine, which is closed, does not do it any more
        print(f"step {step}: evaluated again, since {JOURNAL} lacks the result: {told(results)}", file=sys.stderr)

    def _at_step(self, step: int) -> Runner:
        """The model of an earlier step: a segment's bytes cannot be brought back, so the base is read again."""
        self.engine.close()
        at_step: Runner = self._method.at_step(self.engine, self._model, self._activations, step)
        return at_step

    def close(self) -> None:
        """Close the engine and let go of the directory. May be called twice."""
        self.engine.close()
        self._run.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verify_base(self, model: HFBlockModel) -> None:
        """Read the base whole; what the journal does not know of it yet is noted there."""
        journal = self.engine.journal
        try:
            unknown = verify_with_progress(model, journal, quiet=self._quiet)
            if unknown:
                journal.note_base(unknown)
        except BaseException:
            self.engine.close()
            raise

    def _tokens(self) -> dict[str, object]:
        """What the run trains and evaluates on, beyond the files' own bytes."""
        tokens: dict[str, object] = {"padding": self._pad}
        for name, dataset in (("data", self._data), ("evaluation", self._evaluation)):
            if dataset is not None:
                tokens[f"{name} tokens"] = dataset.tokens
                tokens[f"{name} sha256"] = dataset.digest()
        return tokens

    def _evaluations_to_come(self, version: int) -> int:
        """Evaluations that are due from a version on."""
        options = self.options
        return 0 if self._evaluation is None else evaluations_due(options.steps, options.evaluate_every, version=version)

    def _evaluate(self, rows: Rows, metrics: IO[bytes], live: LiveMetrics, bar: StepBar) -> None:
        began = time.perf_counter()
        results = self._task.evaluate(self.engine, rows)
        seconds = time.perf_counter() - began
        self._method.before_noting(self.engine, results["loss"])
        self.engine.note_evaluation(results)
        bar.count_evaluation(seconds, left=self._evaluations_to_come(self.engine.version + 1))
        record = {**row_of_evaluation(self.engine.version, results), "evaluation_seconds": seconds}
        write_row(metrics, record)
        live.row(record)
        self._say(bar, f"step {self.engine.version}: evaluation {told(results)}, {seconds:.1f} s")

    def _say(self, bar: StepBar, line: str) -> None:
        """Write a line above the bar; of several workers the first one speaks."""
        if is_first(self._workers):
            bar.write(line, file=sys.stderr)


def _require_steps_to_come(options: TrainOptions, taken: int) -> None:
    if options.steps < taken:
        raise OptionError(
            "steps",
            found=str(options.steps),
            expected=f"at least {taken}, which the run has taken already",
            remedy=f"zo2 export --run {options.output} --at {options.steps} writes the model of that step",
        )
