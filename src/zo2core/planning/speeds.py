"""What this machine does in a second, measured when a plan first asks, and once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from zo2core.planning.autotune import read_bytes_per_second, replay_seconds, write_bytes_per_second
from zo2core.protocols import NoiseGenerator, TensorReader
from zo2core.types import BlockLayout


class Speeds(Protocol):
    """The rates on which a plan depends."""

    def replay(self, noise: NoiseGenerator, layouts: Sequence[BlockLayout], *, in_place: bool) -> float:
        """Seconds to replay one more update over the whole model."""

    def reading(self, layouts: Sequence[BlockLayout]) -> float:
        """Bytes a second at which blocks come from the checkpoint."""

    def writing(self, directory: Path) -> float:
        """Bytes a second that can be written durably to a directory's disk."""


class MeasuredSpeeds:
    """Speeds of this machine, each measured for a fraction of a second when it is first asked for.

    Args:
        weights: The checkpoint to read from. Belongs to the caller.
    """

    def __init__(self, weights: TensorReader) -> None:
        self._weights = weights
        self._known: dict[object, float] = {}

    def replay(self, noise: NoiseGenerator, layouts: Sequence[BlockLayout], *, in_place: bool) -> float:
        """Seconds to replay one more update over the whole model. See the contract."""
        return self._once(("replay", in_place), lambda: replay_seconds(noise, layouts, in_place=in_place))

    def reading(self, layouts: Sequence[BlockLayout]) -> float:
        """Bytes a second from the checkpoint.

        Raises:
            CheckpointError: if it cannot be read.
        """
        return self._once("reading", lambda: read_bytes_per_second(self._weights, layouts))

    def writing(self, directory: Path) -> float:
        """Bytes a second to a directory's disk; a directory that is not there yet is not made.

        Raises:
            ScratchError: if it cannot be written to.
        """
        return self._once(("writing", directory), lambda: write_bytes_per_second(directory))

    def _once(self, what: object, measure: Callable[[], float]) -> float:
        if what not in self._known:
            self._known[what] = measure()
        return self._known[what]
