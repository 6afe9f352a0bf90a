"""Anonymous host memory of exact size."""

from __future__ import annotations

import contextlib
import mmap


def anonymous_memory(nbytes: int) -> mmap.mmap:
    """Page-aligned zeros, in huge pages where the system has them.

    Direct I/O pins every page it reads into: into small pages the disks measured gave less than half their rate.
    """
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
