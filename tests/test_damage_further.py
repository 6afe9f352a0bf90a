"""The second half of the damage at random: a file of tests is one worker's, and either half takes long behind --long."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_damage import EXAMPLES, PARTS, Runs, damage_runs
from test_damage import runs as runs  # the fixture


@pytest.mark.parametrize("part", range(PARTS // 2, PARTS))
def test_damage_ends_in_the_undisturbed_bits_or_in_one_typed_line(
    part: int, runs: Runs, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    damage_runs(part, runs, tmp_path, examples=EXAMPLES["long" if request.config.getoption("--long") else "short"])
