"""The journal: what it gives back, what it refuses, what a failed write leaves, and what its header
says of a run.
"""

import contextlib
import json
import math
import os
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from damages import IN_LINES, damaged
from engines import open_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIGS, make_batch, save_model, small_config
from updates import line_of, record_of, update_of

from zo2adapters import open_checkpoint
from zo2core import (
    Engine,
    EngineOptions,
    Evaluation,
    HostDevice,
    Journal,
    MeZOSGD,
    ParameterSpec,
    PhiloxNoise,
    SegmentStore,
    Update,
    ZerothOrder,
    build,
)
from zo2core.encodings.forms import Int8Rows, NF4Blocks
from zo2core.errors import JournalError, OptionError
from zo2core.estimators.noise import TorchGenerator, drawing_fingerprint
from zo2core.journal.journal import copy_journal
from zo2core.journal.records import differences, digest

HEADER = {"base": "b", "noise": "n"}
DIGESTS = {"embedding": "0a1b", "block 0": "2c3d"}
floats = st.floats(allow_nan=False, allow_infinity=False)
rates = st.floats(0, 1e9, exclude_min=True)
seeds = st.integers(0, 2**63 - 1)


@st.composite
def updates(draw: st.DrawFn, step: int) -> Update:
    probes = draw(st.integers(1, 3))
    directions = tuple(draw(seeds) for _ in range(probes))
    return Update(
        step=step,
        evaluations=tuple(
            Evaluation(seed, draw(st.floats(-9, 9))) for seed in directions for _ in range(2)
        ),
        seeds=directions,
        projected_grads=tuple(draw(st.floats(-1e29, 1e29)) for _ in range(probes)),
        lr=draw(rates),
        zo_eps=draw(rates),
        weight_decay=draw(st.floats(0, 1e9)),
        perturb_in_place=draw(st.booleans()),
        losses=tuple(draw(floats) for _ in range(2 * probes)),
    )


def written(path: Path, count: int = 3) -> None:
    with contextlib.closing(Journal(path)) as journal:
        journal.begin(HEADER)
        for step in range(count):
            journal.append(update_of(step))


