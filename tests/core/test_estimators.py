"""What every estimator promises: scalars in, a replayable update out."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from zo2core import FZOO, Clipped, Distribution, Guarded, MeZOSGD, MultiQueryRGE, Update
from zo2core.errors import NonFiniteLossError, OptionError
from zo2core.estimators import ESTIMATORS as REGISTRY
from zo2core.estimators import EvolutionStrategies
from zo2core.protocols import ZOEstimator
from zo2core.ranges import EstimatorName, Fitness

ESTIMATORS: dict[str, Callable[[], ZOEstimator]] = {
    "mezo": lambda: MeZOSGD(lr=1e-3, zo_eps=1e-3),
    "mezo, not in place": lambda: MeZOSGD(lr=1e-3, zo_eps=1e-3, perturb_in_place=False),
    "one query": lambda: MultiQueryRGE(lr=1e-3, zo_eps=1e-3, q=1),
    "four queries": lambda: MultiQueryRGE(lr=1e-3, zo_eps=1e-3, q=4),
    "four queries, not in place": lambda: MultiQueryRGE(lr=1e-3, zo_eps=1e-3, q=4, perturb_in_place=False),
    "fzoo": lambda: FZOO(lr=1e-3, zo_eps=1e-3, q=4),
    "fzoo, eight directions": lambda: FZOO(lr=1e-3, zo_eps=1e-3),
    "evolution strategies": lambda: EvolutionStrategies(lr=1e-3, zo_eps=1e-3, q=4),
    "evolution strategies, by ranks": lambda: EvolutionStrategies(lr=1e-3, zo_eps=1e-3, q=4, fitness=Fitness.RANKS),
    "clipped": lambda: Clipped(estimator=MeZOSGD(lr=1e-3, zo_eps=1e-3), medians=1.5),
    "guarded": lambda: Guarded(estimator=MeZOSGD(lr=1e-3, zo_eps=2.0)),
    "guarded and clipped": lambda: Guarded(estimator=Clipped(estimator=MeZOSGD(lr=1e-3, zo_eps=2.0), value=0.2)),
}

every_estimator = pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS)


def seeds() -> Iterator[int]:
    return itertools.count(7)


def take(
    estimator: ZOEstimator, past: Sequence[Update], losses: Sequence[float] | None = None, *, phase: float = 0.0
) -> Update:
    """The step that follows a run's updates; without losses, with some that differ from step to step and by a phase."""
    step = len(past)
    evaluations = estimator.evaluations(step, itertools.count(1000 * step))
    values = [math.sin(9 * step + place + phase) for place in range(len(evaluations))] if losses is None else losses
    return estimator.update(step, evaluations, [torch.tensor(value) for value in values], 0.25, past)


def run_of(estimator: ZOEstimator, steps: int, *, phase: float = 0.0) -> list[Update]:
    past: list[Update] = []
    for _ in range(steps):
        past.append(take(estimator, past, phase=phase))
    return past


@every_estimator
def test_an_update_carries_all_that_replaying_needs(make: Callable[[], ZOEstimator]) -> None:
    estimator = make()
    past = run_of(estimator, 4)
    evaluations = estimator.evaluations(4, seeds())
    assert evaluations == make().evaluations(4, seeds()), "they follow from step and seeds"
    assert all(evaluation.validated() == evaluation for evaluation in evaluations)
    losses = [torch.tensor(1.0 + 0.5 * i) for i in range(len(evaluations))]
    update = estimator.update(4, evaluations, losses, 0.25, past)
    assert (update.step, update.zo_eps) == (4, estimator.zo_eps)
    assert update.lr * len(update.seeds) == 0.25
    assert update.evaluations == evaluations
    assert update.perturb_in_place is (estimator.perturb_in_place is not False), "None is left to the engine"
    assert set(update.seeds) <= {evaluation.seed for evaluation in evaluations}
    assert len(update.seeds) == len(update.projected_grads)
    assert update.losses == tuple(loss.item() for loss in losses)
    equal = estimator.update(0, evaluations, [torch.tensor(2.0)] * len(evaluations), 1.0, ())
    assert equal.projected_grads == (0.0,) * len(equal.seeds), "equal losses give no gradient"


