"""WinoGrande: which of two nouns belongs into a sentence? The sentence is scored from where it stands."""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, question


def _questions(row: Row) -> list[dict[str, Any]]:
    before, _, after = row["sentence"].partition("_")
    answer = {"1": 0, "2": 1}[str(row["answer"])]
    return question(before.rstrip(), [f" {row[option]}{after}" for option in ("option1", "option2")], answer)


WINOGRANDE = Benchmark(name="winogrande", hub=("allenai/winogrande", "winogrande_debiased"), questions=_questions)
