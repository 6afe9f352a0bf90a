"""Winograd schemas: does a pronoun refer to a noun?"""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, label, question


def _questions(row: Row) -> list[dict[str, Any]]:
    spans = row.get("target", row)  # in the benchmark's own files in an object of their own
    noun, pronoun = spans["span1_text"], spans["span2_text"].lower()
    prompt = f'{row["text"]}\nIn the previous sentence, does the pronoun "{pronoun}" refer to {noun}? Yes or No?\n'
    return question(prompt, ("No", "Yes"), label(row, "no", "yes"))


WSC = Benchmark(name="wsc", hub=("aps/super_glue", "wsc.fixed"), questions=_questions)
