"""``zo2 report``: write a page that compares runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from zo2adapters.commands.options import POSITIONAL, Command, Written
from zo2adapters.trainers.run_directory import JOURNAL
from zo2core.errors import OptionError, OutputError, reason
from zo2core.io.durable import create_file, open_regular, replace_file


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Write a page with the curves, the cost and the options of one run, or of several side by side."""

    needs: ClassVar = ("zo2adapters.commands.report_page",)

    runs: Annotated[tuple[Path, ...], POSITIONAL]
    """Directories of runs, which may still be running, or directories of several runs, such as the --output of zo2 tune."""
    output: Annotated[Path, Written(aliases=("-o",))]
    """HTML file to write. The page is self-contained. It replaces an earlier page of this command, and no other file."""

    def run(self) -> None:
        """Write the page and print its path."""
        from zo2adapters.commands.report_page import HEAD, page, read_run

        if not self.runs:
            raise OptionError("runs", found="none", expected="at least one directory", remedy="pass a run's directory")
        text = page([read_run(path) for given in self.runs for path in runs_in(given)])
        try:
            if begins_with(self.output, HEAD):
                replace_file(self.output, text.encode())
            else:
                with create_file(self.output) as file:
                    file.write(text.encode())
        except OSError as error:
            expected = "a path that does not exist, or an earlier report"
            raise OutputError(self.output, found=reason(error), expected=expected, remedy="pass another path") from error
        print(self.output)


def runs_in(directory: Path) -> list[Path]:
    """The run in a directory, or all runs in its subdirectories, by name, if it holds none itself."""
    if (directory / JOURNAL).exists() or not directory.is_dir():
        return [directory]
    return sorted(path for path in directory.iterdir() if (path / JOURNAL).is_file()) or [directory]


def begins_with(path: Path, head: str) -> bool:
    """Whether a regular file begins with this text."""
    try:
        with open_regular(path) as file:
            return file.read(len(head.encode())) == head.encode()
    except OSError:
        return False
