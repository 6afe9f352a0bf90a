"""Objectives of prompts with candidate answers: cross entropy, accuracy, F1, and preference optimisation.

Every pair of prompt and candidate is a row, as in ``score``. A candidate's score is the mean log-probability of its tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zo2adapters.models.hf import Activations, HFBlockModel
from zo2adapters.tasks.batches import collate
from zo2adapters.tasks.rows import TokenizedRow
from zo2adapters.tasks.scoring import LogLikelihood
from zo2core import Batch
from zo2core.errors import BatchError
from zo2core.ranges import require_number
from zo2core.sweep.microbatch import predicted

PROMPT, ANSWER, REFERENCE = "prompt", "is_answer", "reference"  # keys of a batch that the model's forward does not take

BETA = 0.1  # default beta of DPO


class CandidateScores(NamedTuple):
    """The scores of a prompt's candidates."""

    scores: torch.Tensor  # (candidates,), float64
    answers: Sequence[int]  # indices of the right candidates, at least one


def choice_batch(
    prompts: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[int]]],
    answers: Sequence[int | Sequence[int]],
    *,
    pad_token_id: int = 0,
) -> dict[str, torch.Tensor]:
    """Make a batch for objectives of candidates; each pair of prompt and candidate is a row.

    Args:
        prompts: Token ids of each prompt, at least one.
        candidates: Two or more candidates of each prompt, as token ids, at least one.
        answers: Index of the right candidate of each prompt, or the indices of several.
        pad_token_id: Token id at padded positions.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels``, each (rows, tokens), int64, with labels for the candidates' tokens
        alone; ``prompt``, the index of a row's prompt, and ``is_answer``, 1 where its candidate is right, each (rows,),
        int64.

    Raises:
        BatchError: if there is no prompt, or a prompt or candidate is empty, or a prompt has fewer than two candidates or
            none that is right.
    """
    rows: list[TokenizedRow] = []
    prompt_of: list[int] = []
    is_answer: list[int] = []
    if not prompts:
        raise BatchError("prompts", found="none", expected="at least one prompt", remedy="pass prompts")
    for number, (prompt, options, answer) in enumerate(zip(prompts, candidates, answers, strict=True)):
        right = [answer] if isinstance(answer, int) else list(answer)
        if not prompt or len(options) < 2 or not all(options) or not right or not set(right) <= set(range(len(options))):
            sizes = [len(candidate) for candidate in options]
            raise BatchError(
                f"prompts[{number}]",
                found=f"{len(prompt)} tokens, candidates of {sizes} tokens, answer {answer}",
                expected="a prompt and at least two candidates, all with tokens, and the index of a right candidate",
                remedy="add what is missing",
            )
        rows += [TokenizedRow(array("i", [*prompt, *candidate]), len(prompt), 0) for candidate in options]
        prompt_of += [number] * len(options)
        is_answer += [int(index in right) for index in range(len(options))]
    batch = collate(rows, pad_token_id=pad_token_id)
    return {**batch, PROMPT: torch.tensor(prompt_of), ANSWER: torch.tensor(is_answer)}


def preference_batch(
    prompts: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[int]]],
    references: Sequence[Sequence[float]],
    *,
    pad_token_id: int = 0,
) -> dict[str, torch.Tensor]:
    """Make a batch for ``PreferenceLoss``.

    Args:
        prompts: Token ids of each prompt, at least one.
        candidates: The chosen and the rejected completion of each prompt, as token ids, at least one.
        references: Log-likelihoods of these two under the reference model, from ``score``, for each prompt.
        pad_token_id: Token id at padded positions.

    Returns:
        The batch of ``choice_batch``, and ``reference``, (rows,), float64.

    Raises:
        BatchError: if there is no prompt, or a prompt or completion is empty, or a prompt does not have two completions and
            two references.
    """
    for number, (completions, likelihoods) in enumerate(zip(candidates, references, strict=True)):
        if len(completions) != 2 or len(likelihoods) != 2:
            raise BatchError(
                f"prompts[{number}]",
                found=f"{len(completions)} candidates, {len(likelihoods)} references",
                expected="a chosen and a rejected candidate, and the log-likelihood of each",
                remedy="add what is missing",
            )
    batch = choice_batch(prompts, candidates, [0] * len(prompts), pad_token_id=pad_token_id)
    return {**batch, REFERENCE: torch.tensor(references, dtype=torch.float64).view(-1)}


