"""The ZO2 paper (arXiv 2503.12668): its tables, and its figure of memory."""

import argparse
import functools
import gc
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch
from benches.compare import NOISES, Measured, Side
from make_checkpoint import geometries, make_checkpoint
from measuring import WARM_UP, Usage, timed
from synthetic import scaled
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paper.tables import AMP, TABLES, Row, Transfer, Variant
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.trainers.verification import random_batch
from zo2core import OverlappedScheduler, Trace, ZO2Error
from zo2core.planning.memory import free_memory
from zo2core.ranges import parse_size
from zo2core.schedulers.profiling import Span, Sweep
from zo2core.types import Batch, Lane

A100_MEMORY = 80e9  # bytes of the paper's GPU
HOST_SHARE = 0.8  # share of the free host memory that blocks may take, page-locked
LR, EPS = 1e-7, 1e-3  # the paper's
REASON = "reason"
OPTIONS: Mapping[Variant | Transfer | None, dict[str, Any]] = {  # of sides
    None: {"whole": True},
    Variant.SERIAL: {"serial": True},
    Variant.EAGER: {"eager": True},
    Variant.RESIDENT: {"kept": "all"},
    **{
        transfer: {"precision": "mixed", "transfer_dtype": transfer.value, "noise": "rademacher"}
        for transfer in Transfer
    },
}
NOTES = {
    "cuda": "memory is torch.cuda.max_memory_allocated over a step",
    "bus": (
        "no GPU: the CPU takes its place, behind a simulated bus of {bus} a second in each "
        "direction; the "
        "simulated device has {memory:.0f} MB, of which buffers and tensors are counted"
    ),
    "disk": (
        "no GPU: disk and host memory in the roles of host and GPU, every block read and written "
        "back each step; "
        "{memory:.0f} MB count as the device's, and buffers and tensors are counted"
    ),
}

Trainer = Callable[[PreTrainedModel, Batch], Callable[[], None]]  # makes the step of a model
Outcome = dict[str, Any]  # measurements of one side of a row, or the reason why there are none


