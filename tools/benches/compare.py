"""Compare steps of several sides: storage, precision, directions, method, device, processes, or the
whole model by others.

    python tools/bench.py compare opt-125m --sides "--noise mezo" "--noise mezo --whole"
    python tools/bench.py compare opt-1.3b-bf16 --tokens 64 --sides "--buckets 3" "--buckets 3
    --model opt-1.3b-nf4" python tools/bench.py compare smollm2-135m-bf16 --shapes 4x256,16x40
    --sides "--lora adamw" "--lora adamw --whole"

A side is a step with the options that ``compare opt-125m --sides=--help`` lists; those of the
command line are their defaults. Sides alternate, with the same batch. A model is a checkpoint or,
where there is no file of its name, a geometry of ``make_checkpoint.py`` with synthetic weights
(``synthetic.py``). Each row has seconds, how many times faster than the first side it is, whether
its losses are the first's and how far they are from those, the bytes and busy seconds of its lanes,
a step's ratio to the slowest lane and to their sum, and the peak bytes of operations without
weights and buffers; a side in processes of its own has their memory instead, with page faults and
seconds in the kernel.

A step with q queries on B rows has 2 q evaluations. All of them run together where a block is
visited, or with ``--stack 1`` one after the other. ``--sweeps`` takes several sweeps, as the
variants of P-RGE take forwards (arXiv 2409.15520): *in-turn* 2 q of B rows, *inner* q of both signs
of a query, *outer* 2 of all queries with one sign, *both* one of all.
"""

import argparse
import itertools
import math
import multiprocessing
import os
import resource
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, cast, get_args

import peft
import psutil
import torch
from make_checkpoint import geometries
from measuring import (
    WARM_UP,
    Rounds,
    Usage,
    add_options,
    alternate,
    lanes_of,
    lora,
    lora_fa,
    memory_of,
    ratio,
    resident_step,
    shapes,
    spread,
    times_faster,
    zeroth_order,
)
from synthetic import block_model, scaled, slowed, whole_model
from threaded_device import ThreadedDevice, ThreadedStreams
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM

from zo2adapters import Adapter, MonolithicMeZO, open_checkpoint, pack
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.models.footprint import expected_held_bytes, forward_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.rows import RowReader, collate, training_batches
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
from zo2adapters.trainers.process import LARGEST_KEPT, SMALL, keep_freed_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import (
    CudaDevice,
    Delayed,
    Distribution,
    Engine,
    EngineOptions,
    FirstOrder,
    HostDevice,
    LowRankPerturbation,
    MemoryPolicy,
    SharedBase,
    TorchOptimizer,
    Trace,
    Workers,
    WriteBackPolicy,
)
from zo2core.io.process_memory import peak_memory
from zo2core.optimizers.registry import OPTIMIZERS, make_block_update
from zo2core.planning.memory import ACTIVATIONS, Replay
from zo2core.protocols import UpdateInputs
from zo2core.ranges import OptimizerName, parse_size
from zo2core.sweep.gradient_visitor import gradient_bytes
from zo2core.sweep.microbatch import IGNORE_INDEX
from zo2core.types import Batch, StepResult

ALL_GRAPHS = 1 << 34  # bytes
# of configs; checkpointing turns them on
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")
NOISES = {"mezo": None} | {distribution.value: distribution for distribution in Distribution}
# without effect on a geometry
OF_CHECKPOINTS = ("lora", "lora_fa", "precision", "transfer_dtype", "loss_chunk", "rate")
# the largest blocks of memory that stay when they are freed
FREED = {"returned": None, "small": SMALL, "kept": LARGEST_KEPT}
LORA_LR, LR = 1e-4, 1e-6
ADAMW = partial(torch.optim.AdamW, weight_decay=0.0, fused=True)  # of all parameters
ADAPTERS = [name for name, made in OPTIMIZERS.items() if made.of_adapter]


