"""``zo2 train``: fine-tune a checkpoint, continue a run, or train several at once; ``zo2 plan``
says what that takes.

``zo2 tune`` finds the learning rate for a model and its data, within a budget of forward passes.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from zo2adapters.commands.options import (
    Command,
    Values,
    command_of,
    filled_in,
    line_values,
    recipe_values,
    text_table,
    with_given,
)
from zo2adapters.tasks.option_tree import Change, Option, declared, filled, flag, whole
from zo2adapters.tasks.registry import function_file
from zo2adapters.trainers.metrics import criterion, losses_of
from zo2adapters.trainers.option_checks import require_valid
from zo2adapters.trainers.options import (
    Execution,
    RunOptions,
    TrainOptions,
    require_shareable,
    require_tunable,
)
from zo2adapters.trainers.process import (
    SMALL,
    WorkerOptions,
    is_first,
    keep_freed_memory,
    keeps_memory,
    require_same_command,
    return_freed_memory_at_once,
    torchrun_rank,
)
from zo2adapters.trainers.recipe import OPTIONS as OPTION_ROWS
from zo2adapters.trainers.recipe import changed, read_recipe, require_unchanged
from zo2adapters.trainers.run_directory import (
    CHOICE,
    JOURNAL,
    LOCK,
    METRICS,
    RunDirectory,
    held_directory,
    replace_file,
    require_free,
    worker_directory,
)
from zo2adapters.trainers.run_files import require_device, require_files, require_free_file
from zo2core.errors import OptionError, ZO2Error
from zo2core.ranges import MOST_RUNS, counted, require_whole

if TYPE_CHECKING:
    # command lines are parsed without importing transformers
    from zo2adapters.trainers.run_inputs import RunStart
    from zo2adapters.trainers.trainer import Trainer
    from zo2adapters.trainers.tuning import Schedule, Trial
    from zo2core import SharedBase, Workers

TABLE = "runs.json"  # name of the comparison of several runs in their output directory
_OWN_FILES = (LOCK, TABLE)  # names in that directory that no run can have
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # of one of several runs
_JUDGED = 0.1  # share of a run's steps, the last ones, whose mean loss is compared
# objective of a run with a function of the user's own, which the command line has to name again
_NOT_NAMED = ""


@dataclass(frozen=True, kw_only=True)
class Train(RunOptions, Command):
    """Fine-tune a model block by block, by gradients or zeroth-order steps."""

    needs: ClassVar = ("zo2adapters.trainers.trainer",)
    takes_recipe: ClassVar = True
    # whether functions that a recipe names are run, and have to be named beside it
    runs_code: ClassVar = True
    first_options: ClassVar = (
        "model data output method steps lr lora_rank batch_size evaluation memory device resume"
    )

    model: Annotated[str | None, Option("model", Change.MOVED, is_shared=True)] = None
    """Model directory, GGUF file or hub id, or ollama:NAME of ollama's store."""
    data: Annotated[Path | None, Option("data", Change.MOVED)] = None
    """File of rows: JSONL, JSON, CSV or Parquet, a directory that datasets saved, or name:split of
    the hub. Each row has text, or prompt and completion (loss on the completion only), or messages.
    With --task: the directory with the benchmark's files.
    """
    task: Annotated[str | None, Option("output", Change.CALL, is_shared=True)] = None
    """Benchmark, such as sst2, which is downloaded from the hub unless --data names its files.

    Its rows are written to DIR.rows, the model is scored, trained with --keep-best, and scored
    again. zo2 rows lists the benchmarks, and writes the rows alone.
    """
    shots: Annotated[int | None, Option("output", Change.CALL, needs=("task",), check=whole(0))] = (
        None
    )
    """With --task: number of solved examples before each prompt in one more evaluation before
    training.
    """
    output: Annotated[Path | None, Option("output", Change.CALL, is_shared=True)] = None
    """Directory for the run: journal.jsonl, metrics.jsonl and, at the end, model/.

    It must be new or empty. Further workers on the same host use DIR.worker-1 and so on.
    """
    resume: Annotated[Path | None, Option("output", Change.CALL, is_shared=True)] = None
    """Directory of a run to continue; the result is that of an uninterrupted one.

    Options that do not change it (memory, --trace, ...) may be given, and more --steps if --decay
    is constant; else a new run with --adapter RUN/model goes on from its adapter. --model and
    --data name moved files.
    """
    from_step: Annotated[
        int | None, Option("output", Change.CALL, is_shared=True, needs=("resume",), check=whole(0))
    ] = None
    """Step to branch from: --output gets a new run, which starts with the steps before this one of
    the run in --resume. It may have other --steps, --lr and the like. This is how steps are undone.
    """
    runs: Annotated[Path | None, Option("output", Change.CALL, is_shared=True)] = None
    """YAML file that trains several runs of one model at once, which share each pass over its
    blocks: a line for each run, such as small: {lr: 1e-4}, with the options in which it differs
    from this command. Each has a directory in --output, and can be continued alone; the same
    command continues all. They train adapters by any method, or with --rank.
    """
    execution: Execution = field(default_factory=Execution)
    worker_options: WorkerOptions = field(default_factory=WorkerOptions)

    @classmethod
    def read_line(cls, name: str, arguments: Sequence[str]) -> tuple[Values, Values]:
        """The values of a command line, and those of a recipe at its start."""
        if not arguments or arguments[0].startswith("-"):
            return line_values(name, cls, arguments), {}
        line = line_values(name, cls, arguments[1:])
        return line, values_of_recipe(Path(arguments[0]), line if cls.runs_code else None)

    def saved_command(self) -> Train | None:
        """This command with the options of the run to continue; None for a new run.

        ``torchrun`` restarts workers with the command that started the run; they then continue it.
        """
        resume = self.resume
        if (
            resume is None
            and self.output is not None
            and torchrun_rank() is not None
            and RunDirectory.to_resume(self.output).has_begun
        ):
            resume = self.output
        if resume is None:
            return None
        options = RunDirectory.to_resume(resume).options()
        shared = {option.name: getattr(options, option.name) for option in fields(RunOptions)}
        if options.own_functions is not None:
            is_reward = options.own_functions[0] == "reward"
            shared |= (
                {"rewards": replace(options.rewards, reward=())}
                if is_reward
                else {"objective": _NOT_NAMED}
            )
        output = resume if self.from_step is None else None
        return type(self)(
            model=options.model, data=options.data, output=output, resume=resume, **shared
        )

    @cached_property
    def options(self) -> TrainOptions:
        """The run's options: those given, or those of the run to resume or to branch from, with the
        changes allowed.
        """
        if self.resume is None:
            self._require("model", "data", "output", expected="a value, or --resume DIR")
            return self._of(self.data, self.output)
        saved = self._at_given_paths(
            replace(RunDirectory.to_resume(self.resume).options(), output=self.resume)
        )
        if self.from_step is not None:
            return self._branched(saved)
        if self.model is None or self.data is None:  # nothing was filled in from the run
            return saved
        if self.output is not None and self.output.resolve() != self.resume.resolve():
            raise OptionError("output", str(self.output), "none beside --resume", "leave it out")
        given = self._of(self.data, self.resume).settled_as(saved)
        remedy = "start a new run, or branch with --from-step"
        require_unchanged(saved.to_json(), given.to_json(), Change.RESUME, remedy=remedy)
        return changed(saved.with_steps(self.steps), given, Change.RESUME)

    def _require(self, *options: str, expected: str = "a value") -> None:
        """Refuse the command without these options."""
        for option in options:
            if getattr(self, option) is None:
                raise OptionError(option, "nothing", expected, "see zo2 train --help")

    def _require_none(
        self, *options: str, beside: str, expected: str, remedy: str = "leave it out"
    ) -> None:
        """Refuse the command with one of these options."""
        for option in options:
            if getattr(self, option) is not None:
                raise OptionError(
                    option, f"{getattr(self, option)} {beside}", f"none{expected}", remedy
                )

    def _of(self, data: Path | None, output: Path | None) -> TrainOptions:
        """The options of a run of this command with these paths."""
        assert self.model is not None
        assert data is not None
        assert output is not None
        return self.of_run(model=self.model, data=data, output=output)

    def _at_given_paths(self, saved: TrainOptions) -> TrainOptions:
        """The options of a run, with its files at the paths that this command names.

        The run has digests of all files, which are compared where the files are read.
        """
        if saved.own_functions is not None:
            option, named = saved.own_functions
            if (
                not self.rewards.reward
                if option == "reward"
                else self.objective in (_NOT_NAMED, RunOptions().objective)
            ):
                raise _unnamed(option, named, f"{named}, which the run names")
        files = {
            (name.name, name.weight): name.file
            for name in self.rewards.names
            if name.file is not None
        }
        rewards = [
            name
            if name.file is None
            else name._replace(file=files.get((name.name, name.weight), name.file))
            for name in saved.rewards.names
        ]
        objective = saved.objective
        given = function_file(self.objective)
        before = function_file(saved.objective)
        if given is not None and before is not None:
            objective = f"{given}:{objective.rpartition(':')[2]}"
        saved = replace(
            saved,
            objective=objective,
            rewards=replace(saved.rewards, reward=tuple(map(str, rewards))),
        )
        return changed(saved, self, Change.MOVED)

    def _branched(self, saved: TrainOptions) -> TrainOptions:
        """The options of a new run that starts with steps of another one.

        The learning rate is scheduled over all steps of the new run, including those of the other
        run.
        """
        if saved.optimization.optimizer is not None:
            method = saved.optimization.method
            expected = "a run of zeroth-order steps, which are replayed"
            remedy = "export its adapter with zo2 export --at, and start a new run with --adapter"
            raise OptionError("from_step", f"a run of --method {method}", expected, remedy)
        self._require("output", expected="a directory for the new run")
        given = replace(self, model=self.model or saved.model)._of(
            self.data or saved.data, self.output
        )
        require_unchanged(
            saved.to_json(),
            given.to_json(),
            Change.RESUME,
            Change.BRANCH,
            remedy="or start a new run",
        )
        return given

    def check(self) -> None:
        """Of a benchmark, the run is checked when its rows are there."""
        self._require_consistent()
        if self.runs is not None:
            for name, command in self._of_runs(self.runs).items():
                with naming(name):
                    require_shareable(command.options)
                    command._check(command.options)
                    command._require_place(command.options)
        elif self.task is None:
            self._check(self.options)
            self._require_place(self.options)

    def _require_consistent(self) -> None:
        """Refuse options of the command that contradict each other, or miss another one."""
        self.worker_options.require_workers()
        of_command = {
            one.name
            for one in declared(self)
            if one.option is not None and one.option.change is Change.CALL
        }
        require_valid(self, given=self.given, only=of_command)
        if self.runs is not None:
            self._require_for_runs()
        elif self.task is not None:
            expected = ": without --task it continues with the rows already written"
            self._require_none(
                "resume", beside="with --task", expected=expected, remedy="leave --task out"
            )
            from zo2adapters.commands.evaluate import require_consistent

            require_consistent(self.task, self)
            self._require("model", "output")
            assert self.output is not None
            require_free(self.output)
            require_device(self.storage.device)

    def _require_for_runs(self) -> None:
        """Refuse options that several runs at once cannot have, or do not have."""
        expected = ", because its runs continue by the same command"
        self._require_none(
            "task", "resume", "from_step", "shots", beside="with --runs", expected=expected
        )
        if torchrun_rank() is not None:
            raise OptionError("runs", "torchrun", "one process", "start it without torchrun")
        if self.execution != Execution():
            raise OptionError("runs", "--trace or the like", "none of it", "leave it out")
        self._require("model", "data", "output")

    def _check(self, options: TrainOptions) -> None:
        options.require_valid(given=self.given)
        options.require_packages()
        if options.optimization.lr != "auto":
            options.optimization.require_sane()
        require_files(options, has_rows=self.data is not None or self.resume is not None)
        if self.worker_options.split == "blocks" and options.samples:
            found = f"{options.samples} with --split blocks"
            expected = "0: the first worker, which writes the answers, has a part of the blocks"
            remedy = "pass --samples 0 to a new run, and answer prompts with zo2 generate"
            raise OptionError("samples", found, expected, remedy)

    def _require_place(self, options: TrainOptions) -> None:
        """Refuse a directory in use, or a missing GPU. Workers come to a run that others began."""
        require_device(options.storage.device)
        require_free_file(self.execution.trace)
        is_new = self.resume is None or self.from_step is not None
        if is_new and torchrun_rank() is None:
            require_free(options.output)

    def run(self) -> None:
        """Train, and print where the result is."""
        if self.runs is not None:
            assert self.output is not None, "the command was checked"
            commands = self._of_runs(self.runs).items()
            train_together({name: command.options for name, command in commands}, self.output)
        elif self.task is not None:
            self._train_on_benchmark()
        else:
            with self.worker_options.workers() as workers:
                require_same_command("train", self, workers)
                self._train(workers)

    def _of_runs(self, runs: Path) -> dict[str, Train]:
        """The commands of several runs by their names: this one but for the options in which each
        differs.
        """
        assert self.output is not None, "the command was checked"
        named = dict[str, Train]()
        for name, values in read_differences(runs).items():
            command = self._of_together(runs, name, values)
            output = self.output / name
            resume = output if RunDirectory.to_resume(output).has_begun else None
            named[name] = with_given(replace(command, resume=resume), command.given)
        return named

    def _of_together(self, runs: Path, name: str, values: Mapping[Any, object]) -> Self:
        """This command with the options in which one of several runs differs."""
        command = replace(
            self, runs=None, output=None if self.output is None else self.output / name
        )
        line = recipe_values(values, where=f"{runs}, {name}", options=Train)
        default = with_given(command, self.given)
        differing: Self = filled_in("train", Train, line, default=default)
        if differing.optimization.lr == "auto":
            expected = "a number with --runs, each of whose runs has its own"
            raise OptionError(f"{runs}, {name}: lr", "auto", expected, "use zo2 tune")
        if self.runs_code and differing.own_functions not in (None, self.own_functions):
            option, own = differing.own_functions
            raise _unnamed(option, own, own, f"{runs}, {name}: ")
        return differing

    def _train_on_benchmark(self) -> None:
        from zo2adapters.commands.evaluate import BenchmarkRun, run_task

        command = replace(self, task=None, shots=None, keep_best=True)
        assert self.task is not None, "it is what chose this"
        assert self.model is not None, "the command was checked"
        assert self.output is not None, "the command was checked"
        run_task(
            BenchmarkRun(self.task, self.model, self.output, self.data, self.shots),
            self,
            lambda rows, evaluation: replace(command, data=rows, evaluation=evaluation).run(),
        )

    def _train(self, workers: Workers | None) -> None:
        from zo2adapters.trainers.trainer import Display, open_run

        options = self.options
        first = is_first(workers)
        if options.optimization.optimizer is not None:
            keep_freed_memory(SMALL)
        chooses = options.optimization.lr == "auto"
        if chooses:
            options = self._with_chosen_rate(options, workers)
        start = self._start(options, workers, has_begun=chooses)
        opened = open_run(
            start,
            display=Display(quiet=not first),
            execution=self.execution,
            # what the choice takes was said with what the run takes
            plans=workers is None and not chooses,
        )
        with opened as trainer:
            if first:
                tell(*self._first_lines(trainer, chooses=chooses))
            if keeps_memory(trainer.host_plan):
                keep_freed_memory()
            elif trainer.is_tight:
                return_freed_memory_at_once()
            exported = _finished(trainer, exports=first)
            if exported is None:
                return
            tell(*trainer.last_lines())
        output = start.options.output
        print(f"model: {exported}\nmetrics: {output / METRICS}\njournal: {output / JOURNAL}")

    def _start(
        self, options: TrainOptions, workers: Workers | None, *, has_begun: bool
    ) -> RunStart:
        """What the run is in this process."""
        from zo2adapters.trainers.run_inputs import Branch, RunStart

        resumes = has_begun or self.resume is not None
        branch = None
        if self.resume is not None and self.from_step is not None:
            branch = Branch(self.resume, self.from_step)
        if workers is None:
            return RunStart(options, resumes=resumes, branch=branch)
        if not is_first(workers) or RunDirectory.to_resume(options.output).has_begun:
            branch = None  # the first worker begins it, once
        # each worker has a directory of its own
        own = replace(options, output=worker_directory(options.output))
        return RunStart(
            own, resumes=RunDirectory(own.output).has_begun, branch=branch, workers=workers
        )

    def _first_lines(self, trainer: Trainer, *, chooses: bool) -> list[str]:
        """Lines to print before the first step; the choice of a rate has said most of them."""
        options = trainer.options
        resumes = trainer.start.resumes
        if resumes and trainer.engine.version >= options.steps:
            return [f"{options.output} is finished after {counted(options.steps, 'step')}"]
        if chooses:
            return trainer.notices()
        method = [] if resumes else [self._chosen_method(options)]
        return [*method, *trainer.first_lines()]

    def _chosen_method(self, options: TrainOptions) -> str:
        """A line that says which method the run has, and why."""
        method = options.optimization.method
        if "method" in self.given:
            return f"method: {method}, as asked for"
        if method == RunOptions().optimization.method:
            return f"method: {method}, by default; --method names others"
        return f"method: {method}, as the recipe says"

    def _with_chosen_rate(self, options: TrainOptions, workers: Workers | None) -> TrainOptions:
        """The options with a learning rate that short runs have chosen."""
        from zo2adapters.trainers.tuning import with_chosen_rate

        refused = None if workers is None else "torchrun"
        if self.from_step is not None:
            refused = "--from-step"
        if refused is not None:
            raise OptionError(
                "lr", f"auto with {refused}", "a number", "pass the rate that zo2 tune finds"
            )
        if self.resume is None:
            tell(self._chosen_method(options))
        try:
            return with_chosen_rate(options, resume=self.resume is not None, announce=tell)
        except KeyboardInterrupt:
            if RunDirectory.to_resume(options.output).has_begun:
                tell(f"\nstopped; to continue: {options.resume_command}")
            raise


