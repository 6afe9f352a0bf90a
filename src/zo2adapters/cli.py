"""The command ``zo2``: each subcommand is a dataclass whose fields are its options.

Nothing slow is imported here: the signal handlers are installed first, then a command imports what it uses.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import mmap
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO, runtime_checkable

from zo2adapters.commands.signals import Phase, SignalHandling, interruption_behind, status_of

if TYPE_CHECKING:
    from zo2adapters.commands.parsing import Command

REFUSED = 2  # exit status
_DESCRIPTION = "Fine-tune language models that are larger than memory, block by block: by gradients or zeroth-order steps."
_CONTROL = re.compile(r"(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BAR = re.compile(r"\r(?!\n)|\n*(?:\x1b\[A)+\Z")
_PLAIN_FORMAT = warnings.formatwarning
_BROKEN_PIPE = 141  # exit status that shells give to SIGPIPE
_NO_MEMORY = "zo2: host memory: found none left; expected enough to start. What to do: free memory."
_RESERVE_BYTES = 8 << 20  # address space that is freed when an error has to be printed: printing takes memory, too


@runtime_checkable
class Interruptible(Protocol):
    """A command that says how to continue once a signal has stopped it."""

    def after_interruption(self) -> str:
        """One line: what was written so far, or how to continue."""


@runtime_checkable
class Checked(Protocol):
    """A command whose options are checked before anything slow is imported."""

    def check(self) -> None:
        """Refuse options that depend on neither model nor data nor machine."""


class CommandEntry(NamedTuple):
    """Where a command is defined, and its summary, which is printed without importing it."""

    module: str
    name: str  # name of the dataclass
    summary: str  # first line of the dataclass's docstring
    needs: tuple[str, ...] = ()  # slow modules, imported after the command line is parsed and before the command starts


_MODEL = "zo2adapters.models.checkpoint"
_TRAINER = "zo2adapters.trainers.trainer"

COMMANDS: dict[str, CommandEntry] = {
    "demo": CommandEntry(
        "zo2adapters.commands.demo",
        "Demo",
        "Pre-train a small model, fine-tune it with zeroth-order steps alone, and print what it learned.",
    ),
    "init": CommandEntry(
        "zo2adapters.commands.init",
        "Init",
        "Look at a model and its data, and write a recipe for zo2 train that says why each option was chosen.",
        ("zo2adapters.trainers.initial_recipe",),
    ),
    "train": CommandEntry(
        "zo2adapters.commands.train",
        "Train",
        "Fine-tune a model block by block, by gradients or zeroth-order steps.",
        (_TRAINER,),
    ),
    "tune": CommandEntry(
        "zo2adapters.commands.tune",
        "Tune",
        "Find the learning rate for a model and its data by short runs; the better half of them runs for longer.",
        (_TRAINER, "zo2adapters.trainers.tuning"),
    ),
    "evaluate": CommandEntry(
        "zo2adapters.commands.evaluate",
        "Evaluate",
        "Evaluate a model, or a run at any of its steps beside its base, on a data file.",
        (_TRAINER, "zo2adapters.tasks.scoring"),
    ),
    "generate": CommandEntry(
        "zo2adapters.commands.generate",
        "Generate",
        "Continue prompts with a model, or a run at any of its steps. Slow: each token takes a pass over all blocks.",
        (_MODEL, "zo2adapters.tasks.generation", "zo2adapters.trainers.base_check"),
    ),
    "chat": CommandEntry(
        "zo2adapters.commands.chat",
        "Chat",
        "Chat with a model, its adapters, or a run, in the terminal. Slow: each token takes a pass over all blocks.",
        (_MODEL, "zo2adapters.tasks.generation", "zo2adapters.trainers.base_check"),
    ),
    "export": CommandEntry(
        "zo2adapters.commands.export",
        "Export",
        "Write the model of any step of a run, or of a base and a journal, in the Hugging Face layout or as a GGUF file.",
        (_MODEL,),
    ),
    "merge": CommandEntry(
        "zo2adapters.commands.merge",
        "Merge",
        "Write the base with an adapter, or with what a run has learned, merged into its weights, one block at a time.",
        (_MODEL,),
    ),
    "push": CommandEntry(
        "zo2adapters.commands.push",
        "Push",
        "Upload an exported model or adapter, or the model of a run, to the Hugging Face hub.",
    ),
    "verify": CommandEntry(
        "zo2adapters.commands.verify",
        "Verify",
        "Run a few steps block by block and on the whole model with your checkpoint, and compare every bit.",
        ("zo2adapters.trainers.verification",),
    ),
    "journal": CommandEntry("zo2adapters.commands.journal", "ShowJournal", "Print what happened in a run, step by step."),
    "report": CommandEntry(
        "zo2adapters.commands.report",
        "Report",
        "Write a page with the curves, the cost and the options of one run, or of several side by side.",
        ("zo2adapters.commands.report_page",),
    ),
    "rows": CommandEntry(
        "zo2adapters.commands.rows",
        "WriteRows",
        "Write a benchmark's rows, such as sst2's, as files, with the prompts of MeZO's experiments.",
        ("zo2adapters.tasks.benchmark_rows",),
    ),
    "plan": CommandEntry(
        "zo2adapters.commands.plan",
        "Plan",
        "Print what a run would take in memory, disk and time, without loading the model.",
        ("zo2adapters.trainers.planning",),
    ),
    "convert": CommandEntry(
        "zo2adapters.commands.convert",
        "Convert",
        "Convert pickled .bin shards to safetensors, one at a time and without running code in them, or quantise a model.",
        ("zo2adapters.models.pickle_conversion",),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; every error becomes one line and exit status 2.

    Args:
        arguments: The command line without the program's name; None takes the process's own and handles its signals.
    """
    if arguments is not None:
        status = _status(list(arguments), None)
    else:
        # Texts are tokenised one by one, so the tokenizer has no use for threads; where it cannot start any, it ends the
        # process with a message of many lines.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        signals = SignalHandling()
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, io.TextIOWrapper):  # a path may hold bytes that are not valid text
                stream.reconfigure(errors="backslashreplace")
                setattr(sys, name, GuardedStream(stream, has_bars=name == "stderr"))
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
        from zo2adapters.commands.completion import completions

        line = os.environ["COMP_LINE"][: int(os.environ.get("COMP_POINT", sys.maxsize))]
        sys.stdout.writelines(f"{text}\n" for text in completions(line, COMMANDS, _options_of))
        return 0
    name, *rest = arguments or [""]
    if name not in COMMANDS:
        return _main_help(arguments)
    command: Any = None
    try:
        reserve = mmap.mmap(-1, _RESERVE_BYTES)
    except OSError:
        print(_NO_MEMORY, file=sys.stderr)
        return REFUSED
    try:
        command = _parse_command(name, rest)
        if isinstance(command, Checked):
            command.check()
        for module in COMMANDS[name].needs:
            importlib.import_module(module)
        _quieten_libraries()
        warnings.formatwarning, warnings.showwarning = format_warning, show_warning
        if signals is not None:
            signals.phase = Phase.RUNNING
        command.run()
        sys.stdout.flush()  # here, where an error can still be reported
    except BrokenPipeError:  # the reader of the pipe has closed it
        _drop_output(sys.stdout)
        return _BROKEN_PIPE
    except Exception as error:  # ``as_zo2_error`` recognises errors of the user or the machine; others are raised again
        reserve.close()
        from zo2adapters.commands.refusals import as_zo2_error, error_line

        refusal, interruption = as_zo2_error(error), interruption_behind(error)
        if refusal is None and interruption is None:
            raise
        if isinstance(error, OSError):
            _drop_output(sys.stdout)
        message = "interrupted" if refusal is None else error_line(refusal, command or COMMANDS[name])
        if interruption is None:
            print(f"{_program_name()}: {message}", file=sys.stderr)
            return REFUSED
        return _interrupted(interruption, command, f"{_program_name()}: {message}")
    except KeyboardInterrupt as stopped:
        return _interrupted(stopped, command)
    return 0