class AllocatingScheduler(OverlappedScheduler):
    """Allocates device memory for each block that arrives, and frees it when the block has left.

    Freeing waits for all uses of the memory, as ``cudaFree`` does. On a GPU torch's whole cache is
    emptied, so that the memory returns to the driver.
    """

    def _upload(self, index: int) -> Any:
        if not self._device.in_place and index not in self._permanent_slots:
            slot, nothing = self._free_slots[0], torch.empty(0, dtype=torch.uint8)
            for why, event in slot.last_uses.items():
                self._device.streams.wait(event, why)
            self._release_copied()
            nbytes, slot.memory, slot.last_uses = len(slot.memory), nothing, {}
            if self._device.torch_device.type == "cuda":
                torch.cuda.empty_cache()
            slot.memory = self._device.empty(nbytes)
        return super()._upload(index)


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


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A function that reads some of the known names, with commas between them."""

    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(known)}")
        return text.split(",")

    return names


# Options that both programs have.
Steps = Annotated[int, "number of timed steps, after two that warm up"]
Scale = Annotated[int | None, "divisor of sizes; by default 1 on a GPU, otherwise 16"]
Bus = Annotated[str, "bytes a second of the simulated bus"]
HostMemory = Annotated[
    int | None, parse_size, "memory for blocks; by default most of the free memory"
]
DeviceMemory = Annotated[int | None, parse_size, "memory of the simulated device, without a GPU"]
Folder = Annotated[Path | None, "folder for checkpoints on disk; a temporary one by default"]


def zo2(
    *,
    on: Annotated[str, list(NOTES)] = "cuda" if torch.cuda.is_available() else "bus",
    tables: Annotated[Sequence[str], names_of(TABLES), f"of {', '.join(TABLES)}"] = tuple(TABLES),
    sizes: Annotated[
        Sequence[str] | None, names_of(geometries()), "models to measure; all by default"
    ] = None,
    dtype: Annotated[
        Sequence[str] | None,
        names_of(DTYPES),
        "such as float32,float16; a row in 16 bits takes any 16-bit dtype",
    ] = None,
    steps: Steps = 5,
    noise: Annotated[str, list(NOISES)] = "mezo",
    scale: Scale = None,
    bus: Bus = "1GB",
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    folder: Folder = None,
) -> dict[str, Any]:
    """Measure the tables of the ZO2 paper: this engine against monolithic MeZO with its weights on
    the device.

        python tools/bench.py zo2                                       on a GPU, models that fit it
        and the host's memory python tools/bench.py zo2 --on bus --scale 16 --bus 1GB
        without a GPU: smaller models, a simulated bus python tools/bench.py zo2 --on disk --scale
        16 --tables ablation

    Prints the tables, with the paper's ratios next to the measured ones: of memory and speed, the
    engine's to monolithic MeZO's in the same dtype, and of the ablation's variants to the engine in
    full.

    Both sides of a row are sides of ``compare.py`` that run in this process, one after the other,
    with the same weights, batches and seeds; with MeZO's own noise their losses have to be equal,
    and the JSON tells whether they are. The first two steps warm up, then steps are timed one by
    one, and a last, untimed step measures memory. '-' marks what did not fit or failed; the JSON
    has the reason. Weights are synthetic (see ``synthetic.py``). *On disk* means that disk and host
    memory are in the roles of host and GPU: every block of a checkpoint is read and written back in
    each step.

    Without a GPU width, heads, vocabulary and tokens are divided by ``--scale``; depth stays.
    Blocks, embedding, activations and logits then shrink by its square, and so does the A100's
    memory by default: ratios of memory, and what does not fit, compare with the paper's. Speed does
    not: work shrinks by the third power, and a CPU with a simulated bus differs from a GPU.
    """
    by = scale or (1 if on == "cuda" else 16)
    host, device = (
        host_memory or int(HOST_SHARE * free_memory()),
        device_memory or int(A100_MEMORY / by**2),
    )
    setting = Setting(on, steps, noise, by, bus, host, device, folder)
    note = NOTES[on].format(bus=bus, memory=device / 1e6)
    measured: dict[str, Any] = {"note": note, "scale": by, "rows": []}
    # each side once, in whatever tables it is
    measure = functools.cache(functools.partial(side, setting))
    for name in tables:
        number, subject, rows = TABLES[name]
        pairs = [
            (row, each)
            for row in rows
            for each in dtype or ["float32", "float16" if on == "cuda" else "bfloat16"]
            if (sizes is None or row.model in sizes) and 8 * DTYPES[each].itemsize == row.bits
        ]
        reports = [report(row, each, by, measure) for row, each in pairs]
        measured["rows"] += [{"table": name, **found} for found in reports]
        measured[f"Table {number}: {subject}"] = {
            line: cells for found in reports for line, cells in lines(found)
        }
    return measured


class Setting(NamedTuple):
    """What all sides have in common."""

    on: str
    steps: int
    noise: str
    scale: int
    bus: str
    host_memory: int
    device_memory: int
    folder: Path | None


# of a model, dtype, rows, tokens and variant
Measure = Callable[[str, str, int, int, Variant | Transfer | None], Outcome]


def side(
    setting: Setting,
    model: str,
    dtype: str,
    rows: int,
    tokens: int,
    variant: Variant | Transfer | None,
) -> Outcome:
    """What a variant, or monolithic MeZO, takes; or the reason why it could not be measured."""
    name = "monolithic MeZO" if variant is None else f"engine {variant.value}"
    print(f"{model} {dtype} {rows} x {tokens}: {name}", file=sys.stderr, flush=True)
    try:
        return measured_side(setting, model, dtype, rows, tokens // setting.scale, variant)
    except (ZO2Error, torch.OutOfMemoryError) as error:
        return {REASON: f"{type(error).__name__}: {error}".splitlines()[0]}


def measured_side(
    setting: Setting,
    model: str,
    dtype: str,
    rows: int,
    tokens: int,
    variant: Variant | Transfer | None,
) -> Outcome:
    on, given, traffic = setting.on, OPTIONS.get(variant, {}), Traffic()
    given = {
        "lr": LR,
        "noise": setting.noise,
        "dtype": dtype,
        "rows": rows,
        "tokens": tokens,
        "unpadded": True,
        **given,
    }
    if on == "disk" and variant is not None:
        if variant in (Variant.ALLOCATING, Variant.RESIDENT):
            return {REASON: "no such variant here: blocks are computed on in their buckets"}
        # With one bucket it does not read ahead, so nothing overlaps.
        given |= {"serial": False, "every": 1, "buckets": 1 if variant is Variant.SERIAL else 3}
    elif on != "disk":
        given |= {"gpu": True} if on == "cuda" else {"bus": setting.bus}
    scheduler = AllocatingScheduler if variant is Variant.ALLOCATING else OverlappedScheduler
    is_on_disk = on == "disk" or isinstance(variant, Transfer)  # geometries have one dtype
    with ExitStack() as opened:
        if is_on_disk:
            folder = Path(
                opened.enter_context(tempfile.TemporaryDirectory(dir=setting.folder)), "base"
            )
            make_checkpoint(
                scaled(geometries()[model], setting.scale, tokens), folder, dtype=DTYPES[dtype]
            )
        name = str(folder) if is_on_disk else model
        made = Measured(side=Side(model=name, **given), scale=setting.scale, trace=traffic)
        layouts, room = made.model().layouts, setting.host_memory
        if (
            variant is not None
            and on != "disk"
            and (needed := sum(layout.nbytes for layout in layouts)) > room
        ):
            return {REASON: f"host-memory: found {room} bytes, blocks take {needed}"}
        opened.enter_context(
            mock.patch("zo2core.schedulers.overlapped.OverlappedScheduler", scheduler)
        )
        step = opened.enter_context(made.opened())
        taken = [timed(step) for _ in range(WARM_UP)]
        traffic.nbytes = dict.fromkeys(traffic.nbytes, 0)
        taken += [timed(step) for _ in range(setting.steps)]
        moved = {
            lane.value: nbytes / setting.steps for lane, nbytes in traffic.nbytes.items() if nbytes
        }
        peak = made.device_bytes(step)
    if on != "cuda" and peak > setting.device_memory:
        return {
            REASON: f"took {peak / 1e6:.1f} MB of the device's memory, "
            f"{setting.device_memory / 1e6:.1f} MB"
        }
    if variant is Variant.RESIDENT and moved:
        return {REASON: f"not all {len(layouts) - 2} blocks fit"}
    seconds = [seconds for seconds, _ in taken[WARM_UP:]]
    found = {
        "seconds": seconds,
        "speed": rows * tokens / statistics.median(seconds),
        "memory": peak / 1e6,
    }
    found["losses"] = [result.losses for _, result in taken]
    return found if variant is None else found | {"moved_bytes": moved}


def report(row: Row, dtype: str, scale: int, measure: Measure) -> dict[str, Any]:
    """Measure one row; return all its results as JSON values.

    Memory is in MB, speed in tokens a second.
    """
    setting = (row.model, dtype, row.batch, row.tokens)
    theirs, tokens = measure(*setting, None), row.tokens // scale
    config, variants = scaled(geometries()[row.model], scale, tokens), dict[str, Any]()
    for variant, printed in row.variants.items():
        ours, paper, mezo = measure(*setting, variant), printed._asdict(), row.monolithic._asdict()
        is_comparable = REASON not in ours and REASON not in theirs
        variants[variant.value] = {
            **ours,
            "losses_equal_monolithic": ours["losses"] == theirs["losses"]
            if is_comparable
            else None,
            "to_monolithic": ratios(ours, theirs),
            "to_full": ratios(ours, measure(*setting, Variant.FULL)),
            "paper": {
                **paper,
                "to_monolithic": ratios(paper, mezo),
                "to_full": ratios(paper, row.variants[Variant.FULL]._asdict()),
            },
        }
    sizes = {
        "hidden": config.hidden_size,
        "layers": config.num_hidden_layers,
        "vocabulary": config.vocab_size,
    }
    figures = {
        "monolithic": theirs,
        "paper_monolithic": row.monolithic._asdict(),
        "variants": variants,
    }
    return {
        "model": row.model,
        **sizes,
        "dtype": dtype,
        "batch": row.batch,
        "tokens": tokens,
        **figures,
    }


def ratios(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float | None]:
    """The ratios of memory and speed; None if one is missing."""
    pairs = {name: (ours.get(name), theirs.get(name)) for name in ("memory", "speed")}
    return {name: None if a is None or b is None else a / b for name, (a, b) in pairs.items()}


def lines(found: Mapping[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield the lines of a row in the table: one for each variant."""
    setting = f"{found['model']} {found['dtype']} {found['batch']} x {found['tokens']}"
    for variant, ours in found["variants"].items():
        cells: dict[str, Any] = {}
        for name, unit in (("memory", "MB"), ("speed", "tokens/s")):
            cells |= {f"{unit} MeZO": found["monolithic"].get(name), f"{unit} ours": ours.get(name)}
            cells |= {
                f"{name} ratio": ours["to_monolithic"][name],
                "paper's " + name: ours["paper"]["to_monolithic"][name],
            }
        if len(found["variants"]) == 1:
            yield setting, cells
            continue
        cells |= {
            "to full": ours["to_full"]["speed"],
            "paper's to full": ours["paper"]["to_full"]["speed"],
        }
        cells["moved MB"] = (
            sum(ours["moved_bytes"].values()) / 1e6 if "moved_bytes" in ours else None
        )
        yield f"{setting}, {variant}", cells


