"""First-order runs on disk: journals and snapshots, blocks that stream, commits of whole
generations, and resuming.
"""

import copy
import errno
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from engines import (
    assert_equal,
    assert_same_outcome,
    fails_at,
    first_order,
    inner,
    memory,
    outcome,
    weights,
)
from models import make_batch, save_model, small_config
from profiles import each_choice, short_first

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.models.architecture import Precision
from zo2adapters.models.peft_adapter import is_of_adapter
from zo2core import (
    LOMO,
    AdaLOMO,
    BAdam,
    BlockUpdate,
    Delayed,
    Engine,
    FirstOrder,
    Journal,
    LossScaling,
    MeZOSGD,
    TorchOptimizer,
    ZerothOrder,
    branch_journal,
)
from zo2core.errors import (
    CheckpointError,
    ClosedError,
    JournalError,
    OptionError,
    OutputError,
    ScratchError,
)
from zo2core.io.direct_file import RangedFile, whole_pages
from zo2core.io.durable import from_line, to_line
from zo2core.journal.snapshots import Snapshot, Snapshots
from zo2core.methods.first_order import AtSnapshot
from zo2core.optimizers.adapter_and_base import AdapterAndBase
from zo2core.planning.speeds import read_bytes
from zo2core.sources.slot_file import DATA, MANIFEST, Generations
from zo2core.types import Commit, Lane

EVERY, STEPS = 2, 17  # more than an epoch of eight segments' turns
ADAMW: Any = partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1)
UPDATES: dict[str, Callable[[], BlockUpdate]] = {
    "lomo": lambda: LOMO(weight_decay=0.1),
    "adalomo": lambda: AdaLOMO(weight_decay=0.1),
    "adamw": lambda: TorchOptimizer(ADAMW),
    "fused adamw": lambda: TorchOptimizer(partial(ADAMW, fused=True)),
    "momentum": lambda: TorchOptimizer(partial(torch.optim.SGD, lr=1.0, momentum=0.9)),
    "adagrad": lambda: TorchOptimizer(
        partial(torch.optim.Adagrad, lr=1.0, initial_accumulator_value=0.5)
    ),
    "adafactor": lambda: TorchOptimizer(partial(torch.optim.Adafactor, lr=1.0)),
    "badam": lambda: BAdam(ADAMW, every=EVERY, seed=3),
}
FLOAT16 = Precision(stored=torch.float32, computed=torch.float16)
BATCHES = [make_batch(40, [7, 5], seed=seed) for seed in range(STEPS)]


def streamed(
    deep_base: Path,
    run: Path,
    buckets: int = 2,
    case: str = "badam",
    precision: Any = "exact",
    **options: Any,
) -> Engine:
    model = open_checkpoint(deep_base, precision=precision)
    told = {
        "memory": memory(buckets),
        "lr": lambda step: 1e-2 / (step + 1),
        "commit_every": 1,
        **options,
    }
    return first_order(model, UPDATES[case](), **told, run=run)


@cache
def resident(
    deep_base: Path,
    precision: Any = "exact",
    case: str = "badam",
    steps: int = STEPS,
    **options: Any,
) -> tuple[list[tuple[float, ...]], dict[str, torch.Tensor]]:
    """Losses and weights of a run in memory, which nobody changes."""
    told = {"lr": lambda step: 1e-2 / (step + 1), "memory": memory(), **options}
    return outcome(
        first_order(open_checkpoint(deep_base, precision=precision), UPDATES[case](), **told),
        BATCHES[:steps],
    )


def begun(
    deep_base: Path, run: Path, steps: int, case: str = "badam", buckets: int = 2, **options: Any
) -> None:
    outcome(streamed(deep_base, run, buckets, case, **options), BATCHES[:steps])


def require_goes_on(
    deep_base: Path, run: Path, first: int, case: str = "badam", *, steps: int = 6, buckets: int = 2
) -> None:
    """A run goes on from this step, with the bits of one in memory."""
    losses, expected = resident(deep_base, case=case, steps=steps)
    with streamed(deep_base, run, buckets, case) as engine:
        assert engine.version == first
        assert [engine.step(batch).losses for batch in BATCHES[first:steps]] == losses[first:]
        assert_equal(weights(engine), expected)
        assert [commit.step for commit in engine.journal.commits] == list(range(steps))


@pytest.fixture(scope="module")
def deep_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config("llama", num_hidden_layers=5, tie_word_embeddings=True)
    return save_model(tmp_path_factory.mktemp("streamed") / "base", config)


