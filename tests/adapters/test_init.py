"""``zo2 init``: a recipe for a model and its data, with reasons, that runs with nothing else."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import yaml
from command_lines import done, make_place, refusal, write_rows
from models import WORDS

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.commands.options import option_names
from zo2adapters.commands.train import Train
from zo2adapters.tasks.row_options import RowOptions, Survey, survey
from zo2adapters.trainers.initial_recipe import InitialRecipe
from zo2adapters.trainers.probes import hands_over_tensors
from zo2adapters.trainers.run_inputs import RunInputs
from zo2adapters.trainers.run_plan import RunPlan, plan_of
from zo2core.errors import DataError, MemoryBudgetError
from zo2core.planning.memory import HostPlan, plan_host

peft: Any = pytest.importorskip("peft")

CHAT = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
ROWS = 30
MOODS = [("the cat", "yes"), ("the dog", "no")]
PAIRS = [
    {"prompt": f"the cat {word}", "completion": f" {other} {word}"}
    for word in WORDS[4:9]
    for other in WORDS[5:]
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base that has a chat template, and files of rows."""
    folder = make_place(tmp_path_factory.mktemp("init"))
    settings = folder / "base" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": CHAT}))
    write_rows(folder / "pairs.jsonl", PAIRS)
    write_rows(folder / "few.jsonl", PAIRS[:4])
    with (folder / "labels.csv").open("w", newline="") as file:
        written = csv.writer(file)
        written.writerows([("prompt", "completion"), *(MOODS[i % 2] for i in range(ROWS))])
    with (folder / "moods.csv").open("w", newline="") as file:
        written = csv.writer(file)
        written.writerows(
            [("id", "tweet", "mood"), *((f"{i}", *MOODS[i % 2]) for i in range(ROWS))]
        )
    write_rows(
        folder / "texts.jsonl",
        [{"text": f"the cat {WORDS[5 + i % 6]} the dog"} for i in range(ROWS)],
    )
    chat = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    write_rows(folder / "chat.jsonl", [{"messages": chat}] * ROWS)
    alpaca = [
        {"instruction": f"the {WORDS[5 + i % 6]}", "output": f"cat {i % 7} {WORDS[5 + i % 5]}"}
        for i in range(ROWS)
    ]
    write_rows(folder / "alpaca.json", alpaca)
    preferred = [{"prompt": "the cat", "chosen": " sat", "rejected": " ran"}] * ROWS
    write_rows(folder / "preferred.jsonl", preferred)
    return folder


def written(data: str, *more: object) -> dict[str, Any]:
    """The recipe for a file, which has been written."""
    Path("recipe.yaml").unlink(missing_ok=True)
    done("init", "--model", "base", "--data", data, *more)
    values: dict[str, Any] = yaml.safe_load(Path("recipe.yaml").read_text())
    return values


def reasons() -> str:
    """The recipe, each of its comments on one line."""
    return Path("recipe.yaml").read_text().replace("\n# ", " ")


CASES: list[tuple[str, dict[str, object], str]] = [
    ("pairs.jsonl", {"samples": 2}, "prompts with completions"),
    ("labels.csv", {"label_column": "completion", "objective": "loss"}, "2 labels: 'no', 'yes'"),
    (
        "moods.csv",
        {"label_column": "mood", "prompt_template": "{tweet}\\nMood:", "objective": "loss"},
        "2 labels",
    ),
    ("texts.jsonl", {}, "texts, of which every token is learned"),
    ("chat.jsonl", {}, "conversations, of which the assistant's answers are learned"),
    (
        "alpaca.json",
        {"prompt_column": "instruction", "completion_column": "output"},
        "prompts with completions",
    ),
    ("preferred.jsonl", {}, "prompts with a chosen and a rejected completion"),
]


GIVEN_RATE = ("--lr", 1e-3)  # so that no trials choose one


