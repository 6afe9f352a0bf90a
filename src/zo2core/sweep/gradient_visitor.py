"""Gradients computed segment by segment: a forward pass that keeps each segment's input, then a backward pass.

In the backward pass a segment's forward runs again from its kept input, and restores what its graph needs.
``torch.autograd`` computes the gradients of its trained parameters and of its input; the previous segment continues from the
latter. The bits are those of autograd on the whole model: the same operations run on the same numbers, and gradients are
added in the same order. This is gradient checkpointing (Chen et al., arXiv 1604.06174) with one checkpoint per segment, over
blocks that are in memory one at a time. As many of the last blocks as memory allows keep their activations, and need no
second forward. Inputs for which there is no room leave memory in between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from zo2core.errors import OptionError
from zo2core.io.process_memory import resident_memory, return_freed_memory
from zo2core.profiling import Timeline
from zo2core.protocols import Activations, Forward, Store, Streams
from zo2core.sweep.activations import KeptActivations, Use, flattened, storages_of
from zo2core.sweep.block_graph import BlockGraph
from zo2core.sweep.trained import PresentWeights
from zo2core.types import Batch, BlockLayout, Lane

# Memory of a segment's forward and backward, in multiples of its forward's. Measured: 0.5 to 1.6 for blocks of OPT and
# Llama; 1.2 for a head in 16 bits and 1.5 in float32, whose loss has three float32 copies of the logits.
GRAPH_FORWARDS = 1.5
PASSING = 3  # what is in memory of a micro-batch at a block: its input, its output, and a gradient


def gradient_bytes(held: int, running: int, kept: int) -> int:
    """Memory of a sweep forward and backward."""
    return (PASSING + kept) * held + math.ceil(GRAPH_FORWARDS * running)


class Group(NamedTuple):
    """Micro-batches that pass the blocks together."""

    start: int
    stop: int
    kept_bytes: int  # memory for inputs and graphs that blocks keep


def divided(forward: Forward, batches: Sequence[Batch], allowed: int, *, together: bool) -> Iterator[Group]:
    """Divide micro-batches into groups, in order, for so much memory, which a single one may exceed."""
    start, held, running = 0, 0, 0
    for index, batch in enumerate(batches):
        nbytes, forward_bytes = forward.held_bytes(batch), forward.forward_bytes(batch)
        needed = gradient_bytes(held + nbytes, max(running, forward_bytes), 0)
        if index > start and needed > allowed and not together:
            yield Group(start, index, max(allowed - gradient_bytes(held, running, 0), 0))
            start, held, running = index, 0, 0
        held += nbytes
        running = max(running, forward_bytes)
    yield Group(start, len(batches), max(allowed - gradient_bytes(held, running, 0), 0))


def make_room(limit: int | None, nbytes: int) -> None:
    """Return freed memory to the system, if the process would exceed its limit with so many bytes more.

    An allocator keeps what is freed, since the next activations are as large. It keeps more than was ever in use at a time:
    inputs that stay lie between activations that go, and blocks aligned for vector instructions are seldom reused whole.
    """
    if limit is not None and resident_memory() + nbytes > limit:
        return_freed_memory()


class GraphRoom:
    """The memory for the graphs of a sweep's last blocks, for all of its streams."""

    def __init__(self, nbytes: int, sizes: Sequence[int]) -> None:
        self._left = nbytes
        self._sizes = sizes
        self._largest = 0.0  # bytes of a block's graph for each unit of size, the most so far

    def has_room(self, stream: int, blocks: int) -> bool:
        """Whether the graph of a forward that runs next fits beside those of all later blocks, for all streams."""
        sizes = (blocks - 1) * sum(self._sizes) + sum(self._sizes[stream:])
        return sizes * self._largest <= self._left

    def take(self, graph: BlockGraph, stream: int, blocks: int) -> None:
        """Take the memory of a graph whose forward ran, or drop its activations if it proves too large."""
        nbytes = graph.memory()
        self._largest = max(self._largest, nbytes / max(self._sizes[stream], 1))
        if self.has_room(stream, blocks):
            self._left -= nbytes
        else:
            graph.drop()


