"""First-order steps of all parameters: losses, norms and weights equal those of loops over the whole model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from full_loops import BlockCoordinateLoop, WholeModel, adalomo_loop, lomo_loop, torch_loop
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CONFIGS, batches, make_batch, save_model, small_config
from threaded_device import ThreadedDevice, ThreadedStreams

from zo2adapters import Adapter, open_checkpoint
from zo2core import (
    LOMO,
    AdaLOMO,
    BAdam,
    BatchError,
    BlockUpdate,
    ClosedError,
    FullBackpropEngine,
    HostPlan,
    MemoryBudgetError,
    MemoryPolicy,
    NonFiniteLossError,
    OptionError,
    TorchOptimizer,
)
from zo2core.planning.device_plan import DevicePlan
from zo2core.types import Lane

PROFILE = settings.default
assert PROFILE is not None
ADAMW: Any = partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1)
FUSED: Any = partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1, fused=True)
SGD: Any = partial(torch.optim.SGD, lr=1.0, momentum=0.9)
SEED, EVERY = 3, 2  # of BAdam's turns


class Case(NamedTuple):
    """An optimizer, and the loop that it has the bits of."""

    update: Callable[[], BlockUpdate]
    loop: Callable[..., Any]  # of the whole model, the names of each turn, and the two limits of gradients
    lr: float


CASES = {
    "lomo": Case(lambda: LOMO(weight_decay=0.1), lambda whole, turns, *clips: lomo_loop(whole, 0.1, *clips), 3e-2),
    "adalomo": Case(lambda: AdaLOMO(weight_decay=0.1), lambda whole, turns, *clips: adalomo_loop(whole, 0.1, *clips), 3e-2),
    "adamw": Case(lambda: TorchOptimizer(ADAMW), lambda whole, turns, *clips: torch_loop(whole, ADAMW, *clips), 1e-2),
    "fused adamw": Case(lambda: TorchOptimizer(FUSED), lambda whole, turns, *clips: torch_loop(whole, FUSED, *clips), 1e-2),
    "sgd": Case(lambda: TorchOptimizer(SGD), lambda whole, turns, *clips: torch_loop(whole, SGD, *clips), 3e-2),
    "badam": Case(
        lambda: BAdam(ADAMW, every=EVERY, seed=SEED),
        lambda whole, turns, *clips: BlockCoordinateLoop(whole, ADAMW, turns, EVERY, *clips),
        1e-2,
    ),
}
STEPS = 5


def memory(room: int = 1 << 28) -> MemoryPolicy:
    """All blocks in memory, and so many bytes for what is kept between forward and backward."""
    return MemoryPolicy(host=HostPlan((), 0, None, keep_noise=False), activations=room)


def rate(case: str) -> Callable[[int], float]:
    return lambda step: CASES[case].lr / (step + 1)


def turns_of(model: Any, update: BlockUpdate) -> Sequence[Sequence[str]]:
    """Names of the parameters that each of BAdam's turns trains."""
    trained = [index for index, layout in enumerate(model.layouts) if layout.parameters]
    turns = [update.segments(step, trained) for step in range(0, STEPS, EVERY)]
    return [[spec.name for index in turn for spec in model.layouts[index].parameters] for turn in turns]


def assert_equal_runs(engine: FullBackpropEngine, whole: WholeModel, loop: Any, case: str, micro_batches: Any) -> None:
    """Take steps on both sides, and compare losses, norms and weights after each."""
    for step in range(STEPS):
        if isinstance(loop, BlockCoordinateLoop):
            loop.begin()
        loss = whole.backward(micro_batches)
        loop(rate(case)(step))
        assert engine.step(micro_batches).loss == pytest.approx(loss, rel=1e-6)
        for name, value in engine.parameters_now():
            assert torch.equal(value, whole.parameters[name].detach()), (step, name)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=PROFILE.max_examples // 3)
@given(
    data=st.data(),
    model_type=st.sampled_from(sorted(CONFIGS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    clips=st.sampled_from([(None, None), (0.01, None), (None, 0.05), (0.01, 0.05)]),
    room=st.sampled_from([1, 30_000, 1 << 28]),
    overlap=st.booleans(),
    accumulated=st.integers(1, 3),
)
def test_steps_are_those_of_a_loop_over_the_whole_model(
    case: str,
    data: st.DataObject,
    model_type: str,
    dtype: torch.dtype,
    clips: tuple[float | None, float | None],
    room: int,
    overlap: bool,
    accumulated: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    config = data.draw(CONFIGS[model_type])
    micro_batches = [data.draw(batches(config.vocab_size)) for _ in range(accumulated)]
    base = save_model(tmp_path_factory.mktemp("full") / "base", config, dtype)
    model, update, whole = open_checkpoint(base), CASES[case].update(), WholeModel(base)
    loop = CASES[case].loop(whole, turns_of(model, update), *clips)
    options: Any = {"clip_value": clips[0], "clip_norm": clips[1], "memory": memory(room), "overlap": overlap}
    with FullBackpropEngine(model, update, lr=rate(case), **options) as engine:
        assert_equal_runs(engine, whole, loop, case, micro_batches)
