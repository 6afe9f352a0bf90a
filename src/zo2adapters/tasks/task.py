"""Tasks: how a run trains on rows of one format, and what is measured of a model on rows, with
standard errors.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import string
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from zo2adapters.models.batches import pack
from zo2adapters.models.checkpoint import end_token_ids
from zo2adapters.models.hf import CalledForward, HFBlockModel
from zo2adapters.tasks import objectives
from zo2adapters.tasks.generation import Generation, Sampling, generate, sampling_of
from zo2adapters.tasks.objectives import (
    CandidateScores,
    Scored,
    in_order,
    is_own_shard,
    sharded_forwards,
)
from zo2adapters.tasks.registry import AUTO, MODEL_LOSS, find_task
from zo2adapters.tasks.rewards import Completion, RewardOptions, Rewards
from zo2adapters.tasks.row_options import RowFormat
from zo2adapters.tasks.rows import (
    Choice,
    Question,
    Rows,
    TokenizedRow,
    choice_batch,
    classifies,
    collate,
    file_batches,
    padding_of,
    preference_batch,
    with_completion,
)
from zo2core import Batch, Engine, Evaluation, Forward, StepResult
from zo2core.errors import DivergenceError, OptionError
from zo2core.io.durable import open_regular
from zo2core.ranges import counted, parse_size, require_whole
from zo2core.sweep.microbatch import labelled_tokens

# opens the model that training began with
OpenBase: TypeAlias = Callable[[], AbstractContextManager[Engine]]

_KEPT_ROWS = 16  # rows whose continuations by the base are kept, to measure the drift
_DRIFT_EVERY = 10  # steps between two measurements
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The options of a run, or of an evaluation, that concern its task."""

    # name of the task or FILE.py:function; "auto" until the registry has chosen a task
    objective: str = MODEL_LOSS
    pad: int  # token id at padded positions
    batch_size: int  # number of rows in a batch
    micro_batch_size: int | None = None  # sequences that run at a time; None runs all of a batch
    beta: float | None = None  # strength of DPO's penalty; None is the default
    pack: bool = False  # whether rows of a batch are concatenated instead of padded
    per_row: bool = False  # whether each row of a batch has a loss and a direction of its own
    rewards: RewardOptions | None = None  # rewards of what the model writes; None: there are none
    tokenizer: Any = None  # the model's, for rewards of texts and rows with answers
    seed: int = 0  # of the run
    has_errors: bool = False  # whether the standard error of a loss is estimated
    # of evaluations, with numbers of the units of ``units_of``
    progress: Callable[[int], object] = lambda rows: None


class Measure(NamedTuple):
    """One number that an evaluation measures."""

    name: str
    value: float
    standard_error: float | None = None  # of the value; None: it cannot be estimated, or is not
    is_share: bool = False  # whether it is a share of the rows, shown in percent
    digits: int = 4  # decimals of a value that is no share


class Evaluated(NamedTuple):
    """The measures of one model on rows."""

    measures: Sequence[Measure]
    size: str  # how many rows were evaluated, and in how many sweeps
    # losses or log-likelihoods, which are finite unless something went wrong
    finite: Sequence[float]

    @property
    def results(self) -> dict[str, float]:
        """The values by the names that a run records.

        A perplexity follows from the loss, and is not recorded.
        """
        values = {
            measure.name.lower().replace(" ", "_"): measure.value for measure in self.measures
        }
        return {name: value for name, value in values.items() if name != "perplexity"}


def units_of(rows: Rows) -> tuple[int, str]:
    """The work of an evaluation for a progress bar: how many units, and what is counted."""
    if rows.format is RowFormat.CANDIDATES:
        return sum(len(choice.candidates) for choice in rows), "candidate"
    return len(rows), "row"


def measured(engine: Engine, model: HFBlockModel, rows: Rows, options: TaskOptions) -> Evaluated:
    """Evaluate the current weights on rows of any format but preferences, which need the weights of
    the base.
    """
    measure = {
        RowFormat.LABELS: _labels,
        RowFormat.ANSWERS: _answers,
        RowFormat.CANDIDATES: _choices,
    }
    return measure.get(rows.format, _texts)(engine, model, rows, options)


