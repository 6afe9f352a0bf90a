"""What batches take beside the weights."""

from __future__ import annotations

from transformers import PretrainedConfig

from zo2core.sweep.activation_offload import ROOMS

_LOGIT_COPIES = 3  # in float32 beside the logits themselves: converted, shifted, log-softmax


def held_bytes(config: PretrainedConfig, rows: int, tokens: int) -> int:
    """Expected bytes that a batch holds from segment to segment: hidden state and, for padded rows, an attention mask."""
    return int(rows * tokens * (config.hidden_size * _itemsize(config) + tokens))


def forward_bytes(config: PretrainedConfig, rows: int, tokens: int, *, loss_chunk: int | None = None) -> int:
    """Expected peak of one segment's forward, beside what is held: of a block, or of the logits and the loss.

    Args:
        config: Of the model.
        rows: Of a batch, or of a micro-batch.
        tokens: Of a row.
        loss_chunk: Tokens whose logits are there at a time; None: all.
    """
    itemsize, hidden, places = _itemsize(config), config.hidden_size, rows * tokens
    feed_forward = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", 4 * hidden)
    block = places * (8 * hidden + 3 * feed_forward) * itemsize + places * tokens * itemsize
    logits = (places if loss_chunk is None else min(places, loss_chunk)) * config.vocab_size
    return int(max(block, logits * (itemsize + 4 * _LOGIT_COPIES)))


def activation_bytes(
    config: PretrainedConfig,
    rows: int,
    tokens: int,
    *,
    streams: int = 2,
    micro_rows: int | None = None,
    loss_chunk: int | None = None,
) -> int:
    """Expected peak of activations and logits of one sweep.

    Args:
        config: Of the model.
        rows: Of a batch.
        tokens: Of a row.
        streams: Evaluations of a step, or batches of an evaluation, whose activations are held at a time.
        micro_rows: Rows that run at a time; None: all of a batch.
        loss_chunk: Tokens whose logits are there at a time; None: all.
    """
    running = rows if micro_rows is None else min(rows, micro_rows)
    held = streams * held_bytes(config, rows, tokens)
    return held + forward_bytes(config, running, tokens, loss_chunk=loss_chunk)


def least_activation_bytes(
    config: PretrainedConfig, rows: int, tokens: int, *, micro_rows: int | None = None, loss_chunk: int | None = None
) -> int:
    """Expected peak of what a device holds of one sweep's activations and logits if all others wait in host memory.

    Args:
        config: Of the model.
        rows: Of a batch.
        tokens: Of a row.
        micro_rows: Rows that run at a time; None: all of a batch.
        loss_chunk: Tokens whose logits are there at a time; None: all.
    """
    running = rows if micro_rows is None else min(rows, micro_rows)
    return activation_bytes(config, running, tokens, streams=1 + ROOMS, loss_chunk=loss_chunk)


def cache_bytes(config: PretrainedConfig, rows: int, tokens: int) -> int:
    """Expected bytes of all layers' keys and values for so many tokens of so many rows."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return int(2 * config.num_hidden_layers * rows * tokens * width * _itemsize(config))


def _itemsize(config: PretrainedConfig) -> int:
    return int(getattr(getattr(config, "dtype", None), "itemsize", 4))
