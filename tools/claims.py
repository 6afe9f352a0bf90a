"""Claims: where each measured number of the pages comes from. docs/claims.json has them as data.

A claim is a text as it is printed: a row of a table, or a part of a sentence. It names the command,
the machine and the date. For each number that a file of tools/results/ has, it says where in that
file: then the test computes it again.

    python tools/claims.py             what is covered, page by page
    python tools/claims.py find PAGE   add the rows of a page's tables whose values a result has
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
CLAIMS = ROOT / "docs" / "claims.json"
RESULTS = ROOT / "tools" / "results"

NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?!\w)")
WITH_RANGE = re.compile(r"([\d.,]+)[^\[\]|]*\[([\d.,]+) - ([\d.,]+)\]")
SCALES = (1, 100, 1000, 1 / 60, 1e-6, 1e-9, 1e-12, 1 / 2**20, 1 / 2**30)

Step = str | int | Mapping[str, Any]  # a key, an index, or what an item of a list has


class Spread(NamedTuple):
    """A measured value."""

    median: float
    least: float
    most: float


@cache
def result(name: str) -> Any:
    """The JSON of a file of tools/results/."""
    return json.loads((RESULTS / name).read_text())


def values_at(data: Any, steps: Sequence[Step]) -> list[Any]:
    """All values where the steps lead; a step that describes items leads to each of them."""
    values = [data]
    for step in steps:
        if isinstance(step, Mapping):
            items = [item for listed in values for item in listed]
            values = [item for item in items if step.items() <= item.items()]
        else:
            values = [value[step] for value in values]
    return values


def spread_at(name: str, steps: Sequence[Step]) -> Spread:
    """Median and range of the values in a result, or those that it has."""
    values = values_at(result(name), steps)
    assert values, f"{name} has nothing at {steps}"
    if len(values) == 1 and isinstance(values[0], Mapping):
        return Spread(values[0]["median"], values[0]["min"], values[0]["max"])
    return Spread(statistics.median(values), min(values), max(values))


def is_rounded(value: float, number: str) -> bool:
    """Whether a printed number is the value, rounded to its decimals."""
    unit = 10.0 ** -len(number.partition(".")[2])
    return abs(value - float(number)) <= unit * (0.5 + 1e-9)


def differences(text: str, spread: Spread, times: float) -> list[str]:
    """What is printed otherwise than measured: one number is the median, three are with the range,
    two are the range.
    """
    numbers = [number.replace(",", "") for number in NUMBER.findall(text)]
    expected = {1: spread[:1], 2: spread[1:], 3: tuple(spread)}.get(len(numbers), ())
    if not expected:
        return [f"{text!r} has {len(numbers)} numbers"]
    return [
        f"{text!r}: {number}, where {value * times:.6g} was measured"
        for number, value in zip(numbers, expected, strict=True)
        if not is_rounded(value * times, number)
    ]


def cells(row: str) -> list[str]:
    """The cells of a row of a table."""
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


class Row(NamedTuple):
    """A row of a table, and where it stands."""

    text: str
    section: str  # the anchor of its heading


def rows(page: Path) -> Iterator[Row]:
    """The rows of a page's tables, without heads."""
    lines = page.read_text().splitlines()
    section = ""
    is_code = False
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        is_code ^= line.startswith("```")
        if is_code:
            continue
        if line.startswith("#"):
            section = re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-")
        is_head = after.startswith("|--") or line.startswith("|--")
        if line.startswith("|") and not is_head and before.startswith("|"):
            yield Row(line, section)


def without_code(text: str) -> str:
    """A text without its code, which changes when an option is named anew and no number does."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "``", text)


def printed_at(claim: Mapping[str, Any], number: Mapping[str, Any]) -> str:
    """The part of a claim's text that prints a value: a cell, or what ``part`` says."""
    if "part" in number:
        assert number["part"] in claim["text"], claim
        return str(number["part"])
    cell = cells(claim["text"])[number["cell"]]
    match = WITH_RANGE.search(cell)
    return match[0] if match else cell


def false_numbers(claim: Mapping[str, Any]) -> list[str]:
    """The numbers of a claim that its results do not have."""
    return [
        f"{number['result']}: {difference}"
        for number in claim.get("numbers", [])
        for difference in differences(
            printed_at(claim, number),
            spread_at(number["result"], number["at"]),
            number["times"],
        )
    ]


# ---- finding where printed numbers come from


class Place(NamedTuple):
    """A value of a result."""

    result: str
    steps: tuple[Step, ...]
    spread: Spread


