"""What a run's directory, or a model's, names as code to run: nothing of it is imported before it was compared or named."""

import json
import os
import py_compile
from pathlib import Path

import pytest
from command_lines import Ended, make_place, refusal, run_here

import zo2adapters
from zo2adapters import open_checkpoint
from zo2adapters.tasks.task import user_function
from zo2adapters.trainers.run_directory import RunDirectory
from zo2core import Journal
from zo2core.errors import OptionError, UnsupportedModelError

FUNCTION = "def calm(model, batch):\n    return model(**batch).logits.square().mean()\n"
MARKING = "import pathlib\npathlib.Path({!r}).touch()\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two steps on a function in ``own.py``."""
    make_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(FUNCTION)
    ended = run_here(*train("run"), "--objective", "own.py:calm")
    assert ended.status == 0, ended
    return tmp_path


def train(output: str) -> list[object]:
    given = ["--model", "base", "--data", "rows.jsonl", "--output", output]
    return ["train", *given, "--steps", 2, "--batch-size", 2, "--lr", 1e-3]


def rewrite_objective(run: Path, objective: str) -> None:
    record = json.loads((run / "options.json").read_text())
    record["options"]["objective"] = objective
    (run / "options.json").write_text(json.dumps(record))


def resumed(*more: object) -> Ended:
    return run_here("train", "--resume", "run", "--steps", 3, *more)


def steps() -> int:
    return len(Journal("run/journal.jsonl").updates)


NAMED = ("--objective", "own.py:calm")


def test_a_run_runs_no_function_that_the_command_does_not_name(place: Path) -> None:
    (place / "own.py").write_text(MARKING.format(str(place / "mark")) + FUNCTION)
    assert "own.py:calm if you trust it" in refusal("train", "--resume", "run", "--steps", 3)
    assert "own.py:calm if you trust it" in refusal("train", "--resume", "run", "--from-step", 1, "--output", "branch")
    assert not (place / "mark").exists()
    (place / "own.py").write_text(FUNCTION)
    assert resumed(*NAMED).status == 0
    assert steps() == 3
    command = RunDirectory.options(Path("run")).resume_command  # names its functions
    assert run_here(*command.split()[1:], "--steps", 4).status == 0
    values = {"model": "base", "data": "rows.jsonl", "output": "other", "steps": 2, "objective": "own.py:calm"}
    (place / "recipe.yaml").write_text(json.dumps(values))
    assert run_here("train", "recipe.yaml", *NAMED).status == 0
    assert zo2adapters.train({**values, "output": "mapped"}) == Path("mapped"), "who writes a mapping names the function"


@pytest.mark.parametrize("line", ["objective: own.py:calm", "reward: own.py:calm", "reward: [length, own.py:calm=2]"])
def test_a_recipe_runs_no_function_that_the_command_does_not_name(place: Path, line: str) -> None:
    (place / "own.py").write_text(MARKING.format(str(place / "mark")) + FUNCTION)
    option, more = line.partition(":")[0], "estimator: es\nqueries: 2\n" if line.startswith("reward") else ""
    (place / "recipe.yaml").write_text(f"model: base\ndata: rows.jsonl\noutput: other\nsteps: 2\n{more}{line}\n")
    told = refusal("train", "recipe.yaml")
    assert told.startswith(f"zo2: recipe.yaml: {option}: found ")
    assert "expected the same functions on the command line" in told
    with pytest.raises(OptionError, match="the same functions on the command line"):
        zo2adapters.train(place / "recipe.yaml", {"steps": 1})
    (place / "runs.yaml").write_text(f"one: {{{line}}}\n")
    given = ("--model", "base", "--data", "rows.jsonl", "--output", "all", "--rank", 2)
    assert f"runs.yaml, one: {option}: found" in refusal("train", *given, "--runs", "runs.yaml")
    assert not (place / "mark").exists()


def test_a_file_that_was_changed_is_not_imported_and_one_that_moved_is_named_at_its_new_place(place: Path) -> None:
    (place / "own.py").write_text(MARKING.format(str(place / "mark")) + FUNCTION)
    line = refusal("train", "--resume", "run", "--steps", 3, *NAMED)
    assert line.startswith("zo2: --objective: found ")
    assert not (place / "mark").exists()
    assert steps() == 2
    (place / "own.py").unlink()
    (place / "moved.py").write_text(FUNCTION)
    assert "--objective: found" in refusal("train", "--resume", "run", "--steps", 3, "--objective", "moved.py:gone")
    assert resumed("--objective", "moved.py:calm").status == 0
    assert "moved.py:calm if you trust it" in refusal("train", "--resume", "run", "--steps", 4), "the new path is saved"


@pytest.mark.parametrize("function", ["calm", "other"])
def test_another_file_that_the_options_name_is_not_imported(place: Path, function: str) -> None:
    (place / "other.py").write_text(MARKING.format(str(place / "mark")) + FUNCTION.replace("calm", function))
    rewrite_objective(place / "run", f"{place / 'other.py'}:{function}")
    assert f"other.py:{function} if you trust it" in refusal("train", "--resume", "run", "--steps", 3)
    assert "--objective: found" in refusal("train", "--resume", "run", "--steps", 3, "--objective", f"other.py:{function}")
    assert not (place / "mark").exists()


def test_compiled_code_beside_a_function_is_not_run(tmp_path: Path) -> None:
    """Python's import takes it if size and time of the source are those that it names, whatever the source says."""
    source, other = tmp_path / "own.py", tmp_path / "other.py"
    other.write_text("def one(model, batch):\n    raise OSError\n")
    source.write_text("def one(model, batch):\n    return 1.0  #\n")
    assert source.stat().st_size == other.stat().st_size
    os.utime(other, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))
    cached = Path(py_compile.compile(str(other), doraise=True) or "")
    cached.rename(cached.with_name(cached.name.replace("other", "own")))
    with pytest.raises(OptionError, match="found float from one"):  # what the source says: it returned a number
        user_function(f"{source}:one")(None, {})


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_model_that_names_code_of_the_hub_is_refused_by_name(tmp_path: Path, key: str) -> None:
    base = make_place(tmp_path) / "base"
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, key: "kernels-community/flash-attn2"}))
    with pytest.raises(UnsupportedModelError, match=r"kernels-community/flash-attn2.*remote code is never run"):
        open_checkpoint(base)
