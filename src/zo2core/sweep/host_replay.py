"""Replay on the host for a device with its own memory, which receives weights at their present version."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from zo2core.devices import HostDevice
from zo2core.protocols import CounterNoise, Replaying, Scheduler, Store, Visitor
from zo2core.sources.low_bit import LowBitSource
from zo2core.sweep.perturbers import CounterPerturber
from zo2core.sweep.visitor import UpdateLoss
from zo2core.sweep.work_buffer import WorkBuffer
from zo2core.types import BlockLayout, Bucket, Update
from zo2core.updates import Trajectory


class HostReplay:
    """Brings stored segments to the present version with the host's kernels."""

    def __init__(
        self, layouts: Sequence[BlockLayout], noise: CounterNoise, updates: Sequence[Update], update_loss: UpdateLoss
    ) -> None:
        self._layouts, self._noise, self._updates, self._update_loss = layouts, noise, updates, update_loss
        # Only the views and the scratch of this work buffer are used: its own pages are never touched.
        self._buffer = WorkBuffer(layouts, HostDevice(), noise, keep_noise=False, perturbs_in_place=False)
        self._threads = max(1, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="zo2-replay")
        self._perturber: CounterPerturber | None = None

    @torch.inference_mode()
    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the version of the present number of updates. See ``Visitor``."""
        present = len(self._updates)
        if self._perturber is None or self._perturber.version != present:  # a new sweep
            trajectory = Trajectory(self._updates, present, (), zo_eps=1.0, perturb_in_place=True)
            self._perturber = CounterPerturber(self._noise, self._buffer, self._pool, trajectory, helpers=self._threads - 1)
        version = self._perturber.replay(index, {index: store}, version)
        self._update_loss.sample(index, store, self._layouts[index].parameters)
        return version

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()


class LowBitScheduler:
    """A scheduler whose source prepares the blocks again for each sweep, at their present version."""

    def __init__(self, scheduler: Scheduler, source: LowBitSource) -> None:
        self._scheduler, self._source = scheduler, source
        self._interrupted = False  # whether the last sweep failed: the scheduler may then hold buckets of it

    def sweep(self, visitor: Visitor, order: Sequence[int]) -> None:
        """Visit the segments in this order. See the contract."""
        self._interrupted = True
        self._scheduler.sweep(visitor, order)
        self._interrupted = False

    def release_all(self) -> None:
        """Give back all buckets. See the contract."""
        with self._source.only_when_acquired():
            self._scheduler.release_all()
        self._interrupted = False

    @contextmanager
    def replayed(self, visitor: Replaying, index: int) -> Iterator[Bucket]:
        """Bring one segment to the present version, in its stored dtype. See the contract."""
        if self._interrupted:
            self.release_all()
        with self._source.only_when_acquired():
            if index in self._source.low_bit_segments:
                with self._source.stored(index) as bucket:
                    yield bucket
            else:
                with self._scheduler.replayed(visitor, index) as bucket:
                    yield bucket
