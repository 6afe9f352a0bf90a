"""Runs of all parameters on the command line: the whole model's bits, whatever kills them, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from command_lines import Apart, done, make_place, refusal
from full_loops import BlockCoordinateLoop, WholeModel, adalomo_loop, lomo_loop, torch_loop
from runs import outcome
from safetensors.torch import load_file
from strikes import JOURNAL, strike
from transformers import AutoModelForCausalLM, AutoTokenizer

from zo2adapters import open_checkpoint
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.rows import collate, training_batches
from zo2core import BAdam, FirstOrder, Journal
from zo2core.build import RunOptions, request_of
from zo2core.checkpoint.snapshots import Snapshots
from zo2core.io.direct_file import whole_pages
from zo2core.io.record_log import RecordFile
from zo2core.names import OptimizerName
from zo2core.optimizers import make_block_update
from zo2core.sources.segment_store import laid_out_as_on_disk

STEPS = 6
LR = 1e-2


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base and rows."""
    return make_place(tmp_path_factory.mktemp("full"))


def train(output: str, *more: object, method: str = "adamw") -> list[object]:
    """The command of a run."""
    told = ["train", "--method", method, "--model", "base", "--data", "rows.jsonl", "--output", output]
    switching = ["--method", "switch_every=2"] if method == "badam" else []
    return [*told, "--steps", STEPS, "--lr", LR, "--batch-size", 3, *switching, *more]


def plain_loop(directory: Path, method: OptimizerName, *, clip: float) -> dict[str, torch.Tensor]:
    """What a loop over the whole model makes of the same batches, with a warm-up of two steps and a linear decay."""
    whole = WholeModel(directory / "base")
    adamw: Any = lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.1, fused=True)  # noqa: E731
    sgd: Any = lambda parameters: torch.optim.SGD(parameters, weight_decay=0.1)  # noqa: E731
    if method == "badam":
        update = make_block_update("badam", weight_decay=0.1, switch_every=2)
        layouts = open_checkpoint("base").layouts
        assert isinstance(update, BAdam)
        segments = [index for index, layout in enumerate(layouts) if layout.parameters]
        turns = [update.segments(step, segments) for step in range(0, STEPS, 2)]
        names = [[spec.name for index in turn for spec in layouts[index].parameters] for turn in turns]
        loop: Any = BlockCoordinateLoop(whole, adamw, names, 2, None, clip)
    else:
        loop = {
            "lomo": lambda: lomo_loop(whole, 0.1, None, clip),
            "adalomo": lambda: adalomo_loop(whole, 0.1, None, clip),
            "adamw": lambda: torch_loop(whole, adamw, None, clip),
            "sgd": lambda: torch_loop(whole, sgd, None, clip),
        }[method]()
    tokenizer = AutoTokenizer.from_pretrained(directory / "base")
    rows = RowReader(tokenizer, 12).read(directory / "rows.jsonl")
    batches = training_batches(rows, batch_size=3, seed=0, first_step=0)
    for step in range(STEPS):
        if isinstance(loop, BlockCoordinateLoop):
            loop.begin()
        whole.backward([collate(next(batches), pad_token_id=0)])
        loop(LR * ((step + 1) / 2 if step < 2 else 1 - (step - 2) / (STEPS - 2)))
    return {name: parameter.detach() for name, parameter in whole.parameters.items()}


