"""Sweeps as a trace file for Chrome's and Perfetto's viewers: a row for each lane, with bytes.

The file is an array of JSON events, one a line, whose closing bracket may be missing, so the trace of a killed process is
valid, too. Complete events ("ph": "X") have times in microseconds on the clock of ``time.perf_counter``.

    {"cat": "upload", "name": "block 3", "ts": ..., "dur": ..., "tid": lane and track, "args": {"bytes": ...}}
    {"cat": "sweep", "name": "step 7", "ts": ..., "dur": ..., "tid": 0}

A sweep's event is the time of the step or of the evaluation's pass. Work of the lanes for the next or the last sweep may
overlap it.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from zo2core.errors import OutputError, reason
from zo2core.io.durable import create_file
from zo2core.profiling.timeline import Span, Timeline, lane_uses
from zo2core.types import Lane, LaneUse

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
        try:
            os.lstat(path)
        except FileNotFoundError:
            pass
        except OSError as error:  # a name that is too long, say
            raise self._unwritable(reason(error)) from error
        else:
            raise self._unwritable("something at this path")
        if not os.access(path.parent, os.W_OK):
            raise self._unwritable("a directory that does not exist, or is not writable")

    def add(self, spans: Iterable[Span], sweep: Sweep | None = None) -> None:
        """Write spans that are done, and the sweep that has ended.

        Raises:
            OutputError: if that fails.
        """
        events = [event for span in spans for event in self._span(span)]
        if sweep is not None:
            events += [*self._lane(0, _SWEEP), _complete(_SWEEP, sweep.name, 0, sweep.started, sweep.done)]
        if not events or self._closed:
            return
        try:
            if self._file is None:
                self._file = io.TextIOWrapper(create_file(self._path), encoding="utf-8")
                self._file.write("[\n" + json.dumps(events.pop(0)))
            self._file.writelines(f",\n{json.dumps(event)}" for event in events)
            self._file.flush()
        except OSError as error:
            raise self._unwritable(reason(error)) from error

    def close(self) -> None:
        """Complete the file. May be called twice.

        Raises:
            OutputError: if that fails; what was written can be read.
        """
        file, self._file, self._closed = self._file, None, True
        if file is None:
            return
        try:
            with file:
                file.write("\n]\n")
        except OSError as error:
            raise self._unwritable(reason(error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _span(self, span: Span) -> Iterator[dict[str, Any]]:
        thread = (_LANES.index(span.lane) + 1) * _TRACKS + span.track
        yield from self._lane(thread, row_name(span))
        event = _complete(span.lane.value, span.name, thread, span.started.seconds, span.done.seconds)
        yield event if not span.nbytes else {**event, "args": {"bytes": span.nbytes}}

    def _lane(self, thread: int, name: str) -> Iterator[dict[str, Any]]:
        """Name a lane when it is first used."""
        if thread not in self._named:
            self._named.add(thread)
            common = {"ph": "M", "pid": 0, "tid": thread}
            yield {**common, "name": "thread_name", "args": {"name": name}}
            yield {**common, "name": "thread_sort_index", "args": {"sort_index": thread}}

    def _unwritable(self, found: str) -> OutputError:
        return OutputError(
            self._path,
            found=found,
            expected="a new file in a directory that can be written",
            remedy="pass another path, or free space",
        )


class TraceRecorder:
    """Takes the spans of a timeline sweep by sweep, sums them and writes them to a trace."""

    def __init__(self, timeline: Timeline, trace: Trace | None) -> None:
        self.timeline = timeline
        self._trace = trace

    def ended(self, sweep: Sweep) -> Mapping[Lane, LaneUse]:
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
            self.ended(Sweep(name, started, time.perf_counter()))

    def flush(self) -> None:
        """Record work done outside of sweeps, so that no sweep counts it."""
        spans = self.timeline.take()
        if self._trace is not None:
            self._trace.add(spans)


def row_name(span: Span) -> str:
    """Name a span's row in trace viewers: its lane, or the evaluation."""
    return f"evaluation {span.track + 1}" if span.lane is Lane.EVALUATE else span.lane.value


def _complete(category: str, name: str, thread: int, started: float, done: float) -> dict[str, Any]:
    start, end = _microseconds(started), _microseconds(done)
    times = {"ts": start, "dur": round(end - start, _DIGITS)}
    return {"ph": "X", "pid": 0, "cat": category, "name": name, "tid": thread, **times}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, _DIGITS)
