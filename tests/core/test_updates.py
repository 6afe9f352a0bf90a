"""Updates: what programs they compile to, long replays of them, and whether they change the
weights.
"""

import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import assert_same_outcome, kernels_in, memory, outcome, weights, zeroth_order
from models import make_batch, save_model, small_config
from parity import assert_same_bits
from toy import ToyBlockModel
from updates import update_of

from zo2adapters import open_checkpoint
from zo2core import (
    BlockLayout,
    Distribution,
    Engine,
    Journal,
    MemoryPolicy,
    MeZOSGD,
    MultiQueryRGE,
    NoiseGenerator,
    PhiloxNoise,
    SequentialNoise,
    Update,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.estimators.noise import GENERATOR, STREAM
from zo2core.kernels.dispatch import Kernel
from zo2core.kernels.programs import compile_moves, compile_updates, seeds_of, split_updates
from zo2core.planning.memory import HostPlan
from zo2core.protocols import SEEDS_IN_TURN
from zo2core.sweep.visitor import EVERY, SAMPLED, UpdateLoss
from zo2core.types import Descend, Evaluation, ParameterSpec, Perturb, Program


def update(seeds: tuple[int, ...], *, weight_decay: float = 0.0, in_place: bool = True) -> Update:
    return update_of(0, seeds, lr=1e-2, weight_decay=weight_decay, perturb_in_place=in_place)


def moves(program: Program) -> list[tuple[int, float]]:
    """Seed and shift, or projected gradient, of each instruction."""
    scalars = [
        move.shift if isinstance(move, Perturb) else move.projected_grad
        for move in program.instructions
    ]
    return [
        (program.seeds[move.direction], scalar)
        for move, scalar in zip(program.instructions, scalars, strict=True)
    ]


def test_a_step_is_its_walk_through_the_evaluations_and_then_its_descent() -> None:
    program = compile_updates([update((5, 6))])[False]
    walk = [(5, 1.0), (5, -2.0), (5, 1.0), (6, 1.0), (6, -2.0), (6, 1.0)]
    assert moves(program) == [*walk, (5, 0.1), (6, 0.2)]
    assert moves(compile_updates([update((5, 6), in_place=False)])[False]) == [(5, 0.1), (6, 0.2)]
    updates = [update((5, 6), in_place=False), update((7, 5), in_place=False)]
    program = compile_updates(updates, Evaluation(6, -0.5), 1e-4)[False]
    assert program.seeds == (5, 6, 7), "updates that follow each other name each direction once"
    assert moves(program) == [(5, 0.1), (6, 0.2), (7, 0.1), (5, 0.2)]
    assert program.then == Perturb(1, -0.5, 1e-4)
    assert compile_updates((), Evaluation(9, 1.0), 1e-4)[True].seeds == (9,)
    unrounded = Update(
        0, (Evaluation(8, 0.0), Evaluation(7, 1.0)), (5,), (0.1,), 1e-2, 1e-3, 0.0, True, (1.0, 1.0)
    )
    assert seeds_of(update((5,))) == (5,)
    assert seeds_of(unrounded) == (7, 5), "an evaluation without a shift moves nothing"


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
def test_moves_lead_to_the_evaluation(
    before: Evaluation | None, after: Evaluation | None, expected: list[tuple[int, float]]
) -> None:
    assert moves(compile_moves(before, after, 1e-3)) == expected


@pytest.mark.parametrize("distribution", [None, Distribution.GAUSSIAN])
@pytest.mark.parametrize("blocks", [1, 5])
def test_a_sweep_compiles_its_programs_once_for_all_segments(
    blocks: int, distribution: Distribution | None, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", small_config("llama", num_hidden_layers=blocks))
    programs: dict[int, Program] = {}

    def record(kernel: Kernel, theta: torch.Tensor, program: Program, *arguments: Any) -> None:
        programs[id(program)] = program  # kept, so that no other one gets its address
        kernel(theta, program, *arguments)

    noise = None if distribution is None else PhiloxNoise(distribution)
    estimator = MeZOSGD(lr=1e-3, zo_eps=1e-3, weight_decay=0.1)
    with (
        kernels_in(record),
        Engine(open_checkpoint(base), ZerothOrder(estimator, noise=noise)) as engine,
    ):
        engine.step(make_batch(40, [5]))
        programs.clear()
        engine.step(make_batch(40, [5]))
    replays = 2  # with weight decay and without
    # To the first evaluation, which counter-based noise does in the replay, and from there to the
    # second.
    in_work_buffer = 2 if distribution is None else 1
    assert len(programs) == replays + in_work_buffer
    assert all(len(program.tables) <= 1 for program in programs.values())


UPDATES = 3 * SEEDS_IN_TURN  # more than are held at a time


def drawn_update(step: int, rng: random.Random, probes: int) -> Update:
    seeds = [rng.randrange(2**40) for _ in range(probes)]
    grads = tuple(rng.gauss(0, 1) for _ in seeds)
    return update_of(step, seeds, projected_grads=grads, lr=1e-3, weight_decay=0.1)


def toy(folder: Path) -> ToyBlockModel:
    return ToyBlockModel(11, 6, 3, tied=False, dtype=torch.float32, file=folder / "toy.safetensors")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Of a run of the toy's, in steps that nobody computed."""
    path = tmp_path / "journal.jsonl"
    written = Journal(path)
    with Engine(toy(tmp_path), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3)), journal=written):
        rng = random.Random(0)
        for step in range(UPDATES):
            written.append(drawn_update(step, rng, probes=1 + (step % 50 == 7) * 3))
    return path


