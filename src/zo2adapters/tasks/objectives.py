"""Objectives of prompts with candidates: log-likelihoods, cross entropy, accuracy, F1, and
preference optimisation.

Candidates are compared by the mean log-probability of their tokens, in steps and evaluations, as in
MeZO's program (arXiv 2305.17333): what training minimises is what is measured, and a candidate is
not preferred for having few tokens.

Every pair of prompt and candidate is a row; the batches whose activations fit into the engine's
budget share a sweep.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from zo2adapters.models.batches import is_packed, predictions, recomputed, sequence_numbers
from zo2adapters.models.footprint import PassBytes, forward_bytes
from zo2adapters.models.hf import Activations, HFBlockModel, PredictionLoss
from zo2adapters.tasks.rows import (
    ANSWER,
    PROMPT,
    REFERENCE,
    TokenizedRow,
    collate,
    file_batches,
    with_completion,
)
from zo2core import Batch, Engine, Forward
from zo2core.errors import BatchError
from zo2core.ranges import counted, require_number
from zo2core.sweep.gradient_visitor import GRAPH_FORWARDS
from zo2core.sweep.microbatch import predicted

Value = TypeVar("Value")

BETA = 0.1  # default beta of DPO


def is_own_shard(engine: Engine, number: int) -> bool:
    """Whether a row, or a group of rows, belongs to this worker."""
    return number % engine.workers.size == engine.workers.rank


def in_order(engine: Engine, values: Sequence[Value], rows: object) -> list[Value]:
    """Gather what all workers have computed of their rows or groups of rows, in the order of
    these.
    """
    engine.workers.require_same("rows", zlib.crc32(repr(rows).encode()))
    return engine.workers.in_order(values)


def sharded_forwards(
    engine: Engine,
    groups: Sequence[Sequence[Any]],
    batch_of: Callable[[Any], Batch],
    forward: Forward,
    progress: Callable[[int], object] | None = None,
) -> tuple[list[list[float]], int]:
    """Run groups of rows, of which each worker runs its part: the outputs of each group, and the
    number of sweeps.
    """

    def batches() -> Iterator[Batch]:
        for number, group in enumerate(groups):
            if progress is not None:
                progress(len(group))
            if is_own_shard(engine, number):
                yield batch_of(group)

    sweeps = list(engine.forwards(batches(), forward))
    values = [output.reshape(-1).tolist() for outputs in sweeps for output in outputs]
    return in_order(engine, values, groups), len(sweeps)


class Scored(NamedTuple):
    """How likely the candidates of each prompt are."""

    # [prompt][candidate], summed over the candidate's tokens, in nats
    log_likelihoods: tuple[tuple[float, ...], ...]
    tokens: tuple[tuple[int, ...], ...]  # [prompt][candidate], number of the candidate's tokens
    sweeps: int  # number of passes over all blocks

    @property
    def means(self) -> list[list[float]]:
        """Mean log-probability of the tokens of each candidate, by which candidates are compared:
        ``[prompt][candidate]``.
        """
        rows = zip(self.log_likelihoods, self.tokens, strict=True)
        return [[value / count for value, count in zip(*row, strict=True)] for row in rows]

    def choices(self) -> tuple[int, ...]:
        """The index of each prompt's candidate with the largest mean, the first one if several are
        equal.
        """
        return tuple(max(range(len(means)), key=means.__getitem__) for means in self.means)


class LogLikelihood:
    """The model's forward, which returns each row's log-likelihood of its labelled tokens instead
    of a loss; of a packed row that of each of its sequences.
    """

    def __init__(self, model: HFBlockModel) -> None:
        self._model = model
        self.embed = PredictionLoss(model).embed  # without the logits of routers
        self.block = model.block
        self.held_bytes = model.held_bytes

    def prepared(self, batch: Batch) -> Batch:
        """Check a batch."""
        return self._model.prepared(batch)

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Sum the log-probabilities of each sequence's labelled tokens: (sequences,), float64."""
        targets = batch["labels"][:, 1:]
        rows, columns = predictions(batch)
        chunk = self._model.loss_chunk or len(rows)
        hidden = self._model.by_token(activations.hidden)
        sequences = rows
        count = len(targets)
        if is_packed(batch):
            numbers = sequence_numbers(batch)
            sequences = numbers[rows, columns]
            count = int(numbers.max()) + 1
        sums = torch.zeros(count, dtype=torch.float64, device=targets.device)
        keeps = len(rows) <= chunk
        for start in range(0, len(rows), chunk):
            index = rows[start : start + chunk], columns[start : start + chunk]
            of_tokens = recomputed(
                self._log_probabilities, hidden[index], targets[index], keeps=keeps
            )
            sums.index_add_(0, sequences[start : start + chunk], of_tokens.double())
        return sums

    def _log_probabilities(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The log-probability of each target after its hidden state: (tokens,), float32."""
        logits = self._model.logits(hidden).float()
        return logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]

    def forward_bytes(self, batch: Batch) -> int:
        """The bytes of a forward, with logits of the labelled tokens only."""
        return self._pass_bytes(batch, self._model.forward_peaks)

    def backward_bytes(self, batch: Batch) -> int:
        """The bytes of a forward and backward."""
        measured = self._model.pass_peaks
        if measured is None or measured.both is None:
            return math.ceil(GRAPH_FORWARDS * self.forward_bytes(batch))
        return self._pass_bytes(batch, measured.both)

    def _pass_bytes(self, batch: Batch, measured: PassBytes | None) -> int:
        rows, tokens = batch["input_ids"].shape
        labelled = len(predictions(batch)[0])
        chunk = min(labelled, self._model.loss_chunk or labelled)
        config = self._model.config
        return forward_bytes(config, rows, tokens, loss_chunk=chunk, measured=measured)


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
        sequences = (
            ("prompts", prompt),
            ("candidates", answers),
            *(("candidates", answer) for answer in answers),
        )
        for name, tokens in sequences:
            if not tokens:
                raise BatchError(f"{name}[{number}]", "nothing", "at least one token", "add tokens")
        longest_row = len(prompt) + max(map(len, answers))
        longest = model.longest_row
        if longest is not None and longest_row > longest:
            found = f"{counted(len(prompt), 'token')}, {longest_row} with the longest candidate"
            expected = f"at most {longest} together, the model's longest sequence"
            raise BatchError(
                f"prompts[{number}]", found, expected, "shorten this prompt or its candidates"
            )
        rows += [with_completion(prompt, answer) for answer in answers]
    if not rows:
        raise BatchError("prompts", "none", "at least one prompt", "pass prompts to score")

    batches = file_batches(rows, batch_size)
    collated = partial(collate, pad_token_id=pad_token_id)
    groups, sweeps = sharded_forwards(engine, batches, collated, LogLikelihood(model), progress)
    values = iter(value for group in groups for value in group)
    return Scored(
        log_likelihoods=tuple(tuple(next(values) for _ in answers) for answers in candidates),
        tokens=tuple(tuple(len(answer) for answer in answers) for answers in candidates),
        sweeps=sweeps,
    )


class CandidateScores(NamedTuple):
    """The scores of a prompt's candidates."""

    scores: torch.Tensor  # (candidates,), float64
    answers: Sequence[int]  # indices of the right candidates, at least one


class ChoiceObjective(LogLikelihood, ABC):
    """An objective of prompts with candidates, for batches of ``choice_batch``.

    See ``Objective``.
    """

    @abstractmethod
    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """The value to minimise over all prompts, 0-d, float64."""

    def prepared(self, batch: Batch) -> Batch:
        """Check the entries of a batch that the model's forward takes."""
        task_keys = (PROMPT, ANSWER, REFERENCE)
        return self._model.prepared(
            {key: value for key, value in batch.items() if key not in task_keys}
        )

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Mean log-probability of each row's candidate: (rows,), float64."""
        return super().head(batch, activations) / predicted(batch["labels"]).sum(dim=1)

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """Split a batch between prompts into micro-batches."""
        if not {PROMPT, ANSWER, "labels"} <= batch.keys():
            raise _refusal(f"the keys {', '.join(batch)}", f"also {PROMPT} and {ANSWER}")
        if {len(value) for value in batch.values()} != {len(batch[PROMPT])}:
            raise _refusal(
                f"entries of {[len(value) for value in batch.values()]} rows", "equally many rows"
            )
        right = [int(part.sum()) for part in torch.split(batch[ANSWER], _sizes(batch))]
        if min(right) < 1:
            raise _refusal("prompts without a right candidate", "at least one for each prompt")
        if rows is None:
            return [batch]
        sizes: list[int] = []  # rows of each micro-batch
        for size in _sizes(batch):
            if sizes and sizes[-1] + size <= rows:
                sizes[-1] += size
            else:
                sizes.append(size)
        parts = {key: torch.split(value, sizes) for key, value in batch.items()}
        return [
            {key: values[index] for key, values in parts.items()} for index in range(len(sizes))
        ]

    def loss(self, outputs: Sequence[torch.Tensor], micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Compute the loss from the scores of all micro-batches."""
        rated: list[CandidateScores] = []
        for scores, micro_batch in zip(outputs, micro_batches, strict=True):
            sizes = _sizes(micro_batch)
            answers = [
                part.nonzero()[:, 0].tolist() for part in torch.split(micro_batch[ANSWER], sizes)
            ]
            rated += map(CandidateScores, torch.split(scores.cpu(), sizes), answers)
        return self.value(rated)


class ChoiceLoss(ChoiceObjective):
    """Cross entropy of the right candidates among the scores of a prompt's candidates: MeZO's loss
    over label words.
    """

    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """The mean over prompts."""
        return torch.stack(
            [scores.logsumexp(0) - _of(scores, answers) for scores, answers in rated]
        ).mean()


class ChoiceError(ChoiceObjective):
    """The share of prompts whose likeliest candidate is wrong: 1 - accuracy. It has no gradient."""

    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """The share of wrong prompts."""
        wrong = sum(int(scores.argmax()) not in answers for scores, answers in rated)
        return torch.tensor(wrong / len(rated), dtype=torch.float64)


class ChoiceF1Error(ChoiceObjective):
    """1 - F1 of one candidate, where all prompts have the same candidates. It has no gradient.

    Args:
        model: The model that scores the candidates.
        positive: Index of the candidate that is the positive class.
    """

    def __init__(self, model: HFBlockModel, *, positive: int = 1) -> None:
        super().__init__(model)
        self.positive = positive

    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """1 - 2 TP / (2 TP + FP + FN), or 0 if no prompt is positive and none is predicted to
        be.
        """
        pairs = [
            (int(scores.argmax()) == self.positive, self.positive in answers)
            for scores, answers in rated
        ]
        hits = sum(predicted_positive and is_positive for predicted_positive, is_positive in pairs)
        errors = sum(predicted_positive != is_positive for predicted_positive, is_positive in pairs)
        return torch.tensor(
            errors / (2 * hits + errors) if hits + errors else 0.0, dtype=torch.float64
        )


class PreferenceLoss(ChoiceObjective):
    """Direct preference optimisation, DPO (arXiv 2305.18290, equation 7), for batches of
    ``preference_batch``.

    Args:
        model: The model that scores the completions.
        beta: Strength of the penalty for moving away from the reference model, above 0.

    Raises:
        OptionError: if ``beta`` is not above 0.
    """

    def __init__(self, model: HFBlockModel, *, beta: float = BETA) -> None:
        super().__init__(model)
        require_number("beta", beta, above=0)
        self.beta = beta

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Log-probability of each row's candidate, summed over its tokens: (rows,), float64."""
        return LogLikelihood.head(self, batch, activations)

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """Split a batch between prompts into micro-batches. See ``ChoiceObjective``.

        Raises:
            BatchError: if the batch is not one of ``preference_batch``.
        """
        if REFERENCE not in batch:
            raise _refusal(f"the keys {', '.join(batch)}", f"also {REFERENCE}", "preference_batch")
        return super().split(batch, rows)

    def loss(self, outputs: Sequence[torch.Tensor], micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Compute the loss from all micro-batches' scores, relative to the reference model's."""
        pairs = zip(outputs, micro_batches, strict=True)
        return super().loss(
            [scores.cpu() - micro_batch[REFERENCE].cpu() for scores, micro_batch in pairs],
            micro_batches,
        )

    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """The mean over prompts of -log sigmoid(beta x margin of the chosen completion)."""
        margins = torch.stack(
            [scores[answers[0]] - scores[1 - answers[0]] for scores, answers in rated]
        )
        return -torch.nn.functional.logsigmoid(self.beta * margins).mean()


def _of(scores: torch.Tensor, answers: Sequence[int]) -> torch.Tensor:
    """The log-score of the right candidate, or of any of several right ones."""
    return scores[answers[0]] if len(answers) == 1 else scores[list(answers)].logsumexp(0)


def _refusal(found: str, expected: str, maker: str = "choice_batch") -> BatchError:
    return BatchError("batch", found, expected, f"make it with {maker}")


def _sizes(batch: Batch) -> list[int]:
    """Rows of each prompt of a batch, in order."""
    _, sizes = torch.unique_consecutive(batch[PROMPT], return_counts=True)
    return [int(size) for size in sizes]
