"""The demo's task: is this line text of a docstring, or code? Its rows come from the source of Python's standard library.

The question has a form that does not occur in pre-training, and its answers are letters without a prior meaning.
"""

from __future__ import annotations

import ast
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from zo2core.errors import DataError
from zo2core.io.durable import open_no_follow
from zo2core.ranges import counted

LABELS = (" a", " b")  # docstring text, code; letters without a meaning, so that an untrained model guesses
QUESTION = "\nKind:"  # follows the line; it does not occur in pre-training

_LENGTHS = range(20, 61)  # characters of a line
_SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "encodings"}


def source_texts(*, seed: int) -> Iterator[str]:
    """Yield the standard library's source files, in an order that depends on the seed, without bytes that are not UTF-8."""
    root = Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for directory, children, files in os.walk(root):
        children[:] = [child for child in children if child not in _SKIPPED]  # os.walk then skips the others
        paths = [Path(directory, file) for file in files if file.endswith(".py") and not file.startswith("_sysconfigdata")]
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]  # leaves out dangling links
    order = Random(seed)  # noqa: S311 - the order of files is not a secret
    for name in sorted(sorted(names), key=lambda _: order.random()):
        yield (root / name).read_text(encoding="utf-8", errors="ignore")


def pretraining_texts(files: Iterator[str], characters: int) -> list[str]:
    """Take the text for pre-training from the files, and leave the other files to the task."""
    texts: list[str] = []
    size = 0
    while size < characters:
        text = next(files, None)
        if text is None:
            raise _too_little(f"{size} characters", f"{characters}")
        texts.append(text.replace(QUESTION, "\n")[: characters - size])
        size += len(texts[-1])
    return texts


def question_rows(files: Iterator[str], wanted: int, *, pairs_per_file: int, known: str) -> list[dict[str, str]]:
    """Make rows about lines that are not in a known text, equally many for each label."""
    rows: list[dict[str, str]] = []
    taken: set[str] = set()
    for text in files:
        pairs = zip(*(_fresh(lines, taken, known) for lines in _lines(text)), strict=False)
        for pair in islice(pairs, pairs_per_file):
            rows += [{"prompt": line + QUESTION, "completion": label} for line, label in zip(pair, LABELS, strict=True)]
            taken.update(pair)
        if len(rows) >= wanted:
            return rows[:wanted]
    raise _too_little(counted(len(rows), "row"), f"{wanted}")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    """Write objects as a JSONL file, and return its path."""
    with open(path, "w", encoding="utf-8", opener=open_no_follow) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def _fresh(lines: Sequence[str], taken: set[str], known: str) -> Iterator[str]:
    return (line for line in dict.fromkeys(lines) if len(line) in _LENGTHS and line not in taken and line not in known)


def _lines(source: str) -> tuple[list[str], list[str]]:
    """The lines of docstrings that start with a letter, and the statements that fill a line."""
    prose: list[str] = []
    code: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # about invalid escapes in strings
            warnings.simplefilter("ignore", DeprecationWarning)  # about the same, before Python 3.12
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a template, for example
        return prose, code
    lines = source.split("\n")  # as ast counts them; splitlines would also cut at form feeds
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value if isinstance(node.value.value, str) else ""
            prose += [line.strip() for line in text.splitlines() if line.strip()[:1].isalpha()]
        elif isinstance(node, ast.stmt) and node.lineno == node.end_lineno:
            code.append(lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode())
    return prose, code


def _too_little(found: str, expected: str) -> DataError:
    found = f"{found} in the source files of the standard library"
    remedy = "use a Python installation that includes the source of its standard library"
    return DataError(sysconfig.get_path("stdlib"), found=found, expected=expected, remedy=remedy)
