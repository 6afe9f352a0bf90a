"""Three dtypes a parameter: what is chosen, that nothing is cast inside the forward, what runs and
exports keep of it.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import done, refusal
from engines import assert_equal
from models import CONFIGS, make_batch, save_model, small_config
from parity import assert_same_bits, assert_steps_alike
from runs import finish, rows_of, small_run, weights_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GptOssConfig

from zo2adapters import Architecture, MonolithicMeZO, Precision, open_checkpoint
from zo2adapters.models.architecture import faster_half
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import RunModelOptions, TrainOptions
from zo2adapters.trainers.trainer import Trainer
from zo2core import Distribution, Engine, Journal, MeZOSGD, ZerothOrder
from zo2core.errors import OptionError
from zo2core.kernels import Draw, dispatch
from zo2core.types import Descend, Lane, Perturb, Program

BATCH = make_batch(40, [12, 7])
MEZO = ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", small_config("llama"), torch.bfloat16)


def test_dtypes_that_do_not_go_together_are_refused(base: Path) -> None:
    wrong: list[tuple[Any, Any, Any]] = [
        (torch.int8, None, None),
        (torch.bfloat16, torch.float16, None),
        (torch.float32, torch.float64, None),
        (torch.float64, torch.bfloat16, None),
        (torch.float32, torch.bfloat16, torch.float64),
        (torch.float16, None, torch.bfloat16),
    ]
    for stored, computed, transfer_dtype in wrong:
        with pytest.raises(OptionError, match="precision"):
            Precision(stored=stored, computed=computed, transfer_dtype=transfer_dtype)
    float32 = Precision(stored=torch.float32)
    others: list[tuple[Any, str, str]] = [
        ("half", "auto", "precision"),
        ("mixed", "float32", "dtype"),
    ]
    for precision, dtype, said in [*others, (float32, "bfloat16", "dtype")]:
        with pytest.raises(OptionError, match=said):
            open_checkpoint(base, precision=precision, dtype=dtype)


def test_auto_is_mixed_for_weights_of_16_bits_only(base: Path, tmp_path: Path) -> None:
    wide = save_model(tmp_path / "wide", small_config("llama"), torch.float32)
    assert open_checkpoint(base, precision="auto").autocast in (torch.bfloat16, torch.float16)
    assert open_checkpoint(base, precision="exact").autocast is None
    assert open_checkpoint(wide, precision="auto").autocast is None
    assert (
        open_checkpoint(
            base, precision=Precision(stored=torch.float32, computed=torch.float16)
        ).autocast
        is torch.float16
    )
    assert faster_half({torch.bfloat16: 3.0, torch.float16: 1.0}.__getitem__) is torch.float16
    assert faster_half({torch.bfloat16: 1.0, torch.float16: 0.9}.__getitem__) is torch.bfloat16


_CONVERSIONS = [
    torch.ops.aten._to_copy.default,
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.dtype_layout,
]


class Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the shapes of all tensors that are converted to another dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _CONVERSIONS and out.dtype is not args[0].dtype:
            self.shapes.add(tuple(args[0].shape))
        return out


@pytest.mark.few(3)
@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("tied", [True, False])
def test_no_weight_is_cast_inside_the_forward(model_type: str, tied: bool, tmp_path: Path) -> None:
    base = save_model(
        tmp_path / "base", small_config(model_type, tie_word_embeddings=tied), torch.bfloat16
    )
    model = open_checkpoint(base, precision="mixed", dtype="bfloat16", loss_chunk=None)
    matrices = {
        spec.shape for layout in model.layouts for spec in layout.parameters if len(spec.shape) > 1
    }
    with Engine(model, MEZO) as engine, Casts() as casts:
        engine.step(BATCH)
    assert casts.shapes, "masks and hidden states are converted"
    assert not casts.shapes & matrices


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_an_export_is_rounded_once_its_config_says_to_what_and_the_base_stays(
    base: Path, dtype: str, tmp_path: Path
) -> None:
    written, before = (
        torch.bfloat16 if dtype == "auto" else getattr(torch, dtype),
        (base / "model.safetensors").read_bytes(),
    )
    model = open_checkpoint(base, precision="mixed", export_dtype=dtype)
    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3))) as engine:
        for _ in range(3):
            engine.step(BATCH)
        engine.export(tmp_path / "out")
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
        for name, tensor in engine.parameters_now():
            assert_same_bits(name, exported.get_parameter(name).data, tensor.to(written))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(
        written
    ).removeprefix("torch.")
    assert (base / "model.safetensors").read_bytes() == before


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return small_run(tmp_path, layers=2, dtype=torch.float16, steps=4)


def test_a_run_writes_down_and_says_its_precision_and_what_it_costs(
    options: TrainOptions, tmp_path: Path
) -> None:
    def notice(name: str, **changes: Any) -> str:
        with Trainer(replace(options, output=tmp_path / name, **changes), quiet=True) as trainer:
            assert trainer.options.model_options.precision == (
                "mixed" if name == "mixed" else "exact"
            )
            return str(trainer.notices()[0])

    assert notice("mixed").startswith("precision: mixed, weights in float32, computed in ")
    kept = json.loads((tmp_path / "mixed" / "options.json").read_text())["options"]
    header = Journal(tmp_path / "mixed" / "journal.jsonl").header
    assert header is not None
    assert (kept["precision"], kept["dtype"]) == ("mixed", header["model"]["autocast"])
    assert kept["batching"]["loss_chunk"] >= 1
    line = notice("exact", model_options=RunModelOptions(precision="exact"))
    assert line.startswith("precision: exact, all in float16")
    assert "--precision mixed" in line
    assert "times as long as in bfloat16" in line
    notice("exact MeZO", optimization=Optimization(method="mezo", lr=1e-2))
    line = notice("rank", optimization=replace(options.optimization, rank=8))
    assert line.startswith(
        "precision: exact, computed in float16; weights are only read, updates add up in float32"
    )
    assert "rounded away" not in line
    assert "--precision mixed" not in line


def test_a_mixed_run_resumed_and_exported_ends_as_the_undisturbed_one(
    options: TrainOptions, tmp_path: Path
) -> None:
    undisturbed = replace(options, output=tmp_path / "undisturbed")
    finish(undisturbed)
    with Trainer(options, quiet=True) as trainer:
        rows = {"input_ids": torch.tensor([[3, 4, 6]]), "labels": torch.tensor([[3, 4, 6]])}
        assert trainer.engine.evaluate([rows]).loss > 0
        trainer.engine.close()
    done("train", "--resume", options.output)
    assert_equal(weights_of(options.output / "model"), weights_of(undisturbed.output / "model"))
    export = ("export", "--run", options.output, "--output")
    done(*export, tmp_path / "same", "--precision", "mixed")
    assert "expected mixed, as in the run" in refusal(
        *export, tmp_path / "other", "--precision", "exact"
    )
    assert not (tmp_path / "other").exists()
    done(*export, tmp_path / "wide", "--output-dtype", "float32")
    assert {tensor.dtype for tensor in weights_of(tmp_path / "wide").values()} == {torch.float32}


@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_kernels_round_results_once(
    stored: torch.dtype, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = (5, 6)
    own = (Perturb(0, 1.0, 1e-3), Descend(1, 0.5, 1e-2, 0.1))
    for then in (None, Perturb(1, -2.0, 1e-3)):
        program = Program(seeds, own, then)
        outcomes = []
        for compiled in (True, False):
            if not compiled:
                monkeypatch.setattr(dispatch, "library", lambda: None)
            theta = torch.randn(3000, generator=torch.Generator().manual_seed(1)).to(stored)
            out = None if then is None else torch.empty(3000, dtype=stored)
            rounded = torch.empty(3000, dtype=computed)
            dispatch.apply(
                theta, program, Draw(Distribution.GAUSSIAN, 9, 777), out=out, rounded=rounded
            )
            outcomes.append((theta, theta if out is None else out, rounded))
            assert_same_bits("rounded", rounded, outcomes[-1][1].to(computed))
            alone = torch.empty(3000, dtype=computed)
            if then is not None:
                start = torch.randn(3000, generator=torch.Generator().manual_seed(1)).to(stored)
                dispatch.apply(start, program, Draw(Distribution.GAUSSIAN, 9, 777), out=alone)
                assert_same_bits("without a copy that is not rounded", alone, rounded)
        monkeypatch.undo()
        for ours, theirs in zip(*outcomes, strict=True):
            assert_same_bits("compiled and reference", ours, theirs)


def test_what_is_read_of_the_base_counts_as_it_is_on_disk(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama", num_hidden_layers=3), torch.bfloat16)
    with Engine(open_checkpoint(base, precision="mixed"), MEZO) as engine:
        rows = torch.tensor([[3, 4, 6]])
        read = engine.step({"input_ids": rows, "labels": rows}).lanes[Lane.READ].nbytes
    weights = sum(
        parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(base).parameters()
    )
    assert read == 2 * weights


@pytest.mark.few(1)
@pytest.mark.parametrize("given", [[], ["--precision", "exact"], ["--precision", "mixed"]])
def test_the_base_is_evaluated_as_a_run_on_it_evaluates_it(
    given: list[str], options: TrainOptions
) -> None:
    """In the precision of ``zo2 train`` by default, too: that of a model and of a run at step 0 is
    one loss.
    """
    rows = ("--data", options.data, "--batch-size", 3)
    output = ("--output", options.output, "--evaluation", options.data, "--steps", 1)
    done("train", "--method", "zeroth-order", "--model", options.model, *rows, *output, *given)
    first = rows_of(options.output / "metrics.jsonl")[0]["evaluation_loss"]
    for what in (("--model", options.model, *given), ("--run", options.output, "--at", 0)):
        assert done("evaluate", *what, *rows).out.startswith(f"loss {first:.6f}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_that_transformers_keeps_in_float32_are_float32(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    shape: Any = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "head_dim": 4,
        "max_position_embeddings": 4096,
    }
    heads: Any = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    config = GptOssConfig(
        vocab_size=40, num_hidden_layers=2, tie_word_embeddings=False, **shape, **heads
    )
    architecture = Architecture(
        model_type="gpt_oss",
        embedding=("model.embed_tokens",),
        blocks="model.layers",
        head=("model.norm", "lm_head"),
    )
    base = save_model(tmp_path / "base", config, dtype)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    assert whole.model.norm.weight.dtype is (torch.float32 if dtype is torch.float16 else dtype)
    monolithic, batch = MonolithicMeZO(whole, lr=1e-2, zo_eps=1e-2), make_batch(40, [6, 5])
    with Engine(
        open_checkpoint(base, architecture=architecture), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2))
    ) as engine:
        assert_steps_alike(engine, monolithic, [batch] * 2)
        engine.export(tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert_equal(dict(exported.named_parameters()), dict(whole.named_parameters()))
