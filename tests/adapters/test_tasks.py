"""``zo2 train --objective``: what steps make smaller, against MeZO's loop over a whole model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command_lines import done, refusal, run_here
from models import WORDS, candidate_scores, save_model, save_tokenizer, small_config
from parity import assert_same_bits, assert_same_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from zo2adapters import HFBlockModel, MonolithicMeZO
from zo2adapters.cli import main
from zo2adapters.tasks.registry import TASKS
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.rows import choice_batch, collate, training_batches, with_completion
from zo2adapters.tasks.task import KINDS, PreferenceTask, Task
from zo2core import Journal

NOUNS = WORDS[3:]
COMMON = "--steps 4 --batch-size 4 --lr 2e-2 --zo-eps 5e-2 --estimator mezo:exact --no-guard"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "model", small_config("llama", max_position_embeddings=32))
    save_tokenizer(tmp_path / "model")
    choices = [
        {"prompt": f"the {NOUNS[i % 5]}", "candidates": [f" {NOUNS[1]}", f" {NOUNS[2]} {NOUNS[3]}"], "answer": i % 3 % 2}
        for i in range(12)
    ]
    pairs = [{"prompt": " ".join(NOUNS[i % 4 : i % 4 + 1 + i % 3]), "completion": f" {NOUNS[i % 2]}"} for i in range(12)]
    preferences = [
        {"prompt": f"the {NOUNS[i % 5]}", "chosen": f" {NOUNS[i % 2]}", "rejected": f" {NOUNS[2]} {NOUNS[i % 4]}"}
        for i in range(12)
    ]
    for name, rows in (("choices", choices), ("pairs", pairs), ("preferences", preferences)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text("def calm(model, batch):\n    return model(**batch).logits.square().mean()\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(data: str, objective: str, *more: str, output: str = "run") -> list[str]:
    told = ["--model", "model", "--data", f"{data}.jsonl", "--output", output, "--objective", objective]
    return ["train", *told, *COMMON.split(), *more]


def train(data: str, objective: str, *more: str, output: str = "run") -> Journal:
    main(command(data, objective, *more, output=output))
    return Journal(f"{output}/journal.jsonl")


Number = Callable[[Any, Any], torch.Tensor]  # of a model and the rows of a step


class Literal(MonolithicMeZO):
    """MeZO's loop with a number of its own."""

    def __init__(self, number: Number) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained("model")
        model.config.use_cache = False
        super().__init__(model, lr=2e-2, zo_eps=5e-2)
        self.number = number

    @torch.inference_mode()
    def loss(self, batch: Any) -> torch.Tensor:
        return self.number(self.model, batch)


def batches_of(data: str) -> Iterator[Any]:
    rows: Any = RowReader(AutoTokenizer.from_pretrained("model"), 32).read(Path(f"{data}.jsonl"))
    return training_batches(rows, batch_size=4, seed=0)


def paired(rows: Any) -> Any:
    return choice_batch([row.prompt for row in rows], [row.candidates for row in rows], [row.answer for row in rows])


