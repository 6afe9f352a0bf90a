"""A task for rows of text, with the model's own loss over labelled tokens.

A task for rows of text with the user's own objective: ``--objective FILE.py:function``.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zo2adapters.models.batches import pack
from zo2adapters.models.called_forward import CalledForward
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.batches import collate, evaluation_batches
from zo2adapters.tasks.rows import Dataset, TokenizedRow
from zo2adapters.tasks.task import Task, TaskOptions, gather_in_order, is_own_shard
from zo2core import Batch, Engine, EvaluationResult, StepResult
from zo2core.errors import OptionError
from zo2core.io.durable import open_regular


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


class FunctionTask(LanguageModelling):
    """A task for rows of text with a function of model and batch as objective. See ``Task``."""

    def __init__(self, model: HFBlockModel, rows: Dataset, options: TaskOptions) -> None:
        super().__init__(model, rows, options)
        self._forward = CalledForward(model, user_function(options.objective))

    def step(self, engine: Engine, rows: Sequence[TokenizedRow], batch: Batch) -> StepResult:
        """Take a step on the function, which runs block by block."""
        return engine.step(batch, self._forward)

    def evaluate(self, engine: Engine, rows: Dataset) -> dict[str, float]:
        """Compute the mean of the function over batches, and the model's own loss."""
        starts = range(0, len(rows), self._options.batch_size)

        def batches() -> Iterator[Batch]:
            for number, start in enumerate(starts):
                if is_own_shard(engine, number):
                    yield self.batch(rows.rows[start : start + self._options.batch_size])

        own_values = [float(value) for outputs in engine.forwards(batches(), self._forward) for value in outputs]
        values = gather_in_order(engine, own_values, [1] * len(starts), rows.rows)
        return {"loss": math.fsum(values) / len(values), "model_loss": super().evaluate(engine, rows)["loss"]}


def user_function(name: str) -> Any:
    """Import a function by ``FILE.py:function``.

    The source is compiled here: Python's import might load a ``.pyc`` file from ``__pycache__``, which no digest of the
    source covers.
    """
    path, _, function = name.rpartition(":")
    try:
        spec = importlib.util.spec_from_file_location("zo2_objective", path)
        assert spec is not None, "a path that ends in .py has a loader"
        module = importlib.util.module_from_spec(spec)
        with open_regular(path) as file:
            code = compile(file.read(), path, "exec")
        sys.modules[spec.name] = module  # classes of the module look it up there
        exec(code, module.__dict__)  # noqa: S102 - the user named this program
        objective = getattr(module, function)
        if not callable(objective):
            raise TypeError(f"{function} is a {type(objective).__name__}, not a function")
    except Exception as error:  # the user's program may raise anything
        raise OptionError(
            "objective",
            found=f"{name}, which cannot be imported ({type(error).__name__}: {error})"[:300],
            expected="FILE.py:function, a function of the model and a batch that returns a number",
            remedy="check the path and the name",
        ) from error

    def one_number(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        value = objective(model, batch)
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return value
        found = (
            f"{f'shape {list(value.shape)}' if isinstance(value, torch.Tensor) else type(value).__name__} from {function}"
        )
        raise OptionError("objective", found=found, expected="a 0-d tensor", remedy="return the loss of the batch")

    return one_number