def amp(
    *,
    on: Annotated[str, ["cuda", "bus"]] = "cuda" if torch.cuda.is_available() else "bus",
    sizes: Annotated[Sequence[str] | None, names_of(geometries()), "models; by default all"] = None,
    computed: Annotated[Sequence[str], names_of(AMP), "dtypes of computation"] = tuple(AMP),
    steps: Steps = 5,
    scale: Scale = None,
    bus: Bus = "1GB",
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    folder: Folder = None,
) -> dict[str, Any]:
    """Measure Table 5 of the ZO2 paper: low-bit transfer of weights in mixed precision.

        python tools/bench.py amp                            on a GPU
        python tools/bench.py amp --on bus --scale 16        without one: smaller models, a bus

    Weights are stored in float32, computed with in float16 or bfloat16, and travel as they are
    stored or in fewer bits, both ways. The table has tokens a second, the ratio to weights that
    travel as they are stored, and the paper's ratio. '-' marks what did not fit or failed; the JSON
    has the reason. Directions are Rademacher's, since low-bit transfer does not take MeZO's own.
    Otherwise as ``zo2``, whose program it is.
    """
    by = scale or (1 if on == "cuda" else 16)
    host = host_memory or int(HOST_SHARE * free_memory())
    device = device_memory or int(A100_MEMORY / by**2)
    setting = Setting(on, steps, "rademacher", by, bus, host, device, folder)
    note = NOTES[on].format(bus=bus, memory=device / 1e6)
    measured: dict[str, Any] = {"note": note, "scale": by, "rows": []}
    cells: dict[str, Any] = {}
    for dtype in computed:
        for model, printed in AMP[dtype].items():
            if sizes is not None and model not in sizes:
                continue
            sides = {
                transfer: side(setting, model, dtype, 1, 2048, transfer) for transfer in printed
            }
            stored = sides[Transfer.STORED]
            for transfer, found in sides.items():
                measured["rows"].append(
                    {"model": model, "computed": dtype, "transfer": transfer.value, **found}
                )
                cells[f"{model} {dtype}, {transfer.value}"] = {
                    "tokens/s": found.get("speed"),
                    "to stored": ratios(found, stored)["speed"],
                    "paper's": printed[transfer] / printed[Transfer.STORED],
                }
    return {**measured, "Table 5: transfer of weights in fewer bits": cells}


