"""A run's directory, from which the run is resumed.

options.json    options of the run, and checksums of its data files and of their tokens
recipe.yaml     the same options, for zo2 train to repeat the run
journal.jsonl   every step taken: the run itself
tune.json       the learning rates that a run with --lr auto tried, and its choice; tune-* has the
trials until then metrics.jsonl   a row per step and per evaluation, for plots samples.jsonl   the
model's answers to a few prompts before and after training scratch.*       blocks written back
snapshot-*      adapter and optimizer of a first-order run after a number of steps factors.*
updates of finished periods of low-rank directions lock            held by the process that works on
the run model/          the exported model, at the end
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from filelock import FileLock, Timeout

from zo2adapters.models.model_files import is_gguf
from zo2adapters.tasks.registry import function_file, names_model_loss
from zo2adapters.tasks.row_source import file_sha256, saved_path
from zo2adapters.trainers import checked_json
from zo2adapters.trainers.metrics import Row, align_rows
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.process import torchrun_rank
from zo2adapters.trainers.recipe import RECIPE, recipe_text
from zo2core.checkpoint.unused import refuse_used
from zo2core.errors import (
    DataError,
    OptionError,
    OutputError,
    ZO2Error,
    ZO2Warning,
    reason,
    system_errors_as,
    system_remedy,
)
from zo2core.io.durable import (
    make_directory,
    open_no_follow,
    partial_path,
    read_regular,
)
from zo2core.io.durable import replace_file as replace_bytes
from zo2core.ranges import require_whole

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel
    from zo2adapters.trainers.run_inputs import Branch, RunInputs
    from zo2core import BlockModel, Journal
    from zo2core.journal.snapshots import Snapshots


OPTIONS = "options.json"
METRICS = "metrics.jsonl"
CHOICE = "tune.json"  # learning rates that the run tried, and which it chose
SAMPLES = "samples.jsonl"
JOURNAL = "journal.jsonl"
MODEL = "model"
LOCK = "lock"
# beginning of the name of the trials' directory, which goes on with a digest of their options
TRIALS = "tune-"
_TRIAL = "trial_"  # before the names of a trial's values in a row of the metrics
# what reading a damaged file of JSON raises
_DAMAGES = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_SHOWN = 200  # characters of edited options that an error shows
_LEFT_BEFORE_START = tuple(partial_path(Path(name)).name for name in (OPTIONS, CHOICE))
# files that are written beside themselves and renamed
_REPLACED = (OPTIONS, RECIPE, METRICS, SAMPLES, CHOICE)


class RunDirectory:
    """The directory of a run, as any process may read it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def to_resume(cls, output: Path) -> Self:
        """The directory to read a run from: the worker's, or the run's if that has not begun."""
        own = cls(worker_directory(output))
        return own if own.has_begun else cls(output)

    @property
    def has_begun(self) -> bool:
        """Whether there is a run that can be resumed or joined."""
        return (self.path / OPTIONS).exists()

    def saved(self) -> dict[str, Any]:
        """The options that the run has saved, as JSON values."""
        with refusing_damage(self.path):
            return dict(_read_record(self.path)["options"])

    def options(self) -> TrainOptions:
        """The options that the run has saved."""
        values = self.saved()
        with refusing_damage(self.path):
            return TrainOptions.from_json(values, self.path)

    def journal(self) -> contextlib.closing[Journal]:
        """A context with the journal of the run."""
        from zo2core import Journal

        return contextlib.closing(Journal(self.path / JOURNAL))

    def snapshots(self, journal: Journal) -> Snapshots:
        """The snapshots of the run, whose journal this is."""
        from zo2core.journal.snapshots import Snapshots

        return Snapshots(self.path, journal.chain, journal.require_version)

    def record_of(self, inputs: RunInputs) -> dict[str, Any]:
        """The record of a run that is to continue, or to be planned.

        Refused is a run of other data, tokens or model than those of the inputs.
        """
        options, tokens = inputs.options, inputs.tokens
        with refusing_damage(self.path):
            record = _read_record(self.path)
            saved = record["options"]
            saved_tokens = dict(record["tokens"])
            checksums = checksums_at(options, record)
        for option, file in (("data", options.data), ("evaluation", options.evaluation)):
            at = None if file is None else saved_path(file)
            if at is not None and (now := inputs.checksums[at]) != (before := checksums.get(at)):
                expected = (
                    f"what the run began with: {saved.get(option)}, which had the sha256 "
                    f"{str(before)[:12]}"
                )
                remedy = "restore the file, pass the path to which it was moved, or start a new run"
                raise DataError(
                    option, f"{file}, which has the sha256 {now[:12]}", expected, remedy
                )
        if names := [
            name
            for name in sorted({*tokens, *saved_tokens})
            if tokens.get(name) != saved_tokens.get(name)
        ]:
            found = "; ".join(f"{name} {tokens.get(name)}" for name in names)
            expected = (
                "; ".join(f"{name} {saved_tokens.get(name)}" for name in names)
                + ", as when the run started"
            )
            remedy = (
                "restore the tokenizer's files and the versions of tokenizers and transformers, "
                "or start a new run"
            )
            raise DataError(f"tokenizer of {options.model}", found, expected, remedy)
        _require_same_base(self, record, options, inputs.model)
        return dict(record)

    def metrics(self) -> bytes:
        """The content of ``metrics.jsonl``; empty if it cannot be read, and speed and memory are
        then unknown.
        """
        try:
            return read_regular(self.path / METRICS)
        except OSError:
            return b""

    def rows(self, journal: Journal) -> list[Row]:
        """The rows of the metrics for the steps and evaluations of the run's journal."""
        return align_rows(self.metrics(), journal).rows

    def samples(self) -> list[dict[str, Any]]:
        """The samples of the run. Damaged or missing ones are left out."""
        kinds = {"step": int, "row": int, "prompt": str, "expected": str, "generated": str}
        samples = []
        with contextlib.suppress(OSError):
            for line in read_regular(self.path / SAMPLES).splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    sample = json.loads(line)
                    if isinstance(sample, dict) and all(
                        type(sample.get(name)) is kind for name, kind in kinds.items()
                    ):
                        samples.append(sample)
        return samples

    def trials(self) -> list[dict[str, Any]]:
        """The trials with which the run chose its learning rate, the best one first.

        Those of a damaged or missing file are taken from the run's metrics.

        Raises:
            OutputError: if the file is damaged, and the metrics do not have them.
        """
        path = self.path / CHOICE
        try:
            with reading(path):
                return _whole_trials(checked_json.from_bytes(read_regular(path))["trials"])
        except OutputError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            return _logged_trials(self.metrics())
        except _DAMAGES as error:
            if logged := _logged_trials(self.metrics()):
                return logged
            raise OutputError(
                path,
                "a file that was edited or damaged",
                "the trials that zo2 train saved in it",
                "restore it from a copy, or remove it to go on without the trials' rows",
            ) from error

    @property
    def model(self) -> Path:
        """Directory of the exported model."""
        return self.path / MODEL

    def has_model(self) -> bool:
        """Whether the model was exported. Directories of exports that were killed are removed."""
        from zo2core.checkpoint.export import remove_leftovers

        remove_leftovers(self.model)
        return holds_model(self.model)


