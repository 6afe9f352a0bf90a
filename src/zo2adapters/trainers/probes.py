"""Quick measurements from which plans predict seconds and bytes: one block runs on a batch, nothing
is loaded.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
import timeit
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from threading import Event
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch import nn

from zo2adapters.models.footprint import Masking
from zo2adapters.models.hf import Activations, HFBlockModel
from zo2adapters.models.routed_experts import routed_stacks
from zo2adapters.trainers.run_inputs import BatchShape
from zo2core import Batch, BlockLayout, BlockUpdate, HostDevice, SegmentKind
from zo2core.encodings.decoding import decode
from zo2core.errors import ZO2Error, ZO2Warning
from zo2core.optimizers.states import StateMemory
from zo2core.protocols import TensorReader, UpdateInputs
from zo2core.sources.segment_store import CHUNK
from zo2core.sweep.activations import flattened
from zo2core.sweep.gradient_visitor import (
    BlockGraph,
    KeptSize,
    tensor_ids,
)
from zo2core.types import aligned, flat_views, widened

_PROBED_PRODUCTS = 100_000_000_000  # most multiplications in a block's matrices per forward probe
# least number of probes; the fastest counts, since other programs can slow one down tenfold
_ROUNDS = 3
# seconds of all probes of a forward, unless so many take less
_PROBE_SECONDS, _MOST_ROUNDS = 1.0, 20
_UPDATED_ROWS = 1024  # and columns of the matrix that an optimizer is measured on
_UPDATE_ROUNDS = 4
_HEAD_TOKENS = 128  # most tokens whose logits are measured
_HASHED = 1 << 25  # bytes

P = ParamSpec("P")
R = TypeVar("R")
U = TypeVar("U")


def unless_it_fails(unknown: U) -> Callable[[Callable[P, R]], Callable[P, R | U]]:
    """A decorator of probes: where one fails, a plan lacks its number, and says so.

    A run is not refused for that. Its steps are computed otherwise than a probe is.

    Args:
        unknown: What stands for the number.
    """

    def decorate(probe: Callable[P, R]) -> Callable[P, R | U]:
        @wraps(probe)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | U:
            try:
                return probe(*args, **kwargs)
            except ZO2Error:
                raise
            except Exception as error:  # any: it runs the code of models and adapters
                lacks_memory = isinstance(error, MemoryError) or any(
                    words in str(error) for words in ("allocate memory", "bad_alloc")
                )
                if lacks_memory or isinstance(error.__context__, KeyboardInterrupt):
                    raise
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                note = f"not all of the plan is known, since a measurement failed ({text})"
                warnings.warn(note, ZO2Warning, stacklevel=2)
                return unknown

        return guarded

    return decorate


class SegmentPass:
    """A pass of one segment on rows of constants: what plans time and size.

    Args:
        model: The model, whose modules of this segment, embedding and head are bound to memory.
        index: The segment, a block or the head.
        tokens: Tokens of a row.
        rows: Number of rows.
        masking: What the batch masks.
        has_gradient: Whether the pass goes forward and backward.
    """

    def __init__(
        self,
        model: HFBlockModel,
        index: int,
        tokens: int,
        *,
        rows: int = 1,
        masking: Masking = Masking.NONE,
        has_gradient: bool = False,
    ) -> None:
        self._model = model
        self._index = index
        self.has_gradient = has_gradient
        self.leaves = dict(model.leaves(index))
        self.kept: list[KeptSize] = []  # by the graph of its last run, beside weights and input
        with torch.no_grad():
            activations, self._batch = embed_row(model, tokens, rows, masking)
        self._hidden = activations.hidden.detach().requires_grad_(has_gradient)
        self.activations = activations._replace(hidden=self._hidden)
        if has_gradient:
            trained = {
                spec.name
                for layout in model.layouts
                for spec in layout.parameters
                if not spec.frozen
            }
            for name, leaf in self.leaves.items():
                leaf.requires_grad_(name in trained)

    def run(self, *, of_weights: bool = True) -> None:
        """Run it, as in a step; backward with the gradients of weights or without."""
        if not self.has_gradient:
            with torch.inference_mode():
                self._forward()
            return
        # Without the recorded graph, autograd compares versions of the weights, which are one for
        # all views of their memory: any write to one of them would count as a change of all.
        graph = BlockGraph(self.leaves, [self._hidden])
        with torch.enable_grad(), graph.recorded(keep=True):
            output = self._forward()
        self.kept = graph.sizes()
        weights = [leaf for leaf in self.leaves.values() if leaf.requires_grad]
        wanted = [self._hidden, *(weights if of_weights else [])]
        torch.autograd.grad(output, wanted, torch.ones_like(output), allow_unused=True)

    def _forward(self) -> torch.Tensor:
        if self._index == len(self._model.layouts) - 1:
            return self._model.head(self._batch, self.activations)
        return self._model.block(self._index - 1, self.activations).hidden


@unless_it_fails(math.nan)
def measured_forward_seconds(
    model: HFBlockModel, shape: BatchShape, *, running: int | None = None, all_logits: bool = True
) -> float:
    """Measure the seconds of one forward: a block and the head run on a batch of this shape, or on
    a part of it.
    """
    block = _block_seconds(model, shape, running)
    return block + _head_seconds(model, _with_logits(model, shape, all_logits=all_logits))


class GradientSeconds(NamedTuple):
    """Seconds of the passes of a first-order step."""

    forward: float  # of all blocks
    both: float  # forward and backward, of all blocks and the head


@unless_it_fails(GradientSeconds(math.nan, math.nan))
def measured_gradient_seconds(
    model: HFBlockModel, shape: BatchShape, running: int | None
) -> GradientSeconds:
    """Measure forwards and backwards: a block and the head run on a batch of this shape, or on a
    part of it.
    """
    forward = _block_seconds(model, shape, running)
    both = _block_seconds(model, shape, running, has_gradient=True)
    head = _head_seconds(model, _with_logits(model, shape, all_logits=True), has_gradient=True)
    return GradientSeconds(forward, both + head)


def _block_seconds(
    model: HFBlockModel, shape: BatchShape, running: int | None, *, has_gradient: bool = False
) -> float:
    """Measure the seconds of all blocks: the first one runs on a batch of this shape, or on a part
    of it.
    """
    with evenly_routed(model):
        block, tokens = _block_pass(model, shape, running, has_gradient=has_gradient)
        seconds = _fastest(block.run)
    return seconds / tokens * shape.rows * shape.tokens * _blocks(model)


def _block_pass(
    model: HFBlockModel, shape: BatchShape, running: int | None, *, has_gradient: bool = False
) -> tuple[SegmentPass, int]:
    """A pass of the first block on a batch of this shape, or on a part of it, and its number of
    tokens.
    """
    shares = _routed(model)
    numel = sum(spec.numel * shares.get(spec.name, 1) for spec in model.layouts[1].parameters)
    bind(model)
    rows = min(shape.rows, running or shape.rows)
    tokens = max(round(shape.tokens), 1)
    rows = min(rows, max(int(_PROBED_PRODUCTS / (numel * tokens)), 1))
    tokens = min(tokens, max(int(_PROBED_PRODUCTS / (numel * rows)), 1))
    masking = masking_of(shape.masking, rows)
    block = SegmentPass(model, 1, tokens, rows=rows, masking=masking, has_gradient=has_gradient)
    return block, rows * tokens


@unless_it_fails(0.0)
def measured_reading_cost(model: HFBlockModel, shape: BatchShape, running: int | None) -> float:
    """Measure the seconds that a byte costs which is read while blocks are computed: reading takes
    time of the processor and of the memory, also where a disk is faster than what computes.
    """
    with evenly_routed(model), _Reading(model.weights, model.layouts[1]) as reading:
        block, _ = _block_pass(model, shape, running)
        rounds = max(_ROUNDS, min(int(_PROBE_SECONDS / _best(block.run, 1)), _MOST_ROUNDS))
        alone = timeit.timeit(block.run, number=rounds, timer=time.perf_counter)
        reading.start()
        beside = timeit.timeit(block.run, number=rounds, timer=time.perf_counter)
        nbytes = reading.stop()
    return max(beside - alone, 0.0) / max(nbytes, 1)


class _Reading:
    """Reads a block again and again on a thread of its own, between ``start`` and ``stop``."""

    def __init__(self, weights: TensorReader, layout: BlockLayout) -> None:
        self._weights = weights
        self._layout = layout
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zo2-plan")
        self._nbytes = 0
        self._has_ended = Event()
        self._reading: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._has_ended.set()
        self._thread.shutdown()

    def start(self) -> None:
        """Begin."""
        self._reading = self._thread.submit(self._read)

    def stop(self) -> int:
        """Stop after the present piece; returns the bytes that were read."""
        assert self._reading is not None
        self._has_ended.set()
        self._reading.result()
        return self._nbytes

    def _read(self) -> None:
        memory = HostDevice().host_memory(CHUNK)
        for spec in itertools.cycle(self._layout.parameters):
            length = CHUNK // spec.stored_dtype.itemsize
            for start in range(0, spec.stored_numel, length):
                count = min(length, spec.stored_numel - start)
                piece = memory[: count * spec.stored_dtype.itemsize].view(spec.stored_dtype)
                self._weights.read_into(spec.name, piece, start)
                self._nbytes += piece.nbytes
                if self._has_ended.is_set():
                    return


def _blocks(model: HFBlockModel) -> float:
    """All blocks, in units of the first one's parameters."""
    sizes = [
        sum(spec.numel for spec in layout.parameters)
        for layout in model.layouts
        if not layout.resident
    ]
    return sum(sizes) / sizes[0]