def standard_error(sums: Sequence[float], weights: Sequence[float]) -> float | None:
    """The standard error of a mean ``sum(sums) / sum(weights)`` of independent groups of rows.

    It is that of a ratio estimator; with a weight of 1 for each row, the usual one of a mean.
    """
    count = len(sums)
    total = math.fsum(weights)
    if count < 2 or not all(map(math.isfinite, sums)):
        return None
    mean = math.fsum(sums) / total
    squares = math.fsum(
        (value - mean * weight) ** 2 for value, weight in zip(sums, weights, strict=True)
    )
    return math.sqrt(squares * count / (count - 1)) / total


def normalized(text: str) -> str:
    """Remove case, punctuation, articles and superfluous space from a text."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1_of_words(text: str, right: str) -> float:
    """The F1 of the words that two texts share, from 0 to 1; for a right text of "no answer" it is
    0 or 1.
    """
    words = normalized(text).split()
    right_words = normalized(right).split()
    if right in ("CANNOTANSWER", "no answer"):
        return float(words == right_words)
    shared = sum((Counter(words) & Counter(right_words)).values())
    return 2 * shared / (len(words) + len(right_words)) if shared else 0.0


def _mean(name: str, values: Sequence[float]) -> Measure:
    """The mean of a value of each row, a share."""
    return Measure(
        name,
        math.fsum(values) / len(values),
        standard_error(values, [1.0] * len(values)),
        is_share=True,
    )


def _texts(engine: Engine, model: HFBlockModel, rows: Rows, options: TaskOptions) -> Evaluated:
    """The model's own loss over labelled tokens."""
    if options.has_errors:
        return _texts_by_row(engine, model, rows, options)

    def batches() -> Iterator[Batch]:
        for group in file_batches(rows, options.batch_size):
            options.progress(len(group))
            yield _text_batch(group, options)

    result = engine.evaluate(batches())
    return _of_texts(result.loss, None, result.tokens, len(rows), result.sweeps)


def _texts_by_row(
    engine: Engine, model: HFBlockModel, rows: Rows, options: TaskOptions
) -> Evaluated:
    """The loss over labelled tokens, with a standard error over rows: one over batches would depend
    on their size.
    """
    groups = file_batches(rows, options.micro_batch_size or options.batch_size)
    made = partial(_text_batch, options=options)
    forward = objectives.LogLikelihood(model)
    likelihoods, sweeps = sharded_forwards(engine, groups, made, forward, options.progress)
    losses = [-value for values in likelihoods for value in values]
    tokens = [labelled_tokens(_text_batch([row], options)) for row in rows]
    loss = math.fsum(losses) / sum(tokens)
    return _of_texts(loss, standard_error(losses, tokens), sum(tokens), len(rows), sweeps)


def _text_batch(rows: Sequence[Any], options: TaskOptions) -> Batch:
    batch = collate(rows, pad_token_id=options.pad)
    return pack(batch) if options.pack else batch


def _of_texts(loss: float, error: float | None, tokens: int, rows: int, sweeps: int) -> Evaluated:
    perplexity = math.exp(loss) if loss < 700 else math.inf
    size = f"{counted(tokens, 'token')}, {counted(rows, 'row')}, {counted(sweeps, 'sweep')}"
    measures = [Measure("loss", loss, error, digits=6), Measure("perplexity", perplexity)]
    return Evaluated(measures, size, [loss])


def _labels(engine: Engine, model: HFBlockModel, rows: Rows, options: TaskOptions) -> Evaluated:
    """The model's own loss, which takes no micro-batches, and, for rows with a class, accuracy."""
    groups = file_batches(rows, options.micro_batch_size or options.batch_size)
    pad = padding_of(model.config)
    forward = CalledForward(model, _losses_and_right)
    values, _ = sharded_forwards(
        engine, groups, lambda group: collate(group, pad_token_id=pad), forward, options.progress
    )
    loss = math.fsum(of_batch for of_batch, *_ in values) / len(rows)
    right = math.fsum(of_batch for _, of_batch, *_ in values)
    losses = [of_row for _, _, *of_rows in values for of_row in of_rows]
    measures = [Measure("loss", loss, standard_error(losses, [1.0] * len(rows)), digits=6)]
    if classifies(model.config):
        number = round(right)
        measures.append(_mean("accuracy", [1.0] * number + [0.0] * (len(rows) - number)))
    return Evaluated(measures, counted(len(rows), "row"), [loss])


