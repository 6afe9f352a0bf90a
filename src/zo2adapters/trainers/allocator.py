"""Freed memory that the process keeps: activations and logits of the next step take it again, without a page fault.

glibc gives large blocks back to the system at once, and the system zeroes each page anew when it is asked for again: several
hundred thousand times a step. Told to keep what was freed, it does neither. A process that owns itself may say so, hence the
command does, and the library never.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import replace
from pathlib import Path

import psutil

from zo2core import HostPlan
from zo2core.planning.memory_plan import MemoryPart

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_NEVER = -1  # read as the largest size
_LARGEST = 1 << 30  # bytes of a block that is kept; larger ones are given back as before
_LARGEST_BEFORE = 1 << 25  # what glibc took before 2.35

KEPT = "memory kept by the allocator"


def with_kept_memory(plan: HostPlan, activation_bytes: int) -> HostPlan:
    """Count what a process keeps that does not give freed memory back: as much as activations and logits take, once more.

    What is kept was in use, so the peak hardly rises; but it is kept in pieces, and not every request finds one that fits.

    Args:
        plan: Plan of a run that computes on the host.
        activation_bytes: Bytes that a step's activations and logits take.

    Returns:
        The plan with this part, or with a part of none where the budget has no room for it.
    """
    kept = activation_bytes if activation_bytes <= plan.spare else 0
    part = MemoryPart(KEPT if kept else f"{KEPT}: given back instead", kept)
    return replace(plan, parts=(*plan.parts, part))


def keeps_memory(plan: HostPlan) -> bool:
    """Whether a plan has room for what is kept."""
    return any(part.name == KEPT and part.nbytes > 0 for part in plan.parts)


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for this process; says whether it does. Elsewhere nothing happens."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - raises AttributeError where it is another library
        mallopt = libc.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    is_set = any(mallopt(_M_MMAP_THRESHOLD, size) == 1 for size in (_LARGEST, _LARGEST_BEFORE))
    return is_set and mallopt(_M_TRIM_THRESHOLD, _NEVER) == 1


def peak_memory() -> int:
    """Bytes of host memory that this process had at most; where the system does not say, those that it has."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        # Not getrusage, which counts the process that started this one as well.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return int(psutil.Process().memory_info().rss)
