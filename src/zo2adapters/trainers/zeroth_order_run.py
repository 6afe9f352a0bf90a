"""Runs of zeroth-order steps: the journal gives the weights of every step."""

from __future__ import annotations

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.task import StepReport
from zo2adapters.trainers.batch_shapes import BatchShape
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.run_engine import build_engine, replayer, reserved_bytes
from zo2adapters.trainers.run_health import Watch, diverged, ruined
from zo2adapters.trainers.run_method import Opening, RunMethod
from zo2adapters.trainers.run_notices import storage, written_back
from zo2adapters.trainers.run_plan import step_seconds
from zo2core import DivergenceError, HostPlan, Journal, Runner, StepResult, ZO2Error, ZOEngine


class ZerothOrderRun(RunMethod[ZOEngine]):
    """Zeroth-order steps. See ``RunMethod``."""

    has_gradient = False
    learning_rates = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)

    def __init__(self, options: TrainOptions) -> None:
        super().__init__(options)
        self._estimator = options.estimator()
        self._watch = Watch()

    @property
    def forwards(self) -> int:
        """One for each evaluation. See the contract."""
        return self.options.optimization.evaluations

    def step_seconds(self, model: HFBlockModel, shape: BatchShape) -> float:
        """Forwards, and updates. See the contract."""
        return step_seconds(model, shape, self.options.optimization, self.options.batching.micro_batch_size)

    def losses(self, engine: ZOEngine) -> list[float]:
        """Those of each step's first evaluation. See the contract."""
        return [update.losses[0] for update in engine.journal.updates]

    def reserved_bytes(self, model: HFBlockModel, longest: int, sequences: int) -> tuple[int, int]:
        """Memory for the streams of a step. See the contract."""
        return reserved_bytes(self.options, model, longest, sequences)

    def engine(self, opening: Opening) -> ZOEngine:
        """An engine at the end of the journal. See the contract."""
        return build_engine(
            self.options,
            opening.model,
            self._estimator,
            opening.activations,
            opening.least_activations,
            opening.decides,
            execution=opening.execution,
            workers=opening.workers,
        )

    def first_step(self, journal: Journal) -> int:
        """The journal's end. See the contract."""
        return journal.version

    def storage(self, engine: ZOEngine, host: HostPlan, model: HFBlockModel) -> str:
        """Where blocks are, and how often they are written. See the contract."""
        written = written_back(self.options, engine.write_back_every, model.layouts)
        return storage(host, engine.device_plan, self.options.storage.device, written)

    def after_step(self, engine: ZOEngine, report: StepReport) -> list[str]:
        """What is wrong with all steps, once. See the contract."""
        assert isinstance(report, StepResult), "the engine takes zeroth-order steps"
        return self._watch.lines(report, engine.journal.updates, self.options)

    def at_step(self, engine: ZOEngine, model: HFBlockModel, activations: int, step: int) -> Runner:
        """Replay the journal: a segment's bytes cannot be brought back, so the base is read again. See the contract."""
        return replayer(self.options, model, activations, None, journal=engine.journal.until(step))

    def explained(self, error: ZO2Error, engine: ZOEngine) -> ZO2Error:
        """Where to go on from, and with which command; of a run without a guard the error itself. See the contract."""
        if isinstance(error, DivergenceError) or (self.options.optimization.guard and engine.version):
            return diverged(error, engine.journal.updates, self.options)
        return error

    def verdict(self, engine: ZOEngine) -> str | None:
        """By how far weights have moved. See the contract."""
        return ruined(engine.journal.updates)