class HeldRun(RunDirectory):
    """A run's directory, locked by this process until closed, which writes it.

    Args:
        path: The directory, which is created for a new run.
        resume: Whether the run has begun.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        if not resume:
            require_new(path)
        super().__init__(path)
        self._resumed = resume
        self._lock = directory_lock(path)
        self._checksums: dict[str, str] = {}
        self._record: dict[str, Any] = {}
        self._created = [] if resume else missing_directories(path)  # deepest first
        with writing(path):
            try:
                make_directory(path)
                acquire(self._lock)
                if not resume:
                    _require_unstarted(path)  # another process may have begun and ended since
            except OSError:
                self.abandon()
                raise
            except BaseException:
                self.close()
                raise

    def begin(self, inputs: RunInputs) -> None:
        """Write the record of a new run, or compare that of a resumed one with its options, data,
        tokens and model.
        """
        options, self._checksums = inputs.options, inputs.checksums
        if self._resumed:
            self._record = self.record_of(inputs)
            if options.optimization.lr != "auto":
                # of a process that was killed between its choice and their removal
                self.remove_trials()
            return
        record = {"options": options.to_json(), "checksums": self._checksums}
        self._write_record({**record, "tokens": inputs.tokens}, options)

    def write_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Replace the samples. See ``samples``."""
        replace_file(self.path / SAMPLES, "".join(json.dumps(sample) + "\n" for sample in samples))

    def save(self, options: TrainOptions) -> None:
        """Save the changed options of a resumed run.

        A model that was exported after fewer steps is renamed to a name with its step, which makes
        room for the next export. If that name exists, because a process was killed right after it
        had renamed a model, a number is appended.
        """
        before = self._record["options"]
        now = options.to_json()
        if now == before:
            self._write_recipe(options)
            return
        model = self.model
        changes_model = now["steps"] != before["steps"] or now["keep_best"] != before.get(
            "keep_best", False
        )
        if changes_model and model.exists():
            name = f"{MODEL}-{before['steps']}" + (
                "-best" if before.get("keep_best", False) else ""
            )
            names = chain([name], (f"{name}-{number}" for number in count(2)))
            with writing(model):
                model.rename(
                    next(
                        path for path in map(self.path.joinpath, names) if not os.path.lexists(path)
                    )
                )
        self._write_record({**self._record, "options": now, "checksums": self._checksums}, options)

    def _write_record(self, record: dict[str, Any], options: TrainOptions) -> None:
        self._record = record
        replace_file(self.path / OPTIONS, checked_json.to_text(record))
        self._write_recipe(options)

    def _write_recipe(self, options: TrainOptions) -> None:
        """Write the run's recipe, unless it has been written: a process may have been killed before
        it was.
        """
        path = self.path / RECIPE
        text = recipe_text(options, self._record.get("branch"))
        with contextlib.suppress(OSError):
            if not path.is_symlink() and read_regular(path) == text.encode():
                return
        replace_file(path, text)

    def open_metrics(self, journal: Journal) -> IO[bytes]:
        """Repair the metrics from the journal, and open them for further rows."""
        path = self.path / METRICS
        raw = self.metrics()
        aligned = align_rows(raw, journal)
        aligned.require_whole(journal, METRICS)
        tried = self.trials()
        self._restore_choice(tried)
        trials: list[Row] = [
            {f"{_TRIAL}{name}": value for name, value in row.items()} for row in tried
        ]
        text = "".join(json.dumps(row) + "\n" for row in [*trials, *aligned.rows])
        # A link is replaced, and its target is not written; a pipe is neither read nor written.
        if text.encode() != raw or path.is_symlink() or not path.is_file():
            replace_file(path, text)
        return open(path, "ab", buffering=0, opener=open_no_follow)

    def write_choice(self, lr: float, trials: Sequence[Mapping[str, Any]]) -> None:
        """Save the learning rate that was chosen, and the trials, the best one first.

        See ``trials``.
        """
        replace_file(self.path / CHOICE, checked_json.to_text({"lr": lr, "trials": trials}))

    def _restore_choice(self, trials: Sequence[Mapping[str, Any]]) -> None:
        """Write the trials anew if their file is damaged or gone."""
        with contextlib.suppress(OSError, *_DAMAGES):
            if checked_json.from_bytes(read_regular(self.path / CHOICE))["trials"] == trials:
                return
        if trials:
            self.write_choice(self._record["options"]["optimization"]["lr"], trials)
            warnings.warn(
                f"{self.path / CHOICE} was damaged or removed, and is written anew from {METRICS}",
                ZO2Warning,
                stacklevel=3,
            )

    def remove_trials(self) -> None:
        """Remove the trials with which the run has chosen its learning rate."""
        for directory in self.path.glob(f"{TRIALS}*/"):
            shutil.rmtree(directory, ignore_errors=True)

    def abandon(self) -> None:
        """Close the directory of a run that failed; a run that is new and has taken no step is
        removed with its files.
        """
        if not self._resumed:
            remove_files(self.path, self._created)
        self.close()

    def close(self) -> None:
        """Release the lock. May be called twice."""
        self._lock.release()