def _finished(trainer: Trainer, *, exports: bool) -> Path | None:
    """Take the remaining steps, and export the model, where it then is.

    If it is interrupted, it says how to continue.
    """
    try:
        if exports:
            return trainer.run()
        trainer.train()
    except KeyboardInterrupt:
        tell(f"\n{trainer.how_to_continue()}")
        raise
    return None


def tell(*lines: str, prefix: str = "") -> None:
    """Print lines on standard error."""
    for line in lines:
        print(f"{prefix}{line}", file=sys.stderr)


def train(
    recipe: str | os.PathLike[str] | Mapping[str, object],
    overrides: Mapping[str, object] = MappingProxyType({}),
) -> Path:
    """Run a recipe, as ``zo2 train recipe.yaml`` does.

    Args:
        recipe: YAML file, or a mapping, with the value of each option of ``zo2 train``.
        overrides: Options that replace those of the recipe.

    Returns:
        The run's directory.

    Raises:
        ZO2Error: of the kind that fits, as ``zo2 train`` reports it; OptionError for an unknown
            key.
    """
    later = values_of_recipe(overrides)
    values = values_of_recipe(recipe, None if isinstance(recipe, Mapping) else later)
    command: Train = command_of("train", Train, later, recipe=values)
    command.check()
    command.run()
    output = command.output or command.resume
    assert output is not None, "a run without a directory was refused"
    return output


