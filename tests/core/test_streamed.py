"""Streaming and writing back: bounded memory, reading ahead, and what is on disk when."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from counted_weights import BLOCKS, CountingWeights, layouts

from zo2core import BlockLayout, HostDevice, ParameterSpec, SegmentKind, SegmentStore
from zo2core.errors import OptionError, ScratchError
from zo2core.io.direct_file import whole_pages
from zo2core.protocols import BlockSource
from zo2core.sources.segment_store import READERS
from zo2core.sources.slot_file import Scratch


def settled(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Wait for what goes on in the background."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def sweep(source: BlockSource, version: int) -> None:
    source.prefetch(range(BLOCKS + 2))
    for index in range(BLOCKS + 2):
        bucket = source.acquire(index)
        assert bucket.views[0][0].item() == index + 100 * bucket.version
        bucket.views[0].fill_(index + 100 * version)
        source.release(bucket, version)


def make(weights: CountingWeights, buckets: int, scratch: Scratch | None = None, every: int | None = None) -> SegmentStore:
    return SegmentStore(
        weights, layouts(), HostDevice().host_memory, buckets=buckets, scratch=scratch, write_back_every=every
    )


def scratch_in(folder: Path, durable: Callable[[int], int | None] = lambda version: version) -> Scratch:
    return Scratch(folder, layouts(), durable)


@pytest.mark.parametrize("buckets", [None, 1, 2, 3, 5])
def test_it_allocates_its_buckets_or_the_model_in_one_arena_and_no_more(buckets: int | None) -> None:
    asked: list[int] = []

    def host_memory(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return HostDevice().host_memory(nbytes)

    SegmentStore(CountingWeights(), layouts(), host_memory, buckets=buckets).close()
    first, *blocks, last = (whole_pages(layout.nbytes) for layout in layouts())
    assert asked == [first + last + (sum(blocks) if buckets is None else buckets * max(blocks))]


def test_blocks_are_read_ahead_along_the_order_and_round_its_end() -> None:
    weights = CountingWeights()
    source = make(weights, 3)
    source.prefetch([5, 2, 6, 1])
    source.release(source.acquire(5), 0)
    assert settled(lambda: weights.reads[2] == 1 and weights.reads[6] == 1)
    assert weights.reads[1] == 0, "two ahead, no more"
    source.release(source.acquire(2), 0)
    source.release(source.acquire(6), 0)
    assert settled(lambda: weights.reads[1] == 1 and weights.reads[5] == 2), "the next round's first block"
    assert weights.reads[3] == weights.reads[4] == 0, "what is not in the order is not needed"
    source.close()


def test_what_was_not_read_when_a_source_was_closed_does_not_count() -> None:
    weights = CountingWeights()
    specs = tuple(ParameterSpec(f"p{i}", (4,), torch.float32, i, True) for i in range(READERS + 1))
    source = SegmentStore(weights, (BlockLayout("block", SegmentKind.BLOCK, specs),), HostDevice().host_memory)
    weights.go.clear()
    source.prefetch([0])
    loading = source._own[0].state.loading  # type: ignore[union-attr]
    threading.Timer(0.2, weights.go.set).start()
    source.close()
    assert sum(weights.reads.values()) == READERS, "those that had begun"
    assert loading.done()
    with pytest.raises(CancelledError):
        loading.wait()


def test_without_an_order_nothing_is_read_ahead() -> None:
    weights = CountingWeights()
    source = make(weights, 3)
    source.release(source.acquire(2), 0)
    source.close()
    assert weights.reads == {2: 1}


def test_a_bucket_is_taken_from_the_block_that_comes_last_in_the_order() -> None:
    weights = CountingWeights()
    source = make(weights, 3)
    for index in (1, 2, 3):
        source.release(source.acquire(index), 0)
    source.prefetch([3, 4, 2, 1])
    assert settled(lambda: weights.reads[4] == 1)
    assert source.prefetch([3, 4]) == source.prefetch([2]) + 1 == 2, "4 took the bucket of 1"
    source.prefetch([3, 1, 2])  # 4 is not needed any more
    assert settled(lambda: weights.reads[1] == 2)
    assert source.prefetch([3, 1]) == source.prefetch([2]) + 1 == 2
    source.close()
    assert weights.reads == {1: 2, 2: 1, 3: 1, 4: 1}


class SlowWeights(CountingWeights):
    """A base that holds up the reads of one segment only."""

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        if parameter != "p1":
            out.fill_(int(parameter[1:]))
            self.reads[int(parameter[1:])] += 1
        else:
            super().read_into(parameter, out, start)


def test_memory_that_is_read_into_is_not_reused_before_the_reads_have_ended() -> None:
    weights = SlowWeights()
    source = make(weights, 1)
    weights.go.clear()
    source.prefetch([1])
    for _ in range(3):
        assert source.prefetch([2]) == 0, "the only bucket is read into"
        time.sleep(0.01)
    assert weights.reads[2] == 0
    threading.Timer(0.05, weights.go.set).start()
    bucket = source.acquire(2)
    assert weights.reads == {1: 1, 2: 1}
    assert bool((bucket.views[0] == 2).all())
    source.close()


@pytest.mark.parametrize("waits_for", ["its own reads", "another segment's reads"])
def test_an_interrupted_wait_loses_no_bucket(waits_for: str) -> None:
    weights = SlowWeights()
    source = make(weights, 1)
    weights.go.clear()
    if waits_for == "another segment's reads":
        source.prefetch([1])
    threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        source.acquire(1 if waits_for == "its own reads" else 2)
    threading.Timer(0.05, weights.go.set).start()
    bucket = source.acquire(2)
    assert weights.reads == {1: 1, 2: 1}
    assert bool((bucket.views[0] == 2).all()), "late reads of the other segment do not fall into it"
    source.close()


@pytest.mark.parametrize("buckets", [None, 3])
def test_a_source_tells_how_many_segments_are_there(buckets: int | None) -> None:
    weights = CountingWeights()
    source: BlockSource = (
        SegmentStore(weights, layouts(), HostDevice().host_memory) if buckets is None else make(weights, buckets)
    )
    for index in (0, 2):
        source.release(source.acquire(index), 0)
    weights.go.clear()
    assert source.prefetch([2, 3, 0]) == 1, "the second one is still read"
    assert source.prefetch([3, 2, 0]) == 0, "and nothing behind it counts"
    weights.go.set()
    assert settled(lambda: source.prefetch([2, 3, 0]) == 3)
    assert source.prefetch([]) == 0
    source.close()


def test_more_buckets_keep_blocks_from_sweep_to_sweep() -> None:
    reads = {}
    for buckets in (3, 4, 5, BLOCKS):
        weights = CountingWeights()
        source = make(weights, buckets)
        source.prefetch(range(BLOCKS + 2))
        for _ in range(10):
            for index in range(BLOCKS + 2):
                source.release(source.acquire(index), 0)
                time.sleep(0.0005)  # what is read ahead comes in the meantime
        source.close()
        reads[buckets] = sum(weights.reads[index] for index in range(1, BLOCKS + 1))
    assert reads[BLOCKS] == BLOCKS, "all fit: each is read once"
    assert reads[3] > reads[4] > reads[5] > reads[BLOCKS]


def test_resident_segments_are_read_once() -> None:
    weights = CountingWeights()
    source = make(weights, 1)
    for version in range(1, 4):
        sweep(source, version)
    source.close()
    assert weights.reads[0] == weights.reads[BLOCKS + 1] == 1


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("buckets", [None, 1, 3])
def test_segments_are_written_once_they_lag_and_found_again(buckets: int | None, every: int, tmp_path: Path) -> None:
    weights, written = CountingWeights(), scratch_in(tmp_path)
    source: BlockSource = (
        SegmentStore(weights, layouts(), HostDevice().host_memory, scratch=written, write_back_every=every)
        if buckets is None
        else make(weights, buckets, written, every)
    )
    for version in range(1, 8):
        sweep(source, version)
    source.close()
    found = scratch_in(tmp_path)
    for segment in range(BLOCKS + 2):
        assert 7 - every < found.version(segment) <= 7
    reopened = make(weights, 2, found, None)
    for index in range(BLOCKS + 2):
        bucket = reopened.acquire(index)
        assert bucket.version == found.version(index)
        assert bucket.views[0][-1].item() == index + 100 * bucket.version
        reopened.release(bucket, bucket.version)
    reopened.close()


def versions_in(folder: Path) -> set[int]:
    with closing(scratch_in(folder)) as scratch:
        return {scratch.version(segment) for segment in range(BLOCKS + 2)}


def test_without_a_lag_nothing_is_written(tmp_path: Path) -> None:
    source = make(CountingWeights(), 1, scratch_in(tmp_path), None)
    for version in range(1, 5):
        sweep(source, version)
    source.close()
    assert versions_in(tmp_path) == {0}
    assert (tmp_path / "scratch.bin").stat().st_blocks == 0


def remove_bytes(folder: Path) -> None:
    (folder / "scratch.bin").unlink()


@pytest.mark.parametrize(
    ("change", "chain"),
    [
        (lambda folder: None, lambda version: version if version <= 2 else None),  # updates that the journal has lost
        (lambda folder: None, lambda version: version + 1000),  # another run's
        (remove_bytes, lambda version: version),
    ],
    ids=["lost updates", "another run", "no bytes"],
)
def test_bytes_that_are_not_the_runs_do_not_count(
    change: Callable[[Path], None], chain: Callable[[int], int | None], tmp_path: Path
) -> None:
    source = make(CountingWeights(), 1, scratch_in(tmp_path), 1)
    for version in (1, 2, 3):
        sweep(source, version)
    source.close()
    change(tmp_path)
    with closing(scratch_in(tmp_path, chain)) as found:
        assert {found.version(segment) for segment in range(BLOCKS + 2)} == {0}


def test_bytes_laid_out_otherwise_do_not_count(tmp_path: Path) -> None:
    written = scratch_in(tmp_path)
    written.write(1, HostDevice().host_memory(whole_pages(layouts()[1].nbytes)), 5)
    written.close()
    moved = [replace(layout, offsets=(0 if i != 1 else 8,)) for i, layout in enumerate(layouts())]
    for there, version in ((layouts(), 5), (moved, 0)):
        scratch = Scratch(tmp_path, there, lambda version: version)
        assert scratch.version(1) == version
        scratch.close()


def test_the_bytes_before_count_until_the_new_ones_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = scratch_in(tmp_path)
    pages = HostDevice().host_memory(whole_pages(layouts()[1].nbytes))
    scratch.write(1, pages.fill_(1), 1)

    def broken(*record: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(scratch._manifest, "append", broken)
    with pytest.raises(ScratchError, match="Input/output error"):
        scratch.write(1, pages.fill_(2), 2)
    scratch.close()
    again = scratch_in(tmp_path)
    assert again.version(1) == 1
    again.read(1, pages)
    assert bool((pages == 1).all())
    again.close()


def test_blocks_are_written_after_the_journals_records(tmp_path: Path) -> None:
    scratch = scratch_in(tmp_path, lambda version: version if version <= 4 else None)
    pages = HostDevice().host_memory(whole_pages(layouts()[1].nbytes))
    with pytest.raises(AssertionError, match="after the journal"):
        scratch.write(1, pages, 5)
    scratch.close()


def test_a_write_that_failed_is_reported_and_the_blocks_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = scratch_in(tmp_path)
    source = make(CountingWeights(), 1, scratch, 1)
    data = scratch._data
    write, failing = data.write, True

    def sometimes(offset: int, view: memoryview) -> None:
        if failing:
            raise OSError(28, "No space left on device")
        write(offset, view)

    monkeypatch.setattr(data, "write", sometimes)
    failures = 0
    for version in range(1, 7):
        failing = version < 3
        try:
            sweep(source, version)
        except ScratchError:
            failures += 1
    assert failures >= 1
    source.close()
    assert versions_in(tmp_path) == {6}


def test_a_block_is_never_changed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write waits until somebody asks for the same memory: what reaches the disk must be of one version."""
    scratch = scratch_in(tmp_path)
    source = make(CountingWeights(), 1, scratch, 1)
    data = scratch._data
    write = data.write

    def slow(offset: int, view: memoryview) -> None:
        time.sleep(0.002)
        copy = bytes(view[:4000])
        time.sleep(0.002)
        assert copy == bytes(view[:4000])
        write(offset, view)

    monkeypatch.setattr(data, "write", slow)
    for version in range(1, 6):
        sweep(source, version)
    source.close()


