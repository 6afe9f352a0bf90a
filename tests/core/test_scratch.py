"""What is written back beside a base: scratch files, generations and digests.

Whatever happens to it, weights are right.
"""

import json
import os
import random
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from damages import (
    Damage,
    cut,
    damage_file,
    double_line,
    drop_line,
    exchange,
    flip,
    move_lines,
    zero,
)
from engines import memory
from safetensors.torch import save_file
from segments import BLOCKS, CountingWeights, layouts
from toy import ToyBlockModel

import zo2core.sources.segment_store
from zo2core import (
    BlockLayout,
    Engine,
    EngineOptions,
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
from zo2core.errors import CheckpointError, JournalError, ScratchError
from zo2core.io.direct_file import PAGE, RangedFile, whole_pages
from zo2core.io.durable import RecordFile, to_line
from zo2core.protocols import BlockModel
from zo2core.sources.segment_store import (
    BaseDigests,
    SegmentDigest,
    laid_out_as_on_disk,
    verify_base,
)
from zo2core.sources.slot_file import DATA, MANIFEST, Generations, Scratch
from zo2core.types import StateSpec

IDS = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
BEFORE, AFTER = 4, 3  # steps of the process that wrote the file, and of the one that goes on
LAYERS = 4
BUCKETS = {"resident": None, "one bucket": 1, "three buckets": 3}

every_source = pytest.mark.parametrize("buckets", BUCKETS.values(), ids=BUCKETS)


def engine_on(
    model: BlockModel, run: Path, buckets: int | None = None, every: int | None = None
) -> Engine:
    """An engine that goes on from whatever is in the run's directory."""
    return Engine(
        model,
        ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3), noise=PhiloxNoise()),
        journal=run / "journal.jsonl",
        memory=memory(buckets, budget=1 << 28),
        options=EngineOptions(write_back=WriteBackPolicy(directory=run, every=every)),
    )


def engine(run: Path, buckets: int | None) -> Engine:
    file = run.parent / f"{run.name}.safetensors"
    return engine_on(
        ToyBlockModel(50, 40, LAYERS, tied=True, dtype=torch.float32, file=file), run, buckets, 1
    )


