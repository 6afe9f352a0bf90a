"""QQP: do two questions ask the same?"""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, label, question


def _questions(row: Row) -> list[dict[str, Any]]:
    asked = "Are these two questions asking the same thing? Yes or No?"
    prompt = f"{asked}\nQuestion 1: {row['question1']}\nQuestion 2: {row['question2']}\n"
    return question(prompt, ("No", "Yes"), label(row, "not_duplicate", "duplicate"))


QQP = Benchmark(name="qqp", hub=("nyu-mll/glue", "qqp"), questions=_questions)
