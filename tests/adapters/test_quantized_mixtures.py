"""Mixtures with experts in 8 or 4 bits: the bits of the decoded model, and gpt-oss as transformers decodes it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from coded_checkpoints import save_gpt_oss
from families import batch, small_config, small_model
from hypothesis import given
from hypothesis import strategies as st
from profiles import each_choice
from quantised import by_hand, bytes_of, encodings
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.quantizer import quantize
from zo2core import Engine, FirstOrder, HostPlan, LowRankPerturbation, MemoryPolicy, MeZOSGD, ZerothOrder
from zo2core.encodings import MatrixEncoding, MatrixStack, MXFP4Stack
from zo2core.errors import CheckpointError, UnsupportedModelError
from zo2core.kernels import encoding as kernels
from zo2core.kernels import native
from zo2core.kernels.encoding import encode
from zo2core.types import ParameterSpec

peft: Any = pytest.importorskip("peft")

FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "olmoe", "glm4_moe", "gpt_oss", "granitemoe"]
METHODS = ["nf4", "fp8", "int8"]
BUCKETS = [None, 2]


def save(family: str, directory: Path, **changes: Any) -> Path:
    config = small_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    model: Any = small_model(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def first_order(model: Any, buckets: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of two steps, and the trained parameters."""
    memory = MemoryPolicy(host=HostPlan((), 1 << 40, buckets, keep_noise=False))
    with Engine(model, FirstOrder(partial(torch.optim.SGD, lr=1e-2)), memory=memory) as engine:
        losses = [engine.step(batch()).loss for _ in range(2)]
        return losses, {name: value.clone() for name, value in engine.parameters_now() if "lora" in name}


def lora(targets: list[str]) -> Adapter:
    return Adapter(config=peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False), seed=1)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "method", "buckets", "targets"), each_choice(FAMILIES, METHODS, BUCKETS, [["auto"], ["auto", "experts"]])
)
def test_a_quantised_mixture_trains_as_the_decoded_one(
    family: str, method: str, buckets: int | None, targets: list[str], tmp_path: Path
) -> None:
    base = save(family, tmp_path / "base")
    left = quantize(base, tmp_path / "small", method).left
    assert not any(".experts." in spec.name and len(spec.shape) == 3 for spec in left)
    model = open_checkpoint(tmp_path / "small")
    stacks = [spec for layout in model.layouts for spec in layout.parameters if isinstance(spec.encoding, MatrixStack)]
    assert len(stacks) >= 2
    with Engine(model) as replayer:
        replayer.export(tmp_path / "plain")
    expected = first_order(open_checkpoint(tmp_path / "plain", adapter=lora(targets)), None)
    losses, learned = first_order(open_checkpoint(tmp_path / "small", adapter=lora(targets)), buckets)
    assert losses == expected[0]
    assert all(torch.equal(value, expected[1][name]) for name, value in learned.items())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # with a tensor for each expert's matrix, and with stacks
def test_each_expert_is_decoded_from_its_own_tensors(family: str, method: str, tmp_path: Path) -> None:
    base = save(family, tmp_path / "base")
    quantize(base, tmp_path / "small", method)
    with Engine(open_checkpoint(tmp_path / "small")) as replayer:
        replayer.export(tmp_path / "plain")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "plain" / "model.safetensors")
    assert before.keys() == after.keys()
    experts = [name for name in before if ".experts." in name and not name.endswith("bias")]
    assert len(experts) >= 4
    for name in experts:
        nearness = 0.2 if method == "nf4" else 0.1
        assert not torch.equal(before[name], after[name]), name
        assert (before[name].float() - after[name].float()).abs().max() <= nearness * before[name].abs().max(), name


