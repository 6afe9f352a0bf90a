"""Compare six combinations of transfer dtype and place of replay, at three ratios of compute to transfer.

    python tools/bench.py low-bit-transfer
    python tools/bench.py low-bit-transfer --gpu --geometry opt-1.3b --tokens 2048        # behind a GPU's own bus

The bus is simulated (``threaded_device.py``). The CPU is both device and host, so the host's work for a device (replaying
and rounding: the lane 'host') takes cores from the device's compute, unlike with a GPU. A ratio of 4 means that a sweep
computes four times as long as the transfer of float32 blocks in one direction takes. All configurations run mixed precision,
bfloat16 under autocast.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from make_checkpoint import geometries
from measuring import add_sizes, alternate, checkpoint, lanes_of, no_block_on_device, ratio, spread, zeroth_order

from benches.overlap import bus_rate, simulated_bus
from zo2adapters import Precision, open_checkpoint
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.verification import random_batch
from zo2core import CudaDevice, Engine
from zo2core.planning.run_spec import Replay
from zo2core.types import Batch


class Configuration(NamedTuple):
    """A transfer dtype and a place of replay."""

    transfer_dtype: torch.dtype | None  # None transfers blocks as they are stored
    transfer_back: bool  # whether blocks return from the device in that dtype
    replay: Replay


CONFIGURATIONS = {
    "float32, both ways": Configuration(None, transfer_back=False, replay="device"),
    "bfloat16, both ways (ZO2)": Configuration(torch.bfloat16, transfer_back=True, replay="device"),
    "float8, both ways (ZO2)": Configuration(torch.float8_e4m3fn, transfer_back=True, replay="device"),
    "float32, replayed by the host": Configuration(None, transfer_back=False, replay="host"),
    "bfloat16, replayed by the host": Configuration(torch.bfloat16, transfer_back=False, replay="host"),
    "float8, replayed by the host": Configuration(torch.float8_e4m3fn, transfer_back=False, replay="host"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", default="opt-125m", choices=sorted(geometries()))
    add_sizes(parser, tokens=256)
    ratios = "ratios of compute to the transfer of float32 blocks in one direction"
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 1.0, 4.0], help=ratios)
    parser.add_argument("--gpu", action="store_true", help="use a GPU and its own bus instead of a simulated one")


def opened_model(directory: Path, transfer_dtype: torch.dtype | None = None, *, back: bool = False) -> HFBlockModel:
    """The model in mixed precision."""
    low_bit: Any = {"transfer_dtype": transfer_dtype, "transfer_back": back}
    return open_checkpoint(directory, precision=Precision(stored=torch.float32, computed=torch.bfloat16, **low_bit))


def run(options: argparse.Namespace) -> dict[str, Any]:
    with checkpoint(options.geometry, torch.bfloat16) as directory:
        model = opened_model(directory)
        batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
        if options.gpu:
            return {torch.cuda.get_device_name(0): bench(directory, batch, None, options.steps)}
        with Engine(model, zeroth_order()) as engine:
            equal_rate = bus_rate(model, engine, batch)
        return {
            f"compute to transfer {ratio:g}, {equal_rate * ratio / 1e9:.2f} GB/s each way": bench(
                directory, batch, equal_rate * ratio, options.steps
            )
            for ratio in options.ratios
        }


def bench(directory: Path, batch: Batch, rate: float | None, steps: int) -> dict[str, Any]:
    """Measure all configurations on a bus of ``rate`` bytes a second; None uses a GPU's own bus."""
    with ExitStack() as opened:
        engines: dict[str, Engine] = {}
        for name, configuration in CONFIGURATIONS.items():
            device = opened.enter_context(closing(CudaDevice() if rate is None else simulated_bus(rate)))
            model = opened_model(directory, configuration.transfer_dtype, back=configuration.transfer_back)
            memory = no_block_on_device(1 << 28)
            engines[name] = opened.enter_context(
                Engine(model, zeroth_order(), device=device, replay=configuration.replay, memory=memory)
            )
        measured = alternate({name: partial(engine.step, batch) for name, engine in engines.items()}, steps)
    first = measured[next(iter(CONFIGURATIONS))].seconds
    return {
        name: {"step": spread(side.seconds), "to the first": ratio(side.seconds, first), **lanes_of(side.results)}
        for name, side in measured.items()
    }