# an optimizer, steps between commits, buckets, whether transfers overlap, dtype and precision
CASES = [
    *(
        ("badam", 1, *place)
        for place in (
            (2, True, "float32", "exact"),
            (3, False, "bfloat16", "exact"),
            (2, True, "bfloat16", "mixed"),
        )
    ),
    *(
        (case, *place)
        for case in UPDATES
        if case != "badam"
        for place in (
            (1, 2, True, "bfloat16", "mixed"),
            (1, 3, False, "float32", "exact"),
            (3, 4, True, "bfloat16", "exact"),
            (2, 3, True, "bfloat16", "mixed"),
        )
    ),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("case", "commit_every", "buckets", "overlap", "dtype", "precision"), CASES
)
def test_weights_and_states_on_disk_give_the_bits_of_those_in_memory(
    case: str,
    commit_every: int,
    buckets: int,
    overlap: bool,
    dtype: str,
    precision: str,
    tmp_path: Path,
) -> None:
    config = small_config("llama", num_hidden_layers=5, tie_word_embeddings=buckets == 2)
    deep_base, steps = (
        save_model(tmp_path / "base", config, getattr(torch, dtype)),
        STEPS if case == "badam" else 5,
    )
    expected = resident(deep_base, precision, case, steps)
    options: dict[str, Any] = {
        "commit_every": commit_every,
        "overlap": overlap,
        "precision": precision,
    }
    with streamed(deep_base, tmp_path / "run", buckets, case, **options) as engine:
        losses = [engine.step(batch).losses for batch in BATCHES[:steps]]
        assert_same_outcome((losses, weights(engine)), expected)
        evaluated = engine.evaluate(BATCHES[:2]).loss
        engine.export(tmp_path / "model")
        assert engine.committed == steps // (EVERY if case == "badam" else commit_every) * (
            EVERY if case == "badam" else commit_every
        )
        engine.commit()
        assert engine.committed == (steps // EVERY * EVERY if case == "badam" else steps), (
            "within a turn nothing is"
        )
    if case != "badam":
        with streamed(deep_base, tmp_path / "run", 2, case, precision=precision) as engine:
            assert (engine.version, engine.journal.version) == (steps, steps)
            assert_equal(weights(engine), expected[1])
            assert engine.evaluate(BATCHES[:2]).loss == evaluated
    with Engine(
        open_checkpoint(tmp_path / "model", precision="exact"), FirstOrder(BAdam(ADAMW), lr=1.0)
    ) as exported:
        assert set(dict(exported.parameters_now())) == set(expected[1])
        assert precision == "mixed" or exported.evaluate(BATCHES[:2]).loss == evaluated


def test_a_segment_is_written_once_a_turn_at_the_version_after_its_last_update(
    deep_base: Path, tmp_path: Path
) -> None:
    with streamed(deep_base, tmp_path / "run") as engine:
        state = inner(engine)._state
        trained = state.weights.segments
        turns = [state.update.segments(step, trained)[0] for step in range(0, 12, EVERY)]
        results = [engine.step(batch) for batch in BATCHES[:13]]
        segments = inner(engine)._run.segments
        sizes = [whole_pages(layout.nbytes) for layout in segments.layouts]
        versions = {segment: segments.committed.generations.version(segment) for segment in trained}
    assert len(set(turns)) == 6
    written = sum(result.lanes[Lane.WRITE].nbytes for result in results[:12])
    assert sum(sizes[segment] for segment in turns[:-1]) <= written, (
        "the last one's is noted with the step after it"
    )
    assert written <= sum(sizes[segment] for segment in turns)
    assert {segment: version for segment, version in versions.items() if version} == {
        segment: EVERY * (turn + 1) for turn, segment in enumerate(turns)
    }


def forged(last: bytes, member: str, value: Callable[[Mapping[str, Any]], int]) -> bytes:
    """A record whose checksum holds, with another number of its second segment's."""
    commit = from_line(last.rstrip())
    commit["segments"][1][member] = value(commit)
    return to_line(commit)


