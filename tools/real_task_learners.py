"""The variants of training on the real task, by name, and the accuracy of a model's label words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from zo2adapters import Adapter, HFBlockModel, open_checkpoint
from zo2adapters.models.hf import Activations
from zo2adapters.models.packing import predictions
from zo2adapters.tasks.batches import collate
from zo2adapters.tasks.candidates import read_choices
from zo2adapters.tasks.rows import TokenizedRow
from zo2adapters.tasks.scoring import LogLikelihood
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
from zo2core import (
    FZOO,
    LOMO,
    BAdam,
    Batch,
    BlockUpdate,
    DensePerturbation,
    Distribution,
    Engine,
    FirstOrder,
    LowRankPerturbation,
    MeZOSGD,
    MultiQueryRGE,
    PerRowRGE,
    PhiloxNoise,
    TorchOptimizer,
    ZerothOrder,
    ZOEstimator,
)
from zo2core.errors import DataError, NonFiniteLossError, OptionError

ZO_EPS = 1e-3
LORA_EPS = 1e-2  # perturbation scale of LoRA in MeZO's experiments
QUESTIONS_A_BATCH = 16


class Score(NamedTuple):
    """How well a model answers questions."""

    accuracy: float  # 0 to 1; a row with k equally likely label words, one of them right, counts 1 / k
    loss: float  # mean negative log-likelihood of the right word, in nats


class Questions(NamedTuple):
    """Rows that ask for a label word of one token."""

    batches: tuple[Batch, ...]  # padded on the right; the one labelled token of a row is the right word
    words: torch.Tensor  # tokens of the label words, (label words,), int64
    answers: torch.Tensor  # index of each row's right word, in the batches' order, (rows,), int64

    def score(self, log_likelihoods: torch.Tensor) -> Score:
        """Score log-likelihoods, (rows, label words), in the batches' order.

        Raises:
            NonFiniteLossError: if one is not finite.
        """
        if not bool(log_likelihoods.isfinite().all()):
            found, remedy = "a log-likelihood that is not finite", "lower the learning rate"
            raise NonFiniteLossError("evaluation", found=found, expected="finite numbers", remedy=remedy)
        right = log_likelihoods.gather(1, self.answers[:, None])
        better = (log_likelihoods > right).any(dim=1)
        equal = (log_likelihoods == right).sum(dim=1)
        accuracy = torch.where(better, 0.0, 1.0 / equal).double().mean()
        return Score(float(accuracy), -float(right.double().mean()))


def read_questions(path: Path, model: Path) -> Questions:
    """Read rows of prompt, candidates and answer, sorted by length, so that batches have little padding.

    Args:
        path: JSONL file.
        model: Directory with the tokenizer.

    Raises:
        DataError: if the file cannot be used, or a candidate is not one token, the same ones in all rows.
    """
    tokenizer = load_tokenizer(model)
    choices = sorted(read_choices(path, tokenizer, sequence_length=1 << 20), key=lambda choice: len(choice.prompt))
    words = {choice.candidates for choice in choices}
    if len(words) > 1 or any(len(candidate) != 1 for candidates in words for candidate in candidates):
        found = f"candidates of {sorted({len(c) for candidates in words for c in candidates})} tokens"
        expected = "the same label words in all rows, one token each"
        raise DataError(path, found=found, expected=expected, remedy="choose other label words")
    ((*candidates,),) = words
    rows = [TokenizedRow([*c.prompt, *c.candidates[c.answer]], len(c.prompt), 0) for c in choices]  # type: ignore[arg-type]
    pad = pad_token_id(tokenizer)
    starts = range(0, len(rows), QUESTIONS_A_BATCH)
    return Questions(
        batches=tuple(collate(rows[start : start + QUESTIONS_A_BATCH], pad_token_id=pad) for start in starts),
        words=torch.tensor([token for (token,) in candidates]),
        answers=torch.tensor([choice.answer for choice in choices]),
    )


class Learner(Protocol):
    """A model in training."""

    @property
    def taken(self) -> int:
        """The number of steps so far, including those of an earlier process."""

    def step(self, batch: Batch) -> None:
        """Take a step.

        Raises:
            NonFiniteLossError: if there is nothing to step on.
        """

    def score(self, questions: Questions) -> Score:
        """Score the answers of the current weights."""

    def close(self) -> None:
        """Release files and memory."""


class Variant(Protocol):
    """A variant of training: a line of the table."""

    @property
    def name(self) -> str:
        """The name in files and tables."""

    @property
    def lrs(self) -> tuple[float, ...]:
        """The learning rates that tuning tries, in ascending order."""

    @property
    def forwards(self) -> int:
        """The cost of a step in forwards of its batch."""

    def learner(self, model: Path, *, lr: float, seed: int, journal: Path, rows: int) -> Learner:
        """Start training, or continue it.

        Args:
            model: Directory of the base.
            lr: Learning rate, the same in all steps.
            seed: Of the directions.
            journal: File that keeps the steps, for those who can go on from it.
            rows: Of a batch.
        """


class LabelWords(LogLikelihood):
    """The model's forward, which returns the log-likelihoods of all label words at a row's labelled token.

    One row answers a question. Scored as candidates, a question takes as many rows as there are words.

    Args:
        model: The model whose forward this is.
        words: Tokens of the label words.
    """

    def __init__(self, model: HFBlockModel, words: torch.Tensor) -> None:
        super().__init__(model)
        self._words = words

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """The log-likelihoods, (rows, label words), float32."""
        logits = self._model.logits(activations.hidden[predictions(batch)])
        return logits.float().log_softmax(dim=-1)[:, self._words]


class ZerothOrderLearner:
    """A learner with an engine of this library."""

    def __init__(self, model: HFBlockModel, engine: Engine, rows: int) -> None:
        self._model, self._engine, self._rows = model, engine, rows

    @property
    def taken(self) -> int:
        """The number of steps in the journal."""
        return self._engine.version

    def step(self, batch: Batch) -> None:
        """Take one step along new directions, on the rows that they share."""
        self._engine.step({key: value[: self._rows] for key, value in batch.items()})

    def score(self, questions: Questions) -> Score:
        """Score answers, in as few sweeps as the memory for activations allows."""
        outputs = self._engine.forwards(questions.batches, LabelWords(self._model, questions.words))
        return questions.score(torch.cat([rows for sweep in outputs for rows in sweep]))

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


@dataclass(frozen=True, kw_only=True)
class ZerothOrderVariant:
    """A variant of this library, by default with two-point steps."""

    name: str
    opening: Mapping[str, Any]
    noise: Distribution | None  # None is MeZO's own noise
    estimator: Callable[[float], ZOEstimator]  # makes the estimator from the learning rate
    lrs: tuple[float, ...] = (5e-6, 1e-5, 2e-5, 4e-5)
    forwards: int = 2
    rank: int | None = None  # rank of the directions; None: full-rank directions
    lora: Mapping[str, Any] | None = None  # config of LoRA-FA, which trains the matrices B; None trains all weights
    queries: int = 1  # directions for the same rows; a step has fewer rows by this factor, and equally many forwards of rows

    def learner(self, model: Path, *, lr: float, seed: int, journal: Path, rows: int) -> Learner:
        """Open the model, and continue where the journal ends."""
        if rows % self.queries:
            expected = f"a multiple of the {self.queries} queries of {self.name}, which share them"
            raise OptionError("rows", found=str(rows), expected=expected, remedy="pass another --batch-size")
        adapter = Adapter(config=LoraConfig(**self.lora), frozen=("lora_A",), seed=seed) if self.lora else None
        opened = open_checkpoint(model, adapter=adapter, **self.opening)
        noise = None if self.noise is None else PhiloxNoise(self.noise)
        perturbation = DensePerturbation() if self.rank is None else LowRankPerturbation(rank=self.rank)
        estimator = self.estimator(lr)
        if isinstance(estimator, PerRowRGE):
            estimator = replace(estimator, q=rows)
        engine = Engine(opened, ZerothOrder(estimator, noise=noise, perturbation=perturbation, seed=seed), journal=journal)
        return ZerothOrderLearner(opened, engine, rows // self.queries)


class BackpropLearner:
    """A model trained by gradients over the stream."""

    def __init__(self, model: HFBlockModel, engine: Engine) -> None:
        self._model = model
        self._engine = engine

    @property
    def taken(self) -> int:
        """What an earlier process did is lost with it."""
        return self._engine.version

    def step(self, batch: Batch) -> None:
        """Take one step."""
        self._engine.step(batch)

    def score(self, questions: Questions) -> Score:
        """Answer in as few sweeps as activations fit into memory."""
        outputs = self._engine.forwards(questions.batches, LabelWords(self._model, questions.words))
        return questions.score(torch.cat([rows for sweep in outputs for rows in sweep]))

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


@dataclass(frozen=True, kw_only=True)
class StreamedLoRA:
    """First-order steps of a LoRA over the stream of blocks, at a constant learning rate, clipped to a norm of 1.

    A backward pass counts as two forwards, whether the graphs of blocks were kept or not.
    """

    name: str
    opening: Mapping[str, Any]
    lora: Mapping[str, Any]
    lrs: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3)
    forwards: int = 3

    def learner(self, model: Path, *, lr: float, seed: int, journal: Path, rows: int) -> Learner:
        """Begin."""
        adapter = Adapter(config=LoraConfig(**self.lora), seed=seed)
        opened = open_checkpoint(model, adapter=adapter, **self.opening)
        optimizer = partial(torch.optim.AdamW, lr=lr, weight_decay=0.0)
        return BackpropLearner(opened, Engine(opened, FirstOrder(optimizer, clip=1.0)))


@dataclass(frozen=True, kw_only=True)
class AllParameters:
    """First-order steps of all parameters over the stream, at a constant learning rate after a warm-up.

    A backward pass counts as two forwards.
    """

    name: str
    opening: Mapping[str, Any]
    update: Callable[[int], BlockUpdate]  # makes the optimizer, for a seed
    lrs: tuple[float, ...]
    forwards: int = 3
    warmup: int = 10  # steps
    clip_norm: float | None = None

    def learner(self, model: Path, *, lr: float, seed: int, journal: Path, rows: int) -> Learner:
        """Begin."""
        opened = open_checkpoint(model, **self.opening)

        def schedule(step: int) -> float:
            return lr * min((step + 1) / self.warmup, 1.0)

        return BackpropLearner(opened, Engine(opened, FirstOrder(self.update(seed), lr=schedule, clip=self.clip_norm)))


class AdamWLearner:
    """A learner with a resident model and gradients."""

    def __init__(self, model: Path, lr: float, warmup: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model.config.use_cache = False
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=lr)
        self._lr, self._warmup = lr, warmup
        self.taken = 0

    def step(self, batch: Batch) -> None:
        """Take one step on the model's own loss, with gradients clipped to a norm of 1."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * min((self.taken + 1) / self._warmup, 1.0)
        loss = self._model(**batch).loss
        if not math.isfinite(loss.item()):
            remedy = "lower the learning rate"
            raise NonFiniteLossError(f"step {self.taken}", found=str(loss.item()), expected="a finite loss", remedy=remedy)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.taken += 1

    @torch.inference_mode()
    def score(self, questions: Questions) -> Score:
        """Score answers of the resident model."""
        return questions.score(torch.cat(list(self._answers(questions))))

    def close(self) -> None:
        """Do nothing, because there are no files."""

    def _answers(self, questions: Questions) -> Iterator[torch.Tensor]:
        for batch in questions.batches:
            logits = self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            yield logits[predictions(batch)].log_softmax(dim=-1)[:, questions.words]


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """First-order steps in float32 for reference, with gradients and 16 bytes a parameter, on the same rows.

    A backward pass counts as two forwards. Weight decay is torch's default; the learning rate is constant after a warm-up,
    so that every point of a curve is what a run of that length gives, as in the other curves.
    """

    name: str
    lrs: tuple[float, ...] = (5e-6, 1e-5, 2e-5, 5e-5)
    forwards: int = 3
    warmup: int = 10  # steps

    def learner(self, model: Path, *, lr: float, seed: int, journal: Path, rows: int) -> Learner:
        """Start training; the steps of an earlier process are lost."""
        return AdamWLearner(model, lr, self.warmup)


