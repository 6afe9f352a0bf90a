"""Cases of the default profile, and those that only the long profile runs."""

import random
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

from zo2core.kernels import native

LONG = pytest.mark.long_profile
needs_threads = pytest.mark.skipif(
    native.library() is None or native.torch_threads() is None,
    reason="kernels are not compiled, or torch's OpenMP library is another one",
)


def each_choice(*axes: Sequence[object]) -> list[Any]:
    """All combinations of some parameters' values; the default profile has every value of each
    parameter in at least one.

    It has as many cases as the longest axis has values, drawn once and for all; the long profile
    has all combinations.
    """
    count, columns = max(map(len, axes)), []
    for number, axis in enumerate(axes):
        columns.append([place % len(axis) for place in range(count)])
        random.Random(number).shuffle(columns[-1])
    short = set(zip(*columns, strict=True))
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, places, strict=True)),
            marks=() if places in short else LONG,
        )
        for places in product(*(range(len(axis)) for axis in axes))
    ]


def short_first(short: Iterable[object], others: Iterable[object]) -> list[Any]:
    """Values of one parameter: those of both profiles, and others of the long one."""
    return [*short, *(pytest.param(value, marks=LONG) for value in others)]


def covering_cases(cases: Sequence[pytest.Function]) -> set[pytest.Function]:
    """As many cases as the function's mark ``few`` says, chosen so that most values of its
    parameters occur.
    """
    [count] = next(cases[0].iter_markers("few")).args
    left, covered, chosen = list(cases), set[tuple[str, int]](), set[pytest.Function]()
    random.Random(0).shuffle(left)
    while left and len(chosen) < count:
        case = max(left, key=lambda one: len(one.callspec.indices.items() - covered))
        left.remove(case)
        chosen.add(case)
        covered |= case.callspec.indices.items()
    return chosen


def examples(*, short: int, long: int) -> settings:
    """How many examples are drawn in the default profile, and in the long one."""
    assert settings.default is not None
    is_long = settings.default.max_examples == settings.get_profile("long").max_examples
    return settings(max_examples=long if is_long else short)
