"""All tasks by name: the values of ``--objective``, the format of each task's rows, and the name of
its class.

The classes are elsewhere, so that command lines are parsed without importing transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

    def takes(self, rows: RowFormat) -> bool:
        """Whether the task takes rows of a format, if it is given by name."""
        return rows is self.rows or rows in self.other_rows


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
    named = _named(objective)
    return next((task for task in named if task.rows is rows), named[0])


def require_task(
    objective: str,
    rows: RowFormat | None,
    used: Mapping[str, object],
    *,
    differentiates: bool,
    option: str = "objective",
) -> None:
    """Refuse an objective that there is not, or that does not go with rows or with other options.

    Args:
        objective: Name of the objective.
        rows: Format of the rows to train on; None: it is not known yet.
        used: Values of the options that few tasks support, by their names in ``TaskEntry``.
        differentiates: Whether steps take the gradient of the objective.
        option: The option that asks for it.
    """
    tasks = _named(objective) if rows is None else [find_task(objective, rows)]
    first = tasks[0]
    for name, value in used.items():
        if value not in (None, False) and not any(name in task.options for task in tasks):
            raise _unsupported(name, first)
    if differentiates and not any(task.has_gradient for task in tasks):
        raise _without_gradient(first.name, rows)
    if rows is not None and not first.takes(rows):
        found = f"{objective} for rows with {rows.value}"
        expected = f"rows with {first.rows.value}"
        raise OptionError(option, found, expected, "pass another objective, or other rows")


def _unsupported(option: str, task: TaskEntry) -> OptionError:
    """The error about an option that a task does not support, which names those that do."""
    supporting = [other for other in TASKS if option in other.options]
    expected = _either(other.name for other in supporting)
    found = f"the objective {task.name}"
    if any(other.name == task.name for other in supporting):  # then the rows decide
        found += f" for rows with {task.rows.value}"
        expected += f" for rows with {_either(other.rows.value for other in supporting)}"
    return OptionError(option, found, f"the objective {expected}", "leave it out")


def _without_gradient(name: str, rows: RowFormat | None) -> OptionError:
    """The error about an objective that has no gradient, which names those that have one."""
    differentiable = [task for task in TASKS if task.has_gradient]
    expected = _either(task.name for task in differentiable if rows is None or task.takes(rows))
    return OptionError(
        "objective",
        f"{name}, which has no gradient",
        f"{expected}, which have a gradient",
        "pass another objective, or --method zeroth-order, which needs no gradient",
    )


def require_evaluation(rows: RowFormat, evaluation: RowFormat) -> None:
    """Refuse rows to evaluate on that do not go with the rows to train on, by their formats."""
    is_text = rows is RowFormat.TEXT
    if evaluation is rows or (is_text and evaluation is not RowFormat.PREFERENCES):
        return
    others = ", or with prompt and candidates, or with prompt and answers" if is_text else ""
    raise OptionError(
        "evaluation",
        f"rows with {evaluation.value}, for a run on rows with {rows.value}",
        f"rows with the fields of the training rows{others}",
        "pass a file with such rows",
    )


def _named(objective: str) -> list[TaskEntry]:
    """The tasks of this name; of auto the first task of each format."""
    if objective == AUTO:
        return list({task.rows: task for task in reversed(TASKS)}.values())[::-1]
    name = objective if function_file(objective) is None else FUNCTION
    named = [task for task in TASKS if task.name == name]
    if not named:
        names = dict.fromkeys(task.name for task in TASKS if task.name not in (FUNCTION, REWARD))
        expected = f"one of {', '.join([AUTO, *names])}, or {FUNCTION}"
        raise OptionError("objective", repr(objective), expected, "pass one of these")
    return named


def _either(names: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(names))
