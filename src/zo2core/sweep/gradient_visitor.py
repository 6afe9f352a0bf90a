"""Gradients computed segment by segment: a forward pass that keeps each segment's input, then a
backward pass.

In the backward pass a segment's forward runs again from its kept input, and restores what its graph
needs. ``torch.autograd`` computes the gradients of its trained parameters and of its input; the
previous segment continues from the latter. The bits are those of autograd on the whole model: the
same operations run on the same numbers, and gradients are added in the same order. This is gradient
checkpointing (Chen et al., arXiv 1604.06174) with one checkpoint per segment, over blocks that are
in memory one at a time. As many of the last blocks as memory allows keep their activations, and
need no second forward. Inputs for which there is no room leave memory in between.

``trained_weights.py`` has the weights, and what a step does with a segment's gradients.
"""

from __future__ import annotations

import math
import operator
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from zo2core.errors import OptionError
from zo2core.protocols import Activations, DifferentiatedForward, Forward, Store, Streams
from zo2core.schedulers.profiling import Timeline
from zo2core.sweep.activations import KeptActivations, Use, flattened, storages_of
from zo2core.sweep.microbatch import StepRows
from zo2core.sweep.trained_weights import TrainedWeights
from zo2core.sweep.visitor import Visitor
from zo2core.types import Batch, BlockLayout, Lane

# A freed block of glibc's heap is rarely reused whole for a tensor, whose memory is aligned, so
# that activations lie with gaps between them. Measured for activations of 1 to 7 MB: 1.35 to 1.55
# times their bytes after one step. With 1.5, three runs exceeded their memory by 6 % after several
# steps, with 1.6 by 2 %. Memory of 32 MiB and more is not from the heap.
_HEAP_SPREAD = 1.6
HEAP_EXPECTED = 1.45  # the same of one run as a plan tells it, while room is made for the above
_HEAP_LARGEST = 1 << 25
# Memory of a segment's forward and backward, in multiples of its forward's. Measured: 0.5 to 1.6
# for blocks of OPT and Llama; 1.2 for a head in 16 bits and 1.5 in float32, whose loss has three
# float32 copies of the logits.
GRAPH_FORWARDS = 1.5
# of the memory that is left over, for graphs: with all of it a limit was exceeded by 0.3 %
GRAPH_SHARE = 0.95
PASSING = 3  # what is in memory of a micro-batch at a block: its input, its output, and a gradient


def gradient_bytes(held: int, backward: int, kept_blocks: int) -> int:
    """Memory of a sweep forward and backward.

    Args:
        held: Bytes that all micro-batches hold between two segments.
        backward: The largest of ``backward_bytes``.
        kept_blocks: Number of blocks whose inputs are kept.
    """
    return (PASSING + kept_blocks) * held + backward


def backward_bytes(forward: Forward, batch: Batch) -> int:
    """Expected peak of one segment's forward and backward, beyond what is held."""
    if isinstance(forward, DifferentiatedForward):
        return forward.backward_bytes(batch)
    return math.ceil(GRAPH_FORWARDS * forward.forward_bytes(batch))


class _Activation:
    """A saved tensor that is not a weight, or an empty slot for it.

    It exists as long as the graph needs it.
    """

    def __init__(self, saved: torch.Tensor, *, keep: bool) -> None:
        self.kind = (saved.dtype, saved.shape)
        # detached, so that the graph does not refer to itself
        self.tensor = saved.detach() if keep else None
        self._version = saved._version

    def fill(self, saved: torch.Tensor) -> None:
        """Take the tensor that a second forward saves."""
        self.tensor = saved.detach()
        self._version = saved._version

    def read(self) -> torch.Tensor:
        assert self.tensor is not None, "the forward of a graph runs again before its backward"
        # With hooks autograd does not check this itself.
        assert self.tensor._version == self._version, (
            "a tensor that backward reads was changed in place"
        )
        return self.tensor


class _FilledError(BaseException):
    """Ends a second forward once all saved activations are computed.

    No ``except Exception`` catches it.
    """


class KeptSize(NamedTuple):
    """The size of an activation that a graph keeps."""

    nbytes: float
    on_host: bool  # whether it is in host memory


def graph_memory(sizes: Iterable[KeptSize], spread: float = _HEAP_SPREAD) -> int:
    """Bytes of memory that activations of these sizes take.

    Args:
        sizes: Their sizes.
        spread: Bytes of the heap for each byte of a small activation.
    """
    nbytes = 0.0
    for size in sizes:
        is_spread = size.on_host and size.nbytes < _HEAP_LARGEST
        nbytes += size.nbytes * spread if is_spread else size.nbytes
    return math.ceil(nbytes)