def values_of_recipe(
    recipe: str | os.PathLike[str] | Mapping[str, object], line: Values | None = None
) -> Values:
    """The values of a recipe.

    Args:
        recipe: YAML file, or a mapping.
        line: What is given beside the recipe, which has to name functions whose code is run; None:
            no code is run.
    """
    where = "recipe" if isinstance(recipe, Mapping) else os.fspath(recipe)
    keys: Mapping[Any, object] = recipe if isinstance(recipe, Mapping) else read_recipe(recipe)
    values = recipe_values(keys, where=where, options=Train)
    command: Train = filled(Train(), values)
    if line is not None and command.own_functions is not None:
        option, named = command.own_functions
        if option not in line:
            raise _unnamed(option, named, named, f"{where}: ")
    return values


@contextmanager
def naming(run: str | None) -> Iterator[None]:
    """A context in which errors of options name the one of several runs that has them."""
    try:
        yield
    except OptionError as error:
        if run is None:
            raise
        where = f"{run}, {flag(error.where) if error.where in OPTION_ROWS else error.where}"
        raise OptionError(where, error.found, error.expected, error.remedy) from error


def _unnamed(option: str, named: str, found: str, where: str = "") -> OptionError:
    """The error of functions that a file or directory names, which may be somebody else's, and the
    command line does not.
    """
    expected = "the same functions on the command line, because their code will be run"
    return OptionError(
        f"{where}{option}",
        found,
        expected,
        f"read the file, and pass --{option} {named} if you trust it",
    )