@pytest.mark.few(1)
@pytest.mark.parametrize(("data", "expected", "kind"), CASES, ids=[case[0] for case in CASES])
def test_the_recipe_suits_the_rows_and_runs_with_nothing_else(
    here: Path, data: str, expected: dict[str, object], kind: str, request: pytest.FixtureRequest
) -> None:
    values = written(data)
    assert {key: values.get(key) for key in expected} == expected
    common = {
        "method": "lora",
        "lora_rank": 8,
        "lora_targets": "auto",
        "lr": "auto",
        "output": "run",
    }
    assert {key: values[key] for key in common} == common
    assert values["eval_split"] == 0.1
    assert values.keys() <= set(option_names(Train))
    assert kind in Path("recipe.yaml").read_text()
    chooses_rate = data == "labels.csv" or request.config.getoption("--long")
    said = done("train", "recipe.yaml", "--steps", 8, *(() if chooses_rate else GIVEN_RATE)).err
    assert ("accuracy" in said) == ("label_column" in expected or data == "preferred.jsonl")
    assert Path("run/model/adapter_model.safetensors").exists()


def test_each_choice_has_a_reason_of_one_or_two_lines_and_numbers_follow_from_the_rows(
    here: Path,
) -> None:
    values, text = written("labels.csv"), Path("recipe.yaml").read_text()
    for group in text.split("\n\n")[1:]:
        comment = [line for line in group.splitlines() if line.startswith("# ")]
        assert 1 <= len(comment) <= 2, group
        assert len(group.splitlines()) > len(comment), group
    assert max(map(len, text.splitlines())) <= 100
    assert values["batch_size"] == 16
    assert values["steps"] == 50, "two steps pass all rows"
    assert "sequence_length" not in values, (
        "rows with labels are never cut: longer ones are judged, too"
    )
    assert "micro_batch_size" not in values
    for told in (
        "The median row has",
        "on 3 rows instead of training",
        "50 steps of 16 rows pass the 27 rows 29.6 times",
    ):
        assert told in text

    written("moods.csv")
    [group] = [
        group for group in Path("recipe.yaml").read_text().split("\n\n") if "\ndata: " in group
    ]
    assert [line.partition(":")[0] for line in group.splitlines()[1:]] == [
        "data",
        "prompt_template",
        "label_column",
    ]

    Path("run").mkdir()
    few = written("few.jsonl")
    assert few["output"] == "run-2", "the directory is in use"
    assert few["batch_size"] == 4
    assert "evaluation" not in few
    assert "there are too few rows, 4" in Path("recipe.yaml").read_text()


def test_the_command_prints_what_the_run_takes_and_the_next_command(here: Path) -> None:
    said = done(
        "init", "--model", "base", "--data", "labels.csv", "-o", "other.yaml"
    ).out.splitlines()
    steps = yaml.safe_load(Path("other.yaml").read_text())["steps"]
    line = rf"AdamW trains LoRA of rank 8: {steps} steps of 16 rows, \d evaluations, "
    line += r"and \d+ steps to choose the learning "
    assert (
        said[0]
        == "The rows are prompts with one of 2 labels: 'no', 'yes'; label_column: completion."
    )
    assert re.match(
        rf"{line}rate: about .* in all. Memory: .* free. Disk writes: snapshots of adapter", said[1]
    )
    assert said[2:] == ["next: zo2 train other.yaml"]


@pytest.mark.filterwarnings("default:not all of the plan is known")
def test_a_recipe_is_written_where_the_time_of_a_step_is_not_known(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: object) -> None:
        raise RuntimeError("no probe")

    monkeypatch.setattr("zo2adapters.trainers.probes._fastest", fails)
    recipe = written("labels.csv")
    assert recipe["steps"] >= 1
    assert "at about ? s a step" in reasons()


def test_labels_are_words_rather_than_numbers(here: Path) -> None:
    labels = {
        "review,verdict,stars": "verdict",
        "review,label,stars": "label",
        "review,count,stars": "stars",
    }
    for header, label in labels.items():
        words = "verdict" in header
        rows = [
            f"a film of {i},{('bad', 'good')[i % 2] if words else i % 2},{1 + i % 2}"
            for i in range(20)
        ]
        Path("films.csv").write_text("\n".join([header, *rows]) + "\n")
        chosen = survey(Path("films.csv"), RowOptions(), takes_labels=False).options
        assert (chosen.label_column, chosen.prompt_template) == (
            label,
            f"{{review}}\\n{label.capitalize()}:",
        )


