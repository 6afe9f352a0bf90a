"""Seeing it: what a trace and a step's numbers say of who did what when."""

import errno
import io
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_lines import done, run_here
from engines import fails_at, zeroth_order
from models import make_batch, save_model, small_config
from threaded_device import ThreadedDevice, ThreadedStreams

from zo2adapters import HFBlockModel, open_checkpoint
from zo2core import (
    Engine,
    EngineOptions,
    HostDevice,
    MemoryPolicy,
    MeZOSGD,
    StepResult,
    Trace,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.errors import OutputError
from zo2core.planning.memory import DevicePlan, HostPlan
from zo2core.protocols import Device
from zo2core.schedulers.profiling import PastEvent, Span, SpanOfParts, Sweep, Timeline, lane_uses
from zo2core.sources.segment_store import laid_out_as_on_disk
from zo2core.types import Lane

STEPS = 3
BLOCKS = 3
BATCH = make_batch(40, [5, 7])
SEGMENTS = ["embedding", *(f"block {i}" for i in range(BLOCKS)), "head"]
DELAY = 0.002  # seconds a copy


class Recording(NamedTuple):
    spans: tuple[Span, ...]
    sweeps: tuple[Sweep, ...]  # in the order in which they ended

    def of_step(self, step: int) -> Sweep:
        [sweep] = [sweep for sweep in self.sweeps if sweep.name == f"step {step}"]
        return sweep

    def within(self, sweep: Sweep) -> list[Span]:
        """The spans that a sweep's time has a part of, in order."""
        spans = [
            span
            for span in self.spans
            if span.started.seconds < sweep.done and span.done.seconds > sweep.started
        ]
        return sorted(spans, key=lambda span: span.started.seconds)


def read_trace(path: Path) -> Recording:
    """The spans and sweeps of a whole file, of one without its closing bracket, and of one whose
    last line is torn.
    """
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
                Span(
                    Lane(event["cat"]),
                    event["name"],
                    PastEvent(begun),
                    PastEvent(done),
                    nbytes,
                    event["tid"] % 1000,
                )
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


class Order(NamedTuple):
    overlap: bool
    kept: int = 0  # blocks that stay on a device with memory of its own


# To add a scheduler: one row.
SCHEDULERS = {
    "serial": Order(overlap=False),
    "overlapped": Order(overlap=True),
    "overlapped, a block kept": Order(overlap=True, kept=1),
}

DEVICES: dict[str, Callable[[], Device]] = {
    "in place": HostDevice,
    "behind copies": lambda: ThreadedDevice(ThreadedStreams(lambda lane, nbytes: DELAY)),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("base"), small_config("llama", num_hidden_layers=BLOCKS)
    )


def traced_run(
    base: Path, path: Path, order: Order, device: Device, *, streamed: bool
) -> tuple[HFBlockModel, list[StepResult], Recording]:
    """Some steps, written back after each, and what their trace says."""
    model = open_checkpoint(base)
    plan = DevicePlan((), 0, order.kept, 2**28)
    with zeroth_order(
        model,
        MeZOSGD(lr=1e-3, zo_eps=1e-3),
        device=device,
        memory=MemoryPolicy(
            host=HostPlan((), 2**28, buckets=1 if streamed else None, keep_noise=True),
            device="auto" if device.in_place or not order.overlap else plan,
        ),
        write_back=None
        if streamed
        else WriteBackPolicy(directory=path.parent / "scratch", every=1),
        overlap=order.overlap,
        trace=path,
    ) as engine:
        results = [engine.step(BATCH) for _ in range(STEPS)]
    return model, results, read_trace(path)


def of(spans: list[Span], lane: Lane, track: int = 0) -> list[Span]:
    return [span for span in spans if span.lane is lane and span.track == track]


def require_lanes_in_order(
    results: list[StepResult], recording: Recording, device: Device, *, streamed: bool
) -> None:
    assert [sweep.name for sweep in recording.sweeps] == [
        f"step {result.step}" for result in results
    ]
    for result in results:
        spans = recording.within(recording.of_step(result.step))
        replays, first, second = (
            of(spans, Lane.REPLAY),
            of(spans, Lane.EVALUATE),
            of(spans, Lane.EVALUATE, 1),
        )
        for visits in (replays, first, second):
            assert [span.name for span in visits] == SEGMENTS
        for replay, plus, minus in zip(replays, first, second, strict=True):
            assert replay.done.seconds <= plus.started.seconds
            assert plus.done.seconds <= minus.started.seconds
    steps = [recording.within(recording.of_step(result.step)) for result in results]
    uploads, offloads = (
        [of(spans, lane) for spans in steps] for lane in (Lane.UPLOAD, Lane.OFFLOAD)
    )
    if device.in_place:
        assert not any([*uploads, *offloads])
    else:
        assert uploads[0]
        assert all(offloads[1:])
    written = {span.name for span in recording.spans if span.lane is Lane.WRITE}
    assert written == (set() if streamed else set(SEGMENTS))
    assert {span.name for span in recording.spans if span.lane is Lane.READ} == set(SEGMENTS)


def require_bytes_that_were_moved(
    model: HFBlockModel, results: list[StepResult], recording: Recording, *, streamed: bool
) -> None:
    weights = {
        layout.name: sum(spec.nbytes for spec in layout.parameters) for layout in model.layouts
    }
    layouts = laid_out_as_on_disk(model.layouts, model.weights) if streamed else model.layouts
    buckets = {layout.name: layout.nbytes for layout in layouts}
    for span in recording.spans:
        if span.lane is Lane.READ:
            assert span.nbytes == weights[span.name], "all parts of a segment, whoever read them"
        elif span.lane in (Lane.UPLOAD, Lane.OFFLOAD):
            assert span.nbytes == buckets[span.name]
        elif span.lane is Lane.WRITE:
            assert buckets[span.name] <= span.nbytes < buckets[span.name] + 4096
        else:
            assert span.nbytes == 0
    reads = [span.name for span in recording.spans if span.lane is Lane.READ]
    assert len(reads) > len(SEGMENTS) if streamed else len(reads) == len(SEGMENTS)
    last = max(recording.sweeps, key=lambda sweep: sweep.done).done
    for lane in Lane:
        told = sum(result.lanes[lane].nbytes for result in results)
        known = [
            span.nbytes
            for span in recording.spans
            if span.lane is lane and span.done.seconds <= last
        ]
        assert told == sum(known), "each piece of work counts in one step"


def require_bounds(results: list[StepResult], recording: Recording) -> None:
    """No lane is busier than its step, and the slowest one is the bound."""
    for result in results:
        assert all(0 <= use.busy_seconds <= result.seconds for use in result.lanes.values())
        compute = result.lanes[Lane.REPLAY].busy_seconds + result.lanes[Lane.EVALUATE].busy_seconds
        assert 0 < compute <= result.bound_seconds <= result.seconds
        assert result.bound_seconds in (
            compute,
            *(use.busy_seconds for use in result.lanes.values()),
        )
        sweep = recording.of_step(result.step)
        assert sweep.done - sweep.started == pytest.approx(result.seconds, abs=1e-6)


@pytest.mark.few(5)
@pytest.mark.parametrize("streamed", [False, True], ids=["pinned", "streamed"])
@pytest.mark.parametrize("on", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("order", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_trace_and_the_numbers_of_steps_say_what_was_done(
    order: Order, on: Callable[[], Device], streamed: bool, base: Path, tmp_path: Path
) -> None:
    device = on()
    model, results, recording = traced_run(
        base, tmp_path / "t.json", order, device, streamed=streamed
    )
    require_lanes_in_order(results, recording, device, streamed=streamed)
    require_bytes_that_were_moved(model, results, recording, streamed=streamed)
    assert [result.bytes_moved > 0 for result in results] == [not device.in_place] * STEPS
    require_bounds(results, recording)


def span(
    lane: Lane, begun: float, done: float, nbytes: int = 0, name: str = "block 0", track: int = 0
) -> Span:
    return Span(lane, name, PastEvent(begun), PastEvent(done), nbytes, track)


def test_what_happened_outside_a_sweep_is_in_the_trace_but_in_no_step(
    base: Path, tmp_path: Path
) -> None:
    """An export between two steps, and what is written after the last."""
    with Engine(
        open_checkpoint(base),
        ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3)),
        options=EngineOptions(trace=tmp_path / "t.json"),
    ) as engine:
        engine.step(BATCH)
        for _ in engine.parameters_now():
            pass
        after = engine.step(BATCH)
        engine.evaluate([BATCH])
        engine.flush()
        for _ in engine.parameters_now():
            pass
    recording = read_trace(tmp_path / "t.json")
    assert [sweep.name for sweep in recording.sweeps] == ["step 0", "step 1", "evaluation", "flush"]
    assert len([each for each in recording.spans if each.lane is Lane.REPLAY]) == 6 * len(SEGMENTS)
    within = recording.within(recording.of_step(1))
    assert after.lanes[Lane.REPLAY].busy_seconds == pytest.approx(
        sum(each.done.seconds - each.started.seconds for each in of(within, Lane.REPLAY)), abs=1e-5
    )


def test_a_trace_is_what_chrome_expects(base: Path, tmp_path: Path) -> None:
    traced_run(
        base, tmp_path / "t.json", Order(overlap=False), DEVICES["behind copies"](), streamed=False
    )
    events = json.loads((tmp_path / "t.json").read_text())
    assert {event["ph"] for event in events} == {"M", "X"}
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    order = sorted(names.items())
    rows = ["sweep", "read", "upload", "replay", "evaluation 1", "evaluation 2", "offload", "write"]
    assert [name for _, name in order] == rows
    assert all(
        event["dur"] >= 0 and event["tid"] in names for event in events if event["ph"] == "X"
    )
    for tid, name in order[1:]:
        own = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == tid
        )
        assert name == "read" or all(one[1] <= other[0] + 1e-3 for one, other in pairwise(own)), (
            "one after the other"
        )


