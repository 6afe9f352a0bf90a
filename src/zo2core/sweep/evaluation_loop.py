"""Forwards of the weights as they are: as many batches a sweep as the memory reserved for activations holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from zo2core.errors import BatchError, OptionError
from zo2core.protocols import Forward, Objective
from zo2core.sweep.microbatch import combined_loss, labelled_tokens, split_rows
from zo2core.sweep.objective import require_number
from zo2core.types import Batch, EvaluationResult
from zo2core.workers import Workers


def fill_sweeps(batches: Iterable[Batch], forward: Forward, allowed: int) -> Iterator[list[Batch]]:
    """Group batches, in order, so that what a group holds between segments and its largest forward fit together.

    Args:
        batches: Prepared; taken up one by one.
        forward: What they will run through; says what a batch takes.
        allowed: Bytes for activations. A batch that does not fit alone is a group of its own.

    Yields:
        At least one batch each time.

    Raises:
        BatchError: if the model cannot take a batch.
    """
    group: list[Batch] = []
    held = largest = 0
    for batch in batches:
        own, running = forward.held_bytes(batch), forward.forward_bytes(batch)
        if group and held + own + max(largest, running) > allowed:
            yield group
            group, held, largest = [], 0, 0
        group.append(batch)
        held, largest = held + own, max(largest, running)
    if group:
        yield group


def evaluate(
    forwards: Callable[[Iterable[Batch]], Iterator[list[torch.Tensor]]],
    batches: Iterable[Batch],
    rows: int | None,
    workers: Workers,
) -> EvaluationResult:
    """The mean loss over batches.

    Args:
        forwards: Runs batches and yields their losses, 0-d, a list a sweep.
        batches: With labels. Each counts by its labelled tokens.
        rows: Rows of a micro-batch; None runs each batch whole.
        workers: Take the batches in turns; each batch's loss is what one worker alone would make.

    Raises:
        BatchError: if the model cannot take a batch, or there is no labelled token.
        WorkerError: if another worker is silent, or has other batches.
    """
    began = time.perf_counter()
    tokens: list[list[int]] = []  # of each micro-batch of each batch
    digest = 0  # of all batches

    def micro_batches() -> Iterator[Batch]:
        nonlocal digest
        for number, batch in enumerate(batches):
            digest ^= workers.digest([batch]) * (2 * number + 1) % 2**64
            if number % workers.size != workers.rank:
                continue
            tokens.append([])
            for micro_batch in split_rows(batch, rows):
                tokens[-1].append(labelled_tokens(micro_batch))
                yield micro_batch

    losses, sweeps = _outputs(forwards(micro_batches()), may_be_none=workers.size > 1)
    in_order = iter(losses)
    of_batches = [combined_loss([next(in_order) for _ in batch], batch).item() for batch in tokens]
    counts = [sum(counts_of_batch) for counts_of_batch in tokens]
    workers.require_same("batches", digest)
    of_all = workers.in_order(list(zip(of_batches, counts, strict=True)))
    of_batches, counts = [loss for loss, _ in of_all], [count for _, count in of_all]
    if sum(counts) == 0:
        raise BatchError(
            "batches", found="no labelled token", expected="at least one", remedy="pass labels that are not all -100"
        )
    mean = math.fsum(loss * count for loss, count in zip(of_batches, counts, strict=True) if count) / sum(counts)
    seconds = time.perf_counter() - began
    return EvaluationResult(mean, tuple(of_batches), sum(counts), sweeps, seconds, tuple(counts))


def evaluate_objective(
    forwards: Callable[[Iterable[Batch]], Iterator[list[torch.Tensor]]],
    batches: Iterable[Batch],
    rows: int | None,
    objective: Objective,
) -> EvaluationResult:
    """What an objective makes of all batches together, and of each.

    Args:
        forwards: Runs batches and yields what the head gives, a list a sweep.
        batches: What the objective takes.
        rows: Rows of a micro-batch; None runs each batch whole.
        objective: Says how batches are cut, and how outputs join.

    Raises:
        BatchError: if the objective cannot take a batch, or there is none.
        OptionError: if it is no objective, or what it makes of outputs is no number.
    """
    if not isinstance(objective, Objective):
        raise OptionError(
            "forward",
            found=f"a {type(objective).__name__} that does not say how batches join",
            expected="an Objective, which has split and loss",
            remedy="add these two, or use forwards()",
        )
    began = time.perf_counter()
    cut: list[Sequence[Batch]] = []

    def micro_batches() -> Iterator[Batch]:
        for batch in batches:
            cut.append(objective.split(batch, rows) or [batch])
            yield from cut[-1]

    outputs, sweeps = _outputs(forwards(micro_batches()))
    in_order = iter(outputs)
    of_batches = [require_number(objective.loss([next(in_order) for _ in batch], batch)) for batch in cut]
    whole = require_number(objective.loss(outputs, [micro_batch for batch in cut for micro_batch in batch]))
    losses = tuple(loss.item() for loss in of_batches)
    return EvaluationResult(whole.item(), losses, 0, sweeps, time.perf_counter() - began)


def _outputs(sweeps: Iterator[list[torch.Tensor]], *, may_be_none: bool = False) -> tuple[list[torch.Tensor], int]:
    """What the head gave for all batches in order, and how many sweeps that took."""
    outputs_of_sweeps = list(sweeps)
    outputs = [output for outputs_of_sweep in outputs_of_sweeps for output in outputs_of_sweep]
    if not outputs and not may_be_none:
        raise BatchError("batches", found="none", expected="at least one", remedy="pass batches to evaluate")
    return outputs, len(outputs_of_sweeps)