class ChoiceObjective(ABC):
    """An objective of prompts with candidates, for batches of ``choice_batch``. See ``Objective``."""

    def __init__(self, model: HFBlockModel) -> None:
        self._rows = LogLikelihood(model)
        self.embed = self._rows.embed
        self.block = self._rows.block
        self.forward_bytes = self._rows.forward_bytes
        self.held_bytes = self._rows.held_bytes

    @abstractmethod
    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """The value to minimise over all prompts, 0-d, float64."""

    def prepared(self, batch: Batch) -> Batch:
        """Check the entries of a batch that the model's forward takes. See the contract."""
        return self._rows.prepared({key: value for key, value in batch.items() if key not in (PROMPT, ANSWER, REFERENCE)})

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Mean log-probability of each row's candidate: (rows,), float64."""
        return self._rows.head(batch, activations) / predicted(batch["labels"]).sum(dim=1)

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """Split a batch between prompts into micro-batches. See the contract."""
        if not {PROMPT, ANSWER, "labels"} <= batch.keys():
            raise _refusal(f"the keys {', '.join(batch)}", f"also {PROMPT} and {ANSWER}")
        if {len(value) for value in batch.values()} != {len(batch[PROMPT])}:
            raise _refusal(f"entries of {[len(value) for value in batch.values()]} rows", "equally many rows")
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
        return [{key: values[index] for key, values in parts.items()} for index in range(len(sizes))]

    def loss(self, outputs: Sequence[torch.Tensor], micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Compute the loss from the scores of all micro-batches. See the contract."""
        rated: list[CandidateScores] = []
        for scores, micro_batch in zip(outputs, micro_batches, strict=True):
            sizes = _sizes(micro_batch)
            answers = [part.nonzero()[:, 0].tolist() for part in torch.split(micro_batch[ANSWER], sizes)]
            rated += map(CandidateScores, torch.split(scores.cpu(), sizes), answers)
        return self.value(rated)


class ChoiceLoss(ChoiceObjective):
    """Cross entropy of the right candidates among the scores of a prompt's candidates: MeZO's loss over label words."""

    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """The mean over prompts."""
        return torch.stack([scores.logsumexp(0) - _of(scores, answers) for scores, answers in rated]).mean()


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
        """1 - 2 TP / (2 TP + FP + FN), or 0 if no prompt is positive and none is predicted to be."""
        pairs = [(int(scores.argmax()) == self.positive, self.positive in answers) for scores, answers in rated]
        hits = sum(predicted_positive and is_positive for predicted_positive, is_positive in pairs)
        errors = sum(predicted_positive != is_positive for predicted_positive, is_positive in pairs)
        return torch.tensor(errors / (2 * hits + errors) if hits + errors else 0.0, dtype=torch.float64)


class PreferenceLoss(ChoiceObjective):
    """Direct preference optimisation, DPO (arXiv 2305.18290, equation 7), for batches of ``preference_batch``.

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
        return self._rows.head(batch, activations)

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """Split a batch between prompts into micro-batches. See ``ChoiceObjective``.

        Raises:
            BatchError: if the batch is not one of ``preference_batch``.
        """
        if REFERENCE not in batch:
            raise _refusal(f"the keys {', '.join(batch)}", f"also {REFERENCE}", "preference_batch")
        return super().split(batch, rows)

    def loss(self, outputs: Sequence[torch.Tensor], micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Compute the loss from the scores of all micro-batches, relative to the reference model's. See the contract."""
        pairs = zip(outputs, micro_batches, strict=True)
        return super().loss([scores.cpu() - micro_batch[REFERENCE].cpu() for scores, micro_batch in pairs], micro_batches)

    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """The mean over prompts of -log sigmoid(beta x margin of the chosen completion)."""
        margins = torch.stack([scores[answers[0]] - scores[1 - answers[0]] for scores, answers in rated])
        return -torch.nn.functional.logsigmoid(self.beta * margins).mean()


def _of(scores: torch.Tensor, answers: Sequence[int]) -> torch.Tensor:
    """The log-score of the right candidate, or of any of several right ones."""
    return scores[answers[0]] if len(answers) == 1 else scores[list(answers)].logsumexp(0)


def _refusal(found: str, expected: str, maker: str = "choice_batch") -> BatchError:
    return BatchError("batch", found=found, expected=expected, remedy=f"make it with {maker}")


def _sizes(batch: Batch) -> list[int]:
    """Rows of each prompt of a batch, in order."""
    _, sizes = torch.unique_consecutive(batch[PROMPT], return_counts=True)
    return [int(size) for size in sizes]
