"""``zo2 evaluate``: the loss of a model on rows, its accuracy on rows with candidates, or F1 on rows with answers."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from zo2adapters.commands.at_step import AtStep
from zo2adapters.ranges import require_between
from zo2adapters.tasks.row_format import RowFormat
from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.trainers.batching import Batching
from zo2adapters.trainers.worker_options import WorkerOptions, is_first
from zo2core import NonFiniteLossError, OptionError, Runner, Workers
from zo2core.planning.host_budget import parse_size

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # command lines are parsed without importing transformers
    from zo2adapters.tasks.answers import Questions
    from zo2adapters.tasks.candidates import Choices
    from zo2adapters.tasks.row_files import Rows

MOST_TOKENS = 1 << 20  # largest --max-new-tokens
BATCHES = 8  # batches of the longest rows that memory is reserved for by default


@dataclass(frozen=True, kw_only=True)
class Evaluate(AtStep):
    """Evaluate a model, or a run at any of its steps, on a data file."""

    data: Path
    """File of rows, as for zo2 train. They are those of training, or have prompt, candidates and answer, or prompt and
    answers. A model with another --head takes rows with text and label."""
    rows: RowOptions = field(default_factory=RowOptions)
    batching: Batching = field(default_factory=Batching)
    max_new_tokens: int = 50
    """Most tokens that the model generates for a row with answers; each token takes a pass over the blocks."""
    activation_memory: str | None = None
    """Memory reserved for activations, such as 1GiB. The batches that fit in it share one pass over the blocks. By default
    eight batches of the longest rows fit."""
    key_file: Path | None = None
    """File with a secret that authenticates the workers of torchrun to each other; all of them need the same one."""
    trace: Path | None = None
    """File for a trace of every sweep, to be opened in ui.perfetto.dev; it must not exist."""

    def run(self) -> None:
        """Print loss and perplexity, accuracy for rows with candidates, or F1 and exact match for rows with answers."""
        with WorkerOptions(key_file=self.key_file).workers() as workers:
            self._evaluate(workers)

    def _evaluate(self, workers: Workers | None) -> None:
        from zo2adapters.tasks.answers import read_questions
        from zo2adapters.tasks.candidates import read_choices
        from zo2adapters.tasks.language_modelling_task import evaluate_dataset, perplexity
        from zo2adapters.tasks.row_files import format_of, with_labels
        from zo2adapters.tasks.rows import read_dataset
        from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id

        self.batching.require_valid()
        require_between("max_new_tokens", self.max_new_tokens, 1, MOST_TOKENS)
        at = self.resolved()
        tokenizer = load_tokenizer(at.base())
        model = at.open_model(loss_chunk=self.batching.loss_chunk)
        length = self.batching.length_for(model)
        is_causal = at.model_options.head == "causal-lm"
        self.rows.require_valid(takes_labels=not is_causal)
        row_options = with_labels(self.rows, self.data) if is_causal else self.rows
        rows = format_of(self.data, row_options) if is_causal else RowFormat.LABELS
        if self.batching.pack and rows in (RowFormat.CANDIDATES, RowFormat.ANSWERS, RowFormat.LABELS):
            found, expected = f"{self.data}, whose rows cannot be packed", "rows of text"
            raise OptionError("pack", found=found, expected=expected, remedy="leave it out")
        if rows is RowFormat.LABELS:
            self._evaluate_labels(at, model, tokenizer, length, workers)
            return
        if rows is RowFormat.CANDIDATES:
            choices = read_choices(self.data, tokenizer, sequence_length=length, options=row_options)
            self._print_lengths(choices, workers)
            self._evaluate_choices(at, model, choices, pad_token_id(tokenizer), workers)
            return
        if rows is RowFormat.PREFERENCES:
            raise OptionError(
                "data",
                found=f"{self.data}, rows of preferences",
                expected="other rows: preferences are evaluated during training, against the base model",
                remedy="pass them to zo2 train as --evaluation",
            )
        if rows is RowFormat.ANSWERS:
            if self.max_new_tokens >= length:
                raise OptionError(
                    "max_new_tokens",
                    found=f"{self.max_new_tokens}, where prompt and answer together may have {length} tokens",
                    expected=f"at most {length - 1}",
                    remedy="pass a smaller value, or raise `sequence_length` if the model supports longer rows",
                )
            questions = read_questions(
                self.data,
                tokenizer,
                sequence_length=length,
                max_new_tokens=self.max_new_tokens,
                options=row_options,
            )
            self._print_lengths(questions, workers)
            self._evaluate_answers(at, model, tokenizer, questions, pad_token_id(tokenizer), workers)
            return
        dataset = read_dataset(self.data, tokenizer, sequence_length=length, options=row_options)
        self._print_lengths(dataset, workers)
        with (
            self._engine(at, model, dataset.longest, workers) as engine,
            tqdm(total=len(dataset), unit="row", file=sys.stderr, disable=not is_first(workers)) as bar,
        ):
            result = evaluate_dataset(
                engine,
                dataset,
                batch_size=self.batching.batch_size,
                pad=pad_token_id(tokenizer),
                packed=self.batching.pack,
                progress=bar.update,
            )
            _require_finite([result.loss], model, at)
        _print_result(
            f"loss {result.loss:.6f}, perplexity {perplexity(result.loss):.4f}, {result.tokens} tokens, "
            f"{len(dataset)} rows, {result.sweeps} sweeps",
            workers,
        )

    def _print_lengths(self, rows: Rows | Questions, workers: Workers | None) -> None:
        """Print how many rows were cut or left out."""
        from zo2adapters.trainers.run_notices import length_notices

        for line in length_notices(rows) if is_first(workers) else ():
            print(line, file=sys.stderr)

    def _evaluate_labels(
        self, at: AtStep, model: HFBlockModel, tokenizer: Any, length: int, workers: Workers | None
    ) -> None:
        from zo2adapters.tasks.label_task import evaluate_labels
        from zo2adapters.tasks.labelled import padding_of, read_labelled_rows

        rows = read_labelled_rows(self.data, tokenizer, model.config, sequence_length=length, options=self.rows)
        self._print_lengths(rows, workers)
        rows_at_once = self.batching.micro_batch_size or self.batching.batch_size
        pad = padding_of(model.config)
        with self._engine(at, model, rows.longest, workers) as engine:
            values = evaluate_labels(engine, model, rows, batch_size=rows_at_once, pad=pad)
            _require_finite([values["loss"]], model, at)
        accuracy = f", accuracy {values['accuracy']:.1%}" if "accuracy" in values else ""
        _print_result(f"loss {values['loss']:.6f}{accuracy}, {len(rows)} rows", workers)

    def _evaluate_choices(
        self, at: AtStep, model: HFBlockModel, choices: Choices, pad: int, workers: Workers | None
    ) -> None:
        from zo2adapters.tasks.scoring import score

        total = sum(len(choice.candidates) for choice in choices)
        with (
            self._engine(at, model, choices.longest, workers) as engine,
            tqdm(total=total, unit="candidate", file=sys.stderr, disable=not is_first(workers)) as bar,
        ):
            scored = score(
                engine,
                model,
                [choice.prompt for choice in choices],
                [choice.candidates for choice in choices],
                batch_size=self.batching.batch_size,
                pad_token_id=pad,
                progress=bar.update,
            )
            _require_finite([value for values in scored.log_likelihoods for value in values], model, at)
        shares = []
        for by_length in (False, True):
            chosen = scored.choices(by_length=by_length)
            right = sum(choice.is_right(index) for index, choice in zip(chosen, choices, strict=True))
            shares.append(right / len(choices))
        _print_result(
            f"accuracy {shares[0]:.1%}, by mean log-likelihood {shares[1]:.1%}, "
            f"{len(choices)} rows, {total} candidates, {scored.sweeps} sweeps",
            workers,
        )

    def _evaluate_answers(
        self,
        at: AtStep,
        model: HFBlockModel,
        tokenizer: Any,
        questions: Questions,
        pad: int,
        workers: Workers | None,
    ) -> None:
        from zo2adapters.tasks.answers import answer

        with (
            self._engine(at, model, questions.longest, workers) as engine,
            tqdm(total=len(questions), unit="row", file=sys.stderr, disable=not is_first(workers)) as bar,
        ):
            answered = answer(
                engine,
                model,
                tokenizer,
                questions,
                batch_size=self.batching.batch_size,
                pad_token_id=pad,
                progress=bar.update,
            )
        _print_result(f"F1 {answered.f1:.1%}, exact match {answered.exact_match:.1%}, {len(questions)} rows", workers)

    def _engine(self, at: AtStep, model: HFBlockModel, longest: int, workers: Workers | None) -> Runner:
        from zo2adapters.models.footprint import activation_bytes

        (rows, longest), micro_rows = self.batching.shape(self.batching.batch_size, longest), self.batching.micro_batch_size
        reserved = (
            activation_bytes(model.config, rows, longest, streams=BATCHES, micro_rows=micro_rows)
            if self.activation_memory is None
            else parse_size(self.activation_memory, option="activation_memory")
        )
        return at.engine(model, activation_bytes=reserved, micro_batch_size=micro_rows, trace=self.trace, workers=workers)


def _print_result(line: str, workers: Workers | None) -> None:
    """Print the result; of several workers the first prints."""
    if is_first(workers):
        print(line)


def _require_finite(values: Sequence[float], model: HFBlockModel, at: AtStep) -> None:
    """Refuse a loss that is not finite, and report whether the base's own weights are the cause."""
    from zo2adapters.trainers.base_check import require_finite_base

    not_finite = [value for value in values if not math.isfinite(value)]
    if not_finite:
        require_finite_base(model, at.base())
        raise NonFiniteLossError(
            "evaluation",
            found=f"a loss or log-likelihood of {not_finite[0]}",
            expected="finite numbers",
            remedy="evaluate an earlier step with --at, or in a wider --dtype: the base's weights are finite",
        )
