"""Replaying segments that the workers of a host share: whichever worker comes first replays, under the segment's lock."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zo2core.protocols import Stores
from zo2core.sources.shared import SharedSource
from zo2core.sweep.perturber import Perturber
from zo2core.types import BlockLayout, Evaluation


class SharedPerturber:
    """A ``Perturber`` whose segments other workers replay, too.

    Args:
        perturber: Replays and perturbs.
        source: Where the segments are, with their versions and locks.
        layouts: Segments in visiting order.
    """

    def __init__(self, perturber: Perturber, source: SharedSource, layouts: Sequence[BlockLayout]) -> None:
        self._perturber = perturber
        self._source = source
        self._layouts = layouts

    @property
    def seeds(self) -> Collection[int]:
        """Directions that this sweep draws."""
        return self._perturber.seeds

    @property
    def version(self) -> int:
        """The present version. See the contract."""
        return self._perturber.version

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment to the present version, unless another worker has. See the contract."""
        if self._layouts[index].trains:
            with self._source.turn(index) as turn:
                present = turn.version
                if present < self.version:
                    with turn.changing(self.version):
                        return self._perturber.replay(index, stores, present)
            version = self.version
        return self._perturber.replay(index, stores, version)

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Bring what a segment only reads to where its forward reads it. See the contract."""
        self._perturber.load_frozen(index, stores)

    def perturb(self, index: int, stores: Stores, before: Evaluation | None, evaluation: Evaluation | None) -> None:
        """Bring the work buffer to an evaluation. See the contract."""
        self._perturber.perturb(index, stores, before, evaluation)

    def finish(self) -> None:
        """Wait until the second thread has let go of the memory. See the contract."""
        self._perturber.finish()
