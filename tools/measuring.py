"""What the benchmarks share: sides in turn, medians with ranges, tables, methods and counted memory."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import peft
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from zo2adapters import MonolithicMeZO
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
from zo2core.types import Lane, StepResult

WARM_UP = 2  # rounds that do not count
Result = TypeVar("Result")


class Side(NamedTuple):
    """The rounds of one side."""

    seconds: list[float]
    results: list[Any]


def settle() -> None:
    """Wait for all work of a GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """The seconds that a function takes, with the work that it leaves on a GPU, and its result."""
    settle()
    began = time.perf_counter()
    result = work()
    settle()
    return time.perf_counter() - began, result


def alternate(sides: Mapping[str, Callable[[], Any]], rounds: int, *, warm_up: int = WARM_UP) -> dict[str, Side]:
    """Run all sides in turn; in every second round in reverse order, since a side may slow its neighbour."""
    measured = {name: Side([], []) for name in sides}
    for number in range(warm_up + rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            seconds, result = timed(sides[name])
            if number >= warm_up:
                measured[name].seconds.append(seconds)
                measured[name].results.append(result)
    return measured


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def seconds_of(measured: Mapping[str, Side]) -> dict[str, Any]:
    return {name: spread(side.seconds) for name, side in measured.items()}


def ratio(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """The ratios of neighbouring measurements."""
    return spread([one / other for one, other in zip(first, second, strict=True)])


def times_faster(measured: Mapping[str, Side], side: str, than: str) -> dict[str, float]:
    """How many times faster a side is than another one, pair by pair."""
    return ratio(measured[than].seconds, measured[side].seconds)


def lanes_of(steps: Sequence[StepResult]) -> dict[str, Any]:
    """Busy seconds and bytes of a step's lanes; replaying and computing are one lane."""
    busy = [{lane.value: use.busy_seconds for lane, use in step.lanes.items()} for step in steps]
    for seconds in busy:
        seconds["compute"] = seconds.pop(Lane.REPLAY.value) + seconds.pop(Lane.EVALUATE.value)
    nbytes = {f"{lane.value}_bytes": [step.lanes[lane].nbytes for step in steps] for lane in steps[0].lanes}
    used = {name: spread([seconds[name] for seconds in busy]) for name in busy[0]}
    return {name: value for name, value in used.items() if value["max"]} | {
        name: statistics.median(values) for name, values in nbytes.items() if any(values)
    }


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    processor = platform.processor() or platform.machine()
    cores = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    return {"processor": processor, **cores, **versions, "gpu": gpu}


def table(measured: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Format measurements: a line each, or a row for each side if all sides have the same columns."""
    groups = {name: value for name, value in measured.items() if isinstance(value, Mapping) and "median" not in value}
    leaves = {name: value for name, value in measured.items() if name not in groups and not isinstance(value, list)}
    for name, value in leaves.items():
        yield f"{indent}{name:36s} {_cell(value)}"
    groups = {
        name: {column: value for column, value in group.items() if not isinstance(value, list)}
        for name, group in groups.items()
    }
    shared = set.intersection(*map(set, groups.values())) if len(groups) > 1 else set[str]()
    if shared and not any(_has_groups(group) for group in groups.values()):
        names = list(dict.fromkeys(column for group in groups.values() for column in group))
        rows = {
            name: [_cell(group[column]) if column in group else "" for column in names] for name, group in groups.items()
        }
        widths = [max(map(len, column)) + 2 for column in zip(names, *rows.values(), strict=True)]
        first = max(map(len, rows))
        for name, cells in {"": names, **rows}.items():
            yield f"{indent}{name:{first}s}" + "".join(
                f"{cell:>{width}s}" for cell, width in zip(cells, widths, strict=True)
            )
        return
    for name, group in groups.items():
        yield f"{indent}{name}"
        yield from table(group, indent + "  ")


def _has_groups(group: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) and "median" not in value for value in group.values())


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


def add_sizes(parser: argparse.ArgumentParser, *, rows: int = 1, tokens: int = 64, steps: int = 5) -> None:
    """Add the options of a batch's size and the number of measured steps."""
    parser.add_argument("--rows", type=int, default=rows)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--steps", type=int, default=steps, help="measured steps")


def shapes(text: str) -> list[tuple[int, int]]:
    """Read shapes of batches, rows x tokens, such as ``1x16,4x64``."""
    pairs = [shape.split("x") for shape in text.split(",")]
    return [(int(rows), int(tokens)) for rows, tokens in pairs]


def zeroth_order(
    *,
    lr: float = 1e-6,
    queries: int = 1,
    rank: int | None = None,
    noise: Distribution | None = Distribution.RADEMACHER,
    seed: int = 0,
    period: int = 100,
    stack: int | None = None,
) -> ZerothOrder:
    """Steps along directions of full rank, or of ``rank``, that leave no rounding; noise of None is exact MeZO."""
    in_place = noise is None
    estimator = MeZOSGD(lr=lr, zo_eps=1e-3, perturb_in_place=in_place)
    several = MultiQueryRGE(lr=lr, zo_eps=1e-3, perturb_in_place=in_place, q=queries)
    return ZerothOrder(
        estimator if queries == 1 else several,
        noise=None if noise is None else PhiloxNoise(noise),
        perturbation=DensePerturbation() if rank is None else LowRankPerturbation(rank=rank, period=period, stack=stack),
        seed=seed,
    )


def memory_of(buckets: int | None = None, activations: int | str = ACTIVATIONS, *, kept: int | None = None) -> MemoryPolicy:
    """Memory for so many blocks in host memory, for all of them if None, and of a device for ``kept`` between visits."""
    host = HostPlan((), 1 << 40, buckets=buckets, keep_noise=False)
    room = activations if isinstance(activations, int) else 1 << 30
    device: Any = "auto" if kept is None else DevicePlan((), 1 << 40, kept=kept, activation_bytes=room)
    return MemoryPolicy(host=host, device=device, activations=activations)


def lora(rank: int = 8, **given: Any) -> peft.LoraConfig:
    """LoRA of the projections of queries and values."""
    return peft.LoraConfig(**{"r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], **given})


def lora_fa(base: Path | str, config: peft.LoraConfig, **given: Any) -> MonolithicMeZO:
    """Plain LoRA-FA over peft's model: steps of two forwards, with the matrices B perturbed in the weights."""
    whole = AutoModelForCausalLM.from_pretrained(base)
    peft.inject_adapter_in_model(config, whole)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad = "lora_B" in name

    def draw(z: torch.Tensor, seed: int, parameter: int) -> None:
        fill(z, Distribution.RADEMACHER, seed, parameter)

    return MonolithicMeZO(whole, draw=draw, **given)


class Usage(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors: of those that are registered and, while active, of results of operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, int] = {}  # address -> bytes that count

    def hold(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        """Count a tensor's storage until it is freed, once, or (with counts=False) never."""
        storage = tensor.untyped_storage()
        # A storage of the meta device has no address, but is one object as long as it lives.
        address, nbytes = storage.data_ptr() or storage._cdata, storage.nbytes() if counts else 0
        if (nbytes == 0 and counts) or address in self._known:
            return
        self._known[address] = nbytes
        weakref.finalize(storage, self._freed, address)
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def peak_of(self, work: Callable[[], object], held: Iterable[torch.Tensor] = ()) -> int:
        """The peak bytes while a function runs, with the tensors in ``held``."""
        for tensor in held:
            self.hold(tensor)
            del tensor
        self.peak = self.now
        with self:
            work()
        return self.peak

    def _freed(self, address: int) -> None:
        self.now -= self._known.pop(address)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its results; inference mode passes composite operations whole."""
        with self:
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type in ("cpu", "meta"):
                self.hold(tensor)
        return out
