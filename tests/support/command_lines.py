"""Command lines in this process and in one of their own: what they print, and how they end."""

import atexit
import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Self
from unittest import mock

import psutil
import pytest
import torch
from models import WORDS, save_model, save_tokenizer, small_config

from zo2adapters.cli import COMMANDS, command_class, main

SECONDS = 120  # a command takes a fraction of them
QUICK_MEASUREMENTS = {  # bytes and rounds; more would be more precise, which no test needs
    "zo2core.planning.speeds._BYTES": 1 << 20,
    "zo2core.planning.speeds._ROUNDS": 1,
    "zo2adapters.trainers.probes._HASHED": 1 << 20,
    "zo2adapters.trainers.probes._ROUNDS": 1,
    "zo2adapters.trainers.probes._MOST_ROUNDS": 1,
    "zo2adapters.trainers.probes._UPDATE_ROUNDS": 1,
}
NEEDS = (  # what commands import later: a process that is forked has it
    "zo2adapters.commands.options",
    "transformers.models.llama.modeling_llama",
    "torch.distributed",
    *(["peft"] if importlib.util.find_spec("peft") else []),
)
ROWS = [
    {"prompt": f"the cat {word}", "completion": f" {other}"}
    for word in WORDS[5:8]
    for other in WORDS[8:]
]


_DOUBLED = re.compile(r"\b([a-z]+) \1\b")  # words, as in 'found found'
_PYTHON = re.compile(r"\b[A-Z][a-z]+\w*\(")  # an expression, as in AdamW(lr=1): users see flags


class Ended(NamedTuple):
    """What became of a command."""

    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The last line of what it says about itself."""
        return self.err.strip().splitlines()[-1] if self.err.strip() else ""


def ended(program: Callable[[], int | None]) -> Ended:
    """What becomes of a program in this process; an exception that is none of a command line's own
    comes through.
    """
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = program() or 0
        except SystemExit as end:
            if isinstance(end.code, str):
                raise
            status = end.code or 0
    return Ended(status, out.getvalue(), err.getvalue())


def run_here(*arguments: object) -> Ended:
    """Run a command in this process."""
    return ended(lambda: main([str(argument) for argument in arguments]))


def run_tool(program: Callable[[], int | None], *arguments: object) -> Ended:
    """Run the main function of a program of tools/ in this process."""
    with mock.patch.object(sys, "argv", ["bench.py", *map(str, arguments)]):
        return ended(program)


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
    assert not _DOUBLED.search(ended.line), ended.line
    assert not _PYTHON.search(ended.line), ended.line


def command(*arguments: object) -> list[str]:
    """The arguments of a process that runs a command."""
    return [sys.executable, "-m", "zo2adapters.cli", *map(str, arguments)]


def torchrun_command(size: int, *arguments: object) -> list[str]:
    """The arguments of a process that lets ``torchrun`` start so many workers, on ports of their
    own.
    """
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(size),
    ]
    return [*launcher, *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """The environment of such a process: one thread, and this process's modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **more}


def wait_until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait for what another process or thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come"
        time.sleep(0.002)


def measure_quickly(patch: pytest.MonkeyPatch) -> None:
    """Let plans of this process measure the machine with few bytes and in few rounds."""
    for name, value in QUICK_MEASUREMENTS.items():
        patch.setattr(name, value)


class ExceededError(BaseException):
    """Not an Exception: no handler in the code under test may take it for bad input."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """End what takes longer."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise ExceededError(f"more than {seconds} seconds, in {frame}")

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


class Forker:
    """A process that has imported everything, and forks one for each command.

    One serves all tests of a session.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def fork(self, **told: object) -> int:
        """Fork a process that runs a command, and return its number; see ``Apart.start``."""
        return self._ask(told)

    def wait(self, pid: int) -> int:
        """Wait for such a process, and return its exit status; that of a signal is negative."""
        return self._ask({"wait": pid})

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(SECONDS)
        self._process.stdout.close()

    def _ask(self, told: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the server is gone"
        return int(line)


class Apart:
    """Commands in processes of their own, with signals and limits of their own, one after the
    other.

    What a command became is read before the next one starts.
    """

    def __init__(self, forker: Forker, folder: Path, *, shuts_down: bool = False) -> None:
        self._forker, self._shuts_down = forker, shuts_down
        self._out, self._err = folder / "out", folder / "err"
        self.pid = 0

    def start(self, *arguments: object, patch: str = "", out: str | None = None) -> Self:
        """Start a command in the present directory.

        Args:
            arguments: The command line.
            patch: Python to run in the process beforehand.
            out: File that standard output goes to; by default it is kept.
        """
        self._out.touch()
        self.pid = self._forker.fork(
            arguments=[str(argument) for argument in arguments],
            patch=patch,
            folder=str(Path.cwd()),
            out=out or str(self._out),
            err=str(self._err),
            shuts_down=self._shuts_down,
        )
        return self

    def finish(self) -> Ended:
        """Wait for the command."""
        status = self._forker.wait(self.pid)
        return Ended(status, self._out.read_text(), self._err.read_text())

    def run(self, *arguments: object, **options: Any) -> Ended:
        """Start a command and wait for it."""
        return self.start(*arguments, **options).finish()

    @property
    def is_running(self) -> bool:
        """Whether the command has not ended; its process is there until ``finish`` has waited for
        it.
        """
        try:
            return bool(psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    def send(self, number: int) -> None:
        """Send the command a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def serve() -> None:
    """Fork a process for each command of standard input, and wait for those that are asked for;
    answer with a number.
    """
    torch.set_num_threads(1)
    measure_quickly(pytest.MonkeyPatch())  # never undone
    for name in COMMANDS:
        for module in (*command_class(name).needs, *NEEDS):
            importlib.import_module(module)
    assert threading.active_count() == 1, "a forked process has no threads but the one that forked"
    gc.freeze()  # a child that looks through all of these objects would copy their memory first
    for line in sys.stdin:
        told = json.loads(line)
        if "wait" in told:
            _, status = os.waitpid(told["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        worker = os.fork()
        if worker == 0:
            os.chdir(told["folder"])
            for path, descriptor in ((told["out"], 1), (told["err"], 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            sys.argv = ["zo2", *told["arguments"]]
            signal.alarm(SECONDS)  # ends what hangs
            run_forked(told["patch"], shuts_down=told["shuts_down"])
        print(worker, flush=True)
    os._exit(0)


def run_forked(patch: str, *, shuts_down: bool) -> NoReturn:
    """Run the command of this process, and end it."""
    if shuts_down:
        gc.unfreeze()
        exec(patch, {})
        main()
        sys.exit()
    status = 1
    try:
        exec(patch, {})
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def make_place(folder: Path, *, layers: int = 2) -> Path:
    """Lay a base, training rows and rows of choices into a folder."""
    base = save_model(
        folder / "base", small_config("llama", vocab_size=len(WORDS), num_hidden_layers=layers)
    )
    save_tokenizer(base)
    write_rows(folder / "rows.jsonl", ROWS)
    choices = [{"prompt": "the cat is", "candidates": [" yes", " no"], "answer": " no"}]
    write_rows(folder / "choices.jsonl", choices)
    return folder


def leaves(values: dict[str, Any]) -> dict[str, Any]:
    """Options of a run without their groups."""
    nested = [
        leaves(value) if isinstance(value, dict) else {name: value}
        for name, value in values.items()
    ]
    return {name: value for group in nested for name, value in group.items()}


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    serve()
