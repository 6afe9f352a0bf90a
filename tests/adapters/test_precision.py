"""Three dtypes a parameter: what is chosen, that nothing is cast inside the forward, what runs and
exports keep of it.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from command_lines import done, refusal
from engines import assert_equal, inner, memory, weights
from models import CONFIGS, make_batch, save_model, small_config
from parity import assert_same_bits, assert_steps_alike
from peft_models import lora, monolithic, values_of
from runs import finish, rows_of, small_run, weights_of
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GptOssConfig
from whole_loops import WholeModel

from zo2adapters import Adapter, Architecture, MonolithicMeZO, Precision, open_checkpoint
from zo2adapters.models.architecture import faster_half
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import RunModelOptions, TrainOptions
from zo2adapters.trainers.run_inputs import RunStart
from zo2adapters.trainers.trainer import QUIET, open_run
from zo2core import (
    Distribution,
    Engine,
    EngineOptions,
    FirstOrder,
    Journal,
    MeZOSGD,
    TorchOptimizer,
    ZerothOrder,
)
from zo2core.errors import BusyError, JournalError, OptionError
from zo2core.kernels import Draw, dispatch, native
from zo2core.kernels.matmul_precision import changes_products, matmul_precision
from zo2core.ranges import MatmulPrecision
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
        with open_run(
            RunStart(replace(options, output=tmp_path / name, **changes)),
            display=QUIET,
        ) as trainer:
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
    with open_run(RunStart(options), display=QUIET) as trainer:
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
                monkeypatch.setattr(native, "library", lambda: None)
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


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
ON_CPU = torch.device("cpu")


def wide(folder: Path) -> Path:
    """A base with products that are large enough for a library's fast ones."""
    return save_model(folder / "wide", small_config("llama", num_key_value_heads=4, **WIDE))


@pytest.mark.parametrize("precision", get_args(MatmulPrecision))
@pytest.mark.parametrize("buckets", [None, 2])
def test_steps_have_the_bits_of_the_whole_model_in_each_precision_of_products(
    tmp_path: Path, precision: MatmulPrecision, buckets: int | None
) -> None:
    base = wide(tmp_path)
    batch = make_batch(40, [12, 7])
    whole = WholeModel(base)
    optimizer = torch.optim.SGD(whole.parameters.values(), lr=1e-2)
    mezo = MonolithicMeZO(
        AutoModelForCausalLM.from_pretrained(base, dtype="auto"), lr=1e-3, zo_eps=1e-3
    )
    expected = []
    with matmul_precision(precision):
        for seed in range(2):
            expected.append((whole.backward([batch]), mezo.step(batch, seed).losses))
            optimizer.step()
    options = EngineOptions(matmul_precision=precision)
    shared: dict[str, Any] = {"memory": memory(buckets), "options": options}
    update = TorchOptimizer(partial(torch.optim.SGD, lr=1.0))
    model = open_checkpoint(base)
    with Engine(
        model, FirstOrder(update, lr=1e-2), memory=memory(), options=options
    ) as first_order:
        losses = [first_order.step(batch).loss for _ in range(2)]
        assert_equal(dict(first_order.parameters_now()), whole.parameters)
    with Engine(open_checkpoint(base), MEZO, **shared) as zeroth_order:
        pairs = [zeroth_order.step(batch, seed=seed).losses for seed in range(2)]
        assert zeroth_order.evaluate([batch]).loss != pytest.approx(0)
        assert_equal(weights(zeroth_order), dict(mezo.model.named_parameters()))
    assert list(zip(losses, pairs, strict=True)) == expected