def _losses_and_right(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """A batch's loss times its number of rows, its number of rows whose likeliest class is right,
    and the loss of each row: (2 + rows,), float64.
    """
    output = model(**batch)
    labels = batch["labels"]
    logits = output.logits.double()
    numbers = labels.reshape(len(labels), -1)
    right = (logits.argmax(-1) == labels).sum() if labels.dim() == 1 else labels.new_zeros(())
    kind = model.config.problem_type  # which transformers' forward has set
    if kind == "regression":
        losses = (logits.reshape(numbers.shape) - numbers).square().mean(1)
    elif kind == "single_label_classification":
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    else:
        of_classes = nn.functional.binary_cross_entropy_with_logits
        losses = of_classes(logits, numbers.double(), reduction="none").mean(1)
    return torch.cat([torch.stack([output.loss.double() * len(labels), right.double()]), losses])


def _choices(engine: Engine, model: HFBlockModel, rows: Rows, options: TaskOptions) -> Evaluated:
    """Accuracy of the likeliest candidates."""
    scored = _scored(engine, model, rows, options, options.batch_size)
    size = (
        f"{counted(len(rows), 'row')}, {counted(units_of(rows)[0], 'candidate')}, "
        f"{counted(scored.sweeps, 'sweep')}"
    )
    return Evaluated(
        [_accuracy(scored, rows)],
        size,
        [value for values in scored.log_likelihoods for value in values],
    )


def _scored(
    engine: Engine,
    model: HFBlockModel,
    rows: Sequence[Choice],
    options: TaskOptions,
    batch_size: int | None = None,
) -> Scored:
    """The candidates' log-likelihoods by the current weights, by default in batches of a step's
    sequences.
    """
    size = (
        batch_size
        or options.micro_batch_size
        or options.batch_size * max(len(row.candidates) for row in rows)
    )
    return objectives.score(
        engine,
        model,
        [row.prompt for row in rows],
        [row.candidates for row in rows],
        batch_size=size,
        pad_token_id=options.pad,
        progress=options.progress,
    )


def _accuracy(scored: Scored, rows: Sequence[Choice]) -> Measure:
    return _mean(
        "accuracy",
        [float(index in row.answers) for index, row in zip(scored.choices(), rows, strict=True)],
    )


def _answers(engine: Engine, model: HFBlockModel, rows: Rows, options: TaskOptions) -> Evaluated:
    """F1 over words and exact match, as in SQuAD, of answers that are generated greedily up to the
    end of the line.
    """
    tokenizer = options.tokenizer
    scores = list[list[float]]()
    ends = {
        *end_token_ids(model, tokenizer),
        *tokenizer("\n", add_special_tokens=False)["input_ids"][-1:],
    }
    for number, group in enumerate(file_batches(rows, options.batch_size)):
        if is_own_shard(engine, number):
            answers = zip(
                *generate(
                    engine,
                    model,
                    [row.prompt for row in group],
                    max_new_tokens=rows.new_tokens,
                    eos_token_ids=ends,
                    pad_token_id=options.pad,
                    allowed=engine.activation_bytes,
                ),
                strict=True,
            )
            judged = [
                _judged(row, answer, tokenizer) for row, answer in zip(group, answers, strict=True)
            ]
            scores.append([value for values in judged for value in values])
        options.progress(len(group))
    values = [value for group in in_order(engine, scores, rows.rows) for value in group]
    return Evaluated(
        [_mean("F1", values[::2]), _mean("exact match", values[1::2])],
        counted(len(rows), "row"),
        [],
    )


def _judged(row: Question, answer: Sequence[int | None], tokenizer: Any) -> tuple[float, float]:
    """Of a generated answer, the best F1 with a right one, and 1 if it is a right one."""
    raw = str(
        tokenizer.decode([token for token in answer if token is not None], skip_special_tokens=True)
    )
    text = raw.strip().partition("\n")[0].strip()
    f1 = max(f1_of_words(text, right) for right in row.answers)
    return f1, float(any(normalized(text) == normalized(right) for right in row.answers))


class Task:
    """A task on the model's own loss, and what all tasks have in common."""

    forward: Forward | None = None  # what steps minimise; None: the model's own loss
    provenance: Mapping[str, Any] = MappingProxyType({})
    """Values that the steps depend on and the options do not determine, as JSON values for the
    journal's header.
    """

    measured: Mapping[str, float] = MappingProxyType({})
    """What the last step has measured beside its losses, by name."""

    def __init__(self, model: HFBlockModel, rows: Rows, options: TaskOptions) -> None:
        self._model, self._options = model, options
        self._pad = padding_of(model.config) if rows.format is RowFormat.LABELS else options.pad

    def prepare(self, open_base: OpenBase, rows_to_come: Callable[[], Sequence[Any]]) -> None:
        """Compute what the task needs from the base model, before the first step of a new or
        resumed run.

        The default needs nothing, and calls neither argument.
        """

    def close(self) -> None:
        """End what the task has started. May be called twice. By default there is nothing."""

    def batch(self, rows: Sequence[Any]) -> Batch:
        """Make a batch from the rows of one step: padded to one length, or packed."""
        batch = collate(rows, pad_token_id=self._pad)
        return pack(batch) if self._options.pack else batch

    def step(self, engine: Engine, rows: Sequence[Any], batch: Batch) -> StepResult:
        """Take one step."""
        return engine.step(batch, self.forward)

    def evaluate(self, engine: Engine, rows: Rows) -> dict[str, float]:
        """Evaluate the current weights."""
        return measured(engine, self._model, rows, self._options).results


class FunctionTask(Task):
    """A task for rows of text with a function of model and batch as objective, which runs block by
    block.
    """

    def __init__(self, model: HFBlockModel, rows: Rows, options: TaskOptions) -> None:
        super().__init__(model, rows, options)
        function = user_function(options.objective)
        self.forward = CalledForward(model, function)
        self._measured = CalledForward(model, function, evaluates=True)

    def evaluate(self, engine: Engine, rows: Rows) -> dict[str, float]:
        """Compute the mean of the function over labelled tokens, and the model's own loss.

        Each row is a batch of its own, so that the mean does not depend on how rows are batched.
        """
        groups = file_batches(rows, 1)
        weights = [labelled_tokens(self.batch(group)) for group in groups]
        values, _ = sharded_forwards(engine, groups, self.batch, self._measured)
        sums = [value * weight for [value], weight in zip(values, weights, strict=True)]
        loss = math.fsum(sums) / sum(weights)
        return {"loss": loss, "model_loss": super().evaluate(engine, rows)["loss"]}


class ChoiceTask(Task):
    """A task for rows with candidates.

    The objective is the loss over the candidates, 1 - accuracy, 1 - F1 of the second candidate, or
    the model's own loss on the right candidate alone, one sequence a row.
    """

    def __init__(self, model: HFBlockModel, rows: Rows, options: TaskOptions) -> None:
        super().__init__(model, rows, options)
        kinds: dict[str, Any] = {"accuracy": objectives.ChoiceError, "f1": objectives.ChoiceF1Error}
        self._objective: objectives.ChoiceObjective = kinds.get(
            options.objective, objectives.ChoiceLoss
        )(model)
        self._learns_answer = options.objective == MODEL_LOSS
        if self._learns_answer:
            self.provenance = {"objective": MODEL_LOSS}  # which does not say it for other rows
        else:
            self.forward = self._objective
        if options.objective == "f1" and len({len(row.candidates) for row in rows}) > 1:
            found = f"{options.objective} for rows with different numbers of candidates"
            raise OptionError(
                "objective",
                found,
                "the same candidates in each row",
                "pass another objective, or other rows",
            )

    def batch(self, rows: Sequence[Choice]) -> Batch:
        """Make a batch with a sequence for each candidate, or for the right ones."""
        pad = self._options.pad
        if self._learns_answer:
            return collate(
                [with_completion(row.prompt, row.candidates[row.answer]) for row in rows],
                pad_token_id=pad,
            )
        prompts = [row.prompt for row in rows]
        candidates = [row.candidates for row in rows]
        return choice_batch(prompts, candidates, [row.answers for row in rows], pad_token_id=pad)

    def evaluate(self, engine: Engine, rows: Rows) -> dict[str, float]:
        """Compute the objective and accuracy.

        For the model's own loss, the objective is another one, with its own name.
        """
        scored = _scored(engine, self._model, rows, self._options)
        pairs = zip(scored.means, rows, strict=True)
        rated = [
            CandidateScores(torch.tensor(means, dtype=torch.float64), row.answers)
            for means, row in pairs
        ]
        name = "choice_loss" if self._learns_answer else "loss"
        return {
            name: float(self._objective.value(rated)),
            "accuracy": _accuracy(scored, rows).value,
        }


class PreferenceTask(Task):
    """A task for rows with a chosen and a rejected completion: DPO, with the base as reference
    model.
    """

    def __init__(self, model: HFBlockModel, rows: Rows, options: TaskOptions) -> None:
        super().__init__(model, rows, options)
        beta = objectives.BETA if options.beta is None else options.beta
        self.forward = self._objective = objectives.PreferenceLoss(model, beta=beta)
        self._references: dict[Choice, tuple[float, ...]] = {}
        self.provenance = {"objective": options.objective, "beta": self._objective.beta}

    def prepare(self, open_base: OpenBase, rows_to_come: Callable[[], Sequence[Any]]) -> None:
        """Compute the log-likelihoods of these rows under the base, the reference model of DPO.

        See ``Task``.
        """
        rows = list(dict.fromkeys(rows_to_come()))
        if rows:
            with open_base() as base:
                likelihoods = _scored(base, self._model, rows, self._options).log_likelihoods
                self._references = dict(zip(rows, likelihoods, strict=True))

    def batch(self, rows: Sequence[Choice]) -> Batch:
        """Make a batch with two sequences for each row, and their log-likelihoods under the
        reference model.
        """
        prompts = [row.prompt for row in rows]
        completions = [row.candidates for row in rows]
        references = [self._references[row] for row in rows]
        return preference_batch(prompts, completions, references, pad_token_id=self._options.pad)

    def evaluate(self, engine: Engine, rows: Rows) -> dict[str, float]:
        """Compute DPO's loss, and the share of rows whose chosen completion gained more likelihood
        than the rejected one.
        """
        likelihoods = torch.tensor(
            _scored(engine, self._model, rows, self._options).log_likelihoods, dtype=torch.float64
        )
        gains = likelihoods - torch.tensor(
            [self._references[row] for row in rows], dtype=torch.float64
        )
        right = sum(bool(gain[0] > gain[1]) for gain in gains)
        loss = self._objective.value([CandidateScores(gain, (0,)) for gain in gains])
        return {"loss": float(loss), "accuracy": right / len(gains)}


# A row, and what the model wrote after its prompt, with the token that ended it, if it has ended.
Continued: TypeAlias = tuple[TokenizedRow, Sequence[int]]


class GeneratedTask(Task):
    """A task for rows with prompts. See ``Task``."""

    def __init__(
        self, model: HFBlockModel, rows: Rows, options: TaskOptions, *, ends: Sequence[int] = ()
    ) -> None:
        super().__init__(model, rows, options)
        self._ends = ends
        if not all(row.prompt_length for row in rows):
            option = "objective" if options.rewards is None else "reward"
            remedy = f"pass other rows, or leave `{option}` out"
            raise OptionError(
                option,
                "rows without a prompt",
                "rows with a prompt, after which text is generated",
                remedy,
            )

    @abstractmethod
    def _new_tokens(self, row: TokenizedRow) -> int:
        """Most tokens of a row's continuation; rows that run together have the largest number."""

    @abstractmethod
    def _losses(self, continued: Sequence[Continued]) -> list[float]:
        """The loss of each row."""

    def _note_measured(self, engine: Engine) -> None:
        """Record what a step has measured beside its losses, before the step is taken."""

    def _sampling(self, step: int) -> Sampling | None:
        """How the tokens of a step are sampled; None takes the likeliest token, as
        evaluations do.
        """
        return None

    def step(self, engine: Engine, rows: Sequence[TokenizedRow], batch: Batch) -> StepResult:
        """Take a step; text is generated at all of its evaluations together."""
        continued = self._continued(engine, rows, engine.ask(), self._sampling(engine.version))
        losses = self._losses([of_row for of_evaluation in continued for of_row in of_evaluation])
        self._note_measured(engine)
        starts = range(0, len(losses), len(rows))
        return engine.tell(
            [math.fsum(losses[start : start + len(rows)]) / len(rows) for start in starts]
        )

    def _evaluated(self, engine: Engine, rows: Rows) -> list[Continued]:
        """Continue this worker's part of the rows with the present weights."""
        shard = [row for number, row in enumerate(rows) if is_own_shard(engine, number)]
        return self._continued(engine, shard, [None], None)[0]

    def _continued(
        self,
        engine: Engine,
        rows: Sequence[TokenizedRow],
        at: Sequence[Evaluation | None],
        sampling: Sampling | None,
    ) -> list[list[Continued]]:
        """Continue the prompts of rows at each evaluation."""
        continued: list[list[Continued]] = [[] for _ in at]
        for group in self._groups(rows) if rows and at else ():
            generation = Generation(
                engine,
                self._model,
                max_new_tokens=max(map(self._new_tokens, group)),
                sampling=sampling,
                eos_token_ids=self._ends,
                pad_token_id=self._options.pad,
                evaluations=at,
                allowed=engine.activation_bytes,
            )
            made = generation.continuations([row.input_ids[: row.prompt_length] for row in group])
            for so_far, tokens in zip(continued, made, strict=True):
                so_far += zip(group, tokens, strict=True)
        return continued

    def _groups(self, rows: Sequence[TokenizedRow]) -> Iterator[list[TokenizedRow]]:
        """Yield rows in order, in groups whose longest prompt and longest continuation together fit
        the model's length.
        """
        limit = self._model.longest_row or math.inf
        group: list[TokenizedRow] = []
        for row in rows:
            extended = [*group, row]
            longest = max(member.prompt_length for member in extended) + max(
                map(self._new_tokens, extended)
            )
            if group and longest > limit:
                yield group
                extended = [row]
            group = extended
        yield group


class ExactMatch(GeneratedTask):
    """A task for prompts and completions: the share of prompts that the model does not continue
    with their completion.
    """

    def evaluate(self, engine: Engine, rows: Rows) -> dict[str, float]:
        """Compute the share of rows that match, and ``loss``, 1 minus that share."""
        mismatches = int(
            sum(in_order(engine, self._losses(self._evaluated(engine, rows)), rows.rows))
        )
        return {"loss": mismatches / len(rows), "exact_match": 1 - mismatches / len(rows)}

    def _new_tokens(self, row: TokenizedRow) -> int:
        return len(row.input_ids) - row.prompt_length

    def _losses(self, continued: Sequence[Continued]) -> list[float]:
        """1 for each row that does not match."""
        return [
            float(list(tokens[: self._new_tokens(row)]) != list(row.input_ids[row.prompt_length :]))
            for row, tokens in continued
        ]


class _Kept(NamedTuple):
    """What the base wrote after the prompts of some rows."""

    rows: Sequence[TokenizedRow]
    log_likelihood: float  # of all continuations, by the base
    tokens: int  # of all continuations


class RewardTask(GeneratedTask):
    """A task for rows with prompts, whose loss is minus the mean reward of what the model writes.

    See ``Task``.

    *Drift* says how far the model has moved from its base: by how many nats a token what the base
    wrote has become less likely, for the first rows to train on. It estimates the divergence of the
    model from the base.
    """

    def __init__(self, model: HFBlockModel, rows: Rows, options: TaskOptions) -> None:
        assert options.rewards is not None, "the registry needs --reward for this task"
        assert options.tokenizer is not None
        self._tokenizer: PreTrainedTokenizerBase = options.tokenizer
        self._settings = settings = options.rewards
        super().__init__(model, rows, options, ends=end_token_ids(model, self._tokenizer))
        self._seed, self._rows = options.seed, rows
        self._require_room(rows, "data")
        self._sampling(0)  # refuses numbers out of range
        memory = parse_size(settings.reward_memory, option="reward_memory")
        self._rewards = Rewards(settings.names, seconds=settings.reward_seconds, memory=memory)
        sampled: dict[str, Any] = {
            name: getattr(settings, name) for name in ("max_new_tokens", "temperature", "top_p")
        }
        if further := [token for token in self._ends if token != self._tokenizer.eos_token_id]:
            sampled["further end tokens"] = further
        self.provenance = {"rewards": self._rewards.provenance, "generation": sampled}
        self._kept: _Kept | None = None
        # of each completion of this worker in the present step: reward, each reward, tokens
        self._written: list[list[float]] = []
        self._drift: Mapping[str, float] = {}  # of the present step, if it is measured

    def _require_room(self, rows: Rows, option: str) -> None:
        """Refuse rows of an option's file whose prompt leaves no room for a completion."""
        longest = max(rows, key=lambda row: row.prompt_length)
        limit = self._model.longest_row
        if limit is not None:
            most = limit - longest.prompt_length
            new = self._settings.max_new_tokens
            prompt = (
                f"the prompt of {counted(limit - most, 'token')} in the row on line "
                f"{longest.line} of --{option}"
            )
            require_whole(
                "max_new_tokens",
                new,
                1,
                most,
                otherwise=f", with which {prompt} reaches the model's limit; a shorter "
                "--sequence-length with --too-long drop leaves such rows out",
            )

    def prepare(self, open_base: OpenBase, rows_to_come: Callable[[], Sequence[Any]]) -> None:
        """Let the base continue a few prompts, whose likelihood says later how far the model has
        moved.
        """
        self._rewards.start()
        with open_base() as base:
            continued = self._continued(base, self._rows[:_KEPT_ROWS], [None], None)[0]
            samples = [
                with_completion(row.input_ids[: row.prompt_length], tokens, row.line)
                for row, tokens in continued
            ]
            tokens = sum(len(row.input_ids) - row.prompt_length for row in samples)
            self._kept = _Kept(samples, self._log_likelihood(base, samples), tokens)

    def drift(self, engine: Engine) -> float:
        """By how many nats a token the base's continuations have become less likely."""
        assert self._kept is not None, "the task is prepared"
        return (
            self._kept.log_likelihood - self._log_likelihood(engine, self._kept.rows)
        ) / self._kept.tokens

    def _log_likelihood(self, engine: Engine, rows: Sequence[TokenizedRow]) -> float:
        """Of what follows the prompts of all rows, in nats; every worker computes it."""
        batch = collate(rows, pad_token_id=self._options.pad)
        [[sums]] = engine.forwards([batch], objectives.LogLikelihood(self._model))
        return math.fsum(sums.tolist())

    def step(self, engine: Engine, rows: Sequence[TokenizedRow], batch: Batch) -> StepResult:
        """Take a step. See ``GeneratedTask``."""
        drift = {"drift": self.drift(engine)} if engine.version % _DRIFT_EVERY == 0 else {}
        most = self._settings.max_drift
        if most is not None and drift.get("drift", 0.0) > most:
            found = f"a drift of {drift['drift']:.3g} nats a token from the base"
            expected = f"at most {most:g}, the run's --max-drift"
            remedy = (
                "export an earlier step with --at, or branch from one with a lower `lr`; the step "
                "was not taken"
            )
            raise DivergenceError(
                f"step {engine.version}",
                found,
                expected,
                remedy,
                best_step=max(engine.version - _DRIFT_EVERY, 0),
            )
        self._drift = drift
        return super().step(engine, rows, batch)

    def close(self) -> None:
        """End the process of the rewards."""
        self._rewards.close()

    def evaluate(self, engine: Engine, rows: Rows) -> dict[str, float]:
        """Compute the mean reward of greedy completions, of each reward if there are several, their
        length and the drift.
        """
        self._require_room(rows, "evaluation")
        continued = self._evaluated(engine, rows)

        def mean(values: Sequence[float]) -> float:
            return math.fsum(in_order(engine, values, rows.rows)) / len(rows)

        each = self._rewards.of(self._completions(continued), option="evaluation")
        total = mean(self._rewards.total(each))
        results = {"loss": 0.0 - total, "reward": total}
        results |= {name: mean(values) for name, values in self._named(each)}
        results["completion_tokens"] = mean([float(len(tokens)) for _, tokens in continued])
        return {**results, "drift": self.drift(engine)}

    def _named(self, each: Sequence[Sequence[float]]) -> Iterator[tuple[str, Sequence[float]]]:
        """The values of each reward by its name, if there are several."""
        names = [f"reward_{name.name}" for name in self._rewards.names]
        return iter(()) if len(names) == 1 else zip(names, each, strict=True)

    def _new_tokens(self, row: TokenizedRow) -> int:
        return self._settings.max_new_tokens

    def _sampling(self, step: int) -> Sampling | None:
        return sampling_of(self._settings.temperature, self._settings.top_p, self._seed + step)

    def _losses(self, continued: Sequence[Continued]) -> list[float]:
        """Minus the weighted sum of the rewards of each completion."""
        each = self._rewards.of(self._completions(continued))
        totals = self._rewards.total(each)
        lengths = [len(tokens) for _, tokens in continued]
        self._written = [list(numbers) for numbers in zip(totals, *each, lengths, strict=True)]
        return [-total for total in totals]

    def _note_measured(self, engine: Engine) -> None:
        """Record the rewards and lengths of all workers' completions in the journal."""
        of_workers = engine.workers.all_gather(self._written, "rewards")
        totals, *each, lengths = zip(*chain.from_iterable(of_workers), strict=True)
        count = len(totals)
        tokens = sum(lengths)
        self.measured = {
            "reward": math.fsum(totals) / count,
            "best_reward": max(totals),
            **{name: math.fsum(values) / count for name, values in self._named(each)},
            "completion_tokens": tokens / count,
            "generated_tokens": tokens,
            **self._drift,
        }
        engine.note_measured(self.measured)

    def _completions(self, continued: Sequence[Continued]) -> list[Completion]:
        completions = []
        for row, tokens in continued:
            fields = json.loads(row.source)
            text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
            completions.append(Completion(text, fields.get("prompt"), fields, row.line))
        return completions


KINDS = {
    kind.__name__: kind
    for kind in (Task, ChoiceTask, PreferenceTask, ExactMatch, RewardTask, FunctionTask)
}


def make_task(model: HFBlockModel, rows: Rows, options: TaskOptions) -> Task:
    """Make the task that the options name, of which ``require_task`` knows."""
    entry = find_task(options.objective, rows.format)
    name = entry.name if options.objective == AUTO else options.objective
    return KINDS[entry.kind](model, rows, replace(options, objective=name))


def make_evaluation(
    task: Task, model: HFBlockModel, rows: Rows, evaluation: Rows, options: TaskOptions
) -> Callable[[Engine], dict[str, float]]:
    """Make a function that evaluates the current weights of a runner on a run's rows.

    A run that trains on texts or completions may also be evaluated on rows with candidates, by the
    loss over the candidates and accuracy, or on rows with answers, by F1 and exact match of the
    answers that it generates. ``require_evaluation`` refuses others.
    """
    if evaluation.format is not rows.format:
        # whose evaluation names the loss over the candidates apart
        entry = find_task(MODEL_LOSS, evaluation.format)
        task = KINDS[entry.kind](model, evaluation, replace(options, objective=MODEL_LOSS))
    return lambda engine: task.evaluate(engine, evaluation)


def user_function(name: str) -> Any:
    """Import a function by ``FILE.py:function``.

    The source is compiled here: Python's import might load a ``.pyc`` file from ``__pycache__``,
    which no digest of the source covers.
    """
    path, _, function = name.rpartition(":")
    try:
        spec = importlib.util.spec_from_file_location("zo2_objective", path)
        assert spec is not None, "a path that ends in .py has a loader"
        module = importlib.util.module_from_spec(spec)
        with open_regular(path) as file:
            code = compile(file.read(), path, "exec")
        sys.modules[spec.name] = module  # classes of the module look it up there
        exec(code, module.__dict__)  # noqa: S102 - the user named this program
        objective = getattr(module, function)
        if not callable(objective):
            raise TypeError(f"{function} is a {type(objective).__name__}, not a function")
    except Exception as error:  # the user's program may raise anything
        found = f"{name}, which cannot be imported ({type(error).__name__}: {error})"[:300]
        expected = "FILE.py:function, a function of the model and a batch that returns a number"
        raise OptionError("objective", found, expected, "check the path and the name") from error

    def one_number(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        value = objective(model, batch)
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return value
        kind = (
            f"shape {list(value.shape)}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        raise OptionError(
            "objective", f"{kind} from {function}", "a 0-d tensor", "return the loss of the batch"
        )

    return one_number