@dataclass(frozen=True, kw_only=True)
class Side:
    """The options of a side."""

    model: Annotated[str, "checkpoint or geometry"] = ""
    rows: int = 1
    tokens: int = 64
    unpadded: Annotated[bool, "no row is shorter; by default the last one is"] = False
    labelled: Annotated[
        int | None, "number of labelled tokens at each row's end; by default all"
    ] = None
    data: Annotated[
        Path | None, "file of rows to train on; by default random tokens of one length"
    ] = None
    threads: Annotated[int | None, "with --apart"] = None
    precision: Annotated[str, ["exact", "mixed"]] = "exact"
    dtype: str = "auto"
    transfer_dtype: str = "stored"
    loss_chunk: Annotated[str, ["auto", "none"], "whether logits are made in chunks"] = "auto"
    lr: float | None = None
    noise: Annotated[str, list(NOISES), "mezo is exact MeZO"] = "rademacher"
    rank: Annotated[int | None, "of low-rank directions"] = None
    queries: int = 1
    stack: Annotated[int | None, "with --rank: evaluations that run together; by default all"] = (
        None
    )
    sweeps: Annotated[
        str | None,
        ["in-turn", "inner", "outer", "both"],
        "several sweeps a step, with some evaluations each",
    ] = None
    eager: Annotated[bool, "a sweep of its own for each update"] = False
    lora: Annotated[str | None, ADAPTERS, "train LoRA by gradients"] = None
    lora_fa: Annotated[bool, "train LoRA's matrices B alone: without --lora along directions"] = (
        False
    )
    lora_rank: int = 8
    all_linear: Annotated[bool, "LoRA on all linear layers, not on q_proj and v_proj alone"] = False
    full: Annotated[
        OptimizerName | None, list(get_args(OptimizerName)), "train all parameters by gradients"
    ] = None
    recompute: Annotated[
        bool, "with gradients: memory for the inputs of blocks alone, instead of all graphs"
    ] = False
    update_seconds: Annotated[
        float | None, "with --full: what the update of a step takes on a slow host"
    ] = None
    delayed: Annotated[bool, "with --full: the update of a step is applied during the next"] = False
    buckets: Annotated[int | None, "blocks in host memory; by default all"] = None
    every: Annotated[int | None, "steps after which blocks are written back to disk"] = None
    rate: Annotated[str | None, "bytes a second of a simulated slower disk, such as 1GB"] = None
    serial: Annotated[bool, "without overlap"] = False
    micro_rows: Annotated[int | None, "rows of a micro-batch"] = None
    batches: Annotated[int, "batches of the given size that are one batch of this side"] = 1
    packed: Annotated[bool, "with --data: rows are packed instead of padded"] = False
    gpu: Annotated[bool, "no block stays on the GPU between visits"] = False
    kept: Annotated[
        str, "with --gpu or --bus: blocks that stay on the device, or 'all' for as many as fit"
    ] = "0"
    device_memory: Annotated[
        str | None, "with --gpu: memory that may be used there, such as 8GB"
    ] = None
    bus: Annotated[
        str | None,
        "a simulated bus: bytes a second, such as 1GB, or how many times as long as all uploads "
        "compute takes",
    ] = None
    replay: Annotated[str, ["auto", "host", "device"], "who replays updates for a device"] = "auto"
    whole: Annotated[
        bool, "the whole model by transformers, peft and torch.optim, or monolithic MeZO"
    ] = False
    forward: Annotated[bool, "with --whole: one forward of the stacked batch alone"] = False
    checkpointing: Annotated[bool, "with --whole: blocks are computed again on the way back"] = (
        False
    )
    together: Annotated[
        int, "so many runs with a rate and a seed each share the base; seconds are those of all"
    ] = 0
    run: Annotated[int, "which of such runs has the losses, or runs alone, from 0"] = 0
    workers: Annotated[
        int, "processes, with a core each, that share directions, or with gradients rows"
    ] = 0
    freed: Annotated[str, list(FREED), "with --apart: freed memory that stays with the process"] = (
        "small"
    )

    @classmethod
    def read(cls, text: str, **defaults: Any) -> Self:
        """Read options as a command line has them."""
        parser = argparse.ArgumentParser(prog="side")
        add_options(parser, cls)
        return cls(**vars(parser.parse_args(shlex.split(text), argparse.Namespace(**defaults))))

    def __post_init__(self) -> None:
        for option in OF_CHECKPOINTS if self.is_geometry else ():
            if getattr(self, option) != getattr(Side, option):
                flag = f"--{option.replace('_', '-')}"
                raise SystemExit(
                    f"{self.model}: a geometry takes no {flag}; write a checkpoint by "
                    "tools/make_checkpoint.py"
                )

    @property
    def is_geometry(self) -> bool:
        return self.model in geometries() and not Path(self.model).exists()

    @property
    def by_gradients(self) -> bool:
        return bool(self.lora or self.full)

    @property
    def batch_size(self) -> int:
        return self.rows * self.batches


