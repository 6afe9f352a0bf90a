"""``zo2 train``: fine-tune a checkpoint, or go on with a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from zo2adapters.commands.task_run import BenchmarkRun, require_consistent, run_task
from zo2adapters.tasks.registry import function_file
from zo2adapters.trainers.allocator import keep_freed_memory, keeps_memory
from zo2adapters.trainers.branching import branched_run
from zo2adapters.trainers.options import Execution, RunOptions, TrainOptions
from zo2adapters.trainers.provenance import distrust
from zo2adapters.trainers.run_directory import JOURNAL, METRICS, OPTIONS, RunDirectory, header_of
from zo2adapters.trainers.worker_options import (
    WorkerOptions,
    directory_to_resume,
    holds_run,
    is_first,
    torchrun_rank,
    worker_directory,
)
from zo2core import OptionError, Workers

# What a resumed run may be told anew. No bit of the result depends on where weights are kept, except by the device.
_ANEW = ("steps", "schedule_steps", "storage.", "keep_best", "report_to")
_FIXED = ("storage.device",)

# Files that may be elsewhere; their digests stay the same.
_PATHS = ("model", "data", "evaluation")
_MODEL_PATHS = ("architecture", "adapter")
_NOT_NAMED = ""  # as objective: the run has a function of the user's own, which the command line has to name again

_BESIDE = ("optimization.rank", "optimization.period", "optimization.stack")  # one kind of directions a run

# What a branch may be told anew: how steps are taken from there on, but not along which noise, which replays the others.
_ANEW_IN_BRANCH = (*_ANEW, "optimization.", "evaluate_every")
_FIXED_IN_BRANCH = (*_FIXED, "optimization.noise", "optimization.exact_mezo", *_BESIDE)


@dataclass(frozen=True, kw_only=True)
class Train(RunOptions):
    """Fine-tune all parameters of a checkpoint with zeroth-order steps, one block at a time."""

    first_options: ClassVar = (
        "model",
        "data",
        "output",
        "steps",
        "lr",
        "batch_size",
        "evaluation",
        "memory",
        "device",
        "resume",
    )

    model: str | None = None
    """Model directory with safetensors weights, or a hub id."""
    data: Path | None = None
    """JSONL file; each row has text, or prompt and completion (loss on the completion only), or messages. With --task, the
    directory with the benchmark's files; by default they are fetched from the hub."""
    task: str | None = None
    """A benchmark, such as sst2: write its rows beside the run, score the model, train with --keep-best, score again. zo2
    rows lists the benchmarks, and does the first part alone."""
    shots: int | None = None
    """With --task: also score the model with so many demonstrations before every prompt."""
    output: Path | None = None
    """Directory for the run: journal.jsonl, metrics.jsonl and, at the end, model/. It must not exist, or be empty. Workers
    of a host beside its first have one beside it, DIR.worker-1 and so on."""
    resume: Path | None = None
    """Directory of a run to go on with, exactly as if it had not been interrupted. Beside it may be given what no bit
    depends on (memory, write-backs, --trace, --scheduler), more --steps if lr is constant, and with --model, --data and the
    like the new paths of files that were moved."""
    from_step: int | None = None
    """Step of the run named by --resume to branch from: --output gets a new run, which begins with the steps before it.
    Steps are undone in this way. --steps, --lr and the like may be given anew."""
    execution: Execution = field(default_factory=Execution)
    worker_options: WorkerOptions = field(default_factory=WorkerOptions)

    def begun(self) -> Train | None:
        """The options of the run to go on with, as this command's; None for a new run.

        ``torchrun`` starts workers again with the command that began the run: they then go on with it.

        Raises:
            OptionError: if there is no such run.
        """
        resume = self.resume
        if resume is None and self.output is not None and torchrun_rank() is not None and holds_run(self.output):
            resume = self.output
        if resume is None:
            return None
        options = RunDirectory.options(directory_to_resume(resume))
        shared = {option.name: getattr(options, option.name) for option in fields(RunOptions)}
        if _distrust(resume, options) is not None:
            shared["objective"] = _NOT_NAMED
        output = resume if self.from_step is None else None
        return Train(model=options.model, data=options.data, output=output, resume=resume, **shared)

    def options(self) -> TrainOptions:
        """The run's options: those given, or those of the run to resume with what was told anew.

        Raises:
            OptionError: if some are missing, or a run to resume has others.
        """
        if self.from_step is not None:
            return self._branched()
        if self.resume is not None:
            begun = RunDirectory.options(directory_to_resume(self.resume))
            return self._resumed(self._at_told_paths(replace(begun, output=self.resume)))
        if self.model is None or self.data is None or self.output is None:
            missing = [name for name in ("model", "data", "output") if getattr(self, name) is None]
            raise OptionError(
                missing[0], found="nothing", expected="a value, or --resume DIR", remedy="see zo2 train --help"
            )
        own = {option.name: getattr(self, option.name) for option in fields(RunOptions)}
        return TrainOptions(model=self.model, data=self.data, output=self.output, **own)

    def _resumed(self, begun: TrainOptions) -> TrainOptions:
        assert self.resume is not None
        if self.model is None or self.data is None:  # nothing was filled in from the run
            return begun
        if self.output is not None and self.output.resolve() != self.resume.resolve():
            raise OptionError("output", found=str(self.output), expected="none beside --resume", remedy="leave it out")
        own = {option.name: getattr(self, option.name) for option in fields(RunOptions)}
        told = TrainOptions(model=self.model, data=self.data, output=self.resume, **own)
        _require_same(begun, told, anew=_ANEW, fixed=_FIXED, remedy="or begin a new run, or a branch with --from-step")
        return replace(
            begun.with_steps(self.steps), storage=self.storage, keep_best=self.keep_best, report_to=self.report_to
        )

    def _at_told_paths(self, begun: TrainOptions) -> TrainOptions:
        """The options of a run, with its files at the paths that this command names.

        Whether they are the same files is seen where they are read: the run has digests of all of them.

        Raises:
            OptionError: if the run names code that its journal does not vouch for, and this command does not name it.
        """
        assert self.resume is not None
        distrusted = _distrust(self.resume, begun)
        if distrusted is not None and self.objective in (_NOT_NAMED, RunOptions().objective):
            raise OptionError(
                "objective",
                found=f"{begun.objective}, which the run names: {distrusted}",
                expected="the file to be named again, since its code is run",
                remedy="read the file, and pass --objective FILE.py:function if you trust it",
            )
        paths = _paths_told(_PATHS, begun, self)
        paths["model_options"] = replace(
            begun.model_options, **_paths_told(_MODEL_PATHS, begun.model_options, self.model_options)
        )
        own, then = function_file(self.objective), function_file(begun.objective)
        if own is not None and then is not None:
            paths["objective"] = f"{own}:{begun.objective.rpartition(':')[2]}"
        return replace(begun, **paths)

    def _branched(self) -> TrainOptions:
        """The options of a new run that begins with steps of another one.

        Its learning rate is scheduled over all of its steps, those that it takes over among them.
        """
        if self.resume is None:
            raise OptionError(
                "from_step", found="no run", expected="--resume DIR beside it", remedy="name the run to branch from"
            )
        begun = self._at_told_paths(RunDirectory.options(self.resume))
        if begun.first_order.method is not None:
            raise OptionError(
                "from_step",
                found=f"a run of --method {begun.first_order.method}",
                expected="a run of zeroth-order steps, which are replayed",
                remedy="export its adapter with zo2 export --at, and begin a new run with --adapter",
            )
        if self.output is None:
            raise OptionError("output", found="nothing", expected="a directory for the new run", remedy="name a new one")
        own = {option.name: getattr(self, option.name) for option in fields(RunOptions)}
        told = TrainOptions(
            model=begun.model if self.model is None else self.model,
            data=begun.data if self.data is None else self.data,
            output=self.output,
            **own,
        )
        _require_same(begun, told, anew=_ANEW_IN_BRANCH, fixed=_FIXED_IN_BRANCH, remedy="or begin a new run")
        return told

    def run(self) -> None:
        """Train and say where the result is."""
        if self.task is not None:
            self._train_on_benchmark(self.task)
            return
        if self.shots is not None:
            raise OptionError("shots", found=str(self.shots), expected="none without --task", remedy="leave it out")
        if self.first_order.method is not None and torchrun_rank() is not None:
            raise OptionError(
                "method",
                found=f"{self.first_order.method} under torchrun",
                expected="one process: workers share zeroth-order steps",
                remedy="start zo2 train by itself, or leave --method out",
            )
        with self.worker_options.workers() as workers:
            self._train(workers)

    def _train_on_benchmark(self, task: str) -> None:
        if self.resume is not None:
            expected = "none: --resume alone goes on, with the rows that are there"
            raise OptionError("resume", found=f"{self.resume} beside --task", expected=expected, remedy="leave it out")
        require_consistent(task, self)
        for option in ("model", "output"):
            if getattr(self, option) is None:
                raise OptionError(option, found="nothing", expected="a value", remedy="see zo2 train --help")
        assert self.model is not None
        assert self.output is not None
        own = replace(self, task=None, shots=None, keep_best=True)
        run_task(
            BenchmarkRun(task=task, model=self.model, output=self.output, data=self.data, shots=self.shots, options=self),
            train=lambda rows, evaluation: replace(own, data=rows, evaluation=evaluation).run(),
        )

    def _train(self, workers: Workers | None) -> None:
        from zo2adapters.trainers.trainer import Trainer

        options, resume = self.options(), self.resume is not None
        first = is_first(workers)
        branching: AbstractContextManager[None] = nullcontext()
        is_new = first and not (workers and holds_run(options.output))
        if self.resume is not None and self.from_step is not None and is_new:
            branching = branched_run(self.resume, self.from_step, options)
        with branching:
            if workers is not None:
                options, resume = _own_run(options)
            opened = Trainer(options, resume=resume, quiet=not first, execution=self.execution, workers=workers)
        with opened as trainer:
            for line in (*trainer.notices(), trainer.storage()) if first else ():
                print(line, file=sys.stderr)
            if keeps_memory(trainer.host_plan):
                keep_freed_memory()
            try:
                if not first:
                    trainer.train()
                    return
                exported = trainer.run()
            except KeyboardInterrupt:
                print(f"\n{trainer.ways_on()}", file=sys.stderr)
                raise
            for said in (trainer.divergence(), trainer.best_evaluation()):
                if said is not None:
                    print(said, file=sys.stderr)
        print(f"model: {exported}\nmetrics: {options.output / METRICS}\njournal: {options.output / JOURNAL}")


