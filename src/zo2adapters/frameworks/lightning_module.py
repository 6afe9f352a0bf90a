"""Zeroth-order training in Lightning: a module with manual optimization whose weights are streamed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zo2adapters.frameworks.arguments import ZOArguments
from zo2adapters.frameworks.manual_steps_module import ManualStepsModule
from zo2adapters.frameworks.saved_run import JOURNAL, read_journal
from zo2adapters.models.hf import HFBlockModel
from zo2core import Engine, Journal
from zo2core.errors import JournalError
from zo2core.journal import copy_journal

_VERSION = "journal.version"  # key of the number of steps in a checkpoint


class ZOLightningModule(ManualStepsModule):
    """Trains a model in Lightning's loop: ``Trainer().fit(ZOLightningModule(open_checkpoint("model"), lr=1e-6), loader)``.

    The loader's batches are what the model's forward takes. A training step is ``engine.step(batch)``, bit for bit.
    Lightning's precision, accelerator and strategy apply to weights that are whole in memory: leave them at one CPU or GPU
    in 32 bits, and open the model in the precision to compute in. Lightning's checkpoints have the run's journal instead of
    weights, a few hundred bytes per step; ``export`` writes the model.

    Args:
        model: Model from ``open_checkpoint``.
        lr: Peak learning rate.
        lr_lambda: Maps a 0-based step to a factor of ``lr``; None: constant.
        weight_decay: Weight decay of MeZO's update.
        seed: Seed of the run's directions.
        zo: Other arguments of the zeroth-order run; ``device`` is the CPU by default.

    Logs:
        ``train_loss`` at each step, ``val_loss`` after each validation: the mean over labelled tokens. A subclass whose
        ``validation_step`` does not call this one's logs its own evaluation, and no ``val_loss``.

    Raises:
        MissingPackageError: on import, if Lightning is not installed.
        ZO2Error: as ``Engine`` says, at the first step.
    """

    clipping_remedy = "leave it out: there is no gradient; Clipped(...) in ZOArguments clips projected gradients"

    def __init__(
        self,
        model: HFBlockModel,
        *,
        lr: float,
        lr_lambda: Callable[[int], float] | None = None,
        weight_decay: float = 0.0,
        seed: int = 0,
        zo: ZOArguments | None = None,
    ) -> None:
        super().__init__(lr, lr_lambda)
        self.zo = ZOArguments() if zo is None else zo
        self._model = model
        self._weight_decay, self._seed = weight_decay, seed
        self._engine: Engine | None = None
        self._journal = Journal()

    @property
    def engine(self) -> Engine:
        """Engine that takes the steps, at the present version."""
        if self._engine is None:
            self._engine = self.zo.open_engine(
                self._model,
                self._journal,
                lr=self._present_lr,
                weight_decay=self._weight_decay,
                seed=self._seed,
                device="cpu",
            )
        return self._engine

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the journal and its number of steps to a checkpoint."""
        with tempfile.TemporaryDirectory() as directory:
            copy_journal(self.engine.journal, Path(directory) / JOURNAL)
            checkpoint[JOURNAL] = (Path(directory) / JOURNAL).read_text()
        checkpoint[_VERSION] = self.engine.version  # global_step counts from 0 again when another Trainer goes on

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue from the journal in a checkpoint.

        Raises:
            JournalError: if it is missing or damaged, or has another number of steps than was saved.
        """
        if JOURNAL not in checkpoint:
            raise JournalError(
                "the checkpoint",
                found="no journal",
                expected="the journal of a zeroth-order run",
                remedy="pass a checkpoint that this module saved",
            )
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / JOURNAL).write_text(checkpoint[JOURNAL])
            version = checkpoint.get(_VERSION, checkpoint["global_step"])
            journal = read_journal(Path(directory) / JOURNAL, int(version), name=f"{JOURNAL} in the checkpoint")
        if self._engine is not None:
            self._engine.close()
        self._engine, self._journal = None, journal
