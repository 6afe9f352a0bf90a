"""Estimates of the memory that batches take beside the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from transformers import PretrainedConfig

from zo2adapters.models.batches import are_routers_asked_for
from zo2core.sweep.gradient_visitor import (
    GRAPH_FORWARDS,
    HEAP_EXPECTED,
    KeptSize,
    graph_memory,
)

POSITION_BYTES = 8  # bytes of a token's position, int64
# bytes of a logit in float32, the dtype of Hugging Face's losses and their log-softmax
_FLOAT_BYTES = 4


def expected_held_bytes(
    config: PretrainedConfig,
    rows: int,
    tokens: int,
    *,
    keys: int | None = None,
    is_padded: bool = True,
    position_rows: int | None = None,
) -> int:
    """Expected bytes that a batch holds from segment to segment: hidden state, attention masks,
    positions and rotations.
    """
    config = config.get_text_config()
    keys = tokens if keys is None else keys
    itemsize = _itemsize(config)
    per_layer = _largest(config, "hidden_size_per_layer_input") * _largest(
        config, "num_hidden_layers"
    )
    hidden = rows * tokens * (_copies(config) * config.hidden_size + per_layer) * itemsize
    masks = rows * tokens * keys * _masks(config, keys, is_padded=is_padded)
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        return int(hidden + masks + rows * tokens * POSITION_BYTES)
    # each kind of layer may have a table
    tables = max(sum(isinstance(table, dict) for table in rope.values()), 1)
    # cosines and sines, shared by rows without positions of their own
    rotation = 2 * tables * _head_size(config) * itemsize
    return int(hidden + masks + (position_rows or 1) * tokens * (rotation + POSITION_BYTES))


class Masking(Enum):
    """What a batch's attention masks beside the tokens that come later."""

    NONE = "none"
    PADDING = "padding"  # of rows that are shorter than others
    SEQUENCES = "sequences"  # of one row that are packed


# Bytes for each token, and for each pair of tokens of a row, at one moment of a pass.
Rate: TypeAlias = tuple[float, float]


class KeptGraph(NamedTuple):
    """What the graph of a block's forward keeps, measured on a shorter and a longer row."""

    lengths: tuple[int, int]  # tokens of the rows
    sizes: Sequence[tuple[KeptSize, KeptSize]]  # of each activation, for both rows

    @classmethod
    def of(cls, lengths: tuple[int, int], few: list[KeptSize], many: list[KeptSize]) -> Self:
        """The graph, of whose activations some may exist for the longer row alone."""
        if len(few) != len(many):
            share = lengths[0] / lengths[1]
            few = [size._replace(nbytes=size.nbytes * share) for size in many]
        return cls(lengths, list(zip(few, many, strict=True)))

    def of_rows(self, rows: int, tokens: int) -> list[KeptSize]:
        """Expected activations, which grow with the tokens of a row, or with their pairs."""
        few, many = self.lengths
        expected = []
        for of_few, of_many in self.sizes:
            pair = max((of_many.nbytes / many - of_few.nbytes / few) / (many - few), 0.0)
            token = of_many.nbytes / many - pair * many
            nbytes = rows * tokens * (token + pair * tokens)
            expected.append(of_many._replace(nbytes=nbytes))
        return expected


class BlockBytes(NamedTuple):
    """What the passes of blocks take."""

    rates: Sequence[Rate]
    graph: KeptGraph | None  # of the first block; None: passes only go forward


