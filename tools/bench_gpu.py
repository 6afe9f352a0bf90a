"""Measure the one-pass kernel and the bus on a GPU: bytes a second, compared with a plain copy.

    python tools/bench_gpu.py --output gpu.json

Weights are larger than any cache. Bytes are those that a kernel has to move: weights read and written and, if there is one,
the perturbed copy written. *MeZO in torch* is the perturbation of MeZO's own loop: z is drawn into a new tensor, then
multiplied and added. Times are between CUDA events, medians over the rounds. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import keep

from zo2core import CudaDevice, Distribution
from zo2core.kernels import dispatch
from zo2core.types import Descend, Perturb, Program

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WARM_UP, ROUNDS = 3, 20


def seconds(work: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """The seconds of each round, by the GPU's clock."""
    spans: list[float] = []
    for number in range(WARM_UP + rounds):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        started.record()
        work()
        ended.record()
        ended.synchronize()
        if number >= WARM_UP:
            spans.append(started.elapsed_time(ended) / 1e3)
    return spans


def rates(nbytes: int, spans: list[float]) -> dict[str, float]:
    """Bytes a second: the median and range."""
    per_second = [nbytes / span for span in spans]
    return {"median": statistics.median(per_second), "min": min(per_second), "max": max(per_second)}


def kernels(dtype: torch.dtype, elements: int) -> dict[str, dict[str, float]]:
    """Measure copies, perturbations and replays of one tensor of weights."""
    theta = torch.empty(elements, dtype=dtype, device="cuda").normal_(0.0, 0.02)
    out = torch.empty_like(theta)
    size = theta.nbytes
    perturbations: tuple[Perturb | Descend, ...] = tuple(Perturb(0, shift, 1e-3) for shift in (1.0, -2.0, 1.0))
    update = (*perturbations, Descend(0, 0.5, lr=1e-6, weight_decay=0.0))
    measured = {"copy": rates(2 * size, seconds(lambda: out.copy_(theta)))}

    def mezo() -> None:
        z = torch.normal(mean=0, std=1, size=theta.shape, device="cuda", dtype=dtype)
        theta.add_(z * 1e-3)

    measured["MeZO in torch, perturb"] = rates(2 * size, seconds(mezo))
    for distribution in Distribution:
        programs = {
            "fill": None,
            "perturb into a buffer": Program((1,), (), then=Perturb(0, 1.0, 1e-3)),
            "replay and perturb": Program((1, 2), update, then=Perturb(1, 1.0, 1e-3)),
        }
        for name, program in programs.items():
            moved = {"fill": 1, "perturb into a buffer": 2, "replay and perturb": 3}[name] * size

            def work(program: Program | None = program, distribution: Distribution = distribution) -> None:
                if program is None:
                    dispatch.fill(out, distribution, 1, 0, 0)
                else:
                    dispatch.apply_drawing(theta, program, distribution, 0, 0, out=out)

            measured[f"{name}, {distribution.value}"] = rates(moved, seconds(work))
    return measured


def bus(nbytes: int) -> dict[str, dict[str, float]]:
    """Measure copies between page-locked memory and the GPU, in each direction and in both at once."""
    device = CudaDevice()
    host = [device.host_memory(nbytes) for _ in range(2)]
    on_device = [device.empty(nbytes) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]

    def both() -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            on_device[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(on_device[1], non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    measured = {
        "up": rates(nbytes, seconds(lambda: on_device[0].copy_(host[0], non_blocking=True))),
        "back": rates(nbytes, seconds(lambda: host[1].copy_(on_device[1], non_blocking=True))),
        "each way, both at once": rates(nbytes, seconds(both)),
    }
    device.close()
    return measured


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 29)
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    measured: dict[str, Any] = {
        "machine": {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cuda": torch.version.cuda},
        "elements": options.elements,
        "rounds": ROUNDS,
        "bytes_per_second": {str(dtype): kernels(dtype, options.elements) for dtype in DTYPES} | {"bus": bus(1 << 30)},
    }
    print(f"{'GB/s':50s} {'median':>8s} {'min':>8s} {'max':>8s}")
    for group, results in measured["bytes_per_second"].items():
        for name, values in results.items():
            print(f"{group + ': ' + name:50s} " + " ".join(f"{values[key] / 1e9:8.1f}" for key in ("median", "min", "max")))
    keep(measured, options.output)


if __name__ == "__main__":
    main()
