"""Faults below Python's file calls: short transfers, failing reads, full disks, failing syncs.

No step is lost or wrong.

``faults.c`` is compiled and preloaded into one process that has imported everything; each scenario
runs in a fork of it.
"""

import contextlib
import ctypes
import errno
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import IntFlag
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import torch
from engines import memory
from models import WORDS, make_batch, save_model, save_tokenizer, small_config
from parity import Plan, Storage

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import Batching, TrainOptions
from zo2adapters.trainers.run_directory import RunDirectory
from zo2adapters.trainers.run_inputs import RunStart
from zo2adapters.trainers.trainer import QUIET, open_run
from zo2core import Engine, FirstOrder, ZO2Error
from zo2core.errors import CheckpointError, JournalError, OutputError, ScratchError
from zo2core.planning.speeds import write_bytes_per_second

STEPS = 4
SECONDS = 60  # until a run counts as hung; it takes a fraction of one
BATCH = make_batch(len(WORDS), [9, 5])
PLAN = Plan(
    lr=1e-2,
    zo_eps=1e-3,
    weight_decay=0.1,
    perturb_in_place=True,
    seeds=[11, 5, 2**40, 7],
    between=[],
)

CHECKPOINT = "/base/model.safetensors"
DATA = "/scratch.bin"
MANIFEST = "/scratch.jsonl"
JOURNAL = "/journal.jsonl"

EVER = -1  # count: all calls that follow
HALF = -1  # most: half of what is asked for

STORAGES = {
    "pinned": Storage(buckets=None, write_back_every=1, keep_noise=True),
    "one bucket": Storage(buckets=1, write_back_every=1, keep_noise=False),
    "two buckets": Storage(buckets=2, write_back_every=2, keep_noise=True),
    "three buckets, never written": Storage(buckets=3, write_back_every=None, keep_noise=True),
}


class Call(IntFlag):
    READ = 1
    WRITE = 2
    SYNC = 4
    TRUNCATE = 8
    OPEN_DIRECT = 16
    ONLY_DIRECT = 32  # on descriptors opened so


class Rule:
    """A rule in the preloaded library, until all are cleared: which calls on files of a path fail,
    or transfer little.

    Args:
        first: The first matching call that is hit, from 1. A rule that is only to count has one
            that never comes.
        error: errno they fail with; None for a short transfer.
    """

    def __init__(
        self,
        calls: Call,
        path: str,
        first: int = 1,
        count: int = 1,
        *,
        error: int | None = None,
        most: int = 0,
    ) -> None:
        self._number = library().faults_add(
            int(calls), path.encode(), first, count, error or 0, most
        )
        assert self._number >= 0, "too many rules"

    @property
    def seen(self) -> int:
        return int(library().faults_seen(self._number))

    @property
    def hits(self) -> int:
        return int(library().faults_hits(self._number))


NEVER = 1 << 60  # first: only count


@cache
def library() -> ctypes.CDLL:
    made = ctypes.CDLL(None)  # what is preloaded
    made.faults_add.argtypes = [
        ctypes.c_int,
        ctypes.c_char_p,
        *[ctypes.c_long] * 2,
        ctypes.c_int,
        ctypes.c_long,
    ]
    made.faults_seen.restype = made.faults_hits.restype = ctypes.c_long
    return made


def clear() -> None:
    library().faults_clear()


class Trajectory(NamedTuple):
    losses: list[tuple[float, ...]]
    weights: dict[str, bytes]
    journal: bytes


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def retried(errors: list[ZO2Error], kinds: Sequence[type[ZO2Error]], do: Callable[[], Any]) -> Any:
    """Do it until it succeeds; only errors of these kinds may come."""
    for _ in range(20):
        try:
            return do()
        except tuple(kinds) as error:
            errors.append(error)
    raise AssertionError(f"still fails: {errors[-1]}")


def take_steps(
    engine: Engine, kinds: Sequence[type[ZO2Error]] = (), until: int = STEPS
) -> list[ZO2Error]:
    """Go on to a step, repeating those that fail with errors of these kinds.

    A failed one was not taken.
    """
    errors: list[ZO2Error] = []
    while (version := engine.version) < until:
        retried(errors, kinds, lambda version=version: engine.step(BATCH, seed=PLAN.seeds[version]))  # type: ignore[misc]
        assert engine.version == version + 1
    return errors


