"""A child process that answers requests under limits of memory and computing time: for files that
strangers wrote.

Note: why a child. A limit of memory holds for a whole process, and an instruction that runs in C
cannot be interrupted from inside its process. The template ``{{ 'x' * 10**10 }}`` takes 10 GB in
one instruction. A pickle of 800 bytes, which ``torch.load(weights_only=True)`` accepts, doubles a
string 28 times by ``_codecs.encode(..., "hex")``. Tuples in tuples, as a key, crash the interpreter
or are hashed for ever. None of them runs code; each ends the process that reads it.

This file is both sides. The parent imports it; the child is run by its path, with the path of a
task's file as argument, and imports nothing of this package but the task. A request is a line of
JSON on standard input, {"request", "memory", "seconds"}; the answer is a line on standard output,
{"answer"} or {"failure"}. The child runs no task itself. It forks the process that does, and ends
it with the parent, and with it every process that it has started.

Note: what a task has started. A process may leave its session by setsid, and outlive its parent.
The child is the subreaper of all of them: an orphan becomes its child, so that it finds them as its
descendants. Where the system has no subreapers, which are Linux's, it ends the process group of the
task.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

_TIME = "it takes longer than allowed"
_MEMORY = "it takes more memory than allowed"
_TEXT = 500  # characters of an error that are passed on
_LONGEST_WAIT = (1 << 31) - 1  # milliseconds that the system's poll can wait: 24 days
_ENDING_SECONDS = 10.0  # in which the child ends what the task has started
_IS_LINUX = sys.platform == "linux"
_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # options of Linux's prctl


class LimitedProcessError(Exception):
    """The child gave no answer; the message says why, as a clause."""


class LimitedProcess:
    """A child process that answers one request after the other. It starts with the first one.

    Args:
        task: File of a Python module that imports nothing of this package. Its function ``answer``
            takes a JSON value and returns one.
    """

    def __init__(self, task: Path) -> None:
        self._task = task
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(
        self, request: object, *, seconds: float, memory: int, wall_seconds: float | None = None
    ) -> Any:
        """Send a request and wait for the answer.

        Args:
            request: A JSON value.
            seconds: Processor time that the child may take.
            wall_seconds: Time after which the child is ended, even if it only waits; None: no
                limit.
            memory: Bytes of address space that the child may take beside what it has. Not limited
                where the system has no /proc/self/statm.

        Returns:
            What the task's ``answer`` returned.

        Raises:
            LimitedProcessError: if the child fails, exceeds a limit or dies. The next request
                starts another child.
        """
        line = (
            json.dumps({"request": request, "memory": memory, "seconds": seconds}).encode() + b"\n"
        )
        with self._lock:
            try:
                result = self._exchange(line, wall_seconds)
            except BaseException:
                self._end()
                raise
        if "failure" in result:
            raise LimitedProcessError(result["failure"])
        return result["answer"]

    def close(self) -> None:
        """End the child. May be called twice; a later request would start another."""
        with self._lock:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, line: bytes, wall_seconds: float | None) -> dict[str, Any]:
        if self._process is None:
            try:
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter and files of this package
                    [sys.executable, "-P", __file__, str(self._task)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    # Each further thread would take address space.
                    env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                    start_new_session=True,  # an interrupt at the terminal is the parent's business
                )
            except OSError as error:
                raise LimitedProcessError(f"no process can be started: {error.strerror}") from error
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the child is dead, and there will be no answer
            process.stdin.write(line)
            process.stdin.flush()
        waiting = select.poll()
        waiting.register(process.stdout, select.POLLIN)
        is_late = not waiting.poll(
            None if wall_seconds is None else min(wall_seconds * 1000, _LONGEST_WAIT)
        )
        # Or the end of the file, at the latest when the system ends the child.
        answer = b"" if is_late else process.stdout.readline()
        if not answer.endswith(b"\n"):
            _end_child(process)  # what the task has started may outlive it
            status = process.wait()
            raise LimitedProcessError(_TIME if is_late else _cause_of(status))
        result: dict[str, Any] = json.loads(answer)
        return result

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            _end_child(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _end_child(process: subprocess.Popen[bytes]) -> None:
    """End the child, which ends the processes that its task has started."""
    process.terminate()
    try:
        process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cause_of(status: int) -> str:
    if status == -signal.SIGXCPU:
        return _TIME
    if status == -signal.SIGABRT:  # a library in C++ or Rust that can have no more memory
        return "it ends its process by SIGABRT, as for lack of memory"
    if status < 0:
        return f"it ends its process by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _supervise() -> None:
    """The child: fork, return in the forked process alone, and end it and all that it has started
    with the parent.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signals = signal.SIGTERM, signal.SIGCHLD
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in signals:
        signal.signal(number, lambda *_: None)  # it wakes the poll below
    _prctl(_SET_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        os.close(woken)
        os.close(wake)
        os.setpgid(0, 0)  # what the task sends to its group spares the supervisor
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        return
    os.close(1)
    waiting = select.poll()
    # hung up when the parent has ended, or closes it; the requests are the worker's
    waiting.register(0, 0)
    waiting.register(woken, select.POLLIN)
    ended = status = 0
    while (
        not ended
        and 0 not in dict(waiting.poll())
        and signal.SIGTERM not in os.read(woken, 1 << 12)
    ):
        ended, status = os.waitpid(worker, os.WNOHANG)
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            for pid in _descendants(worker):
                with contextlib.suppress(OSError):  # it has just ended, or is another user's
                    os.kill(pid, signal.SIGKILL)
            ended, code = os.waitpid(-1, 0)
            status = code if ended == worker else status
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # end as the worker did
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _descendants(worker: int) -> list[int]:
    """This process's descendants, or the worker's group (negative, for ``kill``) where the system
    does not tell them.
    """
    if not _IS_LINUX:
        return [-worker]
    return [child.pid for child in psutil.Process().children(recursive=True)]


def _serve(task_file: str) -> None:
    """The worker: answer requests until standard input ends."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    # a fork of the task answers nothing, and keeps no answer from ending
    os.register_at_fork(after_in_child=answers.close)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # the task reads no requests
    os.dup2(2, 1)  # what a library prints is no answer
    spec = importlib.util.spec_from_file_location("task", task_file)
    assert spec is not None
    assert spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = task
    spec.loader.exec_module(task)
    for line in requests:
        answers.write(json.dumps(_limited(task.answer, **json.loads(line))).encode() + b"\n")
        answers.flush()


def _limited(
    answer: Callable[[Any], Any], request: Any, *, memory: int, seconds: float
) -> dict[str, Any]:
    address_space = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_bytes().split()[0])
        _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
    # In whole seconds; the system ends a process that goes beyond, wherever it is.
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))
    try:
        return {"answer": answer(request)}
    except MemoryError:
        return {"failure": _MEMORY}
    except (Exception, SystemExit) as error:  # any: the parent raises it
        text = " ".join(str(error).split())[:_TEXT]
        return {
            "failure": _MEMORY if "allocate memory" in text else f"{type(error).__name__}: {text}"
        }
    finally:
        resource.setrlimit(resource.RLIMIT_AS, address_space)


def _limit(kind: int, soft: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
    _supervise()
    _serve(sys.argv[1])