LAST: dict[str, Callable[[bytes], bytes]] = {  # what is left of the last commit's record
    "lost": lambda last: b"",
    "torn": lambda last: last[: len(last) // 2],
    "two segments in a slot": lambda last: forged(
        last, "slot", lambda commit: commit["segments"][2]["slot"]
    ),
    "bytes of a later step": lambda last: forged(
        last, "version", lambda commit: commit["step"] + 1
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("case", "commit_every", "steps"),
    [
        *(("badam", 1, steps) for steps in (1, 2, 3, 4, 7, 12, 16)),
        *(
            (case, *at)
            for case in ("lomo", "adamw", "adalomo")
            for at in ((1, 1), (1, 3), (3, 2), (3, 4), (2, 5))
        ),
    ],
)
def test_a_run_resumes_from_its_last_commit_with_the_same_bits(
    case: str, commit_every: int, steps: int, deep_base: Path, tmp_path: Path
) -> None:
    begun(deep_base, tmp_path / "run", steps, case, buckets=4, commit_every=commit_every)
    assert Journal(tmp_path / "run" / "journal.jsonl").version == steps
    every = EVERY if case == "badam" else commit_every
    first = steps // every * every
    require_goes_on(
        deep_base, tmp_path / "run", first, case, steps=STEPS if case == "badam" else 7, buckets=3
    )


@pytest.mark.parametrize(
    ("case", "steps", "left"), [("badam", 8, "lost"), *(("adamw", 4, left) for left in LAST)]
)
def test_a_last_commit_that_is_not_whole_goes_back_to_the_one_before(
    case: str, steps: int, left: str, deep_base: Path, tmp_path: Path
) -> None:
    begun(deep_base, tmp_path / "run", steps, case)
    path = tmp_path / "run" / MANIFEST
    *lines, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, LAST[left](last)]))
    first = steps - (EVERY if case == "badam" else 1)
    require_goes_on(deep_base, tmp_path / "run", first, case, steps=first + 2)


def test_damaged_bytes_are_found_when_they_are_read(deep_base: Path, tmp_path: Path) -> None:
    begun(deep_base, tmp_path / "run", 8)
    path = tmp_path / "run" / DATA
    raw = bytearray(path.read_bytes())
    for at in range(0, len(raw), 64):
        raw[at] ^= 1
    path.write_bytes(raw)
    with (
        streamed(deep_base, tmp_path / "run") as engine,
        pytest.raises(ScratchError, match=r"found damaged bytes of .* at step"),
    ):
        engine.step(BATCHES[8])