@every_estimator
def test_an_update_follows_from_the_past_alone(make: Callable[[], ZOEstimator]) -> None:
    """What a resumed run begins with, what has seen other runs, and what has seen this one whole give equal updates."""
    estimator = make()
    whole = run_of(estimator, 12)
    for step in (0, 1, 5, 11):
        assert take(make(), whole[:step]) == whole[step]
        assert take(estimator, whole[:step]) == whole[step]
    run_of(estimator, 11, phase=1.0)
    assert take(estimator, whole[:11]) == whole[11]
    evaluations = whole[3].evaluations
    losses = [torch.tensor(9.0 * place) for place in range(len(evaluations))]  # which a longer past would clip
    later = make().update(3, evaluations, losses, 0.25, whole)  # a list that grows: what comes after the step is not read
    assert later == make().update(3, evaluations, losses, 0.25, whole[:3])


def test_mezo_divides_in_the_dtype_of_the_losses() -> None:
    estimator = MeZOSGD(lr=1.0, zo_eps=1e-3)
    evaluations = estimator.evaluations(0, seeds())
    plus, minus = torch.tensor(2.3456789), torch.tensor(2.3446789)
    grad = estimator.update(0, evaluations, [plus, minus], 1.0, ()).projected_grads[0]
    assert grad == ((plus - minus) / 2e-3).item()
    assert grad != (plus.item() - minus.item()) / 2e-3  # as Python's doubles would have it


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *((MeZOSGD, name, value) for name in ("lr", "zo_eps") for value in (0.0, -1.0, math.nan, math.inf)),
        *((MeZOSGD, "weight_decay", value) for value in (-1.0, math.nan, math.inf)),
        *((kind, "q", value) for kind in (MultiQueryRGE, FZOO) for value in (0, -1, 1.5)),
        (FZOO, "q", 1),
    ],
)
def test_numbers_out_of_range_are_refused(kind: Any, name: str, value: float) -> None:
    with pytest.raises(OptionError, match="at least 2" if (kind, value) == (FZOO, 1) else name):
        kind(**{"lr": 1.0, "zo_eps": 1.0, name: value})


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


def test_every_registered_class_has_a_name_of_its_own_which_the_journal_knows_it_by() -> None:
    classes = [kind for of_name in REGISTRY.values() for kind in of_name if kind is not None]
    assert len({kind.name for kind in classes}) == len(classes)
    made = {make().options["name"] for make in ESTIMATORS.values()}
    assert made <= {kind.name for kind in classes}
    assert set(REGISTRY) == set(EstimatorName)


@pytest.mark.parametrize("queries", [2, 5])
def test_the_registry_counts_the_forwards_that_a_step_takes(queries: int) -> None:
    for classes in REGISTRY.values():
        estimator = classes.multi_query(lr=1.0, zo_eps=1.0, q=queries)
        assert classes.multi_query.forwards(queries) == len(estimator.evaluations(0, seeds()))


@pytest.mark.parametrize(
    ("estimator", "seeds", "expected"),
    [
        (MeZOSGD(lr=1.0, zo_eps=0.5), [7], [(7, 1.0), (7, -1.0)]),
        (MultiQueryRGE(lr=1.0, zo_eps=0.5, q=2), [7, 8], [(7, 1.0), (7, -1.0), (8, 1.0), (8, -1.0)]),
        (MultiQueryRGE(lr=1.0, zo_eps=0.5, q=2), [5, 5, 6], [(5, 1.0), (5, -1.0), (6, 1.0), (6, -1.0)]),
        (FZOO(lr=1.0, zo_eps=0.5, q=3), [5, 6, 5, 9], [(5, 0.0), (5, 1.0), (6, 1.0), (9, 1.0)]),  # first the weights alone
    ],
    ids=["mezo", "queries", "a seed that comes up twice is one direction", "fzoo"],
)
def test_evaluations_are_sides_in_turn(estimator: ZOEstimator, seeds: list[int], expected: list[tuple[int, float]]) -> None:
    assert [evaluation[:2] for evaluation in estimator.evaluations(0, iter(seeds))] == expected


