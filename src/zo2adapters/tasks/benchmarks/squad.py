"""SQuAD: answer a question by words of a paragraph."""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row


def _questions(row: Row) -> list[dict[str, Any]]:
    answers = row["answers"]["text"]
    prompt = f"Title: {row['title']}\nContext: {row['context']}\nQuestion: {row['question'].strip()}\nAnswer:"
    return [{"prompt": prompt, "completion": f" {answers[0]}\n", "answers": answers}]


SQUAD = Benchmark(name="squad", hub=("rajpurkar/squad", None), questions=_questions)
