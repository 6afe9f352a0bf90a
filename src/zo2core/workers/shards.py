"""What a worker does of a step: its part of the evaluations, on its part of the rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from zo2core.errors import OptionError
from zo2core.types import Evaluation


class Shard(NamedTuple):
    """A worker's part of a step."""

    evaluations: range  # places of its evaluations among the step's
    part: int = 0  # of the rows
    parts: int = 1  # into which the rows are dealt

    def rows(self, count: int) -> slice:
        """Its rows, of so many: parts differ by one row at most."""
        return slice(self.part * count // self.parts, (self.part + 1) * count // self.parts)


class Split(NamedTuple):
    """How a step is shared out: workers in groups, which share the evaluations; those of a group share the rows.

    Worker ``rank`` is in group ``rank // parts`` and has the rows of part ``rank % parts``.
    """

    groups: int
    parts: int

    def shard(self, rank: int, evaluations: int, unit: int = 1) -> Shard:
        """A worker's share.

        Args:
            rank: The worker.
            evaluations: Evaluations of the step.
            unit: Evaluations that stay together.
        """
        group, part = divmod(rank, self.parts)
        count = evaluations // unit
        places = range(group * count // self.groups * unit, (group + 1) * count // self.groups * unit)
        return Shard(places, part, self.parts)


def require_split(asked: str) -> None:
    """Refuse a name of a split that is none.

    Raises:
        OptionError: naming it.
    """
    if asked not in ("auto", "rows", "directions") and not re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,5}", asked):
        raise OptionError(
            "split",
            found=repr(asked),
            expected="auto, rows, directions, or both as 2x3: two groups for directions, three workers each for rows",
            remedy="choose one of these",
        )


def choose_split(asked: str, size: int, units: int, rows: int | None) -> Split:
    """The split of a step among workers: as asked, or the one in which the busiest worker has the least to do.

    Of equal ones the one with more groups is chosen: directions that are shared out leave every bit of the result as it is,
    while losses over parts of the rows are summed in another order.

    Args:
        asked: "auto", "rows", "directions", or "GxP".
        size: Workers.
        units: Parts of the step's evaluations that can be made apart.
        rows: Rows of the batch; None where they cannot be sharded.

    Raises:
        OptionError: if some worker would have nothing to do.
    """
    require_split(asked)
    most_parts = 1 if rows is None else rows
    if asked == "auto":
        splits = [Split(groups, size // groups) for groups in range(size, 0, -1) if size % groups == 0]
    elif "x" in asked:
        splits = [Split(*map(int, asked.split("x")))]
    else:
        splits = [Split(size, 1) if asked == "directions" else Split(1, size)]
    fitting = [split for split in splits if split.groups <= units and split.parts <= most_parts]
    if not fitting or fitting[0].groups * fitting[0].parts != size:
        dealt = "rows that cannot be dealt" if rows is None else f"{rows} rows"
        raise OptionError(
            "split",
            found=f"{asked}, {size} workers for {units} evaluations that can be made apart and {dealt}",
            expected="something to do for every worker",
            remedy="start fewer workers, or take more queries or rows a step",
        )
    return min(fitting, key=lambda split: -(-units // split.groups) * -(-most_parts // split.parts))


def evaluations_apart(evaluations: Sequence[Evaluation], *, whole: bool) -> int:
    """How many evaluations stay together: 1, or both sides of a direction.

    Args:
        evaluations: Evaluations of a step.
        whole: Whether directions have to stay whole, since a worker's losses may be left out.

    Raises:
        OptionError: if they have to and the evaluations are not pairs.
    """
    if not whole:
        return 1
    pairs = zip(evaluations[::2], evaluations[1::2], strict=False)
    if len(evaluations) % 2 or any(plus.seed != minus.seed for plus, minus in pairs):
        raise OptionError(
            "deadline",
            found="an estimator whose directions share an evaluation",
            expected="one that evaluates both sides of each direction, so that a worker's directions can be left out",
            remedy="leave the deadline out, or use MultiQueryRGE",
        )
    return 2
