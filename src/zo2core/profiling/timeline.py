"""The work of a sweep in lanes, as spans of time with the bytes they moved.

A lane does one kind of work: disk reads, uploads, replay and forwards, offloads, or disk writes. The slowest lane's time is
a lower bound of a sweep's time, however well the lanes overlap.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from zo2core.types import Event, Lane, LaneUse

_CAPACITY = 1 << 16  # most spans that are kept; beyond it the oldest half is dropped


class PastEvent(NamedTuple):
    """An event that passed at a time of the host's clock."""

    seconds: float
    passed: bool = True


def now() -> PastEvent:
    """Return the host's present time as an event."""
    return PastEvent(time.perf_counter())


class Span(NamedTuple):
    """One piece of work in a lane."""

    lane: Lane
    name: str
    started: Event
    done: Event
    nbytes: int  # moved
    track: int  # row within the lane: the evaluation's index


class Timeline:
    """Spans that any thread may add."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def note(self, lane: Lane, name: str, started: Event, done: Event, nbytes: int = 0, *, track: int = 0) -> None:
        """Add a piece of work, whose events may not have passed yet."""
        with self._lock:
            if len(self._spans) >= _CAPACITY:
                del self._spans[: _CAPACITY // 2]
            self._spans.append(Span(lane, name, started, done, nbytes, track))

    @contextmanager
    def noted(self, lane: Lane, name: str, nbytes: int = 0) -> Iterator[None]:
        """Add a span for the host's work within the context."""
        started = now()
        try:
            yield
        finally:
            self.note(lane, name, started, now(), nbytes)

    def take(self) -> list[Span]:
        """Return the spans that are done, and remove them."""
        with self._lock:
            spans, self._spans = self._spans, []
            taken: list[Span] = []
            for span in spans:  # read once, since an event may pass at any time
                (taken if span.done.passed else self._spans).append(span)
        return taken


class Gathered:
    """Work in parts on several threads, recorded as one span from the first part's start to the last one's end."""

    def __init__(self, timeline: Timeline, lane: Lane, name: str, parts: int) -> None:
        self._timeline = timeline
        self._lane = lane
        self._name = name
        self._left = parts
        self._nbytes = 0
        self._started: Event | None = None
        self._lock = threading.Lock()

    @contextmanager
    def part(self, nbytes: int) -> Iterator[None]:
        """Do one of the parts within the context."""
        with self._lock:
            started = self._started = self._started or now()
        try:
            yield
        finally:
            with self._lock:
                self._left -= 1
                self._nbytes += nbytes
                last = self._left == 0
            if last:
                self._timeline.note(self._lane, self._name, started, now(), self._nbytes)


def lane_uses(
    spans: Iterable[Span], *, started: float = float("-inf"), done: float = float("inf")
) -> Mapping[Lane, LaneUse]:
    """Sum each lane's bytes and its busy time, in which overlapping work counts once."""
    by_lane: dict[Lane, list[Span]] = {lane: [] for lane in Lane}
    for span in spans:
        by_lane[span.lane].append(span)
    return {
        lane: LaneUse(_busy_seconds(work, started, done), sum(span.nbytes for span in work))
        for lane, work in by_lane.items()
    }


def _busy_seconds(spans: Iterable[Span], since: float, until: float) -> float:
    """Length of the spans' union within a time span."""
    total, reached = 0.0, since
    for started, done in sorted((span.started.seconds, span.done.seconds) for span in spans):
        total += max(min(done, until) - max(started, reached), 0.0)
        reached = max(reached, done)
    return total
