"""What the tests of the Triton kernel run in processes of their own: ``interpret`` or ``compile``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product

import torch

from zo2core import Distribution
from zo2core.kernels import dispatch, forming
from zo2core.types import Descend, Perturb, Program

ARGUMENTS = {
    "theta": "*{}",
    "out": "*{}",
    "instructions": "*i32",
    "scalars": "*fp32",
    "directions": "*i64",
    "in_place": "i32",
    "length": "i32",
    "numel": "i32",
    "parameter": "i32",
    "start": "i64",
    "seed": "i64",
    "z": "*{}",
    "first": "i32",
    "last": "i32",
    "kind": "i32",
    "scale": "fp32",
    "rate": "fp32",
    "base": "*{}",
    "left": "*fp32",
    "right": "*fp32",
    "rows": "i32",
    "columns": "i32",
    "rank": "i32",
    "HIGH": "constexpr",
    "WIDE": "constexpr",
    "GAUSSIAN": "constexpr",
    "BLOCK": "constexpr",
}


def interpret() -> None:
    """Hold the interpreted kernel against the other kernels. (The interpreter cannot round to bfloat16.)"""
    from zo2core.kernels import triton_kernels

    walk = (Perturb(0, 1.0, 1e-3), Perturb(0, -2.0, 1e-3), Perturb(1, 0.3, 1e-3))
    descends = (Descend(0, 0.5, 1e-2, 0.1), Descend(1, 0.7, 1e-3, 0.0))
    then = Perturb(2, 1.0, 1e-3)
    seeds = (5, 6, 2**62 + 3)
    for distribution in Distribution:
        for dtype, integer in ((torch.float32, torch.int32), (torch.float16, torch.int16)):
            for start, length in ((0, 3000), (777, 1500), (2**34 - 300, 1000)):
                drawn, z = (torch.zeros(length, dtype=dtype) for _ in range(2))
                triton_kernels.fill(drawn, distribution, 2**62 + 3, 1, start)
                dispatch.fill(z, distribution, 2**62 + 3, 1, start)
                assert torch.equal(drawn.view(integer), z.view(integer)), (distribution, dtype, start)
                for own in ((*walk, *descends), ()):
                    ours = torch.randn(length, generator=torch.Generator().manual_seed(1)).to(dtype)
                    theirs, out, expected = ours.clone(), torch.zeros_like(ours), torch.zeros_like(ours)
                    program = Program(seeds, own, then)
                    triton_kernels.apply_drawing(ours, program, distribution, 9, start, out=out)
                    dispatch.apply_drawing(theirs, program, distribution, 9, start, out=expected)
                    given, zs = ours.clone(), [torch.randn(length).to(dtype) for _ in seeds]
                    also, then_given, then_expected = given.clone(), torch.zeros_like(ours), torch.zeros_like(ours)
                    memory = {"scratch": torch.empty_like(ours), "decay_scratch": torch.empty_like(ours)}
                    triton_kernels.apply(given, program, zs)
                    dispatch.apply(also, program, zs, **memory)
                    for shift in (1.0, 0.3):
                        triton_kernels.perturb(then_given, given, zs[0], Perturb(0, shift, 1e-3))
                        scratch = memory["scratch"]
                        dispatch.perturb(then_expected, also, zs[0], Perturb(0, shift, 1e-3), scratch=scratch)
                        assert torch.equal(then_given.view(integer), then_expected.view(integer)), (dtype, shift)
                    compared = (("theta", ours, theirs), ("out", out, expected), ("z given", given, also))
                    for name, a, b in compared:
                        assert torch.equal(a.view(integer), b.view(integer)), (distribution, dtype, start, name)
    for dtype, integer in ((torch.float32, torch.int32), (torch.float16, torch.int16)):
        for rows, columns, thin in ((16, 128, 1), (19, 150, 5), (1, 1, 3)):
            base, shared = torch.randn(rows, columns).to(dtype), torch.randn(columns, thin)
            factor, formed, expected = torch.randn(rows, thin), torch.empty_like(base), torch.empty_like(base)
            base[0, 0], base[-1, -1], factor[0] = -0.0, torch.inf, 0.0
            triton_kernels.form(base, factor, shared.t().contiguous(), formed)
            forming.form(base, factor, shared, expected)
            assert torch.equal(formed.view(integer), expected.view(integer)), (dtype, rows, columns, thin)


def compile_to_ptx() -> None:
    """Compile for a Hopper GPU, and see that every operation rounds by itself."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from zo2core.kernels import triton_kernels

    drawing = product((triton_kernels._apply_drawing, triton_kernels._fill), ({"GAUSSIAN": True}, {"GAUSSIAN": False}))
    one_dimension = [*drawing, (triton_kernels._apply, {}), (triton_kernels._perturb, {})]
    variants = [(kernel, {**constants, "BLOCK": triton_kernels.BLOCK}) for kernel, constants in one_dimension]
    variants.append((triton_kernels._form, dict(zip(("HIGH", "WIDE"), triton_kernels.TILE, strict=True))))
    for (kernel, constants), number in product(variants, ("fp32", "bf16", "fp16")):
        source = ASTSource(
            fn=kernel, signature={name: ARGUMENTS[name].format(number) for name in kernel.arg_names}, constexprs=constants
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=triton_kernels.LAUNCH)
        ptx = compiled.asm["ptx"]
        assert ".target sm_90" in ptx
        assert kernel is triton_kernels._fill or "mul.f32" in ptx or "mul.rn.f32" in ptx
        for banned in ("fma.", ".ftz", ".approx"):
            assert banned not in ptx, (kernel, constants, number, banned)


PROGRAMS: dict[str, Callable[[], None]] = {"interpret": interpret, "compile": compile_to_ptx}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
