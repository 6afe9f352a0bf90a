"""Measure kernels on weights that no cache holds, in bytes a second, compared with a plain copy; and the bus of a GPU.

    python tools/bench.py kernels
    python tools/bench.py kernels --dtypes bfloat16 --device cuda --elements 536870912
    python tools/bench.py kernels --gguf

Bytes are those that a kernel has to move: weights read and written and, if there is one, the perturbed copy written. *MeZO
in torch* is the perturbation of MeZO's own loop: z is drawn into a new tensor, then multiplied and added. On the CPU each
runs on one thread and on two that share the work; drawing noise fills a buffer in the cache. ``--gguf`` measures decoding of
GGUF's blocks and of nf4 instead, in bytes of decoded weights a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import torch
from measuring import spread, timed

from zo2adapters.models.checkpoint import DTYPES
from zo2core import CudaDevice, Distribution
from zo2core.encodings import GGUF_BLOCKS, GGUFRows, NF4Blocks
from zo2core.kernels import Draw, dispatch, reference
from zo2core.kernels.encoding import decode
from zo2core.types import Descend, ParameterSpec, Perturb, Program

MATRIX = (4096, 11008)  # of Llama-7B's largest matrix
CACHED, PORTION = 1 << 15, 1 << 18  # elements of noise that are drawn, and of weights that are processed, at a time
PERTURB = Program((1,), (), then=Perturb(0, 1.0, 1e-3))
MEZO: tuple[Perturb | Descend, ...] = tuple(Perturb(0, shift, 1e-3) for shift in (1.0, -2.0, 1.0))
REPLAY = Program((1, 2), (*MEZO, Descend(0, 0.5, lr=1e-6, weight_decay=0.0)), then=Perturb(1, 1.0, 1e-3))

Work = Callable[[int, int], object]  # processes elements from a start to a stop


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--elements", type=int, default=1 << 26, help="weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gguf", action="store_true", help="measure decoding")


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)  # this program starts its own threads
    measure = decoding if options.gguf else passes
    measured: dict[str, Any] = {"compiled kernels": dispatch.library() is not None}
    for name in options.dtypes:
        measured[f"{name}: bytes a second"] = measure(DTYPES[name], options)
    return measured | ({"bus: bytes a second": bus(1 << 30, options.rounds)} if options.device == "cuda" else {})


def rate(works: Callable[[], object], nbytes: int, rounds: int) -> dict[str, float]:
    """Bytes a second of all rounds but one, which warms up."""
    return spread([nbytes / timed(works)[0] for _ in range(1 + rounds)][1:])


def on_threads(work: Work, elements: int, portion: int, threads: int) -> None:
    """Run work on all elements, by portions that threads share."""
    starts = range(0, elements - portion + 1, portion)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda first: [work(at, at + portion) for at in starts[first::threads]], range(threads)))


def passes(dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """Draw noise, and process weights once: copy, perturb into a buffer, or replay MeZO's last step before that.

    Mixed precision keeps float32, and rounds what it perturbs to the dtype.
    """
    elements, device, on_cpu = options.elements, options.device, options.device == "cpu"
    weights = torch.zeros(elements, dtype=dtype, device=device)
    in_float32 = torch.zeros(elements, device=device) if on_cpu else weights
    out = torch.empty(2 * PORTION if on_cpu else elements, dtype=dtype, device=device)
    noise = [torch.empty(CACHED, dtype=dtype) for _ in range(2)]

    def target(start: int, stop: int) -> torch.Tensor:
        at = start // PORTION % 2 * PORTION if on_cpu else start  # on the CPU, of the thread's own portion
        return out[at : at + stop - start]

    def draw(fill: Callable[..., None], distribution: Distribution) -> Work:
        if on_cpu:
            return lambda start, stop: fill(noise[start // CACHED % 2], distribution, 5, 0, start)
        return lambda start, stop: fill(target(start, stop), distribution, 5, 0, start)

    def apply(source: torch.Tensor, program: Program, distribution: Distribution) -> Work:
        return lambda start, stop: dispatch.apply(
            source[start:stop], program, Draw(distribution, 0, start), out=target(start, stop)
        )

    def mezo(start: int, stop: int) -> None:
        part = weights[start:stop]
        part.add_(torch.normal(mean=0, std=1, size=part.shape, device=device, dtype=dtype) * 1e-3)

    size = dtype.itemsize
    kernels: dict[str, tuple[Work, int]] = {  # with bytes an element
        "copy": (lambda start, stop: target(start, stop).copy_(weights[start:stop]), 2 * size),
        "MeZO in torch, perturb": (mezo, 2 * size),
    }
    if on_cpu:
        kernels["draw, torch normal_"] = (lambda start, stop: noise[start // CACHED % 2].normal_(), size)
    for distribution in Distribution:
        kernels[f"draw, {distribution.value}"] = (draw(dispatch.fill, distribution), size)
        if on_cpu:
            kernels[f"draw by torch operations, {distribution.value}"] = (draw(reference.fill, distribution), size)
            rounded = apply(in_float32, PERTURB, distribution)
            kernels[f"perturb float32 and round, {distribution.value}"] = (rounded, 4 + size)
        kernels[f"perturb into a buffer, {distribution.value}"] = (apply(weights, PERTURB, distribution), 2 * size)
        kernels[f"replay and perturb, {distribution.value}"] = (apply(weights, REPLAY, distribution), 3 * size)
    measured = {}
    for name, (work, nbytes) in kernels.items():
        if not on_cpu:
            measured[name] = rate(partial(work, 0, elements), elements * nbytes, options.rounds)
            continue
        portion = CACHED if name.startswith("draw") else PORTION
        count = max(elements // 64, CACHED) if "torch operations" in name else elements
        for threads in (1, 2):
            works = partial(on_threads, work, count, portion, threads)
            measured[f"{name}, {threads} threads"] = rate(works, count // portion * portion * nbytes, options.rounds)
    return measured


def bus(nbytes: int, rounds: int) -> dict[str, Any]:
    """Copies between page-locked memory and the GPU, in each direction and in both at once."""
    with closing(CudaDevice()) as device:
        host = [device.host_memory(nbytes) for _ in range(2)]
        on_device = [device.empty(nbytes) for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]

        def copy(*, up: bool, back: bool) -> None:
            with torch.cuda.stream(streams[0]):
                if up:
                    on_device[0].copy_(host[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                if back:
                    host[1].copy_(on_device[1], non_blocking=True)

        ways = {"up": (True, False), "back": (False, True), "each way, both at once": (True, True)}
        return {name: rate(partial(copy, up=up, back=back), nbytes, rounds) for name, (up, back) in ways.items()}


def decoding(dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """Decode a matrix of each of GGUF's types, and of nf4, on one thread and on two."""
    rows, columns = MATRIX[0], MATRIX[1] // 256 * 256
    out = torch.empty(rows * columns, dtype=dtype)
    measured: dict[str, Any] = {}
    with ThreadPoolExecutor(1) as pool:
        for threads, helper in ((1, None), (2, pool)):
            torch.set_num_threads(threads)
            source = torch.ones_like(out)
            measured[f"copy, {threads} threads"] = rate(partial(out.copy_, source), out.nbytes, options.rounds)
            for name in [*GGUF_BLOCKS, "nf4"]:
                encoding = NF4Blocks() if name == "nf4" else GGUFRows(name)
                spec = ParameterSpec("weight", (rows, columns), dtype, 0, decays=False, encoding=encoding)
                stored = torch.randint(0, 60, (spec.nbytes,), dtype=torch.uint8)
                works = partial(decode, spec, stored, out, helper)
                measured[f"{name}, {threads} threads"] = rate(works, out.nbytes, options.rounds)
    return measured
