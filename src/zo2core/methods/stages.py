"""One model over several processes: each holds a contiguous part of the blocks, a stage.

The first stage has the embedding, too, and the last one the head. A sweep of a stage visits all
segments like any other. Those of other stages have no parameters and compute nothing. In place of
the embedding, a later stage receives what the blocks before have computed; in place of the head, an
earlier stage sends it on. So sources, schedulers and visitors are those of one process, which reads
its own blocks only. Micro-batches pass the stages one after the other, first all forward, then all
backward (GPipe, arXiv 1811.06965).

What a stage sends are the hidden states: the first tensor of a segment's activations, in its own
dtype. Everything else in the activations has to follow from the batch alone. A later stage computes
it by running the embedding on weights that are not a number and take no memory; a model in which
NaN then appears elsewhere is refused.

Outputs of the head are sent to all stages at the end of a sweep, so all of them record the same
step. Trained parameters in memory, such as an adapter's, are kept by all stages: once the gradients
of each have been sent to the others, all make the same update. Weights that a journal replays
belong to the stages that use them; a tied weight of embedding and head is with both.
"""

from __future__ import annotations

import platform
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from zo2core.errors import OptionError, ZO2Warning, without_effect
from zo2core.io.direct_file import byte_view
from zo2core.journal.journal import Journal
from zo2core.protocols import (
    Activations,
    BlockModel,
    DifferentiableModel,
    Forward,
    TensorReader,
)
from zo2core.ranges import counted
from zo2core.run import Outputs, Undivided
from zo2core.sources.segment_store import BaseDigests, check_segments
from zo2core.sweep.activations import Use, flattened
from zo2core.sweep.gradient_visitor import GradientVisitor, GradientVisits, tensor_ids
from zo2core.sweep.microbatch import StepRows
from zo2core.types import Batch, BlockLayout, trained
from zo2core.workers.workers import Workers