def compare(
    model: Annotated[str, "checkpoint or geometry"],
    *,
    sides: Annotated[Sequence[str], "the options of each side, quoted"] = ("", "--whole"),
    shapes: Annotated[
        Sequence[tuple[int, int]] | None, shapes, "several shapes of batches, as rows x tokens"
    ] = None,
    rows: int = 1,
    tokens: int = 64,
    steps: Annotated[int, "measured steps"] = 5,
    unpadded: Annotated[bool, "no row is shorter; by default the last one is"] = False,
    labelled: Annotated[
        int | None, "number of labelled tokens at each row's end; by default all"
    ] = None,
    data: Annotated[
        Path | None, "file of rows to train on; by default random tokens of one length"
    ] = None,
    apart: Annotated[bool, "each side has a process of its own"] = False,
    threads: int | None = None,
) -> dict[str, Any]:
    keep_freed_memory(SMALL)  # as zo2 train does
    measured = {}
    for rows_, tokens_ in shapes or [(rows, tokens)]:
        given = {"model": model, "rows": rows_, "tokens": tokens_, "threads": threads}
        given |= {"unpadded": unpadded, "labelled": labelled, "data": data}
        read = {text.strip() or "default": Side.read(text, **given) for text in sides}
        measured[f"{rows_} x {tokens_}"] = compared(read, steps, apart=apart)
    return measured


def compared(sides: Mapping[str, Side], steps: int, *, apart: bool) -> dict[str, Any]:
    """The sides' rows of the table."""
    if any(side.freed != "small" and not (apart or side.workers) for side in sides.values()):
        raise SystemExit("--freed needs --apart: a whole process keeps freed memory")
    made = {
        name: (Processes if apart or side.workers else Measured)(side=side)
        for name, side in sides.items()
    }
    with ExitStack() as opened:
        works = {name: opened.enter_context(side.opened()) for name, side in made.items()}
        measured = alternate(works, steps)
        peaks = {name: made[name].peaks(step) for name, step in works.items()}
    first = next(iter(measured))
    found: dict[str, Any] = {}
    for name, side in measured.items():
        pairs = [
            (one.losses, other.losses)
            for one, other in zip(side.results, measured[first].results, strict=True)
        ]
        found[name] = {
            "step": spread(side.seconds),
            "times faster": times_faster(measured, name, first),
            "losses of the first": all(one == other for one, other in pairs),
            "losses apart": max(
                distance(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=False)
            ),
            **peaks[name],
            **report(side),
        }
        if runs := sides[name].together:
            found[name]["times faster than apart"] = ratio(
                [runs * one for one in measured[first].seconds], side.seconds
            )
    return found


def distance(ours: float, theirs: float) -> float:
    """The relative difference of two losses."""
    is_finite = math.isfinite(ours - theirs)
    return (
        0.0
        if ours == theirs
        else abs(ours - theirs) / abs(theirs)
        if theirs and is_finite
        else math.inf
    )


class Taken(NamedTuple):
    """A step of a side."""

    losses: tuple[float, ...]
    result: StepResult | None = None  # of an engine
    forwards: float = 0.0  # seconds of forwards
    usage: Mapping[str, float] = {}  # of the process


