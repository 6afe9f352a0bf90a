"""Reading a trace file back, for tests: a viewer's part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from zo2core.profiling import PastEvent, Span, Sweep
from zo2core.types import Lane


class Recording(NamedTuple):
    """What a trace holds."""

    spans: tuple[Span, ...]
    sweeps: tuple[Sweep, ...]  # in the order in which they ended

    def of_step(self, step: int) -> Sweep:
        [sweep] = [sweep for sweep in self.sweeps if sweep.name == f"step {step}"]
        return sweep

    def within(self, sweep: Sweep) -> list[Span]:
        """The spans that a sweep's time has a part of, in order."""
        spans = [span for span in self.spans if span.started.seconds < sweep.done and span.done.seconds > sweep.started]
        return sorted(spans, key=lambda span: span.started.seconds)


def read_trace(path: Path) -> Recording:
    """The spans and sweeps of a whole file, of one without its closing bracket, and of one whose last line is torn."""
    spans: list[Span] = []
    sweeps: list[Sweep] = []
    for event in map(_event, path.read_text().split("\n")):
        if event.get("ph") != "X":
            continue
        begun, done = _seconds(event["ts"]), _seconds(event["ts"] + event["dur"])
        if event["cat"] == "sweep":
            sweeps.append(Sweep(event["name"], begun, done))
        else:
            nbytes = int(event.get("args", {}).get("bytes", 0))
            spans.append(
                Span(Lane(event["cat"]), event["name"], PastEvent(begun), PastEvent(done), nbytes, event["tid"] % 1000)
            )
    return Recording(tuple(spans), tuple(sweeps))


def _event(line: str) -> dict[str, Any]:
    """The event of a line; empty for a bracket, and for a line that is torn."""
    try:
        event = json.loads(line.rstrip(","))
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _seconds(microseconds: float) -> float:
    """Rounded so that times that were equal when they were written are equal when they are read."""
    return round(microseconds, 3) / 1e6
