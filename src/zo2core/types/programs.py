"""Programs, the form in which kernels run updates: instructions, and their table in a device's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch


class Perturb(NamedTuple):
    """``theta <- theta + ((shift * z) * zo_eps)``."""

    direction: int  # index of z's seed in the program's seeds
    shift: float  # signed multiple of zo_eps
    zo_eps: float


class Descend(NamedTuple):
    """``theta <- theta - lr * ((projected_grad * z) + (weight_decay * theta))``."""

    direction: int  # index of z's seed in the program's seeds
    projected_grad: float
    lr: float
    weight_decay: float  # 0: the term is omitted


class Table(NamedTuple):
    """A program in a device's memory, encoded for compiled kernels."""

    instructions: torch.Tensor  # int32 (n, 5): kind, direction, and the bits of three float32 scalars
    scalars: torch.Tensor  # float32 (n, 5): the same memory; scale, rate and weight decay in the last three columns
    directions: torch.Tensor  # int64 (m, 2): seed, and the address of a drawn z, here 0


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """The instructions for each weight of a parameter, in order; kernels run them in one pass over memory.

    A program keeps its encoded tables, which live as long as it does: for a sweep.
    """

    seeds: tuple[int, ...]  # of the directions
    instructions: tuple[Perturb | Descend, ...]  # change the weights
    then: Perturb | None = None  # makes a perturbed copy of the weights afterwards
    tables: dict[torch.device, Table] = field(default_factory=dict, init=False, repr=False)  # filled by the kernels


class Distribution(Enum):
    """The distribution of independent random numbers with mean 0 and variance 1."""

    GAUSSIAN = "gaussian"
    RADEMACHER = "rademacher"  # +1 or -1

    @property
    def group(self) -> int:
        """Number of elements that counter-based generators draw together."""
        return 256 if self is Distribution.GAUSSIAN else 1024
