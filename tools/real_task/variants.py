"""The variants of training on a task, by name, and the accuracy of a model's label words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from zo2adapters import Adapter, HFBlockModel, Precision, open_checkpoint
from zo2adapters.models.batches import predictions
from zo2adapters.models.hf import Activations
from zo2adapters.tasks.batches import collate
from zo2adapters.tasks.objectives import LogLikelihood
from zo2adapters.tasks.row_reader import read_rows
from zo2adapters.tasks.rows import TokenizedRow
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
WARMUP = 10  # first-order steps


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
    choices = sorted(read_rows(path, tokenizer, sequence_length=1 << 20), key=lambda choice: len(choice.prompt))
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

    def step(self, batch: Batch) -> Sequence[float]:
        """Take a step; returns its projected gradients. Raises NonFiniteLossError if there is nothing to step on."""

    def score(self, questions: Questions) -> Score:
        """Score the answers of the current weights."""

    def close(self) -> None:
        """Release files and memory."""


class Variant(NamedTuple):
    """A variant of training: a line of the table."""

    name: str  # in files and tables
    learner: Callable[..., Learner]  # starts or continues training, from a model, ``lr``, ``seed``, ``journal`` and ``rows``
    lrs: tuple[float, ...] = (5e-6, 1e-5, 2e-5, 4e-5)  # learning rates that tuning tries, in ascending order
    forwards: int = 2  # the cost of a step in forwards of its batch


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


class EngineLearner:
    """A learner with an engine of this library.

    Args:
        model: The model.
        engine: The engine.
        rows: Rows of a batch that a step takes; None: all.
    """

    def __init__(self, model: HFBlockModel, engine: Engine, rows: int | None = None) -> None:
        self._model, self._engine, self._rows = model, engine, rows

    @property
    def taken(self) -> int:
        """The number of steps; those of an earlier process are kept in a journal, if there is one."""
        return self._engine.version

    def step(self, batch: Batch) -> Sequence[float]:
        """Take one step."""
        result: Any = self._engine.step({key: value[: self._rows] for key, value in batch.items()})
        return tuple(getattr(result, "projected_grads", ()))

    def score(self, questions: Questions) -> Score:
        """Score answers, in as few sweeps as the memory for activations allows."""
        outputs = self._engine.forwards(questions.batches, LabelWords(self._model, questions.words))
        return questions.score(torch.cat([rows for sweep in outputs for rows in sweep]))

    def close(self) -> None:
        self._engine.close()


def zeroth_order(
    model: Path,
    *,
    lr: float,
    seed: int,
    journal: Path,
    rows: int,
    opening: Mapping[str, Any],
    noise: Distribution | None,
    estimator: Callable[[float], ZOEstimator],
    rank: int | None = None,
    lora: Mapping[str, Any] | None = None,
    shared_rows: int = 1,
) -> Learner:
    """Steps without gradients, which continue where the journal ends.

    Args:
        model: Directory of the base.
        lr: Learning rate, the same in all steps.
        seed: Of the directions.
        journal: File that keeps the steps.
        rows: Of a batch.
        opening: Arguments of ``open_checkpoint``.
        noise: None is MeZO's own noise.
        estimator: Makes the estimator from the learning rate.
        rank: Rank of the directions; None: full-rank directions.
        lora: Config of LoRA-FA, which trains the matrices B; None trains all weights.
        shared_rows: Divisor of the rows, since so many queries share them; a step has equally many forwards of rows.

    Raises:
        OptionError: if the rows are not a multiple of ``shared_rows``.
    """
    if rows % shared_rows:
        expected = f"a multiple of the {shared_rows} queries, which share them"
        raise OptionError("rows", found=str(rows), expected=expected, remedy="pass another --batch-size")
    adapter = Adapter(config=LoraConfig(**lora), frozen=("lora_A",), seed=seed) if lora else None
    opened = open_checkpoint(model, adapter=adapter, **opening)
    made = estimator(lr)
    if isinstance(made, PerRowRGE):
        made = replace(made, q=rows)
    perturbation = DensePerturbation() if rank is None else LowRankPerturbation(rank=rank)
    generator = None if noise is None else PhiloxNoise(noise)
    method = ZerothOrder(made, noise=generator, perturbation=perturbation, seed=seed)
    return EngineLearner(opened, Engine(opened, method, journal=journal), rows // shared_rows)


def streamed_lora(
    model: Path, *, lr: float, seed: int, opening: Mapping[str, Any], lora: Mapping[str, Any], **_: Any
) -> Learner:
    """First-order steps of a LoRA over the stream, at a constant learning rate, clipped to a norm of 1."""
    opened = open_checkpoint(model, adapter=Adapter(config=LoraConfig(**lora), seed=seed), **opening)
    optimizer = partial(torch.optim.AdamW, lr=lr, weight_decay=0.0)
    return EngineLearner(opened, Engine(opened, FirstOrder(optimizer, clip=1.0)))


def all_parameters(
    model: Path,
    *,
    lr: float,
    seed: int,
    opening: Mapping[str, Any],
    update: Callable[[int], BlockUpdate],
    warmup: int = WARMUP,
    clip: float | None = None,
    **_: Any,
) -> Learner:
    """First-order steps of all parameters over the stream, at a constant learning rate after a warm-up."""
    opened = open_checkpoint(model, **opening)

    def schedule(step: int) -> float:
        return lr * min((step + 1) / warmup, 1.0)

    return EngineLearner(opened, Engine(opened, FirstOrder(update(seed), lr=schedule, clip=clip)))


class AdamWLearner:
    """A resident model in float32 with gradients and 16 bytes a parameter, for reference.

    Weight decay is torch's default; the learning rate is constant after a warm-up, so that every point of a curve is what a
    run of that length gives, as in the other curves.
    """

    def __init__(self, model: Path, *, lr: float, **_: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model.config.use_cache = False
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=lr)
        self._lr = lr
        self.taken = 0

    def step(self, batch: Batch) -> Sequence[float]:
        """Take one step on the model's own loss, with gradients clipped to a norm of 1."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * min((self.taken + 1) / WARMUP, 1.0)
        loss = self._model(**batch).loss
        if not math.isfinite(loss.item()):
            remedy = "lower the learning rate"
            raise NonFiniteLossError(f"step {self.taken}", found=str(loss.item()), expected="a finite loss", remedy=remedy)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.taken += 1
        return ()

    @torch.inference_mode()
    def score(self, questions: Questions) -> Score:
        """Score answers of the resident model."""
        answers = []
        for batch in questions.batches:
            logits = self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            answers.append(logits[predictions(batch)].log_softmax(dim=-1)[:, questions.words])
        return questions.score(torch.cat(answers))

    def close(self) -> None:
        pass  # there are no files


