"""Write GSM-like conversations: a question about two numbers, and an answer in one line of working
and one of result.

    python tools/make_chats.py chats

Writes ``train.jsonl``, and ``held-out.jsonl`` without any row of the first file. The same seed
gives the same files.
"""

import json
import random
from pathlib import Path
from typing import Any

from measuring import command

NAMES = [
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hana",
    "Ida",
    "Jon",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ola",
    "Pia",
]
THINGS = ["apples", "pencils", "marbles", "books", "stamps", "shells", "coins", "cards"]


def conversation(generator: random.Random) -> dict[str, Any]:
    """A row with one question and its answer, which ends with ``####`` and the result."""
    name, other, things = generator.choice(NAMES), generator.choice(NAMES), generator.choice(THINGS)
    first, second, boxes = (
        generator.randint(2, 30),
        generator.randint(2, 20),
        generator.randint(2, 5),
    )
    kind = generator.randint(0, 2)
    if kind == 0:
        given = f"{name} has {first} {things}. {other} gives {name} {second} more."
        question = f"{given} How many {things} does {name} have now?"
        result, working = (
            first + second,
            f"{name} has {first} + {second} = {first + second} {things}.",
        )
    elif kind == 1:
        question = (
            f"{name} buys {boxes} boxes with {first} {things} each. How many {things} does {name} "
            "have?"
        )
        result = boxes * first
        working = f"{boxes} boxes of {first} {things} are {boxes} * {first} = {result} {things}."
    else:
        whole, result = first + second, first
        question = (
            f"{name} has {whole} {things} and gives {second} of them to {other}. How many "
            f"{things} are left?"
        )
        working = f"{whole} - {second} = {result} {things} are left."
    answer = {"role": "assistant", "content": f"{working}\n#### {result}"}
    return {"messages": [{"role": "user", "content": question}, answer]}


@command
def main(directory: Path, *, rows: int = 800, held_out: int = 100, seed: int = 1) -> None:
    if directory.exists():
        raise SystemExit(f"{directory} exists; name a directory that does not")
    directory.mkdir(parents=True)
    generator = random.Random(seed)
    train = [json.dumps(conversation(generator)) for _ in range(rows)]
    known, others = set(train), list[str]()
    while len(others) < held_out:
        row = json.dumps(conversation(generator))
        if row not in known:
            others.append(row)
    for name, written in (("train", train), ("held-out", others)):
        (directory / f"{name}.jsonl").write_text("\n".join(written) + "\n")


if __name__ == "__main__":
    main()
