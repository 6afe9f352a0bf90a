"""Steps of an objective: it need not be the model's loss, nor come of one sweep, nor have a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import zeroth_order
from models import candidate_scores, make_batch, save_model, small_config
from parity import assert_same_bits, assert_same_weights
from torch import nn
from transformers import AutoModelForCausalLM

from zo2adapters import (
    ChoiceError,
    ChoiceF1Error,
    ChoiceLoss,
    HFBlockModel,
    MonolithicMeZO,
    PreferenceLoss,
    choice_batch,
    generate,
    open_checkpoint,
    preference_batch,
    score,
)
from zo2adapters.tasks.objectives import CandidateScores
from zo2core import (
    FZOO,
    Distribution,
    Engine,
    Evaluation,
    Forward,
    MeZOSGD,
    MultiQueryRGE,
    PhiloxNoise,
    ZerothOrder,
    ZOEstimator,
)
from zo2core.errors import BatchError, NonFiniteLossError, OptionError

NUMBERS: dict[str, Any] = {"lr": 2e-2, "zo_eps": 5e-2}
PROMPTS = [[3, 5, 7], [9, 2], [4, 4, 8, 1], [30, 11], [6, 13, 21], [17, 5]]
CANDIDATES = [[[10], [11, 12]], [[10], [11, 12]], [[10], [11, 12]], [[10], [11, 12]], [[10], [11, 12]], [[10], [11, 12]]]
ANSWERS = [0, 1, 1, 0, 1, 0]
CHOICES = choice_batch(PROMPTS, CANDIDATES, ANSWERS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("objectives") / "base", small_config("llama"))


class MonolithicObjective(MonolithicMeZO):
    """MeZO's loop over a whole model whose loss is a function of model and batch."""

    def __init__(
        self, base: Path, number: Callable[[Any, Mapping[str, torch.Tensor]], torch.Tensor], **options: Any
    ) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        super().__init__(model, **NUMBERS, **options)
        self.number = number

    @torch.inference_mode()
    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.number(self.model, batch)