# Several runs of one base at once, each in a directory of its own, where it can continue alone


def read_differences(path: Path) -> dict[str, Mapping[object, object]]:
    """Read the names of several runs, and the options in which they differ."""
    try:
        named = read_recipe(path)
    except OptionError as error:
        expected = f"a YAML file with {_EXAMPLE}"
        raise OptionError(path, error.found, expected, error.remedy) from error
    if len(named) > MOST_RUNS:
        expected = f"at most {MOST_RUNS}, which take their steps together"
        raise OptionError(path, counted(len(named), "run"), expected, "write several files")
    if not named:
        raise OptionError(path, "no run", "at least one", "write a line for each run")
    return dict(_named_differences(path, name, values) for name, values in named.items())


_EXAMPLE = "a line such as small: {lr: 1e-4} for each run"


def _named_differences(
    path: Path, name: object, given: object
) -> tuple[str, Mapping[object, object]]:
    """The name of one of several runs, and the options in which it differs."""
    values = {} if given is None else given
    if not (isinstance(name, str) and _NAME.fullmatch(name)) or not isinstance(values, dict):
        found = f"{name!r}: {str(values)[:80]}"
        expected = (
            "a name of letters and digits, which its directory gets, and its options, for each run"
        )
        raise OptionError(path, found, expected, f"write {_EXAMPLE}")
    if name.lower() in _OWN_FILES:
        found = f"a run named {name}"
        expected = f"a name that is none of {', '.join(_OWN_FILES)}, files beside the runs"
        raise OptionError(path, found, expected, "give the run another name")
    shared = {one.name for one in declared(Train) if one.option and one.option.is_shared}
    if common := [str(key) for key in values if key in shared]:
        expected = "options in which runs of one base may differ"
        remedy = f"pass {flag(common[0])} for all runs"
        raise OptionError(f"{path}, {name}", common[0], expected, remedy)
    return name, values


