"""Micro-batches: a batch split along its rows, and the losses of its parts combined again.

A mean over tokens is not the mean of the parts' means: each part is weighted by its labelled
tokens, as Hugging Face's Trainer weights the micro-batches of a step (``num_items_in_batch``). This
module defines what a labelled token is.

The number that a step minimises for a batch is the model's own loss, or an objective. Evaluations
compute the same numbers with unperturbed weights, with as many batches in a sweep as the memory for
activations allows.

Several workers share the rows of a first-order step. They add up their gradients in the order of
ranks, as one process does that runs the shards as micro-batches. So all have the same bits, and the
same optimizer gives them the same parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

import torch

from zo2core.errors import BatchError, OptionError
from zo2core.protocols import Forward, Objective
from zo2core.ranges import counted
from zo2core.types import Batch, EvaluationResult, RowGroup, require_tensors
from zo2core.workers.gradients import summed
from zo2core.workers.workers import Split, Workers, require_equal

IGNORE_INDEX = -100  # label of a token without loss, as in torch and Hugging Face


def predicted(labels: torch.Tensor) -> torch.Tensor:
    """Mark the tokens over which a causal language model's loss is averaged."""
    return labels[..., 1:] != IGNORE_INDEX


def labelled_tokens(batch: Batch) -> int:
    """Count the tokens over which the loss of a batch is averaged; a batch without labels has
    none.
    """
    return int(predicted(batch["labels"]).sum().item()) if "labels" in batch else 0


def split_rows(batch: Batch, rows: int | None) -> list[Batch]:
    """Split a batch into micro-batches of at most ``rows`` rows.

    Columns on the right that are padding in all rows of a micro-batch are removed. Columns on the
    left stay, since models count positions from there. A micro-batch without a labelled token is
    left out: it has no loss. A tensor with another number of rows than the labels (positions that
    all rows share) is part of every micro-batch.
    """
    require_tensors(batch)
    labels = batch.get("labels")
    if rows is None or labels is None or labels.dim() != 2 or len(labels) <= rows:
        return [batch]
    micro_batches = []
    for start in range(0, len(labels), rows):
        micro_batch = shard_of_rows(batch, start, start + rows)
        if labelled_tokens(micro_batch):
            micro_batches.append(micro_batch)
    return micro_batches or [batch]


def rows_of_group(batch: Batch, group: RowGroup) -> Batch:
    """Select the rows of a group; all groups keep the batch's columns."""
    labels = batch.get("labels")
    groups = group.groups
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2:
        raise BatchError(
            "batch",
            found="no labels of shape (rows, tokens)",
            expected="a batch with such labels, whose rows are divided among directions",
            remedy="pass a batch with labels",
        )
    rows = len(labels)
    if rows % groups:
        raise BatchError(
            "batch",
            found=f"{counted(rows, 'row')} for {groups} directions",
            expected="a multiple of the number of directions, so that each has equally many rows",
            remedy=f"pass batches of {max(groups, rows - rows % groups)} rows, or choose another "
            "number of directions",
        )
    require_tensors(batch)
    size = rows // groups
    return rows_of(batch, group.number * size, (group.number + 1) * size)


def rows_of_groups(batches: Sequence[Batch], group: RowGroup | None) -> Sequence[Batch]:
    """Select the rows of a group in each batch; None selects all rows."""
    if group is None:
        return batches
    return [rows_of_group(batch, group) for batch in batches]


def shard_of_rows(batch: Batch, start: int, stop: int) -> Batch:
    """A range of a batch's rows, without the columns on the right in which all of them are
    padding.
    """
    rows = rows_of(batch, start, stop)
    return _without_padding(rows) if labelled_tokens(rows) else rows


def rows_to_shard(batches: Sequence[Batch]) -> int | None:
    """Return the number of rows of the smallest batch; None if a batch without labels (rows,
    tokens) prevents sharding.
    """
    labels = [batch.get("labels") for batch in batches]
    counts = [
        len(label) for label in labels if isinstance(label, torch.Tensor) and label.dim() == 2
    ]
    return min(counts) if counts and len(counts) == len(labels) else None


def combined_loss(losses: Sequence[torch.Tensor], tokens: Sequence[int]) -> torch.Tensor:
    """Compute the mean loss over the labelled tokens of all micro-batches."""
    if len(losses) == 1:
        return losses[0]
    summed = torch.stack(
        [loss.double() * count for loss, count in zip(losses, tokens, strict=True)]
    ).sum()
    return (summed / sum(tokens)).to(losses[0].dtype)


