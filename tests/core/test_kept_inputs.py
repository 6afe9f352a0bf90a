"""Inputs that blocks keep from forward to backward: they leave memory when it has no room, and no bit depends on it."""

import errno
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from engines import behind_copies, fails_at, first_order, memory
from hypothesis import given
from hypothesis import strategies as st
from models import make_batch, save_model, small_config

from zo2adapters import Adapter, open_checkpoint
from zo2core import Engine, MemoryPolicy
from zo2core.errors import MemoryBudgetError, ScratchError
from zo2core.io.direct_file import RangedFile
from zo2core.methods.first_order import TRAINED_COPIES
from zo2core.planning.memory import DevicePlan, Machine, RunRequest, RunSpec, plan
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.profiling import Timeline
from zo2core.runner import Runner
from zo2core.sweep.activations import AHEAD, ActivationFile, ActivationOffload, KeptActivations, Use
from zo2core.sweep.gradient_visitor import GRAPH_FORWARDS, PASSING
from zo2core.types import Lane

peft: Any = pytest.importorskip("peft")
BLOCKS = 6
LENGTHS = [7, 5, 6, 4]

FIRST, SECOND = Use(-1, 0), Use(-2, 0)


class Departed:
    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def done(self) -> bool:
        return False

    def result(self) -> None:
        self._act()


class Memory:
    """A store that keeps bytes, and counts how many are in the storages of all inputs."""

    def __init__(self) -> None:
        self.away: dict[Use, list[tuple[torch.UntypedStorage, bytes]]] = {}
        self.sent: list[Use] = []

    def send(self, key: Use, storages: Sequence[torch.UntypedStorage]) -> Departed:
        self.sent.append(key)

        def leave() -> None:
            self.away[key] = [(storage, bytes(filled(storage).tolist())) for storage in storages]
            for storage in storages:
                storage.resize_(0)

        return Departed(leave)

    def bring(self, key: Use) -> Departed:
        left = self.away.pop(key)
        for storage, content in left:
            storage.resize_(len(content))

        def arrive() -> None:
            for storage, content in left:
                filled(storage).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

        return Departed(arrive)

    def clear(self) -> None:
        self.away.clear()

    def close(self) -> None:
        pass


def filled(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4), blocks=st.integers(1, 6), room=st.integers(0, 400))
def test_the_first_blocks_inputs_leave_and_are_there_for_their_backward(sizes: list[int], blocks: int, room: int) -> None:
    store, tensors = Memory(), {}
    inputs = KeptActivations(store)
    for _ in range(2):
        inputs.room = room
        store.sent.clear()
        most = max(room, (AHEAD + 1) * max(sizes))
        for block in range(1, blocks + 1):
            for stream, size in enumerate(sizes):
                tensor = torch.full((size,), 10 * block + stream, dtype=torch.uint8)
                tensors[Use(-block, stream)] = tensor
                inputs.put(Use(-block, stream), [tensor.untyped_storage()] if size else [])
                assert sum(kept.untyped_storage().nbytes() for kept in tensors.values()) <= most
        order = [key for key in tensors if sizes[key.stream]]
        segments = [key.segment for key in order]
        assert [key.segment for key in store.sent] == segments[: len(store.sent)], "the first blocks' inputs leave"
        if blocks * sum(sizes) + AHEAD * max(sizes) <= room:
            assert store.sent == []
        for block in range(blocks, 0, -1):
            for stream, size in enumerate(sizes):
                inputs.take(Use(-block, stream))
                present = sum(kept.untyped_storage().nbytes() for kept in tensors.values())
                assert present <= max(room, AHEAD * max(sizes)) + max(sizes), "what is read ahead has room"
                assert tensors.pop(Use(-block, stream)).tolist() == [10 * block + stream] * size
        inputs.clear()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[ActivationFile]:
    with closing(ActivationFile(tmp_path, Timeline())) as made:
        yield made


