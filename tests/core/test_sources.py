"""What every block source promises; of streaming: bounded memory, reading ahead, and what is on
disk when.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from command_lines import wait_until
from engines import Proxy
from segments import BLOCKS, CountingWeights, checkpoint, layouts, segments, tensors

from zo2core import BlockLayout, HostDevice, ParameterSpec, SegmentKind, SegmentStore
from zo2core.checkpoint.shards import parse_header
from zo2core.errors import CheckpointError, ClosedError, OptionError, ScratchError
from zo2core.io.direct_file import PAGE, whole_pages
from zo2core.protocols import BlockSource, TensorReader
from zo2core.sources.segment_store import READERS, Loading, laid_out_as_on_disk
from zo2core.sources.slot_file import Scratch

Layouts = tuple[BlockLayout, ...]
Make = Callable[[TensorReader, Layouts, Path], BlockSource]

host_memory = HostDevice().host_memory


def store(
    weights: TensorReader,
    layouts: Layouts,
    folder: Path,
    buckets: int | None = None,
    *,
    as_on_disk: bool = False,
    written: bool = False,
) -> BlockSource:
    layouts = laid_out_as_on_disk(layouts, weights) if as_on_disk else layouts
    scratch = Scratch(folder / "run", layouts, chain=lambda version: version) if written else None
    return SegmentStore(
        weights,
        layouts,
        host_memory,
        buckets=buckets,
        scratch=scratch,
        write_back_every=1 if written else None,
    )


# To add a source: one row.
SOURCES: dict[str, Make] = {
    "pinned": store,
    "pinned, written back": partial(store, written=True),
    "streamed": partial(store, buckets=3),
    "streamed, one bucket": partial(store, buckets=1),
    "streamed, laid out as on disk": partial(store, buckets=3, as_on_disk=True),
    "streamed, laid out as on disk, written back": partial(
        store, buckets=1, as_on_disk=True, written=True
    ),
    "streamed, one bucket, written back": partial(store, buckets=1, written=True),
}

every_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


def contents(source: BlockSource, index: int) -> dict[str, torch.Tensor]:
    bucket = source.acquire(index)
    found = {
        s.name: v.clone()
        for s, v in zip(source.layouts[index].parameters, bucket.views, strict=True)
    }
    source.release(bucket, bucket.version)
    return found


@every_source
def test_buckets_hold_the_checkpoints_bytes_at_version_0_aligned(
    make: Make, tmp_path: Path
) -> None:
    source = make(*checkpoint(tmp_path), tmp_path)
    for index in (2, 0, 3, 1, 2):  # any order, again
        layout, bucket = source.layouts[index], source.acquire(index)
        assert (bucket.version, bucket.data.numel()) == (0, layout.nbytes)
        for view in bucket.views:
            assert view.untyped_storage().data_ptr() == bucket.data.untyped_storage().data_ptr()
            assert view.data_ptr() % (64 if layout.offsets is None else view.itemsize) == 0
        source.release(bucket, 0)
        for name, value in contents(source, index).items():
            assert torch.equal(value, tensors()[name])
        source.prefetch([2])  # changes nothing but time
    source.close()


@pytest.mark.parametrize("make", [store, partial(store, buckets=3)], ids=["pinned", "streamed"])
def test_reading_a_segment_changes_no_other_one_in_the_eyes_of_autograd(
    make: Make, tmp_path: Path
) -> None:
    """A graph keeps weights of one segment while a thread reads the next one and converts its
    dtype.
    """
    weights, layouts = checkpoint(tmp_path)
    halves = [
        tuple(replace(spec, dtype=torch.bfloat16) for spec in layout.parameters)
        for layout in layouts
    ]
    source = make(
        weights,
        tuple(replace(layout, parameters=own) for layout, own in zip(layouts, halves, strict=True)),
        tmp_path,
    )
    bucket = source.acquire(1)
    leaf = torch.ones(17, dtype=torch.bfloat16, requires_grad=True)
    product = (bucket.views[0] * leaf).sum()
    source.acquire(2)
    [gradient] = torch.autograd.grad(product, leaf)
    assert gradient.shape == (17,)
    source.close()


@pytest.mark.parametrize("name", SOURCES)
def test_bytes_come_back_with_a_version_that_is_theirs(name: str, tmp_path: Path) -> None:
    """Multiplied by version + 1.

    Sources that can drop changed bytes may give the base again, as version 0.
    """
    source = SOURCES[name](*checkpoint(tmp_path), tmp_path)
    for version in range(1, 4):
        for index in range(4):
            bucket = source.acquire(index)
            for spec, view in zip(source.layouts[index].parameters, bucket.views, strict=True):
                assert torch.equal(view, tensors()[spec.name] * (bucket.version + 1))
                view.copy_(tensors()[spec.name] * (version + 1))
            drops = (
                name.startswith("streamed")
                and "written" not in name
                and not source.layouts[index].resident
            )
            assert bucket.version == version - 1 or (drops and bucket.version == 0)
            source.release(bucket, version)
    source.close()


@every_source
def test_lost_bytes_are_read_again_and_a_closed_source_says_so(make: Make, tmp_path: Path) -> None:
    source = make(*checkpoint(tmp_path), tmp_path)
    bucket = source.acquire(1)
    bucket.data.fill_(255)
    source.release(bucket, None)
    again = source.acquire(1)
    assert again.version == 0
    assert torch.equal(again.views[0], tensors()["p1"])
    source.close()
    source.close()
    with pytest.raises(ClosedError):
        source.acquire(0)


def test_parameters_lie_as_far_from_a_pages_start_as_on_disk_and_converted_ones_are_packed(
    tmp_path: Path,
) -> None:
    weights, layouts = checkpoint(tmp_path)
    spec = replace(layouts[0].parameters[0], dtype=torch.float16)
    (packed,) = laid_out_as_on_disk([replace(layouts[0], parameters=(spec,))], weights)
    assert packed.offsets == (0,)
    source = SegmentStore(weights, laid_out_as_on_disk(layouts, weights), host_memory, buckets=3)
    begin = {
        name: entry.start for name, entry in parse_header(tmp_path / "model.safetensors").items()
    }
    for index, layout in enumerate(source.layouts):
        bucket = source.acquire(index)
        for spec, view in zip(layout.parameters, bucket.views, strict=True):
            assert (view.data_ptr() - begin[spec.name]) % PAGE == 0
        assert layout.nbytes < 2 * PAGE, "what follows on disk follows in the bucket"
        source.release(bucket, 0)
    source.close()


@every_source
def test_a_failed_read_is_reported_by_acquire_and_can_be_repeated(
    make: Make, tmp_path: Path
) -> None:
    weights, layouts = checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    whole, written = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(whole[: len(whole) - 4])  # the head's tensor loses its end
    source = make(weights, layouts, tmp_path)
    source.prefetch([3])
    with pytest.raises(CheckpointError, match=f"found {len(whole) - 4} bytes, where there were"):
        source.acquire(3)
    path.write_bytes(whole)
    os.utime(path, ns=(written, written))  # it is the file that it was
    assert torch.equal(contents(source, 3)["p4"], tensors()["p4"])
    source.close()


class BrokenWeights(Proxy):
    """A base whose reads fail as long as it is broken."""

    def __init__(self, weights: TensorReader) -> None:
        super().__init__(weights)
        self.broken = True
        self.attempts = 0
        self.attempted = threading.Event()

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        if parameter == "p4":
            broken = self.broken
            self.attempts += 1
            self.attempted.set()
            if broken:
                raise CheckpointError("p4", found="no bytes", expected="some", remedy="mend it")
        self._wrapped.read_into(parameter, out, start)


@every_source
@pytest.mark.parametrize("mended", [True, False])
def test_what_failed_ahead_of_its_need_is_read_once_more(
    make: Make, mended: bool, tmp_path: Path
) -> None:
    whole, layouts = checkpoint(tmp_path)
    weights: Any = BrokenWeights(whole)
    source = make(weights, layouts, tmp_path)
    source.prefetch([3])
    assert weights.attempted.wait(10)
    weights.broken = not mended
    if not mended:
        with pytest.raises(CheckpointError, match="p4"):
            source.acquire(3)
        assert weights.attempts == 2, "in advance, and when it was needed"
        weights.broken = False
    assert torch.equal(contents(source, 3)["p4"], tensors()["p4"])
    assert weights.attempts == (2 if mended else 3)
    source.close()


def test_reads_that_closing_cancelled_are_waited_for_and_not_taken_for_whole() -> None:
    read, cancelled = Future[None](), Future[None]()
    read.set_result(None)
    cancelled.cancel()
    cancelled.set_running_or_notify_cancel()
    loading = Loading([read, cancelled], 0)
    assert isinstance(loading.failure(), CancelledError)
    with pytest.raises(CancelledError):
        loading.wait()


def test_opening_reads_no_weights_and_without_an_order_nothing_is_read_ahead() -> None:
    for buckets in (None, 3):
        weights = CountingWeights()
        source = SegmentStore(weights, layouts(), host_memory, buckets=buckets)
        assert weights.reads.total() == 0
        source.release(source.acquire(2), 0)
        assert weights.reads == {2: 1}
        source.acquire(2)
        source.close()
        assert weights.reads == {2: 1}


def settled(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Wait for what goes on in the background, and say whether it has come."""
    with suppress(AssertionError):
        wait_until(condition, seconds)
    return condition()


