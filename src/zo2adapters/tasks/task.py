"""The contract of a task: how a run learns from rows of one format, and how it is evaluated on them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from zo2core import Batch, DurableBackpropEngine, GradientStepResult, Runner, StepResult, ZOEngine

TrainingEngine: TypeAlias = ZOEngine | DurableBackpropEngine
StepReport: TypeAlias = StepResult | GradientStepResult


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What a run's options say about its task."""

    objective: str  # name of the task or FILE.py:function; "auto" until the registry has chosen a task
    pad: int  # token id at padded positions
    batch_size: int  # rows of a batch
    micro_batch_size: int | None = None  # sequences that run at a time; None: all of a batch
    beta: float | None = None  # weight of DPO's penalty; None: the default
    pack: bool = False  # whether rows of a batch are concatenated instead of padded
    per_row: bool = False  # whether each row of a batch has a loss and a direction of its own
    differentiates: bool = False  # whether steps take the gradient of the objective


class Task(Protocol):
    """How a run learns from rows of one format.

    A task is made as ``maker(model, rows, options)``, from an ``HFBlockModel``, the rows to train on, and ``TaskOptions``.
    """

    provenance: Mapping[str, Any] = MappingProxyType({})
    """What the steps depend on and the options leave open, as JSON values for the journal's header."""

    def prepare(
        self, open_base: Callable[[], AbstractContextManager[Runner]], rows_to_come: Callable[[], Sequence[Any]]
    ) -> None:
        """Compute what the task needs of the base model, before the first step of a new or resumed run.

        By default nothing is needed, and neither argument is called.

        Args:
            open_base: Opens a runner of the base model, whatever steps the run has taken.
            rows_to_come: Lists the rows of all steps and evaluations to come.
        """

    @abstractmethod
    def batch(self, rows: Sequence[Any]) -> Batch:
        """Make a batch of the rows of one step."""

    @abstractmethod
    def step(self, engine: TrainingEngine, rows: Sequence[Any], batch: Batch) -> StepReport:
        """Take one step.

        Args:
            engine: The run's engine.
            rows: The rows of the step.
            batch: What ``batch`` made of these rows.
        """

    @abstractmethod
    def evaluate(self, engine: Runner, rows: Any) -> dict[str, float]:
        """Evaluate the current weights.

        Args:
            engine: Runner whose current weights are evaluated.
            rows: A file of rows of the task's format.

        Returns:
            Results by name. ``loss`` is among them, and smaller is better.
        """
