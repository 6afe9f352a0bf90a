"""What most optimizers of all parameters have in common: they change every segment at each step, and need no state."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zo2core.types import BlockLayout, StateSpec


class EverySegment:
    """Defaults of the ``BlockUpdate`` contract; an optimizer overrides what differs."""

    @property
    def widens_gradients(self) -> bool:
        """Whether 16-bit gradients are converted to float32 first: yes."""
        return True

    @property
    def copies(self) -> int:
        """None. See the contract."""
        return 0

    @property
    def turn(self) -> int | None:
        """Nothing is forgotten. See the contract."""
        return None

    def segments(self, step: int, trained: Sequence[int]) -> Collection[int]:
        """All of them."""
        return trained

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """None. See the contract."""
        return ()

    def settle(self) -> None:
        """Do nothing: no work is left to other threads."""