def train(run: Path, buckets: int | None, steps: int) -> dict[str, bytes]:
    with engine(run, buckets) as training:
        for _ in range(steps):
            training.step(BATCH)
        return {name: tensor.numpy().tobytes() for name, tensor in training.parameters_now()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return train(tmp_path_factory.mktemp("undisturbed") / "run", None, BEFORE + AFTER)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that were interrupted, with all segments written back: blocks that stream lie as on
    disk, others are packed.
    """
    folder = tmp_path_factory.mktemp("written")
    for kind, buckets in (("resident", None), ("streamed", 1)):
        train(folder / kind, buckets, BEFORE)
    return folder


def copied(written: Path, folder: Path, buckets: int | None = 1) -> Path:
    shutil.copytree(written / ("resident" if buckets is None else "streamed"), folder / "run")
    return folder / "run"


def records(run: Path) -> list[dict[str, Any]]:
    return [dict(record) for record in RecordFile(run / "scratch.jsonl").loaded]


def rewrite(run: Path, changed: list[dict[str, Any]]) -> None:
    """A manifest whose lines have right checksums."""
    (run / "scratch.jsonl").write_bytes(b"".join(to_line(record) for record in changed))


def exchange_what_records_name(run: Path, rng: random.Random) -> None:
    header, *rest = records(run)
    one, other = rng.sample(rest, 2)
    for key in rng.sample(["segment", "slot", "version", "chain", "xxh3"], rng.randint(1, 4)):
        one[key], other[key] = other[key], one[key]
    rewrite(run, [header, *rest])


def write_nonsense(run: Path, rng: random.Random) -> None:
    header, *rest = records(run)
    nonsense: list[Any] = [None, True, -1, 10**40, 99, 1.5, "1", [], {}, "f" * 16, [0]]
    for record in rng.sample(rest, 3):
        key = rng.choice(list(record))
        if rng.random() < 0.3:
            del record[key]
        else:
            record[key] = rng.choice(
                [value for value in nonsense if key != "version" or value != 99]
            )
    rewrite(run, [header, *rest])


def damaging(name: str, damage: Damage) -> Callable[[Path, random.Random], None]:
    return lambda run, rng: damage_file(run / name, damage, rng)


TO_DATA = {
    f"{damage.__name__} data": damaging("scratch.bin", damage)
    for damage in (flip, zero, exchange, cut)
}
TO_RECORDS = (cut, drop_line, double_line, move_lines)
DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    **TO_DATA,
    **{f"{damage.__name__} of records": damaging("scratch.jsonl", damage) for damage in TO_RECORDS},
    "exchange what records name": exchange_what_records_name,
    "write nonsense": write_nonsense,
}


@pytest.mark.few(4)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_scratch_file_costs_time_and_changes_no_bit(
    damage: str,
    written: Path,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    for seed in range(300 if request.config.getoption("--long") else 5):
        rng = random.Random(f"{damage} {seed}")
        (tmp_path / str(seed)).mkdir()
        buckets = rng.choice(list(BUCKETS.values()))
        run = copied(written, tmp_path / str(seed), buckets)
        DAMAGES[damage](run, rng)
        if rng.random() < 0.3:
            rng.choice([*TO_DATA.values()])(run, rng)
        assert train(run, buckets, AFTER) == undisturbed, seed
        shutil.rmtree(tmp_path / str(seed))


@every_source
def test_a_flipped_bit_costs_its_segment(
    buckets: int | None, written: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    run = copied(written, tmp_path, buckets)
    lasts = {record["segment"]: record for record in records(run)[1:]}
    data = bytearray((run / "scratch.bin").read_bytes())
    data[lasts[2]["slot"] * max(records(run)[0]["sizes"][1:-1]) + 5] ^= 1
    (run / "scratch.bin").write_bytes(data)
    with engine(run, buckets) as resumed:
        source = resumed._run.segments.source
        assert isinstance(source, SegmentStore)
        versions = {}
        for index in range(len(source.layouts)):
            bucket = source.acquire(index)
            versions[index] = bucket.version
            source.release(bucket, bucket.version)
        assert versions == {
            index: 0 if index == 2 else lasts[index]["version"] for index in versions
        }
    assert train(run, buckets, AFTER) == undisturbed


@every_source
def test_two_segments_of_a_slot_are_lost(
    buckets: int | None, written: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    run = copied(written, tmp_path, buckets)
    header, *rest = records(run)
    lasts = {record["segment"]: record for record in rest}
    lasts[3]["slot"] = lasts[2]["slot"]
    rewrite(run, [header, *lasts.values()])
    with engine(run, buckets) as resumed:
        assert resumed.version == BEFORE
    assert [record["segment"] for record in records(run)[1:]] == sorted(set(lasts) - {2, 3}), (
        "they do not count any more"
    )
    assert train(run, buckets, AFTER) == undisturbed


def without_checksum(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "xxh3"}


@pytest.mark.parametrize(
    "change",
    [
        lambda header, *rest: [header, *map(without_checksum, rest)],
        # the format before
        lambda header, *rest: [{**header, "format": 1}, *map(without_checksum, rest)],
        # no run reaches it: no cut journal
        lambda header, *rest: [header, *rest[:-1], {**rest[-1], "version": 10**30}],
    ],
    ids=["no checksums", "the format before", "an absurd version"],
)
def test_records_that_this_version_cannot_have_made_do_not_count(
    change: Callable[..., list[dict[str, Any]]],
    written: Path,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
) -> None:
    run = copied(written, tmp_path)
    before = records(run)
    rewrite(run, change(*before))
    with engine(run, 1):
        assert len(records(run)) < len(before)
    assert train(run, 1, AFTER) == undisturbed


def test_a_manifest_that_knows_a_later_version_tells_that_the_journal_was_cut(
    written: Path, tmp_path: Path
) -> None:
    run = copied(written, tmp_path)
    journal = run / "journal.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-2]))
    with pytest.raises(JournalError, match=r"scratch\.jsonl"):
        engine(run, 1)


@pytest.mark.few(2)
@every_source
def test_a_copy_of_a_live_run_goes_on_with_the_same_bits(
    buckets: int | None,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """In the middle of writes: half of the bytes are there; and each file is of another moment."""
    run, rng = tmp_path / "run", random.Random(0)
    write, calls, copies = RangedFile.write, 0, []
    wanted = 60 if request.config.getoption("--long") else 6
    every = max(BEFORE * (LAYERS + 2) // wanted, 1)
    partial: dict[Path, list[str]] = {}

    def copying(self: RangedFile, offset: int, data: memoryview) -> None:
        nonlocal calls
        half = len(data) // (2 * PAGE) * PAGE
        write(self, offset, data[:half])
        calls += 1
        if calls % every == 0:
            copy = tmp_path / f"copy {calls}"
            copy.mkdir()
            partial[copy] = rng.sample(["scratch.jsonl", "scratch.bin", "journal.jsonl"], 3)
            copies.append(copy)
        for copy, names in partial.items():
            if names and rng.random() < 0.7 and (run / names[0]).exists():
                shutil.copy(run / names[0], copy / names.pop(0))
        write(self, offset + half, data[half:])

    monkeypatch.setattr(RangedFile, "write", copying)
    train(run, buckets, BEFORE + AFTER)
    monkeypatch.undo()
    goes_on = 0
    for copy in copies:
        for name in partial[copy]:
            shutil.copy(run / name, copy)
        done = sum(
            b'"step"' in line
            for line in (copy / "journal.jsonl").read_bytes().splitlines(keepends=True)
        )
        try:
            assert train(copy, buckets, BEFORE + AFTER - done) == undisturbed
            goes_on += 1
        except JournalError as error:  # the journal was copied long before the manifest
            assert "scratch.jsonl" in str(error)  # noqa: PT017
    assert goes_on > 0


def test_each_segments_last_record_has_a_checksum_of_its_bytes_and_one_of_its_own(
    written: Path,
) -> None:
    header, *rest = records(written / "streamed")
    assert header["format"] == 2
    lasts = {record["segment"]: record for record in rest}
    assert set(lasts) == set(range(LAYERS + 2))
    assert all(len(record["xxh3"]) == 16 for record in lasts.values())
    for line in (written / "streamed/scratch.jsonl").read_bytes().splitlines():
        raw, _, member = line.rpartition(b',"crc32":"')
        assert int(member[:8], 16) == zlib.crc32(raw)
        json.loads(line)


WIDTH = 100  # of the toy: a layer's matrix is larger than three samples of the fingerprint


def wide_toy(file: Path) -> ToyBlockModel:
    return ToyBlockModel(50, WIDTH, 3, tied=True, dtype=torch.float32, file=file)


def changed_toy(file: Path, parameter: str = "layers.1.mix.weight") -> ToyBlockModel:
    """The toy, with one byte changed between the samples of the fingerprint under its reader, which
    the file's time does not tell.
    """
    model = wide_toy(file)
    written = file.stat().st_mtime_ns
    before = model.weights.fingerprint
    entry = parse_header(file)[parameter]
    data = bytearray(file.read_bytes())
    data[entry.start + 4096 + 100] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(written, written))
    assert SafetensorsReader(parse_header(file)).fingerprint == before, "the samples do not see it"
    return model


@pytest.fixture
def begun_run(tmp_path: Path) -> Path:
    with engine_on(wide_toy(tmp_path / "base.safetensors"), tmp_path / "run") as training:
        for _ in range(2):
            training.step(BATCH)
    return tmp_path / "run"


def test_the_first_sweep_notes_a_digest_of_every_segment_once_and_a_replayer_none(
    tmp_path: Path,
) -> None:
    file, journal = tmp_path / "base.safetensors", tmp_path / "run/journal.jsonl"
    with engine_on(wide_toy(file), tmp_path / "run", 1) as training:
        assert training.version == 0
    before = journal.read_bytes()
    with Engine(wide_toy(file), journal=journal) as replayer:
        replayer.evaluate([BATCH])
        assert replayer.journal.base_digests == {}
    assert journal.read_bytes() == before
    with engine_on(wide_toy(file), tmp_path / "run", 1) as training:
        training.step(BATCH)
        names = {layout.name for layout in wide_toy(file).layouts}
        assert set(training.journal.base_digests) == names
        training.step(BATCH)
    assert len(journal.read_bytes().splitlines()) == 4, "header, digests, two updates"
    with engine_on(wide_toy(file), tmp_path / "run", 3) as training:
        training.step(BATCH)
        training.step(BATCH)
    assert len(journal.read_bytes().splitlines()) == 6, "nothing new"


@every_source
def test_a_base_changed_between_the_samples_is_refused(
    buckets: int | None, begun_run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "base.safetensors"
    model = changed_toy(file)
    updates = len(Journal(begun_run / "journal.jsonl").updates)
    with engine_on(model, begun_run, buckets) as training:
        for _ in range(2):
            with pytest.raises(
                CheckpointError,
                match=r"base\.safetensors: block 1: found content of digest .*; expected",
            ):
                training.step(BATCH)
    assert len(Journal(begun_run / "journal.jsonl").updates) == updates
    model = changed_toy(file)
    with Engine(model, journal=begun_run / "journal.jsonl", memory=memory(buckets)) as replayer:
        with pytest.raises(CheckpointError, match="block 1"):
            replayer.export(tmp_path / "out")
        assert not (tmp_path / "out").exists()
    model = changed_toy(file)
    with (
        Engine(
            model, journal=Journal(begun_run / "journal.jsonl").until(1), memory=memory(buckets)
        ) as replayer,
        pytest.raises(CheckpointError, match="block 1"),
    ):
        replayer.evaluate([BATCH])


def test_a_base_that_is_overwritten_during_a_run_is_refused_before_a_step_or_an_export(
    tmp_path: Path,
) -> None:
    file, run = tmp_path / "base.safetensors", tmp_path / "run"
    with engine_on(wide_toy(file), run, 1) as training:
        training.step(BATCH)
        training.step(BATCH)
        written, content = file.stat().st_mtime_ns, file.read_bytes()
        file.write_bytes(content)  # in place; even equal bytes may have been others in between
        told = r"base\.safetensors: found that another process has written into the file"
        with pytest.raises(CheckpointError, match=told):
            training.step(BATCH)
        with pytest.raises(CheckpointError, match=told):
            training.export(tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert training.version == 2
        os.utime(file, ns=(written, written))
        training.step(BATCH)
    assert len(Journal(run / "journal.jsonl").updates) == 3


def test_digests_are_compared_where_segments_were_written_back_meanwhile(tmp_path: Path) -> None:
    """What was written back needs no base, until it is damaged: then the base is read, and looked
    at.
    """
    file, begun_run = tmp_path / "base.safetensors", tmp_path / "run"
    with engine_on(wide_toy(file), begun_run, 1, every=1) as training:
        for _ in range(3):
            training.step(BATCH)
    model = changed_toy(file)
    with engine_on(model, begun_run, 1) as training:
        training.step(BATCH)
    scratch = begun_run / "scratch.bin"
    scratch.write_bytes(bytes(scratch.stat().st_size))
    with (
        engine_on(changed_toy(file), begun_run, 1) as training,
        pytest.raises(CheckpointError, match="block 1"),
    ):
        training.step(BATCH)


def digests_of(
    folder: Path,
    values: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    kind: str,
    shards: str = "one",
) -> Mapping[str, str]:
    """The digests that a source of a kind makes of a checkpoint of two segments."""
    file = folder / f"{shards}.safetensors"
    save_file(dict(values) if shards == "one" else {"first": torch.zeros(77), **values}, file)
    entries = {name: entry for name, entry in parse_header(file).items() if name in values}
    weights = SafetensorsReader(entries)
    specs = [
        ParameterSpec(name, tuple(v.shape), dtype, i, True)
        for i, (name, v) in enumerate(values.items())
    ]
    layouts = (
        BlockLayout("embedding", SegmentKind.EMBEDDING, tuple(specs[:1])),
        BlockLayout("block", SegmentKind.BLOCK, tuple(specs[1:])),
    )
    digests, journal = BaseDigests({}, learns=True), Journal()
    journal.begin({"noise": "none"})
    if kind == "at once":
        model = wide_toy(folder / "other.safetensors")
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
        else SegmentStore(
            weights, laid_out_as_on_disk(layouts, weights), memory, base_digests=digests, buckets=3
        )
    )
    for index in (0, 1, 1):
        source.release(source.acquire(index), None)
    source.close()
    weights.close()
    journal.note_base(digests.unknown_to(journal))
    return journal.base_digests


def test_digests_depend_on_the_values_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the source, on where a tensor lies in its file, or on how the file is cut into
    shards.
    """
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
            assert (
                digests_of(tmp_path, {**values, name: other}, torch.float32, "streamed") != expected
            )


def test_a_digest_is_the_same_in_whatever_pieces_bytes_come() -> None:
    length = 1 << 18  # elements of a cut
    values = torch.randn(3 * length + 5)
    found = set()
    for cuts in (
        [0, values.numel()],
        [0, 1, length - 1, length, length + 1, 2 * length + 7, values.numel()],
    ):
        pieces = list(pairwise(cuts))
        for order in (pieces, pieces[::-1]):
            digest = SegmentDigest([values])
            for piece in order:
                digest.add(0, *piece)
            found.add(digest.value())
    assert len(found) == 1


def test_all_of_the_base_is_compared_at_once_and_taken_from_any_source(
    begun_run: Path, tmp_path: Path
) -> None:
    file = tmp_path / "base.safetensors"
    for buckets in BUCKETS.values():
        with Engine(
            wide_toy(file), journal=begun_run / "journal.jsonl", memory=memory(buckets)
        ) as replayer:
            replayer.evaluate([BATCH])
    journal = Journal(begun_run / "journal.jsonl")
    assert verify_base(wide_toy(file), journal) == {}
    model = changed_toy(file, "layers.2.mix.weight")
    with pytest.raises(CheckpointError, match="block 2"):
        verify_base(model, journal)
    assert set(verify_base(wide_toy(file), Journal())) == set(journal.base_digests)


COMMITS = 3
LAYOUTS = layouts()
OF_STATES = tuple(
    replace(layout, states=(StateSpec("moment", (3000,), torch.float32),)) for layout in layouts(3)
)


def opened(folder: Path, segments: Sequence[BlockLayout] = LAYOUTS) -> Generations:
    return Generations(folder, segments, lambda version: version, spare=BLOCKS)


def committed(folder: Path, steps: int = COMMITS) -> None:
    """Commit a few steps, each of which fills all segments with its number."""
    with closing(opened(folder)) as files:
        for step in range(1, steps + 1):
            for segment, layout in enumerate(LAYOUTS):
                files.write(
                    segment, HostDevice().host_memory(whole_pages(layout.nbytes)).fill_(step), step
                )
            files.commit(step, {"values of step": step})


def numbers_in(files: Generations) -> set[int]:
    numbers: set[int] = set()
    for segment, layout in enumerate(LAYOUTS):
        pages = HostDevice().host_memory(whole_pages(layout.nbytes))
        files.read(segment, pages)
        numbers.update(pages.tolist())
    return numbers


def test_a_commit_outlives_processes_that_commit_nothing(tmp_path: Path) -> None:
    """Each process that opens the files writes their manifest anew."""
    committed(tmp_path)
    for _ in range(3):
        with closing(opened(tmp_path)) as files:
            assert (files.step, files.values) == (COMMITS, {"values of step": COMMITS})
            assert numbers_in(files) == {COMMITS}


IMPOSSIBLE: dict[str, Callable[[dict[str, Any]], object]] = {
    "step 0": lambda record: record.update(step=0, chain=0, segments=[]),
    "no number as step": lambda record: record.update(step=True, chain=1, segments=[]),
    "no values": lambda record: record.pop("values"),
    "no segments": lambda record: record.pop("segments"),
    "no object as segment": lambda record: record["segments"].append(3),
    "a segment of version 0": lambda record: record["segments"][2].update(version=0),
    "a segment of a later step": lambda record: record["segments"][2].update(version=COMMITS + 1),
    "a segment of no version": lambda record: record["segments"][2].pop("version"),
    "a segment twice": lambda record: record["segments"].append(dict(record["segments"][2])),
    "a segment that the model lacks": lambda record: record["segments"][2].update(
        segment=BLOCKS + 2
    ),
    "two segments in one slot": lambda record: record["segments"][2].update(
        slot=record["segments"][3]["slot"]
    ),
    "a free slot of another segment": lambda record: record["segments"][2].update(
        slot=record["segments"][0]["slot"] + 1
    ),
}


@pytest.mark.parametrize("kind", [Generations, Scratch])
@pytest.mark.parametrize("damaged", [False, True])
def test_another_runs_only_copy_is_never_opened_for_writing(
    damaged: bool, kind: Any, tmp_path: Path
) -> None:
    committed(tmp_path)
    manifest = tmp_path / MANIFEST
    if damaged:
        manifest.write_bytes(manifest.read_bytes().replace(b"values of", b"valued of", 1))
    before = manifest.read_bytes(), (tmp_path / DATA).read_bytes()
    more = {"spare": BLOCKS} if kind is Generations else {}
    with pytest.raises(ScratchError, match="weights of another run"):
        kind(tmp_path, LAYOUTS, lambda version: version + 100, **more)
    assert (manifest.read_bytes(), (tmp_path / DATA).read_bytes()) == before


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_record_that_no_commit_can_have_made_is_passed_over(
    change: Callable[[Any], object], tmp_path: Path
) -> None:
    committed(tmp_path)
    *records, last = map(dict, RecordFile(tmp_path / MANIFEST).loaded)
    change(last)
    (tmp_path / MANIFEST).write_bytes(b"".join(map(to_line, [*records, last])))
    with closing(opened(tmp_path)) as files:
        assert (files.step, files.values) == (COMMITS - 1, {"values of step": COMMITS - 1})
        assert numbers_in(files) == {COMMITS - 1}


def test_a_commit_without_its_bytes_is_passed_over_and_a_run_of_such_ones_refused(
    tmp_path: Path,
) -> None:
    committed(tmp_path, 2)
    data = (tmp_path / DATA).read_bytes()
    (tmp_path / DATA).write_bytes(data[:-1])  # the file ends with the second slot of the head
    with closing(opened(tmp_path)) as files:
        assert (files.step, numbers_in(files)) == (1, {1})
    manifest = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / DATA).rename(tmp_path / "moved")
    with pytest.raises(ScratchError, match="damaged records or bytes of this run"):
        opened(tmp_path)
    assert (tmp_path / MANIFEST).read_bytes() == manifest
    (tmp_path / "moved").rename(tmp_path / DATA)
    with closing(opened(tmp_path)) as files:
        assert (files.step, numbers_in(files)) == (1, {1})


