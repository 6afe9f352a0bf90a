"""CommitmentBank: does a premise entail a hypothesis, contradict it, or neither?"""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, label, question


def _questions(row: Row) -> list[dict[str, Any]]:
    prompt = f'Suppose {row["premise"]} Can we infer that "{row["hypothesis"]}"? Yes, No, or Maybe?\n'
    return question(prompt, ("Yes", "No", "Maybe"), label(row, "entailment", "contradiction", "neutral"))


CB = Benchmark(name="cb", hub=("aps/super_glue", "cb"), questions=_questions)
