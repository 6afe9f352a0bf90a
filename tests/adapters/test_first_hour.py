"""What a newcomer types: plausible mistakes are answered by what was meant, and lines say what a reader needs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_lines import done, make_place, refusal, run_here

TRAIN = ("train", "--model", "base", "--data", "rows.jsonl", "--steps", 1)
REWARD = ("--reward", "rewards.py:short", "--estimator", "es", "--rank", 2, "--reward-options", "max_new_tokens=2")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base and rows."""
    return make_place(tmp_path_factory.mktemp("hour"))


@pytest.fixture
def here(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that directory, which is the working directory."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_help_and_version_are_found_where_others_have_them() -> None:
    assert run_here("help") == run_here("--help")
    assert run_here("--version").out.startswith("zo2core ")


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("journal", "found no RUN_DIRECTORY; expected RUN_DIRECTORY"),
        ("report run", "found no --output; expected --output PATH"),
        ("generate --run run", "found no --prompt; expected --prompt TEXT ..."),
        ("init", "found no --model, no --data; expected --model TEXT and --data PATH"),
    ],
)
def test_what_is_missing_is_named_as_it_is_written(command: str, missing: str) -> None:
    assert missing in refusal(*command.split())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("num-train-epochs", "steps"),
        ("epochs", "steps"),
        ("gradient_accumulation_steps", "micro-batch-size"),
        ("max-seq-length", "sequence-length"),
        ("lora-r", "lora-rank"),
        ("bf16", "dtype"),
    ],
)
def test_options_of_other_trainers_are_known(theirs: str, ours: str) -> None:
    assert f"did you mean --{ours}. " in refusal("train", f"--{theirs}", 3)


def test_a_name_means_another_option_only_where_that_one_exists() -> None:
    assert "did you mean --steps" not in refusal("evaluate", "--epochs", 3)


def test_a_first_order_option_without_a_method_says_what_is_missing(here: Path) -> None:
    told = refusal(*TRAIN, "--output", "run", "--method", "stream_blocks")
    assert "stream_blocks of --method: found True without --method; expected --method and no adapter" in told
    told = refusal(*TRAIN, "--output", "run", "--clip", "norm=1")
    assert "norm of --clip: found 1.0 without --method" in told
    assert "--clip projected" in told


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def good(prompt, completion, row):\n    return 1\n", "rewards.py without short, but with good"),
        ("'A docstring.'\n", "rewards.py without short;"),
        ("def short(:\n", "rewards.py, line 1: "),
    ],
)
def test_a_reward_that_its_file_does_not_define_is_refused_before_the_run(text: str, found: str, here: Path) -> None:
    Path("rewards.py").write_text(text)
    told = refusal(*TRAIN, "--output", "run", *REWARD)
    assert "--reward: found " in told
    assert found in told
    assert not Path("run").exists()


@pytest.mark.parametrize("text", ["from math import sqrt as short\n", "short = 3\n", "if True:\n    short = len\n"])
def test_a_name_may_be_defined_in_any_way(text: str, here: Path) -> None:
    Path("rewards.py").write_text(text)
    assert "without short" not in run_here(*TRAIN, "--output", "run", *REWARD).err


def test_rows_without_a_prompt_are_named_as_what_a_reward_lacks(here: Path) -> None:
    Path("texts.jsonl").write_text(json.dumps({"text": "the cat sat"}) + "\n")
    told = refusal("train", "--model", "base", "--data", "texts.jsonl", "--output", "run", "--reward", "length", "--rank", 2)
    assert "--reward: found rows without a prompt; expected rows with a prompt" in told


def test_columns_that_a_run_on_texts_does_not_use_are_told(here: Path) -> None:
    Path("tweets.csv").write_text("text,mood,id\nthe cat,good,1\nthe dog,bad,2\n")
    tweets = ("train", "--model", "base", "--data", "tweets.csv", "--steps", 1)
    told = done(*tweets, "--output", "run").err
    assert "trained on: the column text; not used: mood, id. --prompt-template" in told
    template = ("--prompt-template", "{text} is", "--columns", "label=mood")
    assert "not used" not in done(*tweets, "--output", "labels", *template).err
    assert "not used" not in done(*TRAIN, "--output", "rows").err


def test_a_missing_file_of_runs_is_described_as_one_of_runs(here: Path) -> None:
    told = refusal(*TRAIN, "--output", "many", "--runs", "none.yaml", "--rank", 2)
    assert "expected a YAML file with a line such as small: {lr: 1e-4} for each run" in told


def test_a_report_of_a_directory_of_runs_is_one_of_each(here: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        done(*TRAIN, "--output", f"many/{name}")
    done("report", "many", "-o", "all.html")
    assert "<title>one, two</title>" in Path("all.html").read_text()
    done("report", "many/one", "-o", "one.html")
    assert "<title>one</title>" in Path("one.html").read_text()
    Path("empty").mkdir()
    assert "no journal" in refusal("report", "empty", "-o", "none.html")


def test_a_model_that_no_run_has_changed_is_not_one_after_steps(here: Path) -> None:
    assert done("export", "--model", "base", "--output", "copy").out == "copy: the model\n"


def test_an_evaluation_of_one_row_counts_one_row(here: Path) -> None:
    Path("one.jsonl").write_text(json.dumps({"prompt": "the cat", "completion": " sat"}) + "\n")
    assert "1 row, 1 sweep" in done("evaluate", "--model", "base", "--data", "one.jsonl").out


def test_generations_of_several_models_have_a_name_each(here: Path) -> None:
    for name in ("one", "two"):
        done(*TRAIN, "--output", name, "--rank", 2)
    prompts = ("--prompt", "the cat", "--max-new-tokens", 2)
    lines = done("generate", "--run", "one", "--others", "two", *prompts).out.splitlines()
    assert [line for line in lines if line.endswith(":")] == ["one:", "two:"]
    assert not done("generate", "--run", "one", *prompts).out.startswith("one:")
