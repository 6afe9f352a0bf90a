"""One-pass CUDA kernels in Triton, with the bits of the reference.

Directions are drawn in the kernel or passed in.

One launch changes all parameters of a segment: launching from Python takes longer than most
parameters' arithmetic. A table says where each lies.

The module is imported for CUDA tensors only. Kernels are launched without fused multiply-adds
(LAUNCH). The tests run them under Triton's interpreter, and compile them to PTX.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from zo2core.kernels.programs import table
from zo2core.types import Distribution, Program

BLOCK = 1024  # elements of a program instance: a multiple of Philox's groups
# rows and columns that a program instance forms
HIGH = tl.constexpr(16)
WIDE = tl.constexpr(128)
LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _horner3(x, a, b, c, d):
    return ((a * x + b) * x + c) * x + d


@triton.jit
def _box_muller(radial, angular):
    """Do what ``reference.box_muller`` does, operation by operation."""
    u = (radial >> 1).to(tl.int32, bitcast=True).to(tl.float32) + 0.5
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    p = _horner3(f, 0.20213786, -0.3244516, 0.3450166, -0.3980033)
    p = _horner3(f, p, 0.4993982, -0.6667012, 1.0000073) * f - 1.9999999
    radius = tl.sqrt_rn(p * f + (exponent - 31).to(tl.float32) * -1.3862944)

    quarter = angular + 0x20000000
    # 2**-29
    t = ((angular << 2).to(tl.int32, bitcast=True) >> 2).to(tl.float32) * 1.862645149230957e-09
    y = t * t
    sine = _horner3(y, -3.595045e-05, 0.002490001, -0.080745436, 0.7853982) * t
    cosine = _horner3(y, -0.0003188805, 0.015849914, -0.30842426, 1.0)
    odd = (quarter & 0x40000000) != 0
    first = tl.where(odd, sine, cosine)
    second = tl.where(odd, cosine, sine)
    first = tl.where(((quarter + 0x40000000) & 0x80000000) != 0, -first, first)
    second = tl.where((quarter & 0x80000000) != 0, -second, second)
    return radius * first, radius * second


@triton.jit
def _draw(seed, parameter, element, GAUSSIAN: tl.constexpr, BLOCK: tl.constexpr):
    """Draw z of BLOCK elements from ``element`` on, a multiple of BLOCK: float32 (BLOCK,).

    ``reference`` has the order.
    """
    if GAUSSIAN:
        call = element // 4 + tl.arange(0, BLOCK // 4)
    else:  # each call four times: word (i % 32) // 8 of call i % 8 of group i // 32
        i = tl.arange(0, BLOCK // 32)
        call = element // 128 + i // 32 * 8 + i % 8
    c0 = call.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        seed, c0, (call >> 32).to(tl.uint32), c0 * 0 + parameter.to(tl.uint32), c0 * 0
    )
    if GAUSSIAN:
        z0, z1 = _box_muller(w0, w1)
        z2, z3 = _box_muller(w2, w3)
        lanes = tl.join(tl.join(z0, z2), tl.join(z1, z3))  # number 2a + b of call i at [i, a, b]
        z = tl.permute(tl.reshape(lanes, (BLOCK // 256, 64, 2, 2)), (0, 2, 3, 1))
    else:
        word = i % 32 // 8
        chosen = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
        bit = (tl.reshape(chosen, (BLOCK // 1024, 1, 32)) >> tl.arange(0, 32)[None, :, None]) & 1
        z = 1.0 - 2.0 * bit.to(tl.int32).to(tl.float32)
    return tl.reshape(z, (BLOCK,))


@triton.jit
def _run_instruction(weights, z, kind, scale, rate, weight_decay, number: tl.constexpr):
    """Run one instruction, rounding to the weights' dtype after every operation.

    See ``table`` for the kinds.
    """
    step = (z * scale).to(number).to(tl.float32)
    if kind == 2:
        if weight_decay != 0:
            decay = (weights * weight_decay).to(number).to(tl.float32)
            step = (step + decay).to(number).to(tl.float32)
        weights = weights - (step * rate).to(number).to(tl.float32)
    else:
        if kind == 0:
            step = (step * rate).to(number).to(tl.float32)
        weights = weights + step
    return weights.to(number).to(tl.float32)


@triton.jit
def _place(places, ROWS: tl.constexpr):
    """Find this program instance's parameter in the table: its column, and the instance's number
    among the parameter's.
    """
    instance = tl.program_id(0).to(tl.int64)
    firsts = tl.load(places + tl.arange(0, ROWS))
    column = places + tl.sum((firsts <= instance).to(tl.int32)) - 1
    return column, instance - tl.load(column)


# Triton would compile again for an argument that is 1 or a multiple of 16, and pass a 1 as a
# constant without a dtype.
@triton.jit(do_not_specialize=["first", "in_place", "length", "parameter"])
def _run(
    theta,
    out,
    given,  # z, where it is not drawn
    places,
    instructions,  # int32, five for each instruction: kind and direction come first
    scalars,  # float32, the same memory: scale, rate and weight decay come last
    directions,  # int64, two for each direction: the seed comes first
    first,  # the first instruction to run
    # end of the instructions that change theta; the others change the copy that is written to out
    in_place,
    length,  # end of all instructions
    parameter,
    GIVEN: tl.constexpr,
    GAUSSIAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = theta.dtype.element_ty
    place, block = _place(places, ROWS)
    theta += tl.load(place + ROWS)
    out += tl.load(place + 2 * ROWS)
    numel = tl.load(place + 4 * ROWS)
    parameter = (parameter + tl.load(place + 5 * ROWS)).to(tl.int32)
    start = tl.load(place + 6 * ROWS)  # element of the parameter at which theta starts
    element = (start // BLOCK + block) * BLOCK
    at = element - start + tl.arange(0, BLOCK)
    inside = (at >= 0) & (at < numel)
    weights = tl.load(theta + at, mask=inside, other=0.0).to(tl.float32)
    z = weights * 0.0
    if GIVEN:
        z = tl.load(given + tl.load(place + 3 * ROWS) + at, mask=inside, other=0.0).to(tl.float32)
    drawn = -1  # direction in z
    for i in range(first, length):
        if (i == in_place) & (in_place > 0):
            tl.store(theta + at, weights.to(number), mask=inside)
        if not GIVEN:
            direction = tl.load(instructions + 5 * i + 1)
            if direction != drawn:
                z = (
                    _draw(tl.load(directions + 2 * direction), parameter, element, GAUSSIAN, BLOCK)
                    .to(number)
                    .to(tl.float32)
                )
                drawn = direction
        kind = tl.load(instructions + 5 * i)
        scale = tl.load(scalars + 5 * i + 2)
        rate = tl.load(scalars + 5 * i + 3)
        weight_decay = tl.load(scalars + 5 * i + 4)
        weights = _run_instruction(weights, z, kind, scale, rate, weight_decay, number)
    if in_place < length:
        tl.store(out + at, weights.to(out.dtype.element_ty), mask=inside)
    elif in_place > 0:
        tl.store(theta + at, weights.to(number), mask=inside)


@triton.jit(do_not_specialize=["seed", "numel", "parameter", "start"])
def _fill(out, seed, numel, parameter, start, GAUSSIAN: tl.constexpr, BLOCK: tl.constexpr):
    element = (start // BLOCK + tl.program_id(0)).to(tl.int64) * BLOCK
    at = element - start + tl.arange(0, BLOCK)
    z = _draw(seed.to(tl.int64), parameter, element, GAUSSIAN, BLOCK)
    tl.store(out + at, z.to(out.dtype.element_ty), mask=(at >= 0) & (at < numel))


@triton.jit(do_not_specialize=["rows", "columns", "rank"])
def _form(base, out, left, right, rows, columns, rank):
    row = tl.program_id(0).to(tl.int64) * HIGH + tl.arange(0, HIGH)
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    at = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    weights = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros((HIGH, WIDE), tl.float32)
    for k in range(rank):
        by_row = tl.load(left + row * rank + k, mask=row < rows, other=0.0)
        by_column = tl.load(
            right + k * columns.to(tl.int64) + column, mask=column < columns, other=0.0
        )
        sums += by_row[:, None] * by_column[None, :]
    tl.store(out + at, (weights + sums).to(out.dtype.element_ty), mask=inside)


def takes(theta: torch.Tensor) -> bool:
    """Whether the kernels support weights of this dtype."""
    return theta.dtype in (torch.float32, torch.bfloat16, torch.float16)


class _Places(NamedTuple):
    """Where the parameters of one launch lie."""

    # int64 (7, rows): first instance; offsets of theta, out and z; elements; index; start
    table: torch.Tensor
    instances: int


@lru_cache(maxsize=4096)
def _places(device: torch.device, columns: tuple[tuple[int, ...], ...]) -> _Places:
    """Number the instances of a launch, and copy its table to the device.

    The host does not wait for the copy.
    """
    rows = max(triton.next_power_of_2(len(columns)), 2)
    firsts = [
        0,
        *accumulate(
            triton.cdiv(start % BLOCK + numel, BLOCK) for _, _, _, numel, _, start in columns
        ),
    ]
    table = torch.full((7, rows), torch.iinfo(torch.int64).max, pin_memory=device.type == "cuda")
    table[0, : len(columns)] = torch.tensor(firsts[:-1])
    table[1:, : len(columns)] = torch.tensor(columns).T
    return _Places(table.to(device, non_blocking=True), firsts[-1])


def _offsets(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Each tensor's distance from the first one, in elements."""
    first = tensors[0].data_ptr()
    size = tensors[0].element_size()
    return [(tensor.data_ptr() - first) // size for tensor in tensors]


def _launch_over(
    thetas: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor] | None = None,
    zs: Sequence[torch.Tensor] | None = None,
    parameters: Sequence[int] | None = None,
    start: int = 0,
) -> _Places:
    """Return the places of these tensors.

    Indices count from the first parameter's, so that equal blocks share a table.
    """
    indices = (
        [0] * len(thetas)
        if parameters is None
        else [parameter - parameters[0] for parameter in parameters]
    )
    numels = [theta.numel() for theta in thetas]
    offsets = map(_offsets, (thetas, outs or thetas, zs or thetas))
    return _places(
        thetas[0].device, tuple(zip(*offsets, numels, indices, [start] * len(thetas), strict=True))
    )


