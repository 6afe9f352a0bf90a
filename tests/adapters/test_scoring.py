"""Scoring: candidates' log-likelihoods are Hugging Face's, and sweeps are as few as the activation budget allows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from models import CONFIGS, WORDS, save_model, save_tokenizer, small_config
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2adapters.cli import main
from zo2adapters.tasks.objectives import ChoiceError, LogLikelihood, Scored, score
from zo2adapters.tasks.row_options import RowFormat
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.rows import TokenizedRow, collate
from zo2adapters.tasks.task import ChoiceTask, TaskOptions
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2core import Engine, MeZOSGD, ZerothOrder
from zo2core.errors import BatchError, DataError
from zo2core.sweep.activations import storage_bytes

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12]]
CANDIDATES = [[[1], [2, 3]], [[4, 5, 6], [7], [8, 9]], [[1]]]


@pytest.mark.few(4)
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_log_likelihoods_are_hugging_faces(model_type: str, chunk: int | None, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config(model_type), torch.float64)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model = open_checkpoint(base, loss_chunk=chunk)
    with Engine(model) as engine:
        scored = score(engine, model, PROMPTS, CANDIDATES, batch_size=4)
    assert scored.tokens == ((1, 2), (3, 1, 2), (1,))
    for prompt, answers, found in zip(PROMPTS, CANDIDATES, scored.log_likelihoods, strict=True):
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


def test_steps_evaluations_and_the_demo_judge_candidates_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    main(["evaluate", "--model", str(base), "--data", str(data)])
    assert f"accuracy {step:.1%}, 6 rows" in capsys.readouterr().out
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


def test_a_long_candidate_of_a_file_is_told_by_its_line_and_length(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "choices.jsonl"
    path.write_text(json.dumps({"prompt": "the cat sat", "candidates": [" yes", " no no"], "answer": 0}))
    with pytest.raises(DataError, match=r"line 1: found a row of 5 tokens, with candidates.* at most 4") as info:
        RowReader(load_tokenizer(tmp_path), 4).read(path)
    assert "raise `sequence_length`" in info.value.remedy


BAD_ROWS = {
    "no candidates": {"prompt": "the cat", "answer": 0},
    "one candidate": {"prompt": "the cat", "candidates": [" yes"], "answer": 0},
    "an empty candidate": {"prompt": "the cat", "candidates": [" yes", ""], "answer": 0},
    "no prompt": {"candidates": [" yes", " no"], "answer": 0},
    "an empty prompt": {"prompt": "", "candidates": [" yes", " no"], "answer": 0},
    "no answer": {"prompt": "the cat", "candidates": [" yes", " no"]},
    "another answer": {"prompt": "the cat", "candidates": [" yes", " no"], "answer": " maybe"},
    "an answer beyond the candidates": {"prompt": "the cat", "candidates": [" yes", " no"], "answer": 2},
    "an answer before them": {"prompt": "the cat", "candidates": [" yes", " no"], "answer": -1},
    "too long": {"prompt": "the cat sat", "candidates": [" yes", " no no"], "answer": 0},
    "a candidate without a token": {"prompt": "the cat", "candidates": [" yes", " "], "answer": 0},
}


@pytest.mark.parametrize("row", BAD_ROWS.values(), ids=BAD_ROWS)
def test_rows_that_are_no_choices_are_named_by_their_line(tmp_path: Path, row: dict[str, object]) -> None:
    save_tokenizer(tmp_path)
    good = {"prompt": "the cat", "candidates": [" yes", " no"], "answer": " no"}
    path = tmp_path / "choices.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{json.dumps(row)}\n")
    with pytest.raises(DataError, match=r"choices\.jsonl, line 3"):
        RowReader(load_tokenizer(tmp_path), 4).read(path)
    path.write_text(json.dumps(good))
    [choice] = RowReader(load_tokenizer(tmp_path), 4).read(path)
    assert (choice.prompt, choice.candidates, choice.answers) == ((3, 4), ((9,), (10,)), (1,))


def test_files_without_candidates_are_no_choices(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "the cat"}\n')
    assert RowReader(load_tokenizer(tmp_path), 4).read(path).format is RowFormat.TEXT
    path.write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        RowReader(load_tokenizer(tmp_path), 4).read(path)