def report(side: Rounds) -> dict[str, Any]:
    """What processes say of their memory, and engines of their lanes and the share of forwards."""
    found: dict[str, Any] = {
        name: spread([step.usage[name] for step in side.results]) for name in side.results[0].usage
    }
    steps = [step.result for step in side.results]
    if None in steps or not steps[0].bound_seconds:
        return found
    if side.results[0].forwards:
        found["share of forwards"] = ratio([step.forwards for step in side.results], side.seconds)
    sums = [sum(use.busy_seconds for use in step.lanes.values()) for step in steps]
    return found | {
        "to the slowest lane": spread([step.seconds / step.bound_seconds for step in steps]),
        "to the sum of lanes": ratio(side.seconds, sums),
        "lanes": lanes_of(steps),
    }


@dataclass(kw_only=True)
class Measured:
    """What measures a side in this process."""

    side: Side
    workers: Workers | None = None  # the processes that share the steps
    scale: int = 1  # divisor of a geometry's sizes
    layers: int | None = None  # of a geometry; None: all of them
    trace: Trace | None = None  # gets the engine's spans
    usage: Usage = field(default_factory=Usage)  # of the device, where that is not a GPU
    resident: Any = None  # the whole model

    @contextmanager
    def opened(self) -> Iterator[Callable[[], Taken]]:
        """The side's step, as long as the context lasts."""
        with ExitStack() as stack:
            take = (
                self._whole
                if self.side.whole
                else self._together
                if self.side.together
                else self._engine
            )
            yield take(stack)

    def peaks(self, step: Callable[[], object]) -> dict[str, int | None]:
        """The peak bytes of a step's operations, without those that remain after the step."""
        if self.side.gpu:
            return {"operations_bytes": None, "device_bytes": self.device_bytes(step)}
        self.usage.peak_of(step)
        return {"operations_bytes": self.usage.peak_of(step) - self.usage.now}

    def device_bytes(self, step: Callable[[], object]) -> int:
        """The peak bytes of the device while a step runs."""
        if self.side.gpu:
            torch.cuda.reset_peak_memory_stats()
            step()
            return int(torch.cuda.max_memory_allocated())
        # Parameters are given one by one: a list of them would keep the old weights alive with the
        # new ones.
        return self.usage.peak_of(
            step,
            (parameter.data for parameter in self.resident.parameters()) if self.resident else (),
        )

    def model(self, seed: int | None = 0) -> HFBlockModel:
        """The side's model; ``seed`` is that of its adapter, and None leaves the adapter out."""
        side = self.side
        if side.is_geometry:
            config = scaled(geometries()[side.model], self.scale, side.tokens)
            config.num_hidden_layers = self.layers or config.num_hidden_layers
            return block_model(config, DTYPES[side.dtype.replace("auto", "float32")])
        chunk: Any = None if side.loss_chunk == "none" else side.loss_chunk
        given: dict[str, Any] = {"precision": side.precision, "transfer_dtype": side.transfer_dtype}
        if seed is not None and (side.lora or side.lora_fa):
            frozen = ("lora_A",) if side.lora_fa else ()
            given = {"adapter": Adapter(config=lora_of(side), seed=seed, frozen=frozen)}
        return slowed(
            open_checkpoint(side.model, dtype=side.dtype, loss_chunk=chunk, **given), side.rate
        )

    def batches(self, model: HFBlockModel) -> Iterator[Batch]:
        """The batches of the steps: the same one, or those of the data."""
        side = self.side
        if side.data is None:
            batch = random_batch(model.config.vocab_size, side.batch_size, side.tokens, seed=0)
            if side.unpadded:
                batch = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
            if side.labelled is not None:
                batch["labels"][:, : -side.labelled] = IGNORE_INDEX
            return itertools.repeat(batch)
        tokenizer = load_tokenizer(Path(side.model))
        rows = training_batches(
            RowReader(tokenizer, 1 << 20).read(side.data), batch_size=side.batch_size, seed=0
        )
        padded = (collate(chosen, pad_token_id=pad_token_id(tokenizer)) for chosen in rows)
        return map(pack, padded) if side.packed else padded

    def _engine(self, opened: ExitStack) -> Callable[[], Taken]:
        side, model = self.side, self.model(self.side.run)
        forwards = time_forwards(model)
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        write_back = None
        if side.every is not None:
            write_back = WriteBackPolicy(directory=folder, every=side.every)
        engine = opened.enter_context(
            Engine(
                model,
                self.method(model, side.run),
                journal=None if write_back is None else folder / "journal.jsonl",
                device=opened.enter_context(closing(self.device())),
                memory=self.memory(model),
                micro_batch_size=side.micro_rows,
                options=EngineOptions(
                    overlap=not side.serial,
                    replay=cast("Replay", side.replay),
                    write_back=write_back,
                    workers=self.workers,
                    trace=self.trace,
                ),
            )
        )
        batches, seeds = (
            self.batches(model),
            itertools.repeat(None) if side.by_gradients else itertools.count(),
        )

        def step() -> Taken:
            forwards.clear()
            batch, seed = next(batches), next(seeds)
            result: Any = (
                in_sweeps(engine, model, batch, side, seed)
                if side.sweeps
                else engine.step(batch, seed=seed)
            )
            if side.eager:
                engine.flush()
            return Taken(result.losses, result, sum(forwards))

        return step

    def _together(self, opened: ExitStack) -> Callable[[], Taken]:
        models = [self.model(seed) for seed in range(self.side.together)]
        batches = self.batches(models[0])
        device = opened.enter_context(closing(self.device()))
        shared = opened.enter_context(
            SharedBase(self.model(None), device=device, memory=self.memory(models[0]))
        )
        made = (
            Engine(model, self.method(model, number), options=EngineOptions(source=shared))
            for number, model in enumerate(models)
        )
        engines = [opened.enter_context(engine) for engine in made]

        def step() -> Taken:
            results = shared.step(dict.fromkeys(engines, next(batches)))
            for result in results.values():
                if isinstance(result, Exception):
                    raise result
            result = results[engines[self.side.run]]
            assert isinstance(result, StepResult), "errors were raised"
            return Taken(result.losses, result)

        return step

    def method(self, model: HFBlockModel, number: int = 0) -> Any:
        """The method of a run; of several runs each has a rate and a seed of its own."""
        side = self.side
        lr = (side.lr or (LORA_LR if side.lora else LR)) * (1 + number)
        if side.lora:
            return FirstOrder(partial(optimizer_of(side.lora), lr=lr))
        if side.full:
            update = make_block_update(side.full, weight_decay=0.0)
            if side.update_seconds is not None:
                update = SlowHost(ADAMW)
                weights = sum(spec.nbytes for layout in model.layouts for spec in layout.parameters)
                update.seconds_a_byte = side.update_seconds / weights
            return FirstOrder(Delayed(update) if side.delayed else update, lr=lr)
        rank = side.rank or (side.lora_rank if side.lora_fa else None)
        low_rank = None if rank is None else LowRankPerturbation(rank=rank, stack=side.stack)
        return zeroth_order(
            lr=lr, queries=side.queries, low_rank=low_rank, noise=NOISES[side.noise], seed=number
        )

    def memory(self, model: HFBlockModel) -> MemoryPolicy:
        side = self.side
        if side.device_memory is not None:
            return MemoryPolicy(
                device=side.device_memory, activations="1GB", least_activations="256MB"
            )
        on_device = side.gpu or side.bus
        activations: int | str = (
            ALL_GRAPHS if side.by_gradients else 1 << 30 if on_device else ACTIVATIONS
        )
        if side.recompute:
            sizes = (model.config, side.micro_rows or side.batch_size, side.tokens)
            activations = gradient_bytes(
                expected_held_bytes(*sizes), forward_bytes(*sizes), len(model.layouts) - 2
            )
        is_planned = not on_device or side.serial or side.kept == "all"
        return memory_of(side.buckets, activations, kept=None if is_planned else int(side.kept))

    def device(self) -> Any:
        """The side's device; where it is not a GPU, its memory is counted, and that of the host
        where it is the device.
        """
        if self.side.gpu:
            return CudaDevice()
        device: Any = (
            HostDevice()
            if self.side.bus is None
            else ThreadedDevice(ThreadedStreams(self._delay(), poison=False))
        )

        def counted(
            allocate: Callable[[int], torch.Tensor], nbytes: int, *, counts: bool
        ) -> torch.Tensor:
            memory = allocate(nbytes)
            self.usage.hold(memory, counts=counts)
            return memory

        device.empty = partial(counted, device.empty, counts=True)
        device.host_memory = partial(counted, device.host_memory, counts=self.side.bus is None)
        return device

    def _delay(self) -> Callable[[Any, int], float]:
        """The seconds of a transfer; a rate that is relative to compute follows from a resident
        engine's.
        """
        bus = self.side.bus or ""
        try:
            times = float(bus)
        except ValueError:
            rate: float = parse_size(bus)
        else:
            model = self.model()
            nbytes = sum(layout.nbytes for layout in model.layouts if not layout.resident)
            batches = self.batches(model)
            with Engine(model, self.method(model)) as engine:
                results: list[Any] = [engine.step(next(batches)) for _ in range(WARM_UP + 3)]
            rate = nbytes / min(step.bound_seconds for step in results) * times
        return lambda lane, moved: moved / rate

    def _whole(self, opened: ExitStack) -> Callable[[], Taken]:
        side, model = self.side, self.model(self.side.run)
        device = torch.device("cuda" if side.gpu else "cpu")
        batches = (
            {key: value.to(device) for key, value in batch.items()} for batch in self.batches(model)
        )
        lr, seeds, eps = side.lr or (LORA_LR if side.lora else LR), itertools.count(), 1e-3
        if side.lora_fa and not side.lora:
            mezo = lora_fa(side.model, lora_of(side), lr=lr, zo_eps=eps)
            mezo.model.to(device)
            return lambda: Taken(mezo.step(next(batches), next(seeds)).losses)
        self.resident = whole = self.whole(model, device)
        if side.forward:
            return partial(forward, whole, batches, 2 * side.queries)
        if not side.by_gradients:
            mono = MonolithicMeZO(
                whole,
                lr=lr,
                zo_eps=eps,
                autocast=model.autocast if side.precision == "mixed" else None,
            )
            return lambda: Taken(mono.step(next(batches), next(seeds)).losses)
        if side.checkpointing:
            whole.activation_checkpointing_enable({"use_reentrant": False})
            whole.train()  # what makes transformers checkpoint
        if side.lora:
            first, make = first_values(model, device), partial(optimizer_of(side.lora), lr=lr)
            step = resident_step(whole, batches, make, config=lora_of(side), first=first)
        else:
            step = resident_step(whole, batches, partial(ADAMW, lr=lr))
        return lambda: Taken((step(),))

    def whole(self, model: HFBlockModel, device: torch.device) -> Any:
        """The whole model, without dropout."""
        if self.side.is_geometry:
            return whole_model(
                model.config,
                DTYPES[self.side.dtype.replace("auto", "float32")],
                device,
                model.weights,
            )
        config: Any = AutoConfig.from_pretrained(self.side.model)
        for name in DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        dtype = torch.float32 if self.side.precision == "mixed" else self.side.dtype
        whole: Any = AutoModelForCausalLM.from_pretrained(
            self.side.model, config=config, dtype=dtype
        )
        return whole.to(device)