def memory(
    *,
    geometries: Annotated[Sequence[str], list(geometries())] = ("opt-6.7b", "opt-13b"),
    dtype: Annotated[str, list(DTYPES)] = "float32",
    tokens: Annotated[int, "tokens of the batch's one row"] = 2048,
    blocks: Annotated[int, "blocks of the engine's model"] = 5,
) -> dict[str, Any]:
    """Figure 3 of the ZO2 paper: the peak device memory of AdamW, SGD, MeZO and this engine,
    counted in the same manner.

        python tools/bench.py memory
        python tools/bench.py memory --geometries opt-6.7b opt-13b --dtype float32 --tokens 1024

    The results of every operation are counted while they exist, together with weights and buffers.
    Whole models run on torch's ``meta`` device, which has shapes without memory, so that they are
    counted at full size on any machine. The engine computes, with a bus simulated by threads, and
    at the true width of its blocks but with few of them (``--blocks``): its device holds slots,
    embedding, head and activations for any number of blocks, which a second count, with a block
    more, confirms.
    """
    measured: dict[str, Any] = {}
    for name in geometries:
        found = {
            f"{trainer}_bytes": whole_bytes(name, dtype, tokens, step)
            for trainer, step in STEPS.items()
        }
        gc.collect()
        for text, count in (("", blocks), (" with a block more", blocks + 1)):
            side = Side(model=name, tokens=tokens, dtype=dtype, bus="1TB", unpadded=True)
            made = Measured(side=side, layers=count)
            with made.opened() as step:
                step()  # the next one replays its update
                found[f"this engine{text}_bytes"] = made.device_bytes(step)
        measured[name] = found | {
            "more than the paper's GPU has": sum(nbytes > A100_MEMORY for nbytes in found.values())
        }
    return measured


