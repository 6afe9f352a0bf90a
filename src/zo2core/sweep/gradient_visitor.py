"""Gradients, segment by segment: forward keeping each segment's input, then backward from the head.

Backward, a segment's forward runs again, with a graph, from the input that was kept. ``torch.autograd`` takes the gradients
of its trained parameters and of its input, and the latter goes on to the segment before. The bits are those of autograd on
the whole model: the same operations run on the same numbers, and gradients add up in the same order. This is gradient
checkpointing (Chen et al., arXiv 1604.06174) with one segment a checkpoint, over blocks that are in memory one at a time.
The last blocks keep their graphs where memory allows, and need no second forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from zo2core.errors import OptionError
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import Activations, Forward, Store, Streams
from zo2core.sweep.activation_offload import flattened
from zo2core.sweep.kept_graphs import KeptGraphs
from zo2core.sweep.trained_parameters import PresentWeights, TrainedParameters
from zo2core.types import Batch, BlockLayout, Lane


class _Kept:
    """What a segment was given by the one before, as backward needs it again."""

    def __init__(self, values: Sequence[Any], nesting: TreeSpec, places: Collection[int]) -> None:
        self.values = values  # in a row, detached
        self.nesting = nesting
        self.places = frozenset(places)  # of the values through which gradients flow

    def with_leaves(self) -> tuple[Activations, dict[int, torch.Tensor]]:
        """The activations with leaves of a new graph where gradients flow, and these leaves by their place."""
        leaves = {place: self.values[place].detach().requires_grad_() for place in sorted(self.places)}
        values = [leaves.get(place, value) for place, value in enumerate(self.values)]
        return tree_unflatten(values, self.nesting), leaves


class _Stream:
    """A micro-batch on its way forward and back."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.inputs: dict[int, _Kept] = {}  # by segment
        self.gradients: Mapping[int, torch.Tensor] = {}  # of the input of the segment visited last, by place


@dataclass(frozen=True, kw_only=True)
class GradientVisits:
    """Makes the visitors of first-order steps."""

    layouts: Sequence[BlockLayout]  # in visiting order
    present: PresentWeights  # brings weights to where forwards read them
    trained: TrainedParameters  # takes gradients
    leaves: Sequence[Mapping[str, torch.Tensor]]  # of each segment: what its modules read trained parameters from, by name
    weights: Sequence[Mapping[str, torch.Tensor]]  # of each segment: what its modules read since it was visited last
    streams: Streams
    timeline: Timeline

    def visitor(
        self,
        forward: Forward,
        batches: Sequence[Batch],
        *,
        weights: Sequence[float] | None,
        joint_loss: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        graph_bytes: int,
    ) -> GradientVisitor:
        """The visitor of one sweep.

        Args:
            forward: Runs the segments.
            batches: Micro-batches, prepared; all pass a segment before the next one comes.
            weights: The weight of each micro-batch's loss in the step's loss. None: ``joint_loss`` computes it from all
                outputs of the head, whose graphs are then in memory at the same time.
            joint_loss: The step's loss, 0-d, of what the head gave for each micro-batch; differentiable.
            graph_bytes: Memory for graphs that blocks keep from their forward to their backward.
        """
        self.trained.begin_sweep()
        sizes = [forward.held_bytes(batch) for batch in batches]
        return GradientVisitor(self, forward, batches, weights, joint_loss, KeptGraphs(self.weights, graph_bytes, sizes))


