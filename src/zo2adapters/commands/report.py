"""``zo2 report``: write a page that compares runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from zo2core import OptionError, OutputError
from zo2core.errors import reason
from zo2core.io.durable import create_file


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write a page with the curves, the cost and the options of one run, or of several side by side."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs; they may still be running."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """HTML file to write; it must not exist. The page is self-contained."""

    def run(self) -> None:
        """Write the page and print its path."""
        from zo2adapters.commands.report_page import page, read_run

        if not self.runs:
            raise OptionError("runs", found="none", expected="at least one directory", remedy="pass a run's directory")
        text = page([read_run(path) for path in self.runs])
        try:
            with create_file(self.output) as file:
                file.write(text.encode())
        except OSError as error:
            raise OutputError(
                self.output, found=reason(error), expected="a path that does not exist", remedy="pass another path"
            ) from error
        print(self.output)
