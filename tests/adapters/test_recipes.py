"""Recipes: a YAML file runs as the command line does, and a run's directory has the one that repeats it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import done, make_place, refusal

from zo2adapters import train
from zo2adapters.commands.evaluate import WriteRows
from zo2adapters.commands.options import nearest_name, option_names
from zo2adapters.commands.train import Train
from zo2adapters.trainers.option_table import read_recipe
from zo2core import Journal
from zo2core.errors import OptionError

RECIPE = """\
# rates need no dot, as on the command line
model: base
data: rows.jsonl
output: run
steps: 4
lr: 1e-2
batch-size: 3
noise: gaussian
guard: false
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base and rows."""
    return make_place(tmp_path_factory.mktemp("recipes"))


@pytest.fixture
def here(here: Path) -> Path:
    """A copy of it with a recipe, to work in."""
    Path("recipe.yaml").write_text(RECIPE)
    return here


def journal_of(run: str) -> bytes:
    return (Path(run) / "journal.jsonl").read_bytes()


def refused_recipe(text: str) -> str:
    """What is said about a recipe that is refused; nothing of its run is left."""
    Path("recipe.yaml").write_text(text)
    line = refusal("train", "recipe.yaml")
    assert "recipe.yaml" in line
    assert not Path("run").exists()
    return line


def test_a_recipe_runs_as_the_command_line_with_the_same_options(here: Path) -> None:
    done("train", "recipe.yaml")
    same = ["--steps", 4, "--lr", "1e-2", "--batch-size", 3, "--noise", "gaussian", "--no-guard"]
    done("train", "--model", "base", "--data", "rows.jsonl", "--output", "given", *same)
    assert journal_of("run") == journal_of("given")


def test_options_after_a_recipe_override_it(here: Path) -> None:
    done("train", "recipe.yaml", "--steps", 2, "--output", "short", "--guard")
    assert len(Journal(here / "short" / "journal.jsonl").updates) == 2
    written = yaml.safe_load(Path("short/recipe.yaml").read_text())
    assert (written["steps"], written["guard"], written["noise"]) == (2, True, "gaussian")


def test_python_runs_a_recipe_or_a_mapping_with_overrides(here: Path) -> None:
    assert train("recipe.yaml") == Path("run")
    values = {**yaml.safe_load(RECIPE), "data": Path("rows.jsonl"), "output": "mapped"}
    train(values)
    train(here / "recipe.yaml", {"output": "overridden", "steps": 2})
    assert journal_of("mapped") == journal_of("run")
    assert len(Journal(here / "overridden" / "journal.jsonl").updates) == 2
    with pytest.raises(OptionError, match="did you mean batch_size"):
        train({**values, "per_device_train_batch_size": 3})


MANY = ["--evaluation", "rows.jsonl", "--evaluate-every", 2, "--decay", "cosine", "--warmup-steps", 1, "--queries", 2]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "more", [MANY, ["--rank", 2, "--per-row"], ["--estimator", "mezo:exact", "--clip", "median=2.5"]], ids=str
)
def test_the_recipe_in_a_run_directory_repeats_the_run_to_the_same_journal(here: Path, more: list[object]) -> None:
    done("train", "--model", "base", "--data", "rows.jsonl", "--output", "run", "--steps", 4, "--batch-size", 3, *more)
    assert "already started" in refusal("train", "run/recipe.yaml"), "it names the directory that it was written to"
    done("train", "run/recipe.yaml", "--output", "again")
    assert journal_of("again") == journal_of("run")
    first, second = (yaml.safe_load((here / run / "recipe.yaml").read_text()) for run in ("run", "again"))
    assert {**first, "output": None} == {**second, "output": None}


def test_a_recipe_is_planned_as_the_command_line_with_the_same_options(here: Path) -> None:
    Path("recipe.yaml").write_text(RECIPE + "rank: 2\n")
    told = done("plan", "recipe.yaml")
    assert told.out.startswith("Zeroth-order steps train all parameters: 4 steps of 3 rows\n")
    assert told.err == ""
    same = ("--steps", 4, "--batch-size", 3, "--noise", "gaussian", "--rank", 2, "--data", "rows.jsonl")
    given = json.loads(done("plan", "--model", "base", *same, "--json").out)
    planned = json.loads(done("plan", "recipe.yaml", "--json").out)
    names = ("steps", "evaluations", "scratch_bytes", "written_bytes")
    assert [planned[name] for name in names] == [given[name] for name in names]
    assert "7 steps of 3 rows" in done("plan", "recipe.yaml", "--steps", 7).out.splitlines()[0]
    done("train", "recipe.yaml")
    assert "4 steps of 3 rows" in done("plan", "run/recipe.yaml").out.splitlines()[0]


def test_a_plan_says_what_a_run_takes_beside_it(here: Path) -> None:
    Path("recipe.yaml").write_text(RECIPE.replace("lr: 1e-2", "lr: auto") + "samples: 2\ndevice: cuda\n")
    told = done("plan", "recipe.yaml", "--device-memory", "1GiB")
    assert told.err == "not in the plan: the short runs that choose lr, the answers to 2 samples\n"
    assert "device memory" in told.out
    assert "--device-memory: found auto; expected the memory of the GPU" in refusal("plan", "recipe.yaml")


def test_the_recipe_of_a_lengthened_run_has_all_its_steps(here: Path) -> None:
    done("train", "recipe.yaml")
    done("train", "--resume", "run", "--steps", 6)
    done("train", "run/recipe.yaml", "--output", "again")
    again, run = (Journal(here / name / "journal.jsonl") for name in ("again", "run"))
    assert again.updates == run.updates
    assert len(run.updates) == 6


def test_the_recipe_of_a_branch_repeats_the_branch(here: Path) -> None:
    done("train", "recipe.yaml")
    done("train", "--resume", "run", "--from-step", 2, "--output", "branch", "--lr", 1e-4)
    done("train", "branch/recipe.yaml", "--output", "again")
    assert journal_of("again") == journal_of("branch") != journal_of("run")


def test_a_run_that_was_killed_before_its_recipe_was_written_gets_it_when_it_is_resumed(here: Path) -> None:
    done("train", "recipe.yaml")
    written = Path("run/recipe.yaml").read_bytes()
    Path("run/recipe.yaml").unlink()
    done("train", "--resume", "run")
    assert Path("run/recipe.yaml").read_bytes() == written


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("learning_rate", "lr"),
        ("learning-rate", "lr"),
        ("stepz", "steps"),
        ("max_steps", "steps"),
        ("per_device_train_batch_size", "batch_size"),
        ("evaluate_evry", "evaluate_every"),
        ("save_steps", "snapshot_every"),
        ("load_best_model_at_end", "keep_best"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(here: Path, key: str, nearest: str) -> None:
    line = refused_recipe(f"{RECIPE}{key}: 1\n")
    assert line.startswith(
        f"zo2: recipe.yaml: found the key {key}; expected an option of zo2 train; did you mean {nearest}."
    )


def test_a_name_that_only_contains_another_one_is_not_taken_for_it() -> None:
    others = "logging_steps data_seed hub_model_id metric_for_best_model deepspeed lr_scheduler_kwargs do_train"
    names = option_names(Train)
    assert [nearest_name(key, names) for key in others.split()] == [None] * 7
    assert all(nearest_name(name, names) == name for name in names)


@pytest.mark.parametrize("line", ['data: "rows\\0.jsonl"', 'labels: [yes, "n\\0"]', 'reward: "a\\0.py:f"'])
def test_nul_in_a_value_is_refused_with_its_key(here: Path, line: str) -> None:
    recipe = RECIPE.replace("data: rows.jsonl\n", "") + line
    assert f"recipe.yaml: found NUL in the value of {line.partition(':')[0]};" in refused_recipe(recipe)


def test_a_plan_takes_the_options_of_a_run(here: Path) -> None:
    given = ("--model", "base", "--data", "rows.jsonl", "--batch-size", 3, "--steps", 3)
    told = done(
        "plan",
        *given,
        "--lr",
        0.3,
        "--objective",
        "loss",
        "--seed",
        3,
        "--estimator",
        "mezo:exact",
        "--no-guard",
        "--samples",
        2,
    )
    assert "3 steps of 3 rows" in told.out
    assert told.err == "not in the plan: the answers to 2 samples\n"
    assert "every 3 steps" in done("plan", *given, "--write-back-every", 3).out
    done("train", "--output", "planned", *given)
    again = done("plan", "--resume", "planned").out
    assert "3 steps of 3 rows" in again
    assert json.loads((Path("planned") / "options.json").read_text())["options"]["steps"] == 3, "nothing was saved"


def test_an_unknown_key_without_a_similar_name_says_where_all_names_are(here: Path) -> None:
    line = refused_recipe(f"{RECIPE}qqqq: 1\n")
    assert line.endswith("found the key qqqq; expected an option of zo2 train. What to do: see zo2 train --help-all.")
    few = refusal("rows", "--qqqq", 1)
    assert all(f"--{name.replace('_', '-')}" in few for name in option_names(WriteRows))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{RECIPE}optimization:\n  lr: 1\n", "the key optimization"),
        (f"{RECIPE}lr: 1e-3\n", "the key lr a second time"),
        (f"{RECIPE}batch_size: 3\n", "the key batch_size twice"),
        (f"{RECIPE}seed: {{a: 1}}\n", "a dict as seed"),
        (f"{RECIPE}seed: [[1]]\n", "a list as seed"),
        (f"{RECIPE}seed: many\n", "'many' as --seed; expected a whole number"),
        (f"{RECIPE}head: odd\n", "'odd' as --head; expected one of causal-lm"),
        (f"{RECIPE}seed: 2001-99-99\n", "'2001-99-99' as --seed; expected a whole number"),
        (f"{RECIPE}labels: [true, false]\n", "[True, False] as labels"),
        (f"{RECIPE}labels: [null, null]\n", "[None, None] as labels"),
        ("- steps\n", "a list"),
        ("steps\n", "a str"),
        ("", "nothing"),
        ("steps: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("[" * 5000, "maximum recursion depth"),
        ("#" * (1 << 20) + "\n", "more than 1 MiB"),
        ("a: \0\n", "unacceptable character"),
    ],
    ids=range(17),
)
def test_a_recipe_that_says_nothing_usable_is_refused_in_one_line(here: Path, text: str, found: str) -> None:
    assert f"found {found}" in refused_recipe(text)


def test_texts_of_a_recipe_stay_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("labels: [no, yes, On, 1:30, 010, 1_0, 2001-01-01, 1.50]\nguard: false\n")
    values = read_recipe(tmp_path / "recipe.yaml")
    assert values == {"labels": ["no", "yes", "On", "1:30", "010", "1_0", "2001-01-01", "1.50"], "guard": False}


def test_an_error_of_yaml_has_file_and_line(here: Path) -> None:
    assert refused_recipe("model: base\nsteps: [1\nlr: 2\n").startswith("zo2: recipe.yaml, line 3: found ")
    assert "recipe.yaml: found No such file" in refusal("train", "other/recipe.yaml")


def test_paths_of_any_bytes_stand_in_a_recipe(here: Path) -> None:
    odd: Any = "r\udcffows 'ü': #.jsonl"
    shutil.copy("rows.jsonl", odd)
    done("train", "recipe.yaml", "--data", odd)
    done("train", "run/recipe.yaml", "--output", "again")
    assert journal_of("again") == journal_of("run")


def test_a_recipe_and_a_report_have_the_options_of_the_runs_method_alone(here: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("matplotlib")
    same = ("--model", "base", "--data", "rows.jsonl", "--steps", 2, "--lr", "1e-2", "--batch-size", 3)
    done("train", *same, "--output", "zeroth")
    done("train", *same, "--output", "first", "--method", "adamw", "--lora-rank", 2)
    first, zeroth = ((Path(run) / "recipe.yaml").read_text() for run in ("first", "zeroth"))
    assert "\nmethod: adamw\n" in first
    assert "weight_decay" in first
    assert "zo_eps" not in first
    assert "zo_eps" in zeroth
    assert "momentum" not in zeroth
    for run, own, others in (("first", ">method<", "zo_eps"), ("zeroth", ">zo_eps<", "momentum")):
        done("report", run, "-o", f"{run}.html")
        page = Path(f"{run}.html").read_text()
        assert own in page
        assert others not in page
    done("train", "first/recipe.yaml", "--output", "again")
    assert journal_of("again") == journal_of("first")
