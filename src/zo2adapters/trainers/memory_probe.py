"""How much memory the passes of a model's segments take, measured on short rows of constants.

A formula of the config's sizes cannot know it: experts, state-space layers and attention that
writes its scores take many times what a plain decoder takes. So what a pass allocates is counted,
at each moment, for two lengths of a row. The same operations run for both, and each moment's bytes
are ``a * tokens + b * tokens ** 2``, from which those of any batch follow.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zo2adapters.models.footprint import (
    BlockBytes,
    KeptGraph,
    Masking,
    PassBytes,
    PassPeaks,
    Rate,
)
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.token_loss import SMALL
from zo2adapters.trainers.probes import SegmentPass, bind, release_probe, unless_it_fails
from zo2core.sweep.activations import flattened

_MOST_TOKENS = 256  # of the longer row
_PRODUCTS = 20_000_000_000  # most multiplications in a block's matrices for the longer row
_LEAST_TOKENS = 8


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors in host memory: of those that are held and, while active, of
    results of operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0  # bytes
        self.moments: list[int] = []  # bytes after each operation
        self._sizes: dict[int, int] = {}  # bytes that count, by address

    def hold(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        """Count a tensor's storage until it is freed, once, or (with counts=False) never."""
        storage = tensor.untyped_storage()
        # A storage of the meta device has no address, but is one object as long as it lives.
        address = storage.data_ptr() or storage._cdata
        if storage.nbytes() == 0 or address in self._sizes:
            return
        self._sizes[address] = storage.nbytes() if counts else 0
        self.now += self._sizes[address]
        weakref.finalize(storage, self._forget, address)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count its results; inference mode passes composite operations
        whole.
        """
        with self:
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type in ("cpu", "meta"):
                self.hold(tensor)
        self.moments.append(self.now)
        return out

    def _forget(self, address: int) -> None:
        self.now -= self._sizes.pop(address)


@unless_it_fails(None)
def measured_bytes(
    model: HFBlockModel, longest: int, masking: Masking, *, has_gradient: bool
) -> PassPeaks:
    """Measure the passes of a model, whose longest row has so many tokens.

    None if a pass fails on rows of constants, which no step runs: the plan then has its formula.
    """
    numel = max(sum(spec.numel for spec in layout.parameters) for layout in model.layouts[1:-1])
    tokens = max(min(longest, _MOST_TOKENS, _PRODUCTS // max(numel, 1)), _LEAST_TOKENS)
    lengths = (tokens // 2, tokens)
    try:
        forward = _of_passes(model, lengths, longest, masking, has_gradient=False)
        both = None
        if has_gradient:
            both = _of_passes(model, lengths, longest, masking, has_gradient=True)
    finally:
        release_probe(model)
    return PassPeaks(forward, both, masking)


# tokens of a shorter and of a longer row
_Lengths: TypeAlias = tuple[int, int]


def _of_passes(
    model: HFBlockModel, lengths: _Lengths, longest: int, masking: Masking, *, has_gradient: bool
) -> PassBytes:
    """Measure one block of each kind, and the head, on a shorter and a longer row."""
    padded_block = block = _of_blocks(model, lengths, masking, has_gradient=has_gradient)
    if masking is Masking.PADDING:
        block = _of_blocks(model, lengths, Masking.NONE, has_gradient=has_gradient)
    if model.chunk == 0:  # a head without a vocabulary
        return PassBytes(block, padded_block, [])
    head = _of_head(model, max(lengths), longest, has_gradient=has_gradient)
    return PassBytes(block, padded_block, head)


def _of_head(model: HFBlockModel, tokens: int, longest: int, *, has_gradient: bool) -> list[Rate]:
    """Measure the head on a shorter and a longer row, whose logits are one chunk.

    Where the longest row has so many logits that its loss is computed in the cache, that of both
    rows is, too. Fewer logits take at most what three times as many take so.
    """
    last = len(model.layouts) - 1
    bind(model)
    words = getattr(model.config.get_text_config(), "vocab_size", 1)
    if longest * words >= 3 * SMALL:
        tokens = max(tokens, min(longest, 2 * (SMALL // words + 2)))
    chunk = model.loss_chunk
    if chunk is not None:
        tokens = min(tokens, max(chunk + 1, _LEAST_TOKENS))
        model.loss_chunk = max(chunk, tokens)
    passes = (
        SegmentPass(model, last, length, has_gradient=has_gradient)
        for length in (tokens // 2, tokens)
    )
    try:
        few, many = (_moments(model, one) for one in passes)
    finally:
        model.loss_chunk = chunk
    # the last token of a row predicts nothing
    return _rates([(tokens // 2 - 1, few), (tokens - 1, many)])


def _of_blocks(
    model: HFBlockModel, lengths: _Lengths, masking: Masking, *, has_gradient: bool
) -> BlockBytes:
    """Measure one block of each kind, on a shorter and a longer row."""
    rates = list[Rate]()
    graph = None
    for index in _one_of_each_kind(model):
        bind(model, index)
        few, many = (
            SegmentPass(model, index, length, masking=masking, has_gradient=has_gradient)
            for length in lengths
        )
        moments = [_moments(model, one) for one in (few, many)]
        rates += _rates(list(zip(lengths, moments, strict=True)))
        if has_gradient and graph is None:
            graph = KeptGraph.of(lengths, few.kept, many.kept)
    return BlockBytes(rates, graph)


def _one_of_each_kind(model: HFBlockModel) -> list[int]:
    """The first segment of each kind of block, as names and shapes of its parameters tell."""
    kinds: dict[object, int] = {}
    for index, layout in enumerate(model.layouts[1:-1], 1):
        names = [spec.name.partition(f".{index - 1}.")[2] for spec in layout.parameters]
        shapes = [spec.shape for spec in layout.parameters]
        kinds.setdefault((*names, *shapes), index)
    return list(kinds.values())


def _rates(taken: Sequence[tuple[int, Sequence[int]]]) -> list[Rate]:
    """The bytes for each token, and for each pair of tokens, at each moment; of all moments, those
    that are the largest for a row of some length.

    Where a length does not decide the number of operations, peaks stand for all moments. What grows
    by less than the tokens, as memory in chunks of a fixed length, is taken to grow with them.
    """
    (few, of_few), (many, of_many) = taken
    if len(of_few) != len(of_many):
        of_few = [max(of_few)]
        of_many = [max(of_many)]
    rates = set[Rate]()
    for first, second in zip(of_few, of_many, strict=True):
        pair = max((second / many - first / few) / (many - few), 0.0)
        rates.add((second / many - pair * many, pair))
    lengths = [many * 2**doubled for doubled in range(-8, 17)]
    return list({max(rates, key=lambda rate: rate[0] + rate[1] * n) for n in lengths})


def _moments(model: HFBlockModel, segment: SegmentPass) -> list[int]:
    """The bytes at each moment of a segment's pass, without weights and their gradients, which a
    plan counts apart.
    """
    buffers = [buffer for buffer in model.skeleton.buffers() if not buffer.is_meta]
    values, _ = flattened(segment.activations)
    known = [value for value in values if isinstance(value, torch.Tensor)]
    allocations = Allocations()
    for tensor in (*segment.leaves.values(), *buffers, *known):
        allocations.hold(tensor, counts=False)
    with allocations:
        segment.run(of_weights=False)
    return allocations.moments
