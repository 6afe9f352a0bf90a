"""Progress bars on standard error, in a terminal only: of long work, and of the sweeps within it that take seconds each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from zo2adapters.models.hf import HFBlockModel
from zo2core import Engine, Journal
from zo2core.checkpoint.shards import CustomExport
from zo2core.sources.segment_store import verify_base

_SECONDS = 2.0  # a sweep that takes less has no bar


def progress_bar(*, total: int, unit: str, desc: str | None = None, quiet: bool = False) -> Any:
    """Open a bar of tqdm on standard error, which is shown in a terminal only."""
    hidden = True if quiet else None  # None: hidden unless standard error is a terminal
    return tqdm(
        total=total, unit=unit, unit_scale=unit == "B", desc=desc, file=sys.stderr, disable=hidden, dynamic_ncols=True
    )


@contextmanager
def export_bar(model: HFBlockModel, desc: str = "export", *, quiet: bool = False) -> Iterator[Callable[[int], object]]:
    """Show a bar of the bytes that an export writes."""
    exported = model.exported_parameters if isinstance(model, CustomExport) else None
    layouts = [
        layout for layout in model.layouts if exported is None or any(spec.name in exported for spec in layout.parameters)
    ]
    total = sum(spec.decoded.nbytes for layout in layouts for spec in layout.parameters)
    with progress_bar(total=total, unit="B", desc=desc, quiet=quiet) as bar:
        yield bar.update


def verify_with_progress(model: HFBlockModel, journal: Journal, *, quiet: bool = False) -> Mapping[str, str]:
    """Call ``verify_base`` with a progress bar."""
    total = sum(spec.nbytes for layout in model.layouts for spec in layout.parameters)
    with progress_bar(total=total, unit="B", desc="base", quiet=quiet) as bar:
        return verify_base(model, journal, bar.update)


@contextmanager
def sweep_bars(runner: Engine, *, quiet: bool = False) -> Iterator[None]:
    """Show a bar of blocks below other bars while a sweep of a runner takes longer than two seconds."""
    bar: Any = tqdm(disable=True)

    def visited(done: int, total: int) -> None:
        nonlocal bar
        if done == 1:
            bar.close()  # that of a sweep that failed
            options: Any = {"file": sys.stderr, "leave": False, "dynamic_ncols": True, "delay": _SECONDS}
            bar = tqdm(total=total, unit="block", desc="pass", **options)
        bar.update()
        if done == total:
            bar.close()

    runner.watch(None if quiet or not sys.stderr.isatty() else visited)
    try:
        yield
    finally:
        runner.watch(None)
        bar.close()


class SharedSweeps:
    """Counts rows whose batches share sweeps: a row counts as far as the sweep that it takes part in is."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._finished = self._running = 0

    def took(self, rows: int) -> None:
        """Take note of rows that take part in the next sweep."""
        self._running += rows

    def visited(self, done: int, total: int) -> None:
        """Take note of a visit. See ``Engine.watch``."""
        self._bar.update(self._finished + self._running * done // total - self._bar.n)
        if done == total:
            self._finished += self._running
            self._running = 0


_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{spent}<{left}, {rate_fmt}{postfix}]"


class StepBar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar over the steps of a run, between which evaluations take time."""

    def __init__(self, *, evaluations: int = 0, **options: Any) -> None:
        self._evaluations = evaluations
        self._evaluated = 0.0  # seconds of all evaluations so far
        self._longest = 0.0  # seconds of the longest evaluation; the one before the first step also reads the weights
        super().__init__(bar_format=_FORMAT, unit="step", file=sys.stderr, dynamic_ncols=True, **options)

    def count_evaluation(self, seconds: float, *, left: int) -> None:
        """Exclude an evaluation from the time of the steps."""
        self._evaluations, self._evaluated = left, self._evaluated + seconds
        self._longest = max(self._longest, seconds)
        if not self.disable:  # a disabled bar has no clock
            self.start_t += seconds
            self.last_print_t += seconds

    @property
    def evaluation_seconds(self) -> float:
        """Expected seconds of the remaining evaluations."""
        return self._evaluations * self._longest

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values of tqdm, with elapsed and remaining time including evaluations."""
        values: dict[str, Any] = dict(super().format_dict)
        if values.get("initial") is None:  # the bar was never displayed
            return values
        taken, elapsed = values["n"] - values["initial"], values["elapsed"]
        rate = values["rate"] or (taken / elapsed if elapsed else 0.0)
        left = "?"
        if rate and taken:
            left = self.format_interval((values["total"] - values["n"]) / rate + self.evaluation_seconds)
        return {**values, "spent": self.format_interval(elapsed + self._evaluated), "left": left}