def _read_record(path: Path) -> dict[str, Any]:
    """What a run's directory has saved of its options, data and tokens."""
    try:
        return checked_json.from_bytes(read_regular(path / OPTIONS))
    except checked_json.ChecksumError as error:
        now, before = _edited_lines(path, error.values)
        raise OptionError(
            path / OPTIONS,
            f"{now or 'values'}, which no run saved: the file was edited or damaged",
            before or f"the options that zo2 train saved in {OPTIONS}",
            "undo the edit, or restore the file from a copy; options that may change are given to "
            f"zo2 train --resume {path}, such as --keep-best",
        ) from error


def _edited_lines(path: Path, record: Mapping[str, Any]) -> tuple[str, str]:
    """The options that were edited, as they are and as the run's recipe has them; empty if it does
    not tell.
    """
    try:
        kept = read_regular(path / RECIPE).decode().splitlines()
        options = TrainOptions.from_json(record["options"], path)
        found = recipe_text(options, record.get("branch")).splitlines()
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, ZO2Error):
        return "", ""
    now = [line for line in found if line not in kept and not line.startswith("output:")]
    names = {line.partition(":")[0] for line in now}
    before = [line for line in kept if line.partition(":")[0] in names and line not in found]
    return ", ".join(now)[:_SHOWN], ", ".join(before)[:_SHOWN]


