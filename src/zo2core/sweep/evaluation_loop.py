"""Forwards of the weights as they are: as many batches a sweep as the memory set aside for activations holds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from zo2core.errors import BatchError
from zo2core.protocols import Forward
from zo2core.sweep.activation_offload import storage_bytes
from zo2core.sweep.microbatch import cut, joined_loss, labelled_tokens
from zo2core.types import Batch, EvaluationResult


def fill_sweeps(batches: Iterable[Batch], forward: Forward, allowed: int) -> Iterator[list[Batch]]:
    """Group batches, in order: what all of a group hold between segments and the largest forward among them fit together.

    A batch is measured by embedding it with whatever weights are in the work buffer: only sizes count.

    Args:
        batches: On the compute device; taken up one by one.
        forward: What they will run through.
        allowed: Bytes for activations. A batch that does not fit alone is a group of its own.

    Yields:
        At least one batch each time.

    Raises:
        BatchError: if the model cannot take a batch.
    """
    group: list[Batch] = []
    held = largest = 0
    for batch in batches:
        with torch.inference_mode():
            own = storage_bytes(forward.embed(batch))
        running = forward.forward_bytes(batch)
        if group and held + own + max(largest, running) > allowed:
            yield group
            group, held, largest = [], 0, 0
        group.append(batch)
        held, largest = held + own, max(largest, running)
    if group:
        yield group


def evaluate(
    forwards: Callable[[Iterable[Batch]], Iterator[list[torch.Tensor]]], batches: Iterable[Batch], rows: int | None
) -> EvaluationResult:
    """The mean loss over batches.

    Args:
        forwards: Runs batches and yields their losses, 0-d, a list a sweep.
        batches: With labels. Each counts by its labelled tokens.
        rows: Of a micro-batch; None runs each batch whole.

    Raises:
        BatchError: if the model cannot take a batch, or there is no labelled token.
    """
    began = time.perf_counter()
    tokens: list[list[int]] = []  # of each piece of each batch

    def pieces() -> Iterator[Batch]:
        for batch in batches:
            tokens.append([])
            for piece in cut(batch, rows):
                tokens[-1].append(labelled_tokens(piece) if "labels" in piece else 0)
                yield piece

    found: list[torch.Tensor] = []
    sweeps = 0
    for losses in forwards(pieces()):
        found += losses
        sweeps += 1
    if not found:
        raise BatchError("batches", found="none", expected="at least one", remedy="pass batches to evaluate")
    counts = [sum(each) for each in tokens]
    if sum(counts) == 0:
        raise BatchError(
            "batches", found="no labelled token", expected="at least one", remedy="pass labels that are not all -100"
        )
    of_pieces = iter(found)
    losses_of_batches = [joined_loss([next(of_pieces) for _ in each], each).item() for each in tokens]
    mean = math.fsum(loss * n for loss, n in zip(losses_of_batches, counts, strict=True) if n) / sum(counts)
    return EvaluationResult(mean, tuple(losses_of_batches), sum(counts), sweeps, time.perf_counter() - began)
