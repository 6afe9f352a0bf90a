"""Checkpoints of GPTQ, AWQ and compressed-tensors: the bits of the model that is decoded by their published layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from coded_checkpoints import FORMATS, random_matrix, save_four_bits
from families import batch
from hypothesis import given
from hypothesis import strategies as st
from profiles import each_choice
from safetensors.torch import load_file, save_file

from zo2adapters import Adapter, open_checkpoint
from zo2core import Engine, FirstOrder, HostPlan, LowRankPerturbation, MemoryPolicy, MeZOSGD, ZerothOrder
from zo2core.encodings import FourBitGroups
from zo2core.errors import CheckpointError, UnsupportedModelError
from zo2core.kernels import encoding as kernels
from zo2core.kernels import native
from zo2core.types import ParameterSpec

peft: Any = pytest.importorskip("peft")


def encoding_of(kind: str, columns: int, group: int, tensors: Mapping[str, torch.Tensor]) -> FourBitGroups:
    name, _, option = kind.partition(", ")
    group = columns if option == "channels" else 16 if name == "nvfp4" else group
    has_zeros = name not in ("int4", "nvfp4") or "weight_zero_point" in tensors
    return FourBitGroups(name, group, torch.float16, has_zeros, option == "ordered")


@given(
    kind=st.sampled_from(FORMATS),
    rows=st.integers(1, 9).map(lambda count: 8 * count),
    columns=st.integers(1, 6).map(lambda count: 16 * count),
    group=st.sampled_from([8, 16, 24, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 9),
    askew=st.integers(0, 3),
    compiled=st.booleans(),
)
def test_matrices_are_decoded_by_their_published_layouts(
    kind: str, rows: int, columns: int, group: int, dtype: torch.dtype, seed: int, askew: int, *, compiled: bool
) -> None:
    tensors, weights = random_matrix(kind, rows, columns, group, seed)
    encoding = encoding_of(kind, columns, group, tensors)
    roles = {"codes": ("qweight", "weight_packed"), "scales": ("scales", "weight_scale"), "global": ("weight_global_scale",)}
    roles |= {"zeros": ("qzeros", "weight_zero_point"), "order": ("g_idx",)}
    parts = [next(tensors[name] for name in roles[part.role] if name in tensors) for part in encoding.parts((rows, columns))]
    stored = torch.cat([torch.zeros(askew, dtype=torch.uint8), *(part.reshape(-1).view(torch.uint8) for part in parts)])[
        askew:
    ]
    spec = ParameterSpec("w", (rows, columns), dtype, 0, decays=False, encoding=encoding)
    assert spec.nbytes == len(stored)
    out = torch.empty(spec.shape, dtype=dtype)
    with (
        patch.object(native, "decodes", native.decodes if compiled else lambda *tensors: False),
        patch.object(kernels, "_TWO_THREADS", 1),
        ThreadPoolExecutor(1) as helper,
    ):
        kernels.decode(spec, stored, out, helper)
    assert torch.equal(out, weights.to(dtype))


def first_order(model: Any, buckets: int | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    memory = MemoryPolicy(host=HostPlan((), 1 << 40, buckets, keep_noise=False))
    with Engine(model, FirstOrder(partial(torch.optim.SGD, lr=1e-2)), memory=memory) as engine:
        losses = [engine.step(batch()).loss for _ in range(2)]
        return losses, {name: value.clone() for name, value in engine.parameters_now() if "lora" in name}


def lora() -> Adapter:
    return Adapter(config=peft.LoraConfig(r=2, target_modules=["auto"], init_lora_weights=False), seed=1)


@pytest.mark.few(4)
@pytest.mark.parametrize(("kind", "family", "buckets"), each_choice(FORMATS, ["llama", "qwen3_moe", "mixtral"], [None, 2]))
def test_a_model_trains_as_the_decoded_one(kind: str, family: str, buckets: int | None, tmp_path: Path) -> None:
    plain, coded = save_four_bits(kind, tmp_path, family)
    model = open_checkpoint(coded)
    encoded = [spec for layout in model.layouts for spec in layout.parameters if spec.encoding is not None]
    assert len(encoded) >= 8
    losses, learned = first_order(open_checkpoint(coded, adapter=lora()), buckets)
    expected = first_order(open_checkpoint(plain, adapter=lora()))
    assert losses == expected[0]
    assert all(torch.equal(value, expected[1][name]) for name, value in learned.items())
    with Engine(model) as replayer:
        replayer.export(tmp_path / "decoded")
    decoded, before = load_file(tmp_path / "decoded" / "model.safetensors"), load_file(plain / "model.safetensors")
    assert [name for name, value in before.items() if not torch.equal(value, decoded[name])] == []


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_low_rank_directions_only_read_the_base(kind: str, tmp_path: Path) -> None:
    losses = []
    for path in save_four_bits(kind, tmp_path):
        method = ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-2), seed=5, perturbation=LowRankPerturbation(rank=2, period=2))
        with Engine(open_checkpoint(path), method) as engine:
            losses.append([engine.step(batch()).losses for _ in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("gptq", {"bits": 3}, "gptq of 3 bits"),
        ("gptq", {"dynamic": {"+:.*0.*": {"bits": 4}}}, "gptq"),
        ("gptq", {"checkpoint_format": "marlin"}, "gptq"),
        ("awq", {"version": "gemv"}, "awq"),
        ("int4", {"format": "marlin-24"}, "compressed-tensors in format marlin-24"),
        ("int4", {"config_groups": {}}, "compressed-tensors"),
        ("nvfp4", {"transform_config": {"config_groups": {"R": 1}}}, "compressed-tensors"),
    ],
)
def test_what_is_not_decoded_is_refused_by_name(kind: str, change: dict[str, Any], told: str, tmp_path: Path) -> None:
    _, coded = save_four_bits(kind, tmp_path)
    config = json.loads((coded / "config.json").read_bytes())
    config["quantization_config"] |= change
    (coded / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=f"quantization_config: {told}"):
        open_checkpoint(coded)


@pytest.mark.parametrize(
    ("kind", "name", "damage"),
    [
        ("gptq", "qzeros", lambda value: value[:, :-1].contiguous()),
        ("gptq", "scales", lambda value: value.int()),
        ("gptq, ordered", "g_idx", lambda value: value + 1000),
        ("awq", "qweight", lambda value: value[:-1].contiguous()),
        ("int4", "weight_scale", lambda value: value[:-1].contiguous()),
        ("nvfp4", "weight_global_scale", None),
    ],
)
def test_damaged_tensors_are_refused_by_name(kind: str, name: str, damage: Any, tmp_path: Path) -> None:
    _, coded = save_four_bits(kind, tmp_path)
    tensors = load_file(coded / "model.safetensors")
    changed = next(key for key in sorted(tensors) if key.endswith(f"down_proj.{name}"))
    if damage is None:
        del tensors[changed]
    else:
        tensors[changed] = damage(tensors[changed])
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="down_proj"):
        open_checkpoint(coded)
