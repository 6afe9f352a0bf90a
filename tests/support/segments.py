"""Segments of numbers for tests of sources and schedulers."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from zo2core import BlockLayout, ParameterSpec, SegmentKind
from zo2core.checkpoint.shards import SafetensorsReader, parse_header


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
