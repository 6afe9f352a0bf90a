"""All tasks by name: the values of ``--objective``, the format of each task's rows, and the name of
its class.

The classes are elsewhere, so that command lines are parsed without importing transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from zo2adapters.tasks.row_options import RowFormat
from zo2core.errors import OptionError

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
    # further formats that the task takes if it is given by name
    other_rows: tuple[RowFormat, ...] = ()
    has_gradient: bool = True  # whether its objective can be differentiated


# rows of preferences are candidates, too: the chosen one is right
_PREFERENCES = (RowFormat.PREFERENCES,)

TASKS = (
    TaskEntry(MODEL_LOSS, RowFormat.TEXT, "Task", options=("pack", "per_row")),
    TaskEntry(MODEL_LOSS, RowFormat.LABELS, "Task"),
    TaskEntry("choice-loss", RowFormat.CANDIDATES, "ChoiceTask", other_rows=_PREFERENCES),
    TaskEntry(MODEL_LOSS, RowFormat.CANDIDATES, "ChoiceTask", options=("per_row",)),
    TaskEntry(
        "accuracy", RowFormat.CANDIDATES, "ChoiceTask", other_rows=_PREFERENCES, has_gradient=False
    ),
    TaskEntry(
        "f1", RowFormat.CANDIDATES, "ChoiceTask", other_rows=_PREFERENCES, has_gradient=False
    ),
    TaskEntry("dpo", RowFormat.PREFERENCES, "PreferenceTask", options=("beta",)),
    TaskEntry("exact-match", RowFormat.TEXT, "ExactMatch", has_gradient=False),
    TaskEntry(REWARD, RowFormat.TEXT, "RewardTask", options=("rewards",), has_gradient=False),
    TaskEntry(FUNCTION, RowFormat.TEXT, "FunctionTask"),
)


def names_model_loss(objective: str) -> bool:
    """Whether an objective is the model's own loss for rows of text or with labels: ``auto`` or
    ``loss``.
    """
    return objective in (AUTO, MODEL_LOSS)


def function_file(objective: str) -> Path | None:
    """The file of an objective that is the user's own function; None for other objectives."""
    return Path(objective.rpartition(":")[0]) if ".py:" in objective else None


def is_differentiable(objective: str, rows: RowFormat) -> bool:
    """Whether an objective for rows of a format has a gradient."""
    return find_task(objective, rows).has_gradient


def find_task(objective: str, rows: RowFormat) -> TaskEntry:
    """The task of this name for rows of this format; if there is none for them, the first task of
    this name.
    """
    if objective == AUTO:
        return next(task for task in TASKS if task.rows is rows)
    name = objective if function_file(objective) is None else FUNCTION
    named = [task for task in TASKS if task.name == name]
    if not named:
        names = ", ".join(
            dict.fromkeys(
                [AUTO, *(task.name for task in TASKS if task.name not in (FUNCTION, REWARD))]
            )
        )
        raise OptionError(
            "objective", repr(objective), f"one of {names}, or {FUNCTION}", "pass one of these"
        )
    return next((task for task in named if task.rows is rows), named[0])