def _interrupted(interruption: KeyboardInterrupt, command: Any, *message: str) -> int:
    """Print how to continue; return the exit status."""
    if isinstance(command, Interruptible) and _program_name() == "zo2":
        message = (*message, command.after_interruption())
    try:
        print(*message, sep="\n", end="\n" if message else "", file=sys.stderr, flush=True)
    except OSError:  # the terminal was closed, which is what SIGHUP reports
        _drop_output(sys.stderr)
    return status_of(interruption)


def _program_name() -> str:
    """Prefix of messages: the program's name and, in a run of several workers, the worker's rank."""
    rank = os.environ.get("RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"
    return "zo2" if rank == "0" else f"zo2, worker {rank}"


def _main_help(arguments: list[str]) -> int:
    if arguments and arguments[0] in {"-V", "--version"}:
        print(f"zo2core {importlib.import_module('importlib.metadata').version('zo2core')}")
        raise SystemExit(0)
    if arguments and arguments[0] in {"-h", "--help", "--help-all", "help"}:
        from zo2adapters.commands.help_text import program_help

        print(program_help(_DESCRIPTION, {name: entry.summary for name, entry in COMMANDS.items()}))
        raise SystemExit(0)
    if not arguments:
        from zo2adapters.commands.help_text import first_steps

        print(first_steps(_DESCRIPTION))
        return 0
    expected = f"one of {', '.join(COMMANDS)}"
    import difflib

    near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
    meant = f"; did you mean {near[0]}" if near else ""
    print(f"zo2: command: found {arguments[0]!r}; expected {expected}{meant}. What to do: see zo2 --help.", file=sys.stderr)
    return REFUSED


def _options_of(name: str) -> Any:
    """The dataclass of a command."""
    return getattr(importlib.import_module(COMMANDS[name].module), COMMANDS[name].name)


def _parse_command(name: str, arguments: list[str]) -> Command:
    """Import a command and fill in its options."""
    options = _options_of(name)
    if {"-h", "--help", "--help-all"} & set(arguments):
        help_text = importlib.import_module("zo2adapters.commands.help_text")
        print(help_text.command_help(name, options, lists_all="--help-all" in arguments))
        raise SystemExit(0)
    parsing = importlib.import_module("zo2adapters.commands.parsing")
    if issubclass(options, parsing.TakesRecipe):
        arguments = options.with_recipe(arguments)
    command: Command = parsing.parse_command(name, options, arguments)
    return command


def _quieten_libraries() -> None:
    """Keep warnings and progress bars of transformers and bitsandbytes out of a command's output.

    peft imports bitsandbytes, which warns about kernels that are not used here.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if "transformers" in sys.modules:
        transformers_logging: Any = importlib.import_module("transformers.utils.logging")
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


class GuardedStream:
    """A stream on which control characters of names, metadata, errors and generated texts are written as escapes.

    Progress bars move the cursor by writes of their own: a line after a carriage return, or line feeds and moves up alone.
    """

    def __init__(self, stream: TextIO, *, has_bars: bool) -> None:
        self._stream, self._has_bars = stream, has_bars

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        moves = _BAR.match(text) if self._has_bars else None
        start = 0 if moves is None else moves.end()
        return self._stream.write(text[:start] + _CONTROL.sub(lambda found: repr(found[0])[1:-1], text[start:]))


def _drop_output(stream: TextIO) -> None:
    """Discard what could not be written: at exit Python would try to write it again, and print an error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
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
    text, output = format_warning(message, category, filename, lineno, line), sys.stderr if file is None else file
    if "tqdm" in sys.modules:
        importlib.import_module("tqdm").tqdm.write(text, file=output, end="")
    else:
        output.write(text)


if __name__ == "__main__":
    main()
