"""The command ``zo2``: each subcommand is a dataclass whose fields are its options."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Protocol

import tyro
from transformers.utils import logging as transformers_logging

from zo2adapters.commands.convert import Convert
from zo2adapters.commands.demo import Demo
from zo2adapters.commands.evaluate import Evaluate
from zo2adapters.commands.export import Export
from zo2adapters.commands.generate import Generate
from zo2adapters.commands.help_text import reflow_help
from zo2adapters.commands.journal import ShowJournal
from zo2adapters.commands.plan import Plan
from zo2adapters.commands.timeline import ShowTimeline
from zo2adapters.commands.train import Train
from zo2adapters.commands.verify import Verify
from zo2core import ZO2Error, ZO2Warning

_plain_format = warnings.formatwarning


class Command(Protocol):
    """A dataclass whose fields are a subcommand's options."""

    def run(self) -> None:
        """Do it."""


COMMANDS: dict[str, type[Command]] = {
    "demo": Demo,
    "train": Train,
    "evaluate": Evaluate,
    "generate": Generate,
    "export": Export,
    "verify": Verify,
    "journal": ShowJournal,
    "timeline": ShowTimeline,
    "plan": Plan,
    "convert": Convert,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; errors of this library become one line and exit status 2.

    Args:
        arguments: The command line without the program's name; None: the process's own.
    """
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.formatwarning = format_warning
    for options in COMMANDS.values():
        reflow_help(options)
    command: Command = tyro.extras.subcommand_cli_from_dict(
        {**COMMANDS},
        prog="zo2",
        description="Zeroth-order fine-tuning of language models, block by block.",
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.EnumChoicesFromValues),
    )
    try:
        command.run()
    except ZO2Error as error:
        print(f"zo2: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning of this library as one line; others as Python shows them."""
    if issubclass(category, ZO2Warning):
        return f"zo2: {message}\n"
    return _plain_format(message, category, filename, lineno, line)


if __name__ == "__main__":
    main()