def rows_of(
    batch: Batch, start: int, stop: int, counted_in: str = "labels"
) -> dict[str, torch.Tensor]:
    """Select a range of a batch's rows, as many as this entry has.

    Tensors that all rows share are kept whole.
    """
    count = len(batch[counted_in])
    return {
        key: value[start:stop] if value.dim() > 0 and len(value) == count else value
        for key, value in batch.items()
    }


def _without_padding(micro_batch: Batch) -> Batch:
    labels = micro_batch["labels"]
    mask = micro_batch.get("attention_mask")
    if mask is None or mask.shape != labels.shape:
        return micro_batch
    width = labels.shape[1]
    used = int(((mask != 0) | (labels != IGNORE_INDEX)).any(dim=0).nonzero().max()) + 1
    if used == width:
        return micro_batch
    return {
        key: value[:, :used].contiguous()
        if value.dim() > 1 and value.shape[1] == width and len(value) in (1, len(labels))
        else value
        for key, value in micro_batch.items()
    }


class MicroBatches(NamedTuple):
    """The micro-batches of a step."""

    objective: Objective | None  # None: the forward's own loss, a mean over labelled tokens
    batches: Sequence[Batch]
    # labelled tokens of each micro-batch; of a single one they may be left out
    tokens: Sequence[int]

    @property
    def weights(self) -> list[float] | None:
        """Each micro-batch's weight in the mean over labelled tokens; None for an objective, which
        weighs them itself.
        """
        if self.objective is not None:
            return None
        return (
            [count / sum(self.tokens) for count in self.tokens] if len(self.batches) > 1 else [1.0]
        )

    def loss(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the loss, 0-d and differentiable, from the head's outputs for the
        micro-batches.
        """
        if self.objective is not None:
            return require_scalar(self.objective.loss(outputs, self.batches))
        return require_scalar(combined_loss(outputs, self.tokens))


def with_objective(forward: Forward | None, model: Forward) -> tuple[Forward, Forward | None]:
    """Return a step's forward, by default the model, and what says how its losses join; None: they
    are the model's own.
    """
    chosen = model if forward is None else forward
    return chosen, None if forward is None and not isinstance(model, Objective) else chosen


def batches_of(batch: Batch | Sequence[Batch]) -> list[Batch]:
    """Return the batches of a step: one, or several that count as one."""
    if not isinstance(batch, Iterable):
        raise BatchError(
            "batch", repr(batch)[:40], "a batch, or several", "pass names with tensors"
        )
    batches: list[Any] = [batch] if isinstance(batch, Mapping) else list(batch)
    if not batches:
        raise BatchError("batch", "an empty list", "a batch, or several", "pass at least one batch")
    for entry in batches:
        if not isinstance(entry, Mapping):
            kind = type(entry).__name__
            raise BatchError(
                "batch", f"a {kind}", "a mapping of names to tensors", "name the tensors"
            )
    return batches


def prepared(batches: Iterable[Batch], forward: Forward, device: torch.device) -> Iterator[Batch]:
    """Yield the batches on the device, checked by their forward."""
    for batch in batches:
        require_tensors(batch)
        yield forward.prepared({key: value.to(device) for key, value in batch.items()})


def split_batches(
    batches: Sequence[Batch], rows: int | None, forward: Forward | None
) -> MicroBatches:
    """Split a step's batches into micro-batches of at most ``rows`` rows, given what says how their
    losses join.
    """
    if forward is None:
        return _split_by_tokens(batches, rows)
    if isinstance(forward, Objective):
        micro_batches = [
            micro_batch for batch in batches for micro_batch in forward.split(batch, rows)
        ]
        return MicroBatches(forward, micro_batches or batches[:1], [])
    if rows is not None or len(batches) > 1:
        raise OptionError(
            "forward",
            found="a forward that does not combine the losses of micro-batches",
            expected=(
                "an Objective, which has split and loss, for `micro_batch_size` or several batches"
            ),
            remedy="pass one batch without `micro_batch_size`, or add these two methods",
        )
    return MicroBatches(None, batches, [])


def _split_by_tokens(batches: Sequence[Batch], rows: int | None) -> MicroBatches:
    """Split batches whose loss is a mean over labelled tokens."""
    micro_batches = [micro_batch for batch in batches for micro_batch in split_rows(batch, rows)]
    if len(micro_batches) == 1:
        return MicroBatches(None, micro_batches, [])
    # A micro-batch without a labelled token has no loss; one without labels is refused when it is
    # prepared.
    with_loss = [
        micro_batch
        for micro_batch in micro_batches
        if "labels" not in micro_batch or labelled_tokens(micro_batch)
    ]
    if not with_loss:
        with_loss = micro_batches[:1]
    return MicroBatches(
        None, with_loss, [labelled_tokens(micro_batch) for micro_batch in with_loss]
    )


def require_scalar(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss that is a number."""
    if isinstance(loss, torch.Tensor) and loss.dim() == 0:
        return loss
    found = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise OptionError(
        "forward", f"{found} as its loss", "a 0-d tensor", "return one number, or use forwards()"
    )


def losses_as_tensors(losses: Iterable[float | torch.Tensor]) -> list[torch.Tensor]:
    """Convert losses to 0-d tensors; numbers become float64."""
    tensors = [
        loss if isinstance(loss, torch.Tensor) else torch.tensor(loss, dtype=torch.float64)
        for loss in losses
    ]
    return [require_scalar(tensor) for tensor in tensors]


def grouped(
    batches: Iterable[Batch],
    forward: Forward,
    fits: Callable[[int, int], bool],
    *,
    running: Callable[[Batch], int] | None = None,
) -> Iterator[tuple[list[Batch], int, int]]:
    """Group batches, in order, as far as their activations between segments and the largest pass of
    a segment fit in memory.

    Args:
        batches: The batches.
        forward: Their forward.
        fits: Whether so many bytes between segments, and of the largest pass, fit.
        running: Bytes of a batch's largest pass; None: of its forward.

    Yields:
        A group, the bytes that it holds between segments, and the bytes of its largest pass.
    """
    running = forward.forward_bytes if running is None else running
    group: list[Batch] = []
    held = largest = 0
    for batch in batches:
        nbytes = forward.held_bytes(batch)
        of_pass = running(batch)
        if group and not fits(held + nbytes, max(largest, of_pass)):
            yield group, held, largest
            group = []
            held = 0
            largest = 0
        group.append(batch)
        held = held + nbytes
        largest = max(largest, of_pass)
    if group:
        yield group, held, largest


Forwards: TypeAlias = Callable[[Iterable[Batch]], Iterator[list[torch.Tensor]]]


def evaluate(
    forwards: Forwards,
    batches: Iterable[Batch],
    rows: int | None,
    workers: Workers,
    objective: Objective | None = None,
) -> EvaluationResult:
    """Compute the mean loss over batches, which the workers share, or an objective for all batches
    and for each.

    Args:
        forwards: Runs micro-batches; yields the head's outputs, one list for each sweep.
        batches: The batches.
        rows: Rows of a micro-batch; None does not split batches.
        workers: Those that share the batches of the model's own loss.
        objective: Computes a number from outputs; None: the model's own loss.
    """
    if objective is None:
        return _evaluate_loss(forwards, batches, rows, workers)
    if not isinstance(objective, Objective):
        raise OptionError(
            "forward",
            found=f"a {type(objective).__name__} without split and loss",
            expected="an Objective, which has both",
            remedy="add these two methods, or use forwards()",
        )
    return _evaluate_objective(forwards, batches, rows, objective)


def _evaluate_objective(
    forwards: Forwards, batches: Iterable[Batch], rows: int | None, objective: Objective
) -> EvaluationResult:
    """Compute an objective for all batches, and for each."""
    started = time.perf_counter()
    split: list[MicroBatches] = []  # of each batch

    def micro_batches() -> Iterator[Batch]:
        for batch in batches:
            parts = objective.split(batch, rows) or [batch]
            split.append(MicroBatches(objective, parts, []))
            yield from parts

    sweeps = list(forwards(micro_batches()))
    if not any(sweeps):
        raise _no_batches()
    outputs = list(chain.from_iterable(sweeps))
    losses = _losses(split, outputs)
    parts_of_all = [part for of_batch in split for part in of_batch.batches]
    total = MicroBatches(objective, parts_of_all, []).loss(outputs).item()
    seconds = time.perf_counter() - started
    return EvaluationResult(total, tuple(losses), 0, len(sweeps), seconds)


def _evaluate_loss(
    forwards: Forwards, batches: Iterable[Batch], rows: int | None, workers: Workers
) -> EvaluationResult:
    """Compute the mean of the model's own loss over the labelled tokens of all batches."""
    started = time.perf_counter()
    split: list[MicroBatches] = []  # of each of this worker's batches: only tokens are kept
    digest = 0  # of all batches

    def micro_batches() -> Iterator[Batch]:
        nonlocal digest
        for number, batch in enumerate(batches):
            digest ^= workers.digest([batch]) * (2 * number + 1) % 2**64
            if number % workers.size == workers.rank:
                parts = split_rows(batch, rows)
                split.append(MicroBatches(None, (), [labelled_tokens(part) for part in parts]))
                yield from parts

    sweeps = list(forwards(micro_batches()))
    if not any(sweeps) and workers.size == 1:
        raise _no_batches()
    local_losses = _losses(split, list(chain.from_iterable(sweeps)))
    local_tokens = [sum(of_batch.tokens) for of_batch in split]
    workers.require_same("batches", digest)
    gathered = workers.in_order(list(zip(local_losses, local_tokens, strict=True)))
    tokens = sum(count for _, count in gathered)
    if tokens == 0:
        raise BatchError(
            "batches", "no labelled token", "at least one", "pass labels that are not all -100"
        )
    return EvaluationResult(
        loss=math.fsum(loss * count for loss, count in gathered if count) / tokens,
        losses=tuple(loss for loss, _ in gathered),
        tokens=tokens,
        sweeps=len(sweeps),
        seconds=time.perf_counter() - started,
    )


def _losses(split: Sequence[MicroBatches], outputs: Sequence[torch.Tensor]) -> list[float]:
    """The loss of each batch, given the head's outputs for all micro-batches."""
    in_order = iter(outputs)
    losses = []
    for of_batch in split:
        count = len(of_batch.batches or of_batch.tokens)
        losses.append(float(of_batch.loss(list(islice(in_order, count))).item()))
    return losses


def _no_batches() -> BatchError:
    return BatchError("batches", "none", "at least one", "pass batches to evaluate")


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
        self.forward, objective = with_objective(forward, model)
        self._workers = workers
        self._device = device
        self._digest = workers.digest(batches)
        self._of_all_workers, local = _divided(batches, micro_batch_size, objective, workers)
        weights = self._of_all_workers.weights
        self.weights = None if weights is None else weights[local]
        self.batches = list(prepared(self._of_all_workers.batches[local], self.forward, device))

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

    def summed(
        self,
        gradients: dict[str, torch.Tensor],
        forms: Mapping[str, tuple[torch.Size, torch.dtype]],
    ) -> dict[str, torch.Tensor]:
        """The gradients of all workers' rows: see ``workers.gradients.summed``."""
        if self._workers.size == 1:
            return gradients
        return summed(gradients, forms, self._workers, self._device)


def _divided(
    wholes: Sequence[Batch], rows: int | None, forward: Forward | None, workers: Workers
) -> tuple[MicroBatches, slice]:
    """Divide the batches of a step into micro-batches, and choose those that this process runs."""
    if workers.size == 1:
        return split_batches(wholes, rows, forward), slice(None)
    parts = [_parts_of_workers(whole, forward, workers.size) for whole in wholes]
    shards = [
        [batch for of_whole in parts for batch in of_whole[rank]] for rank in range(workers.size)
    ]
    cuts = [list(split_batches(shard, rows, forward).batches) for shard in shards]
    if forward is None:
        # parts without a labelled token have no loss; where none has any, one is left and refused
        cuts = [[batch for batch in batches if labelled_tokens(batch)] for batches in cuts]
        cuts[0] = cuts[0] if any(cuts) else shards[0][:1]
    batches = list(chain.from_iterable(cuts))
    tokens = [labelled_tokens(batch) for batch in batches] if forward is None else []
    start = sum(map(len, cuts[: workers.rank]))
    micro_batches = MicroBatches(
        forward if isinstance(forward, Objective) else None, batches, tokens
    )
    return micro_batches, slice(start, start + len(cuts[workers.rank]))


def _parts_of_workers(whole: Batch, forward: Forward | None, size: int) -> list[list[Batch]]:
    """Each worker's part of a batch, in the order of ranks."""
    if forward is None:
        count = rows_to_shard([whole])
        if count is None:
            raise BatchError(
                "batch",
                found="no labels of shape (rows, tokens)",
                expected="a batch with labels, whose rows are split among workers",
                remedy="add labels",
            )
        return [[shard_of_rows(whole, rows.start, rows.stop)] for rows in _slices(count, size)]
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
