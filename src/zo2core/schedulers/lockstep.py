"""Functions that run in turn, each until it makes a request, so that the requests of all are served
together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from zo2core.errors import BusyError
from zo2core.kernels.parallel import end_openmp_team

RequestT = TypeVar("RequestT")
T = TypeVar("T")


class _Turn(threading.Thread, Generic[RequestT]):
    """A function, and a thread that runs it until it makes a request, and then only when it is told
    to.
    """

    def __init__(self, function: Callable[[], Any], local: threading.local) -> None:
        super().__init__(name="zo2-run", daemon=True)
        self._function, self._local = function, local
        # holds what the function's request raises, if any
        self._resumed: SimpleQueue[BaseException | None] = SimpleQueue()
        self._paused: SimpleQueue[None] = SimpleQueue()
        self.request: RequestT | None = None  # that waits to be served
        self.result: Any = None  # what the function returned, or the exception that it raised
        self.has_ended = False

    def run(self) -> None:
        """Run the function; its thread calls this."""
        self._local.turn = self
        try:
            self._wait()
            self.result = self._function()
        except BaseException as error:
            self.result = error
        finally:
            self.request, self.has_ended = None, True
            self._paused.put(None)

    def pause(self, request: RequestT | None) -> None:
        """Let the other functions run, until the requests of all are served."""
        self.request = request
        end_openmp_team()
        self._paused.put(None)
        self._wait()

    def resume(self, error: BaseException | None = None) -> None:
        """Run the function until it makes its next request, or has ended; an error is raised in it
        first.
        """
        self._resumed.put(error)
        self._paused.get()

    def _wait(self) -> None:
        error = self._resumed.get()
        if error is not None:
            raise error


class Lockstep(Generic[RequestT]):
    """Runs functions one at a time, each until it makes a request, and serves the requests of all
    together.

    Each function has a thread of its own, but only one thread runs at a time: the functions need no
    locks, and always run in the same order. Requests are served in the thread of the caller.
    """

    def __init__(self, serve: Callable[[Sequence[RequestT]], None]) -> None:
        self._serve = serve
        self._local = threading.local()  # the turn of the present thread
        self._is_running = False

    def request(self, request: RequestT | None) -> None:
        """Wait until a request is served: with those of the other functions, or alone outside of
        ``run``.

        None waits until each other function has ended or made a request that is served.
        """
        turn: _Turn[RequestT] | None = getattr(self._local, "turn", None)
        if turn is not None:
            turn.pause(request)
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
        turns: list[_Turn[RequestT]] = [_Turn(function, self._local) for function in functions]
        for turn in turns:
            turn.start()
        self._is_running = True
        try:
            self._run_rounds(turns)
        except BaseException as error:
            # whatever the functions wait for raises it, until all have ended
            for turn in turns:
                while not turn.has_ended:
                    turn.resume(error)
            raise
        finally:
            self._is_running = False
            for turn in turns:
                if turn.has_ended:
                    turn.join()
        return [turn.result for turn in turns]

    def _run_rounds(self, turns: Sequence[_Turn[RequestT]]) -> None:
        while running := [turn for turn in turns if not turn.has_ended]:
            for turn in running:
                turn.resume()
                if isinstance(turn.result, BaseException) and not isinstance(
                    turn.result, Exception
                ):
                    raise turn.result
            requests = [turn.request for turn in running if turn.request is not None]
            if requests:
                self._serve(requests)
