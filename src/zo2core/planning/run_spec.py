"""How a run will be made up: decided once, from what is asked for and what the machine is, before anything is opened.

``build`` makes the parts that a ``RunSpec`` names, and ``zo2 plan`` prints what they take: neither derives it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zo2core.perturbation import DensePerturbation, Perturbation, factor_bytes
from zo2core.planning.device_plan import DevicePlan
from zo2core.planning.host_plan import HostPlan, plan_host
from zo2core.planning.low_bit import LowBitTransfer, Replay, choose_low_bit_transfer
from zo2core.planning.policies import MemoryPolicy, WriteBackPolicy
from zo2core.planning.speeds import Speeds
from zo2core.planning.write_interval import interval_of
from zo2core.protocols import CounterNoise, NoiseGenerator
from zo2core.sources.low_bit import staging_bytes
from zo2core.types import BlockLayout, trained


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What a plan depends on, of the model and of what the caller asks for.

    Args:
        layouts: Segments in visiting order.
        on_disk: The same segments as they lie in the buckets of a streamed source: ``laid_out_as_on_disk``.
        noise: Draws z.
        perturbation: Where directions live.
        perturb_in_place: Whether evaluations walk from one to the next; False for a run that takes no steps.
        takes_steps: Whether there is an estimator.
        directions: The most that a step probes, of those to come and of those to be replayed.
        updates: Number of those taken.
        memory: Sizes, or plans.
        write_back: None never writes.
        replay: Who replays for a device with memory of its own.
        overlap: Whether transfers and disk overlap with compute.
        trained_copies: Copies of the trained parameters that a first-order method has beside the segments': parameters,
            gradients, and what its optimizer keeps.
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

    @property
    def trained_bytes(self) -> int:
        """Bytes of these copies."""
        return self.trained_copies * sum(spec.nbytes for spec in trained(self.layouts))

    @property
    def changes_weights(self) -> bool:
        """Whether stored weights change: else nothing is sent back or written back."""
        frozen = any(spec.frozen for layout in self.layouts for spec in layout.parameters)
        return isinstance(self.perturbation, DensePerturbation) and not frozen

    @property
    def has_to_write(self) -> bool:
        """Whether the caller asked for segments to be written at certain steps."""
        return self.changes_weights and self.write_back is not None and not self.write_back.is_left_to_us


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a plan depends on, of the machine.

    Args:
        in_place: Whether segments are computed on in their buckets, in host memory.
        on_host: Whether the device's own memory is host memory: the CPU, also behind simulated copies.
        device_free: Bytes of the device's memory that are free.
        neighbours: Workers on this host: what is free is theirs together.
        shares: Whether they have one copy of resident blocks together.
    """

    in_place: bool = True
    on_host: bool = True
    device_free: Callable[[], int] = lambda: 0
    neighbours: int = 1
    shares: bool = False


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """How a run is made up. The sums of ``host_plan`` and ``device_plan`` are what it takes in memory."""

    layouts: Sequence[BlockLayout]  # as they lie in buckets
    host_plan: HostPlan
    device_plan: DevicePlan | None  # None where the device computes in host memory, or one thing is done after the other
    low_bit: LowBitTransfer | None  # how blocks travel other than as they are stored
    activation_bytes: int  # that activations may take where forwards run
    waiting_bytes: int  # of host memory, for activations that have no room there
    write_back: WriteBackPolicy | None  # None: no segment is written back
    write_back_every: int | None  # versions that a segment may be ahead of its bytes on disk; None: it is never written

    @property
    def kept(self) -> int:
        """Blocks that stay on the device."""
        return 0 if self.device_plan is None else self.device_plan.kept


def plan(request: RunRequest, machine: Machine, speeds: Speeds) -> RunSpec:
    """Choose how a run is made up.

    Args:
        request: What is asked for.
        machine: What there is.
        speeds: Asked only where something is left to be chosen by them.

    Raises:
        MemoryBudgetError: if not even the smallest plan fits.
        OptionError: if options do not go together, or with this machine.
        CheckpointError, ScratchError: if a speed was to be measured and could not be.
    """
    memory, layouts, noise = request.memory, request.layouts, request.noise
    low_bit = choose_low_bit_transfer(request.replay, layouts, noise, in_place=machine.in_place)
    factors = factor_bytes(request.perturbation, layouts, request.updates)
    device_plan = memory.plan_device(
        layouts,
        noise,
        in_place=machine.in_place,
        free=machine.device_free,
        overlap=request.overlap,
        perturbs_in_place=request.perturb_in_place,
        probes=request.directions,
        is_low_bit=low_bit is not None,
        factors=0 if machine.on_host else factors,
        trained=request.trained_bytes,
    )
    room = memory.activation_bytes if device_plan is None else device_plan.activation_bytes
    waiting = memory.activation_bytes if room < memory.activation_bytes else 0
    host_plan = memory.host
    if not isinstance(host_plan, HostPlan):
        host_plan = plan_host(
            layouts,
            request.on_disk,
            memory=host_plan,
            activation_bytes=memory.activation_bytes if machine.in_place else waiting,
            compute_on_host=machine.on_host,
            may_keep_noise=not isinstance(noise, CounterNoise),
            perturbs_in_place=request.perturb_in_place,
            staging=0 if low_bit is None else staging_bytes(layouts),
            factors=factors if machine.on_host else 0,
            trained=request.trained_bytes if machine.in_place else 0,
            neighbours=machine.neighbours,
            sharers=machine.neighbours if machine.shares else 1,
        )
    write_back = request.write_back if request.changes_weights and not machine.shares else None
    spec = RunSpec(
        layouts=layouts if host_plan.buckets is None else request.on_disk,
        host_plan=host_plan,
        device_plan=device_plan,
        low_bit=low_bit,
        activation_bytes=room,
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
