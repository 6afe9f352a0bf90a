"""The command ``zo2``: each subcommand is a dataclass whose fields are its options.

Nothing slow is imported here: until the signal handlers are installed, Python's own would print a
traceback. Then a command imports what it uses.

Note: SIGINT, SIGTERM and SIGHUP. No signal may leave a traceback or a damaged file, whenever it
comes. While a command starts (imports, the command line) a signal ends the process immediately.
While it runs, the first signal raises in the main thread: the current step is dropped, files are
closed, and one line says how to continue. A second signal prints a line, and a third ends the
process immediately, which loses no step either: a run survives SIGKILL at any moment.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import mmap
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, TextIO

from zo2adapters.commands.guarded_stream import STREAMS, GuardedStream

REFUSED = 2  # exit status
_HELP = {"-h", "--help", "--help-all"}
_PLAIN_FORMAT = warnings.formatwarning
# Variables that turn off the progress bars of tqdm, huggingface_hub and datasets.
_BARS_OFF = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")
_BROKEN_PIPE = 141  # exit status that shells give to SIGPIPE
_NO_MEMORY = "zo2: host memory: found none left; expected enough to start. What to do: free memory."
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNALS_UNTIL_EXIT = 3  # number of signals that ends the process immediately
# address space that is freed when an error has to be printed: printing takes memory, too
_RESERVE_BYTES = 8 << 20


# modules of zo2adapters.commands, and the dataclasses in them
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "Demo"),
    "init": ("init", "Init"),
    "train": ("train", "Train"),
    "tune": ("train", "Tune"),
    "evaluate": ("evaluate", "Evaluate"),
    "generate": ("generate", "Generate"),
    "chat": ("generate", "Chat"),
    "export": ("export", "Export"),
    "merge": ("export", "Merge"),
    "push": ("export", "Push"),
    "verify": ("verify", "Verify"),
    "journal": ("journal", "ShowJournal"),
    "report": ("report", "Report"),
    "rows": ("evaluate", "WriteRows"),
    "plan": ("train", "Plan"),
    "convert": ("export", "Convert"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; every error becomes one line and exit status 2.

    Args:
        arguments: The command line without the program's name; None takes the process's own and
            handles its signals.
    """
    if arguments is not None:
        status = _status(list(arguments), None)
    else:
        # Texts are tokenised one by one, so the tokenizer has no use for threads; where it cannot
        # start any, it ends the process with a message of many lines.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if not sys.stderr.isatty():  # libraries' bars of downloads are for terminals, too
            for name in _BARS_OFF:
                os.environ.setdefault(name, "1")
        signals = SignalHandling()
        if isinstance(sys.stdin, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):  # something was read from it
                sys.stdin.reconfigure(errors="surrogateescape")  # as in arguments
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, io.TextIOWrapper):
                # a path may hold bytes that are not valid text
                stream.reconfigure(errors="backslashreplace")
                setattr(sys, name, GuardedStream(stream, STREAMS[name]))
        try:
            status = _status(sys.argv[1:], signals)
        except KeyboardInterrupt as stopped:  # while an error was told
            status = status_of(stopped)
        finally:
            signals.end()
    if status != 0:
        sys.exit(status)


def _status(arguments: list[str], signals: SignalHandling | None) -> int:
    """Run a command line; return the exit status."""
    if "COMP_LINE" in os.environ:  # set by the shell for ``complete -C zo2 zo2``
        _print_completions(os.environ["COMP_LINE"])
        return 0
    name, *rest = arguments or [""]
    if name == "train" and "--plan" in rest:
        name = "plan"
        rest = [argument for argument in rest if argument != "--plan"]
    if name in {"-V", "--version"}:
        print(f"zo2core {importlib.import_module('importlib.metadata').version('zo2core')}")
        return 0
    command: Any = None
    try:
        reserve = mmap.mmap(-1, _RESERVE_BYTES)
    except OSError:
        print(_NO_MEMORY, file=sys.stderr)
        return REFUSED
    try:
        shown_help = _asked_help(name, rest)
        if shown_help is not None:
            print(shown_help)
            return 0
        command = _parsed(name, rest)
        _run(command, signals)
    except Exception as error:
        reserve.close()
        status = _report(error, command, signals)
        if status is None:
            raise
        return status
    except KeyboardInterrupt as stopped:
        return _interrupted(stopped, command)
    return 0


def _print_completions(line: str) -> None:
    """Print what the last word of a command line, up to the cursor, can become."""
    from zo2adapters.commands.options import completions

    to_cursor = line[: int(os.environ.get("COMP_POINT", sys.maxsize))]
    sys.stdout.writelines(f"{text}\n" for text in completions(to_cursor, COMMANDS, command_class))


def _asked_help(name: str, rest: list[str]) -> str | None:
    """The help that a command line asks for; None: it asks for none.

    Raises:
        OptionError: There is no such command.
    """
    from zo2adapters.commands.options import (
        command_help,
        first_steps,
        program_help,
        require_command,
    )

    if not name:
        return first_steps()
    if name in {*_HELP, "help"}:
        return program_help({other: command_class(other) for other in COMMANDS})
    require_command(name, list(COMMANDS))
    if _HELP & set(rest):
        return command_help(name, command_class(name), lists_all="--help-all" in rest)
    return None


def _parsed(name: str, rest: list[str]) -> Any:
    """The command of a command line, with the options that follow its name."""
    from zo2adapters.commands.options import parse_command

    options = command_class(name)
    return parse_command(name, options, rest)


