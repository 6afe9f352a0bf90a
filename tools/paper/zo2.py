"""Measure the tables of the ZO2 paper: this engine against monolithic MeZO with its weights on the device.

    python tools/bench.py zo2                                       on a GPU, models that fit it and the host's memory
    python tools/bench.py zo2 --on bus --scale 16 --bus 1GB         without a GPU: smaller models, a simulated bus
    python tools/bench.py zo2 --on disk --scale 16 --tables ablation

Prints the tables, with the paper's ratios next to the measured ones: of memory and speed, the engine's to monolithic MeZO's
in the same dtype, and of the ablation's variants to the engine in full.

Both sides of a row are sides of ``compare.py`` that run in this process, one after the other, with the same weights, batches
and seeds; with MeZO's own noise their losses have to be equal, and the JSON tells whether they are. The first two steps warm
up, then steps are timed one by one, and a last, untimed step measures memory. '-' marks what did not fit or failed; the JSON
has the reason. Weights are synthetic (see ``synthetic.py``). *On disk* means that disk and host memory are in the roles of
host and GPU: every block of a checkpoint is read and written back in each step.

Without a GPU width, heads, vocabulary and tokens are divided by ``--scale``; depth stays. Blocks, embedding, activations and
logits then shrink by its square, and so does the A100's memory by default: ratios of memory, and what does not fit, compare
with the paper's. Speed does not: work shrinks by the third power, and a CPU with a simulated bus differs from a GPU.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from benches.compare import NOISES, Measured, side_parser
from make_checkpoint import geometries, make_checkpoint
from measuring import WARM_UP, timed
from synthetic import scaled

from paper.tables import TABLES, Row, Variant
from zo2adapters.models.checkpoint import DTYPES
from zo2core import OverlappedScheduler, Trace, ZO2Error
from zo2core.planning.memory import free_memory
from zo2core.profiling import Span, Sweep
from zo2core.ranges import parse_size
from zo2core.types import Lane

A100_MEMORY = 80e9  # bytes of the paper's GPU
HOST_SHARE = 0.8  # share of the free host memory that blocks may take, page-locked
LR = 1e-7  # the paper's
MEZO, REASON = "monolithic MeZO", "reason"
OPTIONS = {  # of the sides in compare.py
    Variant.SERIAL: "--serial",
    Variant.EAGER: "--eager",
    Variant.RESIDENT: "--kept all",
}
NOTES = {
    "cuda": "memory is torch.cuda.max_memory_allocated over a step",
    "bus": "no GPU: the CPU takes its place, behind a simulated bus of {bus} a second in each direction; the "
    "simulated device has {memory:.0f} MB, of which buffers and tensors are counted",
    "disk": "no GPU: disk and host memory in the roles of host and GPU, every block read and written back each step; "
    "{memory:.0f} MB count as the device's, and buffers and tensors are counted",
}

Outcome = dict[str, Any]  # measurements of one side of a row, or the reason why there are none


class AllocatingScheduler(OverlappedScheduler):
    """Allocates device memory for each block that arrives, and frees it when the block has left.

    Freeing waits for all uses of the memory, as ``cudaFree`` does. On a GPU torch's whole cache is emptied, so that the
    memory returns to the driver.
    """

    def _bring(self, index: int) -> Any:
        if not self._device.in_place and index not in self._own:
            slot, nothing = self._free[0], torch.empty(0, dtype=torch.uint8)
            for why, event in slot.last_uses.items():
                self._device.streams.wait(event, why)
            self._release_arrived()
            nbytes, slot.memory, slot.last_uses = len(slot.memory), nothing, {}
            if self._device.torch_device.type == "cuda":
                torch.cuda.empty_cache()
            slot.memory = self._device.empty(nbytes)
        return super()._bring(index)


class Traffic(Trace):
    """Sums the bytes that sweeps move, instead of writing a trace."""

    def __init__(self) -> None:
        self.nbytes = dict.fromkeys((Lane.READ, Lane.UPLOAD, Lane.OFFLOAD, Lane.WRITE), 0)

    def add(self, spans: Iterable[Span], sweep: Sweep | None = None) -> None:
        for span in spans:
            if span.lane in self.nbytes:
                self.nbytes[span.lane] += span.nbytes

    def close(self) -> None:
        pass  # there is no file


def add_options(parser: argparse.ArgumentParser) -> None:

    def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
        def names(text: str) -> list[str]:
            if unknown := [name for name in text.split(",") if name not in known]:
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(known)}")
            return text.split(",")

        return names

    parser.add_argument("--on", choices=list(NOTES), default="cuda" if torch.cuda.is_available() else "bus")
    parser.add_argument("--tables", type=names_of(list(TABLES)), default=list(TABLES), help=f"of {', '.join(TABLES)}")
    parser.add_argument("--sizes", type=names_of(list(geometries())), help="models to measure; all by default")
    dtypes = "dtypes to measure, such as float32,float16; a row in 16 bits takes any 16-bit dtype"
    parser.add_argument("--dtype", type=names_of(list(DTYPES)), help=dtypes)
    parser.add_argument("--steps", type=int, default=5, help="number of timed steps, after two that warm up")
    parser.add_argument("--noise", choices=list(NOISES), default="mezo")
    parser.add_argument("--scale", type=int, help="divisor of sizes; by default 1 on a GPU, otherwise 16")
    parser.add_argument("--bus", default="1GB", help="bytes a second of the simulated bus")
    parser.add_argument("--host-memory", type=parse_size, help="host memory for blocks; by default most of the free memory")
    parser.add_argument("--device-memory", type=parse_size, help="memory of the simulated device, without a GPU")
    parser.add_argument("--folder", type=Path, help="folder for checkpoints on disk; a temporary one by default")


def run(options: argparse.Namespace) -> dict[str, Any]:
    on_gpu = options.on == "cuda"
    options.scale = options.scale or (1 if on_gpu else 16)
    options.host_memory = options.host_memory or int(HOST_SHARE * free_memory())
    options.device_memory = options.device_memory or int(A100_MEMORY / options.scale**2)
    note = NOTES[options.on].format(bus=options.bus, memory=options.device_memory / 1e6)
    dtypes = options.dtype or ["float32", "float16" if on_gpu else "bfloat16"]
    measured: dict[str, Any] = {"note": note, "scale": options.scale, "rows": []}
    bench = Bench(options)
    for name in options.tables:
        number, subject, rows = TABLES[name]
        chosen = [row for row in rows if options.sizes is None or row.model in options.sizes]
        pairs = [(row, dtype) for row in chosen for dtype in dtypes if 8 * DTYPES[dtype].itemsize == row.bits]
        reports = [bench.report(row, dtype) for row, dtype in pairs]
        measured["rows"] += [{"table": name, **found} for found in reports]
        measured[f"Table {number}: {subject}"] = {line: cells for found in reports for line, cells in lines(found)}
    return measured


class Bench:
    """Measures settings, and each setting once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._found: dict[tuple[Any, ...], Outcome] = {}

    def side(self, row: Row, dtype: str, variant: Variant | None) -> Outcome:
        """What a variant, or monolithic MeZO, takes; or the reason why it could not be measured."""
        key = (row.model, dtype, row.batch, row.tokens, variant)
        if key not in self._found:
            name = MEZO if variant is None else f"engine {variant.value}"
            print(f"{row.model} {dtype} {row.batch} x {row.tokens}: {name}", file=sys.stderr, flush=True)
            try:
                self._found[key] = self._measured(row, dtype, variant)
            except (ZO2Error, torch.OutOfMemoryError) as error:
                self._found[key] = {REASON: f"{type(error).__name__}: {error}".splitlines()[0]}
        return self._found[key]

    def _measured(self, row: Row, dtype: str, variant: Variant | None) -> Outcome:
        options, on, tokens = self._options, self._options.on, row.tokens // self._options.scale
        words = ["--lr", str(LR), "--noise", options.noise, "--dtype", dtype]
        words += ["--whole"] if variant is None else shlex.split(OPTIONS.get(variant, ""))
        if on == "disk" and variant is not None:
            if variant in (Variant.ALLOCATING, Variant.RESIDENT):
                return {REASON: "no such variant here: blocks are computed on in their buckets"}
            # With one bucket it does not read ahead, so nothing overlaps.
            words = [word for word in words if word != "--serial"]
            words += ["--every", "1", "--buckets", "1" if variant is Variant.SERIAL else "3"]
        elif on != "disk":
            words += ["--gpu"] if on == "cuda" else ["--bus", options.bus]
        traffic = Traffic()
        scheduler = AllocatingScheduler if variant is Variant.ALLOCATING else OverlappedScheduler
        with ExitStack() as opened:
            if on == "disk":
                folder = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=options.folder)), "base")
                config = scaled(geometries()[row.model], options.scale, tokens)
                make_checkpoint(config, folder, dtype=DTYPES[dtype])
                words += ["--model", str(folder)]
            given = argparse.Namespace(model=row.model, data=None, labelled=None, unpadded=True)
            made = Measured(given, side_parser().parse_args(words), row.batch, tokens, scale=options.scale, trace=traffic)
            layouts, room = made.model().layouts, options.host_memory
            if variant is not None and on != "disk" and (needed := sum(layout.nbytes for layout in layouts)) > room:
                return {REASON: f"host-memory: found {room} bytes, blocks take {needed}"}
            opened.enter_context(mock.patch("zo2core.schedulers.OverlappedScheduler", scheduler))
            step = opened.enter_context(made.opened())
            taken = [timed(step) for _ in range(WARM_UP)]
            traffic.nbytes = dict.fromkeys(traffic.nbytes, 0)
            taken += [timed(step) for _ in range(options.steps)]
            moved = {lane.value: nbytes / options.steps for lane, nbytes in traffic.nbytes.items() if nbytes}
            peak = made.device_bytes(step)
        if on != "cuda" and peak > options.device_memory:
            return {REASON: f"took {peak / 1e6:.1f} MB of the device's memory, {options.device_memory / 1e6:.1f} MB"}
        if variant is Variant.RESIDENT and moved:
            return {REASON: f"not all {len(layouts) - 2} blocks fit"}
        seconds = [seconds for seconds, _ in taken[WARM_UP:]]
        found = {"seconds": seconds, "speed": row.batch * tokens / statistics.median(seconds), "memory": peak / 1e6}
        found["losses"] = [result.losses for _, result in taken]
        return found if variant is None else found | {"moved_bytes": moved}

    def report(self, row: Row, dtype: str) -> dict[str, Any]:
        """Measure one row; return all its results as JSON values. Memory is in MB, speed in tokens a second."""
        scale, theirs = self._options.scale, self.side(row, dtype, None)
        config = scaled(geometries()[row.model], scale, row.tokens // scale)
        measured: dict[str, Any] = {
            "model": row.model,
            "hidden": config.hidden_size,
            "layers": config.num_hidden_layers,
            "vocabulary": config.vocab_size,
            "dtype": dtype,
            "batch": row.batch,
            "tokens": row.tokens // scale,
            "monolithic": theirs,
            "paper_monolithic": row.monolithic._asdict(),
            "variants": {},
        }
        for variant, printed in row.variants.items():
            ours = self.side(row, dtype, variant)
            is_comparable = REASON not in ours and REASON not in theirs
            measured["variants"][variant.value] = {
                **ours,
                "losses_equal_monolithic": ours["losses"] == theirs["losses"] if is_comparable else None,
                "to_monolithic": ratios(ours, theirs),
                "to_full": ratios(ours, self.side(row, dtype, Variant.FULL)),
                "paper": {
                    **printed._asdict(),
                    "to_monolithic": ratios(printed._asdict(), row.monolithic._asdict()),
                    "to_full": ratios(printed._asdict(), row.variants[Variant.FULL]._asdict()),
                },
            }
        return measured


def ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float | None]:
    """The ratios of memory and speed; None if one is missing."""
    pairs = {name: (ours.get(name), theirs.get(name)) for name in ("memory", "speed")}
    return {name: None if a is None or b is None else a / b for name, (a, b) in pairs.items()}


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
