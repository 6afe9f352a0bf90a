"""What every estimator promises: scalars in, a replayable update out.

And guards: nothing is done to a run that learns.
"""

import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import weights
from toy import ToyBlockModel

from zo2core import (
    FZOO,
    Clipped,
    Distribution,
    Engine,
    Evaluation,
    Guarded,
    GuardPolicy,
    MeZOSGD,
    MultiQueryRGE,
    Update,
    ZerothOrder,
)
from zo2core.errors import DivergenceError, NonFiniteLossError, OptionError, ZO2Warning
from zo2core.estimators.evolution import EvolutionStrategies
from zo2core.estimators.guard import best_step
from zo2core.estimators.registry import ESTIMATORS as REGISTRY
from zo2core.journal.records import decode, encode
from zo2core.protocols import ZOEstimator
from zo2core.ranges import EstimatorName, Fitness

EPS = 1e-3
PLAIN = MeZOSGD(lr=1e-5, zo_eps=EPS, weight_decay=0.1)
ESTIMATORS: dict[str, Callable[[], ZOEstimator]] = {
    "mezo": lambda: MeZOSGD(lr=1e-3, zo_eps=1e-3),
    "mezo, not in place": lambda: MeZOSGD(lr=1e-3, zo_eps=1e-3, perturb_in_place=False),
    "one query": lambda: MultiQueryRGE(lr=1e-3, zo_eps=1e-3, q=1),
    "four queries": lambda: MultiQueryRGE(lr=1e-3, zo_eps=1e-3, q=4),
    "four queries, not in place": lambda: MultiQueryRGE(
        lr=1e-3, zo_eps=1e-3, q=4, perturb_in_place=False
    ),
    "fzoo": lambda: FZOO(lr=1e-3, zo_eps=1e-3, q=4),
    "fzoo, eight directions": lambda: FZOO(lr=1e-3, zo_eps=1e-3),
    "evolution strategies": lambda: EvolutionStrategies(lr=1e-3, zo_eps=1e-3, q=4),
    "evolution strategies, by ranks": lambda: EvolutionStrategies(
        lr=1e-3, zo_eps=1e-3, q=4, fitness=Fitness.RANKS
    ),
    "clipped": lambda: Clipped(estimator=MeZOSGD(lr=1e-3, zo_eps=1e-3), medians=1.5),
    "guarded": lambda: Guarded(estimator=MeZOSGD(lr=1e-3, zo_eps=2.0)),
    "guarded and clipped": lambda: Guarded(
        estimator=Clipped(estimator=MeZOSGD(lr=1e-3, zo_eps=2.0), value=0.2)
    ),
}

every_estimator = pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS)


def seeds() -> Iterator[int]:
    return itertools.count(7)


def take(
    estimator: ZOEstimator,
    past: Sequence[Update],
    losses: Sequence[float] | None = None,
    *,
    phase: float = 0.0,
) -> Update:
    """The step that follows a run's updates; without losses, with some that differ from step to
    step and by a phase.
    """
    step = len(past)
    evaluations = estimator.evaluations(step, itertools.count(1000 * step))
    values = (
        [math.sin(9 * step + place + phase) for place in range(len(evaluations))]
        if losses is None
        else losses
    )
    return estimator.update(
        step, evaluations, [torch.tensor(value) for value in values], 0.25, past
    )


def taken(estimator: ZOEstimator, steps: int, *, phase: float = 0.0) -> list[Update]:
    past: list[Update] = []
    for _ in range(steps):
        past.append(take(estimator, past, phase=phase))
    return past


