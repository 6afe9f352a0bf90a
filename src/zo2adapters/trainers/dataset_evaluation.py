"""The present weights on a whole data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from zo2adapters.models.packing import pack
from zo2adapters.tasks.batches import collate, evaluation_batches
from zo2adapters.tasks.rows import Dataset
from zo2core import Batch, EvaluationResult, Runner


def evaluate_dataset(
    engine: Runner,
    dataset: Dataset,
    *,
    batch_size: int,
    pad: int,
    packed: bool = False,
    progress: Callable[[int], object] | None = None,
) -> EvaluationResult:
    """Evaluate the present weights on a whole data set, in file order.

    Args:
        engine: The engine whose present weights are evaluated.
        dataset: The rows to evaluate on.
        batch_size: Rows a batch.
        pad: Token id at padded positions.
        packed: Whether a batch's rows lie one behind the other instead of being padded.
        progress: Told how many rows are being taken up, batch by batch.
    """

    def batches() -> Iterator[Batch]:
        for rows in evaluation_batches(dataset, batch_size=batch_size):
            if progress is not None:
                progress(len(rows))
            batch = collate(rows, pad_token_id=pad)
            yield pack(batch) if packed else batch

    return engine.evaluate(batches())


def perplexity(loss: float) -> float:
    """The exponential of a mean loss, infinite where it overflows."""
    return math.exp(loss) if loss < 700 else math.inf
