"""Updates compiled to programs: what they do, in which order, and how often a sweep compiles them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import make_batch, save_model, small_config

import zo2core.kernels
import zo2core.sweep.perturbers
from zo2adapters import open_checkpoint
from zo2core import Distribution, Engine, MeZOSGD, PhiloxNoise, ZerothOrder
from zo2core.kernels.programs import compile_moves, compile_updates, seeds_of
from zo2core.types import Descend, Evaluation, Perturb, Program, Update


def update(seeds: tuple[int, ...], *, weight_decay: float = 0.0, in_place: bool = True) -> Update:
    evaluations = tuple(Evaluation(seed, shift) for seed in seeds for shift in (1.0, -1.0))
    grads = tuple(0.1 * (i + 1) for i in range(len(seeds)))
    return Update(0, evaluations, seeds, grads, 1e-2, 1e-3, weight_decay, in_place, (1.0,) * len(evaluations))


def moves(program: Program) -> list[tuple[int, float]]:
    """Seed and shift, or projected gradient, of each instruction."""
    scalars = [move.shift if isinstance(move, Perturb) else move.projected_grad for move in program.instructions]
    return [(program.seeds[move.direction], scalar) for move, scalar in zip(program.instructions, scalars, strict=True)]


def test_a_step_is_its_walk_through_the_evaluations_and_then_its_descent() -> None:
    program = compile_updates([update((5, 6))])[False]
    walk = [(5, 1.0), (5, -2.0), (5, 1.0), (6, 1.0), (6, -2.0), (6, 1.0)]
    assert moves(program) == [*walk, (5, 0.1), (6, 0.2)]
    assert moves(compile_updates([update((5, 6), in_place=False)])[False]) == [(5, 0.1), (6, 0.2)]


def test_updates_that_follow_each_other_name_each_direction_once() -> None:
    updates = [update((5, 6), in_place=False), update((7, 5), in_place=False)]
    program = compile_updates(updates, Evaluation(6, -0.5), 1e-4)[False]
    assert program.seeds == (5, 6, 7)
    assert moves(program) == [(5, 0.1), (6, 0.2), (7, 0.1), (5, 0.2)]
    assert program.then == Perturb(1, -0.5, 1e-4)
    assert compile_updates((), Evaluation(9, 1.0), 1e-4)[True].seeds == (9,)


def test_weight_decay_applies_to_the_parameters_that_decay() -> None:
    programs = compile_updates([update((5,)), update((6,), weight_decay=0.3)])
    decays = {
        decays: [move.weight_decay for move in program.instructions if isinstance(move, Descend)]
        for decays, program in programs.items()
    }
    assert decays == {False: [0.0, 0.0], True: [0.0, 0.3]}
    without = compile_updates([update((5,))])
    assert without[True] is without[False], "nothing is coded twice where nothing decays"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, None, []),
        (None, Evaluation(5, 1.0), [(5, 1.0)]),
        (Evaluation(5, 1.0), Evaluation(5, -1.0), [(5, -2.0)]),
        (Evaluation(5, -1.0), Evaluation(6, 1.0), [(5, 1.0), (6, 1.0)]),
        (Evaluation(5, 1.0), Evaluation(5, 1.0), []),
        (Evaluation(5, 0.0), Evaluation(6, 1.0), [(6, 1.0)]),
        (Evaluation(5, 1.0), None, [(5, -1.0)]),
    ],
)
def test_moves_lead_from_one_evaluation_to_the_next(
    before: Evaluation | None, after: Evaluation | None, expected: list[tuple[int, float]]
) -> None:
    assert moves(compile_moves(before, after, 1e-3)) == expected


def test_an_updates_seeds_are_those_of_its_walk_and_of_its_probes() -> None:
    extra = update((5,))
    unrounded = Update(0, (Evaluation(8, 0.0), Evaluation(7, 1.0)), (5,), (0.1,), 1e-2, 1e-3, 0.0, True, (1.0, 1.0))
    assert seeds_of(extra) == (5,)
    assert seeds_of(unrounded) == (7, 5), "an evaluation without a shift moves nothing"


@pytest.mark.parametrize("distribution", [None, Distribution.GAUSSIAN])
@pytest.mark.parametrize("blocks", [1, 5])
def test_a_sweep_compiles_its_programs_once_for_all_segments(
    blocks: int, distribution: Distribution | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_model(tmp_path / "base", small_config("llama", num_hidden_layers=blocks))
    programs: dict[int, Program] = {}

    def record(name: str) -> Any:
        kernel = getattr(zo2core.kernels, name)

        def recorded(theta: torch.Tensor, program: Program, *arguments: Any, **options: Any) -> None:
            programs[id(program)] = program  # kept, so that no other one gets its address
            kernel(theta, program, *arguments, **options)

        return recorded

    monkeypatch.setattr(zo2core.sweep.perturbers, "apply_drawing", record("apply_drawing"))
    monkeypatch.setattr(zo2core.sweep.perturbers, "apply", record("apply"))
    noise = None if distribution is None else PhiloxNoise(distribution)
    estimator = MeZOSGD(lr=1e-3, zo_eps=1e-3, weight_decay=0.1)
    with Engine(open_checkpoint(base), ZerothOrder(estimator, noise=noise)) as engine:
        engine.step(make_batch(40, [5]))
        programs.clear()
        engine.step(make_batch(40, [5]))
    replays = 2  # with weight decay and without
    in_work_buffer = 0 if distribution is None else 1  # from the first evaluation to the second
    assert len(programs) == replays + in_work_buffer
    assert all(len(program.tables) <= 1 for program in programs.values())