@contextmanager
def source_of_states(folder: Path, buckets: int) -> Iterator[tuple[SegmentStore, Generations]]:
    """Segments after a first step, which has filled each one's weights and states with its
    index.
    """
    weights = CountingWeights()
    segments = laid_out_as_on_disk(OF_STATES, weights)
    files = opened(folder, segments)
    memory = HostDevice().host_memory
    with closing(
        SegmentStore(weights, segments, memory, buckets=buckets, scratch=files, write_back_every=1)
    ) as source:
        for segment in range(len(segments)):
            bucket = source.acquire(segment)
            source.read_states(segment)
            for view in bucket.views:
                view.fill_(segment)
            source.release(bucket, 1)
        source.write_kept()
        source.skip_states()
        files.commit(1, {})
        yield source, files


def test_a_segment_is_written_with_its_states_though_its_weights_alone_were_read(
    tmp_path: Path,
) -> None:
    with source_of_states(tmp_path, 1) as (source, files):
        bucket = source.acquire(1)  # in the memory that has had the states of block 3
        bucket.views[0].fill_(7.0)
        source.release(bucket, 2)
        source.write_kept()
        files.commit(2, {})
        source.release(source.acquire(2), 1)
        bucket = source.acquire(1)
        source.read_states(1)
        assert [set(view.tolist()) for view in bucket.views] == [{7.0}, {1.0}]
        source.release(bucket, 2)