def trajectory(
    engine: Engine, run: Path, errors: Sequence[ZO2Error] = (), kinds: Sequence[type[ZO2Error]] = ()
) -> Trajectory:
    def weights() -> dict[str, bytes]:
        return {name: bits(tensor) for name, tensor in engine.parameters_now()}

    losses = [update.losses for update in engine.journal.updates]
    return Trajectory(
        losses, retried(list(errors), kinds, weights), (run / "journal.jsonl").read_bytes()
    )


def opened(storage: Storage, folder: Path, run: Path) -> Engine:
    """An engine that goes on from whatever is in the run directory."""
    return storage.engine(open_checkpoint(folder / "base"), PLAN, run)


def make_undisturbed(folder: Path) -> None:
    run = folder / "undisturbed"
    with opened(STORAGES["pinned"], folder, run) as engine:
        take_steps(engine)
        torch.save(tuple(trajectory(engine, run)), folder / "undisturbed.pt")


def require_end(
    engine: Engine,
    run: Path,
    folder: Path,
    errors: Sequence[ZO2Error] = (),
    kinds: Sequence[type[ZO2Error]] = (),
) -> None:
    """The run came to the undisturbed end."""
    found, expected = trajectory(engine, run, errors, kinds), torch.load(folder / "undisturbed.pt")
    different = [
        name
        for name, own, other in zip(Trajectory._fields, found, expected, strict=True)
        if own != other
    ]
    assert not different, different


def assert_resumable(storage: Storage, folder: Path, run: Path) -> None:
    """What is on disk leads to the undisturbed end."""
    clear()
    with opened(storage, folder, run) as engine:
        take_steps(engine)
        require_end(engine, run, folder)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """No thread, no descriptor more than before."""

    def now() -> tuple[set[threading.Thread], set[str]]:
        descriptors = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that lists them
                descriptors.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        return set(threading.enumerate()), descriptors

    threads, descriptors = now()
    yield
    threads_after, descriptors_after = now()
    assert threads_after <= threads, f"left: {threads_after - threads}"
    assert descriptors_after <= descriptors, f"left: {descriptors_after - descriptors}"


watched: list[IO[str]] = []  # where a scenario that hangs leaves its stacks


def fresh(folder: Path) -> Path:
    """A directory for one more run, which has its time from now on."""
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=watched[-1])
    return Path(tempfile.mkdtemp(dir=folder)) / "run"


@contextlib.contextmanager
def tried(storage: Storage, folder: Path, until: int = 0) -> Iterator[tuple[Engine, Path]]:
    """The engine of a new run, after some steps: it leaves nothing open, and its run leads to the
    undisturbed end.
    """
    run = fresh(folder)
    with nothing_left(), opened(storage, folder, run) as engine:
        take_steps(engine, until=until)
        yield engine, run
    assert_resumable(storage, folder, run)


Scenario = Callable[[Path], None]  # gets a folder with a base checkpoint


def long() -> bool:
    return "--long" in sys.argv