@pytest.mark.long_profile
def test_only_choices_are_written_and_other_objectives_get_zeroth_order(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {torch.float32: 1.0, torch.bfloat16: 0.1}
    with monkeypatch.context() as patch:
        patch.setattr("zo2adapters.trainers.initial_recipe.product_seconds", seconds.__getitem__)
        values = written("pairs.jsonl")
    assert values["precision"] == "mixed"
    assert not {"dtype", "loss_chunk"} & values.keys(), "a run settles them"
    values = written("labels.csv", "--objective", "accuracy")
    assert values.keys().isdisjoint({"lora_rank", "rank"})
    assert values["method"] == "zeroth-order"
    assert (values["lr"], values["steps"], values["objective"]) == ("auto", 1000, "accuracy")
    assert (
        "Zeroth-order steps, which need no gradient, train all parameters: the objective accuracy"
        in reasons()
    )
    assert (
        "Zeroth-order steps train all parameters" in done("train", "recipe.yaml", "--steps", 2).err
    )
    monkeypatch.setattr(
        "zo2adapters.trainers.initial_recipe.hands_over_tensors", lambda model: True
    )
    told = done("init", "--model", "base", "--data", "labels.csv", "-o", "handed.yaml").out
    assert "train all parameters: this model's blocks hand tensors to later blocks" in told
    assert written("labels.csv")["method"] == "zeroth-order"
    assert "hand tensors to later blocks" in reasons()


def test_blocks_that_hand_over_tensors_are_found_before_a_run(tmp_path: Path) -> None:
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    for family, hands_over in (("gemma3n_text", True), ("llama", False)):
        model: Any = families.small_model(families.small_config(family))
        model.save_pretrained(tmp_path / family)
        assert (
            hands_over_tensors(open_checkpoint(tmp_path / family, adapter=Adapter(config=lora)))
            == hands_over
        )


def test_a_model_larger_than_memory_streams_and_is_then_only_read(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*args: Any, **kwargs: Any) -> HostPlan:
        return replace(plan_host(*args, **kwargs), buckets=1)

    monkeypatch.setattr("zo2core.planning.memory.plan_host", planned)
    values = written("pairs.jsonl")
    assert values["method"] == "lora"
    assert "samples" not in values, "each token takes a pass over the disk"
    assert "The model is larger: blocks are streamed from disk" in reasons()

    values = written("labels.csv", "--objective", "accuracy")
    assert values["rank"] == 8
    done("train", "recipe.yaml", "--steps", 2, *GIVEN_RATE)


@pytest.mark.long_profile
@pytest.mark.parametrize(("share", "separates"), [(0.8, True), (0.95, True), (0.8, False)])
def test_rows_are_packed_where_this_is_expected_to_be_faster(
    share: float, separates: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(inputs: RunInputs) -> RunPlan:
        return replace(
            plan_of(inputs),
            forward_seconds=share if inputs.options.batching.pack else 1.0,
            update_seconds=0.0,
        )

    monkeypatch.setattr("zo2adapters.trainers.initial_recipe.plan_of", plan)
    if not separates:
        monkeypatch.setattr(
            "zo2adapters.models.batches._separates", lambda mask, sequence_ids: False
        )
    write_rows(
        here / "uneven.jsonl", [{"text": f"the cat{' sat' * (i % 10)}"} for i in range(ROWS)]
    )
    values, is_packed = written("uneven.jsonl"), share < 0.9 and separates
    assert values.get("pack") == (True if is_packed else None)
    assert ("of the tokens would be padding" in Path("recipe.yaml").read_text()) == is_packed
    if is_packed:
        done("train", "recipe.yaml", "--steps", 2, *GIVEN_RATE)

    assert "pack" not in written("pairs.jsonl"), "its rows have one length"

    labelled = [
        {"prompt": f"the cat{' sat' * (i % 10)}", "completion": (" yes", " no")[i % 2]}
        for i in range(ROWS)
    ]
    write_rows(here / "labelled.jsonl", labelled)
    values = written("labelled.jsonl")
    assert ("pack" in values, values["label_column"]) == (False, "completion"), (
        "rows of candidates cannot be packed"
    )

    monkeypatch.setattr("zo2adapters.trainers.initial_recipe._ACTIVATIONS", 1e-9)
    values = written("uneven.jsonl")
    assert ("pack" in values, values["micro_batch_size"]) == (False, 1), "packed rows run together"
    done("train", "recipe.yaml", "--steps", 2, *GIVEN_RATE, "--output", "in-pieces")


def test_a_long_text_becomes_rows_of_the_default_length(here: Path) -> None:
    (here / "book.txt").write_text("the cat sat " * 200)
    values = written("book.txt")
    assert values["sequence_length"] == 12, "the longest row that the model takes"
    assert "Longer texts become several rows." in Path("recipe.yaml").read_text()
    done("train", "recipe.yaml", "--steps", 1, *GIVEN_RATE, "--output", "trained")


def test_memory_that_is_told_as_the_least_is_enough(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int | None] = []

    def plan(inputs: RunInputs) -> RunPlan:
        planned.append(inputs.options.batching.micro_batch_size)
        if planned[-1] != 1:
            raise MemoryBudgetError(
                "memory", found="1 MB", expected="at least 2 MB", remedy="raise it"
            )
        return plan_of(inputs)

    monkeypatch.setattr("zo2adapters.trainers.initial_recipe.plan_of", plan)
    assert written("chat.jsonl")["micro_batch_size"] == 1
    assert planned == [None, 8, 4, 2, 1]

    monkeypatch.undo()
    monkeypatch.chdir(here)
    said = refusal(
        "init", "--model", "base", "--data", "chat.jsonl", "--memory", "1MB", "-o", "other.yaml"
    )
    least = re.search(r"at least (\S+) (\wB)", said)
    assert least is not None, said
    memory = least[1] + least[2]
    assert written("chat.jsonl", "--memory", memory)["memory"] == memory


def test_a_few_long_rows_are_cut_and_counted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zo2adapters.trainers.initial_recipe._UNCUT", 4)
    rows = [{"text": "the cat sat"}] * 199 + [{"text": "the cat sat " * 20}]
    write_rows(here / "long.jsonl", rows)
    assert written("long.jsonl")["sequence_length"] == 12, "the longest that the model takes"
    assert "1 longer ones are shortened or left out" in Path("recipe.yaml").read_text()
    assert (
        "cut to the sequence length: 1 row\n"
        in done("train", "recipe.yaml", "--steps", 2, "--eval-split", "0.01", *GIVEN_RATE).err
    )


def test_options_of_the_user_are_kept(here: Path) -> None:
    more = [
        "--prompt-template",
        "{tweet} is",
        "--label-column",
        "mood",
        "--evaluation",
        "moods.csv",
        "--memory",
        "8GB",
    ]
    values = written("moods.csv", *more, "--seed", 3)
    expected = {
        "prompt_template": "{tweet} is",
        "evaluation": "moods.csv",
        "memory": "8GB",
        "seed": 3,
    }
    assert {key: values[key] for key in expected} == expected
    done("train", "recipe.yaml", "--steps", 2, *GIVEN_RATE)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "named",
    [
        "--label-column mood",
        "--completion-column mood",
        "--prompt-column tweet",
        "--prompt-template {tweet}",
    ],
)
def test_the_column_that_is_not_named_is_found(here: Path, named: str) -> None:
    values = written("moods.csv", *named.split())
    assert "tweet" in values.get("prompt_template", values.get("prompt_column", ""))
    assert "mood" in (values.get("label_column"), values.get("completion_column"))


@pytest.mark.parametrize(
    "named", [[], ["--label-column", "mood"], ["--prompt-column", "tweet"]], ids=str
)
def test_an_empty_label_is_refused_with_row_and_column(here: Path, named: list[str]) -> None:
    text = (here / "moods.csv").read_text().splitlines()
    (here / "blank.csv").write_text("\n".join([*text[:4], "9,the cat,", *text[4:]]) + "\n")
    said = refusal("init", "--model", "base", "--data", "blank.csv", *named)
    assert "blank.csv, row 4: found \"\" in the column 'mood'" in said
    assert "What to do: remove the row or fill it" in said


def test_what_cannot_be_written_or_read_is_one_line(here: Path) -> None:
    write_rows(here / "odd.jsonl", [{"a": f"the {i}", "b": f"cat {i}"} for i in range(ROWS)])
    said = refusal("init", "--model", "base", "--data", "odd.jsonl")
    assert "found the columns 'a', 'b'" in said
    assert "--prompt-column a --completion-column b" in said
    assert not Path("recipe.yaml").exists()
    Path("recipe.yaml").write_text("mine")
    assert "recipe.yaml: found something at this path" in refusal(
        "init", "--model", "base", "--data", "labels.csv"
    )
    assert Path("recipe.yaml").read_text() == "mine"
    said = refusal("init", "--model", "base", "--data", "labels.csv", "-o", "nowhere/new.yaml")
    assert said.startswith("zo2: nowhere/new.yaml: found a directory that does not exist"), (
        "before anything is measured"
    )
    assert "nowhere" in refusal(
        "init", "--model", "nowhere", "--data", "labels.csv", "-o", "new.yaml"
    )


def surveyed(path: Path, *rows: dict[str, Any]) -> Survey:
    write_rows(path, list(rows))
    return survey(path, RowOptions(), takes_labels=False)


@pytest.mark.parametrize(
    "columns", [("instruction", "input", "output"), ("system", "question", "context", "answer")]
)
def test_a_context_stands_in_the_prompt_and_other_columns_are_named(
    tmp_path: Path, columns: tuple[str, ...]
) -> None:
    rows = [{"id": i, **{name: f"{name} {i}" for name in columns}} for i in range(2)]
    found = surveyed(tmp_path / "rows.jsonl", *rows)
    assert found.unused == ("id",)
    converted = found.options.converted(rows[1])
    assert converted["completion"] == f"{columns[-1]} 1"
    sections = "".join(f"### {name.capitalize()}:\n{name} 1\n\n" for name in columns[:-1])
    assert converted["prompt"].endswith(f"{sections}### Response:\n")
    assert converted["prompt"].startswith("Below is an instruction") == (
        columns[0] == "instruction"
    )


@pytest.mark.long_profile
def test_columns_that_are_not_used_are_printed_and_written_into_the_recipe(here: Path) -> None:
    columns = ["id", *(f"extra{i}" for i in range(6))]
    rows = [
        {**dict.fromkeys(columns, "x"), "instruction": f"the {i}", "output": f"cat {i}"}
        for i in range(4)
    ]
    write_rows(here / "extra.jsonl", rows)
    for data, unused in (
        ("moods.csv", "id"),
        ("extra.jsonl", f"{', '.join(columns[:6])}, ..."),
        ("few.jsonl", None),
    ):
        said = done("init", "--model", "base", "--data", data, "-o", f"{data}.yaml").out
        for text in (said, Path(f"{data}.yaml").read_text().replace("\n# ", " ")):
            assert (f"; not used: {unused}" in text) == (unused is not None), text


def test_columns_of_conversations_and_numbers_are_found(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "the"}, {"from": "gpt", "value": "cat"}]
    found = surveyed(tmp_path / "chat.jsonl", {"id": "x", "conversations": turns})
    assert ("conversations" in found.kind, found.unused) == (True, ("id",))
    rows = [{"prompt": f"the {i}", "label": float(i % 2)} for i in range(12)]
    assert surveyed(tmp_path / "floats.jsonl", *rows).labels == ("0", "1")
    rows = [{"text": f"the cat {i}", "label": ["yes", "no", "", ""][i % 4]} for i in range(40)]
    with pytest.raises(
        DataError, match=r"line 3: found \"\" in the column 'label'"
    ):  # no plain text
        surveyed(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(DataError, match=r"line 1: found null in the column 'label'"):
        surveyed(tmp_path / "rows.jsonl", {**rows[0], "label": None}, *rows)


def test_values_of_any_text_survive_the_file() -> None:
    template = '{text}\\nIt\'s "#: - yes":'
    reasons = {"prompt_template": "Why.", "method": "Only this."}
    recipe = InitialRecipe(values={"prompt_template": template}, reasons=reasons, summary="")
    assert yaml.safe_load(recipe.text()) == {"prompt_template": template}
    assert recipe.text().startswith("# Why.\nprompt_template: ")
