"""What a run learns from its rows: the number that a step makes smaller, and what an evaluation says."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zo2adapters.models.called_forward import CalledForward
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.packing import pack
from zo2adapters.tasks.batches import collate
from zo2adapters.tasks.candidates import Choice, Choices, holds_choices, read_choices
from zo2adapters.tasks.dealing import in_order, is_own
from zo2adapters.tasks.generation import generate
from zo2adapters.tasks.labelled import LabelledRow, LabelledRows, classifies, labelled_batch, padding_of, read_labelled_rows
from zo2adapters.tasks.objectives import (
    BETA,
    ChoiceError,
    ChoiceF1Error,
    ChoiceLoss,
    ChoiceObjective,
    PreferenceLoss,
    Rated,
    choice_batch,
    preference_batch,
)
from zo2adapters.tasks.preferences import Preferences, holds_preferences, read_preferences
from zo2adapters.tasks.rows import Dataset, TokenizedRow, read_dataset
from zo2adapters.tasks.scoring import score
from zo2adapters.trainers.dataset_evaluation import evaluate_dataset
from zo2adapters.trainers.user_function import user_function
from zo2core import Batch, Forward, OptionError, Runner, StepResult, ZOEngine

Rows = Dataset | Choices | LabelledRows

_OF_CHOICES: dict[str, type[ChoiceObjective]] = {
    "choice-loss": ChoiceLoss,
    "accuracy": ChoiceError,
    "f1": ChoiceF1Error,
}
OBJECTIVES = ("auto", "loss", *_OF_CHOICES, "dpo", "exact-match")


def read_rows(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sequence_length: int,
    labelled_for: PretrainedConfig | None = None,
) -> Rows:
    """Read a file of rows, of rows with candidates, of preferences, or of texts with labels.

    Args:
        path: JSONL file.
        tokenizer: The model's tokenizer.
        sequence_length: Most tokens of a row.
        labelled_for: Config of the model, if that takes texts with labels.

    Raises:
        DataError: if the file cannot be read, or a row is malformed.
    """
    if labelled_for is not None:
        return read_labelled_rows(path, tokenizer, labelled_for, sequence_length=sequence_length)
    if holds_choices(path):
        return read_choices(path, tokenizer, sequence_length=sequence_length)
    if holds_preferences(path):
        return read_preferences(path, tokenizer, sequence_length=sequence_length)
    return read_dataset(path, tokenizer, sequence_length=sequence_length)


class Lesson(ABC):
    """How rows of one kind are learned from.

    Args:
        model: The model.
        pad: Token id at padded positions.
        batch_size: Rows a batch.
        micro_batch_size: Rows that run at a time; None: all of a batch.
    """

    def __init__(self, model: HFBlockModel, *, pad: int, batch_size: int, micro_batch_size: int | None = None) -> None:
        self.model = model
        self.pad = pad
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size

    @property
    def decides(self) -> dict[str, Any]:
        """What the options leave open and a step depends on, as JSON values."""
        return {}

    @abstractmethod
    def batch(self, rows: Sequence[Any]) -> Batch:
        """Rows as one batch."""

    @abstractmethod
    def evaluate(self, engine: Runner, rows: Any) -> dict[str, float]:
        """What the present weights make of rows: ``loss``, smaller is better, and what else there is to say."""

    @property
    def forward(self) -> Forward | None:
        """What a step makes smaller; None is the model's own loss."""
        return None

    def step(self, engine: ZOEngine, rows: Sequence[Any], batch: Batch) -> StepResult:
        """Take a step."""
        return engine.step(batch, self.forward)


class LossLesson(Lesson):
    """Rows of text, by the model's own loss; padded to one length, or packed."""

    def __init__(self, model: HFBlockModel, *, packed: bool = False, **options: Any) -> None:
        super().__init__(model, **options)
        self._packed = packed

    def batch(self, rows: Sequence[TokenizedRow]) -> Batch:
        """Pad the rows, or pack them."""
        batch = collate(rows, pad_token_id=self.pad)
        return pack(batch) if self._packed else batch

    def evaluate(self, engine: Runner, rows: Dataset) -> dict[str, float]:
        """The mean loss over labelled tokens."""
        options: dict[str, Any] = {"batch_size": self.batch_size, "pad": self.pad, "packed": self._packed}
        return {"loss": evaluate_dataset(engine, rows, **options).loss}


