"""What commands share that use a model as it stands at some step: a base model, or a run and a step."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from zo2adapters.commands.run_journal import read_journal
from zo2adapters.ranges import shown
from zo2adapters.trainers.model_options import DtypeName, RunModelOptions, precision_of_run
from zo2adapters.trainers.options import Resources
from zo2adapters.trainers.run_directory import JOURNAL, RunDirectory
from zo2adapters.trainers.worker_options import local_device, worker_trace
from zo2core import Journal, JournalError, MemoryPolicy, OptionError, Replayer, Runner, Workers
from zo2core.checkpoint import Snapshots
from zo2core.engine import SnapshotReplayer

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
    model_options: RunModelOptions = field(default_factory=RunModelOptions)
    adapter_seed: tyro.conf.Suppress[int] = 0
    """Seed of the first values of the run's adapter."""
    resources: Resources = field(default_factory=Resources)
    verify_base: bool = False
    """Read every byte of the base first, and compare it with what the journal keeps of it."""

    def resolved(self) -> AtStep:
        """Fill in base, dtype and journal of the run.

        Raises:
            OptionError: if neither or both of base and run are named.
        """
        if (self.model is None) == (self.run_directory is None) or (self.run_directory and self.journal):
            raise OptionError(
                "model", found="neither or both", expected="either --model or --run", remedy="name one of the two"
            )
        told = self.model_options
        if self.run_directory is None:
            told.require_valid()
            if told.adapter is not None and not told.adapter.is_dir():
                expected = "a directory that save_pretrained made"
                raise OptionError("adapter", found=str(told.adapter), expected=expected, remedy="name one")
            on_cpu, replays = self.resources.device == "cpu", self.journal is not None  # replaying rounds as the run did
            precision = precision_of_run(told.precision, exact_mezo=replays, on_cpu=on_cpu)
            return replace(self, model_options=replace(told, precision=precision))
        options = RunDirectory.options(self.run_directory)
        of_run = replace(options.model_options, precision=options.precision_asked())
        for option in fields(told):
            value, then = getattr(told, option.name), getattr(of_run, option.name)
            if value != option.default and (value.resolve() if isinstance(value, Path) else value) != then:
                raise OptionError(
                    option.name, found=str(value), expected=f"{then or 'none'}, as in the run", remedy="leave it out"
                )
        return replace(
            self,
            model=options.model,
            model_options=of_run,
            adapter_seed=options.seed,
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
        return self.model_options.opened(
            self.base(), seed=self.adapter_seed, loss_chunk=loss_chunk, export_dtype=export_dtype
        )

    def engine(
        self,
        model: HFBlockModel,
        *,
        activation_bytes: int = 256 << 20,
        micro_batch_size: int | None = None,
        trace: Path | None = None,
        workers: Workers | None = None,
    ) -> Runner:
        """Build a runner whose weights are those of the step.

        Args:
            model: The base, opened.
            activation_bytes: Memory reserved for activations, in host memory on the CPU and in device memory on a GPU.
            micro_batch_size: Rows that run at a time; None: all of a batch.
            trace: File that takes down what every sweep did when.
            workers: Others that evaluate the same.

        Raises:
            JournalError: if there is no journal, or it does not fit the base.
            OptionError: if the run has no such step.
            CheckpointError: of a run of first-order steps, if the step has no snapshot.
        """
        journal = None if self.journal is None else read_journal(self.journal, run=self.run_directory, step=self.at)
        taken = 0 if journal is None else journal.version
        if self.at is not None and not 0 <= self.at <= taken:
            steps = f"0 to {taken}, the steps of the run" if self.journal else "none without --run or --journal"
            raise OptionError("at", found=shown(self.at), expected=steps, remedy="name a step that was taken")
        if self.at is not None and journal is not None and journal.is_replayable:
            journal = journal.until(self.at)
        if self.verify_base:
            _verify(model, Journal() if journal is None else journal, self.journal)
        resources = self.resources
        common: Any = {
            "memory": MemoryPolicy(host=resources.memory, device=resources.device_memory, activations=activation_bytes),
            "device": local_device(resources.device, workers),
            "micro_batch_size": micro_batch_size,
            "trace": worker_trace(trace, workers),
        }
        if journal is None or journal.is_replayable:
            return Replayer(model, journal, workers=workers, **common)
        return self._at_snapshot(model, journal, workers, common)

    def _at_snapshot(self, model: HFBlockModel, journal: Journal, workers: Workers | None, common: Any) -> Runner:
        """A runner of what a first-order run has kept of the step."""
        from zo2adapters.trainers.first_order_run import parameters_at

        assert self.journal is not None, "it was read"
        assert journal.header is not None, "it was read"
        if workers is not None:
            raise OptionError(
                "run_directory", found="a run of first-order steps", expected="one process", remedy="leave torchrun out"
            )
        if journal.header["base"] != model.weights.fingerprint:
            raise JournalError(
                self.journal,
                found=f"a run on the base {str(journal.header['base'])[:12]}",
                expected=f"one on {model.weights.fingerprint[:12]}, which was named",
                remedy="name the base and the adapter that the run was begun with",
            )
        step = journal.version if self.at is None else self.at
        snapshots = Snapshots(self.journal.parent, journal.chain, journal.require_version)
        return SnapshotReplayer(model, step, parameters_at(snapshots, step), **common)


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
            "verify_base",
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
