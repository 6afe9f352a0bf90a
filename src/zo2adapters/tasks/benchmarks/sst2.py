"""SST-2: is a sentence of a film review positive?"""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, label, question


def _questions(row: Row) -> list[dict[str, Any]]:
    prompt = f"{row['sentence'].strip()} It was"
    return question(prompt, (" terrible", " great"), label(row, "negative", "positive"))


SST2 = Benchmark(name="sst2", hub=("nyu-mll/glue", "sst2"), questions=_questions)
