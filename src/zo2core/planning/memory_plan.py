"""A memory plan: its parts in bytes and its budget."""

from __future__ import annotations

from dataclasses import dataclass

from zo2core.errors import MemoryBudgetError
from zo2core.types import shown_bytes

_ENOUGH = 1.01  # times the smallest plan


@dataclass(frozen=True)
class MemoryPart:
    """One line of a plan."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Parts of a run in a memory, and the budget that they have to fit into."""

    parts: tuple[MemoryPart, ...]
    budget: int  # bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.nbytes for part in self.parts)

    @property
    def spare(self) -> int:
        """Unused bytes of the budget."""
        return self.budget - self.nbytes

    def table(self) -> str:
        """The parts, one a line, their sum and the budget."""
        rows = [*self.parts, MemoryPart("together", self.nbytes), MemoryPart("allowed", self.budget)]
        width = max(len(row.name) for row in rows)
        return "\n".join(f"{row.name:{width}s} {shown_bytes(row.nbytes):>10s}" for row in rows)

    def too_large(self, option: str, remedy: str) -> MemoryBudgetError:
        """The error for a smallest plan that does not fit.

        The least that it tells is a little more: the text is rounded, and a process has not the same size every time.
        """
        parts = ", ".join(f"{part.name} {shown_bytes(part.nbytes)}" for part in self.parts)
        return MemoryBudgetError(
            option,
            found=shown_bytes(self.budget),
            expected=f"at least {shown_bytes(_ENOUGH * self.nbytes)}, a little more than the smallest plan: {parts}",
            remedy=remedy,
        )
