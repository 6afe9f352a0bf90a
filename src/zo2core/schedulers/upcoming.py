"""What a sweep needs next, as sources are told it."""

from __future__ import annotations

from collections.abc import Sequence


def upcoming(order: Sequence[int], position: int) -> list[int]:
    """Segments in the order in which they are needed from a position on, each once; the next sweep has the same order.

    Args:
        order: Order of the sweep. A block may be in it more than once.
        position: The first visit that is still to come.
    """
    return list(dict.fromkeys([*order[position:], *order[:position]]))
