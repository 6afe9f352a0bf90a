"""``zo2 report``: write a page about runs."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from zo2adapters.commands.journal import HEAD, require_journal
from zo2adapters.commands.options import POSITIONAL, Command, Written
from zo2adapters.optional_package import require_package
from zo2adapters.trainers.run_directory import JOURNAL
from zo2core.errors import OptionError, OutputError, system_errors_as
from zo2core.io.durable import read_regular, replace_file

_WANTED = {
    "expected": "a new file or an earlier report, in a writable directory",
    "remedy": "pass another path",
}


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Write a page with the curves, the cost and the options of one run, or of several side by
    side.
    """

    needs: ClassVar = ("zo2adapters.commands.report_page",)

    runs: Annotated[tuple[Path, ...], POSITIONAL]
    """Directories of runs, which may still be running, or directories of several runs, such as the
    --output of zo2 tune.
    """
    output: Annotated[Path, Written(aliases=("-o",))]
    """HTML file to write.

    The page is self-contained. It replaces an earlier page of this command, and no other file.
    """

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        if not self.runs:
            raise OptionError("runs", "none", "at least one directory", "pass a run's directory")
        if self.output.suffix.lower() not in ("", ".html", ".htm"):
            expected = "the name of an HTML file, which is what a report is"
            raise OptionError("output", str(self.output), expected, "let it end with .html")
        self._require_free()
        for path in self._directories:
            require_journal(path / JOURNAL)
        require_package("matplotlib", install="zo2core[plot]")

    def run(self) -> None:
        """Write the page and print its path."""
        from zo2adapters.commands.report_page import page, read_run

        self.check()  # also where the library is called
        text = page([read_run(path) for path in self._directories])
        self._require_free()  # drawing takes a while
        with system_errors_as(OutputError, self.output, **_WANTED):
            replace_file(self.output, text.encode())
        print(self.output)

    @property
    def _directories(self) -> list[Path]:
        """The runs, each in its directory."""
        return [path for given in self.runs for path in runs_in(given)]

    def _require_free(self) -> None:
        """Refuse a path at which there is something else than an earlier report."""
        is_page = False
        with suppress(OSError):
            is_page = read_regular(self.output).startswith(HEAD.encode())
        if os.path.lexists(self.output) and not is_page:
            raise OutputError(self.output, found="something else at this path", **_WANTED)


def runs_in(directory: Path) -> list[Path]:
    """The run in a directory, or all runs in its subdirectories, by name, if it holds none
    itself.
    """
    if (directory / JOURNAL).exists() or not directory.is_dir():
        return [directory]
    return sorted(path for path in directory.iterdir() if (path / JOURNAL).is_file()) or [directory]