def apply_drawing(
    thetas: Sequence[torch.Tensor],
    program: Program,
    distribution: Distribution,
    parameters: Sequence[int],
    start: int = 0,
    *,
    outs: Sequence[torch.Tensor] | None = None,
) -> None:
    """Do what ``dispatch.apply`` does, for parameters of one dtype in one launch."""
    in_place = len(program.instructions)
    length = in_place if outs is None else in_place + 1
    if length > 0:
        places = _launch_over(thetas, outs, parameters=parameters, start=start)
        memory = thetas[0], (thetas if outs is None else outs)[0], thetas[0], places.table
        run = *table(program, thetas[0].device), 0, in_place, length, parameters[0]
        _launch(
            _run, places, *memory, *run, GIVEN=False, GAUSSIAN=distribution is Distribution.GAUSSIAN
        )


def _launch(kernel: Any, places: _Places, *arguments: object, **constants: bool) -> None:
    """Launch a kernel over places; the first argument is on the GPU to launch on."""
    if places.instances > 0:
        with _current(arguments[0]):
            kernel[(places.instances,)](
                *arguments, ROWS=places.table.shape[1], BLOCK=BLOCK, **constants, **LAUNCH
            )


def fill(
    out: torch.Tensor, distribution: Distribution, seed: int, parameter: int, start: int = 0
) -> None:
    """Do what ``dispatch.fill`` does."""
    if out.numel() == 0:
        return
    blocks = triton.cdiv(start % BLOCK + out.numel(), BLOCK)
    is_gaussian = distribution is Distribution.GAUSSIAN
    with _current(out):
        _fill[(blocks,)](
            out, seed, out.numel(), parameter, start, GAUSSIAN=is_gaussian, BLOCK=BLOCK, **LAUNCH
        )