def _paths_told(names: tuple[str, ...], begun: object, told: object) -> dict[str, Any]:
    """The files that a run has, at the paths that a command names."""
    return {name: getattr(told, name) for name in names if None not in (getattr(begun, name), getattr(told, name))}


def _distrust(resume: Path, options: TrainOptions) -> str | None:
    """Why the run's own function is to be named again; None if it is not."""
    if function_file(options.objective) is None:
        return None
    return distrust(replace(options, output=resume), header_of(directory_to_resume(resume) / JOURNAL))


def _own_run(options: TrainOptions) -> tuple[TrainOptions, bool]:
    """The options with a worker's own directory, and whether its run has begun."""
    own = replace(options, output=worker_directory(options.output))
    return own, (own.output / OPTIONS).exists()


def _require_same(
    begun: TrainOptions, told: TrainOptions, *, anew: tuple[str, ...], fixed: tuple[str, ...], remedy: str
) -> None:
    """Refuse options that differ from those that a run was begun with, unless they may."""
    then = dict(_leaves(begun.to_json()))
    for name, value in _leaves(told.to_json()):
        if value != then[name] and (name in fixed or not name.startswith(anew)):
            raise OptionError(
                name.rpartition(".")[2],
                found=json.dumps(value),
                expected=f"{json.dumps(then[name])}, with which the run was begun",
                remedy=f"leave it out: its result depends on it; {remedy}",
            )


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested options as dotted names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