def test_what_cannot_stream_is_refused(tmp_path: Path) -> None:
    single = save_model(tmp_path / "single", small_config("llama", num_hidden_layers=1))
    with pytest.raises(OptionError, match="model: found 1 block"):
        streamed(single, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_pinned_segment_stays_in_memory_whatever_is_acquired(
    deep_base: Path, tmp_path: Path
) -> None:
    with streamed(deep_base, tmp_path / "run") as engine:
        source = inner(engine)._run.segments.source
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


@pytest.mark.few(1)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_generation_has_the_scale_of_the_loss(clip: float | None, tmp_path: Path) -> None:
    deep_base = save_model(
        tmp_path / "base", small_config("llama", num_hidden_layers=3), torch.float16
    )
    scaling = LossScaling(initial=2.0**40, backoff=1 / 16, interval=2)
    options: dict[str, Any] = {"precision": FLOAT16, "clip": clip, "scaling": scaling}
    losses, expected = resident(deep_base, case="adamw", steps=17, **options)
    with streamed(deep_base, tmp_path / "run", 2, "adamw", **options) as engine:
        first = [engine.step(batch) for batch in BATCHES[:4]]
        assert [result.grad_norm for result in first] == [0.0] * 4, "gradients overflow"
        assert [commit.lr for commit in engine.journal.commits] == [0.0] * 4
    with streamed(deep_base, tmp_path / "run", 2, "adamw", **options) as engine:
        assert inner(engine)._state.scale.values() == {"loss_scale": 2.0**24, "good_steps": 0}
        later = [engine.step(batch) for batch in BATCHES[4:17]]
        assert [result.losses for result in first + later] == losses
        assert later[-1].grad_norm != 0.0
        assert_equal(weights(engine), expected)


def test_only_blocks_without_room_are_written_between_commits(
    deep_base: Path, tmp_path: Path
) -> None:
    for commit_every in (1, 4):
        with (
            streamed(
                deep_base, tmp_path / f"run {commit_every}", 4, "adamw", commit_every=commit_every
            ) as engine,
            patch.object(
                Generations, "write", autospec=True, side_effect=Generations.write
            ) as write,
        ):
            sizes = [whole_pages(layout.nbytes) for layout in engine._run.segments.layouts]
            for batch in BATCHES[:8]:
                engine.step(batch)
        kept = 0 if commit_every == 1 else sizes[0] + sizes[-1] + sizes[1]
        assert (
            sum(call.args[2].nbytes for call in write.mock_calls)
            == 8 * (sum(sizes) - kept) + 2 * kept
        )


def least_bytes(sizes: list[tuple[int, int]], buckets: int, pinned: int, *, sweeps: int) -> int:
    """Bytes that a step reads if a block is evicted only for one that is needed, and the one that
    is needed last.

    Args:
        sizes: Bytes of each block's weights, and of all that is stored of it.
        buckets: Number of buckets.
        pinned: Blocks that are never evicted, from the first.
        sweeps: Sweeps of a step, of which the last one needs states on its way back.
    """
    there, back = range(len(sizes)), range(len(sizes) - 1, -1, -1)
    step = [(block, False) for _ in range(sweeps) for block in (*there, *back)]
    step[-len(sizes) :] = [(block, True) for block in back]
    visits, held, reads = step * 4, dict.fromkeys(range(pinned), True), 0
    for position, (block, needs_states) in enumerate(visits):
        reads = 0 if position == 2 * len(step) else reads
        if position == 3 * len(step):
            break
        if block not in held:
            later = [one for one, _ in visits[position:]]
            if len(held) == buckets:
                del held[max((one for one in held if one >= pinned), key=later.index)]
            held[block] = False
            reads += sizes[block][0]
        if needs_states and not held[block]:
            held[block] = True
            reads += sizes[block][1] - sizes[block][0]
    return reads


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("case", "place", "clip"),
    each_choice(["lomo", "adamw"], [(2, 1), (3, 1), (4, 1), (5, 1), (5, 3)], [None, 1.0]),
)
def test_states_are_read_on_the_way_back(
    case: str, place: tuple[int, int], clip: float | None, tmp_path: Path
) -> None:
    buckets, commit_every = place
    deep_base = save_model(
        tmp_path / "base", small_config("llama", num_hidden_layers=6, tie_word_embeddings=True)
    )

    def bytes_of(work: Callable[[], object]) -> int:
        read.reset_mock()
        work()
        return sum(call.args[2].nbytes for call in read.mock_calls)

    options: dict[str, Any] = {"commit_every": commit_every, "clip": clip}
    losses, expected = resident(deep_base, case=case, steps=6, clip=clip)
    with (
        streamed(deep_base, tmp_path / "run", buckets, case, **options) as engine,
        patch.object(Generations, "read", autospec=True, side_effect=Generations.read) as read,
    ):
        layouts = engine._run.segments.layouts
        blocks = [layout for layout in layouts if not layout.resident]
        sizes = [
            (whole_pages(layout.weight_bytes), whole_pages(layout.nbytes)) for layout in blocks
        ]
        assert all(
            whole > of_weights if case == "adamw" else whole == of_weights
            for of_weights, whole in sizes
        )
        assert [engine.step(batch).losses for batch in BATCHES[:2]] == losses[:2]
        planned = read_bytes(layouts, buckets, commit_every, measures=clip is not None)
        steps = [bytes_of(lambda batch=batch: engine.step(batch)) for batch in BATCHES[2:6]]  # type: ignore[misc]
        assert steps == [planned] * 4
        assert planned == least_bytes(
            sizes, buckets, buckets - 3 if commit_every > 1 else 0, sweeps=1 if clip is None else 2
        )
        evaluated = bytes_of(lambda: engine.evaluate(BATCHES[:1]))
        assert evaluated <= sum(of_weights for of_weights, _ in sizes), (
            "those read ahead for the next sweep among them"
        )
        assert_equal(weights(engine), expected)


