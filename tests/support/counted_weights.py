"""Weights that count how often they are read."""

from __future__ import annotations

import threading
from collections import Counter

import torch

from zo2core import BlockLayout, ParameterSpec, SegmentKind

BLOCKS = 6


def layouts(blocks: int = BLOCKS) -> tuple[BlockLayout, ...]:
    specs = [ParameterSpec(f"p{i}", (1000 + i,), torch.float32, i, True) for i in range(blocks + 2)]
    kinds = [SegmentKind.EMBEDDING, *[SegmentKind.BLOCK] * blocks, SegmentKind.HEAD]
    return tuple(BlockLayout(spec.name, kind, (spec,)) for spec, kind in zip(specs, kinds, strict=True))


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
