"""Zeroth-order runs, whose journal gives the weights of every step."""

from __future__ import annotations

from typing import Any

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.batch_shapes import BatchShape
from zo2adapters.trainers.engines import replayer
from zo2adapters.trainers.methods.run_health import HealthMonitor, destroyed, diverged
from zo2adapters.trainers.methods.run_method import RunMethod
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.run_notices import disk_writes
from zo2adapters.trainers.step_memory import step_memory
from zo2core import Engine, HostPlan, Journal, SharedBase, StepResult, ZO2Error
from zo2core.errors import DivergenceError
from zo2core.ranges import parse_size


class ZerothOrderRun(RunMethod):
    """A run of zeroth-order steps. See ``RunMethod``."""

    has_gradient = False
    learning_rates = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
    few_learning_rates = (1e-6, 1e-5, 1e-4, 1e-3)

    def __init__(self, options: TrainOptions, shared: SharedBase | None = None) -> None:
        super().__init__(options, shared)
        options.estimator()  # refuses what cannot be combined
        self.forwards = options.optimization.evaluations
        self._health = HealthMonitor()

    def losses(self, journal: Journal) -> list[float]:
        """Those of each step's first evaluation. See the contract."""
        return [update.losses[0] for update in journal.updates]

    def reserved_bytes(self, model: HFBlockModel, longest: BatchShape) -> tuple[int, int]:
        """Memory for the activations of all forwards of a step. See the contract."""
        options, given = self.options, self.options.storage.activation_memory
        micro_rows, generated = options.batching.micro_batch_size, options.rewards.new_tokens
        nbytes, least = step_memory(model, longest, options.optimization, micro_rows, new_tokens=generated)
        return nbytes if given is None else parse_size(given), least

    def first_step(self, journal: Journal) -> int:
        """The journal's end. See the contract."""
        return journal.version

    def writes(self, every: int | None, model: HFBlockModel, host: HostPlan) -> str:
        """Blocks, or factors of finished periods. See the contract."""
        return disk_writes(self.options, every, model.layouts)

    def after_step(self, engine: Any, report: StepResult) -> list[str]:
        """Warnings, each of which is given once. See the contract."""
        assert isinstance(report, StepResult), "the engine takes zeroth-order steps"
        return self._health.warnings(report, engine.journal.updates, self.options)

    def at_step(self, engine: Any, model: HFBlockModel, activations: int, step: int) -> Engine:
        """The base with the updates up to the step, since later updates cannot be undone. See the contract."""
        until = engine.journal.until(step)
        return replayer(self.options, model, activations, None, journal=until, shared=self.shared)

    def explained(self, error: ZO2Error, engine: Any) -> ZO2Error:
        """The error with commands to continue from the best step; unchanged without a guard. See the contract."""
        if isinstance(error, DivergenceError) or (self.options.optimization.guard and engine.version):
            return diverged(error, engine.journal.updates, self.options)
        return error

    def verdict(self, journal: Journal) -> str | None:
        """A warning if the weights have moved too far. See the contract."""
        return destroyed(journal.updates)
