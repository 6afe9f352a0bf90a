"""The kernels: compiled code, Triton and the reference give the same bits, and noise is what its
notes say.
"""

import _thread
import math
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import needs_threads

from zo2core.errors import ZO2Warning
from zo2core.kernels import Draw, dispatch, form, native, parallel, reference
from zo2core.kernels.programs import table
from zo2core.types import Descend, Distribution, Perturb, Program

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
compiled = pytest.mark.skipif(native.library() is None, reason="the compiled kernels are not built")

# 0, -0, subnormal numbers, the largest, what overflows, what is not a number, ties of 16-bit
# roundings.
SPECIAL = [
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    6e-8,
    5.9e-8,
    -6.1e-5,
    6.2e-5,
    65504.0,
    65519.9,
    65520.0,
    -65536.0,
    3.3e38,
    3.4e38,
]
SPECIAL += [
    math.inf,
    -math.inf,
    math.nan,
    1 + 2**-9,
    1 + 3 * 2**-9,
    1 + 2**-12,
    1 + 3 * 2**-12,
    2**-25,
    3 * 2**-26,
]

scalars = st.sampled_from([0.0, 1e-3, -0.7, 1.0, 3e-8, 1e30, -2e-39])
seeds = st.sampled_from([0, 1, 999_999_999, 2**32, 2**63 - 1])
starts = st.sampled_from([0, 1, 255, 256, 1000, 1024, 2**31 - 7, 2**34 - 300])
lengths = st.one_of(st.integers(1, 70), st.integers(1000, 1100), st.sampled_from([2048, 5000]))


def test_the_compiled_kernels_are_there_where_a_compiler_is() -> None:
    """They are optional for users; here a build that fails must not pass as tests that are
    skipped.
    """
    compiler = str(sysconfig.get_config_var("CC") or "cc").split()[0]
    assert native.library() is not None or shutil.which(compiler) is None


def instructions(directions: int) -> st.SearchStrategy[list[Perturb | Descend]]:
    place = st.integers(0, directions - 1)
    shifts = st.sampled_from([1.0, -2.0, 1.0, 0.5, -0.3, 3.0])
    perturbs = st.builds(Perturb, place, shifts, st.sampled_from([1e-3, 0.3, 1e-6]))
    descends = st.builds(Descend, place, scalars, scalars, st.sampled_from([0.0, 0.1, 1e-5]))
    return st.lists(st.one_of(perturbs, descends), max_size=9)


