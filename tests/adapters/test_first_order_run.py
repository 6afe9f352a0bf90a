"""First-order runs on the command line: the resident model's bits, whatever kills them, and what
they refuse.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from command_lines import Apart, done, make_place, refusal, write_rows
from engines import assert_equal
from peft_models import monolithic, values_of
from runs import outcome
from safetensors import safe_open
from safetensors.torch import load_file
from strikes import JOURNAL, strike
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.tasks.rows import RowReader, collate, training_batches
from zo2adapters.trainers import checked_json
from zo2adapters.trainers.methods import KEPT_FREE, LARGEST_SHARE, SnapshotPolicy
from zo2core import EngineOptions, FirstOrder, Journal, MemoryPolicy
from zo2core.build import RunInputs, request_of
from zo2core.errors import MemoryBudgetError
from zo2core.io.direct_file import whole_pages
from zo2core.io.durable import RecordFile, from_line, to_line
from zo2core.optimizers.registry import OPTIMIZERS, make_block_update
from zo2core.planning.memory import HostPlan, Machine, MemoryPart, RunRequest, plan_host
from zo2core.ranges import OF_ADAPTERS, OptimizerName
from zo2core.sources.segment_store import laid_out_as_on_disk

peft: Any = pytest.importorskip("peft")

CONFIG = "lora/adapter_config.json"
STEPS = 6


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, rows, and the config of an adapter."""
    folder = make_place(tmp_path_factory.mktemp("first-order"))
    config = peft.LoraConfig(
        r=3, lora_alpha=16, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"
    )
    config.save_pretrained(folder / "lora")
    return folder


def train(
    output: str, *more: object, data: str = "rows.jsonl", method: str = "adamw"
) -> list[object]:
    told = [
        "train",
        "--method",
        method,
        "--model",
        "base",
        "--adapter",
        CONFIG,
        "--data",
        data,
        "--output",
        output,
    ]
    return [*told, "--steps", STEPS, "--lr", 1e-2, "--batch-size", 3, *more]


EVALUATED = (
    "--evaluation",
    "rows.jsonl",
    "--evaluate-every",
    2,
    "--keep-best",
    "--snapshot-every",
    2,
)


def arguments_of(options: Mapping[str, Any]) -> list[object]:
    words = list[object]()
    for name, value in options.items():
        words += [f"--{name}", *(value if isinstance(value, tuple) else (value,))]
    return words


def adapter_of(run: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "model" / "adapter_model.safetensors")


def resident(directory: Path) -> tuple[PreTrainedModel, dict[str, torch.nn.Parameter]]:
    """The whole model with the adapter that a run of seed 0 begins with, and what is trained
    of it.
    """
    opened = open_checkpoint(directory / "base", adapter=Adapter(config=directory / CONFIG, seed=0))
    values = values_of(opened)
    model = monolithic(
        directory / "base", peft.LoraConfig.from_pretrained(directory / "lora"), values
    )
    return model, {
        name: parameter for name, parameter in model.named_parameters() if name in values
    }


LR, CLIP = 1e-2, 0.5
SCHEDULE = (
    "--weight-decay",
    0.1,
    "--max-grad-norm",
    f"{CLIP}",
    "--decay",
    "linear",
    "--warmup-steps",
    2,
)


