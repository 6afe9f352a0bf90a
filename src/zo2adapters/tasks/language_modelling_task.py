"""A task for rows of text, with the model's own loss over labelled tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.packing import pack
from zo2adapters.tasks.batches import collate, evaluation_batches
from zo2adapters.tasks.rows import Dataset, TokenizedRow
from zo2adapters.tasks.task import Task, TaskOptions
from zo2core import Batch, Engine, EvaluationResult, StepResult


class LanguageModelling(Task):
    """A task for rows of text, with the model's own loss. See ``Task``."""

    def __init__(self, model: HFBlockModel, rows: Dataset, options: TaskOptions) -> None:
        self._options = options

    def batch(self, rows: Sequence[TokenizedRow]) -> Batch:
        """Pad the rows to one length, or pack them."""
        batch = collate(rows, pad_token_id=self._options.pad)
        return pack(batch) if self._options.pack else batch

    def step(self, engine: Engine, rows: Sequence[TokenizedRow], batch: Batch) -> StepResult:
        """Take a step on the model's own loss."""
        return engine.step(batch)

    def evaluate(self, engine: Engine, rows: Dataset) -> dict[str, float]:
        """Compute the mean loss over labelled tokens."""
        options = self._options
        result = evaluate_dataset(engine, rows, batch_size=options.batch_size, pad=options.pad, packed=options.pack)
        return {"loss": result.loss}


def evaluate_dataset(
    engine: Engine,
    dataset: Dataset,
    *,
    batch_size: int,
    pad: int,
    packed: bool = False,
    progress: Callable[[int], object] | None = None,
) -> EvaluationResult:
    """Evaluate the current weights on a whole data set, in file order."""

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
