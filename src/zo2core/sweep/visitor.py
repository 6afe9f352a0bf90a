"""A visit, exactly: bring a segment to the present version, evaluate it at the perturbed weights.

Replaying works on the segment's own bytes; evaluating copies them, moved, into the work buffer, whose views are the
model's parameters. With counter-based noise a ``Mover`` does both in one pass.

With a sequential generator drawing is what takes long. Two directions have generators of their own, so two threads draw at
once: while this one replays the missing updates piece by piece, a second one draws the noise of the first evaluation and, as
soon as a piece is replayed and still in the cache, perturbs it into the work buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import Enum, auto
from functools import partial
from itertools import groupby
from queue import SimpleQueue

import torch

from zo2core.kernels import perturb, walk
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import SEEDS_IN_TURN, BlockModel, CounterNoise, Device, Forward, NoiseGenerator, Store
from zo2core.sweep.activation_offload import ActivationOffload
from zo2core.sweep.counter_perturber import Mover
from zo2core.sweep.work_buffer import Cell, Workspace
from zo2core.types import Batch, Evaluation, Lane, SegmentKind, Update
from zo2core.updates import Move, Replay, moves_to, rounds

# Note: Second thread. Handing work over takes tens of microseconds; segments with fewer elements are done on one thread.
PARALLEL_FROM = 1 << 17


class _Piece(Enum):
    """What the replaying thread tells the second one."""

    REPLAYED = auto()
    LOST = auto()  # the replay failed: no piece will follow


class SegmentVisitor:
    """Visits the segments for one sweep.

    Args:
        device: Where forwards run.
        model: Runs the forwards.
        noise: Draws z.
        workspace: Memory; one sweep at a time may use it.
        activations: The streams' memory between segments; likewise.
        worker: The second thread; None does without.
        updates: All updates so far: segments are brought to version ``len(updates)``.
        streams: What to evaluate: (evaluation, batch); None evaluates the weights as they are. Streams of one evaluation
            stand together.
        forward: Runs the forwards in the model's place.
        zo_eps: Perturbation scale.
        perturb_in_place: Evaluations walk from one to the next instead of each starting from the weights.
        timeline: Every replay and every evaluation is noted there.
    """

    def __init__(
        self,
        device: Device,
        model: BlockModel,
        noise: NoiseGenerator,
        workspace: Workspace,
        activations: ActivationOffload,
        worker: ThreadPoolExecutor | None,
        *,
        updates: Sequence[Update],
        streams: Sequence[tuple[Evaluation | None, Batch]] = (),
        forward: Forward | None = None,
        zo_eps: float = 1.0,
        perturb_in_place: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        self._device = device
        self._timeline = Timeline() if timeline is None else timeline
        self._model = model
        self._runs: Forward = model if forward is None else forward
        self._noise = noise
        self._workspace = workspace
        self._worker = worker
        self._updates = updates
        self._present = len(updates)  # the list may grow while a visitor lives
        self._batches = [batch for _, batch in streams]
        self._groups = [
            (evaluation, [i for i, _ in members])
            for evaluation, members in groupby(enumerate(streams), key=lambda item: item[1][0])
        ]
        self._zo_eps = zo_eps
        self._mover: Mover | None = None  # of counter-based noise
        if isinstance(noise, CounterNoise):
            self._mover = Mover(noise, workspace, worker, parallel_from=PARALLEL_FROM, zo_eps=zo_eps)
        self._at: Evaluation | None = None  # where the mover has brought the work buffer already
        self._perturb_in_place = perturb_in_place
        self._replays: dict[int, list[Replay]] = {}  # version -> updates missing from there, prepared
        self._stores: dict[int, Store] = {}  # of resident segments
        self._ahead: Future[Evaluation | None] | None = None
        self._drawn: int | None = None  # seed whose z is in the noise buffer for the segment being visited
        self._drawn_tied: dict[str, int] = {}  # tied weight -> seed whose z is there for it
        self._order = [i for _, members in self._groups for i in members]  # of streams, at each segment
        self._following = dict(zip(self._order, [*self._order[1:], *self._order[:1]], strict=True))
        self._activations = activations
        activations.begin(len(streams), may_wait=any(evaluation is not None for evaluation, _ in streams))
        self.seeds = {evaluation.seed for evaluation, _ in streams if evaluation is not None}  # drawn from, this sweep
        self.outputs: list[torch.Tensor] = []  # the head's, one a stream, once it was visited

    @torch.inference_mode()
    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the present version. See the contract."""
        begun = self._device.streams.mark()
        self._replay(index, store, version)
        self._timeline.note(Lane.REPLAY, self._model.layouts[index].name, begun, self._device.streams.mark())
        return self._present

    def _replay(self, index: int, store: Store, version: int) -> None:
        if version not in self._replays:
            self._replays[version] = [Replay(update) for update in self._updates[version : self._present]]
            self.seeds.update(seed for replay in self._replays[version] for seed in replay.seeds)
        replays = self._replays[version]
        self._stores[index] = store
        if self._mover is not None:
            first = self._groups[0][0] if self._groups else None
            self._at = first if first is not None and first.shift != 0 else None
            self._mover.replay(index, self._stores, replays, self._at)
            return
        self._drawn = None
        queue: SimpleQueue[_Piece] = SimpleQueue()
        try:
            replayed = queue if self._start_ahead(index, replays, queue) else None
            *before, last = rounds(replays, SEEDS_IN_TURN)
            for some in before:
                self._replay_segment(index, store, some, None)
            self._replay_segment(index, store, last, replayed)
        except BaseException:
            queue.put(_Piece.LOST)  # lets the second thread go, whether it was started or not
            self.finish()
            raise

    @torch.inference_mode()
    def evaluate(self, index: int, store: Store) -> None:
        """Run the segment's forwards. See the contract."""
        self._stores[index] = store
        before: Evaluation | None = None
        at = self._join()  # where the second thread has brought the work buffer already
        begun, name = self._device.streams.mark(), self._model.layouts[index].name
        for track, (evaluation, streams) in enumerate(self._groups):
            if at is None or evaluation != at:
                origin = before if self._perturb_in_place else None
                self._move(index, moves_to(origin, evaluation), from_store=origin is None)
            before, at = evaluation, None
            for stream in streams:
                self._forward(index, stream)
            done = self._device.streams.mark()
            self._timeline.note(Lane.EVALUATE, name, begun, done, track=track)
            begun = done
        if self._model.layouts[index].kind is SegmentKind.BLOCK:
            del self._stores[index]

    def finish(self) -> None:
        """Wait until the second thread has let go of the memory, however the sweep ended."""
        if self._ahead is not None:
            wait([self._ahead])

    def _start_ahead(self, index: int, replays: Sequence[Replay], replayed: SimpleQueue[_Piece]) -> bool:
        """Have the second thread, if that pays, prepare the first evaluation; it is told of each replayed piece."""
        first = self._groups[0][0] if self._groups else None
        if self._worker is None or first is None or first.shift == 0:
            return False
        own = sum(cell.spec.numel for cell in self._workspace.segments[index] if cell.owner == index)
        if own < PARALLEL_FROM:
            return False  # this thread has next to nothing to replay: both move what is borrowed, where noise is kept
        if any(first.seed in replay.seeds for replay in replays):
            return False  # one seed's generator in two places would start over for each piece
        self._ahead = self._worker.submit(self._prepare, index, first, replayed)
        return True

    def _prepare(self, index: int, evaluation: Evaluation, replayed: SimpleQueue[_Piece]) -> Evaluation | None:
        """Second thread: draw a direction and perturb along it, piece by piece, behind the replay."""
        for cell in self._workspace.segments[index]:
            for start, stop in cell.pieces:
                z = self._noise_memory(cell, start, stop, "ahead")
                if self._drawn_tied.get(cell.spec.name) != evaluation.seed:
                    self._noise.fill(z, evaluation.seed, cell.spec, start)
                if cell.owner == index and replayed.get() is _Piece.LOST:
                    return None
                self._perturb_piece(cell, start, stop, z, Move(*evaluation), "ahead", from_store=True)
            self._note_drawn(cell, evaluation.seed)
        self._drawn = evaluation.seed
        return evaluation

    def _join(self) -> Evaluation | None:
        at, self._at = self._at, None
        if self._ahead is not None:
            at = self._ahead.result()  # known until it has ended: whoever is interrupted here can still wait for it
            self._ahead = None
        return at

    def _replay_segment(
        self, index: int, store: Store, replays: Sequence[Replay], replayed: SimpleQueue[_Piece] | None
    ) -> None:
        for cell in self._workspace.segments[index]:
            if cell.owner == index:
                self._replay_parameter(cell, store[cell.position], replays, replayed)

    def _replay_parameter(
        self, cell: Cell, theta: torch.Tensor, replays: Sequence[Replay], replayed: SimpleQueue[_Piece] | None
    ) -> None:
        spec, workspace = cell.spec, self._workspace
        scratch, decay_scratch = workspace.scratch(spec.dtype, "replay"), workspace.scratch(spec.dtype, "decay")
        zs = [workspace.drawing(spec.dtype, f"z {i}") for i in range(max((len(r.seeds) for r in replays), default=0))]
        for start, stop in cell.pieces:
            piece, length = theta[start:stop], stop - start
            first, second = scratch[:length], decay_scratch[:length]
            for replay in replays:
                drawn = [z[:length] for z in zs[: len(replay.seeds)]]
                for z, seed in zip(drawn, replay.seeds, strict=True):
                    self._noise.fill(z, seed, spec, start)
                walk(piece, replay.program(decays=spec.decays), drawn, scratch=first, decay_scratch=second)
            if replayed is not None:
                replayed.put(_Piece.REPLAYED)

    def _move(self, index: int, moves: Sequence[Move], *, from_store: bool) -> None:
        """Bring the work buffer to the next evaluation's weights."""
        cells = self._workspace.segments[index]
        if from_store and not moves:
            for cell in cells:
                cell.work.copy_(self._stores[cell.owner][cell.position])
        if self._mover is not None and moves:
            if from_store:
                self._mover.replay(index, self._stores, (), Evaluation(*moves[0]))
            else:
                self._mover.move(index, moves)
            return
        for move in moves:
            if not self._workspace.keeps_noise:
                self._move_drawing(index, move, from_store=from_store)
                from_store = False
                continue
            if self._drawn != move.seed:
                self._draw(index, move.seed)
            if self._worker is None or self._workspace.elements[index] < PARALLEL_FROM:
                self._move_half(index, move, 0, 1, from_store=from_store)
            else:
                other = self._worker.submit(self._move_half, index, move, 1, 2, from_store=from_store)
                try:
                    self._move_half(index, move, 0, 2, from_store=from_store)
                finally:
                    other.result()
            from_store = False

    def _move_half(self, index: int, move: Move, part: int, parts: int, *, from_store: bool) -> None:
        """Perturb every ``parts``-th piece of the work buffer; pieces do not touch each other."""
        for cell in self._workspace.segments[index]:
            for start, stop in cell.pieces[part::parts]:
                z = self._noise_memory(cell, start, stop, "move")
                self._perturb_piece(cell, start, stop, z, move, f"move {part}", from_store=from_store)

    def _move_drawing(self, index: int, move: Move, *, from_store: bool) -> None:
        """Perturb the work buffer along noise that is drawn piece by piece and not kept."""
        for cell in self._workspace.segments[index]:
            for start, stop in cell.pieces:
                z = self._noise_memory(cell, start, stop, "move")
                self._noise.fill(z, move.seed, cell.spec, start)
                self._perturb_piece(cell, start, stop, z, move, "move 0", from_store=from_store)

    def _perturb_piece(
        self, cell: Cell, start: int, stop: int, z: torch.Tensor, move: Move, scratch: str, *, from_store: bool
    ) -> None:
        theta = self._stores[cell.owner][cell.position] if from_store else cell.work
        perturb(
            cell.work[start:stop],
            theta[start:stop],
            z,
            shift=move.shift,
            zo_eps=self._zo_eps,
            scratch=self._workspace.scratch(cell.spec.dtype, scratch)[: stop - start],
        )

    def _draw(self, index: int, seed: int) -> None:
        """Draw one direction for a segment into the noise buffer; tied weights keep theirs from segment to segment."""
        for cell in self._workspace.segments[index]:
            if self._drawn_tied.get(cell.spec.name) == seed:
                continue
            for start, stop in cell.pieces:
                self._noise.fill(self._noise_memory(cell, start, stop, "move"), seed, cell.spec, start)
            self._note_drawn(cell, seed)
        self._drawn = seed

    def _note_drawn(self, cell: Cell, seed: int) -> None:
        if cell.tied and cell.z is not None:
            self._drawn_tied[cell.spec.name] = seed

    def _noise_memory(self, cell: Cell, start: int, stop: int, purpose: str) -> torch.Tensor:
        """Where a piece of z goes: its place in the noise buffer, or scratch that the next piece overwrites."""
        if cell.z is not None:
            return cell.z[start:stop]
        return self._workspace.drawing(cell.spec.dtype, f"z {purpose}")[: stop - start]

    def _forward(self, index: int, stream: int) -> None:
        kind, batch, memory = self._model.layouts[index].kind, self._batches[stream], self._activations
        last = stream == self._order[-1]
        if kind is SegmentKind.EMBEDDING:
            memory.admit(stream, self._runs.embed(batch), partial(self._runs.forward_bytes, batch))
            if last:
                memory.prefetch(self._order[0])
            return
        activations = memory.take(stream)
        if not last or kind is SegmentKind.BLOCK:
            memory.prefetch(self._following[stream])
        if kind is SegmentKind.BLOCK:
            memory.put(stream, self._runs.block(index - 1, activations))
        else:
            self.outputs.append(self._runs.head(batch, activations))
            memory.drop(stream)