@dataclass(kw_only=True)
class Processes:
    """A side in processes of its own, as many as it has workers."""

    side: Side

    @contextmanager
    def opened(self) -> Iterator[Callable[[], Taken]]:
        """The side's step, as long as the context lasts."""
        context, pipes = multiprocessing.get_context("spawn"), list[Connection]()
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(self.side.workers or 1):
                ours, theirs = context.Pipe()
                given = (theirs, self.side, rank, f"file://{folder}/workers")
                context.Process(target=serve, args=given, daemon=True).start()
                theirs.close()  # so that the end of the process is the end of the pipe
                pipes.append(ours)
            for pipe in pipes:
                pipe.recv()

            def step() -> Taken:
                for pipe in pipes:
                    pipe.send("step")
                first, *others = [pipe.recv() for pipe in pipes]
                assert all(other.losses == first.losses for other in others), (
                    "the workers' losses differ"
                )
                taken: Taken = first
                return taken

            yield step
            for pipe in pipes:
                pipe.send(None)

    def peaks(self, step: Callable[[], object]) -> dict[str, int | None]:
        return {}  # each step tells what the process uses


def serve(pipe: Connection, side: Side, rank: int, address: str) -> None:
    """A process that takes a step for each message, and tells its result."""
    if (largest := FREED[side.freed]) is not None:
        keep_freed_memory(largest)
    if side.workers:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    if threads := 1 if side.workers else side.threads:
        torch.set_num_threads(threads)
    with ExitStack() as opened:
        workers = None
        if side.workers > 1:
            distributed.init_process_group(
                "gloo", init_method=address, rank=rank, world_size=side.workers
            )
            split = "rows" if side.by_gradients else "directions"
            workers = opened.enter_context(
                Workers(distributed.group.WORLD, split=split, neighbours=side.workers)
            )
        step = opened.enter_context(Measured(side=side, workers=workers).opened())
        pipe.send("ready")
        while pipe.recv():
            before = resource.getrusage(resource.RUSAGE_SELF)
            taken = step()
            after = resource.getrusage(resource.RUSAGE_SELF)
            usage = {
                "kernel's CPU seconds": after.ru_stime - before.ru_stime,
                "page faults": float(after.ru_minflt - before.ru_minflt),
                "resident_bytes": float(psutil.Process().memory_info().rss),
                "peak_bytes": float(peak_memory()),
            }
            pipe.send(taken._replace(usage=usage))


