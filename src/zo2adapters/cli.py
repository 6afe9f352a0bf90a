"""The command ``zo2``: each subcommand is a dataclass whose fields are its options.

Nothing slow is imported here: a command imports what it uses, and the signal handlers stand before that.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import logging
import mmap
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO, runtime_checkable

from zo2adapters.commands.signals import Phase, SignalHandling, interruption_behind, status_of

if TYPE_CHECKING:
    from zo2core import ZO2Error

REFUSED = 2  # exit status
_PLAIN_FORMAT = warnings.formatwarning
_BROKEN_PIPE = 141  # as a shell counts SIGPIPE
_NO_MEMORY = "zo2: host memory: found no more of it; expected room to start. What to do: free memory."
_TELLING_BYTES = 8 << 20  # of address space, held until an error is told: telling it takes memory, too


class Command(Protocol):
    """A dataclass whose fields are a subcommand's options."""

    def run(self) -> None:
        """Do it."""


@runtime_checkable
class Resumable(Protocol):
    """A command that may go on with a run, whose options are then its defaults."""

    def begun(self) -> Command | None:
        """The command with the options of the run to go on with; None if there is none."""


class Place(NamedTuple):
    """Where a command is, and what is said of it before it is imported."""

    module: str
    name: str  # of the dataclass
    summary: str  # the first line of its docstring
    needs: tuple[str, ...] = ()  # slow modules, imported once the command line is understood and before anything is begun


_MODEL = "zo2adapters.models.checkpoint"
_TRAINER = "zo2adapters.trainers.trainer"

