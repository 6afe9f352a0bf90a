"""Replay of segments that the workers of a host share: the first worker replays a segment, while it holds its lock."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zo2core.protocols import Stores
from zo2core.sources.shared import SharedSource
from zo2core.sweep.perturber import Perturber
from zo2core.types import BlockLayout, Evaluation


class SharedPerturber:
    """A ``Perturber`` whose segments other workers replay as well.

    Args:
        perturber: Replays and perturbs.
        source: The shared segments, with their versions and locks.
        layouts: Segments in visiting order.
    """

    def __init__(self, perturber: Perturber, source: SharedSource, layouts: Sequence[BlockLayout]) -> None:
        self._perturber = perturber
        self._source = source
        self._layouts = layouts

    @property
    def seeds(self) -> Collection[int]:
        """Seeds of the directions that this sweep draws."""
        return self._perturber.seeds

    @property
    def version(self) -> int:
        """The present version. See the contract."""
        return self._perturber.version

    def replay(self, index: int, stores: Stores, version: int) -> int:
        """Bring a segment to the present version, unless another worker has done so. See the contract."""
        if self._layouts[index].trains:
            with self._source.turn(index) as turn:
                present = turn.version
                if present < self.version:
                    with turn.changing(self.version):
                        return self._perturber.replay(index, stores, present)
            version = self.version
        return self._perturber.replay(index, stores, version)

    def load_frozen(self, index: int, stores: Stores) -> None:
        """Let the forward read a segment's frozen weights. See the contract."""
        self._perturber.load_frozen(index, stores)

    def perturb(self, index: int, stores: Stores, before: Evaluation | None, evaluation: Evaluation | None) -> None:
        """Write an evaluation's weights to the work buffer. See the contract."""
        self._perturber.perturb(index, stores, before, evaluation)

    def finish(self) -> None:
        """Wait until the second thread no longer uses the memory. See the contract."""
        self._perturber.finish()