class BlockGraph:
    """The graph of one forward of a segment, whose saved tensors are kept, or computed again for
    the backward pass.

    Autograd saves activations and weights for a backward pass. The memory of the weights is
    overwritten by later segments; in the backward pass the segment's modules have its weights
    again, perhaps at another address. So a saved weight is kept as a name and an offset, and looked
    up in the backward pass. Activations are kept where memory allows. Otherwise the forward runs
    again to compute them. That second forward ends as soon as the last activation is computed:
    later operations, such as a frozen output projection, save nothing and are not repeated.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        self._weights = weights
        self._inputs = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        self._storages: dict[int, KeptSize] = {}  # by address
        # in the order in which they were saved
        self._activations: list[weakref.ref[_Activation]] = []

    def sizes(self) -> list[KeptSize]:
        """The activations that the forward kept, without weights and inputs, in the order in which
        they were saved.
        """
        return [size for address, size in self._storages.items() if address not in self._inputs]

    def memory(self) -> int:
        """Bytes of memory that the activations take which the forward kept."""
        return graph_memory(self.sizes())

    def recorded(self, *, keep: bool) -> AbstractContextManager[object]:
        """Return a context in which the forward runs."""
        locate = self._weight_locator()

        def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
            if (weight := locate(tensor)) is not None:
                return weight
            activation = _Activation(tensor, keep=keep)
            if keep:
                storage = tensor.untyped_storage()
                self._storages[storage.data_ptr()] = KeptSize(
                    storage.nbytes(), on_host=storage.device.type == "cpu"
                )
            self._activations.append(weakref.ref(activation))
            return activation.read

        return saved_tensors_hooks(pack, operator.call)

    def drop(self) -> None:
        """Free the activations that were kept."""
        for activation in self._live_activations():
            if activation is not None:
                activation.tensor = None

    def restore(self, forward: Callable[[], object]) -> None:
        """Run the forward again as far as needed to restore the activations, if they were not
        kept.
        """
        activations = self._live_activations()
        needed = [
            number
            for number, saved in enumerate(activations)
            if saved is not None and saved.tensor is None
        ]
        if not needed:
            return
        locate = self._weight_locator()
        number = 0

        def pack(tensor: torch.Tensor) -> None:
            nonlocal number
            if locate(tensor) is not None:
                return
            activation = activations[number]
            if activation is not None:
                if activation.kind != (tensor.dtype, tensor.shape):
                    raise _other_tensors(f"{(tensor.dtype, tensor.shape)} for {activation.kind}")
                activation.fill(tensor)
            if number == needed[-1]:
                raise _FilledError
            number += 1

        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, _unpack_never):
                forward()
        except _FilledError:
            return
        raise _other_tensors(f"{number} for {needed[-1] + 1}")

    def _live_activations(self) -> list[_Activation | None]:
        return [reference() for reference in self._activations]

    def _weight_locator(self) -> Callable[[torch.Tensor], Callable[[], torch.Tensor] | None]:
        """Return a function that finds the weight in whose memory a tensor lies, by the weights'
        present addresses.

        Its result reads the same part of the weight where the weight is then.
        """
        ranges = sorted(
            [(weight.data_ptr(), weight.nbytes, name) for name, weight in self._weights.items()]
        )
        starts = [start for start, _, _ in ranges]

        def locate(tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
            address = tensor.data_ptr()
            if not (index := bisect_right(starts, address)):
                return None
            start, nbytes, name = ranges[index - 1]
            if address >= start + nbytes:
                return None
            return partial(
                self._weight_part,
                name,
                address - start,
                tensor.dtype,
                tensor.size(),
                tensor.stride(),
            )

        return locate

    def _weight_part(
        self, name: str, offset: int, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...]
    ) -> torch.Tensor:
        """A view of a weight, at an offset in bytes from its first element."""
        weight = self._weights[name]
        start = (weight.storage_offset() * weight.itemsize + offset) // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=weight.device).set_(
            weight.untyped_storage(), start, size, stride
        )


def _unpack_never(saved: None) -> torch.Tensor:
    raise AssertionError("a second forward is not differentiated")


def _other_tensors(found: str) -> OptionError:
    return OptionError(
        "model",
        found=f"a forward that saves other tensors for its backward when it runs again: {found}",
        expected="layers that compute the same when they run again on the same input",
        remedy="train this model by `ZerothOrder`, without gradients",
    )


class GraphRoom:
    """The memory for the graphs of a sweep's last blocks, for all of its streams."""

    def __init__(self, nbytes: int, sizes: Sequence[int]) -> None:
        self._left = GRAPH_SHARE * nbytes
        self._sizes = sizes
        self._largest = 0.0  # bytes of a block's graph for each unit of size, the most so far

    def has_room(self, stream: int, blocks: int) -> bool:
        """Whether the graph of a forward that runs next fits beside those of all later blocks, for
        all streams.
        """
        sizes = (blocks - 1) * sum(self._sizes) + sum(self._sizes[stream:])
        return sizes * self._largest <= self._left

    def take(self, graph: BlockGraph, stream: int, blocks: int) -> None:
        """Take the memory of a graph whose forward ran, or drop its activations if it proves too
        large.
        """
        nbytes = graph.memory()
        self._largest = max(self._largest, nbytes / max(self._sizes[stream], 1))
        if self.has_room(stream, blocks):
            self._left -= nbytes
        else:
            graph.drop()