class Stage(Undivided):
    """The part of a run that one of several processes has, which divide the blocks.

    Args:
        model: The model, of which ``layouts`` are divided.
        workers: The processes, in the order of their stages.

    Raises:
        OptionError: if there are fewer blocks than processes, or several stages would train one
            parameter of an adapter.
    """

    is_divided = True

    def __init__(self, model: BlockModel, workers: Workers) -> None:
        super().__init__(model.layouts, workers)
        self.blocks = divided_blocks(self.all_layouts, workers.size)[workers.rank]
        self.is_first = workers.rank == 0
        self.is_last = workers.rank == workers.size - 1
        self.layouts = stage_layouts(self.all_layouts, self.blocks)
        trained_here, trained_anywhere = (
            sum(spec.nbytes for spec in trained(layouts))
            for layouts in (self.layouts, self.all_layouts)
        )
        self.trained_elsewhere = trained_anywhere - trained_here
        self._own = {spec.name for spec in trained(self.layouts)}
        # whether blocks of this stage, or of one before, are trained by gradients
        self.is_trained = self.was_trained = False
        if isinstance(model, DifferentiableModel):
            self._find_trained(model)
        in_stage = {spec.name for spec in self.layouts[0].parameters}
        unknown = {
            spec.name: torch.full((), torch.nan, dtype=spec.in_forward().dtype).expand(spec.shape)
            for spec in self.all_layouts[0].parameters
            if spec.name not in in_stage
        }
        if unknown and not self.is_first:
            model.bind(0, unknown)

    @property
    def read_whole(self) -> frozenset[str]:
        """Names of the segments of which this stage has all parameters."""
        names = {
            layout.name
            for layout, undivided in zip(self.layouts, self.all_layouts, strict=True)
            if layout.parameters == undivided.parameters
        }
        return frozenset(names | {self.layouts[0].name} if self.is_first else names)

    def check_embedding(self, digests: BaseDigests, weights: TensorReader) -> None:
        """Read the embedding's segment whole for its digest, if no stage has all parameters in it:
        those of an adapter are divided.
        """
        embedding = self.all_layouts[0]
        is_divided = self.layouts[0].parameters != embedding.parameters
        if self.is_first and is_divided and digests.wants(embedding):
            check_segments([embedding], weights, digests)

    def unknown_digests(self, digests: BaseDigests, journal: Journal) -> Mapping[str, str]:
        """The digests of the base's segments that a journal lacks, of all stages."""
        if len(journal.base_digests) == len(self.all_layouts):
            return {}
        unknown = dict(digests.unknown_to(journal))
        of_stages = self.peers.all_gather(unknown, "digests of the base")
        return dict(sorted(chain.from_iterable(of_stage.items() for of_stage in of_stages)))

    def _find_trained(self, model: DifferentiableModel) -> None:
        """Find the first segment that is trained, and refuse a parameter of several stages."""
        names = {spec.name for spec in trained(self.all_layouts)}
        users = [names & model.leaves(index).keys() for index in range(len(self.all_layouts))]
        self.was_trained = any(users[: self.blocks.start]) and not self.is_first
        self.is_trained = any(users[: self.blocks.stop]) or (self.is_last and bool(users[-1]))
        of_stages = [
            set[str]().union(*(users[index] for index in stage))
            for stage in _segments_of_stages(self.all_layouts, self.peers.size)
        ]
        counts = Counter(chain.from_iterable(of_stages))
        self.trained_twice = sorted(name for name, count in counts.items() if count > 1)

    def forward(self, forward: Forward) -> Forward:
        """What this process runs of a forward: ``forward`` from the stage before to the next."""
        return StageForward(forward, self)

    def outputs(self, outputs: Outputs) -> Outputs:
        """The head's outputs, which the last stage sends to all others."""
        workers = self.peers
        workers.end_sends()
        forms = [[_form(output) for output in of_one] for of_one in outputs] if self.is_last else []
        forms = workers.all_gather(forms, "outputs of the head")[-1]
        content = _bytes_of(chain.from_iterable(outputs)) if self.is_last else b""
        received = workers.broadcast(content, workers.size - 1)
        if self.is_last:
            return outputs
        tensors = iter(_tensors_of(received, chain.from_iterable(forms)))
        return [list(islice(tensors, len(of_one))) for of_one in forms]

    def visitor(
        self,
        visits: GradientVisits,
        rows: StepRows,
        part: slice,
        *,
        kept_bytes: int,
        loss_scale: float,
    ) -> GradientVisitor:
        """The visitor of a sweep forward and backward, one micro-batch after the other."""
        if self.trained_twice:
            raise OptionError(
                "split",
                found=f"{self.trained_twice[0]}, which blocks of several stages train",
                expected="trained parameters that each belong to one stage",
                remedy="use one process, or train other parameters",
            )
        return StageVisitor(visits, rows, part, self, kept_bytes=kept_bytes, loss_scale=loss_scale)

    def context(self, batch: Batch) -> int:
        """A digest of a batch, which neighbouring stages compare."""
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        return self.peers.digest([tensors])

    def adds_earlier_gradient(self, name: str) -> bool:
        """Whether the parameter belongs to the stage, which goes on adding to its gradient."""
        return name in self._own

    def agreed_bytes(self, nbytes: int) -> int:
        """The least memory of all stages."""
        return int(min(self.peers.all_gather(nbytes, "memory for activations")))

    def require_alike(self) -> None:
        """Warn of stages that compute other bits, once all of them are known: matrix products
        depend on the processor, and on the number of threads.
        """
        processor = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
        threads = counted(torch.get_num_threads(), "thread")
        here = f"torch {torch.__version__} on {processor} and {threads}"
        kinds = self.peers.all_gather(here, "kinds of machines")
        if len(set(kinds)) > 1 and self.is_first:
            stages = "; ".join(f"stage {rank}: {kind}" for rank, kind in enumerate(kinds))
            warnings.warn(
                f"stages compute on machines of different kinds, whose bits differ: {stages}. The "
                "run goes on with the same bits only with each stage on its kind of machine, with "
                "as many threads",
                ZO2Warning,
                stacklevel=2,
            )


