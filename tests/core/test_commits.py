"""Journals of first-order runs: what is read back, what is refused, and an engine that goes on from its snapshot."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import assert_equal, first_order, weights
from models import make_batch, save_model, small_config
from profiles import short_first

from zo2adapters import Adapter, open_checkpoint
from zo2core import LOMO, AdaLOMO, AtSnapshot, BAdam, Engine, Journal, MeZOSGD, TorchOptimizer, ZerothOrder, branch_journal
from zo2core.checkpoint.snapshots import Snapshot, Snapshots
from zo2core.errors import CheckpointError, ClosedError, JournalError, OptionError, OutputError
from zo2core.io.durable import to_line
from zo2core.types import Commit

peft: Any = pytest.importorskip("peft")

HEADER = {"base": "b", "parameters": "p", "method": {"name": "adamw"}}
COMMIT = {"step": 0, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0}
COMMITS = [Commit(step, 2.5 - step, 0.1 * step, 1e-3) for step in range(3)]


def journal_of(path: Path, *records: Mapping[str, Any], header: Mapping[str, Any] = HEADER) -> Path:
    path.write_bytes(b"".join(map(to_line, [{"format": 1, **header}, *records])))
    return path


def test_commits_are_read_back_to_the_bit(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.begin(HEADER)
    for commit in COMMITS:
        journal.append(commit)
        journal.note_evaluation(commit.step + 1, {"loss": 1.0})
    journal.close()
    again = Journal(path)
    assert list(again.commits) == list(again.steps) == COMMITS
    assert (again.version, list(again.updates), again.is_replayable, again.noise) == (3, [], False, None)
    assert [again.chain(step) for step in range(4)] == [journal.chain(step) for step in range(4)]
    assert list(again.until(2).commits) == COMMITS[:2]
    assert again.excerpt(0) == path.read_bytes()


@pytest.mark.parametrize(
    ("commit", "told"),
    [
        ({**COMMIT, "step": 1}, "found step 1; expected step 0"),
        ({"step": 0, "loss": 1.0, "grad_norm": 1.0}, "expected an object of step, loss, grad_norm, lr alone"),
        ({**COMMIT, "loss": 1}, "found 1 as loss; expected a float"),
        ({**COMMIT, "step": True}, "found True as step"),
        ({**COMMIT, "grad_norm": -1.0}, "found grad_norm -1.0"),
        ({**COMMIT, "lr": -1.0}, "found lr -1.0"),
        ([], r"found commit \[\]"),
    ],
)
def test_a_commit_that_no_step_can_have_made_is_refused(commit: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=told):
        Journal(journal_of(tmp_path / "journal.jsonl", {"commit": commit}))


def test_a_journal_has_steps_of_one_kind(tmp_path: Path) -> None:
    zeroth = {"base": "b", "parameters": "p", "noise": "n", "estimator": {}, "seed": 0}
    commit = {"commit": COMMIT}
    with pytest.raises(JournalError, match="found a commit; expected an update, as the header says"):
        Journal(journal_of(tmp_path / "a.jsonl", commit, header=zeroth))
    with pytest.raises(JournalError, match="found no commit; expected a commit, as the header says"):
        Journal(journal_of(tmp_path / "b.jsonl", {"step": 0}))
    with pytest.raises(JournalError, match="found first-order steps; expected steps that can be replayed"):
        branch_journal(journal_of(tmp_path / "c.jsonl", commit), tmp_path / "d.jsonl", 1)
    assert not (tmp_path / "d.jsonl").exists()


def model_of(base: Path) -> Any:
    return open_checkpoint(base, adapter=Adapter(config=peft.LoraConfig(r=2, target_modules=["q_proj"]), seed=1))


ADAMW: Any = partial(torch.optim.AdamW, lr=1.0)
UPDATES: Mapping[str, Any] = {
    "lomo": lambda: LOMO(weight_decay=0.1),
    "adalomo": AdaLOMO,
    "adamw": lambda: TorchOptimizer(ADAMW),
    "badam": lambda: BAdam(ADAMW, every=2, seed=3),
}
BATCHES = [make_batch(40, [7, 5], seed=seed) for seed in range(5)]


def engine_of(base: Path, run: Path, kind: str = "adapter", **options: Any) -> Engine:
    """Of forwards, of an adapter, or of all parameters."""
    if kind == "forwards":
        return Engine(open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3)), run=run)
    told = {"lr": lambda step: 1e-2 / (step + 1), "memory": "4GiB", **options}
    if kind == "adapter":
        return first_order(model_of(base), ADAMW, run=run, **{"options": {"name": "adamw"}, **told})
    return first_order(open_checkpoint(base), UPDATES[kind](), run=run, **told)


@pytest.mark.parametrize("kind", short_first(["forwards", "adapter", "adamw"], ["lomo", "adalomo", "badam"]))
def test_a_run_goes_on_in_its_directory_and_repeats_the_steps_since_its_snapshot(kind: str, tmp_path: Path) -> None:
    dtype = torch.float32 if kind in ("adapter", "lomo") else torch.bfloat16
    base = save_model(tmp_path / "base", small_config("llama", tie_word_embeddings=kind in UPDATES), dtype)
    with engine_of(base, tmp_path / "whole", kind) as engine:
        losses = [engine.step(batch).loss for batch in BATCHES]
        expected = weights(engine)
    with engine_of(base, tmp_path / "run", kind) as engine:
        for batch in BATCHES[:2]:
            engine.step(batch)
        if kind != "forwards":
            engine.take_snapshot()
        engine.step(BATCHES[2])
    with engine_of(base, tmp_path / "run", kind) as engine:
        first = 3 if kind == "forwards" else 2
        assert (engine.version, engine.journal.version) == (first, 3)
        if kind == "adapter":
            with pytest.raises(JournalError, match="step 2: found loss"):
                engine.step(BATCHES[4])
            assert engine.version == 2
        assert [engine.step(batch).loss for batch in BATCHES[first:]] == losses[first:]
        assert_equal(weights(engine), expected)
        if kind != "forwards":
            engine.take_snapshot()
            parameters = engine.snapshots.read(5).state["parameters"]
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == (tmp_path / "whole" / "journal.jsonl").read_bytes()
    if kind in UPDATES:
        with Engine(open_checkpoint(base), AtSnapshot(5, parameters)) as replayer:
            assert replayer.version == 5
            assert_equal(weights(replayer), expected)


def test_a_journal_that_cannot_be_written_refuses_the_step(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with engine_of(base, tmp_path / "run") as engine:
        engine.step(BATCHES[0])
        before = engine.state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(JournalError, match="No space left"):
                engine.step(BATCHES[1])
            with pytest.raises(OutputError, match=r"snapshot-1.*No space left"):
                engine.take_snapshot()
        after = engine.state_dict()
        assert after["steps"] == before["steps"] == 1
        assert_equal(before["parameters"], after["parameters"])
        assert {path.name for path in (tmp_path / "run").iterdir()} == {"journal.jsonl"}
        engine.step(BATCHES[1])
        engine.take_snapshot()
    with engine_of(base, tmp_path / "run") as engine:
        assert engine.version == 2


def test_a_refused_engine_leaves_no_journal(base: Path, tmp_path: Path) -> None:
    told: dict[str, Any] = {"run": tmp_path, "options": {}, "lr": float}
    with pytest.raises(OptionError, match="closure"):
        first_order(model_of(base), torch.optim.LBFGS, **told)
    with pytest.raises(OptionError, match="a trained parameter of a block"):
        first_order(open_checkpoint(base), torch.optim.SGD, **told)
    assert not (tmp_path / "journal.jsonl").exists()


def test_a_journal_of_first_order_steps_is_not_replayed(base: Path, tmp_path: Path) -> None:
    with engine_of(base, tmp_path / "run") as engine:
        engine.step(BATCHES[0])
    for method in (None, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))):
        with pytest.raises(JournalError, match="found a run of first-order steps"):
            Engine(model_of(base), method, journal=tmp_path / "run" / "journal.jsonl")


def test_a_state_of_any_shape_comes_back_as_it_was(tmp_path: Path) -> None:
    journal = Journal()
    journal.begin(HEADER)
    tensors = [torch.tensor(3.5), torch.zeros(0, 2), torch.arange(6).view(2, 3), torch.ones(2, dtype=torch.bfloat16)]
    state = {"a.b": tensors, "deep": {0: {"x": None, 1: True}, "y": [1, 2.5, "z", tensors[2] > 2]}}
    Snapshots(tmp_path, journal.chain, journal.require_version).write(Snapshot(0, state))
    step, back = Snapshots(tmp_path, journal.chain, journal.require_version).read(0)
    assert step == 0
    assert back["deep"][0] == {"x": None, 1: True}
    *rest, mask = back["deep"]["y"]
    assert rest == [1, 2.5, "z"]
    for given, taken in zip([*tensors, tensors[2] > 2], [*back["a.b"], mask], strict=True):
        assert given.dtype is taken.dtype
        assert given.shape == taken.shape
        assert torch.equal(given, taken)
    with pytest.raises(OptionError, match="optimizer: found odd, a set, in its state"):
        Snapshots(tmp_path, journal.chain, journal.require_version).write(Snapshot(0, {"odd": {1}}))


DEEP = "nested too deep"  # stands for a value that json cannot write

FORGED: Mapping[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "an infinite step": lambda header, contents: contents.update(step=float("inf")),
    "a state that is a list": lambda header, contents: contents.update(state=[]),
    "a state without its items": lambda header, contents: contents.update(state={}),
    "a tensor that is not there": lambda header, contents: contents["state"]["items"].append(["x", {"tensor": "y"}]),
    "a chain that is a number": lambda header, contents: contents.update(chain=1),
    "no format": lambda header, contents: contents.pop("format"),
    "a dtype that is not there": lambda header, contents: header["moment"].update(dtype="F3"),
    "a negative shape": lambda header, contents: header["moment"].update(shape=[-2, -2]),
    "offsets beyond the end": lambda header, contents: header["moment"].update(data_offsets=[0, 1 << 40]),
    "one offset": lambda header, contents: header["moment"].update(data_offsets=[0]),
    "tensors that are a text": lambda header, contents: header.update(moment="bytes"),
    "a state nested too deep": lambda header, contents: contents.update(state=DEEP),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_forged_snapshot_whose_checksum_holds_is_refused(forge: Callable[[Any, Any], object], tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path, lambda step: 0, lambda step, name: None)
    snapshots.write(Snapshot(1, {"moment": torch.ones(2, 2)}))
    raw = snapshots.path(1).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    contents = json.loads(header["__metadata__"]["zo2"])
    forge(header, contents)
    deep = "[" * 100_000 + "]" * 100_000
    header["__metadata__"] = {"sha256": "0" * 64, "zo2": json.dumps(contents).replace(json.dumps(DEEP), deep)}
    forged = json.dumps(header, separators=(",", ":")).encode()
    whole = len(forged).to_bytes(8, "little") + forged + raw[end:]
    sealed = whole.replace(b"0" * 64, hashlib.sha256(whole).hexdigest().encode(), 1)
    snapshots.path(1).write_bytes(sealed)
    with pytest.raises(CheckpointError, match="not a snapshot of this format"):
        snapshots.read(1)


def test_a_repeated_step_of_all_parameters_that_differs_closes_the_engine(base: Path, tmp_path: Path) -> None:
    with engine_of(base, tmp_path / "run", "lomo") as engine:
        engine.step(BATCHES[0])
        engine.take_snapshot()
        engine.step(BATCHES[1])
    with engine_of(base, tmp_path / "run", "lomo") as engine:
        with pytest.raises(JournalError, match="step 1: found loss"):
            engine.step(BATCHES[4])
        with pytest.raises(ClosedError):
            engine.take_snapshot()
    with engine_of(base, tmp_path / "run", "lomo") as engine:
        engine.step(BATCHES[1])
        assert engine.version == engine.journal.version == 2


def test_a_run_is_not_resumed_with_another_method(base: Path, tmp_path: Path) -> None:
    with engine_of(base, tmp_path / "all", "lomo") as engine:
        engine.step(BATCHES[0])
    for other, options in (("badam", {}), ("lomo", {"clip_value": 1.0})):
        with pytest.raises(JournalError, match="method"):
            engine_of(base, tmp_path / "all", other, **options)
    make = partial(torch.optim.SGD, lr=1e-2)
    with first_order(model_of(base), make, clip=1.0, run=tmp_path / "adapter") as engine:
        engine.step(BATCHES[0])
        assert engine.journal.header is not None
        assert engine.journal.header["method"] == {"name": "SGD", "lr": 1e-2, "clip_norm": 1.0}
    for changed in ({"clip": 2.0}, {"lr": 1.0, "clip": 1.0}, {}):
        with pytest.raises(JournalError, match="method"):
            first_order(model_of(base), make, run=tmp_path / "adapter", **changed)


def test_the_state_of_all_parameters_is_views_of_the_stored_weights_and_what_a_snapshot_has(
    base: Path, tmp_path: Path
) -> None:
    with engine_of(base, tmp_path / "run", "adamw") as engine:
        engine.step(BATCHES[0])
        first, second = engine.state_dict(), engine.state_dict()
        for name, value in first["parameters"].items():
            assert value.data_ptr() == second["parameters"][name].data_ptr(), "a view of the store"
        engine.take_snapshot()
        read = engine.snapshots.read(1).state
        assert_equal(first["parameters"], read["parameters"])
