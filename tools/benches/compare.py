"""Compare steps of several sides: storage, precision, directions, method, device, processes, or the whole model by others.

    python tools/bench.py compare opt-125m --sides "--noise mezo" "--noise mezo --whole"
    python tools/bench.py compare opt-1.3b-bf16 --tokens 64 --sides "--buckets 3" "--buckets 3 --model opt-1.3b-nf4"
    python tools/bench.py compare smollm2-135m-bf16 --shapes 4x256,16x40 --sides "--lora adamw" "--lora adamw --whole"

A side is a step with the options that ``compare --side-options`` lists. Sides alternate, with the same batch. A model is a
checkpoint or, where there is no file of its name, a geometry of ``make_checkpoint.py`` with synthetic weights
(``synthetic.py``). Each row has seconds, how many times faster than the first side it is, whether its losses are the
first's and how far they are from those, the bytes and busy seconds of its lanes, a step's ratio to the slowest lane and to
their sum, and the peak bytes of operations without weights and buffers; a side in processes of its own has their memory
instead, with page faults and seconds in the kernel.

A step with q queries on B rows has 2 q evaluations. All of them run together where a block is visited, or with ``--stack 1``
one after the other. ``--sweeps`` takes several sweeps, as the variants of P-RGE take forwards (arXiv 2409.15520): *in-turn*
2 q of B rows, *inner* q of both signs of a query, *outer* 2 of all queries with one sign, *both* one of all.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import resource
import shlex
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, get_args

import peft
import psutil
import torch
from make_checkpoint import geometries
from measuring import (
    WARM_UP,
    Side,
    Usage,
    add_sizes,
    alternate,
    lanes_of,
    lora,
    lora_fa,
    memory_of,
    ratio,
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
from zo2adapters.trainers.process import LARGEST, SMALL, keep_freed_memory, peak_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import (
    CudaDevice,
    Delayed,
    Distribution,
    Engine,
    FirstOrder,
    HostDevice,
    MemoryPolicy,
    SharedBase,
    TorchOptimizer,
    Workers,
    WriteBackPolicy,
)
from zo2core.optimizers import OPTIMIZERS, make_block_update
from zo2core.planning.memory import ACTIVATIONS
from zo2core.protocols import UpdateInputs
from zo2core.ranges import OptimizerName, parse_size
from zo2core.sweep.gradient_visitor import gradient_bytes
from zo2core.sweep.microbatch import IGNORE_INDEX
from zo2core.types import Batch, StepResult

ALL_GRAPHS = 1 << 34  # bytes
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")  # of configs; checkpointing turns them on
NOISES = {"mezo": None} | {distribution.value: distribution for distribution in Distribution}
OF_CHECKPOINTS = ("lora", "lora_fa", "precision", "transfer_dtype", "loss_chunk", "rate")  # without effect on a geometry
FREED = {"returned": None, "small": SMALL, "kept": LARGEST}  # the largest blocks of memory that stay when they are freed
LORA_LR, LR = 1e-4, 1e-6
ADAMW = partial(torch.optim.AdamW, weight_decay=0.0, fused=True)  # of all parameters


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="checkpoint or geometry")
    parser.add_argument("--sides", nargs="+", default=["", "--whole"], help="the options of each side, quoted")
    parser.add_argument("--side-options", action="help", help=side_parser().format_help())
    parser.add_argument("--shapes", type=shapes, help="several shapes of batches, as rows x tokens")
    add_sizes(parser)
    parser.add_argument("--unpadded", action="store_true", help="no row is shorter; by default the last one is")
    parser.add_argument("--labelled", type=int, help="number of labelled tokens at each row's end; by default all")
    parser.add_argument("--data", type=Path, help="file of rows to train on; by default random tokens of one length")
    parser.add_argument("--apart", action="store_true", help="each side has a process of its own")


def side_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="", add_help=False, usage=argparse.SUPPRESS)
    add, flag = parser.add_argument, partial(parser.add_argument, action="store_true")
    add("--model", help="another checkpoint or geometry")
    add("--precision", choices=["exact", "mixed"], default="exact")
    add("--dtype", default="auto")
    add("--transfer-dtype", default="stored")
    add("--loss-chunk", choices=["auto", "none"], default="auto", help="whether logits are made in chunks")
    add("--lr", type=float)
    add("--noise", choices=list(NOISES), default="rademacher", help="mezo is exact MeZO")
    add("--rank", type=int, help="of low-rank directions")
    add("--queries", type=int, default=1)
    add("--stack", type=int, help="with --rank: evaluations that run together; by default all")
    add("--sweeps", choices=["in-turn", "inner", "outer", "both"], help="several sweeps a step, with some evaluations each")
    flag("--eager", help="a sweep of its own for each update")
    add("--lora", choices=[name for name, made in OPTIMIZERS.items() if made.of_adapter], help="train LoRA by gradients")
    flag("--lora-fa", help="train LoRA's matrices B alone: without --lora along directions")
    add("--lora-rank", type=int, default=8)
    add("--full", choices=get_args(OptimizerName), help="train all parameters by gradients")
    flag("--recompute", help="with gradients: memory for the inputs of blocks alone, instead of all graphs")
    add("--update-seconds", type=float, help="with --full: what the update of a step takes on a slow host")
    flag("--delayed", help="with --full: the update of a step is applied during the next")
    add("--buckets", type=int, help="blocks in host memory; by default all")
    add("--every", type=int, help="steps after which blocks are written back to disk")
    add("--rate", help="bytes a second of a simulated slower disk, such as 1GB")
    flag("--serial", help="without overlap")
    add("--rows", type=int, help="another number of rows")
    add("--micro-rows", type=int, help="rows of a micro-batch")
    add("--batches", type=int, default=1, help="batches of the given size that are one batch of this side")
    flag("--packed", help="with --data: rows are packed instead of padded")
    flag("--gpu", help="no block stays on the GPU between visits")
    add("--kept", default="0", help="with --gpu or --bus: blocks that stay on the device, or 'all' for as many as fit")
    add("--device-memory", help="with --gpu: memory that may be used there, such as 8GB")
    add("--bus", help="a simulated bus: bytes a second, such as 1GB, or how many times as long as all uploads compute takes")
    add("--replay", choices=["auto", "host", "device"], default="auto", help="who replays updates for a device")
    flag("--whole", help="the whole model by transformers, peft and torch.optim, or monolithic MeZO")
    flag("--forward", help="with --whole: one forward of the stacked batch alone")
    flag("--checkpointing", help="with --whole: blocks are computed again on the way back")
    add("--together", type=int, help="so many runs with a rate and a seed each share the base; seconds are those of all")
    add("--workers", type=int, help="processes, with a core each, that share directions, or with gradients rows")
    add("--freed", choices=list(FREED), default="small", help="with --apart: freed memory that stays with the process")
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory(SMALL)  # as zo2 train does
    sizes = options.shapes or [(options.rows, options.tokens)]
    return {f"{rows} x {tokens}": bench(options, rows, tokens) for rows, tokens in sizes}


def bench(options: argparse.Namespace, rows: int, tokens: int) -> dict[str, Any]:
    chosen = {text.strip() or "default": side_parser().parse_args(shlex.split(text)) for text in options.sides}
    if any(side.freed != "small" and not (options.apart or side.workers) for side in chosen.values()):
        raise SystemExit("--freed needs --apart: a whole process keeps freed memory")
    made = {
        name: (Processes if options.apart or side.workers else Measured)(options, side, rows, tokens)
        for name, side in chosen.items()
    }
    with ExitStack() as opened:
        steps = {name: opened.enter_context(side.opened()) for name, side in made.items()}
        measured = alternate(steps, options.steps)
        peaks = {name: made[name].peaks(step) for name, step in steps.items()}
    first = next(iter(measured))
    found: dict[str, Any] = {}
    for name, side in measured.items():
        pairs = [(one.losses, other.losses) for one, other in zip(side.results, measured[first].results, strict=True)]
        found[name] = {
            "step": spread(side.seconds),
            "times faster": times_faster(measured, name, first),
            "losses of the first": all(one == other for one, other in pairs),
            "losses apart": max(apart(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=False)),
            **peaks[name],
            **report(side),
        }
        if runs := chosen[name].together:
            found[name]["times faster than apart"] = ratio([runs * one for one in measured[first].seconds], side.seconds)
    return found


def apart(ours: float, theirs: float) -> float:
    """The relative difference of two losses."""
    is_finite = math.isfinite(ours - theirs)
    return 0.0 if ours == theirs else abs(ours - theirs) / abs(theirs) if theirs and is_finite else math.inf


class Taken(NamedTuple):
    """A step of a side."""

    losses: tuple[float, ...]
    result: StepResult | None = None  # of an engine
    forwards: float = 0.0  # seconds of forwards
    usage: Mapping[str, float] = {}  # of the process


def report(side: Side) -> dict[str, Any]:
    """What processes say of their memory, and engines of their lanes and the share of forwards."""
    found: dict[str, Any] = {name: spread([step.usage[name] for step in side.results]) for name in side.results[0].usage}
    steps = [step.result for step in side.results]
    if None in steps or not steps[0].bound_seconds:
        return found
    sums = [sum(use.busy_seconds for use in step.lanes.values()) for step in steps]
    if side.results[0].forwards:
        found["share of forwards"] = ratio([step.forwards for step in side.results], side.seconds)
    return found | {
        "to the slowest lane": spread([step.seconds / step.bound_seconds for step in steps]),
        "to the sum of lanes": ratio(side.seconds, sums),
        "lanes": lanes_of(steps),
    }


class Measured:
    """One side: the command line and its own options, at a number of rows and of tokens a row.

    Args:
        workers: The processes that share the steps.
        scale: Divisor of a geometry's sizes.
        layers: Number of a geometry's layers; None leaves all of them.
        given: Options of the engine.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        side: argparse.Namespace,
        rows: int,
        tokens: int,
        *,
        workers: Workers | None = None,
        scale: int = 1,
        layers: int | None = None,
        **given: Any,
    ) -> None:
        self.options, self.side, self.scale, self.layers = options, side, scale, layers
        self.rows, self.tokens = (side.rows or rows) * side.batches, tokens
        self.name = side.model or options.model
        self.is_geometry = self.name in geometries() and not Path(self.name).exists()
        defaults = side_parser().parse_args([])
        for option in OF_CHECKPOINTS if self.is_geometry else ():
            if getattr(side, option) != getattr(defaults, option):
                flag = f"--{option.replace('_', '-')}"
                raise SystemExit(f"{self.name}: a geometry takes no {flag}; write a checkpoint by tools/make_checkpoint.py")
        self.by_gradients = bool(side.lora or side.full)
        self.usage = Usage()  # of the device, where that is not a GPU
        self.resident: Any = None  # the whole model
        self._given: dict[str, Any] = {"workers": workers, **given}
        self._forward = 0.0

    @contextmanager
    def opened(self) -> Iterator[Callable[[], Taken]]:
        """The side's step, as long as the context lasts."""
        with ExitStack() as stack:
            take = self._whole if self.side.whole else self._together if self.side.together else self._engine
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
        # Parameters are given one by one: a list of them would keep the old weights alive with the new ones.
        return self.usage.peak_of(
            step, (parameter.data for parameter in self.resident.parameters()) if self.resident else ()
        )

    def model(self, seed: int | None = 0) -> HFBlockModel:
        """The side's model; ``seed`` is that of its adapter, and None leaves the adapter out."""
        side = self.side
        if self.is_geometry:
            dtype = "float32" if side.dtype == "auto" else side.dtype
            config = scaled(geometries()[self.name], self.scale, self.tokens)
            config.num_hidden_layers = self.layers or config.num_hidden_layers
            return block_model(config, DTYPES[dtype])
        chunk: Any = None if side.loss_chunk == "none" else side.loss_chunk
        given: dict[str, Any] = {"precision": side.precision, "transfer_dtype": side.transfer_dtype}
        if seed is not None and (side.lora or side.lora_fa):
            frozen = ("lora_A",) if side.lora_fa else ()
            given = {"adapter": Adapter(config=lora(side.lora_rank), seed=seed, frozen=frozen)}
        return slowed(open_checkpoint(self.name, dtype=side.dtype, loss_chunk=chunk, **given), side.rate)

    def batches(self, model: HFBlockModel) -> Iterator[Batch]:
        """The batches of the steps: the same one, or those of the data."""
        if self.options.data is None:
            batch = random_batch(model.config.vocab_size, self.rows, self.tokens, seed=0)
            if self.options.unpadded:
                batch = {"input_ids": batch["input_ids"], "labels": batch["input_ids"]}
            if self.options.labelled is not None:
                batch["labels"][:, : -self.options.labelled] = IGNORE_INDEX
            return itertools.repeat(batch)
        tokenizer = load_tokenizer(Path(self.name))
        dataset = RowReader(tokenizer, 1 << 20).read(self.options.data)
        rows = training_batches(dataset, batch_size=self.rows, seed=0)
        padded = (collate(chosen, pad_token_id=pad_token_id(tokenizer)) for chosen in rows)
        return map(pack, padded) if self.side.packed else padded

    def _engine(self, opened: ExitStack) -> Callable[[], Taken]:
        side, model = self.side, self.model()
        time_forwards(model, self._spend)
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        given: dict[str, Any] = {"overlap": not side.serial, "replay": side.replay, "micro_batch_size": side.micro_rows}
        if side.every is not None:
            write_back = WriteBackPolicy(directory=folder, every=side.every)
            given |= {"journal": folder / "journal.jsonl", "write_back": write_back}
        given |= {"device": opened.enter_context(closing(self.device())), "memory": self.memory(model)}
        engine = opened.enter_context(Engine(model, self.method(model), **given, **self._given))
        batches, seeds = self.batches(model), itertools.repeat(None) if self.by_gradients else itertools.count()

        def step() -> Taken:
            self._forward = 0.0
            batch, seed = next(batches), next(seeds)
            result: Any = in_sweeps(engine, model, batch, side, seed) if side.sweeps else engine.step(batch, seed=seed)
            if side.eager:
                engine.flush()
            return Taken(result.losses, result, self._forward)

        return step

    def _together(self, opened: ExitStack) -> Callable[[], Taken]:
        first = self.model()
        batches = self.batches(first)
        device = opened.enter_context(closing(self.device()))
        shared = opened.enter_context(SharedBase(self.model(None), device=device, memory=self.memory(first)))
        models = [first, *(self.model(seed) for seed in range(1, self.side.together))]
        engines = [
            opened.enter_context(Engine(model, self.method(model, number), shared=shared))
            for number, model in enumerate(models)
        ]

        def step() -> Taken:
            results = shared.step(dict.fromkeys(engines, next(batches)))
            for result in results.values():
                if isinstance(result, Exception):
                    raise result
            result = results[engines[0]]
            assert isinstance(result, StepResult), "errors were raised"
            return Taken(result.losses, result)

        return step

    def _spend(self, seconds: float) -> None:
        self._forward += seconds

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
        noise = NOISES[side.noise]
        return zeroth_order(lr=lr, queries=side.queries, rank=rank, noise=noise, seed=number, stack=side.stack)

    def memory(self, model: HFBlockModel) -> MemoryPolicy:
        side = self.side
        if side.device_memory is not None:
            return MemoryPolicy(device=side.device_memory, activations="1GB", least_activations="256MB")
        on_device = side.gpu or side.bus
        activations: int | str = ALL_GRAPHS if self.by_gradients else 1 << 30 if on_device else ACTIVATIONS
        if side.recompute:
            sizes = (model.config, side.micro_rows or self.rows, self.tokens)
            activations = gradient_bytes(expected_held_bytes(*sizes), forward_bytes(*sizes), len(model.layouts) - 2)
        is_planned = not on_device or side.serial or side.kept == "all"
        return memory_of(side.buckets, activations, kept=None if is_planned else int(side.kept))

    def device(self) -> Any:
        """The side's device; where it is not a GPU, its memory is counted, and that of the host where it is the device."""
        if self.side.gpu:
            return CudaDevice()
        device: Any = HostDevice() if self.side.bus is None else ThreadedDevice(ThreadedStreams(self._delay(), poison=False))

        def counted(allocate: Callable[[int], torch.Tensor], nbytes: int, *, counts: bool) -> torch.Tensor:
            memory = allocate(nbytes)
            self.usage.hold(memory, counts=counts)
            return memory

        device.empty = partial(counted, device.empty, counts=True)
        device.host_memory = partial(counted, device.host_memory, counts=self.side.bus is None)
        return device

    def _delay(self) -> Callable[[Any, int], float]:
        """The seconds of a transfer; a rate that is relative to compute follows from a resident engine's."""
        try:
            times = float(self.side.bus)
        except ValueError:
            rate: float = parse_size(self.side.bus)
        else:
            model = self.model()
            nbytes = sum(layout.nbytes for layout in model.layouts if not layout.resident)
            batches = self.batches(model)
            with Engine(model, self.method(model)) as engine:
                results: list[Any] = [engine.step(next(batches)) for _ in range(WARM_UP + 3)]
            rate = nbytes / min(step.bound_seconds for step in results) * times
        return lambda lane, moved: moved / rate

    def _whole(self, opened: ExitStack) -> Callable[[], Taken]:
        side, model = self.side, self.model()
        device = torch.device("cuda" if side.gpu else "cpu")
        batches = ({key: value.to(device) for key, value in batch.items()} for batch in self.batches(model))
        lr, seeds = side.lr or (LORA_LR if side.lora else LR), itertools.count()
        if side.lora_fa and not side.lora:
            fa = lora_fa(self.name, lora(side.lora_rank), lr=lr, zo_eps=1e-3)
            fa.model.to(device)
            return lambda: Taken(fa.step(next(batches), next(seeds)).losses)
        self.resident = self.whole(model, device)
        if side.forward:
            return partial(forward, self.resident, batches, 2 * side.queries)
        if self.by_gradients:
            first = first_values(model, device) if side.lora else {}
            return first_order_step(self.resident, batches, side, first, lr)
        autocast = model.autocast if side.precision == "mixed" else None
        mono = MonolithicMeZO(self.resident, lr=lr, zo_eps=1e-3, autocast=autocast)
        return lambda: Taken(mono.step(next(batches), next(seeds)).losses)

    def whole(self, model: HFBlockModel, device: torch.device) -> Any:
        """The whole model, without dropout."""
        if self.is_geometry:
            return whole_model(model.config, DTYPES[self.side.dtype.replace("auto", "float32")], device, model.weights)
        config: Any = AutoConfig.from_pretrained(self.name)
        for name in DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, 0.0)
        dtype = torch.float32 if self.side.precision == "mixed" else self.side.dtype
        whole: Any = AutoModelForCausalLM.from_pretrained(self.name, config=config, dtype=dtype)
        return whole.to(device)


