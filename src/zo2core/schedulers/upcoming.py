"""The order in which a sweep needs segments next, for prefetching."""

from __future__ import annotations

from collections.abc import Sequence


def upcoming(order: Sequence[int], position: int) -> list[int]:
    """List each segment once, in the order of its next use; the next sweep has the same order.

    Args:
        order: Order of the sweep. A block may be in it more than once.
        position: Index of the next visit.
    """
    return list(dict.fromkeys([*order[position:], *order[:position]]))