class _SegmentInput(NamedTuple):
    """The input of a segment: the output of the one before, without its graph."""

    values: Sequence[Any]  # the flattened activations, detached
    nesting: TreeSpec
    differentiable: Sequence[int]  # indices of the values through which gradients flow, in order

    @classmethod
    def of(cls, outputs: Sequence[Any], nesting: TreeSpec) -> _SegmentInput:
        """The outputs of a segment, without their graph."""
        values = list(outputs)
        differentiable = []
        for index, value in enumerate(outputs):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                values[index] = value.detach()
                differentiable.append(index)
        return cls(values, nesting, differentiable)

    def storages_but_of(self, outputs: Sequence[Any]) -> list[torch.UntypedStorage]:
        """The storages through which gradients flow, without those that later segments get as
        well.
        """
        passed_on = storages_of(outputs)
        storages = storages_of(self.values[index] for index in self.differentiable)
        return [storage for address, storage in storages.items() if address not in passed_on]

    def with_leaves(self) -> tuple[Activations, dict[int, torch.Tensor]]:
        """Return the activations with leaves of a new graph where gradients flow, and these leaves
        by index.
        """
        leaves = {
            index: self.values[index].detach().requires_grad_() for index in self.differentiable
        }
        values = [leaves.get(index, value) for index, value in enumerate(self.values)]
        return tree_unflatten(values, self.nesting), leaves


class _Pass(NamedTuple):
    """The forward of a segment for one micro-batch, until its backward pass."""

    restore: Callable[[], None]  # computes again what the graph has not kept
    outputs: Sequence[Any]  # flattened, connected to the graph
    inputs: Mapping[int, torch.Tensor]  # leaves of the graph, by their index in the flattened input


