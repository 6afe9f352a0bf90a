"""A run's directory: options, journal, metrics, scratch and lock; what a run is resumed from.

options.json    how the run was begun, checksums of its data files and of the tokens they became
journal.jsonl   every step taken: the run itself
metrics.jsonl   one row a step and one an evaluation, for people and plots
scratch.*       blocks written back
snapshot-*      of a first-order run: adapter and optimizer after so many steps
factors.*       what the periods of directions beside the activations have come to
lock            held by the process that works here
model/          the exported model, at the end
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from zo2adapters.trainers.metrics import Row, align_rows
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.provenance import file_sha256
from zo2core import BlockModel, DataError, Journal, OptionError, OutputError, ZO2Error
from zo2core.checkpoint import require_unused
from zo2core.errors import reason
from zo2core.estimators import EstimatorName
from zo2core.io.durable import make_directory, read_regular
from zo2core.io.durable import replace_file as replace_bytes

OPTIONS = "options.json"
METRICS = "metrics.jsonl"
JOURNAL = "journal.jsonl"
MODEL = "model"
LOCK = "lock"


class RunDirectory:
    """A run's directory, held by this process until closed.

    Args:
        options: The run's options; it lives in ``options.output``.
        tokens: What the data files became by the tokenizer, as JSON values by name.
        resume: It is there already.

    Raises:
        OutputError: if another process holds it, a new one is in use, or it cannot be written.
        OptionError: if a resumed one is none of a run.
        DataError: if a resumed run's data files have changed, or become other tokens.
    """

    def __init__(self, options: TrainOptions, tokens: Mapping[str, object], *, resume: bool) -> None:
        self.path = options.output
        self._lock = _lock(self.path)
        if not resume:
            require_new(self.path)
        files = [path.resolve() for path in (options.data, options.evaluation) if path is not None]
        checksums = {str(path): file_sha256(path) for path in files}
        self._made: list[Path] = []  # directories, by this run, deepest first
        try:
            self._made = missing_directories(self.path)
            make_directory(self.path)
            self._lock.acquire()
        except Timeout as error:
            raise OutputError(
                self.path,
                found="a run that another process works on",
                expected="a directory of one's own",
                remedy="wait until that process has ended, or choose another directory",
            ) from error
        except OSError as error:
            if not resume and self.path.is_dir():
                self.remove()
            self.close()
            raise _unwritable(self.path, error) from error
        try:
            if resume:
                with _refusing_damage(self.path):
                    record = json.loads(read_regular(self.path / OPTIONS))
                    saved_checksums, saved_tokens = checksums_at(options, record), dict(record["tokens"])
                _require_same_data(options, checksums, record["options"], saved_checksums)
                _require_same_tokens(options.model, dict(tokens), saved_tokens)
                self._record = record
            else:
                self._record = {"options": options.to_json(), "checksums": checksums, "tokens": dict(tokens)}
                self._write_record()
            self._checksums = checksums
        except BaseException:
            if resume:
                self.close()
            else:
                self.remove()
            raise

    @staticmethod
    def options(path: Path) -> TrainOptions:
        """How a run was begun.

        Raises:
            OptionError: if the directory is none of a run, or its estimator is one that this version does not have.
        """
        known = [name.value for name in EstimatorName]
        with _refusing_damage(path):
            values = json.loads(read_regular(path / OPTIONS))["options"]
            estimator = values["optimization"].get("estimator", "mezo")
            if estimator in known:
                return TrainOptions.from_json(values, path)
        raise OptionError(
            path / OPTIONS,
            found=f"the estimator {str(estimator)[:40]!r}",
            expected=f"one of {', '.join(known)}: this version has no other",
            remedy="continue the run with the version of zo2core that began it",
        )

    def require_same_base(self, options: TrainOptions, model: BlockModel) -> None:
        """Refuse another base, or adapter, at a path that a resumed run was told anew.

        Args:
            options: Of the run that goes on.
            model: Opened as they say.

        Raises:
            OptionError: naming the option.
        """
        before, now = self._record["options"], options.to_json()
        moved = [option for option in ("model", "adapter") if now[option] != before.get(option)]
        header = header_of(self.path / JOURNAL) if moved else None
        then = "none, since it took no step" if header is None else str(header.get("base"))[:12]
        if moved and then != model.weights.fingerprint[:12]:
            raise OptionError(
                moved[0],
                found=f"{now[moved[0]]}, which has the fingerprint {model.weights.fingerprint[:12]}",
                expected=f"the fingerprint in the run's journal ({then})",
                remedy="name the directory to which the one that the run was begun with was moved, or begin a new run",
            )

    def keep(self, options: TrainOptions) -> None:
        """Take down what a resumed run was told anew, so that the next one goes on with it.

        A model that was exported at the end of fewer steps is kept beside the one to come, under a name with its step. If
        that name is taken, as it is if a process was killed right after it had done this, a number follows.

        Raises:
            OutputError: if that cannot be written.
        """
        before, now = self._record["options"], options.to_json()
        if now == before:
            return
        model = self.path / MODEL
        is_another = now["steps"] != before["steps"] or now["keep_best"] != before.get("keep_best", False)
        if is_another and model.exists():
            name = f"{MODEL}-{before['steps']}" + ("-best" if before.get("keep_best", False) else "")
            names = chain([name], (f"{name}-{number}" for number in count(2)))
            try:
                model.rename(next(path for path in map(self.path.joinpath, names) if not os.path.lexists(path)))
            except OSError as error:
                raise _unwritable(model, error) from error
        self._record = {**self._record, "options": now, "checksums": self._checksums}
        self._write_record()

    def _write_record(self) -> None:
        replace_file(self.path / OPTIONS, json.dumps(self._record, indent=2) + "\n")

    def metrics(self, journal: Journal) -> list[Row]:
        """Bring the metrics in line with the journal: whatever is damaged is made up from it.

        Returns:
            The rows that count.

        Raises:
            JournalError: if there are rows of steps that the journal has lost.
            OutputError: if the file cannot be written.
        """
        path = self.path / METRICS
        try:
            raw: bytes | None = read_regular(path)
        except FileNotFoundError:
            raw = b""
        except OSError:  # a pipe, say: nothing to read, and nothing to write into
            raw = None
        aligned = align_rows(raw or b"", journal)
        journal.require_version(aligned.steps_seen, METRICS)
        text = "".join(json.dumps(row) + "\n" for row in aligned.rows)
        if text.encode() != raw or path.is_symlink():  # a link is replaced: rows are not written into whatever it leads to
            replace_file(path, text)
        return aligned.rows

    def remove(self) -> None:
        """Take back a run of which no step was taken: the files that it made and the directories that it made, no others."""
        remove_files(self.path, self._made)
        self.close()

    def close(self) -> None:
        """Let go of the lock. May be called twice."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def header_of(journal: Path) -> Mapping[str, Any] | None:
    """The header of a journal; None if it was not begun.

    Raises:
        JournalError: if it cannot be read.
    """
    with contextlib.closing(Journal(journal)) as opened:
        return opened.header


