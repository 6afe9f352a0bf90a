"""A self-contained HTML page about runs: curves as inline SVG, and tables of costs and options."""

from __future__ import annotations

import html
import io
import itertools
import json
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from zo2adapters.commands.journal import HEAD, printable, read_journal
from zo2adapters.optional_package import optional_package
from zo2adapters.trainers.methods import ADAPTER_FORWARDS, method_of
from zo2adapters.trainers.metrics import (
    Row,
    criterion,
    recorded_row,
    results_of_row,
    shown_results,
)
from zo2adapters.trainers.recipe import used_options
from zo2adapters.trainers.run_directory import (
    JOURNAL,
    RunDirectory,
)
from zo2adapters.trainers.run_inputs import RunStart
from zo2core import Journal, Update, ZO2Error
from zo2core.errors import JournalError
from zo2core.estimators.guard import is_refused
from zo2core.ranges import counted
from zo2core.types import Commit, Lane, shown_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# keys of a step's row that are not in the journal
_MEASURED = ("seconds", "bound_seconds", "rss_bytes", "peak_rss_bytes")
# Left out of the table where there are none.
_RARE = (
    "forwards of trials before",
    "steps of unknown time and memory",
    "steps rejected by the guard",
)
_UPRIGHT = 4  # learning rates that have room beside each other
_LARGEST_DRAWN = 1e300  # largest number that is drawn
_MARKED = {"marker": "o", "markersize": 4}  # style of a curve of few points
_SMOOTHED = 50  # approximate number of points of a smoothed curve, each the median of an interval
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1100px;
       padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; }
