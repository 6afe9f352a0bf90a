"""Compare steps of several sides: storage, precision, directions, method, device, or the whole model by transformers.

    python tools/bench.py compare opt-125m --sides "--noise mezo" "--noise mezo --whole"
    python tools/bench.py compare opt-1.3b-bf16 --tokens 64 --sides "--buckets 3" "--buckets 3 --model opt-1.3b-nf4"
    python tools/bench.py compare smollm2-135m-bf16 --shapes 4x256,16x40 --sides "--lora adamw" "--lora adamw --whole"

A side is a step with the options that ``compare --side-options`` lists. Sides alternate, with the same batch. A model is a
checkpoint or, where there is no file of its name, a geometry of ``make_checkpoint.py`` with synthetic weights
(``synthetic.py``). Each row has seconds, how many times faster than the first side it is, whether its losses are the
first's, the bytes and busy seconds of its lanes, a step's ratio to the slowest lane and to their sum, and the peak bytes of
operations without weights and buffers.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import peft
import torch
from make_checkpoint import geometries
from measuring import (
    WARM_UP,
    Side,
    add_sizes,
    alternate,
    lanes_of,
    lora,
    memory_of,
    peak_of_step,
    ratio,
    shapes,
    spread,
    times_faster,
    zeroth_order,
)
from synthetic import block_model, scaled, slowed, whole_model
from threaded_device import ThreadedDevice, ThreadedStreams
from transformers import AutoConfig, AutoModelForCausalLM

from zo2adapters import Adapter, MonolithicMeZO, open_checkpoint, pack
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.models.footprint import expected_held_bytes, forward_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.rows import collate, training_batches
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id
from zo2adapters.trainers.allocator import SMALL, keep_freed_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import Delayed, Distribution, Engine, FirstOrder, MemoryPolicy, TorchOptimizer, WriteBackPolicy
from zo2core.optimizers import OPTIMIZERS, make_block_update
from zo2core.planning.memory import ACTIVATIONS
from zo2core.protocols import UpdateInputs
from zo2core.ranges import OptimizerName
from zo2core.sweep.gradient_visitor import gradient_bytes
from zo2core.sweep.microbatch import IGNORE_INDEX
from zo2core.types import Batch

ALL_GRAPHS = 1 << 34  # bytes
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")  # of configs; checkpointing turns them on
NOISES = {"mezo": None} | {distribution.value: distribution for distribution in Distribution}
OF_CHECKPOINTS = ("lora", "precision", "transfer_dtype", "loss_chunk", "rate")  # options without effect on a geometry
LORA_LR, LR = 1e-4, 1e-6
ADAMW = partial(torch.optim.AdamW, weight_decay=0.0, fused=True)  # of all parameters


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="checkpoint or geometry")
    parser.add_argument("--sides", nargs="+", default=["", "--whole"], help="the options of each side, quoted")
    parser.add_argument("--side-options", action="help", help=side_parser().format_help())
    parser.add_argument("--shapes", type=shapes, help="several shapes of batches, as rows x tokens")
    add_sizes(parser)
    parser.add_argument("--labelled", type=int, help="number of labelled tokens at each row's end; by default all")
    parser.add_argument("--data", type=Path, help="file of rows to train on; by default random tokens of one length")


def side_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="", add_help=False, usage=argparse.SUPPRESS)
    add, flag = parser.add_argument, partial(parser.add_argument, action="store_true")
    add("--model", help="another checkpoint or geometry")
    add("--precision", choices=["exact", "mixed"], default="exact")
    add("--dtype", default="auto")
    add("--transfer-dtype", default="stored")
    add("--loss-chunk", choices=["auto", "none"], default="auto", help="whether logits are made in chunks")
    add("--noise", choices=list(NOISES), default="rademacher", help="mezo is exact MeZO")
    add("--rank", type=int, help="of low-rank directions")
    add("--queries", type=int, default=1)
    add("--lora", choices=[name for name, made in OPTIMIZERS.items() if made.of_adapter], help="train LoRA by gradients")
    add("--full", choices=get_args(OptimizerName), help="train all parameters by gradients")
    flag("--recompute", help="with gradients: memory for the inputs of blocks alone, instead of all graphs")
    add("--update-seconds", type=float, help="with --full: what the update of a step takes on a slow host")
    flag("--delayed", help="with --full: the update of a step is applied during the next")
    add("--buckets", type=int, help="blocks in host memory; by default all")
    add("--every", type=int, help="steps after which blocks are written back to disk")
    add("--rate", help="bytes a second of a simulated slower disk, such as 1GB")
    flag("--serial", help="without overlap")
    add("--micro-rows", type=int, help="rows of a micro-batch")
    add("--batches", type=int, default=1, help="batches of the given size that are one batch of this side")
    flag("--packed", help="with --data: rows are packed instead of padded")
    flag("--gpu", help="no block stays on the GPU between visits")
    flag("--stay", help="with --gpu: as many blocks as fit stay there")
    add("--device-memory", help="with --gpu: memory that may be used there, such as 8GB")
    add("--bus", type=float, help="a simulated bus, on which compute takes so many times as long as all uploads")
    add("--replay", choices=["auto", "host", "device"], default="auto", help="who replays updates for a device")
    flag("--whole", help="the whole model by transformers, peft and torch.optim, or monolithic MeZO")
    flag("--forward", help="with --whole: one forward of the stacked batch alone")
    flag("--checkpointing", help="with --whole: blocks are computed again on the way back")
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    keep_freed_memory(SMALL)  # as zo2 train does
    sizes = options.shapes or [(options.rows, options.tokens)]
    return {f"{rows} x {tokens}": bench(options, rows, tokens) for rows, tokens in sizes}


def bench(options: argparse.Namespace, rows: int, tokens: int) -> dict[str, Any]:
    chosen = {text.strip() or "default": side_parser().parse_args(shlex.split(text)) for text in options.sides}
    made = {name: Measured(options, side, rows, tokens) for name, side in chosen.items()}
    with ExitStack() as opened:
        steps = {name: opened.enter_context(side.opened()) for name, side in made.items()}
        measured = alternate(steps, options.steps)
        peaks = {name: None if made[name].side.gpu else peak_of_step(step) for name, step in steps.items()}
    first = next(iter(measured))
    found: dict[str, Any] = {}
    for name, side in measured.items():
        pairs = zip(side.results, measured[first].results, strict=True)
        found[name] = {
            "step": spread(side.seconds),
            "times faster": times_faster(measured, name, first),
            "losses of the first": all(one.losses == other.losses for one, other in pairs),
            "operations_bytes": peaks[name],
            **made[name].report(side),
        }
    return found


class Losses(NamedTuple):
    """The result of a step of the whole model."""

    losses: tuple[float, ...]


class Measured:
    """One side: the command line and its own options, at a number of rows and of tokens a row."""

    def __init__(self, options: argparse.Namespace, side: argparse.Namespace, rows: int, tokens: int) -> None:
        self.options, self.side = options, side
        self.rows, self.tokens = rows * side.batches, tokens
        self.name = side.model or options.model
        self.is_geometry = self.name in geometries() and not Path(self.name).exists()
        defaults = side_parser().parse_args([])
        for option in OF_CHECKPOINTS if self.is_geometry else ():
            if getattr(side, option) != getattr(defaults, option):
                flag = f"--{option.replace('_', '-')}"
                raise SystemExit(f"{self.name}: a geometry takes no {flag}; write a checkpoint by tools/make_checkpoint.py")
        self.forwards: list[float] = []  # seconds of forwards in each step
        self._forward = 0.0

    @contextmanager
    def opened(self) -> Iterator[Callable[[], Any]]:
        """The side's step, as long as the context lasts."""
        with ExitStack() as stack:
            yield (self._whole if self.side.whole else self._engine)(stack)

    def report(self, side: Side) -> dict[str, Any]:
        """What an engine says of its lanes, and the share of forwards."""
        if self.side.whole:
            return {}
        sums = [sum(use.busy_seconds for use in step.lanes.values()) for step in side.results]
        return {
            "share of forwards": ratio(self.forwards[WARM_UP : WARM_UP + len(side.seconds)], side.seconds),
            "to the slowest lane": spread([step.seconds / step.bound_seconds for step in side.results]),
            "to the sum of lanes": ratio(side.seconds, sums),
            "lanes": lanes_of(side.results),
        }

    def model(self) -> HFBlockModel:
        side = self.side
        if self.is_geometry:
            dtype = "float32" if side.dtype == "auto" else side.dtype
            return block_model(scaled(geometries()[self.name], 1, self.tokens), DTYPES[dtype])
        chunk: Any = None if side.loss_chunk == "none" else side.loss_chunk
        adapter = Adapter(config=lora(), seed=0) if side.lora else None
        given: dict[str, Any] = {} if side.lora else {"precision": side.precision, "transfer_dtype": side.transfer_dtype}
        return slowed(open_checkpoint(self.name, dtype=side.dtype, loss_chunk=chunk, adapter=adapter, **given), side.rate)

    def batches(self, model: HFBlockModel) -> Iterator[Batch]:
        """The batches of the steps: the same one, or those of the data."""
        if self.options.data is None:
            batch = random_batch(model.config.vocab_size, self.rows, self.tokens, seed=0)
            if self.options.labelled is not None:
                batch["labels"][:, : -self.options.labelled] = IGNORE_INDEX
            return itertools.repeat(batch)
        tokenizer = load_tokenizer(Path(self.name))
        dataset = RowReader(tokenizer, 1 << 20).read(self.options.data)
        rows = training_batches(dataset, batch_size=self.rows, seed=0)
        padded = (collate(chosen, pad_token_id=pad_token_id(tokenizer)) for chosen in rows)
        return map(pack, padded) if self.side.packed else padded

    def _engine(self, opened: ExitStack) -> Callable[[], Any]:
        side, model = self.side, self.model()
        time_forwards(model, self._spend)
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        given: dict[str, Any] = {"overlap": not side.serial, "replay": side.replay, "micro_batch_size": side.micro_rows}
        if side.every is not None:
            write_back = WriteBackPolicy(directory=folder, every=side.every)
            given |= {"journal": folder / "journal.jsonl", "write_back": write_back}
        if side.gpu or side.bus:
            given["device"] = "cuda" if side.gpu else opened.enter_context(closing(self.bus()))
        kept = 0 if (side.gpu or side.bus) and not (side.stay or side.serial) else None
        given["memory"] = memory_of(side.buckets, self.activations(model), kept=kept)
        if side.device_memory is not None:
            given["memory"] = MemoryPolicy(device=side.device_memory, activations="1GB", least_activations="256MB")
        engine = opened.enter_context(Engine(model, self.method(model), **given))
        batches, seeds = self.batches(model), itertools.repeat(None) if side.lora or side.full else itertools.count()

        def step() -> Any:
            self._forward = 0.0
            result = engine.step(next(batches), seed=next(seeds))
            self.forwards.append(self._forward)
            return result

        return step

    def _spend(self, seconds: float) -> None:
        self._forward += seconds

    def method(self, model: HFBlockModel) -> Any:
        side = self.side
        if side.lora:
            return FirstOrder(partial(optimizer_of(side.lora), lr=LORA_LR))
        if side.full:
            update = make_block_update(side.full, weight_decay=0.0)
            if side.update_seconds is not None:
                update = SlowHost(ADAMW)
                weights = sum(spec.nbytes for layout in model.layouts for spec in layout.parameters)
                update.seconds_a_byte = side.update_seconds / weights
            return FirstOrder(Delayed(update) if side.delayed else update, lr=LR)
        return zeroth_order(queries=side.queries, rank=side.rank, noise=NOISES[side.noise])

    def activations(self, model: HFBlockModel) -> int | str:
        """Memory for all graphs, or for the inputs of blocks."""
        if not self.side.recompute:
            on_device = self.side.gpu or self.side.bus
            return ALL_GRAPHS if self.side.lora or self.side.full else 1 << 30 if on_device else ACTIVATIONS
        sizes = (model.config, self.side.micro_rows or self.rows, self.tokens)
        return gradient_bytes(expected_held_bytes(*sizes), forward_bytes(*sizes), len(model.layouts) - 2)

    def bus(self) -> ThreadedDevice:
        """A device behind a bus whose rate follows from a resident engine's compute."""
        model = self.model()
        nbytes = sum(layout.nbytes for layout in model.layouts if not layout.resident)
        batches = self.batches(model)
        with Engine(model, self.method(model)) as engine:
            results: list[Any] = [engine.step(next(batches)) for _ in range(WARM_UP + 3)]
        rate = nbytes / min(step.bound_seconds for step in results) * self.side.bus
        return ThreadedDevice(ThreadedStreams(lambda lane, moved: moved / rate, poison=False))

    def _whole(self, opened: ExitStack) -> Callable[[], Any]:
        side, model = self.side, self.model()
        device = torch.device("cuda" if side.gpu else "cpu")
        whole: Any = self.whole(model, device)
        batches = ({key: value.to(device) for key, value in batch.items()} for batch in self.batches(model))
        if side.forward:
            return partial(forward, whole, batches, 2 * side.queries)
        if side.lora or side.full:
            return first_order_step(whole, batches, side, first_values(model) if side.lora else {})
        autocast = model.autocast if side.precision == "mixed" else None
        mono, seeds = MonolithicMeZO(whole, lr=LR, zo_eps=1e-3, autocast=autocast), itertools.count()
        return lambda: mono.step(next(batches), next(seeds))

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