def _form(output: object) -> list[Any]:
    """Dtype and shape of a head's output, as JSON values."""
    if not isinstance(output, torch.Tensor):
        raise without_effect(
            "split", "blocks", f"a head that returns tensors, not a {type(output).__name__}"
        )
    return [str(output.dtype).removeprefix("torch."), list(output.shape)]


def _bytes_of(outputs: Iterable[torch.Tensor]) -> bytes:
    on_host = [output.detach().cpu().contiguous() for output in outputs]
    return b"".join(bytes(byte_view(output)) for output in on_host)


def _tensors_of(content: bytes, forms: Iterable[Sequence[Any]]) -> Iterator[torch.Tensor]:
    """Tensors of these dtypes and shapes, from their bytes one after the other."""
    start = 0
    for dtype_name, shape in forms:
        output = torch.empty(shape, dtype=getattr(torch, dtype_name))
        byte_view(output)[:] = content[start : start + output.nbytes]
        start += output.nbytes
        yield output


def stage_layouts(layouts: Sequence[BlockLayout], blocks: range) -> tuple[BlockLayout, ...]:
    """The segments of a model in a stage: those of others have no parameters."""
    needed = _needed_of_embedding(layouts, blocks)
    of_embedding = tuple(spec for spec in layouts[0].parameters if spec.name in needed)
    in_stage = [*blocks, *([len(layouts) - 1] if _has_head(layouts, blocks) else [])]
    others = (
        layout if index in in_stage else replace(layout, parameters=(), borrowed=(), offsets=None)
        for index, layout in enumerate(layouts[1:], 1)
    )
    return (replace(layouts[0], parameters=of_embedding, offsets=None), *others)


def _has_head(layouts: Sequence[BlockLayout], blocks: range) -> bool:
    return blocks.stop == len(layouts) - 1


def _needed_of_embedding(layouts: Sequence[BlockLayout], blocks: range) -> set[str]:
    """Names of the parameters of the embedding's segment that a stage uses. An adapter's are there,
    too.
    """
    borrowers = [layouts[index] for index in blocks]
    if _has_head(layouts, blocks):
        borrowers.append(layouts[-1])
    needed = {spec.name for layout in borrowers for spec in layout.borrowed}
    if blocks.start == 1:
        borrowed = {spec.name for layout in layouts[1:-1] for spec in layout.borrowed}
        needed |= {spec.name for spec in layouts[0].parameters} - borrowed
    return needed


def divided_blocks(layouts: Sequence[BlockLayout], stages: int) -> list[range]:
    """The blocks of each stage: contiguous, and such that the largest stage takes the least
    memory, with embedding and head.

    Raises:
        OptionError: if there are fewer blocks than stages.
    """
    last = len(layouts) - 1
    if last - 1 < stages:
        raise OptionError(
            "split",
            found=f"blocks, {stages} workers for {last - 1} blocks",
            expected="a block for each worker",
            remedy="start fewer workers",
        )

    of_blocks = {spec.name for layout in layouts[1:-1] for spec in layout.borrowed}
    embedding = (spec for spec in layouts[0].parameters if spec.name not in of_blocks)
    sums = [
        *(0, sum(spec.nbytes for spec in embedding)),
        *(sum(spec.nbytes for spec in layout.used) for layout in layouts[1:]),
    ]
    sums = list(accumulate(sums))  # bytes of the segments before each

    def size(start: int, stop: int) -> int:
        return sums[stop + (stop == last)] - sums[start - (start == 1)]

    # by number of stages: for each end, the least largest size, and where the last stage starts
    best: dict[int, tuple[int, list[int]]] = {
        stop: (size(1, stop), [1]) for stop in range(2, last + 1)
    }
    for count in range(2, stages + 1):
        best = {
            stop: min(
                (max(best[start][0], size(start, stop)), [*best[start][1], start])
                for start in range(count, stop)
            )
            for stop in range(count + 1, last + 1)
        }
    starts = best[last][1]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], last], strict=True)]


