"""Every byte of the base counts: a digest of each segment is made beside its first read, kept, and compared ever after."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from engines import memory
from safetensors.torch import save_file
from toy import ToyBlockModel

import zo2core.sources.segment_store
from zo2core import (
    BlockLayout,
    Engine,
    HostDevice,
    Journal,
    MeZOSGD,
    ParameterSpec,
    PhiloxNoise,
    SegmentKind,
    SegmentStore,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.checkpoint.shards import SafetensorsReader, parse_header
from zo2core.errors import CheckpointError
from zo2core.protocols import BlockModel
from zo2core.sources.segment_store import BaseDigests, SegmentDigest, laid_out_as_on_disk, verify_base

IDS = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
BUCKETS = {"resident": None, "one bucket": 1, "three buckets": 3}
WIDTH = 100  # of the toy: a layer's matrix is larger than three samples of the fingerprint

every_source = pytest.mark.parametrize("buckets", BUCKETS.values(), ids=BUCKETS)


def toy(file: Path) -> ToyBlockModel:
    return ToyBlockModel(50, WIDTH, 3, tied=True, dtype=torch.float32, file=file)


def engine(model: BlockModel, run: Path, buckets: int | None = None, every: int | None = None) -> Engine:
    return Engine(
        model,
        ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3), noise=PhiloxNoise()),
        journal=run / "journal.jsonl",
        memory=memory(buckets),
        write_back=WriteBackPolicy(directory=run, every=every),
    )


def changed_toy(file: Path, parameter: str = "layers.1.mix.weight") -> ToyBlockModel:
    """The toy, with one byte changed between the samples of the fingerprint under its reader."""
    model = toy(file)
    before = model.weights.fingerprint
    entry = parse_header(file)[parameter]
    data = bytearray(file.read_bytes())
    data[entry.start + 4096 + 100] ^= 1
    file.write_bytes(data)
    assert SafetensorsReader(parse_header(file)).fingerprint == before, "the samples do not see it"
    return model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with engine(toy(tmp_path / "base.safetensors"), tmp_path / "run") as training:
        for _ in range(2):
            training.step(BATCH)
    return tmp_path / "run"


def test_the_first_sweep_notes_a_digest_of_every_segment_once(tmp_path: Path) -> None:
    file = tmp_path / "base.safetensors"
    with engine(toy(file), tmp_path / "run", 1) as training:
        training.step(BATCH)
        names = {layout.name for layout in toy(file).layouts}
        assert set(training.journal.base_digests) == names
        training.step(BATCH)
    lines = (tmp_path / "run/journal.jsonl").read_bytes().splitlines()
    assert len(lines) == 4, "header, digests, two updates"
    with engine(toy(file), tmp_path / "run", 3) as training:
        training.step(BATCH)
        training.step(BATCH)
    assert len((tmp_path / "run/journal.jsonl").read_bytes().splitlines()) == 6, "nothing new"


@every_source
def test_a_base_that_was_changed_between_the_samples_is_refused(buckets: int | None, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "base.safetensors"
    model = changed_toy(file)
    updates = len(Journal(run / "journal.jsonl").updates)
    with engine(model, run, buckets) as training:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"base\.safetensors: block 1: found content of digest .*; expected"):
                training.step(BATCH)
    assert len(Journal(run / "journal.jsonl").updates) == updates
    model = changed_toy(file)
    with Engine(model, journal=run / "journal.jsonl", memory=memory(buckets)) as replayer:
        with pytest.raises(CheckpointError, match="block 1"):
            replayer.export(tmp_path / "out")
        assert not (tmp_path / "out").exists()
    model = changed_toy(file)
    with (
        Engine(model, journal=Journal(run / "journal.jsonl").until(1), memory=memory(buckets)) as replayer,
        pytest.raises(CheckpointError, match="block 1"),
    ):
        replayer.evaluate([BATCH])


def test_a_base_that_is_as_it_was_is_taken_from_any_source(run: Path, tmp_path: Path) -> None:
    for buckets in BUCKETS.values():
        with Engine(toy(tmp_path / "base.safetensors"), journal=run / "journal.jsonl", memory=memory(buckets)) as replayer:
            replayer.evaluate([BATCH])


def test_a_replayer_notes_nothing(tmp_path: Path) -> None:
    with engine(toy(tmp_path / "base.safetensors"), tmp_path / "run") as training:
        training.journal  # noqa: B018
    before = (tmp_path / "run/journal.jsonl").read_bytes()
    with Engine(toy(tmp_path / "base.safetensors"), journal=tmp_path / "run/journal.jsonl") as replayer:
        replayer.evaluate([BATCH])
        assert replayer.journal.base_digests == {}
    assert (tmp_path / "run/journal.jsonl").read_bytes() == before


def test_digests_are_compared_where_segments_were_written_back_meanwhile(tmp_path: Path) -> None:
    """What was written back needs no base, until it is damaged: then the base is read, and looked at."""
    file, run = tmp_path / "base.safetensors", tmp_path / "run"
    with engine(toy(file), run, 1, every=1) as training:
        for _ in range(3):
            training.step(BATCH)
    model = changed_toy(file)
    with engine(model, run, 1) as training:
        training.step(BATCH)
    scratch = run / "scratch.bin"
    scratch.write_bytes(bytes(scratch.stat().st_size))
    with engine(changed_toy(file), run, 1) as training, pytest.raises(CheckpointError, match="block 1"):
        training.step(BATCH)


def digests_of(
    folder: Path, values: Mapping[str, torch.Tensor], dtype: torch.dtype, kind: str, shards: str = "one"
) -> Mapping[str, str]:
    """The digests that a source of a kind makes of a checkpoint of two segments."""
    file = folder / f"{shards}.safetensors"
    save_file(dict(values) if shards == "one" else {"first": torch.zeros(77), **values}, file)
    entries = {name: entry for name, entry in parse_header(file).items() if name in values}
    weights = SafetensorsReader(entries)
    specs = [ParameterSpec(name, tuple(v.shape), dtype, i, True) for i, (name, v) in enumerate(values.items())]
    layouts = (
        BlockLayout("embedding", SegmentKind.EMBEDDING, tuple(specs[:1])),
        BlockLayout("block", SegmentKind.BLOCK, tuple(specs[1:])),
    )
    digests, journal = BaseDigests({}, learns=True), Journal()
    journal.begin({"noise": "none"})
    if kind == "at once":
        model = toy(folder / "other.safetensors")
        model.layouts, model.weights = layouts, weights
        seen: list[int] = []
        unknown = verify_base(model, journal, seen.append)
        assert sum(seen) == sum(spec.nbytes for spec in specs)
        weights.close()
        return unknown
    memory = HostDevice().host_memory
    source = (
        SegmentStore(weights, layouts, memory, base_digests=digests)
        if kind == "resident"
        else SegmentStore(weights, laid_out_as_on_disk(layouts, weights), memory, base_digests=digests, buckets=3)
    )
    for index in (0, 1, 1):
        source.release(source.acquire(index), None)
    source.close()
    weights.close()
    digests.note(journal)
    return journal.base_digests


def test_digests_depend_on_the_values_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the source, on where a tensor lies in its file, or on how the file is cut into shards."""
    monkeypatch.setattr(zo2core.sources.segment_store, "DIGEST_CHUNK", 1 << 16)
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": (3, 5), "b": (700, 1900), "c": (1,), "d": (1_100_003,)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in sizes.items()}
    for dtype in (torch.float32, torch.bfloat16):
        expected = digests_of(tmp_path, values, dtype, "resident")
        assert set(expected) == {"embedding", "block"}
        for kind in ("resident", "streamed", "at once"):
            for shards in ("one", "moved"):
                assert digests_of(tmp_path, values, dtype, kind, shards) == expected, (kind, shards)
    for name, value in values.items():
        for at in (0, value.numel() // 2, value.numel() - 1):
            other = value.clone()
            other.view(-1)[at] += 1
            assert digests_of(tmp_path, {**values, name: other}, torch.float32, "streamed") != expected


def test_a_digest_is_the_same_in_whatever_pieces_bytes_come() -> None:
    length = 1 << 18  # elements of a cut
    values = torch.randn(3 * length + 5)
    found = set()
    for cuts in ([0, values.numel()], [0, 1, length - 1, length, length + 1, 2 * length + 7, values.numel()]):
        pieces = list(pairwise(cuts))
        for order in (pieces, pieces[::-1]):
            digest = SegmentDigest([values])
            for piece in order:
                digest.add(0, *piece)
            found.add(digest.value())
    assert len(found) == 1


def test_all_of_the_base_is_compared_at_once(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "base.safetensors"
    journal = Journal(run / "journal.jsonl")
    assert verify_base(toy(file), journal) == {}
    model = changed_toy(file, "layers.2.mix.weight")
    with pytest.raises(CheckpointError, match="block 2"):
        verify_base(model, journal)
    assert set(verify_base(toy(file), Journal())) == set(journal.base_digests)
