"""Fine-tune a checkpoint on a JSONL file: the main job, as a library call and behind ``zo2 train``."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.models.exported import holds_model
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.batches import training_batches
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
from zo2adapters.trainers.allocator import with_kept_memory
from zo2adapters.trainers.base_check import verify_with_progress
from zo2adapters.trainers.finite_base import require_finite_base
from zo2adapters.trainers.health import Watch, diverged, ruined
from zo2adapters.trainers.lessons import PreferenceLesson, Rows, lesson_of, read_rows
from zo2adapters.trainers.live_metrics import LiveMetrics
from zo2adapters.trainers.metrics import progress, step_record
from zo2adapters.trainers.options import Execution, TrainOptions, evaluations_due
from zo2adapters.trainers.provenance import provenance
from zo2adapters.trainers.remarks import remarks, storage
from zo2adapters.trainers.run_directory import JOURNAL, METRICS, MODEL, RunDirectory, require_new
from zo2adapters.trainers.run_engine import base_replayer, build_engine, opened_model, reserved_bytes
from zo2adapters.trainers.sharing import device_kinds, is_first, require_same_steps, settled_alike
from zo2adapters.trainers.step_bar import StepBar
from zo2core import (
    CheckpointError,
    DivergenceError,
    Journal,
    JournalError,
    MemoryPolicy,
    NonFiniteLossError,
    OptionError,
    OutputError,
    Replayer,
    ScratchError,
    Workers,
    reason,
)

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
        estimator = options.estimator()
        if not resume:
            require_new(options.output)
        self.options = options
        self._quiet, self._resumed, self._workers = quiet, resume, workers
        self._label = label
        self._watch = Watch()
        execution = Execution() if execution is None else execution
        directory = resolve_directory(options.model)
        model, options = settled_alike(options, workers, lambda options: opened_model(directory, options))
        self._model, self.options = model, options
        require_same_steps(options.steps, workers)
        tokenizer = load_tokenizer(directory)
        length = options.batching.length_for(model)
        self._pad = pad_token_id(tokenizer)
        labelled_for = model.config if options.takes_labels else None
        read_file = partial(read_rows, tokenizer=tokenizer, sequence_length=length, labelled_for=labelled_for)
        self._data = read_file(options.data)
        self._evaluation = None if options.evaluation is None else read_file(options.evaluation)
        self._lesson = lesson_of(
            options.objective,
            model,
            self._data,
            pad=self._pad,
            batch_size=options.batching.batch_size,
            micro_batch_size=options.batching.micro_batch_size,
            beta=options.beta,
            packed=options.batching.pack,
        )
        if options.optimization.per_row and self._lesson.forward is not None:
            raise OptionError(
                "per_row", found="rows with candidates or preferences", expected="rows of text", remedy="leave it out"
            )
        read = [self._data, *([] if self._evaluation is None else [self._evaluation])]
        if len({type(rows) for rows in read}) > 1:
            raise OptionError(
                "evaluation",
                found="rows of another kind than those to train on",
                expected="rows of one kind",
                remedy="name other rows",
            )
        longest, sequences = max(rows.longest for rows in read), max(rows.most_sequences for rows in read)
        activations, least = reserved_bytes(options, model, longest, sequences)
        self._run = RunDirectory(options, self._tokens(), resume=resume)
        try:
            if isinstance(self._lesson, PreferenceLesson):
                rows = self._rows_to_come()
                with base_replayer(options, model, activations, workers) as base:
                    self._lesson.look_at_base(base, rows)
            self._layouts = model.layouts
            decides = provenance(
                options,
                directory,
                self._tokens(),
                sequence_length=length,
                devices=device_kinds(options.storage.device, workers),
                learned=self._lesson.decides,
            )
            self.engine = build_engine(
                options, model, estimator, activations, least, decides, execution=execution, workers=workers
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
                _require_steps_to_come(options, self.engine.version)
                self._run.keep(options)
            except BaseException:
                self.close()
                raise

    def remarks(self) -> list[str]:
        """What a user should know of precision and data, a line each."""
        return remarks(self.options, self._model, self._data)

    def divergence(self) -> str | None:
        """Say if the steps left nothing of the model, in a line; None if they did not."""
        return ruined(self.engine.journal.updates)

    def storage(self) -> str:
        """Where the weights live, in words."""
        return storage(self.options, self.engine, self.host_plan, self._layouts)

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
            raise diverged(error, self.engine.journal.updates, self.options) from error
        except NonFiniteLossError as error:
            try:
                require_finite_base(self._model, self.options.model)
            finally:
                self._take_back(error)
            if self.options.optimization.guard and self.engine.version:
                raise diverged(error, self.engine.journal.updates, self.options) from error
            raise
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
            taken = len(journal.updates)
        _require_steps_to_come(options, taken)
        taken = taken if self._workers is None else min(self._workers.heard(taken))
        batches = training_batches(self._data, batch_size=batch_size, seed=options.seed, first_step=taken)
        steps = options.steps - taken
        is_all = steps * batch_size >= 2 * len(self._data)  # they have a whole epoch, wherever in one they begin
        return [*(self._data if is_all else chain.from_iterable(islice(batches, steps))), *(self._evaluation or ())]

    def _take_steps(self) -> None:
        options, engine = self.options, self.engine
        batches = training_batches(
            self._data, batch_size=options.batching.batch_size, seed=options.seed, first_step=engine.version
        )
        evaluated = {row["step"] for row in self._run.metrics(engine.journal) if "evaluation_loss" in row}
        if self._workers is not None:  # whoever came late has no metrics, and all have to evaluate together
            evaluated = {*self._workers.heard(sorted(evaluated))[0]}
        tracker = options.report_to if is_first(self._workers) else "none"
        with (
            closing(LiveMetrics(tracker, options.output, options.to_json())) as live,
            (options.output / METRICS).open("ab", buffering=0) as metrics,
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
            while True:
                if self._evaluation is not None and self._is_due(engine.version) and engine.version not in evaluated:
                    self._evaluate(self._evaluation, metrics, live, bar)
                if engine.version >= options.steps:
                    break
                rows = next(batches)
                batch = self._lesson.batch(rows)
                result = self._lesson.step(engine, rows, batch)
                for line in self._watch.lines(result, engine.journal.updates, options):
                    self._say(bar, line)
                record = step_record(result, batch)
                _write(metrics, record)
                live.row(record)
                bar.set_postfix_str(progress(record), refresh=False)
                bar.update()

    def _export(self) -> Path:
        """Write the model, if it is not there: a directory appears whole or not at all."""
        exported = self.options.output / MODEL
        for left in self.options.output.glob(f".{MODEL}.partial-*"):  # of an export that was killed, also at its very end
            shutil.rmtree(left)
        if not holds_model(exported):
            best = _best_step(self._evaluations()) if self.options.keep_best else None
            if best in (None, self.engine.version):
                self.engine.export(exported)
            else:
                self._export_step(best, exported)
        return exported

    def best_evaluation(self) -> str | None:
        """Which evaluation was best, in a line; None if there was none."""
        evaluations = self._evaluations()
        best = _best_step(evaluations)
        return None if best is None else f"best of {len(evaluations)} evaluations: step {best}, loss {evaluations[best]:.4f}"

    def _evaluations(self) -> dict[int, float]:
        """The loss of each evaluation, by its step."""
        rows = self._run.metrics(self.engine.journal)
        return {row["step"]: row["evaluation_loss"] for row in rows if "evaluation_loss" in row}

    def _export_step(self, step: int, directory: Path) -> None:
        """Write the model of an earlier step: a segment's bytes cannot be brought back, so the base is read again."""
        self.engine.close()
        storage = self.options.storage
        memory = MemoryPolicy(host=storage.memory, activations="1MiB")
        with Replayer(self._model, self.engine.journal.until(step), device=storage.device, memory=memory) as replayer:
            replayer.export(directory)

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

    def _is_due(self, version: int) -> bool:
        every = self.options.evaluate_every
        return version in (0, self.options.steps) or (every is not None and version % every == 0)

    def _evaluations_to_come(self, version: int) -> int:
        """Evaluations that are due from a version on."""
        options = self.options
        return 0 if self._evaluation is None else evaluations_due(options.steps, options.evaluate_every, version=version)

    def _evaluate(self, rows: Rows, metrics: IO[bytes], live: LiveMetrics, bar: StepBar) -> None:
        began = time.perf_counter()
        values = self._lesson.evaluate(self.engine, rows)
        record: dict[str, Any] = {f"evaluation_{name}": value for name, value in values.items()}
        seconds = time.perf_counter() - began
        bar.count_evaluation(seconds, left=self._evaluations_to_come(self.engine.version + 1))
        record = {"step": self.engine.version, **record, "evaluation_seconds": seconds}
        _write(metrics, record)
        live.row(record)
        said = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        self._say(bar, f"step {self.engine.version}: evaluation {said}, {seconds:.1f} s")

    def _say(self, bar: StepBar, line: str) -> None:
        """Write a line above the bar; of several workers the first one speaks."""
        if is_first(self._workers):
            bar.write(line, file=sys.stderr)


def _best_step(evaluations: Mapping[int, float]) -> int | None:
    """The step of the smallest loss, the first of equal ones; None if there is none."""
    return min(evaluations, key=lambda step: (evaluations[step], step), default=None)


def _require_steps_to_come(options: TrainOptions, taken: int) -> None:
    if options.steps < taken:
        raise OptionError(
            "steps",
            found=str(options.steps),
            expected=f"at least {taken}, which the run has taken already",
            remedy=f"zo2 export --run {options.output} --at {options.steps} writes the model of that step",
        )


def _write(file: IO[bytes], record: dict[str, Any]) -> None:
    line = json.dumps(record).encode() + b"\n"
    try:
        while line:
            line = line[file.write(line) :]
    except OSError as error:
        raise OutputError(
            file.name,
            found=reason(error),
            expected="a file that can be written",
            remedy="free space and resume the run; nothing is lost, the journal is whole",
        ) from error
