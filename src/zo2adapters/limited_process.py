"""A child process that answers requests under limits of memory and computing time: for files that strangers wrote.

Note: why a child. A limit of memory holds for a whole process, and an instruction that runs in C cannot be interrupted from
inside its process. The template ``{{ 'x' * 10**10 }}`` takes 10 GB in one instruction. A pickle of 800 bytes, which
``torch.load(weights_only=True)`` accepts, doubles a string 28 times by ``_codecs.encode(..., "hex")``. Tuples in tuples, as
a key, crash the interpreter or are hashed for ever. None of them runs code; each ends the process that reads it.

This file is both sides. The parent imports it; the child is run by its path, with the path of a task's file as argument,
and imports nothing of this package but the task. A request is a line of JSON on standard input, {"request", "memory",
"seconds"}; the answer is a line on standard output, {"answer"} or {"failure"}. The child leads a session of its own, whose
processes all end when the parent has ended.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

_TIME = "it takes longer than allowed"
_MEMORY = "it takes more memory than allowed"
_TEXT = 500  # characters of an error that are passed on
_LONGEST_WAIT = (1 << 31) - 1  # milliseconds that the system's poll can wait: 24 days


class LimitedProcessError(Exception):
    """The child gave no answer; the message says why, as a clause."""


class LimitedProcess:
    """A child process that answers one request after the other. It starts with the first one.

    Args:
        task: File of a Python module that imports nothing of this package. Its function ``answer`` takes a JSON value and
            returns one.
    """

    def __init__(self, task: Path) -> None:
        self._task = task
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, request: object, *, seconds: float, memory: int, wall_seconds: float | None = None) -> Any:
        """Send a request and wait for the answer.

        Args:
            request: A JSON value.
            seconds: Processor time that the child may take.
            wall_seconds: Time after which the child is ended, even if it only waits; None: no limit.
            memory: Bytes of address space that the child may take beside what it has. Not limited where the system has no
                /proc/self/statm.

        Returns:
            What the task's ``answer`` returned.

        Raises:
            LimitedProcessError: if the child fails, exceeds a limit or dies. The next request starts another child.
        """
        line = json.dumps({"request": request, "memory": memory, "seconds": seconds}).encode() + b"\n"
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
        is_late = not waiting.poll(None if wall_seconds is None else min(wall_seconds * 1000, _LONGEST_WAIT))
        # Or the end of the file, at the latest when the system ends the child.
        answer = b"" if is_late else process.stdout.readline()
        if not answer.endswith(b"\n"):
            _end_session(process)  # what the child has started may outlive it
            status = process.wait()
            raise LimitedProcessError(_TIME if is_late else _cause_of(status))
        result: dict[str, Any] = json.loads(answer)
        return result

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            _end_session(process)
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the child, which leads its session, and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _cause_of(status: int) -> str:
    if status == -signal.SIGXCPU:
        return _TIME
    if status < 0:
        return f"it ends its process by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _serve(task_file: str) -> None:
    """The child: answer requests until standard input ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.register_at_fork(after_in_child=answers.close)  # a fork of the task answers nothing, and keeps no answer from ending
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # the task reads no requests
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    spec = importlib.util.spec_from_file_location("task", task_file)
    assert spec is not None
    assert spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = task
    spec.loader.exec_module(task)
    lines = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(requests, lines), daemon=True).start()
    while True:
        result = _limited(task.answer, **json.loads(lines.get()))
        with contextlib.suppress(BrokenPipeError):  # the parent has ended, and the thread ends the session
            answers.write(json.dumps(result).encode() + b"\n")
            answers.flush()


def _read(requests: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Read requests in a thread, so as to notice the parent's end while a request is answered.

    Code in C that keeps the interpreter's lock delays it, until the limit of processor time at the latest.
    """
    for line in requests:
        lines.put(line)
    os.killpg(0, signal.SIGKILL)


def _limited(answer: Callable[[Any], Any], request: Any, *, memory: int, seconds: float) -> dict[str, Any]:
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
        return {"failure": _MEMORY if "allocate memory" in text else f"{type(error).__name__}: {text}"}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, address_space)


def _limit(kind: int, soft: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


if __name__ == "__main__":
    _serve(sys.argv[1])