STEPS = [update_of(step) for step in range(5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written(tmp_path / "journal.jsonl")
    return tmp_path / "journal.jsonl"


no_sync = partial(patch.object, os, "fsync", side_effect=OSError(5, "Input/output error"))


@given(data=st.data())
def test_every_bit_comes_back(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    expected = [data.draw(updates(step)) for step in range(data.draw(st.integers(0, 4)))]
    journal = Journal(path)
    journal.begin(HEADER)
    for update in expected:
        journal.append(update)
    journal.close()
    again = Journal(path)
    assert repr(list(again.updates)) == repr(expected)  # repr tells 0.0 from -0.0
    again.begin(HEADER)
    for line in path.read_bytes().splitlines():
        assert list(json.loads(line))[-1] == "crc32"
        content, checksum = line.split(b',"crc32":')
        assert checksum == b'"%08x"}' % zlib.crc32(content)


def test_a_torn_last_record_is_dropped_and_written_over(path: Path) -> None:
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        journal = Journal(path)
        assert list(journal.updates) == STEPS[:2]
        assert journal.torn is (end > start)
    path.write_bytes(whole + b"\0" * 100)
    assert list(Journal(path).updates) == STEPS[:3]
    for torn in (whole[start : start + 20], b"\0" * 4096):
        # shorter and longer than the record in its place
        path.write_bytes(whole[:start] + torn)
        with contextlib.closing(Journal(path)) as journal:
            journal.append(update_of(2))
            assert path.read_bytes() == whole
            journal.append(update_of(3))
        assert list(Journal(path).updates) == STEPS[:4]
    header, *_ = whole.splitlines(keepends=True)
    for end in range(1, len(header)):
        path.write_bytes(header[:end])
        journal = Journal(path)
        assert (journal.header, journal.torn) == (None, True)
    path.write_bytes(bytes(4096) + b"tail of a header")
    assert Journal(path).torn


def test_damage_elsewhere_is_refused_with_its_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    for number in range(len(lines) - 1):
        damaged = [*lines]
        damaged[number] = damaged[number].replace(b'"', b"'", 1)
        path.write_bytes(b"".join(damaged))
        with pytest.raises(JournalError, match=f"line {number + 1}"):
            Journal(path)
    path.write_bytes(b"".join([lines[0], lines[2], lines[3]]))  # a record is missing
    with pytest.raises(JournalError, match="line 2: found step 1; expected step 0"):
        Journal(path)


def test_another_header_is_refused_with_the_difference(path: Path) -> None:
    with pytest.raises(JournalError) as info:
        Journal(path).begin({"base": "other", "noise": "n"})
    assert "'b'" in info.value.found
    assert "'other'" in info.value.expected
    assert "noise" not in info.value.found


def test_a_reopened_journal_is_durable_before_a_version_of_it_counts_elsewhere(
    path: Path, tmp_path: Path
) -> None:
    synced: list[str] = []
    with patch.object(
        os,
        "fsync",
        side_effect=lambda opened: synced.append(os.readlink(f"/proc/self/fd/{opened}")),
    ):
        journal = Journal(path)  # whose last record nobody may have synced
        assert list(journal.updates) == STEPS[:3]
        assert synced == [], "reading changes nothing"
        assert journal.chain(3) is not None
        assert synced == [str(path), str(tmp_path)]
        assert journal.chain(2) is not None
        journal.append(update_of(3))
        assert journal.chain(4) is not None
        assert synced == [str(path), str(tmp_path), str(path)]
        journal.close()


def test_what_cannot_be_synced_does_not_count_and_is_made_again(path: Path) -> None:
    before = path.read_bytes()
    with contextlib.closing(Journal(path)) as journal:
        asks: list[Callable[[], object]] = [
            lambda: journal.append(update_of(3)),
            lambda: journal.note_base(DIGESTS),
            lambda: journal.chain(3),
        ]
        for ask in asks:
            with no_sync(), pytest.raises(JournalError, match="Input/output error"):
                ask()
            assert (list(journal.updates), journal.base_digests) == (STEPS[:3], {})
        assert journal.chain(3) is not None
        journal.append(update_of(3))
    assert path.read_bytes().startswith(before)
    again = Journal(path)
    assert (list(again.updates), again.base_digests) == (STEPS[:4], {})
    with no_sync(), pytest.raises(JournalError, match="Input/output error"):
        again.chain(3)  # as the first that is asked of it


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "lr too large": ({"lr": 1e300}, "lr 1e+300"),
    "lr negative": ({"lr": -1e-6}, "lr -1e-06"),
    "lr NaN": ({"lr": math.nan}, "lr nan"),
    "lr * g too large": ({"lr": 1e30, "projected_grads": [1e30]}, "lr * projected gradient 1e+60"),
    "g too large": ({"lr": 1e-300, "projected_grads": [1e300]}, "projected gradient 1e+300"),
    "zo_eps zero": ({"zo_eps": 0.0}, "zo_eps 0.0"),
    "zo_eps infinite": ({"zo_eps": math.inf}, "zo_eps inf"),
    "shift * zo_eps too large": (
        {"zo_eps": 1e30, "evaluations": [[1, 1e30], [1, -1.0]]},
        "shift * zo_eps 1e+60",
    ),
    "weight_decay negative": ({"weight_decay": -0.1}, "weight_decay -0.1"),
    "lr * weight_decay too large": ({"lr": 1e30, "weight_decay": 1e30}, "lr * weight_decay 1e+60"),
    "no seeds": ({"seeds": [], "projected_grads": []}, "no seeds"),
    "no evaluations": ({"evaluations": [], "losses": []}, "no evaluations"),
    "no losses": ({"losses": []}, "0 losses; expected 2"),
    "a loss missing": ({"losses": [1.5]}, "1 losses; expected 2"),
    "a loss NaN": ({"losses": [1.5, math.nan]}, "loss nan"),
    "a projected gradient missing": ({"projected_grads": []}, "0 projected gradients; expected 1"),
    "a projected gradient NaN": ({"projected_grads": [math.nan]}, "projected gradient nan"),
    "a seed that was not evaluated": ({"seeds": [7]}, "an update along seed 7"),
    "a seed out of range": (
        {"evaluations": [[2**63, 1.0], [2**63, -1.0]], "seeds": [2**63]},
        f"seed {2**63}",
    ),
    "a seed of 400 digits": ({"evaluations": [[10**400, 1.0], [1, -1.0]]}, "a seed of 1329 bits"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_no_estimator_can_have_made_is_neither_read_nor_written(name: str, path: Path) -> None:
    before = path.read_bytes()
    changes, found = IMPOSSIBLE[name]
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()
    }
    if "evaluations" in values:
        values["evaluations"] = tuple(Evaluation(*pair) for pair in values["evaluations"])
    evaluations = (Evaluation(1, 1.0), Evaluation(1, -1.0))
    update = replace(update_of(3), **{"evaluations": evaluations, "seeds": (1,), **values})
    with (
        contextlib.closing(Journal(path)) as journal,
        pytest.raises(JournalError, match=re.escape(f"step 3: found {found}")),
    ):
        journal.append(update)
    assert path.read_bytes() == before
    lines = before.splitlines(keepends=True)
    lines[2] = line_of(record_of(lines[2]) | changes)  # neither the last one nor the first
    path.write_bytes(b"".join(lines))
    with pytest.raises(
        JournalError, match=re.escape(f"journal.jsonl, line 3: found {found}")
    ) as info:
        Journal(path)
    assert len(str(info.value)) < 400 + len(str(path))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": True}, "format True; expected a header of format 1"),
    "noise": ({"noise": 5}, "noise 5; expected a string"),
    "base": ({"base": ["x"]}, "base .* expected a string"),
    "parameters": ({"parameters": None}, "parameters None; expected a string"),
    "estimator": ({"estimator": "mezo"}, "estimator 'mezo'; expected an object or null"),
    "seed": ({"seed": 0.5}, "seed 0.5; expected a whole number or null"),
    "model": ({"model": [1]}, "model .* expected an object"),
    "provenance": ({"provenance": 1}, "provenance 1; expected an object"),
    "a size of 400 digits": ({"seed": "1" * 400}, "seed '1+\\.\\.\\.; expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_header_with_a_value_of_another_type_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    changes, found = WRONG[name]
    path.write_bytes(line_of({"format": 1, **HEADER, **changes}))
    with pytest.raises(JournalError, match=f"journal.jsonl, line 1: found {found}"):
        Journal(path)


def test_a_journal_that_is_shorter_than_others_know_is_told_from_a_torn_one(path: Path) -> None:
    whole = path.read_bytes()
    Journal(path).require_version(3, "metrics.jsonl")
    path.write_bytes(whole[:-30] + b"#" + whole[-29:])
    damaged = Journal(path)
    assert damaged.torn
    with pytest.raises(
        JournalError,
        match=r"2 steps and a damaged last record; .* 3, since metrics.jsonl knows of step 2",
    ):
        damaged.require_version(3, "metrics.jsonl")
    damaged.require_version(2, "metrics.jsonl")
    # a record was cut off, and nothing is torn
    path.write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])
    cut = Journal(path)
    assert not cut.torn
    with pytest.raises(JournalError, match="its end was damaged or cut"):
        cut.require_version(3, "scratch.jsonl")


DISTURBANCES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "replaced by its copy": lambda path: (
        (path.parent / "copy").write_bytes(path.read_bytes())
        and (path.parent / "copy").replace(path)
    ),
    "its directory moved": lambda path: path.parent.rename(path.parent.with_name("moved")),
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "lengthened": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
}


@pytest.mark.parametrize("is_open", [False, True], ids=["before the first step", "after a step"])
@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
def test_a_journal_that_is_disturbed_under_a_running_process_is_an_error_at_the_next_step(
    disturb: Callable[[Path], object], is_open: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    written(path)
    with contextlib.closing(Journal(path)) as journal:
        if is_open:
            journal.append(update_of(3))
        taken = list(journal.updates)
        disturb(path)
        there = path.read_bytes() if path.exists() else None
        with pytest.raises(JournalError, match="the step was not taken"):
            journal.append(update_of(len(taken)))
        assert list(journal.updates) == taken
        assert there == (path.read_bytes() if path.exists() else None), (
            "whatever is there is not touched"
        )


def test_a_journal_that_is_removed_during_a_step_is_an_error_of_that_step(path: Path) -> None:
    removed = patch.object(os, "fsync", side_effect=lambda _: path.unlink(missing_ok=True))
    with contextlib.closing(Journal(path)) as journal, removed:
        with pytest.raises(JournalError, match="removed or replaced"):
            journal.append(update_of(3))
        assert len(journal.updates) == 3


def test_a_journal_put_back_goes_on_and_a_relative_path_stays(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(Journal("journal.jsonl")) as journal:
        monkeypatch.chdir("/")
        journal.append(update_of(3))
        path.rename(tmp_path / "elsewhere")
        with pytest.raises(JournalError, match="removed or replaced"):
            journal.append(update_of(4))
        (tmp_path / "elsewhere").rename(path)
        journal.append(update_of(4))
    assert list(Journal(path).updates) == STEPS


def test_what_was_begun_by_another_process_in_the_meantime_is_not_written_over(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    written(path)
    before = path.read_bytes()
    with pytest.raises(JournalError, match="bytes, where this process left 0"):
        journal.begin(HEADER)
    assert path.read_bytes() == before


def test_digests_of_the_base_are_kept_beside_the_updates(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path, 1)
    chain = Journal(path).chain(1)
    with contextlib.closing(Journal(path)) as journal:
        assert journal.base_digests == {}
        journal.note_base({"embedding": "0a1b"})
        journal.append(update_of(1))
        journal.note_base(DIGESTS)
        journal.note_base(DIGESTS)
        assert journal.base_digests == DIGESTS
        chains = [journal.chain(version) for version in range(3)]
    assert [next(iter(json.loads(line))) for line in path.read_bytes().splitlines()] == [
        *("format", "step", "base_digests", "step", "base_digests")
    ], "what is known is not written again"
    again = Journal(path)
    assert list(again.updates) == STEPS[:2]
    assert again.base_digests == again.until(0).base_digests == DIGESTS
    assert [again.chain(version) for version in range(3)] == chains
    assert chains[1] == chain, "digests are no part of the chain"


def test_what_steps_have_measured_is_kept_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path, 1)
    with contextlib.closing(Journal(path)) as journal:
        chain = journal.chain(1)
        journal.note_measured({"reward": 0.5, "tokens": 7})  # of a step that was then killed
        journal.note_measured({"reward": 0.25, "tokens": 7})
        journal.note_measured({"reward": 0.25, "tokens": 7})
        journal.append(update_of(1))
        journal.note_measured({"reward": math.nan})
    assert [next(iter(json.loads(line))) for line in path.read_bytes().splitlines()] == [
        *("format", "step", "measured", "measured", "step", "measured")
    ], "what is known is not written again"
    again = Journal(path)
    assert again.measured[1] == {"reward": 0.25, "tokens": 7.0}
    assert math.isnan(again.measured[2]["reward"])
    assert list(again.until(2).measured) == [1]
    assert not again.until(1).measured
    assert again.chain(1) == chain, "they are no part of the chain"
    copy_journal(again, tmp_path / "copy")
    assert Journal(tmp_path / "copy").measured[1] == again.measured[1]
    other = Journal()
    other.take_excerpt(again.excerpt(0))
    assert other.measured[1] == again.measured[1]
    hostile: object
    for hostile in ({"step": 4}, {"step": 0, "reward": 7}, [], {"step": True}):
        path.write_bytes(path.read_bytes() + line_of({"measured": hostile}))
        with pytest.raises(JournalError, match="line 7"):
            Journal(path)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def test_another_digest_of_a_segment_is_refused(path: Path) -> None:
    with contextlib.closing(Journal(path)) as journal:
        journal.note_base(DIGESTS)
        before = path.read_bytes()
        with pytest.raises(
            JournalError, match="a base whose block 0 has digest 'ffff'; expected digest '2c3d'"
        ):
            journal.note_base({"head": "4e5f", "block 0": "ffff"})
    assert path.read_bytes() == before
    hostile: list[object] = [
        {"block 0": "ffff"},
        {"block 0": "XYZ"},
        {"block 0": 7},
        [],
        {"block 0": ""},
    ]
    for digests in hostile:
        path.write_bytes(before + line_of({"base_digests": digests}))
        with pytest.raises(JournalError, match="line 6"):
            Journal(path)


PATHS: dict[str, Any] = {
    "a directory": lambda path: path.mkdir() or path,
    "a FIFO": lambda path: os.mkfifo(path) or path,  # type: ignore[func-returns-value]
    "/dev/zero": lambda path: Path("/dev/zero"),
    "a name of 300 bytes": lambda path: path.with_name("x" * 300),
    "a path of 5000 bytes": lambda path: path.joinpath(*["x" * 99] * 50),
    "a file as directory": lambda path: path.write_bytes(b"") * 0 or path / "journal.jsonl",
    "a null byte": lambda path: f"{path}\0",
    "a loop of links": lambda path: path.symlink_to(path) or path,
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_can_be_no_journal_is_refused_at_once(name: str, tmp_path: Path) -> None:
    path = PATHS[name](tmp_path / "journal.jsonl")
    with pytest.raises(JournalError, match="expected a readable journal") as info:
        Journal(path)
    assert len(str(info.value).splitlines()) == 1


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Permissions hold for everybody but root."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_journal_that_one_may_not_read_or_write_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("shared")
    for parent in (directory, *directory.parents[:3]):
        # also where several processes share the tests
        parent.chmod(0o755)
    path = directory / "journal.jsonl"
    written(path)
    path.chmod(0o400 if os.geteuid() == 0 else 0)
    with as_nobody(), pytest.raises(JournalError, match="Permission denied"):
        Journal(path)
    path.chmod(0o444)
    before = path.read_bytes()
    with (
        as_nobody(),
        contextlib.closing(Journal(path)) as journal,
        pytest.raises(JournalError, match="Permission denied"),
    ):
        journal.append(update_of(3))
    assert path.read_bytes() == before
    if os.geteuid() == 0:
        with as_nobody(), pytest.raises(JournalError, match="Permission denied"):
            Journal(directory / "other.jsonl").begin(HEADER)


@pytest.mark.parametrize(
    "content",
    [b"dear diary", b"\x89PNG", b"abc", b'{"weights": 1}', b"\0\0PK" * 200, b"12345678 {}"],
)
def test_a_file_that_is_no_journal_is_not_written_over(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "diary"
    for ending in (b"", b"\n"):
        path.write_bytes(content + ending)
        with pytest.raises(JournalError):
            Journal(path).begin(HEADER)
        assert path.read_bytes() == content + ending


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Update]]:
    """A journal with digests between the steps and after them."""
    path = tmp_path_factory.mktemp("whole") / "journal.jsonl"
    path.write_bytes(line_of({"format": 1, **HEADER, "model": {"norm_eps": 1e-5}}))
    with contextlib.closing(Journal(path)) as journal:
        for step in range(4):
            journal.append(update_of(step))
            if step in (1, 3):
                journal.note_base({f"block {step}": f"{step:08x}"})
    return path.read_bytes(), STEPS[:4]


PROFILE = settings.default
assert PROFILE is not None


SCHEDULES = {
    "a field": ("Steps(at=10, gamma=0.5)", "Steps(at=20, gamma=0.5)", ("lr.at 10", "lr.at 20")),
    "a member of an enumeration": (
        "Steps(kind=<Kind.LINEAR: 'linear'>)",
        "Steps(kind=<Kind.COSINE: 'cosine'>)",
        ("lr.kind 'linear'", "lr.kind 'cosine'"),
    ),
    "an item behind a comma": (
        "Steps(at=(10, 20), gamma=0.5)",
        "Steps(at=(10, 30), gamma=0.5)",
        ("lr 'Steps(at=(10, 20), gamma=0.5)'", "lr 'Steps(at=(10, 30), gamma=0.5)'"),
    ),
    "the class": ("Steps(at=10)", "Cosine(at=10)", ("lr 'Steps(at=10)'", "lr 'Cosine(at=10)'")),
}


@pytest.mark.parametrize(("journal", "run", "told"), SCHEDULES.values(), ids=SCHEDULES)
def test_schedules_that_differ_in_anything_are_told_by_what_differs(
    journal: str, run: str, told: tuple[str, str]
) -> None:
    assert differences({"lr": journal}, {"lr": journal}) is None
    assert differences({"lr": journal}, {"lr": run}) == told


@settings(max_examples=PROFILE.max_examples * 5 // 2)  # they are small
@given(seed=st.integers(0, 2**32))
def test_damage_at_random_is_refused_or_leaves_a_prefix_that_says_so(
    seed: int, example: tuple[bytes, list[Update]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole, expected = example
    path = tmp_path_factory.getbasetemp() / "damaged.jsonl"
    raw = damaged(whole, random.Random(seed), IN_LINES)
    path.write_bytes(raw)
    try:
        journal = Journal(path)
        journal.begin({**HEADER, "model": {"norm_eps": 1e-5}}) if journal.header else None
    except JournalError:
        return
    length = len(journal.updates)
    assert repr(list(journal.updates)) == repr(expected[:length])
    assert journal.base_digests.items() <= {"block 1": "00000001", "block 3": "00000003"}.items()
    if length < len(expected):
        lines = whole.splitlines(keepends=True)
        assert journal.torn or set(raw.splitlines(keepends=True)) < set(lines), (
            "but for whole lines cut off its end"
        )
        with pytest.raises(JournalError, match="damaged or cut"):
            journal.require_version(len(expected), "metrics.jsonl")


MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-3)
BATCH = make_batch(40, [7, 5])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", small_config("llama"))


def engine_of(base: Path, journal: Path, provenance: Mapping[str, Any] | None = None) -> Engine:
    return Engine(
        open_checkpoint(base),
        ZerothOrder(MEZO, noise=PhiloxNoise()),
        journal=journal,
        options=EngineOptions(provenance=provenance),
    )


def weights_after(engine: Engine, steps: int) -> dict[str, torch.Tensor]:
    with engine:
        while engine.version < steps:
            engine.step(BATCH)
        return {name: tensor.clone() for name, tensor in engine.parameters_now()}


def change_config(base: Path, **changes: Any) -> None:
    path = base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


DECISIVE: dict[str, tuple[dict[str, Any], str, str]] = {
    "norm epsilon": (
        {"rms_norm_eps": 1e-5},
        "model.rms_norm_eps 1e-06",
        "model.rms_norm_eps 1e-05",
    ),
    "rope": (
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        "model.rope_parameters.rope_theta 10000.0",
        "model.rope_parameters.rope_theta 500.0",
    ),
    "activation": ({"hidden_act": "gelu"}, "model.hidden_act 'silu'", "model.hidden_act 'gelu'"),
    "heads": (
        {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 2},
        "model.head_dim 4; model.num_attention_heads 3; model.num_key_value_heads 3",
        "model.head_dim 2; model.num_attention_heads 6; model.num_key_value_heads 6",
    ),
}


@pytest.mark.parametrize("name", DECISIVE)
def test_a_config_that_decides_another_forward_is_refused_leaf_by_leaf(
    name: str, base: Path, tmp_path: Path
) -> None:
    changes, theirs, ours = DECISIVE[name]
    path = tmp_path / "journal.jsonl"
    weights_after(engine_of(base, path), 1)
    change_config(base, **changes)
    with pytest.raises(JournalError) as refused:
        engine_of(base, path)
    assert (refused.value.found, refused.value.expected) == (theirs, ours)
    with pytest.raises(JournalError) as refused:
        Engine(open_checkpoint(base), journal=path)
    assert refused.value.found == theirs


def test_what_decides_nothing_of_a_config_may_change(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    expected = weights_after(engine_of(base, tmp_path / "other.jsonl"), 2)
    weights_after(engine_of(base, path), 1)
    change_config(
        base,
        transformers_version="4.0.0",
        _name_or_path="x",
        use_cache=False,
        architectures=None,
        rms_norm_eps=1e-6,
    )
    weights = weights_after(engine_of(base, path), 2)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_description_is_json_names_the_attention_and_is_the_same_again(
    model_type: str, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", small_config(model_type))
    description = open_checkpoint(base).description
    assert (
        json.loads(json.dumps(description, allow_nan=False))
        == description
        == open_checkpoint(base).description
    )
    assert description["attention"] == "sdpa"
    assert description["num_attention_heads"] == 3
    assert not {"transformers_version", "_name_or_path", "dtype", "use_cache", "architectures"} & {
        *description
    }


@pytest.mark.parametrize("differs", ["torch", "crc32"])
def test_another_torch_may_go_on_only_if_it_draws_the_same_numbers(
    differs: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    weights_after(Engine(open_checkpoint(base), ZerothOrder(MEZO), journal=path), 1)
    drawn = Journal(path).header["drawn"]  # type: ignore[index]
    assert drawn["torch"] == torch.__version__
    monkeypatch.setattr(build, "drawing_fingerprint", lambda device: {**drawn, differs: "other"})
    for method in (ZerothOrder(MEZO), None):
        if differs == "torch":
            Engine(open_checkpoint(base), method, journal=path).close()
            continue
        with pytest.raises(
            JournalError,
            match=r"noise that torch '[^']*' drew, of checksum '[0-9a-f]{8}'; expected that which",
        ):
            Engine(open_checkpoint(base), method, journal=path)


def test_the_checksum_is_of_what_torch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = drawing_fingerprint.__wrapped__(torch.device("cpu"))
    monkeypatch.setattr(
        TorchGenerator,
        "fill",
        lambda self, out: out.normal_(generator=self._generator).mul_(1 + 2**-7),
    )
    other = drawing_fingerprint.__wrapped__(torch.device("cpu"))
    assert (drawn["torch"], len(drawn["crc32"])) == (other["torch"], 8)
    assert drawn["crc32"] != other["crc32"]


PROVENANCE = {
    "data": {"sha256": "aa", "rows": 7},
    "tokenizer": "bb",
    "options": {"batch_size": 2, "sizes": [1, 2.0]},
}


def test_other_provenance_is_refused_leaf_by_leaf(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    weights_after(engine_of(base, path, PROVENANCE), 1)
    assert Journal(path).header["provenance"] == PROVENANCE  # type: ignore[index]
    other = {
        "data": {"sha256": "cc", "rows": 7.0},
        "tokenizer": "bb",
        "options": {"batch_size": True, "sizes": [1, 3]},
    }
    with pytest.raises(JournalError) as refused:
        engine_of(base, path, {**other, "more": 1})
    assert refused.value.found == (
        "provenance.data.sha256 'aa'; no provenance.more; provenance.options.batch_size 2; "
        "provenance.options.sizes.1 2.0"
    )
    assert refused.value.expected == (
        "provenance.data.sha256 'cc'; provenance.more 1; provenance.options.batch_size True; "
        "provenance.options.sizes.1 3"
    )
    engine_of(base, path, PROVENANCE).close()
    engine_of(base, path).close()  # a caller that says nothing
    Engine(open_checkpoint(base), journal=path).close()


ENDLESS: dict[str, Any] = {}
ENDLESS["again"] = ENDLESS


def test_provenance_that_is_no_json_is_refused_and_a_difference_of_all_stays_short(
    base: Path, tmp_path: Path
) -> None:
    path = tmp_path / "journal.jsonl"
    for wrong in (
        {"x": float("nan")},
        {"x": {1, 2}},
        {"x": object()},
        {"x": [[]] * 2, "y": b"raw"},
        ENDLESS,
    ):
        with pytest.raises(OptionError, match="provenance: "):
            engine_of(base, path, wrong)
        assert not path.exists()
    weights_after(engine_of(base, path, {str(i): "x" * 10_000 for i in range(100)}), 1)
    with pytest.raises(JournalError, match="and 94 more") as refused:
        engine_of(base, path, {str(i): "y\n" * 10_000 for i in range(100)})
    assert len(str(refused.value)) < 2000
    assert len(str(refused.value).splitlines()) == 1


def test_an_engine_of_parts_keeps_provenance_too(base: Path, tmp_path: Path) -> None:
    model, device = open_checkpoint(base), HostDevice()
    with contextlib.closing(
        SegmentStore(model.weights, model.layouts, device.host_memory)
    ) as source:
        parts: dict[str, Any] = {
            "source": source,
            "device": device,
            "journal": tmp_path / "journal.jsonl",
        }
        open_engine(model, ZerothOrder(MEZO), **parts, provenance={"data": 1}).close()
        with pytest.raises(JournalError, match=r"provenance\.data 1"):
            open_engine(model, ZerothOrder(MEZO), **parts, provenance={"data": 2})


@pytest.mark.parametrize("key", ["noise", "base", "parameters", "model", "provenance"])
def test_a_header_that_lacks_a_key_is_refused(key: str, base: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    weights_after(engine_of(base, path, PROVENANCE), 1)
    header, *others = path.read_bytes().splitlines(keepends=True)
    kept = {name: value for name, value in record_of(header).items() if name != key}
    path.write_bytes(b"".join([line_of(kept), *others]))
    for method in (ZerothOrder(MEZO), None):
        with pytest.raises(JournalError, match=f"(no|without) {key}"):
            Engine(
                open_checkpoint(base),
                method,
                journal=path,
                options=EngineOptions(provenance=PROVENANCE),
            )


def test_what_is_frozen_or_encoded_identifies_the_parameters() -> None:
    spec = ParameterSpec("weight", (4, 8), torch.float32, 0, decays=True)
    others = [
        replace(spec, frozen=True),
        replace(spec, encoding=Int8Rows()),
        replace(spec, encoding=NF4Blocks(block=64)),
    ]
    digests = [digest([own]) for own in (spec, *others)]
    assert len(set(digests)) == len(digests)
