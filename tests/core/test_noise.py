"""Noise: z depends on seed and parameter alone, and the compiled generator gives torch's bits or is
not used.
"""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from command_lines import environment
from hypothesis import example, given
from hypothesis import strategies as st
from profiles import examples
from segments import DTYPES, assert_torch_draws, z_of

import zo2core.estimators.noise
from zo2core import (
    BlockLayout,
    Distribution,
    ParameterSpec,
    PhiloxNoise,
    SegmentKind,
    SequentialNoise,
)
from zo2core.estimators.noise import (
    CompiledGenerator,
    Generator,
    TorchGenerator,
    compiled_agrees,
    make_generator,
)
from zo2core.kernels import native
from zo2core.protocols import NoiseGenerator

Make = Callable[[Sequence[BlockLayout]], NoiseGenerator]
NOISES: dict[str, Make] = {
    "sequential": SequentialNoise,
    "gaussian": lambda _: PhiloxNoise(),
    "rademacher": lambda _: PhiloxNoise(Distribution.RADEMACHER),
}
every_noise = pytest.mark.parametrize("make", NOISES.values(), ids=NOISES)

# Registered in this order; the head's stand between the embedding's and the blocks', as in OPT.
SIZES = [
    (40, 0),
    (3, 0),
    (7, 3),
    (65536 + 9, 3),
    (140001, 1),
    (15, 1),
    (16, 1),
    (1, 2),
    (33, 2),
    (131072, 2),
]


def layouts(dtype: torch.dtype = torch.float32) -> tuple[BlockLayout, ...]:
    specs = [
        (ParameterSpec(f"p{i}", (n,), dtype, i, True), segment)
        for i, (n, segment) in enumerate(SIZES)
    ]
    kinds = [SegmentKind.EMBEDDING, SegmentKind.BLOCK, SegmentKind.BLOCK, SegmentKind.HEAD]
    return tuple(
        BlockLayout(f"segment {i}", kind, tuple(spec for spec, segment in specs if segment == i))
        for i, kind in enumerate(kinds)
    )


def parameters(segments: Sequence[BlockLayout]) -> list[ParameterSpec]:
    return sorted(
        (spec for layout in segments for spec in layout.parameters), key=lambda spec: spec.index
    )


VISITS = st.tuples(
    st.integers(0, len(SIZES) - 1), st.none() | st.integers(0, 5), st.sampled_from([0, 2**63 - 1])
)


@every_noise
@given(visits=st.lists(VISITS, max_size=24))
@example(visits=[(4, 1, 0), (4, 0, 0), (4, 0, 0), (3, None, 0), (4, None, 0)])
def test_z_does_not_depend_on_what_was_drawn_before(
    make: Make, visits: list[tuple[int, int | None, int]]
) -> None:
    """Neither on the order of whole parameters nor on that of their chunks."""
    segments = layouts()
    specs, noise = parameters(segments), make(segments)
    in_order = make(segments)
    expected = {
        seed: [z_of(in_order, spec, seed) for spec in specs]
        for seed in {seed for *_, seed in visits}
    }
    for i, chunk, seed in visits:
        chunks = noise.chunks(specs[i])
        for start, stop in chunks if chunk is None else [chunks[chunk % len(chunks)]]:
            out = torch.empty(stop - start)
            noise.fill(out, seed, specs[i], start)
            assert torch.equal(out, expected[seed][i][start:stop])


@every_noise
def test_chunks_cover_a_parameter_once(make: Make) -> None:
    noise = make(layouts())
    for numel in [*range(1, 70), 65535, 65536, 65537, 65536 + 15, 65536 + 16, 200_000]:
        chunks = noise.chunks(ParameterSpec("p", (numel,), torch.float32, 0, True))
        assert [at for start, stop in chunks for at in range(start, stop)] == list(range(numel))