def _require_same_base(
    run: RunDirectory, record: Mapping[str, Any], options: TrainOptions, model: BlockModel
) -> None:
    """Refuse a model directory or adapter at a new path if it is not the one that the run began
    with.
    """
    before = record["options"]
    now = options.to_json()
    option = next(
        (option for option in ("model", "adapter") if now[option] != before.get(option)), None
    )
    if option is None:
        return
    with run.journal() as journal:
        header = journal.header
        fingerprint = model.weights.fingerprint[:12]
    if header is None:
        found = (
            f"{now[option]}, of a run that took no step, so that no fingerprint tells whether "
            "it is the run's own"
        )
        remedy = f"leave it out, or remove {run.path} and begin the run anew"
        raise OptionError(option, found, f"{before.get(option)}, as when the run began", remedy)
    if (recorded := str(header.get("base"))[:12]) != fingerprint:
        found = f"{now[option]}, which has the fingerprint {fingerprint}"
        remedy = "pass the path to which the run's original was moved, or start a new run"
        raise OptionError(
            option, found, f"the fingerprint in the run's journal ({recorded})", remedy
        )


def worker_directory(output: Path) -> Path:
    """Directory for this process's journal: the run's directory, or one next to it for all but the
    host's first worker.

    It is named after the local rank, which stays the same when hosts join or leave.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if torchrun_rank() is not None else 0
    return output if local_rank == 0 else output.with_name(f"{output.name}.worker-{local_rank}")


def checksums_at(options: TrainOptions, record: Mapping[str, Any]) -> dict[str, Any]:
    """Saved checksums of a run's data files, by the files' present paths."""
    now = options.to_json()
    saved = record["options"]
    roles = [role for role in ("data", "evaluation") if now[role] is not None]
    return {now[role]: record["checksums"].get(saved[role]) for role in roles}


def _whole_trials(trials: Sequence[Any]) -> list[dict[str, Any]]:
    """Trials, each of which has all of its numbers."""
    for trial in trials:
        numbers = [trial[key] for key in ("lr", "steps", "forwards", "seconds")]
        numbers += [*trial["losses"], *([] if trial["loss"] is None else [trial["loss"]])]
        if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
            raise ValueError("a trial with a value that is no number")
    return list(trials)


def _logged_trials(metrics: bytes) -> list[dict[str, Any]]:
    """The trials that are the first rows of a run's metrics; none if one of these is damaged."""
    trials = list[dict[str, Any]]()
    try:
        for line in metrics.splitlines():
            row = json.loads(line)
            if not all(name.startswith(_TRIAL) for name in row):
                break
            trials.append({name.removeprefix(_TRIAL): value for name, value in row.items()})
        return _whole_trials(trials)
    except _DAMAGES:
        return []


def require_free(path: Path) -> None:
    """Refuse an output directory that is in use. Nothing is changed; see ``require_new``."""
    _require_unstarted(path)
    if not _ended_before_start(path):
        refuse_used(path)


