"""Claims: what the pages print as measured is what the results have; nothing else is printed."""

import json
import re
from collections.abc import Mapping
from typing import Any

import claims
import pytest

DATA = json.loads(claims.CLAIMS.read_text())
OF_PAGE: Mapping[str, list[dict[str, Any]]] = DATA["claims"]
ALL = [(page, claim) for page, of_page in OF_PAGE.items() for claim in of_page]


@pytest.mark.parametrize("page", OF_PAGE)
def test_every_claim_is_printed_as_it_is(page: str) -> None:
    whole = (claims.ROOT / page).read_text()
    text = claims.without_code(whole)
    changed = [
        claim["text"]
        for claim in OF_PAGE[page]
        if claim["text"] not in whole and claims.without_code(claim["text"]) not in text
    ]
    assert not changed, "the page says something else: measure it, and change docs/claims.json"


def test_printed_numbers_are_those_of_the_results() -> None:
    assert not [false for _, claim in ALL for false in claims.false_numbers(claim)]
    assert sum(len(claim.get("numbers", [])) for _, claim in ALL) > 400


def test_every_claim_names_command_machine_commit_and_date() -> None:
    for page, claim in ALL:
        where, _, section = claim["command"].partition("#")
        if section:
            shown = (claims.ROOT / where).read_text()
            parts = re.split(r"^#+ (.*)$", shown, flags=re.MULTILINE)
            titles = [re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in parts[1::2]]
            assert section in titles, claim
        else:
            assert where.split()[0] in {"zo2", "pip", "make", "python"}, claim
        origins = [DATA["results"][number["result"]] for number in claim.get("numbers", [])]
        for origin in origins or [claim]:
            assert origin["machine"], page
            assert re.fullmatch(r"[0-9a-f]{8}", origin["commit"])
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", origin["date"])


def test_the_readme_prints_no_other_number() -> None:
    """Names, commands and links aside."""
    text = claims.without_code((claims.ROOT / "README.md").read_text())
    for claim in OF_PAGE["README.md"]:
        text = text.replace(claims.without_code(claim["text"]), "")
    for plain in DATA["not measured"]["README.md"]:
        assert plain in text, f"{plain} is not printed any more"
        text = text.replace(plain, "")
    text = re.sub(r"\]\([^)]*\)", "", text)
    left = [
        line
        for line in text.splitlines()
        if claims.NUMBER.search(re.sub(r"\w*[A-Za-z]\S*", "", line))
    ]
    assert not left, "measured: docs/claims.json has it; otherwise its list of what is not"


def test_every_row_of_the_benchmarks_that_prints_numbers_is_a_claim() -> None:
    name = "docs/benchmarks.md"
    known = {claim["text"] for claim in OF_PAGE[name]}
    left = []
    for row in claims.rows(claims.ROOT / name):
        plain = re.sub(r"\]\([^)]*\)", "", claims.without_code(row.text))
        if claims.NUMBER.search(re.sub(r"\w*[A-Za-z]\S*", "", plain)) and row.text not in known:
            left.append(row.text)
    assert not left, "add the row to docs/claims.json, with command, machine, commit and date"


@pytest.mark.parametrize(
    ("text", "spread", "times", "is_printed"),
    [
        ("91.8 % [91.6 - 91.9]", (0.9181, 0.9157, 0.919), 100, True),
        ("91.8 % [91.6 - 91.9]", (0.9181, 0.9145, 0.919), 100, False),
        ("2.7", (161.9, 150.0, 170.0), 1 / 60, True),
        ("2.6", (161.9, 150.0, 170.0), 1 / 60, False),
        ("1.04 to 1.07", (1.05, 1.038, 1.0719), 1, True),
        ("1,024 s", (1024.3, 0.0, 0.0), 1, True),
        ("no number", (1.0, 1.0, 1.0), 1, False),
    ],
)
def test_a_printed_number_is_rounded_as_it_is_printed(
    text: str, spread: tuple[float, float, float], times: float, is_printed: bool
) -> None:
    assert (not claims.differences(text, claims.Spread(*spread), times)) is is_printed


def test_values_are_found_by_what_describes_them() -> None:
    data = {"runs": [{"of": "a", "points": [{"at": 1, "x": 2.0}, {"at": 2, "x": 4.0}]}]}
    assert claims.values_at(data, ["runs", {"of": "a"}, "points", {"at": 2}, "x"]) == [4.0]
    assert claims.values_at(data, ["runs", {"of": "b"}, "points", {"at": 2}, "x"]) == []
    assert claims.values_at(data, ["runs", 0, "points", {}, "x"]) == [2.0, 4.0]
