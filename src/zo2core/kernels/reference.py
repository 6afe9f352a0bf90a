"""The reference that every faster kernel is compared with, in torch operations: MeZO's elementwise
arithmetic, and noise.

Each operation rounds to the parameter's dtype, in the association order of MeZO's own trainer;
Python scalars act in the kernel's wider type. Operations that could contract into a fused
multiply-add (``alpha=``, ``addcmul``) are not used.

All tensors are 1-D and contiguous and, unless stated otherwise, have the same dtype and length.

Noise is drawn by a counter: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
2, 3", SC 2011) turns a counter and a key into four 32-bit words, the same on every device. There is
no state, so any thread can draw any range at any time.

Note: Order of the numbers. The key is the seed (low word, high word), the counter (block low, block
high, parameter, 0), with the parameter's index in registration order. A call gives 4 Gaussian or
128 Rademacher numbers; so that vector units write without shuffling, a *group* of consecutive calls
interleaves its numbers:

    Gaussian     64 calls, 256 elements: element e has group e // 256, word (e % 256) // 64, call e
    % 64 of the group Rademacher   8 calls, 1024 elements: element e has group e // 1024, bit (e %
    1024) // 32 of word (e % 32) // 8
                 of call e % 8 of the group; a set bit is -1

Note: Gaussian numbers. Box and Muller's transform of words (0, 1) and of words (2, 3), in float32:
radius and angle are

    u = (word // 2 + 0.5) / 2**31     radius = sqrt(-2 log u)     angle = 2 pi word' / 2**32

The logarithm and the sine are polynomials, and each addition and multiplication rounds by itself
(no fused multiply-add), so that every device with IEEE numbers and a correctly rounded square root
gives the same bits. A number is within 1e-6 of the exact result, and none is beyond 6.67, which a
true Gaussian exceeds once in 4e10 draws. It is then rounded to the parameter's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zo2core.kernels.programs import Draw, folds
from zo2core.types import Descend, Distribution, Perturb, Program

_CHUNK = 32768  # elements that are processed at a time on the CPU
_GIVEN_CHUNK = 1 << 18  # the same where z is given: enough for all threads
_DEVICE_CHUNK = 1 << 22  # the same on other devices, where launches cost more than memory
_FORMED_AT_ONCE = 1 << 18  # weights that are summed at a time
_WORD = 0xFFFFFFFF
_LOG = (0.20213786, -0.3244516, 0.3450166, -0.3980033, 0.4993982, -0.6667012, 1.0000073, -1.9999999)
_SINE = (-3.595045e-05, 0.002490001, -0.080745436, 0.7853982)
_COSINE = (-0.0003188805, 0.015849914, -0.30842426, 1.0)
_SQRT_HALF = 0x3F3504F3  # bits of sqrt(1/2)


def chunk(tensor: Tensor) -> int:
    """Elements that are processed at a time on a tensor's device."""
    return _CHUNK if tensor.is_cpu else _DEVICE_CHUNK


def perturb(out: Tensor, theta: Tensor, z: Tensor, by: Perturb) -> None:
    """``out = theta + ((shift * z) * zo_eps)`` (MeZO, Algorithm 1, PerturbParameters).

    Args:
        out: Result; may be ``theta``, or of another dtype, to which the result is rounded once
            more.
        theta: Weights.
        z: Direction.
        by: Shift and scale; its direction is not used.
    """
    delta = z * (by.shift * by.zo_eps) if folds(by.shift) else (z * by.shift).mul_(by.zo_eps)
    if out.dtype is theta.dtype:
        torch.add(theta, delta, out=out)
    else:
        out.copy_(torch.add(theta, delta, out=delta))


def descend(theta: Tensor, z: Tensor, by: Descend) -> None:
    """``theta = theta - lr * ((g * z) + (weight_decay * theta))``; without the decay term where it
    is 0.

    MeZO's trainer writes the decay term for every decayed parameter, also with a decay of 0.
    Leaving it out gives the same bits: ``x + 0 * theta`` differs from ``x`` at most in the sign of
    a zero, which matters to ``theta - x`` only if theta is -0. No weight is -0 after MeZO's
    perturbations, the last two of which have opposite signs.

    Args:
        theta: Weights, changed in place.
        z: Direction.
        by: The scalar g, learning rate and weight decay; its direction is not used.
    """
    step = z * by.projected_grad
    if by.weight_decay != 0:
        step.add_(theta * by.weight_decay)
    theta.sub_(step.mul_(by.lr))