def require_new(path: Path) -> None:
    """Refuse an output directory that is in use; remove the files of a process that was killed
    before its run started.
    """
    from zo2core.checkpoint.export import require_unused

    _require_unstarted(path)
    if _ended_before_start(path):
        with (
            contextlib.suppress(OSError),
            directory_lock(path),
        ):  # raises if another process is about to start, and the directory is in use
            for name in (*_LEFT_BEFORE_START, LOCK):
                (path / name).unlink(missing_ok=True)
    require_unused(path)


def make_new(path: Path) -> None:
    """Make an output directory that is not in use."""
    require_new(path)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def _require_unstarted(path: Path) -> None:
    if RunDirectory(path).has_begun:
        found = "a run that has already started"
        remedy = (
            f"continue the run with zo2 train --resume {path}, or pass another directory as "
            "--output"
        )
        raise OutputError(
            path, found, "a path that does not exist yet, or an empty directory", remedy
        )


def _ended_before_start(path: Path) -> bool:
    """Whether a directory has only what a process leaves that was killed before it had saved the
    run's options.
    """
    names = {file.name for file in path.iterdir()} if path.is_dir() else set()
    return bool(names) and names <= {*_LEFT_BEFORE_START, LOCK}


def missing_directories(run: Path) -> list[Path]:
    """Directories that have to be created for a run, deepest first."""
    return [path for path in (run, *run.parents) if not path.exists()]