def test_a_file_gives_back_what_it_was_sent(file: ActivationFile, tmp_path: Path) -> None:
    for _ in range(2):
        tensors = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 4096, (9 << 20) + 5, 77)]
        expected = [tensor.clone() for tensor in tensors]
        storages = [tensor.untyped_storage() for tensor in tensors]
        file.send(FIRST, storages[:3]).result()
        file.send(SECOND, storages[3:]).result()
        assert [storage.nbytes() for storage in storages] == [0] * 4, "their memory is free"
        assert list(tmp_path.iterdir()) == [], "the file has no name"
        file.bring(SECOND).result()
        file.bring(FIRST).result()
        assert all(torch.equal(tensor, values) for tensor, values in zip(tensors, expected, strict=True))
        file.clear()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    storages = [torch.zeros(5).untyped_storage()]
    with closing(ActivationFile(tmp_path / "missing", Timeline())) as file:
        with pytest.raises(ScratchError, match=r"missing: found No such file or directory.* inputs of blocks"):
            file.send(FIRST, storages).result()
        file.clear()
        (tmp_path / "missing").mkdir()
        file.send(FIRST, storages).result()


def test_a_failed_write_frees_the_space_of_all_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: RangedFile, offset: int, data: memoryview) -> None:
        if offset == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(file, offset, data)

    written = RangedFile.write
    monkeypatch.setattr(RangedFile, "write", write)
    with closing(ActivationFile(tmp_path, Timeline())) as file:
        first, second = (file.send(use, [torch.zeros(5).untyped_storage()]) for use in (FIRST, SECOND))
        second.result()
        with pytest.raises(ScratchError, match="No space left"):
            first.result()
        file.clear()
        links = Path("/proc/self/fd").iterdir()
        assert not [link for link in links if link.is_symlink() and os.readlink(link).startswith(str(tmp_path))]


OPTIMIZER = partial(torch.optim.AdamW, lr=1e-2)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", small_config("llama", num_hidden_layers=BLOCKS), torch.bfloat16)


def make(base: Path, room: int, *, buckets: int | None = None, config: Any = None, **options: Any) -> Engine:
    chosen = peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = open_checkpoint(base, adapter=Adapter(config=chosen if config is None else config, seed=1))
    return first_order(model, OPTIMIZER, **{"memory": memory(buckets, room), "micro_batch_size": 1, **options})


def room_for(base: Path, blocks: int) -> int:
    """Memory in which the micro-batches of one row pass together, and so many blocks have room for their inputs."""
    model, rows = open_checkpoint(base), [make_batch(40, [length]) for length in LENGTHS]
    graph = GRAPH_FORWARDS * max(model.forward_bytes(row) for row in rows)
    return math.ceil(graph) + (PASSING + blocks) * sum(model.held_bytes(row) for row in rows)


def outcome(engine: Engine, batch: Any, steps: int = 3) -> tuple[list[float], list[Any]]:
    losses = [engine.step(batch).loss for _ in range(steps)]
    return losses, [value.tolist() for name, value in engine.parameters_now() if name in engine.parameters]


