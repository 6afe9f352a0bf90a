"""How a batch becomes the number that a step makes smaller: the model's own loss, or an objective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zo2core.errors import BatchError, OptionError
from zo2core.protocols import Forward, Objective
from zo2core.sweep.microbatch import combined_loss, labelled_tokens, split_rows
from zo2core.types import Batch


class MicroBatches(NamedTuple):
    """A step's batch, cut as its objective cuts it."""

    objective: Objective | None  # None: the forward's own loss, a mean over labelled tokens
    batches: Sequence[Batch]
    tokens: Sequence[int]  # labelled ones of each, where there are several; counted once, before any sweep

    def loss(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """One number, 0-d, of what the head gave for the micro-batches.

        Raises:
            OptionError: if it is none.
        """
        if self.objective is not None:
            return require_number(self.objective.loss(outputs, self.batches))
        if len(outputs) == 1:
            return require_number(outputs[0])
        return combined_loss(outputs, self.tokens)


def batches_of(batch: Batch | Sequence[Batch]) -> list[Batch]:
    """The batches of a step: one, or several that count as one.

    Raises:
        BatchError: if there is none.
    """
    if not isinstance(batch, Iterable):
        raise BatchError("batch", found=repr(batch)[:40], expected="a batch, or several", remedy="pass names with tensors")
    wholes: list[Any] = [batch] if isinstance(batch, Mapping) else list(batch)
    if not wholes:
        raise BatchError("batch", found="an empty list", expected="a batch, or several", remedy="pass one at least")
    for whole in wholes:
        if not isinstance(whole, Mapping):
            kind = type(whole).__name__
            raise BatchError("batch", found=f"a {kind}", expected="a mapping of names to tensors", remedy="name the tensors")
    return wholes


def cut(wholes: Sequence[Batch], rows: int | None, forward: Forward | None) -> MicroBatches:
    """Cut a step's batches into micro-batches of at most so many rows.

    Args:
        wholes: What the forward takes, at least one.
        rows: Rows of a micro-batch; None leaves each batch whole.
        forward: None is the model's own.

    Raises:
        OptionError: if there are to be micro-batches, and the forward does not say how they join.
    """
    if forward is None:
        micro_batches = [micro_batch for whole in wholes for micro_batch in split_rows(whole, rows)]
        if len(micro_batches) == 1:
            return MicroBatches(None, micro_batches, [])
        counted = [(micro_batch, labelled_tokens(micro_batch)) for micro_batch in micro_batches]
        # What has no labelled token has no loss; what has no labels is refused as it is prepared.
        counted = [
            (micro_batch, tokens) for micro_batch, tokens in counted if tokens or "labels" not in micro_batch
        ] or counted[:1]
        return MicroBatches(None, [micro_batch for micro_batch, _ in counted], [tokens for _, tokens in counted])
    if isinstance(forward, Objective):
        return MicroBatches(
            forward, [micro_batch for whole in wholes for micro_batch in forward.split(whole, rows)] or wholes[:1], []
        )
    if rows is not None or len(wholes) > 1:
        raise OptionError(
            "forward",
            found="one that does not say how micro-batches of a batch join",
            expected="an Objective, which has split and loss, where `micro_batch_size` or several batches are given",
            remedy="pass one batch without `micro_batch_size`, or add these two",
        )
    return MicroBatches(None, wholes, [])


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
