"""BoolQ: is the answer to a question about a passage yes?"""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, label, question


def _questions(row: Row) -> list[dict[str, Any]]:
    asked = row["question"] if row["question"].endswith("?") else f"{row['question']}?"
    prompt = f"{row['passage']} {asked[:1].upper()}{asked[1:]}\n"
    return question(prompt, ("No", "Yes"), label(row, "no", "yes"))


BOOLQ = Benchmark(name="boolq", hub=("aps/super_glue", "boolq"), questions=_questions)
