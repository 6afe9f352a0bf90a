"""The child's side: a task's ``answer`` is called on one request after the other, each under limits of memory and time.

Run by its path, with the path of the task's file as argument, and not as a module of this package, whose import would take
seconds: it and the tasks import nothing of ours. A request is a line of JSON on standard input, {"request", "memory",
"seconds"}; the answer is a line on standard output, {"answer"} or {"failure"}. A first line, {}, says that all is imported.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

MEMORY = "it takes more memory than allowed"
_TEXT = 500  # characters of an error that are passed on


def main() -> None:
    """Import the task and serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    spec = importlib.util.spec_from_file_location("task", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = task
    spec.loader.exec_module(task)
    answers.write(b"{}\n")
    answers.flush()
    for line in sys.stdin.buffer:
        result = _limited(task.answer, **json.loads(line))
        answers.write(json.dumps(result).encode() + b"\n")
        answers.flush()


def _limited(answer: Callable[[Any], Any], request: Any, *, memory: int, seconds: float) -> dict[str, Any]:
    address_space = resource.getrlimit(resource.RLIMIT_AS)
    held = _address_space()
    if held is not None:
        _limit(resource.RLIMIT_AS, held + memory)
    # In whole seconds; the system ends a process that goes beyond, wherever it is.
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))
    try:
        return {"answer": answer(request)}
    except MemoryError:
        return {"failure": MEMORY}
    except Exception as error:  # any: it is told to the process that asked, which raises it
        text = " ".join(str(error).split())[:_TEXT]
        return {"failure": MEMORY if "allocate memory" in text else f"{type(error).__name__}: {text}"}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, address_space)


def _limit(kind: int, soft: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _address_space() -> int | None:
    """Bytes of addresses in use; None where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return None


if __name__ == "__main__":
    main()