@every_estimator
def test_an_update_carries_all_that_replaying_needs(make: Callable[[], ZOEstimator]) -> None:
    estimator = make()
    past = taken(estimator, 4)
    evaluations = estimator.evaluations(4, seeds())
    assert evaluations == make().evaluations(4, seeds()), "they follow from step and seeds"
    assert all(evaluation.validated() == evaluation for evaluation in evaluations)
    losses = [torch.tensor(1.0 + 0.5 * i) for i in range(len(evaluations))]
    update = estimator.update(4, evaluations, losses, 0.25, past)
    assert (update.step, update.zo_eps) == (4, estimator.zo_eps)
    assert update.lr * len(update.seeds) == 0.25
    assert update.evaluations == evaluations
    assert update.perturb_in_place is (estimator.perturb_in_place is not False), (
        "None is left to the engine"
    )
    assert set(update.seeds) <= {evaluation.seed for evaluation in evaluations}
    assert len(update.seeds) == len(update.projected_grads)
    assert update.losses == tuple(loss.item() for loss in losses)
    equal = estimator.update(0, evaluations, [torch.tensor(2.0)] * len(evaluations), 1.0, ())
    assert equal.projected_grads == (0.0,) * len(equal.seeds), "equal losses give no gradient"


@every_estimator
def test_an_update_follows_from_the_past_alone(make: Callable[[], ZOEstimator]) -> None:
    """What a resumed run begins with, what has seen other runs, and what has seen this one whole
    give equal updates.
    """
    estimator = make()
    whole = taken(estimator, 12)
    for step in (0, 1, 5, 11):
        assert take(make(), whole[:step]) == whole[step]
        assert take(estimator, whole[:step]) == whole[step]
    taken(estimator, 11, phase=1.0)
    assert take(estimator, whole[:11]) == whole[11]
    evaluations = whole[3].evaluations
    # which a longer past would clip
    losses = [torch.tensor(9.0 * place) for place in range(len(evaluations))]
    # a list that grows: what comes after the step is not read
    later = make().update(3, evaluations, losses, 0.25, whole)
    assert later == make().update(3, evaluations, losses, 0.25, whole[:3])


def test_mezo_divides_in_the_dtype_of_the_losses() -> None:
    estimator = MeZOSGD(lr=1.0, zo_eps=1e-3)
    evaluations = estimator.evaluations(0, seeds())
    plus, minus = torch.tensor(2.3456789), torch.tensor(2.3446789)
    grad = estimator.update(0, evaluations, [plus, minus], 1.0, ()).projected_grads[0]
    assert grad == ((plus - minus) / 2e-3).item()
    assert grad != (plus.item() - minus.item()) / 2e-3  # as Python's doubles would have it


POSITIVE = (0.0, -1.0, math.nan, math.inf)
OUT_OF_RANGE: list[tuple[str, Any, dict[str, Any]]] = [
    *((name, MeZOSGD, {name: value}) for name in ("lr", "zo_eps") for value in POSITIVE),
    *(("weight_decay", MeZOSGD, {"weight_decay": value}) for value in POSITIVE[1:]),
    *(("q", kind, {"q": value}) for kind in (MultiQueryRGE, FZOO) for value in (0, -1, 1.5)),
    ("at least 2", FZOO, {"q": 1}),
    ("guard.window", GuardPolicy, {"window": 9}),
    ("guard.factor", GuardPolicy, {"factor": 0.5}),
    ("guard.refusals", GuardPolicy, {"refusals": 11}),
    *(("clip_grad", Clipped, {"value": value}) for value in (0.0, math.nan)),
    ("clip_median", Clipped, {"medians": 0.5}),
    ("clipping", Clipped, {}),
]


@pytest.mark.parametrize(("word", "kind", "options"), OUT_OF_RANGE)
def test_numbers_out_of_range_are_refused(word: str, kind: Any, options: dict[str, Any]) -> None:
    own = {GuardPolicy: {}, Clipped: {"estimator": PLAIN}}.get(kind, {"lr": 1.0, "zo_eps": 1.0})
    with pytest.raises(OptionError, match=word):
        kind(**{**own, **options})


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
        (
            MultiQueryRGE(lr=1.0, zo_eps=0.5, q=2),
            [7, 8],
            [(7, 1.0), (7, -1.0), (8, 1.0), (8, -1.0)],
        ),
        (
            MultiQueryRGE(lr=1.0, zo_eps=0.5, q=2),
            [5, 5, 6],
            [(5, 1.0), (5, -1.0), (6, 1.0), (6, -1.0)],
        ),
        # first the weights alone
        (FZOO(lr=1.0, zo_eps=0.5, q=3), [5, 6, 5, 9], [(5, 0.0), (5, 1.0), (6, 1.0), (9, 1.0)]),
    ],
    ids=["mezo", "queries", "a seed that comes up twice is one direction", "fzoo"],
)
def test_evaluations_are_sides_in_turn(
    estimator: ZOEstimator, seeds: list[int], expected: list[tuple[int, float]]
) -> None:
    assert [evaluation[:2] for evaluation in estimator.evaluations(0, iter(seeds))] == expected


