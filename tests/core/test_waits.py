"""Every wait of the overlapped scheduler is needed: each one is taken out in turn, and something breaks.

The device's copies and its compute run in threads. Each case slows down what the wait waits for, so that without it the
other side comes first, always. Memory that is being filled, and buckets that were given back, are poisoned.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pytest
import torch
from profiles import each_choice
from threaded_device import ThreadedDevice, ThreadedStreams
from visitors import TwoStepVisitor
from waits import BLOCKS, FOR_ACTIVATIONS, FOR_INPUTS, SLOW, CheckingSource, nothing, slow

from zo2core import OverlappedScheduler
from zo2core.profiling import Timeline, now
from zo2core.protocols import Store, Transfer, Wait
from zo2core.types import Event, Lane


class IssuingVisitor(TwoStepVisitor):
    """Issues its compute to the device's queue, as kernels are launched, and checks there what it finds."""

    def __init__(self, source: CheckingSource, streams: ThreadedStreams, case: Case, *, replays: bool) -> None:
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
            self.source.errors.append(f"{what} of segment {index} found other bytes than version {version}'s")


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


def run(
    case: Case, without: Sequence[Wait], kept: int = 0, *, order: Sequence[int] = range(BLOCKS + 2), capacity: int = BLOCKS
) -> list[str]:
    """Two sweeps and what is left; return what was found to be wrong."""

    def delay(lane: Lane, nbytes: int) -> float:
        return case.upload() if lane is Lane.UPLOAD else case.offload()

    streams = ThreadedStreams(delay, asynchronous=True, without=without)
    device, source = ThreadedDevice(streams), CheckingSource(capacity)
    scheduler = OverlappedScheduler(source, device, kept=kept)
    for _ in range(2):
        scheduler.sweep(IssuingVisitor(source, streams, case, replays=case.replays), order)
    scheduler.release_all()
    device.close()
    return [*source.errors, *map(str, streams.errors)]


@pytest.mark.few(2)
@pytest.mark.parametrize("wait", CASES)
def test_each_wait_is_needed(wait: Wait) -> None:
    assert run(CASES[wait], without=[]) == []
    assert run(CASES[wait], without=[wait]) != []


def test_no_wait_is_forgotten() -> None:
    assert {*CASES, *FOR_ACTIVATIONS, *FOR_INPUTS} == set(Wait)


@pytest.mark.parametrize("kept", [0, 1, 3, BLOCKS])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_takes_long_nothing_breaks(seed: int, kept: int) -> None:
    rng = random.Random(seed)

    def some() -> float:
        return rng.choice([0.0, 0.0, 0.001, 0.004])

    assert run(Case(some, some, some, some), without=[], kept=kept) == []


@pytest.mark.few(2)
@pytest.mark.parametrize(("kept", "capacity", "replays"), each_choice([0, 1, 3, BLOCKS], [1, 2, BLOCKS], [False, True]))
def test_a_sweep_may_turn_back(kept: int, capacity: int, replays: bool) -> None:
    """Forward over all segments and back, as a first-order step does; at the turn a block comes back that has just left."""
    rng = random.Random(kept)
    order = [*range(BLOCKS + 2), *range(BLOCKS, 0, -1)]

    def some() -> float:
        return rng.choice([0.0, 0.001, 0.004])

    for case in (Case(some, some, some, some, replays=replays), Case(upload=slow, offload=slow, replays=replays)):
        assert run(case, without=[], kept=kept, order=order, capacity=capacity) == []


def test_transfers_and_compute_overlap() -> None:
    """Each of three lanes takes equally long; were any two one after the other, their spans would not touch."""
    streams = ThreadedStreams(lambda lane, nbytes: SLOW, asynchronous=True)
    device, source, timeline = ThreadedDevice(streams), CheckingSource(), Timeline()
    scheduler = OverlappedScheduler(source, device, timeline=timeline)
    scheduler.sweep(IssuingVisitor(source, streams, Case(evaluate=slow), replays=True), range(BLOCKS + 2))
    scheduler.release_all()
    device.close()
    spans = timeline.take()
    uploads, offloads = ([s for s in spans if s.lane is lane] for lane in (Lane.UPLOAD, Lane.OFFLOAD))
    together = [
        (up.name, down.name)
        for up in uploads
        for down in offloads
        if up.started.seconds < down.done.seconds and down.started.seconds < up.done.seconds
    ]
    assert together, "while a block goes back another one comes in"
    assert source.errors == []


class FailingVisitor(IssuingVisitor):
    """Its replay of one segment fails after its compute was issued."""

    def replay(self, index: int, store: Store, version: int) -> int:
        replayed = super().replay(index, store, version)
        if index == 0:
            raise ZeroDivisionError
        return replayed


def test_after_a_failed_replay_a_segment_comes_anew_once_its_memory_is_idle() -> None:
    streams = ThreadedStreams(lambda lane, nbytes: 0.0, asynchronous=True)
    device, source, case = ThreadedDevice(streams), CheckingSource(), Case(replay=slow)
    scheduler = OverlappedScheduler(source, device)
    with pytest.raises(ZeroDivisionError):
        scheduler.sweep(FailingVisitor(source, streams, case, replays=True), range(BLOCKS + 2))
    scheduler.sweep(IssuingVisitor(source, streams, case, replays=True), range(BLOCKS + 2))
    scheduler.release_all()
    device.close()
    assert [*source.errors, *map(str, streams.errors)] == []


def test_the_next_sweeps_first_block_comes_in_though_the_host_runs_ahead() -> None:
    streams = ThreadedStreams(lambda lane, nbytes: 0.0, asynchronous=True)
    device, source, timeline = ThreadedDevice(streams), CheckingSource(), Timeline()
    scheduler = OverlappedScheduler(source, device, timeline=timeline)
    for _ in range(2):  # from the second one on blocks go back as well
        scheduler.sweep(IssuingVisitor(source, streams, Case(evaluate=slow), replays=True), range(BLOCKS + 2))
    scheduler.release_all()
    device.close()
    uploads = [span.name for span in timeline.take() if span.lane is Lane.UPLOAD]
    assert uploads.count("p1") == 3


class FailingStreams(ThreadedStreams):
    """One copy cannot be started."""

    def __init__(self, lane: Lane, at: int) -> None:
        super().__init__(lambda lane, nbytes: 0.0, asynchronous=True)
        self._lane = lane
        self._left = at

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]) -> Transfer:
        self._left -= lane is self._lane
        if lane is self._lane and self._left == 0:
            raise MemoryError
        return super().copy(lane, target, source, after)


@pytest.mark.parametrize("at", range(1, BLOCKS + 3))
@pytest.mark.parametrize("lane", [Lane.UPLOAD, Lane.OFFLOAD])
def test_a_copy_that_cannot_be_started_loses_nothing(lane: Lane, at: int) -> None:
    streams = FailingStreams(lane, at)
    device, source = ThreadedDevice(streams), CheckingSource()
    scheduler = OverlappedScheduler(source, device)
    failures = 0
    for _ in range(3):
        try:
            scheduler.sweep(IssuingVisitor(source, streams, Case(), replays=True), range(BLOCKS + 2))
            for index in range(BLOCKS + 2):
                with scheduler.replayed(IssuingVisitor(source, streams, Case(), replays=True), index) as bucket:
                    assert bucket.segment == index
        except MemoryError:
            failures += 1
    scheduler.release_all()
    device.close()
    assert failures == 1
    assert [*source.errors, *map(str, streams.errors)] == []


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
