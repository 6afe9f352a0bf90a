"""Measure the tables of the ZO2 paper: this engine against monolithic MeZO with its weights on the device.

    python tools/bench_paper.py                                       on a GPU, models that fit it and the host's memory
    python tools/bench_paper.py --on bus --scale 16 --bus 1e9         without a GPU: smaller models, a simulated bus
    python tools/bench_paper.py --on disk --scale 16 --tables ablation

Prints the tables, with the paper's ratios next to the measured ones, and JSON.

Both sides of a row run in this process, one after the other, with the same weights, batches and seeds; with MeZO's own noise
their losses have to be equal, and the JSON tells whether they are. The first step loads, the second warms up, then steps are
timed one by one, and a last, untimed step measures memory. '-' marks what did not fit or failed; the JSON has the reason.
Weights are synthetic (see ``paper_models.py``). The blocks of a model that exceeds the host's memory share buckets, which
the output then says.

Without a GPU width, heads, vocabulary and tokens are divided by ``--scale``; depth stays. Blocks, embedding, activations and
logits then shrink by its square, and so does the A100's memory by default: ratios of memory, and what does not fit, compare
with the paper's. Speed does not: work shrinks by the third power, and a CPU with a simulated bus differs from a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import geometries
from paper_places import LR, ZO_EPS, Bus, Cuda, Disk, Place, wall_seconds
from paper_tables import TABLES, Figures, Row, Variant
from paper_variants import NOISES, Noise
from synthetic import scaled, whole_model
from transformers import PretrainedConfig

from zo2adapters import MonolithicMeZO
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.models.footprint import activation_bytes
from zo2core import MemoryPolicy, ZO2Error
from zo2core.planning.memory import Machine, free_memory
from zo2core.planning.run_spec import RunRequest, plan_device_memory
from zo2core.ranges import parse_size
from zo2core.types import Batch, BlockLayout

A100_MEMORY = 80e9  # bytes of the paper's GPU
HOST_SHARE = 0.8  # share of the free host memory that blocks may take, page-locked
WARM_UP = 2  # steps
MEZO_TEMPORARIES = 4  # tensors of the largest parameter's size: z, products, the new weights


@dataclass(frozen=True)
class Measured:
    """The measurements of one side of a row."""

    seconds: tuple[float, ...]  # seconds of each step
    tokens_per_second: float  # rate of the median step
    memory_bytes: int
    moved_bytes: Mapping[str, float]  # bytes a step, by lane
    shared_buckets: int | None  # number of buckets that all blocks share; None: each block has its own bytes
    losses: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Missing:
    """The reason why there is no measurement."""

    reason: str


Outcome = Measured | Missing


def batch_of(vocab_size: int, rows: int, tokens: int, device: torch.device) -> Batch:
    """A batch of random tokens without padding."""
    ids = torch.randint(vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "labels": ids}


def timed(place: Place, step: Callable[[int], tuple[float, ...]], steps: int) -> tuple[list[float], list[tuple[float, ...]]]:
    """Run steps of ascending seeds; return seconds and losses."""
    losses: list[tuple[float, ...]] = []
    seconds = [wall_seconds(place, partial(lambda seed: losses.append(step(seed)), seed)) for seed in range(steps)]
    return seconds, losses


class Bench:
    """Measures settings, and each setting once.

    Args:
        place: The place to measure in.
        scale: Divisor of geometries and lengths.
        steps: Number of timed steps.
        noise: The engine's noise.
    """

    def __init__(self, place: Place, *, scale: int, steps: int, noise: Noise) -> None:
        self._place = place
        self._scale = scale
        self._steps = steps
        self._noise = noise
        self._found: dict[tuple[Any, ...], Outcome] = {}

    def config(self, row: Row) -> PretrainedConfig:
        """The scaled geometry of a row."""
        return scaled(geometries()[row.model], self._scale, self.tokens(row))

    def tokens(self, row: Row) -> int:
        """The scaled length of a row."""
        return row.tokens // self._scale

    def side(self, row: Row, dtype: torch.dtype, variant: Variant | None) -> Outcome:
        """Measure the engine in a variant, or monolithic MeZO."""
        key = (row.model, dtype, row.batch, row.tokens, variant)
        if key not in self._found:
            name = "monolithic MeZO" if variant is None else f"engine {variant.value}"
            print(f"{row.model} {dtype} {row.batch} x {self.tokens(row)}: {name}", file=sys.stderr, flush=True)
            try:
                self._found[key] = self._monolithic(row, dtype) if variant is None else self._engine(row, dtype, variant)
            except (ZO2Error, torch.OutOfMemoryError) as error:
                self._found[key] = Missing(f"{type(error).__name__}: {error}".splitlines()[0])
        return self._found[key]

    def _monolithic(self, row: Row, dtype: torch.dtype) -> Outcome:
        place, config, tokens = self._place, self.config(row), self.tokens(row)
        cut = place.model(config, dtype)
        try:
            sizes = [spec.nbytes for layout in cut.layouts for spec in layout.parameters]
            needed = sum(sizes) + MEZO_TEMPORARIES * max(sizes) + activation_bytes(config, row.batch, tokens, streams=1)
            if needed > (free := place.free_memory()):
                return Missing(f"needs about {needed / 1e6:.0f} MB of the device's memory, {free / 1e6:.0f} MB are free")
            mezo = MonolithicMeZO(whole_model(config, dtype, place.torch_device, cut.weights), lr=LR, zo_eps=ZO_EPS)
        finally:
            cut.weights.close()
        batch = batch_of(config.vocab_size, row.batch, tokens, place.torch_device)
        seconds, losses = timed(place, lambda seed: mezo.step(batch, seed).losses, WARM_UP + self._steps)
        # Parameters are converted one by one: a list of them would keep the old weights alive with the new ones.
        held = (parameter.data for parameter in mezo.model.parameters())
        peak = place.peak_bytes(lambda: mezo.step(batch, len(losses)), held)
        return self._measured(row, seconds, losses, peak, {}, None)

    def _engine(self, row: Row, dtype: torch.dtype, variant: Variant) -> Outcome:
        place, config, tokens = self._place, self.config(row), self.tokens(row)
        model = place.model(config, dtype)
        kept, free = self._room(model.layouts, activation_bytes(config, row.batch, tokens))
        if variant is Variant.RESIDENT and kept < config.num_hidden_layers:
            return Missing(f"{kept} of {config.num_hidden_layers} blocks fit into {free / 1e6:.0f} MB")
        offloaded = place.offload(model, variant, self._noise)
        if offloaded is None:
            return Missing("no such variant here: blocks are computed on in their buckets")
        engine, parts, traffic, shared = offloaded
        batch = batch_of(config.vocab_size, row.batch, tokens, place.torch_device)

        def step(seed: int) -> tuple[float, ...]:
            losses = engine.step(batch, seed=seed).losses
            if variant is Variant.EAGER:
                engine.flush()  # an own sweep for the update
            return losses

        with parts, engine:
            seconds, losses = timed(place, step, WARM_UP)
            traffic.nbytes = dict.fromkeys(traffic.nbytes, 0)
            more, others = timed(place, lambda seed: step(seed + WARM_UP), self._steps)
            moved = {lane.value: nbytes / self._steps for lane, nbytes in traffic.nbytes.items() if nbytes}
            peak = place.peak_bytes(lambda: step(WARM_UP + self._steps), [])
        return self._measured(row, seconds + more, losses + others, peak, moved, shared)

    def _room(self, layouts: Sequence[BlockLayout], activations: int) -> tuple[int, int]:
        """The number of blocks that could stay on the device, and its free bytes. Raises if the two slots do not fit."""
        free = self._place.free_memory()
        noise = self._noise(layouts, self._place.torch_device)
        memory = MemoryPolicy(device=free, activations=activations)
        request = RunRequest(layouts=layouts, on_disk=layouts, noise=noise, perturb_in_place=True, memory=memory)
        return plan_device_memory(request, Machine(in_place=False, on_host=False)).kept, free

    def _measured(
        self,
        row: Row,
        seconds: list[float],
        losses: list[tuple[float, ...]],
        peak: int,
        moved: Mapping[str, float],
        shared: int | None,
    ) -> Measured:
        settled = tuple(seconds[WARM_UP:])
        speed = row.batch * self.tokens(row) / statistics.median(settled)
        return Measured(settled, speed, peak, moved, shared, tuple(losses))


def ratio(a: float | None, b: float | None) -> float | None:
    """The ratio of two numbers; None if one is missing."""
    return None if a is None or b is None else a / b


def ratios(ours: Outcome | Figures, theirs: Outcome | Figures) -> dict[str, float | None]:
    """The engine's memory and speed relative to MeZO's, as printed in the paper or as measured."""
    return {what: ratio(*(_value(side, what) for side in (ours, theirs))) for what in ("memory", "speed")}


def _value(side: Outcome | Figures, what: str) -> float | None:
    if isinstance(side, Figures):
        return side.memory.value if what == "memory" else side.speed.value
    if isinstance(side, Missing):
        return None
    return side.memory_bytes if what == "memory" else side.tokens_per_second


def report(bench: Bench, row: Row, dtype: torch.dtype) -> dict[str, Any]:
    """Measure one row; return all its results as JSON values."""
    config = bench.config(row)
    theirs = bench.side(row, dtype, None)
    measured: dict[str, Any] = {
        "model": row.model,
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "vocabulary": config.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": row.batch,
        "tokens": bench.tokens(row),
        "monolithic": asdict(theirs),
        "variants": {},
    }
    full = row.zo2[Variant.FULL]
    for variant, printed in row.zo2.items():
        ours = bench.side(row, dtype, variant)
        equal: bool | None = None
        if isinstance(ours, Measured) and isinstance(theirs, Measured) and ours.shared_buckets is None:
            equal = ours.losses == theirs.losses
        measured["variants"][variant.value] = {
            **asdict(ours),
            "losses_equal_monolithic": equal,
            "to_monolithic": ratios(ours, theirs),
            "to_full": ratios(ours, bench.side(row, dtype, Variant.FULL)),
            "paper": {
                "memory_mb": printed.memory.value,
                "tokens_per_second": printed.speed.value,
                "to_monolithic": ratios(printed, row.monolithic),
                "to_full": ratios(printed, full),
            },
        }
    measured["paper_monolithic"] = {
        "memory_mb": row.monolithic.memory.value,
        "tokens_per_second": row.monolithic.speed.value,
    }
    return measured


def table(name: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Format a table as lines."""
    number, subject, _ = TABLES[name]
    ablation = name == "ablation"
    quantities = ["tokens/s"] if ablation else ["MB", "tokens/s"]
    heads = [head for quantity in quantities for head in (f"{quantity} mono", f"{quantity} ours", "ratio", "paper's")]
    heads += ["to full", "paper's", "moved MB"] if ablation else []
    yield f"\nTable {number} of the paper: {subject}"
    yield f"{'model':10s} {'dtype':8s} {'rows':>9s} " + _line(heads)
    for row in rows:
        setting = f"{row['model']:10s} {row['dtype']:8s} {str(row['batch']) + ' x ' + str(row['tokens']):>9s} "
        for variant, ours in row["variants"].items():
            cells: list[float | None] = []
            for what, key, unit in (("memory", "memory_bytes", 1e6), ("speed", "tokens_per_second", 1.0)):
                if what == "speed" or not ablation:
                    cells += [_in(row["monolithic"], key, unit), _in(ours, key, unit)]
                    cells += [ours["to_monolithic"][what], ours["paper"]["to_monolithic"][what]]
            if ablation:
                moved = sum(ours["moved_bytes"].values()) / 1e6 if "moved_bytes" in ours else None
                cells += [ours["to_full"]["speed"], ours["paper"]["to_full"]["speed"], moved]
            said = [variant] if ablation else []
            said += [f"blocks share {ours['shared_buckets']} host buckets"] if ours.get("shared_buckets") else []
            yield f"{setting}{_line(cells)}  {', '.join(said)}".rstrip()


