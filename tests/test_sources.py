"""What every block source promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zo2core import BlockLayout, CheckpointError, ClosedError, HostDevice, ParameterSpec, PinnedSource, SegmentKind
from zo2core.checkpoint import SafetensorsReader, parse_header
from zo2core.protocols import BlockSource

Make = Callable[[SafetensorsReader, tuple[BlockLayout, ...]], BlockSource]

SOURCES: dict[str, Make] = {
    "pinned": lambda weights, layouts: PinnedSource(weights, layouts, HostDevice().host_memory),
}

every_source = pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)


def tensors() -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.arange(n, dtype=torch.float32) + 100 * i for i, n in enumerate([5, 17, 1, 64, 3])}


def checkpoint(folder: Path) -> tuple[SafetensorsReader, tuple[BlockLayout, ...]]:
    values = tensors()
    save_file(values, folder / "model.safetensors")
    specs = [ParameterSpec(name, tuple(v.shape), v.dtype, i, True) for i, (name, v) in enumerate(values.items())]
    layouts = (
        BlockLayout("embedding", SegmentKind.EMBEDDING, (specs[0],)),
        BlockLayout("block 0", SegmentKind.BLOCK, (specs[1], specs[2])),
        BlockLayout("block 1", SegmentKind.BLOCK, (specs[3],)),
        BlockLayout("head", SegmentKind.HEAD, (specs[4],)),
    )
    return SafetensorsReader(parse_header(folder / "model.safetensors")), layouts


def contents(source: BlockSource, index: int) -> dict[str, torch.Tensor]:
    bucket = source.acquire(index)
    found = {s.name: v.clone() for s, v in zip(source.layouts[index].parameters, bucket.views, strict=True)}
    source.release(bucket, bucket.version)
    return found


@every_source
def test_buckets_hold_the_checkpoints_bytes_at_version_0(make: Make, tmp_path: Path) -> None:
    source = make(*checkpoint(tmp_path))
    for index in (2, 0, 3, 1, 2):  # any order, again
        assert source.acquire(index).version == 0
        for name, value in contents(source, index).items():
            assert torch.equal(value, tensors()[name])
    source.close()


@every_source
def test_released_bytes_come_back_with_their_version(make: Make, tmp_path: Path) -> None:
    source = make(*checkpoint(tmp_path))
    bucket = source.acquire(1)
    bucket.views[0].mul_(2)
    source.release(bucket, 3)
    again = source.acquire(1)
    assert again.version == 3
    assert torch.equal(again.views[0], tensors()["p1"] * 2)
    source.close()


@every_source
def test_lost_bytes_are_read_again(make: Make, tmp_path: Path) -> None:
    source = make(*checkpoint(tmp_path))
    bucket = source.acquire(1)
    bucket.data.fill_(255)
    source.release(bucket, None)
    again = source.acquire(1)
    assert again.version == 0
    assert torch.equal(again.views[0], tensors()["p1"])
    source.close()


@every_source
def test_prefetching_changes_nothing_but_time(make: Make, tmp_path: Path) -> None:
    source = make(*checkpoint(tmp_path))
    for _ in range(3):
        source.prefetch(2)
    assert torch.equal(contents(source, 2)["p3"], tensors()["p3"])
    source.prefetch(2)
    assert torch.equal(contents(source, 2)["p3"], tensors()["p3"])
    source.close()


@every_source
def test_views_are_the_buckets_bytes_and_aligned(make: Make, tmp_path: Path) -> None:
    source = make(*checkpoint(tmp_path))
    for index, layout in enumerate(source.layouts):
        bucket = source.acquire(index)
        assert bucket.data.numel() == layout.nbytes
        for view in bucket.views:
            assert view.untyped_storage().data_ptr() == bucket.data.untyped_storage().data_ptr()
            assert view.data_ptr() % 64 == 0
        source.release(bucket, 0)
    source.close()


@every_source
def test_a_failed_read_is_reported_by_acquire_and_can_be_repeated(make: Make, tmp_path: Path) -> None:
    weights, layouts = checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 4])  # the head's tensor loses its end
    source = make(weights, layouts)
    source.prefetch(3)
    with pytest.raises(CheckpointError, match="p4"):
        source.acquire(3)
    path.write_bytes(whole)
    assert torch.equal(contents(source, 3)["p4"], tensors()["p4"])
    source.close()


@every_source
def test_a_closed_source_says_so_and_closes_twice(make: Make, tmp_path: Path) -> None:
    source = make(*checkpoint(tmp_path))
    source.acquire(0)
    source.close()
    source.close()
    with pytest.raises(ClosedError):
        source.acquire(0)


def test_pinned_source_allocates_one_arena_of_the_models_size(tmp_path: Path) -> None:
    weights, layouts = checkpoint(tmp_path)
    asked: list[int] = []

    def host_memory(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return HostDevice().host_memory(nbytes)

    PinnedSource(weights, layouts, host_memory).close()
    assert asked == [sum(layout.nbytes for layout in layouts)]


def test_opening_reads_no_weights(tmp_path: Path) -> None:
    weights, layouts = checkpoint(tmp_path)
    reads: list[str] = []

    class Counting:
        fingerprint = "counted"

        def read_into(self, parameter: str, out: torch.Tensor) -> None:
            reads.append(parameter)
            weights.read_into(parameter, out)

        def close(self) -> None:
            weights.close()

    source = PinnedSource(Counting(), layouts, HostDevice().host_memory)
    assert reads == []
    source.acquire(1)
    assert sorted(reads) == ["p1", "p2"]
    source.acquire(1)
    assert sorted(reads) == ["p1", "p2"]
    source.close()
