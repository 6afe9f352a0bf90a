"""Traces as pictures: lanes over time, block by block, as Figure 5 of the ZO2 paper (arXiv 2503.12668) has them.

One panel a trace, all on one time scale, so that serial and overlapped execution can be held against each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zo2core import (
    COMPUTE,
    Lane,
    MissingPackageError,
    OptionError,
    OutputError,
    Recording,
    Span,
    Sweep,
    TraceError,
    bound_seconds,
    lane_uses,
    reason,
    row_name,
    shown_bytes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Pixels.
WIDTH = 1600
LEFT, RIGHT = 230, 20  # beside the lanes: their names, and room for the scale's last number
ABOVE, BELOW = 44, 56  # of each panel: its title, and the scale
ROW = 34
_CHARACTER = 7  # of a label's font, about

_DPI = 100
_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#64b5cd")  # blocks in turns
_ENDS = "#8c8c8c"  # embedding and head


class Panel(NamedTuple):
    """One sweep of one trace."""

    title: str
    sweep: Sweep
    rows: dict[str, list[Span]]  # one a lane, and one an evaluation, from top to bottom
    captions: dict[str, str]  # beside the rows
    bound: float  # seconds that the slowest lane alone takes

    @property
    def seconds(self) -> float:
        """How long the sweep took."""
        return self.sweep.done - self.sweep.begun


def make_panel(recording: Recording, *, step: int | None = None) -> Panel:
    """Cut one sweep out of a trace.

    Args:
        recording: The trace.
        step: The step whose sweep it is; None: the last one.

    Raises:
        TraceError: if there is no such step, or nothing in it.
    """
    sweep = recording.sweep(step)
    spans = recording.within(sweep)
    if not spans:
        raise TraceError(
            recording.path, found=f"nothing in {sweep.name}", expected="what the lanes did", remedy="choose another step"
        )
    uses = lane_uses(spans, begun=sweep.begun, done=sweep.done)
    seconds, bound = sweep.done - sweep.begun, bound_seconds(uses)
    rows: dict[str, list[Span]] = {}
    lanes = list(Lane)
    for span in sorted(spans, key=lambda span: (lanes.index(span.lane), span.track)):
        rows.setdefault(row_name(span), []).append(span)
    captions = {name: _caption(own, sweep) for name, own in rows.items()}
    title = f"{recording.path.name}, {sweep.name}: {seconds:.3g} s; the slowest lane alone takes {bound:.3g} s"
    return Panel(title, sweep, rows, captions, bound)


def draw(recordings: Sequence[Recording], output: Path, *, step: int | None = None) -> list[str]:
    """Draw a sweep of each trace into a PNG file, one above the other.

    Args:
        recordings: From top to bottom.
        output: Is overwritten.
        step: The step whose sweep it is; None: each trace's last one.

    Returns:
        The panels' titles.

    Raises:
        TraceError: if a trace has no such step.
        OptionError: if the output is no PNG file by its name.
        OutputError: if it cannot be written.
        MissingPackageError: without matplotlib.
    """
    if output.suffix != ".png":
        raise OptionError("output", found=str(output), expected="a name that ends in .png", remedy="choose such a name")
    panels = [make_panel(recording, step=step) for recording in recordings]
    try:  # optional, and slow to import
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "zo2 timeline",
            found="no matplotlib",
            expected="matplotlib, to draw with",
            remedy="pip install 'zo2core[plot]', or open the trace at ui.perfetto.dev",
        ) from error
    height = picture_height(panels)
    figure = Figure(figsize=(WIDTH / _DPI, height / _DPI), dpi=_DPI, facecolor="white")  # not pyplot's: no global state
    longest = max(panel.seconds for panel in panels)
    top = 0
    for panel in panels:
        rows = ROW * len(panel.rows)
        bottom = height - top - ABOVE - rows
        axes = figure.add_axes((LEFT / WIDTH, bottom / height, (WIDTH - LEFT - RIGHT) / WIDTH, rows / height))
        _draw_panel(axes, panel, longest)
        top += ABOVE + rows + BELOW
    try:
        FigureCanvasAgg(figure).print_png(str(output))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise OutputError(
            output,
            found=reason(error),
            expected="a file that can be written",
            remedy="choose another path, or free space",
        ) from error
    return [panel.title for panel in panels]


def picture_height(panels: Sequence[Panel]) -> int:
    """Pixels that panels take, one above the other."""
    return sum(ABOVE + ROW * len(panel.rows) + BELOW for panel in panels)


def _draw_panel(axes: Axes, panel: Panel, longest: float) -> None:
    """Draw a sweep on a scale of so many seconds."""
    scale = longest or 1.0
    for row, spans in enumerate(panel.rows.values()):
        for span in spans:
            begun = max(span.begun.seconds - panel.sweep.begun, 0.0)
            width = min(span.done.seconds - panel.sweep.begun, panel.seconds) - begun
            label, colour = _look(span.name)
            axes.barh(row, width, left=begun, height=0.8, color=colour, edgecolor="white", linewidth=0.5)
            if len(label) * _CHARACTER < width / scale * (WIDTH - LEFT - RIGHT):
                axes.text(begun + width / 2, row, label, color="white", fontsize=8, ha="center", va="center_baseline")
    for seconds, style in ((panel.bound, ":"), (panel.seconds, "-")):
        axes.axvline(seconds, color="black", linestyle=style, linewidth=1)
    axes.set_xlim(0, scale * 1.005)
    axes.set_ylim(len(panel.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(panel.rows)), [f"{name}\n{panel.captions[name]}" for name in panel.rows], fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("seconds", fontsize=8)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _caption(spans: Sequence[Span], sweep: Sweep) -> str:
    """What a row has moved by the end of its pieces of work, and how busy it was."""
    lane, seconds = spans[0].lane, sweep.done - sweep.begun
    busy = lane_uses(spans, begun=sweep.begun, done=sweep.done)[lane].busy_seconds / seconds
    moved = sum(span.nbytes for span in spans if span.done.seconds <= sweep.done)
    return f"{busy:.0%} busy" if lane in COMPUTE else f"{shown_bytes(moved)}, {busy:.0%} busy"


def _look(name: str) -> tuple[str, str]:
    """Label and colour of a segment: a block's number says both."""
    number = re.search(r"\d+$", name)
    return (name, _ENDS) if number is None else (number[0], _COLOURS[int(number[0]) % len(_COLOURS)])
