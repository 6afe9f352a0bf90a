"""``zo2 train --objective``: what steps make smaller, against MeZO's loop over a whole model."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import refusal, run_here
from models import WORDS, candidate_scores, save_model, save_tokenizer, small_config
from parity import assert_same_bits, assert_same_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from zo2adapters import HFBlockModel, MonolithicMeZO
from zo2adapters.cli import main
from zo2adapters.tasks.batches import choice_batch, collate, training_batches
from zo2adapters.tasks.registry import TASKS
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.rows import TokenizedRow
from zo2adapters.tasks.task import PreferenceTask, Task
from zo2core import Journal

NOUNS = WORDS[3:]


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
    common = [
        "--steps",
        "4",
        "--batch-size",
        "4",
        "--lr",
        "2e-2",
        "--zo-eps",
        "5e-2",
        "--estimator",
        "mezo:exact",
        "--no-guard",
    ]
    told = ["--model", "model", "--data", f"{data}.jsonl", "--output", output, "--objective", objective]
    return ["train", *told, *common, *more]


def train(data: str, objective: str, *more: str, output: str = "run") -> Journal:
    main(command(data, objective, *more, output=output))
    return Journal(f"{output}/journal.jsonl")


class Literal(MonolithicMeZO):
    """MeZO's loop with a number of its own."""

    def __init__(self, number: Callable[[Any, Any], torch.Tensor]) -> None:
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


def answers(batch: Any) -> torch.Tensor:
    right: torch.Tensor = batch["is_answer"].view(-1, 2).argmax(1)
    return right


def wrong(model: Any, batch: Any) -> torch.Tensor:
    return (candidate_scores(model, batch).argmax(1) != answers(batch)).double().mean()


def f1_error(model: Any, batch: Any) -> torch.Tensor:
    chosen, right = candidate_scores(model, batch).argmax(1) == 1, answers(batch) == 1
    hits, missed = int((chosen & right).sum()), int((chosen != right).sum())
    return torch.tensor(missed / (2 * hits + missed) if hits + missed else 0.0, dtype=torch.float64)


