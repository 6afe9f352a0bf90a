"""Runs that share their base, from the command line: each is the run alone, to the byte."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from command_lines import Apart, done, refusal, run_here
from engines import fails_at
from models import save_tokenizer
from runs import bits_of, finish, small_run
from strikes import strike

from zo2adapters.commands import train
from zo2adapters.models.conversion import quantize
from zo2adapters.trainers import tuning
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import RunModelOptions, Storage, TrainOptions
from zo2adapters.trainers.tuning import TABLE, tune
from zo2core import Engine, SharedBase

pytest.importorskip("peft")

RUNS: Mapping[str, Mapping[str, Any]] = {
    "low-rank": {"rank": 2, "lr": 1e-3},
    "per-row": {"rank": 1, "per_row": True, "lr": 1e-3, "batch_size": 2, "seed": 3},
    "lora": {"method": "adamw", "lora_rank": 2, "lr": 1e-2, "steps": 6, "keep_best": True},
    "zo-lora": {"lora_rank": 1, "lr": 1e-3},
}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> TrainOptions:
    folder = tmp_path_factory.mktemp("shared")
    made = small_run(folder, layers=2)
    quantize(folder / "base", folder / "nf4", "nf4")
    save_tokenizer(folder / "nf4")
    return replace(made, model=str(folder / "nf4"))


def arguments(options: TrainOptions, *more: object) -> list[str]:
    given = [
        "train",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--data",
        options.data,
        "--evaluation",
        options.data,
        "--steps",
        4,
    ]
    return [str(argument) for argument in (*given, "--evaluate-every", 2, *more)]


def written(folder: Path, runs: Mapping[str, object] = RUNS) -> Path:
    (folder / "runs.yaml").write_text(json.dumps(runs))
    return folder / "runs.yaml"


def flags(values: Mapping[str, Any]) -> list[str]:
    named = ((f"--{key.replace('_', '-')}", value) for key, value in values.items())
    return [
        text for name, value in named for text in ([name] if value is True else [name, str(value)])
    ]


@pytest.fixture(scope="module")
def alone(options: TrainOptions, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    for name, values in RUNS.items():
        done(*arguments(options, "--output", folder / name, *flags(values)))
    return {name: bits_of(folder / name) for name in RUNS}


def results_of(together: Path) -> dict[str, Any]:
    return {name: bits_of(together / name) for name in RUNS}


@pytest.mark.long_profile
def test_runs_together_are_the_runs_apart(
    options: TrainOptions, alone: dict[str, Any], tmp_path: Path
) -> None:
    with counted_sweeps() as sweeps:
        ran = done(*arguments(options, "--output", tmp_path / "all", "--runs", written(tmp_path)))
    assert all(f"{name}: step 2: evaluation " in ran.err for name in RUNS)
    assert sweeps[:7] == [4] * 7, (
        "three evaluations and four steps of all; then one run goes on alone"
    )
    assert set(sweeps[7:]) <= {1}
    table = ran.out.splitlines()
    assert [line.split()[0] for line in table[1:5]] == list(RUNS)
    assert [line.split()[1] for line in table[1:5]] == ["4", "4", "6", "4"]
    outcomes = json.loads((tmp_path / "all" / "runs.json").read_text())
    assert [outcome["error"] for outcome in outcomes] == [None] * 4
    assert results_of(tmp_path / "all") == alone


def test_of_two_commands_at_once_the_first_goes_on_and_the_second_is_refused(
    options: TrainOptions, tmp_path: Path
) -> None:
    """Without a lock of all runs, each command takes some of them, and both end."""
    command = [
        *arguments(
            options,
            "--output",
            tmp_path / "all",
            "--runs",
            written(tmp_path, {"low-rank": {"rank": 2}}),
        )
    ]
    real = train._trained

    def started_again(*given: Any) -> Any:
        with patch.object(train, "_trained", real):
            assert "all: found a run that another process works on" in refusal(*command)
        return real(*given)

    with patch.object(train, "_trained", started_again):
        done(*command)
    assert run_here(*command).status == 0, "the lock ends with the command"


@pytest.mark.long_profile
def test_an_interrupted_command_continues_all_and_one_can_continue_alone(
    options: TrainOptions, alone: dict[str, Any], tmp_path: Path
) -> None:
    command = arguments(options, "--output", tmp_path / "all", "--runs", written(tmp_path))
    interrupted = fails_at(Engine.step, 6, KeyboardInterrupt())
    with patch.object(
        Engine, "step", lambda self, *given, **more: interrupted(self, *given, **more)
    ):
        assert run_here(*command).status != 0
    done("train", "--resume", tmp_path / "all" / "zo-lora")
    done(*command)
    assert results_of(tmp_path / "all") == alone


@pytest.mark.long_profile
def test_kills_lose_nothing(
    options: TrainOptions, alone: dict[str, Any], tmp_path: Path, apart: Apart
) -> None:
    command = arguments(options, "--output", tmp_path / "all", "--runs", written(tmp_path))
    for at, moment in ((3, "before"), (6, "after"), (4, "SIGTERM")):
        struck = apart.run(
            *command, patch=strike("zo2core.journal.journal", "Journal", "append", at, moment)
        )
        assert struck.status != 0
    done(*command)
    assert results_of(tmp_path / "all") == alone


def test_a_run_that_fails_is_named_and_the_others_go_on(
    options: TrainOptions, tmp_path: Path
) -> None:
    runs = {
        "bad": {"rank": 2, "sequence_length": 2, "too_long": "refuse"},
        "good": {"rank": 2, "lr": 1e-3},
        "odd": {"rank": 2, "sequence_length": 100_000},
    }
    ran = run_here(
        *arguments(options, "--output", tmp_path / "all", "--runs", written(tmp_path, runs))
    )
    assert ran.status != 0
    assert "bad ended: " in ran.err
    assert "odd ended: " in ran.err
    assert (tmp_path / "all" / "good" / "model").is_dir()
    outcomes = {
        outcome["run"]: outcome
        for outcome in json.loads((tmp_path / "all" / "runs.json").read_text())
    }
    assert outcomes["good"]["error"] is None
    assert outcomes["good"]["steps"] == 4
    assert outcomes["bad"]["error"] is not None


METHODS: Mapping[str, Any] = {
    "low-rank": {"optimization": Optimization(method="zeroth-order", rank=2)},
    "lora": {
        "optimization": Optimization(method="adamw", lr=1e-3),
        "model_options": RunModelOptions(lora_rank=2),
    },
}


@pytest.mark.long_profile
@pytest.mark.parametrize("method", METHODS)
def test_tuning_together_gives_the_trials_of_tuning_one_by_one(
    options: TrainOptions, tmp_path: Path, method: str
) -> None:
    given: Any = {"forwards": 240, "learning_rates": (1e-7, 2e-6, 1e-5, 1e-4)}
    tried = replace(options, steps=1000, **METHODS[method])
    with patch.object(
        SharedBase, "together", autospec=True, side_effect=SharedBase.together
    ) as together:
        best = tune(replace(tried, output=tmp_path / "together"), **given)
    assert [len(shared.args[1]) for shared in together.call_args_list] == [4, 2], (
        "the last round has one trial"
    )
    with patch.object(tuning, "can_share", return_value=False):
        alone = tune(replace(tried, output=tmp_path / "apart"), **given)
    assert replace(best, directory=alone.directory) == alone
    for run in (tmp_path / "apart").glob("lr-*"):
        ours = tmp_path / "together" / run.name
        assert (ours / "journal.jsonl").read_bytes() == (run / "journal.jsonl").read_bytes()
    ranking, expected = (
        json.loads((tmp_path / f / TABLE).read_text())["results"] for f in ("together", "apart")
    )
    assert ranking == expected


@pytest.mark.long_profile
def test_trials_that_do_not_fit_run_one_by_one(
    options: TrainOptions, tmp_path: Path, process_memory: int
) -> None:
    tried = replace(options, steps=1000, optimization=Optimization(method="zeroth-order", rank=2))
    given: Any = {"forwards": 120, "learning_rates": (1e-4, 1e-3, 1e-2)}
    expected = tune(replace(tried, output=tmp_path / "all"), **given)
    # Two of the trials fit beside this process.
    storage = Storage(activation_memory="400MiB", memory=f"{(process_memory >> 20) + 1000}MiB")
    best = tune(replace(tried, output=tmp_path / "some", storage=storage), **given)
    assert (best.lr, best.loss) == (expected.lr, expected.loss)


def plan_of(options: TrainOptions, *more: object) -> Any:
    return json.loads(done(*planning(options), "--json", *more).out)


def planning(options: TrainOptions) -> tuple[object, ...]:
    return (
        "plan",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--data",
        options.data,
        "--batch-size",
        400,
    )


def beside_process(plan: Any) -> Any:
    """The planned bytes without those of the process itself, which change from one plan to the
    next, and without graphs.
    """
    parts = plan["host_plan"]["parts"]
    return sum(
        part["nbytes"] for part in parts if part["name"] != "this process at present"
    ) - of_graphs(plan)


def of_graphs(plan: Any) -> Any:
    """The planned bytes of graphs, which blocks keep where memory is left over."""
    return sum(
        part["nbytes"]
        for part in plan["host_plan"]["parts"]
        if part["name"].startswith("graphs of")
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [("--rank", 2), ("--method", "adamw", "--lora-rank", 2)])
def test_a_plan_says_how_many_runs_fit_and_costs(
    options: TrainOptions, method: tuple[object, ...], process_memory: int
) -> None:
    memory = f"{(process_memory >> 20) + 70}MiB"
    one, three = (plan_of(options, *method, "--memory", memory, "--runs", runs) for runs in (1, 3))
    assert beside_process(three) - beside_process(one) == pytest.approx(
        2 * three["memory_a_run"], abs=4 << 20
    )
    assert three["seconds"] <= three["seconds_apart"] * 1.5
    if "--method" in method:
        assert of_graphs(one) < of_graphs(three) < 3 * of_graphs(one), (
            "there is room for all, and some of it is reserved"
        )
    assert three["nbytes"] <= three["host_plan"]["budget"]
    most = three["most_runs"]
    assert most >= 3
    told = re.search(
        r"of which (\d+) fit",
        refusal(*planning(options), *method, "--memory", memory, "--runs", 2 * most),
    )
    assert told is not None
    assert int(told[1]) == most


def test_a_plan_of_runs_counts_what_they_generate(
    options: TrainOptions, process_memory: int
) -> None:
    memory = f"{(process_memory >> 20) + 400}MiB"
    given = ("--rank", 2, "--runs", 2, "--batch-size", 2, "--reward", "length", "--memory", memory)
    short, long = (
        plan_of(options, *given, "--max-new-tokens", f"{tokens}")["memory_a_run"]
        for tokens in (1, 8)
    )
    assert long > short


@pytest.fixture(scope="module")
def trained(options: TrainOptions, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trained")
    runs = {name: RUNS[name] for name in ("low-rank", "lora", "zo-lora")}
    done(*arguments(options, "--output", folder / "all", "--runs", written(folder, runs)))
    return {
        **{name: folder / "all" / name for name in runs},
        "model": folder / "all" / "lora" / "model",
    }


@contextmanager
def counted_sweeps() -> Iterator[list[int]]:
    """How many runs each sweep serves, known at the end."""
    sweeps: list[int] = []
    with patch.object(SharedBase, "_sweep", autospec=True, side_effect=SharedBase._sweep) as swept:
        yield sweeps
    sweeps += [len(sweep.args[1]) for sweep in swept.call_args_list]


def test_several_models_evaluate_and_generate_in_one_pass(
    options: TrainOptions, trained: Mapping[str, Path]
) -> None:
    first, *others = trained.values()
    with counted_sweeps() as sweeps:
        together = done("evaluate", "--run", first, "--data", options.data, "--others", *others)
    assert sweeps == [5], "the base, too"
    header, loss, *_ = together.out.splitlines()
    names = [*list(trained)[1:3], str(trained["model"])]  # the run has its name already
    assert header.split() == ["base", "step", "4", *names]
    cells = [cell.split()[0] for cell in re.split(r"\s{2,}", loss.strip())[1:]]
    shown = dict(zip(["base", *trained], cells, strict=True))
    for name, path in trained.items():
        given = (
            ("--run", path) if name != "model" else ("--model", options.model, "--adapter", path)
        )
        alone = run_here("evaluate", *given, "--data", options.data, "--no-base")
        assert f"loss {shown[name]}" in alone.out, name
    ask = ("--prompt", "the cat", "--max-new-tokens", 3)
    with counted_sweeps() as sweeps:
        together = done("generate", "--run", first, *ask, "--others", *others)
    assert sweeps[0] == 4
    assert len(sweeps) <= 3, "one pass a token"
    said = [
        run_here("generate", "--run", path, *ask).out.strip() for path in list(trained.values())[:3]
    ]
    assert [
        part.partition(":\n")[2].strip() or part.strip() for part in together.out.split("\n\n")
    ][:3] == said


def test_models_that_cannot_share_passes_run_one_after_the_other(
    options: TrainOptions, tmp_path: Path
) -> None:
    low_rank = tmp_path / "low-rank"
    done(*arguments(options, "--output", low_rank, *flags(RUNS["low-rank"])))
    (tmp_path / "dense").mkdir()
    dense = small_run(tmp_path / "dense")
    finish(dense)
    with counted_sweeps() as sweeps:
        done("evaluate", "--run", dense.output, "--data", dense.data, "--others", low_rank)
    assert sweeps == []
