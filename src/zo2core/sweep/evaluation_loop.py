"""Evaluations of the unperturbed weights, with as many batches in a sweep as the memory for activations allows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from zo2core.errors import BatchError, OptionError
from zo2core.protocols import Forward, Objective
from zo2core.sweep.microbatch import combined_loss, labelled_tokens, require_number, split_rows
from zo2core.types import Batch, EvaluationResult
from zo2core.workers import Workers


def fill_sweeps(batches: Iterable[Batch], forward: Forward, allowed: int) -> Iterator[list[Batch]]:
    """Group batches, in order, so that a group's activations between segments and its largest forward fit in memory."""
    group: list[Batch] = []
    held = largest = 0
    for batch in batches:
        batch_held, running = forward.held_bytes(batch), forward.forward_bytes(batch)
        if group and held + batch_held + max(largest, running) > allowed:
            yield group
            group, held, largest = [], 0, 0
        group.append(batch)
        held, largest = held + batch_held, max(largest, running)
    if group:
        yield group


def evaluate(
    forwards: Callable[[Iterable[Batch]], Iterator[list[torch.Tensor]]],
    batches: Iterable[Batch],
    rows: int | None,
    workers: Workers,
) -> EvaluationResult:
    """Compute the mean loss over batches."""
    started = time.perf_counter()
    tokens: list[list[int]] = []  # labelled tokens of each micro-batch of each batch
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

    outputs, sweeps = _outputs(forwards(micro_batches()), may_be_empty=workers.size > 1)
    in_order = iter(outputs)
    losses = [combined_loss([next(in_order) for _ in batch], batch).item() for batch in tokens]
    counts = [sum(counts_of_batch) for counts_of_batch in tokens]
    workers.require_same("batches", digest)
    of_all = workers.in_order(list(zip(losses, counts, strict=True)))
    losses, counts = [loss for loss, _ in of_all], [count for _, count in of_all]
    if sum(counts) == 0:
        raise BatchError(
            "batches", found="no labelled token", expected="at least one", remedy="pass labels that are not all -100"
        )
    mean = math.fsum(loss * count for loss, count in zip(losses, counts, strict=True) if count) / sum(counts)
    seconds = time.perf_counter() - started
    return EvaluationResult(mean, tuple(losses), sum(counts), sweeps, seconds, tuple(counts))


def evaluate_objective(
    forwards: Callable[[Iterable[Batch]], Iterator[list[torch.Tensor]]],
    batches: Iterable[Batch],
    rows: int | None,
    objective: Objective,
) -> EvaluationResult:
    """Evaluate an objective for all batches together, and for each batch."""
    if not isinstance(objective, Objective):
        raise OptionError(
            "forward",
            found=f"a {type(objective).__name__} without split and loss",
            expected="an Objective, which has both",
            remedy="add these two methods, or use forwards()",
        )
    started = time.perf_counter()
    split: list[Sequence[Batch]] = []  # micro-batches of each batch

    def micro_batches() -> Iterator[Batch]:
        for batch in batches:
            split.append(objective.split(batch, rows) or [batch])
            yield from split[-1]

    outputs, sweeps = _outputs(forwards(micro_batches()))
    in_order = iter(outputs)
    losses = [require_number(objective.loss([next(in_order) for _ in batch], batch)).item() for batch in split]
    total = require_number(objective.loss(outputs, [micro_batch for batch in split for micro_batch in batch])).item()
    return EvaluationResult(total, tuple(losses), 0, sweeps, time.perf_counter() - started)


def _outputs(sweeps: Iterator[list[torch.Tensor]], *, may_be_empty: bool = False) -> tuple[list[torch.Tensor], int]:
    """Return the head's outputs for all batches in order, and the number of sweeps."""
    outputs_of_sweeps = list(sweeps)
    outputs = [output for outputs_of_sweep in outputs_of_sweeps for output in outputs_of_sweep]
    if not outputs and not may_be_empty:
        raise BatchError("batches", found="none", expected="at least one", remedy="pass batches to evaluate")
    return outputs, len(outputs_of_sweeps)
