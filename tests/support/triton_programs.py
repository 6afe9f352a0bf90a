"""What the tests of the Triton kernel run in processes of their own: ``interpret``, ``engines`` or
``compile``.
"""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from engines import zeroth_order
from models import make_batch
from toy import ToyBlockModel

from zo2core import Distribution, HostPlan, MemoryPolicy, MeZOSGD, MultiQueryRGE, PhiloxNoise
from zo2core.kernels import Draw, dispatch
from zo2core.sweep import perturbers
from zo2core.types import Descend, Perturb, Program

KINDS = {
    "*{}": ("theta", "out", "given", "base"),
    "*fp32": ("scalars", "left", "right"),
    "*i32": ("instructions",),
    "*i64": ("directions", "places"),
    "i32": ("in_place", "length", "numel", "parameter", "first", "rows", "columns", "rank"),
    "i64": ("start", "seed"),
    "constexpr": ("GIVEN", "GAUSSIAN", "ROWS", "BLOCK"),
}
ARGUMENTS = {name: kind for kind, names in KINDS.items() for name in names}


def interpret() -> None:
    """Hold the interpreted kernel against the other kernels. (The interpreter cannot round to
    bfloat16.)
    """
    from zo2core.kernels import triton_kernels

    walk = (Perturb(0, 1.0, 1e-3), Perturb(0, -2.0, 1e-3), Perturb(1, 0.3, 1e-3))
    descends = (Descend(0, 0.5, 1e-2, 0.1), Descend(1, 0.7, 1e-3, 0.0))
    then = Perturb(2, 1.0, 1e-3)
    seeds = (5, 6, 2**62 + 3)
    for distribution in Distribution:
        for dtype, integer in ((torch.float32, torch.int32), (torch.float16, torch.int16)):
            for start, length in ((0, 1500), (2**34 - 300, 1000)):
                drawn, z = (torch.zeros(length, dtype=dtype) for _ in range(2))
                triton_kernels.fill(drawn, distribution, 2**62 + 3, 1, start)
                dispatch.fill(z, distribution, 2**62 + 3, 1, start)
                assert torch.equal(drawn.view(integer), z.view(integer)), (
                    distribution,
                    dtype,
                    start,
                )
                for own in ((*walk, *descends), ()):
                    ours = torch.randn(length, generator=torch.Generator().manual_seed(1)).to(dtype)
                    theirs, out, expected = (
                        ours.clone(),
                        torch.zeros_like(ours),
                        torch.zeros_like(ours),
                    )
                    program = Program(seeds, own, then)
                    triton_kernels.apply_drawing(
                        [ours], program, distribution, [9], start, outs=[out]
                    )
                    dispatch.apply(theirs, program, Draw(distribution, 9, start), out=expected)
                    given, zs = ours.clone(), [torch.randn(length).to(dtype) for _ in seeds]
                    also, then_given, then_expected = (
                        given.clone(),
                        torch.zeros_like(ours),
                        torch.zeros_like(ours),
                    )
                    for also_then in (Perturb(0, 1.0, 1e-3), Perturb(1, 0.3, 1e-3), then):
                        program = Program(seeds, own, also_then)
                        triton_kernels.apply([given], program, [[z] for z in zs], [then_given])
                        dispatch.apply(also, program, zs, out=then_expected)
                        assert torch.equal(then_given.view(integer), then_expected.view(integer)), (
                            dtype,
                            also_then,
                        )
                    compared = (
                        ("theta", ours, theirs),
                        ("out", out, expected),
                        ("z given", given, also),
                    )
                    for name, a, b in compared:
                        assert torch.equal(a.view(integer), b.view(integer)), (
                            distribution,
                            dtype,
                            start,
                            name,
                        )
    for dtype, integer in ((torch.float32, torch.int32), (torch.float16, torch.int16)):
        for rows, columns, thin in ((16, 128, 1), (19, 150, 5), (1, 1, 3)):
            base, shared = torch.randn(rows, columns).to(dtype), torch.randn(columns, thin)
            factor, formed, expected = (
                torch.randn(rows, thin),
                torch.empty_like(base),
                torch.empty_like(base),
            )
            base[0, 0], base[-1, -1], factor[0] = -0.0, torch.inf, 0.0
            triton_kernels.form(base, factor, shared.t().contiguous(), formed)
            dispatch.form(base, factor, shared, expected)
            assert torch.equal(formed.view(integer), expected.view(integer)), (
                dtype,
                rows,
                columns,
                thin,
            )


