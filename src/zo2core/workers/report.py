"""A worker's message of a step: its losses, and a checksum of what they were computed from."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash

from zo2core.errors import WorkerError
from zo2core.io.direct_file import byte_view
from zo2core.types import Batch, Evaluation, require_tensors
from zo2core.workers.shards import Split

_HEADER = struct.Struct("<IIB")  # labelled tokens, context, index into _DTYPES
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # dtypes of losses


class Report(NamedTuple):
    """A worker's losses."""

    tokens: int  # labelled tokens of the worker's rows: the weight of its losses in means over rows
    context: int  # checksum over what all workers have to agree on
    losses: tuple[float, ...]  # one per evaluation of the worker's shard
    dtype: torch.dtype = torch.float64  # dtype in which the model computed the losses

    @classmethod
    def of(cls, losses: Sequence[torch.Tensor], *, tokens: int, context: int) -> Report:
        """The report of 0-d losses. Doubles hold all of their bits."""
        values = tuple(float(loss.item()) for loss in losses)
        return cls(tokens, context, values, losses[0].dtype if losses else torch.float64)

    def packed(self) -> bytes:
        """The report as bytes: 9, and 8 per loss."""
        header = _HEADER.pack(self.tokens, self.context, _DTYPES.index(self.dtype))
        return header + struct.pack(f"<{len(self.losses)}d", *self.losses)

    @classmethod
    def unpacked(cls, payload: bytes, rank: int) -> Report:
        """The report that ``packed`` wrote.

        Raises:
            WorkerError: if the payload is not a report.
        """
        count, rest = divmod(len(payload) - _HEADER.size, 8)
        if count < 0 or rest or payload[_HEADER.size - 1] >= len(_DTYPES):
            raise _mismatch(rank, f"{len(payload)} bytes that are not a report", "a report of losses")
        tokens, context, dtype = _HEADER.unpack_from(payload)
        return cls(tokens, context, struct.unpack_from(f"<{count}d", payload, _HEADER.size), _DTYPES[dtype])


def is_finite(payload: bytes) -> bool:
    """Whether all losses of a packed report are finite."""
    return all(math.isfinite(loss) for loss in Report.unpacked(payload, 0).losses)


def context_of(journal: int, evaluations: Sequence[Evaluation], batch: int | None, split: Split) -> int:
    """A checksum over what all workers have to agree on.

    Args:
        journal: Checksum of the journal.
        evaluations: Evaluations of the step.
        batch: Digest of the batch; None where it is not known.
        split: Split of the step.
    """
    return zlib.crc32(repr((journal, [tuple(evaluation) for evaluation in evaluations], batch, tuple(split))).encode())


def batch_digest(batches: Sequence[Batch]) -> int:
    """A digest of the batches' tensors: names, shapes, dtypes, bytes.

    Raises:
        BatchError: if a batch holds something other than tensors.
    """
    digest = xxhash.xxh3_64()
    for batch in batches:
        require_tensors(batch)
        for name, tensor in sorted(batch.items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
            on_host = tensor.detach().cpu().contiguous()
            digest.update(byte_view(on_host))
    return digest.intdigest()


def require_same_context(reports: Mapping[int, Report], context: int) -> None:
    """Refuse losses of another step.

    Args:
        reports: Reports by rank.
        context: Context of this worker's step.

    Raises:
        WorkerError: naming the worker.
    """
    for rank, report in reports.items():
        if report.context != context:
            raise _mismatch(rank, "losses of another journal, other directions or another batch", "losses of the same step")


def combined(reports: Mapping[int, Report], split: Split, evaluations: int, unit: int) -> dict[int, torch.Tensor]:
    """The losses of a step.

    Args:
        reports: Reports by rank, without those that were left out.
        split: Split of the step.
        evaluations: Number of evaluations of the step.
        unit: Number of consecutive evaluations that stay together.

    Returns:
        A 0-d tensor for each evaluation's index. Where rows are sharded it is float64: the mean over the labelled tokens
        of the reports, summed in the order of ranks. Elsewhere it is the loss as its worker computed it.

    Raises:
        WorkerError: if a worker has more or fewer losses than its shard, or another dtype than other workers.
    """
    parts: dict[int, list[tuple[float, int]]] = {}
    for rank in sorted(reports):
        report, shard = reports[rank], split.shard(rank, evaluations, unit)
        if len(report.losses) != len(shard.evaluations):
            raise _mismatch(
                rank, f"{len(report.losses)} losses", f"{len(shard.evaluations)}, one per evaluation of its shard"
            )
        for index, loss in zip(shard.evaluations, report.losses, strict=True):
            parts.setdefault(index, []).append((loss, report.tokens))
    if split.parts == 1:
        dtypes = {report.dtype: rank for rank, report in reports.items() if report.losses}
        if len(dtypes) > 1:
            *_, (dtype, rank) = dtypes.items()
            raise _mismatch(rank, f"losses in {dtype}", f"one dtype, not {len(dtypes)}")
        dtype = next(iter(dtypes), torch.float64)
        return {index: torch.tensor(parts[index][0][0], dtype=dtype) for index in sorted(parts)}
    return {index: torch.tensor(_mean(parts[index]), dtype=torch.float64) for index in sorted(parts)}


def _mean(parts: Sequence[tuple[float, int]]) -> float:
    """The mean of (loss, labelled tokens) over tokens, in double precision and in this order."""
    total, tokens = 0.0, 0
    for loss, weight in parts:
        total, tokens = total + loss * weight, tokens + weight
    return total / tokens if tokens else math.nan


def _mismatch(rank: int, found: str, expected: str) -> WorkerError:
    return WorkerError(
        f"worker {rank}",
        found=found,
        expected=expected,
        remedy="start all workers with the same command, model and rows",
    )
