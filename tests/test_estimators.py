"""What every estimator promises: scalars in, a replayable update out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from zo2core import MeZOSGD, OptionError
from zo2core.protocols import ZOEstimator

ESTIMATORS: dict[str, Callable[[], ZOEstimator]] = {
    "mezo": lambda: MeZOSGD(lr=1e-3, zo_eps=1e-3),
    "mezo, not in place": lambda: MeZOSGD(lr=1e-3, zo_eps=1e-3, perturb_in_place=False),
}

every_estimator = pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS)


def seeds() -> Iterator[int]:
    return itertools.count(7)


@every_estimator
def test_evaluations_follow_from_step_and_seeds(make: Callable[[], ZOEstimator]) -> None:
    evaluations = make().evaluations(3, seeds())
    assert evaluations == make().evaluations(3, seeds())
    assert all(evaluation.validated() == evaluation for evaluation in evaluations)


@every_estimator
def test_an_update_carries_all_that_replaying_needs(make: Callable[[], ZOEstimator]) -> None:
    estimator = make()
    evaluations = estimator.evaluations(4, seeds())
    losses = [torch.tensor(1.0 + 0.5 * i) for i in range(len(evaluations))]
    update = estimator.update(4, evaluations, losses, 0.25)
    assert (update.step, update.lr, update.zo_eps) == (4, 0.25, estimator.zo_eps)
    assert update.evaluations == evaluations
    assert update.perturb_in_place == estimator.perturb_in_place
    assert set(update.seeds) <= {evaluation.seed for evaluation in evaluations}
    assert len(update.seeds) == len(update.projected_grads)
    assert update.losses == tuple(loss.item() for loss in losses)


@every_estimator
def test_equal_losses_give_no_gradient(make: Callable[[], ZOEstimator]) -> None:
    estimator = make()
    evaluations = estimator.evaluations(0, seeds())
    update = estimator.update(0, evaluations, [torch.tensor(2.0)] * len(evaluations), 1.0)
    assert update.projected_grads == (0.0,) * len(update.seeds)


def test_mezo_evaluates_both_sides_of_one_direction() -> None:
    evaluations = MeZOSGD(lr=1.0, zo_eps=0.5).evaluations(0, seeds())
    assert [tuple(evaluation) for evaluation in evaluations] == [(7, 1.0), (7, -1.0)]


def test_mezo_divides_in_the_dtype_of_the_losses() -> None:
    estimator = MeZOSGD(lr=1.0, zo_eps=1e-3)
    evaluations = estimator.evaluations(0, seeds())
    plus, minus = torch.tensor(2.3456789), torch.tensor(2.3446789)
    grad = estimator.update(0, evaluations, [plus, minus], 1.0).projected_grads[0]
    assert grad == ((plus - minus) / 2e-3).item()
    assert grad != (plus.item() - minus.item()) / 2e-3  # as Python's doubles would have it


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["lr", "zo_eps"])
def test_mezo_refuses_numbers_that_are_not_positive_and_finite(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=name):
        MeZOSGD(lr=value if name == "lr" else 1.0, zo_eps=value if name == "zo_eps" else 1.0)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_mezo_refuses_a_weight_decay_out_of_range(value: float) -> None:
    with pytest.raises(OptionError, match="weight_decay"):
        MeZOSGD(lr=1.0, zo_eps=1.0, weight_decay=value)
