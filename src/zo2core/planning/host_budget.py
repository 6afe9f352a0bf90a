"""Free host memory, from the system and from the control groups that limit this process."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from zo2core.errors import OptionError
from zo2core.io.process_memory import resident_memory as resident_memory

_UNITS = {"": 1, "B": 1} | {f"{prefix}{unit}": base ** (i + 1) for i, prefix in enumerate("KMGT") for unit, base in (
    ("B", 1000), ("iB", 1024), ("", 1024)
)}  # fmt: skip
_MOST = float(2**63)  # bytes, the size of the address space


def parse_size(size: int | str, *, option: str = "memory") -> int:
    """Parse a size such as ``6GiB``, ``500MB``, ``1.5 GiB`` or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", str(size).strip())
    nbytes = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else 0.0
    if not 1 <= nbytes < _MOST:
        raise OptionError(
            option,
            found=reprlib.repr(size),
            expected="a size such as 6GiB or 500MB, or 'auto' for memory",
            remedy="pass a number of bytes, or one with a unit such as GiB",
        )
    return int(nbytes)


def free_memory(*, root: Path = Path("/")) -> int:
    """Bytes of host memory that this process can still allocate without being killed or swapped."""
    return min([psutil.virtual_memory().available, *_control_groups_free(root)])


def _control_groups_free(root: Path) -> Iterator[int]:
    """Yield the bytes left by each limit on this process; the kernel frees page cache first, so it counts as free."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            yield from _group_free(
                root / "sys/fs/cgroup", path, "memory.max", "memory.current", ("inactive_file", "active_file")
            )
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _group_free(root / "sys/fs/cgroup/memory", path, *names, ("total_inactive_file", "total_active_file"))


def _group_free(top: Path, path: str, limit_name: str, usage_name: str, cache_names: tuple[str, ...]) -> Iterator[int]:
    """Yield the bytes left in this group and those above it; in the top one if a container hides the path."""
    group = top / path.lstrip("/")
    groups = [group, *group.parents] if group.is_dir() else [top]
    for nested in groups:
        if nested != top and top not in nested.parents:
            return
        try:
            limit = int((nested / limit_name).read_text())
            usage = int((nested / usage_name).read_text())
            stat = dict(line.split() for line in (nested / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # "max", or no limit at this level
        cache = sum(int(stat.get(name, 0)) for name in cache_names)
        yield max(limit - usage + cache, 0)
