"""What directions beside the activations ask of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from zo2core.protocols import Activations, BlockModel
from zo2core.types import Batch


class Factors(NamedTuple):
    """What is added to a matrix W (m, n): ``own[s] @ shared^T`` for stream s."""

    own: torch.Tensor  # (streams, m, R), in W's dtype
    shared: torch.Tensor  # (n, R), in W's dtype


Moved: TypeAlias = Factors | torch.Tensor  # of a matrix; of a vector its perturbed values, (streams, n)


@runtime_checkable
class StackedModel(BlockModel, Protocol):
    """A model whose forwards run several streams as one batch, each with its own direction.

    A stack has the rows of its first stream, then those of the second, and so on: as many each.
    """

    def require_stackable(self) -> None:
        """Make ready for ``move``. Called before anything is read.

        Raises:
            UnsupportedModelError: naming what cannot take a direction beside its activations.
        """

    def stacked(self, batches: Sequence[Batch]) -> Batch | None:
        """Join prepared batches, one a stream; None if they cannot be joined. What one returns ``prepared`` is prepared."""

    def perturb(self, index: int, moved: Mapping[str, Moved], streams: int) -> None:
        """Run a segment's next forwards with these parameters moved, and no other segment's.

        Args:
            index: The segment's position in visiting order.
            moved: By the name of each parameter that the segment owns or borrows.
            streams: In the stack; 1 is a batch by itself, in any forward that the model's modules run in.
        """

    def heads(self, batches: Sequence[Batch], activations: Activations) -> list[torch.Tensor]:
        """Run what comes after the blocks on a stack; the loss of each stream, 0-d.

        Args:
            batches: The batches that were stacked.
            activations: Activations of the stack.
        """
