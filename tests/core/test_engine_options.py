"""Which options go with which method: what has no effect, or cannot be done right, is refused before anything is opened."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_batch

from zo2adapters import Adapter, open_checkpoint
from zo2core import (
    LOMO,
    AtSnapshot,
    Delayed,
    Engine,
    FirstOrder,
    HostDevice,
    LossScaling,
    LowRankPerturbation,
    MeZOSGD,
    SegmentStore,
    TorchOptimizer,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.errors import BusyError, OptionError

SGD = partial(torch.optim.SGD, lr=1e-2)
MEZO = ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3))
ALL = FirstOrder(LOMO(), lr=1e-2)
BATCH = make_batch(40, [7, 5])


def adapted(base: Path) -> Any:
    peft = pytest.importorskip("peft")
    return open_checkpoint(base, adapter=Adapter(config=peft.LoraConfig(r=2, target_modules=["q_proj"]), seed=1))


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "blocks written back by gradients": (ALL, {"write_back": WriteBackPolicy(directory="x")}, "write_back"),
    "commits of forwards": (MEZO, {"commit_every": 1, "run": "x"}, "commit_every"),
    "commits of an adapter": (FirstOrder(SGD), {"commit_every": 1, "run": "x"}, "commit_every"),
    "commits without a directory": (ALL, {"commit_every": 1}, "run: found None"),
    **{
        f"commits every {steps!r} steps": (ALL, {"commit_every": steps, "run": "x"}, f"commit_every: found {steps!r}")
        for steps in (0, 1.5, "3")
    },
    "a journal without a directory": (ALL, {"journal": "x"}, "run: found None, and a journal"),
    "a delayed update on disk": (
        FirstOrder(Delayed(TorchOptimizer(SGD)), lr=1e-2),
        {"commit_every": 1, "run": "x"},
        "while they are written",
    ),
    "a scheduler without its source": (MEZO, {"scheduler": object()}, "scheduler"),
    "a journal beside a snapshot": (AtSnapshot(0, None), {"journal": "x"}, "journal"),
    "a directory beside a snapshot": (AtSnapshot(0, None), {"run": "x"}, "run"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_method_cannot_heed_is_refused_and_leaves_nothing(
    case: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    method, options, message = REFUSED[case]
    model = open_checkpoint(base)
    with pytest.raises(OptionError, match=message):
        Engine(model, method, **options)
    assert not any(tmp_path.iterdir())
    with Engine(model, MEZO) as engine:  # the model was not taken
        engine.step(BATCH)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": LOMO()}, "lr: found None"),
        ({"optimizer": SGD, "clip": 0.0}, "clip: found 0.0"),
        ({"optimizer": LOMO(), "lr": 1.0, "clip_value": float("nan")}, "clip_value: found nan"),
        ({"optimizer": SGD, "scaling": LossScaling()}, "scaling: found an optimizer of an adapter"),
        ({"optimizer": SGD, "clip_value": 1.0}, "clip_value: found an optimizer of an adapter"),
    ],
)
def test_a_method_checks_itself(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FirstOrder(**options)


def test_what_belongs_to_another_state_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    with Engine(open_checkpoint(base), MEZO) as engine:
        for asked in (
            lambda: engine.optimizer,
            lambda: engine.parameters,
            lambda: engine.gradients(BATCH),
            engine.state_dict,
            lambda: engine.load_state_dict({}),
            lambda: engine.load_parameters({}),
            engine.take_snapshot,
            engine.commit,
            lambda: engine.committed,
        ):
            with pytest.raises(OptionError, match=r"expected|FirstOrder"):
                asked()
        assert engine.step(BATCH).grad_norm is None
    with Engine(adapted(base), FirstOrder(SGD), run=tmp_path / "run") as engine:
        for asked in (engine.ask, lambda: engine.tell([1.0]), engine.commit):
            with pytest.raises(OptionError):
                asked()
        with pytest.raises(OptionError, match="a seed of a first-order step"):
            engine.step(BATCH, seed=1)
        result = engine.step(BATCH)
        assert result.projected_grads == ()
        assert result.losses == (result.loss,)
        assert result.lr == 1e-2
    with Engine(open_checkpoint(base)) as engine, pytest.raises(OptionError, match="without a method"):
        engine.step(BATCH)


def test_a_source_serves_one_engine_at_a_time_and_zeroth_order_alone(base: Path) -> None:
    model, other, device = open_checkpoint(base), open_checkpoint(base), HostDevice()
    with closing(SegmentStore(model.weights, model.layouts, device.host_memory)) as source:
        with Engine(model, MEZO, source=source, device=device) as engine:
            with pytest.raises(BusyError, match="SegmentStore"):
                Engine(other, MEZO, source=source, device=device)
            engine.step(BATCH)
        for method in (ALL, ZerothOrder(MEZO.estimator, perturbation=LowRankPerturbation(rank=2))):
            with pytest.raises(OptionError, match="source: found a run whose weights are not replayed"):
                Engine(other, method, source=source, device=device)
