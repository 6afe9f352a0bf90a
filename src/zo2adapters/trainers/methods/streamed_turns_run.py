"""Runs of BAdam over blocks on disk, which resume at the end of a turn."""

from __future__ import annotations

from collections.abc import Sequence

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.task import StepReport
from zo2adapters.trainers.methods.full_run import FullRun
from zo2adapters.trainers.methods.run_method import Opening
from zo2adapters.trainers.options import Order
from zo2adapters.trainers.run_directory import JOURNAL
from zo2adapters.trainers.worker_options import worker_trace
from zo2core import (
    BAdam,
    BlockLayout,
    FullBackpropEngine,
    Journal,
    OptionError,
    Runner,
    RunRecord,
    StreamedBAdamEngine,
)
from zo2core.io.direct_file import whole_pages
from zo2core.types import shown_bytes


class StreamedTurnsRun(FullRun):
    """First-order steps of one block at a time, over blocks on disk. See ``RunMethod``."""

    def engine(self, opening: Opening) -> FullBackpropEngine:
        """An engine at the end of the last turn. See the contract."""
        options, execution, update = self.options, opening.execution, self.update
        assert isinstance(update, BAdam), "other methods were refused"
        self._require_alone(opening)
        self._require_few_writes(opening.model, update)
        return StreamedBAdamEngine(
            opening.model,
            update,
            lr=self._lr,
            clip_value=options.first_order.max_grad_value,
            clip_norm=options.first_order.max_grad_norm,
            run=RunRecord(directory=options.output, journal=options.output / JOURNAL, provenance=opening.decides),
            memory=self._memory(opening.activations, None),
            micro_batch_size=options.batching.micro_batch_size,
            overlap=execution.scheduler is Order.OVERLAPPED,
            trace=worker_trace(execution.trace, None),
        )

    def first_step(self, journal: Journal) -> int:
        """The first step: how many turns were written is known only when the scratch file is open. See the contract."""
        return 0

    def writes(self, every: int | None, model: HFBlockModel) -> str:
        """One block a turn. See the contract."""
        update = self.update
        assert isinstance(update, BAdam), "other methods were refused"
        written = shown_bytes(1000 * written_bytes(model.layouts, update))
        return f"one block every {update.every} steps, {written} in 1,000"

    def after_step(self, engine: FullBackpropEngine, report: StepReport) -> list[str]:
        """Do nothing: the engine writes what has to be written. See the contract."""
        return []

    def before_recording(self, engine: FullBackpropEngine, loss: float) -> None:
        """Do nothing: no step is kept for its evaluation. See the contract."""

    def at_step(self, engine: FullBackpropEngine, model: HFBlockModel, activations: int, step: int) -> Runner:
        """Refuse: earlier weights are not kept. See the contract."""
        raise self._refusal("at", f"step {step}", "the last step, whose model is in the run's directory")

    def how_to_continue(self, engine: FullBackpropEngine) -> str:
        """At the end of which turn. See the contract."""
        return (
            f"stopped after {engine.version} steps; the run goes on from the end of its last turn:\n"
            f"  zo2 train --resume {self.options.output}"
        )

    def _require_few_writes(self, model: HFBlockModel, update: BAdam) -> None:
        """Refuse turns so short that more is written than allowed.

        Raises:
            OptionError: naming the limit.
        """
        limit, nbytes = self.options.storage.write_limit_tb, 1000 * written_bytes(model.layouts, update)
        if limit is not None and nbytes > limit * 1e12:
            raise OptionError(
                "write_limit_tb",
                found=f"{limit:g}, and turns of {update.every} steps, which write {shown_bytes(nbytes)} in 1,000 steps",
                expected="a limit that the turns keep to",
                remedy="raise the limit, or --switch-every",
            )


def written_bytes(layouts: Sequence[BlockLayout], update: BAdam) -> float:
    """Bytes that a step writes on average: each segment once in an epoch of turns.

    Args:
        layouts: Segments in visiting order.
        update: The optimizer.
    """
    sizes = [whole_pages(layout.nbytes) for layout in layouts if layout.parameters]
    return sum(sizes) / len(sizes) / update.every
