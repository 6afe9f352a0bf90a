"""What every estimator promises: scalars in, a replayable update out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from zo2core import MeZOSGD, MultiQueryRGE, OptionError
from zo2core.protocols import ZOEstimator

ESTIMATORS: dict[str, Callable[[], ZOEstimator]] = {
    "mezo": lambda: MeZOSGD(lr=1e-3, zo_eps=1e-3),
    "mezo, not in place": lambda: MeZOSGD(lr=1e-3, zo_eps=1e-3, perturb_in_place=False),
    "one query": lambda: MultiQueryRGE(lr=1e-3, zo_eps=1e-3, q=1),
    "four queries": lambda: MultiQueryRGE(lr=1e-3, zo_eps=1e-3, q=4),
    "four queries, not in place": lambda: MultiQueryRGE(lr=1e-3, zo_eps=1e-3, q=4, perturb_in_place=False),
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
    update = estimator.update(4, evaluations, losses, 0.25, ())
    assert (update.step, update.zo_eps) == (4, estimator.zo_eps)
    assert update.lr * len(update.seeds) == 0.25
    assert update.evaluations == evaluations
    assert update.perturb_in_place == estimator.perturb_in_place
    assert set(update.seeds) <= {evaluation.seed for evaluation in evaluations}
    assert len(update.seeds) == len(update.projected_grads)
    assert update.losses == tuple(loss.item() for loss in losses)


@every_estimator
def test_equal_losses_give_no_gradient(make: Callable[[], ZOEstimator]) -> None:
    estimator = make()
    evaluations = estimator.evaluations(0, seeds())
    update = estimator.update(0, evaluations, [torch.tensor(2.0)] * len(evaluations), 1.0, ())
    assert update.projected_grads == (0.0,) * len(update.seeds)


def test_mezo_evaluates_both_sides_of_one_direction() -> None:
    evaluations = MeZOSGD(lr=1.0, zo_eps=0.5).evaluations(0, seeds())
    assert [tuple(evaluation) for evaluation in evaluations] == [(7, 1.0), (7, -1.0)]


def test_mezo_divides_in_the_dtype_of_the_losses() -> None:
    estimator = MeZOSGD(lr=1.0, zo_eps=1e-3)
    evaluations = estimator.evaluations(0, seeds())
    plus, minus = torch.tensor(2.3456789), torch.tensor(2.3446789)
    grad = estimator.update(0, evaluations, [plus, minus], 1.0, ()).projected_grads[0]
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


def test_queries_are_both_sides_of_each_direction_in_turn() -> None:
    evaluations = MultiQueryRGE(lr=1.0, zo_eps=0.5, q=2).evaluations(0, seeds())
    assert [tuple(evaluation) for evaluation in evaluations] == [(7, 1.0), (7, -1.0), (8, 1.0), (8, -1.0)]


def test_a_seed_that_comes_up_twice_is_one_direction() -> None:
    evaluations = MultiQueryRGE(lr=1.0, zo_eps=0.5, q=3).evaluations(0, iter([5, 6, 5, 6, 9]))
    assert [evaluation.seed for evaluation in evaluations[::2]] == [5, 6, 9]


def test_each_query_has_its_own_gradient_and_a_share_of_the_learning_rate() -> None:
    estimator = MultiQueryRGE(lr=1.0, zo_eps=0.5, q=2)
    losses = [torch.tensor(value) for value in (3.0, 1.0, 1.5, 2.0)]
    update = estimator.update(0, estimator.evaluations(0, seeds()), losses, 0.1, ())
    assert (update.seeds, update.projected_grads, update.lr) == ((7, 8), (2.0, -0.5), 0.05)
    assert update.losses == (3.0, 1.0, 1.5, 2.0)


def test_equal_options_are_equal_estimators_and_others_are_not() -> None:
    made = [make().options for make in ESTIMATORS.values()]
    assert len({repr(sorted(options.items())) for options in made}) == len(made)
    assert made == [make().options for make in ESTIMATORS.values()]


@pytest.mark.parametrize("q", [0, -1, 1.5])
def test_a_number_of_queries_out_of_range_is_refused(q: int) -> None:
    with pytest.raises(OptionError, match="q"):
        MultiQueryRGE(lr=1.0, zo_eps=1.0, q=q)