@pytest.mark.few(1)
@pytest.mark.parametrize("buckets", [None, 2])
def test_inputs_that_have_no_room_are_written_and_read_once_a_step(
    base: Path, buckets: int | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    batch = make_batch(40, LENGTHS)
    with make(base, 1 << 28) as engine:
        expected = outcome(engine, batch)
        assert engine.step(batch).lanes[Lane.WRITE].nbytes == 0
        layout = engine._runner.model.layouts[1]
    hidden = sum(LENGTHS) * small_config("llama").hidden_size * 2
    written = []
    for blocks in range(BLOCKS + 1) if request.config.getoption("--long") else (0, 1, 2, BLOCKS):
        spill = tmp_path / f"{blocks}"
        spill.mkdir()
        with make(base, room_for(base, blocks), buckets=buckets, spill=spill) as engine:
            assert outcome(engine, batch) == expected
            lanes = engine.step(batch).lanes
            written.append(lanes[Lane.WRITE].nbytes)
            of_blocks = 0 if buckets is None else (2 * (BLOCKS - buckets) + 2) * layout.nbytes
            assert written[-1] <= lanes[Lane.READ].nbytes <= written[-1] + of_blocks
            assert list(spill.iterdir()) == []
    assert written[0] == (BLOCKS - 1) * hidden, "all but the embedding's output, which has no gradient"
    assert written == sorted(written, reverse=True)
    assert 0 < written[2] < written[1]
    assert written[-1] == 0


def test_micro_batches_pass_together_though_their_inputs_have_no_room(base: Path) -> None:
    for room, expected in ((room_for(base, 0), 1), (1, len(LENGTHS))):
        with patch.object(Runner, "run", autospec=True, side_effect=Runner.run) as run, make(base, room) as engine:
            engine.step(make_batch(40, LENGTHS))
        assert run.call_count == expected


def assert_same_in_any_room(base: Path, prepare: Callable[[Any], object] = lambda model: None, **options: Any) -> None:
    outcomes = []
    for room in (1 << 28, 1, room_for(base, 0)):
        with make(base, room, **options) as engine:
            prepare(engine._runner.model)
            outcomes.append(outcome(engine, make_batch(40, LENGTHS)))
    assert outcomes[1:] == outcomes[:1] * 2


@pytest.mark.few(1)
@pytest.mark.parametrize("view", [False, True])
def test_a_layer_that_hands_on_its_input_keeps_it_in_memory(view: bool, base: Path) -> None:
    def prepare(model: Any) -> None:
        for layer in (2, 3):
            model._layers[layer].register_forward_hook(
                lambda _, args, output: args[0].view(args[0].shape) if view else args[0]
            )

    assert_same_in_any_room(base, prepare)


def test_a_prefix_that_all_blocks_get_stays(base: Path) -> None:
    assert_same_in_any_room(base, config=peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def test_a_disk_that_refuses_ends_the_step_and_the_next_one_goes_on(base: Path) -> None:
    batch, small = make_batch(40, LENGTHS), make_batch(40, LENGTHS[:1])
    with make(base, room_for(base, 0)) as engine:
        expected = outcome(engine, batch)
    refused = ScratchError("disk", found="a full disk", expected="space", remedy="free it")
    write = fails_at(ActivationFile._write, 4, refused)
    with make(base, room_for(base, 0)) as engine, patch.object(ActivationFile, "_write", write):
        with pytest.raises(ScratchError, match="a full disk"):
            engine.step(batch)
        assert engine.version == 0
        assert outcome(engine, batch) == expected
        assert engine.step(small).loss > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("host_room", [None, 0])
def test_a_device_of_its_own_memory_keeps_inputs_on_host_or_disk_with_the_same_bits(
    host_room: int | None, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LittleRoom(ActivationOffload):
        def __init__(self, device: Any, timeline: Timeline, file: Any, room: int) -> None:
            super().__init__(device, timeline, file, room if host_room is None else host_room)

    monkeypatch.setattr("zo2core.methods.first_order.ActivationOffload", LittleRoom)
    batch = make_batch(40, LENGTHS)
    with make(base, 1 << 28) as engine:
        expected = outcome(engine, batch)
    moved, written = [], []
    for blocks in (0, 1, 3, BLOCKS + 1):
        room = room_for(base, blocks)
        policy = replace(memory(2), device=DevicePlan((), 0, kept=0, activation_bytes=room))
        with behind_copies(1e-4) as device, make(base, room, memory=policy, device=device, spill=tmp_path) as engine:
            assert outcome(engine, batch) == expected
            lanes = engine.step(batch).lanes
        assert lanes[Lane.ACTIVATIONS_IN].nbytes == lanes[Lane.ACTIVATIONS_OUT].nbytes
        moved.append(lanes[Lane.ACTIVATIONS_OUT].nbytes)
        written.append(lanes[Lane.WRITE].nbytes)
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[1] > moved[-1] == 0
    assert all(0 <= out <= sent for out, sent in zip(written, moved, strict=True))
    assert (written[0] > 0) == (host_room is not None)


def test_a_plan_leaves_inputs_to_the_disk_if_host_memory_has_no_room_for_all(base: Path, process_memory: int) -> None:
    model = open_checkpoint(base)
    free = 1 << 30  # of the device
    machine = Machine(on_host=False, in_place=False, device_free=lambda: free)
    layouts, least = model.layouts, 1 << 20

    def planned(host: int | str, activations: int, copies: int = 0) -> RunSpec:
        memory = MemoryPolicy(host=host, device="8MB", activations=activations, least_activations=least)
        request = RunRequest(layouts=layouts, on_disk=layouts, memory=memory, trained_copies=copies)
        return plan(request, machine, MeasuredSpeeds(model.weights))

    enough = planned("auto", 1 << 30, TRAINED_COPIES)
    assert enough.waiting_bytes == 1 << 30
    budget = process_memory + (64 << 20)
    little = planned(budget, 1 << 30, TRAINED_COPIES)
    assert little.waiting_bytes == least
    assert little.host_plan.nbytes <= budget
    with pytest.raises(MemoryBudgetError, match="memory"):
        planned(budget, 1 << 30)  # a zeroth-order run writes no activations to disk
