"""What prompts with candidate answers can be trained on and evaluated by: a loss over them, accuracy, F1, a preference.

Every pair of prompt and candidate is a row, as in ``score``. A candidate's score is the mean log-probability of its tokens,
as in MeZO's program (arXiv 2305.17333) where it trains on classification.
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
from zo2core import Batch, BatchError
from zo2core.estimators.inputs import require_positive
from zo2core.sweep.microbatch import predicted

PROMPT, ANSWER, REFERENCE = "prompt", "is_answer", "reference"  # keys of a batch that the model's forward does not take

BETA = 0.1  # of DPO, unless told otherwise


class CandidateScores(NamedTuple):
    """A prompt's candidates with their scores."""

    scores: torch.Tensor  # (candidates,), float64
    answers: Sequence[int]  # the right ones, at least one


def choice_batch(
    prompts: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[int]]],
    answers: Sequence[int | Sequence[int]],
    *,
    pad_token_id: int = 0,
) -> dict[str, torch.Tensor]:
    """Make a batch for the objectives of candidates.

    Args:
        prompts: Token ids, at least one each.
        candidates: For each prompt two or more lists of token ids that may follow it, at least one each.
        answers: For each prompt the place of the right one among its candidates, or the places of several.
        pad_token_id: Token id at padded positions.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels`` (rows, tokens), with labels for the candidates' tokens alone;
        ``prompt`` and ``is_answer`` (rows,): which prompt a row belongs to, and whether its candidate is the right one.

    Raises:
        BatchError: if there is no prompt, or one is empty, has fewer than two candidates, an empty one, or no right one.
    """
    rows: list[TokenizedRow] = []
    prompt_of: list[int] = []
    is_answer: list[int] = []
    if not prompts:
        raise BatchError("prompts", found="none", expected="at least one", remedy="pass prompts")
    for number, (prompt, given, answer) in enumerate(zip(prompts, candidates, answers, strict=True)):
        right = [answer] if isinstance(answer, int) else list(answer)
        if not prompt or len(given) < 2 or not all(given) or not right or not set(right) <= set(range(len(given))):
            sizes = [len(candidate) for candidate in given]
            raise BatchError(
                f"prompts[{number}]",
                found=f"{len(prompt)} tokens, candidates of {sizes} tokens, answer {answer}",
                expected="tokens, two candidates or more that have tokens, and the place of the right one",
                remedy="fill them in",
            )
        rows += [TokenizedRow(array("i", [*prompt, *candidate]), len(prompt), 0) for candidate in given]
        prompt_of += [number] * len(given)
        is_answer += [int(place in right) for place in range(len(given))]
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
        prompts: Token ids, at least one each.
        candidates: For each prompt two lists of token ids that may follow it: the chosen one, and the rejected one.
        references: For each prompt the log-likelihoods of these two by the reference model, as ``score`` gives them.
        pad_token_id: Token id at padded positions.

    Returns:
        What ``choice_batch`` gives, and ``reference`` (rows,), float64.

    Raises:
        BatchError: if there is no prompt, or one is empty, has not two candidates with tokens, or not two references.
    """
    for number, (given, own) in enumerate(zip(candidates, references, strict=True)):
        if len(given) != 2 or len(own) != 2:
            raise BatchError(
                f"prompts[{number}]",
                found=f"{len(given)} candidates, {len(own)} references",
                expected="a chosen one and a rejected one, and the log-likelihood of each",
                remedy="fill them in",
            )
    batch = choice_batch(prompts, candidates, [0] * len(prompts), pad_token_id=pad_token_id)
    return {**batch, REFERENCE: torch.tensor(references, dtype=torch.float64).view(-1)}


class ChoiceObjective(ABC):
    """An objective of prompts with candidates, for batches of ``choice_batch``. See ``Objective``.

    Args:
        model: The model whose forward it is.
    """

    def __init__(self, model: HFBlockModel) -> None:
        self._rows = LogLikelihood(model)
        self.embed = self._rows.embed
        self.block = self._rows.block
        self.forward_bytes = self._rows.forward_bytes
        self.held_bytes = self._rows.held_bytes

    @abstractmethod
    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """What is to become smaller, 0-d, float64, of all prompts."""

    def prepared(self, batch: Batch) -> Batch:
        """Check what the model's forward takes of a batch. See the contract."""
        return self._rows.prepared({key: value for key, value in batch.items() if key not in (PROMPT, ANSWER, REFERENCE)})

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Mean log-probability of each row's candidate: (rows,), float64."""
        return self._rows.head(batch, activations) / predicted(batch["labels"]).sum(dim=1)

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """Cut a batch between prompts: pieces of at most so many rows, or of one prompt that has more. See the contract.

        Raises:
            BatchError: if the batch is not one of ``choice_batch``.
        """
        if not {PROMPT, ANSWER, "labels"} <= batch.keys():
            raise _refusal(", ".join(batch), f"{PROMPT} and {ANSWER} among it")
        if {len(value) for value in batch.values()} != {len(batch[PROMPT])}:
            raise _refusal(f"entries of {[len(value) for value in batch.values()]} rows", "as many rows of each")
        right = [int(part.sum()) for part in torch.split(batch[ANSWER], _sizes(batch))]
        if min(right) < 1:
            raise _refusal("prompts without a right candidate", "one at least for each prompt")
        if rows is None:
            return [batch]
        sizes: list[int] = []  # rows of each piece
        for size in _sizes(batch):
            if sizes and sizes[-1] + size <= rows:
                sizes[-1] += size
            else:
                sizes.append(size)
        cut = {key: torch.split(value, sizes) for key, value in batch.items()}
        return [{key: parts[place] for key, parts in cut.items()} for place in range(len(sizes))]

    def loss(self, outputs: Sequence[torch.Tensor], pieces: Sequence[Batch]) -> torch.Tensor:
        """Join what the head gave for pieces. See the contract."""
        rated: list[CandidateScores] = []
        for scores, piece in zip(outputs, pieces, strict=True):
            sizes = _sizes(piece)
            answers = [part.nonzero()[:, 0].tolist() for part in torch.split(piece[ANSWER], sizes)]
            rated += map(CandidateScores, torch.split(scores.cpu(), sizes), answers)
        return self.value(rated)


