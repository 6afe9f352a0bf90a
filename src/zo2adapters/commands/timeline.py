"""``zo2 timeline``: a picture of what the lanes did in one sweep."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from zo2adapters.commands.trace_picture import draw
from zo2core import read_trace


@dataclass(frozen=True, kw_only=True)
class ShowTimeline:
    """Draw what the lanes did in one sweep, from a trace; two traces one above the other on one time scale."""

    trace: tyro.conf.Positional[Path]
    """File that train or evaluate wrote with --trace."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """PNG file to write."""
    against: Path | None = None
    """Another trace to draw above it, such as one of --scheduler serial."""
    step: int | None = None
    """Step to draw; by default the last one."""

    def run(self) -> None:
        """Draw, and print each panel's title."""
        paths = [path for path in (self.against, self.trace) if path is not None]
        for line in draw([read_trace(path) for path in paths], self.output, step=self.step):
            print(line)
        print(self.output)
