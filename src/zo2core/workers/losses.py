"""A worker's losses of a step, with a checksum of what they were computed from, and how all workers combine them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash

from zo2core.errors import WorkerError
from zo2core.io.direct_file import byte_view
from zo2core.types import Batch, Evaluation, require_tensors
from zo2core.workers.shards import Split


class Report(NamedTuple):
    """A worker's losses, as JSON values."""

    context: int  # checksum over what all workers have to agree on
    tokens: int  # labelled tokens of the worker's rows: the weight of its losses in means over rows
    dtype: str  # in which the model computed the losses; doubles hold all of their bits
    losses: list[float]  # one per evaluation of the worker's shard

    @classmethod
    def of(cls, losses: Sequence[torch.Tensor], *, tokens: int, context: int) -> Report:
        """The report of 0-d losses."""
        dtype = losses[0].dtype if losses else torch.float64
        return cls(context, tokens, str(dtype).removeprefix("torch."), [float(loss.item()) for loss in losses])


def context_of(journal: int, evaluations: Sequence[Evaluation], batch: int | None, split: Split) -> int:
    """A checksum over what all workers have to agree on: journal, evaluations, digest of the batch, and split."""
    return zlib.crc32(repr((journal, [tuple(evaluation) for evaluation in evaluations], batch, tuple(split))).encode())


def batch_digest(batches: Sequence[Batch]) -> int:
    """A digest of the batches' tensors: names, shapes, dtypes, bytes."""
    digest = xxhash.xxh3_64()
    for batch in batches:
        require_tensors(batch)
        for name, tensor in sorted(batch.items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
            on_host = tensor.detach().cpu().contiguous()
            digest.update(byte_view(on_host))
    return digest.intdigest()


def combined(reports: Sequence[Report], split: Split, evaluations: int) -> list[torch.Tensor]:
    """The losses of a step, 0-d, on the CPU."""
    parts: list[list[tuple[float, int]]] = [[] for _ in range(evaluations)]
    for rank, report in enumerate(reports):
        shard = split.shard(rank, evaluations).evaluations
        if report.context != reports[0].context:
            raise mismatch(rank, "losses of another journal, other directions or another batch", "losses of the same step")
        if len(report.losses) != len(shard):
            raise mismatch(rank, f"{len(report.losses)} losses", f"{len(shard)}, one per evaluation of its shard")
        if split.parts == 1 and report.dtype != reports[0].dtype:
            raise mismatch(rank, f"losses in {report.dtype}", f"{reports[0].dtype}, as worker 0's")
        for index, loss in zip(shard, report.losses, strict=True):
            parts[index].append((loss, report.tokens))
    if split.parts == 1:
        return [torch.tensor(loss, dtype=getattr(torch, reports[0].dtype)) for [(loss, _)] in parts]
    return [torch.tensor(_mean(of_evaluation), dtype=torch.float64) for of_evaluation in parts]


def _mean(parts: Sequence[tuple[float, int]]) -> float:
    """The mean of (loss, labelled tokens) over tokens, in double precision and in this order."""
    total, tokens = 0.0, 0
    for loss, weight in parts:
        total, tokens = total + loss * weight, tokens + weight
    return total / tokens if tokens else math.nan


def mismatch(rank: int, found: str, expected: str) -> WorkerError:
    """The error for a worker that does something else than the others."""
    return WorkerError(
        f"worker {rank}", found=found, expected=expected, remedy="start all workers with the same command, model and rows"
    )