def whole_bytes(name: str, dtype: str, tokens: int, make: Trainer) -> int:
    """The peak bytes of a whole model's second step, when all of the optimizer's state exists."""
    config: PretrainedConfig = scaled(geometries()[name], 1, tokens)
    with torch.device("meta"):
        new: Any = AutoModelForCausalLM.from_config
        model = new(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
    model.config.use_cache = False
    batch = random_batch(config.vocab_size, 1, tokens, seed=0)
    step = make(
        model, {key: value.to("meta") for key, value in batch.items() if key != "attention_mask"}
    )
    usage = Usage()
    usage.peak_of(
        step, (tensor for part in (model.parameters(), model.buffers()) for tensor in part)
    )
    return usage.peak_of(step)


def first_order(
    optimizer: Callable[..., torch.optim.Optimizer], model: PreTrainedModel, batch: Batch
) -> Callable[[], None]:
    """A first-order step that keeps gradients between steps, as torch's examples do."""
    rule = optimizer(model.parameters(), lr=LR)

    def step() -> None:
        model(**batch).loss.backward()
        rule.step()
        rule.zero_grad()

    return step


def mezo(model: PreTrainedModel, batch: Batch) -> Callable[[], None]:
    """MeZO's loop: one parameter's z at a time, no gradients.

    ``MonolithicMeZO`` reads its losses: ``meta`` has none.
    """

    @torch.no_grad()
    def step() -> None:
        for scale, is_evaluated in ((1, True), (-2, True), (1, False), (LR, False)):
            for parameter in model.parameters():
                z = torch.normal(
                    mean=0,
                    std=1,
                    size=parameter.size(),
                    device=parameter.device,
                    dtype=parameter.dtype,
                )
                parameter.data = parameter.data + scale * z * EPS
            if is_evaluated:
                model(**batch)

    return step


STEPS: Mapping[str, Trainer] = {
    "AdamW": functools.partial(first_order, torch.optim.AdamW),
    "SGD": functools.partial(first_order, torch.optim.SGD),
    "MeZO": mezo,
}
