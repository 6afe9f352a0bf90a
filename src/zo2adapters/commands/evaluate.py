"""``zo2 evaluate``: measures of a model on rows; ``zo2 rows``: the rows of benchmarks, by which
``zo2 train`` scores.

What is measured is the loss, the accuracy of rows with candidates, or F1 of rows with answers.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from zo2adapters.commands.at_step import AtStep
from zo2adapters.commands.options import Command, Written, text_table
from zo2adapters.models.model_files import ADAPTER_FOLDER, BASE_FOLDER
from zo2adapters.tasks.row_options import RowFormat, RowOptions, first_format
from zo2adapters.trainers.metrics import SharedSweeps, progress_bar, sweep_bars
from zo2adapters.trainers.option_checks import require_valid
from zo2adapters.trainers.options import (
    Batching,
    Resources,
    RunModelOptions,
    RunOptions,
    precision_of_run,
)
from zo2adapters.trainers.process import (
    WorkerOptions,
    is_first,
    require_same_command,
    require_same_inputs,
    torchrun_rank,
)
from zo2adapters.trainers.run_directory import MODEL, OPTIONS, name_of, require_new
from zo2adapters.trainers.run_files import require_free_file, require_there
from zo2core.checkpoint.unused import refuse_used
from zo2core.errors import NonFiniteLossError, OptionError, without_effect
from zo2core.io.durable import read_regular
from zo2core.ranges import LARGEST_WHOLE, counted, parse_size, require_whole

if TYPE_CHECKING:
    # command lines are parsed without importing transformers
    from zo2adapters.models.hf import HFBlockModel
    from zo2adapters.tasks.rows import Rows
    from zo2adapters.tasks.task import Evaluated, Measure
    from zo2core import SharedBase, Workers

MOST_TOKENS = 1 << 20  # largest --max-new-tokens
BATCHES = 8  # batches of the longest rows that memory is reserved for by default
NEWLINE = b"\n"  # ends each row of a benchmark's files, and occurs nowhere else: JSON escapes it


@dataclass(frozen=True, kw_only=True)
class Evaluate(AtStep):
    """Evaluate a model, or a run at any of its steps beside its base, on a data file."""

    needs: ClassVar = ("zo2adapters.trainers.trainer", "zo2adapters.tasks.objectives")
    takes_texts: ClassVar = True
    first_options: ClassVar = (
        "run_directory model adapter data at beside_base others batch_size max_new_tokens memory"
    )

    data: Path | None = None
    """File of rows, as for zo2 train.

    They are those of training, or have prompt, candidates and answer, or prompt and answers. A
    model with another --head takes rows with text and label. By default the rows that the run
    evaluated.
    """
    beside_base: Annotated[bool, Written(name="base")] = True
    """Evaluate the base, too, and print both in a table, for a run or an adapter."""
    others: tuple[Path, ...] = ()
    """Further runs, or directories with saved adapters, of the same base, to compare on the same
    rows. All share each pass over the blocks if they only read the base: adapters, and runs with
    --rank.
    """
    rows: RowOptions = field(default_factory=RowOptions)
    batching: Batching = field(default_factory=Batching)
    max_new_tokens: int = 50
    """Most tokens that the model generates for a row with answers; each token takes a pass over the
    blocks.
    """
    activation_memory: str | None = None
    """Memory reserved for activations, such as 1GiB.

    The batches that fit in it share one pass over the blocks. By default eight batches of the
    longest rows fit.
    """
    trace: Path | None = None
    """New file for a timeline of every pass over the blocks, for ui.perfetto.dev."""
    worker_options: WorkerOptions = field(default_factory=WorkerOptions)

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        super().check()
        self.worker_options.require_no_shards("auto, which splits batches")
        require_valid(self.batching)
        require_whole("max_new_tokens", self.max_new_tokens, 1, MOST_TOKENS)
        takes_labels = self.model_options.head != "causal-lm"
        if self.saved is not None:
            takes_labels = self.saved.takes_labels
        elif self.data is None:
            raise OptionError("data", "none", "a file of rows", "pass --data FILE")
        if self.data is not None:
            first_format(self.data, self._with_options_of_run().rows, takes_labels=takes_labels)
        require_free_file(self.trace)

    def run(self) -> None:
        """Print loss and perplexity, accuracy for rows with candidates, or F1 and exact match for
        rows with answers.
        """
        with self.worker_options.workers() as workers:
            require_same_command("evaluate", self, workers)
            self._with_options_of_run()._evaluate(workers)

    def _with_options_of_run(self) -> Evaluate:
        """The command with the columns, template, labels and lengths of the run where none are
        given.
        """
        if self.saved is None:
            return self
        given = {option.name: getattr(self.rows, option.name) for option in fields(RowOptions)}
        changes = {
            name: value
            for name, value in given.items()
            if name in self.given or value != getattr(RowOptions(), name)
        }
        length = self.batching.sequence_length or self.saved.batching.sequence_length
        rows = replace(self.saved.rows, **changes)
        batching = replace(self.batching, sequence_length=length)
        return replace(self, rows=rows, batching=batching)

    def _evaluate(self, workers: Workers | None) -> None:
        from zo2adapters.models.footprint import activation_bytes
        from zo2adapters.tasks.task import TaskOptions, measured, units_of
        from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
        from zo2adapters.trainers.run_inputs import row_notices

        require_valid(self.batching)
        require_whole("max_new_tokens", self.max_new_tokens, 1, MOST_TOKENS)
        at = self.resolved()
        chunk: int | Literal["auto"] = self.batching.loss_chunk or "auto"
        tokenizer = load_tokenizer(at.base())
        model = at.open_model(loss_chunk=chunk)
        rows = self._read(at, model, tokenizer)
        require_same_inputs(model, at.model, {"data": (self.data, rows)}, workers)
        quiet = not is_first(workers)
        for line in () if quiet else row_notices(rows, "evaluated on"):
            print(line, file=sys.stderr)
        others = at.named_others(self.others)
        if (
            self.beside_base
            and self.at != 0
            and (at.journal is not None or at.model_options.adapter is not None)
        ):
            others.insert(0, ("base", at.without_learning()))
        (total, unit) = units_of(rows)
        size = self.batching.batch_size
        micro_rows = self.batching.micro_batch_size
        if self.activation_memory is None:
            most, longest = self.batching.shape(size, rows.longest)
            room = activation_bytes(
                model.config, most, longest, streams=BATCHES, micro_rows=micro_rows
            )
        else:
            room = parse_size(self.activation_memory, option="activation_memory")
        options = TaskOptions(
            tokenizer=tokenizer,
            pad=pad_token_id(tokenizer),
            has_errors=True,
            batch_size=size,
            micro_batch_size=micro_rows,
            pack=self.batching.pack,
        )

        def evaluated(
            one: AtStep, its_model: HFBlockModel, shared: SharedBase | None
        ) -> tuple[str, Evaluated]:
            """What one model is, and its measures."""
            adapter = one.model_options.adapter
            trace = self.trace if one is at else None
            with one.engine(
                its_model,
                activation_bytes=room,
                workers=workers,
                shared=shared,
                micro_batch_size=micro_rows,
                trace=trace,
            ) as engine:
                name = "base" if adapter is None else name_of(adapter)
                name = name if one.journal is None else f"step {engine.version}"
                with (
                    progress_bar(total=total, unit=unit, desc=name, quiet=quiet) as bar,
                    sweep_bars(engine, quiet=quiet),
                ):
                    progress = bar.update
                    if rows.format is not RowFormat.ANSWERS:  # whose tokens take a sweep each
                        sweeps = SharedSweeps(bar)
                        engine.watch(sweeps.visited)
                        progress = sweeps.took
                    result = measured(engine, its_model, rows, replace(options, progress=progress))
            _require_finite(result.finite, its_model)
            return name, result

        may_share = workers is None and self.trace is None
        results = at.with_others(model, others, evaluated, loss_chunk=chunk, may_share=may_share)
        columns = [(name or own_name, result) for name, (own_name, result) in results.items()]
        columns.sort(key=lambda column: column[0] != "base")  # the base comes first
        if not quiet:
            print(_table(columns) if len(columns) > 1 else _line(columns[0][1]))

    def _read(self, at: AtStep, model: HFBlockModel, tokenizer: Any) -> Rows:
        """The rows to evaluate on."""
        from zo2adapters.tasks.rows import RowReader, with_labels
        from zo2adapters.tasks.tokenizer import vocabulary_of

        length = self.batching.length_for(model)
        is_causal = at.model_options.head == "causal-lm"
        saved = self.saved
        self.rows.require_valid(takes_labels=not is_causal)
        labelled_for = None if is_causal else model.config
        reader = RowReader(
            tokenizer, length, self.rows, labelled_for, vocabulary=vocabulary_of(model.config)
        )
        if self.data is not None:
            options = self.rows
            if is_causal and saved is not None and saved.data.exists():
                # a run's labels are those of its training rows
                options = with_labels(options, saved.data)
            rows: Rows | None = replace(
                reader, options=options, new_tokens=self.max_new_tokens
            ).read(self.data)
        elif saved is not None and saved.evaluates:
            rewards = saved.rewards
            reader = replace(
                reader, keeps_sources=bool(rewards.reward), rewards_read=rewards.columns
            )
            _, rows = reader.read_files(saved.data, saved.evaluation, saved.eval_split)
        else:
            found = "none" if saved is None else "none, for a run without rows to evaluate on"
            raise OptionError("data", found, "a file of rows", "pass --data FILE")
        assert rows is not None, "the run evaluates"
        if rows.format is RowFormat.PREFERENCES:
            found = f"{self.data or 'the rows of the run'}, rows of preferences"
            expected = (
                "other rows: preferences are evaluated during training, against the base model"
            )
            raise OptionError("data", found, expected, "pass them to zo2 train as --evaluation")
        if saved is None or saved.rows.labels != self.rows.labels:
            self.rows.require_labelled(are_labelled=rows.are_labelled)
        if self.batching.pack and rows.format is not RowFormat.TEXT:
            raise without_effect(
                "pack", f"{self.data}, whose rows cannot be packed", "rows of text"
            )
        return rows


def _line(evaluated: Evaluated) -> str:
    """The measures of one model as a line."""
    error = evaluated.measures[0].standard_error
    values = [f"{measure.name} {_value(measure, measure.value)}" for measure in evaluated.measures]
    errors = [] if error is None else [f"standard error {_value(evaluated.measures[0], error)}"]
    return ", ".join([*values, evaluated.size, *errors])


def _table(columns: Sequence[tuple[str, Evaluated]]) -> str:
    """The measures of several models on the same rows, a column each."""
    cells = [["", *(name for name, _ in columns)]]
    for measures in zip(*(evaluated.measures for _, evaluated in columns), strict=True):
        cells.append([measures[0].name])
        for measure in measures:
            error = measure.standard_error
            value = _value(measure, measure.value)
            cells[-1].append(
                value if error is None else f"{value} \N{PLUS-MINUS SIGN} {_value(measure, error)}"
            )
    has_errors = any(measure.standard_error is not None for measure in columns[-1][1].measures)
    return "\n".join(
        [
            text_table(cells),
            columns[-1][1].size
            + ("; \N{PLUS-MINUS SIGN} is the standard error" if has_errors else ""),
        ]
    )


def _value(measure: Measure, value: float) -> str:
    return f"{value:.1%}" if measure.is_share else f"{value:.{measure.digits}f}"


def _require_finite(values: Sequence[float], model: HFBlockModel) -> None:
    """Refuse a loss that is not finite, and report whether the base's own weights are the cause."""
    from zo2adapters.trainers.methods import require_finite_base

    not_finite = [value for value in values if not math.isfinite(value)]
    if not_finite:
        require_finite_base(model)
        remedy = (
            "evaluate an earlier step with --at, or in a wider --dtype: the base's weights are "
            "finite"
        )
        raise NonFiniteLossError(
            "evaluation", f"a loss or log-likelihood of {not_finite[0]}", "finite numbers", remedy
        )