def train_together(runs: Mapping[str, TrainOptions], output: Path) -> None:
    """Train several runs that share their base, by their names, and print how they compare."""
    from zo2adapters.trainers.methods import open_shared_base

    # before its runs': else two processes take some of them each, and both end
    held = held_directory(output)
    tell(f"{len(runs)} runs share each pass over the blocks: {', '.join(runs)}")
    with held, open_shared_base(next(iter(runs.values()))) as shared:
        try:
            ended = shared.together(
                {name: partial(_trained, name, options, shared) for name, options in runs.items()}
            )
        except KeyboardInterrupt:
            tell("\nstopped; the same command continues all runs; to continue one of them:")
            tell(*(options.resume_command for options in runs.values()), prefix="  ")
            raise
    failures = {name: result for name in runs if isinstance(result := ended[name], Exception)}
    tell(*(f"{name} ended: {failure}" for name, failure in failures.items()))
    outcomes = [
        _outcome(name, options.output, failures.get(name)) for name, options in runs.items()
    ]
    replace_file(output / TABLE, json.dumps(outcomes, indent=2) + "\n")
    cells = [("run", "steps", "loss", "evaluation", "s a step", ""), *map(_cells, outcomes)]
    print(text_table(cells, left=(0, 5)))
    directories = " ".join(outcome["directory"] for outcome in outcomes if outcome["steps"])
    if directories:
        print(f"their curves side by side: zo2 report {directories} --output runs.html")
    for failure in failures.values():
        raise failure


