"""``zo2 plan``: what a run would take, without a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from zo2adapters.ranges import require_between
from zo2adapters.trainers.batching import Batching
from zo2adapters.trainers.optimization import MOST_QUERIES, Noise, Optimization
from zo2adapters.trainers.options import CarriedName, DtypeName, HeadName, PrecisionName, precision_of_run
from zo2core import (
    EstimatorName,
    OptionError,
    Replay,
    SequentialNoise,
    WriteBackPolicy,
    choose_carrying,
    require_perturbation,
)

MOST_WORKERS = 1024  # of a host


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Say what a run would take in memory, disk and time, without loading anything."""

    model: str
    """Model directory with safetensors weights, or a hub id."""
    architecture: Path | None = None
    """JSON file that says where the model's parts are; by default they are learned."""
    head: HeadName = "causal-lm"
    """What the model ends in, as for training."""
    dtype: DtypeName = "auto"
    """Dtype of the weights, as for training."""
    precision: PrecisionName = "auto"
    """exact, mixed or auto, as for training."""
    carried: CarriedName = "stored"
    """What blocks are carried in, as for training."""
    replay: Replay = "auto"
    """Who replays for a GPU, as for training."""
    memory: str = "auto"
    """Host memory the run may take in all, such as 6GiB; auto takes what is free."""
    scratch: Path = Path()
    """Directory on the disk that the run would write to."""
    write_limit_tb: float | None = None
    """Terabytes that 1,000 steps may write there, as for training."""
    device_memory: str | None = None
    """Memory of a GPU to plan for, such as 24GB, which need not be here: how many blocks stay there, and what is moved."""
    bus: str = "25GB"
    """Bytes a second from the host to that GPU, and as many back at the same time. They are assumed, not measured."""
    json: bool = False
    """Print JSON instead of a table."""
    noise: Noise = Noise.RADEMACHER
    """Random directions, as for training."""
    exact_mezo: bool = False
    """MeZO's noise and walk, as for training."""
    estimator: EstimatorName = EstimatorName.MEZO
    """What turns losses into steps, as for training."""
    queries: int = 1
    """Directions a step, as for training."""
    rank: int | None = None
    """Rank of directions beside the activations, as for training."""
    period: int = 100
    """Steps for which a factor of --rank stays, as for training."""
    workers: int = 1
    """Workers that torchrun starts on this host: the plan is that of one of them, with its part of the blocks that all have
    together. Times are those of one worker alone."""
    batching: Batching = field(default_factory=Batching)

    def run(self) -> None:
        """Print the plan."""
        WriteBackPolicy(directory=self.scratch, terabytes_per_1000_steps=self.write_limit_tb)  # refuses what is no limit
        from zo2adapters.models.checkpoint import open_checkpoint, resolve_directory
        from zo2adapters.trainers.device_run_plan import plan_device_run
        from zo2adapters.trainers.run_plan import plan_run

        require_between("queries", self.queries, 1, MOST_QUERIES)
        require_between("workers", self.workers, 1, MOST_WORKERS)
        if self.workers > 1 and self.device_memory is not None:
            raise OptionError(
                "workers",
                found=f"{self.workers} beside --device-memory",
                expected="a plan for the CPU: on GPUs each worker has a copy of its own",
                remedy="leave one of the two out",
            )
        optimization = Optimization(
            noise=self.noise,
            exact_mezo=self.exact_mezo,
            estimator=self.estimator,
            queries=self.queries,
            rank=self.rank,
            period=self.period,
        )
        optimization.require_consistent()
        self.batching.require_valid()
        directory = resolve_directory(self.model)
        on_cpu = self.device_memory is None
        exact = self.exact_mezo or self.rank is not None
        precision = precision_of_run(self.precision, exact_mezo=exact, on_cpu=on_cpu)
        model = open_checkpoint(
            directory,
            head=self.head,
            architecture=self.architecture,
            dtype=self.dtype,
            precision=precision,
            carried=self.carried,
            loss_chunk=self.batching.loss_chunk or "auto",
        )
        rows, tokens = self.batching.shape(self.batching.batch_size, self.batching.length_for(model))
        noise = optimization.generator(model.layouts)
        drawn = noise or SequentialNoise(model.layouts)
        require_perturbation(optimization.perturbation, model, optimization.estimator_of(1), drawn, replay=self.replay)
        if self.device_memory is not None:
            on_device = plan_device_run(
                model,
                memory=self.memory,
                device_memory=self.device_memory,
                bus=self.bus,
                rows=rows,
                tokens=tokens,
                micro_rows=self.batching.micro_batch_size,
                noise=noise,
                queries=self.queries,
                evaluations=optimization.evaluations,
                write_limit_tb=self.write_limit_tb,
                replay=self.replay,
                perturbation=optimization.perturbation,
            )
            print(on_device.to_json() if self.json else on_device.table())
            return
        choose_carrying(self.replay, model.layouts, drawn, in_place=True)  # or refuses it
        planned = plan_run(
            model,
            memory=self.memory,
            rows=rows,
            tokens=tokens,
            scratch=self.scratch,
            micro_rows=self.batching.micro_batch_size,
            noise=noise,
            queries=self.queries,
            evaluations=optimization.evaluations,
            write_limit_tb=self.write_limit_tb,
            perturbation=optimization.perturbation,
            workers=self.workers,
        )
        print(planned.to_json() if self.json else planned.table())