def stock_error(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    wrong = candidate_scores(model, batch).argmax(1) != torch.tensor(ANSWERS)
    share: torch.Tensor = wrong.double().mean()
    return share


def stock_f1_error(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    chosen, right = candidate_scores(model, batch).argmax(1) == 1, torch.tensor(ANSWERS) == 1
    precision, recall = (chosen & right).sum() / max(int(chosen.sum()), 1), (chosen & right).sum() / right.sum()
    both = precision + recall
    return 1 - (2 * precision.double() * recall.double() / both.double() if both else both.double())


def stock_loss(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(candidate_scores(model, batch), torch.tensor(ANSWERS))


def same_weights(engine: Engine, whole: MonolithicMeZO) -> None:
    assert_same_weights(engine.parameters_now(), whole.model.named_parameters())


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "number"), [(ChoiceError, stock_error), (ChoiceF1Error, stock_f1_error)])
@pytest.mark.parametrize("rows", [None, 1, 4])
def test_objectives_without_a_gradient_are_the_monolithic_loop(kind: Any, number: Any, rows: int | None, base: Path) -> None:
    model = open_checkpoint(base)
    whole = MonolithicObjective(base, number)
    grads: list[float] = []
    with zeroth_order(model, MeZOSGD(**NUMBERS), micro_batch_size=rows) as engine:
        for seed in range(12):
            result, expected = engine.step(CHOICES, kind(model), seed=seed), whole.step(CHOICES, seed)
            assert result.losses == pytest.approx(expected.losses, abs=1e-6)
            grads += result.projected_grads
        if number is stock_error:  # sixths are the same floats both ways
            same_weights(engine, whole)
        now = engine.evaluate([CHOICES], kind(model))
    assert any(grads), "some step has to move something"
    assert now.loss == pytest.approx(float(whole.loss(CHOICES)), abs=1e-6)


def test_the_loss_over_candidates_is_that_of_the_whole_model(base: Path) -> None:
    model = open_checkpoint(base)
    whole = MonolithicObjective(base, stock_loss)
    with zeroth_order(model, MeZOSGD(**NUMBERS)) as engine:
        for seed in range(5):
            result, expected = engine.step(CHOICES, ChoiceLoss(model), seed=seed), whole.step(CHOICES, seed)
            assert result.losses == pytest.approx(expected.losses, rel=1e-4)
        trained = engine.evaluate([CHOICES], ChoiceLoss(model)).loss
        assert trained < result.losses[0]
        assert trained == pytest.approx(float(whole.loss(CHOICES)), rel=1e-3)


def test_an_evaluation_joins_the_prompts_of_all_batches(base: Path) -> None:
    model = open_checkpoint(base)
    halves = [choice_batch(PROMPTS[part], CANDIDATES[part], ANSWERS[part]) for part in (slice(0, 2), slice(2, 6))]
    for kind in (ChoiceLoss, ChoiceError, ChoiceF1Error):
        for rows in (None, 3):
            with Engine(model, micro_batch_size=rows) as replayer:
                whole, cut = replayer.evaluate([CHOICES], kind(model)), replayer.evaluate(halves, kind(model))
            assert cut.loss == pytest.approx(whole.loss, rel=1e-6)
            assert len(cut.losses) == 2
            assert whole.losses == (whole.loss,)


def test_dpo_of_a_model_that_is_its_own_reference_is_log_two(base: Path) -> None:
    model = open_checkpoint(base)
    with Engine(model) as replayer:
        references = score(replayer, model, PROMPTS, CANDIDATES).log_likelihoods
    batch = preference_batch(PROMPTS, CANDIDATES, references)
    with zeroth_order(model, MeZOSGD(**NUMBERS), micro_batch_size=3) as engine:
        assert engine.evaluate([batch], PreferenceLoss(model)).loss == pytest.approx(math.log(2), abs=1e-6)
        for _ in range(20):
            engine.step(batch, PreferenceLoss(model, beta=0.5))
        assert engine.evaluate([batch], PreferenceLoss(model)).loss < math.log(2)
        with pytest.raises(BatchError, match="make it with preference_batch"):
            engine.step(CHOICES, PreferenceLoss(model))
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(OptionError, match="beta"):
            PreferenceLoss(model, beta=wrong)
    with pytest.raises(BatchError, match=r"prompts\[0\]: found 3 candidates"):
        preference_batch([[1]], [[[2], [3], [4]]], [[0.0, 0.0]])


ESTIMATORS: Sequence[Callable[[], ZOEstimator]] = [
    lambda: MeZOSGD(**NUMBERS),
    lambda: MultiQueryRGE(**NUMBERS, q=3),
    lambda: FZOO(lr=1e-2, zo_eps=5e-2, q=3),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("make", ESTIMATORS)
@pytest.mark.parametrize("philox", [False, True])
def test_losses_told_one_by_one_are_those_of_a_step(make: Callable[[], ZOEstimator], philox: bool, base: Path) -> None:
    batch, engines = make_batch(40, [6, 4]), []
    distribution = make().distribution
    for _ in range(2):
        noise = PhiloxNoise(distribution or Distribution.GAUSSIAN) if philox or distribution else None
        engines.append(Engine(open_checkpoint(base), ZerothOrder(make(), noise=noise)))
    straight, asked = engines
    with straight, asked:
        for step in range(3):
            losses: dict[Evaluation, torch.Tensor] = {}
            evaluations = asked.ask()
            for evaluation in reversed(evaluations):  # in any order, and as often as it takes
                [[losses[evaluation]]] = asked.forwards([batch], at=evaluation)
            asked.evaluate([batch])  # the weights as they are, in between
            [[again]] = asked.forwards([batch], at=evaluations[-1])
            assert torch.equal(again, losses[evaluations[-1]])
            told = asked.tell([losses[evaluation] for evaluation in evaluations])
            taken = straight.step(batch)
            assert told.losses == taken.losses
            assert told.projected_grads == taken.projected_grads
            assert told.step == step
        for (name, own), (_, other) in zip(asked.parameters_now(), straight.parameters_now(), strict=True):
            assert_same_bits(name, own, other)


def test_exact_match_of_generated_text_trains_as_over_transformers_generate(base: Path) -> None:
    prompts, new = [[3, 5, 7], [9, 2, 30], [4, 8, 1]], 3

    def continued(model: Any) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return [row[len(prompts[0]) :].tolist() for row in out]

    references = continued(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    whole = MonolithicObjective(
        base,
        lambda model, batch: torch.tensor(
            sum(text != reference for text, reference in zip(continued(model), references, strict=True)) / 3,
            dtype=torch.float64,
        ),
    )
    model = open_checkpoint(base)
    moved = False
    with zeroth_order(model, MeZOSGD(**NUMBERS)) as engine:
        for seed in range(4):
            losses = []
            for evaluation in engine.ask(seed=seed):
                tokens = list(generate(engine, model, prompts, max_new_tokens=new, at=evaluation))
                texts = [list(column) for column in zip(*tokens, strict=True)]
                wrong = [text != reference for text, reference in zip(texts, references, strict=True)]
                losses.append(sum(wrong) / 3)
            result, expected = engine.tell(losses), whole.step({}, seed)
            assert result.losses == expected.losses
            assert result.projected_grads == expected.projected_grads
            moved = moved or any(result.projected_grads)
        same_weights(engine, whole)
    assert moved, "some step has to move something"


@pytest.mark.parametrize(("rows", "sizes"), [(None, [12]), (1, [2] * 6), (4, [4, 4, 4]), (5, [4, 4, 4]), (8, [8, 4])])
def test_batches_are_cut_between_prompts(rows: int | None, sizes: list[int], base: Path) -> None:
    pieces = ChoiceLoss(open_checkpoint(base)).split(CHOICES, rows)
    assert [len(piece["prompt"]) for piece in pieces] == sizes
    for key, value in CHOICES.items():
        assert torch.equal(torch.cat([piece[key] for piece in pieces]), value)


class FirstLogit:
    """A plain forward that ends in a number: the model's own but for its head."""

    def __init__(self, model: HFBlockModel, shape: tuple[int, ...] = ()) -> None:
        self.model, self.shape = model, shape
        self.prepared, self.embed, self.block = model.prepared_inputs, model.embed, model.block
        self.forward_bytes, self.held_bytes = model.forward_bytes, model.held_bytes

    def head(self, batch: Mapping[str, torch.Tensor], activations: Any) -> torch.Tensor:
        return self.model.logits(activations.hidden[:1, 0])[0, 0].reshape(self.shape)


class Unjoined(ChoiceLoss):
    """An objective that ends in no number."""

    def value(self, rated: Sequence[CandidateScores]) -> torch.Tensor:
        return torch.zeros(2)


def test_any_forward_that_ends_in_a_number_is_an_objective(base: Path) -> None:
    model = open_checkpoint(base)
    ids = {"input_ids": torch.tensor([[3, 5]])}  # and labels are not compulsory
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-4, zo_eps=1e-3))) as engine:
        forward: Forward = FirstLogit(model)
        before = list(engine.forwards([ids], forward))
        for _ in range(20):
            engine.step(ids, forward)
        after = list(engine.forwards([ids], forward))
    assert after[0][0] < before[0][0]


