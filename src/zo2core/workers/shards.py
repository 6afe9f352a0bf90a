"""A worker's shard of a step: part of the evaluations, on part of the rows."""

from __future__ import annotations

import re
from typing import NamedTuple

from zo2core.errors import OptionError


class Shard(NamedTuple):
    """A worker's part of a step."""

    evaluations: range  # indices of the worker's evaluations in the step
    part: int = 0  # index of the worker's part of the rows
    parts: int = 1  # number of parts of the rows

    def rows(self, count: int) -> slice:
        """The worker's rows of a batch of ``count`` rows: parts differ by one row at most."""
        return slice(self.part * count // self.parts, (self.part + 1) * count // self.parts)


class Split(NamedTuple):
    """Groups of workers shard the evaluations of a step; the workers of a group shard the rows.

    Worker ``rank`` is in group ``rank // parts`` and has the rows of part ``rank % parts``.
    """

    groups: int
    parts: int

    def shard(self, rank: int, evaluations: int) -> Shard:
        """The shard of the worker of this rank, in a step of so many evaluations."""
        group, part = divmod(rank, self.parts)
        return Shard(range(group * evaluations // self.groups, (group + 1) * evaluations // self.groups), part, self.parts)


def require_split(name: str) -> None:
    """Refuse a name that is not the name of a split."""
    if name not in ("auto", "rows", "directions") and not re.fullmatch(r"[1-9]\d{0,5}x[1-9]\d{0,5}", name):
        raise OptionError(
            "split",
            found=repr(name),
            expected="auto, rows, directions, or both as 2x3: two groups for directions, three workers each for rows",
            remedy="pass one of these",
        )


def choose_split(name: str, size: int, evaluations: int, rows: int | None) -> Split:
    """The named split of a step among workers; for "auto", the one in which the busiest worker has the least to compute.

    Of equally good splits "auto" takes the one with the most groups: sharding directions leaves every bit of the result as
    it is, while losses over parts of the rows are summed in another order.
    """
    require_split(name)
    most_parts = 1 if rows is None else rows
    if name == "auto":
        splits = [Split(groups, size // groups) for groups in range(size, 0, -1) if size % groups == 0]
    elif "x" in name:
        splits = [Split(*map(int, name.split("x")))]
    else:
        splits = [Split(size, 1) if name == "directions" else Split(1, size)]
    fitting = [split for split in splits if split.groups <= evaluations and split.parts <= most_parts]
    if not fitting or fitting[0].groups * fitting[0].parts != size:
        row_count = "rows that cannot be sharded" if rows is None else f"{rows} rows"
        raise OptionError(
            "split",
            found=f"{name}, {size} workers for {evaluations} evaluations and {row_count}",
            expected="an evaluation and a row for every worker",
            remedy="start fewer workers, or use more queries or rows per step",
        )
    return min(fitting, key=lambda split: -(-evaluations // split.groups) * -(-most_parts // split.parts))
