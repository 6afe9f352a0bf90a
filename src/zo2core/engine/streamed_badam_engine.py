"""BAdam over blocks on disk: the trained segment stays in memory, and is written once, when its turn ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zo2core.build import RunOptions
from zo2core.engine.full_backprop_engine import FullBackpropEngine, RunRecord
from zo2core.errors import OptionError, ScratchError
from zo2core.methods.fused_backprop import GradientClipping
from zo2core.optimizers import BAdam
from zo2core.planning import MemoryPolicy, WriteBackPolicy
from zo2core.profiling import Trace
from zo2core.protocols import DifferentiableModel, Forward
from zo2core.sources import StreamedSource
from zo2core.types import Batch, GradientStepResult


class StreamedBAdamEngine(FullBackpropEngine):
    """A ``FullBackpropEngine`` for a model that is larger than memory, one segment of which is trained at a time.

    A turn changes one segment. When it ends, that segment's bytes are written to the run's scratch file, and BAdam has no
    state. So a run resumes at the end of a turn: the file always has one whole generation of each segment, and the record
    that names a newer one is the commit. Steps since are repeated, with the same bits.

    Args:
        model, lr, clip_value, clip_norm, memory, micro_batch_size, overlap, trace: As for ``FullBackpropEngine``.
        update: The optimizer.
        run: Where the run and its scratch file are kept.

    Raises:
        ScratchError: if the scratch file cannot be opened, another engine has it open, or segments are missing in it.
        ZO2Error: As for ``FullBackpropEngine``.
    """

    def __init__(
        self,
        model: DifferentiableModel,
        update: BAdam,
        *,
        lr: float | Callable[[int], float],
        run: RunRecord,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        memory: MemoryPolicy = MemoryPolicy(),  # noqa: B008 - frozen
        micro_batch_size: int | None = None,
        overlap: bool = True,
        trace: Trace | Path | str | None = None,
    ) -> None:
        blocks = sum(not layout.resident for layout in model.layouts)
        if blocks < 2:
            raise OptionError("model", found=f"{blocks} block", expected="at least 2", remedy="use FullBackpropEngine")
        options = RunOptions(
            memory=memory,
            micro_batch_size=micro_batch_size,
            trace=trace,
            overlap=overlap,
            write_back=WriteBackPolicy(directory=run.directory, every=1),
            streams=True,
        )
        self._every = update.every
        self._open(model, update, lr, GradientClipping(value=clip_value, norm=clip_norm), run, options)
        try:
            source = self._parts.source
            assert isinstance(source, StreamedSource), "it was planned"
            self._streamed = source
            written = {segment: source.written_version(segment) for segment in range(len(model.layouts))}
            self._method.steps = max(written.values())
            self._require_whole(written, run)
            self._parameters.begin_at(written)
            source.pin(self._turn())
        except BaseException:
            self._close_refused()
            raise

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None = None) -> GradientStepResult:
        """Take one first-order step; the last one of a turn writes the trained segment. See ``FullBackpropEngine.step``.

        Raises:
            ScratchError: if the segment cannot be written; the step was taken.
            ZO2Error: As for ``FullBackpropEngine.step``.
        """
        result = super().step(batch, forward)
        if self.steps % self._every == 0:
            self._streamed.pin(self._turn())
        return result

    def _require_whole(self, written: Mapping[int, int], run: RunRecord) -> None:
        """Refuse a scratch file that lacks what a turn before the last one wrote: the base would be taken for it.

        Raises:
            ScratchError: naming the segment.
        """
        expected = dict.fromkeys(written, 0)
        for step in range(0, self.steps, self._every):
            [segment] = self._update.segments(step, self._parameters.segments)
            expected[segment] = step + self._every
        for segment, version in expected.items():
            if written[segment] != version:
                raise ScratchError(
                    run.directory,
                    found=f"{self._model.layouts[segment].name} of step {written[segment]} in the scratch file",
                    expected=f"that of step {version}, as the other segments say",
                    remedy="restore the run's directory from a backup, or begin the run anew",
                )

    def _turn(self) -> Sequence[int]:
        """The segment that the next step trains."""
        return tuple(self._update.segments(self.steps, self._parameters.segments))
