"""``zo2 export``: the model of any step, as a directory that ``from_pretrained`` loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zo2adapters.commands.at_step import AtStep
from zo2adapters.trainers.model_options import DtypeName
from zo2core import OptionError
from zo2core.checkpoint import require_unused


@dataclass(frozen=True, kw_only=True)
class Export(AtStep):
    """Write the model of any step of a run, or of a base and a journal, in the Hugging Face layout."""

    output: Path
    """Directory to write; it must not exist, or be empty."""
    output_dtype: DtypeName = "auto"
    """Dtype to which weights are rounded as they are written. auto writes them as they are stored; in mixed precision it is
    the base's own."""
    as_adapter: bool = False
    """Of a run with --rank: write what it learned as a LoRA adapter of peft's, for the base, instead of a whole model."""

    def after_interruption(self) -> str:
        """What there is after an interruption. The directory appears whole or not at all."""
        if self.output.is_dir() and any(self.output.iterdir()):
            return f"{self.output} is there, and whole"
        return f"{self.output} was not written; the same command writes it"

    def run(self) -> None:
        """Replay and write.

        Raises:
            OptionError: if no adapter can say what the run learned, or it is to be rounded.
        """
        from zo2adapters.models.adapter_export import export_adapter

        require_unused(self.output)
        if self.as_adapter and self.output_dtype != "auto":
            expected = "auto for an adapter, which is float32"
            raise OptionError("output_dtype", found=self.output_dtype, expected=expected, remedy="leave it out")
        at = self.resolved()
        model = at.opened(export_dtype=self.output_dtype)
        with at.engine(model) as engine:
            if self.as_adapter:
                export_adapter(engine, model, self.output, base=str(at.model))
            else:
                engine.export(self.output)
            print(f"{self.output}: the {'adapter' if self.as_adapter else 'model'} after {engine.version} steps")
