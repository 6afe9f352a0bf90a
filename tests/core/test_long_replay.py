"""Replays of very many updates: generators are bounded in number, and no bit depends on the bound."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import weights
from parity import assert_same_bits
from toy import ToyBlockModel

from zo2core import BlockLayout, Engine, Evaluation, Journal, MemoryPolicy, MeZOSGD, SequentialNoise, Update, ZerothOrder
from zo2core.kernels.programs import seeds_of, split_updates
from zo2core.noise import GENERATOR, STREAM
from zo2core.planning.memory import HostPlan
from zo2core.protocols import SEEDS_IN_TURN

UPDATES = 3 * SEEDS_IN_TURN  # more than are held at a time


def update(step: int, rng: random.Random, probes: int) -> Update:
    seeds = tuple(rng.randrange(2**40) for _ in range(probes))
    evaluations = tuple(Evaluation(seed, shift) for seed in seeds for shift in (1.0, -1.0))
    grads = tuple(rng.gauss(0, 1) for _ in seeds)
    return Update(step, evaluations, seeds, grads, 1e-3, 1e-3, 0.1, True, (1.0,) * len(evaluations))


def toy(folder: Path) -> ToyBlockModel:
    return ToyBlockModel(11, 6, 3, tied=False, dtype=torch.float32, file=folder / "toy.safetensors")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Of a run of the toy's, in steps that nobody computed."""
    path = tmp_path / "journal.jsonl"
    written = Journal(path)
    with Engine(toy(tmp_path), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3)), journal=written):
        rng = random.Random(0)
        for step in range(UPDATES):
            written.append(update(step, rng, probes=1 + (step % 50 == 7) * 3))
    return path


class Watched(SequentialNoise):
    """Counts what it holds and draws."""

    def __init__(self, layouts: Collection[BlockLayout], memory: int) -> None:
        super().__init__(tuple(layouts), memory=memory)
        self.most_streams = self.most_generators = 0

    def fill(self, *args: Any, **kwargs: Any) -> None:
        super().fill(*args, **kwargs)
        streams = [*self._streams.values(), *self._recent.values()]
        self.most_streams = max(self.most_streams, len(streams))
        self.most_generators = max(self.most_generators, sum(1 + len(stream.copies) for stream in streams))


@pytest.mark.few(1)
@pytest.mark.parametrize("kept", [0, 100])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_long_replay_holds_a_bounded_number_of_generators(
    journal: Path, tmp_path: Path, kept: int, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy(tmp_path)
    with Engine(model, journal=journal) as engine:
        expected = weights(engine)
    model = toy(tmp_path)
    generators = 4  # of a seed: its own, the segment's start, and two jumps, as the head is registered before the blocks
    noise = Watched(model.layouts, memory=kept * (STREAM + generators * GENERATOR))
    memory = MemoryPolicy(host=HostPlan((), 0, buckets=1 if streamed else None, keep_noise=True))
    drawn, normal_ = 0, torch.Tensor.normal_

    def counted(self: torch.Tensor, **options: Any) -> torch.Tensor:
        nonlocal drawn
        drawn += self.numel()
        return normal_(self, **options)

    with Engine(model, ZerothOrder(None, noise=noise), journal=journal, memory=memory) as engine:
        seeds = {seed for each in engine.journal.updates for seed in each.seeds}
        monkeypatch.setattr(torch.Tensor, "normal_", counted)
        found = weights(engine)
    for name, tensor in expected.items():
        assert_same_bits(name, found[name], tensor)
    most = kept + 2 * SEEDS_IN_TURN
    assert noise.most_streams == most < len(seeds)
    assert noise.most_generators <= generators * most
    # Whoever is not kept starts over at each segment, not at each parameter.
    specs = sorted((spec for layout in model.layouts for spec in layout.parameters), key=lambda spec: spec.index)
    before = {spec.name: sum(each.numel for each in specs[:at]) for at, spec in enumerate(specs)}
    own = sum(spec.numel for spec in specs)
    skipped = sum(min(before[spec.name] for spec in layout.parameters) for layout in model.layouts)
    assert drawn <= len(seeds) * (own + skipped)


def test_the_engines_generators_fit_into_what_the_arrangement_leaves(
    journal: Path, tmp_path: Path, process_memory: int
) -> None:
    asked = process_memory + (128 << 20)
    with Engine(toy(tmp_path), journal=journal, memory=MemoryPolicy(host=asked, activations=80 << 20)) as engine:
        assert engine.host_plan is not None
        assert 0 <= engine.host_plan.spare < 24 << 20
        assert engine._runner.host_limit == asked, "no more may be resident"
        assert isinstance(engine._runner.noise, SequentialNoise)
        assert engine._runner.noise._most == engine.host_plan.spare // (STREAM + 4 * GENERATOR)


@pytest.mark.parametrize("most", [1, 3, 4, 100])
def test_updates_are_split_into_parts_in_order(most: int) -> None:
    rng = random.Random(1)
    updates = [update(step, rng, probes) for step, probes in enumerate([1, 1, 3, 1, 5, 1, 1, 1])]
    parts = list(split_updates(updates, most))
    assert [each for part in parts for each in part] == updates
    for part in parts:
        assert len(part) == 1 or sum(len(seeds_of(each)) for each in part) <= most
    assert [list(part) for part in split_updates([], most)] == [[]]
