"""Steps of an objective: it need not be the model's loss, nor come of one sweep, nor have a gradient."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import done
from engines import zeroth_order
from models import CONFIGS, WORDS, make_batch, save_model, save_tokenizer, small_config
from parity import assert_same_bits
from transformers import AutoModelForCausalLM

from zo2adapters import (
    ChoiceError,
    ChoiceF1Error,
    ChoiceLoss,
    HFBlockModel,
    PreferenceLoss,
    choice_batch,
    generate,
    open_checkpoint,
    preference_batch,
    score,
)
from zo2adapters.cli import main
from zo2adapters.tasks.objectives import CandidateScores, LogLikelihood, Scored
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.rows import TokenizedRow, collate
from zo2adapters.tasks.task import ChoiceTask, TaskOptions
from zo2adapters.tasks.tokenizer import load_tokenizer
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
from zo2core.sweep.activations import storage_bytes

NUMBERS: dict[str, Any] = {"lr": 2e-2, "zo_eps": 5e-2}
PROMPTS = [[3, 5, 7], [9, 2], [4, 4, 8, 1], [30, 11], [6, 13, 21], [17, 5]]
CANDIDATES = [[[10], [11, 12]], [[10], [11, 12]], [[10], [11, 12]], [[10], [11, 12]], [[10], [11, 12]], [[10], [11, 12]]]
ANSWERS = [0, 1, 1, 0, 1, 0]
CHOICES = choice_batch(PROMPTS, CANDIDATES, ANSWERS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("objectives") / "base", small_config("llama"))


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


def test_what_makes_no_preferences_is_refused(base: Path) -> None:
    model = open_checkpoint(base)
    with zeroth_order(model, MeZOSGD(**NUMBERS)) as engine, pytest.raises(BatchError, match="make it with preference_batch"):
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


# Scores: candidates' log-likelihoods are Hugging Face's


SCORED_PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12]]
SCORED = [[[1], [2, 3]], [[4, 5, 6], [7], [8, 9]], [[1]]]


@pytest.mark.few(4)
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_log_likelihoods_are_hugging_faces(model_type: str, chunk: int | None, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config(model_type), torch.float64)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model = open_checkpoint(base, loss_chunk=chunk)
    with Engine(model) as engine:
        scored = score(engine, model, SCORED_PROMPTS, SCORED, batch_size=4)
    assert scored.tokens == ((1, 2), (3, 1, 2), (1,))
    for prompt, answers, found in zip(SCORED_PROMPTS, SCORED, scored.log_likelihoods, strict=True):
        for answer, value in zip(answers, found, strict=True):
            with torch.inference_mode():
                logs = whole(input_ids=torch.tensor([prompt + answer])).logits[0].float().log_softmax(-1)
            expected = sum(logs[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer))
            assert value == pytest.approx(expected, rel=1e-5)


def test_scores_are_of_the_present_weights(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("opt"))
    model = open_checkpoint(base)
    batch = collate([TokenizedRow((prompt := [3, 4, 5, 1]), 3, 1)], pad_token_id=0)  # type: ignore[arg-type]
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-1, zo_eps=1e-3))) as engine:
        before = score(engine, model, [prompt[:3]], [[[1]]]).log_likelihoods[0][0]
        engine.step(batch, seed=1)
        after = score(engine, model, [prompt[:3]], [[[1]]]).log_likelihoods[0][0]
        assert after != before
        assert after == pytest.approx(-engine.evaluate([batch]).loss, rel=1e-5)


@pytest.mark.long_profile
def test_a_thousand_examples_take_the_sweeps_that_the_budget_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_model(tmp_path / "base", small_config("llama", vocab_size=len(WORDS)))
    save_tokenizer(base)
    rows = [{"prompt": f"the {WORDS[3 + i % 5]} is", "candidates": [" yes", " no"], "answer": i % 2} for i in range(1000)]
    data = tmp_path / "choices.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = open_checkpoint(base)
    batch = collate([TokenizedRow([3, 4, 8, 9], 3, 1)] * 16, pad_token_id=0)  # type: ignore[arg-type]
    forward = LogLikelihood(model)
    with Engine(model), torch.inference_mode():
        held, running = storage_bytes(forward.embed(batch)), forward.forward_bytes(batch)
    for fitting in (1, 10, 125):
        budget = fitting * held + running
        main(["evaluate", "--model", str(base), "--data", str(data), "--activation-memory", str(budget)])
        printed = capsys.readouterr().out
        assert f"1000 rows, 2000 candidates, {math.ceil(2000 / 16 / fitting)} sweep" in printed
    with Engine(model := open_checkpoint(base)) as engine:
        choices = RowReader(load_tokenizer(base), 12).read(data)
        scored = score(engine, model, [c.prompt for c in choices], [c.candidates for c in choices])
    right = sum(mine == each.answer for mine, each in zip(scored.choices(), choices, strict=True))
    assert f"accuracy {right / 1000:.1%}," in printed


def test_the_candidate_with_the_largest_mean_is_chosen_and_the_first_of_equal_ones() -> None:
    scored = Scored(((-3.0, -2.0), (-1.0, -1.0)), ((3, 1), (1, 1)), 1)
    assert scored.means == [[-1.0, -2.0], [-1.0, -1.0]]
    assert scored.choices() == (0, 0)


def test_steps_evaluations_and_the_demo_judge_candidates_alike(tmp_path: Path) -> None:
    """The candidates have one and four tokens, so that by sums the short one would always be chosen."""
    base = save_model(tmp_path / "base", small_config("llama", vocab_size=len(WORDS)))
    save_tokenizer(base)
    labels = [" yes", " no cat sat the"]
    rows = [{"prompt": f"the {word}", "candidates": labels, "answer": number % 2} for number, word in enumerate(WORDS[3:9])]
    data = tmp_path / "choices.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, tokenizer = open_checkpoint(base), load_tokenizer(base)
    choices = RowReader(tokenizer, 12).read(data)
    with Engine(model) as engine:
        task = ChoiceTask(model, choices, TaskOptions(objective="accuracy", batch_size=2, pad=0))
        [[outputs]] = engine.forwards([(batch := task.batch(choices.rows))], forward := ChoiceError(model))
        step = 1 - float(forward.loss([outputs], [batch]))
        held_out = task.evaluate(engine, choices)
        scored = score(engine, model, [row.prompt for row in choices], [row.candidates for row in choices])
    assert f"accuracy {step:.1%}, 6 rows" in done("evaluate", "--model", base, "--data", data).out
    assert held_out == {"loss": pytest.approx(1 - step), "accuracy": pytest.approx(step)}
    sums = [max((0, 1), key=values.__getitem__) for values in scored.log_likelihoods]
    assert sum(index in row.answers for row, index in zip(choices, sums, strict=True)) / 6 != pytest.approx(step), (
        "sums would give another accuracy"
    )


@pytest.mark.parametrize(
    ("prompts", "candidates"),
    [([], []), ([[]], [[[1]]]), ([[1]], [[]]), ([[1]], [[[]]]), ([[1] * 12], [[[1]]]), ([[40]], [[[1]]])],
)
def test_what_cannot_be_scored_is_refused(
    tmp_path: Path, prompts: list[list[int]], candidates: list[list[list[int]]]
) -> None:
    model = open_checkpoint(save_model(tmp_path / "base", small_config("opt")))
    with Engine(model) as engine, pytest.raises(BatchError):
        score(engine, model, prompts, candidates)


def test_a_prompt_that_is_too_long_with_a_candidate_is_named(tmp_path: Path) -> None:
    model = open_checkpoint(save_model(tmp_path / "base", small_config("llama")))
    with Engine(model) as engine:
        assert score(engine, model, [[3] * 9], [[[4], [5] * 3]]).sweeps == 1
        found = r"prompts\[1\]: found 9 tokens, 13 with the longest candidate; expected at most 12 together"
        with pytest.raises(BatchError, match=found):
            score(engine, model, [[3], [3] * 9], [[[4]], [[4], [5] * 4]])
