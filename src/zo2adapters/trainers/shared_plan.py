"""Plan of several runs that share their base: how many fit, what one more costs, and when compute is the limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.run_plan import RunPlan, decoding_seconds, duration, memory_words
from zo2core import HostPlan, MemoryPolicy
from zo2core.errors import MemoryBudgetError
from zo2core.methods.first_order import TRAINED_COPIES
from zo2core.perturbation import Perturbation, factor_bytes
from zo2core.planning.machine import Machine
from zo2core.planning.memory_plan import MemoryPart
from zo2core.planning.run_spec import plan
from zo2core.planning.shared_runs import MOST_RUNS, RunNeeds, shared_request
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.planning.write_interval import streamed_bytes
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.types import shown_bytes, trained


@dataclass(frozen=True, kw_only=True)
class SharedRunsPlan:
    """Expected memory and time of equal runs that share their base."""

    run: RunPlan  # of one of the runs, alone
    runs: int
    host_plan: HostPlan  # of all runs
    memory_a_run: int  # bytes that one run more takes
    most_runs: int  # largest number of runs that fit
    read_bytes: int  # that one step of all runs reads
    disk_seconds: float  # of these reads, which overlap with compute
    decoding_seconds: float  # that a step of all runs takes to decode blocks, once for all
    seconds_a_run: float  # of compute that one run more adds to a step of all runs
    free_runs: int  # runs whose compute takes no longer than the reads; 0: compute is the limit from the first run on

    @property
    def seconds(self) -> float:
        """Expected seconds of a step of all runs."""
        return max(self.decoding_seconds + self.runs * self.seconds_a_run, self.disk_seconds)

    def to_json(self) -> str:
        """The plan as JSON; that of one run alone is in ``run``."""
        sums = {"seconds": self.seconds, "seconds_apart": self.runs * self.run.seconds, "nbytes": self.host_plan.nbytes}
        return json.dumps({**asdict(self), **sums})

    def summary(self) -> list[str]:
        """Lines that say whether the runs fit, how long they take, and how much they write."""
        most = f"{self.most_runs} runs or more fit" if self.most_runs == MOST_RUNS else f"At most {self.most_runs} runs fit"
        each = f"{duration(self.seconds)} a step of all runs"
        total = f"{duration(self.run.steps * self.seconds)} in all, {each}" if self.run.steps else each
        return [
            f"Memory: {memory_words(self.host_plan)}. {most}.",
            f"Time: about {total}.",
            self.run.disk_writes(self.runs),
        ]

    def table(self) -> str:
        """The plan as a table."""
        limit = (
            "compute, from the first run on"
            if self.free_runs == 0
            else f"the disk up to {self.free_runs} runs, then compute"
        )
        rows = [
            ("blocks", "all in memory" if self.host_plan.buckets is None else "streamed from disk"),
            (
                "one run more takes",
                f"{shown_bytes(self.memory_a_run)}, and {duration(self.seconds_a_run)} of compute a step",
            ),
            ("runs that fit", f"{self.most_runs}{' or more' if self.most_runs == MOST_RUNS else ''}"),
            ("read per step of all", shown_bytes(self.read_bytes)),
            ("disk, overlapped", duration(self.disk_seconds)),
            ("decoding, once for all", duration(self.decoding_seconds)),
            ("limited by", limit),
            (
                "expected per step of all",
                f"{duration(self.seconds)}; one run after the other {duration(self.runs * self.run.seconds)}",
            ),
        ]
        if self.run.steps:
            rows.append(("expected in total", f"{duration(self.run.steps * self.seconds)} ({self.run.steps} steps of each)"))
        title = f"host memory of {self.runs} runs"
        return "\n".join([title, self.host_plan.table(), "", *(f"{name:26s} {value}" for name, value in rows)])


def needs_of(model: HFBlockModel, activations: int, least: int, perturbation: Perturbation | None) -> RunNeeds:
    """What a run needs beside its base.

    Args:
        model: The model, with the run's adapter.
        activations: Bytes for activations.
        least: Bytes for activations with which the run could do.
        perturbation: Perturbation of zeroth-order steps; None: steps by gradients.
    """
    if perturbation is None:
        kept = TRAINED_COPIES * sum(spec.nbytes for spec in trained(model.layouts))
    else:
        kept = factor_bytes(perturbation, model.layouts)
    return RunNeeds(activations=activations, least=least, kept=kept)


def memory_together(
    base: HFBlockModel, needs: RunNeeds, memory: int | str, *, graph_bytes: int = 0
) -> Callable[[int], HostPlan]:
    """Return a function that plans the host memory of so many equal runs, which share their base.

    It raises MemoryBudgetError if they do not fit.

    Args:
        base: The base without an adapter.
        needs: What each needs beside the base.
        memory: Host memory the process may use in total.
        graph_bytes: Bytes of a block's graph in a usual step, which is kept where memory is left over; 0: there is none.
    """
    speeds, on_disk = MeasuredSpeeds(base.weights), laid_out_as_on_disk(base.layouts, base.weights)
    blocks = sum(not layout.resident for layout in base.layouts)

    def planned(runs: int) -> HostPlan:
        request = shared_request(base.layouts, on_disk, MemoryPolicy(host=memory), [needs] * runs)
        host_plan = plan(request, Machine(), speeds).host_plan
        if not graph_bytes:
            return host_plan
        kept = min(max(host_plan.spare, 0) // runs // graph_bytes, blocks)
        # One run at a time computes, so that graphs have the others' room for computing.
        beyond = max(runs * kept * graph_bytes - (runs - 1) * needs.least, 0)
        graphs = MemoryPart(f"graphs of {kept} of {blocks} blocks of each run, beyond what is reserved", beyond)
        return replace(host_plan, parts=(*host_plan.parts, graphs))

    return planned


def plan_shared_runs(
    base: HFBlockModel,
    run: RunPlan,
    needs: RunNeeds,
    *,
    runs: int,
    memory: int | str = "auto",
    passes: int = 1,
    graph_bytes: int = 0,
) -> SharedRunsPlan:
    """Plan equal runs on the CPU that share their base.

    Args:
        base: The base without an adapter.
        run: Plan of one of the runs, alone.
        needs: What each needs beside the base.
        runs: Number of runs.
        memory: Host memory the process may use in total.
        passes: Passes of a step over the blocks: 2 for a step by gradients.
        graph_bytes: As for ``memory_together``.

    Raises:
        MemoryBudgetError: if they do not fit; the error says how many do.
        CheckpointError: if the checkpoint cannot be read.
    """
    planned = memory_together(base, needs, memory, graph_bytes=graph_bytes)
    most = _most(planned)
    try:
        host_plan = planned(runs)
    except MemoryBudgetError as error:
        found = f"{error.found} for {runs} runs, of which {most} fit"
        raise MemoryBudgetError("runs", found=found, expected=error.expected, remedy=error.remedy) from error
    speeds = MeasuredSpeeds(base.weights)
    layouts = base.layouts if host_plan.buckets is None else laid_out_as_on_disk(base.layouts, base.weights)
    read = passes * streamed_bytes(layouts, host_plan.buckets)
    disk = read / speeds.reading(layouts) if read else 0.0
    decoding = passes * decoding_seconds(base.layouts)
    own = max(run.forward_seconds + run.update_seconds - decoding, 0.0)
    return SharedRunsPlan(
        run=run,
        runs=runs,
        host_plan=host_plan,
        memory_a_run=needs.activations + needs.kept,
        most_runs=most,
        read_bytes=read,
        disk_seconds=disk,
        decoding_seconds=decoding,
        seconds_a_run=own,
        free_runs=MOST_RUNS if own == 0.0 else min(MOST_RUNS, int(max(disk - decoding, 0.0) / own)),
    )


def _most(planned: Callable[[int], object]) -> int:
    """The largest number of runs for which a plan fits."""
    fits, too_many = 0, MOST_RUNS + 1
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        try:
            planned(count)
            fits = count
        except MemoryBudgetError:
            too_many = count
    return fits
