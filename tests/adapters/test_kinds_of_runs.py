"""What every kind of run holds on the command line: resumed, repeated by its recipe, exported and
evaluated at its steps.
"""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
import yaml
from command_lines import done, make_place, refusal
from engines import assert_equal
from models import save_tokenizer
from peft_models import KIND_CONFIGS
from profiles import short_first
from runs import outcome, rows_of, weights_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from zo2adapters.models.conversion import quantize
from zo2adapters.tasks.rows import RowReader, collate
from zo2core import Journal
from zo2core.ranges import OptimizerName

peft: Any = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),  # peft asks for it
    # save or load projections: peft's remark
    pytest.mark.filterwarnings("ignore:Specified to not"),
]

STEPS = 6
SCHEDULED = "--weight-decay 0.1 --warmup-steps 2 --evaluation rows.jsonl --evaluate-every 2"


class Kind(NamedTuple):
    """Options of a kind of run, and what it leaves."""

    options: str
    model: str = "base"
    has_snapshots: bool = True  # or can replay its steps; streamed blocks have neither

    @property
    def trains_adapter(self) -> bool:
        return "--lora-rank" in self.options or "--adapter" in self.options


FULL = {method: f"--method {method} --max-grad-norm 0.5" for method in get_args(OptimizerName)}
FULL["badam"] += " --switch-every 2"
KINDS = {
    "mezo": Kind(f"--method mezo {SCHEDULED} --queries 2"),
    "fzoo, clipped": Kind("--estimator fzoo --queries 3 --clip-median 2.5"),
    "low rank": Kind("--rank 2 --period 2 --queries 2"),
    "a direction a row": Kind("--rank 2 --per-row --evaluation rows.jsonl --evaluate-every 2"),
    "low rank on codes": Kind("--rank 2 --period 2", model="nf4"),
    "rewards": Kind("--reward length --estimator es --queries 2 --rank 2 --max-new-tokens 3"),
    "lora": Kind("--lora-rank 2 --lora-alpha 3"),
    "lora, frozen in part": Kind(
        "--adapter kinds/lora/adapter_config.json --adapter-frozen lora_A"
    ),
    "lora by low rank": Kind("--lora-rank 2 --rank 2"),
    "lora by sgd with momentum": Kind(
        "--lora-rank 2 --method sgd --momentum 0.9 --max-grad-norm 0.5"
    ),
    "lora by adamw": Kind(f"--lora-rank 2 --method adamw --betas 0.8 0.9 --samples 1 {SCHEDULED}"),
    "lora by adamw on codes": Kind("--lora-rank 2 --method adamw", model="nf4"),
    **{method: Kind(options) for method, options in FULL.items()},
    **{
        f"{method}, streamed": Kind(f"{FULL[method]} --stream-blocks", has_snapshots=False)
        for method in FULL
    },
    "adamw, one step late": Kind("--method adamw --delayed-update"),
    "adamw, scaled": Kind("--method adamw --loss-scaling"),
    "adamw, in 8 bits": Kind("--method adamw --state-bits 8"),
    "adamw, in 8 bits, streamed": Kind(
        "--method adamw --state-bits 8 --stream-blocks", has_snapshots=False
    ),
    **{
        f"adapter of kind {kind}": Kind(f"--adapter kinds/{kind}/adapter_config.json")
        for kind in KIND_CONFIGS
    },
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, the same one in 4 bits, rows, and configs of adapters."""
    folder = make_place(tmp_path_factory.mktemp("kinds"))
    quantize(folder / "base", folder / "nf4", "nf4")
    save_tokenizer(folder / "nf4")
    for kind, config in KIND_CONFIGS.items():
        config("llama").save_pretrained(folder / "kinds" / kind)
    return folder


SHORT = [
    "mezo",
    "a direction a row",
    "lora by adamw",
    "adamw",
    "badam, streamed",
]
SHORT += ["adapter of kind prefix"]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # peft's own call
@pytest.mark.parametrize("name", short_first(SHORT, [name for name in KINDS if name not in SHORT]))
def test_a_run_is_resumed_repeated_exported_and_evaluated_at_its_steps(
    name: str, here: Path
) -> None:
    kind = KINDS[name]
    if "--state-bits" in kind.options and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is an extra")
    is_first_order = "--method" in kind.options and "--method mezo" not in kind.options
    fixed = "--data rows.jsonl --lr 1e-2 --batch-size 3 --seed 3"
    command = f"--model {kind.model} {fixed} {kind.options}".split()
    command += ["--snapshot-every", "2"] if is_first_order and name != "badam, streamed" else []
    done("train", "--method", "zeroth-order", *command, "--output", "whole", "--steps", STEPS)
    done("train", "--method", "zeroth-order", *command, "--output", "run", "--steps", 4)
    done("train", "--resume", "run", "--steps", STEPS)
    assert_equal(weights_of("run/model"), weights_of("whole/model"))
    ours, theirs = (Journal(f"{run}/journal.jsonl") for run in ("run", "whole"))
    assert list(ours.updates) == list(theirs.updates)
    assert list(ours.commits) == list(theirs.commits)
    if "--samples" in kind.options:
        assert [sample["step"] for sample in rows_of("run/samples.jsonl")] == [0, 4, STEPS]
    assert "already started" in refusal("train", "run/recipe.yaml"), (
        "it names the directory that it was written to"
    )
    done("train", "run/recipe.yaml", "--output", "again")
    assert outcome("again") == outcome("whole")
    recipes = [yaml.safe_load(Path(run, "recipe.yaml").read_text()) for run in ("run", "again")]
    assert {**recipes[0], "output": None} == {**recipes[1], "output": None}
    assert f"{STEPS} steps" in done("journal", "run").out

    if is_first_order:
        told = refusal("export", "--run", "run", "--at", 3, "--output", "none")
        assert (
            "steps that have a snapshot: 4, 6" if kind.has_snapshots else "no snapshot of step"
        ) in told
        assert not Path("none").exists()
    if not kind.has_snapshots:
        done(
            "train",
            "--method",
            "zeroth-order",
            *command,
            "--output",
            "resident",
            "--steps",
            STEPS,
            "--no-stream-blocks",
        )
        assert_equal(weights_of("resident/model"), weights_of("run/model"))
        return
    for at, expected in ((6, "run/model"), (4, "run/model-4"), (0, "base")):
        done("export", "--run", "run", "--at", at, "--output", f"at-{at}")
        if expected != "base" or (kind.model == "base" and not kind.trains_adapter):
            assert_equal(weights_of(f"at-{at}"), weights_of(expected))
    prompted = ("--prompt", "the cat", "--max-new-tokens", 3)
    assert done("generate", "--run", "run", *prompted).out.startswith("the cat")
    if kind.options.startswith("--adapter") and "frozen" not in kind.options:
        done(
            "train",
            "--method",
            "zeroth-order",
            *command,
            "--adapter",
            "at-0",
            "--output",
            "from-0",
            "--steps",
            STEPS,
        )
        assert_equal(weights_of("from-0/model"), weights_of("whole/model"))
    if "--reward" in kind.options:
        return
    evaluate = ("--data", "rows.jsonl", "--no-base", "--batch-size", 99)
    of_run, at_start = (
        done("evaluate", "--run", "run", "--at", at, *evaluate).out for at in (6, 0)
    )
    assert at_start != of_run
    if not kind.trains_adapter:
        assert at_start == done("evaluate", "--model", kind.model, *evaluate).out
        assert "quantization_config" not in Path("at-6/config.json").read_text()
    if kind.model == "base":
        exported = (
            ("--model", "base", "--adapter", "at-6") if kind.trains_adapter else ("--model", "at-6")
        )
        told = done("evaluate", *exported, *evaluate).out
        assert "--rank" in kind.options or told == of_run, "factors are merged, and rounded once"
    elif kind.trains_adapter:
        return
    whole: Any = AutoModelForCausalLM.from_pretrained("base" if kind.trains_adapter else "at-6")
    whole = peft.PeftModel.from_pretrained(whole, "at-6").eval() if kind.trains_adapter else whole
    rows = RowReader(AutoTokenizer.from_pretrained("base"), 12).read(Path("rows.jsonl"))
    with torch.inference_mode():
        loss = whole(**collate(rows.rows, pad_token_id=0), use_cache=False).loss.item()
    assert float(of_run.split()[1].strip(",")) == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("kind", sorted(KIND_CONFIGS.keys() - {"lora", "rslora"}))
def test_adapters_that_directions_of_low_rank_cannot_train_are_refused_by_their_option(
    kind: str, here: Path
) -> None:
    adapter = ("--adapter", f"kinds/{kind}/adapter_config.json")
    told = refusal(
        "train",
        "--method",
        "zeroth-order",
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--output",
        "run",
        "--rank",
        2,
        *adapter,
    )
    assert told.startswith("zo2: --adapter: found ")
    assert not Path("run").exists()
