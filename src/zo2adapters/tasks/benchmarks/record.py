"""ReCoRD: which entity of a passage belongs into a sentence? Any of its names that are right will do."""

from __future__ import annotations

from typing import Any

from zo2adapters.tasks.benchmarks.benchmark import Benchmark, Row, question


def _questions(row: Row) -> list[dict[str, Any]]:
    if isinstance(row["passage"], str):
        return _asked(row["passage"], row["query"], row["entities"], row["answers"])
    text, places = row["passage"]["text"], row["passage"]["entities"]  # the benchmark's own files have a line a passage
    entities = list(dict.fromkeys(text[place["start"] : place["end"] + 1] for place in places))
    return [
        asked
        for query in row["qas"]
        for asked in _asked(text, query["query"], entities, [answer["text"] for answer in query["answers"]])
    ]


def _asked(passage: str, query: str, entities: list[str], answers: list[str]) -> list[dict[str, Any]]:
    right = [place for place, entity in enumerate(entities) if entity in answers]
    prompt = passage.replace("@highlight\n", "- ") + "\n-"
    return question(prompt, [f" {query.replace('@placeholder', entity)}" for entity in entities], right)


RECORD = Benchmark(name="record", hub=("aps/super_glue", "record"), questions=_questions)
