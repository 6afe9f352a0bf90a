"""What a batch takes beside the weights."""

from __future__ import annotations

from transformers import PretrainedConfig

_LOGIT_COPIES = 3  # in float32 beside the logits themselves: converted, shifted, log-softmax


def activation_bytes(config: PretrainedConfig, rows: int, tokens: int, *, streams: int = 2) -> int:
    """Expected peak of activations and logits of one sweep.

    Args:
        config: Of the model.
        rows: Of a batch.
        tokens: Of a row.
        streams: Evaluations or batches whose hidden states are held at a time.
    """
    itemsize = getattr(getattr(config, "dtype", None), "itemsize", 4)
    hidden = config.hidden_size
    feed_forward = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", 4 * hidden)
    places = rows * tokens
    held = streams * places * hidden * itemsize
    block = places * (8 * hidden + 3 * feed_forward) * itemsize + rows * tokens * tokens * itemsize
    logits = places * config.vocab_size * (itemsize + 4 * _LOGIT_COPIES)
    return int(held + max(block, logits))
