"""Which parts of a run stand in host memory, and what they take: decided before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zo2core.budget import free_memory, parse_size, resident_memory
from zo2core.checkpoint import Scratch, whole_pages
from zo2core.checkpoint.ranged import STAGING
from zo2core.errors import MemoryBudgetError
from zo2core.protocols import BlockSource, TensorReader
from zo2core.sources import PinnedSource, StreamedSource
from zo2core.sources.loader import READERS
from zo2core.types import BlockLayout
from zo2core.workspace import work_bytes

# Note: Headroom. What the allocators of Python and torch keep beside what is counted here, and what other programs may
# take in the meantime.
AUTO_SHARE = 0.9  # of the free memory

MOST_USEFUL_BUCKETS = 3  # for reading ahead; more only keep blocks


@dataclass(frozen=True)
class Part:
    """One line of the account."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Arrangement:
    """A way to hold a run in host memory."""

    parts: tuple[Part, ...]
    buckets: int | None  # of a StreamedSource; None: every block is resident, a PinnedSource
    keep_noise: bool  # z is held from one evaluation to the next
    budget: int  # bytes the process may have

    @property
    def nbytes(self) -> int:
        """Expected peak of resident bytes."""
        return sum(part.nbytes for part in self.parts)

    def source(
        self,
        weights: TensorReader,
        layouts: Sequence[BlockLayout],
        host_memory: Callable[[int], torch.Tensor],
        *,
        scratch: Scratch | None,
        write_back_every: int | None,
    ) -> BlockSource:
        """Build the source that this arrangement speaks of. See the sources for the arguments."""
        if self.buckets is None:
            return PinnedSource(weights, layouts, host_memory, scratch=scratch, write_back_every=write_back_every)
        return StreamedSource(
            weights,
            layouts,
            host_memory,
            buckets=self.buckets,
            scratch=scratch,
            write_back_every=write_back_every,
        )

    def table(self) -> str:
        """The parts, one a line, and their sum."""
        rows = [*self.parts, Part("together", self.nbytes), Part("allowed", self.budget)]
        width = max(len(row.name) for row in rows)
        return "\n".join(f"{row.name:{width}s} {row.nbytes / 2**30:9.2f} GiB" for row in rows)


def arrange(
    layouts: Sequence[BlockLayout], *, memory: int | str = "auto", activation_bytes: int, compute_on_host: bool = True
) -> Arrangement:
    """Choose the fastest arrangement that fits: all blocks resident, else as many buckets as fit, noise kept if it fits.

    Args:
        layouts: Segments in visiting order.
        memory: Bytes the process may have in all, or a size ("6GiB"); "auto" takes what is free.
        activation_bytes: Set aside for activations and logits.
        compute_on_host: Work and noise buffer are host memory, too.

    Raises:
        MemoryBudgetError: if not even the smallest arrangement fits; it adds up what that needs.
        OptionError: if ``memory`` is no size.
    """
    now = resident_memory()
    budget = now + int(AUTO_SHARE * free_memory()) if memory == "auto" else parse_size(memory)
    blocks = [whole_pages(layout.nbytes) for layout in layouts if not layout.resident]
    resident = sum(whole_pages(layout.nbytes) for layout in layouts if layout.resident)
    largest = max(blocks, default=0)
    work = work_bytes(layouts) if compute_on_host else 0
    fixed = (Part("this program, as it is", now), Part("activations, set aside", activation_bytes))

    def counted(buckets: int | None, *, keep_noise: bool) -> Arrangement:
        count = len(blocks) if buckets is None else buckets
        size = sum(blocks) if buckets is None else count * largest
        parts = [
            *fixed,
            Part("embedding and head", resident),
            Part(f"{count} of {len(blocks)} blocks", size),
            Part("work buffer", work),
            Part("noise buffer" if keep_noise else "noise buffer: drawn again instead", work if keep_noise else 0),
            Part("reading buffers", READERS * STAGING),
        ]
        return Arrangement(tuple(parts), buckets, keep_noise, budget)

    choices: list[tuple[int | None, bool]] = [(None, True), (None, False)]
    choices += [(buckets, True) for buckets in range(len(blocks) - 1, 1, -1)]
    choices += [(buckets, False) for buckets in range(min(MOST_USEFUL_BUCKETS, len(blocks) - 1), 0, -1)]
    found = [counted(buckets, keep_noise=keep_noise) for buckets, keep_noise in choices]
    for arrangement in found:
        if arrangement.nbytes <= budget:
            return arrangement
    smallest = found[-1]
    parts = ", ".join(f"{part.name} {part.nbytes / 2**30:.2f} GiB" for part in smallest.parts)
    raise MemoryBudgetError(
        "memory",
        found=f"{budget / 2**30:.2f} GiB",
        expected=f"at least {smallest.nbytes / 2**30:.2f} GiB, the smallest arrangement: {parts}",
        remedy="free memory, allow more, or take smaller batches or a 16-bit dtype",
    )