def choice_loss(model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(candidate_scores(model, batch), answers(batch))


@pytest.mark.few(2)
@pytest.mark.parametrize(("objective", "number"), [("auto", choice_loss), ("accuracy", wrong), ("f1", f1_error)])
def test_objectives_of_choices_are_monolithic_mezos(here: Path, objective: str, number: Any) -> None:
    journal, literal = train("choices", objective), Literal(number)
    for update, rows in zip(journal.updates, batches_of("choices"), strict=False):
        given = [row.candidates for row in rows]
        batch = choice_batch([row.prompt for row in rows], given, [row.answer for row in rows])
        step = literal.step(batch, *update.seeds)
        assert update.losses == pytest.approx(step.losses, rel=1e-6)
        if objective != "auto":
            assert update.projected_grads == step.projected_grads
    assert len(journal.updates) == 4


def dpo(beta: float) -> Callable[[Any, Any], torch.Tensor]:
    """DPO's loss over a whole model, whose reference is the model of the checkpoint (arXiv 2305.18290, equation 7)."""
    reference: Any = AutoModelForCausalLM.from_pretrained("model")

    def summed(model: Any, batch: Any) -> Any:
        return candidate_scores(model, batch) * (batch["labels"][:, 1:] != -100).sum(1).view(-1, 2)

    def number(model: Any, batch: Any) -> torch.Tensor:
        chosen, rejected = (summed(model, batch) - summed(reference, batch)).unbind(1)
        loss: torch.Tensor = -torch.nn.functional.logsigmoid(beta * (chosen - rejected)).mean()
        return loss

    return number


def paired(rows: Any) -> Any:
    return choice_batch([row.prompt for row in rows], [row.candidates for row in rows], [0] * len(rows))


@pytest.mark.few(1)
@pytest.mark.parametrize("more", [(), ("--objective", "dpo:beta=2.0"), ("--micro-batch-size", "3")], ids=str)
def test_dpo_is_mezo_against_the_base_also_where_it_is_gone_on_with(here: Path, more: tuple[str, ...]) -> None:
    journal, literal = train("preferences", "auto", *more), Literal(dpo(2.0 if "dpo:beta=2.0" in more else 0.1))
    for update, rows in zip(journal.updates, batches_of("preferences"), strict=False):
        step = literal.step(paired(rows), *update.seeds)
        assert update.losses == pytest.approx(step.losses, rel=1e-6)
    main(["train", "--resume", "run", "--steps", "6"])
    updates = Journal("run/journal.jsonl").updates
    assert list(updates[:4]) == list(journal.updates)
    rows = list(itertools.islice(batches_of("preferences"), 6))
    assert updates[4].losses == pytest.approx(literal.step(paired(rows[4]), *updates[4].seeds).losses, rel=1e-6)
    assert train("preferences", "dpo", *more, "--steps", "6", output="whole").updates == updates


def test_dpo_is_evaluated_by_what_the_weights_have_gained_on_the_base(here: Path) -> None:
    train("preferences", "dpo", "--evaluation", "preferences.jsonl")
    metrics = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [row for row in metrics if "evaluation_loss" in row]
    assert first["evaluation_loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert first["evaluation_accuracy"] == 0.0
    rows: Any = RowReader(AutoTokenizer.from_pretrained("model"), 32).read(Path("preferences.jsonl"))
    trained: Any = AutoModelForCausalLM.from_pretrained("run/model")
    with torch.inference_mode():
        assert last["evaluation_loss"] == pytest.approx(float(dpo(0.1)(trained, paired(list(rows)))), rel=1e-6)
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
    main(["train", "--resume", "run", "--steps", "5"])
    assert looked == [4]
    assert "at least 5" in refusal("train", "--resume", "run", "--steps", 2)
    lines = (here / "preferences.jsonl").read_text()
    (here / "preferences.jsonl").write_text(lines + lines.splitlines()[0] + "\n")
    assert refusal("train", "--resume", "run", "--steps", 6)
    assert looked == [4]


def test_a_run_resumed_within_an_epoch_has_the_references_of_all_rows_to_come(here: Path) -> None:
    row = {"prompt": "the dog", "chosen": " ran", "rejected": " sat"}
    with (here / "preferences.jsonl").open("a") as file:
        file.writelines(json.dumps({**row, "prompt": f"the {word} dog"}) + "\n" for word in WORDS[2:11])
    train("preferences", "dpo", "--steps", "3")
    main(["train", "--resume", "run", "--steps", "20"])
    assert Journal("run/journal.jsonl").updates == train("preferences", "dpo", "--steps", "20", output="whole").updates


def test_the_chosen_completion_is_the_first_one_and_ends(here: Path) -> None:
    rows: Any = RowReader(AutoTokenizer.from_pretrained("model"), 32).read(Path("preferences.jsonl"))
    written = [json.loads(line) for line in (here / "preferences.jsonl").read_text().splitlines()]
    for row, own in zip(rows, written, strict=True):
        texts = [" ".join(WORDS[token] for token in candidate) for candidate in row.candidates]
        assert texts == [f"{own[key].strip()} </s>" for key in ("chosen", "rejected")]
        assert row.answer == 0


def test_what_dpo_depends_on_is_in_the_journal(here: Path) -> None:
    told = train("preferences", "auto").header
    assert told is not None
    assert (told["provenance"]["objective"], told["provenance"]["beta"]) == ("dpo", 0.1)


def test_preferences_are_evaluated_by_their_run_alone(here: Path) -> None:
    assert "zo2 train as --evaluation" in refusal("evaluate", "--model", "model", "--data", "preferences.jsonl")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--data", "pairs.jsonl", "--objective", "dpo"), "rows with prompt, chosen and rejected"),
        (
            ("--data", "pairs.jsonl", "--objective", "beta=0.5"),
            "beta of --objective: found the objective loss; expected the objective dpo",
        ),
        (("--data", "preferences.jsonl", "--objective", "beta=0"), "beta of --objective: found 0.0"),
        (("--data", "preferences.jsonl", "--objective", "exact-match"), "rows with prompt, chosen and rejected"),
        (
            ("--data", "preferences.jsonl", "--rank", "2", "--per-row"),
            "--per-row: found the objective dpo; expected the objective loss",
        ),
        (("--data", "choices.jsonl", "--rank", "2", "--per-row"), "--per-row: found the objective choice-loss"),
        (("--data", "choices.jsonl", "--evaluation", "preferences.jsonl"), "rows with the fields of the training rows"),
    ],
    ids=str,
)
def test_what_dpo_cannot_heed_is_refused(here: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in refusal("train", "--model", "model", "--output", "run", "--steps", 1, *arguments)
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "the cat", "chosen": " sat"}, "'prompt', 'chosen' and 'rejected'"),
        ({"prompt": "the cat", "chosen": " sat", "rejected": [{"role": "user", "content": "x"}]}, "all texts or all lists"),
        (
            {"prompt": "the cat", "chosen": " sat", "rejected": " sat" * 40},
            "a row of 43 tokens, with candidates, preferences or answers, which cannot be cut; expected at most 32",
        ),
        ({"prompt": "", "chosen": " sat", "rejected": " ran"}, "at least 1 token of each"),
        ({"prompt": "the cat", "chosen": "", "rejected": " ran"}, "text to learn from"),
    ],
    ids=str,
)
def test_a_row_that_is_no_preference_is_refused_by_its_line(here: Path, row: Any, said: str) -> None:
    good = {"prompt": "the cat", "chosen": " sat", "rejected": " ran"}
    (here / "bad.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    line = refusal("train", "--model", "model", "--data", "bad.jsonl", "--output", "run", "--steps", 1)
    assert "bad.jsonl, line 2" in line
    assert said in line
    assert not (here / "run").exists()


def test_exact_match_is_mezo_over_generated_text(here: Path) -> None:
    """The oracle is Hugging Face's ``generate``; its weights are the run's to the last bit."""
    journal = train("pairs", "exact-match")

    def missed(model: Any, rows: Any) -> torch.Tensor:
        count = 0
        for row in rows:
            prompt, wanted = row.input_ids[: row.prompt_length], list(row.input_ids[row.prompt_length :])
            options: dict[str, Any] = {"max_new_tokens": len(wanted), "do_sample": False, "eos_token_id": None}
            ids = torch.tensor([list(prompt)])
            written = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
            count += written[0, len(prompt) :].tolist() != wanted
        return torch.tensor(count / len(rows), dtype=torch.float64)

    literal = Literal(missed)
    for update, rows in zip(journal.updates, batches_of("pairs"), strict=False):
        assert update.losses == literal.step(rows, *update.seeds).losses
    own = dict(literal.model.named_parameters())
    exported = AutoModelForCausalLM.from_pretrained("run/model")
    for name, value in exported.named_parameters():
        assert_same_bits(name, value, own[name])


def test_a_function_of_ones_own_is_monolithic_mezo(here: Path) -> None:
    from zo2adapters.tasks.batches import collate

    journal = train("pairs", "own.py:calm")
    literal = Literal(lambda model, batch: model(**batch).logits.square().mean())
    for update, rows in zip(journal.updates, batches_of("pairs"), strict=False):
        assert update.losses == literal.step(collate(rows, pad_token_id=0), *update.seeds).losses
    assert journal.header is not None
    assert journal.header["provenance"]["objective"] == "calm"
    resumed = ["train", "--resume", "run", "--objective", "own.py:calm", "--steps"]
    main([*resumed, "5"])
    (here / "own.py").write_text("def calm(model, batch):\n    return model(**batch).logits.abs().mean()\n")
    with pytest.raises(SystemExit):
        main([*resumed, "6"])
    assert len(Journal("run/journal.jsonl").updates) == 5


def test_evaluations_say_what_the_rows_are_about_and_the_best_is_kept(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--evaluation", "choices.jsonl", "--evaluate-every", "1", "--keep-best"]
    journal = train("choices", "accuracy", *more)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    evaluations = {row["step"]: row for row in rows if "evaluation_loss" in row}
    assert evaluations.keys() == set(range(5))
    assert all(row["evaluation_accuracy"] == pytest.approx(1 - row["evaluation_loss"]) for row in evaluations.values())
    best = min(evaluations, key=lambda step: (evaluations[step]["evaluation_loss"], step))
    assert f"best of 5 evaluations: step {best}, loss" in capsys.readouterr().err
    main(["export", "--run", "run", "--at", str(best), "--output", "then"])
    kept, then = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in ("run/model", "then"))
    assert_same_weights(kept.items(), then.items())
    main(["evaluate", "--model", "run/model", "--data", "choices.jsonl"])
    said = capsys.readouterr().out.splitlines()[-1]
    assert f"accuracy {evaluations[best]['evaluation_accuracy']:.1%}," in said
    assert len(journal.updates) == 4


def test_the_models_own_loss_of_rows_with_candidates_is_that_of_the_right_one(here: Path) -> None:
    """Each step's first loss is that of the whole model, perturbed, on the prompts with their right candidates alone."""
    journal = train("choices", "loss", "--evaluation", "choices.jsonl")
    assert journal.header is not None
    assert journal.header["provenance"]["objective"] == "loss"
    assert "accuracy" in journal.evaluations[0]
    tokenizer = AutoTokenizer.from_pretrained("model")
    rows = [json.loads(line) for line in Path("choices.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    reference = MonolithicMeZO(model, lr=2e-2, zo_eps=5e-2)
    for update, order in zip(journal.updates, training_batches(range(12), batch_size=4, seed=0), strict=False):
        ids = [tokenizer(rows[i]["prompt"])["input_ids"] for i in order]
        answers = [tokenizer(rows[i]["candidates"][rows[i]["answer"]])["input_ids"] for i in order]
        tokenized = [
            TokenizedRow(array("i", [*prompt, *answer]), len(prompt), 0) for prompt, answer in zip(ids, answers, strict=True)
        ]
        assert update.losses == reference.step(collate(tokenized, pad_token_id=0), *update.seeds).losses


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("choices", "exact-match"), "found exact-match for rows with prompt, candidates"),
    (("pairs", "accuracy"), "found accuracy for rows with text, or prompt and completion"),
    (("pairs", "f2"), "found 'f2'; expected one of auto, loss, choice-loss"),
    (("pairs", "own.py:gone"), "found own.py:gone, which cannot be imported (AttributeError"),
    (("pairs", "gone.py:calm"), "which cannot be imported (FileNotFoundError"),
    (("pairs", "own.py:logits"), "--objective: found shape [4,"),
    (("choices", "accuracy", "--keep-best"), "--keep-best: found True; expected --evaluation"),
    (("choices", "accuracy", "--evaluation", "pairs.jsonl"), "--evaluation: found rows with text"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED, ids=str)
def test_what_does_not_fit_is_one_line(here: Path, arguments: tuple[str, ...], said: str) -> None:
    with (here / "own.py").open("a") as file:
        file.write("def logits(model, batch):\n    return model(**batch).logits\n")
    assert said in refusal(*command(*arguments))
    assert not Path("run").exists()


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


def test_the_best_step_can_be_asked_for_later(here: Path) -> None:
    train("choices", "f1", "--evaluation", "choices.jsonl", "--evaluate-every", "1")
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["evaluation_loss"] for row in metrics if "evaluation_loss" in row}
    best = min(losses, key=lambda step: (losses[step], step))
    main(["train", "--resume", "run", "--keep-best"])
    main(["export", "--run", "run", "--at", str(best), "--output", "then"])
    kept, then = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in ("run/model", "then"))
    assert_same_weights(kept.items(), then.items())
    assert Path("run/model-4").is_dir(), "what was there before"


