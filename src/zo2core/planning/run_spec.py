"""The plan of a run, derived once from the caller's request and the machine, before anything is opened.

``build`` makes the parts of a ``RunSpec``, and ``zo2 plan`` prints their sizes.

The plan of a base that several runs share: what each run needs beside it, and all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from zo2core.errors import MemoryBudgetError, OptionError
from zo2core.noise import PhiloxNoise
from zo2core.perturbation import DensePerturbation, Perturbation, factor_bytes
from zo2core.planning.low_bit import LowBitTransfer, Replay, choose_low_bit_transfer
from zo2core.planning.memory import (
    MOST_USEFUL_BUCKETS,
    DevicePlan,
    HostPlan,
    Machine,
    MemoryPart,
    plan_device_memory,
    plan_host,
)
from zo2core.planning.policies import MemoryPolicy, WriteBackPolicy
from zo2core.planning.speeds import Speeds
from zo2core.planning.write_interval import interval_of
from zo2core.protocols import CounterNoise, NoiseGenerator
from zo2core.sources.low_bit import staging_bytes
from zo2core.types import BlockLayout, SegmentKind, aligned, trained


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The model and the caller's options on which a plan depends.

    Args:
        layouts: Segments in visiting order.
        on_disk: The same segments, laid out as in the buckets of a streamed source (``laid_out_as_on_disk``).
        noise: Draws z.
        perturbation: Kind of the perturbations.
        perturb_in_place: Whether weights are perturbed in place from one evaluation to the next; False for a run that takes
            no steps.
        takes_steps: Whether there is an estimator.
        directions: Most directions of a step, new or replayed.
        updates: Number of steps taken so far.
        memory: Memory sizes or plans.
        write_back: When segments are written to disk; None: never.
        replay: Whether the host or the device replays, for a device with its own memory.
        overlap: Whether transfers and disk reads overlap with compute.
        trained_copies: Further copies of the trained parameters that a first-order method keeps: parameters, gradients and
            optimizer state.
        gradient_bytes: Gradients of one segment, of a first-order method that changes weights where they are stored.
        optimizer_bytes: Its optimizer's state, in host memory.
        stays_in_memory: Whether all blocks have to stay in memory.
        streams: Whether blocks have to be streamed, with one bucket that keeps a block from sweep to sweep.
        is_read_only: Whether stored weights never change, though none is frozen.
        further: Further parts in the memory in which forwards run.
    """

    layouts: Sequence[BlockLayout]
    on_disk: Sequence[BlockLayout]
    noise: NoiseGenerator
    perturbation: Perturbation = DensePerturbation()  # noqa: RUF009 - frozen
    perturb_in_place: bool = True
    takes_steps: bool = True
    directions: int = 1
    updates: int = 0
    memory: MemoryPolicy = MemoryPolicy()  # noqa: RUF009 - frozen
    write_back: WriteBackPolicy | None = None
    replay: Replay = "auto"
    overlap: bool = True
    trained_copies: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    stays_in_memory: bool = False
    streams: bool = False
    is_read_only: bool = False
    further: Sequence[MemoryPart] = ()

    @property
    def spills(self) -> bool:
        """Whether inputs of blocks that have no room in memory are written to disk, as in first-order steps."""
        return self.trained_copies > 0 or self.stays_in_memory or self.streams

    @property
    def trained_bytes(self) -> int:
        """Bytes of a first-order method's copies of the trained parameters, and of a segment's gradients."""
        return self.trained_copies * sum(spec.nbytes for spec in trained(self.layouts)) + self.gradient_bytes

    @property
    def changes_weights(self) -> bool:
        """Whether stored weights change: if not, they are neither offloaded nor written back."""
        frozen = any(spec.frozen for layout in self.layouts for spec in layout.parameters)
        return isinstance(self.perturbation, DensePerturbation) and not (frozen or self.is_read_only)

    @property
    def has_to_write(self) -> bool:
        """Whether the caller asked for segments to be written at certain steps."""
        return self.changes_weights and self.write_back is not None and not self.write_back.is_automatic


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The parts of a run. The sums of ``host_plan`` and ``device_plan`` are its expected memory."""

    layouts: Sequence[BlockLayout]  # of the buckets
    host_plan: HostPlan
    device_plan: DevicePlan | None  # None if it computes in host memory, or transfers do not overlap
    low_bit: LowBitTransfer | None  # how blocks are copied; None: as they are stored
    activation_bytes: int  # for activations in the memory in which forwards run
    waiting_bytes: int  # host memory for activations that do not fit there
    write_back: WriteBackPolicy | None  # None: no segment is written back
    write_back_every: int | None  # versions that a segment may be ahead of its bytes on disk; None: it is never written

    @property
    def kept(self) -> int:
        """Blocks that stay on the device."""
        return 0 if self.device_plan is None else self.device_plan.kept

    def spare_bytes(self, *, in_place: bool) -> int:
        """Bytes that the plan leaves over in the memory in which forwards run, which is that of the host if ``in_place``."""
        plan = self.host_plan if self.device_plan is None and in_place else self.device_plan
        return 0 if plan is None else max(plan.spare, 0)


def plan(request: RunRequest, machine: Machine, speeds: Speeds) -> RunSpec:
    """Plan a run.

    Args:
        request: The model and the caller's options.
        machine: The machine.
        speeds: Speeds of the machine, measured only if a choice depends on them.

    Raises:
        MemoryBudgetError: if not even the smallest plan fits.
        OptionError: if options exclude each other, or do not fit the machine.
        CheckpointError, ScratchError: if a speed cannot be measured.
    """
    memory, layouts, noise = request.memory, request.layouts, request.noise
    low_bit = choose_low_bit_transfer(request.replay, layouts, noise, in_place=machine.in_place)
    factors = MemoryPart("factors of directions", factor_bytes(request.perturbation, layouts, request.updates))
    trained_copies = MemoryPart("trained parameters, gradients, optimizer", request.trained_bytes)
    encoded = MemoryPart("blocks in their transfer dtypes", 0 if low_bit is None else staging_bytes(layouts))
    further = [trained_copies] if machine.on_host else [factors, trained_copies, *request.further]
    device_plan = _device_plan(request, machine, further, is_low_bit=low_bit is not None)
    activation_bytes = memory.activation_bytes if device_plan is None else device_plan.activation_bytes
    waiting = memory.activation_bytes if activation_bytes < memory.activation_bytes else 0
    host_plan = memory.host
    if not isinstance(host_plan, HostPlan):
        plan_with = partial(
            plan_host,
            layouts,
            request.on_disk,
            machine,
            memory=host_plan,
            may_keep_noise=not isinstance(noise, CounterNoise),
            perturbs_in_place=request.perturb_in_place,
            further=[
                encoded,
                *([factors, *request.further] if machine.on_host else []),
                MemoryPart(
                    trained_copies.name, request.optimizer_bytes + (trained_copies.nbytes if machine.in_place else 0)
                ),
            ],
            stays_in_memory=request.stays_in_memory,
            streams=request.streams,
        )
        least = memory.least_activation_bytes
        try:
            host_plan = plan_with(activation_bytes=memory.activation_bytes if machine.in_place else waiting)
        except MemoryBudgetError:
            if least is None or not request.spills:
                raise
            if machine.in_place:
                activation_bytes = min(least, activation_bytes)
            waiting = min(least, waiting)
            in_host_memory = activation_bytes if machine.in_place else waiting
            host_plan = plan_with(activation_bytes=in_host_memory, most_buckets=MOST_USEFUL_BUCKETS)
    write_back = request.write_back if request.changes_weights else None
    spec = RunSpec(
        layouts=layouts if host_plan.buckets is None else request.on_disk,
        host_plan=host_plan,
        device_plan=device_plan,
        low_bit=low_bit,
        activation_bytes=activation_bytes,
        waiting_bytes=waiting,
        write_back=write_back,
        write_back_every=None,
    )
    every = interval_of(
        write_back,
        spec.layouts,
        noise,
        speeds,
        in_place=request.perturb_in_place or not request.takes_steps,
        buckets=host_plan.buckets,
        kept=spec.kept,
    )
    return replace(spec, write_back_every=every)


def _device_plan(
    request: RunRequest, machine: Machine, further: Sequence[MemoryPart], *, is_low_bit: bool
) -> DevicePlan | None:
    """Plan device memory; None if the device computes in host memory, or transfers do not overlap with compute."""
    memory = request.memory
    if machine.in_place and memory.least_activations is not None and not request.spills:
        raise OptionError(
            "memory.least_activations",
            found=f"{memory.least_activations!r} on a device that computes in host memory",
            expected="a GPU, where activations can wait in host memory",
            remedy="leave it out",
        )
    if machine.in_place or not request.overlap:
        if memory.device != "auto":
            raise OptionError(
                "memory.device",
                found=repr(memory.device),
                expected="a GPU and overlapping transfers for this option",
                remedy="leave it out; `memory.host` limits host memory",
            )
        return None
    if isinstance(memory.device, DevicePlan):
        return memory.device
    return plan_device_memory(
        request.layouts,
        request.noise,
        memory=memory.device,
        free=machine.device_free(),
        activation_bytes=memory.activation_bytes,
        least_activation_bytes=memory.least_activation_bytes,
        perturbs_in_place=request.perturb_in_place,
        probes=request.directions,
        is_low_bit=is_low_bit,
        further=further,
    )


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
