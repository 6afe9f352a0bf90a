"""The interface of methods, zeroth-order and first-order. ``Trainer`` uses it and knows no method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.batch_shapes import BatchShape
from zo2adapters.trainers.engines import Opening, open_engine
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.run_notices import storage
from zo2core import Engine, HostPlan, Journal, SharedBase, StepResult, ZO2Error
from zo2core.ranges import counted


class RunMethod(ABC):
    """How the steps of a run are taken: memory, snapshots and messages."""

    has_gradient: bool  # whether steps differentiate the objective
    forwards: int  # cost of a step, in forward passes of its batch
    learning_rates: Sequence[float]  # candidates of ``zo2 tune`` if the user gives none
    few_learning_rates: Sequence[float]  # candidates of a run that is too short to try all of these

    def __init__(self, options: TrainOptions, shared: SharedBase | None = None) -> None:
        self.options, self.shared = options, shared

    @abstractmethod
    def losses(self, journal: Journal) -> list[float]:
        """The loss of each step of a journal, before its update."""

    @abstractmethod
    def reserved_bytes(self, model: HFBlockModel, longest: BatchShape) -> tuple[int, int]:
        """Bytes to reserve for activations of the largest batch, and the least bytes that a device needs."""

    def engine(self, opening: Opening) -> Any:
        """The run's engine, at the step from which the run continues."""
        return open_engine(self.options, opening)

    @abstractmethod
    def first_step(self, journal: Journal) -> int:
        """The earliest step from which the run may continue. Later steps of the journal are repeated."""

    def storage(self, engine: Any, host: HostPlan, model: HFBlockModel) -> str:
        """A line that says where the weights are kept and what the run writes."""
        every = getattr(engine, "write_back_every", None)
        return storage(host, engine.device_plan, self.options.storage, self.writes(every, model, host))

    @abstractmethod
    def writes(self, every: int | None, model: HFBlockModel, host: HostPlan) -> str:
        """What the run writes, in words; ``every`` are the steps after which a zeroth-order run writes a block back."""

    @abstractmethod
    def after_step(self, engine: Any, report: StepResult) -> list[str]:
        """Do what is due after a step, and return messages, a line each."""

    def snapshot_bytes(self, engine: Any) -> int:
        """Bytes of snapshots that this process has written."""
        return 0

    @abstractmethod
    def at_step(self, engine: Any, model: HFBlockModel, activations: int, step: int) -> Engine:
        """The model at an earlier step, for evaluation and export. The engine is closed."""

    def before_recording(self, engine: Any, loss: float) -> None:
        """Prepare for writing the loss of an evaluation of the current step to the journal."""
        return

    def explained(self, error: ZO2Error, engine: Any) -> ZO2Error:
        """The error with which a run ends after a step raised ``error``."""
        return error

    def verdict(self, journal: Journal) -> str | None:
        """A line that says if a journal's steps have destroyed the model, else None."""
        return None

    def how_to_continue(self, engine: Any) -> str:
        """Commands that continue an interrupted run, and that export its model."""
        return (
            f"stopped after {counted(engine.version, 'step')}; to continue the run, or to export the model at this step:\n"
            f"  {self.options.resume_command}\n"
            f"  zo2 export --run {self.options.output} --output DIR"
        )
