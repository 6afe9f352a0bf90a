"""Whether updates land: told by a sample, for every source and noise, without touching a bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from models import make_batch
from toy import ToyBlockModel

from zo2adapters import open_checkpoint
from zo2core import (
    Distribution,
    Engine,
    MemoryPolicy,
    MeZOSGD,
    MultiQueryRGE,
    NoiseGenerator,
    PhiloxNoise,
    SequentialNoise,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.planning.memory import HostPlan
from zo2core.sweep.visitor import EVERY, SAMPLED, UpdateLoss
from zo2core.types import Evaluation, ParameterSpec, Update

BATCH = make_batch(40, [9, 5])
NOISES: dict[str, NoiseGenerator | None] = {
    "mezo": None,
    "gaussian": PhiloxNoise(),
    "rademacher": PhiloxNoise(Distribution.RADEMACHER),
}
every_noise = pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)


def update_of(lr: float, *grads: float, step: int = 0) -> Update:
    evaluations = tuple(Evaluation(seed, shift) for seed in range(len(grads)) for shift in (1.0, -1.0))
    seeds, losses = tuple(range(len(grads))), (1.0,) * len(evaluations)
    return Update(step, evaluations, seeds, grads, lr, 1e-3, 0.0, perturb_in_place=False, losses=losses)


@pytest.mark.parametrize("buckets", [None, 2], ids=["resident", "streamed"])
@every_noise
def test_the_share_is_that_of_the_weights_that_the_step_changes(
    noise: NoiseGenerator | None, buckets: int | None, tmp_path: Path
) -> None:
    """Of all weights, where the sample is of a few hundred: in bfloat16, at steps of which about half lands."""
    model = ToyBlockModel(97, 48, 4, tied=True, dtype=torch.bfloat16, file=tmp_path / "toy.safetensors")
    batch = dict.fromkeys(("input_ids", "labels"), BATCH["input_ids"])
    memory = MemoryPolicy(host=HostPlan((), budget=2**28, buckets=buckets, keep_noise=False))
    with Engine(
        model, ZerothOrder(MeZOSGD(lr=1.0, zo_eps=0.1, perturb_in_place=False), noise=noise), memory=memory
    ) as engine:
        grad = abs(engine.step(batch).projected_grads[0])
    estimator = MeZOSGD(lr=5e-4 / grad, zo_eps=0.1, perturb_in_place=False)
    with Engine(model_again(tmp_path), ZerothOrder(estimator, noise=noise), memory=memory) as engine:
        before = {name: tensor.clone() for name, tensor in engine.parameters_now()}
        share_applied = engine.step(batch).share_applied
        changed = [(tensor != before[name]).sum().item() for name, tensor in engine.parameters_now()]
    share = sum(changed) / sum(tensor.numel() for tensor in before.values())
    assert 0.2 < share < 0.9
    assert share_applied == pytest.approx(share, abs=0.07)


def model_again(tmp_path: Path) -> ToyBlockModel:
    return ToyBlockModel(97, 48, 4, tied=True, dtype=torch.bfloat16, file=tmp_path / "again.safetensors")


@pytest.mark.parametrize(
    ("dtype", "lr", "least", "most"),
    [("bfloat16", 1e-2, 0.9, 1.0), ("bfloat16", 1e-6, 0.0, 0.2), ("float32", 1e-2, 0.9, 1.0), ("float32", 1e-6, 0.9, 1.0)],
)
def test_small_steps_land_in_float32_and_not_in_bfloat16(
    dtype: str, lr: float, least: float, most: float, base: Path
) -> None:
    with Engine(open_checkpoint(base, dtype=dtype), ZerothOrder(MeZOSGD(lr=lr, zo_eps=1e-2))) as engine:
        share_applied = engine.step(BATCH).share_applied
    assert share_applied is not None
    assert least <= share_applied <= most


@pytest.mark.few(2)
@every_noise
def test_it_is_looked_at_once_in_a_hundred_steps(noise: NoiseGenerator | None, base: Path) -> None:
    with Engine(open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3), noise=noise)) as engine:
        looked = [step for step in range(EVERY + 3) if engine.step(BATCH).share_applied is not None]
    assert looked == [0, EVERY]


def test_a_run_that_goes_on_looks_at_its_first_step(base: Path, tmp_path: Path) -> None:
    """Also where blocks stream, and have updates to catch up with."""
    memory = MemoryPolicy(host=HostPlan((), budget=2**28, buckets=2, keep_noise=False))
    share_applied = []
    for _ in range(2):
        model, write_back = open_checkpoint(base), WriteBackPolicy(directory=tmp_path / "run", every=None)
        with Engine(
            model,
            ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3)),
            journal=tmp_path / "run" / "j",
            memory=memory,
            write_back=write_back,
        ) as engine:
            share_applied += [engine.step(BATCH).share_applied for _ in range(3)]
    assert [share is not None for share in share_applied] == [True, False, False, True, False, False]


def sample(update_loss: UpdateLoss, segment: int, store: Sequence[torch.Tensor]) -> None:
    specs = [
        ParameterSpec(str(place), tuple(theta.shape), theta.dtype, place, decays=True) for place, theta in enumerate(store)
    ]
    update_loss.sample(segment, store, specs)


def test_a_step_without_update_says_nothing_and_the_next_one_is_looked_at() -> None:
    update_loss, store = UpdateLoss(SequentialNoise([])), [torch.ones(100)]
    for step, grad in enumerate((0.0, 1.0, 1.0)):
        update_loss.begin(step)
        sample(update_loss, 0, store)
        share = update_loss.share_applied(update_of(0.1, grad, step=step))
        assert share == (None, 1.0, None)[step]


def test_the_sample_is_spread_over_every_segment_and_is_small() -> None:
    """A parameter that stays where it is counts by its size, wherever it lies."""
    large = torch.full((10 * SAMPLED,), 1e9)
    for still in range(3):
        store = [large if place == still else torch.full((10 * SAMPLED,), 1e-3) for place in range(3)]
        update_loss = UpdateLoss(PhiloxNoise(Distribution.RADEMACHER))
        update_loss.begin(0)
        sample(update_loss, 0, store)
        sample(update_loss, 1, [torch.full((20 * SAMPLED,), 1e-3)])
        assert update_loss.share_applied(update_of(0.1, 1.0)) == pytest.approx(1 - 1 / 6, abs=0.01)


@pytest.mark.parametrize("queries", [1, 4])
def test_each_direction_rounds_on_its_own_and_dtypes_count_together(queries: int) -> None:
    """Nine tenths of half the distance to the next smaller bfloat16: however many follow each other, each is lost."""
    update_loss = UpdateLoss(PhiloxNoise(Distribution.RADEMACHER))
    update_loss.begin(0)
    sample(update_loss, 0, [torch.full((1000,), 1.0, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)])
    share = update_loss.share_applied(update_of(2.0**-9, *(0.9 + 0.001 * 2**query for query in range(queries))))
    assert share == pytest.approx(0.5, abs=0.01)


def test_looking_changes_no_bit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome() -> list[object]:
        estimator = MultiQueryRGE(lr=1e-3, zo_eps=1e-3, q=2)
        with Engine(open_checkpoint(base, dtype="bfloat16"), ZerothOrder(estimator)) as engine:
            steps: list[object] = [engine.step(BATCH).losses for _ in range(4)]
            return [*steps, *(tensor.tolist() for _, tensor in engine.parameters_now())]

    looking = outcome()
    monkeypatch.setattr(UpdateLoss, "begin", lambda self, step: None)
    assert outcome() == looking