def _trained(name: str, options: TrainOptions, shared: SharedBase) -> None:
    """Train and export one of several runs; the sweeps are made together with those of the
    others.
    """
    from zo2adapters.trainers.run_inputs import RunStart
    from zo2adapters.trainers.trainer import Display, open_run

    resumes = RunDirectory.to_resume(options.output).has_begun
    start = RunStart(options, resumes=resumes, shared=shared)
    with open_run(start, display=Display(label=name)) as trainer:
        tell(*trainer.first_lines(), prefix=f"{name}: ")
        trainer.run()
        tell(*trainer.last_lines(), prefix=f"{name}: ")


def _outcome(name: str, directory: Path, failure: Exception | None) -> dict[str, Any]:
    """What became of one of several runs, as its directory says: the mean loss of the last steps,
    the best evaluation.
    """
    # of its steps, each with the time of the sweep that it shares
    losses = list[float]()
    evaluation = None
    seconds = 0.0
    run = RunDirectory(directory)
    if run.has_begun:
        with suppress(ZO2Error), run.journal() as journal:
            # its journal may be what failed
            losses = losses_of(journal)
            evaluations = journal.evaluations.values()
            evaluation = min(map(criterion, evaluations), default=None)
            seconds = math.fsum(row.get("seconds", 0.0) for row in run.rows(journal))
    loss = fmean(losses[-max(1, round(_JUDGED * len(losses))) :]) if losses else None
    numbers = {"steps": len(losses), "loss": loss, "evaluation": evaluation, "seconds": seconds}
    return {
        "run": name,
        **numbers,
        "directory": str(directory),
        "error": None if failure is None else str(failure),
    }


def _cells(outcome: Mapping[str, Any]) -> tuple[str, ...]:
    """A run's line of the table."""
    values = [
        "" if outcome[key] is None else f"{outcome[key]:.4f}" for key in ("loss", "evaluation")
    ]
    steps = outcome["steps"]
    seconds = outcome["seconds"]
    speed = f"{seconds / steps:.2f}" if steps and seconds else ""
    return (
        outcome["run"],
        str(steps),
        *values,
        speed,
        outcome["directory"] if outcome["error"] is None else "ended early",
    )