def remove_files(run: Path, directories: Sequence[Path]) -> None:
    """Remove a run's files, except its model, and those of the directories that are then empty."""
    stores = [f"{name}.{ending}" for name in ("scratch", "factors") for ending in ("bin", "jsonl")]
    replaced = (*_REPLACED, *stores)
    partial = (partial_path(run / name).name for name in replaced)
    for name in (JOURNAL, *replaced, *partial, LOCK):
        # the lock last: then another process may begin a run here
        with contextlib.suppress(OSError):
            (run / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a directory has files that are not the run's
        for path in directories:
            path.rmdir()


def acquire(lock: FileLock) -> contextlib.AbstractContextManager[object]:
    """Acquire the lock of a directory. The result is a context that releases it."""
    try:
        return lock.acquire()
    except Timeout as error:
        found = "a run that another process works on"
        remedy = "wait until that process has ended, or choose another directory"
        raise OutputError(
            Path(lock.lock_file).parent, found, "a directory that no other process uses", remedy
        ) from error


def held_directory(path: Path) -> contextlib.AbstractContextManager[object]:
    """Make a directory, and lock it. The result is a context that releases it."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        return acquire(directory_lock(path))


def directory_lock(path: Path) -> FileLock:
    """Lock of a run's directory.

    It is tried once, belongs to the process, not to a thread, and ends with the process.
    """
    return FileLock(path / LOCK, timeout=0, thread_local=False)


@contextlib.contextmanager
def refusing_damage(path: Path) -> Iterator[None]:
    """A context in which damage of a run's options becomes a typed error."""
    try:
        yield
    except OSError as error:
        otherwise = _option_for(path) or "pass the directory that was the run's --output"
        remedy = system_remedy(error, otherwise)
        raise OptionError(
            path, f"no readable {OPTIONS} ({reason(error)})", "the directory of a run", remedy
        ) from error
    except KeyError as error:
        raise _damaged(path, f"no value for the key {error}") from error
    except ZO2Error as error:
        if isinstance(error.__cause__, checked_json.ChecksumError):
            raise
        raise _damaged(path, f"{error.found} as {error.where}") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise _damaged(
            path, (str(error).splitlines() or [type(error).__name__])[0][:200]
        ) from error


def _option_for(path: Path) -> str | None:
    """A remedy for a directory that has a model or an adapter, or of a run that never began; None
    for others.
    """
    if _ended_before_start(path):
        return (
            "give the command that began the run again: its process ended before it had saved "
            "anything"
        )
    if (path / "adapter_config.json").exists():
        return f"this is an adapter: pass --adapter {path}"
    return f"this is a model: pass --model {path}" if (path / "config.json").exists() else None


def _damaged(path: Path, found: str) -> OptionError:
    remedy = (
        "restore the file from a copy, or use zo2 export --model --journal, which needs only the "
        "journal"
    )
    return OptionError(
        path / OPTIONS, found, f"the options that zo2 train saved in {OPTIONS}", remedy
    )


def replace_file(path: Path, text: str) -> None:
    """Replace the content of a file atomically; the new content is durable on return."""
    with writing(path):
        replace_bytes(path, text.encode())


def writing(path: Path) -> contextlib.AbstractContextManager[None]:
    """A context in which errors of the system say that a directory cannot be written."""
    expected, remedy = "a directory that can be written", "free space or choose another directory"
    return system_errors_as(OutputError, path, expected=expected, remedy=remedy)


def reading(path: Path) -> contextlib.AbstractContextManager[None]:
    """A context in which errors of the system say that a file cannot be read."""
    return system_errors_as(OutputError, path, expected="a readable file", remedy="check the path")


def name_of(directory: Path) -> str:
    """What a model, adapter or run is called: the name of its directory, or of the run that
    exported it.
    """
    directory = directory.resolve()
    is_of_run = directory.name == MODEL and (directory.parent / JOURNAL).exists()
    return directory.parent.name if is_of_run else directory.name


def holds_model(directory: Path) -> bool:
    """Whether a model was exported to this directory; False if it does not exist or is empty."""
    if not (directory.exists() or directory.is_symlink()) or (
        directory.is_dir() and not any(directory.iterdir())
    ):
        return False
    names = ("config.json", "adapter_config.json")
    if any((directory / name).is_file() for name in names) and any(directory.glob("*.safetensors")):
        return True
    found, expected = (
        "files that are not a complete model",
        "an exported model, an empty directory, or no such path",
    )
    raise OutputError(
        directory,
        found,
        expected,
        "move it away and give the command again, which then writes the model",
    )


def require_branch(options: TrainOptions, journal: Journal, step: int) -> None:
    """Refuse to branch from a step that a run does not have, or beyond the new run's steps."""
    taken = len(journal.updates)
    require_whole("from_step", step, 0, taken, otherwise=", the steps of the run")
    require_whole("steps", options.steps, step, otherwise=", the step to branch from")


def begin_branch(branch: Branch, options: TrainOptions) -> list[Path]:
    """Create a run with the first steps of another one, and return the directories that this
    created. The run is then resumed like an interrupted one.

    Only journal and options are copied: blocks that the parent has written back are replayed.
    """
    from zo2core import branch_journal
    from zo2core.checkpoint.export import new_directory

    parent, step = branch
    estimator = options.estimator()
    output = options.output
    created = missing_directories(output)
    require_new(output)
    with RunDirectory(parent).journal() as journal:
        header = journal.header
        require_branch(options, journal, step)
        own = None if header is None else header.get("provenance")
        (evaluated, schedule) = _varying(options)
        own = None if own is None else {**own, **evaluated, "schedule": schedule}
        with new_directory(output) as partial:
            branch_journal(
                journal, partial / JOURNAL, step, estimator=estimator.options, provenance=own
            )
            with refusing_damage(parent):
                record = _read_record(parent)
            record |= {"options": options.to_json(), "checksums": checksums_at(options, record)}
            # for the run's recipe
            record["branch"] = {"resume": str(parent.resolve()), "from_step": step}
            replace_file(partial / OPTIONS, checked_json.to_text(record))
    return created


BASE_FILES = "base files sha256"  # key of the provenance
_TOKENIZER_FILES = (  # in the order of their digest
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt"),
)


def provenance(inputs: RunInputs, *, devices: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """The run's provenance, as JSON values.

    It leaves out what no bit of the result depends on: memory, write-backs, the order of transfers,
    and the number of steps.
    """
    options = inputs.options
    batching = options.batching
    opening = options.model_options
    objective = options.objective
    declared: dict[str, Any] = {}
    if opening.architecture is not None:
        declared["architecture sha256"] = file_sha256(opening.architecture)
    if not names_model_loss(objective):
        declared["objective"] = objective
        if (function := function_file(objective)) is not None:
            declared |= {
                "objective": objective.rpartition(":")[2],
                "objective sha256": file_sha256(function),
            }
    if batching.pack:
        declared["packed"] = True
    if options.takes_labels:
        declared["head"] = opening.head
    evaluated, schedule = _varying(options)
    return {
        **declared,
        **evaluated,
        **task,
        "data sha256": inputs.data.sha256,
        "tokens": {
            key: value for key, value in inputs.tokens.items() if not key.startswith("evaluation")
        },
        "tokenizer sha256": tokenizer_sha256(inputs.directory),
        BASE_FILES: inputs.model.base_files.digests(),
        "dtype": opening.dtype,
        "batch size": batching.batch_size,
        "micro-batch size": batching.micro_batch_size,
        "loss chunk": batching.loss_chunk,
        "sequence length": inputs.length,
        "seed": options.seed,
        "device": devices,
        "schedule": schedule,
    }


def _varying(options: TrainOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a branch may have otherwise than its parent: evaluations, and the learning-rate
    schedule.
    """
    schedule = {
        "decay": options.optimization.decay.value,
        "warmup steps": options.optimization.warmup_steps,
        "steps": options.scheduled_steps,
    }
    # Evaluations are the steps that --keep-best chooses among.
    return {"evaluated every": options.evaluate_every} if options.evaluates else {}, schedule


_TAKEN = (
    ", the steps that the run has already taken; zo2 export with --at writes the model of an "
    "earlier one"
)


def require_resumable(options: TrainOptions, journal: Journal) -> None:
    """Refuse fewer steps than a run has taken, and other files than those that it began with."""
    require_same_files(options, journal.header)
    require_whole("steps", options.steps, journal.version, otherwise=_TAKEN)


def require_same_base_files(model: HFBlockModel, header: Mapping[str, Any] | None) -> None:
    """Refuse a base whose config.json, generation_config.json, tokenizer or other small files are
    not those that a run began with.
    """
    recorded = {} if header is None else header.get("provenance", {})
    if BASE_FILES in recorded:
        model.base_files.require_digests(recorded[BASE_FILES])


def require_same_files(options: TrainOptions, header: Mapping[str, Any] | None) -> None:
    """Refuse files other than those that the run began with, before they are parsed or imported."""
    saved = {} if header is None else header.get("provenance", {})
    if not saved:
        return
    objective = function_file(options.objective)
    compared = list[tuple[str, object, object, str, str]]()
    for option, path in (
        ("objective", objective),
        ("architecture", options.model_options.architecture),
    ):
        if path is not None:
            digest = str(saved.get(f"{option} sha256"))
            now = file_sha256(path)
            compared.append(
                (
                    option,
                    now,
                    digest,
                    f"{path}, with sha256 {now[:12]}",
                    f"sha256 {digest[:12]}, as",
                )
            )
    if "rewards" in saved:
        digests = [name.file and file_sha256(name.file) for name in options.rewards.names]
        before = [digest for *_, digest in saved["rewards"]]
        found = "functions in files with other digests"
        compared.append(("reward", digests, before, found, "the files as they were,"))
    if objective is not None:
        function = options.objective.rpartition(":")[2]
        named = saved.get("objective")
        compared.append(("objective", function, named, f"the function {function}", f"{named}, as"))
    for option, is_now, was, found, expected in compared:
        if is_now != was:
            remedy = "pass what the run began with, or start a new run"
            raise OptionError(option, found, f"{expected} in the run's journal", remedy)


def tokenizer_sha256(base: Path) -> str:
    """SHA-256 over the names and bytes of a model directory's tokenizer files, or over what a GGUF
    file says of it.
    """
    from zo2core.checkpoint.gguf import StoredArray, read_gguf

    digest = hashlib.sha256()
    if is_gguf(base):
        file = read_gguf(base)
        for key in sorted(key for key in file.metadata if key.startswith("tokenizer.")):
            value = file.metadata[key]
            is_plain = isinstance(value, (int, float, bool, str))
            values = (
                file.array(key)
                if isinstance(value, StoredArray)
                else [value if is_plain else file.text(key)]
            )
            for element in values:
                digest.update(repr((key, element)).encode())
        return digest.hexdigest()
    for name in _TOKENIZER_FILES:
        if (base / name).exists():
            digest.update(f"{name} {file_sha256(base / name)}\n".encode())
    return digest.hexdigest()
