"""What Lightning modules over streamed models share: evaluation in common sweeps, and refusals of what has no effect."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from pathlib import Path
from typing import Any

from zo2adapters.optional_package import optional_package
from zo2core import Batch, Engine
from zo2core.errors import OptionError, ZO2Warning

lightning = optional_package("lightning.pytorch", install="zo2core[lightning]")
CombinedLoader: Any = optional_package("lightning.pytorch.utilities", install="zo2core[lightning]").CombinedLoader

WHOLE_STEPS = (None, 1)  # of accumulate_grad_batches: a loader gives lists of batches instead


class StreamedLightningModule(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """A module whose model is no ``nn.Module`` in memory, but streamed by an engine."""

    def __init__(self) -> None:
        super().__init__()
        self._to_evaluate: list[Batch] = []

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The engine that runs the model, at the present weights."""

    def require_whole_steps(self) -> None:
        """Refuse gradient accumulation by Lightning, which would take each batch through all blocks by itself."""
        asked = self.trainer.accumulate_grad_batches
        if self.trainer.state.fn == "fit" and asked not in WHOLE_STEPS:
            raise OptionError(
                "Trainer(accumulate_grad_batches)",
                found=str(asked),
                expected="1",
                remedy="leave it out, and have the loader give lists of batches: a step takes all batches of a list at once",
            )

    def setup(self, stage: str) -> None:
        """Refuse what concerns weights that are whole in memory."""
        asked = {"precision": (str(self.trainer.precision), "32-true"), "devices": (str(self.trainer.world_size), "1")}
        for name, (found, expected) in asked.items():
            if found != expected:
                raise OptionError(
                    f"Trainer({name})",
                    found=found,
                    expected=expected,
                    remedy="leave it out; open_checkpoint(precision=...) says in which precision the model runs",
                )

    def on_train_start(self) -> None:
        """Warn if a resumed epoch repeats batches, as it does with a data loader that cannot restore its position."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        is_in_epoch = self.trainer.fit_loop.restarting and progress.current.ready > 0 and not progress.is_last_batch
        loaders = CombinedLoader(self.trainer.train_dataloader, "sequential").flattened
        if is_in_epoch and not all(hasattr(loader, "load_state_dict") for loader in loaders):
            warnings.warn(
                f"the checkpoint was saved after {progress.current.ready} batches of an epoch, and the data loader has no "
                "load_state_dict, so it gives the epoch's first batches again: the steps are not those of an uninterrupted "
                "run. Resume from a checkpoint at the end of an epoch, or train with a loader that has state_dict and "
                "load_state_dict, such as torchdata's StatefulDataLoader",
                ZO2Warning,
                stacklevel=2,
            )

    def on_validation_epoch_start(self) -> None:
        """Forget the batches of a validation that was broken off."""
        self._to_evaluate = []

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Keep the batch: all of them share sweeps at the end. A subclass that evaluates by itself need not call it."""
        self._to_evaluate.append(batch)

    def on_validation_epoch_end(self) -> None:
        """Evaluate the batches that were kept, as many a sweep as activations may take memory, and log ``val_loss``."""
        batches, self._to_evaluate = self._to_evaluate, []
        if not batches:
            return
        self.log("val_loss", self.engine.evaluate(batches).loss, prog_bar=True)

    def export(self, directory: Path | str) -> None:
        """Write the model, as ``from_pretrained`` loads it. See ``Engine.export``."""
        self.engine.export(directory)
