"""Blocks of GGUF files: decoded to the bits of the gguf package, by the compiled kernels and by the reference."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
from gguf_models import SCALES

from zo2core.encodings import GGUF_BLOCKS, GGUFRows
from zo2core.errors import OptionError
from zo2core.kernels import dispatch
from zo2core.kernels.encoding import decode, grid_of
from zo2core.types import ParameterSpec

# As float16: zeros, denormals, the smallest normal number, the largest one, infinities, NaNs with payloads
EDGES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01)


def oracle(codes: np.ndarray, name: str) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.array(gguf.dequantize(codes, gguf.GGMLQuantizationType[name])))


def edge_blocks(name: str, rng: np.random.Generator) -> np.ndarray:
    """(blocks, bytes): every byte takes every value, and scales take all edges, in all pairs."""
    block = GGUF_BLOCKS[name]
    pairs = [(first, second) for first in EDGES for second in EDGES]
    codes = rng.integers(0, 256, (512, block.nbytes), dtype=np.uint8)
    codes[:256] = np.arange(256, dtype=np.uint8)[:, None] + np.arange(block.nbytes, dtype=np.uint8)
    for at, edges in zip(SCALES.get(name, ()), zip(*pairs, strict=True), strict=False):
        codes[: len(pairs), at : at + 2] = np.array(edges, dtype="<u2")[:, None].view(np.uint8)
        codes[256 : 256 + len(pairs), at : at + 2] = np.array(edges, dtype="<u2")[:, None].view(np.uint8)
    return codes


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all bits are the same, but for what a NaN carries."""
    nan = torch.isnan(expected)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    bits_agree = found.view(integers)[~nan].equal(expected.view(integers)[~nan])
    return bits_agree and bool(torch.isnan(found)[nan].all())


def decoded(
    name: str, codes: np.ndarray, dtype: torch.dtype, *, heads: int = 0, offset: int = 0, workers: int = 0
) -> torch.Tensor:
    block = GGUF_BLOCKS[name]
    shape = (len(codes), codes.shape[1] // block.nbytes * block.weights)
    spec = ParameterSpec("weight", shape, dtype, 0, decays=False, encoding=GGUFRows(name, heads))
    memory = torch.empty(codes.size + offset, dtype=torch.uint8)
    stored = memory[offset:]
    stored.copy_(torch.from_numpy(codes.reshape(-1)))
    assert spec.nbytes == stored.numel()
    out = torch.empty(shape, dtype=dtype)
    if workers:
        with ThreadPoolExecutor(workers) as pool:
            decode(spec, stored, out, pool)
    else:
        decode(spec, stored, out)
    return out


@pytest.fixture(params=["compiled", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(dispatch, "library", lambda: None)
    elif dispatch.library() is None:
        pytest.skip("no compiled kernels")
    return str(request.param)


@pytest.mark.parametrize("name", GGUF_BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_blocks_have_the_bits_of_the_gguf_package(name: str, dtype: torch.dtype, kernels: str) -> None:
    blocks = edge_blocks(name, np.random.default_rng(0))
    for across in (1, 4, 16):  # 16 blocks of 256 are more than the kernel decodes at once
        codes = blocks.reshape(len(blocks) // across, -1)
        expected = oracle(codes, name)
        found = decoded(name, codes, dtype, offset=across % 3)
        assert same_bits(found, expected.to(found.dtype))


@pytest.mark.parametrize("name", ["F32", "F16", "Q4_0", "Q6_K"])
def test_rows_of_heads_are_put_back(name: str, kernels: str) -> None:
    heads, rows, block = 3, 24, GGUF_BLOCKS[name]
    codes = np.random.default_rng(1).integers(0, 60, (rows, block.nbytes * 2), dtype=np.uint8)
    weights = oracle(codes, name)
    expected = weights.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(rows, -1)  # as transformers does
    assert not expected.equal(weights)
    assert same_bits(decoded(name, codes, torch.float32, heads=heads), expected)


def test_types_whose_values_another_package_has_are_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    grid_of.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(OptionError, match=r"IQ2_S; expected the package gguf.*pip install gguf"):
        decoded("IQ2_S", edge_blocks("IQ2_S", np.random.default_rng(0)), torch.float32)


@pytest.mark.parametrize("heads", [0, 5])
def test_two_threads_decode_the_same(heads: int) -> None:
    codes = np.random.default_rng(2).integers(0, 60, (530, GGUF_BLOCKS["Q4_K"].nbytes * 4), dtype=np.uint8)
    alone = decoded("Q4_K", codes, torch.bfloat16, heads=heads)
    assert same_bits(decoded("Q4_K", codes, torch.bfloat16, heads=heads, workers=1), alone)