class Watched(SequentialNoise):
    """Counts what it holds and draws."""

    def __init__(self, layouts: Collection[BlockLayout], memory: int) -> None:
        super().__init__(tuple(layouts), memory=memory)
        self.most_streams = self.most_generators = 0

    def fill(self, *args: Any, **kwargs: Any) -> None:
        super().fill(*args, **kwargs)
        streams = [*self._streams.values(), *self._recent.values()]
        self.most_streams = max(self.most_streams, len(streams))
        self.most_generators = max(
            self.most_generators, sum(1 + len(stream.copies) for stream in streams)
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("kept", [0, 100])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_long_replay_holds_a_bounded_number_of_generators(
    journal: Path, tmp_path: Path, kept: int, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy(tmp_path)
    with Engine(model, journal=journal) as engine:
        expected = weights(engine)
    model = toy(tmp_path)
    # of a seed: its own, the segment's start, and two jumps, as the head is registered before the
    # blocks
    generators = 4
    noise = Watched(model.layouts, memory=kept * (STREAM + generators * GENERATOR))
    memory = MemoryPolicy(host=HostPlan((), 0, buckets=1 if streamed else None, keep_noise=True))
    drawn, normal_ = 0, torch.Tensor.normal_

    def counted(self: torch.Tensor, **options: Any) -> torch.Tensor:
        nonlocal drawn
        drawn += self.numel()
        return normal_(self, **options)

    with Engine(model, ZerothOrder(None, noise=noise), journal=journal, memory=memory) as engine:
        seeds = {seed for each in engine.journal.updates for seed in each.seeds}
        monkeypatch.setattr(torch.Tensor, "normal_", counted)
        found = weights(engine)
    for name, tensor in expected.items():
        assert_same_bits(name, found[name], tensor)
    most = kept + 2 * SEEDS_IN_TURN
    assert noise.most_streams == most < len(seeds)
    assert noise.most_generators <= generators * most
    # Whoever is not kept starts over at each segment, not at each parameter.
    specs = sorted(
        (spec for layout in model.layouts for spec in layout.parameters),
        key=lambda spec: spec.index,
    )
    before = {spec.name: sum(each.numel for each in specs[:at]) for at, spec in enumerate(specs)}
    own = sum(spec.numel for spec in specs)
    skipped = sum(min(before[spec.name] for spec in layout.parameters) for layout in model.layouts)
    assert drawn <= len(seeds) * (own + skipped)


def test_an_engines_generators_fit_into_what_the_plan_leaves(
    journal: Path, tmp_path: Path, process_memory: int
) -> None:
    asked = process_memory + (128 << 20)
    with Engine(
        toy(tmp_path), journal=journal, memory=MemoryPolicy(host=asked, activations=80 << 20)
    ) as engine:
        assert engine.host_plan is not None
        assert 0 <= engine.host_plan.spare < 24 << 20
        maker: Any = engine._run.segments.room_maker(engine._run.device)
        assert maker.args == (asked,), "no more may be resident"
        noise = engine._run.directions.noise
        assert isinstance(noise, SequentialNoise)
        assert noise._most == engine.host_plan.spare // (STREAM + 4 * GENERATOR)


@pytest.mark.parametrize("most", [1, 3, 4, 100])
def test_updates_are_split_into_parts_in_order(most: int) -> None:
    rng = random.Random(1)
    updates = [
        drawn_update(step, rng, probes) for step, probes in enumerate([1, 1, 3, 1, 5, 1, 1, 1])
    ]
    parts = list(split_updates(updates, most))
    assert [each for part in parts for each in part] == updates
    for part in parts:
        assert len(part) == 1 or sum(len(seeds_of(each)) for each in part) <= most
    assert [list(part) for part in split_updates([], most)] == [[]]


BATCH = make_batch(40, [9, 5])
NOISES: dict[str, NoiseGenerator | None] = {
    "mezo": None,
    "gaussian": PhiloxNoise(),
    "rademacher": PhiloxNoise(Distribution.RADEMACHER),
}
every_noise = pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)


def sampled(lr: float, *grads: float, step: int = 0) -> Update:
    return update_of(step, range(len(grads)), projected_grads=grads, lr=lr, perturb_in_place=False)


@pytest.mark.parametrize("buckets", [None, 2], ids=["resident", "streamed"])
@every_noise
def test_the_share_is_of_the_weights_that_change(
    noise: NoiseGenerator | None, buckets: int | None, tmp_path: Path
) -> None:
    """Of all weights, where the sample is of a few hundred: in bfloat16, at steps of which about
    half lands.
    """
    batch = dict.fromkeys(("input_ids", "labels"), BATCH["input_ids"])

    def engine_of(lr: float) -> Engine:
        model = ToyBlockModel(
            97, 48, 4, tied=True, dtype=torch.bfloat16, file=tmp_path / f"{lr}.safetensors"
        )
        estimator = MeZOSGD(lr=lr, zo_eps=0.1, perturb_in_place=False)
        return zeroth_order(model, estimator, noise=noise, memory=memory(buckets, budget=2**28))

    with engine_of(1.0) as engine:
        grad = abs(engine.step(batch).projected_grads[0])
    with engine_of(5e-4 / grad) as engine:
        before = weights(engine)
        share_applied = engine.step(batch).share_applied
        changed = [
            (tensor != before[name]).sum().item() for name, tensor in engine.parameters_now()
        ]
    share = sum(changed) / sum(tensor.numel() for tensor in before.values())
    assert 0.2 < share < 0.9
    assert share_applied == pytest.approx(share, abs=0.07)


@pytest.mark.parametrize(
    ("dtype", "lr", "least", "most"),
    [
        ("bfloat16", 1e-2, 0.9, 1.0),
        ("bfloat16", 1e-6, 0.0, 0.2),
        ("float32", 1e-2, 0.9, 1.0),
        ("float32", 1e-6, 0.9, 1.0),
    ],
)
def test_small_steps_land_in_float32_alone(
    dtype: str, lr: float, least: float, most: float, base: Path
) -> None:
    with Engine(
        open_checkpoint(base, dtype=dtype), ZerothOrder(MeZOSGD(lr=lr, zo_eps=1e-2))
    ) as engine:
        share_applied = engine.step(BATCH).share_applied
    assert share_applied is not None
    assert least <= share_applied <= most


@pytest.mark.few(2)
@every_noise
def test_it_is_looked_at_once_in_a_hundred_steps(noise: NoiseGenerator | None, base: Path) -> None:
    with Engine(
        open_checkpoint(base), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3), noise=noise)
    ) as engine:
        looked = [step for step in range(EVERY + 3) if engine.step(BATCH).share_applied is not None]
    assert looked == [0, EVERY]