class _SegmentInput:
    """The input of a segment: the output of the one before, without its graph."""

    def __init__(self, values: Sequence[Any], nesting: TreeSpec, differentiable: Collection[int]) -> None:
        self.values = values  # the flattened activations, detached
        self.nesting = nesting
        self.differentiable = frozenset(differentiable)  # indices of the values through which gradients flow

    def with_leaves(self) -> tuple[Activations, dict[int, torch.Tensor]]:
        """Return the activations with leaves of a new graph where gradients flow, and these leaves by index."""
        leaves = {index: self.values[index].detach().requires_grad_() for index in sorted(self.differentiable)}
        values = [leaves.get(index, value) for index, value in enumerate(self.values)]
        return tree_unflatten(values, self.nesting), leaves

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """The storages of the values through which gradients flow, by address."""
        return storages_of(self.values[index] for index in self.differentiable)


class _Pass(NamedTuple):
    """The forward of a segment for one micro-batch, until its backward pass."""

    forward: Callable[[], object]  # runs it again
    graph: BlockGraph
    outputs: Sequence[Any]  # flattened, connected to the graph
    inputs: Mapping[int, torch.Tensor]  # leaves of the graph, by their index in the flattened input


class _Stream:
    """The state of a micro-batch in a sweep."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.next_input: _SegmentInput  # of the segment that is visited next; the embedding has none
        self.passes: dict[int, _Pass] = {}  # by segment
        self.gradients: Mapping[int, torch.Tensor] = {}  # of the input of the last visited segment, by index of the value


@dataclass(frozen=True, kw_only=True)
class GradientVisits:
    """The objects that all sweeps of first-order steps share."""

    layouts: Sequence[BlockLayout]  # in visiting order
    present: PresentWeights  # loads weights into the work buffer, and accumulates gradients
    leaves: Sequence[Mapping[str, torch.Tensor]]  # for each segment, its modules' trained parameters by name
    weights: Sequence[Mapping[str, torch.Tensor]]  # for each segment, its modules' weights since its last visit, by name
    inputs: KeptActivations[torch.UntypedStorage]
    limit: int | None  # resident bytes of the process; None: no limit
    streams: Streams
    timeline: Timeline


class GradientVisitor:
    """Visits the segments once forward and once backward, and adds gradients to the trained parameters."""

    seeds: Collection[int] = ()  # nothing is drawn

    def __init__(
        self,
        visits: GradientVisits,
        forward: Forward,
        batches: Sequence[Batch],
        *,
        weights: Sequence[float] | None,
        joint_loss: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        kept_bytes: int,
        loss_scale: float = 1.0,
    ) -> None:
        self._visits, self._trained = visits, visits.present.trained
        self._forward, self._weights, self._joint_loss, self._loss_scale = forward, weights, joint_loss, loss_scale
        self._streams = [_Stream(batch) for batch in batches]
        self._trained.begin_sweep()
        sizes = [forward.held_bytes(batch) for batch in batches]
        visits.inputs.room = min((len(visits.layouts) - 2) * sum(sizes), kept_bytes)
        self._room = GraphRoom(kept_bytes - visits.inputs.room, sizes)
        self._running = gradient_bytes(0, max(map(forward.forward_bytes, batches), default=0), 0)  # of a backward, at most
        uses = Counter(name for leaves in self._visits.leaves for name in leaves)
        self._tied = {name for name, count in uses.items() if count > 1}
        self._tied_sums: dict[tuple[str, int], torch.Tensor] = {}  # by name and stream, in autograd's order: head first
        self._head = len(self._visits.layouts) - 1
        self._first = next(index for index, leaves in enumerate(self._visits.leaves) if leaves)  # the first with a gradient
        self._last = min(self._first, *self._trained.updated, self._head)  # the last of the backward pass
        self._is_backward = False
        self._stores: dict[int, Store] = {}
        self.outputs: list[list[torch.Tensor]] = [[]]  # outputs of the head, one per micro-batch

    @property
    def order(self) -> Sequence[int]:
        """All segments, then back to the first one that has a gradient or is updated."""
        return [*range(self._head + 1), *range(self._head - 1, self._last - 1, -1)]

    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Run a segment's forwards, or compute its gradients in the backward pass. See the contract."""
        version = self.replay(index, store, version)
        self._is_backward |= index == self._head
        if not self._is_backward:
            commit(version)
            self._run(index)
            return
        try:
            self._run(index)
            if index == self._last:
                self._add_tied_gradients()
            self._trained.complete(index)
        except BaseException:
            commit(version)  # nothing was changed
            raise
        started = self._visits.streams.mark()
        updated = self._trained.update(index, store, version)
        if updated != version:
            self._visits.timeline.note(Lane.REPLAY, self._visits.layouts[index].name, started, self._visits.streams.mark())
        commit(updated)

    def _run(self, index: int) -> None:
        """Run a segment's forwards, or compute its gradients in the backward pass."""
        visits, layout = self._visits, self._visits.layouts[index]
        started = visits.streams.mark()
        with torch.no_grad():
            visits.present.load_frozen(index, self._stores)
            visits.present.perturb(index, self._stores, 0)
        make_room(visits.limit, self._running if index == self._head else 0)  # logits are the largest of all
        if index == self._head:
            self._run_head()
        elif not self._is_backward:
            self._run_forwards(index)
        elif index >= self._first:
            self._run_backward(index)
        visits.timeline.note(Lane.EVALUATE, layout.name, started, visits.streams.mark(), track=0)
        if not layout.resident:
            del self._stores[index]

    @torch.no_grad()
    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the present version. See the contract."""
        self._stores[index] = store
        return self._visits.present.replay(index, self._stores, version)

    def finish(self) -> None:
        """Free inputs, graphs and sums, however the sweep ended."""
        self._visits.inputs.clear()
        self._streams.clear()
        self._tied_sums.clear()
        make_room(self._visits.limit, self._running)

    def _run_forwards(self, index: int) -> None:
        """Run a segment's forward for each micro-batch, and keep the next segment's input.

        A graph is made even where its activations are not kept: torch chooses kernels by whether their inputs require
        gradients, and some kernels round differently from those that it uses without a graph.
        """
        for number, stream in enumerate(self._streams):
            outputs, nesting = self._run_embedding(stream) if index == 0 else self._run_block(index, number, stream)
            differentiable = {
                i for i, value in enumerate(outputs) if isinstance(value, torch.Tensor) and value.requires_grad
            }
            values = [value.detach() if i in differentiable else value for i, value in enumerate(outputs)]
            segment_input = stream.next_input if index > 0 else None
            stream.next_input = _SegmentInput(values, nesting, differentiable)
            if segment_input is not None and index >= self._first:
                needed = storages_of(outputs)  # what later blocks get as well stays
                own = [storage for address, storage in segment_input.storages().items() if address not in needed]
                self._visits.inputs.put(Use(-index, number), own)

    def _run_embedding(self, stream: _Stream) -> tuple[list[Any], TreeSpec]:
        """Run the embedding's forward for one micro-batch. Its activations are not kept: it is cheap to run again."""
        forward = partial(self._forward.embed, stream.batch)
        graph = BlockGraph(self._visits.weights[0], ())
        with torch.enable_grad(), graph.recorded(keep=False):
            outputs, nesting = flattened(forward())
        if self._first == 0:
            stream.passes[0] = _Pass(forward, graph, outputs, {})
        return outputs, nesting

    def _run_block(self, index: int, number: int, stream: _Stream) -> tuple[list[Any], TreeSpec]:
        """Run a block's forward for one micro-batch, and keep its activations if there is room for them."""
        segment_input = stream.next_input
        before = [tensor_ids(value) for value in segment_input.values]
        activations, inputs = segment_input.with_leaves()
        blocks = self._head - index
        keep = index >= self._first and self._room.has_room(number, blocks)
        tensors = [value for value in segment_input.values if isinstance(value, torch.Tensor)]
        forward = partial(self._forward.block, index - 1, activations)
        graph = BlockGraph(self._visits.weights[index], tensors)
        with torch.enable_grad(), graph.recorded(keep=keep):
            outputs, nesting = flattened(forward())
        self._require_unchanged(index, segment_input, nesting, before)
        if keep:
            self._room.take(graph, number, blocks)
        if index >= self._first:
            stream.passes[index] = _Pass(forward, graph, outputs, inputs)
        return outputs, nesting

    def _run_head(self) -> None:
        """Run the head for each micro-batch, and start the backward pass from the step's loss."""
        self._visits.inputs.end_departures()
        graphs = []
        for number, stream in enumerate(self._streams):
            activations, inputs = stream.next_input.with_leaves()
            del stream.next_input
            with torch.enable_grad():
                output = self._forward.head(stream.batch, activations)
            _require_gradient(output)
            self.outputs[0].append(output.detach())
            if self._weights is None:
                graphs.append((number, stream, inputs, output))
            else:
                gradient = torch.full_like(output, self._weights[number] * self._loss_scale)
                self._add_gradients(self._head, number, stream, inputs, [output], [gradient])
        if graphs:
            outputs = [output.detach().requires_grad_() for *_, output in graphs]
            with torch.enable_grad():
                loss = self._joint_loss(outputs)
            _require_gradient(loss)
            gradients = torch.autograd.grad(loss, outputs, torch.full_like(loss, self._loss_scale))
            for (number, stream, inputs, output), gradient in zip(graphs, gradients, strict=True):
                self._add_gradients(self._head, number, stream, inputs, [output], [gradient])

    def _run_backward(self, index: int) -> None:
        """Compute a segment's gradients, from activations that were kept or that its forward restores."""
        for number, stream in enumerate(self._streams):
            if index > 0:
                self._visits.inputs.take(Use(-index, number))
            forward, graph, outputs, inputs = stream.passes.pop(index)
            graph.restore(forward)
            reached = [outputs[i] for i in stream.gradients]
            self._add_gradients(index, number, stream, inputs, reached, list(stream.gradients.values()))

    def _add_gradients(
        self,
        index: int,
        number: int,
        stream: _Stream,
        inputs: Mapping[int, torch.Tensor],
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Compute one micro-batch's gradients of a segment's inputs and trained parameters, and add the latter."""
        leaves = self._visits.leaves[index]
        sources = [*inputs.values(), *leaves.values()]
        if not sources:
            stream.gradients = {}
            return
        computed: Sequence[torch.Tensor | None] = torch.autograd.grad(outputs, sources, gradients, allow_unused=True)
        of_inputs = zip(inputs, computed[: len(inputs)], strict=True)
        stream.gradients = {i: gradient for i, gradient in of_inputs if gradient is not None}
        for name, gradient in zip(leaves, computed[len(inputs) :], strict=True):
            if gradient is None:
                continue
            if name not in self._tied:
                self._trained.add_gradient(name, gradient)
            elif (key := (name, number)) in self._tied_sums:
                self._tied_sums[key] = self._tied_sums[key] + gradient
            else:
                self._tied_sums[key] = gradient

    def _add_tied_gradients(self) -> None:
        """Add the summed gradients of tied parameters, one micro-batch after the other, as a plain loop does."""
        for number in range(len(self._streams)):
            for name in self._trained.forms:
                if (name, number) in self._tied_sums:
                    self._trained.add_gradient(name, self._tied_sums.pop((name, number)))

    def _require_unchanged(
        self, index: int, segment_input: _SegmentInput, nesting: TreeSpec, before: Sequence[object]
    ) -> None:
        """Refuse a block that passes tensors to later blocks other than by its output: their gradients would be lost."""
        if nesting != segment_input.nesting or before != [tensor_ids(value) for value in segment_input.values]:
            raise OptionError(
                "model",
                found=f"{self._visits.layouts[index].name}, which passes tensors to later blocks besides its output",
                expected="blocks that are connected by their outputs alone",
                remedy="train this model by ZerothOrder, whose steps need no gradient",
            )


def tensor_ids(value: object) -> object:
    """Identify the tensors in another library's object, to see whether a block has changed which ones it holds."""
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, str | int | float):
        return None
    attributes = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return [id(leaf) for leaf in tree_leaves(dict(attributes)) if isinstance(leaf, torch.Tensor)]


def _require_gradient(output: torch.Tensor) -> None:
    """Refuse a loss that autograd cannot differentiate."""
    if not (isinstance(output, torch.Tensor) and output.requires_grad):
        raise OptionError(
            "forward",
            found="a loss that has no gradient",
            expected="a loss that torch.autograd can differentiate",
            remedy="use ZerothOrder, whose steps need no gradient",
        )
