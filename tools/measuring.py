"""What the benchmarks share: command lines, sides in turn, medians with ranges, tables, methods and
counted memory.
"""

import argparse
import inspect
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import peft
import torch
from transformers import AutoModelForCausalLM

from zo2adapters import MonolithicMeZO
from zo2adapters.trainers.memory_probe import Allocations
from zo2core import (
    DensePerturbation,
    DevicePlan,
    Distribution,
    HostPlan,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    MultiQueryRGE,
    PhiloxNoise,
    ZerothOrder,
)
from zo2core.kernels import fill
from zo2core.planning.memory import ACTIVATIONS
from zo2core.types import Batch, Lane, StepResult

WARM_UP = 2  # rounds that do not count
# what an option's annotation is, by its type
MARKS = {str: "help", list: "choices", object: "type"}
Result = TypeVar("Result")


def add_options(parser: argparse.ArgumentParser, function: Callable[..., Any]) -> None:
    """Add an option for each argument of a function, which is positional if it has no default.

    A type may be annotated with a help text, with a list of choices, or with the function that
    reads the value.
    """
    for name, argument in inspect.signature(function).parameters.items():
        kind, given = argument.annotation, dict[str, Any]()
        if get_origin(kind) is Annotated:
            kind, *marks = get_args(kind)
            given = {
                next(name for type_, name in MARKS.items() if isinstance(mark, type_)): mark
                for mark in marks
            }
        if type(None) in get_args(kind):
            kind = get_args(kind)[0]
        if get_origin(kind) is Sequence and "type" not in given:
            kind, given["nargs"] = get_args(kind)[0], "+"
        if get_origin(kind) is Literal:
            kind, given["choices"] = str, list(get_args(kind))
        given |= (
            {"action": "store_true"}
            if kind is bool
            else {"type": kind}
            if "type" not in given
            else {}
        )
        if argument.default is inspect.Parameter.empty:
            parser.add_argument(name, **given)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", default=argument.default, **given)


def command_line(function: Callable[..., Any]) -> argparse.ArgumentParser:
    """The parser of the command line of a function, which its documentation or that of its module
    describes.
    """
    text = inspect.getdoc(function) or sys.modules[function.__module__].__doc__
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=text, formatter_class=raw, conflict_handler="resolve"
    )
    add_options(parser, function)
    return parser


def command(function: Callable[..., Result]) -> Callable[[], Result]:
    """A function that takes its arguments from the command line."""
    return lambda: function(**vars(command_line(function).parse_args()))


class Rounds(NamedTuple):
    """The rounds of one side."""

    seconds: list[float]
    results: list[Any]


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """The seconds that a function takes, with the work that it leaves on a GPU, and its result."""
    is_on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    settle: Callable[[], object] = torch.cuda.synchronize if is_on_gpu else lambda: None
    settle()
    began = time.perf_counter()
    result = work()
    settle()
    return time.perf_counter() - began, result


