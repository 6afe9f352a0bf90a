"""MRPC: do two sentences mean the same?"""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, label, question


def _questions(row: Row) -> list[dict[str, Any]]:
    asked = "Do the following two sentences mean the same thing? Yes or No?"
    prompt = f"{asked}\nSentence 1: {row['sentence1']}\nSentence 2: {row['sentence2']}\n"
    return question(prompt, ("No", "Yes"), label(row, "not_equivalent", "equivalent"))


MRPC = Benchmark(name="mrpc", hub=("nyu-mll/glue", "mrpc"), questions=_questions)
