"""The contract of a task: how a run trains on rows of one format, and how it is evaluated on them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from zo2adapters.tasks.reward_options import RewardOptions
from zo2core import Batch, Engine, StepResult


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The options of a run that concern its task."""

    objective: str  # name of the task or FILE.py:function; "auto" until the registry has chosen a task
    pad: int  # token id at padded positions
    batch_size: int  # number of rows in a batch
    micro_batch_size: int | None = None  # sequences that run at a time; None runs all of a batch
    beta: float | None = None  # strength of DPO's penalty; None is the default
    pack: bool = False  # whether rows of a batch are concatenated instead of padded
    per_row: bool = False  # whether each row of a batch has a loss and a direction of its own
    differentiates: bool = False  # whether steps take the gradient of the objective
    rewards: RewardOptions | None = None  # rewards of what the model writes; None: there are none
    tokenizer: Any = None  # the model's, for rewards of texts
    seed: int = 0  # of the run


class Task(Protocol):
    """How a run trains on rows of one format.

    A task's constructor takes an ``HFBlockModel``, the rows to train on, and ``TaskOptions``.
    """

    provenance: Mapping[str, Any] = MappingProxyType({})
    """Values that the steps depend on and the options do not determine, as JSON values for the journal's header."""

    def prepare(
        self, open_base: Callable[[], AbstractContextManager[Engine]], rows_to_come: Callable[[], Sequence[Any]]
    ) -> None:
        """Compute what the task needs from the base model, before the first step of a new or resumed run.

        The default needs nothing, and calls neither argument.
        """

    def measured(self) -> Mapping[str, float]:
        """Return what the last step has measured beside its losses, by name. By default nothing."""
        return {}

    def close(self) -> None:
        """End what the task has started. May be called twice. By default there is nothing."""

    @abstractmethod
    def batch(self, rows: Sequence[Any]) -> Batch:
        """Make a batch from the rows of one step."""

    @abstractmethod
    def step(self, engine: Engine, rows: Sequence[Any], batch: Batch) -> StepResult:
        """Take one step."""

    @abstractmethod
    def evaluate(self, engine: Engine, rows: Any) -> dict[str, float]:
        """Evaluate the current weights."""