def _with_logits(model: HFBlockModel, shape: BatchShape, *, all_logits: bool) -> BatchShape:
    """The shape, with all its tokens as predictions if all have logits."""
    if model.loss_chunk is None and all_logits:
        return shape._replace(predictions=shape.rows * shape.tokens)
    return shape


def _head_seconds(model: HFBlockModel, shape: BatchShape, *, has_gradient: bool = False) -> float:
    """Measure the seconds of the head and the loss, on some of a batch's predictions. A head
    without a vocabulary takes next to none.
    """
    if model.chunk == 0:
        return 0.0
    last = len(model.layouts) - 1
    bind(model, last)
    numel = sum(spec.numel for spec in model.layouts[last].used)
    most = min(math.ceil(shape.predictions), model.chunk or _HEAD_TOKENS, _HEAD_TOKENS)
    most = max(min(most, _PROBED_PRODUCTS // numel), 1)
    in_row = max(min(most, round(shape.tokens) - 1), 1)
    rows = most // in_row
    # the last token of a row predicts nothing
    head = SegmentPass(model, last, in_row + 1, rows=rows, has_gradient=has_gradient)
    return _fastest(head.run) / (rows * in_row) * shape.predictions


@unless_it_fails(math.nan)
def measured_update_seconds(model: HFBlockModel, update: BlockUpdate) -> float:
    """Measure what an optimizer takes for a step of all segments, on one matrix in the dtype of the
    weights.
    """
    specs = [spec for layout in model.layouts for spec in layout.parameters]
    weight = torch.zeros(_UPDATED_ROWS, _UPDATED_ROWS, dtype=specs[0].dtype)
    gradient = widened(weight) if update.widens_gradients else weight
    probe = replace(specs[0], name="probe", shape=tuple(weight.shape))
    states = StateMemory(update, [BlockLayout("probe", SegmentKind.BLOCK, (probe,))]).of(0, ())
    steps = itertools.count()
    inputs = partial(UpdateInputs, 0, {"probe": weight}, {"probe": gradient}, states, lr=0.0)
    seconds = _best(lambda: update.apply(inputs(step=next(steps))), _UPDATE_ROUNDS)
    segments = [index for index, layout in enumerate(model.layouts) if layout.parameters]
    share = len(update.segments(0, segments)) / len(segments)
    return seconds * share * sum(spec.numel for spec in specs) / weight.numel()


def decoding_seconds(layouts: Sequence[BlockLayout]) -> float:
    """Seconds to decode all encoded matrices, measured on the largest one."""
    encoded = [
        spec for layout in layouts for spec in layout.parameters if spec.encoding is not None
    ]
    if not encoded:
        return 0.0
    largest = max(encoded, key=lambda spec: spec.numel)
    stored = torch.zeros(largest.nbytes, dtype=torch.uint8)
    out = torch.empty(largest.numel, dtype=largest.dtype)
    # the first one also touches the memory
    best = _best(lambda: decode(largest, stored, out), _ROUNDS)
    return best / largest.numel * sum(spec.numel for spec in encoded)


def hashing_speed() -> float:
    """Measure in how many bytes a second snapshots are checksummed."""
    content = bytes(_HASHED)
    return _HASHED / _best(lambda: hashlib.sha256(content).digest(), 1)


def hands_over_tensors(model: HFBlockModel) -> bool:
    """Whether a block hands tensors to later blocks beside its output, so that its gradient would
    be lost.

    Every block runs once on a row of two tokens; an engine binds the model's modules anew.
    """
    bind(model)
    with torch.no_grad():
        activations, _ = embed_row(model, 2)
        for index in range(1, len(model.layouts) - 1):
            bind(model, index)
            values, nesting = flattened(activations)
            ids_before = tensor_ids(values)
            activations = model.block(index - 1, activations)
            if flattened(activations)[1] != nesting or ids_before != tensor_ids(values):
                return True
    return False


def require_packable(model: HFBlockModel) -> None:
    """Refuse a model whose attention would not keep packed rows apart."""
    bind(model)
    ids = torch.ones(1, 4, dtype=torch.long)
    positions = torch.tensor([[0, 1, 0, 1]])
    model.prepared({"input_ids": ids, "labels": ids, "position_ids": positions})


def release_probe(model: HFBlockModel) -> None:
    """Free the memory that probes have bound, before an engine allocates its own."""
    for index in range(len(model.layouts)):
        specs = [spec.in_forward() for spec in model.layouts[index].used]
        model.bind(
            index,
            {spec.name: torch.empty(1, dtype=spec.dtype).expand(spec.shape) for spec in specs},
        )


def bind(model: HFBlockModel, block: int = 1) -> None:
    """Bind the modules of embedding, head and one block to memory, the block's filled with a
    constant.
    """
    for index in (0, block, len(model.layouts) - 1):
        specs = [spec.in_forward() for spec in model.layouts[index].used]
        memory = HostDevice().host_memory(sum(aligned(spec.nbytes) for spec in specs))
        views = zip(specs, flat_views(specs, memory), strict=True)
        model.bind(
            index,
            {
                spec.name: (view.fill_(0.01) if index == block else view).view(spec.shape)
                for spec, view in views
            },
        )


def embed_row(
    model: HFBlockModel, tokens: int, rows: int = 1, masking: Masking = Masking.NONE
) -> tuple[Activations, Batch]:
    """What the first block is given for rows of one token, and their batch.

    Each row is padded by a token, or sequences are packed in it, if there is something to mask.
    """
    ids = torch.ones(rows, tokens, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    if masking is Masking.SEQUENCES:
        length = min(-(-tokens // 2), model.longest_row or tokens)
        batch["position_ids"] = torch.arange(tokens).remainder(length).expand(rows, -1)
        return model.embed(model.prepared(batch)), batch
    batch["attention_mask"] = torch.ones_like(ids)
    if masking is Masking.PADDING:
        batch["attention_mask"][:, 1:][:, -1:] = 0
    return model.embed(batch), batch


def masking_of(masking: Masking, rows: int) -> Masking:
    """What a micro-batch of so many rows masks: one row is not padded."""
    return Masking.NONE if rows == 1 and masking is Masking.PADDING else masking


def _routed(model: HFBlockModel) -> dict[str, float]:
    """The share of each of the first block's stacks of experts that a token passes, by name."""
    per_token = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    places = {
        spec.name: (spec, *model.places_of(spec.name)[0][1:])
        for spec in model.layouts[1].parameters
    }
    routed = {*routed_stacks([module for _, module, _ in places.values()])}
    found = {
        name: spec for name, (spec, module, leaf) in places.items() if (module, leaf) in routed
    }
    return (
        {}
        if per_token is None
        else {name: per_token / spec.shape[0] for name, spec in found.items()}
    )


@contextmanager
def evenly_routed(model: HFBlockModel) -> Iterator[None]:
    """Route tokens of the first block to all experts in turn: a router of constant weights would
    choose the same few.
    """

    def turn(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, chosen, *others = arguments
        experts: Any = module.num_experts
        return hidden, torch.arange(chosen.numel()).view(chosen.shape) % experts, *others

    modules = {model.places_of(name)[0][1] for name in _routed(model)}
    hooks = [module.register_forward_pre_hook(turn) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs, as many as fit in a second."""
    seconds: list[float] = []
    while len(seconds) < _ROUNDS or sum(seconds) < min(_PROBE_SECONDS, _MOST_ROUNDS * seconds[0]):
        seconds.append(_best(run, 1))
    return min(seconds)


def _best(run: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of so many runs."""
    return min(timeit.repeat(run, repeat=rounds, number=1, timer=time.perf_counter))
