"""What every block source promises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_weights import CountingWeights, layouts
from engines import Proxy
from segments import checkpoint, tensors

from zo2core import BlockLayout, HostDevice, SegmentStore
from zo2core.checkpoint.shards import parse_header
from zo2core.errors import CheckpointError, ClosedError
from zo2core.io.direct_file import PAGE
from zo2core.protocols import BlockSource, TensorReader
from zo2core.sources.segment_store import Loading, laid_out_as_on_disk
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
        weights, layouts, host_memory, buckets=buckets, scratch=scratch, write_back_every=1 if written else None
    )


# To add a source: one row.
SOURCES: dict[str, Make] = {
    "pinned": store,
    "pinned, written back": partial(store, written=True),
    "streamed": partial(store, buckets=3),
    "streamed, one bucket": partial(store, buckets=1),
    "streamed, laid out as on disk": partial(store, buckets=3, as_on_disk=True),
    "streamed, laid out as on disk, written back": partial(store, buckets=1, as_on_disk=True, written=True),
    "streamed, one bucket, written back": partial(store, buckets=1, written=True),
}

every_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


def contents(source: BlockSource, index: int) -> dict[str, torch.Tensor]:
    bucket = source.acquire(index)
    found = {s.name: v.clone() for s, v in zip(source.layouts[index].parameters, bucket.views, strict=True)}
    source.release(bucket, bucket.version)
    return found


@every_source
def test_buckets_hold_the_checkpoints_bytes_at_version_0(make: Make, tmp_path: Path) -> None:
    source = make(*checkpoint(tmp_path), tmp_path)
    for index in (2, 0, 3, 1, 2):  # any order, again
        bucket = source.acquire(index)
        assert bucket.version == 0
        source.release(bucket, 0)
        for name, value in contents(source, index).items():
            assert torch.equal(value, tensors()[name])
    source.close()


@pytest.mark.parametrize("make", [store, partial(store, buckets=3)], ids=["pinned", "streamed"])
def test_reading_a_segment_changes_no_other_one_in_the_eyes_of_autograd(make: Make, tmp_path: Path) -> None:
    """A graph keeps weights of one segment while a thread reads the next one and converts its dtype."""
    weights, layouts = checkpoint(tmp_path)
    halves = [tuple(replace(spec, dtype=torch.bfloat16) for spec in layout.parameters) for layout in layouts]
    source = make(
        weights, tuple(replace(layout, parameters=own) for layout, own in zip(layouts, halves, strict=True)), tmp_path
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
    """Multiplied by version + 1. Sources that can drop changed bytes may give the base again, as version 0."""
    source = SOURCES[name](*checkpoint(tmp_path), tmp_path)
    for version in range(1, 4):
        for index in range(4):
            bucket = source.acquire(index)
            for spec, view in zip(source.layouts[index].parameters, bucket.views, strict=True):
                assert torch.equal(view, tensors()[spec.name] * (bucket.version + 1))
                view.copy_(tensors()[spec.name] * (version + 1))
            drops = name.startswith("streamed") and "written" not in name and not source.layouts[index].resident
            assert bucket.version == version - 1 or (drops and bucket.version == 0)
            source.release(bucket, version)
    source.close()


@every_source
def test_lost_bytes_are_read_again(make: Make, tmp_path: Path) -> None:
    source = make(*checkpoint(tmp_path), tmp_path)
    bucket = source.acquire(1)
    bucket.data.fill_(255)
    source.release(bucket, None)
    again = source.acquire(1)
    assert again.version == 0
    assert torch.equal(again.views[0], tensors()["p1"])
    source.close()


@every_source
def test_prefetching_changes_nothing_but_time(make: Make, tmp_path: Path) -> None:
    source = make(*checkpoint(tmp_path), tmp_path)
    for _ in range(3):
        source.prefetch([2])
    assert torch.equal(contents(source, 2)["p3"], tensors()["p3"])
    source.prefetch([2])
    assert torch.equal(contents(source, 2)["p3"], tensors()["p3"])
    source.close()


@every_source
def test_views_are_the_buckets_bytes_and_aligned(make: Make, tmp_path: Path) -> None:
    source = make(*checkpoint(tmp_path), tmp_path)
    for index, layout in enumerate(source.layouts):
        bucket = source.acquire(index)
        assert bucket.data.numel() == layout.nbytes
        for view in bucket.views:
            assert view.untyped_storage().data_ptr() == bucket.data.untyped_storage().data_ptr()
            assert view.data_ptr() % (64 if layout.offsets is None else view.itemsize) == 0
        source.release(bucket, 0)
    source.close()


def test_parameters_lie_as_far_from_a_pages_start_as_on_disk(tmp_path: Path) -> None:
    weights, layouts = checkpoint(tmp_path)
    source = SegmentStore(weights, laid_out_as_on_disk(layouts, weights), host_memory, buckets=3)
    begin = {name: entry.start for name, entry in parse_header(tmp_path / "model.safetensors").items()}
    for index, layout in enumerate(source.layouts):
        bucket = source.acquire(index)
        for spec, view in zip(layout.parameters, bucket.views, strict=True):
            assert (view.data_ptr() - begin[spec.name]) % PAGE == 0
        assert layout.nbytes < 2 * PAGE, "what follows on disk follows in the bucket"
        source.release(bucket, 0)
    source.close()


def test_converted_parameters_are_packed(tmp_path: Path) -> None:
    weights, layouts = checkpoint(tmp_path)
    spec = replace(layouts[0].parameters[0], dtype=torch.float16)
    (layout,) = laid_out_as_on_disk([replace(layouts[0], parameters=(spec,))], weights)
    assert layout.offsets == (0,)


@every_source
def test_a_failed_read_is_reported_by_acquire_and_can_be_repeated(make: Make, tmp_path: Path) -> None:
    weights, layouts = checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 4])  # the head's tensor loses its end
    source = make(weights, layouts, tmp_path)
    source.prefetch([3])
    with pytest.raises(CheckpointError, match="p4"):
        source.acquire(3)
    path.write_bytes(whole)
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
def test_what_failed_ahead_of_its_need_is_read_once_more(make: Make, mended: bool, tmp_path: Path) -> None:
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


@every_source
def test_a_closed_source_says_so_and_closes_twice(make: Make, tmp_path: Path) -> None:
    source = make(*checkpoint(tmp_path), tmp_path)
    source.acquire(0)
    source.close()
    source.close()
    with pytest.raises(ClosedError):
        source.acquire(0)


def test_reads_that_closing_cancelled_are_waited_for_and_not_taken_for_whole() -> None:
    read, cancelled = Future[None](), Future[None]()
    read.set_result(None)
    cancelled.cancel()
    cancelled.set_running_or_notify_cancel()
    loading = Loading([read, cancelled], 0)
    assert isinstance(loading.failure(), CancelledError)
    with pytest.raises(CancelledError):
        loading.wait()


def test_opening_reads_no_weights() -> None:
    weights = CountingWeights()
    source = SegmentStore(weights, layouts(), host_memory)
    assert weights.reads.total() == 0
    source.release(source.acquire(1), 0)
    assert weights.reads == {1: 1}
    source.acquire(1)
    assert weights.reads == {1: 1}
    source.close()
