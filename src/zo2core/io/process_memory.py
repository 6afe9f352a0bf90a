"""This process's memory: how much it has, and how what it has freed goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from functools import cache
from pathlib import Path

import psutil

_IS_MACOS = sys.platform == "darwin"


@cache
def _process(number: int) -> psutil.Process:
    return psutil.Process(number)


def resident_memory() -> int:
    """Resident bytes of this process."""
    return int(_process(os.getpid()).memory_info().rss)


def peak_memory() -> int:
    """Peak of this process's resident bytes; the present ones on systems that do not record it."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        # On Linux, getrusage would include the memory of the process that started this one.
        lines = os.fsdecode(Path("/proc/self/status").read_bytes()).splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    if _IS_MACOS:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes there
    return resident_memory()


def memory_in_use() -> int:
    """Resident bytes of this process, without what it has freed and will use again before it grows.

    What an allocator keeps would otherwise count twice in the plan of a later run: as part of the
    process, and as the run's.
    """
    return_freed_memory()
    return resident_memory()


def return_freed_memory() -> None:
    """Return memory that was freed to the system, whole pages of it.

    Without effect where the C library is not glibc.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def set_malloc(option: int, value: int) -> bool:
    """Set an option of glibc's allocator; without effect, and false, with another C library."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - raises AttributeError if the library is not glibc
        return bool(libc.mallopt(option, value) == 1)
    except (OSError, AttributeError, TypeError):
        return False


def make_room(limit: int, nbytes: int) -> None:
    """Return freed memory to the system, if the process would exceed its limit with so many bytes
    more.

    An allocator keeps what is freed, since the next activations are as large. It keeps more than
    was ever in use at a time: inputs that stay lie between activations that go, and blocks aligned
    for vector instructions are seldom reused whole.
    """
    if resident_memory() + nbytes > limit:
        return_freed_memory()
