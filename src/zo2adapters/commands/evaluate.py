"""``zo2 evaluate``: the loss of a model on rows, or how often it chooses the right one of several candidates."""

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
from zo2adapters.trainers.batching import Batching
from zo2adapters.trainers.worker_options import WorkerOptions, is_first
from zo2core import NonFiniteLossError, OptionError, Runner, Workers
from zo2core.planning.host_budget import parse_size

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # a command line is read without transformers
    from zo2adapters.tasks.answers import Asked
    from zo2adapters.tasks.candidates import Choices

MOST_TOKENS = 1 << 20  # of an answer
BATCHES = 8  # an evaluation reserves memory for so many batches of the longest rows by default


@dataclass(frozen=True, kw_only=True)
class Evaluate(AtStep):
    """Evaluate a model, or a run at any of its steps, on a JSONL file."""

    data: Path
    """JSONL file of rows as for training, of rows with prompt, candidates and answer, or of rows with prompt and answers.
    With another --head it has rows with text and label."""
    batching: Batching = field(default_factory=Batching)
    max_new_tokens: int = 50
    """Longest answer, where rows have answers that are to be written; each token is one pass over the blocks."""
    activation_memory: str | None = None
    """Memory reserved for activations, such as 1GiB: as many batches as fit in it share one pass over the blocks. By default
    it is what eight of the longest take."""
    key_file: Path | None = None
    """File with a secret, the same for all workers that torchrun started, by which they know each other."""
    trace: Path | None = None
    """File to write each sweep to, for ui.perfetto.dev; it must not exist."""

    def run(self) -> None:
        """Print loss and perplexity; of candidates how often the likeliest one is right; of answers F1 and exact match."""
        with WorkerOptions(key_file=self.key_file).workers() as workers:
            self._evaluate(workers)

    def _evaluate(self, workers: Workers | None) -> None:
        from zo2adapters.tasks.answers import read_asked
        from zo2adapters.tasks.candidates import read_choices
        from zo2adapters.tasks.language_modelling_task import evaluate_dataset, perplexity
        from zo2adapters.tasks.row_files import format_of
        from zo2adapters.tasks.rows import read_dataset
        from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id

        self.batching.require_valid()
        require_between("max_new_tokens", self.max_new_tokens, 1, MOST_TOKENS)
        at = self.resolved()
        tokenizer = load_tokenizer(at.base())
        model = at.opened(loss_chunk=self.batching.loss_chunk)
        length = self.batching.length_for(model)
        rows = format_of(self.data) if at.model_options.head == "causal-lm" else RowFormat.LABELS
        if self.batching.pack and rows in (RowFormat.CANDIDATES, RowFormat.ANSWERS, RowFormat.LABELS):
            found, expected = f"{self.data}, rows of another kind", "rows of text, by the model's own loss"
            raise OptionError("pack", found=found, expected=expected, remedy="leave it out")
        if rows is RowFormat.LABELS:
            self._classify(at, model, tokenizer, length, workers)
            return
        if rows is RowFormat.CANDIDATES:
            choices = read_choices(self.data, tokenizer, sequence_length=length)
            self._choose(at, model, choices, pad_token_id(tokenizer), workers)
            return
        if rows is RowFormat.PREFERENCES:
            raise OptionError(
                "data",
                found=f"{self.data}, rows of preferences",
                expected="other rows: what a run has gained on its base is evaluated as it trains",
                remedy="name them as --evaluation of zo2 train",
            )
        if rows is RowFormat.ANSWERS:
            if self.max_new_tokens >= length:
                raise OptionError(
                    "max_new_tokens",
                    found=f"{self.max_new_tokens} where a row may have {length} tokens, the prompt among them",
                    expected=f"at most {length - 1}",
                    remedy="choose fewer, or raise `sequence_length`, up to what the model takes",
                )
            asked = read_asked(self.data, tokenizer, most_tokens=length - self.max_new_tokens)
            self._answer(at, model, tokenizer, asked, pad_token_id(tokenizer), workers)
            return
        dataset = read_dataset(self.data, tokenizer, sequence_length=length)
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
        _tell(
            f"loss {result.loss:.6f}, perplexity {perplexity(result.loss):.4f}, {result.tokens} tokens, "
            f"{len(dataset)} rows, {result.sweeps} sweeps",
            workers,
        )

    def _classify(self, at: AtStep, model: HFBlockModel, tokenizer: Any, length: int, workers: Workers | None) -> None:
        from zo2adapters.tasks.label_task import evaluate_labels
        from zo2adapters.tasks.labelled import padding_of, read_labelled_rows

        rows = read_labelled_rows(self.data, tokenizer, model.config, sequence_length=length)
        rows_at_once = self.batching.micro_batch_size or self.batching.batch_size
        pad = padding_of(model.config)
        with self._engine(at, model, rows.longest, workers) as engine:
            values = evaluate_labels(engine, model, rows, batch_size=rows_at_once, pad=pad)
            _require_finite([values["loss"]], model, at)
        accuracy = f", accuracy {values['accuracy']:.1%}" if "accuracy" in values else ""
        _tell(f"loss {values['loss']:.6f}{accuracy}, {len(rows)} rows", workers)

    def _choose(self, at: AtStep, model: HFBlockModel, choices: Choices, pad: int, workers: Workers | None) -> None:
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
            right = sum(choice.is_right(place) for place, choice in zip(chosen, choices, strict=True))
            shares.append(right / len(choices))
        _tell(
            f"accuracy {shares[0]:.1%}, by mean log-likelihood {shares[1]:.1%}, "
            f"{len(choices)} rows, {total} candidates, {scored.sweeps} sweeps",
            workers,
        )

    def _answer(
        self,
        at: AtStep,
        model: HFBlockModel,
        tokenizer: Any,
        asked: Sequence[Asked],
        pad: int,
        workers: Workers | None,
    ) -> None:
        from zo2adapters.tasks.answers import answer

        longest = max(len(row.prompt) for row in asked) + self.max_new_tokens
        with (
            self._engine(at, model, longest, workers) as engine,
            tqdm(total=len(asked), unit="row", file=sys.stderr, disable=not is_first(workers)) as bar,
        ):
            answered = answer(
                engine,
                model,
                tokenizer,
                asked,
                batch_size=self.batching.batch_size,
                max_new_tokens=self.max_new_tokens,
                pad_token_id=pad,
                progress=bar.update,
            )
        _tell(f"F1 {answered.f1:.1%}, exact match {answered.exact_match:.1%}, {len(asked)} rows", workers)

    def _engine(self, at: AtStep, model: HFBlockModel, longest: int, workers: Workers | None) -> Runner:
        from zo2adapters.models.footprint import activation_bytes

        (rows, longest), micro_rows = self.batching.shape(self.batching.batch_size, longest), self.batching.micro_batch_size
        nbytes = (
            activation_bytes(model.config, rows, longest, streams=BATCHES, micro_rows=micro_rows)
            if self.activation_memory is None
            else parse_size(self.activation_memory, option="activation_memory")
        )
        return at.engine(model, activation_bytes=nbytes, micro_batch_size=micro_rows, trace=self.trace, workers=workers)


def _tell(line: str, workers: Workers | None) -> None:
    """Print the result; of several workers the first one speaks."""
    if is_first(workers):
        print(line)


def _require_finite(values: Sequence[float], model: HFBlockModel, at: AtStep) -> None:
    """Refuse what a model of broken weights makes of rows, and say whose weights are broken."""
    from zo2adapters.trainers.base_check import require_finite_base

    wrong = [value for value in values if not math.isfinite(value)]
    if wrong:
        require_finite_base(model, at.base())
        raise NonFiniteLossError(
            "evaluation",
            found=f"a loss or log-likelihood of {wrong[0]}",
            expected="finite numbers",
            remedy="evaluate an earlier step with --at, or in a wider --dtype: the base's weights are finite",
        )
