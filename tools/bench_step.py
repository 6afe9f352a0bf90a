"""Time a step of this engine against monolithic MeZO, alternating in one process, and divide the time.

    python tools/bench_step.py --geometry opt-125m --dtype float32 --batch 1 --tokens 256

Prints JSON and a table: medians, their spread, the ratio pair by pair, and how the engine's step divides into noise,
arithmetic and forward (measured apart, each alone, over the same segments).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from make_checkpoint import geometries, make_checkpoint
from transformers import AutoModelForCausalLM

from zo2adapters import MonolithicMeZO, open_checkpoint
from zo2adapters.checkpoint import DTYPES
from zo2core import MeZOSGD, SequentialNoise, ZOEngine
from zo2core.types import Batch


def timed(function: Callable[[], object]) -> float:
    """Seconds one call takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def noise_seconds(engine: ZOEngine, model_layouts: object) -> float:
    """Seconds to draw one direction for the whole model on one thread."""
    noise = SequentialNoise(engine.layouts)
    out = torch.empty(1 << 16, dtype=torch.float32)
    specs = sorted((spec for layout in engine.layouts for spec in layout.parameters), key=lambda spec: spec.index)

    def draw() -> None:
        for spec in specs:
            piece = out.to(spec.dtype)
            for start, stop in noise.pieces(spec):
                noise.fill(piece[: stop - start], 1, spec, start)
        noise.retain(())

    return timed(draw)