@dataclass(frozen=True, kw_only=True)
class WriteRows(Command):
    """Write a benchmark's rows, such as sst2's, as files, with the prompts of MeZO's
    experiments.
    """

    needs: ClassVar = ("zo2adapters.tasks.benchmarks",)

    task: str
    """Name of the benchmark: boolq, cb, copa, drop, mrpc, multirc, qnli, qqp, record, rte, squad,
    sst2, wic, winogrande, wnli or wsc.
    """
    output: Path
    """Directory for train.jsonl, dev.jsonl and test.jsonl. It must not exist, or be empty."""
    data: Path | None = None
    """Directory with train.jsonl and validation.jsonl (or val, dev, valid), in the benchmark's own
    format or that of the package datasets. By default datasets fetches the rows from the Hugging
    Face hub.
    """
    train_rows: int = 1000
    """Most rows to train on."""
    dev_rows: int = 500
    """Most rows to choose the best step with.

    They are other rows of the training file, at most a quarter of a small one.
    """
    test_rows: int = 1000
    """Most rows to test on, taken from the held-out file."""
    shots: int | None = None
    """Number of training rows with answers that precede each test row in another file,
    in-context.jsonl. By default that file is not written.
    """
    seed: int = 0
    """Seed with which rows are sampled."""

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        refuse_used(self.output)
        if self.data is not None:
            require_there(self.data)

    def run(self) -> None:
        """Write the files, and print how many rows each has."""
        from zo2core.checkpoint.export import new_directory

        refuse_used(self.output)
        files = self.files()  # before anything is made at the path
        with new_directory(self.output) as partial:
            for name, content in files.items():
                (partial / name).write_bytes(content)
        self.print_summary(files)

    def print_summary(self, files: Mapping[str, bytes]) -> None:
        """Print the directory of the files, and how many rows each has."""
        counts = ", ".join(
            f"{counted(content.count(NEWLINE), 'row')} in {name}" for name, content in files.items()
        )
        print(f"{self.output}: {counts}")

    def files(self) -> dict[str, bytes]:
        """The content of each file, by its name."""
        from zo2adapters.tasks.benchmarks import benchmark_of, benchmark_rows, with_demonstrations

        benchmark = benchmark_of(self.task)
        sizes = {name: getattr(self, f"{name}_rows") for name in ("train", "dev", "test")}
        for name, most in sizes.items():
            require_whole(f"{name}_rows", most, 1, LARGEST_WHOLE)
        require_whole("seed", self.seed, -LARGEST_WHOLE, LARGEST_WHOLE)
        named = benchmark_rows(benchmark, self.data, seed=self.seed, **sizes)
        if self.shots is not None:
            named["in-context"] = with_demonstrations(named["test"], named["train"], self.shots)
        lines = {
            name: [json.dumps(row, ensure_ascii=False).encode() + NEWLINE for row in rows]
            for name, rows in named.items()
        }
        return {f"{name}.jsonl": b"".join(of_file) for name, of_file in lines.items()}