@dataclass(frozen=True, kw_only=True)
class Plan(Train):
    """Print what a run would take in memory, disk and time, without loading the model, as zo2 train
    --plan does.

    All options are those of zo2 train. --data and --output may be left out: rows are then as long
    as --sequence-length. --device-memory plans for a GPU, which need not be in this machine, and
    --runs 3 for three equal runs.
    """

    needs: ClassVar = ("zo2adapters.trainers.run_plan",)
    runs_code: ClassVar = False
    first_options: ClassVar = (
        "model data method lora_rank rank steps batch_size memory device_memory json"
    )

    json: bool = False
    """Print JSON instead of a table."""
    stages: int | None = None
    """Plan the memory of so many workers that divide the blocks with --split blocks."""

    def check(self) -> None:
        """Refused is what zo2 train refuses."""
        if self.stages is not None:
            require_whole("stages", self.stages, 2)
            self._require_none("runs", beside="with --stages", expected=": one run has stages")
        expected = ": zo2 rows writes a benchmark's rows, which are passed as --data"
        self._require_none("task", beside="in a plan", expected=expected)
        self._require_consistent()
        if self._count is not None:
            require_whole("runs", self._count, 1, MOST_RUNS)
        for name, command in self._commands():
            with naming(name):
                options = command._planned_options()
                if self.runs is not None:
                    require_shareable(options)
                command._check(options)

    def _require_for_runs(self) -> None:
        """Refuse options that several runs at once cannot have. Paths may be missing."""
        expected = ", because a plan of several runs is of new ones"
        self._require_none("resume", "from_step", "shots", beside="with --runs", expected=expected)
        self._require("model")

    def _commands(self) -> list[tuple[str | None, Plan]]:
        """This command, or the one of each run in the file of several runs, with its name."""
        if self.runs is None or self._count is not None:
            return [(None, self)]
        differences = read_differences(self.runs).items()
        return [(name, self._of_together(self.runs, name, values)) for name, values in differences]

    @property
    def _count(self) -> int | None:
        """The number of equal runs; None: one run, or runs in a file."""
        return int(str(self.runs)) if str(self.runs).isdecimal() else None

    def run(self) -> None:
        """Print what the run would take, or several equal runs, of a file the first one."""
        from zo2adapters.trainers.run_plan import method_words, plan_of_options

        _, command = (commands := self._commands())[0]
        count = len(commands) if self.runs is not None and self._count is None else self._count
        options = command._planned_options()
        planned = plan_of_options(
            options,
            has_rows=command.resume is not None or command.data is not None,
            resume=command.resume,
            from_step=command.from_step,
            runs=count,
            stages=command.stages,
        )
        beside = (
            ["the short runs that choose lr"]
            if options.optimization.lr == "auto" and command.lr_is_given
            else []
        )
        beside += [f"the answers to {options.samples} samples"] if options.samples else []
        if beside:
            print(f"not in the plan: {', '.join(beside)}", file=sys.stderr)
        lines = (
            [planned.to_json()]
            if self.json
            else [method_words(options), *planned.summary(), "", planned.table()]
        )
        print("\n".join(lines))

    @property
    def lr_is_given(self) -> bool:
        """Whether there is a learning rate, which a plan does not need: one that was given, or that
        of a run to continue.
        """
        return "lr" in self.given or self.optimization.lr is not None

    def _planned_options(self) -> TrainOptions:
        """The options of the run to plan. What a plan does not depend on may be missing."""
        if self.resume is not None:
            options = self.options
        else:
            self._require("model", expected="a value, or --resume DIR")
            options = self._of(self.data or Path(), self.output or Path("run"))
            if self.data is None:
                expected = ": they need the rows as --data"
                self._require_none(
                    "evaluation",
                    "eval_split",
                    "evaluate_every",
                    beside="without the rows",
                    expected=expected,
                )
        if options.optimization.optimizer is not None and not self.lr_is_given:
            options = options.with_rate("auto")
        if options.optimization.trains_both and options.optimization.base_lr is None:
            options = options.having(base_lr=1.0)  # stands for any
        if options.storage.device_memory != "auto" and options.storage.device == "cpu":
            options = replace(options, storage=replace(options.storage, device="cuda"))
        elif options.storage.device_memory == "auto" and options.storage.device != "cpu":
            expected = "the memory of the GPU for a plan, which needs none in this machine"
            raise OptionError("device_memory", "auto", expected, "pass it, such as 24GB")
        return options


