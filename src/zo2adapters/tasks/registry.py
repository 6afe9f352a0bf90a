"""All tasks by name: the values of ``--objective``, the format of each task's rows, and its class.

A task is imported when a run uses it, so that command lines are parsed without importing transformers.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zo2adapters.tasks.row_options import RowFormat
from zo2core.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from zo2adapters.models.hf import HFBlockModel
    from zo2adapters.tasks.rows import Rows
    from zo2adapters.tasks.task import Task, TaskOptions
    from zo2core import Engine

AUTO = "auto"  # the first task of the rows' format
MODEL_LOSS = "loss"  # the model's own loss
FUNCTION = "FILE.py:function"
REWARD = "reward"  # rewards of what the model writes, which options of their own name


class TaskEntry(NamedTuple):
    """A task of the registry."""

    name: str
    rows: RowFormat
    kind: str  # its class in the module ``task``
    options: tuple[str, ...] = ()  # fields of TaskOptions that this task supports and most do not
    other_rows: tuple[RowFormat, ...] = ()  # further formats that the task takes if it is given by name
    has_gradient: bool = True  # whether its objective can be differentiated

    def load(self) -> Callable[[HFBlockModel, Rows, TaskOptions], Task]:
        """Import the class of the task."""
        tasks: Any = importlib.import_module("zo2adapters.tasks.task")
        loaded: Callable[[HFBlockModel, Rows, TaskOptions], Task] = getattr(tasks, self.kind)
        return loaded


_PREFERENCES = (RowFormat.PREFERENCES,)  # rows of preferences are candidates, too: the chosen one is right

TASKS = (
    TaskEntry(MODEL_LOSS, RowFormat.TEXT, "Task", options=("pack", "per_row")),
    TaskEntry(MODEL_LOSS, RowFormat.LABELS, "Task"),
    TaskEntry("choice-loss", RowFormat.CANDIDATES, "ChoiceTask", other_rows=_PREFERENCES),
    TaskEntry(MODEL_LOSS, RowFormat.CANDIDATES, "ChoiceTask", options=("per_row",)),
    TaskEntry("accuracy", RowFormat.CANDIDATES, "ChoiceTask", other_rows=_PREFERENCES, has_gradient=False),
    TaskEntry("f1", RowFormat.CANDIDATES, "ChoiceTask", other_rows=_PREFERENCES, has_gradient=False),
    TaskEntry("dpo", RowFormat.PREFERENCES, "PreferenceTask", options=("beta",)),
    TaskEntry("exact-match", RowFormat.TEXT, "ExactMatch", has_gradient=False),
    TaskEntry(REWARD, RowFormat.TEXT, "RewardTask", options=("rewards",), has_gradient=False),
    TaskEntry(FUNCTION, RowFormat.TEXT, "FunctionTask"),
)


def names_model_loss(objective: str) -> bool:
    """Whether an objective is the model's own loss for rows of text or with labels: ``auto`` or ``loss``."""
    return objective in (AUTO, MODEL_LOSS)


def function_file(objective: str) -> Path | None:
    """The file of an objective that is the user's own function; None for other objectives."""
    return Path(objective.rpartition(":")[0]) if ".py:" in objective else None


def is_differentiable(objective: str, rows: RowFormat) -> bool:
    """Whether an objective for rows of a format has a gradient."""
    return _find(objective, rows).has_gradient


def make_task(model: HFBlockModel, rows: Rows, options: TaskOptions) -> Task:
    """Make the task that the options name."""
    entry = _find(options.objective, rows.format)
    for option in ("pack", "beta", "per_row", "rewards"):
        if getattr(options, option) not in (None, False) and option not in entry.options:
            expected = f"the objective {' or '.join(task.name for task in TASKS if option in task.options)}"
            raise OptionError(option, found=f"the objective {entry.name}", expected=expected, remedy="leave it out")
    if options.differentiates and not entry.has_gradient:
        names = [task.name for task in TASKS if task.has_gradient and rows.format in (task.rows, *task.other_rows)]
        found, expected = f"{entry.name}, which has no gradient", f"{' or '.join(names)} with --method"
        remedy = "pass another objective, or leave --method out: zeroth-order steps need no gradient"
        raise OptionError("objective", found=found, expected=expected, remedy=remedy)
    if rows.format not in (entry.rows, *entry.other_rows):
        found, expected = f"{options.objective} for rows with {rows.format.value}", f"rows with {entry.rows.value}"
        raise OptionError("objective", found=found, expected=expected, remedy="pass another objective, or other rows")
    name = entry.name if options.objective == AUTO else options.objective
    return entry.load()(model, rows, replace(options, objective=name))


def make_evaluation(
    task: Task, model: HFBlockModel, rows: Rows, evaluation: Rows, options: TaskOptions
) -> Callable[[Engine], dict[str, float]]:
    """Make a function that evaluates the current weights of a runner on a run's rows.

    A run that trains on texts or completions may also be evaluated on rows with candidates, by the loss over the candidates
    and accuracy, or on rows with answers, by F1 and exact match of the answers that it generates.
    """
    if evaluation.format is not rows.format:
        is_text = rows.format is RowFormat.TEXT
        if not is_text or evaluation.format is RowFormat.PREFERENCES:
            found = f"rows with {evaluation.format.value}, for a run on rows with {rows.format.value}"
            others = ", or with prompt and candidates, or with prompt and answers" if is_text else ""
            expected = f"rows with the fields of the training rows{others}"
            raise OptionError("evaluation", found=found, expected=expected, remedy="pass a file with such rows")
        entry = _find(MODEL_LOSS, evaluation.format)  # whose evaluation names the loss over the candidates apart
        task = entry.load()(model, evaluation, replace(options, objective=MODEL_LOSS))
    return lambda engine: task.evaluate(engine, evaluation)


def _find(objective: str, rows: RowFormat) -> TaskEntry:
    """The task of this name for rows of this format; if there is none for them, the first task of this name."""
    if objective == AUTO:
        return next(task for task in TASKS if task.rows is rows)
    name = objective if function_file(objective) is None else FUNCTION
    named = [task for task in TASKS if task.name == name]
    if not named:
        names = ", ".join(dict.fromkeys([AUTO, *(task.name for task in TASKS if task.name not in (FUNCTION, REWARD))]))
        expected = f"one of {names}, or {FUNCTION}"
        raise OptionError("objective", found=repr(objective), expected=expected, remedy="pass one of these")
    return next((task for task in named if task.rows is rows), named[0])
