"""Tasks and objectives: what steps make smaller, on the command line against a loop over a whole
model, and in an engine.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from command_lines import done, refusal, run_here, write_rows
from engines import zeroth_order
from models import (
    CONFIGS,
    WORDS,
    candidate_scores,
    make_batch,
    save_model,
    save_tokenizer,
    small_config,
)
from parity import assert_same_bits, assert_same_weights
from profiles import short_first
from transformers import AutoModelForCausalLM, AutoTokenizer

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
from zo2adapters.cli import main
from zo2adapters.tasks.objectives import CandidateScores, LogLikelihood, Scored
from zo2adapters.tasks.registry import TASKS
from zo2adapters.tasks.rows import (
    RowReader,
    TokenizedRow,
    collate,
    training_batches,
    with_completion,
)
from zo2adapters.tasks.task import KINDS, ChoiceTask, PreferenceTask, Task, TaskOptions
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2core import (
    FZOO,
    Distribution,
    Engine,
    Evaluation,
    Forward,
    Journal,
    MeZOSGD,
    MultiQueryRGE,
    PhiloxNoise,
    ZerothOrder,
    ZOEstimator,
)
from zo2core.errors import BatchError, NonFiniteLossError, OptionError
from zo2core.sweep.activations import storage_bytes

NOUNS = WORDS[3:]
COMMON = "--steps 4 --batch-size 4 --lr 2e-2 --zo-eps 5e-2 --method mezo --no-guard"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "model", small_config("llama", max_position_embeddings=32))
    save_tokenizer(tmp_path / "model")
    choices = [
        {
            "prompt": f"the {NOUNS[i % 5]}",
            "candidates": [f" {NOUNS[1]}", f" {NOUNS[2]} {NOUNS[3]}"],
            "answer": i % 3 % 2,
        }
        for i in range(12)
    ]
    pairs = [
        {"prompt": " ".join(NOUNS[i % 4 : i % 4 + 1 + i % 3]), "completion": f" {NOUNS[i % 2]}"}
        for i in range(12)
    ]
    preferences = [
        {
            "prompt": f"the {NOUNS[i % 5]}",
            "chosen": f" {NOUNS[i % 2]}",
            "rejected": f" {NOUNS[2]} {NOUNS[i % 4]}",
        }
        for i in range(12)
    ]
    for name, rows in (("choices", choices), ("pairs", pairs), ("preferences", preferences)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(
        "def calm(model, batch):\n    return model(**batch).logits.square().mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(data: str, objective: str, *more: str, output: str = "run") -> list[str]:
    told = [
        "--model",
        "model",
        "--data",
        f"{data}.jsonl",
        "--output",
        output,
        "--objective",
        objective,
    ]
    return ["train", "--method", "zeroth-order", *told, *COMMON.split(), *more]


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
    return choice_batch(
        [row.prompt for row in rows], [row.candidates for row in rows], [row.answer for row in rows]
    )


def scored(model: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return candidate_scores(model, paired(rows)), torch.tensor([row.answer for row in rows])


def wrong(model: Any, rows: Any) -> torch.Tensor:
    scores, right = scored(model, rows)
    return (scores.argmax(1) != right).double().mean()


def f1_error(model: Any, rows: Any) -> torch.Tensor:
    scores, right = scored(model, rows)
    hits, missed = (
        int(((scores.argmax(1) == 1) & (right == 1)).sum()),
        int((scores.argmax(1) != right).sum()),
    )
    return torch.tensor(missed / (2 * hits + missed) if hits + missed else 0.0, dtype=torch.float64)


def choice_loss(model: Any, rows: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(*scored(model, rows))


def own_loss(model: Any, rows: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**collate(rows, pad_token_id=0)).loss
    return loss


def loss_of_the_right_one(model: Any, rows: Any) -> torch.Tensor:
    return own_loss(
        model, [with_completion(row.prompt, row.candidates[row.answer]) for row in rows]
    )


def square(model: Any, rows: Any) -> torch.Tensor:
    value: torch.Tensor = model(**collate(rows, pad_token_id=0)).logits.square().mean()
    return value


def missed(model: Any, rows: Any) -> torch.Tensor:
    """The share of rows that Hugging Face's ``generate`` does not continue with their
    completion.
    """
    count = 0
    for row in rows:
        prompt, wanted = (
            row.input_ids[: row.prompt_length],
            list(row.input_ids[row.prompt_length :]),
        )
        options: dict[str, Any] = {
            "max_new_tokens": len(wanted),
            "do_sample": False,
            "eos_token_id": None,
        }
        ids = torch.tensor([list(prompt)])
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options
        )
        count += written[0, len(prompt) :].tolist() != wanted
    return torch.tensor(count / len(rows), dtype=torch.float64)


def dpo(beta: float) -> Number:
    """DPO's loss over a whole model, whose reference is the model of the checkpoint (arXiv
    2305.18290, equation 7).
    """
    references: list[Any] = []

    def summed(model: Any, batch: Any) -> Any:
        return candidate_scores(model, batch) * (batch["labels"][:, 1:] != -100).sum(1).view(-1, 2)

    def number(model: Any, rows: Any) -> torch.Tensor:
        if not references:
            references.append(AutoModelForCausalLM.from_pretrained("model"))
        chosen, rejected = (
            summed(model, paired(rows)) - summed(references[0], paired(rows))
        ).unbind(1)
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
    "accuracy": Claim(
        "choices",
        "accuracy",
        wrong,
        {"objective": "accuracy"},
        JUDGED,
        more=("--micro-batch-size", "4"),
    ),
    "f1": Claim("choices", "f1", f1_error, {"objective": "f1"}, JUDGED),
    "right one": Claim(
        "choices", "loss", loss_of_the_right_one, {"objective": "loss"}, {"choice_loss", "accuracy"}
    ),
    "dpo": Claim(
        "preferences", "auto", dpo(0.1), {"objective": "dpo", "beta": 0.1}, JUDGED, is_exact=False
    ),
    "beta": Claim(
        "preferences",
        "dpo",
        dpo(2.0),
        {"objective": "dpo", "beta": 2.0},
        JUDGED,
        more=("--beta", "2.0"),
        is_exact=False,
    ),
    "micro": Claim(
        "preferences",
        "dpo",
        dpo(0.1),
        {"beta": 0.1},
        JUDGED,
        is_exact=False,
        more=("--micro-batch-size", "3"),
    ),
    "exact match": Claim(
        "pairs", "exact-match", missed, {"objective": "exact-match"}, {"loss", "exact_match"}
    ),
    "function": Claim(
        "pairs", "own.py:calm", square, {"objective": "calm"}, {"loss", "model_loss"}
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_task_is_monolithic_mezo_on_its_number_also_where_it_is_gone_on_with(
    here: Path, claim: Claim
) -> None:
    more = (*claim.more, "--evaluation", f"{claim.data}.jsonl")
    train(claim.data, claim.objective, *more)
    trusted = ["--objective", claim.objective] if ".py" in claim.objective else []
    done("train", "--resume", "run", "--steps", "6", *trusted)
    journal, literal = Journal("run/journal.jsonl"), Literal(claim.number)
    for update, rows in zip(journal.updates, batches_of(claim.data), strict=False):
        step = literal.step(rows, *update.seeds)
        assert update.losses == (
            step.losses if claim.is_exact else pytest.approx(step.losses, rel=1e-6)
        )
        assert update.projected_grads == step.projected_grads or not claim.is_exact
    if claim.is_exact:
        own, exported = (
            dict(literal.model.named_parameters()),
            AutoModelForCausalLM.from_pretrained("run/model"),
        )
        for name, value in exported.named_parameters():
            assert_same_bits(name, value, own[name])
    assert (
        journal.updates
        == train(claim.data, claim.objective, *more, "--steps", "6", output="whole").updates
    )
    assert journal.header is not None
    assert claim.recorded.items() <= journal.header["provenance"].items()
    # steps 0, 4 and 6
    assert [results.keys() for results in journal.evaluations.values()] == [claim.evaluated] * 3


@pytest.mark.parametrize(
    "claim", short_first(["text", "function"], sorted({*CLAIMS} - {"text", "function"}))
)
def test_an_evaluation_of_a_task_does_not_depend_on_the_batch_size(here: Path, claim: str) -> None:
    data, objective = CLAIMS[claim].data, CLAIMS[claim].objective
    results = [
        train(
            *(data, objective, "--evaluation", f"{data}.jsonl"),
            *("--steps", "1", "--batch-size", str(size)),
            output=f"run-{size}",
        ).evaluations[0]
        for size in (1, 5)
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_dpo_is_evaluated_by_what_the_weights_have_gained_on_the_base(here: Path) -> None:
    train("preferences", "dpo", "--evaluation", "preferences.jsonl")
    metrics = [
        json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    first, *_, last = [row for row in metrics if "evaluation_loss" in row]
    assert first["evaluation_loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert first["evaluation_accuracy"] == 0.0
    rows: Any = RowReader(AutoTokenizer.from_pretrained("model"), 32).read(
        Path("preferences.jsonl")
    )
    written = [json.loads(line) for line in (here / "preferences.jsonl").read_text().splitlines()]
    for row, own in zip(rows, written, strict=True):
        texts = [" ".join(WORDS[token] for token in candidate) for candidate in row.candidates]
        assert texts == [f"{own[key].strip()} </s>" for key in ("chosen", "rejected")], (
            "the chosen one is the first"
        )
        assert row.answer == 0
    trained: Any = AutoModelForCausalLM.from_pretrained("run/model")
    with torch.inference_mode():
        assert last["evaluation_loss"] == pytest.approx(
            float(dpo(0.1)(trained, list(rows))), rel=1e-6
        )
    assert last["evaluation_accuracy"] > 0.0


@pytest.mark.few(1)
@pytest.mark.parametrize("transfer_dtype", ["float8", "bfloat16-back"])
def test_dpo_learns_with_weights_that_are_carried_in_fewer_bits(
    here: Path, transfer_dtype: str
) -> None:
    opening = ("--model", "model", "--precision", "mixed", "--transfer-dtype", f"{transfer_dtype}")
    rows = ("--data", "preferences.jsonl", "--evaluation", "preferences.jsonl")
    ended = run_here(
        "train",
        "--method",
        "zeroth-order",
        *opening,
        *rows,
        "--output",
        "run",
        "--steps",
        2,
        "--lr",
        1e-3,
    )
    assert ended.status == 0, ended.err
    metrics = [
        json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    # the reference is what the steps see of the base
    assert metrics[0]["evaluation_loss"] == math.log(2)
    assert run_here("evaluate", *opening, "--data", "pairs.jsonl").status == 0


def test_references_take_no_more_rows_at_a_time_than_steps(here: Path) -> None:
    with patch.object(
        HFBlockModel, "embed", autospec=True, side_effect=HFBlockModel.embed
    ) as embed:
        train("preferences", "dpo", "--micro-batch-size", "2", "--evaluation", "preferences.jsonl")
    batches = [call.args[1]["input_ids"] for call in embed.mock_calls]
    assert {len(ids) for ids in batches if not (ids == 1).all()} == {2}, "all but those of probes"


def test_a_resumed_run_looks_at_the_base_for_what_is_to_come_alone(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        file.writelines(
            json.dumps({**row, "prompt": f"the {word} dog"}) + "\n" for word in WORDS[2:11]
        )
    train("preferences", "dpo", "--steps", "3")
    done("train", "--resume", "run", "--steps", "20")
    assert (
        Journal("run/journal.jsonl").updates
        == train("preferences", "dpo", "--steps", "20", output="whole").updates
    )


def test_the_best_step_is_kept_also_where_it_is_asked_for_later(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("choices", "accuracy", "--evaluation", "choices.jsonl", "--evaluate-every", "1")
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    evaluations = {row["step"]: row for row in rows if "evaluation_loss" in row}
    assert evaluations.keys() == set(range(5))
    assert all(
        row["evaluation_accuracy"] == pytest.approx(1 - row["evaluation_loss"])
        for row in evaluations.values()
    )
    best = min(evaluations, key=lambda step: (evaluations[step]["evaluation_loss"], step))
    told = capsys.readouterr().err
    assert f"best of 5 evaluations: step {best}, loss" in told
    assert ("has the weights of the last step, 4" in told) == (best != 4)
    main(["train", "--resume", "run", "--keep-best"])
    main(["export", "--run", "run", "--at", str(best), "--output", "then"])
    kept, then = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in ("run/model", "then")
    )
    assert_same_weights(kept.items(), then.items())
    assert Path("run/model-4").is_dir(), "what was there before"
    main(["evaluate", "--model", "run/model", "--data", "choices.jsonl"])
    assert (
        f"accuracy {evaluations[best]['evaluation_accuracy']:.1%},"
        in capsys.readouterr().out.splitlines()[-1]
    )


def test_several_right_answers_are_right_everywhere(here: Path) -> None:
    # Some likeliest one is not first.
    orders = [[" cat", " dog", " sat"], [" sat", " cat", " dog"], [" dog", " sat", " cat"]]
    rows = [
        {"prompt": "the", "candidates": order, "answer": [0, 1, 2]}
        for order in (*orders, orders[0])
    ]
    (here / "several.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    journal = train("several", "accuracy", "--evaluation", "several.jsonl")
    assert all(update.losses == (0.0, 0.0) for update in journal.updates)
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {row["evaluation_accuracy"] for row in metrics if "evaluation_loss" in row} == {1.0}


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


def test_long_prompts_and_completions_need_not_fit_together_and_a_functions_file_may_have_classes(
    here: Path,
) -> None:
    words = " ".join(NOUNS[:5] * 5)
    rows = [
        {"prompt": words, "completion": " cat"},
        {"prompt": "the", "completion": " " + words},
    ] * 2
    (here / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(train("long", "exact-match", "--steps", "1", output="long").updates) == 1
    (here / "own.py").write_text(CLASSES)
    train("pairs", "own.py:calm")
    assert "SCALE is a Scale, not a function" in refusal(
        *command("pairs", "own.py:SCALE", output="other")
    )


def test_every_task_of_the_registry_is_a_task_and_stands_on_its_page_and_in_the_help() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    told = "".join(run_here("train", "--help-all").out.split())  # lines are wrapped at hyphens
    for entry in TASKS:
        assert issubclass(KINDS[entry.kind], Task)
        assert f"`{entry.name}`" in page
        assert entry.name in told
    assert len({(entry.name, entry.rows) for entry in TASKS}) == len(TASKS)


# Objectives as an engine takes them: they need not be the model's loss, nor come of one sweep, nor
# have a gradient


NUMBERS: dict[str, Any] = {"lr": 2e-2, "zo_eps": 5e-2}
PROMPTS = [[3, 5, 7], [9, 2], [4, 4, 8, 1], [30, 11], [6, 13, 21], [17, 5]]
CANDIDATES = [
    [[10], [11, 12]],
    [[10], [11, 12]],
    [[10], [11, 12]],
    [[10], [11, 12]],
    [[10], [11, 12]],
    [[10], [11, 12]],
]
ANSWERS = [0, 1, 1, 0, 1, 0]
CHOICES = choice_batch(PROMPTS, CANDIDATES, ANSWERS)


def test_an_evaluation_joins_the_prompts_of_all_batches(base: Path) -> None:
    model = open_checkpoint(base)
    halves = [
        choice_batch(PROMPTS[part], CANDIDATES[part], ANSWERS[part])
        for part in (slice(0, 2), slice(2, 6))
    ]
    for kind in (ChoiceLoss, ChoiceError, ChoiceF1Error):
        for rows in (None, 3):
            with Engine(model, micro_batch_size=rows) as replayer:
                whole, cut = (
                    replayer.evaluate([CHOICES], kind(model)),
                    replayer.evaluate(halves, kind(model)),
                )
            assert cut.loss == pytest.approx(whole.loss, rel=1e-6)
            assert len(cut.losses) == 2
            assert whole.losses == (whole.loss,)


def test_what_makes_no_choices_or_preferences_is_refused(base: Path) -> None:
    model = open_checkpoint(base)
    with (
        zeroth_order(model, MeZOSGD(**NUMBERS)) as engine,
        pytest.raises(BatchError, match="make it with preference_batch"),
    ):
        engine.step(CHOICES, PreferenceLoss(model))
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(OptionError, match="beta"):
            PreferenceLoss(model, beta=wrong)
    with pytest.raises(BatchError, match=r"prompts\[0\]: found 3 candidates"):
        preference_batch([[1]], [[[2], [3], [4]]], [[0.0, 0.0]])
    none: list[Any] = [
        ([], [], []),
        ([[]], [[[1], [2]]], [0]),
        ([[1]], [[[1]]], [0]),
        ([[1]], [[[1], []]], [0]),
    ]
    for choices in [*none, ([[1]], [[[1], [2]]], [2])]:
        with pytest.raises(BatchError):
            choice_batch(*choices)


ESTIMATORS: Sequence[Callable[[], ZOEstimator]] = [
    lambda: MeZOSGD(**NUMBERS),
    lambda: MultiQueryRGE(**NUMBERS, q=3),
    lambda: FZOO(lr=1e-2, zo_eps=5e-2, q=3),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("make", ESTIMATORS)
@pytest.mark.parametrize("philox", [False, True])
def test_losses_told_one_by_one_are_those_of_a_step(
    make: Callable[[], ZOEstimator], philox: bool, base: Path
) -> None:
    batch, engines = make_batch(40, [6, 4]), []
    distribution = make().distribution
    for _ in range(2):
        noise = (
            PhiloxNoise(distribution or Distribution.GAUSSIAN) if philox or distribution else None
        )
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
        for (name, own), (_, other) in zip(
            asked.parameters_now(), straight.parameters_now(), strict=True
        ):
            assert_same_bits(name, own, other)


@pytest.mark.parametrize(
    ("rows", "sizes"), [(None, [12]), (1, [2] * 6), (4, [4, 4, 4]), (5, [4, 4, 4]), (8, [8, 4])]
)
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
        with pytest.raises(OptionError, match="call ask"):
            # the step above has given up the one that was asked for
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


# Scores: candidates' log-likelihoods are Hugging Face's


SCORED_PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11, 12]]
SCORED = [[[1], [2, 3]], [[4, 5, 6], [7], [8, 9]], [[1]]]


@pytest.mark.few(4)
@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_log_likelihoods_are_hugging_faces(
    model_type: str, chunk: int | None, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", small_config(model_type), torch.float64)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model = open_checkpoint(base, loss_chunk=chunk)
    with Engine(model) as engine:
        scored = score(engine, model, SCORED_PROMPTS, SCORED, batch_size=4)
    assert scored.tokens == ((1, 2), (3, 1, 2), (1,))
    for prompt, answers, found in zip(SCORED_PROMPTS, SCORED, scored.log_likelihoods, strict=True):
        for answer, value in zip(answers, found, strict=True):
            with torch.inference_mode():
                logs = (
                    whole(input_ids=torch.tensor([prompt + answer]))
                    .logits[0]
                    .float()
                    .log_softmax(-1)
                )
            expected = sum(
                logs[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer)
            )
            assert value == pytest.approx(expected, rel=1e-5)


def test_scores_are_of_the_present_weights_and_the_first_of_the_largest_means_is_chosen(
    tmp_path: Path,
) -> None:
    base = save_model(tmp_path / "base", small_config("opt"))
    model = open_checkpoint(base)
    batch = collate([TokenizedRow((prompt := [3, 4, 5, 1]), 3, 1)], pad_token_id=0)  # type: ignore[arg-type]
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-1, zo_eps=1e-3))) as engine:
        before = score(engine, model, [prompt[:3]], [[[1]]]).log_likelihoods[0][0]
        engine.step(batch, seed=1)
        after = score(engine, model, [prompt[:3]], [[[1]]]).log_likelihoods[0][0]
        assert after != before
        assert after == pytest.approx(-engine.evaluate([batch]).loss, rel=1e-5)
    scored = Scored(((-3.0, -2.0), (-1.0, -1.0)), ((3, 1), (1, 1)), 1)
    assert scored.means == [[-1.0, -2.0], [-1.0, -1.0]]
    assert scored.choices() == (0, 0)


@pytest.mark.long_profile
def test_a_thousand_examples_take_the_sweeps_of_the_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_model(tmp_path / "base", small_config("llama", vocab_size=len(WORDS)))
    save_tokenizer(base)
    rows = [
        {"prompt": f"the {WORDS[3 + i % 5]} is", "candidates": [" yes", " no"], "answer": i % 2}
        for i in range(1000)
    ]
    data = write_rows(tmp_path / "choices.jsonl", rows)
    model = open_checkpoint(base)
    batch = collate([TokenizedRow([3, 4, 8, 9], 3, 1)] * 16, pad_token_id=0)  # type: ignore[arg-type]
    forward = LogLikelihood(model)
    with Engine(model), torch.inference_mode():
        held, running = storage_bytes(forward.embed(batch)), forward.forward_bytes(batch)
    for fitting in (1, 10, 125):
        budget = fitting * held + running
        main(
            [
                "evaluate",
                "--model",
                str(base),
                "--data",
                str(data),
                "--activation-memory",
                str(budget),
            ]
        )
        printed = capsys.readouterr().out
        assert f"1000 rows, 2000 candidates, {math.ceil(2000 / 16 / fitting)} sweep" in printed
    with Engine(model := open_checkpoint(base)) as engine:
        choices = RowReader(load_tokenizer(base), 12).read(data)
        scored = score(engine, model, [c.prompt for c in choices], [c.candidates for c in choices])
    right = sum(mine == each.answer for mine, each in zip(scored.choices(), choices, strict=True))
    assert f"accuracy {right / 1000:.1%}," in printed


def test_steps_evaluations_and_the_demo_judge_candidates_alike(tmp_path: Path) -> None:
    """The candidates have one and four tokens, so that by sums the short one would always be
    chosen.
    """
    base = save_model(tmp_path / "base", small_config("llama", vocab_size=len(WORDS)))
    save_tokenizer(base)
    labels = [" yes", " no cat sat the"]
    rows = [
        {"prompt": f"the {word}", "candidates": labels, "answer": number % 2}
        for number, word in enumerate(WORDS[3:9])
    ]
    data = write_rows(tmp_path / "choices.jsonl", rows)
    model, tokenizer = open_checkpoint(base), load_tokenizer(base)
    choices = RowReader(tokenizer, 12).read(data)
    with Engine(model) as engine:
        task = ChoiceTask(model, choices, TaskOptions(objective="accuracy", batch_size=2, pad=0))
        [[outputs]] = engine.forwards(
            [(batch := task.batch(choices.rows))], forward := ChoiceError(model)
        )
        step = 1 - float(forward.loss([outputs], [batch]))
        held_out = task.evaluate(engine, choices)
        scored = score(
            engine, model, [row.prompt for row in choices], [row.candidates for row in choices]
        )
    assert f"accuracy {step:.1%}, 6 rows" in done("evaluate", "--model", base, "--data", data).out
    assert held_out == {"loss": pytest.approx(1 - step), "accuracy": pytest.approx(step)}
    sums = [max((0, 1), key=values.__getitem__) for values in scored.log_likelihoods]
    assert sum(
        index in row.answers for row, index in zip(choices, sums, strict=True)
    ) / 6 != pytest.approx(step), "sums would give another accuracy"


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    model = open_checkpoint(save_model(tmp_path / "base", small_config("opt")))
    wrong: list[tuple[list[list[int]], list[list[list[int]]]]] = [
        ([], []),
        ([[]], [[[1]]]),
        ([[1]], [[]]),
        ([[1]], [[[]]]),
    ]
    with Engine(model) as engine:
        for prompts, candidates in [*wrong, ([[1] * 12], [[[1]]]), ([[40]], [[[1]]])]:
            with pytest.raises(BatchError):
                score(engine, model, prompts, candidates)
        assert score(engine, model, [[3] * 9], [[[4], [5] * 3]]).sweeps == 1
        found = (
            r"prompts\[1\]: found 9 tokens, 13 with the longest candidate; "
            "expected at most 12 together"
        )
        with pytest.raises(BatchError, match=found):
            score(engine, model, [[3], [3] * 9], [[[4]], [[4], [5] * 4]])
