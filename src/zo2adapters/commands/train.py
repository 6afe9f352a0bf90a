"""``zo2 train``: fine-tune a checkpoint, or go on with a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from zo2adapters.trainers.allocator import keep_freed_memory, keeps_memory
from zo2adapters.trainers.options import Execution, RunOptions, TrainOptions
from zo2adapters.trainers.run_directory import JOURNAL, METRICS, RunDirectory
from zo2adapters.trainers.trainer import Trainer
from zo2core import OptionError


@dataclass(frozen=True, kw_only=True)
class Train(RunOptions):
    """Fine-tune all parameters of a checkpoint with zeroth-order steps, one block at a time."""

    model: str | None = None
    """Model directory with safetensors weights, or a hub id."""
    data: Path | None = None
    """JSONL file; each row has text, or prompt and completion (loss on the completion only), or messages."""
    output: Path | None = None
    """Directory for the run: journal.jsonl, metrics.jsonl and, at the end, model/. It must not exist, or be empty."""
    resume: Path | None = None
    """Directory of a run to go on with, exactly as if it had not been interrupted. Only the options of execution may be
    given beside it."""
    execution: Execution = field(default_factory=Execution)

    def options(self) -> TrainOptions:
        """The run's options: those given, or those of the run to resume.

        Raises:
            OptionError: if some are missing, or given beside ``resume``.
        """
        if self.resume is not None:
            if replace(self, resume=None, execution=Execution()) != Train():
                raise OptionError(
                    "resume",
                    found="other options beside it",
                    expected="none but --trace, --scheduler and --verify-base",
                    remedy="a run keeps what it began with",
                )
            return RunDirectory.options(self.resume)
        if self.model is None or self.data is None or self.output is None:
            missing = [name for name in ("model", "data", "output") if getattr(self, name) is None]
            raise OptionError(
                f"--{missing[0]}", found="nothing", expected="a value, or --resume DIR", remedy="see zo2 train --help"
            )
        return TrainOptions(**{option.name: getattr(self, option.name) for option in fields(TrainOptions)})

    def run(self) -> None:
        """Train and say where the result is."""
        options = self.options()
        with Trainer(options, resume=self.resume is not None, execution=self.execution) as trainer:
            if trainer.truncated:
                print(f"{trainer.truncated} rows were cut to the sequence length", file=sys.stderr)
            print(trainer.storage(), file=sys.stderr)
            if keeps_memory(trainer.host_plan):
                keep_freed_memory()
            try:
                exported = trainer.run()
            except KeyboardInterrupt:
                print(
                    f"\nstopped after {trainer.engine.version} steps; to go on, or to get the model of this moment:\n"
                    f"  zo2 train --resume {options.output}\n"
                    f"  zo2 export --run {options.output} --output DIR",
                    file=sys.stderr,
                )
                raise
        print(f"model: {exported}\nmetrics: {options.output / METRICS}\njournal: {options.output / JOURNAL}")
