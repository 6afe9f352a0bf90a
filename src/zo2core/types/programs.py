"""An update as kernels run it: instructions, a program of them, and its table in a device's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch


class Perturb(NamedTuple):
    """``theta <- theta + ((shift * z) * zo_eps)``."""

    direction: int  # position of z's seed in the program's list
    shift: float  # signed multiple of zo_eps
    zo_eps: float


class Descend(NamedTuple):
    """``theta <- theta - lr * ((projected_grad * z) + (weight_decay * theta))``."""

    direction: int  # position of z's seed in the program's list
    projected_grad: float
    lr: float
    weight_decay: float  # 0 leaves the term out


class Table(NamedTuple):
    """A program in the memory of a device, as compiled kernels read it."""

    instructions: torch.Tensor  # int32 (n, 5): kind, direction, and the bits of three float32 scalars
    scalars: torch.Tensor  # float32 (n, 5): the same memory; scale, rate and weight decay in the last three columns
    directions: torch.Tensor  # int64 (m, 2): seed, and 0 where the address of a z that was drawn before would be


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """What is done to each weight of a parameter, in order: kernels run it in one pass over memory.

    Tables are kept with the program they were coded from, so they live as long as it does: for a sweep.
    """

    seeds: tuple[int, ...]  # of the directions
    instructions: tuple[Perturb | Descend, ...]  # change the weights
    then: Perturb | None = None  # from the weights to a copy of them, which is perturbed
    tables: dict[torch.device, Table] = field(default_factory=dict, init=False, repr=False)  # filled by the kernels


class Distribution(Enum):
    """How independent random numbers with mean 0 and variance 1 are distributed."""

    GAUSSIAN = "gaussian"
    RADEMACHER = "rademacher"  # +1 or -1

    @property
    def group(self) -> int:
        """Elements that counter-based generators draw together."""
        return 256 if self is Distribution.GAUSSIAN else 1024