def two_point(lr: float, *, in_place: bool = False) -> ZOEstimator:
    """MeZO. In place, as published, weights keep the rounding of the perturbations; a perturbed copy leaves none."""
    return MeZOSGD(lr=lr, zo_eps=ZO_EPS, perturb_in_place=in_place)


def fzoo(lr: float) -> ZOEstimator:
    """One-sided evaluations along eight directions, divided by their spread."""
    return FZOO(lr=lr, zo_eps=ZO_EPS, q=8)


def queries(q: int, lr: float, zo_eps: float) -> ZOEstimator:
    """Two-point steps along several directions, all evaluated on the same rows (P-RGE, equation 1)."""
    return MultiQueryRGE(q=q, lr=lr, zo_eps=zo_eps, perturb_in_place=False)


def per_row(lr: float) -> ZOEstimator:
    """Two-point steps in which each row of the batch has a direction of its own."""
    return PerRowRGE(q=1, lr=lr, zo_eps=ZO_EPS, perturb_in_place=False)


def both_ways(transfer_dtype: torch.dtype) -> dict[str, Any]:
    """Mixed precision whose blocks are transferred to the device and back in a dtype."""
    stored: Any = {"stored": torch.float32, "computed": torch.bfloat16}
    return {"precision": Precision(**stored, transfer_dtype=transfer_dtype, transfer_back=True)}


RADEMACHER, GAUSSIAN = Distribution.RADEMACHER, Distribution.GAUSSIAN
FZOO_LRS = (
    1e-3,
    3e-3,
    6e-3,
    1.2e-2,
)  # FZOO normalises its steps: learning rates are lengths, a weight moves by lr / sqrt(8)
PER_ROW_LRS = (1e-5, 2e-5, 4e-5, 8e-5)
LORA_LRS = (3e-3, 1e-2, 3e-2, 1e-1)
IN_FLOAT32 = {"dtype": "float32", "loss_chunk": 64}
IN_BFLOAT16 = {"dtype": "bfloat16", "loss_chunk": 64}
IN_MIXED = {"precision": "mixed", "dtype": "bfloat16"}  # weights in float32; the dtype is fixed, not chosen by speed
# LoRA-FA is what P-RGE trains: the matrices A stay as they were drawn. The base is bfloat16, the adapter float32.
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
BADAM_STEPS = 3  # of a block's turn: 32 segments have one in 96 steps

