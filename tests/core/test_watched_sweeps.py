"""Sweeps report how far they are, whatever they are for, and do the same work as sweeps that nobody watches."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import first_order, zeroth_order
from models import make_batch

from zo2adapters import Adapter, open_checkpoint
from zo2core import Distribution, Engine, LowRankPerturbation, MeZOSGD, PhiloxNoise

peft: Any = pytest.importorskip("peft")

BATCH = make_batch(40, [7, 5])
SEGMENTS = 4  # embedding, two blocks, head


def of_forwards(base: Path, **options: Any) -> Engine:
    estimator = MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False)
    return zeroth_order(open_checkpoint(base), estimator, noise=PhiloxNoise(Distribution.GAUSSIAN), **options)


def of_gradients(base: Path, **options: Any) -> Engine:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = open_checkpoint(base, adapter=Adapter(config=config))
    return first_order(model, partial(torch.optim.SGD, lr=1e-2), **options)


ENGINES: dict[str, Any] = {
    "zeroth-order": of_forwards,
    "serial": partial(of_forwards, overlap=False),
    "low-rank": partial(of_forwards, perturbation=LowRankPerturbation(rank=2)),
    "first-order": of_gradients,
}


@pytest.mark.parametrize("kind", ENGINES)
def test_each_visit_of_a_sweep_is_reported_once(kind: str, base: Path) -> None:
    losses = []
    for is_watched in (True, False):
        seen: list[tuple[int, int]] = []
        with ENGINES[kind](base) as engine:
            engine.watch((lambda done, total, seen=seen: seen.append((done, total))) if is_watched else None)
            losses.append([engine.step(BATCH).loss, engine.step(BATCH).loss, engine.evaluate([BATCH]).loss])
        if is_watched:
            sweeps = [[visit] for visit in seen if visit[0] == 1]
            assert len(sweeps) == 3
            assert seen == [(done, total) for [(_, total)] in sweeps for done in range(1, total + 1)]
            assert {total for _, total in seen} >= {SEGMENTS}
        else:
            assert seen == []
    assert losses[0] == losses[1]


def test_a_sweep_after_one_that_failed_counts_from_its_start(base: Path) -> None:
    seen: list[int] = []

    def visited(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with of_forwards(base) as engine:
        engine.watch(visited)
        with pytest.raises(KeyboardInterrupt):
            engine.evaluate([BATCH])
        engine.evaluate([BATCH])
    assert seen == [1, 2, 1, 2, 3, 4]
