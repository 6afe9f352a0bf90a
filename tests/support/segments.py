"""Segments of numbers for tests of sources, schedulers and noise, and weights that count how often they are read."""

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from zo2core import BlockLayout, ParameterSpec, SegmentKind, SequentialNoise
from zo2core.checkpoint.shards import SafetensorsReader, parse_header
from zo2core.protocols import NoiseGenerator


def segments(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[BlockLayout, ...]:
    """Embedding, blocks and head of one parameter of such a size each."""
    kinds = [SegmentKind.EMBEDDING, *[SegmentKind.BLOCK] * (len(sizes) - 2), SegmentKind.HEAD]
    specs = [ParameterSpec(f"p{i}", (size,), dtype, i, decays=True) for i, size in enumerate(sizes)]
    return tuple(BlockLayout(spec.name, kind, (spec,)) for spec, kind in zip(specs, kinds, strict=True))


def tensors() -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.arange(n, dtype=torch.float32) + 100 * i for i, n in enumerate([5, 17, 1, 64, 3])}


def checkpoint(folder: Path) -> tuple[SafetensorsReader, tuple[BlockLayout, ...]]:
    values = tensors()
    save_file(values, folder / "model.safetensors")
    specs = [ParameterSpec(name, tuple(v.shape), v.dtype, i, True) for i, (name, v) in enumerate(values.items())]
    layouts = (
        BlockLayout("embedding", SegmentKind.EMBEDDING, (specs[0],)),
        BlockLayout("block 0", SegmentKind.BLOCK, (specs[1], specs[2])),
        BlockLayout("block 1", SegmentKind.BLOCK, (specs[3],)),
        BlockLayout("head", SegmentKind.HEAD, (specs[4],)),
    )
    return SafetensorsReader(parse_header(folder / "model.safetensors")), layouts


BLOCKS = 6


def layouts(blocks: int = BLOCKS) -> tuple[BlockLayout, ...]:
    return segments(range(1000, 1002 + blocks))


class CountingWeights:
    """A base that counts its reads, and can hold them up; parameter i is full of i."""

    fingerprint = "counted"

    def __init__(self) -> None:
        self.reads: Counter[int] = Counter()
        self.go = threading.Event()
        self.go.set()

    def page_offset(self, spec: ParameterSpec) -> int | None:
        return None

    def itemsize(self, parameter: str) -> int:
        return 4

    def origin(self, parameter: str) -> str:
        return "counted"

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        assert self.go.wait(10)
        out.fill_(int(parameter[1:]))
        self.reads[int(parameter[1:])] += 1

    def close(self) -> None:
        pass


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def reference(seed: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.normal(0.0, 1.0, (size,), dtype=dtype, generator=torch.Generator().manual_seed(seed))


def z_of(noise: NoiseGenerator, spec: ParameterSpec, seed: int) -> torch.Tensor:
    out = torch.empty(spec.numel, dtype=spec.dtype)
    for start, stop in noise.chunks(spec):
        noise.fill(out[start:stop], seed, spec, start)
    return out


def one_parameter(size: int, dtype: torch.dtype) -> tuple[ParameterSpec, SequentialNoise]:
    spec = ParameterSpec("p", (size,), dtype, 0, True)
    return spec, SequentialNoise([BlockLayout("s", SegmentKind.BLOCK, (spec,))])
