"""Command lines that the declarations of options call valid: none ends in a traceback."""

from pathlib import Path

import pytest
from command_walk import WEIGHTS, Ended, make_place, walk
from profiles import LONG


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("walk"))


def shown(ended: list[Ended]) -> str:
    return "\n".join(f"{one.line}\n    {one.said}" for one in ended)


QUICK = {"plan": 14, "init": 2, "journal": 1, "export": 1, "generate": 1, "train": 1}


@pytest.mark.parametrize(
    ("lines", "weights", "most"), [(12, QUICK, 1), pytest.param(300, WEIGHTS, 9, marks=LONG)]
)
def test_a_valid_line_gives_a_result(
    lines: int, weights: dict[str, int], most: int, place: Path
) -> None:
    """But for a few, of which model or data know more than the declarations."""
    ended = list(walk(place, lines, 0, weights))
    assert len(ended) == lines
    assert not [one for one in ended if one.status == "fault"], shown(ended)
    refused = [one for one in ended if one.status == "refused"]
    assert len(refused) <= most, shown(refused)
