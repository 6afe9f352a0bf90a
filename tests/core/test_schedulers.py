"""What every scheduler promises: each segment once, replay before evaluate, every bucket
released.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engines import Proxy
from segments import CheckingSource, CountingWeights, TwoStepVisitor, checkpoint, layouts, tensors
from threaded_device import ThreadedDevice, ThreadedStreams

from zo2core import HostDevice, OverlappedScheduler, SegmentStore, SerialScheduler
from zo2core.errors import OptionError
from zo2core.protocols import BlockSource, Device, Scheduler, Store
from zo2core.types import Bucket

Make = Callable[[BlockSource, Device], Scheduler]

OWNED = [["p0"], ["p1", "p2"], ["p3"], ["p4"]]  # the parameters of each segment

# To add a scheduler: one row.
SCHEDULERS: dict[str, Make] = {
    "serial": SerialScheduler,
    "overlapped": OverlappedScheduler,
    "overlapped, a block kept": partial(OverlappedScheduler, kept=1),
    "overlapped, all blocks kept": partial(OverlappedScheduler, kept=2),
}


def threaded(rng: random.Random | None = None) -> ThreadedDevice:
    rng = random.Random(0) if rng is None else rng
    return ThreadedDevice(ThreadedStreams(lambda lane, nbytes: rng.choice([0.0, 0.002])))


DEVICES: dict[str, Callable[[], Device]] = {"in place": HostDevice, "behind copies": threaded}

every_device = pytest.mark.parametrize("on", DEVICES.values(), ids=DEVICES)

every_scheduler = pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)


class RecordingSource(Proxy):
    def __init__(self, inner: BlockSource) -> None:
        super().__init__(inner)
        self.inner = inner
        self.out: set[int] = set()

    def acquire(self, index: int) -> Bucket:
        assert index not in self.out
        self.out.add(index)
        return self.inner.acquire(index)

    def release(self, bucket: Bucket, version: int | None) -> None:
        self.out.remove(bucket.segment)
        self.inner.release(bucket, version)


class RecordingVisitor(TwoStepVisitor):
    """A visitor that notes its visits and can fail at one of them."""

    def __init__(self, source: RecordingSource, fail_at: tuple[str, int] | None = None) -> None:
        self.source = source
        self.fail_at = fail_at
        self.visits: list[tuple[str, int]] = []

    def replay(self, index: int, store: Store, version: int) -> int:
        store[0].add_(0.5)
        self.note("replay", index)  # where it fails, half of the change is made
        store[0].add_(0.5)
        return version + 1

    def evaluate(self, index: int, store: Store) -> None:
        self.note("evaluate", index)
        assert not bool((store[0] != store[0]).any()), "what is evaluated is there"

    def note(self, what: str, index: int) -> None:
        if self.fail_at == (what, index):
            raise ZeroDivisionError
        self.visits.append((what, index))


def recording_source(folder: Path, **options: Any) -> RecordingSource:
    folder.mkdir(exist_ok=True)
    return RecordingSource(SegmentStore(*checkpoint(folder), HostDevice().host_memory, **options))


def contents(source: RecordingSource, scheduler: Scheduler) -> list[torch.Tensor]:
    """Everything, as the buckets hold it after the scheduler gave back what it has."""
    scheduler.release_all()
    assert source.out == set()
    found = []
    for index in range(4):
        bucket = source.inner.acquire(index)
        found.append(torch.cat([*bucket.views, torch.tensor([float(bucket.version)])]))
        source.inner.release(bucket, bucket.version)
    return found


class Bench(NamedTuple):
    source: Any  # a RecordingSource
    scheduler: Scheduler


@contextmanager
def benched(make: Make, on: Callable[[], Device], source: Any) -> Iterator[Bench]:
    device = on()
    yield (made := Bench(source, make(source, device)))
    made.scheduler.release_all()
    assert source.out == set()
    device.close()
    source.close()


class AddingVisitor(TwoStepVisitor):
    """Adds one at each visit; or up to the present version, as replaying does, whatever version a
    segment comes at.
    """

    def __init__(self, present: int | None = None) -> None:
        self.present = present
        self.visits: list[int] = []

    def replay(self, index: int, store: Store, version: int) -> int:
        assert self.present is None or store[0][-1].item() == index + version
        replayed = version + 1 if self.present is None else self.present
        store[0].add_(replayed - version)
        return replayed

    def evaluate(self, index: int, store: Store) -> None:
        self.visits.append(index)
        assert self.present is None or store[0][-1].item() == index + self.present


@pytest.fixture
def bench(make: Make, on: Callable[[], Device], tmp_path: Path) -> Iterator[Bench]:
    with benched(make, on, recording_source(tmp_path)) as made:
        yield made


@every_device
@every_scheduler
@pytest.mark.parametrize("buckets", [None, 1, 2, 3])
def test_segments_are_visited_once_in_order(
    make: Make, on: Callable[[], Device], buckets: int | None, tmp_path: Path
) -> None:
    with benched(make, on, recording_source(tmp_path, buckets=buckets)) as (source, scheduler):
        for _ in range(3):
            visitor = RecordingVisitor(source)
            scheduler.sweep(visitor.visit, range(4))
            assert [index for what, index in visitor.visits if what == "evaluate"] == [0, 1, 2, 3]
            assert all(
                visitor.visits.index(("replay", i)) < visitor.visits.index(("evaluate", i))
                for i in range(4)
            )
            assert len(visitor.visits) == 8
        some = RecordingVisitor(source)
        scheduler.sweep(some.visit, [2])
        assert some.visits == [("replay", 2), ("evaluate", 2)]


@every_device
@every_scheduler
def test_bytes_and_versions_are_the_serial_ones(
    make: Make, on: Callable[[], Device], tmp_path: Path
) -> None:
    for settles in ([0, 1, 2, 3], [3]):
        with benched(make, on, recording_source(tmp_path / f"{settles}")) as (source, scheduler):
            for sweep in range(4):
                scheduler.sweep(RecordingVisitor(source).visit, range(4))
                if sweep in settles:
                    for index, found in enumerate(contents(source, scheduler)):
                        assert found[-1] == sweep + 1
                        first = found[0] - torch.cat([tensors()[name] for name in OWNED[index]])[0]
                        assert first == sweep + 1, (
                            "one was added to the first parameter at each visit"
                        )


@every_device
def test_what_came_in_ahead_makes_room_for_another_order(on: Callable[[], Device]) -> None:
    device, source = on(), CheckingSource()
    scheduler, visitor = OverlappedScheduler(source, device), AddingVisitor()
    for order in (range(7), [4], [3, 5], range(7)):
        # the first blocks are there ahead when the fourth is asked for
        scheduler.sweep(visitor.visit, order)
    scheduler.release_all()
    assert visitor.visits == [*range(7), 4, 3, 5, *range(7)]
    assert source.errors == []
    device.close()


@every_device
@every_scheduler
def test_a_segment_is_replayed_into_its_bucket(bench: Bench) -> None:
    source, scheduler = bench
    for sweep in range(3):  # before the first one nothing is on the device
        for index in range(4):
            with scheduler.replayed(RecordingVisitor(source).replay, index) as bucket:
                assert bucket.segment == index
                assert bucket.views[0][0] == tensors()[OWNED[index][0]][0] + 2 * sweep + 1
            assert index not in source.out
        scheduler.sweep(RecordingVisitor(source).visit, range(4))
    for index in range(4):
        with (
            pytest.raises(ZeroDivisionError),
            scheduler.replayed(RecordingVisitor(source, ("replay", index)).replay, index),
        ):
            pass


@every_device
@every_scheduler
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("what", ["replay", "evaluate"])
def test_a_failing_visit_releases_every_bucket(bench: Bench, what: str, index: int) -> None:
    source, scheduler = bench
    with pytest.raises(ZeroDivisionError):
        scheduler.sweep(RecordingVisitor(source, (what, index)).visit, range(4))
    for each, found in enumerate(contents(source, scheduler)):
        replayed = each < index or (each == index and what == "evaluate")
        assert found[-1] == (1 if replayed else 0), (
            "half-replayed bytes are lost, evaluated ones are not"
        )
        assert found[0] == tensors()[OWNED[each][0]][0] + found[-1]
    scheduler.sweep(RecordingVisitor(source).visit, range(4))


@every_device
@every_scheduler
@pytest.mark.parametrize("position", range(1, 5))
def test_an_interrupt_releases_every_bucket(
    make: Make, on: Callable[[], Device], position: int, tmp_path: Path
) -> None:
    class InterruptedSource(RecordingSource):
        calls = 0

        def prefetch(self, order: Sequence[int]) -> int:
            self.calls += 1
            if self.calls == position + 2:  # one call at the beginning, and one before each visit
                raise KeyboardInterrupt
            return self.inner.prefetch(order)

    order = [0, 1, 0, 1, 0]
    # with fewer buckets than blocks, each visit says what is needed next
    inner = recording_source(tmp_path, buckets=1).inner
    with benched(make, on, InterruptedSource(inner)) as (source, scheduler):
        with pytest.raises(KeyboardInterrupt):
            scheduler.sweep(RecordingVisitor(source).visit, order)
        scheduler.release_all()
        assert source.out == set()
        scheduler.sweep(RecordingVisitor(source).visit, range(4))


@every_device
@every_scheduler
def test_bytes_go_back_when_the_visit_commits_them_and_not_otherwise(bench: Bench) -> None:
    class CommittingLate(RecordingVisitor):
        """Changes a segment after its forwards, as an update that is fused into a backward pass
        does.
        """

        def visit(
            self, index: int, store: Store, version: int, commit: Callable[[int], None]
        ) -> None:
            self.evaluate(index, store)
            commit(self.replay(index, store, version))

    class Looking(RecordingVisitor):
        """Commits nothing, as an evaluation that changes nothing."""

        def visit(
            self, index: int, store: Store, version: int, commit: Callable[[int], None]
        ) -> None:
            self.evaluate(index, store)

    source, scheduler = bench
    scheduler.sweep(CommittingLate(source).visit, range(4))
    scheduler.sweep(Looking(source).visit, range(4))
    assert [found[-1] for found in contents(source, scheduler)] == [1, 1, 1, 1], (
        "one change, which was kept"
    )
    with pytest.raises(ZeroDivisionError):
        scheduler.sweep(CommittingLate(source, ("replay", 2)).visit, range(4))
    found = contents(source, scheduler)
    assert [own[-1] for own in found[:2]] == [2, 2]
    assert found[2][-1] < 2, "a change that failed half-way is lost"
    assert all(own[0] == tensors()[OWNED[index][0]][0] + own[-1] for index, own in enumerate(found))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("buckets", "kept", "reads"), [(1, 6, 6), (3, 0, 12), (3, 6, 6), (3, 11, 0), (8, 6, 0)]
)
def test_a_sweep_reads_blocks_that_neither_the_device_nor_a_bucket_keeps(
    buckets: int, kept: int, reads: int
) -> None:
    weights, device, visitor, present = CountingWeights(), threaded(), AddingVisitor(1), 1
    source = SegmentStore(weights, layouts(blocks=12), HostDevice().host_memory, buckets=buckets)
    scheduler, order = OverlappedScheduler(source, device, kept=kept), range(14)
    scheduler.sweep(visitor.visit, order)
    time.sleep(0.2)  # until what comes first in the next sweep is read ahead
    before = weights.reads.total()
    for present in (2, 3, 4):
        visitor.present = present
        scheduler.sweep(visitor.visit, order)
    time.sleep(0.2)
    # A bucket that is still in use when a sweep ends is filled in the next one: one block more or
    # fewer comes ahead.
    assert abs(weights.reads.total() - before - 3 * reads) <= 1
    assert weights.reads[0] == weights.reads[13] == 1, "embedding and head stay"
    for index in order:
        with scheduler.replayed(visitor.replay, index) as bucket:
            assert bucket.views[0][0].item() == index + present
    scheduler.release_all()
    device.close()
    source.close()


@every_device
def test_the_source_is_told_what_is_acquired_next(on: Callable[[], Device], tmp_path: Path) -> None:
    class ToldSource(RecordingSource):
        told: Sequence[int] = ()
        missed = 0

        def prefetch(self, order: Sequence[int]) -> int:
            assert len(set(order)) == len(order)
            self.told = list(order)
            return self.inner.prefetch(order)

        def acquire(self, index: int) -> Bucket:
            self.missed += index != self.told[0]
            self.told = self.told[1:]
            return super().acquire(index)

    for number, make in enumerate(SCHEDULERS.values()):
        with benched(make, on, ToldSource(recording_source(tmp_path / f"{number}").inner)) as (
            source,
            scheduler,
        ):
            for _ in range(3):
                scheduler.sweep(RecordingVisitor(source).visit, range(4))
            for index in range(4):
                with scheduler.replayed(RecordingVisitor(source).replay, index):
                    pass
            assert source.missed == 0


@pytest.mark.parametrize("kept", [-1, 3])
def test_more_blocks_than_there_are_cannot_be_kept(kept: int, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="kept"):
        OverlappedScheduler(recording_source(tmp_path).inner, HostDevice(), kept=kept)