class FunctionLesson(LossLesson):
    """Rows of text, by a function of model and batch: ``--objective FILE.py:function``."""

    def __init__(self, model: HFBlockModel, name: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._forward = CalledForward(model, user_function(name))

    @property
    def forward(self) -> Forward:
        """The function, run in segments."""
        return self._forward

    def evaluate(self, engine: Runner, rows: Dataset) -> dict[str, float]:
        """The mean of the function over batches, and the model's own loss."""
        starts = range(0, len(rows), self.batch_size)

        def batches() -> Iterator[Batch]:
            for number, start in enumerate(starts):
                if is_own(engine, number):
                    yield self.batch(rows.rows[start : start + self.batch_size])

        own = [float(value) for outputs in engine.forwards(batches(), self._forward) for value in outputs]
        values = in_order(engine, own, [1] * len(starts), rows.rows)
        return {"loss": math.fsum(values) / len(values), "model_loss": super().evaluate(engine, rows)["loss"]}


class ChoiceLesson(Lesson):
    """Rows with candidates: by MeZO's loss over them, or by how often the likeliest one is wrong."""

    def __init__(self, model: HFBlockModel, objective: type[ChoiceObjective], **options: Any) -> None:
        super().__init__(model, **options)
        self._forward = objective(model)

    @property
    def forward(self) -> ChoiceObjective:
        """The objective."""
        return self._forward

    def batch(self, rows: Sequence[Choice]) -> Batch:
        """A row a candidate."""
        given = [row.candidates for row in rows]
        return choice_batch(
            [row.prompt for row in rows], given, [(row.answer, *row.also) for row in rows], pad_token_id=self.pad
        )

    def evaluate(self, engine: Runner, rows: Choices) -> dict[str, float]:
        """The objective's number, and accuracy; candidates are compared by mean log-probability, as in MeZO's program."""
        scored = score(
            engine,
            self.model,
            [row.prompt for row in rows],
            [row.candidates for row in rows],
            batch_size=self.micro_batch_size or self.batch_size * rows.most_sequences,
            pad_token_id=self.pad,
        )
        right = sum(row.is_right(place) for row, place in zip(rows, scored.choices(by_length=True), strict=True))
        means = [
            torch.tensor([value / count for value, count in zip(values, counts, strict=True)], dtype=torch.float64)
            for values, counts in zip(scored.log_likelihoods, scored.tokens, strict=True)
        ]
        rated = [Rated(scores, (row.answer, *row.also)) for scores, row in zip(means, rows, strict=True)]
        return {"loss": float(self._forward.number(rated)), "accuracy": right / len(rows)}


class PreferenceLesson(Lesson):
    """Rows with a chosen and a rejected completion, by DPO; the reference model is the base."""

    def __init__(self, model: HFBlockModel, beta: float, **options: Any) -> None:
        super().__init__(model, **options)
        self._forward = PreferenceLoss(model, beta=beta)
        self._references: dict[Choice, tuple[float, ...]] = {}

    @property
    def decides(self) -> dict[str, Any]:
        """The objective and its beta."""
        return {"objective": "dpo", "beta": self._forward.beta}

    def look_at_base(self, base: Runner, rows: Sequence[Choice]) -> None:
        """Note what the base makes of rows, before they are learned from: the reference of the loss."""
        unknown = [row for row in dict.fromkeys(rows) if row not in self._references]
        if unknown:
            self._references |= dict(zip(unknown, self._scored(base, unknown), strict=True))

    @property
    def forward(self) -> PreferenceLoss:
        """The objective."""
        return self._forward

    def batch(self, rows: Sequence[Choice]) -> Batch:
        """Two rows a preference, with their references."""
        given = [row.candidates for row in rows]
        references = [self._references[row] for row in rows]
        return preference_batch([row.prompt for row in rows], given, references, pad_token_id=self.pad)

    def evaluate(self, engine: Runner, rows: Choices) -> dict[str, float]:
        """DPO's loss, and for how many rows the chosen completion has gained more on the base than the rejected one."""
        pairs = zip(self._scored(engine, rows.rows), map(self._references.__getitem__, rows), strict=True)
        margins = [torch.tensor(own, dtype=torch.float64) - torch.tensor(base, dtype=torch.float64) for own, base in pairs]
        rated = [Rated(margin, (0,)) for margin in margins]
        gained = sum(bool(scores[0] > scores[1]) for scores, _ in rated)
        return {"loss": float(self._forward.number(rated)), "accuracy": gained / len(rated)}

    def _scored(self, engine: Runner, rows: Sequence[Choice]) -> tuple[tuple[float, ...], ...]:
        prompts, given = [row.prompt for row in rows], [row.candidates for row in rows]
        options: dict[str, Any] = {"batch_size": self.micro_batch_size or 2 * self.batch_size, "pad_token_id": self.pad}
        return score(engine, self.model, prompts, given, **options).log_likelihoods


class LabelLesson(Lesson):
    """Texts with labels, by the loss of a model that classifies or rates; padded as its config says.

    Raises:
        OptionError: if its config does not say.
    """

    def __init__(self, model: HFBlockModel, *, batch_size: int, micro_batch_size: int | None = None) -> None:
        super().__init__(model, pad=padding_of(model.config), batch_size=batch_size, micro_batch_size=micro_batch_size)

    def batch(self, rows: Sequence[LabelledRow]) -> Batch:
        """Pad the rows."""
        return labelled_batch(rows, pad_token_id=self.pad)

    def evaluate(self, engine: Runner, rows: LabelledRows) -> dict[str, float]:
        """The mean loss over rows and, of classes, how often the likeliest one is right."""
        size = self.micro_batch_size or self.batch_size
        groups = [rows.rows[start : start + size] for start in range(0, len(rows), size)]
        batches = (self.batch(group) for number, group in enumerate(groups) if is_own(engine, number))
        outputs = engine.forwards(batches, CalledForward(self.model, _loss_and_right))
        own = [value for outputs_of_sweep in outputs for output in outputs_of_sweep for value in output.tolist()]
        values = in_order(engine, own, [2] * len(groups), rows.rows)
        means = [math.fsum(values[place::2]) / len(rows) for place in (0, 1)]
        return dict(zip(("loss", "accuracy"), means, strict=True)) if classifies(self.model.config) else {"loss": means[0]}


def _loss_and_right(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Of a batch: its loss times its rows, and how many rows' likeliest class is the right one."""
    output, labels = model(**batch), batch["labels"]
    right = (output.logits.argmax(-1) == labels).sum() if labels.dim() == 1 else labels.new_zeros(())
    return torch.stack([output.loss.double() * len(labels), right.double()])


class ExactMatchLesson(LossLesson):
    """Prompts and completions, by the share of prompts that are not continued by their completion, token for token."""

    def step(self, engine: ZOEngine, rows: Sequence[TokenizedRow], batch: Batch) -> StepResult:
        """Take a step, by text that is generated at each of its evaluations."""
        return engine.tell([self._wrong(engine, rows, at) / len(rows) for at in engine.ask()])

    def evaluate(self, engine: Runner, rows: Dataset) -> dict[str, float]:
        """One less the share of matches, and it."""
        starts = range(0, len(rows), self.batch_size)
        own = [start for number, start in enumerate(starts) if is_own(engine, number)]
        counts = [self._wrong(engine, rows.rows[start : start + self.batch_size], None) for start in own]
        wrong = int(sum(in_order(engine, counts, [1] * len(starts), rows.rows)))
        return {"loss": wrong / len(rows), "exact_match": 1 - wrong / len(rows)}

    def _wrong(self, engine: Runner, rows: Sequence[TokenizedRow], at: Any) -> int:
        return sum(self._wrong_together(engine, group, at) for group in self._groups(rows))

    def _groups(self, rows: Sequence[TokenizedRow]) -> Iterator[list[TokenizedRow]]:
        """Rows in order, so many at a time that the longest prompt and the longest completion fit the model together."""
        room = self.model.longest_row or math.inf
        group: list[TokenizedRow] = []
        for row in rows:
            together = [*group, row]
            longest = max(own.prompt_length for own in together)
            if group and longest + max(len(own.input_ids) - own.prompt_length for own in together) > room:
                yield group
                together = [row]
            group = together
        yield group

    def _wrong_together(self, engine: Runner, rows: Sequence[TokenizedRow], at: Any) -> int:
        prompts = [row.input_ids[: row.prompt_length] for row in rows]
        wanted = [list(row.input_ids[row.prompt_length :]) for row in rows]
        options: dict[str, Any] = {"max_new_tokens": max(map(len, wanted)), "pad_token_id": self.pad, "at": at}
        columns = list(generate(engine, self.model, prompts, **options))
        written = [list(row) for row in zip(*columns, strict=True)]
        return sum(own[: len(answer)] != answer for own, answer in zip(written, wanted, strict=True))


def lesson_of(
    objective: str,
    model: HFBlockModel,
    rows: Rows,
    *,
    pad: int,
    batch_size: int,
    micro_batch_size: int | None = None,
    beta: float | None = None,
    packed: bool = False,
) -> Lesson:
    """The lesson of an objective for rows.

    Args:
        objective: One of ``OBJECTIVES``, or ``FILE.py:function``.
        model: The model.
        rows: To learn from.
        pad: Token id at padded positions.
        batch_size: Rows a batch.
        micro_batch_size: Rows that run at a time; None: all of a batch.
        beta: Of DPO; None is the default.
        packed: Whether a batch's rows lie one behind the other instead of being padded.

    Raises:
        OptionError: if there is no such objective, the rows are of another kind, or ``beta`` or ``packed`` is for nothing.
    """
    options: dict[str, Any] = {"pad": pad, "batch_size": batch_size, "micro_batch_size": micro_batch_size}
    if isinstance(rows, LabelledRows):
        return LabelLesson(model, batch_size=batch_size, micro_batch_size=micro_batch_size)
    of_choices = isinstance(rows, Choices)
    if objective == "auto":
        objective = "dpo" if isinstance(rows, Preferences) else "choice-loss" if of_choices else "loss"
    if packed and objective != "loss":
        expected = "loss, on rows of text"
        raise OptionError("pack", found=f"{objective} as objective", expected=expected, remedy="leave it out")
    if objective == "dpo":
        if not isinstance(rows, Preferences):
            raise _refusal(objective, "rows without preferences", "rows with prompt, chosen and rejected")
        return PreferenceLesson(model, BETA if beta is None else beta, **options)
    if beta is not None:
        raise OptionError("beta", found=f"{beta} for {objective}", expected="dpo", remedy="leave it out")
    if objective in _OF_CHOICES:
        if not of_choices:
            raise _refusal(objective, "rows without candidates", "rows with prompt, candidates and answer")
        assert isinstance(rows, Choices)
        if objective == "f1" and len({len(row.candidates) for row in rows}) > 1:
            raise _refusal(objective, "rows of different numbers of candidates", "the same candidates in each row")
        return ChoiceLesson(model, _OF_CHOICES[objective], **options)
    if objective not in OBJECTIVES and ".py:" not in objective:
        raise OptionError(
            "objective",
            found=repr(objective),
            expected=f"one of {', '.join(OBJECTIVES)}, or FILE.py:function",
            remedy="choose one of these",
        )
    if of_choices:
        raise _refusal(objective, "rows with candidates", "rows with text, or prompt and completion")
    if objective == "loss":
        return LossLesson(model, packed=packed, **options)
    if objective != "exact-match":
        return FunctionLesson(model, objective, **options)
    assert isinstance(rows, Dataset)
    if not all(row.prompt_length for row in rows):
        raise _refusal(objective, "rows without a prompt", "rows with prompt and completion")
    return ExactMatchLesson(model, **options)


def _refusal(objective: str, found: str, expected: str) -> OptionError:
    return OptionError(
        "objective", found=f"{objective} for {found}", expected=expected, remedy="choose another objective, or other rows"
    )