def test_a_run_that_goes_on_looks_at_its_first_step(base: Path, tmp_path: Path) -> None:
    """Also where blocks stream, and have updates to catch up with."""
    options: dict[str, Any] = {"journal": tmp_path / "run" / "j", "memory": memory(2, budget=2**28)}
    options["write_back"] = WriteBackPolicy(directory=tmp_path / "run", every=None)
    share_applied = []
    for _ in range(2):
        with zeroth_order(
            open_checkpoint(base), MeZOSGD(lr=1e-3, zo_eps=1e-3), **options
        ) as engine:
            share_applied += [engine.step(BATCH).share_applied for _ in range(3)]
    assert [share is not None for share in share_applied] == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]


def sample(update_loss: UpdateLoss, segment: int, store: Sequence[torch.Tensor]) -> None:
    specs = [
        ParameterSpec(str(place), tuple(theta.shape), theta.dtype, place, decays=True)
        for place, theta in enumerate(store)
    ]
    update_loss.sample(segment, store, specs)


def test_a_step_without_update_says_nothing_and_the_next_one_is_looked_at() -> None:
    update_loss, store = UpdateLoss(SequentialNoise([])), [torch.ones(100)]
    for step, grad in enumerate((0.0, 1.0, 1.0)):
        update_loss.begin(step)
        sample(update_loss, 0, store)
        share = update_loss.share_applied(sampled(0.1, grad, step=step))
        assert share == (None, 1.0, None)[step]


