"""DROP: answer a question about a passage, by counting and comparing."""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row


def _questions(row: Row) -> list[dict[str, Any]]:
    answers = row["answers_spans"]["spans"]
    prompt = f"Passage: {row['passage']}\nQuestion: {row['question'].strip()}\nAnswer:"
    return [{"prompt": prompt, "completion": f" {answers[0]}\n", "answers": answers}]


DROP = Benchmark(name="drop", hub=("ucinlp/drop", None), questions=_questions)
