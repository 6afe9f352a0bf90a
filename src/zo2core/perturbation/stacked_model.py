"""The contracts of models that take low-rank perturbations, and of forwards that run several of them as one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from zo2core.protocols import Activations, BlockModel, Forward
from zo2core.types import Batch


class Factors(NamedTuple):
    """Factors of the change of a matrix W (m, n): ``left[s] @ right^T`` for stream s."""

    left: torch.Tensor  # (streams, m, R), in W's dtype
    right: torch.Tensor  # (n, R), in W's dtype


PerturbedParameter: TypeAlias = Factors | torch.Tensor  # factors for a matrix; (streams, n) values for a vector


@runtime_checkable
class StackedForward(Forward, Protocol):
    """A forward that runs several streams as one batch, each with another perturbation.

    A stack has the rows of its first stream, then those of the second, and so on, with equal numbers of rows.
    """

    def stacked(self, batches: Sequence[Batch]) -> Batch | None:
        """Join prepared batches, one for each stream, to a prepared batch; None if they cannot be joined."""

    def heads(self, batches: Sequence[Batch], activations: Activations) -> list[torch.Tensor]:
        """Run the layers after the blocks on a stack; return the output of each stream, of a model its loss, 0-d."""


@runtime_checkable
class StackedModel(BlockModel, StackedForward, Protocol):
    """A model that takes low-rank perturbations."""

    def require_stackable(self) -> None:
        """Prepare for ``perturb``. Called before anything is read."""

    def perturb(self, index: int, perturbations: Mapping[str, PerturbedParameter], streams: int) -> None:
        """Perturb a segment's next forwards, and stop perturbing every other segment's."""
