"""``zo2 evaluate``: the loss of a model on rows, or how often it chooses the right one of several candidates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from zo2adapters.commands.at_step import AtStep
from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.models.footprint import activation_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.candidates import Choice, holds_choices, read_choices
from zo2adapters.tasks.rows import read_dataset
from zo2adapters.tasks.scoring import score
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
from zo2adapters.trainers.options import Batching
from zo2adapters.trainers.trainer import evaluate_dataset, perplexity
from zo2core import Replayer, parse_size

BATCHES = 8  # an evaluation reserves memory for so many batches of the longest rows by default


@dataclass(frozen=True, kw_only=True)
class Evaluate(AtStep):
    """Evaluate a model, or a run at any of its steps, on a JSONL file."""

    data: Path
    """JSONL file of rows as for training, or of rows with prompt, candidates and answer."""
    batching: Batching = field(default_factory=Batching)
    activation_memory: str | None = None
    """Memory reserved for activations, such as 1GiB: as many batches as fit in it share one pass over the blocks. By default
    it is what eight of the longest take."""
    trace: Path | None = None
    """File to write each sweep to, for ui.perfetto.dev and zo2 timeline; it must not exist."""

    def run(self) -> None:
        """Print loss and perplexity; of rows with candidates, how often the likeliest one is the answer."""
        at = self.resolved()
        tokenizer = load_tokenizer(at.base())
        model = open_checkpoint(at.base(), dtype=at.dtype, loss_chunk=self.batching.loss_chunk)
        length = self.batching.length_for(model)
        if holds_choices(self.data):
            self._choose(at, model, read_choices(self.data, tokenizer, sequence_length=length), pad_token_id(tokenizer))
            return
        dataset = read_dataset(self.data, tokenizer, sequence_length=length)
        longest = max(len(row.input_ids) for row in dataset)
        with self._engine(at, model, longest) as engine, tqdm(total=len(dataset), unit="row", file=sys.stderr) as bar:
            result = evaluate_dataset(
                engine, dataset, batch_size=self.batching.batch_size, pad=pad_token_id(tokenizer), progress=bar.update
            )
        print(
            f"loss {result.loss:.6f}, perplexity {perplexity(result.loss):.4f}, {result.tokens} tokens, "
            f"{len(dataset)} rows, {result.sweeps} sweeps"
        )

    def _choose(self, at: AtStep, model: HFBlockModel, choices: Sequence[Choice], pad: int) -> None:
        longest = max(len(choice.prompt) + len(candidate) for choice in choices for candidate in choice.candidates)
        total = sum(len(choice.candidates) for choice in choices)
        with self._engine(at, model, longest) as engine, tqdm(total=total, unit="candidate", file=sys.stderr) as bar:
            scored = score(
                engine,
                model,
                [choice.prompt for choice in choices],
                [choice.candidates for choice in choices],
                batch_size=self.batching.batch_size,
                pad_token_id=pad,
                progress=bar.update,
            )
        shares = []
        for by_length in (False, True):
            chosen = scored.choices(by_length=by_length)
            right = sum(place == choice.answer for place, choice in zip(chosen, choices, strict=True))
            shares.append(right / len(choices))
        print(
            f"accuracy {shares[0]:.1%}, by mean log-likelihood {shares[1]:.1%}, "
            f"{len(choices)} rows, {total} candidates, {scored.sweeps} sweeps"
        )

    def _engine(self, at: AtStep, model: HFBlockModel, longest: int) -> Replayer:
        rows, micro_rows = self.batching.batch_size, self.batching.micro_batch_size
        nbytes = (
            activation_bytes(model.config, rows, longest, streams=BATCHES, micro_rows=micro_rows)
            if self.activation_memory is None
            else parse_size(self.activation_memory)
        )
        return at.engine(model, activation_bytes=nbytes, micro_batch_size=micro_rows, trace=self.trace)
