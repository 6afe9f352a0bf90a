"""Typed errors: each says where, what was found, what was expected and what to do."""

from os import PathLike


class ZO2Error(Exception):
    """Base of every error this library raises for a user's input or environment.

    Args:
        where: File, option, parameter or object the error is about, as exact as it is known (path, line, tensor name).
        found: What is there.
        expected: What would have been right.
        remedy: What the user can do about it, one imperative sentence without a full stop.
    """

    def __init__(self, where: object, *, found: str, expected: str, remedy: str) -> None:
        self.where = str(where)
        self.is_of_path = isinstance(where, PathLike)  # which may be called as an option is
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{self.where}: found {found}; expected {expected}. What to do: {remedy}.")


class OptionError(ZO2Error, ValueError):
    """An option is out of its range, or two options contradict each other."""


class CheckpointError(ZO2Error):
    """A checkpoint on disk is malformed, incomplete or does not match its model."""


class UnsupportedModelError(ZO2Error):
    """A model that cannot be trained here: unknown architecture, quantised weights, pickled shards."""


class BatchError(ZO2Error, ValueError):
    """A batch that the model cannot take, or that has no label to learn from."""


class DataError(ZO2Error, ValueError):
    """A data file that cannot be used: empty, malformed, or a row without anything to learn."""


class OutputError(ZO2Error):
    """An output path is in use or cannot be written."""


class DeviceError(ZO2Error):
    """A compute device is not there, or refuses memory."""


class JournalError(ZO2Error):
    """A journal is damaged, or belongs to another base checkpoint or other options."""


class MemoryBudgetError(ZO2Error):
    """Not even the smallest arrangement fits into the memory there is."""


class ScratchError(ZO2Error):
    """A file of written-back blocks, or a temporary file, cannot be read or written; the journal is whole."""


class WorkerError(ZO2Error):
    """Another worker of the run is silent, or says what does not fit; no step was taken."""


class OutrunError(WorkerError):
    """Other workers have taken steps on the weights that this one shares with them, and works on."""


class MissingPackageError(ZO2Error, ImportError):
    """An optional package is needed that is not installed."""


class NonFiniteLossError(ZO2Error):
    """A forward pass gave a loss that is not finite; the step was not taken."""


class DivergenceError(ZO2Error):
    """A run has got worse for good; the step was not taken, and the journal holds every earlier one.

    Args:
        where: As in ``ZO2Error``, and so are the next three.
        found: The losses of the last steps.
        expected: The losses that they should have come to.
        remedy: What the user can do.
        best_step: Number of updates in the best weights so far: the step to branch from.
    """

    def __init__(self, where: object, *, found: str, expected: str, remedy: str, best_step: int) -> None:
        self.best_step = best_step
        super().__init__(where, found=found, expected=expected, remedy=remedy)


class BusyError(ZO2Error):
    """An engine was used while an iteration over its parameters was under way."""


class ClosedError(ZO2Error):
    """A closed engine or source was used."""


class ZO2Warning(UserWarning):
    """Something is done otherwise than it could have been expected, and no worse: the message is one line."""


def reason(error: Exception) -> str:
    """Say why the system refused, in its own words and without the number and path that ``str`` would add."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