def mezo(lr: float) -> ZOEstimator:
    """MeZO as published: weights are perturbed in place, and keep the rounding of the perturbations."""
    return MeZOSGD(lr=lr, zo_eps=ZO_EPS)


def two_point(lr: float) -> ZOEstimator:
    """MeZO whose evaluations perturb a copy of the weights, so that perturbations leave no rounding."""
    return MeZOSGD(lr=lr, zo_eps=ZO_EPS, perturb_in_place=False)


def fzoo(lr: float) -> ZOEstimator:
    """One-sided evaluations along eight directions, divided by their spread."""
    return FZOO(lr=lr, zo_eps=ZO_EPS, q=8)


def queries(q: int, lr: float) -> ZOEstimator:
    """Two-point steps along several directions, all evaluated on the same rows (P-RGE, equation 1)."""
    return MultiQueryRGE(q=q, lr=lr, zo_eps=LORA_EPS, perturb_in_place=False)


def per_row(lr: float) -> ZOEstimator:
    """Two-point steps in which each row of the batch has a direction of its own."""
    return PerRowRGE(q=1, lr=lr, zo_eps=ZO_EPS, perturb_in_place=False)


RADEMACHER, GAUSSIAN = Distribution.RADEMACHER, Distribution.GAUSSIAN
FZOO_LRS = (1e-3, 3e-3, 6e-3, 1.2e-2)
PER_ROW_LRS = (1e-5, 2e-5, 4e-5, 8e-5)
IN_FLOAT32 = {"dtype": "float32", "loss_chunk": 64}
IN_BFLOAT16 = {"dtype": "bfloat16", "loss_chunk": 64}
# LoRA-FA is what P-RGE trains: the matrices A stay as they were drawn. The base is bfloat16, the adapter float32.
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
BADAM_STEPS = 3  # of a block's turn: 32 segments have one in 96 steps
LORA_LRS = (3e-3, 1e-2, 3e-2, 1e-1)
IN_MIXED = {"precision": "mixed", "dtype": "bfloat16"}  # weights in float32; the dtype is fixed, not chosen by speed
VARIANTS: tuple[Variant, ...] = (
    ZerothOrderVariant(name="mezo-float32", opening={"dtype": "float32"}, noise=None, estimator=mezo),
    ZerothOrderVariant(name="rademacher-float32", opening=IN_FLOAT32, noise=RADEMACHER, estimator=two_point),
    ZerothOrderVariant(name="rademacher-bfloat16", opening=IN_BFLOAT16, noise=RADEMACHER, estimator=two_point),
    ZerothOrderVariant(name="rademacher-mixed", opening=IN_MIXED, noise=RADEMACHER, estimator=two_point),
    ZerothOrderVariant(
        name="rademacher-mixed-float8-carried",
        opening={**IN_MIXED, "transfer_dtype": "float8"},
        noise=RADEMACHER,
        estimator=two_point,
    ),
    ZerothOrderVariant(
        name="rademacher-mixed-bfloat16-carried",
        opening={**IN_MIXED, "transfer_dtype": "bfloat16"},
        noise=RADEMACHER,
        estimator=two_point,
    ),
    *(
        ZerothOrderVariant(name=f"rank-{rank}-bfloat16", opening=IN_BFLOAT16, noise=GAUSSIAN, estimator=two_point, rank=rank)
        for rank in (1, 2, 4, 8)
    ),
    *(
        ZerothOrderVariant(
            name=f"lora-fa-{count}-queries-bfloat16",
            opening=IN_BFLOAT16,
            noise=GAUSSIAN,
            estimator=partial(queries, count),
            lrs=LORA_LRS,
            lora=LORA,
            queries=count,
        )
        for count in (1, 4, 16)
    ),
    ZerothOrderVariant(
        name="per-row-rank-8-bfloat16", opening=IN_BFLOAT16, noise=GAUSSIAN, estimator=per_row, rank=8, lrs=PER_ROW_LRS
    ),
    # FZOO normalises its steps, so that learning rates are lengths: a weight moves by lr / sqrt(8).
    ZerothOrderVariant(name="fzoo-mixed", opening=IN_MIXED, noise=RADEMACHER, estimator=fzoo, lrs=FZOO_LRS, forwards=9),
    ZerothOrderVariant(name="fzoo-float32", opening=IN_FLOAT32, noise=RADEMACHER, estimator=fzoo, lrs=FZOO_LRS, forwards=9),
    StreamedLoRA(name="lora-adamw-bfloat16", opening=IN_BFLOAT16, lora=LORA),
    AdamW(name="adamw-float32"),
    AllParameters(
        name="adamw-mixed",
        opening=IN_MIXED,
        update=lambda seed: TorchOptimizer(torch.optim.AdamW),
        lrs=(5e-6, 1e-5, 2e-5, 5e-5),
    ),
    AllParameters(
        name="lomo-mixed",
        opening=IN_MIXED,
        update=lambda seed: LOMO(),
        lrs=(3e-3, 1e-2, 3e-2, 1e-1),
        clip_norm=1.0,  # measured by a second backward pass
        forwards=5,
    ),
    AllParameters(
        name="badam-mixed",
        opening=IN_MIXED,
        update=lambda seed: BAdam(torch.optim.AdamW, every=BADAM_STEPS, seed=seed),
        lrs=(1e-5, 3e-5, 1e-4, 3e-4),
        warmup=1,
    ),
)


def variants(names: Sequence[str]) -> list[Variant]:
    """The variants of these names; all variants if there are no names."""
    by_name = MappingProxyType({variant.name: variant for variant in VARIANTS})
    return [by_name[name] for name in names or by_name]