td, th { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }
tr + tr > * { border-top: 1px solid #ddd; } td { font-variant-numeric: tabular-nums; }
tr.differs { background: #fff6d6; } svg { max-width: 100%; height: auto; }
.key { font-weight: 600; }
"""


Points: TypeAlias = tuple[Sequence[float], Sequence[float]]  # x and y of a curve


class Run(NamedTuple):
    """A run, as its directory describes it."""

    name: str
    options: dict[str, Any]  # nested, as in options.json
    taken: Sequence[Update | Commit]  # steps of the journal
    steps: list[dict[str, Any]]  # rows of metrics.jsonl that describe steps, in order
    evaluations: list[dict[str, Any]]  # rows of metrics.jsonl that describe evaluations, in order
    samples: list[dict[str, Any]]  # rows of samples.jsonl, in order
    gradient_forwards: int  # work of a first-order step, in forward passes
    # short runs with which the learning rate was chosen; see RunDirectory.trials
    trials: list[dict[str, Any]]

    @property
    def label(self) -> str:
        """The name in a legend; matplotlib leaves out labels that start with an underscore."""
        return f" {self.name}" if self.name.startswith("_") else self.name

    @property
    def forwards(self) -> list[int]:
        """Forward passes, or equivalent work, taken by the end of each step, without those of
        trials.
        """
        of_steps = [
            self.gradient_forwards if isinstance(step, Commit) else len(step.evaluations)
            for step in self.taken
        ]
        return list(itertools.accumulate(of_steps))

    @property
    def refused(self) -> list[int]:
        """Steps that the guard did not apply."""
        return [step.step for step in self.taken if isinstance(step, Update) and is_refused(step)]

    @property
    def minutes(self) -> list[float]:
        """Minutes of steps and evaluations by the end of each step; NaN from the first step of
        unknown time on.
        """
        evaluation_seconds = {
            row["step"]: row.get("evaluation_seconds", 0.0) for row in self.evaluations
        }
        seconds = [
            row.get("seconds", math.nan) + evaluation_seconds.get(row["step"], 0.0)
            for row in self.steps
        ]
        return [value / 60 for value in itertools.accumulate(seconds)]


def read_run(directory: Path) -> Run:
    """Read a run's directory without changing it."""
    journal = read_journal(directory / JOURNAL, run=directory)
    if not journal.steps:
        remedy = "pass the directory of another run"
        raise JournalError(
            directory / JOURNAL, "no step", "the journal of a run with steps", remedy
        )
    run = RunDirectory(directory)
    options = run.saved()
    gradient_forwards = ADAPTER_FORWARDS  # if the options do not say
    with suppress(ZO2Error):
        gradient_forwards = method_of(RunStart(run.options())).forwards
    rows = run.rows(journal)
    return Run(
        name=printable(directory.name or str(directory)),
        options=options,
        taken=journal.steps,
        steps=[_step_row(row, journal) for row in rows if "loss" in row],
        evaluations=[_numbers(row) for row in rows if results_of_row(row)],
        samples=run.samples(),
        gradient_forwards=gradient_forwards,
        trials=run.trials(),
    )


def _step_row(row: Row, journal: Journal) -> dict[str, Any]:
    """A step's row or, where its speed and memory are incomplete or damaged, the row that the
    journal gives.
    """
    lanes = row.get("lanes", {})
    is_whole = isinstance(lanes, dict) and all(
        isinstance(use, dict) and all(_is_number(use.get(name)) for name in ("busy", "bytes"))
        for use in lanes.values()
    )
    return (
        dict(row)
        if is_whole and all(_is_number(row.get(name)) for name in _MEASURED)
        else recorded_row(journal, row["step"])
    )


def _numbers(row: Row) -> dict[str, Any]:
    """The numbers in an evaluation's row."""
    return {name: value for name, value in row.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) < _LARGEST_DRAWN
    )


def page(runs: Sequence[Run]) -> str:
    """Write the HTML of the page."""
    title = html.escape(", ".join(run.name for run in runs))
    parts = [f"<h1>{title}</h1>", _summary(runs), "<h2>Loss</h2>", _losses(runs)]
    if any("reward" in row for run in runs for row in run.steps):
        parts += ["<h2>Rewards</h2>", _rewards(runs)]
    if any(run.evaluations for run in runs):
        parts += ["<h2>Evaluations</h2>", _evaluations(runs)]
    for run in runs:
        parts += (
            [f"<h2>Samples of {html.escape(run.name)}</h2>", _samples(run)] if run.samples else []
        )
        parts += (
            [f"<h2>Learning rate of {html.escape(run.name)}</h2>", _trials(run)]
            if run.trials
            else []
        )
    parts += ["<h2>Time of a step, and memory</h2>", _costs(runs)]
    parts += [_lanes(runs), "<h2>Options</h2>", _options(runs)]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return (
        f'{HEAD}<html lang="en"><head>{head}</head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _summary(runs: Sequence[Run]) -> str:
    cells_of_runs = [_summary_cells(run) for run in runs]
    names = list(dict.fromkeys(name for cells in cells_of_runs for name in cells))
    rows = {name: [cells.get(name, "none") for cells in cells_of_runs] for name in names}
    shown = {
        name: values for name, values in rows.items() if name not in _RARE or set(values) != {"0"}
    }
    return _table(
        ["", *(run.name for run in runs)], [[name, *values] for name, values in shown.items()]
    )


def _summary_cells(run: Run) -> dict[str, str]:
    """The texts of a run in the summary, by the names of its rows."""
    losses = [row["loss"] for row in run.steps]
    few = max(len(losses) // 20, 1)
    seconds = [row["seconds"] for row in run.steps if "seconds" in row]
    written = _written_bytes(run)
    return {
        "model": _file_name(run.options.get("model")),
        "data": _file_name(run.options.get("data")),
        "method": _method(run.options),
        **_evaluated(run),
        "steps, forwards": f"{len(run.taken):,}, {run.forwards[-1]:,}",
        "minutes": _number(run.minutes[-1]),
        "forwards of trials before": f"{sum(trial['forwards'] for trial in run.trials):,}",
        "loss, mean of first and last 5 %": (
            f"{statistics.mean(losses[:few]):.4f}, {statistics.mean(losses[-few:]):.4f}"
        ),
        "best evaluation": _best_evaluation(run),
        "seconds a step, median": _number(statistics.median(seconds) if seconds else math.nan),
        "steps of unknown time and memory": f"{len(run.steps) - len(seconds)}",
        "steps rejected by the guard": _rejected(run),
        "written to disk, with snapshots": (
            f"{shown_bytes(written)}, {shown_bytes(1000 * written / len(run.steps))} in 1,000 steps"
        ),
        "peak memory, and --memory": f"{_peak_memory(run)}, {_memory_option(run)}",
    }


def _written_bytes(run: Run) -> int:
    """Bytes that a run has written to disk, with its snapshots."""
    written = 0
    for row in run.steps:
        snapshots: Any = row.get("snapshot_bytes")
        written += snapshots if _is_number(snapshots) else 0
        written += row.get("lanes", {}).get(Lane.WRITE.value, {}).get("bytes", 0)
    return written


def _best_evaluation(run: Run) -> str:
    if not run.evaluations:
        return "none"
    best = min(run.evaluations, key=lambda row: (criterion(results_of_row(row)), row["step"]))
    return f"{shown_results(results_of_row(best))} at step {best['step']}"


def _rejected(run: Run) -> str:
    """The number of the steps that the guard rejected, and the first of them."""
    refused = run.refused
    return f"{len(refused)}, the first {refused[0]}" if refused else "0"


def _peak_memory(run: Run) -> str:
    peaks = [row["peak_rss_bytes"] for row in run.steps if "peak_rss_bytes" in row]
    return shown_bytes(max(peaks)) if peaks else "not noted"


def _memory_option(run: Run) -> object:
    storage = run.options.get("storage")
    return storage.get("memory", "auto") if isinstance(storage, dict) else "auto"


def _file_name(path: object) -> str:
    """The last part of a path, or a hub id as it is."""
    text = str(path or "not noted")
    return printable(Path(text).name) if Path(text).is_absolute() else text


def _method(options: dict[str, Any]) -> str:
    """How steps are taken, and what they train."""
    optimization = options.get("optimization")
    known = optimization if isinstance(optimization, dict) else {}
    name = known.get("method", "not noted")
    if name == "zeroth-order":
        name = f"{name} ({known.get('estimator', 'mezo')})"
    if options.get("lora_rank") is not None:
        return f"{name}, LoRA of rank {options['lora_rank']}"
    return (
        f"{name}, adapter {_file_name(options['adapter'])}"
        if options.get("adapter") is not None
        else str(name)
    )


def _evaluated(run: Run) -> dict[str, str]:
    """The first and the last result of each measure of the evaluations."""
    if len(run.evaluations) < 2:
        return {}
    first = run.evaluations[0]
    last = run.evaluations[-1]
    names = [name for name in first if name in last and name not in ("step", "evaluation_seconds")]
    title = f"at step {first['step']} and {last['step']}"
    return {
        f"{name.replace('_', ' ')}, first and last": f"{first[name]:.4f}, {last[name]:.4f} {title}"
        for name in sorted(names)
    }


def _losses(runs: Sequence[Run]) -> str:
    def points(run: Run, name: str) -> Points:
        return getattr(run, name) if name != "steps" else range(1, len(run.taken) + 1), [
            row["loss"] for row in run.steps
        ]

    marks = [(step + 1, f"C{number}") for number, run in enumerate(runs) for step in run.refused]
    names = ("steps", "forwards", "minutes")
    charts = _charts(runs, dict.fromkeys(names, "training loss"), points)
    charts = [chart._replace(x_label=name) for name, chart in zip(names, charts, strict=True)]
    note = (
        "Thin lines are steps, thick lines medians. Dotted lines mark steps that the guard "
        "rejected."
    )
    return f"{_figure([charts[0]._replace(marks=marks), *charts[1:]])}<p>{note}</p>"


def _rewards(runs: Sequence[Run]) -> str:
    """Reward, length and drift of the completions of training steps."""
    titles = {
        name: name.replace("_", " ") for name in ("reward", "best_reward", "completion_tokens")
    }
    charts = _charts(
        runs, {**titles, "drift": "drift, nats a token"}, lambda run, name: _points(run.steps, name)
    )
    note = (
        "Means over all completions of a step. Drift is by how much what the base wrote has "
        "become less likely."
    )
    return f"{_figure(charts)}<p>{note}</p>"


def _evaluations(runs: Sequence[Run]) -> str:
    names = {name for run in runs for row in run.evaluations for name in row} - {
        "step",
        "evaluation_seconds",
    }
    titles = {name: name.replace("_", " ") for name in sorted(names)}
    return _figure(
        _charts(runs, titles, lambda run, name: _points(run.evaluations, name, first=0), _MARKED)
    )


def _points(rows: Sequence[Row], name: str, *, first: int = 1, unit: float = 1) -> Points:
    """A number of rows over their steps, which are counted from ``first``, where they have it."""
    known = [row for row in rows if _is_number(row.get(name))]
    return [row["step"] + first for row in known], [row[name] / unit for row in known]


def _samples(run: Run) -> str:
    """The answers to each prompt, by the number of steps."""
    steps = sorted({sample["step"] for sample in run.samples})
    answers = {(sample["row"], sample["step"]): sample for sample in run.samples}
    rows = []
    for row in sorted({row for row, _ in answers}):
        given = [answers.get((row, step)) for step in steps]
        first = next(sample for sample in given if sample is not None)
        texts = ["" if sample is None else sample["generated"] for sample in given]
        rows.append([first["prompt"], first["expected"], *texts])
    return _table(
        ["prompt", "expected", *(f"after {counted(step, 'step')}" for step in steps)], rows
    )


def _trials(run: Run) -> str:
    """The short runs with which the learning rate was chosen: their losses, and what they cost."""
    losses: list[Any] = [
        (range(1, len(trial["losses"]) + 1), trial["losses"], {"label": f"{trial['lr']:g}"})
        for trial in sorted(run.trials, key=lambda trial: trial["lr"])
    ]
    rated = sorted(
        (trial["lr"], trial["loss"]) for trial in run.trials if trial["loss"] is not None
    )
    rates, means = zip(*rated, strict=True)
    curve = rates, means, {**_MARKED, "color": "C7"}
    charts = [
        Chart("steps", "training loss", losses),
        Chart("learning rate", "mean loss of the last steps", [curve], ticks=rates),
    ]
    head = ["learning rate", "steps", "loss", "forwards", "minutes"]
    rows = [
        [
            f"{trial['lr']:g}" + (" (chosen)" if number == 0 else ""),
            str(trial["steps"]),
            "diverged" if trial["loss"] is None else f"{trial['loss']:.4f}",
            f"{trial['forwards']:,}",
            _number(trial["seconds"] / 60),
        ]
        for number, trial in enumerate(run.trials)
    ]
    return _figure(charts, legend="learning rate") + _table(head, rows)


def _costs(runs: Sequence[Run]) -> str:
    def charts(titles: Mapping[str, str], style: Mapping[str, Any]) -> list[Chart]:
        """Time in seconds, and memory in gigabytes."""
        units = {name: 1e9 if name.endswith("bytes") else 1 for name in titles}
        return _charts(
            runs, titles, lambda run, name: _points(run.steps, name, unit=units[name]), style
        )

    titles = {
        "seconds": "seconds; dotted: the slowest lane alone",
        "rss_bytes": "resident GB; dotted: peak so far",
    }
    dotted = charts({"bound_seconds": "", "peak_rss_bytes": ""}, {"linestyle": ":", "label": None})
    both = zip(charts(titles, {"linestyle": "-"}), dotted, strict=True)
    return _figure(
        [
            solid._replace(curves=solid.curves + other.curves, from_zero=True)
            for solid, other in both
        ]
    )


def _lanes(runs: Sequence[Run]) -> str:
    """A table of lanes; nothing where all there was is computing."""
    rows = []
    for lane in Lane:
        uses = [
            [row["lanes"][lane.value] for row in run.steps if lane.value in row.get("lanes", {})]
            for run in runs
        ]
        if any(use["busy"] for run_uses in uses for use in run_uses):
            rows.append([lane.value, *map(_use, uses)])
    if len(rows) < 2:
        return ""
    note = (
        "The share of a step in which a lane was busy, and the bytes it moved: medians over steps."
    )
    return "<h2>Lanes</h2>" + _table(["", *(run.name for run in runs)], rows) + f"<p>{note}</p>"


def _use(uses: Sequence[dict[str, float]]) -> str:
    if not uses:
        return "not noted"
    busy, moved = (statistics.median(use[name] for use in uses) for name in ("busy", "bytes"))
    return f"{busy:.0%}, {shown_bytes(moved)}" if moved else f"{busy:.0%}"


def _options(runs: Sequence[Run]) -> str:
    flat = [
        {
            name: value
            for name, value in used_options(run.options).items()
            if value not in (None, [])
        }
        for run in runs
    ]
    names = dict.fromkeys(name for options in flat for name in options)
    rows = [
        [name, *(json.dumps(of_run[name]) if name in of_run else "not set" for of_run in flat)]
        for name in names
    ]
    return _table(["", *(run.name for run in runs)], rows, marks=lambda row: len(set(row[1:])) > 1)


def _table(
    head: list[str],
    rows: list[list[str]],
    *,
    marks: Callable[[list[str]], bool] = lambda row: False,
) -> str:
    lines = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
    for row in rows:
        first, *cells = (html.escape(cell) for cell in row)
        kind = ' class="differs"' if marks(row) else ""
        lines.append(
            f'<tr{kind}><td class="key">{first}</td>'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    return "<table>\n" + "\n".join(lines) + "\n</table>"


class Chart(NamedTuple):
    """Curves over common axes."""

    x_label: str
    y_label: str
    # x, y, and how matplotlib draws them
    curves: list[tuple[Sequence[float], Sequence[float], dict[str, Any]]]
    marks: Sequence[tuple[float, str]] = ()  # places of dotted lines across, and their colours
    ticks: Sequence[float] = ()  # of a logarithmic x axis; empty for a linear one
    # whether the y axis begins at zero, whatever the curves are; see _set_heights
    from_zero: bool = False


def _charts(
    runs: Sequence[Run],
    titles: Mapping[str, str],
    points: Callable[[Run, str], Points],
    style: Mapping[str, Any] | None = None,
) -> list[Chart]:
    """A chart over the steps for each title, with a curve for each run; without a style, also with
    its medians.
    """
    charts = []
    for name, title in titles.items():
        chart = Chart("steps", title, [])
        for number, run in enumerate(runs):
            (x, y) = points(run, name)
            drawn = {"color": f"C{number}", "label": run.label, **(style or {})}
            if style is None:
                chart.curves.append(
                    (x, y, {**drawn, "label": None, "alpha": 0.25, "linewidth": 0.8})
                )
                length = max(len(y) // _SMOOTHED, 1)
                starts = range(0, len(y), length)
                x, y = (
                    [statistics.median(values[start : start + length]) for start in starts]
                    for values in (x, y)
                )
            chart.curves.append((x, y, drawn))
        charts.append(chart)
    return charts


def _figure(charts: Sequence[Chart], legend: str | None = None) -> str:
    """Draw charts side by side, as SVG; the first one has the legend, with this title."""
    modules = ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_svg")
    mpl, figures, backend = (optional_package(name, install="zo2core[plot]") for name in modules)
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "zo2",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    style |= {"text.parse_math": False}  # a dollar sign in a run's name does not start a formula
    with mpl.rc_context(style), warnings.catch_warnings():
        # a glyph missing in the fonts here may be in the browser's
        warnings.filterwarnings("ignore", "Glyph")
        figure = figures.Figure(figsize=(3.8 * max(len(charts), 2), 3.2), layout="constrained")
        for index, chart in enumerate(charts):
            axis = figure.add_subplot(1, len(charts), index + 1)
            for x, y, drawn in chart.curves:
                axis.plot(x, y, **drawn)
            for place, colour in chart.marks:
                axis.axvline(place, color=colour, alpha=0.4, linestyle=":")
            if chart.ticks:
                axis.set_xscale("log")
                rotation = 45 if len(chart.ticks) > _UPRIGHT else 0
                axis.set_xticks(
                    chart.ticks, [f"{tick:g}" for tick in chart.ticks], rotation=rotation
                )
                axis.set_xticks([], minor=True)
            axis.set_xlabel(chart.x_label)
            _set_heights(axis, chart)
            if index == 0 and axis.get_legend_handles_labels()[1]:
                axis.legend(frameon=False, title=legend)
        written = io.StringIO()
        backend.FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]


def _set_heights(axis: Axes, chart: Chart) -> None:
    """Let an axis begin at zero or, where curves would then be flat, say where it begins."""
    (bottom, top) = axis.get_ylim()
    lowest = axis.dataLim.ymin
    is_high = lowest >= top / 2 > 0 and not chart.from_zero
    if chart.from_zero or 0 <= lowest < top / 2:
        axis.set_ylim(bottom=0)
    axis.set_ylabel(f"{chart.y_label}, from {bottom:.3g}" if is_high else chart.y_label)


def _number(value: float) -> str:
    return "not noted" if math.isnan(value) else f"{value:.3g}"
