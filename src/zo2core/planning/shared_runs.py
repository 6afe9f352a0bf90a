"""The plan of a base that several runs share: what each run needs beside it, and all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from zo2core.noise import PhiloxNoise
from zo2core.perturbation import factor_bytes
from zo2core.planning.memory_plan import MemoryPart
from zo2core.planning.policies import MemoryPolicy
from zo2core.planning.run_spec import RunRequest
from zo2core.types import BlockLayout, SegmentKind, aligned

MOST_RUNS = 64  # of one base, each of which has a thread and files of its own


@dataclass(frozen=True, kw_only=True)
class RunNeeds:
    """The memory that a run needs beside the base that it shares."""

    activations: int
    least: int
    kept: int

    @classmethod
    def of(cls, request: RunRequest, *, in_place: bool) -> Self:
        """What a run asks for."""
        activations, least = request.memory.activation_bytes, request.memory.least_activation_bytes
        can_spill = in_place and request.spills
        return cls(
            activations=activations,
            least=least if can_spill and least is not None else activations,
            kept=factor_bytes(request.perturbation, request.layouts, request.updates) + request.trained_bytes,
        )

    def with_least(self) -> Self:
        """The same with the least activations."""
        return replace(self, activations=self.least)


def shared_request(
    layouts: Sequence[BlockLayout],
    on_disk: Sequence[BlockLayout],
    memory: MemoryPolicy,
    needs: Sequence[RunNeeds],
    *,
    overlap: bool = True,
) -> RunRequest:
    """The request of a base for several runs."""
    activations = max(1, sum(need.activations for need in needs))
    return RunRequest(
        layouts=layouts,
        on_disk=on_disk,
        noise=PhiloxNoise(),  # none is drawn
        perturb_in_place=False,
        takes_steps=False,
        memory=MemoryPolicy(host=memory.host, device=memory.device, activations=activations),
        overlap=overlap,
        is_read_only=True,
        further=[
            MemoryPart("a decoded block", decoded_bytes(layouts)),
            MemoryPart(f"factors, parameters, optimizers of {len(needs)} runs", sum(need.kept for need in needs)),
        ],
    )


def decoded_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of the largest block's decoded weights; 0 if no block is encoded."""
    return max(
        sum(aligned(spec.decoded.nbytes) for spec in layout.parameters if spec.encoding is not None)
        for layout in layouts
        if layout.kind is SegmentKind.BLOCK
    )
