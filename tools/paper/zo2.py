"""Measure the tables of the ZO2 paper: this engine against monolithic MeZO with its weights on the device.

    python tools/bench.py zo2                                       on a GPU, models that fit it and the host's memory
    python tools/bench.py zo2 --on bus --scale 16 --bus 1e9         without a GPU: smaller models, a simulated bus
    python tools/bench.py zo2 --on disk --scale 16 --tables ablation

Prints the tables, with the paper's ratios next to the measured ones: of memory and speed, the engine's to monolithic MeZO's
in the same dtype, and of the ablation's variants to the engine in full.

Both sides of a row run in this process, one after the other, with the same weights, batches and seeds; with MeZO's own noise
their losses have to be equal, and the JSON tells whether they are. The first step loads, the second warms up, then steps are
timed one by one, and a last, untimed step measures memory. '-' marks what did not fit or failed; the JSON has the reason.
Weights are synthetic (see ``synthetic.py``). The blocks of a model have to fit into the host's memory.

Without a GPU width, heads, vocabulary and tokens are divided by ``--scale``; depth stays. Blocks, embedding, activations and
logits then shrink by its square, and so does the A100's memory by default: ratios of memory, and what does not fit, compare
with the paper's. Speed does not: work shrinks by the third power, and a CPU with a simulated bus differs from a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import geometries
from measuring import NOISES, WARM_UP, Noise, timed
from synthetic import scaled, whole_model
from transformers import PretrainedConfig

from paper.places import LR, ZO_EPS, Place
from paper.tables import TABLES, Row, Variant
from zo2adapters import MonolithicMeZO
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.models.footprint import activation_bytes
from zo2core import MemoryPolicy, ZO2Error
from zo2core.planning.memory import Machine, RunRequest, free_memory, plan_device_memory
from zo2core.ranges import parse_size
from zo2core.types import Batch, BlockLayout

A100_MEMORY = 80e9  # bytes of the paper's GPU
HOST_SHARE = 0.8  # share of the free host memory that blocks may take, page-locked
MEZO_TEMPORARIES = 4  # tensors of the largest parameter's size: z, products, the new weights
MEZO, REASON = "monolithic MeZO", "reason"

Outcome = dict[str, Any]  # measurements of one side of a row, or the reason why there are none


def add_options(parser: argparse.ArgumentParser) -> None:

    def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
        def names(text: str) -> list[str]:
            if unknown := [name for name in text.split(",") if name not in known]:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(known)}")
            return text.split(",")

        return names

    parser.add_argument("--on", choices=["cuda", "bus", "disk"], default="cuda" if torch.cuda.is_available() else "bus")
    parser.add_argument("--tables", type=names_of(list(TABLES)), default=list(TABLES), help=f"of {', '.join(TABLES)}")
    parser.add_argument("--sizes", type=names_of(list(geometries())), help="models to measure; all by default")
    dtypes = "dtypes to measure, such as float32,float16; a row in 16 bits takes any 16-bit dtype"
    parser.add_argument("--dtype", type=names_of(list(DTYPES)), help=dtypes)
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps, after two that warm up")
    parser.add_argument("--noise", choices=list(NOISES), default="sequential")
    parser.add_argument("--scale", type=int, help="divisor of sizes; by default 1 on a GPU, otherwise 16")
    parser.add_argument("--bus", type=float, default=1e9, help="bytes a second of the simulated bus")
    parser.add_argument("--host-memory", type=parse_size, help="host memory for blocks; by default most of the free memory")
    parser.add_argument("--device-memory", type=parse_size, help="memory of the simulated device, without a GPU")
    parser.add_argument("--folder", type=Path, help="folder for checkpoints on disk; a temporary one by default")


def run(options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = options.on == "cuda"
    options.scale = options.scale or (1 if on_gpu else 16)
    host = int(HOST_SHARE * free_memory()) if options.host_memory is None else options.host_memory
    device = int(A100_MEMORY / options.scale**2) if options.device_memory is None else options.device_memory
    place = Place(options.on, host_memory=host, device_memory=device, rate=options.bus, folder=options.folder)
    dtypes = [DTYPES[name] for name in options.dtype or ["float32", "float16" if on_gpu else "bfloat16"]]
    measured: dict[str, Any] = {"note": place.note, "scale": options.scale, "rows": []}
    try:
        bench = Bench(place, scale=options.scale, steps=options.steps, noise=NOISES[options.noise])
        for name in options.tables:
            number, subject, rows = TABLES[name]
            chosen = [row for row in rows if options.sizes is None or row.model in options.sizes]
            pairs = [(row, dtype) for row in chosen for dtype in dtypes if 8 * dtype.itemsize == row.bits]
            reports = [report(bench, row, dtype) for row, dtype in pairs]
            measured["rows"] += [{"table": name, **found} for found in reports]
            measured[f"Table {number}: {subject}"] = {line: cells for found in reports for line, cells in lines(found)}
    finally:
        place.close()
    return measured


def batch_of(vocab_size: int, rows: int, tokens: int, device: torch.device) -> Batch:
    """A batch of random tokens without padding."""
    ids = torch.randint(vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "labels": ids}


def steps_of(step: Callable[[int], Any], seeds: range) -> tuple[list[float], list[Any]]:
    """Run steps of these seeds; return seconds and losses."""
    measured = [timed(partial(step, seed)) for seed in seeds]
    return [seconds for seconds, _ in measured], [losses for _, losses in measured]


class Bench:
    """Measures settings, and each setting once."""

    def __init__(self, place: Place, *, scale: int, steps: int, noise: Noise) -> None:
        self._place = place
        self._scale = scale
        self._steps = steps
        self._noise = noise
        self._found: dict[tuple[Any, ...], Outcome] = {}

    def config(self, row: Row) -> PretrainedConfig:
        return scaled(geometries()[row.model], self._scale, self.tokens(row))

    def tokens(self, row: Row) -> int:
        return row.tokens // self._scale

    def side(self, row: Row, dtype: torch.dtype, variant: Variant | None) -> Outcome:
        key = (row.model, dtype, row.batch, row.tokens, variant)
        if key not in self._found:
            name = MEZO if variant is None else f"engine {variant.value}"
            print(f"{row.model} {dtype} {row.batch} x {self.tokens(row)}: {name}", file=sys.stderr, flush=True)
            try:
                self._found[key] = self._monolithic(row, dtype) if variant is None else self._engine(row, dtype, variant)
            except (ZO2Error, torch.OutOfMemoryError) as error:
                self._found[key] = {REASON: f"{type(error).__name__}: {error}".splitlines()[0]}
        return self._found[key]

    def _monolithic(self, row: Row, dtype: torch.dtype) -> Outcome:
        place, config, tokens = self._place, self.config(row), self.tokens(row)
        cut = place.model(config, dtype)
        try:
            sizes = [spec.nbytes for layout in cut.layouts for spec in layout.parameters]
            needed = sum(sizes) + MEZO_TEMPORARIES * max(sizes) + activation_bytes(config, row.batch, tokens, streams=1)
            if needed > (free := place.free_memory()):
                return {REASON: f"needs about {needed / 1e6:.0f} MB of the device's memory, {free / 1e6:.0f} MB are free"}
            mezo = MonolithicMeZO(whole_model(config, dtype, place.torch_device, cut.weights), lr=LR, zo_eps=ZO_EPS)
        finally:
            cut.weights.close()
        batch = batch_of(config.vocab_size, row.batch, tokens, place.torch_device)
        seconds, losses = steps_of(lambda seed: mezo.step(batch, seed).losses, range(WARM_UP + self._steps))
        # Parameters are converted one by one: a list of them would keep the old weights alive with the new ones.
        held = (parameter.data for parameter in mezo.model.parameters())
        peak = place.peak_bytes(lambda: mezo.step(batch, len(losses)), held)
        return self._measured(row, seconds, losses, peak)

    def _engine(self, row: Row, dtype: torch.dtype, variant: Variant) -> Outcome:
        place, config, tokens = self._place, self.config(row), self.tokens(row)
        model = place.model(config, dtype)
        kept, free = self._room(model.layouts, activation_bytes(config, row.batch, tokens))
        if variant is Variant.RESIDENT and kept < config.num_hidden_layers:
            return {REASON: f"{kept} of {config.num_hidden_layers} blocks fit into {free / 1e6:.0f} MB"}
        offloaded = place.offload(model, variant, self._noise)
        if offloaded is None:
            return {REASON: "no such variant here: blocks are computed on in their buckets"}
        engine, parts, traffic = offloaded
        batch = batch_of(config.vocab_size, row.batch, tokens, place.torch_device)

        def step(seed: int) -> tuple[float, ...]:
            losses = engine.step(batch, seed=seed).losses
            if variant is Variant.EAGER:
                engine.flush()  # an own sweep for the update
            return losses

        with parts, engine:
            seconds, losses = steps_of(step, range(WARM_UP))
            traffic.nbytes = dict.fromkeys(traffic.nbytes, 0)
            more, others = steps_of(step, range(WARM_UP, WARM_UP + self._steps))
            moved = {lane.value: nbytes / self._steps for lane, nbytes in traffic.nbytes.items() if nbytes}
            peak = place.peak_bytes(lambda: step(WARM_UP + self._steps), [])
        return self._measured(row, seconds + more, losses + others, peak) | {"moved_bytes": moved}

    def _room(self, layouts: Sequence[BlockLayout], activations: int) -> tuple[int, int]:
        """The number of blocks that could stay on the device, and its free bytes. Raises if the two slots do not fit."""
        free = self._place.free_memory()
        noise = self._noise(layouts, self._place.torch_device)
        memory = MemoryPolicy(device=free, activations=activations)
        request = RunRequest(layouts=layouts, on_disk=layouts, noise=noise, perturb_in_place=True, memory=memory)
        return plan_device_memory(request, Machine(in_place=False, on_host=False)).kept, free

    def _measured(self, row: Row, seconds: list[float], losses: list[Any], peak: int) -> Outcome:
        settled = seconds[WARM_UP:]
        speed = row.batch * self.tokens(row) / statistics.median(settled)
        return {"seconds": settled, "speed": speed, "memory": peak / 1e6, "losses": losses}


def ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float | None]:
    """The ratios of memory and speed; None if one is missing."""
    pairs = {name: (ours.get(name), theirs.get(name)) for name in ("memory", "speed")}
    return {name: None if a is None or b is None else a / b for name, (a, b) in pairs.items()}


def report(bench: Bench, row: Row, dtype: torch.dtype) -> dict[str, Any]:
    """Measure one row; return all its results as JSON values. Memory is in MB, speed in tokens a second."""
    config, theirs = bench.config(row), bench.side(row, dtype, None)
    measured: dict[str, Any] = {
        "model": row.model,
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "vocabulary": config.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": row.batch,
        "tokens": bench.tokens(row),
        "monolithic": theirs,
        "paper_monolithic": row.monolithic._asdict(),
        "variants": {},
    }
    for variant, printed in row.variants.items():
        ours = bench.side(row, dtype, variant)
        is_comparable = REASON not in ours and REASON not in theirs
        measured["variants"][variant.value] = {
            **ours,
            "losses_equal_monolithic": ours["losses"] == theirs["losses"] if is_comparable else None,
            "to_monolithic": ratios(ours, theirs),
            "to_full": ratios(ours, bench.side(row, dtype, Variant.FULL)),
            "paper": {
                **printed._asdict(),
                "to_monolithic": ratios(printed._asdict(), row.monolithic._asdict()),
                "to_full": ratios(printed._asdict(), row.variants[Variant.FULL]._asdict()),
            },
        }
    return measured


def lines(found: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The lines of a row in the table: one for each variant."""
    setting = f"{found['model']} {found['dtype']} {found['batch']} x {found['tokens']}"
    made = []
    for variant, ours in found["variants"].items():
        cells: dict[str, Any] = {}
        for name, unit in (("memory", "MB"), ("speed", "tokens/s")):
            cells |= {f"{unit} MeZO": found["monolithic"].get(name), f"{unit} ours": ours.get(name)}
            cells |= {f"{name} ratio": ours["to_monolithic"][name], "paper's " + name: ours["paper"]["to_monolithic"][name]}
        if len(found["variants"]) > 1:
            cells |= {"to full": ours["to_full"]["speed"], "paper's to full": ours["paper"]["to_full"]["speed"]}
            cells["moved MB"] = sum(ours["moved_bytes"].values()) / 1e6 if "moved_bytes" in ours else None
        made.append((f"{setting}, {variant}" if len(found["variants"]) > 1 else setting, cells))
    return made
