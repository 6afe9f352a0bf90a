"""BAdam over blocks on disk: the bits of one in memory, one write a turn, and resuming at the end of a turn."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_batch, save_model, small_config

from zo2adapters import open_checkpoint
from zo2core import (
    BAdam,
    ClosedError,
    FullBackpropEngine,
    HostPlan,
    MemoryPolicy,
    OptionError,
    RunRecord,
    ScratchError,
    StreamedBAdamEngine,
    StreamedSource,
)
from zo2core.io.direct_file import whole_pages
from zo2core.sources.scratch import DATA, MANIFEST
from zo2core.types import Lane

ADAMW: Any = partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1)
EVERY, STEPS = 2, 17  # more than an epoch of eight segments' turns
BATCHES = [make_batch(40, [7, 5], seed=seed) for seed in range(STEPS)]


def memory(buckets: int | None) -> MemoryPolicy:
    return MemoryPolicy(host=HostPlan((), 0, buckets, keep_noise=False), activations=1 << 28)


def streamed(base: Path, run: Path, buckets: int = 2, **options: Any) -> StreamedBAdamEngine:
    record = RunRecord(directory=run, journal=run / "journal.jsonl")
    update = BAdam(ADAMW, every=EVERY, seed=3)
    model = open_checkpoint(base, precision=options.pop("precision", "exact"))
    told = {"memory": memory(buckets), "lr": lambda step: 1e-2 / (step + 1), **options}
    return StreamedBAdamEngine(model, update, run=record, **told)


def weights(engine: FullBackpropEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.parameters_now()}


def resident(base: Path, precision: str = "exact") -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a run in memory."""
    model, update = open_checkpoint(base, precision=precision), BAdam(ADAMW, every=EVERY, seed=3)
    with FullBackpropEngine(model, update, lr=lambda step: 1e-2 / (step + 1), memory=memory(None)) as engine:
        return [engine.step(batch).loss for batch in BATCHES], weights(engine)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", small_config("llama", num_hidden_layers=5, tie_word_embeddings=True))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("buckets", [2, 3])
@pytest.mark.parametrize(("dtype", "precision"), [("float32", "exact"), ("bfloat16", "exact"), ("bfloat16", "mixed")])
def test_blocks_on_disk_give_the_bits_of_blocks_in_memory(
    dtype: str, precision: str, buckets: int, overlap: bool, tmp_path: Path
) -> None:
    config = small_config("llama", num_hidden_layers=5, tie_word_embeddings=buckets == 2)
    base = save_model(tmp_path / "base", config, getattr(torch, dtype))
    losses, expected = resident(base, precision)
    with streamed(base, tmp_path / "run", buckets, overlap=overlap, precision=precision) as engine:
        assert [engine.step(batch).loss for batch in BATCHES] == losses
        assert all(torch.equal(value, expected[name]) for name, value in weights(engine).items())
        evaluated = engine.evaluate(BATCHES[:2]).loss
        engine.export(tmp_path / "model")
    with FullBackpropEngine(open_checkpoint(tmp_path / "model", precision="exact"), BAdam(ADAMW), lr=1.0) as exported:
        assert set(dict(exported.parameters_now())) == set(expected)
        assert precision == "mixed" or exported.evaluate(BATCHES[:2]).loss == evaluated


def test_a_segment_is_written_once_a_turn(base: Path, tmp_path: Path) -> None:
    with streamed(base, tmp_path / "run") as engine:
        written = [engine.step(batch).lanes[Lane.WRITE].nbytes for batch in BATCHES[:12]]
        engine.step(BATCHES[12])
        source = engine._parts.source
        assert isinstance(source, StreamedSource)
        sizes = [whole_pages(layout.nbytes) for layout in source.layouts]
        turns = [engine._update.segments(step, engine._parameters.segments) for step in range(0, 12, EVERY)]
    assert len(set(turns)) == 6
    assert sum(written) <= sum(sizes[segment] for [segment] in turns), "noted with the step after the turn"
    assert sum(written) >= sum(sizes[segment] for [segment] in turns[:-1])


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7, 12, 16])
def test_a_run_resumes_at_the_end_of_a_turn_with_the_same_bits(steps: int, base: Path, tmp_path: Path) -> None:
    losses, expected = resident(base)
    with streamed(base, tmp_path / "run") as engine:
        for batch in BATCHES[:steps]:
            engine.step(batch)
    with streamed(base, tmp_path / "run", 3) as engine:
        first = steps // EVERY * EVERY
        assert (engine.version, engine.journal.version) == (first, steps)
        assert [engine.step(batch).loss for batch in BATCHES[first:]] == losses[first:]
        assert all(torch.equal(value, expected[name]) for name, value in weights(engine).items())
        assert len(engine.journal.commits) == STEPS


def begun(base: Path, run: Path, steps: int) -> None:
    with streamed(base, run) as engine:
        for batch in BATCHES[:steps]:
            engine.step(batch)


def test_a_manifest_that_lost_its_last_record_goes_back_a_turn(base: Path, tmp_path: Path) -> None:
    losses, expected = resident(base)
    begun(base, tmp_path / "run", 8)
    path = tmp_path / "run" / MANIFEST
    *lines, _ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines))
    with streamed(base, tmp_path / "run") as engine:
        assert engine.version == 6
        assert [engine.step(batch).loss for batch in BATCHES[6:]] == losses[6:]
        assert all(torch.equal(value, expected[name]) for name, value in weights(engine).items())


def test_a_manifest_that_lost_an_earlier_turn_is_refused(base: Path, tmp_path: Path) -> None:
    begun(base, tmp_path / "run", 8)
    path = tmp_path / "run" / MANIFEST
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(ScratchError, match="of step 0 in the scratch file; expected that of step 4"):
        streamed(base, tmp_path / "run")


def test_damaged_bytes_are_found_when_they_are_read(base: Path, tmp_path: Path) -> None:
    begun(base, tmp_path / "run", 8)
    path = tmp_path / "run" / DATA
    raw = bytearray(path.read_bytes())
    for at in range(0, len(raw), 64):
        raw[at] ^= 1
    path.write_bytes(raw)
    with streamed(base, tmp_path / "run") as engine, pytest.raises(ClosedError, match="written bytes are damaged"):
        engine.step(BATCHES[8])


def test_what_cannot_stream_is_refused(tmp_path: Path) -> None:
    single = save_model(tmp_path / "single", small_config("llama", num_hidden_layers=1))
    with pytest.raises(OptionError, match="model: found 1 block"):
        streamed(single, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_pinned_segment_stays_in_memory_whatever_is_acquired(base: Path, tmp_path: Path) -> None:
    with streamed(base, tmp_path / "run") as engine:
        source = engine._streamed
        for pinned in (1, 3):
            source.pin([pinned])
            bucket = source.acquire(pinned)
            bucket.views[0].fill_(7.0)
            source.release(bucket, 0)
            for order in ([2, 4, 5], [5, 4, 2]):
                source.prefetch([*order, pinned])
                for other in (*order, order[0]):
                    source.release(source.acquire(other), 0)
            bucket = source.acquire(pinned)
            assert bool((bucket.views[0] == 7.0).all())
            source.release(bucket, 0)