def checksums_at(options: TrainOptions, record: Mapping[str, Any]) -> dict[str, Any]:
    """A run's checksums of its data files, by the paths where options say that the files are now.

    Args:
        options: Of the run that goes on.
        record: What the run's ``options.json`` holds.
    """
    now, then = options.to_json(), record["options"]
    roles = [role for role in ("data", "evaluation") if now[role] is not None]
    return {now[role]: record["checksums"].get(then[role]) for role in roles}


def require_new(path: Path) -> None:
    """Refuse an output directory that is in use; remove the files of a process that was killed before its run started.

    Raises:
        OutputError: naming the directory.
    """
    names = {file.name for file in path.iterdir()} if path.is_dir() else set()
    if OPTIONS in names:
        raise OutputError(
            path,
            found="a run that has already started",
            expected="a path that does not exist yet, or an empty directory",
            remedy=f"continue the run with zo2 train --resume {path}, or choose another output directory",
        )
    if names and names <= {LOCK, "options.partial", "tune.partial"}:
        with contextlib.suppress(OSError), _lock(path):  # refused where a process is about to begin: it is in use, then
            for name in {*names, LOCK}:
                (path / name).unlink(missing_ok=True)
    require_unused(path)


def missing_directories(run: Path) -> list[Path]:
    """The directories that a run has to make, deepest first."""
    return [path for path in (run, *run.parents) if not path.exists()]


