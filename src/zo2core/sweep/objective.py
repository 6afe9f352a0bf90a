"""The number that a step minimises for a batch: the model's own loss, or an objective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zo2core.errors import BatchError, OptionError
from zo2core.protocols import Forward, Objective
from zo2core.sweep.microbatch import combined_loss, labelled_tokens, split_rows
from zo2core.types import Batch


class MicroBatches(NamedTuple):
    """The micro-batches of a step."""

    objective: Objective | None  # None: the forward's own loss, a mean over labelled tokens
    batches: Sequence[Batch]
    tokens: Sequence[int]  # labelled tokens of each micro-batch, if there are several

    def loss(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the loss, 0-d, from the head's outputs for the micro-batches."""
        if self.objective is not None:
            return require_number(self.objective.loss(outputs, self.batches))
        if len(outputs) == 1:
            return require_number(outputs[0])
        return combined_loss(outputs, self.tokens)


def batches_of(batch: Batch | Sequence[Batch]) -> list[Batch]:
    """Return the batches of a step: one, or several that count as one."""
    if not isinstance(batch, Iterable):
        raise BatchError("batch", found=repr(batch)[:40], expected="a batch, or several", remedy="pass names with tensors")
    batches: list[Any] = [batch] if isinstance(batch, Mapping) else list(batch)
    if not batches:
        raise BatchError("batch", found="an empty list", expected="a batch, or several", remedy="pass at least one batch")
    for entry in batches:
        if not isinstance(entry, Mapping):
            kind = type(entry).__name__
            raise BatchError("batch", found=f"a {kind}", expected="a mapping of names to tensors", remedy="name the tensors")
    return batches


def split_batches(batches: Sequence[Batch], rows: int | None, forward: Forward | None) -> MicroBatches:
    """Split a step's batches into micro-batches of at most ``rows`` rows."""
    if forward is None:
        micro_batches = [micro_batch for batch in batches for micro_batch in split_rows(batch, rows)]
        if len(micro_batches) == 1:
            return MicroBatches(None, micro_batches, [])
        counted = [(micro_batch, labelled_tokens(micro_batch)) for micro_batch in micro_batches]
        # A micro-batch without a labelled token has no loss; one without labels is refused when it is prepared.
        counted = [
            (micro_batch, tokens) for micro_batch, tokens in counted if tokens or "labels" not in micro_batch
        ] or counted[:1]
        return MicroBatches(None, [micro_batch for micro_batch, _ in counted], [tokens for _, tokens in counted])
    if isinstance(forward, Objective):
        micro_batches = [micro_batch for batch in batches for micro_batch in forward.split(batch, rows)]
        return MicroBatches(forward, micro_batches or batches[:1], [])
    if rows is not None or len(batches) > 1:
        raise OptionError(
            "forward",
            found="a forward that does not combine the losses of micro-batches",
            expected="an Objective, which has split and loss, for `micro_batch_size` or several batches",
            remedy="pass one batch without `micro_batch_size`, or add these two methods",
        )
    return MicroBatches(None, batches, [])


def require_number(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that is a number."""
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    found = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise OptionError(
        "forward", found=f"{found} as its loss", expected="a 0-d tensor", remedy="return one number, or use forwards()"
    )


def losses_as_tensors(losses: Iterable[float | torch.Tensor]) -> list[torch.Tensor]:
    """Convert losses to 0-d tensors; numbers become float64."""
    tensors = [loss if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64) for loss in losses]
    return [require_number(tensor) for tensor in tensors]
