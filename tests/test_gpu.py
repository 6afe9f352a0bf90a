"""What only a GPU can show. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models import make_batch, save_model, small_config
from parity import Plan, Storage, assert_parity
from transformers import AutoModelForCausalLM

from zo2adapters import MonolithicMeZO, open_checkpoint
from zo2core import CudaDevice, Distribution, MemoryPolicy, MeZOSGD, PhiloxNoise, ZOEngine
from zo2core.kernels import dispatch, philox
from zo2core.protocols import Device
from zo2core.types import Descend, Perturb, Program

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BLOCKS = 4


class OnGPU(Storage):
    """As ``Storage``, on the GPU."""

    def device(self) -> Device:
        return CudaDevice()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", small_config("llama", num_hidden_layers=BLOCKS), torch.float32)


def whole_on_gpu(base: Path) -> Any:
    whole: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    return whole.to("cuda")


@pytest.mark.parametrize("activations_wait", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("distribution", [None, *Distribution])
def test_the_trajectory_is_the_monolithic_loops(
    distribution: Distribution | None, in_place: bool, activations_wait: bool, base: Path, tmp_path: Path
) -> None:
    between = ["nothing", "evaluate", "flush", "reopen", "nothing"]
    plan = Plan(1e-2, 1e-3, 0.1, in_place, list(range(5)), between, 2, distribution)
    storage = OnGPU(3, 2, False, behind_copies=True, activations_wait=activations_wait)
    batch = make_batch(40, [7, 4])
    on_gpu = {key: value.to("cuda") for key, value in batch.items()}
    run = tmp_path / "run"
    assert_parity(lambda: storage.engine(open_checkpoint(base), plan, run), whole_on_gpu(base), plan, on_gpu).close()


@contextmanager
def watched(engine: ZOEngine, seen: list[int]) -> Iterator[None]:
    """Let a sweep fail that makes the host wait; note what torch has reserved before and after each."""
    sweep = engine._parts.scheduler.sweep

    def strict(*arguments: Any) -> None:
        seen.append(torch.cuda.memory_stats()["segment.all.allocated"])
        torch.cuda.set_sync_debug_mode("error")
        try:
            sweep(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen.append(torch.cuda.memory_stats()["segment.all.allocated"])

    with patch.object(engine._parts.scheduler, "sweep", strict):
        yield


@pytest.mark.parametrize("least", [None, 1], ids=["activations stay", "activations wait"])
@pytest.mark.parametrize("lengths", [[7, 7], [7, 4]], ids=["full", "padded"])
def test_a_sweep_neither_waits_nor_allocates(lengths: list[int], least: int | None, base: Path) -> None:
    seen: list[int] = []
    with ZOEngine(
        open_checkpoint(base),
        MeZOSGD(lr=1e-3, zo_eps=1e-3),
        noise=PhiloxNoise(Distribution.GAUSSIAN),
        device="cuda",
        memory=MemoryPolicy(activations=1 if least else 2**28, least_activations=least),
    ) as engine:
        batch = make_batch(40, lengths)
        for _ in range(3):  # kernels are compiled, and the allocator's cache is filled
            engine.step(batch)
        with watched(engine, seen):
            for _ in range(3):
                engine.step(batch)
    assert len(set(seen)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("distribution", Distribution)
def test_the_kernel_gives_the_references_bits(distribution: Distribution, dtype: torch.dtype) -> None:
    numel, start, seed = 100_003, 777, 2**40 + 3
    moves = (Perturb(0, 1.0, 1e-3), Perturb(1, -2.0, 1e-3), Descend(0, 0.3, 1e-2, 0.1), Descend(1, -0.7, 1e-2, 0.0))
    program = Program((seed, 5), moves, then=Perturb(1, 1.0, 1e-3))
    theta = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = []
    for device in ("cpu", "cuda"):
        weights, out = theta.to(device, copy=True), torch.empty(numel, dtype=dtype, device=device)
        dispatch.apply_drawing(weights, program, distribution, 3, start, out=out)
        found.append((weights.cpu(), out.cpu()))
    z, there = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype, device="cuda")
    philox.fill(z, distribution, seed, 3, 0)
    dispatch.fill(there, distribution, seed, 3, 0)
    assert torch.equal(there.cpu(), z)
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_losses_are_finite_and_memory_is_given_back(base: Path) -> None:
    before = torch.cuda.memory_allocated()
    engine = ZOEngine(open_checkpoint(base), MeZOSGD(lr=1e-3, zo_eps=1e-3), device="cuda")
    mono = MonolithicMeZO(whole_on_gpu(base), lr=1e-3, zo_eps=1e-3)
    batch = make_batch(40, [5])
    ours = engine.step(batch, seed=3)
    theirs = mono.step({key: value.to("cuda") for key, value in batch.items()}, 3)
    assert ours.losses == theirs.losses
    assert ours.bound_seconds > 0
    engine.close()
    del engine, mono
    assert torch.cuda.memory_allocated() <= before + 2**20
