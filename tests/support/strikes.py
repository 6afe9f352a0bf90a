"""What a process does before the command in which it is to be killed: it dies at a call, or tells
how far it is.

Imported by forked processes: of a function here, ``beforehand`` makes the Python that such a
process runs first.
"""

import fcntl
import importlib
import itertools
import json
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any, NoReturn

TRAINER, METRICS = "zo2adapters.trainers.trainer", "zo2adapters.trainers.metrics"
JOURNAL, SNAPSHOTS = "zo2core.journal.journal", "zo2core.journal.snapshots"
# of os: what changes files
WRITES = ("pwrite", "fsync", "fdatasync", "ftruncate", "replace", "rename", "mkdir")
# seconds after each of them, where the clock kills: so it hits files more often than the arithmetic
PAUSE = 0.001
PAGE = 4096
MARKED = {  # phases of a process, with the functions during which it is in them
    "snapshot or commit": (
        (SNAPSHOTS, "Snapshots", "write"),
        ("zo2core", "Engine", "commit"),
        ("zo2core.estimators.factors", "FactorFile", "keep"),
    ),
    "evaluation": (
        ("zo2core", "Engine", "evaluate"),
        ("zo2adapters.tasks.task", "RewardTask", "evaluate"),
    ),
    "step": (("zo2core", "Engine", "step"), ("zo2adapters.tasks.task", "RewardTask", "step")),
    "record": ((JOURNAL, "Journal", "append"),),
    "generation": (("zo2adapters.tasks.generation", "Generation", "continuations"),),
    "rewards": (("zo2adapters.tasks.rewards", "Rewards", "of"),),
}
PHASES = ("start-up", "outside of a step", *MARKED)
STEP = PHASES.index("step")  # those after it are parts of a step, and are told apart nowhere else


def beforehand(function: Callable[..., None], *arguments: object, **options: object) -> str:
    """Python that calls a function of this module."""
    return f"import strikes\nstrikes.{function.__name__}(*{arguments!r}, **{options!r})\n"


def strike(module: str, owner: str, name: str, at: int, moment: str) -> str:
    """Python that kills its process at a call: before it, after it, or with half of what it writes;
    or sends it SIGTERM.
    """
    return beforehand(die_at_call, module, owner, name, at, moment)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived SIGKILL")


def die_at_call(module: str, owner: str, name: str, at: int, moment: str) -> None:
    place: Any = importlib.import_module(module)
    place = getattr(place, owner) if owner else place
    real, calls = getattr(place, name), itertools.count(1)

    def struck(*args: Any, **kwargs: Any) -> Any:
        met = moment if next(calls) == at else None  # one step of the interpreter: threads call too
        if met == "before":
            die()
        if met == "half":
            path, content = args
            whole = b"".join(content)
            path.with_name("." + path.name + ".partial").write_bytes(whole[: len(whole) // 2])
            die()
        if met == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        result = real(*args, **kwargs)
        if met == "after":
            die()
        return result

    setattr(place, name, struck)


def die_at_write(at: int | None = None, file: str | None = None, *, pauses: bool = False) -> None:
    """Count the calls that change files, for who has mapped the file ``calls``, and die in the
    middle of one of them.

    Args:
        at: The call, from 1; at one without a middle it dies after it.
        file: Count only writes to files of this name.
        pauses: Whether each call takes a while, and leaves a half first.
    """
    with open("calls", "r+b") as mapped:
        shared = mmap.mmap(mapped.fileno(), 8)
    # main and writing thread
    calls, counted, lock = itertools.count(1), itertools.count(1), threading.Lock()

    def wrap(real: Callable[..., Any], half: Callable[..., object] | None) -> Callable[..., Any]:
        def struck(*args: Any, **kwargs: Any) -> Any:
            with lock:
                struct.pack_into("<q", shared, 0, next(calls))
                is_counted = file is None or (half is not None and _name_of(args[0]) == file)
                dies = is_counted and next(counted) == at
            if half is not None and (dies or (pauses and half is write_half)):
                half(*args)
                if dies:
                    die()
                time.sleep(PAUSE)  # the whole write follows; between them the clock may strike
            try:
                return real(*args, **kwargs)
            finally:  # also if a directory is there already
                if dies:
                    die()
                if pauses:
                    time.sleep(PAUSE)

        return struck

    write_half = _half_of(os.pwrite)
    metrics: Any = importlib.import_module(METRICS)
    metrics.write_row = wrap(metrics.write_row, _half_row)
    for name in WRITES:
        setattr(os, name, wrap(getattr(os, name), write_half if name == "pwrite" else None))


def _name_of(opened: int | IO[Any]) -> str:
    """The name of an open file."""
    descriptor = opened if isinstance(opened, int) else opened.fileno()
    return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))


def _half_of(pwrite: Callable[[int, bytes, int], int]) -> Callable[[int, bytes, int], None]:
    def half(descriptor: int, data: bytes, offset: int) -> None:
        count = len(data) // 2
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            count -= count % PAGE  # direct I/O takes whole pages only
        pwrite(descriptor, data[:count], offset)

    return half


def _half_row(file: IO[Any], record: dict[str, Any]) -> None:
    line = json.dumps(record).encode()
    os.write(file.fileno(), line[: len(line) // 2])


def mark_phases() -> None:
    """Keep the number of the present phase in the file ``phase``."""
    with open("phase", "r+b") as mapped:
        phase = mmap.mmap(mapped.fileno(), 1)

    def mark(number: int, module: str, owner: str, name: str) -> None:
        place = getattr(importlib.import_module(module), owner)
        real = getattr(place, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            before = phase[0]
            phase[0] = number if number <= STEP or before == STEP else before
            result = real(*args, **kwargs)
            phase[0] = before if number > STEP else max(before, 1)
            return result

        setattr(place, name, marked)

    for number, name in enumerate(PHASES):
        for place in MARKED.get(name, ()):
            mark(number, *place)


def arrange(*, is_tight: bool = False, **changes: Any) -> None:
    """Change the plan of host memory: of a tiny model's process nearly all is the interpreter, and
    no budget could.
    """
    spec: Any = importlib.import_module("zo2core.planning.memory")
    plan_host = spec.plan_host

    def planned(*args: Any, **kwargs: Any) -> Any:
        plan = plan_host(*args, **kwargs)
        return replace(plan, **changes, **({"budget": plan.nbytes} if is_tight else {}))

    spec.plan_host = planned


def keep_temporary_files(folder: str) -> None:
    """Let this process's temporary files be in a folder, and its number in the file ``pid``."""
    import tempfile

    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    tempfile.tempdir = os.environ["TMPDIR"] = os.path.abspath(folder)