def written(path: Path) -> Path:
    with Trace(path) as trace:
        trace.add([span(Lane.READ, 1, 2, 10)], Sweep.of_step(0, 1, 3))
        trace.add([span(Lane.EVALUATE, 3, 4, track=1)], Sweep.of_step(1, 3, 5))
    return path


def test_a_trace_reads_back_as_it_was_written_and_cut_anywhere_gives_its_whole_lines(
    tmp_path: Path,
) -> None:
    raw = written(tmp_path / "t.json").read_text()
    recording = read_trace(tmp_path / "t.json")
    assert recording.spans == (span(Lane.READ, 1, 2, 10), span(Lane.EVALUATE, 3, 4, track=1))
    assert recording.sweeps == (Sweep("step 0", 1, 3), Sweep("step 1", 3, 5))
    ends = [place for place, character in enumerate(raw) if character == "\n"]  # of lines
    lines = raw.split("\n")
    assert sum('"ph": "X"' in line for line in lines) == 4
    for size in range(1, len(raw)):
        (tmp_path / "cut.json").write_text(raw[:size])
        found = read_trace(tmp_path / "cut.json")
        whole = sum(
            '"ph": "X"' in line for line, end in zip(lines, ends, strict=False) if end < size
        )
        torn = raw[:size].rpartition("\n")[2]
        whole += (
            '"ph": "X"' in torn
            and torn.rstrip(",").endswith("}")
            and torn.count("{") == torn.count("}")
        )
        assert len(found.spans) + len(found.sweeps) == whole, size