@every_noise
def test_seeds_and_parameters_have_noise_of_their_own_whatever_is_forgotten(make: Make) -> None:
    segments = layouts()
    specs = [spec for spec in parameters(segments) if spec.numel > 30]
    noise = make(segments)
    drawn = [z_of(noise, spec, seed)[:30] for seed in (0, 1) for spec in specs]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    noise.retain({6})
    assert torch.equal(z_of(noise, specs[-1], 1)[:30], drawn[-1])


@every_noise
@pytest.mark.parametrize("seeds", [(1, 2), (1, 1)], ids=["two seeds", "one seed"])
def test_threads_do_not_disturb_each_other(make: Make, seeds: tuple[int, int]) -> None:
    segments = layouts()
    specs = parameters(segments)
    noise = make(segments)
    results: dict[int, list[torch.Tensor]] = {}

    def work(thread: int) -> None:
        results[thread] = [z_of(noise, spec, seeds[thread]) for spec in specs]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, seed in enumerate(seeds):
        alone = make(segments)
        assert all(
            torch.equal(a, z_of(alone, spec, seed))
            for a, spec in zip(results[i], specs, strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_sequential_noise_is_torch_normal_from_one_seeded_generator(dtype: torch.dtype) -> None:
    segments = layouts(dtype)
    noise = SequentialNoise(segments)
    generator = torch.Generator().manual_seed(11)
    expected = [
        torch.normal(0.0, 1.0, spec.shape, dtype=dtype, generator=generator)
        for spec in parameters(segments)
    ]
    for layout in segments:  # visiting order, not registration order
        for spec in layout.parameters:
            assert torch.equal(z_of(noise, spec, 11), expected[spec.index])


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many numbers each call of a sequential generator goes on by."""
    counts: list[int] = []

    counter = SimpleNamespace(
        fill=lambda out: counts.append(out.numel()), skip=lambda count, _: counts.append(count)
    )
    counter.copy = lambda: counter
    monkeypatch.setattr(zo2core.estimators.noise, "make_generator", lambda *_: counter)
    return counts


@pytest.mark.parametrize("sweeps", [1, 3])
@pytest.mark.parametrize("jump", [True, False])
def test_sequential_noise_goes_back_no_further_than_a_segments_start(
    jump: bool, sweeps: int, passed: list[int]
) -> None:
    segments = layouts()
    if not jump:  # five segments in registration order
        specs = [ParameterSpec(f"p{i}", (100,), torch.float32, i, True) for i in range(10)]
        segments = tuple(
            BlockLayout(f"{i}", SegmentKind.BLOCK, tuple(specs[2 * i : 2 * i + 2]))
            for i in range(5)
        )
    noise = SequentialNoise(segments)
    for _ in range(sweeps):
        for layout in segments:
            for _ in range(2):
                for spec in layout.parameters:
                    z_of(noise, spec, 11)
    once = sum(spec.numel for layout in segments for spec in layout.parameters)
    skipped = 7 + 65536 + 9 if jump else 0  # the head's, registered before block 0's, once
    assert sum(passed) == 2 * sweeps * once + skipped


def test_seeds_that_are_retained_go_on_and_others_give_up_their_place(passed: list[int]) -> None:
    """A break here changes no number, but how many are drawn in vain."""
    specs = parameters(layouts())
    noise = SequentialNoise(layouts(), memory=1 << 15)
    assert noise._most == 2

    def skipped(seed: int, at: int) -> int:
        passed.clear()
        z_of(noise, specs[at], seed)
        return sum(passed) - specs[at].numel

    before = [sum(spec.numel for spec in specs[:at]) for at in range(len(specs))]
    assert [skipped(seed, 5) for seed in (1, 2)] == [before[5]] * 2
    noise.retain({2})
    assert (skipped(2, 6), skipped(1, 6)) == (0, before[6]), "one was kept, the other forgotten"
    noise.retain({3})
    assert [skipped(seed, 7) for seed in (3, 4, 2)] == [before[7]] * 3
    noise.retain({3, 4})
    assert [skipped(seed, 8) for seed in (3, 4, 2)] == [0, 0, before[8]]


CPU = torch.device("cpu")
compiled = pytest.mark.skipif(native.library() is None, reason="the compiled kernels are not built")
agreeing = pytest.mark.skipif(
    native.library() is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the compiled kernels are not built, or torch computes otherwise on this processor",
)

any_seeds = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]) | st.integers(0, 2**63 - 1)
sizes = st.one_of(
    st.integers(1, 40),
    st.integers(600, 700),
    st.integers(1000, 1100),
    st.sampled_from([2048, 65536 + 9]),
)


@pytest.fixture(autouse=True)
def compared_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whether the generators agree; and chunks are shorter than some of the parameters."""
    monkeypatch.setattr(zo2core.estimators.noise, "CHUNK", 1 << 16)
    compiled_agrees.cache_clear()
    yield
    compiled_agrees.cache_clear()


def drawn(generator: Generator, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Bits of the next numbers, written to an odd address."""
    out = torch.empty(size + 1, dtype=dtype)[1:]
    generator.fill(out)
    return out.view(torch.int32 if dtype is torch.float32 else torch.int16)


@agreeing
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_generator_is_used_where_it_agrees(dtype: torch.dtype) -> None:
    assert compiled_agrees(dtype)
    assert isinstance(make_generator(3, CPU, {dtype}), CompiledGenerator)
    assert isinstance(make_generator(3, CPU, {dtype, torch.float64}), TorchGenerator)


@agreeing
@examples(short=30, long=300)
@given(
    seed=any_seeds, run=st.lists(st.tuples(sizes, st.sampled_from(DTYPES)), min_size=1, max_size=12)
)
def test_compiled_numbers_of_several_dtypes_are_torchs(
    seed: int, run: list[tuple[int, torch.dtype]]
) -> None:
    ours, theirs = CompiledGenerator(seed), TorchGenerator(seed, CPU)
    for size, dtype in run:
        assert torch.equal(drawn(ours, size, dtype), drawn(theirs, size, dtype))


@agreeing
def test_millions_of_compiled_numbers_are_torchs() -> None:
    ours, theirs = CompiledGenerator(7), TorchGenerator(7, CPU)
    for _ in range(8):
        assert torch.equal(
            drawn(ours, 1 << 20, torch.float32), drawn(theirs, 1 << 20, torch.float32)
        )


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["compiled", "torch"])
@given(seed=any_seeds, before=sizes, skipped=st.lists(sizes, max_size=4), after=sizes)
def test_skipping_is_drawing(
    kind: str, dtype: torch.dtype, seed: int, before: int, skipped: list[int], after: int
) -> None:
    one: Generator = CompiledGenerator(seed) if kind == "compiled" else TorchGenerator(seed, CPU)
    drawn(one, before, dtype)
    other = one.copy()
    for size in skipped:
        one.skip(size, dtype)
        drawn(other, size, dtype)
    assert torch.equal(drawn(one, after, dtype), drawn(other, after, dtype))


@compiled
@pytest.mark.parametrize("size", [3, 16, 33, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_library_of_other_numbers_is_not_used(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = CompiledGenerator.fill

    def lying(self: CompiledGenerator, out: torch.Tensor) -> None:
        fill(self, out)
        if len(out) == size:
            bits = out.view(torch.int32 if dtype is torch.float32 else torch.int16)
            bits[-1] ^= 1  # the last bit of one number

    monkeypatch.setattr(CompiledGenerator, "fill", lying)
    assert not compiled_agrees(dtype)
    assert_torch_draws(size, [dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_library_torch_draws(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    assert isinstance(make_generator(3, CPU, {dtype}), TorchGenerator)
    assert_torch_draws(1000, [dtype])


@pytest.mark.long_profile
def test_numbers_are_torchs_where_torch_computes_otherwise() -> None:
    """In a process of its own, without vector instructions."""
    code = "import segments; segments.assert_torch_draws(70_000, capability='DEFAULT')"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=environment(ATEN_CPU_CAPABILITY="default"),
        timeout=120,
    )
