"""What is in the scratch file is checked: whatever happens to it between two processes, the weights are those of the run."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damages import Damage, cut, damage_file, double_line, drop_line, exchange, flip, move_lines, zero
from engines import memory, zeroth_order
from toy import ToyBlockModel

from zo2core import Engine, MeZOSGD, PhiloxNoise, SegmentStore, WriteBackPolicy
from zo2core.errors import JournalError
from zo2core.io.direct_file import PAGE, RangedFile
from zo2core.io.durable import RecordFile, to_line

IDS = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
BEFORE, AFTER = 4, 3  # steps of the process that wrote the file, and of the one that goes on
LAYERS = 4
BUCKETS = {"resident": None, "one bucket": 1, "three buckets": 3}

every_source = pytest.mark.parametrize("buckets", BUCKETS.values(), ids=BUCKETS)


def engine(run: Path, buckets: int | None, every: int | None = 1) -> Engine:
    """An engine that goes on from whatever is in the run's directory."""
    model = ToyBlockModel(50, 40, LAYERS, tied=True, dtype=torch.float32, file=run.parent / f"{run.name}.safetensors")
    return zeroth_order(
        model,
        MeZOSGD(lr=1e-2, zo_eps=1e-3),
        noise=PhiloxNoise(),
        journal=run / "journal.jsonl",
        memory=memory(buckets, budget=1 << 28),
        write_back=WriteBackPolicy(directory=run, every=every),
    )


def train(run: Path, buckets: int | None, steps: int) -> dict[str, bytes]:
    """Take steps; return the final weights."""
    with engine(run, buckets) as training:
        for _ in range(steps):
            training.step(BATCH)
        return {name: tensor.numpy().tobytes() for name, tensor in training.parameters_now()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return train(tmp_path_factory.mktemp("undisturbed") / "run", None, BEFORE + AFTER)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that were interrupted, with all segments written back: blocks that stream lie as on disk, others are packed."""
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
            record[key] = rng.choice([value for value in nonsense if key != "version" or value != 99])
    rewrite(run, [header, *rest])


def damaging(name: str, damage: Damage) -> Callable[[Path, random.Random], None]:
    return lambda run, rng: damage_file(run / name, damage, rng)


TO_DATA = {f"{damage.__name__} data": damaging("scratch.bin", damage) for damage in (flip, zero, exchange, cut)}
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
def test_one_flipped_bit_gives_up_its_segment_alone(
    buckets: int | None, written: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    run = copied(written, tmp_path, buckets)
    lasts = {record["segment"]: record for record in records(run)[1:]}
    data = bytearray((run / "scratch.bin").read_bytes())
    data[lasts[2]["slot"] * max(records(run)[0]["sizes"][1:-1]) + 5] ^= 1
    (run / "scratch.bin").write_bytes(data)
    with engine(run, buckets) as resumed:
        source = resumed._runner.source
        assert isinstance(source, SegmentStore)
        versions = {}
        for index in range(len(source.layouts)):
            bucket = source.acquire(index)
            versions[index] = bucket.version
            source.release(bucket, bucket.version)
        assert versions == {index: 0 if index == 2 else lasts[index]["version"] for index in versions}
    assert train(run, buckets, AFTER) == undisturbed


@every_source
def test_two_segments_of_one_slot_are_both_replayed(
    buckets: int | None, written: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    run = copied(written, tmp_path, buckets)
    header, *rest = records(run)
    lasts = {record["segment"]: record for record in rest}
    lasts[3]["slot"] = lasts[2]["slot"]
    rewrite(run, [header, *lasts.values()])
    with engine(run, buckets) as resumed:
        assert resumed.version == BEFORE
    assert [record["segment"] for record in records(run)[1:]] == sorted(set(lasts) - {2, 3}), "they do not count any more"
    assert train(run, buckets, AFTER) == undisturbed


def without_checksum(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "xxh3"}


@pytest.mark.parametrize(
    "change",
    [
        lambda header, *rest: [header, *map(without_checksum, rest)],
        lambda header, *rest: [{**header, "format": 1}, *map(without_checksum, rest)],  # the format before
        lambda header, *rest: [header, *rest[:-1], {**rest[-1], "version": 10**30}],  # no run reaches it: no cut journal
    ],
    ids=["no checksums", "the format before", "an absurd version"],
)
def test_records_that_this_version_cannot_have_made_do_not_count(
    change: Callable[..., list[dict[str, Any]]], written: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    run = copied(written, tmp_path)
    before = records(run)
    rewrite(run, change(*before))
    with engine(run, 1):
        assert len(records(run)) < len(before)
    assert train(run, 1, AFTER) == undisturbed


def test_a_manifest_that_knows_a_later_version_tells_that_the_journal_was_cut(written: Path, tmp_path: Path) -> None:
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
        done = sum(b'"step"' in line for line in (copy / "journal.jsonl").read_bytes().splitlines(keepends=True))
        try:
            assert train(copy, buckets, BEFORE + AFTER - done) == undisturbed
            goes_on += 1
        except JournalError as error:  # the journal was copied long before the manifest
            assert "scratch.jsonl" in str(error)  # noqa: PT017
    assert goes_on > 0


def test_bytes_are_hashed_beside_the_write_and_memory_is_free_when_it_ends(written: Path) -> None:
    """Records of a run name the checksum of what the file holds."""
    header, *rest = records(written / "streamed")
    assert header["format"] == 2
    lasts = {record["segment"]: record for record in rest}
    assert set(lasts) == set(range(LAYERS + 2))
    assert all(len(record["xxh3"]) == 16 for record in lasts.values())
    for line in (written / "streamed/scratch.jsonl").read_bytes().splitlines():
        raw, _, member = line.rpartition(b',"crc32":"')
        assert int(member[:8], 16) == zlib.crc32(raw)
        json.loads(line)
