"""Functions that run one at a time, each until it makes a request, so that all requests are served together.

Each function has a thread of its own, but only one thread runs at a time: the functions need no locks, and always run in the
same order. Requests are served in the thread of the caller.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from zo2core.errors import BusyError

_PAUSE_SOFT = 1  # omp_pause_soft of omp.h: threads end, and settings stay


def end_openmp_team() -> None:
    """End the OpenMP threads of the calling thread, which start again when it next computes.

    Once a process has more OpenMP threads than processors, GNU's library puts them to sleep at the end of each operation
    instead of letting them wait actively: a step of a small model then takes a quarter longer. Threads that take turns
    call this before they wait. Other libraries than OpenMP 5.0 are left alone.
    """
    try:
        openmp = ctypes.CDLL(None)
        openmp.omp_pause_resource(_PAUSE_SOFT, openmp.omp_get_initial_device())
    except (OSError, AttributeError, TypeError):
        return


RequestT = TypeVar("RequestT")
T = TypeVar("T")


class _Turn(Generic[RequestT]):
    """A function, its thread and its state."""

    def __init__(self, function: Callable[[], Any], paused: threading.Semaphore) -> None:
        self.function = function
        self.paused = paused  # of all functions: released whenever one waits or has ended
        self.may_run = threading.Semaphore(0)
        self.request: RequestT | None = None  # that waits to be served
        self.result: Any = None  # what the function returned, or the exception that it raised
        self.has_ended = False
        self.abort: BaseException | None = None  # raised instead of serving a request


class Lockstep(Generic[RequestT]):
    """Runs functions, and serves their requests together."""

    def __init__(self, serve: Callable[[Sequence[RequestT]], None]) -> None:
        self._serve = serve
        self._local = threading.local()  # the turn of the present thread
        self._is_running = False

    def request(self, request: RequestT | None) -> None:
        """Wait until a request is served: with those of the other functions, or alone outside of ``run``.

        None waits until each other function has ended or made a request that is served.
        """
        turn: _Turn[RequestT] | None = getattr(self._local, "turn", None)
        if turn is not None:
            self._pause(turn, request)
        elif request is not None:
            self._serve([request])

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """Run functions to their ends."""
        if self._is_running:
            raise BusyError(
                "shared base",
                found="a call within a function that already runs together with others",
                expected="one call at a time",
                remedy="pass all functions in one call",
            )
        paused = threading.Semaphore(0)
        turns: list[_Turn[RequestT]] = [_Turn(function, paused) for function in functions]
        threads = [threading.Thread(target=self._run_turn, args=(turn,), name="zo2-run", daemon=True) for turn in turns]
        self._is_running = True
        try:
            for thread in threads:
                thread.start()
            try:
                self._run_rounds(turns)
            except BaseException as error:
                self._abort(turns, error)
                raise
        finally:
            self._is_running = False
            for thread, turn in zip(threads, turns, strict=True):
                if turn.has_ended:
                    thread.join()
        return [turn.result for turn in turns]

    def _pause(self, turn: _Turn[RequestT], request: RequestT | None) -> None:
        """Let the other functions run, until the requests of all are served."""
        if turn.abort is None:
            turn.request = request
            end_openmp_team()
            turn.paused.release()
            turn.may_run.acquire()
        if turn.abort is not None:
            raise turn.abort

    def _run_rounds(self, turns: Sequence[_Turn[RequestT]]) -> None:
        running = list(turns)
        while running:
            for turn in running:
                turn.may_run.release()
                turn.paused.acquire()
                if isinstance(turn.result, BaseException) and not isinstance(turn.result, Exception):
                    raise turn.result
            running = [turn for turn in running if not turn.has_ended]
            requests = [turn.request for turn in running if turn.request is not None]
            if requests:
                self._serve(requests)

    def _abort(self, turns: Sequence[_Turn[RequestT]], error: BaseException) -> None:
        """End all functions: what they wait for raises the error."""
        for turn in turns:
            turn.abort = error
        for turn in turns:
            turn.may_run.release()
        for turn in turns:
            while not turn.has_ended:
                turn.paused.acquire()

    def _run_turn(self, turn: _Turn[RequestT]) -> None:
        self._local.turn = turn
        turn.may_run.acquire()
        try:
            turn.result = turn.function() if turn.abort is None else turn.abort
        except BaseException as error:
            turn.result = error
        finally:
            turn.request, turn.has_ended = None, True
            turn.paused.release()
