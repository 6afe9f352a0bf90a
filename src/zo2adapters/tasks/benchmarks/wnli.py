"""WNLI: does one sentence follow from another?"""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, label, question


def _questions(row: Row) -> list[dict[str, Any]]:
    asked = "Given the first sentence, is the second sentence true? Yes or No?"
    prompt = f"{asked}\nSentence 1: {row['sentence1']}\nSentence 2: {row['sentence2']}\n"
    return question(prompt, ("No", "Yes"), label(row, "not_entailment", "entailment"))


WNLI = Benchmark(name="wnli", hub=("nyu-mll/glue", "wnli"), questions=_questions)
