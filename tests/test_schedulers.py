"""What every scheduler promises: each segment once, replay before evaluate, every bucket released."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from test_sources import checkpoint

from zo2core import HostDevice, PinnedSource, SerialScheduler
from zo2core.protocols import BlockSource, Device, Scheduler, Store
from zo2core.types import BlockLayout, Bucket

Make = Callable[[BlockSource, Device], Scheduler]

SCHEDULERS: dict[str, Make] = {"serial": SerialScheduler}

every_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)


class RecordingSource:
    """A source that notes what is acquired and released."""

    def __init__(self, inner: BlockSource) -> None:
        self.inner = inner
        self.events: list[tuple[str, int, int | None]] = []
        self.out: set[int] = set()

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        return self.inner.layouts

    def prefetch(self, index: int) -> None:
        self.inner.prefetch(index)

    def acquire(self, index: int) -> Bucket:
        assert index not in self.out
        self.out.add(index)
        bucket = self.inner.acquire(index)
        self.events.append(("acquire", index, bucket.version))
        return bucket

    def release(self, bucket: Bucket, version: int | None) -> None:
        self.out.remove(bucket.segment)
        self.events.append(("release", bucket.segment, version))
        self.inner.release(bucket, version)

    def close(self) -> None:
        self.inner.close()


class RecordingVisitor:
    """A visitor that notes its visits and can fail at one of them."""

    def __init__(self, source: RecordingSource, fail_at: tuple[str, int] | None = None) -> None:
        self.source = source
        self.fail_at = fail_at
        self.visits: list[tuple[str, int]] = []

    def replay(self, index: int, store: Store, version: int) -> int:
        self.note("replay", index)
        store[0].add_(1)
        return version + 1

    def evaluate(self, index: int, store: Store) -> None:
        self.note("evaluate", index)
        if index == 3:
            assert 0 in self.source.out, "the embedding stays reachable until the head is done"

    def note(self, what: str, index: int) -> None:
        if self.fail_at == (what, index):
            raise ZeroDivisionError
        self.visits.append((what, index))


def recording_source(folder: Path) -> RecordingSource:
    return RecordingSource(PinnedSource(*checkpoint(folder), HostDevice().host_memory))


@every_scheduler
def test_each_segment_is_visited_once_in_order_replay_first(make: Make, tmp_path: Path) -> None:
    source = recording_source(tmp_path)
    visitor = RecordingVisitor(source)
    make(source, HostDevice()).sweep(visitor, range(4))
    assert [index for what, index in visitor.visits if what == "evaluate"] == [0, 1, 2, 3]
    assert all(visitor.visits.index(("replay", i)) < visitor.visits.index(("evaluate", i)) for i in range(4))
    assert len(visitor.visits) == 8
    source.close()


@every_scheduler
def test_every_bucket_is_released_with_its_new_version(make: Make, tmp_path: Path) -> None:
    source = recording_source(tmp_path)
    scheduler = make(source, HostDevice())
    for sweep in range(1, 4):
        scheduler.sweep(RecordingVisitor(source), range(4))
        assert source.out == set()
        for index in range(4):
            bucket = source.inner.acquire(index)
            assert bucket.version == sweep
            source.inner.release(bucket, bucket.version)
    source.close()


@every_scheduler
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("what", ["replay", "evaluate"])
def test_a_failing_visit_releases_every_bucket(make: Make, what: str, index: int, tmp_path: Path) -> None:
    source = recording_source(tmp_path)
    scheduler = make(source, HostDevice())
    with pytest.raises(ZeroDivisionError):
        scheduler.sweep(RecordingVisitor(source, (what, index)), range(4))
    assert source.out == set()
    released = {segment: version for kind, segment, version in source.events if kind == "release"}
    assert released[index] == (None if what == "replay" else 1)  # half-replayed bytes are lost, evaluated ones are not
    assert all(released[other] == 1 for other in range(index))
    scheduler.sweep(RecordingVisitor(source), range(4))
    source.close()


@every_scheduler
def test_a_sweep_may_visit_some_segments_only(make: Make, tmp_path: Path) -> None:
    source = recording_source(tmp_path)
    visitor = RecordingVisitor(source)
    make(source, HostDevice()).sweep(visitor, [2])
    assert visitor.visits == [("replay", 2), ("evaluate", 2)]
    assert source.out == set()
    source.close()
