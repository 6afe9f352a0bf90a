"""Arguments of a zeroth-order run that a trainer's own arguments do not cover."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zo2core import (
    BlockModel,
    Distribution,
    Engine,
    Guarded,
    Journal,
    MemoryPolicy,
    MeZOSGD,
    PhiloxNoise,
    WriteBackPolicy,
    ZerothOrder,
    ZOEstimator,
)
from zo2core.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class ZOArguments:
    """Arguments of a zeroth-order run. The defaults are those of ``zo2 train``.

    Learning rate, its schedule, weight decay and seed are arguments of the trainer.

    Args:
        zo_eps: Perturbation scale.
        estimator: Makes the estimator from ``lr`` (a function of the step), ``zo_eps`` and ``weight_decay``: a class such as
            ``MeZOSGD``, or ``functools.partial(MultiQueryRGE, q=4)``.
        guard: Whether to skip steps far outside the run's range and to stop a run that diverges. See ``Guarded``.
        distribution: Distribution of the directions; None: the numbers that MeZO draws. MeZO bit for bit needs None and
            ``estimator=MeZOSGD``.
        device: "cpu", "cuda" or "cuda:N"; None: the trainer's device.
        memory: How much memory the process may use.
        write_back: When changed segments are written to disk, in the folder ``.zo2-scratch`` of its directory; None: never.
            The files serve one process only: a resumed run replays its journal, since its checkpoint may be of an earlier
            step than the files.
        micro_batch_size: Rows of the micro-batches into which a batch is split. Needs the model's own loss.
        trainer_loss: Whether to call the trainer's ``compute_loss`` in training even if it gives the model's own loss. It
            then also computes the trainer's training metrics, which needs all logits.
        export_checkpoints: Whether checkpoints have the weights as well as the journal. Without weights a checkpoint takes a
            few hundred bytes per step; resuming and loading the best model need only the journal.

    Raises:
        OptionError: if ``estimator`` is not callable, for example because it is an estimator.
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
                expected="a function that makes an estimator, such as the class MeZOSGD",
                remedy="pass a class, or functools.partial(MultiQueryRGE, q=4)",
            )

    def open_engine(
        self, model: BlockModel, journal: Journal, *, lr: Callable[[int], float], weight_decay: float, seed: int, device: str
    ) -> Engine:
        """The engine of a run, at the last step of its journal.

        Args:
            model: The model.
            journal: The run's journal, in memory.
            lr: Maps a 0-based step to its learning rate.
            weight_decay: Weight decay of the trainer's arguments.
            seed: Seed of the run's directions.
            device: Device to compute on if ``self.device`` is None.

        Raises:
            ZO2Error: as ``Engine`` says.
        """
        estimator = self.estimator(lr=lr, zo_eps=self.zo_eps, weight_decay=weight_decay)
        noise = None if self.distribution is None else PhiloxNoise(self.distribution)  # None: MeZO's, the engine's default
        write_back = self.write_back
        if write_back is not None:  # files of an earlier engine do not belong to this version of the run
            write_back = replace(write_back, directory=Path(write_back.directory) / ".zo2-scratch")
            shutil.rmtree(write_back.directory, ignore_errors=True)
        return Engine(
            model,
            ZerothOrder(Guarded(estimator=estimator) if self.guard else estimator, noise=noise, seed=seed),
            journal=journal,
            device=device if self.device is None else self.device,
            memory=self.memory,
            write_back=write_back,
            micro_batch_size=self.micro_batch_size,
        )