def _run(command: Any, signals: SignalHandling | None) -> None:
    """Check a command and run it."""
    command.check()
    for module in command.needs:
        importlib.import_module(module)
    _quieten_libraries()
    warnings.formatwarning = format_warning
    warnings.showwarning = show_warning
    if signals is not None:
        signals.is_running = True
    command.run()
    sys.stdout.flush()  # here, where an error can still be reported
    if signals is not None and signals.raised is not None:
        raise signals.raised


def _report(error: Exception, command: Any, signals: SignalHandling | None) -> int | None:
    """Print the line of an error; return the exit status.

    None: it is no error of the user or of the machine, and no signal is behind it.
    """
    from zo2adapters.commands.options import as_zo2_error, error_line

    if isinstance(error, BrokenPipeError) and error.filename in STREAMS.values():
        _drop_output(sys.stdout)  # the reader of the pipe has closed it
        return _BROKEN_PIPE
    refusal = as_zo2_error(error)
    interruption = interruption_behind(error)
    raised = None if signals is None else signals.raised
    if refusal is None and interruption is None and raised is None:
        return None
    if isinstance(error, OSError):
        _drop_output(sys.stdout)
    message = "interrupted" if refusal is None else error_line(refusal, command)
    if interruption is None and raised is not None:
        # The error may come of it: foreign code had replaced the exception.
        interruption = raised
        message = "interrupted"
    line = f"{_program_name()}: {message}"
    if interruption is None:
        print(line, file=sys.stderr)
        return REFUSED
    return _interrupted(interruption, command, line)


def _interrupted(interruption: KeyboardInterrupt, command: Any, *message: str) -> int:
    """Print how to continue; return the exit status."""
    if (
        command is not None
        and _program_name() == "zo2"
        and (how := command.after_interruption()) is not None
    ):
        message = (*message, how)
    try:
        print(*message, sep="\n", end="\n" if message else "", file=sys.stderr, flush=True)
    except OSError:  # the terminal was closed, which is what SIGHUP reports
        _drop_output(sys.stderr)
    return status_of(interruption)


def _program_name() -> str:
    """Prefix of messages: the program's name and, in a run of several workers, the worker's
    rank.
    """
    rank = os.environ.get("RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"
    return "zo2" if rank == "0" else f"zo2, worker {rank}"


def command_class(name: str) -> Any:
    """The dataclass of a command, which imports its module."""
    module, options = COMMANDS[name]
    return getattr(importlib.import_module(f"zo2adapters.commands.{module}"), options)


def _quieten_libraries() -> None:
    """Keep warnings and progress bars of transformers and bitsandbytes out of a command's output.

    peft imports bitsandbytes, which warns about kernels that are not used here.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if "transformers" in sys.modules:
        transformers_logging: Any = importlib.import_module("transformers.utils.logging")
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


def _drop_output(stream: TextIO) -> None:
    """Discard what could not be written: at exit Python would try to write it again, and print an
    error.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format a warning of this library as one line, and others as Python does."""
    from zo2core.errors import ZO2Warning

    if issubclass(category, ZO2Warning):
        return f"zo2: {message}\n"
    return _PLAIN_FORMAT(message, category, filename, lineno, line)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning on a line of its own, above a progress bar if there is one."""
    text = format_warning(message, category, filename, lineno, line)
    output = sys.stderr if file is None else file
    if "tqdm" in sys.modules:
        importlib.import_module("tqdm").tqdm.write(text, file=output, end="")
    else:
        output.write(text)


class Interrupted(KeyboardInterrupt):
    """A signal asked the command to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class SignalHandling:
    """The handlers of this process.

    A signal that was ignored when the process started stays ignored, as ``nohup`` and background
    jobs of a shell require.

    Note: signals within foreign code. A handler runs where Python code does, which may be called by
    compiled code of a library that replaces the handler's exception by one of its own, or drops it.
    So files are read without such calls (``safe_open.get_tensor`` is one), and a command that ends
    after a signal ends as interrupted, whatever became of the exception.
    """

    def __init__(self) -> None:
        self.is_running = False  # while modules are imported, and the command line is parsed
        self._count = 0
        self.raised: Interrupted | None = None  # once a signal has come
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        sys.unraisablehook = self._handle_unraisable

    def end(self) -> None:
        """Ignore signals while Python shuts down, which removes handlers and cannot handle an
        exception.
        """
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._count += 1
        if not self.is_running:
            _exit(number, "interrupted; nothing was started")
        if self._count >= _SIGNALS_UNTIL_EXIT:
            _exit(number, "stopped immediately")
        if self._count > 1:
            _print("stopping; interrupt once more to stop immediately")
        else:
            self.raised = Interrupted(number)
            raise self.raised

    def _handle_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """End the process where Python would ignore the interruption, in a destructor or a
        callback.
        """
        if isinstance(unraisable.exc_value, Interrupted):
            _exit(unraisable.exc_value.number, "stopped immediately")
        sys.__unraisablehook__(unraisable)


def interruption_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interruption that caused an error, if any: interrupted code, such as a context manager,
    may raise an error.
    """
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        if isinstance(error, KeyboardInterrupt):
            return error
        visited.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def status_of(interruption: KeyboardInterrupt) -> int:
    """The exit status of an interrupted command, as in shells: 130, 143 or 129."""
    return 128 + (interruption.number if isinstance(interruption, Interrupted) else signal.SIGINT)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # print() is not reentrant, and a handler may interrupt it
        os.write(2, f"\nzo2: {text}\n".encode())


def _exit(number: int, text: str) -> None:
    _print(text)
    os._exit(128 + number)


if __name__ == "__main__":
    main()
