"""Zeroth-order runs, whose journal gives the weights of every step."""

from __future__ import annotations

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.batch_shapes import BatchShape
from zo2adapters.trainers.methods.run_health import HealthMonitor, destroyed, diverged
from zo2adapters.trainers.methods.run_method import Opening, RunMethod, limits, replayer
from zo2adapters.trainers.options import Order, TrainOptions
from zo2adapters.trainers.run_directory import JOURNAL
from zo2adapters.trainers.run_notices import disk_writes, storage
from zo2adapters.trainers.run_plan import step_memory, step_seconds
from zo2adapters.trainers.worker_options import local_device, worker_trace
from zo2core import Engine, HostPlan, Journal, MemoryPolicy, SharedBase, StepResult, WriteBackPolicy, ZerothOrder, ZO2Error
from zo2core.errors import DivergenceError
from zo2core.planning.host_budget import parse_size


class ZerothOrderRun(RunMethod):
    """A run of zeroth-order steps. See ``RunMethod``."""

    has_gradient = False
    learning_rates = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
    few_learning_rates = (1e-6, 1e-5, 1e-4, 1e-3)

    def __init__(self, options: TrainOptions, shared: SharedBase | None = None) -> None:
        super().__init__(options, shared)
        self._estimator = options.estimator()
        self._health = HealthMonitor()

    @property
    def forwards(self) -> int:
        """One for each evaluation. See the contract."""
        return self.options.optimization.evaluations

    def step_seconds(self, model: HFBlockModel, shape: BatchShape) -> float:
        """Forwards, and updates. See the contract."""
        options = self.options
        generated = options.rewards.new_tokens
        return step_seconds(model, shape, options.optimization, options.batching.micro_batch_size, new_tokens=generated)

    def losses(self, journal: Journal) -> list[float]:
        """Those of each step's first evaluation. See the contract."""
        return [update.losses[0] for update in journal.updates]

    def reserved_bytes(self, model: HFBlockModel, longest: int, sequences: int) -> tuple[int, int]:
        """Memory for the activations of all forwards of a step. See the contract."""
        batching, given = self.options.batching, self.options.storage.activation_memory
        shape = BatchShape.whole(*batching.shape(batching.batch_size * sequences, longest))
        optimization, generated = self.options.optimization, self.options.rewards.new_tokens
        nbytes, least = step_memory(model, shape, optimization, batching.micro_batch_size, new_tokens=generated)
        return nbytes if given is None else parse_size(given), least

    def engine(self, opening: Opening) -> Engine:
        """An engine at the end of the journal. See the contract."""
        options, execution, stored = self.options, opening.execution, self.options.storage
        return Engine(
            opening.model,
            ZerothOrder(
                self._estimator,
                noise=options.optimization.generator(opening.model.layouts),
                seed=options.seed,
                perturbation=options.optimization.perturbation,
            ),
            journal=options.output / JOURNAL,
            device=local_device(stored.device, opening.workers),
            memory=MemoryPolicy(
                **limits(options, self.shared),
                activations=opening.activations,
                least_activations=None if stored.device == "cpu" else opening.least_activations,
            ),
            write_back=WriteBackPolicy(
                directory=options.output,
                every=None if stored.write_back_every == "never" else stored.write_back_every,
                snapshot_every=stored.snapshot_every,
                terabytes_per_1000_steps=stored.write_limit_tb,
            ),
            micro_batch_size=options.batching.micro_batch_size,
            overlap=execution.scheduler is Order.OVERLAPPED,
            replay=execution.replay,
            trace=worker_trace(execution.trace, opening.workers),
            provenance=opening.decides,
            workers=opening.workers,
            shared=self.shared,
        )

    def first_step(self, journal: Journal) -> int:
        """The journal's end. See the contract."""
        return journal.version

    def storage(self, engine: Engine, host: HostPlan, model: HFBlockModel) -> str:
        """Where blocks are kept, and how often they are written. See the contract."""
        writes = self.writes(engine.write_back_every, model, host)
        return storage(host, engine.device_plan, self.options.storage, writes)

    def writes(self, every: int | None, model: HFBlockModel, host: HostPlan) -> str:
        """Blocks, or factors of finished periods. See the contract."""
        return disk_writes(self.options, every, model.layouts)

    def after_step(self, engine: Engine, report: StepResult) -> list[str]:
        """Warnings, each of which is given once. See the contract."""
        assert isinstance(report, StepResult), "the engine takes zeroth-order steps"
        return self._health.warnings(report, engine.journal.updates, self.options)

    def at_step(self, engine: Engine, model: HFBlockModel, activations: int, step: int) -> Engine:
        """The base with the updates up to the step, since later updates cannot be undone. See the contract."""
        until = engine.journal.until(step)
        return replayer(self.options, model, activations, None, journal=until, shared=self.shared)

    def explained(self, error: ZO2Error, engine: Engine) -> ZO2Error:
        """The error with commands to continue from the best step; unchanged without a guard. See the contract."""
        if isinstance(error, DivergenceError) or (self.options.optimization.guard and engine.version):
            return diverged(error, engine.journal.updates, self.options)
        return error

    def verdict(self, journal: Journal) -> str | None:
        """A warning if the weights have moved too far. See the contract."""
        return destroyed(journal.updates)