class _Stream:
    """The state of a micro-batch in a sweep."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        # of the segment that is visited next; the embedding has none
        self.next_input = _SegmentInput(*flattened(()), ())
        self.passes: dict[int, _Pass] = {}  # by segment
        # of the output of the next segment backward, by index of the value
        self.gradients: Mapping[int, torch.Tensor] = {}


@dataclass(frozen=True, kw_only=True)
class GradientVisits:
    """The objects that all sweeps of first-order steps share."""

    layouts: Sequence[BlockLayout]  # in visiting order
    trained: TrainedWeights
    # for each segment, its modules' trained parameters by name
    leaves: Sequence[Mapping[str, torch.Tensor]]
    inputs: KeptActivations[torch.UntypedStorage]
    # returns freed memory to the system, if so many bytes more would exceed a limit
    make_room: Callable[[int], object]
    streams: Streams
    timeline: Timeline


class GradientVisitor(Visitor):
    """Visits the segments once forward and once backward, and adds gradients to the trained
    parameters.

    Args:
        visits: What all sweeps share.
        rows: The micro-batches of the step.
        part: Those of them that run in this sweep.
        kept_bytes: Memory for the inputs and graphs of segments until their backward.
        loss_scale: Factor of the loss.
    """

    def __init__(
        self,
        visits: GradientVisits,
        rows: StepRows,
        part: slice,
        *,
        kept_bytes: int,
        loss_scale: float = 1.0,
    ) -> None:
        self._visits = visits
        self._trained = visits.trained
        self._rows = rows
        self._forward = forward = rows.forward
        self._weights = None if rows.weights is None else rows.weights[part]
        self._loss_scale = loss_scale
        batches = rows.batches[part]
        self._streams = [_Stream(batch) for batch in batches]
        # of the streams that run in the present visit
        self._numbers: Sequence[int] = range(len(batches))
        self._trained.begin_sweep()
        sizes = [forward.held_bytes(batch) for batch in batches]
        visits.inputs.room = min((len(visits.layouts) - 2) * sum(sizes), kept_bytes)
        self._room = GraphRoom(kept_bytes - visits.inputs.room, sizes)
        # of a backward, at most
        self._running = max((backward_bytes(forward, batch) for batch in batches), default=0)
        self._tied = {
            name for name, count in Counter(chain.from_iterable(visits.leaves)).items() if count > 1
        }
        # by name and stream, in autograd's order: head first
        self._tied_sums: dict[tuple[str, int], torch.Tensor] = {}
        self._head = len(self._visits.layouts) - 1
        # the first with a gradient
        self._first = next(
            (index for index, leaves in enumerate(self._visits.leaves) if leaves), self._head
        )
        # the last of the backward pass
        self._last = min(self._first, *self._trained.updated, self._head)
        self._is_backward = False
        self._stores: dict[int, Store] = {}
        self.outputs: list[list[torch.Tensor]] = [[]]  # outputs of the head, one per micro-batch

    @property
    def order(self) -> Sequence[int]:
        """All segments, then back to the first one that has a gradient or is updated."""
        return [*range(self._head + 1), *range(self._head - 1, self._last - 1, -1)]

    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Run a segment's forwards, or compute its gradients in the backward pass."""
        version = self.replay(index, store, version)
        self._begin_visit(index)
        if not self._is_backward:
            commit(version)
            self._run(index)
            return
        try:
            self._run(index)
            if index == self._last:
                self._add_tied_gradients()
            gradients = self._trained.complete(index)
        except BaseException:
            commit(version)  # nothing was changed
            raise
        started = self._visits.streams.mark()
        updated = self._trained.update(index, store, version, gradients)
        if updated != version:
            self._visits.timeline.note(
                Lane.REPLAY, self._visits.layouts[index].name, started, self._visits.streams.mark()
            )
        commit(updated)

    def _begin_visit(self, index: int) -> None:
        """Choose what the visit does: the backward pass begins at the head."""
        self._is_backward |= index == self._head

    def _use(self, index: int, number: int) -> Use:
        """The use of a segment's input in the backward pass."""
        return Use(-index, number)

    def _run(self, index: int) -> None:
        """Run a segment's forwards, or compute its gradients in the backward pass."""
        visits = self._visits
        layout = self._visits.layouts[index]
        started = visits.streams.mark()
        with torch.no_grad():
            self._trained.load_frozen(index, self._stores)
            self._trained.perturb(index, self._stores, 0)
        if index == self._head:
            self._run_head()
        elif not self._is_backward:
            for number in self._numbers:
                visits.make_room(self._running)
                self._run_forward(index, number, self._streams[number])
        elif index >= self._first:
            for number in self._numbers:
                stream = self._streams[number]
                visits.inputs.take(self._use(index, number))
                visits.make_room(self._running)
                stream.passes[index].restore()
                self._add_gradients(index, number, stream)
        visits.timeline.note(Lane.EVALUATE, layout.name, started, visits.streams.mark(), track=0)
        if not layout.resident:
            del self._stores[index]

    @torch.no_grad()
    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the present version."""
        self._stores[index] = store
        return self._trained.replay(index, self._stores, version)

    def finish(self) -> None:
        """Free inputs, graphs and sums, however the sweep ended."""
        self._visits.inputs.clear()
        self._streams.clear()
        self._tied_sums.clear()
        self._visits.make_room(self._running)

    def _run_forward(self, index: int, number: int, stream: _Stream) -> None:
        """Run a segment's forward for one micro-batch, and keep the next segment's input.

        A graph is made even where its activations are not kept: torch chooses kernels by whether
        their inputs require gradients, and some kernels round differently from those that it uses
        without a graph.
        """
        segment_input = stream.next_input
        blocks = self._head - index
        has_backward = index >= self._first
        ids_before = tensor_ids(segment_input.values)
        activations, inputs = segment_input.with_leaves()
        forward = partial(self._forward.embed, stream.batch)
        if index > 0:
            forward = partial(self._forward.block, index - 1, activations)
        # The embedding's activations are not kept: it is cheap to run again.
        keep = index > 0 and has_backward and self._room.has_room(number, blocks)
        tensors = [value for value in segment_input.values if isinstance(value, torch.Tensor)]
        graph = BlockGraph(self._trained.buffer.bound[index], tensors)
        with torch.enable_grad(), graph.recorded(keep=keep):
            outputs, nesting = flattened(forward())
        if index > 0:
            self._require_unchanged(index, segment_input, nesting, ids_before)
        if keep:
            self._room.take(graph, number, blocks)
        stream.next_input = _SegmentInput.of(outputs, nesting)
        if has_backward:
            stream.passes[index] = _Pass(partial(graph.restore, forward), outputs, inputs)
            self._visits.inputs.put(
                self._use(index, number), segment_input.storages_but_of(outputs)
            )

    def _run_head(self) -> None:
        """Run the head for each micro-batch, and start the backward pass from the step's loss."""
        self._visits.inputs.end_departures()
        outputs = []
        for number in self._numbers:
            stream = self._streams[number]
            activations, inputs = stream.next_input.with_leaves()
            del stream.next_input
            self._visits.make_room(self._running)
            with torch.enable_grad():
                output = self._forward.head(stream.batch, activations)
            _require_gradient(output)
            self.outputs[0].append(output.detach())
            stream.passes[self._head] = _Pass(lambda: None, [output], inputs)
            if self._weights is None:
                outputs.append(output.detach().requires_grad_())
            else:
                stream.gradients = {
                    0: torch.full_like(output, self._weights[number] * self._loss_scale)
                }
                del output
                self._add_gradients(self._head, number, stream)
        if outputs:
            with torch.enable_grad():
                loss = self._rows.loss(outputs)
            _require_gradient(loss)
            gradients = torch.autograd.grad(loss, outputs, torch.full_like(loss, self._loss_scale))
            for number, (stream, gradient) in enumerate(zip(self._streams, gradients, strict=True)):
                stream.gradients = {0: gradient}
                self._add_gradients(self._head, number, stream)

    def _add_gradients(self, index: int, number: int, stream: _Stream) -> None:
        """Compute one micro-batch's gradients of a segment's inputs and trained parameters, and add
        the latter.
        """
        _, values, inputs = stream.passes.pop(index)
        outputs = [values[i] for i in stream.gradients]
        gradients = list(stream.gradients.values())
        leaves = self._visits.leaves[index]
        sources = [*inputs.values(), *leaves.values()]
        if not sources:
            stream.gradients = {}
            return
        computed: Sequence[torch.Tensor | None] = torch.autograd.grad(
            outputs, sources, gradients, allow_unused=True
        )
        of_inputs = zip(inputs, computed[: len(inputs)], strict=True)
        stream.gradients = {i: gradient for i, gradient in of_inputs if gradient is not None}
        for name, gradient in zip(leaves, computed[len(inputs) :], strict=True):
            if gradient is None:
                continue
            if name not in self._tied:
                self._trained.add_gradient(name, gradient)
                continue
            earlier = self._tied_sums.get((name, number))
            self._tied_sums[name, number] = gradient if earlier is None else earlier + gradient

    def _add_tied_gradients(self) -> None:
        """Add the summed gradients of tied parameters, one micro-batch after the other, as a plain
        loop does.
        """
        for number in range(len(self._streams)):
            for name in self._trained.forms:
                if (name, number) in self._tied_sums:
                    self._trained.add_gradient(name, self._tied_sums.pop((name, number)))

    def _require_unchanged(
        self,
        index: int,
        segment_input: _SegmentInput,
        nesting: TreeSpec,
        ids_before: list[list[int]],
    ) -> None:
        """Refuse a block that passes tensors to later blocks other than by its output: their
        gradients would be lost.
        """
        if nesting != segment_input.nesting or ids_before != tensor_ids(segment_input.values):
            raise OptionError(
                "model",
                found=f"{self._visits.layouts[index].name}, which passes tensors to later blocks "
                "besides its output",
                expected="blocks that are connected by their outputs alone",
                remedy="train this model by `ZerothOrder`, without gradients",
            )


def tensor_ids(values: Sequence[Any]) -> list[list[int]]:
    """Identify the tensors in other libraries' objects, to see whether a block has changed which
    ones they hold.
    """
    objects = [
        value if isinstance(value, Mapping) else vars(value)
        for value in values
        if isinstance(value, Mapping) or (hasattr(value, "__dict__") and not torch.is_tensor(value))
    ]
    return [
        [id(leaf) for leaf in tree_leaves(dict(attributes)) if isinstance(leaf, torch.Tensor)]
        for attributes in objects
    ]


def _require_gradient(output: torch.Tensor) -> None:
    """Refuse a loss that autograd cannot differentiate."""
    if not (isinstance(output, torch.Tensor) and output.requires_grad):
        raise OptionError(
            "forward",
            found="a loss that has no gradient",
            expected="a loss that torch.autograd can differentiate",
            remedy="train by `ZerothOrder`, without gradients",
        )
