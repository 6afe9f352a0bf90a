"""A run killed at any moment, again and again, ends as the undisturbed one: weights, losses and journal, bit for bit.

Workers are forked from one process that has imported everything, and killed by SIGKILL in two ways: at the n-th call that
changes a file (before it, in its middle, after it), which is exact, and by the clock, which hits what nobody thought of.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, NoReturn

import pytest
import torch
from command_lines import environment
from models import WORDS, save_model, save_tokenizer, small_config
from profiles import short_first
from runs import outcome

from zo2adapters.trainers.batching import Batching
from zo2adapters.trainers.lr_schedules import Decay
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import Storage, TrainOptions
from zo2adapters.trainers.run_directory import RunDirectory
from zo2adapters.trainers.trainer import Trainer
from zo2core.io.direct_file import PAGE
from zo2core.planning.memory import HostPlan
from zo2core.planning.run_spec import plan_host

STEPS = 6
SECONDS = 60  # an attempt takes a fraction of one
PAUSE = 0.001  # seconds after each call, where the clock kills: so it hits the files more often than the arithmetic
FILES = {"options.json", "recipe.yaml", "journal.jsonl", "metrics.jsonl", "scratch.bin", "scratch.jsonl", "lock", "model"}
CALLS = ("pwrite", "fsync", "fdatasync", "ftruncate", "replace", "rename", "mkdir")  # of os: what changes files

Moment = Literal["before", "middle", "after"]
MOMENTS: tuple[Moment, ...] = ("before", "middle", "after")


class Setup(NamedTuple):
    """Where a run keeps its weights."""

    buckets: int | None  # None: all blocks resident
    keep_noise: bool
    write_back_every: int | Literal["auto", "never"]
    snapshot_every: int | None = None


SETUPS = {
    "pinned, written every step": Setup(None, True, 1),
    "pinned, written every second step": Setup(None, False, 2),
    "pinned, never written": Setup(None, True, "never"),
    "pinned, snapshots": Setup(None, True, "never", 3),
    "streamed, written every step": Setup(2, True, 1),
    "streamed, written every second step": Setup(1, False, 2),
    "streamed, never written": Setup(2, False, "never"),
    "streamed, snapshots": Setup(1, True, 4, 3),
}

every_setup = pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What a worker is to do, and when to die."""

    base: str  # directory of the model; the rows lie beside it
    run: str
    setup: Setup
    kill_at: int | None = None  # call, from 1
    moment: Moment = "before"
    file: str | None = None  # count only writes to files of this name, calls that have a middle
    delay: float | None = None  # seconds until it is killed from outside


class Ended(NamedTuple):
    """What became of it."""

    killed: bool
    calls: int  # it had begun
    seconds: float


# The worker's side.


