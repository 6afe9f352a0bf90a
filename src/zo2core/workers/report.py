"""What a worker tells of a step: the losses of its share, and what they were made of."""

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

_HEAD = struct.Struct("<IIB")  # labelled tokens, context, dtype
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of losses, by their number


class Report(NamedTuple):
    """A worker's losses."""

    tokens: int  # labelled ones of its rows: what its losses weigh among those of other rows
    context: int  # checksum over what all workers have to agree on
    losses: tuple[float, ...]  # one an evaluation of its share
    dtype: torch.dtype = torch.float64  # in which the model computed them

    @classmethod
    def of(cls, losses: Sequence[torch.Tensor], *, tokens: int, context: int) -> Report:
        """The report of losses, 0-d each. Doubles hold all of their bits."""
        values = tuple(float(loss.item()) for loss in losses)
        return cls(tokens, context, values, losses[0].dtype if losses else torch.float64)

    def packed(self) -> bytes:
        """9 bytes, and 8 a loss."""
        head = _HEAD.pack(self.tokens, self.context, _DTYPES.index(self.dtype))
        return head + struct.pack(f"<{len(self.losses)}d", *self.losses)

    @classmethod
    def unpacked(cls, payload: bytes, rank: int) -> Report:
        """Undo ``packed``.

        Raises:
            WorkerError: if it is none.
        """
        count, rest = divmod(len(payload) - _HEAD.size, 8)
        if count < 0 or rest or payload[_HEAD.size - 1] >= len(_DTYPES):
            raise _unlike(rank, f"{len(payload)} bytes as its report", "losses")
        tokens, context, dtype = _HEAD.unpack_from(payload)
        return cls(tokens, context, struct.unpack_from(f"<{count}d", payload, _HEAD.size), _DTYPES[dtype])


def is_finite(payload: bytes) -> bool:
    """Whether all losses of a packed report are finite."""
    return all(math.isfinite(loss) for loss in Report.unpacked(payload, 0).losses)


def context_of(journal: int, evaluations: Sequence[Evaluation], batch: int | None, split: Split) -> int:
    """A checksum over what all workers have to agree on.

    Args:
        journal: Checksum of the journal.
        evaluations: Evaluations of the step.
        batch: Digest of the batch; None where it is not known.
        split: How the step is shared out.
    """
    return zlib.crc32(repr((journal, [tuple(evaluation) for evaluation in evaluations], batch, tuple(split))).encode())


def batch_digest(batches: Sequence[Batch]) -> int:
    """A digest of all that batches hold: names, shapes, dtypes, bytes.

    Raises:
        BatchError: if one of them holds something else than tensors.
    """
    digest = xxhash.xxh3_64()
    for batch in batches:
        require_tensors(batch)
        for name, tensor in sorted(batch.items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
            on_host = tensor.detach().cpu().contiguous()
            digest.update(byte_view(on_host))
    return digest.intdigest()


def require_same_context(reports: Mapping[int, Report], own: int) -> None:
    """Refuse losses of another step than this worker's.

    Raises:
        WorkerError: naming the worker.
    """
    for rank, report in reports.items():
        if report.context != own:
            raise _unlike(rank, "losses of another journal, other directions or another batch", "those of the same step")


def combined(reports: Mapping[int, Report], split: Split, evaluations: int, unit: int) -> dict[int, torch.Tensor]:
    """The losses of a step.

    Args:
        reports: By rank; of those whose losses count.
        split: How the step was shared out.
        evaluations: Evaluations of the step.
        unit: Evaluations that stay together.

    Returns:
        By the evaluation's place: a 0-d tensor. Where rows are shared out it is float64: the mean over the labelled tokens
        of those whose losses count, summed in the order of ranks. Elsewhere it is the loss as its worker computed it.

    Raises:
        WorkerError: if a worker has more or fewer losses than its share, or of another dtype than others have.
    """
    parts: dict[int, list[tuple[float, int]]] = {}
    for rank in sorted(reports):
        report, share = reports[rank], split.shard(rank, evaluations, unit)
        if len(report.losses) != len(share.evaluations):
            raise _unlike(rank, f"{len(report.losses)} losses", f"{len(share.evaluations)}, those of its share")
        for place, loss in zip(share.evaluations, report.losses, strict=True):
            parts.setdefault(place, []).append((loss, report.tokens))
    if split.parts == 1:
        dtypes = {report.dtype: rank for rank, report in reports.items() if report.losses}
        if len(dtypes) > 1:
            *_, (dtype, rank) = dtypes.items()
            raise _unlike(rank, f"losses in {dtype}", f"one dtype, not {len(dtypes)}")
        dtype = next(iter(dtypes), torch.float64)
        return {place: torch.tensor(parts[place][0][0], dtype=dtype) for place in sorted(parts)}
    return {place: torch.tensor(_mean(parts[place]), dtype=torch.float64) for place in sorted(parts)}


def _mean(parts: Sequence[tuple[float, int]]) -> float:
    """The mean over tokens, in double precision and in this order; what has no labelled token weighs nothing."""
    total, tokens = 0.0, 0
    for loss, own in parts:
        total, tokens = total + loss * own, tokens + own
    return total / tokens if tokens else math.nan


def _unlike(rank: int, found: str, expected: str) -> WorkerError:
    return WorkerError(
        f"worker {rank}",
        found=found,
        expected=expected,
        remedy="start all workers with the same command, model and rows",
    )