def test_long_prompts_and_long_completions_need_not_fit_together(here: Path) -> None:
    words = " ".join(NOUNS[:5] * 5)
    rows = [{"prompt": words, "completion": " cat"}, {"prompt": "the", "completion": " " + words}] * 2
    (here / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(train("long", "exact-match").updates) == 4


def test_a_functions_file_may_have_classes_of_its_own(here: Path) -> None:
    lines = [
        "from __future__ import annotations",
        "from dataclasses import dataclass",
        "@dataclass",
        "class Scale:",
        "    by: float = 1.0",
        "SCALE = Scale()",
        "def calm(model, batch):",
        "    return SCALE.by * model(**batch).loss",
    ]
    (here / "own.py").write_text("\n".join(lines))
    train("pairs", "own.py:calm")
    assert "SCALE is a Scale, not a function" in refusal(*command("pairs", "own.py:SCALE", output="other"))


def test_every_task_of_the_registry_is_a_task_and_stands_on_its_page_and_in_the_help() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    told = "".join(run_here("train", "--help-all").out.split())  # lines are wrapped at hyphens
    for entry in TASKS:
        loaded: Any = entry.load()
        assert Task in loaded.__mro__
        assert f"`{entry.name}`" in page
        assert entry.name in told
    assert len({(entry.name, entry.rows) for entry in TASKS}) == len(TASKS)


def test_names_of_tasks_are_read_without_transformers() -> None:
    code = "import sys; sys.modules['transformers'] = None; import zo2adapters.tasks.registry, zo2adapters.trainers.options"
    subprocess.run([sys.executable, "-c", code], check=True)