def test_fzoo_divides_by_the_standard_deviation_of_the_perturbed_losses() -> None:
    losses = [2.5, 3.0, 1.0, 2.0, 6.0]
    estimator = FZOO(lr=1.0, zo_eps=1e-3, q=4)
    assert (estimator.distribution, estimator.perturb_in_place) == (Distribution.RADEMACHER, False)
    update = take(estimator, (), losses)
    sides = torch.tensor(losses[1:], dtype=torch.float64)
    expected = (sides - 2.5) / sides.std(unbiased=False)
    torch.testing.assert_close(
        torch.tensor(update.projected_grads, dtype=torch.float64), expected, rtol=1e-15, atol=0
    )
    assert update.lr == 0.25 / 4
    assert (
        take(FZOO(lr=1.0, zo_eps=1e-2, q=4), (), losses).projected_grads == update.projected_grads
    ), "zo_eps is left out"
    flat, steep = (
        [2.0, *(2.0 + scale * change for change in (1.0, -0.5, 0.25, 0.0))]
        for scale in (2.0**-10, 2.0**10)
    )
    assert (
        take(estimator, (), flat).projected_grads == take(estimator, (), steep).projected_grads
    ), "however steep it is"
    assert take(estimator, (), [2.0, 3.0, 3.0, 3.0, 3.0]).projected_grads == (0.0,) * 4, (
        "equal losses give no step"
    )


def test_evolution_strategies_weight_each_member_by_its_fitness() -> None:
    losses = [2.5, 3.0, 1.0, 2.0, 6.0, 6.0]
    made = {
        fitness: take(EvolutionStrategies(lr=1.0, zo_eps=0.1, q=3, fitness=fitness), (), losses)
        for fitness in Fitness
    }
    members = torch.tensor(losses, dtype=torch.float64)
    fitness = (members.mean() - members) / members.std(unbiased=False)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    # theta + lr / N sum_n F_n epsilon_n, of which each direction has two members
    expected = -(fitness.view(3, 2) * signs).sum(dim=1) / 2
    scaled, ranked = made[Fitness.SCALED], made[Fitness.RANKS]
    torch.testing.assert_close(
        torch.tensor(scaled.projected_grads, dtype=torch.float64), expected, rtol=1e-14, atol=0
    )
    ranks = [2 / 5, 3 / 5, 0.0, 1 / 5, 4.5 / 5, 4.5 / 5]
    assert ranked.projected_grads == pytest.approx(
        [(ranks[i] - ranks[i + 1]) / 2 for i in (0, 2, 4)], rel=1e-15
    )
    assert scaled.lr == ranked.lr == 0.25 / 3
    assert scaled.losses == ranked.losses == tuple(losses)
    assert len({evaluation.seed for evaluation in scaled.evaluations}) == 3


def test_evolution_strategies_take_steps_of_one_length() -> None:
    for fitness in Fitness:
        estimator = EvolutionStrategies(lr=1.0, zo_eps=1e-3, q=2, fitness=fitness)
        near, far = (
            take(estimator, (), [scale * loss + 7 for loss in (1.0, 2.0, 4.0, 0.0)])
            for scale in (0.25, 64.0)
        )
        assert near.projected_grads == far.projected_grads != (0.0, 0.0)