def test_a_commit_names_each_segment_once_after_the_journal_and_all_bytes_are_durable(
    deep_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def noted(kind: type[Any], name: str, event: str) -> None:
        real = getattr(kind, name)

        def call(self: Any, *given: Any, **named: Any) -> Any:
            result = real(self, *given, **named)
            events.append(event)
            return result

        monkeypatch.setattr(kind, name, call)

    noted(Journal, "append", "journal")
    noted(RangedFile, "write", "bytes")
    noted(RangedFile, "sync", "bytes durable")
    noted(Generations, "commit", "committed")
    with streamed(deep_base, tmp_path / "run", 2, "adamw") as engine:
        noted(type(inner(engine)._run.segments.committed.generations._manifest), "append", "record")
        segments = sum(bool(layout.parameters) for layout in engine._run.segments.layouts)
        for batch in BATCHES[:3]:
            events.clear()
            engine.step(batch)
            *before, last = events
            assert last == "committed"
            assert before[-2:] == ["bytes durable", "record"]
            assert before.count("bytes") == segments
            assert before.index("journal") < before.index("bytes durable")
    _, *commits = map(json.loads, (tmp_path / "run" / MANIFEST).read_bytes().splitlines())
    assert [commit["step"] for commit in commits] == [1, 2, 3]
    for commit in commits:
        assert (
            len({one["segment"] for one in commit["segments"]})
            == len(commit["segments"])
            == segments
        )
        assert {one["version"] for one in commit["segments"]} == {commit["step"]}
    slots = [{one["slot"] for one in commit["segments"]} for commit in commits]
    assert not slots[0] & slots[1]
    assert slots[2] == slots[0], "two generations take turns"


def test_bytes_of_another_journal_are_neither_used_nor_replaced(
    deep_base: Path, tmp_path: Path
) -> None:
    begun(deep_base, tmp_path / "one", 4, "lomo")
    begun(deep_base, tmp_path / "other", 4, "lomo", lr=lambda step: 5e-3)
    for name in (DATA, MANIFEST):
        (tmp_path / "other" / name).write_bytes((tmp_path / "one" / name).read_bytes())
    with pytest.raises(ScratchError, match="weights of another run"):
        streamed(deep_base, tmp_path / "other", 2, "lomo", lr=lambda step: 5e-3)
    assert (tmp_path / "other" / MANIFEST).read_bytes() == (
        tmp_path / "one" / MANIFEST
    ).read_bytes()
    path = tmp_path / "one" / "journal.jsonl"  # which loses the committed step
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    with pytest.raises(JournalError):
        streamed(deep_base, tmp_path / "one", 2, "lomo")


@pytest.mark.parametrize("call", ["apply", "sync", "write"])
def test_a_failed_update_or_commit_closes_the_engine_and_is_undone(
    call: str, deep_base: Path, tmp_path: Path
) -> None:
    engine = streamed(deep_base, tmp_path / "run", 2, "adamw")
    for batch in BATCHES[:2]:
        engine.step(batch)
    update = inner(engine)._state.update
    if call == "apply":
        failing: Any = patch.object(update, call, fails_at(update.apply, 5, KeyboardInterrupt()))
    else:
        failing = patch.object(RangedFile, call, side_effect=OSError(28, "no space left"))
    with failing:
        with pytest.raises((KeyboardInterrupt, ScratchError), match=r"no space left|^$"):
            engine.step(BATCHES[2])
        for use in (engine.commit, lambda: engine.step(BATCHES[2])):
            with pytest.raises(ClosedError):
                use()
        engine.close()
    require_goes_on(deep_base, tmp_path / "run", 2, "adamw")


@pytest.mark.parametrize("case", ["adamw", "badam"])
def test_what_would_change_weights_beside_their_commits_is_refused(
    tmp_path: Path, case: str
) -> None:
    deep_base = save_model(tmp_path / "base", small_config("opt"))
    with streamed(deep_base, tmp_path / "run", case=case) as engine:
        asked: list[Callable[[], object]] = [
            lambda: engine.load_parameters({}),
            engine.state_dict,
            lambda: engine.load_state_dict({}),
            engine.take_snapshot,
        ]
        for ask in asked:
            with pytest.raises(OptionError, match="committed on disk"):
                ask()
        engine.step(BATCHES[0])


HEADER = {"base": "b", "parameters": "p", "method": {"name": "adamw"}}
RECORD = {"step": 0, "loss": 1.0, "grad_norm": 1.0, "lr": 1.0}
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
    assert (again.version, list(again.updates), again.is_replayable, again.noise) == (
        3,
        [],
        False,
        None,
    )
    assert [again.chain(step) for step in range(4)] == [journal.chain(step) for step in range(4)]
    assert list(again.until(2).commits) == COMMITS[:2]
    assert again.excerpt(0) == path.read_bytes()


@pytest.mark.parametrize(
    ("commit", "told"),
    [
        ({**RECORD, "step": 1}, "found step 1; expected step 0"),
        (
            {"step": 0, "loss": 1.0, "grad_norm": 1.0},
            "expected an object of step, loss, grad_norm, lr alone",
        ),
        ({**RECORD, "loss": 1}, "found 1 as loss; expected a float"),
        ({**RECORD, "step": True}, "found True as step"),
        ({**RECORD, "grad_norm": -1.0}, "found grad_norm -1.0"),
        ({**RECORD, "lr": -1.0}, "found lr -1.0"),
        ([], r"found commit \[\]"),
    ],
)
def test_a_commit_that_no_step_can_have_made_is_refused(
    commit: Any, told: str, tmp_path: Path
) -> None:
    with pytest.raises(JournalError, match=told):
        Journal(journal_of(tmp_path / "journal.jsonl", {"commit": commit}))


def test_a_journal_has_steps_of_one_kind(tmp_path: Path) -> None:
    zeroth = {"base": "b", "parameters": "p", "noise": "n", "estimator": {}, "seed": 0}
    commit = {"commit": RECORD}
    with pytest.raises(
        JournalError, match="found a commit; expected an update, as the header says"
    ):
        Journal(journal_of(tmp_path / "a.jsonl", commit, header=zeroth))
    with pytest.raises(
        JournalError, match="found no commit; expected a commit, as the header says"
    ):
        Journal(journal_of(tmp_path / "b.jsonl", {"step": 0}))
    with pytest.raises(
        JournalError, match="found first-order steps; expected steps that can be replayed"
    ):
        branch_journal(journal_of(tmp_path / "c.jsonl", commit), tmp_path / "d.jsonl", 1)
    assert not (tmp_path / "d.jsonl").exists()


def model_of(base: Path, *, trains_base: bool = False) -> Any:
    config = pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj"])
    return open_checkpoint(base, adapter=Adapter(config=config, seed=1, trains_base=trains_base))


def engine_of(base: Path, run: Path, kind: str = "adapter", **options: Any) -> Engine:
    if kind == "forwards":
        return Engine(open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3)), run=run)
    told = {"lr": lambda step: 1e-2 / (step + 1), "memory": "4GiB", **options}
    if kind == "adapter":
        return first_order(model_of(base), ADAMW, run=run, **{"options": {"name": "adamw"}, **told})
    return first_order(open_checkpoint(base), UPDATES[kind](), run=run, **told)


