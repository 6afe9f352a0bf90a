"""What a zeroth-order run takes beyond a trainer's own arguments."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zo2core import (
    BlockModel,
    Distribution,
    Guarded,
    Journal,
    MemoryPolicy,
    MeZOSGD,
    NoiseGenerator,
    OptionError,
    PhiloxNoise,
    WriteBackPolicy,
    ZOEngine,
    ZOEstimator,
)


@dataclass(frozen=True, kw_only=True)
class ZOArguments:
    """What a zeroth-order run takes beyond a trainer's own arguments. The defaults are those of ``zo2 train``.

    Learning rate, its schedule, weight decay and seed are the trainer's arguments.

    Args:
        zo_eps: Perturbation scale.
        estimator: Makes the estimator of ``lr`` (a function of the step), ``zo_eps`` and ``weight_decay``: a class such as
            ``MeZOSGD``, or ``functools.partial(MultiQueryRGE, q=4)``.
        guard: Whether steps far outside the run's range are refused, and a run that diverges ends. See ``Guarded``.
        distribution: Distribution of the directions; None: the numbers that MeZO draws. MeZO bit for bit needs None and
            ``estimator=MeZOSGD``.
        device: "cpu", "cuda" or "cuda:N"; None is the trainer's.
        memory: How much memory the process may take.
        write_back: When changed segments are written to disk, in the folder ``.zo2-scratch`` of its directory. None: never.
            It makes room within one process: a run that goes on replays its journal, since a checkpoint may hold an earlier
            step than what was written.
        micro_batch_size: Rows of the micro-batches into which a batch is split. Only where the loss is the model's own.
        trainer_loss: Whether the trainer's ``compute_loss`` runs in training where its loss is the model's own, too. It also
            makes the trainer's metrics of a training step, at the price of all logits.
        export_checkpoints: Whether a checkpoint holds the weights beside the journal. Without them it is a few hundred bytes
            a step; resuming and the best model need the journal alone.

    Raises:
        OptionError: if ``estimator`` is an estimator already, or nothing that can be called.
    """

    zo_eps: float = 1e-3
    estimator: Callable[..., ZOEstimator] = partial(MeZOSGD, perturb_in_place=False)  # noqa: RUF009 - not changed
    guard: bool = True
    distribution: Distribution | None = Distribution.RADEMACHER
    device: str | None = None
    memory: MemoryPolicy = MemoryPolicy()  # noqa: RUF009 - frozen
    write_back: WriteBackPolicy | None = None
    micro_batch_size: int | None = None
    trainer_loss: bool = False
    export_checkpoints: bool = True

    def __post_init__(self) -> None:
        if not callable(self.estimator):
            raise OptionError(
                "estimator",
                found=repr(self.estimator)[:80],
                expected="what makes an estimator, such as the class MeZOSGD",
                remedy="pass a class, or functools.partial(MultiQueryRGE, q=4)",
            )

    def open_engine(
        self,
        model: BlockModel,
        journal: Journal,
        *,
        lr: Callable[[int], float],
        weight_decay: float,
        seed: int,
        device: str,
    ) -> ZOEngine:
        """The engine of a run, where its journal ends.

        Args:
            model: The model.
            journal: The run's, in memory.
            lr: From the 0-based step to its learning rate.
            weight_decay: The trainer's.
            seed: Seed of the run's directions.
            device: Where it computes if ``self.device`` does not say.

        Raises:
            ZO2Error: as ``ZOEngine`` says.
        """
        return ZOEngine(
            model,
            self.make_estimator(lr, weight_decay),
            noise=self.make_noise(),
            journal=journal,
            seed=seed,
            device=device if self.device is None else self.device,
            memory=self.memory,
            write_back=self.fresh_write_back(),
            micro_batch_size=self.micro_batch_size,
        )

    def make_noise(self) -> NoiseGenerator | None:
        """What draws the directions of a run; None is the engine's choice: MeZO's numbers."""
        return None if self.distribution is None else PhiloxNoise(self.distribution)

    def fresh_write_back(self) -> WriteBackPolicy | None:
        """The policy with an empty folder of its own: what another version has left there does not belong to this one."""
        if self.write_back is None:
            return None
        directory = Path(self.write_back.directory) / ".zo2-scratch"
        shutil.rmtree(directory, ignore_errors=True)
        return replace(self.write_back, directory=directory)

    def make_estimator(self, lr: Callable[[int], float], weight_decay: float) -> ZOEstimator:
        """The estimator of a run.

        Args:
            lr: From the 0-based step to its learning rate.
            weight_decay: The trainer's.

        Raises:
            OptionError: if a number is out of its range.
        """
        estimator = self.estimator(lr=lr, zo_eps=self.zo_eps, weight_decay=weight_decay)
        return Guarded(estimator=estimator) if self.guard else estimator