class BenchmarkRun(NamedTuple):
    """What a run on a benchmark has beside the options of other runs."""

    task: str
    model: str
    output: Path
    data: Path | None  # with the benchmark's files
    shots: int | None


def run_task(run: BenchmarkRun, options: RunOptions, train: Callable[[Path, Path], object]) -> None:
    """Write the benchmark's rows, score the model, train it, and score the result.

    The rows are in a directory with the run's name and the suffix ``.rows``. Rows left by a process
    that was killed before the run started are reused if they are the same.
    """
    output = run.output
    rows = output.with_name(f"{output.name}.rows")
    require_new(output)
    writer = WriteRows(
        task=run.task, output=rows, data=run.data, shots=run.shots, seed=options.seed
    )
    files = writer.files() if rows.is_dir() else {}
    is_there = bool(files) and {path.name for path in rows.iterdir()} == files.keys()
    if is_there := is_there and all(
        read_regular(rows / name) == content for name, content in files.items()
    ):
        writer.print_summary(files)
    else:
        writer.run()
    try:
        _score(run, options, rows / "test.jsonl", "zero-shot")
        if run.shots is not None:
            _score(run, options, rows / "in-context.jsonl", f"with {run.shots} demonstrations")
        train(rows / "train.jsonl", rows / "dev.jsonl")
    except BaseException:  # raised again
        if not is_there and not (output / OPTIONS).exists():
            shutil.rmtree(rows)
        raise
    _score(run, options, rows / "test.jsonl", "fine-tuned", exported=output / MODEL)


