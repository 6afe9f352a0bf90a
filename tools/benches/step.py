"""Time a step of this engine against monolithic MeZO, and break the time down.

    python tools/bench.py step --tokens 256
    python tools/bench.py step --noise philox-gaussian
    python tools/bench.py step --dtype bfloat16 --precision mixed --against autocast --loss-chunk none

The engine's time is that of forwards, of noise on the main thread, and of arithmetic, the rest. Counter-based noise is drawn
in the same pass as its arithmetic, and counts as arithmetic. With MeZO's own noise both sides' losses have to be equal.
"""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import geometries
from measuring import add_sizes, alternate, checkpoint, ratio, require_equal, seconds_of, spread, times_faster
from transformers import AutoModelForCausalLM

from zo2adapters import MonolithicMeZO, open_checkpoint
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.trainers.verification import random_batch
from zo2core import Distribution, Engine, MeZOSGD, ParameterSpec, PhiloxNoise, SequentialNoise, ZerothOrder
from zo2core.protocols import NoiseGenerator
from zo2core.types import BlockLayout

NOISES: dict[str, Callable[[Sequence[BlockLayout]], NoiseGenerator]] = {
    "sequential": SequentialNoise,
    "philox-gaussian": lambda _: PhiloxNoise(Distribution.GAUSSIAN),
    "philox-rademacher": lambda _: PhiloxNoise(Distribution.RADEMACHER),
}
ENGINE, MONOLITHIC = "this engine", "monolithic MeZO"


class TimedNoise:
    """A noise generator that sums its seconds, separately for the main thread and others."""

    def __init__(self, inner: NoiseGenerator) -> None:
        self.inner = inner
        self.name = inner.name
        self.chunks = inner.chunks
        self.main, self.beside = 0.0, 0.0
        if isinstance(inner, PhiloxNoise):  # its drawing and arithmetic are one pass, which needs the distribution
            self.distribution = inner.distribution

    def fill(self, out: torch.Tensor, seed: int, parameter: ParameterSpec, start: int = 0) -> None:
        """Fill a tensor, timed."""
        began = time.perf_counter()
        self.inner.fill(out, seed, parameter, start)
        seconds = time.perf_counter() - began
        if threading.current_thread() is threading.main_thread():
            self.main += seconds
        else:
            self.beside += seconds

    def retain(self, seeds: Collection[int]) -> None:
        """Call the generator's own method."""
        self.inner.retain(seeds)


class TimedForward:
    """Sums the seconds of a model's forwards."""

    def __init__(self, model: Any) -> None:
        self.seconds = 0.0
        for name in ("embed", "block", "head"):
            setattr(model, name, self._timed(getattr(model, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = function(*args)
            self.seconds += time.perf_counter() - began
            return result

        return timed


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--geometry", choices=list(geometries()), default="opt-125m")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    add_sizes(parser, tokens=256, steps=7)
    parser.add_argument("--noise", choices=list(NOISES), default="sequential")
    parser.add_argument("--precision", choices=["exact", "mixed"], default="exact", help="precision of the engine")
    against = "precision of monolithic MeZO: as its weights, or float32 weights under autocast"
    parser.add_argument("--against", choices=["plain", "autocast"], default="plain", help=against)
    parser.add_argument("--loss-chunk", choices=["auto", "none"], default="auto", help="whether logits are made in chunks")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    with checkpoint(options.geometry, DTYPES[options.dtype]) as base:
        return bench(base, options)


def bench(base: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides on one checkpoint."""
    chunk = None if options.loss_chunk == "none" else options.loss_chunk
    model = open_checkpoint(base, precision=options.precision, loss_chunk=chunk)
    forward, plain = TimedForward(model), NOISES[options.noise](model.layouts)
    noise: Any = TimedNoise(plain)
    dtype = DTYPES[options.dtype] if options.precision == "exact" else torch.float32
    autocast = model.autocast if options.against == "autocast" else None
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    mono = MonolithicMeZO(whole, lr=1e-6, zo_eps=1e-3, autocast=autocast)
    batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
    in_place = isinstance(plain, SequentialNoise)  # as `zo2 train` and `zo2 train --exact-mezo` do
    ours, theirs = itertools.count(), itertools.count()

    def step() -> tuple[Any, dict[str, float]]:
        forward.seconds = noise.main = noise.beside = 0.0
        result = engine.step(batch, seed=next(ours))
        rest = result.seconds - forward.seconds - noise.main
        parts = {
            "forwards": forward.seconds,
            "noise": noise.main,
            "arithmetic": rest,
            "noise on a second thread": noise.beside,
        }
        return result.losses, parts

    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-6, zo_eps=1e-3, perturb_in_place=in_place), noise=noise)) as engine:
        sides = {ENGINE: step, MONOLITHIC: lambda: (mono.step(batch, next(theirs)).losses, {})}
        measured = alternate(sides, options.steps, warm_up=1)
    if in_place and model.autocast is autocast and model.loss_chunk is None:
        require_equal(measured, lambda result: result[0])
    parts = [found for _, found in measured[ENGINE].results]
    return {
        "seconds": seconds_of(measured) | {name: spread([part[name] for part in parts]) for name in parts[0]},
        "times faster": times_faster(measured, ENGINE, MONOLITHIC),
        "share of forwards": ratio([part["forwards"] for part in parts], measured[ENGINE].seconds),
    }
