"""Options shared by the commands that use a model at some step: a base model, or a run and a
step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

from zo2adapters.commands.journal import read_journal, require_journal
from zo2adapters.commands.options import Command, Written
from zo2adapters.models.model_files import require_model
from zo2adapters.tasks.option_tree import as_written
from zo2adapters.trainers.metrics import best_step, untrained_line, verified_base
from zo2adapters.trainers.options import (
    Resources,
    RunModelOptions,
    TrainOptions,
    can_share,
    precision_of_run,
)
from zo2adapters.trainers.process import is_first, local_device, worker_trace
from zo2adapters.trainers.run_directory import (
    JOURNAL,
    RunDirectory,
    name_of,
    require_same_base_files,
)
from zo2adapters.trainers.run_files import require_device
from zo2core.errors import JournalError, OptionError, without_effect
from zo2core.ranges import counted, require_whole, shown

if TYPE_CHECKING:
    # command lines are parsed without importing transformers
    from zo2adapters.models.hf import HFBlockModel
    from zo2core import Engine, Journal, MemoryPolicy, SharedBase, Workers

T = TypeVar("T")
EXPORT_BYTES = 256 << 20  # of activations, beside weights that are written


@dataclass(frozen=True, kw_only=True)
class AtStep(Command):
    """A base model, or a run at any of its steps."""

    needs: ClassVar[tuple[str, ...]] = ("zo2adapters.models.checkpoint",)
    takes_texts: ClassVar[bool] = False  # whether the model's tokenizer is needed

    model: str | None = None
    """The base model: a directory with safetensors weights, a GGUF file, or a hub id.

    By default the base that --adapter names.
    """
    journal: Path | None = None
    """Journal of a run on that base; the weights are those after its last step.

    Without it they are the base's.
    """
    run_directory: Annotated[Path | None, Written(name="run", aliases=("--run-directory",))] = None
    """Directory of a run, which determines base, dtype and journal.

    With torchrun, which has an option --run of its own, write --run-directory.
    """
    at: int | None = None
    """Number of steps of the run that the weights include.

    By default all of them; with the run's --keep-best those of the best evaluation, and of a
    stopped run with first-order steps those of its last snapshot.
    """
    model_options: RunModelOptions = field(default_factory=RunModelOptions)
    resources: Resources = field(default_factory=Resources)
    verify_base: bool = False
    """Read the whole base first, and compare its digests with those in the journal."""

    @cached_property
    def saved(self) -> TrainOptions | None:
        """The options of the run."""
        return None if self.run_directory is None else RunDirectory(self.run_directory).options()

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        adapter = self.model_options.adapter
        named = self
        if self._is_named_by_adapter and adapter is not None:
            _require_adapter(adapter)
        else:
            named = self.resolved()
        if named.journal is not None:
            require_journal(named.journal)
        if named.model is not None:
            require_model(named.model, has_tokenizer=self.takes_texts)
        require_device(self.resources.device)

    @property
    def _is_named_by_adapter(self) -> bool:
        """Whether a saved adapter alone can say which model this is."""
        has_adapter = self.model_options.adapter is not None
        return self.model is None and self.run_directory is None and has_adapter

    def resolved(self) -> AtStep:
        """Fill in base, dtype and journal of the run."""
        if self._is_named_by_adapter and (base := self._base_of_adapter()) is not None:
            return replace(self, model=base).resolved()
        self._require_one_model()
        saved = self.saved
        if saved is None or self.run_directory is None:
            return self._without_run()
        saved_options = replace(saved.model_options, precision=saved.precision_asked())
        self._require_as_in(saved_options)
        return replace(
            self,
            model=saved.model,
            model_options=saved_options,
            journal=self.run_directory / JOURNAL,
        )

    def _without_run(self) -> AtStep:
        """The same model with its precision filled in, whose options no run has."""
        model_options = self.model_options
        model_options.require_valid()
        if model_options.adapter is not None:
            _require_adapter(model_options.adapter)
        if model_options.lora_rank is not None:
            found = str(model_options.lora_rank)
            expected = "none: the adapter that a run has trained is in its directory"
            raise OptionError("lora_rank", found, expected, "pass --run or --adapter DIR")
        replays = self.journal is not None  # and has to round as the run did
        on_cpu = self.resources.device == "cpu"
        precision = precision_of_run(model_options.precision, is_exact=replays, on_cpu=on_cpu)
        return replace(self, model_options=replace(model_options, precision=precision))

    def _require_one_model(self) -> None:
        """Refuse none of a model and a run, and both."""
        if self.model is None and self.run_directory is None:
            found = "neither"
        elif self.run_directory is not None and (self.model, self.journal) != (None, None):
            found = "--run with --model or --journal"
        else:
            return
        raise OptionError("model", found, "either --model or --run", "pass one of the two")

    def _require_as_in(self, saved: RunModelOptions) -> None:
        """Refuse options that a run has otherwise."""
        for option in fields(saved):
            value = getattr(self.model_options, option.name)
            of_run = getattr(saved, option.name)
            is_asked = option.name in self.given and value not in (None, (), "auto")
            absolute = value.resolve() if isinstance(value, Path) else value
            if (value != option.default or is_asked) and of_run != absolute:
                expected = f"{as_written(of_run)}, as in the run"
                raise without_effect(option.name, as_written(value), expected)

    def without_learning(self) -> AtStep:
        """The base alone, opened as the run or the adapter opens it.

        Call it on what ``resolved`` returned.
        """
        return AtStep(
            model=self.model,
            model_options=self.model_options.without_adapter(),
            resources=self.resources,
        )

    def named_others(self, directories: Sequence[Path]) -> list[tuple[str, AtStep]]:
        """Other runs or saved adapters of the same base, by names: of the directory, or its path if
        an earlier one has it.

        Call it on what ``resolved`` returned.
        """
        named = dict[str, AtStep]()
        alone = self.without_learning()
        for directory in directories:
            other = AtStep(run_directory=directory, resources=self.resources)
            if not RunDirectory(directory).has_begun:
                other = replace(
                    alone, model_options=replace(alone.model_options, adapter=directory)
                )
            name = name_of(directory)
            named[str(directory) if name in ("base", *named) else name] = other.resolved()
        return list(named.items())

    @property
    def reads_base_only(self) -> bool:
        """Whether the model is the base, with an adapter or low-rank changes or without, so that
        passes can be shared.
        """
        if self.saved is not None:
            return can_share(self.saved)
        return self.journal is None and self.model_options.head == "causal-lm"

    def with_others(
        self,
        model: HFBlockModel,
        others: Sequence[tuple[str, AtStep]],
        function: Callable[[AtStep, HFBlockModel, SharedBase | None], T],
        *,
        may_share: bool = True,
        loss_chunk: int | Literal["auto"] | None = "auto",
    ) -> dict[str, T]:
        """What a function returns for this step, by the name "", and for others, by theirs, which
        are opened with this ``loss_chunk``.

        Each pass over the blocks serves all if they only read the base; else one runs after the
        other.
        """
        from zo2core import MemoryPolicy, SharedBase

        def runs(shared: SharedBase | None) -> dict[str, Callable[[], T]]:
            steps = {"": (self, model)} | {
                name: (other, other.open_model(loss_chunk=loss_chunk)) for name, other in others
            }
            return {
                name: partial(function, step, model_at_step, shared)
                for name, (step, model_at_step) in steps.items()
            }

        if not (
            others
            and may_share
            and self.reads_base_only
            and all(other.reads_base_only for _, other in others)
        ):
            return {name: run() for name, run in runs(None).items()}
        resources = self.resources
        results = dict[str, T]()
        memory = MemoryPolicy(host=resources.memory, device=resources.device_memory)
        with SharedBase(
            self.without_learning().open_model(), device=resources.device, memory=memory
        ) as shared:
            for name, result in shared.together(runs(shared)).items():
                if isinstance(result, Exception):
                    raise result
                results[name] = result
        return results

    def _base_of_adapter(self) -> str | None:
        """The base that a saved adapter names, for a command without --model; None if there is
        none.
        """
        adapter = self.model_options.adapter
        if adapter is None or not adapter.is_dir():
            return None
        from zo2adapters.models.peft_adapter import Adapter, peft_config

        base: str | None = peft_config(
            Adapter(config=adapter, is_trained=False)
        ).config.base_model_name_or_path
        return base

    def base(self) -> Path:
        """The base model's directory or GGUF file."""
        from zo2adapters.models.checkpoint import resolve_directory

        assert self.model is not None, "resolved() was called"
        return resolve_directory(self.model)

    def open_model(
        self, *, loss_chunk: int | Literal["auto"] | None = "auto", export_dtype: str = "auto"
    ) -> HFBlockModel:
        """Open the base with the run's options. See ``open_checkpoint``."""
        return self.model_options.opened(
            self.base(),
            seed=0 if self.saved is None else self.saved.seed,
            base=self.model,
            is_trained=False,
            trains_base=self.saved is not None and self.saved.optimization.trains_both,
            loss_chunk=loss_chunk,
            export_dtype=export_dtype,
        )

    def engine(
        self,
        model: HFBlockModel,
        *,
        activation_bytes: int = EXPORT_BYTES,
        micro_batch_size: int | None = None,
        trace: Path | None = None,
        workers: Workers | None = None,
        shared: SharedBase | None = None,
        tokens: int | None = None,
    ) -> Engine:
        """Build a runner whose weights are those of the step.

        If most forwards have few tokens (None: many), the experts of a mixture are read when tokens
        are routed to them.
        """
        from zo2adapters.trainers.methods import StepWeights, weights_at
        from zo2core import Engine, EngineOptions, Journal

        journal = (
            Journal()
            if self.journal is None
            else read_journal(self.journal, run=self.run_directory, step=self.at)
        )
        step = self._step(journal, prints=is_first(workers))
        if self.run_directory is not None:
            require_same_base_files(model, journal.header)
        replays = self.journal is not None and journal.is_replayable
        if self.verify_base:
            _verify(model, journal, self.journal)
        reads_itself = shared is None and self.resources.device == "cpu" and not replays
        experts = model.route(tokens) if tokens is not None and reads_itself else None
        room = activation_bytes + (0 if experts is None else experts.buffer_bytes)
        weights = StepWeights()
        if self.journal is not None:
            if not replays:
                self._require_snapshots_of(model, journal, workers)
            weights = weights_at(journal, step, self.journal.parent)
        engine = Engine(
            model,
            weights.method,
            journal=weights.journal,
            device=local_device(self.resources.device, workers),
            memory=self._memory(room, is_shared=shared is not None),
            micro_batch_size=micro_batch_size,
            options=EngineOptions(
                matmul_precision=self.model_options.matmul_precision,
                trace=worker_trace(trace, workers),
                workers=workers,
                source=shared,
            ),
        )
        if experts is not None and engine.host_plan is not None:
            experts.capacity = max(engine.host_plan.spare, 0)
        return engine

    def _memory(self, activations: int, *, is_shared: bool) -> MemoryPolicy:
        """The memory that the engine may use; a shared base has limits of its own."""
        from zo2core import MemoryPolicy

        if is_shared:
            return MemoryPolicy(activations=activations)
        limits = self.resources
        return MemoryPolicy(
            host=limits.memory, device=limits.device_memory, activations=activations
        )

    def _step(self, journal: Journal, *, prints: bool) -> int:
        """The step whose weights are taken: the given one, else that of the model that the run
        exports.

        It is the step of the best evaluation if the run keeps the best, otherwise the last step. A
        first-order run that was stopped has no weights of its last step, but those of its last
        snapshot.
        """
        step = self.at
        last = journal.version
        run = self.run_directory
        if step is not None:
            if step and self.journal is None:
                raise without_effect(
                    "at", shown(step), "none without --run or --journal, whose steps it names"
                )
            require_whole("at", step, 0, last, otherwise=", the steps of the run")
            return step
        if run is None or self.saved is None:
            return last
        last_stored = _last_stored(journal, RunDirectory(run))
        evaluations = {
            evaluated: results
            for evaluated, results in journal.evaluations.items()
            if evaluated <= last
        }
        best = best_step(evaluations) if self.saved.keep_best else None
        notice = None
        if best == 0 < last_stored:
            notice = f"{untrained_line(evaluations)}; --at {last_stored} takes step {last_stored}"
        elif best is not None:
            count = counted(len(evaluations), "evaluation")
            notice = f"step {best} (best of {count}); --at N takes another one"
        elif last_stored < last:
            notice = (
                f"step {last_stored} (the last snapshot of {last} steps); --at N takes another one"
            )
        if notice is not None and prints:
            print(f"{run}: {notice}", file=sys.stderr)
        return last_stored if best is None else best

    def _require_snapshots_of(
        self, model: HFBlockModel, journal: Journal, workers: Workers | None
    ) -> None:
        """Refuse a first-order run on another base, or several workers."""
        assert self.journal is not None, "the journal was read from there"
        assert journal.header is not None, "read_journal refuses a journal without a header"
        if workers is not None:
            found = "a run of first-order steps under torchrun"
            raise OptionError(
                "run_directory", found, "one process", "start the command without torchrun"
            )
        base_of_run = str(journal.header["base"])
        base = model.weights.fingerprint
        if base_of_run != base:
            found = f"a run on the base {base_of_run[:12]}"
            expected = f"a run on {base[:12]}, the base of this command"
            raise JournalError(self.journal, found, expected, "pass the run's own base and adapter")


def _require_adapter(path: Path) -> None:
    """Refuse the path of no saved adapter."""
    if not path.is_dir():
        expected = "a directory that save_pretrained wrote"
        raise OptionError("adapter", str(path), expected, "check the path")


def _last_stored(journal: Journal, run: RunDirectory) -> int:
    """The last step whose weights can be had: of first-order steps that of the last snapshot."""
    if journal.is_replayable:
        return journal.version
    steps = run.snapshots(journal).steps
    return max((step for step in steps if step <= journal.version), default=journal.version)


def _verify(model: HFBlockModel, journal: Journal, path: Path | None) -> None:
    """Compare the whole base with the digests in a journal."""
    if path is None:
        raise without_effect(
            "verify_base", "no journal", "--run or --journal, which has the digests"
        )
    missing = [layout.name for layout in model.layouts if layout.name not in journal.base_digests]
    if missing:
        found = f"no digest for {len(missing)} of {len(model.layouts)} segments of the base"
        remedy = "resume the run for a step with --verify-base, or leave --verify-base out"
        raise JournalError(path, found, "a digest for each, which zo2 train writes", remedy)
    verified_base(model, journal)
