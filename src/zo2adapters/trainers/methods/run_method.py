"""The interface of methods, zeroth-order and first-order. ``Trainer`` uses it and knows no method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.batch_shapes import BatchShape
from zo2adapters.trainers.options import Execution, TrainOptions
from zo2adapters.trainers.worker_options import local_device
from zo2core import Engine, HostPlan, Journal, MemoryPolicy, SharedBase, StepResult, Workers, ZO2Error


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a run's engine is made of, in addition to the run's options."""

    model: HFBlockModel
    activations: int  # bytes that activations may use
    least_activations: int  # least bytes of activations on a device
    decides: Mapping[str, Any]  # the run's provenance, as JSON values
    execution: Execution
    workers: Workers | None  # processes that work on the same run; None: this process works alone


class RunMethod(ABC):
    """How the steps of a run are taken: its engine, memory, snapshots and messages.

    Args:
        options: The run's options.
        shared: The base that the run shares with others; None: it reads its base alone.

    Raises:
        OptionError: if a number is out of range, or options cannot be combined.
    """

    has_gradient: bool  # whether steps differentiate the objective
    learning_rates: Sequence[float]  # candidates of ``zo2 tune`` if the user gives none
    few_learning_rates: Sequence[float]  # candidates of a run that is too short to try all of these

    def __init__(self, options: TrainOptions, shared: SharedBase | None = None) -> None:
        self.options, self.shared = options, shared

    @property
    @abstractmethod
    def forwards(self) -> int:
        """Cost of a step, in forward passes of its batch."""

    @abstractmethod
    def step_seconds(self, model: HFBlockModel, shape: BatchShape) -> float:
        """Expected seconds of a step on the CPU with all blocks in memory. The probes take a few seconds."""

    @abstractmethod
    def losses(self, journal: Journal) -> list[float]:
        """The loss of each step of a journal, before its update."""

    @abstractmethod
    def reserved_bytes(self, model: HFBlockModel, longest: int, sequences: int) -> tuple[int, int]:
        """Memory for activations.

        Args:
            model: The model.
            longest: Tokens of the longest row.
            sequences: Largest number of sequences that a row has.

        Returns:
            Bytes to reserve, and the least bytes that a device needs.

        Raises:
            OptionError: if ``activation_memory`` cannot be parsed.
        """

    @abstractmethod
    def engine(self, opening: Opening) -> Engine:
        """The run's engine, at the step from which the run continues."""

    @abstractmethod
    def first_step(self, journal: Journal) -> int:
        """The earliest step from which the run may continue. Later steps of the journal are repeated."""

    @abstractmethod
    def storage(self, engine: Engine, host: HostPlan, model: HFBlockModel) -> str:
        """A line that says where the weights are kept and what the run writes."""

    @abstractmethod
    def writes(self, every: int | None, model: HFBlockModel, host: HostPlan) -> str:
        """What the run writes, in words.

        Args:
            every: Steps after which a zeroth-order run writes a block back; None: never.
            model: The model.
            host: Plan of the run's memory.
        """

    @abstractmethod
    def after_step(self, engine: Engine, report: StepResult) -> list[str]:
        """Do what is due after a step, and return messages, a line each."""

    @abstractmethod
    def at_step(self, engine: Engine, model: HFBlockModel, activations: int, step: int) -> Engine:
        """The model at an earlier step, for evaluation and export. The engine is closed."""

    def before_recording(self, engine: Engine, loss: float) -> None:  # noqa: B027 - most methods need nothing
        """Prepare for writing the loss of an evaluation of the current step to the journal. By default nothing is done."""

    def explained(self, error: ZO2Error, engine: Engine) -> ZO2Error:
        """The error with which a run ends after a step raised ``error``. By default the same error."""
        return error

    def verdict(self, journal: Journal) -> str | None:
        """A line that says if a journal's steps have destroyed the model, else None. By default None."""
        return None

    def how_to_continue(self, engine: Engine) -> str:
        """Commands that continue an interrupted run, and that export its model."""
        output = self.options.output
        return (
            f"stopped after {engine.version} steps; to continue the run, or to export the model at this step:\n"
            f"  {self.options.resume_command}\n"
            f"  zo2 export --run {output} --output DIR"
        )


def limits(options: TrainOptions, shared: SharedBase | None) -> Mapping[str, Any]:
    """The memory that the run's engine may use, for ``MemoryPolicy``; a shared base has those of its runs."""
    storage = options.storage
    return {} if shared is not None else {"host": storage.memory, "device": storage.device_memory}


def replayer(
    options: TrainOptions,
    model: HFBlockModel,
    activations: int,
    workers: Workers | None,
    *,
    journal: Journal | None = None,
    shared: SharedBase | None = None,
) -> Engine:
    """Open the weights of a step for evaluation. The run's engine, which uses the same model, must be closed.

    Args:
        options: The run's options.
        model: Model that was opened with these options.
        activations: Bytes that activations may use.
        workers: Processes that evaluate the same rows; None: this process works alone.
        journal: The run's journal up to the step; None: the base.
        shared: The base that the run shares with others; None: it reads its base alone.

    Raises:
        ZO2Error: of the kind that fits.
    """
    return Engine(
        model,
        journal=journal,
        micro_batch_size=options.batching.micro_batch_size,
        device=local_device(options.storage.device, workers),
        memory=MemoryPolicy(**limits(options, shared), activations=activations),
        workers=workers,
        shared=shared,
    )
