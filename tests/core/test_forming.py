"""Weights formed of thin factors: the compiled kernel gives the reference's bits, and both the sum in float32."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zo2core.kernels import dispatch, form, reference

needs_kernels = pytest.mark.skipif(dispatch.library() is None, reason="needs the compiled kernels")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrices(
    rows: int, columns: int, thin: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, columns, generator=generator).to(dtype)
    return base, torch.randn(rows, thin, generator=generator), torch.randn(columns, thin, generator=generator).to(dtype)


@needs_kernels
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    thin=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    in_place=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_the_compiled_kernel_gives_the_references_bits(
    *, rows: int, columns: int, thin: int, dtype: torch.dtype, in_place: bool, seed: int
) -> None:
    base, own, shared = matrices(rows, columns, thin, dtype, seed)
    expected, out = torch.empty_like(base), base if in_place else torch.empty_like(base)
    reference.form(base, own, shared, expected)
    form(base, own, shared, out)
    assert torch.equal(out, expected)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_helper_forms_a_part_of_it(dtype: torch.dtype) -> None:
    base, own, shared = matrices(301, 257, 7, dtype)
    alone, together = torch.empty_like(base), torch.empty_like(base)
    form(base, own, shared, alone)
    with ThreadPoolExecutor(1) as helper:
        form(base, own, shared, together, helper)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_formed_is_the_sum_rounded_once(dtype: torch.dtype) -> None:
    base, own, shared = matrices(70, 130, 9, dtype)
    out = torch.empty_like(base)
    form(base, own, shared, out)
    exact = base.double() + own.double() @ shared.double().t()
    torch.testing.assert_close(out.double(), exact, rtol=2e-6 if dtype is torch.float32 else 2**-8, atol=2e-6)


def test_numbers_that_are_not_finite_stay_so() -> None:
    base, own, shared = matrices(5, 20, 3, torch.bfloat16)
    base[0, 0], own[1, 0], base[2, 3] = torch.inf, torch.nan, torch.nan
    out, expected = torch.empty_like(base), torch.empty_like(base)
    form(base, own, shared, out)
    reference.form(base, own, shared, expected)
    assert out[0, 0] == torch.inf
    assert bool(out[1].isnan().all())
    assert bool(out[2, 3].isnan())
    assert torch.equal(out.isnan(), expected.isnan())
