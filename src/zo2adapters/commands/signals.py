"""SIGINT, SIGTERM and SIGHUP of a process that runs one command: no traceback, nothing torn, whenever they come.

While a command starts (imports, the command line) nothing was begun, so the process ends at once. While it runs, the first
signal raises in the main thread: the step under way is dropped, files are closed, one line says how to go on. A second one
is noted, and a third one ends the process at once, which costs no step either: a run survives SIGKILL at any moment.

This module imports nothing slow: until the handlers stand, Python's own would print a traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from enum import Enum
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE = 3  # signals after which the process ends at once


class Phase(Enum):
    """What a signal meets."""

    STARTING = "starting"  # nothing was begun
    RUNNING = "running"


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class SignalHandling:
    """The handlers of this process.

    A signal that was ignored when the process began stays ignored, as ``nohup`` and the background jobs of a shell want it.
    """

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self._count = 0
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        sys.unraisablehook = self._handle_unraisable

    def end(self) -> None:
        """Ignore signals from here on: all is done but Python's own end, which takes no exception and forgets handlers."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._count += 1
        if self.phase is Phase.STARTING:
            _leave(number, "interrupted; nothing was begun")
        if self._count >= _PATIENCE:
            _leave(number, "ended at once")
        if self._count > 1:
            _say("stopping; once more ends it at once")
        else:
            raise Interrupted(number)

    def _handle_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """End where Python would swallow the interruption, in a destructor or a callback, and go on."""
        if isinstance(unraisable.exc_value, Interrupted):
            _leave(unraisable.exc_value.number, "ended at once")
        sys.__unraisablehook__(unraisable)


def interruption_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interruption that an error came of: what it cuts in two, a context manager say, may end in an error of its own."""
    passed: set[int] = set()
    while error is not None and id(error) not in passed:
        if isinstance(error, KeyboardInterrupt):
            return error
        passed.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def status_of(interruption: KeyboardInterrupt) -> int:
    """The exit status of an interrupted command, as shells count it: 130, 143 or 129."""
    return 128 + (interruption.number if isinstance(interruption, Interrupted) else signal.SIGINT)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # print() is not safe in a handler: it may interrupt itself
        os.write(2, f"\nzo2: {text}\n".encode())


def _leave(number: int, text: str) -> None:
    _say(text)
    os._exit(128 + number)