def remove_files(run: Path, made: Sequence[Path]) -> None:
    """Remove a run's files but its model and, as far as they are empty then, directories."""
    kept = [f"{what}.{ending}" for what in ("scratch", "factors") for ending in ("bin", "jsonl", "partial")]
    for name in (OPTIONS, JOURNAL, METRICS, LOCK, *kept, "options.partial", "metrics.partial"):
        with contextlib.suppress(OSError):
            (run / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: somebody else put something there
        for path in made:
            path.rmdir()


def _lock(path: Path) -> FileLock:
    """The lock of a run's directory: tried once, held by this process from whichever thread, gone with it."""
    return FileLock(path / LOCK, timeout=0, thread_local=False)


@contextlib.contextmanager
def _refusing_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OptionError(
            path,
            found=f"no readable {OPTIONS} ({reason(error)})",
            expected="the directory of a run",
            remedy="name the directory that was the run's --output",
        ) from error
    except KeyError as error:
        raise _damaged(path, f"nothing under the key {error}") from error
    except ZO2Error as error:
        raise _damaged(path, f"{error.found} as {error.where}") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise _damaged(path, (str(error).splitlines() or [type(error).__name__])[0][:200]) from error


def _damaged(path: Path, found: str) -> OptionError:
    return OptionError(
        path / OPTIONS,
        found=found,
        expected=f"the directory of a run, with {OPTIONS} as it was written",
        remedy="restore the file from a copy; zo2 export --model --journal needs the journal alone",
    )


def _require_same_data(
    options: TrainOptions, checksums: Mapping[str, str], saved: Mapping[str, Any], saved_checksums: Mapping[str, Any]
) -> None:
    """Refuse data files with other bytes than the run began with.

    Args:
        options: Options of the resumed run.
        checksums: SHA-256 of each data file as it is now, by path.
        saved: Options that the run has saved, as JSON values.
        saved_checksums: SHA-256 of each data file when the run began, by the path where the file is now.

    Raises:
        DataError: naming the option.
    """
    for option, path in (("data", options.data), ("evaluation", options.evaluation)):
        if path is None:
            continue
        checksum, before = checksums[str(path.resolve())], saved_checksums.get(str(path.resolve()))
        if checksum != before:
            raise DataError(
                option,
                found=f"{path}, which has the sha256 {checksum[:12]}",
                expected=f"what the run began with: {saved.get(option)}, which had the sha256 {str(before)[:12]}",
                remedy="restore the file, pass the path to which it was moved, or start a new run",
            )


def _require_same_tokens(model: str, now: dict[str, object], then: dict[str, object]) -> None:
    names = [name for name in sorted({*now, *then}) if now.get(name) != then.get(name)]
    if names:
        raise DataError(
            f"tokenizer of {model}",
            found="; ".join(f"{name} {now.get(name)}" for name in names),
            expected="; ".join(f"{name} {then.get(name)}" for name in names) + ", as when the run was begun",
            remedy="restore the tokenizer's files and the versions of tokenizers and transformers, or begin a new run",
        )


def replace_file(path: Path, text: str) -> None:
    """Give a file another content: on return the new one is durable, before that the old one counts.

    Raises:
        OutputError: if it cannot be written.
    """
    try:
        replace_bytes(path, text.encode())
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(
        path,
        found=reason(error),
        expected="a directory that can be written",
        remedy="free space or choose another directory",
    )


def holds_model(directory: Path) -> bool:
    """Whether a model was exported to a directory already; an empty one holds none.

    Raises:
        OutputError: if there is something else.
    """
    if not (directory.exists() or directory.is_symlink()) or (directory.is_dir() and not any(directory.iterdir())):
        return False
    names = ("config.json", "adapter_config.json")
    if any((directory / name).is_file() for name in names) and any(directory.glob("*.safetensors")):
        return True
    raise OutputError(
        directory,
        found="something that is no whole model",
        expected="the exported model, an empty directory, or nothing",
        remedy="move it away and give the command again: the model is written anew",
    )