def _spreads(data: Any, steps: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], Spread]]:
    if isinstance(data, Mapping):
        if {"median", "min", "max"} <= data.keys():
            yield steps, Spread(data["median"], data["min"], data["max"])
        else:
            for key, value in data.items():
                yield from _spreads(value, (*steps, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _spreads(value, (*steps, index))


def _of_points(data: Any) -> Iterator[tuple[tuple[Step, ...], Spread]]:
    """Of a real task's runs: each value at each point, over seeds."""
    runs = data.get("runs", []) if isinstance(data, Mapping) else []
    if not runs or not isinstance(runs, list) or "points" not in runs[0]:
        return
    kinds = {
        (run["variant"], run["lr"], run["steps"]): run["points"]
        for run in runs
        if run["rows"] == "evaluation"
    }
    for (variant, lr, steps), points in kinds.items():
        chosen = {"variant": variant, "lr": lr, "steps": steps, "rows": "evaluation"}
        for point in points:
            at: tuple[Step, ...] = ("runs", chosen, "points", {"steps": point["steps"]})
            for key in ("accuracy", "loss", "cpu_seconds"):
                values = values_at(data, (*at, key))
                yield (*at, key), Spread(statistics.median(values), min(values), max(values))


@cache
def places() -> list[Place]:
    """All values of all results."""
    return [
        Place(path.name, steps, spread)
        for path in sorted(RESULTS.glob("*.json"))
        for steps, spread in (*_spreads(result(path.name)), *_of_points(result(path.name)))
    ]


def find(page: Path) -> list[dict[str, Any]]:
    """The rows of a page's tables of which a result has a value."""
    sections = re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE)
    claims = []
    for row in rows(page):
        around = next((text for text in sections if row.text in text), "")
        named = set(re.findall(r"([\w.-]+\.json)", around))
        numbers = _sources(cells(row.text), named)
        if numbers:
            command = f"{page.relative_to(ROOT)}#{row.section}"
            claims.append({"text": row.text, "command": command, "numbers": numbers})
    return claims


def _sources(printed_cells: Sequence[str], named: set[str]) -> list[dict[str, Any]]:
    """Where the numbers of a row come from.

    A value with its range is found by itself: no other has the same digits. A single number could
    be anything, so it is looked for beside one that was found.
    """
    sources: dict[int, tuple[Place, float]] = {}
    for index, cell in enumerate(printed_cells):
        if match := WITH_RANGE.search(cell):
            fitting = [
                (place, times)
                for place in places()
                for times in SCALES
                if not differences(match[0], place.spread, times)
            ]
            fitting.sort(key=lambda source: source[0].result not in named)
            if fitting:
                sources[index] = fitting[0]
    besides = {(place.result, repr(place.steps[:-1])) for place, _ in sources.values()}
    for index, cell in enumerate(printed_cells):
        if index in sources or len(NUMBER.findall(cell)) != 1 or not re.search(r"\d\.\d", cell):
            continue
        for place in places():
            beside = (place.result, repr(place.steps[:-1])) in besides
            if beside and not differences(cell, place.spread, _scale(cell, place.steps[-1])):
                sources.setdefault(index, (place, _scale(cell, place.steps[-1])))
    return [
        {"cell": index, "result": place.result, "at": list(place.steps), "times": times}
        for index, (place, times) in sorted(sources.items())
    ]


def _scale(cell: str, key: Step) -> float:
    """How a single number of a cell would be printed from a value with this name."""
    if cell.endswith("GB"):
        return 1e-9 if "bytes" in str(key) else 0.0
    if key in {"accuracy", "loss", "minutes"}:
        return 0.0  # printed with their range; and a shared machine's minutes are not printed
    return 1 / 60 if key == "cpu_seconds" else 1


def origin(name: str) -> dict[str, str]:
    """Commit and date of a result, and what it says of its machine: docs/measuring.md says more."""
    log = ["git", "log", "-1", "--format=%h %ad", "--date=short", "--", str(RESULTS / name)]
    commit, date = subprocess.check_output(log, cwd=ROOT, text=True).split()
    data = result(name)
    machine = data.get("machine", {}) if isinstance(data, Mapping) else {}
    said = [str(machine[key]) for key in ("gpu", "processor") if machine.get(key)]
    return {"machine": ", ".join(said), "commit": commit, "date": date}


def written(claims: Mapping[str, Mapping[str, Any]]) -> str:
    """The claims as JSON, a line each, as a reader of a diff wants them."""
    parts = []
    for kind, items in claims.items():
        entries = [f"{json.dumps(name)}: {_lines(value)}" for name, value in items.items()]
        parts.append(f"{json.dumps(kind)}: {{\n" + ",\n".join(entries) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    return "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n]"


def main() -> None:
    """Print what is covered, or add what is found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["find"])
    parser.add_argument("page", nargs="?", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args()
    claims = json.loads(CLAIMS.read_text())
    if options.what == "find":
        page = options.page.resolve()
        name = str(page.relative_to(ROOT))
        known = {claim["text"] for claim in claims["claims"].get(name, [])}
        new = [claim for claim in find(page) if claim["text"] not in known]
        claims["claims"].setdefault(name, []).extend(new)
        for claim in new:
            for number in claim["numbers"]:
                claims["results"].setdefault(number["result"], origin(number["result"]))
        CLAIMS.write_text(written(claims))
    for name, texts in claims["claims"].items():
        known = {claim["text"] for claim in texts}
        told = [row for row in rows(ROOT / name) if NUMBER.search(row.text)]
        computed = sum(len(claim.get("numbers", [])) for claim in texts)
        covered = sum(row.text in known for row in told)
        print(f"{name}: {covered} of {len(told)} rows, {computed} values computed from results")


if __name__ == "__main__":
    main()