def apply(
    theta: Tensor,
    program: Program,
    z: Draw | Sequence[Tensor],
    out: Tensor | None = None,
    rounded: Tensor | None = None,
) -> None:
    """Run a program on a range of a parameter, a chunk at a time; ``dispatch.apply`` has the
    arguments.
    """
    length = chunk(theta) if isinstance(z, Draw) or not theta.is_cpu else _GIVEN_CHUNK
    for first in range(0, theta.numel(), length):
        part = slice(first, first + length)
        weights = theta[part]
        if isinstance(z, Draw):
            zs = [torch.empty_like(weights) for _ in program.seeds]
            for drawn, seed in zip(zs, program.seeds, strict=True):
                fill(drawn, z.distribution, seed, z.parameter, z.start + first)
        else:
            zs = [whole[part] for whole in z]
        for instruction in program.instructions:
            if isinstance(instruction, Perturb):
                perturb(weights, weights, zs[instruction.direction], instruction)
            else:
                descend(weights, zs[instruction.direction], instruction)
        if out is not None and program.then is not None:
            perturb(out[part], weights, zs[program.then.direction], program.then)
        if rounded is not None:
            rounded[part].copy_(weights if out is None else out[part])


def words(seed: int, parameter: int, first: int, count: int, device: torch.device) -> Tensor:
    """Philox4x32-10 of ``count`` counters from block ``first`` on: int64 (4, count), each below
    2**32.
    """
    block = torch.arange(first, first + count, device=device)
    c0 = block & _WORD
    c1 = block >> 32
    c2 = torch.full_like(block, parameter)
    c3 = torch.zeros_like(block)
    k0 = seed & _WORD
    k1 = seed >> 32
    for _ in range(10):
        # the product wraps, which leaves its 64 bits right
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0 = (p1 >> 32 & _WORD) ^ c1 ^ k0
        c1 = p1 & _WORD
        c2 = (p0 >> 32 & _WORD) ^ c3 ^ k1
        c3 = p0 & _WORD
        k0 = k0 + 0x9E3779B9 & _WORD
        k1 = k1 + 0xBB67AE85 & _WORD
    return torch.stack((c0, c1, c2, c3))


def fill(
    out: Tensor, distribution: Distribution, seed: int, parameter: int, start: int = 0
) -> None:
    """Write the elements from ``start`` on of a parameter's z.

    Args:
        out: 1-D, contiguous, of any floating dtype, on any device.
        distribution: Distribution of the numbers.
        seed: Seed of the direction, 0 to 2**63 - 1.
        parameter: Index of the parameter in registration order.
        start: First element to write.
    """
    group = distribution.group
    first = start // group * group
    groups = math.ceil((start + out.numel() - first) / group)
    if distribution is Distribution.GAUSSIAN:
        drawn = words(seed, parameter, first // 4, groups * 64, out.device)
        pairs = [box_muller(drawn[0], drawn[1]), box_muller(drawn[2], drawn[3])]
        z = torch.stack([number.view(groups, 64) for pair in pairs for number in pair], 1)
    else:
        drawn = words(seed, parameter, first // 128, groups * 8, out.device)
        interleaved = drawn.view(4, groups, 8).transpose(0, 1).reshape(groups, 1, 32)
        z = 1.0 - 2.0 * (interleaved >> torch.arange(32, device=out.device).view(1, 32, 1) & 1)
    out.copy_(z.flatten()[start - first : start - first + out.numel()])


def box_muller(radial: Tensor, angular: Tensor) -> tuple[Tensor, Tensor]:
    """Turn each pair of words, int64 below 2**32, into two independent Gaussian numbers,
    float32.
    """
    u = (radial >> 1).float() + 0.5
    bits = u.view(torch.int32)
    exponent = (bits - _SQRT_HALF) >> 23
    f = (bits - (exponent << 23)).view(torch.float32) - 1.0
    squared = _horner(_LOG, f) * f + (exponent - 31).float() * -1.3862944
    # correctly rounded, unlike torch's float32 square root on some machines
    radius = squared.double().sqrt().float()

    quarter = (angular + 0x20000000) >> 30 & 3  # the nearest axis, counted from 0 degrees
    from_axis = (angular << 2 & _WORD).where(
        angular << 2 & 0x80000000 == 0, (angular << 2 & _WORD) - (1 << 32)
    ) >> 2
    t = from_axis.float() * 2.0**-29  # -1 to 1: 45 degrees to either side
    y = t * t
    sine = _horner(_SINE, y) * t
    cosine = _horner(_COSINE, y)
    odd = quarter & 1 == 1
    first = torch.where(odd, sine, cosine)
    second = torch.where(odd, cosine, sine)
    first = torch.where((quarter == 1) | (quarter == 2), -first, first)
    second = torch.where(quarter >= 2, -second, second)
    return radius * first, radius * second


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def form(base: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write ``base + left right^T``. See ``dispatch.form``."""
    columns = right.float().t().contiguous()
    rows = max(1, _FORMED_AT_ONCE // max(base.shape[1], 1))
    for weights, factors, memory in zip(
        *(torch.split(matrix, rows) for matrix in (base, left, out)), strict=True
    ):
        sums = torch.zeros_like(weights, dtype=torch.float32)
        product = torch.empty_like(weights, dtype=torch.float32)
        for k, column in enumerate(columns):
            sums += torch.mul(factors[:, k, None], column, out=product)
        memory.copy_(weights.float() + sums)
