"""This process's memory: how much it has, and how what it has freed goes back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import os
from functools import cache

import psutil


@cache
def _process(number: int) -> psutil.Process:
    return psutil.Process(number)


def resident_memory() -> int:
    """Resident bytes of this process."""
    return int(_process(os.getpid()).memory_info().rss)


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


def make_room(limit: int, nbytes: int) -> None:
    """Return freed memory to the system, if the process would exceed its limit with so many bytes
    more.

    An allocator keeps what is freed, since the next activations are as large. It keeps more than
    was ever in use at a time: inputs that stay lie between activations that go, and blocks aligned
    for vector instructions are seldom reused whole.
    """
    if resident_memory() + nbytes > limit:
        return_freed_memory()
