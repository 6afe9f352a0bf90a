"""What a run needs before its engine is opened: its inputs are read, its batches divided such that
the largest one that can be drawn fits in memory, and its memory is planned, once.

If a whole batch has no room, as many rows run at a time as have some: *micro-batches*. If a single
row has none, its logits are computed in chunks. Either changes a result by rounding, so the choice
is part of the run's record, and a run that is resumed keeps it. What the user has given stays as it
is. Where nothing helps, the run is refused before its first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, TypeVar

from zo2adapters.models.batches import require_chunkable
from zo2adapters.models.checkpoint import cached_chunk
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.registry import function_file
from zo2adapters.trainers.memory_probe import measured_bytes
from zo2adapters.trainers.methods import GradientRun, StepMemory, ZerothOrderRun, method_of
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.probes import measured_reading_cost
from zo2adapters.trainers.run_inputs import (
    Division,
    RowlessInputs,
    RowShapes,
    RunInputs,
    RunStart,
)
from zo2core import Workers, ZO2Error
from zo2core.errors import MemoryBudgetError
from zo2core.planning.memory import Machine, RunRequest, RunSpec, plan
from zo2core.planning.speeds import MeasuredSpeeds

Inputs = TypeVar("Inputs", RunInputs, RowlessInputs)


class FittingPlan(NamedTuple):
    """The plan of a run whose largest batch fits, and what it follows from."""

    method: ZerothOrderRun | GradientRun
    model: HFBlockModel
    shapes: RowShapes
    memory: StepMemory
    request: RunRequest
    spec: RunSpec
    speeds: MeasuredSpeeds

    @property
    def options(self) -> TrainOptions:
        """The options of the run."""
        return self.method.options

    def read_seconds(self, nbytes: float) -> float:
        """Seconds to read so many bytes of blocks from disk."""
        return nbytes / self.speeds.reading(self.spec.layouts) if nbytes else 0.0

    def reading_cost(self, nbytes: float) -> float:
        """Seconds by which blocks are computed later while so many bytes are read."""
        if not nbytes:
            return 0.0
        running = self.options.batching.micro_batch_size
        return nbytes * measured_reading_cost(self.model, self.shapes.step, running)


class PreparedRun(NamedTuple):
    """A run whose inputs were read, and whose memory was planned."""

    inputs: RunInputs
    method: ZerothOrderRun | GradientRun
    memory: StepMemory  # what its engine reserves
    # None: its engine alone knows the memory, that of a GPU or of a base that others share
    fitting: FittingPlan | None


def prepare(start: RunStart, *, digests: bool = False) -> PreparedRun:
    """Read what a run needs before it starts, divide the batches of a new one, and plan its memory.
    See ``RunInputs.read``.
    """
    inputs = RunInputs.read(start, digests=digests)
    on_cpu = inputs.options.storage.device == "cpu"
    fitting = None
    if on_cpu and not start.resumes:
        inputs, fitting = _divided_alike(inputs, start)
    elif start.workers is not None:
        inputs = _agreed(inputs, inputs, start)
    start = replace(start, options=inputs.options)
    method = method_of(start)
    if start.shared is not None or not on_cpu:
        memory = method.reserved_bytes(inputs.model, inputs.shapes())
        return PreparedRun(inputs, method, memory, None)
    if fitting is None:
        fitting = fitting_plan(method, inputs.model, inputs.shapes())
    return PreparedRun(inputs, method, fitting.memory, fitting)


def _divided_alike(inputs: RunInputs, start: RunStart) -> tuple[RunInputs, FittingPlan | None]:
    """Divide the batches of a new run as all of its workers do; without a plan, if it has to be
    made anew.
    """
    if start.workers is None:
        return divided(inputs)
    chosen, fitting = inputs, None
    with suppress(MemoryBudgetError):  # which the worker's own plan tells
        chosen, fitting = divided(inputs, start.workers)
    agreed = _agreed(inputs, chosen, start)
    return agreed, fitting if agreed is chosen else None


def divided(inputs: Inputs, workers: Workers | None = None) -> tuple[Inputs, FittingPlan]:
    """Choose micro-batches and chunks of a run with which its largest batch fits in this process.

    Raises:
        MemoryBudgetError: if it fits with none.
    """
    shapes = inputs.shapes()  # the largest batch has the same rows, however it is divided
    undivided = inputs.model.loss_chunk
    refusal: MemoryBudgetError | None = None
    for division in _divisions(inputs):
        method = method_of(RunStart(division.options, workers=workers))
        try:
            return division, fitting_plan(method, division.model, shapes)
        except MemoryBudgetError as error:
            refusal = error
    inputs.model.loss_chunk = undivided
    inputs.model.pass_peaks = None
    assert refusal is not None, "the undivided batch was planned"
    raise refusal


def fitting_plan(
    method: ZerothOrderRun | GradientRun, model: HFBlockModel, shapes: RowShapes
) -> FittingPlan:
    """Plan a run, whose prompts are continued together if they have room, else one at a time.

    Raises:
        MemoryBudgetError: if the largest batch has no room.
    """
    on_device = method.options.storage.device != "cpu"
    neighbours = 1 if method.workers is None else method.workers.neighbours
    machine = Machine(in_place=not on_device, on_host=not on_device, neighbours=neighbours)
    masking = shapes.masking
    peaks = model.pass_peaks
    is_measured = peaks is not None and peaks.masking is masking
    if peaks is not None and peaks.both is None and method.has_gradient:
        is_measured = False
    if not on_device and not is_measured:
        model.pass_peaks = measured_bytes(
            model, shapes.largest.lengths[0], masking, has_gradient=method.has_gradient
        )
    speeds = MeasuredSpeeds(model.weights)
    refusal: MemoryBudgetError | None = None
    for together in (True, False) if shapes.prompts else (True,):
        memory = method.reserved_bytes(model, shapes, together=together)
        request = method.request(model, memory, rows=len(shapes.largest.lengths))
        try:
            spec = plan(request, machine, speeds)
        except MemoryBudgetError as error:
            refusal = error
        else:
            return FittingPlan(method, model, shapes, memory, request, spec, speeds)
    assert refusal is not None, "a plan was made"
    raise refusal


def _divisions(inputs: Inputs) -> Iterator[Inputs]:
    """The inputs with each division, those first that change least.

    They have one model, which is as the last one needs it.
    """
    yield inputs
    batching = inputs.options.batching
    if not _is_divisible(inputs.options):
        return
    rows = [batching.micro_batch_size]
    if batching.micro_batch_size is None:
        rows += _fewer_rows(inputs)
    for fewer in rows[1:]:
        with suppress(ZO2Error):  # options that take no micro-batches
            yield _divided_by(inputs, fewer, batching.loss_chunk)
    if not inputs.model.takes_chunks or inputs.model.loss_chunk is not None:
        return
    chunk = cached_chunk(inputs.model.config)
    for fewer in rows:
        with suppress(ZO2Error):  # options that take no chunks
            yield _divided_by(inputs, fewer, chunk)


def _is_divisible(options: TrainOptions) -> bool:
    """Whether a batch may be divided: not where all bits are to be MeZO's, nor where a function of
    the user's own gets the batch.
    """
    return not options.optimization.is_exact and function_file(options.objective) is None


def _fewer_rows(inputs: RunInputs | RowlessInputs) -> list[int]:
    """Rows of ever smaller micro-batches, down to one row with all its sequences."""
    count = len(inputs.largest.lengths)
    least = inputs.sequences_of_a_row
    halves = [count >> times for times in range(1, count.bit_length())]
    possible = dict.fromkeys(max(half, least) for half in halves)
    return [rows for rows in possible if rows < count]


def _divided_by(inputs: Inputs, rows: int | None, chunk: int | None) -> Inputs:
    """The inputs with this division."""
    options = inputs.options.having(micro_batch_size=rows, loss_chunk=chunk)
    options.require_valid()
    batching = inputs.options.batching
    if chunk is not None and chunk != inputs.model.loss_chunk:
        require_chunkable(inputs.model.skeleton)
        inputs.model.loss_chunk = chunk
        inputs.model.pass_peaks = None  # the head's are others
    division = Division(
        batching.batch_size,
        None if rows == batching.micro_batch_size else rows,
        None if chunk == batching.loss_chunk else chunk,
    )
    return replace(inputs, options=options, division=division)


def _agreed(inputs: RunInputs, chosen: RunInputs, start: RunStart) -> RunInputs:
    """The division of all workers: the recorded one, if some of them resume the run, else the
    smallest, so that it fits for each. A worker for which none fits is refused by its own plan.
    """
    assert start.workers is not None, "several workers agree"
    batching = chosen.options.batching
    own: tuple[int | None, int | None] = batching.micro_batch_size, batching.loss_chunk
    gathered = start.workers.all_gather([*own, start.resumes], "division")
    recorded = [(rows, chunk) for rows, chunk, resumes in gathered if resumes]
    smallest_rows = min((rows for rows, _, _ in gathered if rows), default=None)
    smallest_chunk = min((chunk for _, chunk, _ in gathered if chunk), default=None)
    agreed = recorded[0] if recorded else (smallest_rows, smallest_chunk)
    if start.resumes or agreed == own:
        return chosen
    if own[1] is not None and agreed[1] is None:  # chosen here, for a model that had none
        inputs.model.loss_chunk = None
        inputs.model.pass_peaks = None
    return _divided_by(inputs, *agreed)
