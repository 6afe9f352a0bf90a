"""A causal language model's loss over chunks of tokens, so that its logits are never in memory whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Note: Losses one after another. A loss allocates its logits in float32, twice, and then a scalar. If that scalar were kept,
# it would lie behind the freed memory, and glibc, which aligns torch's allocations, could not reuse all of it for the next
# loss: 32 losses would take 32 times as much. So each scalar is copied into one tensor and freed.


def chunked_loss(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    predictions: tuple[torch.Tensor, torch.Tensor],
    chunk: int,
    *,
    logits: Callable[[torch.Tensor], torch.Tensor],
    loss_function: Callable[..., torch.Tensor],
    vocab_size: int,
) -> torch.Tensor:
    """Compute the mean loss over labelled tokens; logits of unlabelled tokens are not computed."""
    targets = labels[:, 1:]
    rows, columns = predictions
    count = len(rows)
    terms = KeptLosses(-(-count // chunk))
    for start in range(0, count, chunk):
        at = rows[start : start + chunk], columns[start : start + chunk]
        terms.keep(  # a sum, divided by the labelled tokens of all chunks
            loss_function(
                logits(hidden[at]), None, vocab_size=vocab_size, shift_labels=targets[at], num_items_in_batch=count
            )
        )
    return terms.losses.sum()


class KeptLosses:
    """A fixed number of losses in one tensor. See the note: Losses one after another."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept = 0
        self._losses: torch.Tensor | None = None

    def keep(self, loss: torch.Tensor) -> None:
        """Store a copy of the next loss, 0-d."""
        if self._losses is None:
            self._losses = loss.new_empty(self._count)
        self._losses[self._kept] = loss
        self._kept += 1

    @property
    def losses(self) -> torch.Tensor:
        """All losses, 1-D."""
        assert self._losses is not None, "no loss was kept"
        assert self._kept == self._count, "a loss is missing"
        return self._losses