class GradientVisitor:
    """Visits the segments once forward and once back, and adds gradients to the trained parameters.

    Args:
        parts: What all sweeps share.
        forward, batches, weights, joint_loss: As ``GradientVisits.visitor`` takes them.
        graphs: Keeps the graphs of the last blocks.
    """

    def __init__(
        self,
        parts: GradientVisits,
        forward: Forward,
        batches: Sequence[Batch],
        weights: Sequence[float] | None,
        joint_loss: Callable[[Sequence[torch.Tensor]], torch.Tensor],
        graphs: KeptGraphs,
    ) -> None:
        self._layouts = parts.layouts
        self._present = parts.present
        self._trained = parts.trained
        self._leaves = parts.leaves
        self._queues = parts.streams
        self._timeline = parts.timeline
        self._forward = forward
        self._streams = [_Stream(batch) for batch in batches]
        self._weights = weights
        self._joint_loss = joint_loss
        self._graphs = graphs
        users = [name for own in self._leaves for name in own]
        self._tied = {name for name in users if users.count(name) > 1}
        self._tied_sums: dict[
            tuple[str, int], torch.Tensor
        ] = {}  # by name and stream, added up as autograd does: head first
        self._head = len(self._layouts) - 1
        self._first = next(index for index, own in enumerate(self._leaves) if own)  # segments before it have no gradient
        self._turned = False
        self._stores: dict[int, Store] = {}
        self.outputs: list[list[torch.Tensor]] = [[]]  # what the head gave for each micro-batch

    @property
    def order(self) -> Sequence[int]:
        """Forward over all segments, and back to the first block that takes part. The embedding's turn comes with that."""
        return [*range(self._head + 1), *range(self._head - 1, max(self._first, 1) - 1, -1)]

    @property
    def seeds(self) -> Collection[int]:
        """None: nothing is drawn."""
        return ()

    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Run a segment's forwards, or on the way back its gradients. See the contract."""
        commit(self.replay(index, store, version))
        begun = self._queues.mark()
        self._load(index)
        if index == self._head:
            self._turn()
        elif self._turned:
            self._backward(index)
        else:
            self._run_forwards(index)
        if self._turned and index == max(self._first, 1):
            if self._first == 0:
                self._load(0)
                self._backward(0)
            self._add_tied()
        self._timeline.note(Lane.EVALUATE, self._layouts[index].name, begun, self._queues.mark(), track=0)
        if not self._layouts[index].resident:
            del self._stores[index]

    @torch.no_grad()
    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the present version. See the contract."""
        self._stores[index] = store
        return self._present.replay(index, self._stores, version)

    def finish(self) -> None:
        """Let go of all that was kept, however the sweep ended."""
        self._streams.clear()
        self._graphs.clear()
        self._tied_sums.clear()

    @torch.no_grad()
    def _load(self, index: int) -> None:
        self._present.load_frozen(index, self._stores)
        self._present.perturb(index, self._stores, None, None)

    def _run_forwards(self, index: int) -> None:
        """Run a segment's forward of each micro-batch, and keep what the next segment is given.

        A graph is made even where it is dropped at once: torch chooses kernels by what requires gradients, and some of them
        round otherwise than those that it takes without a graph.
        """
        for number, stream in enumerate(self._streams):
            if index == 0:
                with torch.enable_grad():
                    values, nesting = flattened(self._forward.embed(stream.batch))
            else:
                values, nesting = self._run_block(index, number, stream)
            places = {i for i, value in enumerate(values) if isinstance(value, torch.Tensor) and value.requires_grad}
            values = [value.detach() if place in places else value for place, value in enumerate(values)]
            stream.inputs[index + 1] = _Kept(values, nesting, places)

    def _run_block(self, index: int, number: int, stream: _Stream) -> tuple[list[Any], TreeSpec]:
        """Run a block's forward of one micro-batch; keep its graph if there is room for it, else its input."""
        given = stream.inputs.pop(index)
        before = [contents(value) for value in given.values]
        activations, inputs = given.with_leaves()
        blocks = self._head - index
        graph = self._graphs.graph(index, number, blocks, [one for one in given.values if isinstance(one, torch.Tensor)])
        with torch.enable_grad(), graph.recorded():
            values, nesting = flattened(self._forward.block(index - 1, activations))
        self._require_alike(index, given, nesting, before)
        if index >= self._first and not self._graphs.offer(graph, index, number, blocks, values, inputs):
            stream.inputs[index] = given
        return values, nesting

    def _turn(self) -> None:
        """Run the head of each micro-batch, and begin the way back from the step's loss."""
        self._turned = True
        graphs = []
        for number, stream in enumerate(self._streams):
            activations, inputs = stream.inputs.pop(self._head).with_leaves()
            with torch.enable_grad():
                output = self._forward.head(stream.batch, activations)
            _require_gradient(output)
            self.outputs[0].append(output.detach())
            if self._weights is None:
                graphs.append((number, stream, inputs, output))
            else:
                gradient = torch.full_like(output, self._weights[number])
                self._take(self._head, number, stream, inputs, [output], [gradient])
        if graphs:
            outputs = [output.detach().requires_grad_() for *_, output in graphs]
            with torch.enable_grad():
                loss = self._joint_loss(outputs)
            _require_gradient(loss)
            gradients = torch.autograd.grad(loss, outputs)
            for (number, stream, inputs, output), gradient in zip(graphs, gradients, strict=True):
                self._take(self._head, number, stream, inputs, [output], [gradient])

    def _backward(self, index: int) -> None:
        """Take a segment's gradients: of the graph that was kept, else of one that its forward makes again."""
        for number, stream in enumerate(self._streams):
            values, inputs = self._graphs.pop(index, number) or self._run_again(index, stream)
            outputs = [values[place] for place in stream.gradients]
            self._take(index, number, stream, inputs, outputs, list(stream.gradients.values()))

    def _run_again(self, index: int, stream: _Stream) -> tuple[Sequence[Any], Mapping[int, torch.Tensor]]:
        """Run a segment's forward again, with a graph.

        Returns:
            What it gave, and the leaves of its graph by their place in what it was given.
        """
        inputs: Mapping[int, torch.Tensor] = {}
        with torch.enable_grad():
            if index == 0:
                given = self._forward.embed(stream.batch)
            else:
                activations, inputs = stream.inputs.pop(index).with_leaves()
                given = self._forward.block(index - 1, activations)
        return flattened(given)[0], inputs

    def _take(
        self,
        index: int,
        number: int,
        stream: _Stream,
        inputs: Mapping[int, torch.Tensor],
        outputs: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Take the gradients of a segment's inputs and trained parameters, of one micro-batch."""
        leaves = self._leaves[index]
        wanted = [*inputs.values(), *leaves.values()]
        if not wanted:
            stream.gradients = {}
            return
        taken: Sequence[torch.Tensor | None] = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        back = zip(inputs, taken[: len(inputs)], strict=True)
        stream.gradients = {place: gradient for place, gradient in back if gradient is not None}
        for name, gradient in zip(leaves, taken[len(inputs) :], strict=True):
            if gradient is None:
                continue
            if name not in self._tied:
                self._trained.add_gradient(name, gradient)
            elif (key := (name, number)) in self._tied_sums:
                self._tied_sums[key] = self._tied_sums[key] + gradient
            else:
                self._tied_sums[key] = gradient

    def _add_tied(self) -> None:
        """Add what several segments gave for one parameter, micro-batch after micro-batch, as a plain loop would."""
        for number in range(len(self._streams)):
            for name in self._trained.parameters:
                if (name, number) in self._tied_sums:
                    self._trained.add_gradient(name, self._tied_sums.pop((name, number)))

    def _require_alike(self, index: int, given: _Kept, nesting: TreeSpec, before: Sequence[object]) -> None:
        """Refuse a block that hands something to later ones beside its output: its gradient would be lost."""
        if nesting != given.nesting or before != [contents(value) for value in given.values]:
            raise OptionError(
                "model",
                found=f"{self._layouts[index].name}, which hands tensors to later blocks beside its output",
                expected="blocks that are connected by their outputs alone",
                remedy="train this model with ZOEngine, whose steps need no gradient",
            )


def contents(value: object) -> object:
    """Which tensors an object of another library holds, so that one can see whether a block has put others there."""
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, str | int | float):
        return None
    held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return [id(leaf) for leaf in tree_leaves(dict(held)) if isinstance(leaf, torch.Tensor)]


def _require_gradient(output: torch.Tensor) -> None:
    """Refuse what autograd cannot differentiate."""
    if not (isinstance(output, torch.Tensor) and output.requires_grad):
        raise OptionError(
            "forward",
            found="a loss that has no gradient",
            expected="a loss that torch.autograd can differentiate",
            remedy="use ZOEngine, whose steps need none",
        )