def sweep(source: BlockSource, version: int) -> None:
    source.prefetch(range(BLOCKS + 2))
    for index in range(BLOCKS + 2):
        bucket = source.acquire(index)
        assert bucket.views[0][0].item() == index + 100 * bucket.version
        bucket.views[0].fill_(index + 100 * version)
        source.release(bucket, version)


def make(
    weights: CountingWeights,
    buckets: int | None,
    scratch: Scratch | None = None,
    every: int | None = None,
) -> SegmentStore:
    return SegmentStore(
        weights, layouts(), host_memory, buckets=buckets, scratch=scratch, write_back_every=every
    )


def scratch_in(
    folder: Path, durable: Callable[[int], int | None] = lambda version: version
) -> Scratch:
    return Scratch(folder, layouts(), durable)


@pytest.mark.parametrize("buckets", [None, 1, 2, 3, 5])
def test_it_allocates_its_buckets_or_the_model_in_one_arena_and_no_more(
    buckets: int | None,
) -> None:
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
    assert settled(lambda: weights.reads[1] == 1 and weights.reads[5] == 2), (
        "the next round's first block"
    )
    assert weights.reads[3] == weights.reads[4] == 0, "what is not in the order is not needed"
    source.close()


def test_what_was_not_read_when_a_source_was_closed_does_not_count() -> None:
    weights = CountingWeights()
    specs = tuple(ParameterSpec(f"p{i}", (4,), torch.float32, i, True) for i in range(READERS + 1))
    source = SegmentStore(
        weights, (BlockLayout("block", SegmentKind.BLOCK, specs),), HostDevice().host_memory
    )
    weights.go.clear()
    source.prefetch([0])
    loading = source._own[0].state.loading  # type: ignore[union-attr]
    threading.Timer(0.2, weights.go.set).start()
    source.close()
    assert sum(weights.reads.values()) == READERS, "those that had begun"
    assert loading.done()
    with pytest.raises(CancelledError):
        loading.wait()


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
    source = SegmentStore(weights, layouts(), host_memory, buckets=buckets)
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


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("buckets", [None, 1, 3])
def test_segments_are_written_once_they_lag_and_found_again(
    buckets: int | None, every: int, tmp_path: Path
) -> None:
    weights, written = CountingWeights(), scratch_in(tmp_path)
    source = make(weights, buckets, written, every)
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


