"""SIGINT, SIGTERM and SIGHUP of a process that runs one command: no traceback and no damaged file at any moment.

While a command starts (imports, the command line) a signal ends the process immediately. While it runs, the first signal
raises in the main thread: the current step is dropped, files are closed, and one line says how to continue. A second signal
prints a line, and a third ends the process immediately, which loses no step either: a run survives SIGKILL at any moment.

This module imports nothing slow: until the handlers are installed, Python's own would print a traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from enum import Enum
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS_UNTIL_EXIT = 3  # number of signals that ends the process immediately


class Phase(Enum):
    """What the process is doing when a signal comes."""

    STARTING = "starting"  # importing, and parsing the command line
    RUNNING = "running"


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class SignalHandling:
    """The handlers of this process.

    A signal that was ignored when the process started stays ignored, as ``nohup`` and background jobs of a shell require.
    """

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self._count = 0
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        sys.unraisablehook = self._handle_unraisable

    def end(self) -> None:
        """Ignore signals while Python shuts down, which removes handlers and cannot handle an exception."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._count += 1
        if self.phase is Phase.STARTING:
            _exit(number, "interrupted; nothing was started")
        if self._count >= _SIGNALS_UNTIL_EXIT:
            _exit(number, "stopped immediately")
        if self._count > 1:
            _print("stopping; interrupt once more to stop immediately")
        else:
            raise Interrupted(number)

    def _handle_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """End the process where Python would ignore the interruption, in a destructor or a callback."""
        if isinstance(unraisable.exc_value, Interrupted):
            _exit(unraisable.exc_value.number, "stopped immediately")
        sys.__unraisablehook__(unraisable)


def interruption_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interruption that caused an error, if any: interrupted code, such as a context manager, may raise an error."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        if isinstance(error, KeyboardInterrupt):
            return error
        visited.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def status_of(interruption: KeyboardInterrupt) -> int:
    """The exit status of an interrupted command, as in shells: 130, 143 or 129."""
    return 128 + (interruption.number if isinstance(interruption, Interrupted) else signal.SIGINT)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # print() is not reentrant, and a handler may interrupt it
        os.write(2, f"\nzo2: {text}\n".encode())


def _exit(number: int, text: str) -> None:
    _print(text)
    os._exit(128 + number)
