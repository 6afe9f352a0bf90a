"""The rows of ``metrics.jsonl``, and their repair from the journal.

The file is for people and plots and has no checksums. The journal has the same numbers, except speed and memory, so damaged
rows are restored from it. No content of the file can block a run or decide which step is exported. It gives one piece of
information that the journal cannot: a row is written after its step is durable, so rows of steps that the journal does not
have mean that the journal has lost these steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import psutil

from zo2adapters.trainers.allocator import peak_memory
from zo2adapters.trainers.evaluations import criterion, row_of_evaluation
from zo2core.errors import OutputError, reason

if TYPE_CHECKING:
    from zo2core import Batch, Journal, StepResult, Update
    from zo2core.types import Commit


Row = Mapping[str, Any]


class MetricsRows(NamedTuple):
    """The rows of a file of metrics after their comparison with a journal."""

    rows: list[Row]  # one row per step and per evaluation, in order, as the file should have them
    steps_seen: int  # number of steps that the journal had when the last row was written


def align_rows(raw: bytes, journal: Journal) -> MetricsRows:
    """Keep the rows that agree with the journal, and restore lost or damaged rows from it."""
    rows = [row for row in map(_parsed, raw.split(b"\n")) if row is not None]
    known, evaluations = [row_of(step) for step in journal.steps], journal.evaluations
    at_steps: dict[int, list[Row]] = {}
    for row in rows:
        at_steps.setdefault(row["step"], []).append(row)
    aligned: list[Row] = []
    for step in range(len(known) + 1):
        restored = list[Row]()
        if step in evaluations and math.isfinite(criterion(evaluations[step])):
            restored.append(row_of_evaluation(step, evaluations[step]))
        restored += known[step : step + 1]
        aligned += [next((row for row in at_steps.get(step, ()) if _agrees(row, record)), record) for record in restored]
    return MetricsRows(aligned, _steps_seen([row for row in rows if "loss" in row], known))


def trial_rows(trials: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of short runs with which the learning rate was chosen. See ``read_trials``."""
    return [{f"trial_{name}": value for name, value in trial.items()} for trial in trials]


def row_of(update: Update | Commit) -> dict[str, Any]:
    """The row of a step as far as the journal has it, without speed and memory."""
    from zo2core.types import Commit

    if isinstance(update, Commit):
        return {"step": update.step, "loss": update.loss, "grad_norm": update.grad_norm, "lr": update.lr}
    return {
        "step": update.step,
        "loss": update.losses[0],
        "losses": list(update.losses),
        "projected_grads": list(update.projected_grads),
        "lr": update.lr,
    }


def _steps_seen(rows: Sequence[Row], known: Sequence[Row]) -> int:
    """Number of steps that the journal must have had, by rows that a single damage cannot have produced.

    Rows after the journal's last step count if they follow it without a gap, if most other rows agree with the journal, and
    if they are not rows of the journal's steps with a damaged step number.
    """
    below = [row for row in rows if row["step"] < len(known)]
    if 2 * sum(_agrees(row, known[row["step"]]) for row in below) < len(below):
        return len(known)  # the file belongs to another run
    losses = {row["loss"] for row in known}
    beyond = {row["step"] for row in rows if row["loss"] not in losses}
    seen = len(known)
    while seen in beyond:
        seen += 1
    return seen


def _agrees(row: Row, known: Row) -> bool:
    return all(row.get(key) == known[key] for key in known)


def _parsed(line: bytes) -> Row | None:
    """Parse a line; None if it is torn, damaged or empty."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0
    return row if is_row and type(row.get("loss", 0.0)) is float and math.isfinite(row.get("loss", 0.0)) else None


def step_record(
    update: Update | Commit, result: StepResult, batch: Batch, measured: Mapping[str, float] = MappingProxyType({})
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

    memory, peak = shown_bytes(record["rss_bytes"]), shown_bytes(record["peak_rss_bytes"])
    number = f"reward {record['reward']:.4f}" if "reward" in record else f"loss {record['loss']:.4f}"
    return f"{number}, {record['tokens_per_second']:.0f} tokens/s, {memory} (peak {peak})"


def write_row(file: IO[bytes], record: Row) -> None:
    """Append a row to the file."""
    line = json.dumps(record).encode() + b"\n"
    try:
        while line:
            line = line[file.write(line) :]
    except OSError as error:
        raise OutputError(
            file.name,
            found=reason(error),
            expected="a file that can be written",
            remedy="free space and resume the run; the journal is whole, so no step is lost",
        ) from error
