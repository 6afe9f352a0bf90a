"""First-order steps of all parameters over blocks on disk: weights and optimizer states change there, and are committed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from zo2core.build import GenerationPolicy, RunOptions
from zo2core.engine.full_backprop_engine import FullBackpropEngine, RunRecord, trained_bytes
from zo2core.errors import OptionError
from zo2core.io.direct_file import whole_pages
from zo2core.methods.fused_backprop import GradientPolicy
from zo2core.optimizers import Delayed
from zo2core.planning import MemoryPolicy
from zo2core.planning.host_plan import MOST_USEFUL_BUCKETS
from zo2core.profiling import Trace
from zo2core.protocols import BlockUpdate, DifferentiableModel, Forward
from zo2core.sources import StreamedSource
from zo2core.types import Batch, BlockLayout, GradientStepResult


class StreamedFullBackpropEngine(FullBackpropEngine):
    """A ``FullBackpropEngine`` for a model that is larger than memory.

    The segments of a step, with their optimizer states, are a generation on disk. A run resumes from the last one that was
    committed, and repeats the steps since with the same bits. Optimizer states are read only where a step updates them: on
    the way back.

    An optimizer that forgets its states after a turn, as ``BAdam`` does, keeps them in memory. The segment of the turn stays
    there, too, and is written once, when the turn ends; that is the commit.

    Args:
        model, update, lr, gradients, memory, micro_batch_size, overlap, trace: As for ``FullBackpropEngine``.
        run: Where the run and its files of segments are kept.
        commit_every: Steps between two commits. With more than 1, embedding, head and the blocks that memory has room for
            are written that seldom; other blocks are written at each step. Without effect if the optimizer has turns.

    Raises:
        OptionError: if the update is ``Delayed``, or the model has one block only.
        ScratchError: if the files cannot be opened, or another engine has them open.
        ZO2Error: As for ``FullBackpropEngine``.
    """

    def __init__(
        self,
        model: DifferentiableModel,
        update: BlockUpdate,
        *,
        lr: float | Callable[[int], float],
        run: RunRecord,
        commit_every: int = 1,
        gradients: GradientPolicy = GradientPolicy(),  # noqa: B008 - frozen
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        micro_batch_size: int | None = None,
        overlap: bool = True,
        trace: Trace | Path | str | None = None,
    ) -> None:
        blocks = sum(not layout.resident for layout in model.layouts)
        if blocks < 2:
            raise OptionError("model", found=f"{blocks} block", expected="at least 2", remedy="use FullBackpropEngine")
        if isinstance(update, Delayed):
            raise OptionError(
                "update",
                found="Delayed, whose thread changes states while they are written",
                expected="an optimizer that has ended with a segment when it is written",
                remedy="pass the optimizer that it delays, or use FullBackpropEngine",
            )
        if not isinstance(commit_every, int) or commit_every < 1:
            expected = "a number of steps of at least 1"
            raise OptionError("commit_every", found=repr(commit_every), expected=expected, remedy="pass such a number")
        options = dataclasses.replace(
            options_on_disk(update, model.layouts, run.directory),
            memory=memory,
            micro_batch_size=micro_batch_size,
            trace=trace,
            overlap=overlap,
        )
        self._turn = update.turn
        self._every = commit_every if update.turn is None else update.turn
        self._open(model, update, lr, gradients, run, options)
        with self._closed_if_refused():
            source, generations = self._parts.source, self._parts.generations
            assert isinstance(source, StreamedSource), "it was planned"
            assert generations is not None, "it was planned"
            self._streamed, self._generations = source, generations
            self._method.steps = generations.step
            self._method.load_values(generations.values)
            self._trained.begin_at({segment: generations.version(segment) for segment in range(len(model.layouts))})
            source.pin(self._kept())

    @property
    def committed(self) -> int:
        """The step of the last commit, from which a run resumes."""
        return self._generations.step

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None = None) -> GradientStepResult:
        """Take one first-order step, and commit it if it is due. See ``FullBackpropEngine.step``.

        Raises:
            ScratchError: if a segment cannot be written; the engine is closed then.
            ZO2Error: As for ``FullBackpropEngine.step``.
        """
        try:
            result = super().step(batch, forward)
        finally:
            self._streamed.skip_states()
        if self.steps % self._every == 0:
            self.commit()
        return result

    def commit(self) -> None:
        """Commit the present step durably. An optimizer with turns is committed at their ends only.

        Raises:
            ScratchError: if it cannot be written; the engine is closed then.
        """
        self._use.require_open()
        if self.steps == self.committed or (self._turn is not None and self.steps % self._turn):
            return
        try:
            self._streamed.write_kept()
            self._generations.commit(self.steps, self._method.values())
        except BaseException:
            self._use.close()  # memory and disk may disagree about the segments
            raise
        self._streamed.pin(self._kept())

    def _kept(self) -> Sequence[int]:
        """Segments that stay in memory until the next commit."""
        if self._turn is not None:
            return tuple(self._update.segments(self.steps, self._trained.segments))
        if self._every == 1:
            return ()
        layouts = self._model.layouts
        residents = [index for index, layout in enumerate(layouts) if layout.resident]
        blocks = [index for index, layout in enumerate(layouts) if not layout.resident]
        return (*residents, *blocks[: kept_blocks(self._streamed.capacity, self._every)])


def options_on_disk(update: BlockUpdate, layouts: Sequence[BlockLayout], directory: Path) -> RunOptions:
    """What a run of all parameters over blocks on disk asks for, by which it is planned.

    Args:
        update: The optimizer. One with turns keeps its states in memory; otherwise they are stored with their segments.
        layouts: Segments in visiting order.
        directory: Directory of the files.
    """
    states = [() if update.turn is not None else tuple(update.states(layout)) for layout in layouts]
    changing = 1 if update.turn is not None else sum(not layout.resident for layout in layouts)
    # A first step makes the states of one segment before they are in its bucket.
    made = max(sum(spec.nbytes for spec in of_segment) for of_segment in states)
    gradients, in_memory = trained_bytes(update, layouts)
    return RunOptions(
        generations=GenerationPolicy(directory=directory, states=states, changing=changing),
        gradient_bytes=gradients,
        optimizer_bytes=made if update.turn is None else in_memory,
    )


def read_bytes(layouts: Sequence[BlockLayout], buckets: int, commit_every: int, *, measures: bool = False) -> int:
    """Bytes of blocks that a step reads from disk, for an optimizer without turns.

    Weights of blocks that are not in a bucket are read on the way there and on the way back. Optimizer states are read on
    the way back. At the end of a step the first blocks are in the buckets, and at its turn the last blocks.

    Args:
        layouts: Segments in visiting order, with the states that are stored with them.
        buckets: Number of buckets for blocks.
        commit_every: Steps between two commits.
        measures: Whether a sweep before the one that updates measures all gradients.
    """
    kept = kept_blocks(buckets, commit_every)
    blocks = [layout for layout in layouts if not layout.resident][kept:]
    count, free = len(blocks), buckets - kept
    if free >= count:
        return 0
    weights = [whole_pages(layout.weight_bytes) for layout in blocks]
    states = [whole_pages(layout.nbytes) - of_weights for layout, of_weights in zip(blocks, weights, strict=True)]
    moved = sum(weights[free:]) + sum(weights[: count - free])
    return moved * (2 if measures else 1) + sum(states[max(free, count - free) :]) + sum(states[: count - free])


def kept_blocks(buckets: int, commit_every: int) -> int:
    """Blocks that stay in memory from one commit to the next.

    Args:
        buckets: Number of buckets for blocks.
        commit_every: Steps between two commits.
    """
    return 0 if commit_every == 1 else max(buckets - MOST_USEFUL_BUCKETS, 0)
