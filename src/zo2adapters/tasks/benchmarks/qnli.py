"""QNLI: does a sentence answer a question?"""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, label, question


def _questions(row: Row) -> list[dict[str, Any]]:
    asked = "Does this sentence answer the question? Yes or No?"
    prompt = f"{asked}\nSentence 1: {row['question']}\nSentence 2: {row['sentence']}\n"
    return question(prompt, ("Yes", "No"), label(row, "entailment", "not_entailment"))


QNLI = Benchmark(name="qnli", hub=("nyu-mll/glue", "qnli"), questions=_questions)