@dataclass(frozen=True, kw_only=True)
class Tune(RunOptions, Command):
    """Find the learning rate for a model and its data by short runs; the better half of them runs
    for longer.
    """

    needs: ClassVar = ("zo2adapters.trainers.trainer", "zo2adapters.trainers.tuning")
    first_options: ClassVar = (
        "model data output forwards learning_rates zo_eps_to_try batch_size memory"
    )

    model: str
    """Model directory, GGUF file or hub id, or ollama:NAME of ollama's store."""
    data: Path
    """File to train on, as for zo2 train."""
    output: Path
    """Directory for tune.json and the trials, each of which is a run.

    The same command continues interrupted trials.
    """
    forwards: int = 2000
    """Forward passes of a batch that all trials together may take.

    A first-order step counts as three for an adapter, and as four or eight for all parameters.
    """
    learning_rates: tuple[float, ...] = ()
    """Learning rates to try; by default five from 3e-5 to 3e-3 for an adapter, five on the
    optimizer's own scale for all parameters, and of zeroth-order steps seven from 1e-6 to 1e-3.
    --lr has no effect here and is refused.
    """
    zo_eps_to_try: tuple[float, ...] = ()
    """Perturbation scales to try with each learning rate; by default --zo-eps alone."""

    def after_interruption(self) -> str:
        """How to continue after an interruption."""
        return (
            f"run the same command again to continue: finished work is in {self.output} and is "
            "not repeated"
        )

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        require_whole("forwards", self.forwards, 1)
        require_tunable(self, self.zo_eps_to_try, given=self.given)
        options = self.of_run(model=self.model, data=self.data, output=self.output)
        options = options.with_rate("auto")  # each trial has its own
        options.require_valid(given=self.given)
        options.require_packages()
        require_files(options)
        require_device(options.storage.device)
        if torchrun_rank() is None and not (self.output / CHOICE).exists():
            require_free(self.output)

    def run(self) -> None:
        """Print the cost, run the trials, print a table after each round, and print how to continue
        the best trial.
        """
        from zo2adapters.trainers.tuning import tune

        options = self.of_run(model=self.model, data=self.data, output=self.output)
        with WorkerOptions().workers() as workers:
            require_same_command("tune", self, workers)
            first = is_first(workers)

            def tell_cost(schedule: Schedule) -> None:
                if first:
                    tell(_trials_cost(schedule, options, workers))

            def tell_table(trials: Sequence[Trial]) -> None:
                if first:
                    tell(_trials_table(trials))

            best = tune(
                options,
                forwards=self.forwards,
                learning_rates=self.learning_rates,
                zo_eps=self.zo_eps_to_try,
                before=tell_cost,
                after_round=tell_table,
                quiet=not first,
                workers=workers,
            )
        if not first:
            return
        scale = "" if self.optimization.optimizer else f", zo_eps {best.zo_eps:g}"
        print(
            f"lr {best.lr:g}{scale}: mean loss {best.loss:.4f} over the last steps of "
            f"{best.steps}\n"
            f"to continue this run: {replace(options, output=best.directory).resume_command} "
            "--steps 1000"
        )


def _trials_cost(schedule: Schedule, options: TrainOptions, workers: Workers | None) -> str:
    """The number of steps and forward passes and, on the CPU, the planned time."""
    from zo2adapters.trainers.run_plan import duration
    from zo2adapters.trainers.tuning import expected_seconds

    line = (
        f"{schedule.trials} trials in {len(schedule.rounds)} rounds, of up to "
        f"{schedule.rounds[-1]} steps: "
        f"{schedule.steps:,} steps, {schedule.forwards:,} forward passes of "
        f"{options.batching.batch_size} rows"
    )
    if options.storage.device != "cpu":
        return line
    return (
        f"{line}, about "
        f"{duration(expected_seconds(options, schedule))}"
        f"{'' if workers is None else ' with one worker'}"
    )


def _trials_table(trials: Sequence[Trial]) -> str:
    losses = [f"{trial.loss:.4f}" if math.isfinite(trial.loss) else "diverged" for trial in trials]
    rows = [(f"{trial.lr:.1e}", f"{trial.zo_eps:.1e}", str(trial.steps)) for trial in trials]
    return text_table(
        [
            ("lr", "zo_eps", "steps", "loss"),
            *((*row, loss) for row, loss in zip(rows, losses, strict=True)),
        ],
        left=(),
    )
