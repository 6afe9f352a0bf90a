"""A single worker, which exchanges nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zo2core.checkpoint import Snapshot, Snapshots
from zo2core.journal import Journal
from zo2core.protocols import NoiseGenerator
from zo2core.types import Batch, BlockLayout, Evaluation
from zo2core.workers.exchange import Exchange
from zo2core.workers.seal import Seal
from zo2core.workers.workers import Gathered, Plan, Workers


class SoloWorker(Workers):
    """The only worker of a run: it computes all evaluations on all rows, and losses stay as they were computed."""

    def __init__(self) -> None:
        super().__init__(Exchange(None, 0, 1, Seal(b"")))

    def neighbours(self) -> tuple[int, ...]:
        """This worker."""
        return (0,)

    def sync_journal(self, journal: Journal) -> None:
        """Do nothing: there is no other journal."""

    def sync_snapshots(self, snapshots: Snapshots) -> Snapshot | None:
        """This worker's newest snapshot."""
        return snapshots.newest()

    def require_agreement(
        self, journal: Journal, noise: NoiseGenerator, layouts: Sequence[BlockLayout], device: torch.device
    ) -> None:
        """Do nothing: there is no other worker."""

    def all_gather(self, value: Any) -> list[Any]:
        """The value itself."""
        return [value]

    def digest(self, batches: Sequence[Batch]) -> int:
        """0: there is no other worker to compare with."""
        return 0

    def plan(self, evaluations: Sequence[Evaluation], rows: int | None) -> Plan:
        """All evaluations, of all rows."""
        return Plan.alone(len(evaluations))

    def gathered(
        self,
        plan: Plan,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        *,
        tokens: int,
        journal: Journal,
        batch: int | None,
    ) -> Gathered:
        """The losses themselves, on the device and in the dtype in which they were computed."""
        return Gathered(tuple(evaluations), list(losses), ())