def test_the_sample_is_spread_over_every_segment_and_is_small() -> None:
    """A parameter that stays where it is counts by its size, wherever it lies."""
    large = torch.full((10 * SAMPLED,), 1e9)
    for still in range(3):
        store = [
            large if place == still else torch.full((10 * SAMPLED,), 1e-3) for place in range(3)
        ]
        update_loss = UpdateLoss(PhiloxNoise(Distribution.RADEMACHER))
        update_loss.begin(0)
        sample(update_loss, 0, store)
        sample(update_loss, 1, [torch.full((20 * SAMPLED,), 1e-3)])
        assert update_loss.share_applied(sampled(0.1, 1.0)) == pytest.approx(1 - 1 / 6, abs=0.01)


@pytest.mark.parametrize("queries", [1, 4])
def test_each_direction_rounds_on_its_own_and_dtypes_count_together(queries: int) -> None:
    """Nine tenths of half the distance to the next smaller bfloat16: however many follow each
    other, each is lost.
    """
    update_loss = UpdateLoss(PhiloxNoise(Distribution.RADEMACHER))
    update_loss.begin(0)
    sample(
        update_loss,
        0,
        [torch.full((1000,), 1.0, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)],
    )
    share = update_loss.share_applied(
        sampled(2.0**-9, *(0.9 + 0.001 * 2**query for query in range(queries)))
    )
    assert share == pytest.approx(0.5, abs=0.01)


def test_looking_changes_no_bit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def looked() -> Any:
        method = ZerothOrder(MultiQueryRGE(lr=1e-3, zo_eps=1e-3, q=2))
        return outcome(Engine(open_checkpoint(base, dtype="bfloat16"), method), [BATCH] * 4)

    looking = looked()
    monkeypatch.setattr(UpdateLoss, "begin", lambda self, step: None)
    assert_same_outcome(looked(), looking)