dense = partial(zeroth_order, noise=RADEMACHER, estimator=two_point)
low_rank = partial(zeroth_order, noise=GAUSSIAN, estimator=two_point)
adamw_mixed = partial(all_parameters, opening=IN_MIXED, update=lambda seed: TorchOptimizer(torch.optim.AdamW))
lomo = partial(all_parameters, opening=IN_MIXED, update=lambda seed: LOMO(), clip=1.0)  # by a second backward pass
badam = partial(
    all_parameters,
    opening=IN_MIXED,
    update=lambda seed: BAdam(torch.optim.AdamW, every=BADAM_STEPS, seed=seed),
    warmup=1,
)


def lora_fa(count: int) -> Callable[..., Learner]:
    """LoRA-FA with so many queries, which share the rows."""
    estimator = partial(queries, count, zo_eps=LORA_EPS)
    return partial(low_rank, opening=IN_BFLOAT16, estimator=estimator, lora=LORA, shared_rows=count)


# A backward pass counts as two forwards, whether the graphs of blocks were kept or not.
VARIANTS: tuple[Variant, ...] = (
    Variant(
        "mezo-float32",
        partial(zeroth_order, opening={"dtype": "float32"}, noise=None, estimator=partial(two_point, in_place=True)),
    ),
    Variant("rademacher-float32", partial(dense, opening=IN_FLOAT32)),
    Variant("rademacher-bfloat16", partial(dense, opening=IN_BFLOAT16)),
    Variant("rademacher-mixed", partial(dense, opening=IN_MIXED)),
    *(
        Variant(f"rademacher-mixed-{name}-carried", partial(dense, opening={**IN_MIXED, "transfer_dtype": name}))
        for name in ("float8", "bfloat16")
    ),
    Variant("rademacher-mixed-float8-both-ways", partial(dense, opening=both_ways(torch.float8_e4m3fn))),
    Variant("rademacher-mixed-bfloat16-both-ways", partial(dense, opening=both_ways(torch.bfloat16))),
    Variant(
        "rademacher-4-queries-float32",
        partial(dense, opening=IN_FLOAT32, estimator=partial(queries, 4, zo_eps=ZO_EPS)),
        forwards=8,
    ),
    Variant("gaussian-float32", partial(low_rank, opening=IN_FLOAT32)),
    Variant("gaussian-bfloat16", partial(low_rank, opening=IN_BFLOAT16)),
    *(Variant(f"rank-{rank}-bfloat16", partial(low_rank, opening=IN_BFLOAT16, rank=rank)) for rank in (1, 2, 4, 8)),
    Variant("rank-8-float32", partial(low_rank, opening=IN_FLOAT32, rank=8)),
    *(Variant(f"lora-fa-{count}-queries-bfloat16", lora_fa(count), LORA_LRS) for count in (1, 4, 16)),
    *(
        Variant(f"per-row-rank-8-{name}", partial(low_rank, opening=opening, estimator=per_row, rank=8), PER_ROW_LRS)
        for name, opening in (("bfloat16", IN_BFLOAT16), ("float32", IN_FLOAT32))
    ),
    Variant("fzoo-mixed", partial(dense, opening=IN_MIXED, estimator=fzoo), FZOO_LRS, forwards=9),
    Variant("fzoo-float32", partial(dense, opening=IN_FLOAT32, estimator=fzoo), FZOO_LRS, forwards=9),
    Variant(
        "lora-adamw-bfloat16", partial(streamed_lora, opening=IN_BFLOAT16, lora=LORA), (5e-4, 1e-3, 2e-3, 4e-3), forwards=3
    ),
    Variant("adamw-float32", AdamWLearner, (5e-6, 1e-5, 2e-5, 5e-5), forwards=3),
    Variant("adamw-mixed", adamw_mixed, (5e-6, 1e-5, 2e-5, 5e-5), forwards=3),
    Variant("lomo-mixed", lomo, (3e-3, 1e-2, 3e-2, 1e-1), forwards=5),
    Variant("badam-mixed", badam, (1e-5, 3e-5, 1e-4, 3e-4), forwards=3),
)


def variants(names: Sequence[str]) -> list[Variant]:
    """The variants of these names; all variants if there are no names."""
    by_name = {variant.name: variant for variant in VARIANTS}
    return [by_name[name] for name in names or by_name]