def _in(side: Mapping[str, Any], key: str, unit: float) -> float | None:
    return side[key] / unit if key in side else None


def _line(cells: Sequence[str | float | None]) -> str:
    return "".join(f"{_cell(cell):>14s}" for cell in cells)


def _cell(value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def machine() -> dict[str, Any]:
    """The machine that this runs on, as JSON values."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def parse() -> argparse.Namespace:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--on", choices=["cuda", "bus", "disk"], default="cuda" if gpu else "bus")
    parser.add_argument(
        "--tables", default=",".join(TABLES), help="tables to measure, from main, ablation, batch, length, qwen3"
    )
    parser.add_argument("--sizes", help="models to measure, such as opt-1.3b,qwen3-4b; all by default")
    parser.add_argument(
        "--dtype", help="dtypes to measure, such as float32,float16; a row in 16 bits takes any 16-bit dtype"
    )
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps, after two that warm up")
    parser.add_argument("--noise", choices=list(NOISES), default="sequential")
    parser.add_argument("--scale", type=int, help="divisor of sizes; by default 1 on a GPU, otherwise 16")
    parser.add_argument("--bus", type=float, default=1e9, help="bytes a second of the simulated bus")
    parser.add_argument("--host-memory", type=parse_size, help="host memory for blocks; by default most of the free memory")
    parser.add_argument("--device-memory", type=parse_size, help="memory of the simulated device, without a GPU")
    parser.add_argument("--folder", type=Path, help="folder for checkpoints on disk; a temporary one by default")
    options = parser.parse_args()
    for option, known in (("tables", list(TABLES)), ("sizes", list(geometries())), ("dtype", list(DTYPES))):
        chosen = (getattr(options, option) or "").split(",") if getattr(options, option) else []
        if unknown := [name for name in chosen if name not in known]:
            parser.error(f"--{option}: {', '.join(unknown)} is none of {', '.join(known)}")
    if options.scale is None:
        options.scale = 1 if options.on == "cuda" else 16
    if options.dtype is None:
        options.dtype = "float32,float16" if options.on == "cuda" else "float32,bfloat16"
    return options


def choose_place(options: argparse.Namespace) -> Place:
    """Make the place to measure in."""
    host = int(HOST_SHARE * free_memory()) if options.host_memory is None else options.host_memory
    device = int(A100_MEMORY / options.scale**2) if options.device_memory is None else options.device_memory
    if options.on == "cuda":
        return Cuda(host)
    return Bus(host, device, options.bus) if options.on == "bus" else Disk(options.folder, device)


def main() -> None:
    """Run the command line."""
    options = parse()
    place = choose_place(options)
    try:
        bench = Bench(place, scale=options.scale, steps=options.steps, noise=NOISES[options.noise])
        measured: dict[str, list[dict[str, Any]]] = {}
        for name in options.tables.split(","):
            rows = [row for row in TABLES[name].rows if options.sizes is None or row.model in options.sizes.split(",")]
            dtypes = [DTYPES[name] for name in options.dtype.split(",")]
            pairs = [(row, dtype) for row in rows for dtype in dtypes if 8 * dtype.itemsize == row.bits]
            measured[name] = [report(bench, row, dtype) for row, dtype in pairs]
    finally:
        place.close()
    print(place.note)
    if options.scale > 1:
        print(f"width, heads, vocabulary and tokens of every model divided by {options.scale}")
    print("MB are 10^6 bytes; ratios are to monolithic MeZO in the same dtype")
    for name, reported in measured.items():
        print("\n".join(table(name, reported)))
    print()
    about = {"place": options.on, "note": place.note, "scale": options.scale, "steps": options.steps, "noise": options.noise}
    print(json.dumps({**about, "machine": machine(), "tables": measured}))


if __name__ == "__main__":
    main()