@pytest.mark.parametrize(
    "kind", short_first(["forwards", "adapter", "adamw"], ["lomo", "adalomo", "badam"])
)
def test_a_run_goes_on_in_its_directory_and_repeats_the_steps_since_its_snapshot(
    kind: str, tmp_path: Path
) -> None:
    dtype = torch.float32 if kind in ("adapter", "lomo") else torch.bfloat16
    base = save_model(
        tmp_path / "base", small_config("llama", tie_word_embeddings=kind in UPDATES), dtype
    )
    with engine_of(base, tmp_path / "whole", kind) as engine:
        losses = [engine.step(batch).loss for batch in BATCHES[:5]]
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
        assert [engine.step(batch).loss for batch in BATCHES[first:5]] == losses[first:]
        assert_equal(weights(engine), expected)
        if kind != "forwards":
            engine.take_snapshot()
            parameters = engine.snapshots.read(5).state["parameters"]
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == (
        tmp_path / "whole" / "journal.jsonl"
    ).read_bytes()
    if kind in UPDATES:
        with Engine(open_checkpoint(base), AtSnapshot(5, parameters)) as replayer:
            assert replayer.version == 5
            assert_equal(weights(replayer), expected)


def test_a_journal_that_cannot_be_written_refuses_the_step(base: Path, tmp_path: Path) -> None:
    with engine_of(base, tmp_path / "run") as engine:
        engine.step(BATCHES[0])
        before = engine.state_dict()
        with patch.object(
            os, "fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")
        ):
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


def test_a_state_of_any_shape_comes_back_as_it_was(tmp_path: Path) -> None:
    journal = Journal()
    journal.begin(HEADER)
    tensors = [
        torch.tensor(3.5),
        torch.zeros(0, 2),
        torch.arange(6).view(2, 3),
        torch.ones(2, dtype=torch.bfloat16),
    ]
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