COMMANDS: dict[str, Place] = {
    "demo": Place(
        "zo2adapters.commands.demo",
        "Demo",
        "Make a small model on the spot, fine-tune it with zeroth-order steps alone, and show what it learned.",
    ),
    "train": Place(
        "zo2adapters.commands.train",
        "Train",
        "Fine-tune all parameters of a checkpoint with zeroth-order steps, one block at a time.",
        (_TRAINER,),
    ),
    "tune": Place(
        "zo2adapters.commands.tune",
        "Tune",
        "Find the learning rate for a model and its data by short runs, of which the better half goes on for longer.",
        (_TRAINER, "zo2adapters.trainers.tuning"),
    ),
    "evaluate": Place(
        "zo2adapters.commands.evaluate",
        "Evaluate",
        "Evaluate a model, or a run at any of its steps, on a JSONL file.",
        (_TRAINER, "zo2adapters.tasks.scoring"),
    ),
    "generate": Place(
        "zo2adapters.commands.generate",
        "Generate",
        "Continue prompts with a model, or a run at any of its steps. Slow: each token takes a pass over all blocks.",
        (_MODEL, "zo2adapters.tasks.generation", "zo2adapters.trainers.base_check"),
    ),
    "export": Place(
        "zo2adapters.commands.export",
        "Export",
        "Write the model of any step of a run, or of a base and a journal, in the Hugging Face layout.",
        (_MODEL,),
    ),
    "verify": Place(
        "zo2adapters.commands.verify",
        "Verify",
        "Run a few steps block by block and as monolithic MeZO on your checkpoint, and compare every bit.",
        ("zo2adapters.trainers.verification",),
    ),
    "journal": Place("zo2adapters.commands.journal", "ShowJournal", "Print what happened in a run, step by step."),
    "report": Place(
        "zo2adapters.commands.report",
        "Report",
        "Write a page with the curves, the cost and the options of one run, or of several side by side.",
        ("zo2adapters.commands.report_page",),
    ),
    "timeline": Place(
        "zo2adapters.commands.timeline",
        "ShowTimeline",
        "Draw what the lanes did in one sweep, from a trace; two traces one above the other on one time scale.",
    ),
    "rows": Place(
        "zo2adapters.commands.rows",
        "WriteRows",
        "Write a benchmark's rows, such as sst2's, as files, with the prompts of MeZO's experiments.",
        ("zo2adapters.tasks.benchmark_rows",),
    ),
    "plan": Place(
        "zo2adapters.commands.plan",
        "Plan",
        "Say what a run would take in memory, disk and time, without loading the model.",
        ("zo2adapters.trainers.run_plan", "zo2adapters.trainers.device_run_plan"),
    ),
    "convert": Place(
        "zo2adapters.commands.convert",
        "Convert",
        "Turn pickled .bin shards into safetensors, one at a time and without running code in them, or quantise a model.",
        ("zo2adapters.models.pickle_conversion",),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; whatever goes wrong becomes one line and exit status 2.

    Args:
        arguments: The command line without the program's name; None: the process's own, whose signals are then handled, too.
    """
    if arguments is not None:
        status = _status(list(arguments), None)
    else:
        # Texts are tokenised one by one, so the tokenizer's own threads do nothing; where none can be started it ends the
        # process with a message of many lines.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        signals = SignalHandling()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a path may hold bytes that are no text
                stream.reconfigure(errors="backslashreplace")
        try:
            status = _status(sys.argv[1:], signals)
        finally:
            signals.end()
    if status != 0:
        sys.exit(status)


def _status(arguments: list[str], signals: SignalHandling | None) -> int:
    """Run a command line; return the exit status."""
    name, *rest = arguments or [""]
    if name not in COMMANDS:
        return _answer_without_command(arguments)
    command: Any = None
    try:
        room_to_tell = mmap.mmap(-1, _TELLING_BYTES)
    except OSError:
        print(_NO_MEMORY, file=sys.stderr)
        return REFUSED
    try:
        command = _understood(name, rest)
        for module in COMMANDS[name].needs:
            importlib.import_module(module)
        _quieten_libraries()
        warnings.formatwarning, warnings.showwarning = format_warning, show_warning
        if signals is not None:
            signals.phase = Phase.RUNNING
        command.run()
        sys.stdout.flush()  # here, where it can still be told that nobody takes it
    except BrokenPipeError:  # whoever reads has seen enough
        _drop_output()
        return _BROKEN_PIPE
    except Exception as error:  # any: ``refusal_of`` knows those that are a user's or a machine's, others are raised again
        room_to_tell.close()
        from zo2adapters.commands.refusals import refusal_of, worded

        refusal, interruption = refusal_of(error), interruption_behind(error)
        if refusal is None and interruption is None:
            raise
        if isinstance(error, OSError):
            _drop_output()
        said = "interrupted" if refusal is None else worded(refusal, command or COMMANDS[name])
        print(f"{_speaker()}: {said}", file=sys.stderr)
        return REFUSED if interruption is None else status_of(interruption)
    except KeyboardInterrupt as stopped:
        return status_of(stopped)
    return 0


def _speaker() -> str:
    """Who says why it ends: of several workers, which one."""
    rank = os.environ.get("RANK", "0") if "TORCHELASTIC_RUN_ID" in os.environ else "0"
    return "zo2" if rank == "0" else f"zo2, worker {rank}"


def _answer_without_command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="zo2", description="Zeroth-order fine-tuning of language models, block by block.", add_help=False
    )
    commands = parser.add_subparsers(title="commands")
    for name, place in COMMANDS.items():
        commands.add_parser(name, help=place.summary, add_help=False)
    parser.add_argument("-h", "--help", action="store_true", help="show this help; zo2 COMMAND --help shows a command's")
    if arguments and arguments[0] in {"-h", "--help"}:
        parser.print_help()
        raise SystemExit(0)
    found = repr(arguments[0]) if arguments else "nothing"
    expected = f"one of {', '.join(COMMANDS)}"
    print(f"zo2: command: found {found}; expected {expected}. What to do: see zo2 --help.", file=sys.stderr)
    return REFUSED


def _understood(name: str, arguments: list[str]) -> Command:
    """Import a command and fill in its options."""
    place = COMMANDS[name]
    options: Any = getattr(importlib.import_module(place.module), place.name)
    help_text = importlib.import_module("zo2adapters.commands.help_text")
    help_text.reflow_help(options)
    asks = {"-h", "--help"} & set(arguments)
    if asks and "--help-all" not in arguments and hasattr(options, "first_options"):
        print(help_text.short_help(f"zo2 {name}", options))
        raise SystemExit(0)
    arguments = ["--help" if argument == "--help-all" else argument for argument in arguments]
    command = _parsed(name, options, arguments)
    if isinstance(command, Resumable) and (begun := command.begun()) is not None:
        command = _parsed(name, options, arguments, default=begun)
    return command


def _parsed(name: str, options: Any, arguments: list[str], **default: Any) -> Command:
    import tyro

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command: Command = tyro.cli(
                options,
                prog=f"zo2 {name}",
                args=arguments,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.EnumChoicesFromValues),
                **default,
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise _misunderstood(name, said.getvalue()) from None
    return command


def _misunderstood(name: str, said: str) -> ZO2Error:
    """What tyro says in a box of many lines, in one."""
    from zo2core import OptionError

    lines = [line.strip("│╭╮╰╯ \t") for line in said.splitlines()[1:]]  # the first one is the box's title
    lines = list(itertools.dropwhile(lambda line: not line.strip("─-"), lines))
    said_first = itertools.takewhile(lambda line: line.strip("─-") and line != "Got errors:", filter(None, lines))
    found = " ".join(said_first).rstrip(".:")
    return OptionError("command line", found=found, expected=f"the options of zo2 {name}", remedy=f"see zo2 {name} --help")


def _quieten_libraries() -> None:
    """Keep warnings and progress bars of transformers, if a command uses it, out of what the command says.

    So with those of bitsandbytes, which peft imports, about kernels that nothing here uses.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if "transformers" in sys.modules:
        own_logging: Any = importlib.import_module("transformers.utils.logging")
        own_logging.set_verbosity_error()
        own_logging.disable_progress_bar()


def _drop_output() -> None:
    """Let go of what could not be written: Python would try again at its end, and complain."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of this library as one line; others as Python shows them."""
    from zo2core import ZO2Warning

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
    """A warning on a line of its own, above a progress bar if there is one."""
    text, output = format_warning(message, category, filename, lineno, line), sys.stderr if file is None else file
    if "tqdm" in sys.modules:
        importlib.import_module("tqdm").tqdm.write(text, file=output, end="")
    else:
        output.write(text)


if __name__ == "__main__":
    main()