@given(
    data=st.data(),
    matrices=st.lists(st.tuples(encodings(), st.integers(1, 6)), min_size=1, max_size=4),
    columns=st.integers(1, 24),
    compiled=st.booleans(),
)
def test_a_stack_is_its_matrices_one_after_the_other(
    data: st.DataObject, matrices: list[tuple[MatrixEncoding, int]], columns: int, *, compiled: bool
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    fitted, stored, expected = [], [], []
    for own, rows in matrices:
        encoding, parts = encode(torch.randn(rows, columns, generator=generator), own)
        fitted.append((encoding, rows))
        stored.append(bytes_of(encoding, parts, (rows, columns)))
        expected.append(by_hand(encoding, parts, (rows, columns)))
    total = sum(rows for _, rows in matrices)
    spec = ParameterSpec("w", (1, total, columns), torch.float32, 0, decays=False, encoding=MatrixStack(tuple(fitted)))
    joined, out = torch.cat(stored), torch.empty(spec.shape)
    assert spec.nbytes == len(joined)
    with patch.object(native, "decodes", native.decodes if compiled else lambda *tensors: False):
        kernels.decode(spec, joined, out)
    assert torch.equal(out[0], torch.cat(expected))


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3).map(lambda blocks: 32 * blocks), st.integers(1, 70)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
    compiled=st.booleans(),
)
def test_mxfp4_is_decoded_as_transformers_does(
    shape: tuple[int, int, int], dtype: torch.dtype, seed: int, *, compiled: bool
) -> None:
    experts, inputs, outputs = shape
    generator = torch.Generator().manual_seed(seed)
    rows = (experts, outputs, inputs // 32)
    blocks = torch.randint(256, (*rows, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(255, rows, dtype=torch.uint8, generator=generator)
    spec = ParameterSpec("w", shape, dtype, 0, decays=False, encoding=MXFP4Stack())
    out = torch.empty(shape, dtype=dtype)
    with (
        patch.object(native, "decodes", native.decodes if compiled else lambda *tensors: False),
        patch.object(kernels, "_TWO_THREADS", 1),
        ThreadPoolExecutor(1) as helper,
    ):
        kernels.decode(spec, torch.cat([blocks.view(-1), scales.view(-1)]), out, helper)
    assert torch.equal(out, convert_moe_packed_tensors(blocks, scales, dtype=dtype))


@pytest.mark.few(1)
@pytest.mark.parametrize(("targets", "buckets"), each_choice([["auto"], ["auto", "experts"]], BUCKETS))
def test_gpt_oss_trains_as_what_transformers_decodes(targets: list[str], buckets: int | None, tmp_path: Path) -> None:
    base, packed = save_gpt_oss(tmp_path)
    losses, learned = first_order(open_checkpoint(packed, adapter=lora(targets)), buckets)
    expected = first_order(open_checkpoint(base, adapter=lora(targets)), None)
    assert losses == expected[0]
    assert all(torch.equal(value, expected[1][name]) for name, value in learned.items())
    whole = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    for parameter in whole.parameters():
        parameter.data = parameter.data.clone()  # what is mapped from a file lies otherwise, and products round differently
    with Engine(open_checkpoint(packed)) as replayer:
        assert replayer.evaluate([batch()]).loss == whole(**batch(), use_cache=False).loss.item()
        replayer.export(tmp_path / "decoded")
    decoded, plain = load_file(tmp_path / "decoded" / "model.safetensors"), load_file(base / "model.safetensors")
    assert [name for name, value in plain.items() if not torch.equal(value, decoded[name])] == []


def test_low_rank_directions_leave_experts_alone_by_name(tmp_path: Path) -> None:
    _, packed = save_gpt_oss(tmp_path)
    method = ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2), perturbation=LowRankPerturbation(rank=2, period=2))
    with pytest.raises(UnsupportedModelError, match="experts"):
        Engine(open_checkpoint(packed), method)


@pytest.mark.parametrize("damage", ["no scales", "fewer scales", "a matrix of one expert less", "one of a stack less"])
def test_damaged_experts_are_refused_by_name(damage: str, tmp_path: Path) -> None:
    if damage == "a matrix of one expert less":
        path = tmp_path / "small"
        quantize(save("qwen3_moe", tmp_path / "base"), path, "nf4")
        lost = "model.layers.0.mlp.experts.1.up_proj.weight"
    elif damage == "one of a stack less":
        path = tmp_path / "small"
        quantize(save("gpt_oss", tmp_path / "base"), path, "nf4")
        lost = "model.layers.0.mlp.experts.down_proj.matrices.1.weight"
    else:
        path, lost = save_gpt_oss(tmp_path)[1], "model.layers.1.mlp.experts.down_proj_scales"
    tensors = load_file(path / "model.safetensors")
    if damage == "fewer scales":
        tensors[lost] = tensors[lost][:, 1:].contiguous()
    else:
        tensors = {name: value for name, value in tensors.items() if not name.startswith(lost)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"mlp\.experts"):
        open_checkpoint(path)