def test_an_interrupt_at_any_call_of_reading_a_snapshot_is_not_taken_for_damage(
    tmp_path: Path,
) -> None:
    state: dict[str, Any] = {"one": torch.arange(3.0), "two": [torch.ones(2, 2), 1]}
    snapshots = Snapshots(tmp_path, lambda step: 0, lambda step, name: None)
    snapshots.write(Snapshot(1, state))

    def is_read(at: int) -> bool:
        """Read it, interrupted at this call of a Python function, by compiled code or not."""
        calls = itertools.count(1)

        def interrupt(frame: object, event: str, argument: object) -> None:
            if event == "call" and next(calls) == at:
                raise KeyboardInterrupt

        sys.setprofile(interrupt)
        try:
            newest = snapshots.newest()
        except KeyboardInterrupt:
            return False
        finally:
            sys.setprofile(None)
        assert newest is not None
        return torch.equal(newest.state["one"], state["one"])

    reached = next(at for at in itertools.count(1) if is_read(at))
    assert reached > 50, "calls were counted"


def test_a_snapshot_of_another_run_is_not_taken(tmp_path: Path) -> None:
    Snapshots(tmp_path, lambda step: 2, lambda step, name: None).write(Snapshot(4, {}))
    with pytest.raises(
        CheckpointError, match=r"snapshot-4\.safetensors: found the snapshot of another run"
    ):
        Snapshots(tmp_path, lambda step: 1, lambda step, name: None).read(4)


DEEP = "nested too deep"  # stands for a value that json cannot write

FORGED: Mapping[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "an infinite step": lambda header, contents: contents.update(step=float("inf")),
    "a state that is a list": lambda header, contents: contents.update(state=[]),
    "a state without its items": lambda header, contents: contents.update(state={}),
    "a tensor that is not there": lambda header, contents: contents["state"]["items"].append(
        ["x", {"tensor": "y"}]
    ),
    "a chain that is a number": lambda header, contents: contents.update(chain=1),
    "no format": lambda header, contents: contents.pop("format"),
    "a dtype that is not there": lambda header, contents: header["moment"].update(dtype="F3"),
    "a negative shape": lambda header, contents: header["moment"].update(shape=[-2, -2]),
    "offsets beyond the end": lambda header, contents: header["moment"].update(
        data_offsets=[0, 1 << 40]
    ),
    "one offset": lambda header, contents: header["moment"].update(data_offsets=[0]),
    "tensors that are a text": lambda header, contents: header.update(moment="bytes"),
    "a state nested too deep": lambda header, contents: contents.update(state=DEEP),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_forged_snapshot_whose_checksum_holds_is_refused(
    forge: Callable[[Any, Any], object], tmp_path: Path
) -> None:
    snapshots = Snapshots(tmp_path, lambda step: 0, lambda step, name: None)
    snapshots.write(Snapshot(1, {"moment": torch.ones(2, 2)}))
    raw = snapshots.path(1).read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    contents = json.loads(header["__metadata__"]["zo2"])
    forge(header, contents)
    deep = "[" * 100_000 + "]" * 100_000
    header["__metadata__"] = {
        "sha256": "0" * 64,
        "zo2": json.dumps(contents).replace(json.dumps(DEEP), deep),
    }
    forged = json.dumps(header, separators=(",", ":")).encode()
    whole = len(forged).to_bytes(8, "little") + forged + raw[end:]
    sealed = whole.replace(b"0" * 64, hashlib.sha256(whole).hexdigest().encode(), 1)
    snapshots.path(1).write_bytes(sealed)
    with pytest.raises(CheckpointError, match="not a snapshot of this format"):
        snapshots.read(1)


def test_a_repeated_step_of_all_parameters_that_differs_closes_the_engine(
    base: Path, tmp_path: Path
) -> None:
    with engine_of(base, tmp_path / "run", "adamw") as engine:
        engine.step(BATCHES[0])
        first, second = engine.state_dict(), engine.state_dict()
        for name, value in first["parameters"].items():
            assert value.data_ptr() == second["parameters"][name].data_ptr(), "a view of the store"
        engine.take_snapshot()
        assert_equal(first["parameters"], engine.snapshots.read(1).state["parameters"])
        engine.step(BATCHES[1])
    with engine_of(base, tmp_path / "run", "adamw") as engine:
        with pytest.raises(JournalError, match="step 1: found loss"):
            engine.step(BATCHES[4])
        with pytest.raises(ClosedError):
            engine.take_snapshot()
    with engine_of(base, tmp_path / "run", "adamw") as engine:
        engine.step(BATCHES[1])
        assert engine.version == engine.journal.version == 2


def test_a_run_is_not_resumed_or_replayed_with_another_method(base: Path, tmp_path: Path) -> None:
    told: dict[str, Any] = {"run": tmp_path, "options": {}, "lr": float}
    with pytest.raises(OptionError, match="closure"):
        first_order(model_of(base), torch.optim.LBFGS, **told)
    with pytest.raises(OptionError, match="a trained parameter of a block"):
        first_order(open_checkpoint(base), torch.optim.SGD, **told)
    assert not (tmp_path / "journal.jsonl").exists()
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
    for method in (None, ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))):
        with pytest.raises(JournalError, match="found a run of first-order steps"):
            Engine(model_of(base), method, journal=tmp_path / "adapter" / "journal.jsonl")


