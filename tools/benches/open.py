"""Measure the peak resident memory of opening a checkpoint and loading all of its blocks into a SegmentStore.

    python tools/bench.py open --geometry opt-1.3b --dtype float16

A process of its own loads a checkpoint with random weights, and the kernel counts its peak.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from make_checkpoint import geometries
from measuring import checkpoint, in_process, timed

from zo2adapters import open_checkpoint
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.trainers.allocator import peak_memory
from zo2core import Engine, MeZOSGD, ZerothOrder


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", choices=list(geometries()), default="opt-1.3b")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float16")


def opened(directory: Path) -> dict[str, Any]:
    """Open and load; the bytes and seconds after each stage."""
    imported = peak_memory()
    seconds, engine = timed(lambda: Engine(open_checkpoint(directory), ZerothOrder(MeZOSGD(lr=1e-6, zo_eps=1e-3))))
    after_opening = peak_memory()
    loading, _ = timed(engine.flush)
    loaded = peak_memory()
    engine.close()
    weights = sum(spec.nbytes for layout in open_checkpoint(directory).layouts for spec in layout.parameters)
    return {
        "weights_bytes": weights,
        "above weights_bytes": loaded - weights,
        "peaks": {
            "imported": {"peak_bytes": imported, "seconds": 0.0},
            "opened": {"peak_bytes": after_opening, "seconds": seconds},
            "loaded": {"peak_bytes": loaded, "seconds": loading},
        },
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    with checkpoint(options.geometry, DTYPES[options.dtype]) as base:
        return in_process(opened, base)