def require_consistent(task: str, options: RunOptions) -> None:
    """Refuse options that cannot be combined with a benchmark."""
    model_options, chosen = (
        options.model_options,
        "because the task has its own rows to choose the best step with",
    )
    for option, found, why in (
        ("evaluation", options.evaluation, chosen),
        ("eval_split", options.eval_split, chosen),
        (
            "head",
            model_options.head if options.takes_labels else None,
            "because the rows have candidates",
        ),
        ("beta", options.beta, "because the rows have candidates, not preferences"),
        ("adapter", model_options.adapter, "because the score before training is the base's"),
    ):
        if found is not None:
            raise OptionError(option, f"{found} with --task", f"none, {why}", "leave it out")
    if torchrun_rank() is not None:
        remedy = "write them with zo2 rows, and pass them as --data"
        raise OptionError(
            "task", f"{task} under torchrun", "rows that exist when the workers start", remedy
        )


def _score(
    run: BenchmarkRun,
    options: RunOptions,
    rows: Path,
    name: str,
    *,
    exported: Path | None = None,
) -> None:
    """Print the score of the model, or of what was exported, on rows."""
    storage, model_options = options.storage, options.model_options
    trained = model_options.of_method(options.optimization.method)
    adapter = exported if trained.trains_adapter else None
    whole = exported if adapter is None else None
    if exported is not None and options.optimization.trains_both:
        adapter = exported / ADAPTER_FOLDER
        whole = exported / BASE_FOLDER
    exact = options.optimization.is_exact or options.optimization.rank is not None
    precision = precision_of_run(
        model_options.precision, is_exact=exact, on_cpu=storage.device == "cpu"
    )
    dtype = "auto" if whole or model_options.precision == "mixed" else model_options.dtype
    opening = RunModelOptions(
        architecture=model_options.architecture, dtype=dtype, precision=precision, adapter=adapter
    )
    resources = Resources(
        memory=storage.memory, device=storage.device, device_memory=storage.device_memory
    )
    print(f"{name}: ", end="", flush=True)
    Evaluate(
        model=run.model if whole is None else str(whole),
        data=rows,
        batching=options.batching,
        model_options=opening,
        resources=resources,
    ).run()
