"""RTE: does a premise entail a hypothesis?"""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, label, question


def _questions(row: Row) -> list[dict[str, Any]]:
    prompt = f'{row["premise"]}\nDoes this mean that "{row["hypothesis"]}" is true? Yes or No?\n'
    return question(prompt, ("Yes", "No"), label(row, "entailment", "not_entailment"))


RTE = Benchmark(name="rte", hub=("aps/super_glue", "rte"), questions=_questions)
