"""Fused LoRA layers: bits of peft's, in fewer passes, and peft's own path elsewhere."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_batch, save_model, small_config
from profiles import each_choice
from safetensors.torch import load_file
from torch import nn

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models import fused_lora
from zo2core import Engine, FirstOrder
from zo2core.errors import ZO2Warning
from zo2core.kernels import thin

peft = pytest.importorskip("peft")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(20,), (3, 5), (2, 3, 33)]  # of rows and tokens


class Projections(nn.Module):
    """Two projections that read one input, and one that reads what they compute."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.left = nn.Linear(inputs, outputs, bias=bias)
        self.right = nn.Linear(inputs, outputs, bias=bias)
        self.last = nn.Linear(outputs, inputs, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.last(self.left(x) * self.right(x))
        return result


def adapted(dtype: torch.dtype, *, bias: bool = False, **options: Any) -> nn.Module:
    """The projections with LoRA layers whose matrices are not zero."""
    torch.default_generator.manual_seed(0)
    model: nn.Module = Projections(40, 72, bias=bias).to(dtype)
    config = peft.LoraConfig(target_modules=["left", "right", "last"], **options)
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape) / 8
    return model.eval()


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of the input and of all trained parameters."""
    x = x.detach().requires_grad_()
    output = model(x)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(3)
    gradient = torch.randn(output.shape, generator=generator).to(output.dtype)
    return [output, *torch.autograd.grad(output, [x, *trained], gradient)]


def drawn_input(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((*shape, 40), generator=torch.Generator().manual_seed(2)).to(dtype)


def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of what is added to the outputs of fused layers from now on."""
    calls: list[torch.Size] = []

    def counted(out: torch.Tensor, *arguments: Any, **options: Any) -> None:
        calls.append(out.shape)
        thin.thin_product(out, *arguments, **options)

    monkeypatch.setattr(fused_lora, "thin_product", counted)
    return calls


def has_known_orders(rows: int, rank: int, *widths: int) -> bool:
    """Whether this machine's library adds in orders that are known, so that layers are fused."""
    return thin.sums_in_order(rows, rank, *widths)


@pytest.mark.few(9)
@pytest.mark.parametrize(
    ("dtype", "rank", "shape", "bias"),
    each_choice(DTYPES, [1, 2, 3, 8, 9, 16, 33, 64], SHAPES, [False, True]),
)
def test_a_fused_layer_has_the_bits_of_pefts(
    dtype: torch.dtype,
    rank: int,
    shape: tuple[int, ...],
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = adapted(dtype, bias=bias, r=rank, lora_alpha=3, use_rslora=rank == 8)
    x = drawn_input(shape, dtype)
    expected = gradients(model, x)
    fused_lora.fuse(model.modules())
    calls = fused_calls(monkeypatch)
    for value, of_peft in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(value, of_peft, rtol=0, atol=0)
    is_fused = has_known_orders(x.numel() // 40, rank, 40, 72)
    assert len(calls) == (6 if is_fused else 0), "three layers, forward and back"
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected[0], rtol=0, atol=0)


def test_only_what_needs_a_gradient_gets_one() -> None:
    model = adapted(torch.bfloat16, r=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    x = drawn_input((3, 5), torch.bfloat16)
    expected = gradients(model, x)
    fused_lora.fuse(model.modules())
    for value, of_peft in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(value, of_peft, rtol=0, atol=0)
    output = model(x)  # the first layers' input needs no gradient
    assert output.grad_fn is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_has_the_gradients_of_pefts(dtype: torch.dtype) -> None:
    """At rank 1 the forward's sums agree, and the gradients are products of vectors."""
    model = adapted(dtype, r=1)
    x = drawn_input((1, 1), dtype)
    expected = gradients(model, x)
    fused_lora.fuse(model.modules())
    for value, of_peft in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(value, of_peft, rtol=0, atol=0)


OWN_PATH: dict[str, dict[str, Any]] = {
    "dropout": {"lora_dropout": 0.5},
    "DoRA": {"use_dora": True},
    "a bias in the adapter": {"lora_bias": True, "bias": True},
    "a rank whose products are as fast in the library": {"r": 65},
}


@pytest.mark.parametrize("name", OWN_PATH)
def test_other_layers_take_pefts_own_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(torch.float32, **{"r": 4, **OWN_PATH[name]})
    calls = fused_calls(monkeypatch)
    fused_lora.fuse(model.modules())
    gradients(model, drawn_input((3, 5), torch.float32))
    assert not calls


@pytest.mark.parametrize("is_known", [False, True])
def test_a_line_says_where_the_order_of_sums_is_unknown(
    monkeypatch: pytest.MonkeyPatch, *, is_known: bool
) -> None:
    model = adapted(torch.float32, r=4)
    fused_lora.fuse(model.modules())
    monkeypatch.setattr(fused_lora, "sums_in_order", lambda *_: False)
    monkeypatch.setattr(fused_lora, "knows_library", lambda: is_known)
    line = "most LoRA layers run peft's own passes"
    with nullcontext() if is_known else pytest.warns(ZO2Warning, match=line):
        gradients(model, drawn_input((3, 5), torch.float32))


@pytest.mark.parametrize("case", ["one row", "autocast", "disabled", "merged", "other sums"])
def test_a_fused_layer_takes_pefts_path_where_that_computes_something_else(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = adapted(torch.float32, r=4)
    fused_lora.fuse(model.modules())
    x = drawn_input((1,) if case == "one row" else (3, 5), torch.float32)
    if case == "disabled":
        model.left.enable_adapters(False)
    elif case == "merged":
        model.left.merge()
    elif case == "other sums":
        monkeypatch.setattr(fused_lora, "sums_in_order", lambda *_: False)
    calls = fused_calls(monkeypatch)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        output = model.left(x)
        fused_lora.unfuse(model.modules())
        assert torch.equal(output, model.left(x))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_runs_fused_layers_with_the_bits_of_pefts(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = save_model(tmp_path / "base", small_config("llama", **sizes), dtype)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "up_proj", "lm_head"])
    batch = make_batch(40, [7, 5])
    calls = fused_calls(monkeypatch)

    def outcome(folder: Path, *, is_fused: bool) -> list[float]:
        with monkeypatch.context() as patch:
            if not is_fused:
                patch.setattr(fused_lora, "fuse", lambda modules: None)
            model = open_checkpoint(base, adapter=Adapter(config=config), precision="exact")
        with Engine(model, FirstOrder(partial(torch.optim.AdamW, lr=1e-2))) as engine:
            losses = [engine.step(batch).loss for _ in range(3)]
            losses.append(engine.evaluate([batch]).loss)
            engine.export(folder)
        return losses

    plain = outcome(tmp_path / "plain", is_fused=False)
    assert not calls
    assert outcome(tmp_path / "fused", is_fused=True) == plain
    names = ["q_proj", "up_proj"] * 2 + ["lm_head"]
    forwards = 3 * 2 + 1  # each step runs a segment twice, unless its graph is kept
    if has_known_orders(14, 8, 64, 20, 40):
        assert len(calls) >= (forwards - 3) * len(names), "layers of blocks are fused, too"
    adapters = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "fused")
    )
    first, second = adapters
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