def test_fzoo_gives_no_infinity_that_is_not_refused() -> None:
    estimator = FZOO(lr=1.0, zo_eps=1e-3, q=2)
    losses = [torch.tensor(value, dtype=torch.float64) for value in (1e300, 0.0, 1e-320)]
    update = estimator.update(0, estimator.evaluations(0, seeds()), losses, 1.0, ())
    assert update.projected_grads[0] == -math.inf
    with pytest.raises(NonFiniteLossError, match="step 0"):
        update.validated()


# from progress in [0, 1) to loss and projected gradient
Process = Callable[[random.Random, float], tuple[float, float]]


def rare_rows(share: float, rows: int) -> Process:
    """Batches of rows that are easy but for a share of them, whose loss and gradient are hundreds
    of times larger.
    """

    def process(rng: random.Random, progress: float) -> tuple[float, float]:
        hard = sum(rng.random() < share for _ in range(rows)) / rows
        return 0.05 + 4 * hard * rng.lognormvariate(0, 0.3) + 0.05 * rng.random(), rng.gauss(
            0, 0.3 + 100 * hard
        )

    return process


def learning(rng: random.Random, progress: float) -> tuple[float, float]:
    left = math.exp(-6 * progress)
    return 0.3 + 5 * left + rng.gauss(0, 0.1 + 0.3 * left), rng.gauss(0, 3 + 20 * left)


def memorising(rng: random.Random, progress: float) -> tuple[float, float]:
    return 4 * math.exp(-20 * progress) * rng.lognormvariate(0, 1), rng.gauss(0, 10) * math.exp(
        -15 * progress
    )


LEARNING: dict[str, Process] = {  # and the share of its steps that may be taken for outliers
    "noise": lambda rng, _: (2 + rng.gauss(0, 0.05), rng.gauss(0, 3)),
    "learning": learning,
    "memorising": memorising,
    "wandering": lambda rng, progress: (
        3 + 0.3 * math.sin(20 * progress) + rng.gauss(0, 0.15),
        rng.gauss(0, 5),
    ),
    "exponential": lambda rng, _: (rng.expovariate(1), rng.gauss(0, 1) * rng.expovariate(1)),
    "most rows hard": rare_rows(0.6, 1),
    "one row in three hard": rare_rows(0.3, 1),
    "one row in ten hard": rare_rows(0.1, 1),
    "one row in thirty hard, four rows": rare_rows(0.03, 4),
}


