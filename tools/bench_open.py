"""Measure the peak resident memory of opening a checkpoint and loading all of its blocks into a SegmentStore.

    python tools/bench_open.py --geometry opt-1.3b --dtype float16

The measured process loads a checkpoint with random weights, and the kernel counts its peak. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from make_checkpoint import geometries, make_checkpoint

from zo2adapters import open_checkpoint
from zo2adapters.models.checkpoint import DTYPES
from zo2core import Engine, MeZOSGD, ZerothOrder


def peak() -> int:
    """The peak of this process's resident bytes so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(directory: Path) -> dict[str, Any]:
    """Open and load; return bytes and seconds after each stage."""
    imported = peak()
    began = time.perf_counter()
    model = open_checkpoint(directory)
    engine = Engine(model, ZerothOrder(MeZOSGD(lr=1e-6, zo_eps=1e-3)))
    opened, opened_at = peak(), time.perf_counter()
    engine.flush()
    loaded, loaded_at = peak(), time.perf_counter()
    weights = sum(spec.nbytes for layout in model.layouts for spec in layout.parameters)
    engine.close()
    return {
        "weights_bytes": weights,
        "imported_bytes": imported,
        "opened_bytes": opened,
        "opened_seconds": opened_at - began,
        "loaded_bytes": loaded,
        "loaded_seconds": loaded_at - opened_at,
        "above_weights_bytes": loaded - weights,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=list(geometries()), default="opt-1.3b")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float16")
    parser.add_argument("--directory", type=Path, help="an existing checkpoint to load instead of one with random weights")
    options = parser.parse_args()
    if options.directory is not None:
        measured = measure(options.directory)
        print(f"{'':24s} {'MB':>8s} {'seconds':>8s}")
        for stage in ("imported", "opened", "loaded"):
            print(f"peak, {stage:18s} {measured[stage + '_bytes'] / 1e6:8.0f} {measured.get(stage + '_seconds', 0):8.2f}")
        for name in ("weights", "above_weights"):
            print(f"{name:24s} {measured[name + '_bytes'] / 1e6:8.0f}")
        print(json.dumps(measured))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(geometries()[options.geometry], Path(folder, "base"), dtype=DTYPES[options.dtype])
        # A new process, because making the checkpoint would count towards the peak.
        subprocess.run([sys.executable, __file__, "--directory", os.path.join(folder, "base")], check=True)


if __name__ == "__main__":
    main()
