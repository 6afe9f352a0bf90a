"""The command ``zo2``: each subcommand is a dataclass whose fields are its options."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, TypeAlias

import tyro
from transformers.utils import logging as transformers_logging

from zo2adapters.commands.at_step import Evaluate, Export, Generate
from zo2adapters.commands.demo import run_demo
from zo2adapters.commands.timeline import Timeline
from zo2adapters.models.checkpoint import open_checkpoint, resolve_directory
from zo2adapters.models.pickle_conversion import convert
from zo2adapters.trainers.device_run_plan import plan_device
from zo2adapters.trainers.options import (
    Batching,
    DtypeName,
    Execution,
    Noise,
    Optimization,
    RunOptions,
    TrainOptions,
    require_at_least,
)
from zo2adapters.trainers.run_directory import JOURNAL, METRICS, RunDirectory
from zo2adapters.trainers.run_plan import plan
from zo2adapters.trainers.trainer import Trainer
from zo2adapters.trainers.verification import verify
from zo2core import Journal, JournalError, OptionError, ZO2Error
from zo2core.checkpoint import require_unused


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Make a small model on the spot, fine-tune it with zeroth-order steps alone, and show what it learned."""

    keep: Path | None = None
    """Directory to keep model, data and run in; by default they are removed at the end."""
    seed: int = 0
    """Of preparation and training."""

    def run(self) -> None:
        """Run the demo."""
        if self.keep is not None:
            require_unused(self.keep)
            run_demo(self.keep, seed=self.seed)
            return
        with tempfile.TemporaryDirectory(prefix="zo2-demo-") as directory:
            run_demo(Path(directory), seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class Train(RunOptions):
    """Fine-tune all parameters of a checkpoint with zeroth-order steps, one block at a time."""

    model: str | None = None
    """Model directory with safetensors weights, or a hub id."""
    data: Path | None = None
    """JSONL file; each row has text, or prompt and completion (loss on the completion only), or messages."""
    output: Path | None = None
    """Directory for the run: journal.jsonl, metrics.jsonl and, at the end, model/. Must not exist or be empty."""
    resume: Path | None = None
    """Directory of a run to go on with, exactly as if it had not been interrupted; takes no other options than those of
    execution."""
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
                    expected="none but --trace and --scheduler",
                    remedy="a run keeps what it began with",
                )
            return RunDirectory.options(self.resume)
        if self.model is None or self.data is None or self.output is None:
            missing = [name for name in ("model", "data", "output") if getattr(self, name) is None]
            raise OptionError(
                f"--{missing[0]}", found="nothing", expected="a value, or --resume DIR", remedy="see zo2 train --help"
            )
        return TrainOptions(**{each.name: getattr(self, each.name) for each in fields(TrainOptions)})

    def run(self) -> None:
        """Train and say where the result is."""
        options = self.options()
        with Trainer(options, resume=self.resume is not None, execution=self.execution) as trainer:
            if trainer.truncated:
                print(f"{trainer.truncated} rows were cut to the sequence length", file=sys.stderr)
            print(trainer.storage(), file=sys.stderr)
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


