"""The table of families and formats: what it says is what was compared."""

from __future__ import annotations

from pathlib import Path

import families
import formats
import pytest


@pytest.mark.parametrize(
    ("family", "form", "expected"),
    [("llama", "awq", "="), ("gpt_oss", "mxfp4", "="), ("llama", "mxfp4", ""), ("granitemoe", "awq", "equal, with experts")],
)
def test_a_cell_says_what_holds(family: str, form: str, expected: str, tmp_path: Path) -> None:
    assert formats.outcome(family, form, tmp_path).startswith(expected)


def test_steps_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "trained_by_peft", lambda *arguments, steps: ([0.0] * formats.STEPS, {}))
    assert formats.outcome("llama", "bfloat16", tmp_path) == "different"