def lora_of(side: Side) -> peft.LoraConfig:
    """The adapter of a side: on the layers that this model has."""
    if not side.all_linear:
        return lora(side.lora_rank)
    return lora(side.lora_rank, target_modules="all-linear")


class SlowHost(TorchOptimizer):
    """An optimizer on a host that takes a given time for each byte of weights."""

    seconds_a_byte = 0.0

    def apply(self, inputs: UpdateInputs) -> None:
        began = time.perf_counter()
        super().apply(inputs)
        seconds = self.seconds_a_byte * sum(weight.nbytes for weight in inputs.weights.values())
        time.sleep(max(seconds - (time.perf_counter() - began), 0.0))


def optimizer_of(name: Any) -> Any:
    return OPTIMIZERS[name].of_adapter


def time_forwards(model: Any) -> list[float]:
    """A list that grows by the seconds of each forward of a model's segment."""
    seconds: list[float] = []

    def timed(function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        result = function(*arguments)
        seconds.append(time.perf_counter() - began)
        return result

    for name in ("embed", "block", "head"):
        setattr(model, name, partial(timed, getattr(model, name)))
    return seconds


def sweeps_of(queries: int) -> dict[str, list[Sequence[int]]]:
    """The evaluations of each sweep, in the order + - + -, by what ``--sweeps`` says."""
    places = range(2 * queries)
    return {
        "in-turn": [[place] for place in places],
        "inner": [[place, place + 1] for place in places[::2]],
        "outer": [places[::2], places[1::2]],
        "both": [places],
    }


def in_sweeps(engine: Engine, model: Any, batch: Batch, side: Side, seed: int | None) -> StepResult:
    """Take a step in several sweeps, each with some of the evaluations as one batch."""
    evaluations, losses = engine.ask(seed=seed), dict[int, torch.Tensor]()
    for places in sweeps_of(side.queries)[side.sweeps or "both"]:
        outputs = engine.forwards_at([(evaluations[place], [batch]) for place in places], model)
        losses.update(zip(places, (loss for [loss] in outputs), strict=True))
    return engine.tell([losses[place] for place in range(len(evaluations))])


@torch.inference_mode()
def forward(whole: Any, batches: Iterator[Batch], copies: int) -> Taken:
    stacked = {key: torch.cat([value] * copies) for key, value in next(batches).items()}
    return Taken((float(whole(**stacked, use_cache=False).loss),))


def first_values(model: HFBlockModel, device: torch.device) -> dict[str, torch.Tensor]:
    """The adapter's values, as the stream begins with them."""
    specs = [spec for layout in model.layouts for spec in layout.parameters if not spec.frozen]
    values = {spec.name: torch.empty(spec.shape, dtype=spec.dtype) for spec in specs}
    for name, value in values.items():
        model.weights.read_into(name, value.view(-1))
    return {name: value.to(device) for name, value in values.items()}