def test_fzoo_divides_by_the_standard_deviation_of_the_perturbed_losses() -> None:
    losses = [2.5, 3.0, 1.0, 2.0, 6.0]
    estimator = FZOO(lr=1.0, zo_eps=1e-3, q=4)
    assert (estimator.distribution, estimator.perturb_in_place) == (Distribution.RADEMACHER, False)
    update = take(estimator, (), losses)
    sides = torch.tensor(losses[1:], dtype=torch.float64)
    expected = (sides - 2.5) / sides.std(unbiased=False)
    torch.testing.assert_close(torch.tensor(update.projected_grads, dtype=torch.float64), expected, rtol=1e-15, atol=0)
    assert update.lr == 0.25 / 4
    assert take(FZOO(lr=1.0, zo_eps=1e-2, q=4), (), losses).projected_grads == update.projected_grads, "zo_eps is left out"
    flat, steep = ([2.0, *(2.0 + scale * change for change in (1.0, -0.5, 0.25, 0.0))] for scale in (2.0**-10, 2.0**10))
    assert take(estimator, (), flat).projected_grads == take(estimator, (), steep).projected_grads, "however steep it is"
    assert take(estimator, (), [2.0, 3.0, 3.0, 3.0, 3.0]).projected_grads == (0.0,) * 4, "equal losses give no step"


def test_evolution_strategies_weight_each_member_by_its_fitness() -> None:
    losses = [2.5, 3.0, 1.0, 2.0, 6.0, 6.0]
    made = {fitness: take(EvolutionStrategies(lr=1.0, zo_eps=0.1, q=3, fitness=fitness), (), losses) for fitness in Fitness}
    members = torch.tensor(losses, dtype=torch.float64)
    fitness = (members.mean() - members) / members.std(unbiased=False)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    # theta + lr / N sum_n F_n epsilon_n, of which each direction has two members
    expected = -(fitness.view(3, 2) * signs).sum(dim=1) / 2
    scaled, ranked = made[Fitness.SCALED], made[Fitness.RANKS]
    torch.testing.assert_close(torch.tensor(scaled.projected_grads, dtype=torch.float64), expected, rtol=1e-14, atol=0)
    ranks = [2 / 5, 3 / 5, 0.0, 1 / 5, 4.5 / 5, 4.5 / 5]
    assert ranked.projected_grads == pytest.approx([(ranks[i] - ranks[i + 1]) / 2 for i in (0, 2, 4)], rel=1e-15)
    assert scaled.lr == ranked.lr == 0.25 / 3
    assert scaled.losses == ranked.losses == tuple(losses)
    assert len({evaluation.seed for evaluation in scaled.evaluations}) == 3


def test_evolution_strategies_take_steps_of_one_length() -> None:
    for fitness in Fitness:
        estimator = EvolutionStrategies(lr=1.0, zo_eps=1e-3, q=2, fitness=fitness)
        near, far = (take(estimator, (), [scale * loss + 7 for loss in (1.0, 2.0, 4.0, 0.0)]) for scale in (0.25, 64.0))
        assert near.projected_grads == far.projected_grads != (0.0, 0.0)


def test_fzoo_gives_no_infinity_that_is_not_refused() -> None:
    estimator = FZOO(lr=1.0, zo_eps=1e-3, q=2)
    losses = [torch.tensor(value, dtype=torch.float64) for value in (1e300, 0.0, 1e-320)]
    update = estimator.update(0, estimator.evaluations(0, seeds()), losses, 1.0, ())
    assert update.projected_grads[0] == -math.inf
    with pytest.raises(NonFiniteLossError, match="step 0"):
        update.validated()
