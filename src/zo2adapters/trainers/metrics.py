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
from typing import IO, Any, NamedTuple

import psutil

from zo2adapters.trainers.allocator import peak_memory
from zo2adapters.trainers.evaluations import Results, criterion, results_of_row, row_of_evaluation
from zo2core import Batch, Journal, StepResult, Update
from zo2core.errors import OutputError, reason
from zo2core.types import Commit, shown_bytes

Row = Mapping[str, Any]


class MetricsRows(NamedTuple):
    """The rows of a file of metrics after their comparison with a journal."""

    rows: list[Row]  # one row per step and per evaluation, in order, as the file should have them
    steps_seen: int  # number of steps that the journal had when the last row was written


def align_rows(raw: bytes, journal: Journal) -> MetricsRows:
    """Keep the rows that agree with the journal, and restore lost or damaged rows from it.

    Rows of evaluations that the journal does not have are kept: journals of earlier versions have no evaluations.

    Args:
        raw: The file's bytes.
        journal: Journal of the run.
    """
    known = journal.steps
    rows = [row for row in map(_parsed, raw.split(b"\n")) if row is not None]
    steps = [row for row in rows if "loss" in row]
    evaluations = {row["step"]: row for row in rows if "loss" not in row and row["step"] <= len(known)}
    for step, results in journal.evaluations.items():
        _align_evaluation(evaluations, step, results)
    kept = {row["step"]: row for row in steps if row["step"] < len(known) and _agrees(row, known[row["step"]])}
    aligned: list[Row] = []
    for step in range(len(known) + 1):
        aligned += [evaluations[step]] if step in evaluations else []
        if step < len(known):
            aligned.append(kept.get(step) or row_of(known[step]))
    return MetricsRows(aligned, _steps_seen(steps, known, kept))


def trial_rows(trials: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of short runs with which the learning rate was chosen. See ``read_trials``."""
    return [{f"trial_{name}": value for name, value in trial.items()} for trial in trials]


def row_of(update: Update | Commit) -> dict[str, Any]:
    """The row of a step as far as the journal has it, without speed and memory."""
    if isinstance(update, Commit):
        return {"step": update.step, "loss": update.loss, "grad_norm": update.grad_norm, "lr": update.lr}
    return {
        "step": update.step,
        "loss": update.losses[0],
        "losses": list(update.losses),
        "projected_grads": list(update.projected_grads),
        "lr": update.lr,
    }


def _align_evaluation(rows: dict[int, Row], step: int, results: Results) -> None:
    """Replace a row that differs from the journal's results of an evaluation."""
    known = row_of_evaluation(step, results)
    if not math.isfinite(criterion(results)):
        rows.pop(step, None)
    elif step not in rows or any(rows[step].get(key) != value for key, value in known.items()):
        rows[step] = known


def _steps_seen(steps: Sequence[Row], updates: Sequence[Update | Commit], kept: Mapping[int, Row]) -> int:
    """Number of steps that the journal must have had, by rows that a single damage cannot have produced.

    Rows after the journal's last step count if they follow it without a gap, if most other rows agree with the journal, and
    if they are not rows of the journal's steps with a damaged step number.
    """
    below = sum(row["step"] < len(updates) for row in steps)
    if 2 * len(kept) < below:
        return len(updates)  # the file belongs to another run
    known = {_numbers(row_of(update)) for update in updates}
    beyond = {row["step"] for row in steps if _numbers(row) not in known}
    seen = len(updates)
    while seen in beyond:
        seen += 1
    return seen


def _numbers(row: Row) -> tuple[object, ...]:
    """The measured numbers of a step, which differ from those of every other step."""
    if "grad_norm" in row:
        return row["loss"], row["grad_norm"]
    return tuple(row["losses"]), tuple(row["projected_grads"])


def _agrees(row: Row, update: Update | Commit) -> bool:
    known = row_of(update)
    return all(row.get(key) == known[key] for key in known)


def _parsed(line: bytes) -> Row | None:
    """Parse a line; None if it is torn, damaged or empty."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        return None
    if "loss" in row:
        lists = [row.get("losses"), row.get("projected_grads")]
        is_whole = _is_real(row["loss"]) and (
            _is_real(row["grad_norm"])
            if "grad_norm" in row
            else all(isinstance(values, list) and values and all(map(_is_real, values)) for values in lists)
        )
    else:
        is_whole = math.isfinite(criterion(results_of_row(row)))
    return row if is_whole else None


def _is_real(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


def step_record(
    update: Update | Commit, result: StepResult, batch: Batch, measured: Mapping[str, float] = MappingProxyType({})
) -> dict[str, Any]:
    """The row of a step in ``metrics.jsonl``, as JSON values.

    Args:
        update: The step's record in the journal.
        result: The step's report.
        batch: The batch of the step.
        measured: What the task has measured in the step, by name.
    """
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
    memory, peak = shown_bytes(record["rss_bytes"]), shown_bytes(record["peak_rss_bytes"])
    number = f"reward {record['reward']:.4f}" if "reward" in record else f"loss {record['loss']:.4f}"
    return f"{number}, {record['tokens_per_second']:.0f} tokens/s, {memory} (peak {peak})"


def write_row(file: IO[bytes], record: Row) -> None:
    """Append a row to the file.

    Args:
        file: ``metrics.jsonl``, opened unbuffered.
        record: The row, as JSON values.

    Raises:
        OutputError: if the file cannot be written.
    """
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
