"""Every wait of a sweep is needed: each one is taken out in turn, and something breaks.

Nothing is lost or mixed up.

The device's copies and its compute run in threads. Each case slows down what the wait waits for, so
that without it the other side comes first, always. Memory that is being filled, and buckets that
were given back, are poisoned.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from time import sleep
from typing import Any, NamedTuple

import pytest
import torch
from engines import fails_at
from profiles import each_choice
from segments import BLOCKS, SLOW, CheckingSource, TwoStepVisitor, nothing, slow
from threaded_device import ThreadedDevice, ThreadedStreams
from torch.utils._pytree import register_pytree_node

from zo2core import HostDevice, OverlappedScheduler
from zo2core.io.direct_file import PAGE
from zo2core.protocols import Store, Transfer, Wait
from zo2core.schedulers.profiling import Timeline, now
from zo2core.sweep.activations import (
    IN_TRANSIT,
    USES_AHEAD,
    ActivationFile,
    ActivationOffload,
    KeptActivations,
    StreamActivations,
    Use,
    storage_bytes,
)
from zo2core.types import Lane


class IssuingVisitor(TwoStepVisitor):
    """Issues its compute to the device's queue, as kernels are launched, and checks there what it
    finds.
    """

    def __init__(
        self, source: CheckingSource, streams: ThreadedStreams, case: Case, *, replays: bool
    ) -> None:
        self.source = source
        self.streams = streams
        self.case = case
        self.replays = replays

    def replay(self, index: int, store: Store, version: int) -> int:
        def work() -> None:
            time.sleep(self.case.replay())
            self.expect("replay", index, store, version)
            store[0].add_(1)

        if not self.replays:
            return version
        self.streams.compute(work)
        return version + 1

    def evaluate(self, index: int, store: Store) -> None:
        version = self.source.versions[index] if not self.replays else None

        def work() -> None:
            before = store[0].clone()
            time.sleep(self.case.evaluate())
            if version is not None:
                self.expect("evaluate", index, store, version)
            if not torch.equal(before, store[0]):
                self.source.errors.append(f"segment {index} changed under its forwards")

        self.streams.compute(work)

    def expect(self, what: str, index: int, store: Store, version: int) -> None:
        if not bool((store[0] == self.source.expected(index, version)).all()):
            self.source.errors.append(
                f"{what} of segment {index} found other bytes than version {version}'s"
            )


class Queued:
    """Work on a device whose copies and compute run in threads: each takes as long as its lane is
    told.
    """

    def __init__(
        self, delay: Callable[[Lane], float], without: Sequence[Wait], *, issues: bool = True
    ) -> None:
        self.streams = ThreadedStreams(
            lambda lane, nbytes: delay(lane), asynchronous=issues, without=without
        )
        self.device = ThreadedDevice(self.streams)
        self.timeline = Timeline()
        self.errors: list[str] = []
        self.allocated: list[int] = []  # bytes of page-locked memory
        self.device.host_memory = self.host_memory  # type: ignore[method-assign]

    def host_memory(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(nbytes)
        return HostDevice().host_memory(nbytes)

    def end(self) -> list[str]:
        """Wait for everything; return what was found to be wrong."""
        self.device.close()
        return [*self.errors, *map(str, self.streams.errors)]

    def together(self, *lanes: Lane) -> bool:
        """Whether work of two lanes was done at once."""
        spans = self.timeline.take()
        one, other = ([span for span in spans if span.lane is lane] for lane in lanes)
        return any(
            up.started.seconds < down.done.seconds and down.started.seconds < up.done.seconds
            for up in one
            for down in other
        )


class Case(NamedTuple):
    """How long everything takes, and whether there is anything to replay."""

    upload: Callable[[], float] = nothing
    offload: Callable[[], float] = nothing
    replay: Callable[[], float] = nothing
    evaluate: Callable[[], float] = nothing
    replays: bool = True


CASES: dict[Wait, Case] = {
    Wait.UPLOADED: Case(upload=slow),
    Wait.REPLAYED: Case(replay=slow),
    Wait.OFFLOADED: Case(offload=slow),
    Wait.EVALUATED: Case(evaluate=slow),
    Wait.RETURNED: Case(offload=slow),
    Wait.SENT: Case(upload=slow, replays=False),
}


class Weights(Queued):
    """Sweeps over segments, whose weights come and go."""

    def __init__(
        self, case: Case, without: Sequence[Wait] = (), kept: int = 0, capacity: int = BLOCKS
    ) -> None:
        super().__init__(
            lambda lane: case.upload() if lane is Lane.UPLOAD else case.offload(), without
        )
        self.case, self.source = case, CheckingSource(capacity)
        self.scheduler = OverlappedScheduler(
            self.source, self.device, kept=kept, timeline=self.timeline
        )

    def visitor(self, kind: type[IssuingVisitor] = IssuingVisitor) -> IssuingVisitor:
        return kind(self.source, self.streams, self.case, replays=self.case.replays)

    def sweep(
        self, order: Sequence[int] = range(BLOCKS + 2), kind: type[IssuingVisitor] = IssuingVisitor
    ) -> None:
        self.scheduler.sweep(self.visitor(kind).visit, order)

    def end(self) -> list[str]:
        self.scheduler.release_all()
        return [*super().end(), *self.source.errors]


def run(
    case: Case,
    without: Sequence[Wait] = (),
    kept: int = 0,
    *,
    order: Sequence[int] = range(BLOCKS + 2),
    capacity: int = BLOCKS,
) -> list[str]:
    sweeps = Weights(case, without, kept, capacity)
    for _ in range(2):
        sweeps.sweep(order)
    return sweeps.end()


def at_random(seed: int) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rng.choice([0.0, 0.0, 0.001, 0.004])


@pytest.mark.parametrize("kept", [0, 1, 3, BLOCKS])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_takes_long_nothing_breaks(seed: int, kept: int) -> None:
    some = at_random(seed)
    assert run(Case(some, some, some, some), without=[], kept=kept) == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kept", "capacity", "replays"), each_choice([0, 1, 3, BLOCKS], [1, 2, BLOCKS], [False, True])
)
def test_a_sweep_may_turn_back(kept: int, capacity: int, replays: bool) -> None:
    """Forward over all segments and back, as a first-order step does; at the turn a block comes
    back that has just left.
    """
    some, order = at_random(kept), [*range(BLOCKS + 2), *range(BLOCKS, 0, -1)]
    for case in (
        Case(some, some, some, some, replays=replays),
        Case(upload=slow, offload=slow, replays=replays),
    ):
        assert run(case, without=[], kept=kept, order=order, capacity=capacity) == []


def test_transfers_and_compute_overlap() -> None:
    """Each of three lanes takes equally long; were any two one after the other, their spans would
    not touch.
    """
    weights = Weights(Case(slow, slow, evaluate=slow))
    weights.sweep()
    assert weights.end() == []
    assert weights.together(Lane.UPLOAD, Lane.OFFLOAD), (
        "while a block goes back another one comes in"
    )
    streams = Sweeps(StreamsCase(upload=slow, offload=slow, forward=slow, streams=4))
    streams.run()
    assert streams.end() == []
    assert streams.together(Lane.ACTIVATIONS_IN, Lane.ACTIVATIONS_OUT), (
        "and so do activations of streams"
    )


class FailingVisitor(IssuingVisitor):
    """Its replay of one segment fails after its compute was issued."""

    def replay(self, index: int, store: Store, version: int) -> int:
        replayed = super().replay(index, store, version)
        if index == 0:
            raise ZeroDivisionError
        return replayed


def test_after_a_failed_replay_a_segment_comes_anew_once_its_memory_is_idle() -> None:
    sweeps = Weights(Case(replay=slow))
    with pytest.raises(ZeroDivisionError):
        sweeps.sweep(kind=FailingVisitor)
    sweeps.sweep()
    assert sweeps.end() == []


def test_the_next_sweeps_first_block_comes_in_though_the_host_runs_ahead() -> None:
    sweeps = Weights(Case(evaluate=slow))
    for _ in range(2):  # from the second one on blocks go back as well
        sweeps.sweep()
    sweeps.end()
    uploads = [span.name for span in sweeps.timeline.take() if span.lane is Lane.UPLOAD]
    assert uploads.count("p1") == 3


@pytest.mark.parametrize("at", range(1, BLOCKS + 3))
@pytest.mark.parametrize("lane", [Lane.UPLOAD, Lane.OFFLOAD])
def test_a_copy_that_cannot_be_started_loses_nothing(
    lane: Lane, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeps, failures = Weights(Case()), 0
    copy = sweeps.streams.copy
    failing = fails_at(copy, at, MemoryError())
    monkeypatch.setattr(
        sweeps.streams, "copy", lambda of, *given: (failing if of is lane else copy)(of, *given)
    )
    for _ in range(3):
        try:
            sweeps.sweep()
            for index in range(BLOCKS + 2):
                with sweeps.scheduler.replayed(sweeps.visitor().replay, index) as bucket:
                    assert bucket.segment == index
        except MemoryError:
            failures += 1
    assert sweeps.end() == []
    assert failures == 1


def test_a_span_that_ends_while_it_is_asked_for_is_not_lost() -> None:
    class Ending:
        seconds = 1.0
        asked = 0

        @property
        def passed(self) -> bool:
            self.asked += 1
            return self.asked > 1

    timeline = Timeline()
    timeline.note(Lane.UPLOAD, "p1", now(), Ending())
    assert len(timeline.take()) + len(timeline.take()) == 1


SEGMENTS = 4
NUMBERS = 64  # of a stream's activations
STREAM_BYTES = 4 * NUMBERS


class StreamsCase(NamedTuple):
    """How long everything takes, and how many streams there are."""

    upload: Callable[[], float] = nothing
    offload: Callable[[], float] = nothing
    forward: Callable[[], float] = nothing
    head: Callable[[], float] = nothing
    streams: int = 3
    allowed: int = 0


OF_ACTIVATIONS: dict[Wait, StreamsCase] = {
    Wait.COMPUTED: StreamsCase(forward=slow),
    Wait.STAGING_OFFLOADED: StreamsCase(offload=slow),
    Wait.ACTIVATIONS_UPLOADED: StreamsCase(upload=slow),
}


class Sweeps(Queued):
    """Streams whose every number is 100 * stream + segment; compute is issued to a queue, and
    checks what it finds there.
    """

    def __init__(
        self,
        case: StreamsCase,
        without: Sequence[Wait] = (),
        planned: int = 0,
        *,
        issues: bool = True,
    ) -> None:
        lanes = {Lane.ACTIVATIONS_IN: case.upload}
        super().__init__(lambda lane: lanes.get(lane, case.offload)(), without, issues=issues)
        self.case = case
        self.memory = StreamActivations(self.device, case.allowed, planned, timeline=self.timeline)

    def run(self, segments: int = SEGMENTS) -> None:
        """One sweep, or the beginning of one."""
        count = self.case.streams
        self.memory.begin(count)
        for stream in range(count):
            self.memory.add(stream, self.forward(stream, 0, None, 0.0), STREAM_BYTES)
        for segment in range(1, segments):
            for stream in range(count):
                found = self.memory.take(segment, stream)
                if segment + 1 < SEGMENTS:
                    self.memory.put(
                        segment + 1,
                        stream,
                        self.forward(stream, segment, found, self.case.forward()),
                    )
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


def sweep_twice(case: StreamsCase, without: Sequence[Wait] = ()) -> list[str]:
    sweeps = Sweeps(case, without)
    sweeps.run()
    sweeps.run()
    return sweeps.end()


def test_streams_take_the_planned_host_memory_and_allocate_nothing_after_the_first_sweep() -> None:
    count, pages = 3, (1, 9, 3)
    planned = count * sum(pages) * PAGE
    sweeps = Sweeps(StreamsCase(), planned=planned, issues=False)
    memory = sweeps.memory
    for _ in range(2):
        memory.begin(count)
        for stream in range(count):
            memory.add(
                stream,
                tuple(torch.full((number * PAGE,), stream, dtype=torch.uint8) for number in pages),
                0,
            )
        for segment, stream in product(range(1, SEGMENTS), range(count)):
            found = memory.take(segment, stream)
            assert all(bool((tensor == stream).all()) for tensor in found)
            if segment + 1 < SEGMENTS:
                memory.put(segment + 1, stream, tuple(tensor.clone() for tensor in found))
    assert sweeps.end() == []
    assert sweeps.allocated == [planned]
    sweeps = Sweeps(StreamsCase(streams=4))
    sweeps.run()
    first = sum(sweeps.allocated)
    assert PAGE <= first <= (4 + IN_TRANSIT) * PAGE, "streams have memory in turn"
    sweeps.run()
    assert sum(sweeps.allocated) == first
    assert sweeps.device.allocated == []
    assert sweeps.end() == []


@pytest.mark.parametrize("streams", [1, 2, 3, 7])
@pytest.mark.parametrize("staying", [0, 1, 3])
def test_whatever_takes_long_no_stream_is_mixed_up(streams: int, staying: int) -> None:
    some = at_random(streams)
    # Room for the streams that stay, for one forward, and for streams in transit.
    case = StreamsCase(
        some, some, some, some, streams=streams, allowed=(staying + 1 + IN_TRANSIT) * STREAM_BYTES
    )
    assert sweep_twice(case) == []


def test_streams_wait_only_if_they_must() -> None:
    for staying, streams in ((0, 5), (2, 7), (5, 5)):
        in_transit = IN_TRANSIT if staying < streams else 0
        sweeps = Sweeps(
            StreamsCase(streams=streams, allowed=(staying + 1 + in_transit) * STREAM_BYTES)
        )
        sweeps.run()
        assert sweeps.end() == []
        names = {span.name.split(", ")[-1] for span in sweeps.timeline.take()}
        assert names == {f"stream {stream}" for stream in range(staying, streams)}


@pytest.mark.few(2)
@pytest.mark.parametrize("segments", range(1, SEGMENTS))
def test_a_sweep_that_fails_leaves_nothing_behind(segments: int) -> None:
    sweeps = Sweeps(StreamsCase(upload=slow))
    sweeps.run(segments)
    sweeps.memory.take(segments, 0)  # and its forward fails
    sweeps.run()
    sweeps.run()
    assert sweeps.end() == []


def test_a_sweep_begins_once_the_copies_of_a_failed_one_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sweeps, transfers = Sweeps(StreamsCase(upload=slow, offload=slow)), list[Transfer]()
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
def test_a_failed_allocation_or_copy_loses_no_memory(
    what: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeps = Sweeps(StreamsCase())
    owner = {
        "copy": sweeps.streams,
        "resize": sweeps.memory._kept._target,
        "host_memory": sweeps.device,
    }[what]
    monkeypatch.setattr(owner, what, fails_at(getattr(owner, what), at, MemoryError()))
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
            memory.add(stream, torch.zeros(size, dtype=torch.uint8), 64)
    staying = len(memory._on_device)
    assert staying in (0, streams) or (staying + IN_TRANSIT) * nbytes + 64 <= allowed
    assert staying < streams or streams * nbytes + 64 <= allowed
    assert staying == streams or (staying + 1 + IN_TRANSIT) * nbytes + 64 > allowed
    device.close()


class Named(NamedTuple):
    hidden: torch.Tensor
    others: list[Any]


def test_tensors_come_back_as_they_were_shared_and_strided() -> None:
    base = torch.arange(24, dtype=torch.float64)
    mask = torch.tensor([[True, False, True]]).expand(4, 3)
    activations = Named(
        base.view(4, 6).t(),
        [
            {"mask": mask, "again": mask, "bytes": torch.tensor([3], dtype=torch.int8)},
            base[5:7],
            torch.empty(0),
            "x",
            7,
        ],
    )
    device = ThreadedDevice(ThreadedStreams(lambda lane, nbytes: 0.0))
    memory = StreamActivations(device, 0)
    memory.begin(1)
    memory.add(0, activations, 0)
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
    """A container of another library, which told torch how to take it apart but not all that is in
    it.
    """

    def __init__(self, tensor: torch.Tensor, *, fresh: bool = True) -> None:
        self.tensor = tensor
        self.fresh = fresh


def test_objects_of_other_libraries_are_handed_through_as_they_are() -> None:
    register_pytree_node(
        Foreign,
        lambda foreign: ([foreign.tensor], None),
        lambda tensors, _: Foreign(*tensors, fresh=False),
    )
    cache, hidden = Foreign(torch.ones(3)), torch.arange(4.0)
    device = ThreadedDevice(ThreadedStreams(lambda lane, nbytes: 0.0))
    memory = StreamActivations(device, 0)
    memory.begin(1)
    memory.add(0, (hidden, {"cache": cache, "size": hidden.shape, "nothing": None}), 0)
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
    tensor, base = torch.zeros(3), torch.zeros(10)
    memory.add(0, [tensor], 10**9)
    assert memory.take(1, 0)[0] is tensor
    assert timeline.take() == []
    assert (
        storage_bytes(
            {"a": base[:3], "b": [base[2:], (torch.zeros(1, dtype=torch.int64), "x")], "c": None}
        )
        == 48
    )


NBYTES = PAGE  # of an input


ALL_ON_HOST = 1 << 20


class Computed(Queued):
    """Sweeps over inputs on a device whose compute is a queue: forwards make them, backwards check
    them.

    Memory that is freed is overwritten by the compute that follows; memory that is taken is still
    being written by compute that was issued before.
    """

    def __init__(
        self, case: Mapping[Wait, float], without: Sequence[Wait], host_room: int, spill: Path
    ) -> None:
        slow = {Lane.ACTIVATIONS_IN: Wait.ACTIVATIONS_UPLOADED}
        super().__init__(
            lambda lane: case.get(slow.get(lane, Wait.STAGING_OFFLOADED), 0.0), without
        )
        self.case = case
        self.store = ActivationOffload(
            self.device, self.timeline, ActivationFile(spill, self.timeline), host_room
        )
        self.store.resize = self.overwritten  # type: ignore[method-assign]

    def overwritten(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        def work() -> None:
            sleep(self.case.get(Wait.STAGING_READ, 0.0) if nbytes else 0.0)
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(7)

        self.streams.compute(work)

    def run(self, blocks: int = 5, room: int = 0, streams: int = 2) -> None:
        inputs, tensors = KeptActivations(self.store), {}
        inputs.room = room
        for block in range(1, blocks + 1):
            for stream in range(streams):
                tensors[block, stream] = tensor = torch.full((NBYTES,), 3, dtype=torch.uint8)
                self.streams.compute(partial(self.make, tensor, 10 * block + stream))
                inputs.put(Use(-block, stream), [tensor.untyped_storage()])
        inputs.end_departures()
        for block in range(blocks, 0, -1):
            for stream in range(streams):
                inputs.take(Use(-block, stream))
                self.streams.compute(
                    partial(self.check, tensors[block, stream], 10 * block + stream)
                )
        inputs.clear()

    def make(self, tensor: torch.Tensor, number: int) -> None:
        sleep(self.case.get(Wait.COMPUTED, 0.0))
        tensor.fill_(number)

    def check(self, tensor: torch.Tensor, number: int) -> None:
        if not bool((tensor == number).all()):
            self.errors.append(f"{number} is {tensor.tolist()[:3]}")

    def end(self) -> list[str]:
        self.store.close()
        return super().end()


def swept(
    spill: Path,
    case: Mapping[Wait, float],
    without: Sequence[Wait] = (),
    room: int = 0,
    host_room: int = ALL_ON_HOST,
) -> Computed:
    computed = Computed(case, without, host_room, spill)
    computed.run(room=room)
    computed.run(room=room)
    computed.errors += computed.end()
    return computed


OF_INPUTS = (Wait.COMPUTED, Wait.STAGING_OFFLOADED, Wait.STAGING_READ, Wait.ACTIVATIONS_UPLOADED)
SLOW_FOR_INPUTS = {
    Wait.INPUT_OFFLOADED: Wait.STAGING_OFFLOADED,
    Wait.INPUT_UPLOADED: Wait.ACTIVATIONS_UPLOADED,
}

# what goes wrong without some waits, with a directory for files
Fails = Callable[[Path, list[Wait]], list[str]]


def of_weights(case: Case) -> Fails:
    return lambda _, without: run(case, without)


def of_activations(case: StreamsCase) -> Fails:
    return lambda _, without: sweep_twice(case, without)


def of_inputs(slow: Wait, host_room: int = ALL_ON_HOST) -> Fails:
    return lambda spill, without: swept(spill, {slow: SLOW}, without, host_room=host_room).errors


# To add a wait: what fails without it.
NEEDED: dict[str, tuple[Wait, Fails]] = {
    **{f"{wait}, of weights": (wait, of_weights(case)) for wait, case in CASES.items()},
    **{
        f"{wait}, of activations": (wait, of_activations(case))
        for wait, case in OF_ACTIVATIONS.items()
    },
    **{f"{wait}, of inputs in host memory": (wait, of_inputs(wait)) for wait in OF_INPUTS},
    **{
        f"{wait}, of host memory of inputs": (wait, of_inputs(slow, 0))
        for wait, slow in SLOW_FOR_INPUTS.items()
    },
}


@pytest.mark.few(8)
@pytest.mark.parametrize(("wait", "fails"), NEEDED.values(), ids=NEEDED)
def test_each_wait_is_needed(wait: Wait, fails: Fails, tmp_path: Path) -> None:
    assert fails(tmp_path, []) == []
    assert fails(tmp_path, [wait]) != []


def test_no_wait_is_forgotten() -> None:
    assert {wait for wait, _ in NEEDED.values()} == set(Wait)


@pytest.mark.few(7)
@pytest.mark.parametrize("host_room", [0, 3 * NBYTES, 6 * NBYTES, ALL_ON_HOST])
@pytest.mark.parametrize("room", [0, NBYTES, 3 * NBYTES, 5 * NBYTES, 8 * NBYTES, 1 << 20])
def test_inputs_in_host_memory_are_not_mixed_up(room: int, host_room: int, tmp_path: Path) -> None:
    computed = swept(tmp_path, dict.fromkeys(OF_INPUTS, 0.001), room=room, host_room=host_room)
    assert computed.errors == []
    spans = computed.timeline.take()
    written, offloaded = (
        sum(span.nbytes for span in spans if span.lane is lane)
        for lane in (Lane.WRITE, Lane.ACTIVATIONS_OUT)
    )
    assert written <= offloaded
    sent = offloaded / 2  # in each of the two sweeps
    assert written == 0 or sent > host_room - USES_AHEAD * NBYTES
    assert written > 0 or sent <= host_room + (USES_AHEAD + 1) * NBYTES
    assert sum(computed.allocated) <= host_room + (2 * USES_AHEAD + 3) * NBYTES


@pytest.mark.parametrize("host_room", [0, ALL_ON_HOST])
def test_an_empty_part_of_an_input_moves_like_any_other(host_room: int, tmp_path: Path) -> None:
    computed = Computed({}, (), host_room, tmp_path)
    inputs, tensors = (
        KeptActivations(computed.store),
        [torch.full((size,), 3, dtype=torch.uint8) for size in (0, 5)],
    )
    inputs.room = 0
    for block in range(1, 6):
        inputs.put(
            Use(-block, 0), [tensor.untyped_storage() for tensor in tensors] if block == 1 else []
        )
    for block in range(5, 0, -1):
        inputs.take(Use(-block, 0))
    computed.streams.compute(
        lambda: computed.errors.extend([] if tensors[1].tolist() == [3] * 5 else ["lost"])
    )
    inputs.clear()
    assert computed.end() == []
