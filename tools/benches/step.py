"""Time a step of this engine against monolithic MeZO, and break the time down.

    python tools/bench.py step --tokens 256
    python tools/bench.py step --noise philox-gaussian
    python tools/bench.py step --dtype bfloat16 --precision mixed --against autocast --loss-chunk none

The engine's time that is not of forwards is that of noise and arithmetic. With MeZO's own noise both sides' losses have to
be equal.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import geometries
from measuring import NOISES, add_sizes, alternate, checkpoint, ratio, require_equal, seconds_of, spread, times_faster
from transformers import AutoModelForCausalLM

from zo2adapters import MonolithicMeZO, open_checkpoint
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.trainers.verification import random_batch
from zo2core import Engine, MeZOSGD, SequentialNoise, ZerothOrder

ENGINE, MONOLITHIC = "this engine", "monolithic MeZO"


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
    parser.add_argument("--geometry", choices=list(geometries()), default="opt-125m")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    add_sizes(parser, tokens=256, steps=7)
    parser.add_argument("--noise", choices=list(NOISES), default="sequential")
    parser.add_argument("--precision", choices=["exact", "mixed"], default="exact", help="precision of the engine")
    against = "precision of monolithic MeZO: as its weights, or float32 weights under autocast"
    parser.add_argument("--against", choices=["plain", "autocast"], default="plain", help=against)
    parser.add_argument("--loss-chunk", choices=["auto", "none"], default="auto", help="whether logits are made in chunks")


def run(options: argparse.Namespace) -> dict[str, Any]:
    with checkpoint(options.geometry, DTYPES[options.dtype]) as base:
        return bench(base, options)


def bench(base: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides on one checkpoint."""
    chunk = None if options.loss_chunk == "none" else options.loss_chunk
    model = open_checkpoint(base, precision=options.precision, loss_chunk=chunk)
    forward, noise = TimedForward(model), NOISES[options.noise](model.layouts, torch.device("cpu"))
    dtype = DTYPES[options.dtype] if options.precision == "exact" else torch.float32
    autocast = model.autocast if options.against == "autocast" else None
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    mono = MonolithicMeZO(whole, lr=1e-6, zo_eps=1e-3, autocast=autocast)
    batch = random_batch(model.config.vocab_size, options.rows, options.tokens, seed=0)
    in_place = isinstance(noise, SequentialNoise)  # as `zo2 train` and `zo2 train --exact-mezo` do
    ours, theirs = itertools.count(), itertools.count()

    def step() -> tuple[Any, float]:
        forward.seconds = 0.0
        return engine.step(batch, seed=next(ours)).losses, forward.seconds

    with Engine(model, ZerothOrder(MeZOSGD(lr=1e-6, zo_eps=1e-3, perturb_in_place=in_place), noise=noise)) as engine:
        sides = {ENGINE: step, MONOLITHIC: lambda: (mono.step(batch, next(theirs)).losses, 0.0)}
        measured = alternate(sides, options.steps, warm_up=1)
    if in_place and model.autocast is autocast and model.loss_chunk is None:
        require_equal(measured, lambda result: result[0])
    forwards = [seconds for _, seconds in measured[ENGINE].results]
    return {
        "seconds": seconds_of(measured) | {"forwards of this engine": spread(forwards)},
        "times faster": times_faster(measured, ENGINE, MONOLITHIC),
        "share of forwards": ratio(forwards, measured[ENGINE].seconds),
    }