class Strikes:
    """Counts the calls that change files, and ends the process at one of them."""

    def __init__(self, attempt: Attempt, shared: mmap.mmap) -> None:
        self._attempt = attempt
        self._shared = shared  # with the server, which reads it when this process is no more
        self._count = 0
        self._of_file = 0
        self._over = False
        self._lock = threading.Lock()  # main and writing thread

    def wrap(self, real: Callable[..., Any], half: Callable[..., object] | None = None) -> Callable[..., Any]:
        """Let calls be counted.

        Args:
            real: What is called.
            half: Does a part of it, such as a killed process leaves.
        """

        def struck(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._count += 1
                struct.pack_into("<q", self._shared, 0, self._count)
                self._of_file += (
                    self._attempt.file is not None and half is not None and file_of(args[0]) == self._attempt.file
                )
                counted = self._count if self._attempt.file is None else self._of_file
                now = not self._over and counted == self._attempt.kill_at
                self._over = self._over or now
            if now and self._attempt.moment == "before":
                die()
            if now and self._attempt.moment == "middle" and half is not None:
                half(*args)
                die()
            if self._attempt.delay is not None and half is half_pwrite:
                half(*args)  # the whole write follows; between them the clock may strike
                time.sleep(PAUSE)
            try:
                result = real(*args, **kwargs)
            finally:  # also if a directory is there already
                if now:
                    die()
            if self._attempt.delay is not None:
                time.sleep(PAUSE)
            return result

        return struck


def file_of(opened: int | IO[Any]) -> str:
    """The name of an open file."""
    descriptor = opened if isinstance(opened, int) else opened.fileno()
    return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived SIGKILL")


real_pwrite = os.pwrite


def half_pwrite(descriptor: int, data: bytes, offset: int) -> None:
    """Write the first half; direct I/O takes whole pages only."""
    count = len(data) // 2
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        count -= count % PAGE
    real_pwrite(descriptor, data[:count], offset)


def half_row(file: IO[Any], record: dict[str, Any]) -> None:
    """Write half a line of the metrics."""
    line = json.dumps(record).encode()
    os.write(file.fileno(), line[: len(line) // 2])


def work(attempt: Attempt, shared: mmap.mmap) -> None:
    """Begin a run, or go on with it, to its end."""
    setup, run = attempt.setup, Path(attempt.run)

    def planned(*args: Any, **kwargs: Any) -> HostPlan:
        # By its memory budget no arrangement could be forced: of a tiny model's process nearly all is the interpreter.
        return replace(plan_host(*args, **kwargs), buckets=setup.buckets, keep_noise=setup.keep_noise)

    patch, strikes = pytest.MonkeyPatch(), Strikes(attempt, shared)
    patch.setattr("zo2core.planning.run_spec.plan_host", planned)
    for name in CALLS:
        patch.setattr(os, name, strikes.wrap(getattr(os, name), half_pwrite if name == "pwrite" else None))
    patch.setattr(
        "zo2adapters.trainers.trainer.write_row",
        strikes.wrap(sys.modules["zo2adapters.trainers.trainer"].__dict__["write_row"], half_row),
    )
    resume = (run / "options.json").exists()
    if not resume and run.exists():
        assert {path.name for path in run.iterdir()} <= {"lock", ".options.json.partial"}, (
            "without options nothing was begun"
        )
        shutil.rmtree(run)
    options = RunDirectory.options(run) if resume else new_options(Path(attempt.base), run, setup)
    with Trainer(options, resume=resume, quiet=True) as trainer:
        trainer.run()


def new_options(base: Path, run: Path, setup: Setup) -> TrainOptions:
    return TrainOptions(
        model=str(base),
        data=base.parent / "rows.jsonl",
        evaluation=base.parent / "few.jsonl",
        evaluate_every=2,
        output=run,
        steps=STEPS,
        seed=3,
        optimization=Optimization(lr=1e-2, decay=Decay.LINEAR, warmup_steps=2),
        batching=Batching(batch_size=3),
        storage=Storage(write_back_every=setup.write_back_every, snapshot_every=setup.snapshot_every),
    )


def serve() -> None:
    """Fork a worker for each line of standard input, and say on standard output how it ended."""
    torch.set_num_threads(1)
    assert threading.active_count() == 1, "a forked process has no threads but the one that forked"
    for line in sys.stdin:
        values = json.loads(line)
        attempt = Attempt(**values | {"setup": Setup(*values["setup"])})
        shared = mmap.mmap(-1, 8)
        began = time.perf_counter()
        worker = os.fork()
        if worker == 0:
            code = 1
            try:
                os.dup2(2, 1)  # whatever is printed, the answers stay legible
                work(attempt, shared)
                code = 0
            except BaseException:  # whatever it is, the test is told
                traceback.print_exc()
            finally:
                os._exit(code)
        limit = SECONDS if attempt.delay is None else attempt.delay
        status = wait_for(worker, limit)
        if status is None:
            os.kill(worker, signal.SIGKILL)
            _, status = os.waitpid(worker, 0)
        hung = attempt.delay is None and time.perf_counter() - began > SECONDS
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and not hung
        fine = killed or (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0)
        answer = {
            "killed": killed,
            "fine": fine,
            "calls": struct.unpack_from("<q", shared)[0],
            "seconds": time.perf_counter() - began,
        }
        print(json.dumps(answer), flush=True)
    os._exit(0)  # without a visit to all that was imported


def wait_for(worker: int, seconds: float) -> int | None:
    """Wait for a process.

    Returns:
        Its status; None if it still runs.
    """
    end = time.perf_counter() + seconds
    while True:
        found, status = os.waitpid(worker, os.WNOHANG)
        if found:
            return status
        if time.perf_counter() >= end:
            return None
        time.sleep(0.001)


# The test's side.


class Undisturbed(NamedTuple):
    """A run that nothing happened to."""

    outcome: dict[str, object]
    calls: int
    seconds: float  # with the pauses


class Server:
    """The process that forks the workers."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._undisturbed: dict[Setup, Undisturbed] = {}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(),
            )
        self.base = save_model(folder / "base", small_config("llama", vocab_size=len(WORDS), num_hidden_layers=3))
        save_tokenizer(self.base)
        rows = [{"prompt": f"the cat {word}", "completion": f" {other}"} for word in WORDS[5:] for other in WORDS[8:]]
        for name, some in {"rows.jsonl": rows, "few.jsonl": rows[:5]}.items():
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in some))

    def attempt(self, run: Path, setup: Setup, **death: Any) -> Ended:
        """Have a worker begin or continue a run; fail if it ends otherwise than by itself or by SIGKILL."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        attempt = Attempt(base=str(self.base), run=str(run), setup=setup, **death)
        self._process.stdin.write(json.dumps(asdict(attempt)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self._log.read_text()
        answer = json.loads(line)
        assert answer.pop("fine"), f"{attempt}\n{self._log.read_text()[-4000:]}"
        return Ended(**answer)

    def undisturbed(self, setup: Setup, folder: Path) -> Undisturbed:
        """A setup's run that nothing happens to; made once."""
        if setup not in self._undisturbed:
            folder.mkdir()  # else the worker makes it, which counts
            ended = self.attempt(folder / "run", setup, delay=float(SECONDS))
            assert not ended.killed
            self._undisturbed[setup] = Undisturbed(outcome(folder / "run"), ended.calls, ended.seconds)
        return self._undisturbed[setup]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with contextlib.closing(Server(tmp_path_factory.mktemp("kill"))) as made:
        yield made


@pytest.fixture
def undisturbed(server: Server, setup: Setup, tmp_path: Path) -> Undisturbed:
    return server.undisturbed(setup, tmp_path / "undisturbed")


@pytest.fixture(scope="module")
def reference(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """One for all: where the weights are kept does not show in them."""
    run = tmp_path_factory.mktemp("reference") / "run"
    server.attempt(run, SETUPS["pinned, never written"])
    return outcome(run)


def assert_ended_as(run: Path, expected: dict[str, object]) -> None:
    found = outcome(run)
    assert found["journal"] == expected["journal"]
    assert found["weights"] == expected["weights"]
    assert found["metrics"] == expected["metrics"]
    assert {path.name for path in run.iterdir()} <= FILES, "a killed process's leavings are cleared away"


def deaths(rng: random.Random, whole: Undisturbed) -> dict[str, Any]:
    """When to die next, at any point of a whole run: what is beyond the end of what is left does not happen."""
    if rng.random() < 0.4:
        return {"delay": rng.uniform(0, whole.seconds)}
    return {"kill_at": rng.randint(1, whole.calls), "moment": rng.choice(MOMENTS)}


@pytest.mark.long_profile
@every_setup
def test_a_run_killed_again_and_again_ends_as_the_undisturbed_one(
    server: Server,
    setup: Setup,
    undisturbed: Undisturbed,
    reference: dict[str, object],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    assert undisturbed.outcome == reference
    wanted = 60 if request.config.getoption("--long") else 3
    rng = random.Random(f"{setup}")
    kills, runs = 0, 0
    while kills < wanted:
        run, runs = tmp_path / f"run {runs}", runs + 1
        while server.attempt(run, setup, **(deaths(rng, undisturbed) if kills < wanted else {})).killed:
            kills += 1
        assert_ended_as(run, reference)


@pytest.mark.few(1)
@every_setup
def test_writes_cut_in_half_are_made_up_for(
    server: Server, setup: Setup, reference: dict[str, object], tmp_path: Path
) -> None:
    run, written = tmp_path / "run", setup.write_back_every != "never" or setup.snapshot_every is not None
    for file in ("journal.jsonl", *(("scratch.bin", "scratch.jsonl") if written else ()), "metrics.jsonl"):
        assert server.attempt(run, setup, file=file, kill_at=2, moment="middle").killed, file
    server.attempt(run, setup)
    assert_ended_as(run, reference)


@pytest.mark.long_profile
@pytest.mark.parametrize("buckets", short_first([1], [None]))
def test_a_run_killed_while_it_measures_the_disk_leaves_nothing(
    server: Server, buckets: int | None, reference: dict[str, object], tmp_path: Path
) -> None:
    setup, run = Setup(buckets, True, "auto"), tmp_path / "run"
    for call in range(1, 12):  # at each start, a little later: among them are all calls of the probe
        assert server.attempt(run, setup, kill_at=call, moment="middle").killed
    server.attempt(run, setup)
    assert_ended_as(run, reference)


@pytest.mark.few(1)
@every_setup
def test_a_run_killed_at_any_call_ends_as_the_undisturbed_one(
    server: Server,
    setup: Setup,
    undisturbed: Undisturbed,
    reference: dict[str, object],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    # In its middle, or after it where it has none: after one is before the next. Or at one call a setup, each time later.
    place, last = list(SETUPS.values()).index(setup), undisturbed.calls - 9
    one = 1 + place * (last - 1) // (len(SETUPS) - 1)
    calls = range(1, undisturbed.calls + 1) if request.config.getoption("--long") else [one]
    kills = 0
    for call in calls:
        run = tmp_path / f"run {call}"
        kills += server.attempt(run, setup, kill_at=call, moment="middle").killed
        server.attempt(run, setup)
        assert_ended_as(run, reference)
        shutil.rmtree(run)
    assert kills >= 0.9 * len(calls), "nearly every call comes in every run"


if __name__ == "__main__":
    serve()
