"""The loss of next tokens on the CPU, row by row in the processor's cache, with the same bits.

transformers widens all logits to float32, and torch computes the log-probabilities of all words,
their gradients and the gradients of the logits, each in memory of its own: with a vocabulary of
50,000 more than anything else in a step. Here a few rows at a time pass through all of this. The
functions are torch's, which compute each row by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from zo2adapters.models.library_names import ForCausalLMLoss

_CACHED = 1 << 19  # numbers in float32 of which a few times as many stay in the cache
SMALL = 1 << 23  # logits up to which passes through memory of their own take no longer
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Compute transformers' loss of a causal language model.

    Args:
        logits: (..., tokens, vocabulary).
        labels: (..., tokens); a token's logits predict the label of the next one.
        vocab_size: The size of the vocabulary.
        num_items_in_batch: Divisor of the summed losses; None: the number of labelled tokens.
        ignore_index: The label of tokens without one.
        shift_labels: The labels, each at the place of the token before, instead of ``labels``.
        options: Further ones, with which transformers computes the loss.
    """
    # a label that is a word, too, cannot stand for tokens without one here
    if options or ignore_index >= 0 or not _fits(logits, vocab_size):
        given = (logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
        return ForCausalLMLoss(*given, **options)
    if shift_labels is None:
        assert labels is not None, "labels are given at one of two places"
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1)
    is_ignored = targets == ignore_index
    of_targets: Any = _LogProbabilities.apply  # autograd's is untyped
    chosen = of_targets(logits.view(-1, vocab_size), targets.masked_fill(is_ignored, 0)[:, None])
    reduction = "mean" if num_items_in_batch is None else "sum"
    only_word = torch.zeros_like(targets).masked_fill(is_ignored, ignore_index)
    loss = functional.nll_loss(chosen, only_word, ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _fits(logits: torch.Tensor, vocab_size: int) -> bool:
    return (
        type(logits) is torch.Tensor
        and logits.device.type == "cpu"
        and logits.dtype in _DTYPES
        and logits.shape[-1] == vocab_size
        and logits.is_contiguous()
        and logits.numel() > SMALL
    )


class _LogProbabilities(torch.autograd.Function):
    """The log-probabilities of one word for each row of logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        """Compute them in float32.

        Args:
            ctx: Of autograd.
            logits: (rows, vocabulary).
            words: (rows, 1): indices of words.
        """
        ctx.save_for_backward(logits, words)
        chosen = torch.empty(words.shape)
        for rows in _chunks(logits):
            torch.gather(_log_softmax(logits[rows]), 1, words[rows], out=chosen[rows])
        return chosen

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The gradients of the logits, in their dtype."""
        [gradient] = gradients
        logits, words = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        chunks = _chunks(logits)
        of_words = torch.zeros(len(logits[chunks[0]]), logits.shape[1])
        for rows in chunks:
            of_rows = of_words[: len(words[rows])]
            of_rows.scatter_(1, words[rows], gradient[rows])
            of_logits[rows] = torch._log_softmax_backward_data(
                of_rows, _log_softmax(logits[rows]), 1, torch.float32
            )
            of_rows.scatter_(1, words[rows], 0.0)
        return of_logits, None


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return functional.log_softmax(logits.float(), 1)


def _chunks(logits: torch.Tensor) -> list[slice]:
    """Ranges of rows that fit into the cache."""
    count, words = logits.shape
    length = max(torch.get_num_threads(), _CACHED // words)
    return [slice(start, min(start + length, count)) for start in range(0, count, length)]
