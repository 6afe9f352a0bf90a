"""A run's directory: options, journal, metrics, scratch and lock; what a run is resumed from.

options.json    how the run was begun, checksums of its data files and of the tokens they became
journal.jsonl   every step taken: the run itself
metrics.jsonl   one row a step and one an evaluation, for people and plots
scratch.*       blocks written back
lock            held by the process that works here
model/          the exported model, at the end
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from zo2adapters.trainers.options import TrainOptions
from zo2core import (
    DataError,
    OptionError,
    OutputError,
    Update,
    ZO2Error,
    create_file,
    make_directory,
    reason,
    require_unused,
    sync_path,
)

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
        checksums = {str(path): _checksum(path) for path in files}
        try:
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
                    record = json.loads((self.path / OPTIONS).read_bytes())
                    checksums_then, tokens_then = dict(record["checksums"]), dict(record["tokens"])
                _require_same_data(checksums, checksums_then)
                _require_same_tokens(options.model, dict(tokens), tokens_then)
            else:
                record = {"options": options.to_json(), "checksums": checksums, "tokens": dict(tokens)}
                _replace(self.path / OPTIONS, json.dumps(record, indent=2) + "\n")
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
            OptionError: if the directory is none of a run.
        """
        with _refusing_damage(path):
            values = json.loads((path / OPTIONS).read_bytes())
            return TrainOptions.from_json(values["options"], path)

    def metrics(self, updates: Sequence[Update]) -> list[dict[str, Any]]:
        """Bring the metrics in line with the journal: drop what it does not know, make up what was not written any more.

        Returns:
            The rows that count.
        """
        rows: list[dict[str, Any]] = []
        path = self.path / METRICS
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # torn
            rows.append(row)
        steps = {row["step"]: row for row in rows if "loss" in row}
        evaluations = {row["step"]: row for row in rows if "evaluation_loss" in row}
        kept: list[dict[str, Any]] = []
        for step in range(len(updates) + 1):
            kept += [evaluations[step]] if step in evaluations else []
            if step < len(updates):
                kept.append(steps.get(step) or _row_of(updates[step]))
        if kept or path.exists():
            _replace(path, "".join(json.dumps(row) + "\n" for row in kept))
        return kept

    def remove(self) -> None:
        """Take back a directory in which nothing was done."""
        for name in (OPTIONS, JOURNAL, LOCK, "scratch.bin", "scratch.jsonl", "options.partial", "scratch.partial"):
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()
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


def require_new(path: Path) -> None:
    """Refuse an output directory that is in use; take away what a process left that was killed before its run began.

    Raises:
        OutputError: naming the directory.
    """
    names = {file.name for file in path.iterdir()} if path.is_dir() else set()
    if names and names <= {LOCK, "options.partial"}:
        with contextlib.suppress(OSError), _lock(path):  # refused where a process is about to begin: it is in use, then
            for name in names:
                (path / name).unlink(missing_ok=True)
    require_unused(path)


def _lock(path: Path) -> FileLock:
    """The lock of a run's directory: tried once, held by this process from whichever thread, gone with it."""
    return FileLock(path / LOCK, timeout=0, thread_local=False)


@contextlib.contextmanager
def _refusing_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, ZO2Error) as error:
        raise OptionError(
            "resume",
            found=f"{path}: {error if str(error) else type(error).__name__}",
            expected=f"the directory of a run, with {OPTIONS} as it was written",
            remedy="name the directory that was the run's --output",
        ) from error


def _row_of(update: Update) -> dict[str, Any]:
    """What the journal knows of a step; speed and memory are lost."""
    return {
        "step": update.step,
        "loss": update.losses[0],
        "losses": list(update.losses),
        "projected_grads": list(update.projected_grads),
        "lr": update.lr,
    }


def _checksum(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(path, found=reason(error), expected="a readable file", remedy="check the path") from error


def _require_same_data(now: dict[str, str], then: dict[str, str]) -> None:
    for path, checksum in now.items():
        if then.get(path) != checksum:
            raise DataError(
                path,
                found=f"another content (sha256 {checksum[:12]})",
                expected=f"what the run was begun with (sha256 {str(then.get(path))[:12]})",
                remedy="restore the file, or begin a new run",
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


def _replace(path: Path, text: str) -> None:
    """Give a file another content: on return the new one is durable, before that the old one counts."""
    partial = path.with_suffix(".partial")
    try:
        partial.unlink(missing_ok=True)  # of a process that was killed
        with create_file(partial) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_path(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(
        path,
        found=reason(error),
        expected="a directory that can be written",
        remedy="free space or choose another directory",
    )
