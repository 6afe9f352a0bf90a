"""GGUF files: headers and blocks are read as the gguf package reads them; damaged ones are refused
by name.
"""

import random
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from damages import damaged
from gguf_models import SCALES, Tensor, gguf_bytes

from zo2core import ZO2Error
from zo2core.checkpoint.gguf import GGUFFile, read_gguf
from zo2core.encodings.decoding import decode
from zo2core.encodings.forms import GGUF_BLOCKS, GGUFRows
from zo2core.encodings.gguf import grid_of
from zo2core.errors import CheckpointError, OptionError, UnsupportedModelError
from zo2core.kernels import native, parallel
from zo2core.types import ParameterSpec

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "llama.block_count": 2,
    "llama.rope.freq_base": 1e4,
    "flag": True,
    "tokenizer.ggml.tokens": [f"token {number}" for number in range(400)],
    "tokenizer.ggml.token_type": [1] * 400,
    "long": "x" * 100_000,
}


def tensor(name: str, shape: tuple[int, ...], kind: str = "F32", **options: Any) -> Tensor:
    block = GGUF_BLOCKS[kind]
    return Tensor(
        name, shape, kind, bytes(int(np.prod(shape)) // block.weights * block.nbytes), **options
    )


TENSORS = [
    tensor("token_embd.weight", (400, 64), "Q4_0"),
    tensor("blk.0.attn_q.weight", (8, 256), "Q4_K"),
    tensor("output_norm.weight", (64,)),
    tensor("experts", (2, 3, 32), "F16"),
]


LONG = tensor("a", (16,))


def read(tmp_path: Path, raw: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return read_gguf(path)


def test_a_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 7)
    writer.add_float32("llama.rope.freq_base", 5e5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("tokenizer.chat_template", "é" * 50_000)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ä", ""])
    writer.add_array("scores", [0.5, -1.0])
    rng = np.random.default_rng(0)
    writer.add_tensor("a", rng.standard_normal((3, 64), dtype=np.float32))
    packed = gguf.quantize(
        rng.standard_normal((5, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q5_1
    )
    writer.add_tensor("b", packed, raw_dtype=gguf.GGMLQuantizationType.Q5_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert ours.metadata["llama.block_count"] == 7
    assert ours.metadata["llama.rope.freq_base"] == 5e5
    assert ours.metadata["tokenizer.ggml.add_bos_token"] is True
    assert ours.text("tokenizer.chat_template") == "é" * 50_000
    assert list(ours.array("tokenizer.ggml.tokens")) == ["a", "ä", ""]
    assert list(ours.array("scores")) == [0.5, -1.0]
    assert list(ours.array("absent")) == []
    raw = path.read_bytes()
    for found, expected in zip(ours.tensors.values(), theirs.tensors, strict=True):
        assert (found.name, found.dtype) == (expected.name, expected.tensor_type.name)
        assert found.shape == tuple(reversed(expected.shape.tolist()))
        assert raw[found.start : found.start + found.nbytes] == expected.data.tobytes()


def test_metadata_of_a_file_that_has_changed_since_it_was_read_is_refused(tmp_path: Path) -> None:
    file = read(tmp_path, gguf_bytes(METADATA, TENSORS))
    assert next(file.array("tokenizer.ggml.tokens")) == "token 0"
    other = {**METADATA, "tokenizer.ggml.tokens": [f"other {number}" for number in range(400)]}
    (tmp_path / "new").write_bytes(gguf_bytes(other, TENSORS))
    (tmp_path / "new").replace(file.path)
    for use in (lambda: next(file.array("tokenizer.ggml.tokens")), lambda: file.text("long")):
        with pytest.raises(CheckpointError, match="found another file in its place"):
            use()
    with pytest.raises(CheckpointError, match="found another file in its place"):
        file.tensors["output_norm.weight"].read()


def split(tmp_path: Path, count: int, *, numbers: list[int] | None = None) -> Path:
    for number in range(count):
        metadata = {
            "split.no": numbers[number] if numbers else number,
            "split.count": count,
            "split.tensors.count": count,
        }
        metadata |= METADATA if number == 0 else {}
        path = tmp_path / f"model-{number + 1:05}-of-{count:05}.gguf"
        path.write_bytes(gguf_bytes(metadata, [tensor(f"blk.{number}.ffn_up.weight", (2, 32))]))
    return tmp_path / f"model-00001-of-{count:05}.gguf"


def test_the_files_of_a_split_model_are_one(tmp_path: Path) -> None:
    model = read_gguf(split(tmp_path, 3))
    assert [entry.path.name for entry in model.tensors.values()] == [
        f"model-{n:05}-of-00003.gguf" for n in (1, 2, 3)
    ]
    assert not any(key.startswith("split.") for key in model.metadata)


def test_other_files_of_a_split_model_are_refused(tmp_path: Path) -> None:
    """Not the first one, exchanged ones, one that is missing, and one that lies elsewhere."""
    second = tmp_path / "model-00002-of-00003.gguf"
    path = split(tmp_path, 3)
    with pytest.raises(CheckpointError, match="pass the path of the file 00001"):
        read_gguf(second)
    second.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        read_gguf(path)
    second.symlink_to(tmp_path.parent / "elsewhere.gguf")
    (tmp_path / "elsewhere.gguf").rename(tmp_path.parent / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match="a link to"):
        read_gguf(path)
    second.unlink()
    with pytest.raises(CheckpointError, match="counted from 0"):
        read_gguf(split(tmp_path, 3, numbers=[0, 2, 1]))


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (b"", CheckpointError, "another beginning"),
        (b"PK" + bytes(40), CheckpointError, "another beginning"),
        (gguf_bytes(METADATA, TENSORS, version=1), UnsupportedModelError, "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), UnsupportedModelError, "big-endian"),
        (
            gguf_bytes(METADATA | {"general.alignment": 24}, TENSORS),
            CheckpointError,
            "a power of 2",
        ),
        (gguf_bytes(METADATA, [Tensor("a", (256,), 28, b"")]), UnsupportedModelError, "F64"),
        (gguf_bytes(METADATA, [Tensor("a", (256,), 99, b"")]), UnsupportedModelError, "type 99"),
        (
            gguf_bytes(METADATA, [Tensor("a", (2, 48), "Q4_0", bytes(54))]),
            CheckpointError,
            "whole blocks of 32",
        ),
        (
            gguf_bytes(METADATA, [Tensor("a", (0,), "F32", b"")]),
            CheckpointError,
            "sizes of at least 1",
        ),
        (gguf_bytes(METADATA, [Tensor("a", (1,) * 5, "F32", bytes(4))]), CheckpointError, "5 axes"),
        (
            gguf_bytes(METADATA, [tensor("a", (8,)), tensor("a", (8,))]),
            CheckpointError,
            "a name that occurs twice",
        ),
        (
            gguf_bytes(METADATA, [LONG, tensor("b", (8,), offset=32)]),
            CheckpointError,
            "where the tensor before",
        ),
        (gguf_bytes(METADATA, [tensor("a", (8,), offset=16)]), CheckpointError, "a multiple of 32"),
        (
            gguf_bytes(METADATA, [tensor("a", (8,), offset=2**40)]),
            CheckpointError,
            "data that lie in the file",
        ),
        (gguf_bytes(METADATA, TENSORS)[:-40], CheckpointError, "data that lie in the file"),
        (gguf_bytes(METADATA, TENSORS)[:900], CheckpointError, "a header that lies in the file"),
    ],
)
def test_a_wrong_file_is_refused(
    raw: bytes, error: type[ZO2Error], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, raw)


@pytest.mark.parametrize(
    ("there", "instead", "message"),
    [
        (b"bbbb", b"aaaa", "occurs twice"),
        (b"bbbb", b"\xff" * 4, "UTF-8"),
        (struct.pack("<II", 9, 5), struct.pack("<II", 9, 9), "an array of type 9"),
    ],
)
def test_wrong_metadata_are_refused(
    there: bytes, instead: bytes, message: str, tmp_path: Path
) -> None:
    raw = gguf_bytes({"aaaa": 1, "bbbb": [1, 2]}, [])
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, raw.replace(there, instead))


def test_any_damaged_file_is_read_inside_its_bounds_or_refused(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    whole = gguf_bytes(METADATA, TENSORS)
    # the tensors' part of the header lies behind the long metadata
    tables = whole.index(b"token_embd.weight") - 60
    front = gguf_bytes({"general.architecture": "llama"}, TENSORS)
    rng, refused, used, peak = random.Random(0), 0, 0, 0
    path = tmp_path / "model.gguf"
    for number in range(10_000 if pytestconfig.getoption("--long") else 2_000):
        raw = (
            whole[:tables] + damaged(whole[tables:], rng)
            if number % 4 == 0
            else damaged((whole, front)[number % 2], rng)
        )
        path.write_bytes(raw)
        try:
            tracemalloc.start() if number % 50 == 0 else None
            try:
                model = read_gguf(path)
            finally:
                peak = max(peak, tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            end = 0
            for entry in sorted(model.tensors.values(), key=lambda entry: entry.start):
                assert end <= entry.start
                end = entry.start + entry.nbytes
                assert end <= len(raw)
                assert len(entry.read()) == entry.nbytes
            for key in model.metadata:
                if not isinstance(model.metadata[key], (int, float, bool, str)):
                    use = model.text if key == "long" else model.array
                    for _ in use(key) or ():
                        pass
            used += 1
        except ZO2Error:
            refused += 1
    assert refused > used / 2
    assert used > 50
    assert 0 < peak < len(whole)


# As float16: zeros, denormals, the smallest normal number, the largest one, infinities, NaNs with
# payloads
EDGES = (
    0x0000,
    0x8000,
    0x0001,
    0x83FF,
    0x0400,
    0x3C00,
    0x7BFF,
    0xFBFF,
    0x7C00,
    0xFC00,
    0x7E00,
    0xFE01,
    0x7C01,
)


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
        codes[256 : 256 + len(pairs), at : at + 2] = np.array(edges, dtype="<u2")[:, None].view(
            np.uint8
        )
    return codes


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all bits are the same, but for what a NaN carries."""
    nan = torch.isnan(expected)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    bits_agree = found.view(integers)[~nan].equal(expected.view(integers)[~nan])
    return bits_agree and bool(torch.isnan(found)[nan].all())


def decoded(
    name: str,
    codes: np.ndarray,
    dtype: torch.dtype,
    *,
    heads: int = 0,
    offset: int = 0,
    in_threads: bool = False,
) -> torch.Tensor:
    block = GGUF_BLOCKS[name]
    shape = (len(codes), codes.shape[1] // block.nbytes * block.weights)
    spec = ParameterSpec("weight", shape, dtype, 0, decays=False, encoding=GGUFRows(name, heads))
    memory = torch.empty(codes.size + offset, dtype=torch.uint8)
    stored = memory[offset:]
    stored.copy_(torch.from_numpy(codes.reshape(-1)))
    assert spec.nbytes == stored.numel()
    out = torch.empty(shape, dtype=dtype)
    decode(spec, stored, out, in_threads=in_threads)
    return out


@pytest.fixture(params=["compiled", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no compiled kernels")
    return str(request.param)


@pytest.mark.parametrize("name", GGUF_BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_blocks_have_the_bits_of_the_gguf_package(
    name: str, dtype: torch.dtype, kernels: str
) -> None:
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
    # as transformers does
    expected = weights.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(rows, -1)
    assert not expected.equal(weights)
    assert same_bits(decoded(name, codes, torch.float32, heads=heads), expected)


def test_types_whose_values_another_package_has_are_refused_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid_of.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(OptionError, match=r"IQ2_S; expected the package gguf.*pip install gguf"):
        decoded("IQ2_S", edge_blocks("IQ2_S", np.random.default_rng(0)), torch.float32)


@pytest.mark.parametrize("heads", [0, 5])
def test_two_threads_decode_the_same(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "thread_count", lambda: 2)
    codes = np.random.default_rng(2).integers(
        0, 60, (530, GGUF_BLOCKS["Q4_K"].nbytes * 4), dtype=np.uint8
    )
    alone = decoded("Q4_K", codes, torch.bfloat16, heads=heads)
    assert same_bits(decoded("Q4_K", codes, torch.bfloat16, heads=heads, in_threads=True), alone)
