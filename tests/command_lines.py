"""Command lines in this process and in one of their own: what they print, and how they end."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from models import WORDS, save_model, save_tokenizer, small_config

from zo2adapters.cli import main

ROWS = [{"prompt": f"the cat {word}", "completion": f" {other}"} for word in WORDS[5:8] for other in WORDS[8:]]


class Ended(NamedTuple):
    """What became of a command."""

    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The last line of what it says about itself."""
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""


def run_here(*arguments: object) -> Ended:
    """Run a command in this process; an exception that is none of a command line's own comes through."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0
    return Ended(status, out.getvalue(), err.getvalue())


def refusal(*arguments: object) -> str:
    """What a command says that must be refused, in one typed line."""
    ended = run_here(*arguments)
    assert ended.status == 2, ended
    assert_typed(ended)
    return ended.line


def assert_typed(ended: Ended) -> None:
    """Of a refused command: one line, with what was found, what was expected and what to do."""
    typed = [line for line in ended.err.splitlines() if line.startswith("zo2: ")]
    assert typed == [ended.line], ended.err
    assert "Traceback" not in ended.err
    for part in (": found ", "; expected ", ". What to do: "):
        assert part in ended.line, ended.line


def command(*arguments: object) -> list[str]:
    """The arguments of a process that runs a command."""
    return [sys.executable, "-m", "zo2adapters.cli", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """The environment of such a process: one thread, and this process's modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **more}


def run_apart(*arguments: object, **options: Any) -> Ended:
    """Run a command in a process of its own."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120, **options}
    done = subprocess.run(command(*arguments), text=True, env=environment(), check=False, **given)
    return Ended(done.returncode, done.stdout or "", done.stderr or "")


def make_place(folder: Path, *, layers: int = 2) -> Path:
    """Lay a base, training rows and rows of choices into a folder."""
    base = save_model(folder / "base", small_config("llama", vocab_size=len(WORDS), num_hidden_layers=layers))
    save_tokenizer(base)
    write_rows(folder / "rows.jsonl", ROWS)
    choices = [{"prompt": "the cat is", "candidates": [" yes", " no"], "answer": " no"}]
    write_rows(folder / "choices.jsonl", choices)
    return folder


def write_rows(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