def some(count: int) -> Sequence[int]:
    """Of 1..count: all, or two inside, in a test that is run all the time."""
    return range(1, count + 1) if long() else sorted({1 + count // 3, max(1, count * 2 // 3)})


MODES = {
    "direct": None,
    "buffered, as opening is refused": Call.OPEN_DIRECT,
    "buffered, as transfers are refused": Call.READ | Call.WRITE | Call.ONLY_DIRECT,
}
SHORT = {"one byte": 1, "777 bytes": 777, "a page and a byte": 4097, "half": HALF}


def short_transfers(calls: Call, storage: Storage, mode: str, folder: Path) -> None:
    sizes = list(SHORT)
    if not long():
        sizes = [sizes[(calls + len(mode) + (storage.buckets or 0)) % len(sizes)]]  # by turns
    for size in sizes:
        run = fresh(folder)
        with nothing_left():
            if (refused := MODES[mode]) is not None:
                for path in (CHECKPOINT, DATA):
                    Rule(refused, path, count=EVER, error=errno.EINVAL)
            rules = [Rule(calls, path, count=EVER, most=SHORT[size]) for path in (CHECKPOINT, DATA)]
            for until in (2, STEPS):
                # what was written back is read again, by a resident source too
                with opened(storage, folder, run) as engine:
                    take_steps(engine, until=until)
                    if until == STEPS:
                        require_end(engine, run, folder)
            assert rules[0].hits > 0 or calls is Call.WRITE
            assert rules[1].hits > 0 or storage.write_back_every is None
        assert_resumable(storage, folder, run)


class Fault(NamedTuple):
    """What fails, and as which error it is to arrive."""

    calls: Call
    path: str
    error: int
    kinds: tuple[type[ZO2Error], ...]


FAULTS = {
    "EIO, reading the checkpoint": Fault(Call.READ, CHECKPOINT, errno.EIO, (CheckpointError,)),
    "EIO, reading what was written back": Fault(Call.READ, DATA, errno.EIO, (ScratchError,)),
    "ENOSPC, writing back": Fault(Call.WRITE, DATA, errno.ENOSPC, (ScratchError,)),
    "EIO, writing back": Fault(Call.WRITE, DATA, errno.EIO, (ScratchError,)),
    "EIO, syncing what was written back": Fault(Call.SYNC, DATA, errno.EIO, (ScratchError,)),
    "ENOSPC, writing the manifest": Fault(Call.WRITE, MANIFEST, errno.ENOSPC, (ScratchError,)),
    "EIO, syncing the manifest": Fault(Call.SYNC, MANIFEST, errno.EIO, (ScratchError,)),
    "EIO, truncating the manifest": Fault(Call.TRUNCATE, MANIFEST, errno.EIO, (ScratchError,)),
    "ENOSPC, writing the journal": Fault(Call.WRITE, JOURNAL, errno.ENOSPC, (JournalError,)),
    "EIO, syncing the journal": Fault(Call.SYNC, JOURNAL, errno.EIO, (JournalError,)),
    "EIO, truncating the journal": Fault(Call.TRUNCATE, JOURNAL, errno.EIO, (JournalError,)),
}


def count_calls(fault: Fault, storage: Storage, folder: Path) -> int:
    """How many matching calls an undisturbed run makes, once it is open."""
    run = fresh(folder)
    with opened(storage, folder, run) as engine:
        rule = Rule(fault.calls, fault.path, NEVER)
        take_steps(engine)
        trajectory(engine, run)
    count = rule.seen  # when it is closed: writes may be under way until then
    clear()
    return count


def one_call_fails(fault: Fault, storage: Storage, folder: Path) -> None:
    """One call, whichever, fails, and what failed is repeated; or the run is closed there and
    resumed.

    A read may have failed ahead of its need: then it is repeated without a word.
    """
    calls = count_calls(fault, storage, folder)
    if not calls:
        assert storage.buckets is None, "a resident source reads nothing back"
        assert fault.calls is Call.READ
        return
    reported = 0
    for turn, nth in enumerate(some(calls)):
        if long() or turn % 2 == 0:
            with tried(storage, folder) as (engine, run):
                rule = Rule(fault.calls, fault.path, nth, error=fault.error)
                errors = take_steps(engine, fault.kinds)
                require_end(engine, run, folder, errors, fault.kinds)
                # Not at all if it met what nobody asked for; how far is read ahead in the end is a
                # matter of time.
                assert len(errors) <= rule.hits <= 1
            reported += len(errors)
        if long() or turn % 2 == 1:
            with tried(storage, folder) as (engine, _):
                Rule(fault.calls, fault.path, nth, error=fault.error)
                with contextlib.suppress(*fault.kinds):
                    for seed in PLAN.seeds:
                        engine.step(BATCH, seed=seed)
    assert reported > 0 or fault.calls is Call.READ


def reads_fail_until_reported(fault: Fault, storage: Storage, folder: Path) -> None:
    """The disk breaks at a read, and is mended as soon as that is reported: nothing of it is heard
    a second time.
    """
    reported = 0
    for nth in some(count_calls(fault, storage, folder)):
        with tried(storage, folder) as (engine, run):
            Rule(fault.calls, fault.path, nth, EVER, error=fault.error)
            try:
                take_steps(engine)
                trajectory(engine, run)
            except fault.kinds:
                reported += 1
            clear()  # if nothing was reported, only what was read ahead at the end failed
            take_steps(engine)
            require_end(engine, run, folder)
    assert reported > 0


def every_call_fails(fault: Fault, storage: Storage, folder: Path) -> None:
    """The disk stays broken: each attempt reports it, nothing hangs, and once it is mended all is
    well.
    """
    with tried(storage, folder, until=1) as (engine, _):
        rule = Rule(fault.calls, fault.path, count=EVER, error=fault.error)
        failures = 0
        for _ in range(6):
            version = engine.version
            try:
                if version < STEPS:
                    engine.step(BATCH, seed=PLAN.seeds[version])
            except fault.kinds:
                failures += 1
                assert engine.version == version
        assert failures > 0 or not rule.hits, "all is in memory already"


def torn_then_full(storage: Storage, folder: Path) -> None:
    """The disk takes half of the record, then is full; the next step takes the torn record's
    place.
    """
    for nth, resume in product(some(STEPS), (False, True)):
        with tried(storage, folder) as (engine, run):
            # the first step's first record has the digests of the base
            write = nth if nth == 1 else nth + 1
            Rule(Call.WRITE, JOURNAL, write, most=HALF)
            rule = Rule(Call.WRITE, JOURNAL, write + 1, error=errno.ENOSPC)
            take_steps(engine, until=nth - 1)
            with pytest.raises(JournalError, match="No space left"):
                engine.step(BATCH, seed=PLAN.seeds[nth - 1])
            assert rule.hits == 1
            assert engine.version == nth - 1
            if not resume:
                take_steps(engine)
                require_end(engine, run, folder)


def stale_record(storage: Storage, folder: Path) -> None:
    """A record that was written but not synced must not count for the bytes that its slot gets
    later.

    The manifest's sync fails once, then the next write, which goes into the same slot, breaks off
    half-way.
    """
    met = 0
    for nth in some(count_calls(FAULTS["EIO, syncing the manifest"], storage, folder) - 1):
        with tried(storage, folder) as (engine, _):
            rules = [
                Rule(Call.SYNC, MANIFEST, nth, error=errno.EIO),
                Rule(Call.WRITE, DATA, nth + 1, most=HALF),
                Rule(Call.WRITE, DATA, nth + 2, EVER, error=errno.EIO),
            ]
            for _ in range(STEPS + 3):
                # beyond the failure, so that its slot is used again for sure
                with contextlib.suppress(ScratchError):
                    take_steps(engine, until=min(engine.version + 1, STEPS))
            met += all(rule.hits for rule in rules)
    assert met > 0


def measured_buffered(folder: Path) -> None:
    """The file that is measured with has no name, and is opened a second time all the same."""
    run = fresh(folder)
    with nothing_left():
        rule = Rule(Call.WRITE | Call.ONLY_DIRECT, "(deleted)", count=EVER, error=errno.EINVAL)
        assert write_bytes_per_second(run) > 0
        assert rule.hits > 0
    assert not list(run.glob("*"))


def unsynced_journal(storage: Storage, folder: Path) -> None:
    """A resumed run counts no record that it could not sync: it writes no block back, and
    says why.
    """
    run = fresh(folder)
    with opened(storage, folder, run) as engine:
        take_steps(engine, until=2)
    with nothing_left():
        rules = [
            Rule(Call.SYNC, JOURNAL, count=EVER, error=errno.EIO),
            Rule(Call.WRITE, "/scratch.", NEVER),
        ]
        with pytest.raises(JournalError, match="Input/output error"), opened(storage, folder, run):
            pass
        assert rules[0].hits == 1
        assert rules[1].seen == 0
    assert_resumable(storage, folder, run)


def read_ahead_fails(folder: Path) -> None:
    """It is tried again when the block is needed; only if that fails, too, it is reported, once."""
    for buckets in (2, 3):
        with tried(Storage(buckets, None, keep_noise=True), folder) as (engine, run):
            last = engine._run.model.layouts[-2].parameters[-1].name
            rule = Rule(Call.READ, CHECKPOINT, count=EVER, error=errno.EIO)
            with pytest.raises(CheckpointError) as info:
                engine.step(BATCH, seed=PLAN.seeds[0])
            assert rule.hits > 0
            assert last not in str(info.value), "the first failure is the first segment's"
            clear()
            take_steps(engine)  # what was read ahead failed, too, and is read again
            require_end(engine, run, folder)


def closed_while_failing(folder: Path) -> None:
    for storage in STORAGES.values():
        with tried(storage, folder, until=2) as (engine, _):
            for path in (CHECKPOINT, DATA, MANIFEST):
                Rule(Call.READ | Call.WRITE | Call.SYNC, path, count=EVER, error=errno.EIO)
            with contextlib.suppress(ZO2Error):
                engine.step(BATCH, seed=PLAN.seeds[2])


UNNAMED = "(deleted)"  # in the path of the temporary file of inputs
SMALL_BATCH = make_batch(len(WORDS), [4])


def of_adapter(folder: Path, run: Path) -> Engine:
    """An engine whose inputs of blocks have no room in memory."""
    peft: Any = pytest.importorskip("peft")
    run.mkdir(exist_ok=True)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return Engine(
        open_checkpoint(folder / "base", adapter=Adapter(config=config, seed=1)),
        FirstOrder(
            partial(torch.optim.AdamW, lr=1e-2), lr=lambda step: 1e-2, options={"name": "adamw"}
        ),
        run=run,
        memory=memory(1, 1),
    )


def adapter_after(engine: Engine, batches: Sequence[dict[str, torch.Tensor]]) -> dict[str, bytes]:
    for batch in batches:
        engine.step(batch)
    return {name: bits(value.detach()) for name, value in engine.parameters.items()}


def inputs_fail(calls: Call, error: int, folder: Path) -> None:
    """Inputs cannot be written, or read: the step is not taken, the run goes on with other batches,
    or is resumed.
    """
    batches = [BATCH, SMALL_BATCH, BATCH]
    with of_adapter(folder, fresh(folder)) as engine:
        rule = Rule(calls, UNNAMED, NEVER)
        expected = adapter_after(engine, batches)
        count = rule.seen
    clear()
    assert count >= len(batches)
    for nth in some(count):
        with nothing_left():
            with of_adapter(folder, fresh(folder)) as engine:
                rule, errors = Rule(calls, UNNAMED, nth, error=error), list[ZO2Error]()
                for taken, batch in enumerate(batches):
                    retried(errors, [ScratchError], partial(engine.step, batch))
                    assert engine.version == taken + 1
                assert (len(errors), rule.hits) == (1, 1)
                assert os.strerror(error) in str(errors[0])
                assert ("the step was not taken" in str(errors[0])) is (calls is Call.WRITE)
                assert adapter_after(engine, []) == expected
            clear()
            run = fresh(folder)
            Rule(calls, UNNAMED, nth, EVER, error=error)  # the disk stays full
            with of_adapter(folder, run) as engine, pytest.raises(ScratchError):
                adapter_after(engine, batches)
            clear()
            with of_adapter(folder, run) as engine:
                # no snapshot was taken: it begins anew, and compares its steps
                assert adapter_after(engine, batches) == expected
    assert not [path for path in run.iterdir() if path.name != "journal.jsonl"]


def train_options(folder: Path) -> TrainOptions:
    return TrainOptions(
        model=str(folder / "base"),
        data=folder / "rows.jsonl",
        evaluation=folder / "rows.jsonl",
        output=fresh(folder),
        steps=3,
        batching=Batching(batch_size=2),
        optimization=Optimization(method="zeroth-order"),
        storage=replace(
            TrainOptions(model="", data=Path(), output=Path()).storage, write_back_every=1
        ),
    )


def exported(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def finish(options: TrainOptions, *, resume: bool = False) -> bytes:
    with open_run(RunStart(options, resumes=resume), display=QUIET) as trainer:
        trainer.run()
    return exported(options.output)


def run_cannot_begin(rule: Callable[[], Rule], kind: type[ZO2Error], folder: Path) -> None:
    """The constructor raises the right error and leaves neither threads, descriptors nor the new
    directory.
    """
    options = train_options(folder)
    finish(options)  # whatever is opened once and for all, is open now
    options = replace(options, output=fresh(folder))
    with nothing_left():
        made = rule()
        with pytest.raises(kind):
            open_run(RunStart(options), display=QUIET)
        assert made.hits > 0
    assert not options.output.exists()
    clear()
    finish(options)


BEGINNINGS: dict[str, tuple[Callable[[], Rule], type[ZO2Error]]] = {
    "a checkpoint that cannot be read": (
        lambda: Rule(Call.READ, CHECKPOINT, 4, EVER, error=errno.EIO),
        CheckpointError,
    ),
    "a journal that cannot be written": (
        lambda: Rule(Call.WRITE, JOURNAL, error=errno.ENOSPC),
        JournalError,
    ),
    "a journal that cannot be synced": (
        lambda: Rule(Call.SYNC, JOURNAL, error=errno.EIO),
        JournalError,
    ),
    "a manifest that cannot be written": (
        lambda: Rule(Call.WRITE, "/.scratch.jsonl.partial", error=errno.ENOSPC),
        ScratchError,
    ),
    "options that cannot be written": (
        lambda: Rule(Call.WRITE, "/.options.json.partial", error=errno.ENOSPC),
        OutputError,
    ),
    "options that cannot be synced": (
        lambda: Rule(Call.SYNC, "/.options.json.partial", error=errno.EIO),
        OutputError,
    ),
    "a directory that cannot be synced": (
        lambda: Rule(Call.SYNC, "/room", error=errno.EIO),
        OutputError,
    ),
    "options whose name cannot be synced": (
        lambda: Rule(Call.SYNC, "/run", 2, error=errno.EIO),
        OutputError,
    ),
}


def run_breaks_off(rule: Callable[[], Rule], folder: Path) -> None:
    """A run ends with a typed error, leaves nothing open, and is resumed to the undisturbed end."""
    options = train_options(folder)
    expected = finish(options)
    options = replace(options, output=fresh(folder))
    made: list[Rule] = []
    with nothing_left(), open_run(RunStart(options), display=QUIET) as trainer:
        made.append(rule())
        with pytest.raises(ZO2Error):
            trainer.run()
    assert made[0].hits > 0
    assert not (options.output / "model").exists()
    clear()
    assert finish(RunDirectory(options.output).options(), resume=True) == expected
    assert len((options.output / "metrics.jsonl").read_text().splitlines()) == options.steps + 2


RUNNING: dict[str, Callable[[], Rule]] = {
    "the journal's disk is full": lambda: Rule(Call.WRITE, JOURNAL, 2, error=errno.ENOSPC),
    "the scratch's disk is full": lambda: Rule(Call.WRITE, DATA, 2, error=errno.ENOSPC),
    "the metrics' disk is full": lambda: Rule(
        Call.WRITE, "/metrics.jsonl", 2, EVER, error=errno.ENOSPC
    ),
    "the model's disk is full": lambda: Rule(
        Call.WRITE, ".model.partial", 2, EVER, error=errno.ENOSPC
    ),
    "the model cannot be synced": lambda: Rule(Call.SYNC, ".model.partial", error=errno.EIO),
    "the checkpoint cannot be read": lambda: Rule(Call.READ, CHECKPOINT, 9, EVER, error=errno.EIO),
}


def scenarios() -> Iterator[tuple[str, Callable[[Path], None]]]:
    for name, storage in STORAGES.items():
        is_written = storage.write_back_every is not None
        for mode in MODES:
            yield f"short reads, {mode}: {name}", partial(short_transfers, Call.READ, storage, mode)
            if is_written:
                yield (
                    f"short writes, {mode}: {name}",
                    partial(short_transfers, Call.WRITE, storage, mode),
                )
        for fault_name, fault in FAULTS.items():
            reads_back = fault.path == CHECKPOINT or storage.buckets is not None
            if is_written or fault.path in (CHECKPOINT, JOURNAL):
                yield f"once {fault_name}: {name}", partial(one_call_fails, fault, storage)
            if (is_written or fault.path in (CHECKPOINT, JOURNAL)) and (
                reads_back or fault.calls is not Call.READ
            ):
                yield f"ever {fault_name}: {name}", partial(every_call_fails, fault, storage)
                if fault.calls is Call.READ:
                    yield (
                        f"until reported {fault_name}: {name}",
                        partial(reads_fail_until_reported, fault, storage),
                    )
        yield f"a torn record on a full disk: {name}", partial(torn_then_full, storage)
        if is_written:
            yield f"an unsynced record of a slot used again: {name}", partial(stale_record, storage)
            yield f"a reopened journal cannot be synced: {name}", partial(unsynced_journal, storage)
    yield "the disk is measured where direct transfers are refused", measured_buffered
    yield "reading ahead fails for a later block", read_ahead_fails
    yield "closing while reads and writes fail", closed_while_failing
    yield (
        "inputs of blocks on disk: the disk is full",
        partial(inputs_fail, Call.WRITE, errno.ENOSPC),
    )
    yield "inputs of blocks on disk: writing fails", partial(inputs_fail, Call.WRITE, errno.EIO)
    yield "inputs of blocks on disk: reading fails", partial(inputs_fail, Call.READ, errno.EIO)
    for name, (rule, kind) in BEGINNINGS.items():
        yield f"a run cannot begin: {name}", partial(run_cannot_begin, rule, kind)
    for name, rule in RUNNING.items():
        yield f"a run breaks off: {name}", partial(run_breaks_off, rule)


SCENARIOS = dict(scenarios())


def prepare(folder: Path) -> None:
    base = save_model(
        folder / "base", small_config("llama", vocab_size=len(WORDS), num_hidden_layers=4)
    )
    save_tokenizer(base)
    rows = [{"prompt": f"the cat {word}", "completion": " yes"} for word in WORDS[5:]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def forked(folder: Path, run: Scenario) -> str:
    """What went wrong with a scenario in a fork; empty if nothing did."""
    with tempfile.TemporaryFile("w+") as log:
        worker = os.fork()
        if worker == 0:
            status = 1
            try:
                watched.append(log)
                faulthandler.dump_traceback_later(SECONDS, exit=True, file=log)
                run(folder)
                status = 0
            except BaseException:  # whatever it is, the test is told
                traceback.print_exc(file=log)
            finally:
                log.flush()
                os._exit(status)
        _, status = os.waitpid(worker, 0)
        log.seek(0)
        return "" if status == 0 else f"status {status}\n{log.read()}"


def main(folder: Path) -> None:
    """Run each scenario that is asked for on standard input, and say on standard output what became
    of it.
    """
    torch.set_num_threads(1)
    assert threading.active_count() == 1, "a forked process has no threads but the one that forked"
    assert not forked(folder, make_undisturbed)
    for line in sys.stdin:
        room = folder / "room"
        room.mkdir()
        for each in ("base", "rows.jsonl", "undisturbed.pt"):
            (room / each).symlink_to(folder / each)
        print(json.dumps(forked(room, SCENARIOS[json.loads(line)])), flush=True)
        shutil.rmtree(room)
    os._exit(0)  # without a visit to all that was imported


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], str]]:
    """Runs a scenario; says what went wrong."""
    folder = tmp_path_factory.mktemp("faults")
    shim, log = folder / "faults.so", folder / "log"
    source = Path(__file__).parents[1] / "support" / "faults.c"
    flags = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", shim, source, "-ldl", "-pthread"], check=True)
    prepare(folder)
    profile = ["--long"] if request.config.getoption("--long") else []
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, __file__, str(folder), *profile],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"LD_PRELOAD": str(shim), "PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        ) as process,
    ):
        asked, told = process.stdin, process.stdout
        assert asked is not None
        assert told is not None

        def run(name: str) -> str:
            with contextlib.suppress(BrokenPipeError):
                # the process is gone, which its log explains
                asked.write(json.dumps(name) + "\n")
                asked.flush()
            line = told.readline()
            return str(json.loads(line)) if line else f"did not run\n{log.read_text()}"

        yield run


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SCENARIOS)
def test_faults_are_reported_and_cost_no_step(outcome: Callable[[str], str], name: str) -> None:
    problem = outcome(name)
    assert not problem, problem


if __name__ == "__main__":
    main(Path(sys.argv[1]))
