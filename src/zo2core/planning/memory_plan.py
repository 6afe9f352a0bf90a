"""A memory plan: parts in bytes, and the budget that they have to fit into."""

from __future__ import annotations

from dataclasses import dataclass

from zo2core.errors import MemoryBudgetError

_SHOWN = 2**30 // 100  # bytes: what is less would be shown as 0.00 GiB


@dataclass(frozen=True)
class MemoryPart:
    """One line of a plan."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Parts of a memory and the budget that they have to fit into."""

    parts: tuple[MemoryPart, ...]
    budget: int  # bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.nbytes for part in self.parts)

    def table(self) -> str:
        """The parts, one a line, and their sum."""
        rows = [*self.parts, MemoryPart("together", self.nbytes), MemoryPart("allowed", self.budget)]
        width = max(len(row.name) for row in rows)
        return "\n".join(f"{row.name:{width}s} {row.nbytes / 2**30:9.2f} GiB" for row in rows)

    def too_large(self, option: str, remedy: str) -> MemoryBudgetError:
        """The error that says that even this plan, the smallest, does not fit."""
        parts = ", ".join(f"{part.name} {part.nbytes / 2**30:.2f} GiB" for part in self.parts)
        return MemoryBudgetError(
            option,
            found=f"{self.budget / 2**30:.2f} GiB" if self.budget >= _SHOWN else f"{self.budget} bytes",
            expected=f"at least {self.nbytes / 2**30:.2f} GiB, the smallest plan: {parts}",
            remedy=remedy,
        )
