"""Optimizer states that are divided among workers, each of which keeps those of some segments.

All workers add up the gradients of a segment, so each could make the same update. The one that owns
the segment's states makes it, and sends the changed weights to the others: as ZeRO's second stage
does (arXiv 1910.02054, section 5). An update depends on one segment alone, so all bits are those of
workers that each keep all states.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zo2core.errors import OptionError
from zo2core.protocols import BlockUpdate, UpdateInputs, WrappedUpdate
from zo2core.types import BlockLayout, StateSpec
from zo2core.workers.workers import Workers


class DividedStates(WrappedUpdate):
    """Another optimizer, whose states of each segment one worker keeps.

    Args:
        update: The optimizer. It changes all segments at each step.
        layouts: All segments.
        workers: The workers.

    Raises:
        OptionError: if the optimizer has no states.
    """

    def __init__(
        self, update: BlockUpdate, layouts: Sequence[BlockLayout], workers: Workers
    ) -> None:
        super().__init__(update)
        self._workers = workers
        self.specs = [update.states(layout) for layout in layouts]  # by segment
        sizes = [sum(spec.nbytes for spec in specs) for specs in self.specs]
        if not any(sizes):
            raise OptionError(
                "divide_states",
                found=f"{update.options['name']}, which has no states",
                expected="an optimizer with states, such as AdamW",
                remedy="leave divide_states out",
            )
        self.owners = owners_of(sizes, workers.size)  # by segment
        self._own_layouts = {layouts[segment].name for segment in self.own(range(len(layouts)))}

    def own(self, segments: Collection[int]) -> list[int]:
        """Those of the segments whose states this worker keeps."""
        return [segment for segment in segments if self.owners[segment] == self._workers.rank]

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """The optimizer's states of a segment that this worker owns; of others there are none."""
        return self._update.states(layout) if layout.name in self._own_layouts else ()

    def apply(self, inputs: UpdateInputs) -> None:
        """Change a segment's weights in place, or receive them from the worker that changes
        them.
        """
        owner = self.owners[inputs.segment]
        if owner == self._workers.rank:
            self._update.apply(inputs)
        for weight in inputs.weights.values():
            self._workers.broadcast_tensor(weight, owner)


def owners_of(sizes: Sequence[int], workers: int) -> list[int]:
    """The worker of each segment: the largest segment first, each goes to the worker that has the
    fewest bytes.
    """
    owners = [0] * len(sizes)
    of_workers = [0] * workers
    for segment in sorted(range(len(sizes)), key=lambda segment: -sizes[segment]):
        owners[segment] = min(range(workers), key=of_workers.__getitem__)
        of_workers[owners[segment]] += sizes[segment]
    return owners
