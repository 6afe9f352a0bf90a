"""The rows of a first-order step: all of them in one process, or a shard of them in each of several workers.

Each worker computes the gradients of its rows. All workers add up these gradients in the order of ranks, as one process does
that runs the shards as micro-batches. So all have the same bits, and the same optimizer gives them the same parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from zo2core.errors import BatchError, OptionError, WorkerError
from zo2core.protocols import Forward, Objective
from zo2core.sweep.microbatch import MicroBatches, labelled_tokens, rows_to_shard, shard_of_rows, split_batches
from zo2core.sweep.trained import TrainedParameters
from zo2core.types import Batch
from zo2core.workers import Split, Workers


class RowShards:
    """Chooses the rows of each step that this process runs."""

    def __init__(self, workers: Workers, trained: TrainedParameters) -> None:
        if workers.size > 1 and workers.split not in ("auto", "rows", f"1x{workers.size}"):
            raise OptionError(
                "split",
                found=f"{workers.split}, {workers.size} workers for one gradient",
                expected="rows, since a first-order step has no directions to split",
                remedy="pass rows, or leave it out",
            )
        self.workers, self.trained = workers, trained
        self.split = Split(1, workers.size)

    def of_step(self, wholes: Sequence[Batch], rows: int | None, forward: Forward | None) -> StepRows:
        """The rows of a step."""
        if self.workers.size == 1:
            return split_batches(wholes, rows, forward)
        shards = self._shards(wholes, forward)
        cuts = [list(split_batches(shard, rows, forward).batches) for shard in shards]
        if forward is None:  # parts without a labelled token have no loss; where none has any, one is left and refused
            cuts = [[batch for batch in batches if labelled_tokens(batch)] for batches in cuts]
            cuts[0] = cuts[0] if any(cuts) else shards[0][:1]
        batches = [batch for of_worker in cuts for batch in of_worker]
        tokens = [labelled_tokens(batch) for batch in batches] if forward is None else []
        start = sum(map(len, cuts[: self.workers.rank]))
        micro_batches = MicroBatches(forward if isinstance(forward, Objective) else None, batches, tokens)
        own = slice(start, start + len(cuts[self.workers.rank]))
        return _ShardOfStep(self, micro_batches, own, self.workers.digest(wholes))

    def _shards(self, wholes: Sequence[Batch], forward: Forward | None) -> list[list[Batch]]:
        """Each worker's part of each batch, in the order of ranks."""
        if forward is None:
            parts = [self._row_parts(whole) for whole in wholes]
        elif isinstance(forward, Objective):
            parts = [self._objective_parts(whole, forward) for whole in wholes]
        else:
            raise OptionError(
                "forward",
                found=f"one that does not say how parts of a batch join, and {self.workers.size} workers",
                expected="the model's own loss, or an Objective, which has split and loss",
                remedy="start one process, or add these two",
            )
        return [[batch for of_whole in parts for batch in of_whole[rank]] for rank in range(self.workers.size)]

    def _row_parts(self, whole: Batch) -> list[list[Batch]]:
        size, count = self.workers.size, rows_to_shard([whole])
        if count is None:
            raise BatchError(
                "batch",
                found="no labels of shape (rows, tokens)",
                expected="a batch with labels, whose rows are split among workers",
                remedy="add labels",
            )
        if count < size:
            raise self._too_few(count)
        slices = [self.split.shard(rank, 1).rows(count) for rank in range(size)]
        return [[shard_of_rows(whole, rows.start, rows.stop)] for rows in slices]

    def _objective_parts(self, whole: Batch, objective: Objective) -> list[list[Batch]]:
        """An objective's own micro-batches, the largest of which there is one for each worker at least."""
        size, count = self.workers.size, max((len(value) for value in whole.values() if value.dim()), default=0)
        for rows in range(-(-count // size), 0, -1):
            parts = objective.split(whole, rows)
            if len(parts) >= size:
                slices = [self.split.shard(rank, 1).rows(len(parts)) for rank in range(size)]
                return [list(parts[indices]) for indices in slices]
        raise self._too_few(len(objective.split(whole, 1)))

    def _too_few(self, count: int) -> BatchError:
        return BatchError(
            "batch",
            found=f"{count} rows that can be separated, and {self.workers.size} workers",
            expected="a row for each worker; a packed batch is one row",
            remedy="start fewer workers, or pass more rows",
        )


class _ShardOfStep:
    """One worker's micro-batches of a step."""

    def __init__(self, shards: RowShards, whole: MicroBatches, own: slice, digest: int) -> None:
        self._workers, self._trained, self._whole, self._digest = shards.workers, shards.trained, whole, digest
        self.batches, weights = whole.batches[own], whole.weights
        self.weights = None if weights is None else weights[own]
        if self._workers.rank > 0:  # earlier gradients are the same on all workers, and rank 0 adds them
            self._trained.clear_gradients()

    def loss(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of all workers' outputs, of which this worker's have a gradient."""
        return self._loss(outputs, self._workers.all_gather(self._note(outputs)))

    def finish(self, outputs: Sequence[torch.Tensor]) -> float:
        """Add up the gradients of all workers, and return the loss."""
        notes = self._workers.all_gather(self._note(outputs))
        loss = self._loss(outputs, notes)
        add_up(list(self._trained.parameters.values()), self._workers, [note["present"] for note in notes])
        return float(loss)

    def _note(self, outputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        """What this worker says of its gradients, as JSON values with all their bits."""
        listed = [[str(output.dtype).removeprefix("torch."), output.tolist()] for output in outputs]
        present = [parameter.grad is not None for parameter in self._trained.parameters.values()]
        return {"batches": self._digest, "present": present, "outputs": listed}

    def _loss(self, outputs: Sequence[torch.Tensor], notes: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """The step's loss, from the outputs of all workers; this worker's stay in their graph."""
        for rank, note in enumerate(notes):
            if note["batches"] != notes[0]["batches"]:
                raise WorkerError(
                    f"worker {rank}",
                    found="other batches than worker 0's",
                    expected="the same",
                    remedy="start all workers with the same command and the same rows",
                )
        of_workers = [
            [torch.tensor(values, dtype=getattr(torch, dtype)) for dtype, values in note["outputs"]] for note in notes
        ]
        of_workers[self._workers.rank] = [output.cpu() for output in outputs]
        return self._whole.loss([output for of_worker in of_workers for output in of_worker])


StepRows: TypeAlias = MicroBatches | _ShardOfStep  # the micro-batches of a step that this process runs


def add_up(parameters: Sequence[nn.Parameter], workers: Workers, present: Sequence[Sequence[bool]]) -> None:
    """Set each parameter's gradient to the sum of all workers', in the order of ranks.

    Args:
        parameters: The parameters.
        workers: The workers, which exchange all gradients as one tensor of bytes.
        present: Whether each worker has a gradient of each parameter.
    """
    pairs = zip(parameters, map(any, zip(*present, strict=True)), strict=True)
    ordered = sorted(pairs, key=lambda pair: -pair[0].element_size())  # so that offsets are aligned
    # A gradient that is missing is -0.0, which changes no bit of a sum.
    own = [torch.full_like(parameter, -0.0) if parameter.grad is None else parameter.grad for parameter, _ in ordered]
    message = torch.cat([gradient.detach().reshape(-1).view(torch.uint8) for gradient in own])
    sizes = [gradient.nbytes for gradient in own]
    messages = [torch.split(received, sizes) for received in workers.all_gather_tensors(message)]
    for (parameter, has_gradient), parts in zip(ordered, zip(*messages, strict=True), strict=True):
        total, *others = [part.view(parameter.dtype) for part in parts]
        for other in others:
            total += other
        parameter.grad = total.view(parameter.shape).clone() if has_gradient else None