def apply(
    thetas: Sequence[torch.Tensor],
    program: Program,
    zs: Sequence[Sequence[torch.Tensor]],
    outs: Sequence[torch.Tensor] | None = None,
) -> None:
    """Do what ``dispatch.apply`` does, for parameters of one dtype: one launch for each run along
    one direction.

    ``zs`` has each direction's numbers, by parameter.
    """
    coded = table(program, thetas[0].device)
    in_place = len(program.instructions)
    run = (
        program.instructions
        if outs is None or program.then is None
        else (*program.instructions, program.then)
    )
    first = 0
    for direction, along in groupby(run, lambda instruction: instruction.direction):
        last = first + len(list(along))
        places = _launch_over(thetas, outs, zs[direction])
        memory = thetas[0], (thetas if outs is None else outs)[0], zs[direction][0], places.table
        _launch(
            _run,
            places,
            *memory,
            *coded,
            first,
            min(in_place, last),
            last,
            0,
            GIVEN=True,
            GAUSSIAN=True,
        )
        first = last


def form(base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Do what ``dispatch.form`` does, with ``right`` as (rank, columns), float32."""
    rows, columns = base.shape
    if base.numel() == 0:
        return
    tiles = triton.cdiv(rows, HIGH.value), triton.cdiv(columns, WIDE.value)
    with _current(base):
        _form[tiles](base, out, left, right, rows, columns, len(right), **LAUNCH)


def _current(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make a tensor's GPU the current one for a launch.

    That takes as long as a launch: it is done only if needed.
    """
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