@pytest.mark.skipif(
    not changes_products("medium", ON_CPU), reason="this processor has no faster products"
)
@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "up_proj"]])
def test_faster_products_change_a_run_and_an_adapter_has_the_bits_of_peft_in_them(
    tmp_path: Path, targets: list[str]
) -> None:
    base = wide(tmp_path)
    config = lora(target_modules=targets, init_lora_weights=False, r=4)
    batch = make_batch(40, [12, 12, 9, 12])
    values = values_of(open_checkpoint(base, adapter=Adapter(config=config, seed=1)))
    losses: dict[MatmulPrecision, list[float]] = {}
    precisions: tuple[MatmulPrecision, ...] = ("highest", "medium")
    for precision in precisions:
        whole = WholeModel(monolithic(base, config, values))
        trained = [p for p in whole.parameters.values() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        expected = []
        with matmul_precision(precision):
            for _ in range(2):
                expected.append(whole.backward([batch]))
                optimizer.step()
        model = open_checkpoint(base, adapter=Adapter(config=config, seed=1))
        method = FirstOrder(partial(torch.optim.AdamW, lr=1e-2))
        options = EngineOptions(matmul_precision=precision)
        with Engine(model, method, memory=memory(2), options=options) as engine:
            losses[precision] = [engine.step(batch).loss for _ in range(2)]
            trained_values = dict(engine.parameters)
        assert losses[precision] == expected
        assert_equal(trained_values, {name: whole.parameters[name] for name in trained_values})
    assert losses["highest"] != losses["medium"]


def backends() -> tuple[str, str]:
    """The precisions of torch's backends."""
    onednn: Any = torch.backends.mkldnn
    return torch.backends.cuda.matmul.fp32_precision, onednn.matmul.fp32_precision


@pytest.fixture
def cuda_alone() -> Iterator[None]:
    """A process that has chosen the precision of one backend only."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


class RefusingObjective:
    """The model's forward, which fails in the head."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seen: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def head(self, batch: Any, activations: Any) -> torch.Tensor:
        self.seen.append(backends())
        raise ArithmeticError("the head")


@pytest.mark.usefixtures("cuda_alone")
def test_the_setting_of_the_process_is_put_back_after_each_sweep_also_one_that_fails(
    base: Path,
) -> None:
    before = backends()
    options = EngineOptions(matmul_precision="medium")
    model = open_checkpoint(base)
    with Engine(model, MEZO, options=options) as engine:
        engine.step(BATCH)
        assert backends() == before
        objective = RefusingObjective(model)
        with pytest.raises(ArithmeticError):
            engine.step(BATCH, objective)
        assert objective.seen == [("tf32", "bf16")]
        assert backends() == before
    with pytest.raises(OptionError, match="that differ"):
        Engine(open_checkpoint(base), MEZO)


def test_a_run_keeps_its_precision_of_products(base: Path, tmp_path: Path) -> None:
    for begun, others in (("high", ["highest", "medium"]), ("highest", ["high"])):
        path = tmp_path / f"{begun}.jsonl"

        def opened(precision: Any, path: Path = path) -> Engine:
            options = EngineOptions(matmul_precision=precision)
            return Engine(open_checkpoint(base), MEZO, journal=path, options=options)

        with opened(begun) as engine:
            engine.step(BATCH)
        for other in others:
            with pytest.raises(JournalError, match="matmul_precision"):
                opened(other)
        with opened(None) as engine:
            assert inner(engine)._run.matmul_precision == begun
    with pytest.raises(OptionError, match=r"'tf32'.*highest, high or medium"):
        opened("tf32")


def test_two_threads_cannot_compute_in_two_precisions() -> None:
    before = backends()
    with matmul_precision("high"), matmul_precision("high"):
        said = "medium, while another engine computes with high"
        with pytest.raises(BusyError, match=said), matmul_precision("medium"):
            pass
        assert torch.get_float32_matmul_precision() == "high"
    assert backends() == before


def test_train_says_what_a_precision_of_products_does_and_resumes_with_no_other(
    tmp_path: Path,
) -> None:
    small_run(tmp_path)
    here = ["--model", tmp_path / "base", "--data", tmp_path / "rows.jsonl"]
    run = ["train", *here, "--output", tmp_path / "run", "--lr", "1e-2", "--batch-size", "2"]
    ended = done(*run, "--steps", "2", "--matmul-precision", "medium", "--method", "zeroth-order")
    says = "for products of float32 matrices on cpu"
    if not changes_products("medium", ON_CPU):
        says = "has no effect: on cpu it gives the products of highest"
    assert says in ended.out + ended.err
    header = json.loads((tmp_path / "run" / "journal.jsonl").read_text().splitlines()[0])
    assert header["matmul_precision"] == "medium"
    other = refusal("train", "--resume", tmp_path / "run", "--matmul-precision", "high")
    assert "medium, as in the run" in other
    done("evaluate", "--run", tmp_path / "run", "--data", tmp_path / "rows.jsonl")