def test_a_trace_is_made_where_nothing_stands(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "link.json").symlink_to(tmp_path / "made")
    for path, told in (
        (tmp_path / ("n" * 300), "name too long"),
        (tmp_path / "rows.jsonl", "something at this path"),
        (tmp_path / "link.json", "something at this path"),
        (tmp_path / "nowhere" / "t.json", "a directory that does not exist"),
    ):
        with pytest.raises(OutputError, match=told):
            Trace(path)
    with Trace(tmp_path / "t.json"):
        pass
    assert not (tmp_path / "t.json").exists(), "no sweep, no file"


@pytest.mark.parametrize("sweeps", [0, 1])
def test_a_disk_that_is_full_is_a_typed_error_and_no_file_without_a_sweep_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweeps: int
) -> None:
    class Filling(io.FileIO):
        def write(self, content: Any) -> int:
            if bool(self.tell()) == bool(sweeps):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

    trace = Trace(tmp_path / "t.json")
    monkeypatch.setattr("zo2core.schedulers.profiling.create_file", lambda path: Filling(path, "x"))
    for number in range(sweeps):
        trace.add([span(Lane.READ, number, number + 1)])
    with pytest.raises(OutputError, match="No space left"):
        trace.add([span(Lane.READ, 5, 6)])
    if sweeps:
        with pytest.raises(OutputError, match="No space left"):
            trace.close()
    trace.close()
    trace.add([span(Lane.READ, 6, 7)])  # without effect, after the end
    assert (tmp_path / "t.json").exists() == bool(sweeps)


