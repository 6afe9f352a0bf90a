"""What differs between runs of zeroth-order and of first-order steps, behind the same verbs: ``Trainer`` knows no method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.task import StepReport, TrainingEngine
from zo2adapters.trainers.batch_shapes import BatchShape
from zo2adapters.trainers.options import Execution, TrainOptions
from zo2core import HostPlan, Journal, Runner, Workers, ZO2Error

EngineT = TypeVar("EngineT", bound=TrainingEngine)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a run's engine is made of, beside its options."""

    model: HFBlockModel
    activations: int  # bytes that activations may take
    least_activations: int  # bytes that they take at least, on a device
    decides: Mapping[str, Any]  # what decides the run beside its base and its method, as JSON values
    execution: Execution
    workers: Workers | None  # others that work on the same run


class RunMethod(ABC, Generic[EngineT]):
    """How the steps of a run are taken, and what follows from that.

    Args:
        options: The run's.

    Raises:
        OptionError: if a number is out of its range, or options do not go together.
    """

    has_gradient: bool  # whether steps differentiate the objective
    learning_rates: Sequence[float]  # to try where a user names none
    few_learning_rates: Sequence[float]  # to try where a run is too short to try all of these

    def __init__(self, options: TrainOptions) -> None:
        self.options = options

    @property
    @abstractmethod
    def forwards(self) -> int:
        """What a step costs, in forwards of its batch."""

    @abstractmethod
    def step_seconds(self, model: HFBlockModel, shape: BatchShape) -> float:
        """Expected seconds of a step on the CPU, all blocks in memory. The probes take a few seconds."""

    @abstractmethod
    def losses(self, journal: Journal) -> list[float]:
        """The loss of each step of a journal, before its update."""

    @abstractmethod
    def reserved_bytes(self, model: HFBlockModel, longest: int, sequences: int) -> tuple[int, int]:
        """Memory to reserve for activations on rows of so many tokens and sequences, and the least that a device needs."""

    @abstractmethod
    def engine(self, opening: Opening) -> EngineT:
        """The run's engine, at the step where the run goes on."""

    @abstractmethod
    def first_step(self, journal: Journal) -> int:
        """The earliest step from which the run may go on: fewer than its journal has, if steps have to be repeated."""

    @abstractmethod
    def storage(self, engine: EngineT, host: HostPlan, model: HFBlockModel) -> str:
        """Where the weights live and what the run writes, in words."""

    @abstractmethod
    def writes(self, every: int | None, model: HFBlockModel) -> str:
        """What the run writes, in words, if each block is written back every so many steps; None: never."""

    @abstractmethod
    def after_step(self, engine: EngineT, report: StepReport) -> list[str]:
        """Do what is due after a step; what there is to say, a line each."""

    @abstractmethod
    def at_step(self, engine: EngineT, model: HFBlockModel, activations: int, step: int) -> Runner:
        """The model of an earlier step, to look at. The engine is closed."""

    def before_noting(self, engine: EngineT, loss: float) -> None:
        """Do what has to be done before the loss of an evaluation of the present step is noted. By default nothing."""

    def explained(self, error: ZO2Error, engine: EngineT) -> ZO2Error:
        """The error with which a run ends whose step was refused. By default the step's own."""
        return error

    def verdict(self, journal: Journal) -> str | None:
        """Say in a line that a journal's steps left nothing of the model; None if they did not, and by default."""
        return None

    def ways_on(self, engine: EngineT) -> str:
        """How to go on with a run that was interrupted, and how to get its model."""
        output = self.options.output
        return (
            f"stopped after {engine.version} steps; to go on, or to get the model of this moment:\n"
            f"  zo2 train --resume {output}\n"
            f"  zo2 export --run {output} --output DIR"
        )
