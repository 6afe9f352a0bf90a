"""The limit of a process's memory, within which memory that was freed may be kept for later."""

from __future__ import annotations

from dataclasses import dataclass

from zo2core.io.process_memory import resident_memory, return_freed_memory


@dataclass(frozen=True)
class MemoryLimit:
    """Returns freed memory to the system where it would make the process larger than planned.

    An allocator keeps what is freed, since the next activations are as large. It keeps more than was ever in use at a time:
    inputs that stay lie between activations that go, and blocks aligned for vector instructions are seldom reused whole.
    """

    nbytes: int | None  # resident bytes of the process; None: no limit

    def make_room(self, nbytes: int) -> None:
        """Return what was freed, if the process would exceed its limit with so many bytes more."""
        if self.nbytes is not None and resident_memory() + nbytes > self.nbytes:
            return_freed_memory()
