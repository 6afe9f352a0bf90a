"""COPA: which of two sentences is the cause, or the effect, of a premise?"""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, label, question

_CONJUNCTIONS = {"cause": "because", "effect": "so"}


def _questions(row: Row) -> list[dict[str, Any]]:
    prompt = f"{row['premise'].rstrip().removesuffix('.')} {_CONJUNCTIONS[row['question']]}"
    candidates = [f" {_continued(row[choice])}" for choice in ("choice1", "choice2")]
    return question(prompt, candidates, label(row, "choice1", "choice2"))


def _continued(sentence: str) -> str:
    """A sentence as it goes on after a conjunction: its first word is not capital, unless it is I."""
    first, space, rest = sentence.partition(" ")
    return f"{first if first == 'I' else first.lower()}{space}{rest}"


COPA = Benchmark(name="copa", hub=("aps/super_glue", "copa"), questions=_questions)
