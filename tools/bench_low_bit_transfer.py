"""Compare six combinations of transfer dtype and place of replay, at three ratios of compute to transfer.

    python tools/bench_low_bit_transfer.py --output low-bit-transfer.json
    python tools/bench_low_bit_transfer.py --gpu --geometry opt-1.3b --tokens 2048        # behind a GPU's own bus

The bus is simulated (``threaded_device.py``): copies run in threads at a given rate, in both directions simultaneously. The
CPU is both device and host, so the host's work for a device (replaying and rounding: the lane 'host') takes cores from the
device's compute, unlike with a GPU. A ratio of 4 means that a sweep computes four times as long as the transfer of float32
blocks in one direction takes. ``--gpu`` uses a real GPU and bus. All configurations run mixed precision, bfloat16 under
autocast, with the default noise, and alternate in one process. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_overlap import WARM_UP, estimator, keep, machine, spread
from make_checkpoint import geometries, make_checkpoint
from threaded_device import ThreadedDevice, ThreadedStreams

from zo2adapters import Precision, open_checkpoint
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.verification import random_batch
from zo2core import CudaDevice, DevicePlan, Distribution, Engine, MemoryPolicy, PhiloxNoise, ZerothOrder
from zo2core.planning.low_bit import Replay
from zo2core.types import Batch, Lane, StepResult

RATIOS = (0.25, 1.0, 4.0)  # ratios of compute to the transfer of float32 blocks in one direction


class Configuration(NamedTuple):
    """A transfer dtype and a place of replay."""

    name: str
    transfer_dtype: torch.dtype | None  # None transfers blocks as they are stored
    transfer_back: bool  # whether blocks return from the device in that dtype
    replay: Replay


FP8 = torch.float8_e4m3fn
CONFIGURATIONS = (
    Configuration("float32, both ways", None, transfer_back=False, replay="device"),
    Configuration("bfloat16, both ways (ZO2)", torch.bfloat16, transfer_back=True, replay="device"),
    Configuration("float8, both ways (ZO2)", FP8, transfer_back=True, replay="device"),
    Configuration("float32, replayed by the host", None, transfer_back=False, replay="host"),
    Configuration("bfloat16, replayed by the host", torch.bfloat16, transfer_back=False, replay="host"),
    Configuration("float8, replayed by the host", FP8, transfer_back=False, replay="host"),
)


def opened(directory: Path, configuration: Configuration | None = None) -> HFBlockModel:
    """The model in mixed precision."""
    transfer_dtype, back = (
        (None, False) if configuration is None else (configuration.transfer_dtype, configuration.transfer_back)
    )
    return open_checkpoint(
        directory,
        precision=Precision(
            stored=torch.float32, computed=torch.bfloat16, transfer_dtype=transfer_dtype, transfer_back=back
        ),
    )


def compute_seconds(directory: Path, batch: Batch) -> float:
    """The seconds of a sweep's replay and forwards without transfers."""
    with Engine(opened(directory), ZerothOrder(estimator(), noise=PhiloxNoise(Distribution.RADEMACHER))) as engine:
        steps = [engine.step(batch).lanes for _ in range(WARM_UP + 3)]
    return min(lanes[Lane.REPLAY].busy_seconds + lanes[Lane.EVALUATE].busy_seconds for lanes in steps)


def on_a_bus(rate: float) -> ThreadedDevice:
    """A device behind a simulated bus of ``rate`` bytes a second in each direction."""
    return ThreadedDevice(ThreadedStreams(lambda lane, nbytes: nbytes / rate, poison=False))