def test_a_block_is_not_reused_before_its_turn_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one write looks for a bucket to read into while somebody waits for the next write to end."""
    scratch, weights, go = scratch_in(tmp_path), CountingWeights(), threading.Event()
    source = make(weights, 1, scratch, 1)
    write, written = scratch.write, {}

    def slow(segment: int, data: torch.Tensor, version: int) -> None:
        assert go.wait(10)
        settled(lambda: segment == 1 and weights.reads[2] > before, seconds=0.2)  # what must not happen
        written[segment] = data.view(torch.float32)[0].item()
        write(segment, data, version)

    monkeypatch.setattr(scratch, "write", slow)
    for index in (0, 1):
        bucket = source.acquire(index)
        bucket.views[0].fill_(index + 100)
        source.release(bucket, 1)
    before = weights.reads[2]
    threading.Timer(0.1, go.set).start()
    bucket = source.acquire(1)  # waits for both writes
    assert bucket.views[0][0].item() == 101
    source.release(bucket, 1)
    source.close()
    assert written == {0: 100, 1: 101}


@pytest.mark.parametrize(("buckets", "every"), [(0, None), (1, 0), (1, 1)])
def test_impossible_options_are_refused(buckets: int, every: int | None) -> None:
    with pytest.raises(OptionError):
        make(CountingWeights(), buckets, None, every)


def test_blocks_of_two_sizes_go_from_one_source_to_the_other(tmp_path: Path) -> None:
    sizes = (10, 5, 200_000, 5, 10)
    specs = [ParameterSpec(f"p{i}", (size,), torch.float32, i, True) for i, size in enumerate(sizes)]
    kinds = [SegmentKind.EMBEDDING, *[SegmentKind.BLOCK] * 3, SegmentKind.HEAD]
    segments = tuple(BlockLayout(spec.name, kind, (spec,)) for spec, kind in zip(specs, kinds, strict=True))
    memory = HostDevice().host_memory

    def scratch() -> Scratch:
        return Scratch(tmp_path, segments, lambda version: version)

    pinned = SegmentStore(CountingWeights(), segments, memory, scratch=scratch(), write_back_every=1)
    for index in (3, 1):  # the small ones: the file is shorter than the large one's slot
        bucket = pinned.acquire(index)
        bucket.views[0].fill_(-index)
        pinned.release(bucket, 1)
    pinned.close()
    streamed = SegmentStore(CountingWeights(), segments, memory, buckets=2, scratch=scratch(), write_back_every=1)
    for index in (1, 3):
        bucket = streamed.acquire(index)
        assert bucket.version == 1
        assert bool((bucket.views[0] == -index).all())
        streamed.release(bucket, 1)
    streamed.close()