class PassBytes(NamedTuple):
    """The peaks of the passes of blocks and head, beyond what is held, measured on short rows."""

    block: BlockBytes
    padded_block: BlockBytes  # of several rows, some of which are padded
    head: Sequence[Rate]  # whose tokens all have logits; empty without a vocabulary

    @property
    def all_rates(self) -> list[Sequence[Rate]]:
        """The rates of blocks, of blocks with padded rows, and of the head."""
        return [self.block.rates, self.padded_block.rates, self.head]

    def of_block(self, rows: int, tokens: int) -> float:
        """Expected peak of a block's pass."""
        rates = self._of(rows).rates
        return rows * tokens * max(token + pair * tokens for token, pair in rates)

    def of_graphs(self, micro_batches: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """What a block's graphs keep for micro-batches of so many rows and tokens: at most, and as
        expected.
        """
        sizes = list[KeptSize]()
        for rows, tokens in micro_batches:
            graph = self._of(rows).graph
            assert graph is not None, "passes were measured forward and backward"
            sizes += graph.of_rows(rows, tokens)
        return graph_memory(sizes), graph_memory(sizes, HEAP_EXPECTED)

    def _of(self, rows: int) -> BlockBytes:
        return self.block if rows == 1 else self.padded_block

    def of_head(self, rows: int, tokens: int) -> float:
        """Expected peak of the head's pass for rows of so many tokens, all of which have logits."""
        return rows * tokens * max((token + pair * tokens for token, pair in self.head), default=0)


class PassPeaks(NamedTuple):
    """The peaks of a model's passes."""

    forward: PassBytes
    both: PassBytes | None  # forward and backward; None: not measured
    masking: Masking = Masking.NONE  # of the batches for which they were measured

    def of_forwards(self, rates: Sequence[Sequence[Rate]]) -> Self:
        """The same with other ``PassBytes.all_rates`` of forwards."""
        block, padded_block, head = rates
        forward = PassBytes(
            self.forward.block._replace(rates=block),
            self.forward.padded_block._replace(rates=padded_block),
            head,
        )
        return self._replace(forward=forward)


def agreed_peaks(peaks: PassPeaks | None, gather: Callable[[Any], list[Any]]) -> PassPeaks | None:
    """The peaks of forwards on that of several machines on which a batch takes most; None if one of
    them has not measured any.

    Args:
        peaks: Those of this machine.
        gather: See ``MeasuredModel``.
    """
    gathered = gather(None if peaks is None else peaks.forward.all_rates)
    if peaks is None or None in gathered:
        return None
    return peaks.of_forwards(
        [
            sorted({(token, pair) for rates in of_pass for token, pair in rates})
            for of_pass in zip(*gathered, strict=True)
        ]
    )


def forward_bytes(
    config: PretrainedConfig,
    rows: int,
    tokens: int,
    *,
    loss_chunk: int | None = None,
    loss_rows: int | None = None,
    measured: PassBytes | None = None,
) -> int:
    """Expected peak of one segment's pass, beyond what is held: a block's, or that of logits and
    loss.

    It is that of a forward, by a formula, or of the pass that was ``measured``.
    """
    config = config.get_text_config()
    positions = rows * tokens
    logits = positions if loss_chunk is None else min(positions, loss_chunk)
    in_loss = logits if loss_rows is None else min(logits, loss_rows * tokens)
    of_logits = _itemsize(config) * int(config.vocab_size)
    block: float
    if measured is not None:
        block = measured.of_block(rows, tokens)
        # a chunk's tokens are rows of one token
        shape = (rows, tokens) if logits == positions else (logits, 1)
        loss = max(measured.of_head(*shape) - logits * of_logits, 0) / max(logits, 1)
    else:
        block = _block_bytes(config, rows, tokens)
        # chunks are of mixed precision, too
        is_converted = _itemsize(config) != _FLOAT_BYTES or loss_chunk is not None
        loss = _FLOAT_BYTES * (2 if is_converted else 1) * int(config.vocab_size)
    routed = router_bytes(config, positions) if are_routers_asked_for(config) else 0
    return math.ceil(max(block, logits * of_logits + in_loss * loss)) + routed


def backward_bytes(
    config: PretrainedConfig,
    rows: int,
    tokens: int,
    *,
    loss_chunk: int | None = None,
    measured: PassPeaks | None = None,
) -> int:
    """Expected peak of one segment's forward and backward, beyond what is held."""
    if measured is None or measured.both is None:
        forward = forward_bytes(config, rows, tokens, loss_chunk=loss_chunk)
        return math.ceil(GRAPH_FORWARDS * forward)
    return forward_bytes(config, rows, tokens, loss_chunk=loss_chunk, measured=measured.both)


def _block_bytes(config: PretrainedConfig, rows: int, tokens: int) -> int:
    """Expected peak of a block's forward, by a formula."""
    hidden = config.hidden_size
    feed_forward = (
        _largest(config, "intermediate_size") or _largest(config, "ffn_dim") or 4 * hidden
    )
    of_token = 4 * (1 + _copies(config)) * hidden + 3 * feed_forward + tokens
    return int(rows * tokens * of_token * _itemsize(config))


def router_bytes(config: PretrainedConfig, tokens: int) -> int:
    """Expected bytes of the logits of all routers for so many tokens, with their gradients."""
    config = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = max(_largest(config, name) for name in names)
    return int(2 * tokens * experts * config.num_hidden_layers * _FLOAT_BYTES)


def loss_bytes(config: PretrainedConfig, tokens: int) -> int:
    """Expected peak of logits and loss of so many tokens, with their gradients."""
    config = config.get_text_config()
    return int(tokens * int(config.vocab_size) * (2 * _itemsize(config) + 3 * _FLOAT_BYTES))


def vision_bytes(config: PretrainedConfig, images: torch.Tensor) -> int:
    """Expected peak of a vision tower's forward."""
    tower = config.vision_config
    # Qwen2-VL's hidden_size is that of the language model
    hidden = getattr(tower, "embed_dim", tower.hidden_size)
    patches = len(images)
    if images.dim() > 2:
        sides = tower.patch_size
        area = math.prod(sides) if isinstance(sides, (list, tuple)) else sides**2
        patches = images.numel() // (getattr(tower, "num_channels", 3) * area)
    feed_forward = _largest(tower, "intermediate_size")
    feed_forward = feed_forward or getattr(tower, "mlp_ratio", 4) * hidden
    return int(images.nbytes + patches * (8 * hidden + 3 * feed_forward) * _itemsize(config))


def activation_bytes(
    config: PretrainedConfig,
    rows: int,
    tokens: int,
    *,
    streams: int = 2,
    micro_rows: int | None = None,
    measured: PassBytes | None = None,
) -> int:
    """Expected peak of activations and logits of one sweep, all of whose tokens have logits."""
    running = rows if micro_rows is None else min(rows, micro_rows)
    whole, rest = divmod(rows, running)
    held = whole * expected_held_bytes(config, running, tokens)
    held += expected_held_bytes(config, rest, tokens) if rest else 0
    return streams * held + forward_bytes(config, running, tokens, measured=measured)


def cache_bytes(config: PretrainedConfig, rows: int, tokens: int) -> int:
    """Expected bytes of all layers' keys and values for so many tokens of so many rows."""
    config = config.get_text_config()
    heads = _largest(config, "num_key_value_heads") or _largest(config, "num_attention_heads")
    of_layer = 2 * heads * _head_size(config) if heads else 0  # without attention there are none
    return int(config.num_hidden_layers * rows * tokens * of_layer * _itemsize(config))


def _masks(config: PretrainedConfig, keys: int, *, is_padded: bool) -> int:
    """Bytes of all attention masks for one pair of tokens: each kind of layer may need a mask."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = {
        kind for kind in kinds if kind != "full_attention" and (window is None or keys > window)
    }
    if getattr(config, "_attn_implementation", None) == "eager":
        # adds its mask to the scores, with or without padding
        return len(kinds) * _itemsize(config)
    return len(kinds if is_padded else windowed)


def _copies(config: PretrainedConfig) -> int:
    """Number of hidden-size vectors in a token's hidden state: Gemma 3n and DeepSeek-V4 have
    several.
    """
    return _largest(config, "altup_num_inputs") or _largest(config, "hc_mult") or 1


def _head_size(config: PretrainedConfig) -> int:
    return _largest(config, "head_dim") or config.hidden_size // _largest(
        config, "num_attention_heads"
    )


def _largest(config: PretrainedConfig, name: str) -> int:
    """A size in the config, the largest if layers differ; 0 if the config has none."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # raised by configs whose layers differ
        value = [getattr(layer, name, None) for layer in config.per_layer_config]
    sizes = value if isinstance(value, (list, tuple)) else [value]
    return max((int(size) for size in sizes if size is not None), default=0)


def _itemsize(config: PretrainedConfig) -> int:
    return int(getattr(getattr(config, "dtype", None), "itemsize", 4))
