"""Quick measurements of this machine, for choices that depend on it. Each takes a fraction of a second."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from zo2core.devices import HostDevice
from zo2core.errors import ScratchError, reason
from zo2core.io.direct_file import RangedFile, byte_view
from zo2core.kernels import apply, apply_drawing
from zo2core.protocols import CounterNoise, NoiseGenerator, TensorReader
from zo2core.sources.loader import CHUNK, READERS
from zo2core.types import BlockLayout, Descend, ParameterSpec, Perturb, Program, trained

_BYTES = 64 << 20  # written by the disk probe
_READ_CHUNKS = 48  # read by the checkpoint's probe
_CHUNKS = 64  # drawn by the noise probe
_THREADS = 2  # share each pass with counter-based noise; with a sequential generator one replays
_DESCEND = Descend(0, projected_grad=1.0, lr=1e-6, weight_decay=0.0)
_ROUNDS = 3  # the best counts: others disturb, nothing helps
_UPDATES = 4  # replayed in one pass, to tell what one more costs
_LEAST_SHARE = 0.1  # of a pass of one update, that one more takes at least: below that, the clock decides

# A weight as models have them. Zeros would become denormal numbers, on which the arithmetic of halves is ten times as slow.
_WEIGHT = 0.02


def replay_seconds(noise: NoiseGenerator, layouts: Sequence[BlockLayout], *, in_place: bool = True) -> float:
    """Seconds to replay one more update over the whole model, on as many threads as a visit uses.

    With counter-based noise, updates are replayed in one pass over memory, so that one more costs less than the first one.

    Args:
        noise: Draws z.
        layouts: Layouts of the model.
        in_place: With MeZO's walk.
    """
    walk = (1.0, -2.0, 1.0) if in_place else ()

    def replaying(updates: int) -> float:
        seeds = tuple(range(updates))
        instructions: list[Perturb | Descend] = []
        for seed in seeds:
            instructions += [Perturb(seed, shift, 1e-3) for shift in walk]
            instructions.append(_DESCEND._replace(direction=seed))
        program = Program(seeds, tuple(instructions))

        def run(spec: ParameterSpec, start: int, theta: torch.Tensor, z: torch.Tensor, *scratch: torch.Tensor) -> None:
            if isinstance(noise, CounterNoise):
                apply_drawing(theta, program, noise.distribution, spec.index, start)
                return
            noise.fill(z, 0, spec, start)
            apply(theta, program, [z], scratch=scratch[0], decay_scratch=scratch[1])

        return _seconds(noise, layouts, run)

    one = replaying(1)
    if not isinstance(noise, CounterNoise):
        return one
    return max((replaying(_UPDATES) - one) / (_UPDATES - 1), _LEAST_SHARE * one)


def evaluation_seconds(noise: CounterNoise, layouts: Sequence[BlockLayout]) -> tuple[float, float]:
    """Seconds to bring the whole model to the weights of an evaluation, on as many threads as a visit uses.

    Args:
        noise: Draws z.
        layouts: Layouts of the model.

    Returns:
        Of a step's first evaluation, with one update replayed in the same pass, and of any other.
    """

    def to_evaluation(program: Program) -> float:
        def run(spec: ParameterSpec, start: int, theta: torch.Tensor, out: torch.Tensor, *_: torch.Tensor) -> None:
            apply_drawing(theta, program, noise.distribution, spec.index, start, out=out)

        return _seconds(noise, layouts, run)

    with_update = Program((0, 1), (_DESCEND,), then=Perturb(1, 1.0, 1e-3))
    return to_evaluation(with_update), to_evaluation(Program((1,), (), then=Perturb(0, 1.0, 1e-3)))


def _seconds(noise: NoiseGenerator, layouts: Sequence[BlockLayout], run: Callable[..., None]) -> float:
    """Seconds of a pass over all weights, from some chunks of the largest parameter."""
    specs = trained(layouts)
    largest = max(specs, key=lambda spec: spec.numel)
    chunks = noise.chunks(largest)[:_CHUNKS]
    longest = max(stop - start for start, stop in chunks)
    memory = [torch.full((longest,), _WEIGHT, dtype=largest.dtype) for _ in range(4)]
    best = math.inf
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for start, stop in chunks:
            run(largest, start, *(buffer[: stop - start] for buffer in memory))
        best = min(best, time.perf_counter() - began)
    threads = min(_THREADS, os.cpu_count() or 1) if isinstance(noise, CounterNoise) else 1
    return best / sum(stop - start for start, stop in chunks) * sum(spec.numel for spec in specs) / threads


def read_bytes_per_second(weights: TensorReader, layouts: Sequence[BlockLayout]) -> float:
    """Rate at which blocks come from a checkpoint, read as a source reads them; infinite where one is less than a chunk.

    Args:
        weights: The checkpoint.
        layouts: Segments in visiting order; the largest parameters of the blocks are read.

    Raises:
        CheckpointError: if they cannot be read.
    """
    specs = [spec for layout in layouts if not layout.resident for spec in layout.parameters]
    chunks: list[tuple[ParameterSpec, int]] = []
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        step = CHUNK // spec.stored_dtype.itemsize
        chunks += [(spec, start) for start in range(0, spec.stored_numel - step + 1, step)]
        if len(chunks) >= _READ_CHUNKS:
            break
    chunks = chunks[:_READ_CHUNKS]
    if not chunks:
        return math.inf

    def read(spec: ParameterSpec, start: int) -> None:
        weights.read_into(spec.name, torch.empty(CHUNK // spec.stored_dtype.itemsize, dtype=spec.stored_dtype), start)

    with ThreadPoolExecutor(READERS) as pool:
        began = time.perf_counter()
        for future in [pool.submit(read, *chunk) for chunk in chunks]:
            future.result()
        return len(chunks) * CHUNK / (time.perf_counter() - began)


def write_bytes_per_second(directory: Path) -> float:
    """Rate of durable writes to a directory's disk; a directory that is not there yet is not made.

    Raises:
        ScratchError: if it cannot be written to.
    """
    data = byte_view(memory := HostDevice().host_memory(_BYTES))
    memory.fill_(1)
    try:
        existing = next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.exists())
        with contextlib.closing(RangedFile.unnamed(existing)) as file:
            best = math.inf
            for _ in range(_ROUNDS):
                began = time.perf_counter()
                file.write(0, data)
                file.sync()
                best = min(best, time.perf_counter() - began)
    except OSError as error:
        raise ScratchError(
            directory,
            found=reason(error),
            expected="a directory on a disk with room",
            remedy="choose another directory or free space",
        ) from error
    return _BYTES / best
