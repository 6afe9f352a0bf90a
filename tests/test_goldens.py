"""Golden trajectories: runs of every method, source and precision compute what they did when the
goldens were made.
"""

import pytest
from goldens.stored import CASES, difference, load, make

STORED = load()
OTHER_MACHINE = difference(STORED["machine"])


@pytest.mark.few(20)
@pytest.mark.skipif(OTHER_MACHINE is not None, reason=str(OTHER_MACHINE))
@pytest.mark.parametrize("name", CASES)
def test_a_run_has_its_golden_bits(name: str) -> None:
    made, stored = make(name), STORED["goldens"][name]
    assert made == stored, (
        "after a wanted change: python -m tests.goldens, and the reason in the commit"
    )


def test_every_golden_has_its_run() -> None:
    assert STORED["goldens"].keys() == CASES.keys()