@pytest.mark.few(2)
@pytest.mark.parametrize("method", get_args(OptimizerName))
def test_a_run_ends_with_the_plain_loops_bits(method: OptimizerName, here: Path) -> None:
    schedule = ("--weight-decay", 0.1, "--clip", "norm=0.5", "--decay", "linear", "--warmup-steps", 2)
    done(*train("run", *schedule, "--snapshot-every", 2, method=method))
    expected = plain_loop(here, method, clip=0.5)
    saved = load_file("run/model/model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in saved.items())
    assert len(saved) == len(expected)
    assert [commit.step for commit in Journal("run/journal.jsonl").commits] == list(range(STEPS))
    AutoModelForCausalLM.from_pretrained("run/model")


@pytest.mark.long_profile
def test_verbs_know_runs_of_all_parameters(here: Path) -> None:
    done(*train("run", "--snapshot-every", 2))
    told = done("evaluate", "--run", "run", "--at", 4, "--data", "rows.jsonl").out
    base, after = map(float, re.findall(r"[0-9.]+", next(line for line in told.splitlines() if line.startswith("loss"))))
    assert after < base
    done("export", "--run", "run", "--at", 4, "--output", "early")
    journal = Journal("run/journal.jsonl")
    saved = Snapshots(Path("run"), journal.chain, journal.require_version).read(4).state["parameters"]
    early = load_file("early/model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in early.items())
    assert "expected one of the steps that have a snapshot" in refusal("export", "--run", "run", "--at", 3, "--output", "no")
    done("journal", "run")
    done("report", "run", "--output", "report.html")
    done("train", "--resume", "run", "--steps", STEPS + 2)
    done(*train("whole"), "--steps", STEPS + 2)
    assert outcome("run")["weights"] == outcome("whole")["weights"]


def test_the_export_of_a_first_step_is_the_base_without_a_snapshot(here: Path) -> None:
    done(*train("run"))
    done("export", "--run", "run", "--at", 0, "--output", "first")
    first, base = load_file("first/model.safetensors"), load_file("base/model.safetensors")
    assert all(torch.equal(value, first[name]) for name, value in base.items())


@pytest.mark.few(2)
@pytest.mark.parametrize("method", get_args(OptimizerName))
def test_plan_counts_gradients_states_and_snapshots(here: Path, method: OptimizerName) -> None:
    common = ("plan", "--model", "base", "--method", method, "--data", "rows.jsonl")
    planned = json.loads(done(*common, "--json").out)
    parts = {part["name"]: part["nbytes"] for part in planned["host_plan"]["parts"]}
    layouts = open_checkpoint("base").layouts
    sizes = [sum(spec.nbytes for spec in layout.parameters) for layout in layouts]
    shapes = [spec.shape for layout in layouts for spec in layout.parameters]
    factors = 4 * sum(map(sum, shapes))  # of a matrix a row and a column, of a vector all
    steps = 5  # bytes of a parameter's number of steps, and of the flag that it has states
    counts = [len(layout.parameters) for layout in layouts]
    states = {
        "adamw": 2 * sum(sizes) + steps * sum(counts),
        "sgd": 0,
        "lomo": 0,
        "adalomo": factors,
        "badam": max(2 * size + steps * count for size, count in zip(sizes, counts, strict=True)),
    }[method]
    largest = max(4 * spec.numel for layout in layouts for spec in layout.parameters)
    in_use = max(sizes) + max(max(sizes), 3 * largest if method == "adalomo" else 0)
    assert parts["trained parameters, gradients, optimizer"] == in_use + states
    assert planned["snapshot_bytes"] == sum(layout.nbytes for layout in layouts) + states
    snapshots = 2 * planned["snapshot_bytes"]  # the first and the last step's
    assert planned["terabytes_per_1000_steps"] == pytest.approx(max(1000 * planned["written_bytes"], snapshots) / 1e12)
    assert planned["host_plan"]["buckets"] is None
    assert "snapshot   " in done(*common).out


def test_several_workers_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zo2adapters.trainers.methods import GradientRun

    class Pair:
        size = 2

    def engine(self: GradientRun, *arguments: Any, real: Any = GradientRun.engine, **given: Any) -> Any:
        return real(self, *arguments, **{**given, "workers": Pair()})

    monkeypatch.setattr(GradientRun, "engine", engine)
    told = refusal(*train("run"))
    assert "--method: found adamw of all parameters, and 2 workers; expected one process" in told
    assert "FSDP and DeepSpeed" in told


def test_fewer_snapshots_are_taken_where_writes_are_limited(here: Path) -> None:
    size = json.loads(done("plan", "--model", "base", "--method", "lomo", "--json").out)["snapshot_bytes"]
    common = ("plan", "--model", "base", "--method", "lomo", "--json", "--write-limit-tb", 1e-13)
    assert json.loads(done(*common).out)["written_bytes"] == pytest.approx(1e-4)
    limit = size / 4 / 1e9  # a snapshot every four steps
    done(*train("run", "--write-limit-tb", limit, method="lomo"))
    assert sorted(path.name for path in Path("run").glob("snapshot*")) == [
        "snapshot-4.safetensors",
        "snapshot-6.safetensors",
    ]


STREAMED = ("--method", "stream_blocks")


def test_a_streamed_run_goes_on_and_says_what_it_writes(here: Path) -> None:
    ended = done(*train("run", *STREAMED, method="badam"))
    assert "blocks are streamed from disk, 2 at a time. Disk writes: one block every 2 steps, " in ended.err
    done("train", "--resume", "run", "--steps", STEPS + 3)
    done(*train("whole", method="badam"), "--steps", STEPS + 3)
    assert outcome("run")["weights"] == outcome("whole")["weights"]
    assert "no snapshot of step" in refusal("export", "--run", "run", "--at", 4, "--output", "no")


def test_plan_counts_what_turns_write(here: Path) -> None:
    common = ("plan", "--model", "base", "--method", "badam:stream_blocks,switch_every=2", "--data", "rows.jsonl")
    planned = json.loads(done(*common, "--json").out)
    model = open_checkpoint("base")
    sizes = [whole_pages(layout.nbytes) for layout in laid_out_as_on_disk(model.layouts, model.weights)]
    assert planned["host_plan"]["buckets"] == 2
    assert planned["written_bytes"] == sum(sizes) / len(sizes) / 2
    assert planned["snapshot_bytes"] == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [method for method in get_args(OptimizerName) if method != "badam"])
def test_a_run_over_blocks_on_disk_has_the_plain_loops_bits(method: OptimizerName, here: Path) -> None:
    schedule = ("--weight-decay", 0.1, "--clip", "norm=0.5", "--decay", "linear", "--warmup-steps", 2)
    ended = done(*train("run", *schedule, *STREAMED, "--snapshot-every", 4, method=method))
    assert "Disk writes: changed blocks with their states, a commit every 4 steps, " in ended.err
    expected, saved = plain_loop(here, method, clip=0.5), load_file("run/model/model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in saved.items())
    assert [record["step"] for record in RecordFile(Path("run/scratch.jsonl")).loaded[1:]] == [4, STEPS], "and the last step"
    done(*train("longer", *STREAMED, "--snapshot-every", 4, method=method))
    done("train", "--resume", "longer", "--steps", STEPS + 2)
    done(*train("whole", method=method), "--steps", STEPS + 2)
    assert outcome("longer")["weights"] == outcome("whole")["weights"]


def test_plan_counts_what_streamed_states_write(here: Path) -> None:
    common = ("plan", "--model", "base", "--method", "adamw:stream_blocks", "--data", "rows.jsonl")
    planned = json.loads(done(*common, "--json").out)
    model = open_checkpoint("base")
    adamw = make_block_update("adamw", weight_decay=0.0)
    stored = request_of(model, FirstOrder(adamw, lr=0.0), RunOptions(run=Path(), commit_every=1)).on_disk
    sizes = [whole_pages(layout.nbytes) for layout in stored]
    weights = sum(layout.nbytes for layout in model.layouts)
    assert sum(layout.nbytes for layout in stored) > 3 * weights
    assert planned["written_bytes"] == sum(sizes)
    assert planned["terabytes_per_1000_steps"] == pytest.approx(sum(sizes) / 1e9)
    blocks = len(sizes) - 2
    assert planned["scratch_bytes"] == 2 * blocks * max(sizes[1:-1]) + 2 * (sizes[0] + sizes[-1])
    seldom = json.loads(done(*common, "--json", "--snapshot-every", 4).out)
    assert seldom["written_bytes"] == sum(sizes[1:-1]) + (sizes[0] + sizes[-1]) / 4


def test_a_run_that_writes_more_than_a_disk_bears_needs_a_word(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zo2adapters.trainers.methods.WRITE_BUDGET_TB", 1e-7)
    told = refusal(*train("run", *STREAMED))
    assert "--write-limit-tb: found none, which is 1e-07, and a run that writes " in told
    assert not Path("run").exists()
    limit = re.findall(r"pass --write-limit-tb ([0-9.e-]+) to allow it", told)
    done(*train("run", *STREAMED, "--write-limit-tb", 1.1 * float(limit[0])))


def test_the_loss_is_scaled_where_it_is_asked_for(here: Path) -> None:
    done(*train("run", "--method", "loss_scaling"))
    done(*train("plain"))
    assert outcome("run")["weights"] == outcome("plain")["weights"], "a scale that is a power of two changes no float32 bit"
    method = Journal("run/journal.jsonl").header["method"]  # type: ignore[index]
    assert method["loss_scaling"] == {"initial": 65536.0, "growth": 2.0, "backoff": 0.5, "interval": 2000}


@pytest.mark.long_profile
def test_a_delayed_run_is_another_run_and_resumes_with_its_bits(here: Path, apart: Apart) -> None:
    command = train("run", "--method", "delayed_update", "--snapshot-every", 2)
    ended = apart.run(*command, patch=strike(JOURNAL, "Journal", "append", 6, "after"))
    assert ended.status == -9, ended
    done("train", "--resume", "run")
    done(*train("whole", "--method", "delayed_update"))
    done(*train("prompt"))
    assert outcome("run")["weights"] == outcome("whole")["weights"]
    assert outcome("run")["weights"] != outcome("prompt")["weights"]
    assert Journal("run/journal.jsonl").header["method"]["delayed"] is True  # type: ignore[index]


@pytest.mark.long_profile
def test_states_in_8_bits_take_a_quarter_and_train(here: Path) -> None:
    pytest.importorskip("bitsandbytes")
    ended = done(*train("run", "--method", "state_bits=8", "--snapshot-every", 2))
    done("train", "--resume", "run", "--steps", STEPS + 2)
    done(*train("whole", "--method", "state_bits=8"), "--steps", STEPS + 2)
    assert outcome("run")["weights"] == outcome("whole")["weights"]
    assert "all parameters" in ended.err
    done(*train("streamed", "--method", "state_bits=8", *STREAMED), "--steps", STEPS + 2)
    assert outcome("streamed")["weights"] == outcome("whole")["weights"]
