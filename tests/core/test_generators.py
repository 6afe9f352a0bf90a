"""Sequential generators: the compiled one gives torch's bits, or is not used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from drawn_numbers import DTYPES, one_parameter, reference, z_of
from hypothesis import given
from hypothesis import strategies as st

from zo2core.kernels import dispatch
from zo2core.noise import CompiledGenerator, Generator, TorchGenerator, agrees, seeded

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(dispatch.library() is None, reason="the compiled kernels are not built")
agreeing = pytest.mark.skipif(
    dispatch.library() is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="the compiled kernels are not built, or torch computes otherwise on this processor",
)

seeds = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]) | st.integers(0, 2**63 - 1)
sizes = st.one_of(st.integers(1, 40), st.integers(600, 700), st.integers(1000, 1100), st.sampled_from([2048, 65536 + 9]))


@pytest.fixture(autouse=True)
def compared_anew() -> Iterator[None]:
    agrees.cache_clear()
    yield
    agrees.cache_clear()


def drawn(generator: Generator, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Bits of the next numbers, written to an odd address."""
    out = torch.empty(size + 1, dtype=dtype)[1:]
    generator.fill(out)
    return out.view(torch.int32 if dtype is torch.float32 else torch.int16)


@agreeing
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_compiled_generator_is_used_where_it_agrees(dtype: torch.dtype) -> None:
    assert agrees(dtype)
    assert isinstance(seeded(3, CPU, {dtype}), CompiledGenerator)
    assert isinstance(seeded(3, CPU, {dtype, torch.float64}), TorchGenerator)


@agreeing
@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=seeds, run=st.lists(sizes, min_size=1, max_size=12))
def test_compiled_numbers_are_torchs(dtype: torch.dtype, seed: int, run: list[int]) -> None:
    ours, theirs = CompiledGenerator(seed), TorchGenerator(seed, CPU)
    for size in run:
        assert torch.equal(drawn(ours, size, dtype), drawn(theirs, size, dtype))


@agreeing
@given(seed=seeds, run=st.lists(st.tuples(sizes, st.sampled_from(DTYPES)), min_size=1, max_size=12))
def test_one_generator_serves_several_dtypes(seed: int, run: list[tuple[int, torch.dtype]]) -> None:
    ours, theirs = CompiledGenerator(seed), TorchGenerator(seed, CPU)
    for size, dtype in run:
        assert torch.equal(drawn(ours, size, dtype), drawn(theirs, size, dtype))


@agreeing
def test_millions_of_compiled_numbers_are_torchs() -> None:
    ours, theirs = CompiledGenerator(7), TorchGenerator(7, CPU)
    for _ in range(8):
        assert torch.equal(drawn(ours, 1 << 20, torch.float32), drawn(theirs, 1 << 20, torch.float32))


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["compiled", "torch"])
@given(seed=seeds, before=sizes, skipped=st.lists(sizes, max_size=4), after=sizes)
def test_skipping_leads_where_drawing_does(
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
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_goes_its_own_way(dtype: torch.dtype) -> None:
    one = CompiledGenerator(5)
    drawn(one, 3, dtype)  # a spare number is kept
    other = one.copy()
    ahead = [drawn(one, size, dtype) for size in (1, 700)]
    assert all(torch.equal(drawn(other, size, dtype), numbers) for size, numbers in zip((1, 700), ahead, strict=True))


@compiled
@pytest.mark.parametrize("size", [3, 16, 33, 1024])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_library_that_gives_other_numbers_is_not_used(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = CompiledGenerator.fill

    def lying(self: CompiledGenerator, out: torch.Tensor) -> None:
        fill(self, out)
        if len(out) == size:
            bits = out.view(torch.int32 if dtype is torch.float32 else torch.int16)
            bits[-1] ^= 1  # the last bit of one number

    monkeypatch.setattr(CompiledGenerator, "fill", lying)
    assert not agrees(dtype)
    spec, noise = one_parameter(size, dtype)
    assert torch.equal(z_of(noise, spec, 9), reference(9, size, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_library_torch_draws(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "library", lambda: None)
    assert isinstance(seeded(3, CPU, {dtype}), TorchGenerator)
    spec, noise = one_parameter(1000, dtype)
    assert torch.equal(z_of(noise, spec, 9), reference(9, 1000, dtype))


_ELSEWHERE = """
import torch
from drawn_numbers import DTYPES, one_parameter, reference, z_of

assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
for dtype in DTYPES:
    spec, noise = one_parameter(70_000, dtype)
    assert torch.equal(z_of(noise, spec, 9), reference(9, 70_000, dtype)), dtype
"""


@pytest.mark.long_profile
def test_numbers_are_torchs_where_torch_computes_otherwise() -> None:
    environment = dict(os.environ, ATEN_CPU_CAPABILITY="default")
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", _ELSEWHERE], check=True, env=environment, timeout=120)
