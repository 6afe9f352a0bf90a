"""What commands share that use a model as it stands at some step: a base model, or a run and a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from zo2adapters.commands.run_journal import read_journal
from zo2adapters.ranges import shown
from zo2adapters.trainers.options import CarriedName, DtypeName, HeadName, PrecisionName, precision_of_run
from zo2adapters.trainers.run_directory import JOURNAL, RunDirectory
from zo2adapters.trainers.sharing import local_device, own_trace
from zo2core import Journal, JournalError, MemoryPolicy, OptionError, Replayer, Workers

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # a command line is read without transformers


@dataclass(frozen=True, kw_only=True)
class AtStep:
    """A base model, or a run at any of its steps."""

    model: str | None = None
    """Base model directory with safetensors weights, or a hub id."""
    journal: Path | None = None
    """Journal of a run on that base; the weights are those after its last step. Without a journal they are the base's."""
    run_directory: Annotated[Path | None, tyro.conf.arg(name="run", aliases=("--run-directory",))] = None
    """Directory of a run, which names its base, dtype and journal. Behind torchrun, which takes --run for an option of its
    own, it is --run-directory."""
    at: int | None = None
    """Step of the journal to stop after; by default its last one."""
    architecture: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """JSON file that says where the model's parts are; by default they are learned. --run knows its own."""
    head: HeadName = "causal-lm"
    """What the model ends in; --run knows its own."""
    adapter: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Directory of an adapter on --model; --run knows its own."""
    adapter_begun: tyro.conf.Suppress[tuple[tuple[str, ...], int]] = ((), 0)
    """What of the run's adapter is frozen, and the seed of its first values."""
    dtype: DtypeName = "auto"
    """Dtype of the weights; with a journal, the one that the run was made with, which is also that of --run."""
    precision: PrecisionName = "auto"
    """Precision of the run; --run knows its own. For --model auto is that of zo2 train, mixed for weights of 16 bits on the
    CPU. With --journal auto is exact: a run in mixed precision has to be named as such."""
    carried: CarriedName = "stored"
    """What the run carried its weights in; --run knows its own."""
    memory: str = "auto"
    """Host memory the process may take in all, such as 6GiB; auto takes what is free."""
    verify_base: bool = False
    """Read every byte of the base first, and compare it with what the journal keeps of it."""
    device: str = "cpu"
    """Device to compute on: cpu, cuda or cuda:N."""
    device_memory: str = "auto"
    """Device memory the process may use, such as 8GiB; auto takes what is free."""

    def resolved(self) -> AtStep:
        """Fill in base, dtype and journal of the run.

        Raises:
            OptionError: if neither or both of base and run are named.
        """
        if (self.model is None) == (self.run_directory is None) or (self.run_directory and self.journal):
            raise OptionError(
                "--model", found="neither or both", expected="either --model or --run", remedy="name one of the two"
            )
        if self.run_directory is None and self.adapter is not None and not self.adapter.is_dir():
            raise OptionError(
                "adapter", found=str(self.adapter), expected="a directory that save_pretrained made", remedy="name one"
            )
        if self.run_directory is None:
            on_cpu, replays = self.device == "cpu", self.journal is not None  # replaying rounds as the run did
            return replace(self, precision=precision_of_run(self.precision, exact_mezo=replays, on_cpu=on_cpu))
        options = RunDirectory.options(self.run_directory)
        precision = options.precision_asked()
        if self.precision not in ("auto", precision):
            raise OptionError(
                "precision",
                found=self.precision,
                expected=f"{precision}, in which the run was made",
                remedy="leave it out",
            )
        if self.carried not in ("stored", options.carried):
            raise OptionError(
                "carried", found=self.carried, expected=f"{options.carried}, as in the run", remedy="leave it out"
            )
        if self.dtype not in ("auto", options.dtype):
            raise OptionError(
                "dtype",
                found=self.dtype,
                expected=f"{options.dtype}, in which the run was made: its updates round in it",
                remedy="leave it out; from_pretrained converts what is exported",
            )
        if self.architecture is not None and self.architecture.resolve() != options.architecture:
            raise OptionError(
                "architecture",
                found=str(self.architecture),
                expected=f"{options.architecture or 'none'}, as in the run",
                remedy="leave it out",
            )
        if self.head not in ("causal-lm", options.head):
            raise OptionError("head", found=self.head, expected=f"{options.head}, as in the run", remedy="leave it out")
        if self.adapter is not None:
            raise OptionError(
                "adapter", found=str(self.adapter), expected="the run's own", remedy="leave it out, or name --model"
            )
        return replace(
            self,
            model=options.model,
            adapter=options.adapter,
            adapter_begun=(options.adapter_frozen, options.seed),
            architecture=options.architecture,
            head=options.head,
            dtype=options.dtype,
            precision=precision,
            carried=options.carried,
            journal=self.run_directory / JOURNAL,
        )

    def base(self) -> Path:
        """The base model's directory."""
        from zo2adapters.models.checkpoint import resolve_directory

        assert self.model is not None, "resolved"
        return resolve_directory(self.model)

    def opened(self, *, loss_chunk: int | None = None, export_dtype: DtypeName = "auto") -> HFBlockModel:
        """Open the base as the run has it.

        Args:
            loss_chunk: Labelled tokens whose logits are in memory at a time; None leaves it to the precision.
            export_dtype: As ``open_checkpoint`` takes it.
        """
        from zo2adapters.models.checkpoint import open_checkpoint
        from zo2adapters.models.peft_model import Adapter

        frozen, seed = self.adapter_begun
        adapter = None if self.adapter is None else Adapter(config=self.adapter, frozen=frozen, seed=seed)
        return open_checkpoint(
            self.base(),
            head=self.head,
            architecture=self.architecture,
            adapter=adapter,
            dtype=self.dtype,
            precision=self.precision,
            carried=self.carried,
            export_dtype=export_dtype,
            loss_chunk=loss_chunk or "auto",
        )

    def engine(
        self,
        model: HFBlockModel,
        *,
        activation_bytes: int = 256 << 20,
        micro_batch_size: int | None = None,
        trace: Path | None = None,
        workers: Workers | None = None,
    ) -> Replayer:
        """Build a replayer whose weights are those of the step.

        Args:
            model: The base, opened.
            activation_bytes: Memory reserved for activations, in host memory on the CPU and in device memory on a GPU.
            micro_batch_size: Rows that run at a time; None: all of a batch.
            trace: File that takes down what every sweep did when.
            workers: Others that evaluate the same.

        Raises:
            JournalError: if there is no journal, or it does not fit the base.
            OptionError: if the run has no such step.
        """
        journal = None if self.journal is None else read_journal(self.journal, run=self.run_directory, step=self.at)
        taken = 0 if journal is None else len(journal.updates)
        if self.at is not None and not 0 <= self.at <= taken:
            steps = f"0 to {taken}, the steps of the run" if self.journal else "none without --run or --journal"
            raise OptionError("at", found=shown(self.at), expected=steps, remedy="name a step that was taken")
        if self.at is not None:
            journal = None if journal is None else journal.until(self.at)
        if self.verify_base:
            _verify(model, Journal() if journal is None else journal, self.journal)
        return Replayer(
            model,
            journal,
            memory=MemoryPolicy(host=self.memory, device=self.device_memory, activations=activation_bytes),
            device=local_device(self.device, workers),
            micro_batch_size=micro_batch_size,
            trace=own_trace(trace, workers),
            workers=workers,
        )


def _verify(model: HFBlockModel, journal: Journal, path: Path | None) -> None:
    """Compare the whole base with what a journal keeps of it.

    Raises:
        OptionError: if there is no journal.
        JournalError: if it keeps nothing of some segment.
        CheckpointError: if the base is another one.
    """
    from zo2adapters.trainers.base_check import verify_with_progress

    if path is None:
        raise OptionError(
            "--verify-base",
            found="no journal",
            expected="--run or --journal, which keeps the digests",
            remedy="leave it out",
        )
    unknown = [layout.name for layout in model.layouts if layout.name not in journal.base_digests]
    if unknown:
        raise JournalError(
            path,
            found=f"no digest of {len(unknown)} of {len(model.layouts)} segments of the base",
            expected="one of each, as a step of zo2 train notes them",
            remedy="take a step with --resume and --verify-base, or leave --verify-base out",
        )
    verify_with_progress(model, journal)
