"""Numbers as torch draws them, and as a noise generator does."""

from __future__ import annotations

import torch

from zo2core import BlockLayout, ParameterSpec, SegmentKind, SequentialNoise
from zo2core.protocols import NoiseGenerator

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