def compile_to_ptx() -> None:
    """Compile for a Hopper GPU, and see that every operation rounds by itself."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from zo2core.kernels import triton_kernels

    drawing = [{"GIVEN": False, "GAUSSIAN": is_gaussian} for is_gaussian in (True, False)]
    one_dimension = [*product((triton_kernels._run, triton_kernels._fill), drawing)]
    one_dimension.append((triton_kernels._run, {"GIVEN": True, "GAUSSIAN": True}))
    variants = [
        (kernel, {**constants, "ROWS": 16, "BLOCK": triton_kernels.BLOCK})
        for kernel, constants in one_dimension
    ]
    variants.append((triton_kernels._form, {}))
    for (kernel, constants), number in product(variants, ("fp32", "bf16", "fp16")):
        source = ASTSource(
            fn=kernel,
            signature={name: ARGUMENTS[name].format(number) for name in kernel.arg_names},
            constexprs={
                name: value for name, value in constants.items() if name in kernel.arg_names
            },
        )
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options=triton_kernels.LAUNCH
        )
        ptx = compiled.asm["ptx"]
        assert ".target sm_90" in ptx
        assert kernel is triton_kernels._fill or "mul.f32" in ptx or "mul.rn.f32" in ptx
        for banned in ("fma.", ".ftz", ".approx"):
            assert banned not in ptx, (kernel, constants, number, banned)


def engines() -> None:
    """Hold an engine whose segments are changed by the interpreted kernels against one on the
    CPU's, and count launches.
    """
    batch = {
        name: value
        for name, value in make_batch(40, [6, 6]).items()
        if name in ("input_ids", "labels")
    }
    queries = partial(MultiQueryRGE, q=2)
    cases: list[tuple[PhiloxNoise | None, bool, float, Callable[..., MeZOSGD], torch.dtype]] = [
        (None, True, 0.1, MeZOSGD, torch.float32),
        (None, False, 0.0, MeZOSGD, torch.float16),
        (PhiloxNoise(), True, 0.1, MeZOSGD, torch.float16),
        (PhiloxNoise(), False, 0.0, queries, torch.float32),
    ]
    for noise, tied, weight_decay, estimator, dtype in cases:
        states, counted = [], Counter[str]()
        for kernels in (None, counting(counted)):
            with (
                TemporaryDirectory() as folder,
                patch.object(perturbers, "triton_kernels", lambda _, kernels=kernels: kernels),
            ):
                model = ToyBlockModel(
                    40, 8, 1, tied=tied, dtype=dtype, file=Path(folder, "toy.safetensors")
                )
                method = estimator(lr=1e-2, zo_eps=1e-2, weight_decay=weight_decay)
                # as on a device with its own
                memory = MemoryPolicy(host=HostPlan((), 1 << 30, None, keep_noise=False))
                with zeroth_order(
                    model, method, noise=noise, journal=Path(folder, "log"), memory=memory
                ) as engine:
                    losses = [engine.step(batch, seed=seed).losses for seed in (1, 2)]
                    # of the last step alone: it replays the one before, and perturbs
                    counted.clear()
                    losses.append(engine.step(batch, seed=3).losses)
                    per_step = dict(counted)
                    states.append(
                        (losses, {name: value.clone() for name, value in engine.parameters_now()})
                    )
        (losses, expected), (found_losses, found) = states
        assert losses == found_losses, (noise, tied, weight_decay, estimator, dtype)
        for name, value in expected.items():
            assert torch.equal(value, found[name]), (
                noise,
                tied,
                weight_decay,
                estimator,
                dtype,
                name,
            )
        # Three segments. A replay takes a launch for each kind of decay, every evaluation one; for
        # an untied head two, whose matrix fills the memory for z.
        if estimator is MeZOSGD and noise is None:
            assert per_step["apply"] == (3 if weight_decay else 4) + 2 * (3 + (not tied)), per_step
        elif estimator is MeZOSGD:
            assert per_step["apply_drawing"] <= 3 * (2 + bool(weight_decay) + tied), per_step


def counting(counted: Counter[str]) -> SimpleNamespace:
    """The kernels, with their launches counted."""
    from zo2core.kernels import triton_kernels

    def counts(name: str) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            counted[name] += 1
            getattr(triton_kernels, name)(*arguments, **options)

        return call

    return SimpleNamespace(**{name: counts(name) for name in ("apply", "apply_drawing")})


PROGRAMS: dict[str, Callable[[], None]] = {
    "interpret": interpret,
    "engines": engines,
    "compile": compile_to_ptx,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
