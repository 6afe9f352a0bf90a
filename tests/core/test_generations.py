"""Generations of segments on disk: which commit a manifest is taken to hold, and what is written of a segment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_weights import BLOCKS, CountingWeights, layouts

from zo2core import BlockLayout, HostDevice, SegmentStore
from zo2core.errors import ScratchError
from zo2core.io.direct_file import RangedFile, whole_pages
from zo2core.io.durable import RecordFile, to_line
from zo2core.sources.segment_store import laid_out_as_on_disk
from zo2core.sources.slot_file import DATA, MANIFEST, Generations, Scratch
from zo2core.types import StateSpec

STEPS = 3
LAYOUTS = layouts()
OF_STATES = tuple(replace(layout, states=(StateSpec("moment", (3000,), torch.float32),)) for layout in layouts(3))


def opened(folder: Path, segments: Sequence[BlockLayout] = LAYOUTS) -> Generations:
    return Generations(folder, segments, lambda version: version, spare=BLOCKS)


def committed(folder: Path, steps: int = STEPS) -> None:
    """Commit a few steps, each of which fills all segments with its number."""
    with closing(opened(folder)) as files:
        for step in range(1, steps + 1):
            for segment, layout in enumerate(LAYOUTS):
                files.write(segment, HostDevice().host_memory(whole_pages(layout.nbytes)).fill_(step), step)
            files.commit(step, {"values of step": step})


def contents(files: Generations) -> set[int]:
    """The numbers that all segments are full of."""
    numbers: set[int] = set()
    for segment, layout in enumerate(LAYOUTS):
        pages = HostDevice().host_memory(whole_pages(layout.nbytes))
        files.read(segment, pages)
        numbers.update(pages.tolist())
    return numbers


def test_a_commit_outlives_processes_that_commit_nothing(tmp_path: Path) -> None:
    """Each process that opens the files writes their manifest anew."""
    committed(tmp_path)
    for _ in range(3):
        with closing(opened(tmp_path)) as files:
            assert (files.step, files.values) == (STEPS, {"values of step": STEPS})
            assert contents(files) == {STEPS}


IMPOSSIBLE: dict[str, Callable[[dict[str, Any]], object]] = {
    "step 0": lambda record: record.update(step=0, chain=0, segments=[]),
    "no number as step": lambda record: record.update(step=True, chain=1, segments=[]),
    "no values": lambda record: record.pop("values"),
    "no segments": lambda record: record.pop("segments"),
    "no object as segment": lambda record: record["segments"].append(3),
    "a segment of version 0": lambda record: record["segments"][2].update(version=0),
    "a segment of a later step": lambda record: record["segments"][2].update(version=STEPS + 1),
    "a segment of no version": lambda record: record["segments"][2].pop("version"),
    "a segment twice": lambda record: record["segments"].append(dict(record["segments"][2])),
    "a segment that the model lacks": lambda record: record["segments"][2].update(segment=BLOCKS + 2),
    "two segments in one slot": lambda record: record["segments"][2].update(slot=record["segments"][3]["slot"]),
    "a free slot of another segment": lambda record: record["segments"][2].update(slot=record["segments"][0]["slot"] + 1),
}


@pytest.mark.parametrize("kind", [Generations, Scratch])
@pytest.mark.parametrize("damaged", [False, True])
def test_another_runs_only_copy_is_never_opened_for_writing(damaged: bool, kind: Any, tmp_path: Path) -> None:
    committed(tmp_path)
    manifest = tmp_path / MANIFEST
    if damaged:
        manifest.write_bytes(manifest.read_bytes().replace(b"values of", b"valued of", 1))
    before = manifest.read_bytes(), (tmp_path / DATA).read_bytes()
    more = {"spare": BLOCKS} if kind is Generations else {}
    with pytest.raises(ScratchError, match="weights of another run"):
        kind(tmp_path, LAYOUTS, lambda version: version + 100, **more)
    assert (manifest.read_bytes(), (tmp_path / DATA).read_bytes()) == before


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_record_that_no_commit_can_have_made_is_passed_over(change: Callable[[Any], object], tmp_path: Path) -> None:
    committed(tmp_path)
    *records, last = map(dict, RecordFile(tmp_path / MANIFEST).loaded)
    change(last)
    (tmp_path / MANIFEST).write_bytes(b"".join(map(to_line, [*records, last])))
    with closing(opened(tmp_path)) as files:
        assert (files.step, files.values) == (STEPS - 1, {"values of step": STEPS - 1})
        assert contents(files) == {STEPS - 1}


def test_a_commit_whose_bytes_are_cut_off_is_passed_over(tmp_path: Path) -> None:
    committed(tmp_path, 2)
    data = (tmp_path / DATA).read_bytes()
    (tmp_path / DATA).write_bytes(data[:-1])  # the file ends with the second slot of the head
    with closing(opened(tmp_path)) as files:
        assert files.step == 1
        assert contents(files) == {1}


def test_a_run_none_of_whose_commits_has_its_bytes_is_refused_and_keeps_its_manifest(tmp_path: Path) -> None:
    committed(tmp_path, 1)
    manifest = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / DATA).rename(tmp_path / "moved")
    with pytest.raises(ScratchError, match="damaged records or bytes of this run"):
        opened(tmp_path)
    assert (tmp_path / MANIFEST).read_bytes() == manifest
    (tmp_path / "moved").rename(tmp_path / DATA)
    with closing(opened(tmp_path)) as files:
        assert (files.step, contents(files)) == (1, {1})


@contextmanager
def source_of_states(folder: Path, buckets: int) -> Iterator[tuple[SegmentStore, Generations]]:
    """Segments after a first step, which has filled each one's weights and states with its index."""
    weights = CountingWeights()
    segments = laid_out_as_on_disk(OF_STATES, weights)
    files = opened(folder, segments)
    memory = HostDevice().host_memory
    with closing(SegmentStore(weights, segments, memory, buckets=buckets, scratch=files, write_back_every=1)) as source:
        for segment in range(len(segments)):
            bucket = source.acquire(segment)
            source.read_states(segment)
            for view in bucket.views:
                view.fill_(segment)
            source.release(bucket, 1)
        source.write_kept()
        source.skip_states()
        files.commit(1, {})
        yield source, files


