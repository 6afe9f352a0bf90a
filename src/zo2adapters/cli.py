"""The command ``zo2``: each subcommand is a dataclass whose fields are its options."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

import tyro
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from zo2adapters.checkpoint import open_checkpoint, resolve_directory
from zo2adapters.data import pad_token_id, read_dataset
from zo2adapters.demo import run_demo
from zo2adapters.hf import HFBlockModel
from zo2adapters.trainer import (
    Batching,
    DtypeName,
    Trainer,
    TrainOptions,
    evaluate_dataset,
    load_tokenizer,
    perplexity,
)
from zo2adapters.verify import verify
from zo2core import Journal, JournalError, ZO2Error, ZOEngine
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
class Train(TrainOptions):
    """Fine-tune all parameters of a checkpoint with zeroth-order steps, one block at a time."""

    def run(self) -> None:
        """Train and say where the result is."""
        with Trainer(self) as trainer:
            if trainer.truncated:
                print(f"{trainer.truncated} rows were cut to the sequence length", file=sys.stderr)
            try:
                exported = trainer.run()
            except KeyboardInterrupt:
                journal = self.output / "journal.jsonl"
                print(
                    f"\nstopped after {trainer.engine.version} steps; to get the model of this moment:\n"
                    f"  zo2 export --model {self.model} --dtype {self.dtype} --journal {journal} --output DIR",
                    file=sys.stderr,
                )
                raise
        print(f"model: {exported}\nmetrics: {self.output / 'metrics.jsonl'}\njournal: {self.output / 'journal.jsonl'}")


@dataclass(frozen=True, kw_only=True)
class _AtJournal:
    model: str
    """Base model directory with safetensors weights, or a hub id."""
    journal: Path | None = None
    """Journal of a run on that base: the weights are those after its last step. Without one: the base itself."""
    dtype: DtypeName = "auto"
    """Of the weights; with a journal, the one the run was made with."""

    def engine(self, model: HFBlockModel) -> ZOEngine:
        """An engine at the journal's last step."""
        journal = Journal(self.journal)
        if self.journal is not None and journal.header is None:
            raise JournalError(self.journal, found="no journal", expected="a run's journal.jsonl", remedy="check the path")
        return ZOEngine(model, None, journal=journal)


@dataclass(frozen=True, kw_only=True)
class Evaluate(_AtJournal):
    """Evaluate a model, or a base and a journal, on a JSONL file."""

    data: Path
    """JSONL file, as for training."""
    batching: Batching = field(default_factory=Batching)

    def run(self) -> None:
        """Print loss and perplexity."""
        tokenizer = load_tokenizer(resolve_directory(self.model))
        model = open_checkpoint(self.model, dtype=self.dtype)
        dataset = read_dataset(self.data, tokenizer, sequence_length=self.batching.length_for(model))
        with self.engine(model) as engine, tqdm(total=len(dataset), unit="row", file=sys.stderr) as bar:
            result = evaluate_dataset(
                engine, dataset, batch_size=self.batching.batch_size, pad=pad_token_id(tokenizer), progress=bar.update
            )
        print(
            f"loss {result.loss:.6f}, perplexity {perplexity(result.loss):.4f}, {result.tokens} tokens, {len(dataset)} rows"
        )


@dataclass(frozen=True, kw_only=True)
class Export(_AtJournal):
    """Write the model that a base and a journal make, in the Hugging Face layout."""

    output: Path
    """Directory to write; must not exist or be empty."""

    def run(self) -> None:
        """Replay and write."""
        require_unused(self.output)
        with self.engine(open_checkpoint(self.model, dtype=self.dtype)) as engine:
            engine.export(self.output)
            print(f"{self.output}: the model after {engine.version} steps")


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
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of this library become one line and exit status 2.

    Args:
        arguments: Without the program's name; those of the process if None.
    """
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    command: Demo | Train | Evaluate | Export | Verify = tyro.cli(
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
