"""The real task's runs as a table and as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from real_task_records import Point, Run


def groups(runs: Sequence[Run]) -> dict[tuple[str, float], list[Run]]:
    """Group runs that differ in their seed only."""
    by_variant: dict[tuple[str, float], list[Run]] = {}
    for run in runs:
        if run.points:
            by_variant.setdefault((run.variant, run.lr), []).append(run)
    return by_variant


def common_points(runs: Sequence[Run]) -> list[list[Point]]:
    """The evaluations that all runs have in common, in order, each with a point for each run."""
    steps = set.intersection(*({point.steps for point in run.points} for run in runs))
    return [[next(point for point in run.points if point.steps == step) for run in runs] for step in sorted(steps)]


def summary(runs: Sequence[Run], tuning: Sequence[Run]) -> list[dict[str, Any]]:
    """Summarise each variant and learning rate in a row: its runs before training, and at their last common evaluation.

    Args:
        runs: Runs that were measured on the rows to evaluate on.
        tuning: Runs that were measured on the rows to tune with; their forwards are part of a row.
    """
    rows = []
    for (variant, lr), members in groups(runs).items():
        points = common_points(members)
        if not points:
            continue
        first, last = points[0], points[-1]
        row: dict[str, Any] = {"variant": variant, "lr": lr, "seeds": [run.seed for run in members]}
        row |= {"steps": last[0].steps, "forwards": last[0].forwards}
        row |= {"stopped": [run.stopped for run in members if run.stopped is not None]}
        row["tuning forwards"] = sum(run.points[-1].forwards for run in tuning if run.variant == variant and run.points)
        for key, values in {
            "accuracy before": [point.accuracy for point in first],
            "accuracy": [point.accuracy for point in last],
            "loss": [point.loss for point in last],
            "minutes": [point.seconds / 60 for point in last],
            "CPU minutes": [point.cpu_seconds / 60 for point in last],
        }.items():
            row[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a table of medians over seeds, with their range."""
    lines = [
        f"{'':24s}{'lr':>7s} {'seeds':>5s} {'forwards':>8s} {'before':>7s} {'accuracy':>24s} {'loss':>22s} "
        f"{'minutes':>8s} {'of CPU':>7s}"
    ]
    for row in rows:
        accuracy, loss = row["accuracy"], row["loss"]
        lines.append(
            f"{row['variant']:24s}{row['lr']:7g} {len(row['seeds']):5d} {row['forwards']:8d} "
            f"{row['accuracy before']['median']:7.1%} "
            f"{accuracy['median']:8.1%} [{accuracy['min']:.1%} - {accuracy['max']:.1%}] "
            f"{loss['median']:7.3f} [{loss['min']:.3f} - {loss['max']:.3f}] "
            f"{row['minutes']['median']:8.1f} {row['CPU minutes']['median']:7.1f}"
            + (f"  {len(row['stopped'])} diverged" if row["stopped"] else "")
        )
    return "\n".join(lines)


def plot(runs: Sequence[Run], path: Path) -> None:
    """Plot accuracy over forwards and over seconds: a line for the seeds' median, a band for their range."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    places: tuple[Callable[[Point], float], ...] = (lambda point: point.forwards, lambda point: point.seconds)
    for axis, label, place in zip(axes, ("forwards of a batch", "seconds of steps"), places, strict=True):
        for (variant, lr), own in groups(runs).items():
            points = common_points(own)
            at = [statistics.median(map(place, looks)) for looks in points]
            values = [[point.accuracy for point in looks] for looks in points]
            style = "--" if variant.startswith("adamw") else "-"
            name = f"{variant}, lr {lr:g}"
            (line,) = axis.plot(at, [statistics.median(column) for column in values], style, label=name)
            low, high = [min(column) for column in values], [max(column) for column in values]
            axis.fill_between(at, low, high, alpha=0.15, color=line.get_color())
        axis.set_xlabel(label)
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel("accuracy")
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