def weights(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(length, generator=generator) * 10 ** torch.randint(
        -9, 5, (length,), generator=generator
    )
    special = torch.randint(len(SPECIAL), (length,), generator=generator)
    chosen = torch.rand(length, generator=generator) < 0.2
    return torch.where(chosen, torch.tensor(SPECIAL)[special], values).to(dtype)


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Bits are equal; of what is not a number, only that it is not."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.view(integer)[~ours.isnan()], theirs.view(integer)[~theirs.isnan()])


def unaligned(values: torch.Tensor) -> torch.Tensor:
    """A copy that starts one element after an aligned address."""
    return torch.cat((values[:1], values))[1:]


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_compiled_arithmetic_gives_the_references_bits(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    length, directions, seed = (
        data.draw(lengths),
        data.draw(st.integers(1, 6)),
        data.draw(st.integers(0, 9)),
    )
    program = Program(tuple(range(directions)), tuple(data.draw(instructions(directions))))
    theta = weights(length, dtype, seed)
    zs = [weights(length, dtype, 10 + i) for i in range(directions)]
    ours = unaligned(theta)
    assert dispatch.takes(ours, *zs)
    dispatch.apply(ours, program, zs)
    reference.apply(theta, program, zs)
    assert_same(ours, theta)


@pytest.mark.parametrize("shift", [1.0, -2.0, 4.0, 0.5, -0.25, 3.0])
def test_a_shift_and_the_scale_round_as_in_mezo(shift: float) -> None:
    z = weights(5000, torch.float16, 0)  # many of them subnormal: halving these rounds
    theta, expected = torch.zeros_like(z), torch.zeros_like(z) + (z * shift) * 4.0
    reference.apply(theta, Program((0,), (Perturb(0, shift, 4.0),)), [z])
    assert_same(theta, expected)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", Distribution)
@given(seed=seeds, parameter=st.sampled_from([0, 1, 2**31]), start=starts, length=lengths)
def test_compiled_noise_gives_the_references_bits(
    dtype: torch.dtype,
    distribution: Distribution,
    seed: int,
    parameter: int,
    start: int,
    length: int,
) -> None:
    ours, theirs = (unaligned(torch.zeros(length, dtype=dtype)) for _ in range(2))
    assert dispatch.takes(ours)
    dispatch.fill(ours, distribution, seed, parameter, start)
    reference.fill(theirs, distribution, seed, parameter, start)
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(
    "with_library", [pytest.param(True, marks=compiled), False], ids=["compiled", "reference"]
)
@given(data=st.data())
def test_one_pass_is_the_composition_of_its_parts(
    dtype: torch.dtype, with_library: bool, data: st.DataObject
) -> None:
    draw = data.draw
    length, directions, start = draw(lengths), draw(st.integers(1, 6)), draw(starts)
    then = draw(
        st.none() | st.builds(Perturb, st.integers(0, directions - 1), st.just(-2.0), st.just(1e-3))
    )
    program = Program(
        tuple(range(40, 40 + directions)), tuple(draw(instructions(directions))), then
    )
    in_place, distribution = draw(st.booleans()), draw(st.sampled_from(Distribution))
    theta = weights(length, dtype, start % 10)
    expected = theta.clone()
    zs = [torch.empty_like(theta) for _ in program.seeds]
    for z, seed in zip(zs, program.seeds, strict=True):
        reference.fill(z, distribution, seed, 6, start)
    reference.apply(expected, program, zs)
    moved = expected.clone()
    if then is not None:
        reference.perturb(moved, expected, zs[then.direction], then)
    out = None if then is None else theta if in_place else torch.empty_like(theta)
    with pytest.MonkeyPatch.context() as patch:
        if not with_library:
            patch.setattr(native, "library", lambda: None)
        dispatch.apply(theta, program, Draw(distribution, 6, start), out=out)
    if out is not None:
        assert_same(out, moved)
    if out is not theta:
        assert_same(theta, expected)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_kernels_give_the_references_bits(dtype: torch.dtype) -> None:
    theta, z = weights(3000, dtype, 1), weights(3000, dtype, 2)
    ours, theirs = torch.empty_like(theta), torch.empty_like(theta)
    for shift in (1.0, -2.0, -0.3):
        dispatch.apply(theta, Program((0,), (), Perturb(0, shift, 1e-3)), [z], out=ours)
        reference.perturb(theirs, theta, z, Perturb(0, shift, 1e-3))
        assert_same(ours, theirs)
    for decay in (0.0, 0.1):
        ours, theirs = theta.clone(), theta.clone()
        program = Program((0,), (Descend(0, 0.7, 1e-3, decay),))
        dispatch.apply(ours, program, [z])
        reference.descend(theirs, z, Descend(0, 0.7, 1e-3, decay))
        assert_same(ours, theirs)


def test_tensors_that_the_compiled_kernels_cannot_take_go_to_the_reference() -> None:
    numbers = torch.zeros(64)
    assert not dispatch.takes(numbers.double())
    assert not dispatch.takes(numbers[::2])
    assert not dispatch.takes(numbers, numbers.half())
    assert dispatch.takes(numbers) == (native.library() is not None)
    chosen = dispatch.choose_kernel(numbers, copies=(numbers.half(), None))
    assert (chosen is not reference.apply) == (native.library() is not None)
    for weights, copy in ((numbers.double(), None), (numbers, numbers.double())):
        assert dispatch.choose_kernel(weights, copies=(copy,)) is reference.apply


def test_a_library_of_another_revision_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_REVISION", -1)
    if native.library() is not None:
        with pytest.warns(ZO2Warning, match="revision"):
            assert native.library.__wrapped__() is None


@compiled
@pytest.mark.parametrize(
    "kind", ["garbage", "empty", "cut", "cut in its header", "other functions", "a directory"]
)
def test_a_library_that_cannot_be_loaded_is_said_in_one_line_and_not_used(
    kind: str, tmp_path: Path
) -> None:
    whole = native.library()
    assert whole is not None
    content = Path(whole._name).read_bytes()
    renamed = content.replace(b"zo2core_twister_skip", b"zo2core_twister_skap")
    path = tmp_path / "_native.so"
    contents = {
        "garbage": b"x" * 1000,
        "empty": b"",
        "cut": content[:-100],
        "cut in its header": content[:70],
    }
    if kind == "a directory":
        path.mkdir()
    else:
        path.write_bytes({**contents, "other functions": renamed}[kind])
    with pytest.warns(ZO2Warning, match="compiled kernels are not used") as warned:
        assert native._loaded(path) is None
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)


def test_a_library_that_was_not_built_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    with pytest.warns(ZO2Warning, match="not used \\(no compiler built them") as warned:
        assert native.library.__wrapped__() is None
    assert len(warned) == 1


def test_philox_gives_the_integers_of_its_authors() -> None:
    """Known answers of Random123's kat_vectors: philox4x32, 10 rounds."""
    assert [f"{int(w):08x}" for w in reference.words(0, 0, 0, 1, torch.device("cpu"))] == [
        "6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8",
    ]  # fmt: skip


@pytest.mark.parametrize("then", [None, Perturb(1, 0.3, 1e-3)], ids=["weights alone", "and a copy"])
def test_a_program_is_coded_once_for_a_device_and_let_go_with_it(then: Perturb | None) -> None:
    program = Program((5, 2**63 - 1), (Perturb(0, -2.0, 0.5), Descend(1, 1e300, 0.1, 0.2)), then)
    coded = table(program, torch.device("cpu"))
    assert table(program, torch.device("cpu")) is coded
    assert coded.directions.tolist() == [[5, 0], [2**63 - 1, 0]]
    kinds = [1, 2] if then is None else [1, 2, 0]
    assert coded.instructions[:, 0].tolist() == kinds
    assert coded.instructions[:, 1].tolist() == ([0, 1] if then is None else [0, 1, 1])
    expected = [[-1.0, 0.0, 0.0], [math.inf, 0.1, 0.2], [0.3, 1e-3, 0.0]][: len(kinds)]
    assert torch.equal(coded.scalars[:, 2:], torch.tensor(expected, dtype=torch.float64).float())
    memory = weakref.ref(coded.instructions)
    del coded, program
    assert memory() is None, "nobody else keeps it"


def test_gaussian_numbers_are_as_accurate_as_their_note_says() -> None:
    edges = [
        0,
        1,
        2,
        3,
        2**32 - 1,
        2**32 - 2,
        2**31,
        2**31 - 1,
        0xB504F333,
        0xB504F334,
        *(k << 29 for k in range(8)),
    ]
    edges += [(k << 29) - 1 for k in range(1, 8)]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(1 << 32, (2, 1 << 20), generator=generator)
    radial, angular = torch.cat(
        (drawn, torch.cartesian_prod(torch.tensor(edges), torch.tensor(edges)).T), 1
    )
    radius = torch.sqrt(-2 * torch.log((radial // 2 + 0.5).double() / 2**31))
    angle = 2 * math.pi * angular.double() / 2**32
    first, second = reference.box_muller(radial, angular)
    assert (first - radius * angle.cos()).abs().max() < 1e-6
    assert (second - radius * angle.sin()).abs().max() < 1e-6
    assert 6.6 < max(first.abs().max(), second.abs().max()) < 6.67


N = 1 << 20


def drawn(distribution: Distribution, seed: int, parameter: int) -> torch.Tensor:
    z = torch.empty(N)
    dispatch.fill(z, distribution, seed, parameter)
    return z.double()


def deviations(value: float, mean: float, variance: float) -> float:
    """How many standard deviations a mean over N numbers is off."""
    return abs(value - mean) / math.sqrt(variance / N)


@pytest.mark.parametrize("seed", [0, 1, 999_999_999, 2**40])
def test_gaussian_moments_and_tails_and_fair_signs(seed: int) -> None:
    z = drawn(Distribution.GAUSSIAN, seed, 3)
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)]:
        assert deviations((z**power).mean().item(), mean, variance) < 4, power
    for bound in (0.1, 1.0, 2.0, 3.0, 4.0):
        p = math.erfc(bound / math.sqrt(2))
        assert deviations((z.abs() > bound).double().mean().item(), p, p * (1 - p)) < 4, bound
    signs = drawn(Distribution.RADEMACHER, seed, 3)
    assert torch.equal(signs.abs(), torch.ones(N))
    assert deviations(signs.mean().item(), 0, 1) < 4


@pytest.mark.parametrize("distribution", Distribution)
def test_no_correlation_between_parameters_seeds_and_neighbours(distribution: Distribution) -> None:
    """Seeds of consecutive steps are any numbers: near ones and ones that differ in a high bit are
    the hard cases.
    """
    base = drawn(distribution, 7, 3)
    others = [
        drawn(distribution, seed, p)
        for seed, p in [(8, 3), (6, 3), (7 + 2**32, 3), (7, 4), (7, 2), (3, 7), (8, 4)]
    ]
    others += [base.roll(lag) for lag in (1, 2, 8, 32, 63, 64, 128, 256, 1024)]
    for other in others:
        assert deviations((base * other).mean().item(), 0, 1) < 4.5
        if distribution is Distribution.GAUSSIAN:
            assert deviations((base**2 * other**2).mean().item(), 1, 8) < 4.5


@pytest.mark.parametrize("distribution", Distribution)
def test_every_range_is_cut_from_the_same_numbers(distribution: Distribution) -> None:
    whole = torch.empty(9000)
    dispatch.fill(whole, distribution, 5, 2)
    for start, stop in pairwise([0, 1, 2, 255, 256, 257, 1023, 1024, 4000, 8999, 9000]):
        part = torch.empty(stop - start)
        dispatch.fill(part, distribution, 5, 2, start)
        assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize("compiles", [True, False], ids=["as it is", "reference"])
@given(data=st.data())
def test_moves_by_themselves_are_each_one_move(compiles: bool, data: st.DataObject) -> None:
    draw = data.draw
    distribution, into = draw(st.sampled_from(Distribution)), draw(st.sampled_from(DTYPES))
    length, seed = draw(lengths), draw(st.integers(0, 2**32))
    shifts = draw(st.lists(st.sampled_from([1.0, -1.0, 0.0, 0.3]), min_size=1, max_size=5))
    theta = weights(length, torch.float32, seed)
    places = [seed % (1 + place) for place in range(len(shifts))]
    moves = Program(
        (5, 6, 7, 8, 2**62), tuple(Perturb(*of, 1e-3) for of in zip(places, shifts, strict=True))
    )
    out, before = torch.empty(len(shifts), length, dtype=into), theta.clone()
    with pytest.MonkeyPatch.context() as patch:
        if not compiles:
            patch.setattr(dispatch, "takes", lambda *tensors: False)
        dispatch.perturb_each(theta, moves, distribution, 3, out)
        assert_same(theta, before)
        for row, place, shift in zip(out, places, shifts, strict=True):
            expected = theta.to(into, copy=True)
            if shift != 0:
                alone = Program((moves.seeds[place],), (), then=Perturb(0, shift, 1e-3))
                dispatch.apply(theta, alone, Draw(distribution, 3), out=expected)
            assert_same(row, expected)


def matrices(
    rows: int, columns: int, thin: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, columns, generator=generator).to(dtype)
    return (
        base,
        torch.randn(rows, thin, generator=generator),
        torch.randn(columns, thin, generator=generator).to(dtype),
    )


@compiled
@given(
    # rows, columns, and those of a factor
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 300), st.integers(0, 40)),
    dtype=st.sampled_from(DTYPES),
    in_place=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_compiled_sums_are_the_references(
    sizes: tuple[int, int, int], dtype: torch.dtype, in_place: bool, seed: int
) -> None:
    base, own, shared = matrices(*sizes, dtype, seed)
    expected, out = torch.empty_like(base), base if in_place else torch.empty_like(base)
    reference.form(base, own, shared, expected)
    form(base, own, shared, out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_formed_is_the_sum_rounded_once_in_two_threads_too(dtype: torch.dtype) -> None:
    base, own, shared = matrices(301, 257, 7, dtype)
    alone, together = torch.empty_like(base), torch.empty_like(base)
    form(base, own, shared, alone)
    with (
        patch.object(dispatch, "_IN_A_PART", 1),
        patch.object(parallel, "thread_count", lambda: 2),
    ):
        form(base, own, shared, together)
    assert torch.equal(together, alone)
    exact = base.double() + own.double() @ shared.double().t()
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(alone.double(), exact, rtol=rounding, atol=2e-6)
    base[0, 0], own[1, 0], base[2, 3] = torch.inf, torch.nan, torch.nan
    expected = torch.empty_like(base)
    form(base, own, shared, alone)
    reference.form(base, own, shared, expected)
    assert alone[0, 0] == torch.inf
    assert bool(alone[1].isnan().all())
    assert bool(alone[2, 3].isnan())
    assert torch.equal(alone.isnan(), expected.isnan())


with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run_program(program: str, cache: Path, **environment: str) -> None:
    code = [
        sys.executable,
        str(Path(__file__).parents[1] / "support" / "triton_programs.py"),
        program,
    ]
    paths = os.pathsep.join(sys.path)  # those of pytest, too
    subprocess.run(
        code,
        check=True,
        env=os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": paths} | environment,
    )


@pytest.mark.long_profile
@with_triton
@pytest.mark.parametrize(
    "program", ["interpret", pytest.param("engines", marks=pytest.mark.long_profile)]
)
def test_the_interpreted_kernel_gives_the_references_bits(program: str, tmp_path: Path) -> None:
    run_program(program, tmp_path, TRITON_INTERPRET="1")


@with_triton
@pytest.mark.long_profile
def test_the_kernel_compiles_for_a_gpu_without_fused_or_approximate_operations(
    tmp_path: Path,
) -> None:
    run_program("compile", tmp_path)


@needs_threads
def test_functions_run_at_the_same_time_in_torchs_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "thread_count", lambda: 2)
    first, second = SimpleQueue[int](), SimpleQueue[int]()
    threads: set[int] = set()

    def answer(question: SimpleQueue[int], reply: SimpleQueue[int], number: int) -> None:
        threads.add(threading.get_ident())
        reply.put(number)
        assert question.get(timeout=60) == 3 - number, "both run before one of them has ended"

    parallel.run_together([lambda: answer(first, second, 1), lambda: answer(second, first, 2)])
    assert len(threads) == 2
    assert threading.get_ident() in threads


@pytest.mark.parametrize("threads", [1, 2])
def test_functions_begin_in_their_order_and_the_first_error_is_raised(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "thread_count", lambda: threads)
    begun: list[int] = []

    def begin(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise ArithmeticError(number)

    with pytest.raises(ArithmeticError, match="1"):
        parallel.run_together([partial(begin, number) for number in range(3)])
    assert begun == [0, 1] if threads == 1 else 1 in begun


@needs_threads
def test_no_interrupt_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "thread_count", lambda: 2)
    main = threading.get_ident()
    weights = torch.zeros(1 << 12)
    delays = random.Random(0)

    def interrupt() -> None:
        if threading.get_ident() == main:
            has_begun.wait(0.05)  # for the other thread, which may still be asleep
        elif not sent:
            has_begun.set()
            time.sleep(delays.uniform(0, 1e-4))
            sent.append(True)
            _thread.interrupt_main()
        dispatch.fill(weights, Distribution.RADEMACHER, 5, 0)

    all_sent = 0
    for _ in range(200):
        sent: list[bool] = []
        has_begun = threading.Event()
        received = False
        try:
            parallel.run_together([interrupt] * 16)
            time.sleep(0)
        except KeyboardInterrupt:
            received = True
        assert received == bool(sent)
        all_sent += received
    assert all_sent


@pytest.mark.parametrize("missing", ["library", "torch_threads"])
def test_without_threads_of_torchs_library_one_runs_all(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, missing, lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert parallel.thread_count() == 1
    begun: list[int] = []
    parallel.run_together([lambda: begun.append(0), lambda: begun.append(1)])
    assert begun == [0, 1]


@needs_threads
def test_an_interrupt_is_raised_before_other_errors_and_nothing_begins_after_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel, "thread_count", lambda: 2)
    waiting, has_begun, begun = SimpleQueue[None](), threading.Event(), list[int]()

    def broken() -> None:
        assert has_begun.wait(timeout=60)
        raise ArithmeticError

    def interrupted() -> None:
        has_begun.set()
        waiting.get(timeout=60)
        raise KeyboardInterrupt

    later = [partial(begun.append, number) for number in range(6)]
    with pytest.raises(KeyboardInterrupt):
        parallel.run_together([interrupted, broken, *later], failed=lambda: waiting.put(None))
    assert not begun
