"""A visit, exactly: bring a segment to the present version, evaluate it at the perturbed weights.

Replaying works on the segment's own bytes; evaluating copies them, moved, into the work buffer, whose views are the
model's parameters. While the missing updates are replayed on this thread, a second thread draws the noise of the first
evaluation: the two directions have generators of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby

import torch

from zo2core.kernels import descend, perturb
from zo2core.protocols import Activations, BlockModel, NoiseGenerator, Store
from zo2core.types import Batch, Evaluation, SegmentKind, Update
from zo2core.walk import Move, Replay, moves_to
from zo2core.workspace import Cell, Workspace


class SegmentVisitor:
    """Visits the segments for one sweep.

    Args:
        model: Runs the forwards.
        noise: Draws z.
        workspace: Memory; one sweep at a time may use it.
        drawer: One thread for noise.
        updates: All updates so far: segments are brought to version ``len(updates)``.
        streams: What to evaluate: (evaluation, batch); None evaluates the weights as they are. Streams of one evaluation
            stand together.
        zo_eps: Perturbation scale.
        perturb_in_place: Evaluations walk from one to the next instead of each starting from the weights.
    """

    def __init__(
        self,
        model: BlockModel,
        noise: NoiseGenerator,
        workspace: Workspace,
        drawer: ThreadPoolExecutor,
        *,
        updates: Sequence[Update],
        streams: Sequence[tuple[Evaluation | None, Batch]] = (),
        zo_eps: float = 1.0,
        perturb_in_place: bool = True,
    ) -> None:
        self._model = model
        self._noise = noise
        self._workspace = workspace
        self._drawer = drawer
        self._updates = updates
        self._batches = [batch for _, batch in streams]
        self._groups = [
            (evaluation, [i for i, _ in members])
            for evaluation, members in groupby(enumerate(streams), key=lambda item: item[1][0])
        ]
        self._zo_eps = zo_eps
        self._perturb_in_place = perturb_in_place
        self._replays: dict[int, list[Replay]] = {}  # version -> updates missing from there, prepared
        self._stores: dict[int, Store] = {}  # of resident segments
        self._drawing: Future[None] | None = None
        self._drawn: int | None = None  # seed whose z is in the noise buffer for the segment being visited
        self._drawn_tied: dict[str, int] = {}  # tied weight -> seed whose z is there for it
        self._activations: list[Activations] = [None] * len(streams)
        self.losses: list[torch.Tensor] = []  # one a stream, once the head was visited

    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the present version. See the contract."""
        if version not in self._replays:
            self._replays[version] = [Replay(update) for update in self._updates[version:]]
        replays = self._replays[version]
        self._drawn = None
        first = next((evaluation.seed for evaluation, _ in self._groups if evaluation is not None), None)
        # One seed's generator cannot serve two places at once without starting over for each piece.
        if first is not None and all(first not in replay.seeds for replay in replays):
            self._drawing = self._drawer.submit(self._draw, index, first)
        try:
            for cell in self._workspace.segments[index]:
                if replays and cell.owner == index:
                    self._replay_parameter(cell, store[cell.position], replays)
        except BaseException:
            self._join()
            raise
        return len(self._updates)

    def evaluate(self, index: int, store: Store) -> None:
        """Run the segment's forwards. See the contract."""
        self._join()
        self._stores[index] = store
        before: Evaluation | None = None
        for evaluation, streams in self._groups:
            if self._perturb_in_place:
                self._move(index, moves_to(before, evaluation), from_store=before is None)
            else:
                self._move(index, moves_to(None, evaluation), from_store=True)
            before = evaluation
            for stream in streams:
                self._forward(index, stream)
        if self._model.layouts[index].kind is SegmentKind.BLOCK:
            del self._stores[index]

    def _join(self) -> None:
        drawing, self._drawing = self._drawing, None
        if drawing is not None:
            drawing.result()

    def _replay_parameter(self, cell: Cell, theta: torch.Tensor, replays: Sequence[Replay]) -> None:
        spec, workspace = cell.spec, self._workspace
        scratch, decay_scratch = workspace.scratch(spec.dtype, 0), workspace.scratch(spec.dtype, 1)
        zs = [workspace.scratch(spec.dtype, 2 + i) for i in range(max(len(replay.seeds) for replay in replays))]
        for start, stop in cell.pieces:
            piece, length = theta[start:stop], stop - start
            first, second = scratch[:length], decay_scratch[:length]
            for replay in replays:
                for z, seed in zip(zs, replay.seeds, strict=False):
                    self._noise.fill(z[:length], seed, spec, start)
                for which, shift in replay.moves:
                    perturb(piece, piece, zs[which][:length], shift=shift, zo_eps=replay.zo_eps, scratch=first)
                for which, grad in replay.probes:
                    descend(
                        piece,
                        zs[which][:length],
                        projected_grad=grad,
                        lr=replay.lr,
                        weight_decay=replay.weight_decay if spec.decays else 0.0,
                        scratch=first,
                        decay_scratch=second,
                    )

    def _move(self, index: int, moves: Sequence[Move], *, from_store: bool) -> None:
        """Bring the work buffer to the next evaluation's weights."""
        cells = self._workspace.segments[index]
        if from_store and not moves:
            for cell in cells:
                cell.work.copy_(self._stores[cell.owner][cell.position])
        for move in moves:
            if self._drawn != move.seed:
                self._draw(index, move.seed)
            for cell in cells:
                theta = self._stores[cell.owner][cell.position] if from_store else cell.work
                scratch = self._workspace.scratch(cell.spec.dtype, 0)
                for start, stop in cell.pieces:
                    perturb(
                        cell.work[start:stop],
                        theta[start:stop],
                        cell.z[start:stop],
                        shift=move.shift,
                        zo_eps=self._zo_eps,
                        scratch=scratch[: stop - start],
                    )
            from_store = False

    def _draw(self, index: int, seed: int) -> None:
        """Draw one direction for a segment into the noise buffer; tied weights keep theirs from segment to segment."""
        for cell in self._workspace.segments[index]:
            if self._drawn_tied.get(cell.spec.name) == seed:
                continue
            for start, stop in cell.pieces:
                self._noise.fill(cell.z[start:stop], seed, cell.spec, start)
            if cell.tied:
                self._drawn_tied[cell.spec.name] = seed
        self._drawn = seed

    def _forward(self, index: int, stream: int) -> None:
        kind = self._model.layouts[index].kind
        batch, activations = self._batches[stream], self._activations[stream]
        if kind is SegmentKind.EMBEDDING:
            self._activations[stream] = self._model.embed(batch)
        elif kind is SegmentKind.BLOCK:
            self._activations[stream] = self._model.block(index - 1, activations)
        else:
            self._activations[stream] = None
            self.losses.append(self._model.head(batch, activations))
