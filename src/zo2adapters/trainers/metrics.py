"""What a run tells while it works: the rows of ``metrics.jsonl``, and progress bars.

The file of metrics is for people and plots and has no checksums. The journal has the same numbers,
except speed and memory, so damaged rows are restored from it. No content of the file can block a
run or decide which step is exported. It gives one piece of information that the journal cannot: a
row is written after its record is durable, so rows of steps or evaluations that the journal does
not have mean that the journal has lost them.

Bars stand on standard error, in a terminal only: of long work, and of the passes within it that
take seconds each.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import psutil
from tqdm import tqdm

from zo2adapters.optional_package import optional_package
from zo2core.errors import JournalError, OutputError, system_errors_as
from zo2core.io.process_memory import peak_memory
from zo2core.ranges import counted

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel
    from zo2adapters.trainers.options import TrackerName
    from zo2core import Batch, Engine, Journal, StepResult, Update
    from zo2core.types import Commit

Row = Mapping[str, Any]


class MetricsRows(NamedTuple):
    """The rows of a file of metrics after their comparison with a journal."""

    rows: list[Row]  # one row per step and per evaluation, in order, as the file should have them
    steps_seen: int  # number of steps that the journal had when the last row was written
    lost: list[int]  # steps whose evaluation the journal had, and has no more

    def require_whole(self, journal: Journal, where: str) -> None:
        """Refuse a journal that has lost what a file with these rows knows of."""
        journal.require_version(self.steps_seen, where)
        if self.lost:
            at = self.lost[0]
            raise JournalError(
                journal.name,
                f"no evaluation of step {at}",
                f"its result, since {where} has it",
                f"restore the journal from a copy: a record is gone; or remove {where} to do "
                "without it",
            )


def align_rows(raw: bytes, journal: Journal) -> MetricsRows:
    """Keep the rows that agree with the journal, and restore lost or damaged rows from it."""
    rows = [row for row in map(_parsed, raw.split(b"\n")) if row is not None]
    known = [recorded_row(journal, step) for step in range(journal.version)]
    evaluations = journal.evaluations
    at_steps: dict[int, list[Row]] = {}
    for row in rows:
        at_steps.setdefault(row["step"], []).append(row)
    aligned: list[Row] = []
    for step in range(len(known) + 1):
        restored = list[Row]()
        if step in evaluations and math.isfinite(criterion(evaluations[step])):
            restored.append(row_of_evaluation(step, evaluations[step]))
        restored += known[step : step + 1]
        aligned += [
            next((row for row in at_steps.get(step, ()) if _agrees(row, record)), record)
            for record in restored
        ]
    of_steps = [row for row in rows if "loss" in row]
    lost = _lost(rows, evaluations, journal.version) if _is_of_run(of_steps, known) else []
    return MetricsRows(aligned, _steps_seen(of_steps, known), lost)


def row_of(update: Update | Commit) -> dict[str, Any]:
    """The row of a step as far as the journal has it, without speed and memory."""
    from zo2core.types import Commit

    if isinstance(update, Commit):
        return {
            "step": update.step,
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "lr": update.lr,
        }
    return {
        "step": update.step,
        "loss": update.losses[0],
        "losses": list(update.losses),
        "projected_grads": list(update.projected_grads),
        "lr": update.lr,
    }


def recorded_row(journal: Journal, step: int) -> dict[str, Any]:
    """The row of a step, with what the step has measured, as far as the journal has it."""
    return {**row_of(journal.steps[step]), **journal.measured.get(step, {})}


def losses_of(journal: Journal) -> list[float]:
    """The loss of each step of a journal, before its update."""
    return [row_of(step)["loss"] for step in journal.steps]


def _steps_seen(rows: Sequence[Row], known: Sequence[Row]) -> int:
    """Number of steps that the journal must have had, by rows that a single damage cannot have
    produced.

    Rows after the journal's last step count if they follow it without a gap, if most other rows
    agree with the journal, and if they are not rows of the journal's steps with a damaged step
    number.
    """
    if not _is_of_run(rows, known):
        return len(known)
    losses = {row["loss"] for row in known}
    beyond = {row["step"] for row in rows if row["loss"] not in losses}
    seen = len(known)
    while seen in beyond:
        seen += 1
    return seen


def _is_of_run(rows: Sequence[Row], known: Sequence[Row]) -> bool:
    """Whether most rows of the journal's steps agree with it."""
    below = [row for row in rows if row["step"] < len(known)]
    return 2 * sum(_agrees(row, known[row["step"]]) for row in below) >= len(below)


