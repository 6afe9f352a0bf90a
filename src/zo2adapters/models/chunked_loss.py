"""A causal language model's loss over slices of tokens, so that its logits are never there whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Note: Losses one after another. A loss takes memory for its logits in float32, twice, and gives a number. If that number
# were kept as it comes, it would lie behind this memory, and glibc, which aligns what torch asks for, could not give all of
# it to the next loss: 32 losses would take 32 times as much. So numbers are copied to where they are kept, and given back.


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
    """The mean loss over labelled tokens; tokens without a label cost nothing.

    Args:
        hidden: Final hidden states, (rows, tokens, ...), before the norm.
        labels: (rows, tokens); each token but the last predicts the next one's.
        predictions: Rows and columns of the tokens from which a labelled one is predicted.
        chunk: Labelled tokens whose logits are in memory at a time.
        logits: Norm and head: (n, ...) to (n, vocabulary).
        loss_function: The model's own, by Hugging Face.
        vocab_size: Size of the model's vocabulary.

    Returns:
        0-d, as ``loss_function`` gives it.
    """
    targets = labels[:, 1:]
    rows, places = predictions
    count = len(rows)
    terms = KeptLosses(-(-count // chunk))
    for start in range(0, count, chunk):
        at = rows[start : start + chunk], places[start : start + chunk]
        terms.keep(  # a sum, divided by the labelled tokens of all chunks
            loss_function(
                logits(hidden[at]), None, vocab_size=vocab_size, shift_labels=targets[at], num_items_in_batch=count
            )
        )
    return terms.losses.sum()


class KeptLosses:
    """Losses in the order in which they come. See the note: Losses one after another.

    Args:
        count: How many there will be.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept = 0
        self._losses: torch.Tensor | None = None

    def keep(self, loss: torch.Tensor) -> None:
        """Copy the next loss, 0-d."""
        if self._losses is None:
            self._losses = loss.new_empty(self._count)
        self._losses[self._kept] = loss
        self._kept += 1

    @property
    def losses(self) -> torch.Tensor:
        """All of them, 1-D."""
        assert self._losses is not None, "there is a loss"
        assert self._kept == self._count, "each was kept"
        return self._losses
