"""Typed errors: each says where, what was found, what was expected and what to do."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any


class ZO2Error(Exception):
    """Base of every error this library raises for a user's input or environment.

    Args:
        where: File, option, parameter or object the error is about, as exact as it is known (path,
            line, tensor name).
        found: The value or state that was found.
        expected: The expected value or state.
        remedy: What the user can do, as an imperative sentence without a full stop.
    """

    def __init__(self, where: object, found: str, expected: str, remedy: str) -> None:
        self.where = str(where)
        self.is_of_path = isinstance(where, PathLike)  # a path may have the name of an option
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{self.where}: found {found}; expected {expected}. What to do: {remedy}.")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle message and fields, with which a process tells its error to another one."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class OptionError(ZO2Error, ValueError):
    """An option is out of its range, or two options contradict each other."""


class CheckpointError(ZO2Error):
    """A checkpoint on disk is malformed, incomplete or does not match its model."""


class UnsupportedModelError(ZO2Error):
    """A model that cannot be trained here: unknown architecture, quantised weights, pickled
    shards.
    """


class BatchError(ZO2Error, ValueError):
    """A batch that the model cannot take, or that has no label to learn from."""


class DataError(ZO2Error, ValueError):
    """A data file that cannot be used: empty, malformed, or a row without anything to learn."""


class OutputError(ZO2Error):
    """An output path is in use or cannot be written."""


class DeviceError(ZO2Error):
    """A compute device is missing, or cannot allocate memory."""


class JournalError(ZO2Error):
    """A journal is damaged, or belongs to another base checkpoint or other options."""


class MemoryBudgetError(ZO2Error):
    """Not even the smallest plan fits into the memory."""


class ScratchError(ZO2Error):
    """A file of written-back blocks, or a temporary file, cannot be read or written; the journal is
    intact.
    """


class WorkerError(ZO2Error):
    """Another worker of the run does not answer, or sends a message that does not fit; no step was
    taken.
    """


class MissingPackageError(ZO2Error, ImportError):
    """An optional package is needed that is not installed."""


class UnsupportedSystemError(ZO2Error, ImportError):
    """The operating system is none that this library runs on."""


class NonFiniteLossError(ZO2Error):
    """A loss is not finite; the step was not taken."""


class DivergenceError(ZO2Error):
    """A run has diverged; the step was not taken, and the journal has all earlier steps.

    Args:
        where, found, expected, remedy: As for ``ZO2Error``.
        best_step: Version of the best weights, from which to branch the run.
    """

    def __init__(
        self, where: object, found: str, expected: str, remedy: str, *, best_step: int
    ) -> None:
        self.best_step = best_step
        super().__init__(where, found=found, expected=expected, remedy=remedy)


class BusyError(ZO2Error):
    """An engine was used during an iteration over its parameters."""


class ClosedError(ZO2Error):
    """A closed engine or source was used."""


class ZO2Warning(UserWarning):
    """A warning of one line: something is done differently than expected, without harm."""


def reason(error: Exception) -> str:
    """Return the system's reason of an error, without the number and path that ``str`` adds."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def without_effect(option: str, value: object, expected: str) -> OptionError:
    """The error for an option that would have no effect."""
    return OptionError(option, str(value)[:120], expected, "leave it out")


# What helps against an error of the system, by its number, whatever the file is for.
_SYSTEM_REMEDIES: Mapping[int, str] = {
    errno.EACCES: "change its permissions, or choose another path",
    errno.EDQUOT: "free space of your quota, or choose a path on another disk",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or choose another file system",
    errno.EIO: "check the disk, whose errors are in the system's log (dmesg)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENFILE: "end programs that have many files open, or raise fs.file-max (sysctl)",
    errno.ENOMEM: "free memory",
    errno.ENOSPC: "free space on its disk, or choose a path on another one",
    errno.EPERM: "change its permissions, or choose another path",
    errno.EROFS: "choose a path on a file system that can be written",
}


def system_remedy(error: Exception, otherwise: str) -> str:
    """What helps against an error of the system: its number tells, else the place where it came."""
    number = error.errno if isinstance(error, OSError) else None
    return otherwise if number is None else _SYSTEM_REMEDIES.get(number, otherwise)


def system_error(
    kind: type[ZO2Error],
    where: object,
    error: Exception,
    *,
    expected: str,
    remedy: str,
    afterwards: str = "",
) -> ZO2Error:
    """The typed error for an error of the system.

    Args:
        kind: The error's class.
        where: What the error is about. The error's own file is named, too, if it is another one.
        error: The error of the system.
        expected: The expected state.
        remedy: What to do, unless the error's number tells. See ``system_remedy``.
        afterwards: What holds, or is to be done, once the cause is gone.
    """
    remedy = system_remedy(error, remedy)
    names = [os.fsdecode(name) for name in _files_of(error)]
    is_other = len(names) > 1 or any(os.path.basename(name) not in str(where) for name in names)
    paths = f" ({' to '.join(names)[:400]})" if is_other else ""
    return kind(
        where, reason(error) + paths, expected, f"{remedy}; {afterwards}" if afterwards else remedy
    )


def _files_of(error: Exception) -> list[str | bytes]:
    """The files that an error of the system names: two where one was renamed or linked."""
    if not isinstance(error, OSError):
        return []
    return [name for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]


@contextmanager
def system_errors_as(
    kind: type[ZO2Error], where: object, *, expected: str, remedy: str, afterwards: str = ""
) -> Iterator[None]:
    """A context in which errors of the system, such as a disk without space, become a typed
    error. See ``system_error``.
    """
    try:
        yield
    except (OSError, EOFError) as error:
        raise system_error(
            kind, where, error, expected=expected, remedy=remedy, afterwards=afterwards
        ) from error