def scored(model: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return candidate_scores(model, paired(rows)), torch.tensor([row.answer for row in rows])


def wrong(model: Any, rows: Any) -> torch.Tensor:
    scores, right = scored(model, rows)
    return (scores.argmax(1) != right).double().mean()


def f1_error(model: Any, rows: Any) -> torch.Tensor:
    scores, right = scored(model, rows)
    hits, missed = int(((scores.argmax(1) == 1) & (right == 1)).sum()), int((scores.argmax(1) != right).sum())
    return torch.tensor(missed / (2 * hits + missed) if hits + missed else 0.0, dtype=torch.float64)


def choice_loss(model: Any, rows: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(*scored(model, rows))


def own_loss(model: Any, rows: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**collate(rows, pad_token_id=0)).loss
    return loss


def loss_of_the_right_one(model: Any, rows: Any) -> torch.Tensor:
    return own_loss(model, [with_completion(row.prompt, row.candidates[row.answer]) for row in rows])


def square(model: Any, rows: Any) -> torch.Tensor:
    value: torch.Tensor = model(**collate(rows, pad_token_id=0)).logits.square().mean()
    return value


def missed(model: Any, rows: Any) -> torch.Tensor:
    """The share of rows that Hugging Face's ``generate`` does not continue with their completion."""
    count = 0
    for row in rows:
        prompt, wanted = row.input_ids[: row.prompt_length], list(row.input_ids[row.prompt_length :])
        options: dict[str, Any] = {"max_new_tokens": len(wanted), "do_sample": False, "eos_token_id": None}
        ids = torch.tensor([list(prompt)])
        written = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        count += written[0, len(prompt) :].tolist() != wanted
    return torch.tensor(count / len(rows), dtype=torch.float64)


def dpo(beta: float) -> Number:
    """DPO's loss over a whole model, whose reference is the model of the checkpoint (arXiv 2305.18290, equation 7)."""
    references: list[Any] = []

    def summed(model: Any, batch: Any) -> Any:
        return candidate_scores(model, batch) * (batch["labels"][:, 1:] != -100).sum(1).view(-1, 2)

    def number(model: Any, rows: Any) -> torch.Tensor:
        if not references:
            references.append(AutoModelForCausalLM.from_pretrained("model"))
        chosen, rejected = (summed(model, paired(rows)) - summed(references[0], paired(rows))).unbind(1)
        loss: torch.Tensor = -torch.nn.functional.logsigmoid(beta * (chosen - rejected)).mean()
        return loss

    return number


class Claim(NamedTuple):
    """What a task promises."""

    data: str
    objective: str
    number: Number
    recorded: dict[str, Any]  # in the provenance
    evaluated: set[str]
    is_exact: bool = True  # whether losses are the oracle's to the last bit
    more: tuple[str, ...] = ()


JUDGED = {"loss", "accuracy"}
CLAIMS = {
    "text": Claim("pairs", "auto", own_loss, {}, {"loss"}),
    "choices": Claim("choices", "auto", choice_loss, {}, JUDGED, is_exact=False),
    "accuracy": Claim("choices", "accuracy", wrong, {"objective": "accuracy"}, JUDGED, more=("--micro-batch-size", "4")),
    "f1": Claim("choices", "f1", f1_error, {"objective": "f1"}, JUDGED),
    "right one": Claim("choices", "loss", loss_of_the_right_one, {"objective": "loss"}, {"choice_loss", "accuracy"}),
    "dpo": Claim("preferences", "auto", dpo(0.1), {"objective": "dpo", "beta": 0.1}, JUDGED, is_exact=False),
    "beta": Claim("preferences", "dpo:beta=2.0", dpo(2.0), {"objective": "dpo", "beta": 2.0}, JUDGED, is_exact=False),
    "micro": Claim("preferences", "dpo", dpo(0.1), {"beta": 0.1}, JUDGED, is_exact=False, more=("--micro-batch-size", "3")),
    "exact match": Claim("pairs", "exact-match", missed, {"objective": "exact-match"}, {"loss", "exact_match"}),
    "function": Claim("pairs", "own.py:calm", square, {"objective": "calm"}, {"loss", "model_loss"}),
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_task_is_monolithic_mezo_on_its_number_also_where_it_is_gone_on_with(here: Path, claim: Claim) -> None:
    more = (*claim.more, "--evaluation", f"{claim.data}.jsonl")
    train(claim.data, claim.objective, *more)
    trusted = ["--objective", claim.objective] if ".py" in claim.objective else []
    done("train", "--resume", "run", "--steps", "6", *trusted)
    journal, literal = Journal("run/journal.jsonl"), Literal(claim.number)
    for update, rows in zip(journal.updates, batches_of(claim.data), strict=False):
        step = literal.step(rows, *update.seeds)
        assert update.losses == (step.losses if claim.is_exact else pytest.approx(step.losses, rel=1e-6))
        assert update.projected_grads == step.projected_grads or not claim.is_exact
    if claim.is_exact:
        own, exported = dict(literal.model.named_parameters()), AutoModelForCausalLM.from_pretrained("run/model")
        for name, value in exported.named_parameters():
            assert_same_bits(name, value, own[name])
    assert journal.updates == train(claim.data, claim.objective, *more, "--steps", "6", output="whole").updates
    assert journal.header is not None
    assert claim.recorded.items() <= journal.header["provenance"].items()
    assert [results.keys() for results in journal.evaluations.values()] == [claim.evaluated] * 3  # steps 0, 4 and 6


def test_dpo_is_evaluated_by_what_the_weights_have_gained_on_the_base(here: Path) -> None:
    train("preferences", "dpo", "--evaluation", "preferences.jsonl")
    metrics = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [row for row in metrics if "evaluation_loss" in row]
    assert first["evaluation_loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert first["evaluation_accuracy"] == 0.0
    rows: Any = RowReader(AutoTokenizer.from_pretrained("model"), 32).read(Path("preferences.jsonl"))
    trained: Any = AutoModelForCausalLM.from_pretrained("run/model")
    with torch.inference_mode():
        assert last["evaluation_loss"] == pytest.approx(float(dpo(0.1)(trained, list(rows))), rel=1e-6)
    assert last["evaluation_accuracy"] > 0.0


@pytest.mark.few(1)
@pytest.mark.parametrize("transfer_dtype", ["float8", "bfloat16-back"])
def test_dpo_learns_with_weights_that_are_carried_in_fewer_bits(here: Path, transfer_dtype: str) -> None:
    opening = ("--model", "model", "--precision", f"mixed:transfer={transfer_dtype}")
    rows = ("--data", "preferences.jsonl", "--evaluation", "preferences.jsonl")
    ended = run_here("train", *opening, *rows, "--output", "run", "--steps", 2, "--lr", 1e-3)
    assert ended.status == 0, ended.err
    metrics = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["evaluation_loss"] == math.log(2)  # the reference is what the steps see of the base
    assert run_here("evaluate", *opening, "--data", "pairs.jsonl").status == 0


def test_references_take_no_more_rows_at_a_time_than_steps(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    embed = HFBlockModel.embed

    def counted(model: HFBlockModel, batch: Any) -> Any:
        rows.append(len(batch["input_ids"]))
        return embed(model, batch)

    monkeypatch.setattr(HFBlockModel, "embed", counted)
    train("preferences", "dpo", "--micro-batch-size", "2", "--evaluation", "preferences.jsonl")
    assert set(rows) == {2}


def test_a_resumed_run_looks_at_the_base_for_what_is_to_come_alone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train("preferences", "dpo")
    looked: list[int] = []
    prepare = PreferenceTask.prepare

    def noted(task: PreferenceTask, open_base: Any, rows_to_come: Any) -> None:
        rows = rows_to_come()
        looked.append(len(rows))
        prepare(task, open_base, lambda: rows)

    monkeypatch.setattr(PreferenceTask, "prepare", noted)
    done("train", "--resume", "run", "--steps", "5")
    assert looked == [4]
    lines = (here / "preferences.jsonl").read_text()
    (here / "preferences.jsonl").write_text(lines + lines.splitlines()[0] + "\n")
    assert refusal("train", "--resume", "run", "--steps", 6)
    assert looked == [4]
    (here / "preferences.jsonl").write_text(lines)
    assert "at least 5" in refusal("train", "--resume", "run", "--steps", 2)


def test_a_run_resumed_within_an_epoch_has_the_references_of_all_rows_to_come(here: Path) -> None:
    row = {"prompt": "the dog", "chosen": " ran", "rejected": " sat"}
    with (here / "preferences.jsonl").open("a") as file:
        file.writelines(json.dumps({**row, "prompt": f"the {word} dog"}) + "\n" for word in WORDS[2:11])
    train("preferences", "dpo", "--steps", "3")
    done("train", "--resume", "run", "--steps", "20")
    assert Journal("run/journal.jsonl").updates == train("preferences", "dpo", "--steps", "20", output="whole").updates


def test_the_chosen_completion_is_the_first_one_and_ends(here: Path) -> None:
    rows: Any = RowReader(AutoTokenizer.from_pretrained("model"), 32).read(Path("preferences.jsonl"))
    written = [json.loads(line) for line in (here / "preferences.jsonl").read_text().splitlines()]
    for row, own in zip(rows, written, strict=True):
        texts = [" ".join(WORDS[token] for token in candidate) for candidate in row.candidates]
        assert texts == [f"{own[key].strip()} </s>" for key in ("chosen", "rejected")]
        assert row.answer == 0


def test_the_best_step_is_kept_also_where_it_is_asked_for_later(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("choices", "accuracy", "--evaluation", "choices.jsonl", "--evaluate-every", "1")
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    evaluations = {row["step"]: row for row in rows if "evaluation_loss" in row}
    assert evaluations.keys() == set(range(5))
    assert all(row["evaluation_accuracy"] == pytest.approx(1 - row["evaluation_loss"]) for row in evaluations.values())
    best = min(evaluations, key=lambda step: (evaluations[step]["evaluation_loss"], step))
    assert f"best of 5 evaluations: step {best}, loss" in capsys.readouterr().err
    main(["train", "--resume", "run", "--keep-best"])
    main(["export", "--run", "run", "--at", str(best), "--output", "then"])
    kept, then = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in ("run/model", "then"))
    assert_same_weights(kept.items(), then.items())
    assert Path("run/model-4").is_dir(), "what was there before"
    main(["evaluate", "--model", "run/model", "--data", "choices.jsonl"])
    assert f"accuracy {evaluations[best]['evaluation_accuracy']:.1%}," in capsys.readouterr().out.splitlines()[-1]


def test_several_right_answers_are_right_everywhere(here: Path) -> None:
    orders = [
        [" cat", " dog", " sat"],
        [" sat", " cat", " dog"],
        [" dog", " sat", " cat"],
    ]  # some likeliest one is not first
    rows = [{"prompt": "the", "candidates": order, "answer": [0, 1, 2]} for order in (*orders, orders[0])]
    (here / "several.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    journal = train("several", "accuracy", "--evaluation", "several.jsonl")
    assert all(update.losses == (0.0, 0.0) for update in journal.updates)
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {row["evaluation_accuracy"] for row in metrics if "evaluation_loss" in row} == {1.0}


def test_long_prompts_and_long_completions_need_not_fit_together(here: Path) -> None:
    words = " ".join(NOUNS[:5] * 5)
    rows = [{"prompt": words, "completion": " cat"}, {"prompt": "the", "completion": " " + words}] * 2
    (here / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(train("long", "exact-match", "--steps", "1").updates) == 1


CLASSES = """
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Scale:
    by: float = 1.0
SCALE = Scale()
def calm(model, batch):
    return SCALE.by * model(**batch).loss
"""


def test_a_functions_file_may_have_classes_of_its_own(here: Path) -> None:
    (here / "own.py").write_text(CLASSES)
    train("pairs", "own.py:calm")
    assert "SCALE is a Scale, not a function" in refusal(*command("pairs", "own.py:SCALE", output="other"))


def test_every_task_of_the_registry_is_a_task_and_stands_on_its_page_and_in_the_help() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    told = "".join(run_here("train", "--help-all").out.split())  # lines are wrapped at hyphens
    for entry in TASKS:
        assert issubclass(KINDS[entry.kind], Task)
        assert f"`{entry.name}`" in page
        assert entry.name in told
    assert len({(entry.name, entry.rows) for entry in TASKS}) == len(TASKS)