@dataclass(frozen=True, kw_only=True)
class ShowJournal:
    """Print what happened in a run, step by step."""

    run_directory: tyro.conf.Positional[Path]
    """Directory of the run."""
    last: int | None = None
    """Show so many steps only, the last ones."""

    def run(self) -> None:
        """Print header and steps."""
        path = self.run_directory / JOURNAL
        journal = Journal(path)
        if journal.header is None:
            raise JournalError(path, found="no journal", expected="a run's directory", remedy="check the path")
        for key, value in journal.header.items():
            print(f"{key:12s} {json.dumps(value)}")
        if self.last is not None and self.last < 1:
            raise OptionError("last", found=repr(self.last), expected="at least 1", remedy="leave it out to see all")
        updates = journal.updates if self.last is None else journal.updates[-self.last :]
        print(f"{len(journal.updates)} steps\n{'step':>8s} {'loss':>12s} {'projected grad':>16s} {'lr':>10s}  seeds")
        for update in updates:
            grads = " ".join(f"{grad:16.6g}" for grad in update.projected_grads)
            seeds = " ".join(str(seed) for seed in update.seeds)
            print(f"{update.step:8d} {update.losses[0]:12.6f} {grads} {update.lr:10.3g}  {seeds}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Say what a run would take in memory, disk and time, without loading anything."""

    model: str
    """Model directory with safetensors weights, or a hub id."""
    dtype: DtypeName = "auto"
    """Of the weights; auto is the checkpoint's own."""
    memory: str = "auto"
    """Host memory the process may have in all, such as 6GiB; auto takes what is free."""
    scratch: Path = Path()
    """A directory on the disk that the run would be on."""
    device_memory: str | None = None
    """Plan for a GPU of this memory, such as 24GB, which need not be here: how many blocks stay there, what is moved."""
    bus: str = "25GB"
    """Bytes a second from the host to that GPU, and as many back at the same time; an assumption, nothing is measured."""
    json: bool = False
    """Print JSON instead of a table."""
    noise: Noise = Noise.RADEMACHER
    """As for training."""
    exact_mezo: bool = False
    """As for training."""
    queries: int = 1
    """As for training."""
    batching: Batching = field(default_factory=Batching)

    def run(self) -> None:
        """Print the plan."""
        require_at_least("queries", self.queries, 1)
        directory = resolve_directory(self.model)
        model = open_checkpoint(directory, dtype=self.dtype, loss_chunk=self.batching.loss_chunk)
        tokens = self.batching.length_for(model)
        noise = Optimization(noise=self.noise, exact_mezo=self.exact_mezo).generator(model.layouts)
        if self.device_memory is not None:
            on_device = plan_device(
                model,
                memory=self.memory,
                device_memory=self.device_memory,
                bus=self.bus,
                rows=self.batching.batch_size,
                tokens=tokens,
                micro_rows=self.batching.micro_batch_size,
                noise=noise,
                queries=self.queries,
            )
            print(on_device.to_json() if self.json else on_device.table())
            return
        planned = plan(
            model,
            memory=self.memory,
            rows=self.batching.batch_size,
            tokens=tokens,
            scratch=self.scratch,
            micro_rows=self.batching.micro_batch_size,
            noise=noise,
            queries=self.queries,
        )
        print(planned.to_json() if self.json else planned.table())


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Turn pickled .bin shards into safetensors, one shard at a time; code in the pickles is not run."""

    model: Path
    """Model directory with pytorch_model*.bin."""
    output: Path
    """Directory to write; must not exist or be empty."""

    def run(self) -> None:
        """Convert."""
        convert(self.model, self.output, report=print)


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Run a few steps block by block and as monolithic MeZO on your checkpoint, and compare every bit."""

    model: str
    """Model directory with safetensors weights, or a hub id. Memory: it is held twice."""
    dtype: DtypeName = "auto"
    """Of the weights; auto is the checkpoint's own."""
    steps: int = 3
    """Steps to take both ways."""
    batch_size: int = 2
    """Rows a batch, of random tokens."""
    tokens: int = 32
    """Tokens a row."""
    lr: float = 1e-4
    """Learning rate."""
    zo_eps: float = 1e-3
    """Perturbation scale."""
    weight_decay: float = 0.1
    """Weight decay."""
    seed: int = 0
    """Of batches and directions."""

    def run(self) -> None:
        """Compare; exit with 1 if a bit differs."""
        result = verify(
            resolve_directory(self.model),
            dtype=self.dtype,
            lr=self.lr,
            zo_eps=self.zo_eps,
            weight_decay=self.weight_decay,
            steps=self.steps,
            batch_size=self.batch_size,
            tokens=self.tokens,
            seed=self.seed,
        )
        if result.difference is not None:
            print(f"DIFFERENT: {result.difference}")
            sys.exit(1)
        equal = f"losses, projected gradients and all {result.parameters} parameters"
        print(f"EQUAL over {result.steps} steps, bit for bit: {equal}")


Command: TypeAlias = (
    Annotated[Demo, tyro.conf.subcommand("demo")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[ShowJournal, tyro.conf.subcommand("journal")]
    | Annotated[Timeline, tyro.conf.subcommand("timeline")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of this library become one line and exit status 2.

    Args:
        arguments: Without the program's name; those of the process if None.
    """
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    command: Demo | Train | Evaluate | Generate | Export | Verify | ShowJournal | Timeline | Plan | Convert = tyro.cli(
        Command,
        prog="zo2",
        description="Zeroth-order fine-tuning of language models, block by block.",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.EnumChoicesFromValues),
    )
    try:
        command.run()
    except ZO2Error as error:
        print(f"zo2: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
