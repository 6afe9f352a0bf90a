"""Words in context: has a word the same meaning in two sentences?"""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, label, question


def _questions(row: Row) -> list[dict[str, Any]]:
    asked = f'Does the word "{row["word"]}" have the same meaning in these two sentences? Yes, No?'
    prompt = f"{asked}\n{row['sentence1']}\n{row['sentence2']}\n"
    return question(prompt, ("No", "Yes"), label(row, "no", "yes"))


WIC = Benchmark(name="wic", hub=("aps/super_glue", "wic"), questions=_questions)
