"""Log-likelihoods of candidate answers: multiple choice, and classification by label words.

Candidates are compared by the mean log-probability of their tokens, in steps and evaluations, as in MeZO's program
(arXiv 2305.17333): what training minimises is what is measured, and a candidate is not preferred for having few tokens.

Every pair of prompt and candidate is a row; the batches whose activations fit into the engine's budget share a sweep.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from zo2adapters.models.batches import predictions
from zo2adapters.models.footprint import forward_bytes
from zo2adapters.models.hf import Activations, HFBlockModel
from zo2adapters.tasks.batches import collate
from zo2adapters.tasks.rows import TokenizedRow
from zo2adapters.tasks.task import gather_in_order, is_own_shard
from zo2core import Batch, Engine
from zo2core.errors import BatchError
from zo2core.ranges import counted


class Scored(NamedTuple):
    """How likely the candidates of each prompt are."""

    log_likelihoods: tuple[tuple[float, ...], ...]  # [prompt][candidate], summed over the candidate's tokens, in nats
    tokens: tuple[tuple[int, ...], ...]  # [prompt][candidate], number of the candidate's tokens
    sweeps: int  # number of passes over all blocks

    @property
    def means(self) -> list[list[float]]:
        """Mean log-probability of the tokens of each candidate, by which candidates are compared: [prompt][candidate]."""
        rows = zip(self.log_likelihoods, self.tokens, strict=True)
        return [[value / count for value, count in zip(*row, strict=True)] for row in rows]

    def choices(self) -> tuple[int, ...]:
        """The index of each prompt's candidate with the largest mean, the first one if several are equal."""
        return tuple(max(range(len(means)), key=means.__getitem__) for means in self.means)


class LogLikelihood:
    """The model's forward, which returns each row's log-likelihood of its labelled tokens instead of a loss."""

    def __init__(self, model: HFBlockModel) -> None:
        self._model = model
        self.prepared = model.prepared
        self.embed = model.embed
        self.block = model.block
        self.held_bytes = model.held_bytes

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Sum the log-probabilities of each row's labelled tokens: (rows,), float64."""
        targets = batch["labels"][:, 1:]
        rows, columns = predictions(batch)
        chunk = self._model.loss_chunk or len(rows)
        hidden = self._model.by_token(activations.hidden)
        sums = torch.zeros(len(targets), dtype=torch.float64, device=targets.device)
        for start in range(0, len(rows), chunk):
            index = rows[start : start + chunk], columns[start : start + chunk]
            logits = self._model.logits(hidden[index]).float()
            log_probabilities = logits.log_softmax(dim=-1).gather(1, targets[index][:, None])[:, 0]
            sums.index_add_(0, index[0], log_probabilities.double())
        return sums

    def forward_bytes(self, batch: Batch) -> int:
        """The model's bytes of activations, with logits of the labelled tokens only."""
        rows, tokens = batch["input_ids"].shape
        labelled = len(predictions(batch)[0])
        chunk = min(labelled, self._model.loss_chunk or labelled)
        return forward_bytes(self._model.config, rows, tokens, loss_chunk=chunk)


def score(
    engine: Engine,
    model: HFBlockModel,
    prompts: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[int]]],
    *,
    batch_size: int = 16,
    pad_token_id: int = 0,
    progress: Callable[[int], object] | None = None,
) -> Scored:
    """Compute the log-likelihoods of each prompt's candidates with the engine's current weights.

    Args:
        engine: The engine whose current weights are used.
        model: The model that the engine was made with.
        prompts: Token ids of each prompt, at least one.
        candidates: One or more candidates of each prompt, as token ids, at least one.
        batch_size: Number of rows in a batch; a row is a prompt with one candidate.
        pad_token_id: Token id at padded positions.
        progress: Called with the number of rows of each batch.

    Raises:
        BatchError: if a prompt or a candidate is empty, or a row is longer than the model supports.
        WorkerError: if another worker does not answer, or has other rows.
    """
    rows: list[TokenizedRow] = []
    for number, (prompt, answers) in enumerate(zip(prompts, candidates, strict=True)):
        sequences = (("prompts", prompt), ("candidates", answers), *(("candidates", answer) for answer in answers))
        for name, tokens in sequences:
            if not tokens:
                raise BatchError(f"{name}[{number}]", found="nothing", expected="at least one token", remedy="add tokens")
        longest_row, longest = len(prompt) + max(map(len, answers)), model.longest_row
        if longest is not None and longest_row > longest:
            raise BatchError(
                f"prompts[{number}]",
                found=f"{counted(len(prompt), 'token')}, {longest_row} with the longest candidate",
                expected=f"at most {longest} together, the model's longest sequence",
                remedy="shorten this prompt or its candidates",
            )
        rows += [TokenizedRow(array("i", [*prompt, *answer]), len(prompt), 0) for answer in answers]
    if not rows:
        raise BatchError("prompts", found="none", expected="at least one prompt", remedy="pass prompts to score")

    groups = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]

    def batches() -> Iterator[Batch]:
        for number, group in enumerate(groups):
            if progress is not None:
                progress(len(group))
            if is_own_shard(engine, number):
                yield collate(group, pad_token_id=pad_token_id)

    sums: list[float] = []
    sweeps = 0
    for outputs in engine.forwards(batches(), LogLikelihood(model)):
        sums += torch.cat(outputs).tolist()
        sweeps += 1
    values = iter(gather_in_order(engine, sums, [len(group) for group in groups], rows))
    return Scored(
        log_likelihoods=tuple(tuple(next(values) for _ in answers) for answers in candidates),
        tokens=tuple(tuple(len(answer) for answer in answers) for answers in candidates),
        sweeps=sweeps,
    )