def bench(directory: Path, batch: Batch, rate: float | None, steps: int) -> dict[str, Any]:
    """Measure all configurations, step by step in turn, on a bus of ``rate`` bytes a second; None uses a GPU's own bus."""
    measured: dict[str, list[StepResult]] = {configuration.name: [] for configuration in CONFIGURATIONS}
    with ExitStack() as opened_engines:
        engines: dict[str, Engine] = {}
        for configuration in CONFIGURATIONS:
            device = CudaDevice() if rate is None else on_a_bus(rate)
            opened_engines.enter_context(closing(device))
            engines[configuration.name] = opened_engines.enter_context(
                Engine(
                    opened(directory, configuration),
                    ZerothOrder(estimator(), noise=PhiloxNoise(Distribution.RADEMACHER)),
                    device=device,
                    replay=configuration.replay,
                    memory=MemoryPolicy(device=DevicePlan((), 1 << 40, kept=0, activation_bytes=1 << 28)),
                )
            )
        for number in range(WARM_UP + steps):
            for name, engine in engines.items():
                result = engine.step(batch)
                if number >= WARM_UP:
                    measured[name].append(result)
    return {name: report(results) for name, results in measured.items()}


def report(results: list[StepResult]) -> dict[str, Any]:
    """Summarise one configuration: seconds, bytes and busy lanes of a step."""
    lanes = [result.lanes for result in results]
    compute = [use[Lane.REPLAY].busy_seconds + use[Lane.EVALUATE].busy_seconds for use in lanes]
    return {
        "seconds": spread([result.seconds for result in results]),
        "compute": spread(compute),
        **{lane.value: spread([use[lane].busy_seconds for use in lanes]) for lane in (Lane.UPLOAD, Lane.OFFLOAD, Lane.HOST)},
        "uploaded_bytes": spread([use[Lane.UPLOAD].nbytes for use in lanes])["median"],
        "offloaded_bytes": spread([use[Lane.OFFLOAD].nbytes for use in lanes])["median"],
    }


def table(measured: dict[str, Any]) -> str:
    """Format the results as a table."""
    lines: list[str] = []
    for ratio, sides in measured["ratios"].items():
        base = sides[CONFIGURATIONS[0].name]["seconds"]["median"]
        rate = measured["rates"].get(ratio)
        lines.append(ratio if rate is None else f"compute to transfer {ratio}: {rate / 1e9:.2f} GB/s each way")
        lines.append(f"  {'':32s}{'step':>8s}{'share':>8s}{'up':>9s}{'back':>9s}{'compute':>9s}{'upload':>8s}{'host':>8s}")
        for name, side in sides.items():
            seconds = side["seconds"]["median"]
            lines.append(
                f"  {name:32s}{seconds:8.3f}{seconds / base:8.2f}{side['uploaded_bytes'] / 1e6:7.0f}MB"
                f"{side['offloaded_bytes'] / 1e6:7.0f}MB{side['compute']['median']:9.3f}{side['upload']['median']:8.3f}"
                f"{side['host']['median']:8.3f}"
            )
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="opt-125m", choices=sorted(geometries()))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--gpu", action="store_true", help="use a GPU and its own bus instead of a simulated one")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    options = parser.parse_args()
    measured: dict[str, Any] = {"machine": machine(), "geometry": options.geometry, "rows": options.rows}
    measured |= {"tokens": options.tokens, "steps": options.steps, "rates": {}, "ratios": {}}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        make_checkpoint(geometries()[options.geometry], directory, dtype=torch.bfloat16)
        model = opened(directory)
        batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
        if options.gpu:
            measured["ratios"][torch.cuda.get_device_name(0)] = bench(directory, batch, None, options.steps)
            options.ratios = []
        nbytes = sum(layout.nbytes for layout in model.layouts if not layout.resident)
        compute = compute_seconds(directory, batch) if options.ratios else math.nan
        for ratio in options.ratios:
            rate = nbytes * ratio / compute
            measured["rates"][str(ratio)] = rate
            measured["ratios"][str(ratio)] = bench(directory, batch, rate, options.steps)
    print(table(measured))
    keep(measured, options.output, indent=1)


if __name__ == "__main__":
    main()
