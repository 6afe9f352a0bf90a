"""The parent's side: a child process that is asked, and ended when it takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from zo2core import reason

_WORKER = Path(__file__).with_name("worker.py")
_START_SECONDS = 300.0  # for imports from a slow disk
_LARGEST_ANSWER = 1 << 26  # bytes
_SLACK = 4  # seconds on the wall for each that the child may compute; other processes run, too
TIME = "it takes longer than allowed"


class ConfinementError(Exception):
    """The child gave no answer; the message says why, as a clause."""


class ConfinedProcess:
    """A child process that answers requests about what comes from strangers. It starts when it is first asked.

    Args:
        task: File of a module with ``answer(request)``, from JSON value to JSON value, that imports nothing of ours.
    """

    def __init__(self, task: Path) -> None:
        self._task = task
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: object, *, seconds: float, memory: int) -> Any:
        """Send a request and wait for the answer.

        Args:
            request: A JSON value.
            seconds: That the child may compute.
            memory: Bytes it may take beside what it has.

        Raises:
            ConfinementError: if it fails, exceeds a limit or dies. The next request starts another child.
        """
        line = json.dumps({"request": request, "memory": memory, "seconds": seconds}).encode() + b"\n"
        with self._lock:
            try:
                process = self._started()
                self._send(process, line)
                result = json.loads(self._receive(process, _SLACK * seconds))
            except BaseException:
                self._end()
                raise
        if "failure" in result:
            raise ConfinementError(result["failure"])
        return result["answer"]

    def close(self) -> None:
        """End the child. May be called twice; a later request would start another."""
        with self._lock:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            try:
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter and files of this package
                    [sys.executable, "-P", str(_WORKER), str(self._task)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "MKL_NUM_THREADS": "1",
                    },  # each thread would take address space
                    start_new_session=True,  # an interrupt at the terminal is the parent's business
                )
            except OSError as error:
                raise ConfinementError(f"no process can be started: {reason(error)}") from error
            self._receive(self._process, _START_SECONDS)
        return self._process

    def _send(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead, of which the answer's absence will tell
            process.stdin.write(line)
            process.stdin.flush()

    def _receive(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        assert process.stdout is not None
        answer = bytearray()
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(deadline - time.monotonic()):
                    raise ConfinementError(TIME)
                received = os.read(process.stdout.fileno(), 1 << 16)
                if not received:
                    raise ConfinementError(_end_of(process.wait()))
                answer += received
                if len(answer) > _LARGEST_ANSWER:
                    raise ConfinementError("its answer is too long")
        return bytes(answer)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _end_of(status: int) -> str:
    if status == -signal.SIGXCPU:
        return TIME
    if status < 0:
        return f"it ends its process by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"