def step_of(
    estimator: ZOEstimator, past: list[Update], loss: float, grad: float = 1.0, *, lr: float = 1e-5
) -> Update:
    """One more step, whose losses are around a level, and whose two-point estimate comes to
    this.
    """
    step = len(past)
    evaluations = estimator.evaluations(step, iter(range(2 * step, 2 * step + 9)))
    pair = [torch.tensor(loss + side * grad * EPS, dtype=torch.float64) for side in (1, -1)]
    return estimator.update(step, evaluations, pair * (len(evaluations) // 2), lr, past)


def run_of(estimator: ZOEstimator, process: Process, steps: int, seed: int = 0) -> list[Update]:
    rng, past = random.Random(seed), list[Update]()
    for step in range(steps):
        past.append(step_of(estimator, past, *process(rng, step / steps)))
    return past


@pytest.mark.parametrize("process", LEARNING.values(), ids=LEARNING)
@pytest.mark.filterwarnings("ignore::zo2core.errors.ZO2Warning")
def test_a_run_that_learns_is_the_unguarded_one_and_in_the_long_run_hardly_a_step_is_left_out(
    process: Process, request: pytest.FixtureRequest
) -> None:
    for seed in range(2):
        assert run_of(Guarded(estimator=PLAIN), process, 600, seed) == run_of(
            PLAIN, process, 600, seed
        )
    seeds, steps = (30, 3000) if request.config.getoption("--long") else (1, 1000)
    updates = [
        update
        for seed in range(seeds)
        for update in run_of(Guarded(estimator=PLAIN), process, steps, seed)
    ]
    assert sum(not any(update.projected_grads) for update in updates) <= len(updates) / 5000


@pytest.mark.parametrize("share", [0.01, 0.003])
@pytest.mark.filterwarnings("ignore::zo2core.errors.ZO2Warning")
def test_rows_too_rare_to_be_known_do_not_stop_a_run(share: float) -> None:
    guarded = run_of(Guarded(estimator=PLAIN), rare_rows(share, 1), 1000)
    assert sum(not any(update.projected_grads) for update in guarded) <= 0.005 * len(guarded)


def noisy(steps: int, loss: float = 2.0) -> list[Update]:
    return run_of(PLAIN, lambda rng, _: (loss + rng.gauss(0, 0.05), rng.gauss(0, 3)), steps)


@pytest.mark.parametrize(
    ("loss", "grad", "word"), [(9.0, 1.0, "loss 9"), (2.0, 500.0, "zo_eps apart")]
)
def test_a_step_far_outside_the_range_is_not_applied_and_keeps_its_losses(
    loss: float, grad: float, word: str
) -> None:
    past = noisy(40)
    with pytest.warns(ZO2Warning, match=f"step 40 is not applied: .*{word}"):
        update = step_of(Guarded(estimator=PLAIN), past, loss, grad)
    plain = step_of(PLAIN, past, loss, grad)
    assert any(plain.projected_grads)
    assert update == replace(
        plain, projected_grads=(0.0,), weight_decay=0.0, perturb_in_place=False
    )
    assert update.losses == plain.losses


@pytest.mark.filterwarnings("ignore::zo2core.errors.ZO2Warning")
def test_a_run_that_stops_at_once_counts_the_steps_that_it_took() -> None:
    """Of five steps, none can be applied: their updates are larger than weights are."""
    past: list[Update] = []
    for _ in range(4):
        past.append(step_of(Guarded(estimator=PLAIN), past, 2.0, lr=10.0))
    with pytest.raises(
        DivergenceError, match=r"step 4: found 5 of the last 5 steps cannot .*expected fewer than 5"
    ):
        step_of(Guarded(estimator=PLAIN), past, 2.0, lr=10.0)


@pytest.mark.filterwarnings("ignore::zo2core.errors.ZO2Warning")
def test_what_is_far_outside_the_range_is_left_out_in_each_direction_once_there_is_a_range() -> (
    None
):
    estimator = Guarded(estimator=PLAIN)
    assert any(step_of(estimator, noisy(19), 9.0).projected_grads)
    both = Guarded(estimator=MultiQueryRGE(lr=1e-5, zo_eps=EPS, q=2))
    assert step_of(both, noisy(40), 9.0).projected_grads == (0.0, 0.0)
    past = noisy(30)
    for _ in range(9):  # in 16 bits many losses are equal, which is no refusal
        past.append(step_of(PLAIN, past, 2.0, grad=0.0))
    assert step_of(estimator, past, 9.0).projected_grads == (0.0,)


def test_a_jump_that_lasts_stops_the_run_at_its_fifth_step() -> None:
    estimator, past = Guarded(estimator=PLAIN), noisy(43)
    for _ in range(4):
        with pytest.warns(ZO2Warning, match="not applied"):
            past.append(step_of(estimator, past, 9.0))
    with pytest.raises(
        DivergenceError, match="step 47: found 5 of the last 10 steps cannot be applied"
    ) as info:
        step_of(estimator, past, 9.0)
    assert info.value.best_step == best_step(past) < 43


def test_steps_that_were_not_applied_count_among_the_last_ten_alone() -> None:
    estimator, past = Guarded(estimator=PLAIN), noisy(43)
    for loss in (*[9.0] * 4, *[2.0] * 6, 9.0):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            past.append(step_of(estimator, past, loss))
        assert ["not applied" in str(each.message) for each in warned] == [True] * (loss > 2)


def test_a_run_that_lost_what_it_had_learned_stops_and_names_its_best_step() -> None:
    estimator, past, rng = Guarded(estimator=PLAIN), run_of(PLAIN, learning, 400), random.Random(1)

    def forget() -> None:
        for step in range(300):  # back to a coin, too slowly for a single step to be an outlier
            past.append(
                step_of(
                    estimator,
                    past,
                    0.3 + 4 * min(step / 200, 1) + rng.gauss(0, 0.1),
                    rng.gauss(0, 3),
                )
            )

    with pytest.raises(
        DivergenceError, match=r"median loss of .*the best ten steps had 0\."
    ) as info:
        forget()
    assert 2.0 < past[-1].losses[0] < 3.5
    assert 300 < info.value.best_step < 410
    assert past[info.value.best_step].losses[0] < 0.5


def test_a_run_that_was_ruined_at_once_stops_within_twenty_steps_and_names_the_base() -> None:
    estimator, past, rng = Guarded(estimator=PLAIN), list[Update](), random.Random(0)

    def go_on() -> None:
        past.append(step_of(estimator, past, 4.0, 30.0, lr=1e-3))
        while len(past) < 21:
            past.append(step_of(estimator, past, 40 + 5 * rng.random(), rng.gauss(0, 90), lr=1e-3))

    with pytest.raises(DivergenceError, match="since the run began with 4") as info:
        go_on()
    assert info.value.best_step == 0


def test_an_update_larger_than_weights_are_is_not_applied() -> None:
    for queries, lands in ((1, True), (4, False)):  # 0.6 each, and together 1.2 for each weight
        estimator = Guarded(estimator=MultiQueryRGE(lr=1e-5, zo_eps=EPS, q=queries))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            update = step_of(estimator, [], 4.0, 60.0, lr=1e-2 * queries)
        assert any(update.projected_grads) == lands
        assert [str(each.message) for each in warned] == (
            []
            if lands
            else [
                "step 0 is not applied: an update that moves each weight by 1.2, and most weights "
                "are below 1"
            ]
        )


def test_a_model_that_each_step_moved_a_little_too_far_is_ruined_whatever_its_loss() -> None:
    """The loss of a coin can be lower than that of a model that is wrong: the best step is none of
    the coin's.
    """
    estimator, past = Guarded(estimator=PLAIN), list[Update]()

    def go_on() -> None:
        while len(past) < 50:
            past.append(step_of(estimator, past, 4.0 if len(past) < 5 else 2.4, 40.0, lr=1e-2))

    with pytest.raises(
        DivergenceError, match=r"step 10: found each weight moved by 1\.3 in all"
    ) as info:
        go_on()
    assert past[info.value.best_step].losses[0] > 3.9


def test_the_best_step_is_neither_a_lucky_batch_nor_behind_a_leap() -> None:
    losses = [4.0] * 20 + [0.5] + [4.0] * 10 + [2.0 - step / 100 for step in range(13)] + [50.0] * 8
    past = list[Update]()
    for loss in losses:
        past.append(step_of(PLAIN, past, loss))
    assert best_step(past) == losses.index(1.88)


@pytest.mark.filterwarnings("ignore::zo2core.errors.ZO2Warning")
def test_what_a_guard_does_follows_from_the_journal() -> None:
    """An estimator made anew, with the journal read back, goes on with the same bits."""

    def process(rng: random.Random, progress: float) -> tuple[float, float]:
        leap = 60.0 if progress > 0.2 and rng.random() < 0.02 else 0.0
        return learning(rng, progress)[0] + leap, rng.gauss(0, 3)

    whole = run_of(Guarded(estimator=Clipped(estimator=PLAIN, medians=1.5)), process, 200)
    assert any(not any(update.projected_grads) for update in whole)
    rng, past = random.Random(0), list[Update]()
    for step in range(200):
        estimator = Guarded(estimator=Clipped(estimator=PLAIN, medians=1.5))
        read_back = [step for step in map(decode, map(encode, past)) if isinstance(step, Update)]
        past.append(step_of(estimator, read_back, *process(rng, step / 200)))
    assert past == whole


def test_an_estimator_that_has_seen_another_run_judges_this_one_alone() -> None:
    shared = Guarded(estimator=PLAIN)
    calm, wild = noisy(40), [replace(update, lr=0.3) for update in noisy(40)]
    with pytest.raises(DivergenceError, match="in all"):
        step_of(shared, wild, 2.0)
    assert step_of(shared, calm, 2.0) == step_of(PLAIN, calm, 2.0)


def test_a_step_that_was_not_applied_leaves_every_bit_as_it_was(tmp_path: Path) -> None:
    """Whatever the wrapped estimator would have done: decay, or walk and round."""
    model = ToyBlockModel(
        20, 8, 2, tied=True, dtype=torch.bfloat16, file=tmp_path / "toy.safetensors"
    )
    inner = MeZOSGD(lr=1e-4, zo_eps=1e-2, weight_decay=0.5, perturb_in_place=True)
    usual, strange = (
        {"input_ids": ids, "labels": ids}
        for ids in (torch.tensor([[19, 10, 6]]), torch.tensor([[13, 5, 0]]))
    )
    with Engine(
        model, ZerothOrder(Guarded(estimator=inner, policy=GuardPolicy(factor=1.0)))
    ) as engine:

        def step_changes_weights(batch: dict[str, torch.Tensor]) -> bool:
            before = weights(engine)
            engine.step(batch)
            return any(
                not torch.equal(before[name], tensor) for name, tensor in engine.parameters_now()
            )

        assert all(step_changes_weights(usual) for _ in range(20))
        with pytest.warns(ZO2Warning, match="step 20 is not applied"):
            assert not step_changes_weights(strange)


def test_projected_gradients_are_cut_by_value_and_by_their_running_median() -> None:
    by_value = Clipped(estimator=PLAIN, value=2.0)
    assert [step_of(by_value, [], 3.0, grad).projected_grads for grad in (9.0, -9.0)] == [
        (2.0,),
        (-2.0,),
    ]
    assert step_of(by_value, [], 3.0, 1.0) == step_of(PLAIN, [], 3.0, 1.0)
    clipped, past = Clipped(estimator=PLAIN, medians=3.0), list[Update]()
    for step in range(60):
        past.append(step_of(PLAIN, past, 3.0, 100.0 if step < 10 else 2.0))
    # no median yet
    assert step_of(clipped, past[:9], 3.0, 1e6) == step_of(PLAIN, past[:9], 3.0, 1e6)
    assert step_of(clipped, past, 3.0, -90.0).projected_grads == pytest.approx((-6.0,))
    assert step_of(clipped, past, 3.0, 5.0) == step_of(PLAIN, past, 3.0, 5.0)
    both = Clipped(estimator=PLAIN, medians=3.0, value=4.0)
    assert step_of(both, past, 3.0, -90.0).projected_grads == (-4.0,)
    past = [
        replace(update, projected_grads=(0.0,)) if update.step % 2 else update
        for update in noisy(20)
    ]
    # those that were not have no part in it
    applied = sorted(abs(update.projected_grads[0]) for update in past[::2])
    median = (applied[4] + applied[5]) / 2
    assert step_of(
        Clipped(estimator=PLAIN, medians=1.0), past, 2.0, 1e3
    ).projected_grads == pytest.approx((median,))


def test_options_say_what_wraps_an_estimator() -> None:
    wrapped = Guarded(estimator=Clipped(estimator=PLAIN, value=2, medians=3))
    assert wrapped.options == {
        **PLAIN.options,
        "clip_grad": 2.0,
        "clip_median": 3.0,
        "guard": {"window": 50, "factor": 5.0, "refusals": 5},
    }
    assert (wrapped.lr, wrapped.zo_eps, wrapped.perturb_in_place) == (
        PLAIN.lr,
        PLAIN.zo_eps,
        PLAIN.perturb_in_place,
    )
    assert wrapped.evaluations(0, iter([7])) == (Evaluation(7, 1.0), Evaluation(7, -1.0))
