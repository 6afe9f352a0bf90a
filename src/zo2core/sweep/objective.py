"""How a batch becomes the number that a step makes smaller: the model's own loss, or an objective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from zo2core.errors import OptionError
from zo2core.protocols import Forward, Objective
from zo2core.sweep.microbatch import combined_loss, labelled_tokens, split_rows
from zo2core.types import Batch


class Pieces(NamedTuple):
    """A batch, cut as its objective cuts it."""

    objective: Objective | None  # None: the forward's own loss, a mean over labelled tokens
    batches: Sequence[Batch]
    tokens: Sequence[int]  # labelled ones of each, where there are several; counted once, before any sweep

    def loss(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """One number, 0-d, of what the head gave for the pieces.

        Raises:
            OptionError: if it is none.
        """
        if self.objective is not None:
            return require_number(self.objective.loss(outputs, self.batches))
        if len(outputs) == 1:
            return require_number(outputs[0])
        return combined_loss(outputs, self.tokens)


def cut(batch: Batch, rows: int | None, forward: Forward | None) -> Pieces:
    """Cut a batch into pieces of at most so many rows.

    Args:
        batch: What the forward takes.
        rows: Of a micro-batch; None leaves the batch whole.
        forward: None is the model's own.

    Raises:
        OptionError: if rows are given, and the forward does not say how pieces join.
    """
    if forward is None:
        batches = split_rows(batch, rows)
        return Pieces(None, batches, [labelled_tokens(piece) for piece in batches] if len(batches) > 1 else [])
    if isinstance(forward, Objective):
        return Pieces(forward, forward.split(batch, rows), [])
    if rows is not None:
        raise OptionError(
            "micro_batch_size",
            found=f"{rows}, beside a forward that does not say how pieces of a batch join",
            expected="an Objective, which has split and loss",
            remedy="leave it out, or add these two",
        )
    return Pieces(None, [batch], [])


def require_number(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss if it is one number.

    Raises:
        OptionError: if it is not 0-d.
    """
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    found = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise OptionError(
        "forward", found=f"{found} as its loss", expected="a 0-d tensor", remedy="end it in one number, or use forwards()"
    )


def losses_as_tensors(losses: Iterable[float | torch.Tensor]) -> list[torch.Tensor]:
    """Losses that a caller made, 0-d each; those that are no tensors in float64."""
    tensors = [loss if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64) for loss in losses]
    return [require_number(tensor) for tensor in tensors]
