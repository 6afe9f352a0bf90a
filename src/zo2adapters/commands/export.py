"""``zo2 export``: the model of any step, as a directory that ``from_pretrained`` loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zo2adapters.commands.at_step import AtStep
from zo2adapters.trainers.options import DtypeName
from zo2core import require_unused


@dataclass(frozen=True, kw_only=True)
class Export(AtStep):
    """Write the model of any step of a run, or of a base and a journal, in the Hugging Face layout."""

    output: Path
    """Directory to write; it must not exist, or be empty."""
    output_dtype: DtypeName = "auto"
    """Dtype to which weights are rounded as they are written. auto writes them as they are stored; in mixed precision it is
    the base's own."""

    def run(self) -> None:
        """Replay and write."""
        require_unused(self.output)
        at = self.resolved()
        model = at.opened(export_dtype=self.output_dtype)
        with at.engine(model) as engine:
            engine.export(self.output)
            print(f"{self.output}: the model after {engine.version} steps")