def _segments_of_stages(layouts: Sequence[BlockLayout], stages: int) -> list[list[int]]:
    """Indices of each stage's segments."""
    last = len(layouts) - 1
    return [
        [*([0] if blocks.start == 1 else []), *blocks, *([last] if blocks.stop == last else [])]
        for blocks in divided_blocks(layouts, stages)
    ]


class StageForward:
    """What a stage runs of a forward, between what it receives and what it sends.

    Args:
        forward: The whole forward.
        stage: The stage.
    """

    def __init__(self, forward: Forward, stage: Stage) -> None:
        self._forward = forward
        self._stage = stage
        self.prepared = forward.prepared
        self.forward_bytes = forward.forward_bytes
        self.held_bytes = forward.held_bytes
        # what the activations of a stream were before the blocks of this stage
        self._before: list[_Structure] = []

    def embed(self, batch: Batch) -> Activations:
        """Run the embedding; a later stage receives hidden states in its place."""
        stage = self._stage
        if stage.is_first:
            activations = self._forward.embed(batch)
            self._before.append(_Structure.of(activations))
            return activations
        with torch.no_grad():
            activations = self._forward.embed(batch)
        values, nesting = flattened(activations)
        hidden = _first_tensor(values)
        _require_from_batch(values, hidden)
        [received] = stage.peers.receive(stage.peers.rank - 1, stage.context(batch))
        values[hidden] = received.to(values[hidden].device).requires_grad_(
            stage.was_trained and torch.is_grad_enabled()
        )
        activations = tree_unflatten(values, nesting)
        self._before.append(_Structure.of(activations))
        return activations

    def block(self, index: int, activations: Activations) -> Activations:
        """Run a block, if it belongs to the stage."""
        if index + 1 not in self._stage.blocks:
            return activations
        return self._forward.block(index, activations)

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Run the head; an earlier stage sends the hidden states, and returns 0."""
        stage = self._stage
        before = self._before.pop(0)
        if stage.is_last:
            return self._forward.head(batch, activations)
        values, _ = flattened(activations)
        if _Structure.of(activations) != before:
            raise OptionError(
                "split",
                found="blocks, of a model whose blocks pass on more than hidden states",
                expected="blocks that are connected by hidden states alone",
                remedy="use one process",
            )
        hidden = values[_first_tensor(values)]
        stage.peers.send([hidden.detach()], stage.peers.rank + 1, stage.context(batch))
        return torch.zeros((), device=hidden.device)


@dataclass(frozen=True)
class _Structure:
    """The structure of activations, which blocks leave as it is."""

    nesting: TreeSpec
    tensors: tuple[bool, ...]  # which of the values are tensors
    inner: list[list[int]]  # see ``tensor_ids``

    @classmethod
    def of(cls, activations: Activations) -> _Structure:
        values, nesting = flattened(activations)
        are_tensors = tuple(isinstance(value, torch.Tensor) for value in values)
        return cls(nesting, are_tensors, tensor_ids(values))


def _first_tensor(values: Sequence[Any]) -> int:
    return next(index for index, value in enumerate(values) if isinstance(value, torch.Tensor))


def _require_from_batch(values: Sequence[Any], hidden: int) -> None:
    """Refuse activations that depend on weights of the embedding beside the hidden states."""
    for index, value in enumerate(values):
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        if index != hidden and is_float and bool(value.isnan().any()):
            raise OptionError(
                "split",
                found="blocks, of a model whose blocks read more of the embedding than hidden "
                "states",
                expected="blocks that are connected by hidden states alone",
                remedy="use one process",
            )


class _Visit(NamedTuple):
    """A visit of a segment in a stage's sweep."""

    segment: int
    numbers: range  # the micro-batches that run
    is_backward: bool