def test_what_cannot_be_heeded_is_refused_and_takes_no_step(base: Path) -> None:
    model = open_checkpoint(base)
    batch = make_batch(40, [6, 4])
    engine = zeroth_order(model, MeZOSGD(**NUMBERS), micro_batch_size=1)
    with engine, pytest.raises(OptionError, match="does not combine the losses of micro-batches"):
        engine.step(batch, FirstLogit(model))
    model = open_checkpoint(base)
    with zeroth_order(model, MeZOSGD(**NUMBERS)) as engine:
        with pytest.raises(OptionError, match=r"shape \[1\] as its loss"):
            engine.step(batch, FirstLogit(model, (1,)))
        plain: Any = FirstLogit(model)
        with pytest.raises(OptionError, match="a FirstLogit without split and loss"):
            engine.evaluate([batch], plain)
        with pytest.raises(OptionError, match=r"shape \[2\] as its loss"):
            engine.evaluate([CHOICES], Unjoined(model))
        with pytest.raises(OptionError, match="call ask"):
            engine.tell([1.0, 2.0])
        with pytest.raises(OptionError, match="call ask"):
            next(engine.forwards([batch], at=Evaluation(1, 1.0)))
        evaluations = engine.ask()
        with pytest.raises(OptionError, match="found 1 loss; expected 2"):
            engine.tell([1.0])
        with pytest.raises(OptionError, match="an evaluation that ask"):
            next(engine.forwards([batch], at=Evaluation(evaluations[0].seed, 7.0)))
        with pytest.raises(NonFiniteLossError):
            engine.tell([1.0, float("nan")])
        with pytest.raises(BatchError, match="make it with choice_batch"):
            engine.step(batch, ChoiceLoss(model))
        for key, value, said in (
            ("is_answer", torch.zeros(12, dtype=torch.int64), r"prompts without a right candidate"),
            ("prompt", torch.zeros(3, dtype=torch.int64), "equally many rows"),
        ):
            with pytest.raises(BatchError, match=said):
                engine.step({**CHOICES, key: value}, ChoiceLoss(model))
        assert engine.version == 0
        with pytest.raises(OptionError, match="call ask"):  # the step above has given up the one that was asked for
            engine.tell([1.0, 2.0])
        engine.ask()
        with pytest.raises(OptionError, match="seed"):
            engine.ask(seed=-1)
        with pytest.raises(OptionError, match="call ask"):  # and so has the refused one
            engine.tell([1.0, 2.0])
        engine.ask()
        assert engine.tell([1.0, 2.0]).step == 0
    with Engine(model) as replayer, pytest.raises(OptionError, match="without zeroth-order steps"):
        list(generate(replayer, model, [[3]], max_new_tokens=1, at=evaluations[0]))


@pytest.mark.parametrize(
    ("prompts", "candidates", "answers"),
    [([], [], []), ([[]], [[[1], [2]]], [0]), ([[1]], [[[1]]], [0]), ([[1]], [[[1], []]], [0]), ([[1]], [[[1], [2]]], [2])],
)
def test_choices_that_are_none_are_refused(prompts: Any, candidates: Any, answers: Any) -> None:
    with pytest.raises(BatchError):
        choice_batch(prompts, candidates, answers)
