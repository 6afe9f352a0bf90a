"""Activations that wait in host memory: none is lost or mixed up, and every wait is needed.

As in test_waits.py the device's copies and its compute run in threads, and each case slows down what a wait waits for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from time import sleep
from typing import Any, NamedTuple

import pytest
import torch
from threaded_device import ThreadedDevice, ThreadedStreams
from torch.utils._pytree import register_pytree_node
from waits import FOR_ACTIVATIONS, nothing, slow

from zo2core import HostDevice
from zo2core.io.direct_file import PAGE
from zo2core.profiling import Timeline
from zo2core.protocols import Transfer, Wait
from zo2core.sweep.activations import IN_TRANSIT, StreamActivations, storage_bytes
from zo2core.types import Lane

SEGMENTS = 4
NUMBERS = 64  # of a stream's activations
NBYTES = 4 * NUMBERS


class Case(NamedTuple):
    """How long everything takes, and how many streams there are."""

    upload: Callable[[], float] = nothing
    offload: Callable[[], float] = nothing
    forward: Callable[[], float] = nothing
    head: Callable[[], float] = nothing
    streams: int = 3
    allowed: int = 0


CASES: dict[Wait, Case] = {
    Wait.COMPUTED: Case(forward=slow),
    Wait.STAGING_OFFLOADED: Case(offload=slow),
    Wait.ACTIVATIONS_UPLOADED: Case(upload=slow),
}


class Sweeps:
    """Streams whose every number is 100 * stream + segment; compute is issued to a queue, and checks what it finds there."""

    def __init__(self, case: Case, without: Sequence[Wait] = ()) -> None:
        def delay(lane: Lane, nbytes: int) -> float:
            return case.upload() if lane is Lane.ACTIVATIONS_IN else case.offload()

        self.case = case
        self.streams = ThreadedStreams(delay, asynchronous=True, without=without)
        self.device = ThreadedDevice(self.streams)
        self.timeline = Timeline()
        self.memory = StreamActivations(self.device, case.allowed, timeline=self.timeline)
        self.errors: list[str] = []

    def run(self, segments: int = SEGMENTS) -> None:
        """One sweep, or the beginning of one."""
        count = self.case.streams
        self.memory.begin(count)
        for stream in range(count):
            self.memory.add(stream, self.forward(stream, 0, None, 0.0), lambda: NBYTES)
        for segment in range(1, segments):
            for stream in range(count):
                found = self.memory.take(segment, stream)
                if segment + 1 < SEGMENTS:
                    self.memory.put(segment + 1, stream, self.forward(stream, segment, found, self.case.forward()))
                else:
                    self.forward(stream, segment, found, self.case.head())

    def forward(self, stream: int, segment: int, found: Any, seconds: float) -> tuple[torch.Tensor]:
        out = torch.full((NUMBERS,), float("nan"))

        def work() -> None:
            for _ in range(2):  # what is read may not change meanwhile
                if found is not None and not bool((found[0] == 100 * stream + segment - 1).all()):
                    self.errors.append(f"stream {stream} found other numbers at segment {segment}")
                sleep(seconds / 2)
            out.fill_(100 * stream + segment)

        self.streams.compute(work)
        return (out,)

    def end(self) -> list[str]:
        """Wait for everything; return what was found to be wrong."""
        self.device.close()
        return [*self.errors, *map(str, self.streams.errors)]


def sweep_twice(case: Case, without: Sequence[Wait] = ()) -> list[str]:
    sweeps = Sweeps(case, without)
    sweeps.run()
    sweeps.run()
    return sweeps.end()


def test_streams_of_several_storages_take_the_host_memory_that_is_planned() -> None:
    count, pages = 3, (1, 9, 3)
    device, planned = ThreadedDevice(ThreadedStreams(lambda *_: 0.0)), count * sum(pages) * PAGE
    memory, take, allocated = StreamActivations(device, 0, planned), device.host_memory, []

    def counted(nbytes: int) -> torch.Tensor:
        allocated.append(nbytes)
        return take(nbytes)

    device.host_memory = counted  # type: ignore[method-assign]
    for _ in range(2):
        memory.begin(count)
        for stream in range(count):
            memory.add(stream, tuple(torch.full((number * PAGE,), stream, dtype=torch.uint8) for number in pages), lambda: 0)
        for segment, stream in product(range(1, SEGMENTS), range(count)):
            found = memory.take(segment, stream)
            assert all(bool((tensor == stream).all()) for tensor in found)
            if segment + 1 < SEGMENTS:
                memory.put(segment + 1, stream, tuple(tensor.clone() for tensor in found))
    device.close()
    assert allocated == [planned]


@pytest.mark.few(2)
@pytest.mark.parametrize("wait", CASES)
def test_each_wait_is_needed(wait: Wait) -> None:
    assert set(CASES) == FOR_ACTIVATIONS
    assert sweep_twice(CASES[wait]) == []
    assert sweep_twice(CASES[wait], without=[wait]) != []


@pytest.mark.parametrize("streams", [1, 2, 3, 7])
@pytest.mark.parametrize("staying", [0, 1, 3])
def test_whatever_takes_long_nothing_is_mixed_up(streams: int, staying: int) -> None:
    rng = random.Random(streams)

    def some() -> float:
        return rng.choice([0.0, 0.0, 0.001, 0.004])

    # Room for the streams that stay, for one forward, and for streams in transit.
    case = Case(some, some, some, some, streams=streams, allowed=(staying + 1 + IN_TRANSIT) * NBYTES)
    assert sweep_twice(case) == []


def test_streams_wait_only_if_they_must() -> None:
    for staying, streams in ((0, 5), (2, 7), (5, 5)):
        in_transit = IN_TRANSIT if staying < streams else 0
        sweeps = Sweeps(Case(streams=streams, allowed=(staying + 1 + in_transit) * NBYTES))
        sweeps.run()
        assert sweeps.end() == []
        names = {span.name.split(", ")[-1] for span in sweeps.timeline.take()}
        assert names == {f"stream {stream}" for stream in range(staying, streams)}


def test_nothing_is_allocated_from_the_second_sweep_on() -> None:
    sweeps, allocated = Sweeps(Case(streams=4)), []
    take = sweeps.device.host_memory

    def counted(nbytes: int) -> torch.Tensor:
        allocated.append(nbytes)
        return take(nbytes)

    sweeps.device.host_memory = counted  # type: ignore[method-assign]
    sweeps.run()
    first = sum(allocated)
    assert PAGE <= first <= (4 + IN_TRANSIT) * PAGE, "streams have memory in turn"
    sweeps.run()
    assert sum(allocated) == first
    assert sweeps.device.allocated == []
    assert sweeps.end() == []


@pytest.mark.few(2)
@pytest.mark.parametrize("segments", range(1, SEGMENTS))
def test_a_sweep_that_fails_leaves_nothing_behind(segments: int) -> None:
    sweeps = Sweeps(Case(upload=slow))
    sweeps.run(segments)
    sweeps.memory.take(segments, 0)  # and its forward fails
    sweeps.run()
    sweeps.run()
    assert sweeps.end() == []


def test_a_sweep_begins_once_the_copies_of_a_failed_one_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps, transfers = Sweeps(Case(upload=slow, offload=slow)), list[Transfer]()
    copy = sweeps.streams.copy

    def noted(*arguments: Any) -> Transfer:
        transfers.append(copy(*arguments))
        return transfers[-1]

    monkeypatch.setattr(sweeps.streams, "copy", noted)
    sweeps.run(2)
    sweeps.memory.take(2, 0)  # and its forward fails, while others leave and come
    assert not all(transfer.done.passed for transfer in transfers)
    sweeps.memory.begin(3)
    assert all(transfer.done.passed for transfer in transfers)
    assert sweeps.end() == []


@pytest.mark.few(12)
@pytest.mark.parametrize("at", range(1, 12))
@pytest.mark.parametrize("what", ["copy", "resize", "host_memory"])
def test_a_failed_allocation_or_copy_loses_no_memory(what: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps = Sweeps(Case())
    owner = {"copy": sweeps.streams, "resize": sweeps.memory._kept._target, "host_memory": sweeps.device}[what]
    work, calls = getattr(owner, what), 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise MemoryError
        return work(*arguments)

    monkeypatch.setattr(owner, what, failing)
    for _ in range(4):
        with suppress(MemoryError):
            sweeps.run()
    sweeps.run()
    sweeps.run()
    assert sweeps.end() == []


@pytest.mark.parametrize("streams", range(1, 9))
@pytest.mark.parametrize("numbers", [1, 3, 8])
def test_streams_stay_only_while_those_in_transit_have_room(streams: int, numbers: int) -> None:
    nbytes, allowed = 64 * numbers, 20 * 64
    device = ThreadedDevice(ThreadedStreams(lambda lane, nbytes: 0.0))
    memory = StreamActivations(device, allowed)
    for count, size in ((2, 4 * 64), (9, 3 * 64), (streams, nbytes)):
        memory.begin(count)
        for stream in range(count):
            memory.add(stream, torch.zeros(size, dtype=torch.uint8), lambda: 64)
    staying = len(memory._on_device)
    assert staying in (0, streams) or (staying + IN_TRANSIT) * nbytes + 64 <= allowed
    assert staying < streams or streams * nbytes + 64 <= allowed
    assert staying == streams or (staying + 1 + IN_TRANSIT) * nbytes + 64 > allowed
    device.close()


def test_transfers_and_forwards_overlap() -> None:
    sweeps = Sweeps(Case(upload=slow, offload=slow, forward=slow, streams=4))
    sweeps.run()
    assert sweeps.end() == []
    spans = sweeps.timeline.take()
    ups, downs = ([span for span in spans if span.lane is lane] for lane in (Lane.ACTIVATIONS_IN, Lane.ACTIVATIONS_OUT))
    assert any(
        up.started.seconds < down.done.seconds and down.started.seconds < up.done.seconds for up in ups for down in downs
    ), "while one stream's activations go out another one's come in"


class Named(NamedTuple):
    hidden: torch.Tensor
    others: list[Any]


def test_tensors_come_back_as_they_were_shared_and_strided() -> None:
    base = torch.arange(24, dtype=torch.float64)
    mask = torch.tensor([[True, False, True]]).expand(4, 3)
    activations = Named(
        base.view(4, 6).t(),
        [{"mask": mask, "again": mask, "bytes": torch.tensor([3], dtype=torch.int8)}, base[5:7], torch.empty(0), "x", 7],
    )
    device = ThreadedDevice(ThreadedStreams(lambda lane, nbytes: 0.0))
    memory = StreamActivations(device, 0)
    memory.begin(1)
    memory.add(0, activations, lambda: 0)
    for larger in range(3):
        found = memory.take(1 + larger, 0)
        assert found.hidden.stride() == (1, 6)
        assert torch.equal(found.hidden, activations.hidden)
        mapping, part, *rest = found.others
        assert torch.equal(part, base[5:7])
        assert found.hidden.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        assert torch.equal(mapping["mask"], mask)
        assert mapping["mask"].stride() == mask.stride()
        assert mapping["mask"].data_ptr() == mapping["again"].data_ptr()
        assert mapping["bytes"].tolist() == [3]
        assert (rest[0].shape, *rest[1:]) == ((0,), "x", 7)
        base = torch.arange(24 + 100 * larger, dtype=torch.float64)
        activations = Named(base[:24].view(4, 6).t(), [mapping, base[5:7], *rest])
        memory.put(2 + larger, 0, activations)
    device.close()


class Foreign:
    """A container of another library, which told torch how to take it apart but not all that is in it."""

    def __init__(self, tensor: torch.Tensor, *, fresh: bool = True) -> None:
        self.tensor = tensor
        self.fresh = fresh


def test_objects_of_other_libraries_are_handed_through_as_they_are() -> None:
    register_pytree_node(
        Foreign, lambda foreign: ([foreign.tensor], None), lambda tensors, _: Foreign(*tensors, fresh=False)
    )
    cache, hidden = Foreign(torch.ones(3)), torch.arange(4.0)
    device = ThreadedDevice(ThreadedStreams(lambda lane, nbytes: 0.0))
    memory = StreamActivations(device, 0)
    memory.begin(1)
    memory.add(0, (hidden, {"cache": cache, "size": hidden.shape, "nothing": None}), lambda: 0)
    tensor, others = memory.take(1, 0)
    assert torch.equal(tensor, hidden)
    assert tensor is not hidden
    assert others["cache"] is cache
    assert (others["size"], others["nothing"]) == ((4,), None)
    assert storage_bytes([hidden, cache]) == 16
    device.close()


def test_where_the_device_is_the_host_everything_stays() -> None:
    timeline = Timeline()
    memory = StreamActivations(HostDevice(), 0, timeline=timeline)
    memory.begin(1)
    tensor = torch.zeros(3)
    memory.add(0, [tensor], lambda: 10**9)
    assert memory.take(1, 0)[0] is tensor
    assert timeline.take() == []


def test_bytes_are_those_of_the_storages() -> None:
    base = torch.zeros(10)
    assert storage_bytes({"a": base[:3], "b": [base[2:], (torch.zeros(1, dtype=torch.int64), "x")], "c": None}) == 48