@dataclass(frozen=True)
class Falling:
    """A schedule that a journal records by its fields."""

    peak: float

    def __call__(self, step: int) -> float:
        return self.peak / (step + 1)


def decaying(weight_decay: float) -> Any:
    return partial(torch.optim.AdamW, lr=1.0, weight_decay=weight_decay)


def of_both(base_lr: Any = 1e-2, weight_decay: float = 0.1) -> AdapterAndBase:
    adamw = TorchOptimizer(decaying(weight_decay))
    return AdapterAndBase(adamw, LOMO(), base_lr=base_lr, is_of_adapter=is_of_adapter)


class Decided(NamedTuple):
    """A method made from a value, what is trained, and how an error names the value 0.01."""

    method: Callable[[Any], FirstOrder]
    trained: str
    told: str


DECIDED = {
    "rate": Decided(lambda lr: FirstOrder(LOMO(), lr=lr), "all", "lr"),
    "schedule": Decided(lambda lr: FirstOrder(LOMO(), lr=Falling(lr)), "all", "lr.peak"),
    "schedule of an adapter": Decided(
        lambda lr: FirstOrder(ADAMW, lr=Falling(lr)), "adapter", "lr.peak"
    ),
    "rate of the base": Decided(lambda lr: FirstOrder(of_both(lr), lr=1.0), "both", "base_lr"),
    "schedule of the base": Decided(
        lambda lr: FirstOrder(of_both(Falling(lr)), lr=1.0), "both", "base_lr.peak"
    ),
    "rate of a base that is changed late": Decided(
        lambda lr: FirstOrder(Delayed(of_both(lr)), lr=1.0), "both", "base_lr"
    ),
    "weight decay": Decided(
        lambda decay: FirstOrder(TorchOptimizer(decaying(decay)), lr=1.0), "all", "weight_decay"
    ),
    "weight decay in turns": Decided(
        lambda decay: FirstOrder(BAdam(decaying(decay)), lr=1.0), "all", "optimizer.weight_decay"
    ),
    "weight decay beside a base": Decided(
        lambda decay: FirstOrder(of_both(weight_decay=decay), lr=1.0),
        *("both", "adapter.weight_decay"),
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("case", DECIDED)
def test_all_that_decides_a_run_is_in_its_journal(base: Path, tmp_path: Path, case: str) -> None:
    method, trained, told = DECIDED[case]

    def opened(value: float) -> Engine:
        model = open_checkpoint(base)
        if trained != "all":
            model = model_of(base, trains_base=trained == "both")
        return Engine(model, method(value), run=tmp_path, memory=memory())

    opened(1e-2).close()
    with pytest.raises(JournalError, match=re.escape(f"found method.{told} 0.01")):
        opened(2e-2)
    opened(1e-2).close()


def test_an_option_is_recorded_alike_by_each_process() -> None:
    def make(parameters: Any, **options: Any) -> Any:
        return torch.optim.SGD(parameters, lr=1.0)

    factory = partial(
        make,
        decaying=frozenset("dcba"),
        choose=decaying,
        lr=1.0,
        betas=(0.9, 0.95),
        rate=Falling(2),
    )
    assert TorchOptimizer(factory).options == {
        "name": "SGD",
        "decaying": ["'a'", "'b'", "'c'", "'d'"],
        "choose": "decaying",
        "betas": (0.9, 0.95),
        "rate": "Falling(peak=2)",
    }


def test_a_state_of_all_parameters_goes_on_at_other_rates(base: Path) -> None:
    def opened(lr: float, base_lr: float) -> Engine:
        method = FirstOrder(of_both(base_lr), lr=lr)
        return Engine(model_of(base, trains_base=True), method, memory=memory())

    with opened(1e-2, 1e-2) as engine:
        engine.step(BATCHES[0])
        state = copy.deepcopy(engine.state_dict())
        expected = engine.step(BATCHES[1]).loss
    with opened(1e-3, 1e-3) as engine:
        engine.load_state_dict(state)
        assert engine.step(BATCHES[1]).loss == expected
