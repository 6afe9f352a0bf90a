"""Golden trajectories: runs of every method, source and precision compute what they did when the
goldens were made.
"""

import json

import pytest
from goldens.stored import CASES, FOLDER, difference, load, make

STORED = load()
OTHER_MACHINE = difference(STORED["machine"])


@pytest.mark.few(20)
@pytest.mark.skipif(OTHER_MACHINE is not None, reason=str(OTHER_MACHINE))
@pytest.mark.parametrize("name", CASES)
def test_a_run_has_its_golden_bits(name: str) -> None:
    if name not in STORED["goldens"]:
        pytest.skip("made on another machine alone since it changed: python -m tests.goldens")
    made, stored = make(name), STORED["goldens"][name]
    assert made == stored, (
        "after a wanted change: python -m tests.goldens, and the reason in the commit"
    )


def test_every_golden_has_its_run_and_every_run_a_golden_of_some_machine() -> None:
    of_machines = [json.loads(path.read_text())["goldens"] for path in FOLDER.glob("*.json")]
    assert {name for goldens in of_machines for name in goldens} == CASES.keys()
