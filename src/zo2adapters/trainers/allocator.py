"""Settings that let the process keep freed memory, so that the next step's activations reuse it without page faults.

By default glibc returns large blocks to the system as soon as they are freed, and the system zeroes their pages again when
they are next allocated: several hundred thousand pages a step. The setting applies to the whole process, so the command
``zo2 train`` makes it and the library never does.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from zo2core import HostPlan


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of malloc.h
_NEVER = -1  # glibc converts it to the largest size
LARGEST = 1 << 30  # bytes of the largest block that is kept; larger blocks are returned to the system
SMALL = 1 << 25  # the same where graphs take all spare memory, and the largest value that glibc accepts before 2.35

KEPT = "memory kept by the allocator"


def with_kept_memory(plan: HostPlan, activation_bytes: int) -> HostPlan:
    """Add the freed memory that the process keeps: as much as activations and logits need, once more.

    Most of it was in use before, so the peak hardly rises; but it is fragmented, and not every allocation fits into it.
    """
    from zo2core.planning.memory import MemoryPart

    kept = activation_bytes if activation_bytes <= plan.spare else 0
    part = MemoryPart(KEPT if kept else f"{KEPT}: none, returned to the system", kept)
    return replace(plan, parts=(*plan.parts, part))


def keeps_memory(plan: HostPlan) -> bool:
    """Whether the plan has room for freed memory that is kept."""
    return any(part.name == KEPT and part.nbytes > 0 for part in plan.parts)


def keep_freed_memory(largest: int = LARGEST) -> bool:
    """Tell glibc to keep freed memory for this process. Other C libraries are left alone."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - raises AttributeError if the library is not glibc
        mallopt = libc.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    is_set = any(mallopt(_M_MMAP_THRESHOLD, size) == 1 for size in (largest, SMALL))
    return is_set and mallopt(_M_TRIM_THRESHOLD, _NEVER) == 1


def peak_memory() -> int:
    """Peak host memory of this process in bytes; its present memory on systems that do not record the peak."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        # getrusage would include the memory of the process that started this one.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return int(psutil.Process().memory_info().rss)
