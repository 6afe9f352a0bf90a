"""Command lines in this process and in one of their own: what they print, and how they end."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from models import WORDS, save_model, save_tokenizer, small_config

from zo2adapters.cli import COMMANDS, main

SECONDS = 120  # a command takes a fraction of them
NEEDS = (  # what commands import later: a process that is forked has it
    "tyro",
    "zo2adapters.commands.help_text",
    "zo2adapters.commands.refusals",
    "transformers.models.llama.modeling_llama",
    "zo2core.workers.rendezvous",
    *(["peft"] if importlib.util.find_spec("peft") else []),
)
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


def done(*arguments: object) -> Ended:
    """Run a command that has to succeed."""
    ended = run_here(*arguments)
    assert ended.status == 0, ended.err
    return ended


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


def torchrun_command(size: int, *arguments: object) -> list[str]:
    """The arguments of a process that lets ``torchrun`` start so many workers, on ports of their own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    return [*launcher, *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """The environment of such a process: one thread, and this process's modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **more}


class Apart:
    """A process that has imported everything, and forks one for each command: with signals and limits of its own.

    Used by one test at a time: what a command became is read before the next one starts.
    """

    def __init__(self, folder: Path) -> None:
        self._out, self._err = folder / "out", folder / "err"
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        self.pid = 0

    def start(self, *arguments: object, patch: str = "", out: str | None = None) -> Self:
        """Start a command.

        Args:
            arguments: The command line.
            patch: Python to run in the process beforehand.
            out: File that standard output goes to; by default it is kept.
        """
        assert self._process.stdin is not None
        told = {"arguments": [str(argument) for argument in arguments], "patch": patch}
        told |= {"out": out or str(self._out), "err": str(self._err)}
        self._out.touch()
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        self.pid = int(self._answer())
        return self

    def finish(self) -> Ended:
        """Wait for the command."""
        status = int(self._answer())
        return Ended(status, self._out.read_text(), self._err.read_text())

    def run(self, *arguments: object, **options: Any) -> Ended:
        """Start a command and wait for it."""
        return self.start(*arguments, **options).finish()

    def send(self, number: int) -> None:
        """Send the command a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(SECONDS)
        self._process.stdout.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server is gone"
        return line


def serve() -> None:
    """Fork a process for each line of standard input; answer its number, and then its status."""
    torch.set_num_threads(1)
    for place in COMMANDS.values():
        for module in (place.module, *place.needs, *NEEDS):
            importlib.import_module(module)
    assert threading.active_count() == 1, "a forked process has no threads but the one that forked"
    for line in sys.stdin:
        told = json.loads(line)
        worker = os.fork()
        if worker == 0:
            for path, descriptor in ((told["out"], 1), (told["err"], 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            sys.argv = ["zo2", *told["arguments"]]
            signal.alarm(SECONDS)  # ends what hangs
            exec(told["patch"], {})
            main()
            sys.exit()  # as a process of its own ends, with all that Python does then
        print(worker, flush=True)
        _, status = os.waitpid(worker, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


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


if __name__ == "__main__":
    serve()
