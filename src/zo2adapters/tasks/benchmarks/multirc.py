"""MultiRC: is an answer to a question about a paragraph right? Each answer is a question of its own."""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, label, question


def _questions(row: Row) -> list[dict[str, Any]]:
    if "passage" not in row:
        return _asked(row["paragraph"], row["question"], row["answer"], row)
    passage = row["passage"]  # the benchmark's own files have a line a passage
    return [
        asked
        for of_passage in passage["questions"]
        for answer in of_passage["answers"]
        for asked in _asked(passage["text"], of_passage["question"], answer["text"], answer)
    ]


def _asked(paragraph: str, asked: str, answer: str, labelled: Row) -> list[dict[str, Any]]:
    prompt = f'{paragraph}\nQuestion: {asked}\nI found this answer "{answer}". Is that correct? Yes or No?\n'
    return question(prompt, ("No", "Yes"), label(labelled, "no", "yes"))


MULTIRC = Benchmark(name="multirc", hub=("aps/super_glue", "multirc"), questions=_questions)