class Processes:
    """A side in processes of its own, as many as it has workers."""

    def __init__(self, options: argparse.Namespace, side: argparse.Namespace, rows: int, tokens: int) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = int(bound.getsockname()[1])
        self._given = [(options, side, rows, tokens, rank, port) for rank in range(side.workers or 1)]

    @contextmanager
    def opened(self) -> Iterator[Callable[[], Taken]]:
        """The side's step, as long as the context lasts."""
        context, pipes = multiprocessing.get_context("spawn"), list[Connection]()
        for given in self._given:
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(theirs, *given), daemon=True).start()
            theirs.close()  # so that the end of the process is the end of the pipe
            pipes.append(ours)

        def step() -> Taken:
            for pipe in pipes:
                pipe.send("step")
            first, *others = [pipe.recv() for pipe in pipes]
            assert all(other.losses == first.losses for other in others), "the workers' losses differ"
            taken: Taken = first
            return taken

        for pipe in pipes:
            pipe.recv()
        yield step
        for pipe in pipes:
            pipe.send(None)

    def peaks(self, step: Callable[[], object]) -> dict[str, int | None]:
        return {}  # each step tells what the process uses


def serve(
    pipe: Connection, options: argparse.Namespace, side: argparse.Namespace, rows: int, tokens: int, rank: int, port: int
) -> None:
    """A process that takes a step for each message, and tells its result."""
    if (largest := FREED[side.freed]) is not None:
        keep_freed_memory(largest)
    if side.workers:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
        torch.set_num_threads(1)
    elif options.threads is not None:
        torch.set_num_threads(options.threads)
    with ExitStack() as opened:
        workers = None
        if (side.workers or 1) > 1:
            address = f"tcp://127.0.0.1:{port}"
            distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=side.workers)
            split = "rows" if side.lora or side.full else "directions"
            workers = opened.enter_context(Workers(distributed.group.WORLD, split=split, neighbours=side.workers))
        step = opened.enter_context(Measured(options, side, rows, tokens, workers=workers).opened())
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


