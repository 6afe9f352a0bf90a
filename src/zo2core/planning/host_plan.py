"""Which parts of a run stand in host memory, and what they take: decided before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from zo2core.errors import OptionError
from zo2core.io.direct_file import STAGING, whole_pages
from zo2core.planning.autotune import replay_seconds, write_back_interval, write_bytes_per_second
from zo2core.planning.host_budget import free_memory, parse_size, resident_memory
from zo2core.planning.memory_plan import Account, Part
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import BlockModel, BlockSource, NoiseGenerator
from zo2core.sources import PinnedSource, StreamedSource
from zo2core.sources.loader import READERS, laid_out_as_on_disk
from zo2core.sources.reading_order import READ_AHEAD
from zo2core.sources.scratch import Scratch
from zo2core.sweep.work_buffer import noise_bytes, work_bytes
from zo2core.types import BlockLayout

# Note: Headroom. What the allocators of Python and torch keep beside what is counted here, and what other programs may
# take in the meantime.
AUTO_SHARE = 0.9  # of the free memory

MOST_USEFUL_BUCKETS = 1 + READ_AHEAD  # more only keep blocks


@dataclass(frozen=True)
class Arrangement(Account):
    """A way to hold a run in host memory; the sum of its parts is the expected peak of resident bytes."""

    buckets: int | None  # of a StreamedSource; None: every block is resident, a PinnedSource
    keep_noise: bool  # z is held from one evaluation to the next

    @property
    def spare(self) -> int:
        """Bytes that are left."""
        return self.budget - self.nbytes

    def source(
        self,
        model: BlockModel,
        noise: NoiseGenerator,
        host_memory: Callable[[int], torch.Tensor],
        chain: Callable[[int], int | None],
        *,
        timeline: Timeline,
        scratch: Path | str | None,
        write_back_every: int | Literal["auto"] | None,
        snapshot_every: int | None,
        in_place: bool,
    ) -> BlockSource:
        """Build the source that this arrangement speaks of.

        Args:
            model: Whose segments.
            noise: Whose speed an automatic lag is weighed against.
            host_memory: Allocates: ``Device.host_memory``.
            chain: Version to the journal's checksum.
            timeline: Takes down reads and writes.
            scratch: Directory to write back to.
            write_back_every: Versions that a segment may lag; "auto" measures.
            snapshot_every: The same, at most.
            in_place: Updates are replayed with MeZO's walk.

        Raises:
            ScratchError: if the directory cannot be written to.
        """
        layouts, every = model.layouts, write_back_every
        if self.buckets is not None:
            layouts = laid_out_as_on_disk(layouts, model.weights)
        if scratch is not None and every == "auto":
            replay = replay_seconds(noise, layouts, in_place=in_place)
            write = sum(layout.nbytes for layout in layouts) / write_bytes_per_second(Path(scratch))
            every = write_back_interval(replay, write, resident=self.buckets is None)
        lag = min((limit for limit in (every, snapshot_every) if isinstance(limit, int)), default=None)
        opened = None if scratch is None else Scratch(Path(scratch), layouts, chain)
        try:
            options: Any = {"scratch": opened, "write_back_every": lag, "timeline": timeline}
            if self.buckets is None:
                return PinnedSource(model.weights, layouts, host_memory, **options)
            return StreamedSource(model.weights, layouts, host_memory, buckets=self.buckets, **options)
        except BaseException:
            if opened is not None:
                opened.close()
            raise


def check_lags(
    source: BlockSource | None,
    scratch: Path | str | None,
    write_back_every: int | Literal["auto"] | None,
    snapshot_every: int | None,
) -> None:
    """Refuse lags that cannot be, and options that a source which was passed would not hear of.

    Raises:
        OptionError: naming the option.
    """
    for name, value in (("write_back_every", write_back_every), ("snapshot_every", snapshot_every)):
        if value is None or (name == "write_back_every" and value == "auto"):
            continue
        if not isinstance(value, int) or value < 1 or scratch is None:
            raise OptionError(
                name,
                found=f"{value!r}{'' if scratch is not None else ' and no scratch directory'}",
                expected="at least 1, with a scratch directory",
                remedy="pass scratch=DIRECTORY, or leave the option out",
            )
    if source is not None and scratch is not None:
        raise OptionError("scratch", found="a source as well", expected="one of both", remedy="give the source its scratch")


def arrange(
    layouts: Sequence[BlockLayout],
    *,
    memory: int | str = "auto",
    activation_bytes: int,
    compute_on_host: bool = True,
    may_keep_noise: bool = True,
) -> Arrangement:
    """Choose the fastest arrangement that fits: all blocks resident, else as many buckets as fit, noise kept if it fits.

    Args:
        layouts: Segments in visiting order.
        memory: Bytes the process may have in all, or a size ("6GiB"); "auto" takes what is free.
        activation_bytes: Set aside for activations and logits.
        compute_on_host: Work and noise buffer are host memory, too.
        may_keep_noise: There is a use for a noise buffer; counter-based noise has none.

    Raises:
        MemoryBudgetError: if not even the smallest arrangement fits; it adds up what that needs.
        OptionError: if ``memory`` is no size.
    """
    now = resident_memory()
    budget = now + int(AUTO_SHARE * free_memory()) if memory == "auto" else parse_size(memory)
    blocks = [whole_pages(layout.nbytes) for layout in layouts if not layout.resident]
    resident = sum(whole_pages(layout.nbytes) for layout in layouts if layout.resident)
    largest = max(blocks, default=0)
    work, noise = (work_bytes(layouts), noise_bytes(layouts)) if compute_on_host else (0, 0)
    fixed = (Part("this program, as it is", now), Part("activations, set aside", activation_bytes))

    def counted(buckets: int | None, *, keep_noise: bool) -> Arrangement:
        count = len(blocks) if buckets is None else buckets
        size = sum(blocks) if buckets is None else count * largest
        parts = [
            *fixed,
            Part("embedding and head", resident),
            Part(f"{count} of {len(blocks)} blocks", size),
            Part("work buffer", work),
            Part("noise buffer" if keep_noise else "noise buffer: drawn again instead", noise if keep_noise else 0),
            Part("reading buffers", READERS * STAGING),
        ]
        return Arrangement(tuple(parts), budget, buckets, keep_noise)

    choices: list[tuple[int | None, bool]] = [(None, True), (None, False)]
    choices += [(buckets, True) for buckets in range(len(blocks) - 1, 1, -1)]
    choices += [(buckets, False) for buckets in range(min(MOST_USEFUL_BUCKETS, len(blocks) - 1), 0, -1)]
    if not may_keep_noise:
        choices = [(buckets, False) for buckets in (None, *range(len(blocks) - 1, 0, -1))]
    found = [counted(buckets, keep_noise=keep_noise) for buckets, keep_noise in choices]
    for arrangement in found:
        if arrangement.nbytes <= budget:
            return arrangement
    raise found[-1].too_large("memory", "free memory, allow more, or take smaller batches or a 16-bit dtype")