def alternate(
    sides: Mapping[str, Callable[[], Any]], rounds: int, *, warm_up: int = WARM_UP
) -> dict[str, Rounds]:
    """Run all sides in turn; in every second round in reverse order, since a side may slow its
    neighbour.
    """
    measured = {name: Rounds([], []) for name in sides}
    for number in range(warm_up + rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            seconds, result = timed(sides[name])
            if number >= warm_up:
                measured[name].seconds.append(seconds)
                measured[name].results.append(result)
    return measured


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def seconds_of(measured: Mapping[str, Rounds]) -> dict[str, Any]:
    return {name: spread(side.seconds) for name, side in measured.items()}


def ratio(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """The ratios of neighbouring measurements."""
    return spread([one / other for one, other in zip(first, second, strict=True)])


def times_faster(measured: Mapping[str, Rounds], side: str, than: str) -> dict[str, float]:
    """How many times faster a side is than another one, pair by pair."""
    return ratio(measured[than].seconds, measured[side].seconds)


def lanes_of(steps: Sequence[StepResult]) -> dict[str, Any]:
    """Busy seconds and bytes of a step's lanes; replaying and computing are one lane."""
    busy = [{lane.value: use.busy_seconds for lane, use in step.lanes.items()} for step in steps]
    for seconds in busy:
        seconds["compute"] = seconds.pop(Lane.REPLAY.value) + seconds.pop(Lane.EVALUATE.value)
    nbytes = {
        f"{lane.value}_bytes": [step.lanes[lane].nbytes for step in steps]
        for lane in steps[0].lanes
    }
    used = {name: spread([seconds[name] for seconds in busy]) for name in busy[0]}
    return {name: value for name, value in used.items() if value["max"]} | {
        name: statistics.median(values) for name, values in nbytes.items() if any(values)
    }


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    processor = platform.processor() or platform.machine()
    cores = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    versions = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    return {"processor": processor, **cores, **versions, "gpu": gpu}


def table(measured: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Format measurements: a line each, or a row for each side if all sides have the same
    columns.
    """
    shown = {name: value for name, value in measured.items() if not isinstance(value, list)}
    groups = {name: value for name, value in shown.items() if _is_group(value)}
    for name, value in shown.items():
        if name not in groups:
            yield f"{indent}{name:36s} {_cell(value)}"
    rows = {
        name: {key: value for key, value in row.items() if not isinstance(value, list)}
        for name, row in groups.items()
    }
    is_nested = any(_is_group(value) for row in rows.values() for value in row.values())
    if len(rows) > 1 and not is_nested and set.intersection(*map(set, rows.values())):
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        lines = {
            name: [_cell(row[column]) if column in row else "" for column in columns]
            for name, row in rows.items()
        }
        lines = {"": columns, **lines}
        widths = [max(map(len, column)) + 2 for column in zip(*lines.values(), strict=True)]
        for name, cells in lines.items():
            padded = (f"{cell:>{width}s}" for cell, width in zip(cells, widths, strict=True))
            yield f"{indent}{name:{max(map(len, rows))}s}{''.join(padded)}"
        return
    for name, row in rows.items():
        yield f"{indent}{name}"
        yield from table(row, indent + "  ")


def _is_group(value: Any) -> bool:
    return isinstance(value, Mapping) and "median" not in value


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{_cell(value['median'])} [{_cell(value['min'])} - {_cell(value['max'])}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else str(value)
    return f"{value / 1e6:,.1f} M" if abs(value) >= 1e6 else f"{value:.4g}"


def zo2(*arguments: object) -> str:
    """Run a command of the library in a process of its own; return its output."""
    command = [sys.executable, "-m", "zo2adapters.cli", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"zo2 {arguments[0]} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def shapes(text: str) -> list[tuple[int, int]]:
    """Read shapes of batches, rows x tokens, such as ``1x16,4x64``."""
    pairs = [shape.split("x") for shape in text.split(",")]
    return [(int(rows), int(tokens)) for rows, tokens in pairs]


def zeroth_order(
    *,
    lr: float = 1e-6,
    queries: int = 1,
    low_rank: LowRankPerturbation | None = None,
    noise: Distribution | None = Distribution.RADEMACHER,
    seed: int = 0,
) -> ZerothOrder:
    """Steps along directions of full or of low rank, that leave no rounding; noise of None is exact
    MeZO.
    """
    given: dict[str, Any] = {"lr": lr, "zo_eps": 1e-3, "perturb_in_place": noise is None}
    return ZerothOrder(
        MeZOSGD(**given) if queries == 1 else MultiQueryRGE(**given, q=queries),
        noise=None if noise is None else PhiloxNoise(noise),
        perturbation=low_rank or DensePerturbation(),
        seed=seed,
    )


def memory_of(
    buckets: int | None = None, activations: int | str = ACTIVATIONS, *, kept: int | None = None
) -> MemoryPolicy:
    """Memory for so many blocks in host memory, for all of them if None, and of a device for
    ``kept`` between visits.
    """
    host = HostPlan((), 1 << 40, buckets=buckets, keep_noise=True)
    room = activations if isinstance(activations, int) else 1 << 30
    device: Any = (
        "auto" if kept is None else DevicePlan((), 1 << 40, kept=kept, activation_bytes=room)
    )
    return MemoryPolicy(host=host, device=device, activations=activations)


def lora(rank: int = 8, **given: Any) -> peft.LoraConfig:
    """LoRA of the projections of queries and values, unless other targets are given."""
    return peft.LoraConfig(
        **{"r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], **given}
    )


def lora_fa(base: Path | str, config: peft.LoraConfig, **given: Any) -> MonolithicMeZO:
    """Plain LoRA-FA over peft's model: steps of two forwards, with the matrices B perturbed in the
    weights.
    """
    whole = AutoModelForCausalLM.from_pretrained(base)
    peft.inject_adapter_in_model(config, whole)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = "lora_B" in name
    return MonolithicMeZO(
        whole,
        draw=lambda z, seed, parameter: fill(z, Distribution.RADEMACHER, seed, parameter),
        **given,
    )


def resident_step(
    whole: Any,
    batches: Iterator[Batch],
    make: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer],
    *,
    config: peft.LoraConfig | None = None,
    first: Mapping[str, torch.Tensor] | None = None,
) -> Callable[[], float]:
    """The step of torch on the whole model, or on peft's adapter from its ``first`` values; it
    returns the loss.
    """
    if config is not None:
        peft.inject_adapter_in_model(config, whole)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = first is None or name in first
        # Memory mapped from a file has another alignment than allocated memory, with which products
        # round differently.
        parameter.data = (first or {}).get(name, parameter.data).to(parameter.device, copy=True)
    optimizer = make([parameter for parameter in whole.parameters() if parameter.requires_grad])

    def step() -> float:
        optimizer.zero_grad()
        loss = whole(**next(batches), use_cache=False).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


class Usage(Allocations):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors, and their peak."""

    @property
    def peak(self) -> int:
        """The most bytes after an operation."""
        return max(self.moments, default=self.now)

    def peak_of(self, work: Callable[[], object], held: Iterable[torch.Tensor] = ()) -> int:
        """The peak bytes while a function runs, with the tensors in ``held``."""
        for tensor in held:
            self.hold(tensor)
            del tensor
        self.moments = [self.now]
        with self:
            work()
        return self.peak