class ChoiceLoss(ChoiceObjective):
    """Cross entropy of the right candidates among the scores of a prompt's candidates: MeZO's loss over label words."""

    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """The mean over prompts."""
        return torch.stack([scores.logsumexp(0) - _of(scores, answers) for scores, answers in rated]).mean()


class ChoiceError(ChoiceObjective):
    """The share of prompts whose likeliest candidate is not the right one: one less accuracy. It has no gradient."""

    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """Wrong prompts by all prompts."""
        wrong = sum(int(scores.argmax()) not in answers for scores, answers in rated)
        return torch.tensor(wrong / len(rated), dtype=torch.float64)


class ChoiceF1Error(ChoiceObjective):
    """One less the F1 of one place among the candidates, where all prompts have the same ones. It has no gradient.

    Args:
        model: The model whose forward it is.
        positive: The place of the candidate that counts as found.
    """

    def __init__(self, model: HFBlockModel, *, positive: int = 1) -> None:
        super().__init__(model)
        self.positive = positive

    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """1 - 2 TP / (2 TP + FP + FN); 0 where nothing is positive and nothing was taken for it."""
        pairs = [(int(scores.argmax()) == self.positive, self.positive in answers) for scores, answers in rated]
        hits = sum(chosen and right for chosen, right in pairs)
        missed = sum(chosen != right for chosen, right in pairs)
        return torch.tensor(missed / (2 * hits + missed) if hits + missed else 0.0, dtype=torch.float64)


class PreferenceLoss(ChoiceObjective):
    """Direct preference optimisation, DPO (arXiv 2305.18290, equation 7), for batches of ``preference_batch``.

    Args:
        model: The model whose forward it is.
        beta: How much a step away from the reference model costs.

    Raises:
        OptionError: if ``beta`` is not above 0.
    """

    def __init__(self, model: HFBlockModel, *, beta: float = BETA) -> None:
        super().__init__(model)
        require_positive("beta", beta)
        self.beta = beta

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Log-probability of each row's candidate, summed over its tokens: (rows,), float64."""
        return self._rows.head(batch, activations)

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """Cut a batch between prompts. See ``ChoiceObjective``.

        Raises:
            BatchError: if the batch is not one of ``preference_batch``.
        """
        if REFERENCE not in batch:
            raise _refusal(", ".join(batch), f"{REFERENCE} among it", "preference_batch")
        return super().split(batch, rows)

    def loss(self, outputs: Sequence[torch.Tensor], pieces: Sequence[Batch]) -> torch.Tensor:
        """Join what the head gave for pieces, less what the reference model gives. See the contract."""
        pairs = zip(outputs, pieces, strict=True)
        return super().loss([scores.cpu() - piece[REFERENCE].cpu() for scores, piece in pairs], pieces)

    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        """The mean over prompts of -log sigmoid(beta x the margin of the chosen one)."""
        margins = torch.stack([scores[answers[0]] - scores[1 - answers[0]] for scores, answers in rated])
        return -torch.nn.functional.logsigmoid(self.beta * margins).mean()


def _of(scores: torch.Tensor, answers: Sequence[int]) -> torch.Tensor:
    """The score of the right candidate; of several that of any of them."""
    return scores[answers[0]] if len(answers) == 1 else scores[list(answers)].logsumexp(0)


def _refusal(found: str, expected: str, maker: str = "choice_batch") -> BatchError:
    return BatchError("batch", found=found, expected=expected, remedy=f"make it with {maker}")


def _sizes(batch: Batch) -> list[int]:
    """Rows of each prompt of a batch, in order."""
    _, sizes = torch.unique_consecutive(batch[PROMPT], return_counts=True)
    return [int(size) for size in sizes]
