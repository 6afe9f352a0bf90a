"""Speed of decoding each type of GGUF's blocks, beside a copy of the same memory.

Figures are GB of decoded weights a second, as of a copy of the decoded matrix: the median of several passes over a matrix
that no cache holds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from zo2core.kernels import native
from zo2core.kernels.encoding import decode
from zo2core.types import GGUF_BLOCKS, GGUFRows, NF4Blocks, ParameterSpec

ROWS, COLUMNS = 4096, 11008  # of Llama-7B's largest matrix
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The median time of a call, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def measure(dtype: torch.dtype, repeats: int, pool: ThreadPoolExecutor | None) -> dict[str, float]:
    """GB a second, by type."""
    out = torch.empty(ROWS, COLUMNS, dtype=dtype)
    nbytes = out.numel() * out.itemsize
    source = torch.ones_like(out)
    speeds = {"copy": nbytes / seconds(lambda: out.copy_(source), repeats) / 1e9}
    columns = COLUMNS // 256 * 256
    memory = out.view(-1)[: ROWS * columns]
    for name in [*GGUF_BLOCKS, "nf4"]:
        encoding = NF4Blocks() if name == "nf4" else GGUFRows(name)
        spec = ParameterSpec("weight", (ROWS, columns), dtype, 0, decays=False, encoding=encoding)
        stored = torch.randint(0, 60, (spec.nbytes,), dtype=torch.uint8)
        taken = seconds(partial(decode, spec, stored, memory, pool), repeats)
        speeds[name] = memory.numel() * memory.itemsize / taken / 1e9
    return speeds


def main() -> None:
    """Measure, and write a JSON file and a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    assert native.library() is not None, "the compiled kernels are measured"
    results = {}
    with ThreadPoolExecutor(1) as pool:
        for threads, helper in ((1, None), (2, pool)):
            torch.set_num_threads(threads)
            for name, dtype in DTYPES.items():
                results[f"{name}, {threads} threads"] = measure(dtype, options.repeats, helper)
    print(f"{'GB/s':8}" + "".join(f"{column:>24}" for column in results))
    for kind in next(iter(results.values())):
        print(f"{kind:8}" + "".join(f"{speeds[kind]:24.2f}" for speeds in results.values()))
    if options.output is not None:
        found = {"matrix": [ROWS, COLUMNS], "cpus": os.cpu_count(), "GB a second": results}
        options.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
