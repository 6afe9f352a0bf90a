"""All tasks by name: what ``--objective`` takes, which rows each task is for, and where it is.

Tasks are imported when a run asks for one, so that a command line is read without transformers.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zo2adapters.tasks.row_format import RowFormat
from zo2core import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from zo2adapters.models.hf import HFBlockModel
    from zo2adapters.tasks.row_files import Rows
    from zo2adapters.tasks.task import Task, TaskOptions

AUTO = "auto"  # the first task of the rows' format
MODEL_LOSS = "loss"  # the model's own loss
FUNCTION = "FILE.py:function"


class TaskEntry(NamedTuple):
    """A task of the registry."""

    name: str
    rows: RowFormat
    location: str  # module of this folder, and class
    options: tuple[str, ...] = ()  # fields of TaskOptions that this task supports and most do not
    other_rows: tuple[RowFormat, ...] = ()  # formats that it takes beside its own, if it is asked for by name
    has_gradient: bool = True  # whether its objective can be differentiated

    def load(self) -> Callable[[HFBlockModel, Rows, TaskOptions], Task]:
        """Import the class of the task."""
        module, name = self.location.split(":")
        loaded: Callable[[HFBlockModel, Rows, TaskOptions], Task] = getattr(
            importlib.import_module(f"zo2adapters.tasks.{module}"), name
        )
        return loaded


_PREFERENCES = (RowFormat.PREFERENCES,)  # are candidates, too: the chosen one is right

TASKS = (
    TaskEntry(MODEL_LOSS, RowFormat.TEXT, "language_modelling_task:LanguageModelling", options=("pack", "per_row")),
    TaskEntry(MODEL_LOSS, RowFormat.LABELS, "label_task:LabelTask"),
    TaskEntry("choice-loss", RowFormat.CANDIDATES, "choice_task:ChoiceLossTask", other_rows=_PREFERENCES),
    TaskEntry("accuracy", RowFormat.CANDIDATES, "choice_task:AccuracyTask", other_rows=_PREFERENCES, has_gradient=False),
    TaskEntry("f1", RowFormat.CANDIDATES, "choice_task:F1Task", other_rows=_PREFERENCES, has_gradient=False),
    TaskEntry("dpo", RowFormat.PREFERENCES, "preference_task:PreferenceTask", options=("beta",)),
    TaskEntry("exact-match", RowFormat.TEXT, "exact_match_task:ExactMatch", has_gradient=False),
    TaskEntry(FUNCTION, RowFormat.TEXT, "function_task:FunctionTask"),
)


def names_model_loss(objective: str) -> bool:
    """Whether an objective is the model's own loss for rows of text or with labels: ``auto`` or ``loss``."""
    return objective in (AUTO, MODEL_LOSS)


def function_file(objective: str) -> Path | None:
    """The file of an objective that is a function of the user's own."""
    return Path(objective.rpartition(":")[0]) if ".py:" in objective else None


def make_task(model: HFBlockModel, rows: Rows, options: TaskOptions) -> Task:
    """Make the task that the options name, for rows.

    Args:
        model: The model to train.
        rows: The rows to train on.
        options: What the run's options say about the task.

    Raises:
        OptionError: if there is no such task, it takes rows of another format, or it does not support an option.
    """
    entry = _find(options.objective, rows.format)
    for option in ("pack", "beta", "per_row"):
        if getattr(options, option) not in (None, False) and option not in entry.options:
            supporting = " or ".join(known.name for known in TASKS if option in known.options)
            raise OptionError(option, found=f"{entry.name} as objective", expected=supporting, remedy="leave it out")
    if options.differentiates and not entry.has_gradient:
        differentiable = [
            known.name for known in TASKS if known.has_gradient and rows.format in (known.rows, *known.other_rows)
        ]
        raise OptionError(
            "objective",
            found=f"{entry.name}, which has no gradient",
            expected=f"{' or '.join(differentiable)} with --method",
            remedy="choose another objective, or leave --method out: zeroth-order steps need no gradient",
        )
    if rows.format not in (entry.rows, *entry.other_rows):
        raise OptionError(
            "objective",
            found=f"{options.objective} for rows with {rows.format.value}",
            expected=f"rows with {entry.rows.value}",
            remedy="choose another objective, or other rows",
        )
    name = entry.name if options.objective == AUTO else options.objective
    return entry.load()(model, rows, replace(options, objective=name))


def _find(objective: str, rows: RowFormat) -> TaskEntry:
    """The task of a name: the one for rows of this format, else the first one."""
    if objective == AUTO:
        return next(known for known in TASKS if known.rows is rows)
    name = objective if function_file(objective) is None else FUNCTION
    named = [known for known in TASKS if known.name == name]
    if not named:
        names = ", ".join(dict.fromkeys([AUTO, *(known.name for known in TASKS if known.name != FUNCTION)]))
        raise OptionError(
            "objective", found=repr(objective), expected=f"one of {names}, or {FUNCTION}", remedy="choose one of these"
        )
    return next((known for known in named if known.rows is rows), named[0])