def _lost(rows: Sequence[Row], evaluations: Mapping[int, Results], version: int) -> list[int]:
    """Steps with a row of an evaluation that the journal lacks.

    A row with the results of another evaluation is that one's, with a damaged step number.
    """
    lost = set()
    for row in rows:
        results = results_of_row(row)
        is_result = math.isfinite(criterion(results)) and results not in evaluations.values()
        if is_result and row["step"] not in evaluations and row["step"] <= version:
            lost.add(row["step"])
    return sorted(lost)


def _agrees(row: Row, known: Row) -> bool:
    return all(row.get(key) == known[key] for key in known)


def _parsed(line: bytes) -> Row | None:
    """Parse a line; None if it is torn, damaged or empty."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0
    return (
        row
        if is_row and type(row.get("loss", 0.0)) is float and math.isfinite(row.get("loss", 0.0))
        else None
    )


def _row_of_step(
    update: Update | Commit, result: StepResult, batch: Batch, measured: Mapping[str, float]
) -> dict[str, Any]:
    """The row of a step in ``metrics.jsonl``, as JSON values."""
    mask = batch.get("attention_mask")  # packed rows have no padding
    tokens = batch["input_ids"].numel() if mask is None else int(mask.sum())
    tokens = int(measured.get("generated_tokens", tokens))
    return {
        **row_of(update),
        **measured,
        "tokens": tokens,
        "tokens_per_second": tokens / result.seconds,
        "seconds": result.seconds,
        "bytes_moved": result.bytes_moved,
        "bound_seconds": result.bound_seconds,
        "lanes": {
            lane.value: {"busy": use.busy_seconds / result.seconds, "bytes": use.nbytes}
            for lane, use in result.lanes.items()
        },
        "rss_bytes": psutil.Process().memory_info().rss,
        "peak_rss_bytes": peak_memory(),
    }


def progress(record: dict[str, Any]) -> str:
    """The text that the progress bar displays for a step."""
    from zo2core.types import shown_bytes

    memory = shown_bytes(record["rss_bytes"])
    peak = shown_bytes(record["peak_rss_bytes"])
    number = (
        f"reward {record['reward']:.4f}" if "reward" in record else f"loss {record['loss']:.4f}"
    )
    return f"{number}, {record['tokens_per_second']:.0f} tokens/s, {memory} (peak {peak})"


# results of one evaluation by name, among them the one that ``criterion`` takes
Results = Mapping[str, float]

PREFIX = "evaluation_"  # prefix of a result's name in a row of metrics
_SHARES = ("accuracy", "f1", "exact_match")  # results that are shares of the rows
_DURATION = f"{PREFIX}seconds"  # of a row of metrics: how long the evaluation took


def best_step(evaluations: Mapping[int, Results]) -> int | None:
    """Step with the best evaluation, the earliest of equal ones; None if there is none with a
    number.
    """
    losses = {step: criterion(results) for step, results in evaluations.items()}
    comparable = [(loss, step) for step, loss in losses.items() if not math.isnan(loss)]
    return min(comparable)[1] if comparable else None


def best_line(evaluations: Mapping[int, Results]) -> str | None:
    """A line about the best evaluation; None if there is none with a number."""
    best = best_step(evaluations)
    counts = counted(len(evaluations), "evaluation")
    return (
        None
        if best is None
        else f"best of {counts}: step {best}, {shown_results(evaluations[best])}"
    )


def untrained_line(evaluations: Mapping[int, Results]) -> str:
    """A line about a best evaluation that is that of the base, before the first step."""
    return (
        f"the evaluation before the first step is the best of {len(evaluations)}, so nothing that "
        "was trained is used"
    )


def criterion(results: Results) -> float:
    """The result of an evaluation by which steps are compared; smaller is better, and NaN is none.

    It is ``loss`` where evaluations measure what steps minimise, otherwise ``choice_loss``, the
    loss over the candidates of a row, or 1 - ``f1`` of generated answers. Earlier versions wrote
    the last two as ``loss``.
    """
    for name in ("loss", "choice_loss"):
        if name in results:
            return results[name]
    return 1 - results.get("f1", math.nan)


def results_of_row(row: Mapping[str, Any]) -> Results:
    """The results in a row of metrics, without the prefix of their names; none in the row of a
    step.
    """
    if "loss" in row:
        return {}
    return {
        name.removeprefix(PREFIX): value
        for name, value in row.items()
        if name.startswith(PREFIX) and name != _DURATION and type(value) is float
    }


def row_of_evaluation(step: int, results: Results) -> dict[str, Any]:
    """The row of metrics of an evaluation, without its duration."""
    return {"step": step, **{f"{PREFIX}{name}": value for name, value in results.items()}}


def shown_results(results: Results) -> str:
    """Results as text, shares of rows in percent."""
    texts = {
        name: f"{value:.1%}" if name in _SHARES else f"{value:.4f}"
        for name, value in results.items()
    }
    return ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in texts.items())


def write_row(file: IO[bytes], record: Row) -> None:
    """Append a row to the file."""
    line = json.dumps(record).encode() + b"\n"
    with system_errors_as(
        OutputError,
        file.name,
        expected="a file that can be written",
        remedy="check the path and its disk",
        afterwards="resume the run then; the journal is whole, so no step is lost",
    ):
        while line:
            line = line[file.write(line) :]


class LiveMetrics:
    """Writes the rows of ``metrics.jsonl``, and reports them to a tracker."""

    def __init__(
        self, tracker: TrackerName, folder: Path, file: IO[bytes], options: Mapping[str, Any]
    ) -> None:
        self._opened = ExitStack()
        self._file = file
        self._report: Callable[[int, Mapping[str, float]], object] = lambda step, numbers: None
        if tracker == "tensorboard":
            module = optional_package("torch.utils.tensorboard", install="tensorboard")
            writer = self._opened.enter_context(
                closing(module.SummaryWriter(log_dir=str(folder / "tensorboard")))
            )
            self._report = lambda step, numbers: [
                writer.add_scalar(key, value, step) for key, value in numbers.items()
            ]
        elif tracker == "wandb":
            wandb = optional_package("wandb", install="wandb")
            run = wandb.init(project="zo2", name=folder.name, dir=str(folder), config=dict(options))
            self._opened.callback(run.finish)
            self._report = lambda step, numbers: run.log({"step": step, **numbers})

    def row(self, row: Row) -> None:
        """Append the row of a step or of an evaluation, and report it."""
        write_row(self._file, row)
        self._report(
            row["step"],
            {key: value for key, value in row.items() if key != "step" and _is_number(value)},
        )

    def step(
        self,
        update: Update | Commit,
        result: StepResult,
        batch: Batch,
        measured: Mapping[str, float],
        *,
        is_known: bool,
    ) -> dict[str, Any]:
        """Append the row of a step, unless it is known, and return it."""
        row = _row_of_step(update, result, batch, measured)
        if not is_known:
            self.row(row)
        return row

    def evaluation(self, step: int, results: Results, seconds: float) -> str:
        """Append the row of an evaluation, and return a line about it."""
        self.row({**row_of_evaluation(step, results), _DURATION: seconds})
        return f"step {step}: evaluation {shown_results(results)}, {seconds:.1f} s"

    def close(self) -> None:
        """Close the tracker. May be called twice."""
        self._opened.close()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_SECONDS = 2.0  # a sweep that takes less has no bar


def progress_bar(*, total: int, unit: str, desc: str | None = None, quiet: bool = False) -> Any:
    """Open a bar of tqdm on standard error, which is shown in a terminal only."""
    hidden = True if quiet else None  # None: hidden unless standard error is a terminal
    return tqdm(
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        desc=desc,
        file=sys.stderr,
        disable=hidden,
        dynamic_ncols=True,
    )


@contextmanager
def export_bar(
    model: HFBlockModel, desc: str = "export", *, quiet: bool = False
) -> Iterator[Callable[[int], object]]:
    """Show a bar of the bytes that an export writes."""
    from zo2core.checkpoint.export import CustomExport

    exported = model.exported_parameters if isinstance(model, CustomExport) else None
    layouts = [
        layout
        for layout in model.layouts
        if exported is None or any(spec.name in exported for spec in layout.parameters)
    ]
    total = sum(spec.decoded.nbytes for layout in layouts for spec in layout.parameters)
    with progress_bar(total=total, unit="B", desc=desc, quiet=quiet) as bar:
        yield bar.update


def verified_base(
    model: HFBlockModel, journal: Journal, *, quiet: bool = False
) -> Mapping[str, str]:
    """Call ``verify_base`` with a progress bar."""
    from zo2core.sources.segment_store import verify_base

    total = sum(spec.nbytes for layout in model.layouts for spec in layout.parameters)
    with progress_bar(total=total, unit="B", desc="base", quiet=quiet) as bar:
        return verify_base(model, journal, bar.update)


@contextmanager
def sweep_bars(runner: Engine, *, quiet: bool = False) -> Iterator[None]:
    """Show a bar of blocks below other bars while a sweep of a runner takes longer than two
    seconds.
    """
    bar: Any = tqdm(disable=True)

    def visited(done: int, total: int) -> None:
        nonlocal bar
        if done == 1:
            bar.close()  # that of a sweep that failed
            bar = tqdm(
                total=total,
                unit="block",
                desc="pass",
                file=sys.stderr,
                leave=False,
                dynamic_ncols=True,
                delay=_SECONDS,
            )
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
    """Counts rows whose batches share sweeps: a row counts as far as the sweep that it takes part
    in is.
    """

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


_LOGGED_SECONDS = 60.0  # after which a log has a line also of less than a tenth of the steps


class LoggedBar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar of steps on standard error; where that is no terminal, lines of a log instead.

    A line is written after each tenth of the steps, and once a minute. No line moves the cursor.
    """

    _bar_end = "[{elapsed}<{remaining}, {rate_fmt}{postfix}]"

    def __init__(self, label: str | None, **options: Any) -> None:
        self._is_log = not sys.stderr.isatty()
        self._logged = float(options.get("initial", 0))  # steps that the last line has told
        self._logged_at = time.monotonic()
        prefix = "step" if label is None else f"{label}: step"
        start = f"{prefix} " if self._is_log else "{l_bar}{bar}| "
        super().__init__(
            bar_format=f"{start}{{n_fmt}}/{{total_fmt}} {self._bar_end}",
            desc=label,
            unit="step",
            file=sys.stderr,
            dynamic_ncols=not self._is_log,
            **options,
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Show the bar, or write a line if one is due."""
        if not self._is_log:
            return super().display(msg, pos)
        is_due = self._tenth(self.n) > self._tenth(self._logged)
        if is_due or time.monotonic() - self._logged_at >= _LOGGED_SECONDS:
            self._log()
        return True

    def _tenth(self, steps: float) -> int:
        return int(steps * 10 // (self.total or 1))

    def _log(self) -> None:
        self._logged = self.n
        self._logged_at = time.monotonic()
        self.fp.write(f"{self}\n")

    def clear(self, nolock: bool = False) -> None:  # noqa: FBT001, FBT002 - as tqdm's
        """Remove the bar from the terminal, to print something else."""
        if not self._is_log:
            super().clear(nolock)

    def close(self) -> None:
        """End the bar, or write the last line. May be called twice."""
        if self._is_log and not self.disable:
            if self.n > self._logged:
                self._log()
            self.leave = False
            self.last_print_t = -math.inf  # tqdm's own takes it for a bar that was never shown
        super().close()


class StepBar(LoggedBar):
    """A bar over the steps of a run, between which evaluations take time."""

    _bar_end = "[{spent}<{left}, {rate_fmt}{postfix}]"

    def __init__(
        self, label: str | None, steps: int, *, initial: int, evaluations: int, quiet: bool
    ) -> None:
        self._evaluations = evaluations
        self._evaluated = 0.0  # seconds of all evaluations so far
        # seconds of the longest evaluation; the one before the first step also reads the weights
        self._longest = 0.0
        super().__init__(
            label,
            leave=label is None,
            total=steps,
            initial=initial,
            disable=quiet,
        )

    def count_step(self, record: dict[str, Any]) -> None:
        """Count a step, and show its row of metrics."""
        self.set_postfix_str(progress(record), refresh=False)
        self.update()

    def count_evaluation(self, seconds: float, *, left: int) -> None:
        """Exclude an evaluation from the time of the steps."""
        self._evaluations = left
        self._evaluated = self._evaluated + seconds
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
        taken = values["n"] - values["initial"]
        elapsed = values["elapsed"]
        rate = values["rate"] or (taken / elapsed if elapsed else 0.0)
        left = "?"
        if rate and taken:
            left = self.format_interval(
                (values["total"] - values["n"]) / rate + self.evaluation_seconds
            )
        return {**values, "spent": self.format_interval(elapsed + self._evaluated), "left": left}
