"""A sweep asks the device for nothing: what Hugging Face's forward wants to know of a batch is known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models import CONFIGS, make_batch, save_model, small_config
from torch.utils._python_dispatch import TorchDispatchMode

from zo2adapters import open_checkpoint, score
from zo2adapters.models.batches import BranchCache, PreparedBatch
from zo2adapters.models.hf import HFBlockModel
from zo2core import Distribution, Engine, MeZOSGD, PhiloxNoise, ZerothOrder
from zo2core.errors import UnsupportedModelError

WAITING = {"_local_scalar_dense", "is_nonzero", "item", "equal", "nonzero", "masked_select", "_unique2"}


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations for whose result the host would wait on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.names += [name] if name in WAITING else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss_chunk", [None, 3])
@pytest.mark.parametrize("lengths", [[5, 5], [5, 3]], ids=["full", "padded"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_sweep_asks_the_device_for_nothing(
    model_type: str, lengths: list[int], loss_chunk: int | None, tmp_path: Path
) -> None:
    base = save_model(tmp_path, small_config(model_type))
    model = open_checkpoint(base, loss_chunk=loss_chunk)
    batch = make_batch(model.config.vocab_size, lengths)
    prepared = model.prepared

    def ahead(given: Any) -> Any:
        """As for a GPU."""
        learned = prepared(given)
        model.record_branches(learned)
        return learned

    noise = PhiloxNoise(Distribution.RADEMACHER)
    with (
        Engine(model, ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3), noise=noise)) as engine,
        patch.object(model, "prepared", ahead),
    ):
        sweep = engine._runner.scheduler.sweep
        waits = Waits()

        def watched(*arguments: Any) -> None:
            with waits:
                sweep(*arguments)

        with patch.object(engine._runner.scheduler, "sweep", watched):
            for _ in range(2):
                engine.step(batch)
            losses = engine.evaluate([batch]).losses
            score(engine, model, [[3, 4], [5]], [[[6], [7, 8]], [[9, 4, 6], [1]]])
        assert waits.names == []
        with patch.object(model, "prepared", lambda given: given):  # asks each time
            assert engine.evaluate([batch]).losses == losses
            with patch.object(engine._runner.scheduler, "sweep", watched):
                engine.evaluate([batch])
        assert waits.names != [], "what is looked for is there to be found"


def asked(question: Callable[[], Any], branches: BranchCache) -> Any:
    with branches:
        return question()


def test_answers_are_those_of_the_first_time_and_in_order() -> None:
    values = torch.tensor([1, 0, 7])
    branches = BranchCache()

    def questions() -> list[Any]:
        return [bool(values[0]), bool(values[1]), values[2].item(), int(values[2]), values.tolist()]

    assert asked(questions, branches) == [True, False, 7, 7, [1, 0, 7]]
    values.zero_()
    assert asked(questions, branches) == [True, False, 7, 7, [1, 0, 7]]


def test_what_is_not_known_is_asked() -> None:
    values, weights = torch.tensor([1, 2]), torch.tensor([0.5])
    branches = BranchCache()
    assert asked(lambda: (int(values[0]), weights.item()), branches) == (1, 0.5)
    values.add_(10)
    weights.add_(10)
    assert asked(lambda: (int(values[0]), weights.item(), int(values[1])), branches) == (1, 10.5, 12)
    values.add_(10)
    assert asked(lambda: (int(values[0]), weights.item(), int(values[1])), branches) == (1, 10.5, 22), "not learned late"


OTHER_QUESTIONS: dict[str, Callable[[], object]] = {
    "another order": lambda: (torch.tensor(7).item(), bool(torch.tensor(data=True))),
    "another function": lambda: torch.tensor(data=True).item(),
    "another shape": lambda: bool(torch.tensor([True])),
    "another dtype": lambda: bool(torch.tensor(1)),
}


@pytest.mark.parametrize("questions", OTHER_QUESTIONS.values(), ids=OTHER_QUESTIONS)
def test_another_question_is_never_given_the_answer_to_the_first(questions: Callable[[], object]) -> None:
    branches = BranchCache()
    assert asked(lambda: (bool(torch.tensor(data=True)), torch.tensor(7).item()), branches) == (True, 7)
    with pytest.raises(UnsupportedModelError, match=r"read 0 .*expected __bool__ of a tensor of shape"):
        asked(questions, branches)
    assert asked(lambda: bool(torch.tensor(data=False)), branches) is True, "the same question is answered again"


def test_a_batch_is_checked_where_it_is_prepared(tmp_path: Path) -> None:
    model: HFBlockModel = open_checkpoint(save_model(tmp_path, small_config("opt")))
    with Engine(model):
        assert isinstance(model.prepared(make_batch(model.config.vocab_size, [4])), PreparedBatch)