def test_work_at_once_counts_once_and_its_parts_are_one_span() -> None:
    spans = [
        span(Lane.READ, 0, 4, 5),
        span(Lane.READ, 1, 3, 6),
        span(Lane.READ, 8, 12, 7),
        span(Lane.READ, 20, 30, 8),
    ]
    assert lane_uses(spans)[Lane.READ] == (18, 26)
    assert lane_uses(spans, started=2, done=10)[Lane.READ] == (4, 26), "only within the step"
    timeline = Timeline()
    gathered = SpanOfParts(timeline, Lane.READ, "block 0", 2)
    with gathered.part(3):
        pass
    assert timeline.take() == []
    with pytest.raises(ZeroDivisionError), gathered.part(4):
        raise ZeroDivisionError
    (found,) = timeline.take()
    assert (found.name, found.nbytes) == ("block 0", 7)


def test_of_too_many_spans_the_older_half_goes_and_one_that_is_not_done_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zo2core.schedulers.profiling._CAPACITY", 4)
    timeline = Timeline()
    for name in "abcdef":
        timeline.note(Lane.READ, name, PastEvent(0), PastEvent(1, passed=name != "e"))
    assert [found.name for found in timeline.take()] == ["c", "d", "f"]
    assert timeline.take() == []
    assert [waiting.name for waiting in timeline._spans] == ["e"]


def sweeps_in(path: str) -> list[str]:
    return [sweep.name for sweep in read_trace(Path(path)).sweeps]


def test_the_commands_trace_and_resume(here: Path) -> None:
    given = (
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--evaluation",
        "rows.jsonl",
        "--steps",
        3,
        "--batch-size",
        9,
    )
    done("train", "--method", "zeroth-order", *given, "--output", "run", "--trace", "a.json")
    assert sweeps_in("a.json") == ["evaluation", "step 0", "step 1", "step 2", "evaluation"]
    journal = here / "run" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-2]))  # without the last step, and the evaluation after it
    for name in ("metrics.jsonl", "scratch.bin", "scratch.jsonl"):
        # which know that there was one step more
        (here / "run" / name).unlink(missing_ok=True)
    done("train", "--resume", "run", "--trace", "c.json")
    assert sweeps_in("c.json") == ["step 2", "evaluation"]
    assert journal.read_bytes() == b"".join(lines)
    done("evaluate", "--model", "base", "--data", "rows.jsonl", "--trace", "d.json")
    assert sweeps_in("d.json") == ["evaluation"]


def test_metrics_tell_lanes_bytes_and_the_bound(here: Path) -> None:
    done(
        "train",
        "--method",
        "zeroth-order",
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--output",
        "run",
        "--steps",
        2,
    )
    for line in (here / "run" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert list(row["lanes"]) == [lane.value for lane in Lane]
        assert all(0 <= lane["busy"] <= 1 for lane in row["lanes"].values())
        assert row["bytes_moved"] == 0, "computed on where the bytes lie"
        busiest = max(
            row["lanes"]["replay"]["busy"] + row["lanes"]["evaluate"]["busy"],
            row["lanes"]["read"]["busy"],
        )
        assert row["seconds"] * busiest <= row["bound_seconds"] * (1 + 1e-9) <= row["seconds"]
        read = row["lanes"]["read"]["bytes"]
        assert (read > 0) == (row["step"] == 0), "once, then it is all in memory"


def test_an_interrupted_run_leaves_a_whole_trace(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "step", fails_at(Engine.step, 3, KeyboardInterrupt()))
    ended = run_here(
        "train",
        "--method",
        "zeroth-order",
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--output",
        "run",
        "--trace",
        "t.json",
    )
    assert ended.status == 130
    json.loads((here / "t.json").read_text())
    assert sweeps_in("t.json") == ["step 0", "step 1"]
