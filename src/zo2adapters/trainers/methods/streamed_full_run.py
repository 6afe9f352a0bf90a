"""Runs of all parameters over blocks on disk, which resume from their last commit."""

from __future__ import annotations

from collections.abc import Sequence

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.methods.full_run import FullRun
from zo2adapters.trainers.methods.run_method import Opening
from zo2adapters.trainers.options import Order
from zo2adapters.trainers.worker_options import worker_trace
from zo2core import BlockLayout, BlockUpdate, Engine, HostPlan, Journal, MemoryPolicy, StepResult
from zo2core.build import RunOptions, request_of
from zo2core.errors import OptionError
from zo2core.io.direct_file import whole_pages
from zo2core.methods.states import kept_blocks
from zo2core.planning.machine import Machine
from zo2core.planning.run_spec import RunRequest, plan
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.types import shown_bytes

WRITE_BUDGET_TB = 1.2
"""Terabytes that 1,000 steps may write without --write-limit-tb: a hundredth of what a consumer SSD bears in a year. One of
1 TB is rated for about 600 TB in its five years, which are 120 a year."""


class StreamedFullRun(FullRun):
    """First-order steps of all parameters, over blocks on disk. See ``RunMethod``."""

    @property
    def _commit_every(self) -> int:
        """Steps between two commits."""
        return self.options.storage.snapshot_every or 1

    def engine(self, opening: Opening) -> Engine:
        """An engine at the last commit. See the contract."""
        options, execution, update = self.options, opening.execution, self.update
        self._require_alone(opening)
        self._require_few_writes(opening, update)
        return Engine(
            opening.model,
            self._method(update),
            commit_every=self._commit_every,
            memory=self._memory(opening.activations, None),
            micro_batch_size=options.batching.micro_batch_size,
            overlap=execution.scheduler is Order.OVERLAPPED,
            trace=worker_trace(execution.trace, None),
            run=options.output,
            provenance=opening.decides,
        )

    def first_step(self, journal: Journal) -> int:
        """The first step: which one was committed is known only when the files are open. See the contract."""
        return 0

    def writes(self, every: int | None, model: HFBlockModel, host: HostPlan) -> str:
        """Blocks that change. See the contract."""
        update = self.update
        written = shown_bytes(1000 * self._written(model, update, host.buckets or 0))
        often = self._commit_every
        what = (
            f"one block every {update.turn} steps"
            if update.turn is not None
            else f"changed blocks with their states, a commit every {'step' if often == 1 else f'{often} steps'}"
        )
        return f"{what}, {written} in 1,000 steps"

    def after_step(self, engine: Engine, report: StepResult) -> list[str]:
        """Commit the last step. See the contract."""
        if engine.version == self.options.steps:
            engine.commit()
        return []

    def before_recording(self, engine: Engine, loss: float) -> None:
        """Do nothing: no step is kept for its evaluation. See the contract."""

    def at_step(self, engine: Engine, model: HFBlockModel, activations: int, step: int) -> Engine:
        """Refuse: earlier weights are not kept. See the contract."""
        raise self._refusal("at", f"step {step}", "the last step, whose model is in the run's directory")

    def how_to_continue(self, engine: Engine) -> str:
        """From which commit. See the contract."""
        return (
            f"stopped after {engine.version} steps; the run goes on from the commit of step {engine.committed}:\n"
            f"  {self.options.resume_command}"
        )

    def _require_few_writes(self, opening: Opening, update: BlockUpdate) -> None:
        """Refuse a run that writes more than a disk bears, unless the user allows it."""
        model, given = opening.model, self.options.storage.write_limit_tb
        limit = WRITE_BUDGET_TB if given is None else given
        request = self._request(model, update, self._memory(opening.activations, None))
        planned = plan(request, Machine(), MeasuredSpeeds(model.weights))
        nbytes = self._written(model, update, planned.host_plan.buckets or 0)
        if 1000 * nbytes > limit * 1e12:
            total = shown_bytes(self.options.steps * nbytes)
            remedy = "--switch-every" if update.turn is not None else "--snapshot-every, where memory has room for blocks"
            raise OptionError(
                "write_limit_tb",
                found=f"{'none, which is ' if given is None else ''}{limit:g}, and a run that writes "
                f"{shown_bytes(1000 * nbytes)} in 1,000 steps, {total} in its {self.options.steps}",
                expected="a limit that the run keeps to: writing wears disks out",
                remedy=f"pass --write-limit-tb {1000 * nbytes / 1e12:.2g} to allow it, or raise {remedy}",
            )

    def _request(self, model: HFBlockModel, update: BlockUpdate, memory: MemoryPolicy) -> RunRequest:
        options = RunOptions(memory=memory, run=self.options.output, commit_every=self._commit_every)
        return request_of(model, self._method(update), options)

    def _written(self, model: HFBlockModel, update: BlockUpdate, buckets: int) -> float:
        stored = self._request(model, update, MemoryPolicy()).on_disk
        return written_bytes(stored, update, buckets, self._commit_every)


def written_bytes(layouts: Sequence[BlockLayout], update: BlockUpdate, buckets: int, commit_every: int) -> float:
    """Bytes that a step writes on average.

    Args:
        layouts: Segments in visiting order, with the states that are stored with them.
        update: The optimizer. If it has turns, each segment is written once in an epoch of them.
        buckets: Number of buckets for blocks.
        commit_every: Steps between two commits.
    """
    sizes = [whole_pages(layout.nbytes) for layout in layouts if layout.parameters]
    if update.turn is not None:
        return sum(sizes) / len(sizes) / update.turn
    if commit_every == 1:
        return sum(sizes)
    blocks = [whole_pages(layout.nbytes) for layout in layouts if not layout.resident]
    seldom = sum(sizes) - sum(blocks) + sum(blocks[: kept_blocks(buckets, commit_every)])
    return sum(sizes) - seldom + seldom / commit_every
