"""Time a step of this engine against monolithic MeZO, alternating in one process, and break the time down.

    python tools/bench_step.py --tokens 256
    python tools/bench_step.py --batch 4 --tokens 512

    python tools/bench_step.py --noise philox-gaussian
    python tools/bench_step.py --dtype bfloat16 --precision mixed --against autocast --loss-chunk none

Prints a table and JSON: medians over the pairs with their range, the ratio pair by pair, and the engine's time in forwards,
in noise on the main thread (the noise of a second thread is listed separately) and in arithmetic, the rest. Counter-based
noise is drawn in the same pass as its arithmetic, and counts as arithmetic.

Both sides run the same seeds. With MeZO's own noise their losses are bitwise equal, which is checked for every pair; with
other noise monolithic MeZO keeps its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from make_checkpoint import geometries, make_checkpoint
from transformers import AutoModelForCausalLM

from zo2adapters import MonolithicMeZO, open_checkpoint
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.trainers.verification import random_batch
from zo2core import Distribution, Engine, MeZOSGD, ParameterSpec, PhiloxNoise, SequentialNoise, ZerothOrder
from zo2core.kernels import native
from zo2core.protocols import NoiseGenerator
from zo2core.types import BlockLayout

NOISES: dict[str, Callable[[Sequence[BlockLayout]], NoiseGenerator]] = {
    "sequential": SequentialNoise,
    "philox-gaussian": lambda _: PhiloxNoise(Distribution.GAUSSIAN),
    "philox-rademacher": lambda _: PhiloxNoise(Distribution.RADEMACHER),
}


class TimedNoise:
    """A noise generator that sums its seconds, separately for the main thread and others."""

    def __init__(self, inner: NoiseGenerator) -> None:
        self.inner = inner
        self.name = inner.name
        self.chunks = inner.chunks
        self.main, self.beside = 0.0, 0.0

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


class TimedCounterNoise(TimedNoise):
    """The same for counter-based noise, whose drawing and arithmetic are one pass and are not timed separately."""

    def __init__(self, inner: PhiloxNoise) -> None:
        super().__init__(inner)
        self.distribution = inner.distribution


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


def spread(values: list[float]) -> dict[str, float]:
    """The median and range of values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def bench(
    geometry: str,
    dtype: torch.dtype,
    batch_size: int,
    tokens: int,
    pairs: int,
    noise_name: str,
    folder: Path,
    *,
    precision: str,
    against: str,
    loss_chunk: int | Literal["auto"] | None,
) -> dict[str, Any]:
    """Run the pairs; return all measurements."""
    config = geometries()[geometry]
    make_checkpoint(config, folder / "base", dtype=dtype)
    model = open_checkpoint(folder / "base", precision=precision, loss_chunk=loss_chunk)
    forward = TimedForward(model)
    plain = NOISES[noise_name](model.layouts)
    noise = TimedCounterNoise(plain) if isinstance(plain, PhiloxNoise) else TimedNoise(plain)
    whole = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype if precision == "exact" else torch.float32)
    autocast = model.autocast if against == "autocast" else None
    mono = MonolithicMeZO(whole, lr=1e-6, zo_eps=1e-3, autocast=autocast)
    batch = random_batch(config.vocab_size, batch_size, tokens, seed=0)
    ours: list[float] = []
    theirs: list[float] = []
    parts: dict[str, list[float]] = {"forward": [], "noise": [], "arithmetic": [], "noise on a second thread": []}
    in_place = isinstance(plain, SequentialNoise)  # as `zo2 train` and `zo2 train --exact-mezo` do
    estimator = MeZOSGD(lr=1e-6, zo_eps=1e-3, perturb_in_place=in_place)
    with Engine(model, ZerothOrder(estimator, noise=noise)) as engine:
        for pair in range(-1, pairs):  # the first one warms up: it loads the weights and has nothing to replay
            forward.seconds = noise.main = noise.beside = 0.0
            began = time.perf_counter()
            result = engine.step(batch, seed=pair + 1)
            seconds = time.perf_counter() - began
            began = time.perf_counter()
            reference = mono.step(batch, pair + 1)
            if pair >= 0:
                theirs.append(time.perf_counter() - began)
                ours.append(seconds)
                rest = seconds - forward.seconds - noise.main
                for name, value in zip(parts, (forward.seconds, noise.main, rest, noise.beside), strict=True):
                    parts[name].append(value)
            if noise_name == "sequential" and model.autocast is autocast and model.loss_chunk is None:
                assert result.losses == reference.losses, "the engine's losses are not monolithic MeZO's"
    return {
        "geometry": geometry,
        "dtype": str(dtype),
        "precision": precision,
        "autocast": str(model.autocast),
        "loss_chunk": model.loss_chunk,
        "monolithic_autocast": str(autocast),
        "batch": batch_size,
        "tokens": tokens,
        "pairs": pairs,
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "torch": torch.__version__,
        "noise": noise.name,
        "compiled_kernels": native.library() is not None,
        "engine_seconds": spread(ours),
        "monolithic_seconds": spread(theirs),
        "ratio": spread([b / a for a, b in zip(ours, theirs, strict=True)]),
        "share_of_forwards": spread([f / a for f, a in zip(parts["forward"], ours, strict=True)]),
        "parts_seconds": {name: spread(values) for name, values in parts.items()},
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=list(geometries()), default="opt-125m")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--noise", choices=list(NOISES), default="sequential")
    parser.add_argument("--precision", choices=["exact", "mixed"], default="exact", help="precision of the engine")
    parser.add_argument(
        "--against",
        choices=["plain", "autocast"],
        default="plain",
        help="precision of monolithic MeZO: as its weights, or float32 weights under autocast",
    )
    parser.add_argument(
        "--loss-chunk", default="auto", help="labelled tokens whose logits are in memory at a time, none or auto"
    )
    options = parser.parse_args()
    chunk: int | Literal["auto"] | None = "auto"
    if options.loss_chunk != "auto":
        chunk = None if options.loss_chunk == "none" else int(options.loss_chunk)
    with tempfile.TemporaryDirectory() as folder:
        size = (options.batch, options.tokens, options.pairs)
        measured = bench(
            options.geometry,
            DTYPES[options.dtype],
            *size,
            options.noise,
            Path(folder),
            precision=options.precision,
            against=options.against,
            loss_chunk=chunk,
        )
    rows = {"monolithic MeZO": measured["monolithic_seconds"], "this engine": measured["engine_seconds"]}
    rows |= {f"  {name}": values for name, values in measured["parts_seconds"].items()}
    print(f"{'seconds a step':28s} {'median':>8s} {'min':>8s} {'max':>8s}")
    for name, values in [
        *rows.items(),
        ("share of forwards", measured["share_of_forwards"]),
        ("times faster", measured["ratio"]),
    ]:
        print(f"{name:28s} {values['median']:8.3f} {values['min']:8.3f} {values['max']:8.3f}")
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