def scheduled_batches(directory: Path) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Rates and batches of a run with this schedule."""
    rows = RowReader(AutoTokenizer.from_pretrained(directory / "base"), 12).read(
        directory / "rows.jsonl"
    )
    for step, batch in zip(
        range(STEPS), training_batches(rows, batch_size=3, seed=0, first_step=0), strict=False
    ):
        yield (
            LR * ((step + 1) / 2 if step < 2 else 1 - (step - 2) / (STEPS - 2)),
            collate(batch, pad_token_id=0),
        )


def plain_loop(
    directory: Path, method: OptimizerName, options: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """What transformers, peft and torch.optim make of the same batches."""
    model, trained = resident(directory)
    of_adapter = OPTIMIZERS[method].of_adapter
    assert of_adapter is not None
    optimizer = of_adapter(list(trained.values()), lr=LR, weight_decay=0.1, **options)
    for rate, batch in scheduled_batches(directory):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), CLIP)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in trained.items()}


def assert_same_adapter(
    saved: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> None:
    own = {name.replace(".default", ""): value for name, value in parameters.items()}
    assert len(saved) == len(own) > 0
    for name, value in saved.items():
        assert torch.equal(value, own[name.removeprefix("base_model.model.")]), name


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
@pytest.mark.parametrize(
    ("method", "options"),
    [("adamw", {}), ("sgd", {}), ("adamw", {"betas": (0.8, 0.95)}), ("sgd", {"momentum": 0.9})],
)
def test_a_run_ends_with_the_plain_loops_bits(
    method: OptimizerName, options: Mapping[str, Any], here: Path
) -> None:
    done(*train("run", *SCHEDULE, *arguments_of(options), "--snapshot-every", 2, method=method))
    assert_same_adapter(adapter_of("run"), plain_loop(here, method, options))
    header = Journal("run/journal.jsonl").header
    assert header is not None
    assert header["method"] == {
        "name": method,
        "lr": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        **{
            name: list(value) if isinstance(value, tuple) else value
            for name, value in options.items()
        },
    }
    assert [commit.step for commit in Journal("run/journal.jsonl").commits] == list(range(STEPS))
    whole = AutoModelForCausalLM.from_pretrained("base", dtype="auto")
    loaded = peft.PeftModel.from_pretrained(whole, "run/model")
    assert any("lora" in name for name, _ in loaded.named_parameters())


@pytest.fixture(scope="module")
def undisturbed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("undisturbed") / "here"
    shutil.copytree(prepared, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done(*train("run", *EVALUATED))
    return outcome(folder / "run")


@pytest.mark.long_profile
def test_commands_take_the_last_snapshot_of_an_interrupted_run(here: Path, apart: Apart) -> None:
    killed = strike(JOURNAL, "Journal", "append", 5, "after")
    assert apart.run(*train("run", "--snapshot-every", 2), patch=killed).status == -9
    evaluated = done("evaluate", "--run", "run", "--data", "rows.jsonl")
    assert "run: step 4 (the last snapshot of 5 steps); --at N takes another one" in evaluated.err
    assert evaluated.out.splitlines()[0].split() == ["base", "step", "4"]
    done("export", "--run", "run", "--output", "default")
    done("export", "--run", "run", "--at", 4, "--output", "four")
    name = "adapter_model.safetensors"
    assert Path("default", name).read_bytes() == Path("four", name).read_bytes()
    told = refusal("export", "--run", "run", "--at", 5, "--output", "five")
    assert (
        "one of the steps that have a snapshot: 2, 4. What to do: pass one of these steps, with "
        "--at" in told
    )


def interrupted(here: Path, apart: Apart) -> list[Path]:
    """A run that was killed after its fifth step, and its snapshots, of steps 2 and 4."""
    killed = strike(JOURNAL, "Journal", "append", 5, "after")
    assert apart.run(*train("run", *EVALUATED), patch=killed).status == -9
    snapshots = [Path(f"run/snapshot-{step}.safetensors") for step in (2, 4)]
    assert sorted(Path("run").glob("snapshot*")) == snapshots
    return snapshots


# on the command line they are lines
told_warnings = pytest.mark.filterwarnings("always::zo2core.errors.ZO2Warning")


def damage(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def take_anothers(last: Path) -> None:
    done(*train("other", "--snapshot-every", 2, "--seed", 5))
    shutil.copy(f"other/{last.name}", last)


CHECKSUM = (
    "snapshot-4.safetensors: a damaged snapshot: its checksum does not match. The run resumes from"
)
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "digest": (lambda last: damage(last, 40), CHECKSUM),
    "end": (lambda last: damage(last, -1), CHECKSUM),
    "empty": (lambda last: last.write_bytes(b""), CHECKSUM),
    "another run's": (take_anothers, "snapshot-4.safetensors: the snapshot of another run"),
}


@pytest.mark.few(2)
@told_warnings
@pytest.mark.parametrize(("spoil", "told"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_snapshot_is_passed_over_with_a_warning(
    spoil: Callable[[Path], object],
    told: str,
    here: Path,
    apart: Apart,
    undisturbed: dict[str, object],
) -> None:
    _, last = interrupted(here, apart)
    spoil(last)
    said = done("train", "--resume", "run").err
    assert told in said
    assert "snapshot of step 2, and repeats the later steps" in said
    assert outcome("run") == undisturbed
    assert sorted(path.name[9:10] for path in Path("run").glob("snapshot*")) == ["4", "6"]
    done("export", "--run", "run", "--at", 4, "--output", "again")  # it was written anew


def test_a_run_whose_snapshots_are_all_damaged_stops(
    here: Path, apart: Apart, undisturbed: dict[str, object]
) -> None:
    for path in interrupted(here, apart):
        damage(path, 1000)
    before = Path("run/journal.jsonl").read_bytes()
    told = refusal("train", "--resume", "run")
    assert "snapshot-4.safetensors: a damaged snapshot" in told
    assert "snapshot-2.safetensors: a damaged snapshot" in told
    assert "expected an undamaged snapshot" in told
    assert Path("run/journal.jsonl").read_bytes() == before
    for path in Path("run").glob("snapshot*"):
        path.unlink()
    done("train", "--resume", "run")
    assert outcome("run") == undisturbed


def test_another_repeated_step_and_a_journal_shorter_than_a_snapshot_are_refused(
    here: Path, apart: Apart
) -> None:
    interrupted(here, apart)
    journal = Path("run/journal.jsonl")
    *lines, last = journal.read_bytes().splitlines()
    commit = dict(from_line(last)["commit"])
    journal.write_bytes(
        b"\n".join([*lines, to_line({"commit": {**commit, "loss": commit["loss"] + 1e-6}})])
    )
    told = refusal("train", "--resume", "run")
    assert "step 4: found loss" in told
    assert "in the repeated step" in told
    journal.write_bytes(b"".join(line + b"\n" for line in lines[:-2]))
    Path("run/metrics.jsonl").unlink()
    assert "at least 4, since snapshot-4.safetensors knows of step 3" in refusal(
        "train", "--resume", "run"
    )


def test_the_best_step_is_exported_though_the_run_went_on(here: Path) -> None:
    # A rate at which the last steps go too far: the best evaluation is not the last one.
    ended = done(
        *train("run", *EVALUATED, "--lr", 0.1, "--steps", 8, "--snapshot-every", 1, method="adamw")
    )
    best = Journal("run/journal.jsonl").evaluations
    step = min(best, key=lambda at: (best[at]["loss"], at))
    assert step == 6
    assert {path.name for path in Path("run").glob("snapshot*")} == {
        f"snapshot-{at}.safetensors" for at in (6, 7, 8)
    }
    assert f"step {step}, loss" in ended.err
    done("export", "--run", "run", "--at", step, "--output", "best")
    done("export", "--run", "run", "--at", 8, "--output", "last")
    assert (
        f"run: step {step} (best of 5 evaluations)"
        in done("export", "--run", "run", "--output", "default").err
    )
    exported = load_file("run/model/adapter_model.safetensors")
    for same in ("best", "default"):
        adapter = load_file(f"{same}/adapter_model.safetensors")
        assert all(torch.equal(exported[name], value) for name, value in adapter.items())
    assert not all(
        torch.equal(exported[n], value)
        for n, value in load_file("last/adapter_model.safetensors").items()
    )


def test_a_result_that_is_the_base_is_told_with_the_command_for_the_last_step(here: Path) -> None:
    # What is learned makes the rows to evaluate on less likely.
    for name, word in (("learned", " sat"), ("others", " ran")):
        write_rows(Path(f"{name}.jsonl"), [{"prompt": "the cat", "completion": word}] * 3)
    given = (*EVALUATED, "--evaluation", "others.jsonl", "--steps", 4, "--lr", 0.1)
    ended = done(*train("run", *given, data="learned.jsonl"))
    untrained = "the evaluation before the first step is the best of 3, so nothing that was trained"
    last = "zo2 export --run run --at 4 --output DIR"
    assert f"{untrained} is used: run/model has the base's weights." in ended.err
    assert f"To get those of the last step: {last}" in ended.err
    told = done("evaluate", "--run", "run").err
    assert f"run: {untrained} is used; --at 4 takes step 4\n" in told
    (Path("run") / "snapshot-4.safetensors").unlink()  # as of a run that was stopped
    assert "; --at 2 takes step 2\n" in done("evaluate", "--run", "run").err
    done(*last.replace("4", "2").replace("DIR", "last").split()[1:])
    learned = load_file("last/adapter_model.safetensors")
    assert any(value.any() for name, value in learned.items() if "lora_B" in name)
    assert not any(value.any() for name, value in adapter_of("run").items() if "lora_B" in name)


def test_verbs_know_first_order_runs(here: Path) -> None:
    assert "is finished" not in done(*train("run", *EVALUATED)).err
    told = done("journal", "run").out
    assert told.startswith("method ")
    assert "first-order steps, adamw, lr 0.01" in told.splitlines()[0]
    assert "snapshot of step 6" in told
    assert len(done("journal", "run", "--last", 2).out.splitlines()) < len(told.splitlines())
    done("report", "run", "-o", "page.html")
    assert "steps, forwards</td><td>6, 18<" in Path("page.html").read_text()
    for step in (0, 6):
        loss = Journal("run/journal.jsonl").evaluations[step]["loss"]
        assert (
            f"loss {loss:.6f}"
            in done(
                "evaluate", "--run", "run", "--at", step, "--data", "rows.jsonl", "--no-base"
            ).out
        )
    before = outcome("run")
    lines = done("train", "--resume", "run").err.splitlines()  # at its end
    assert outcome("run") == before
    assert lines[0] == "run is finished after 6 steps"
    assert not any("Memory" in line or "about" in line for line in lines)
    with safe_open("run/snapshot-6.safetensors", "pt") as opened:
        names = set(opened.keys())
        assert json.loads(opened.metadata()["zo2"])["step"] == STEPS
        assert_same_adapter(
            adapter_of("run"),
            {
                name.removeprefix("parameters."): opened.get_tensor(name)
                for name in names
                if "lora" in name
            },
        )
    assert any(name.endswith("exp_avg_sq") for name in names)
    told = refusal("train", "--resume", "run", "--from-step", 2, "--output", "new")
    assert "--from-step: found a run of --method adamw" in told
    assert "--lr" in refusal("train", "--resume", "run", "--lr", 3e-2)
    assert "--method" in refusal("train", "--resume", "run", "--method", "sgd")
    assert "is finished" not in done("train", "--resume", "run", "--steps", 7).err

    place = ("--model", "base", "--data", "rows.jsonl", "--adapter", CONFIG)
    done("train", "--method", "zeroth-order", *place, "--output", "zeroth", "--steps", STEPS)
    journals = {name: Path(name, "journal.jsonl").read_bytes() for name in ("run", "zeroth")}
    for name, other, kind in (("run", "zeroth", "zeroth-order"), ("zeroth", "run", "first-order")):
        Path(name, "journal.jsonl").write_bytes(journals[other])
        for path in (*Path(name).glob("snapshot*"), Path(name, "metrics.jsonl")):
            path.unlink()
        for model in Path(name).glob("model*"):
            shutil.rmtree(model)
        assert f"found a run of {kind} steps" in refusal("train", "--resume", name)


def test_a_run_with_decay_goes_on_as_a_new_run_of_its_adapter(here: Path) -> None:
    done(*train("run", "--decay", "linear"))
    assert "with --adapter RUN/model" in refusal("train", "--resume", "run", "--steps", 9)
    done(*train("further", "--adapter", "run/model", "--steps", 1, "--lr", 1e-9))
    begun, after = adapter_of("run"), adapter_of("further")
    assert all(torch.allclose(begun[name], value, atol=1e-6) for name, value in after.items())
    assert any(value.any() for name, value in after.items() if "lora_B" in name)


def test_snapshots_cost_a_fiftieth_of_the_time_at_most() -> None:
    now, cost = [0.0], 1.7
    spent: list[float] = []

    def write() -> None:
        now[0] += cost
        spent.append(cost)

    def taken(steps: int) -> list[float]:
        spent.clear()
        policy = SnapshotPolicy(None, lambda: now[0])
        for step in range(1, steps + 1):
            now[0] += 1.0
            if policy.is_due(step):
                policy.take(write)
        return spent[1:]  # the first one tells what it costs

    began = now[0]
    assert 0.9 * LARGEST_SHARE <= sum(taken(2000)) / (now[0] - began) <= LARGEST_SHARE
    cost = 0.01
    assert len(taken(600)) == 9, "a disk wears out by what is written: one a minute is enough"
    assert [step for step in range(1, 9) if SnapshotPolicy(3, lambda: 0.0).is_due(step)] == [3, 6]


CHOICES = [
    {"prompt": f"the {animal}", "candidates": [" sat", " ran"], "answer": " ran"}
    for animal in ("cat", "dog")
]
PREFERENCES = [
    {"prompt": f"the {animal}", "chosen": " ran", "rejected": " sat"} for animal in ("cat", "dog")
]
TEXTS = [{"text": "the cat sat"}, {"text": "the dog ran"}]
CHATS = [
    {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]}
] * 2
CHAT = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
FUNCTION = "def twice(model, batch):\n    return 2 * model(**batch).loss\n"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("rows", "more"),
    [
        (TEXTS, ("--pack",)),
        (TEXTS, ("--micro-batch-size", 1)),
        (TEXTS, ("--objective", "own.py:twice")),
        (CHATS, ()),
        (CHOICES, ()),
        (PREFERENCES, ()),
        (PREFERENCES, ("--objective", "choice-loss")),
    ],
    ids=["packed", "micro-batches", "function", "chat", "choices", "dpo", "preferred choice"],
)
def test_what_has_a_gradient_is_learned(
    rows: Sequence[object], more: Sequence[object], here: Path
) -> None:
    settings = here / "base" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": CHAT}))
    (here / "own.py").write_text(FUNCTION)
    write_rows(here / "some.jsonl", rows)
    done(*train("run", "--evaluation", "some.jsonl", "--batch-size", 2, *more, data="some.jsonl"))
    evaluations = Journal("run/journal.jsonl").evaluations
    assert evaluations[STEPS]["loss"] < evaluations[0]["loss"]


def test_a_resumed_run_of_preferences_has_the_references_of_the_steps_that_it_repeats(
    here: Path, apart: Apart
) -> None:
    write_rows(
        here / "some.jsonl",
        [{**row, "prompt": f"{row['prompt']} is"} for row in PREFERENCES] + PREFERENCES,
    )
    command = train("run", "--batch-size", 1, "--snapshot-every", 2, data="some.jsonl")
    assert apart.run(*command, patch=strike(JOURNAL, "Journal", "append", 4, "after")).status == -9
    done("train", "--resume", "run")
    command[command.index("run")] = "whole"
    done(*command)
    assert outcome("run") == outcome("whole")


def test_choices_are_learned_by_the_gradient_of_their_loss(here: Path) -> None:
    """Against a plain forward of the whole model: each candidate's mean log-probability, and cross
    entropy over them.
    """
    write_rows(here / "some.jsonl", CHOICES[:1])
    done(
        *train("run", "--steps", 1, "--batch-size", 1, "--lr", 0.1, data="some.jsonl", method="sgd")
    )
    model, trained = resident(here)
    tokenizer = AutoTokenizer.from_pretrained("base")
    scores = []
    for candidate in (" sat", " ran"):
        ids = torch.tensor([tokenizer(f"the cat{candidate}")["input_ids"]])
        scores.append(model(ids).logits[0, -2].log_softmax(-1)[ids[0, -1]])
    loss = torch.nn.functional.cross_entropy(torch.stack(scores)[None], torch.tensor([1]))
    gradients = torch.autograd.grad(loss, list(trained.values()))
    [commit] = Journal("run/journal.jsonl").commits
    assert commit.loss == pytest.approx(loss.item(), rel=1e-5)
    saved = adapter_of("run")
    for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
        expected = parameter.detach() - 0.1 * gradient
        own = saved["base_model.model." + name.replace(".default", "")]
        assert torch.allclose(own, expected, rtol=1e-4, atol=1e-7), name


def test_all_optimizers_that_can_be_named_are_there_and_their_options_stay_as_they_are(
    here: Path,
) -> None:
    assert set(OPTIMIZERS) == set(get_args(OptimizerName))
    assert {name for name, entry in OPTIMIZERS.items() if entry.of_adapter is not None} == set(
        OF_ADAPTERS
    )
    done(*train("run", "--betas", "0.8", "0.9", "--steps", 2))
    assert "--betas" in refusal("train", "--resume", "run", "--betas", "0.8", "0.95")
    saved = json.loads(Path("run/options.json").read_text())
    del saved["sha256"]
    for betas in ([0.8], [0.8, 0.9, 0.9], 0.8):
        saved["options"]["optimization"]["betas"] = betas
        Path("run/options.json").write_text(checked_json.to_text(saved))
        assert "options.json" in refusal("train", "--resume", "run")


def test_dropout_is_never_silent(here: Path) -> None:
    """An adapter with dropout is refused; of the model's config, whose dropout no step has, a line
    says so.
    """
    told = "no dropout: steps run in evaluation mode"
    assert told not in done(*train("without")).err
    path = here / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_dropout": 0.1}))
    assert f"{told}; attention_dropout 0.1 has no effect" in done(*train("run")).err
    assert outcome("run")["weights"] == outcome("without")["weights"]
    config = here / CONFIG
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_dropout": 0.05}))
    assert "adapter.lora_dropout: found 0.05; expected LoRA" in refusal(*train("none"))
    assert not Path("none").exists()


def test_a_loss_that_is_not_finite_leaves_the_run_as_it_was(here: Path) -> None:
    (here / "own.py").write_text(
        "calls = []\n\n\ndef nan(model, batch):\n    calls.append(1)\n    loss = "
        "model(**batch).loss\n"
        "    return loss * float('nan') if len(calls) > 8 else loss\n"
    )
    told = refusal(*train("run", "--objective", "own.py:nan", "--snapshot-every", 1))
    assert "found loss nan" in told
    version = Journal("run/journal.jsonl").version
    assert 0 < version < STEPS
    assert Path(f"run/snapshot-{version}.safetensors").exists()


def test_streamed_blocks_give_the_same_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(*args: Any, **kwargs: Any) -> HostPlan:
        return replace(plan_host(*args, **kwargs), buckets=1)

    done(*train("run"))
    monkeypatch.setattr("zo2core.planning.memory.plan_host", planned)
    said = (
        "blocks are streamed from disk, 1 at a time. Disk writes: snapshots of adapter and "
        "optimizer, "
    )
    assert said in done(*train("other")).err
    assert outcome("run")["weights"] == outcome("other")["weights"]


def test_plan_counts_gradients_and_reads(here: Path) -> None:
    common = (
        "plan",
        "--model",
        "base",
        "--method",
        "adamw",
        "--adapter",
        CONFIG,
        "--data",
        "rows.jsonl",
        "--json",
    )
    planned = json.loads(done(*common).out)
    parts = {part["name"]: part["nbytes"] for part in planned["host_plan"]["parts"]}
    model = open_checkpoint("base", adapter=Adapter(config=CONFIG))
    trained = sum(
        spec.nbytes for layout in model.layouts for spec in layout.parameters if not spec.frozen
    )
    assert parts["trained parameters, gradients, optimizer"] == 4 * trained
    assert parts["graphs of 2 of 2 blocks"] > 0
    assert planned["read_bytes"] == 0
    assert planned["snapshot_bytes"] == 3 * trained, "parameters and two moments"
    assert 0 < planned["written_bytes"] < planned["snapshot_bytes"]
    told = done(*common[:-1]).out
    assert "all in memory" in told


def test_plan_counts_inputs_that_have_no_room(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zo2core.planning.memory.memory_in_use", lambda: 0)
    make_place(here, layers=8)
    common = (
        "plan",
        "--model",
        "base",
        "--method",
        "adamw",
        "--adapter",
        CONFIG,
        "--data",
        "rows.jsonl",
        "--json",
    )
    parts = {
        part["name"]: part["nbytes"] for part in json.loads(done(*common).out)["host_plan"]["parts"]
    }
    reserved, model = (
        parts["activations, reserved"],
        open_checkpoint("base", adapter=Adapter(config=CONFIG)),
    )
    further = [MemoryPart("trained", parts["trained parameters, gradients, optimizer"])]
    on_disk, smallest, memory = laid_out_as_on_disk(model.layouts, model.weights), 0, 1 << 30
    with suppress(MemoryBudgetError):
        while True:
            policy = MemoryPolicy(host=memory, kept_free=KEPT_FREE)
            request = RunRequest(layouts=model.layouts, on_disk=on_disk, memory=policy)
            smallest = plan_host(request, Machine(), reserved, further).nbytes
            memory = smallest - 1
    assert smallest
    for missing in (100, 2000):
        memory = smallest - missing
        planned = json.loads(done(*common, "--memory", memory).out)
        counted = {part["name"]: part["nbytes"] for part in planned["host_plan"]["parts"]}
        assert sum(counted.values()) == planned["nbytes"] <= memory
        [blocks] = [
            nbytes
            for name, nbytes in counted.items()
            if name.endswith("of 8 blocks") and "graphs" not in name
        ]
        # buckets to read ahead into come first
        more = blocks - blocks // planned["host_plan"]["buckets"]
        assert (
            counted["activations, reserved"]
            + counted["inputs of blocks"]
            + planned["spilled_bytes"]
            == reserved
        )
        assert (
            planned["spilled_bytes"]
            == missing + more
            == pytest.approx(planned["written_bytes"], abs=100)
        )
        assert planned["read_bytes"] > planned["spilled_bytes"]
        assert planned["terabytes_per_1000_steps"] == pytest.approx(
            planned["written_bytes"] / 1e9, rel=0.5
        )
    assert "temporary file of inputs" in done(*common[:-1], "--memory", memory).out
    assert "the smallest plan" in refusal(*common, "--memory", smallest - reserved)


def train_all(output: str, *more: object, method: str = "adamw") -> list[object]:
    switching = ["--switch-every", "2"] if method == "badam" else []
    return [
        word
        for word in train(output, *switching, *more, method=method)
        if word not in ("--adapter", CONFIG)
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("method", get_args(OptimizerName))
def test_plan_counts_gradients_states_and_snapshots(here: Path, method: OptimizerName) -> None:
    common = (
        "plan",
        "--model",
        "base",
        "--method",
        method,
        "--data",
        "rows.jsonl",
    )
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
    assert planned["terabytes_per_1000_steps"] == pytest.approx(
        max(1000 * planned["written_bytes"], snapshots) / 1e12
    )
    assert planned["host_plan"]["buckets"] is None
    assert "snapshot   " in done(*common).out


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
def test_an_adapter_and_its_base_are_resumed_merged_and_never_exported_apart(here: Path) -> None:
    told = (
        *("train", "--method", "lora+lomo", "--model", "base", "--data", "rows.jsonl"),
        *("--lr", 1e-2, "--batch-size", 3, "--lora-rank", 2),
    )
    assert "--base-lr: found nothing" in refusal(*told, "--output", "none")
    both = (*told, "--base-lr", 1e-2)
    done(*both, "--output", "whole", "--steps", 3)
    done(*both, "--output", "resumed", "--steps", 2)
    done("train", "--resume", "resumed", "--steps", 3)
    for part in ("base/model", "adapter/adapter_model"):
        made, expected = (
            load_file(Path(run) / "model" / f"{part}.safetensors") for run in ("resumed", "whole")
        )
        assert_equal(made, expected)
    done("merge", "--run", "whole", "--output", "merged")
    base = AutoModelForCausalLM.from_pretrained("whole/model/base")
    merged = peft.PeftModel.from_pretrained(base, "whole/model/adapter").merge_and_unload()
    assert_equal(load_file("merged/model.safetensors"), dict(merged.state_dict()))
    alone = refusal("export", "--run", "whole", "--output", "alone", "--as-adapter")
    assert "the adapter alone is of no use" in alone
    assert "what zo2 merge wrote" in refusal("push", "whole", "--to", "a/b")
    frozen = refusal(*both, "--output", "none", "--adapter-frozen", "lora_A")
    assert "--adapter-frozen: found lora_A with --method lora+lomo" in frozen
    assert "0.01, as in the run" in refusal("train", "--resume", "whole", "--base-lr", 0.5)
    assert "base_lr 0.01" in done("journal", "whole").out
    assert not Path("none").exists()


STREAMED = ("--stream-blocks",)


def test_plan_counts_what_turns_and_streamed_states_write(here: Path) -> None:
    def planned(method: str, *more: object) -> dict[str, Any]:
        common = [
            "plan",
            "--model",
            "base",
            "--method",
            method,
            "--data",
            "rows.jsonl",
            "--json",
        ]
        common.append("--stream-blocks")
        plan: dict[str, Any] = json.loads(done(*common, *more).out)
        return plan

    turns, model = planned("badam", "--switch-every", 2), open_checkpoint("base")
    sizes = [
        whole_pages(layout.nbytes) for layout in laid_out_as_on_disk(model.layouts, model.weights)
    ]
    assert turns["host_plan"]["buckets"] == 2
    assert turns["written_bytes"] == sum(sizes) / len(sizes) / 2
    assert turns["snapshot_bytes"] == 0
    states, adamw = planned("adamw"), make_block_update("adamw", weight_decay=0.0)
    inputs = RunInputs(
        model=model,
        method=FirstOrder(adamw, lr=0.0),
        run=Path(),
        options=EngineOptions(commit_every=1),
    )
    stored = request_of(inputs).on_disk
    sizes = [whole_pages(layout.nbytes) for layout in stored]
    weights = sum(layout.nbytes for layout in model.layouts)
    assert sum(layout.nbytes for layout in stored) > 3 * weights
    assert states["written_bytes"] == sum(sizes)
    assert states["terabytes_per_1000_steps"] == pytest.approx(sum(sizes) / 1e9)
    blocks = len(sizes) - 2
    assert states["scratch_bytes"] == 2 * blocks * max(sizes[1:-1]) + 2 * (sizes[0] + sizes[-1])
    seldom = planned("adamw", "--snapshot-every", 4)
    assert seldom["written_bytes"] == sum(sizes[1:-1]) + (sizes[0] + sizes[-1]) / 4


def test_a_streamed_run_says_what_it_writes_and_writes_within_limits(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = done(*train_all("run", *STREAMED, method="badam"))
    assert (
        "blocks are streamed from disk, 2 at a time. Disk writes: one block every 2 steps, "
        in ended.err
    )
    ended = done(*train_all("all", *STREAMED, "--snapshot-every", 4))
    assert "Disk writes: changed blocks with their states, a commit every 4 steps, " in ended.err
    assert [record["step"] for record in RecordFile(Path("all/scratch.jsonl")).loaded[1:]] == [
        4,
        STEPS,
    ], "and the last step"
    common = ("plan", "--model", "base", "--method", "lomo", "--json")
    assert json.loads(done(*common, "--write-limit-tb", 1e-13).out)[
        "written_bytes"
    ] == pytest.approx(1e-4)
    limit = json.loads(done(*common).out)["snapshot_bytes"] / 4 / 1e9  # a snapshot every four steps
    done(*train_all("limited", "--write-limit-tb", limit, method="lomo"))
    assert sorted(path.name[9:10] for path in Path("limited").glob("snapshot*")) == ["4", "6"]
    monkeypatch.setattr("zo2adapters.trainers.methods.WRITE_BUDGET_TB", 1e-7)
    told = refusal(*train_all("much", *STREAMED))
    assert "--write-limit-tb: found none, which is 1e-07, and a run that writes " in told
    assert not Path("much").exists()
    [least] = re.findall(r"pass --write-limit-tb ([0-9.e-]+) to allow it", told)
    done(*train_all("much", *STREAMED, "--write-limit-tb", 1.1 * float(least)))


def test_the_loss_is_scaled_where_it_is_asked_for(here: Path) -> None:
    done(*train_all("run", "--loss-scaling"))
    done(*train_all("plain"))
    assert outcome("run")["weights"] == outcome("plain")["weights"], (
        "a scale that is a power of two changes no float32 bit"
    )
    method = Journal("run/journal.jsonl").header["method"]  # type: ignore[index]
    assert method["loss_scaling"] == {
        "initial": 65536.0,
        "growth": 2.0,
        "backoff": 0.5,
        "interval": 2000,
    }