def test_resident_segments_are_read_once_and_without_a_lag_nothing_is_written(
    tmp_path: Path,
) -> None:
    weights = CountingWeights()
    source = make(weights, 1, scratch_in(tmp_path), None)
    for version in range(1, 5):
        sweep(source, version)
    source.close()
    assert weights.reads[0] == weights.reads[BLOCKS + 1] == 1
    assert versions_in(tmp_path) == {0}
    assert (tmp_path / "scratch.bin").stat().st_blocks == 0


@pytest.mark.parametrize(
    ("change", "chain"),
    [
        # updates that the journal has lost
        (lambda folder: None, lambda version: version if version <= 2 else None),
        (lambda folder: None, lambda version: version + 1000),  # another run's
        (lambda folder: (folder / "scratch.bin").unlink(), lambda version: version),
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


def test_the_bytes_before_count_until_the_new_ones_are_durable(tmp_path: Path) -> None:
    scratch = scratch_in(tmp_path, lambda version: version if version <= 4 else None)
    pages = HostDevice().host_memory(whole_pages(layouts()[1].nbytes))
    scratch.write(1, pages.fill_(1), 1)
    broken = patch.object(scratch._manifest, "append", side_effect=OSError(5, "Input/output error"))
    with broken, pytest.raises(ScratchError, match="Input/output error"):
        scratch.write(1, pages.fill_(2), 2)
    with pytest.raises(AssertionError, match="after the journal"):
        scratch.write(1, pages, 5)
    scratch.close()
    again = scratch_in(tmp_path)
    assert again.version(1) == 1
    again.read(1, pages)
    assert bool((pages == 1).all())
    again.close()


def test_a_failed_write_is_reported_and_its_blocks_made_again(
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


def test_a_block_is_never_changed_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write waits until somebody asks for the same memory: what reaches the disk must be of
    one version.
    """
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


def test_a_block_is_not_reused_before_its_turn_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of one write looks for a bucket to read into while somebody waits for the next write
    to end.
    """
    scratch, weights, go = scratch_in(tmp_path), CountingWeights(), threading.Event()
    source = make(weights, 1, scratch, 1)
    write, written = scratch.write, {}

    def slow(segment: int, data: torch.Tensor, version: int) -> None:
        assert go.wait(10)
        # what must not happen
        settled(lambda: segment == 1 and weights.reads[2] > before, seconds=0.2)
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
    sized, memory = segments((10, 5, 200_000, 5, 10)), HostDevice().host_memory

    def scratch() -> Scratch:
        return Scratch(tmp_path, sized, lambda version: version)

    pinned = SegmentStore(CountingWeights(), sized, memory, scratch=scratch(), write_back_every=1)
    for index in (3, 1):  # the small ones: the file is shorter than the large one's slot
        bucket = pinned.acquire(index)
        bucket.views[0].fill_(-index)
        pinned.release(bucket, 1)
    pinned.close()
    streamed = SegmentStore(
        CountingWeights(), sized, memory, buckets=2, scratch=scratch(), write_back_every=1
    )
    for index in (1, 3):
        bucket = streamed.acquire(index)
        assert bucket.version == 1
        assert bool((bucket.views[0] == -index).all())
        streamed.release(bucket, 1)
    streamed.close()
