"""The work of a sweep in lanes, as spans of time with the bytes they moved, and traces of it.

A lane does one kind of work: disk reads, uploads, replay and forwards, offloads, or disk writes.
The slowest lane's time is a lower bound of a sweep's time, however well the lanes overlap.

A trace is a file for Chrome's and Perfetto's viewers, with a row for each lane: an array of JSON
events, one a line, whose closing bracket may be missing, so the trace of a killed process is valid,
too. Complete events ("ph": "X") have times in microseconds on the clock of ``time.perf_counter``.

    {"cat": "upload", "name": "block 3", "ts": ..., "dur": ..., "tid": lane and track, "args":
    {"bytes": ...}} {"cat": "sweep", "name": "step 7", "ts": ..., "dur": ..., "tid": 0}

A sweep's event is the time of the step or of the evaluation's pass. Work of the lanes for the next
or the last sweep may overlap it.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from zo2core.errors import OutputError, system_errors_as
from zo2core.io.durable import create_file, require_new_file
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

    def note(
        self, lane: Lane, name: str, started: Event, done: Event, nbytes: int = 0, *, track: int = 0
    ) -> None:
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
            spans = self._spans
            self._spans = []
            ended: list[Span] = []
            for span in spans:  # read once, since an event may pass at any time
                (ended if span.done.passed else self._spans).append(span)
        return ended


class SpanOfParts:
    """Work in parts on several threads, recorded as one span from the first part's start to the
    last one's end.
    """

    def __init__(self, timeline: Timeline, lane: Lane, name: str, parts: int) -> None:
        self._note = partial(timeline.note, lane, name)
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
                self._note(started, now(), self._nbytes)


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


_SWEEP = "sweep"
_STEP = "step "  # prefix of the name of a step's sweep
_LANES = list(Lane)
_TRACKS = 1000  # tracks of one lane, numbered as threads
_DIGITS = 3  # of microseconds: nanoseconds, the clock's resolution


class Sweep(NamedTuple):
    """The time span of one sweep."""

    name: str  # "step 7", "evaluation", "flush"
    started: float  # seconds on the clock of ``time.perf_counter``
    done: float

    @classmethod
    def of_step(cls, step: int, started: float, done: float) -> Sweep:
        """The whole time span of a step."""
        return cls(f"{_STEP}{step}", started, done)


class Trace:
    """A file of sweeps, created with the first one.

    Args:
        path: Path of the file, which must not exist.

    Raises:
        OutputError: if the file exists or cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._named: set[int] = set()
        self._file: IO[str] | None = None
        self._closed = False
        with self._writing():
            require_new_file(path)

    def add(self, spans: Iterable[Span], sweep: Sweep | None = None) -> None:
        """Write spans that are done, and the sweep that has ended.

        Raises:
            OutputError: if that fails.
        """
        events = [event for span in spans for event in self._span(span)]
        if sweep is not None:
            events += [
                *self._lane(0, _SWEEP),
                _complete(_SWEEP, sweep.name, 0, sweep.started, sweep.done),
            ]
        if not events or self._closed:
            return
        text = ",\n".join(map(json.dumps, events))
        with self._writing():
            if self._file is not None:
                self._file.write(f",\n{text}")
                self._file.flush()
                return
            self._closed = True  # unless the first spans can be written
            file = io.TextIOWrapper(create_file(self._path), encoding="utf-8")
            try:
                file.write(f"[\n{text}")
                file.flush()
            except OSError:
                with suppress(OSError):
                    file.close()
                self._path.unlink(missing_ok=True)
                raise
            self._file, self._closed = file, False

    def close(self) -> None:
        """Complete the file. May be called twice.

        Raises:
            OutputError: if that fails; what was written can be read.
        """
        file = self._file
        self._file = None
        self._closed = True
        if file is None:
            return
        with self._writing(), file:
            file.write("\n]\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _span(self, span: Span) -> Iterator[dict[str, Any]]:
        thread = (_LANES.index(span.lane) + 1) * _TRACKS + span.track
        yield from self._lane(
            thread,
            f"evaluation {span.track + 1}" if span.lane is Lane.EVALUATE else span.lane.value,
        )
        event = _complete(
            span.lane.value, span.name, thread, span.started.seconds, span.done.seconds
        )
        yield event if not span.nbytes else {**event, "args": {"bytes": span.nbytes}}

    def _lane(self, thread: int, name: str) -> Iterator[dict[str, Any]]:
        """Name a lane when it is first used."""
        if thread not in self._named:
            self._named.add(thread)
            common = {"ph": "M", "pid": 0, "tid": thread}
            yield {**common, "name": "thread_name", "args": {"name": name}}
            yield {**common, "name": "thread_sort_index", "args": {"sort_index": thread}}

    def _writing(self) -> AbstractContextManager[None]:
        """A context of work on the file."""
        expected, remedy = (
            "a new file in a directory that can be written",
            "pass another path, or free space",
        )
        return system_errors_as(OutputError, self._path, expected=expected, remedy=remedy)


class TraceRecorder:
    """Takes the spans of a timeline sweep by sweep, sums them and writes them to a trace."""

    def __init__(self, timeline: Timeline, trace: Trace | None) -> None:
        self.timeline = timeline
        self._trace = trace

    def end_sweep(self, sweep: Sweep) -> Mapping[Lane, LaneUse]:
        """Write the spans that are done, and sum them by lane."""
        spans = self.timeline.take()
        if self._trace is not None:
            self._trace.add(spans, sweep)
        return lane_uses(spans, started=sweep.started, done=sweep.done)

    @contextmanager
    def sweep(self, name: str) -> Iterator[None]:
        """Record the work within the context, even if it fails, so that no later step counts it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.end_sweep(Sweep(name, started, time.perf_counter()))

    def flush(self) -> None:
        """Record work done outside of sweeps, so that no sweep counts it."""
        spans = self.timeline.take()
        if self._trace is not None:
            self._trace.add(spans)


def _complete(category: str, name: str, thread: int, started: float, done: float) -> dict[str, Any]:
    start = _microseconds(started)
    end = _microseconds(done)
    times = {"ts": start, "dur": round(end - start, _DIGITS)}
    return {"ph": "X", "pid": 0, "cat": category, "name": name, "tid": thread, **times}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, _DIGITS)
