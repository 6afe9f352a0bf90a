"""A task for rows of text with the user's own objective: ``--objective FILE.py:function``."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zo2adapters.models.called_forward import CalledForward
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.language_modelling_task import LanguageModelling
from zo2adapters.tasks.rows import Dataset, TokenizedRow
from zo2adapters.tasks.sharding import gather_in_order, is_own_shard
from zo2adapters.tasks.task import TaskOptions
from zo2core import Batch, Engine, StepResult
from zo2core.errors import OptionError
from zo2core.io.durable import open_regular


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
