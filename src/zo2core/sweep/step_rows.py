"""The rows of a first-order step, of which each of several workers runs its part.

All workers add up their gradients in the order of ranks, as one process does that runs the shards
as micro-batches. So all have the same bits, and the same optimizer gives them the same parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from zo2core.errors import BatchError, OptionError
from zo2core.protocols import (
    Forward,
    Objective,
)
from zo2core.sweep import microbatch
from zo2core.types import Batch
from zo2core.workers.workers import Split, Workers, require_equal


class StepRows:
    """The micro-batches of a step, of which this process runs its part.

    Args:
        batches: The batches of the step.
        forward: Computes the number to minimise; None: the model.
        model: The model.
        micro_batch_size: Rows of a micro-batch; None does not split batches.
        workers: Those that share the step.
        device: Device of the model.
    """

    outputs: Sequence[torch.Tensor]  # of the head, in the present sweep, once it has run

    def __init__(
        self,
        batches: Sequence[Batch],
        forward: Forward | None,
        model: Forward,
        *,
        micro_batch_size: int | None,
        workers: Workers,
        device: torch.device,
    ) -> None:
        self.forward, objective = microbatch.with_objective(forward, model)
        self._workers = workers
        self._digest = workers.digest(batches)
        self._of_all_workers, local = _divided(batches, micro_batch_size, objective, workers)
        weights = self._of_all_workers.weights
        self.weights = None if weights is None else weights[local]
        self.batches = list(
            microbatch.prepared(self._of_all_workers.batches[local], self.forward, device)
        )

    def loss(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of all workers' outputs, of which this worker's have a gradient."""
        if self._workers.size == 1:
            return self._of_all_workers.loss(outputs)
        # all bits, as JSON
        listed = [[str(output.dtype).removeprefix("torch."), output.tolist()] for output in outputs]
        digests, gathered = zip(*self._workers.all_gather([self._digest, listed]), strict=True)
        require_equal(digests, "batches")
        of_workers = [
            [torch.tensor(value, dtype=getattr(torch, dtype)) for dtype, value in listed]
            for listed in gathered
        ]
        of_workers[self._workers.rank] = [output.cpu() for output in outputs]
        return self._of_all_workers.loss(list(chain.from_iterable(of_workers)))


def _divided(
    wholes: Sequence[Batch], rows: int | None, forward: Forward | None, workers: Workers
) -> tuple[microbatch.MicroBatches, slice]:
    """Divide the batches of a step into micro-batches, and choose those that this process runs."""
    if workers.size == 1:
        return microbatch.split_batches(wholes, rows, forward), slice(None)
    parts = [_parts_of_workers(whole, forward, workers.size) for whole in wholes]
    shards = [
        [batch for of_whole in parts for batch in of_whole[rank]] for rank in range(workers.size)
    ]
    cuts = [list(microbatch.split_batches(shard, rows, forward).batches) for shard in shards]
    if forward is None:
        # parts without a labelled token have no loss; where none has any, one is left and refused
        cuts = [
            [batch for batch in batches if microbatch.labelled_tokens(batch)] for batches in cuts
        ]
        cuts[0] = cuts[0] if any(cuts) else shards[0][:1]
    batches = list(chain.from_iterable(cuts))
    tokens = [microbatch.labelled_tokens(batch) for batch in batches] if forward is None else []
    start = sum(map(len, cuts[: workers.rank]))
    micro_batches = microbatch.MicroBatches(
        forward if isinstance(forward, Objective) else None, batches, tokens
    )
    return micro_batches, slice(start, start + len(cuts[workers.rank]))


def _parts_of_workers(whole: Batch, forward: Forward | None, size: int) -> list[list[Batch]]:
    """Each worker's part of a batch, in the order of ranks."""
    if forward is None:
        count = microbatch.rows_to_shard([whole])
        if count is None:
            raise BatchError(
                "batch",
                found="no labels of shape (rows, tokens)",
                expected="a batch with labels, whose rows are split among workers",
                remedy="add labels",
            )
        return [
            [microbatch.shard_of_rows(whole, rows.start, rows.stop)]
            for rows in _slices(count, size)
        ]
    if not isinstance(forward, Objective):
        raise OptionError(
            "forward",
            found=f"one that does not say how parts of a batch join, and {size} workers",
            expected="the model's own loss, or an Objective, which has split and loss",
            remedy="start one process, or add these two",
        )
    # An objective's own micro-batches, the largest of which there is one for each worker at least.
    count = max((len(value) for value in whole.values() if value.dim()), default=0)
    larger = (forward.split(whole, rows) for rows in range(-(-count // size), 1, -1))
    parts = next((parts for parts in larger if len(parts) >= size), None) or forward.split(whole, 1)
    return [list(parts[indices]) for indices in _slices(len(parts), size)]


def _slices(count: int, size: int) -> list[slice]:
    """Each worker's part of so many rows."""
    if count >= size:
        return [Split(1, size).rows(rank, count) for rank in range(size)]
    found = f"{count} rows that can be separated, and {size} workers"
    expected = "a row for each worker; a packed batch is one row"
    raise BatchError("batch", found, expected, "start fewer workers, or pass more rows")


def add_up(parameters: Sequence[nn.Parameter], workers: Workers) -> None:
    """Set each parameter's gradient to the sum of all workers', in the order of ranks.

    All gradients are exchanged as one tensor of bytes, which ends with a byte for each that says
    whether it is there.
    """
    # so that offsets are aligned
    ordered = sorted(parameters, key=lambda parameter: -parameter.element_size())
    # A gradient that is missing is -0.0, which changes no bit of a sum.
    own = [
        torch.full_like(parameter, -0.0) if parameter.grad is None else parameter.grad
        for parameter in ordered
    ]
    present = torch.tensor(
        [parameter.grad is not None for parameter in ordered],
        dtype=torch.uint8,
        device=own[0].device,
    )
    message = torch.cat(
        [*(gradient.detach().reshape(-1).view(torch.uint8) for gradient in own), present]
    )
    sizes = [*(gradient.nbytes for gradient in own), len(own)]
    *of_parameters, presents = zip(
        *(torch.split(received, sizes) for received in workers.all_gather_tensors(message)),
        strict=True,
    )
    any_present = torch.stack(presents).any(dim=0).tolist()
    for parameter, parts, has_gradient in zip(ordered, of_parameters, any_present, strict=True):
        total, *others = [part.view(parameter.dtype) for part in parts]
        for other in others:
            total += other
        parameter.grad = total.view(parameter.shape).clone() if has_gradient else None