def test_segments_are_released_once_no_states_are_read_into_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that fails releases a segment unchanged while its states are read."""
    go, ended, real = threading.Event(), threading.Event(), Generations.read

    def slow(self: Generations, segment: int, out: torch.Tensor, start: int = 0) -> None:
        if start > 0 and segment == 1:
            assert go.wait(10)
        real(self, segment, out, start)
        if start > 0 and segment == 1:
            ended.set()

    with source_of_states(tmp_path, 2) as (source, _):
        source.release(source.acquire(1), 1)  # without states, in the memory of another block
        resident = source.acquire(0)
        source.read_states(0)
        source.release(resident, 1)
        monkeypatch.setattr(Generations, "read", slow)
        bucket = source.acquire(1)
        threading.Timer(0.1, go.set).start()
        source.release(bucket, 1)
        assert ended.is_set()


def test_all_that_is_kept_is_written_before_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real = threading.Event(), Generations.write

    def slow(self: Generations, segment: int, data: torch.Tensor, version: int) -> None:
        assert go.wait(10)
        real(self, segment, data, version)

    with source_of_states(tmp_path, 2) as (source, files):
        monkeypatch.setattr(Generations, "write", slow)
        source.release(source.acquire(1), 2)
        threading.Timer(0.1, go.set).start()
        source.write_kept()
        assert files.version(1) == 2


def test_a_write_that_failed_is_reported_before_a_commit(tmp_path: Path) -> None:
    full = patch.object(RangedFile, "write", side_effect=OSError(28, "no space left"))
    with source_of_states(tmp_path, 2) as (source, _), full:
        source.release(source.acquire(1), 2)
        with pytest.raises(ScratchError, match="no space left"):
            source.write_kept()