class StageVisitor(GradientVisitor):
    """Visits a stage's segments with one micro-batch after the other, all forward and then all
    backward.

    The last stage goes backward with each micro-batch at once. If losses of micro-batches are
    joined by more than their weights, it has to know all of them first, and visits each segment
    with all micro-batches.

    Args:
        visits: What all sweeps share.
        rows: The micro-batches of the step.
        part: Those of them that run in this sweep.
        stage: The stage.
        kept_bytes: Memory for the inputs and graphs of segments until their backward.
        loss_scale: Factor of the loss.
    """

    def __init__(
        self,
        visits: GradientVisits,
        rows: StepRows,
        part: slice,
        stage: Stage,
        *,
        kept_bytes: int,
        loss_scale: float,
    ) -> None:
        super().__init__(visits, rows, part, kept_bytes=kept_bytes, loss_scale=loss_scale)
        self._stage = stage
        self._forward = stage.forward(rows.forward)
        if stage.was_trained:
            self._first = 0
        self._last = min(self._first, self._head)
        self._planned = self._planned_visits()
        self._remaining = iter(self._planned)

    @property
    def order(self) -> Sequence[int]:
        """The segments, once or more for each micro-batch."""
        return [visit.segment for visit in self._planned]

    def _planned_visits(self) -> list[_Visit]:
        every = range(len(self._streams))
        there = range(self._head)
        back = range(self._head, self._last - 1, -1)
        if self._stage.is_last:
            groups = [every] if self._weights is None else [range(n, n + 1) for n in every]
            return [
                visit
                for group in groups
                for visit in (
                    *(_Visit(index, group, is_backward=False) for index in there),
                    *(_Visit(index, group, is_backward=True) for index in back),
                )
            ]
        groups = [range(number, number + 1) for number in every]
        forward = [
            _Visit(index, group, is_backward=False)
            for group in groups
            for index in range(self._head + 1)
        ]
        if not self._stage.is_trained:
            return forward
        return forward + [
            _Visit(index, group, is_backward=True) for group in groups for index in back
        ]

    def _begin_visit(self, index: int) -> None:
        visit = next(self._remaining)
        assert visit.segment == index, "segments are visited in order"
        self._numbers = visit.numbers
        self._is_backward = visit.is_backward

    def _use(self, index: int, number: int) -> Use:
        """Micro-batches that go backward earlier are used earlier."""
        return Use((number - len(self._streams)) * len(self._visits.layouts) - index, number)

    def _run_head(self) -> None:
        """Send the hidden states, or receive their gradients; at the last stage as anywhere."""
        if self._stage.is_last:
            super()._run_head()
            return
        peers = self._stage.peers
        if self._is_backward:
            self._visits.inputs.end_departures()
        for number in self._numbers:
            stream = self._streams[number]
            if not self._is_backward:
                activations, _ = stream.next_input.with_leaves()
                with torch.no_grad():
                    self.outputs[0].append(self._forward.head(stream.batch, activations))
                continue
            [gradient] = peers.receive(peers.rank + 1, self._stage.context(stream.batch))
            [hidden] = stream.next_input.differentiable
            stream.gradients = {hidden: gradient.to(stream.next_input.values[hidden].device)}
            del stream.next_input

    def _add_gradients(self, index: int, number: int, stream: Any) -> None:
        """Compute gradients; those of the first segment's hidden states go to the stage before."""
        if index == 0 and self._stage.was_trained:
            context = self._stage.context(stream.batch)
            gradients = [*stream.gradients.values()]
            self._stage.peers.send(gradients, self._stage.peers.rank - 1, context)
        super()._add_gradients(index, number, stream)