@torch.inference_mode()
def forward(whole: Any, batches: Iterator[Batch], copies: int) -> Losses:
    stacked = {key: torch.cat([value] * copies) for key, value in next(batches).items()}
    return Losses((float(whole(**stacked, use_cache=False).loss),))


def first_values(model: HFBlockModel) -> dict[str, torch.Tensor]:
    """The adapter's values, as the stream begins with them."""
    values = {}
    for spec in (spec for layout in model.layouts for spec in layout.parameters if not spec.frozen):
        values[spec.name] = torch.empty(spec.shape, dtype=spec.dtype)
        model.weights.read_into(spec.name, values[spec.name].view(-1))
    return values


def first_order_step(
    whole: Any, batches: Iterator[Batch], side: argparse.Namespace, first: Mapping[str, torch.Tensor]
) -> Callable[[], Losses]:
    """The step of torch on the whole model; ``first`` has the values of the adapter, if there is one."""
    if first:
        peft.inject_adapter_in_model(lora(), whole)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = not first or name in first
        # What was mapped from a file lies where no allocator puts it, and products round otherwise there.
        parameter.data = first.get(name, parameter.data).clone()
    if side.checkpointing:
        whole.activation_checkpointing_enable({"use_reentrant": False})
        whole.train()  # what makes transformers checkpoint
    trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
    made: Any = optimizer_of(side.lora) if first else ADAMW
    optimizer = made(trained, lr=LORA_LR if first else LR)

    def step() -> Losses:
        optimizer.zero_grad()
        loss = whole(**next(batches), use_cache=False).loss
        loss.backward()
        optimizer.step()
        return Losses((float(loss.detach()),))

    return step
