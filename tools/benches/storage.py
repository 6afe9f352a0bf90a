"""Reading: the rate of streaming a checkpoint, and the first step of a run that is resumed from a
long journal.
"""

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from measuring import alternate, memory_of, ratio, spread, timed, zeroth_order

from benches.compare import Measured, Side
from zo2adapters import HFBlockModel, open_checkpoint
from zo2adapters.trainers.process import keep_freed_memory
from zo2adapters.trainers.verification import random_batch
from zo2core import (
    BlockLayout,
    Distribution,
    Engine,
    EngineOptions,
    HostDevice,
    LowRankPerturbation,
    SegmentStore,
    WriteBackPolicy,
)
from zo2core.estimators.factors import BESIDE_UP_TO
from zo2core.io.direct_file import byte_view
from zo2core.planning.memory import resident_memory
from zo2core.sources.segment_store import CHUNK, READERS, BaseDigests, laid_out_as_on_disk
from zo2core.types import Lane, trained

SETTLE = 2.0  # seconds


class AlwaysNew(BaseDigests):
    """Computes a digest at every read; a run computes one at a segment's first read."""

    def wants(self, layout: BlockLayout) -> bool:
        return True


def raw_reader(paths: list[Path]) -> Callable[[int], int]:
    """A function that reads about so many bytes of files from their start, with O_DIRECT, and
    returns how many.
    """
    buffers = [byte_view(HostDevice().host_memory(CHUNK)) for _ in range(READERS)]
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
    places = [(fd, at) for fd in descriptors for at in range(0, os.fstat(fd).st_size, CHUNK)]

    def read(nbytes: int) -> int:
        ranges = places[: -(-nbytes // CHUNK)]
        with ThreadPoolExecutor(READERS) as pool:
            parts = [ranges[thread::READERS] for thread in range(READERS)]
            return sum(
                pool.map(
                    lambda part, buffer: sum(os.preadv(fd, [buffer], at) for fd, at in part),
                    parts,
                    buffers,
                )
            )

    return read


def stream(
    directory: Path,
    *,
    buckets: int = 3,
    rounds: int = 7,
    blocks: Annotated[int, "blocks of a round"] = 10,
    check: Annotated[bool, "compare reading with and without digests"] = False,
) -> dict[str, Any]:
    """Measure the rate of streaming all blocks of a checkpoint through a few buckets against the
    raw rate of the disk.

        python tools/bench.py stream DIR --buckets 3
        python tools/bench.py stream DIR --check

    The raw side reads the same files in order with O_DIRECT into page-aligned buffers, with as many
    threads as the source. The other side is a sweep that acquires and releases every segment
    without using it. With ``--check`` both sides are sweeps, and one computes digests of all bytes,
    as a run does in its first sweep only. Each time the next blocks are read; the first round
    touches the buckets and does not count.
    """
    model = open_checkpoint(directory)
    layouts = laid_out_as_on_disk(model.layouts, model.weights)
    streamed = [index for index, layout in enumerate(model.layouts) if not layout.resident]
    portion = min(blocks, len(streamed) - 2 * buckets)

    def sweeping(base_digests: BaseDigests | None) -> Callable[[list[int], int], int]:
        memory = HostDevice().host_memory
        source = SegmentStore(
            model.weights, layouts, memory, buckets=buckets, base_digests=base_digests
        )

        def sweep(part: list[int], nbytes: int) -> int:
            source.prefetch(part)
            for index in part:
                source.release(source.acquire(index), 0)
            return nbytes

        return sweep

    sides = {"streamed": sweeping(None)}
    if check:
        sides["checked"] = sweeping(AlwaysNew({}, learns=True))
    else:
        raw = raw_reader(sorted(directory.glob("*.safetensors")))
        sides["raw"] = lambda _, nbytes: raw(nbytes)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-1, rounds):
        # A gap between the parts, so that none starts with blocks that were read ahead, and a pause
        # for such reads to end.
        part = [
            streamed[(number * (portion + buckets) + i) % len(streamed)] for i in range(portion)
        ]
        nbytes = sum(model.layouts[index].nbytes for index in part)
        for name in sorted(sides, reverse=number % 2 == 0):
            time.sleep(SETTLE)
            began = time.process_time()
            seconds, done = timed(partial(sides[name], part, nbytes))
            if number >= 0:
                rates[name].append(done / seconds)
                cpu[name].append((time.process_time() - began) / done * 1e9)
    first, second = rates.values()
    return {
        "round_bytes": nbytes,
        "resident_bytes": resident_memory(),
        "share": ratio(second, first) if check else ratio(first, second),
        "bytes a second": {name: spread(values) for name, values in rates.items()},
        "CPU seconds a GB": {name: spread(values) for name, values in cpu.items()},
    }


def resume(
    model: Annotated[str, "checkpoint, or geometry with synthetic weights in float32"],
    *,
    buckets: Annotated[int | None, "number of blocks in host memory; by default all"] = None,
    rank: int = 2,
    period: int = 100,
    updates: Annotated[int, "updates in the journal"] = 1000,
    journal_alone: Annotated[bool, "resume without the saved periods"] = False,
    rows: int = 1,
    tokens: int = 64,
    steps: Annotated[int, "measured steps"] = 5,
) -> dict[str, Any]:
    """Time the first step of a run that is resumed from a long journal against a step of a run
    without a journal.

        python tools/bench.py resume opt-125m --rank 2
        python tools/bench.py resume opt-1.3b-bf16 --buckets 3 --rank 2 --tokens 64
        python tools/bench.py resume opt-125m --rank 2 --journal-alone

    The journal has updates of low-rank directions, made from synthetic losses, and one step that
    saves its ended periods. A side opens an engine with or without a copy of the run and takes two
    steps; with ``--journal-alone`` the copy has no saved periods, and all updates are replayed. The
    second step of the side without a journal is the time of a sweep.
    """
    keep_freed_memory()  # as zo2 train does
    new_model = Measured(side=Side(model=model, rows=rows, tokens=tokens)).model
    with closing((probe := new_model()).weights):
        inputs = [spec.shape[1] for spec in trained(probe.layouts) if len(spec.shape) == 2]
    batch = random_batch(probe.config.vocab_size, rows, tokens, seed=0)
    columns = updates // period * rank  # of past periods

    def new_engine(opened: HFBlockModel, run: Path | None) -> Engine:
        method = zeroth_order(
            low_rank=LowRankPerturbation(rank=rank, period=period), noise=Distribution.GAUSSIAN
        )
        memory = memory_of(buckets)
        if run is None:
            return Engine(opened, method, memory=memory)
        options = EngineOptions(write_back=WriteBackPolicy(directory=run))
        return Engine(opened, method, journal=run / "journal.jsonl", memory=memory, options=options)

    def write(run: Path) -> None:
        """Add updates with synthetic losses, without a sweep, and then a step that ends the
        periods.
        """
        losses, opened = random.Random(0), new_model()
        with closing(opened.weights), new_engine(opened, run) as engine:
            for _ in range(updates - 1):
                engine.ask()
                engine.tell([5 + losses.gauss(0, 1e-2), 5 + losses.gauss(0, 1e-2)])
            engine.step(batch)
            engine.evaluate([batch])  # ends the last period

    def started(run: Path | None) -> dict[str, float]:
        """Open an engine and take two steps; the seconds of each, and of replaying in the first
        step.
        """
        opened = new_model()
        with closing(opened.weights):
            opening, engine = timed(lambda: new_engine(opened, run))
            with engine:
                first, result = timed(lambda: engine.step(batch))
                second, _ = timed(lambda: engine.step(batch))
        replay = result.lanes[Lane.REPLAY].busy_seconds
        return {
            "open": opening,
            "first step": first,
            "second step": second,
            "replay in the first": replay,
        }

    with tempfile.TemporaryDirectory() as folder:
        original, copy = Path(folder, "run"), Path(folder, "copy")
        seconds, _ = timed(lambda: write(original))
        kept = sum(path.stat().st_size for path in original.glob("factors.*"))

        def resumed() -> dict[str, float]:
            shutil.copytree(
                original,
                copy,
                ignore=shutil.ignore_patterns("factors.*") if journal_alone else None,
            )
            try:
                return started(copy)
            finally:
                shutil.rmtree(copy)

        measured = alternate(
            {"without": lambda: started(None), "resumed": resumed}, steps, warm_up=1
        )
    found = {
        name: {key: [one[key] for one in side.results] for key in side.results[0]}
        for name, side in measured.items()
    }
    fresh, later = found["without"], found["resumed"]
    from_opening = [
        [a + b for a, b in zip(side["open"], side["first step"], strict=True)]
        for side in (later, fresh)
    ]
    return {
        "columns of past periods": columns,
        "matrices": len(inputs),
        "matrices that are formed": sum(columns > BESIDE_UP_TO * inputs_ for inputs_ in inputs),
        "seconds of writing the run": seconds,
        "kept_bytes": kept,
        "first to first": ratio(later["first step"], fresh["first step"]),
        "first to sweep": ratio(later["first step"], fresh["second step"]),
        "from opening": ratio(*from_opening),
        "second to second": ratio(later["second step"], fresh["second step"]),
        "seconds": {
            name: {key: spread(values) for key, values in side.items()}
            for name, side in found.items()
        },
    }