class SlowHost(TorchOptimizer):
    """An optimizer on a host that takes a given time for each byte of weights."""

    seconds_a_byte = 0.0

    def apply(self, inputs: UpdateInputs) -> None:
        began = time.perf_counter()
        super().apply(inputs)
        seconds = self.seconds_a_byte * sum(weight.nbytes for weight in inputs.weights.values())
        time.sleep(max(seconds - (time.perf_counter() - began), 0.0))


def optimizer_of(name: OptimizerName) -> Any:
    return OPTIMIZERS[name].of_adapter


def time_forwards(model: Any, spend: Callable[[float], None]) -> None:
    """Measure the forwards of a model's segments."""

    def timed(function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        result = function(*arguments)
        spend(time.perf_counter() - began)
        return result

    for name in ("embed", "block", "head"):
        setattr(model, name, partial(timed, getattr(model, name)))


def sweeps_of(queries: int) -> dict[str, list[Sequence[int]]]:
    """The evaluations of each sweep, in the order + - + -, by what ``--sweeps`` says."""
    places = range(2 * queries)
    return {
        "in-turn": [[place] for place in places],
        "inner": [[place, place + 1] for place in places[::2]],
        "outer": [places[::2], places[1::2]],
        "both": [places],
    }


def in_sweeps(engine: Engine, model: Any, batch: Batch, side: argparse.Namespace, seed: int | None) -> StepResult:
    """Take a step in several sweeps, each with some of the evaluations as one batch."""
    evaluations, losses = engine.ask(seed=seed), dict[int, torch.Tensor]()
    for places in sweeps_of(side.queries)[side.sweeps]:
        outputs = engine.forwards_at([(evaluations[place], [batch]) for place in places], model)
        losses.update(zip(places, (loss for [loss] in outputs), strict=True))
    return engine.tell([losses[place] for place in range(len(evaluations))])


@torch.inference_mode()
def forward(whole: Any, batches: Iterator[Batch], copies: int) -> Taken:
    stacked = {key: torch.cat([value] * copies) for key, value in next(batches).items()}
    return Taken((float(whole(**stacked, use_cache=False).loss),))


def first_values(model: HFBlockModel, device: torch.device) -> dict[str, torch.Tensor]:
    """The adapter's values, as the stream begins with them."""
    values = {}
    for spec in (spec for layout in model.layouts for spec in layout.parameters if not spec.frozen):
        value = torch.empty(spec.shape, dtype=spec.dtype)
        model.weights.read_into(spec.name, value.view(-1))
        values[spec.name] = value.to(device)
    return values


def first_order_step(
    whole: Any, batches: Iterator[Batch], side: argparse.Namespace, first: Mapping[str, torch.Tensor], lr: float
) -> Callable[[], Taken]:
    """The step of torch on the whole model; ``first`` has the values of the adapter, if there is one."""
    if first:
        peft.inject_adapter_in_model(lora(side.lora_rank), whole)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = not first or name in first
        # What was mapped from a file lies where no allocator puts it, and products round otherwise there.
        parameter.data = first.get(name, parameter.data).clone()
    if side.checkpointing:
        whole.activation_checkpointing_enable({"use_reentrant": False})
        whole.train()  # what makes transformers checkpoint
    trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
    made: Any = optimizer_of(side.lora) if first else ADAMW
    optimizer = made(trained, lr=lr)

    def step() -> Taken:
        optimizer.zero_grad()
        loss = whole(**next(batches), use_cache=False).loss
        loss.backward()
        optimizer.step()
        return Taken((float(loss.detach()),))

    return step
