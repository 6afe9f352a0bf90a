"""Sweeps as a file that Chrome's and Perfetto's trace viewers open: one lane each, with bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from zo2core.errors import OutputError
from zo2core.timeline import Lane, Span

_TRACKS = 1000  # thread numbers of one lane: its tracks


class Trace:
    """A file of trace events (the JSON array format, whose closing bracket may be missing).

    Args:
        path: Is overwritten.

    Raises:
        OutputError: if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._named: set[int] = set()
        self._separator = ""
        try:
            self._file = path.open("w")
            self._file.write("[")
        except OSError as error:
            raise self._unwritable(error) from error

    def add(self, spans: Iterable[Span]) -> None:
        """Write spans that are done.

        Raises:
            OutputError: if that fails.
        """
        try:
            for span in spans:
                self._write(span)
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Complete the file. May be called twice."""
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, span: Span) -> None:
        lane = list(Lane).index(span.lane) * _TRACKS + span.track
        if lane not in self._named:
            self._named.add(lane)
            name = span.lane.value if span.lane is not Lane.EVALUATE else f"{span.lane.value} {span.track + 1}"
            self._event({"ph": "M", "name": "thread_name", "tid": lane, "args": {"name": name}})
            self._event({"ph": "M", "name": "thread_sort_index", "tid": lane, "args": {"sort_index": lane}})
        begun, done = span.begun.seconds, span.done.seconds
        times = {"ts": begun * 1e6, "dur": (done - begun) * 1e6}  # microseconds
        args = {"bytes": span.nbytes} if span.nbytes else {}
        self._event({"ph": "X", "name": span.name, "cat": span.lane.value, "tid": lane, **times, "args": args})

    def _event(self, event: dict[str, Any]) -> None:
        self._file.write(f"{self._separator}\n{json.dumps({'pid': 0, **event})}")
        self._separator = ","

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(
            self._path,
            found=error.strerror or str(error),
            expected="a file that can be written",
            remedy="choose another file or free space",
        )