def test_a_segment_is_written_with_its_states_though_its_weights_alone_were_read(tmp_path: Path) -> None:
    with source_of_states(tmp_path, 1) as (source, files):
        bucket = source.acquire(1)  # in the memory that has had the states of block 3
        bucket.views[0].fill_(7.0)
        source.release(bucket, 2)
        source.write_kept()
        files.commit(2, {})
        source.release(source.acquire(2), 1)
        bucket = source.acquire(1)
        source.read_states(1)
        assert [set(view.tolist()) for view in bucket.views] == [{7.0}, {1.0}]
        source.release(bucket, 2)


def test_a_segment_is_released_once_no_states_are_read_into_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that fails releases a segment unchanged while its states are read."""
    go, ended, real = threading.Event(), threading.Event(), Generations.read

    def slow(self: Generations, segment: int, out: torch.Tensor, start: int = 0) -> None:
        if start > 0 and segment == 1:
            assert go.wait(10)
        real(self, segment, out, start)
        if start > 0 and segment == 1:
            ended.set()

    with source_of_states(tmp_path, 2) as (source, _):
        source.release(source.acquire(1), 1)  # without states, in the memory of another block
        resident = source.acquire(0)
        source.read_states(0)
        source.release(resident, 1)
        monkeypatch.setattr(Generations, "read", slow)
        bucket = source.acquire(1)
        threading.Timer(0.1, go.set).start()
        source.release(bucket, 1)
        assert ended.is_set()


def test_all_that_is_kept_is_written_before_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), Generations.write

    def slow(self: Generations, segment: int, data: torch.Tensor, version: int) -> None:
        assert go.wait(10)
        real(self, segment, data, version)

    with source_of_states(tmp_path, 2) as (source, files):
        monkeypatch.setattr(Generations, "write", slow)
        source.release(source.acquire(1), 2)
        threading.Timer(0.1, go.set).start()
        source.write_kept()
        assert files.version(1) == 2


def test_a_write_that_failed_is_reported_before_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "no space left")

    with source_of_states(tmp_path, 2) as (source, _):
        monkeypatch.setattr(RangedFile, "write", full)
        source.release(source.acquire(1), 2)
        with pytest.raises(ScratchError, match="no space left"):
            source.write_kept()
