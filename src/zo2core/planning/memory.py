"""What a run may take of memory (the caller's policy), and the plan of the run: its parts in bytes,
and a budget.

A plan is derived once from the caller's request and the machine, before anything is opened.
``build`` makes the parts of a ``RunSpec``, and ``zo2 plan`` prints their sizes. On a device
activations come first: a block that stays saves one upload and offload a sweep, activations that
stay save them at each block. Then as many blocks stay as fit.

The plan of a base that several runs share: what each run needs beside it, and all of them together.

Free host memory is that of the system and of the control groups that limit this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Self, TypeAlias

import psutil

from zo2core.errors import MemoryBudgetError, OptionError, without_effect
from zo2core.estimators.noise import PhiloxNoise, drawn_bytes, noise_bytes
from zo2core.estimators.perturbation import DensePerturbation, Perturbation
from zo2core.io.direct_file import STAGING, whole_pages
from zo2core.io.process_memory import memory_in_use
from zo2core.io.process_memory import resident_memory as resident_memory
from zo2core.kernels.low_bit import low_bit_bytes, low_bit_layout
from zo2core.planning.speeds import (
    MOST_USEFUL_BUCKETS,
    MeasuredSpeeds,
    WriteBackPolicy,
    write_interval,
)
from zo2core.protocols import CounterNoise, Device, NoiseGenerator
from zo2core.ranges import parse_size
from zo2core.schedulers.overlapped import SLOTS
from zo2core.sources.low_bit import staging_bytes
from zo2core.sources.segment_store import READERS
from zo2core.types import (
    BlockLayout,
    SegmentKind,
    aligned,
    shown_bytes,
    trained,
    unrounded_bytes,
    work_bytes,
)

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
        rows = [
            *self.parts,
            MemoryPart("together", self.nbytes),
            MemoryPart("allowed", self.budget),
        ]
        width = max(len(row.name) for row in rows)
        return "\n".join(f"{row.name:{width}s} {shown_bytes(row.nbytes):>10s}" for row in rows)

    def too_large(self, option: str, remedy: str) -> MemoryBudgetError:
        """The error for a smallest plan that does not fit.

        The least that it tells is a little more: the text is rounded, and a process has not the
        same size every time.
        """
        parts = ", ".join(f"{part.name} {shown_bytes(part.nbytes)}" for part in self.parts)
        return MemoryBudgetError(
            option,
            found=shown_bytes(self.budget),
            expected=(
                f"at least {shown_bytes(_ENOUGH * self.nbytes)}, a little more than the smallest "
                f"plan: {parts}"
            ),
            remedy=remedy,
        )


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The properties of the machine on which a plan depends.

    Args:
        in_place: Whether segments are computed on in their buckets, in host memory.
        on_host: Whether the device's memory is host memory: on the CPU, also with simulated copies.
        device_free: Returns the free device memory in bytes.
        neighbours: Number of workers on this host, which divide the free memory.
    """

    in_place: bool = True
    on_host: bool = True
    device_free: Callable[[], int] = lambda: 0
    neighbours: int = 1

    @classmethod
    def of(cls, device: Device, neighbours: int = 1) -> Self:
        """The machine of a device."""
        on_host = device.torch_device.type == "cpu"
        free = device.free_memory
        return cls(
            in_place=device.in_place, on_host=on_host, device_free=free, neighbours=neighbours
        )


@dataclass(frozen=True)
class HostPlan(MemoryPlan):
    """How a run uses host memory; the sum of its parts is the expected peak of the process's
    resident bytes.
    """

    buckets: int | None  # number of buckets that blocks share; None: every block has one of its own
    keep_noise: bool  # z stays in memory from one evaluation to the next


@dataclass(frozen=True)
class DevicePlan(MemoryPlan):
    """How a run uses a device's memory."""

    kept: int  # blocks that stay; the others pass through two slots
    # for forwards and activations; activations that do not fit wait in host memory
    activation_bytes: int


def free_memory(*, root: Path = Path("/")) -> int:
    """Bytes of host memory that this process can still allocate without being killed or swapped."""
    return min([psutil.virtual_memory().available, *_control_groups_free(root)])


def _read(path: Path) -> str:
    """A file of the kernel, which may hold names of any bytes."""
    return os.fsdecode(path.read_bytes())


def _control_groups_free(root: Path) -> Iterator[int]:
    """Yield the bytes left by each limit on this process; the kernel frees page cache first, so it
    counts as free.
    """
    try:
        lines = _read(root / "proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top = root / "sys/fs/cgroup"
            limit_name = "memory.max"
            usage_name = "memory.current"
            prefix = ""
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            prefix = "total_"
            limit_name, usage_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        # a container may hide the path
        groups = [group, *group.parents] if group.is_dir() else [top]
        for nested in (nested for nested in groups if nested.is_relative_to(top)):
            try:
                limit = int(_read(nested / limit_name))
                usage = int(_read(nested / usage_name))
                stat = dict(line.split() for line in _read(nested / "memory.stat").splitlines())
            except (OSError, ValueError):
                continue  # "max", or no limit at this level
            cache = sum(
                int(stat.get(f"{prefix}{state}_file", 0)) for state in ("inactive", "active")
            )
            yield max(limit - usage + cache, 0)


ACTIVATIONS = 256 << 20  # bytes reserved for activations by default


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """How much memory a run may take.

    Args:
        host: Total host memory of the process, in bytes or as a size ("6GiB"); "auto" uses the free
            memory. A ``HostPlan`` is used as it is.
        device: Device memory of the run, in bytes or as a size; "auto" uses the free memory. A
            ``DevicePlan`` is used as it is.
        activations: Memory reserved for activations and logits, in host memory on the CPU and in
            device memory on a GPU. It limits how many batches of an evaluation run in one sweep.
        least_activations: Memory for activations if ``activations`` does not fit: on a device with
            memory of its own enough for the running streams, while those of the others wait in host
            memory; on the CPU, for first-order steps alone, enough for what is not written to disk.
            First-order steps also use it for what waits in host memory, if there is no room for
            more. None: all activations stay where forwards run.
        steps: Steps that the run takes in all. Factors of low-rank directions need memory for each
            period; those of fewer steps than were taken count as those.
        kept_free: Bytes of host memory that the run does not use, so that a process that continues
            it has room, whose libraries may take a little more.

    Raises:
        OptionError: if a value is not a size.
    """

    host: int | str | HostPlan = "auto"
    device: int | str | DevicePlan = "auto"
    activations: int | str = ACTIVATIONS
    least_activations: int | str | None = None
    steps: int = 0
    kept_free: int = 0

    def __post_init__(self) -> None:
        for option, size in (("memory.host", self.host), ("memory.device", self.device)):
            if isinstance(size, (int, str)) and size != "auto":
                parse_size(size, option=option)
        self.activation_bytes, self.least_activation_bytes  # noqa: B018 - raise OptionError now

    @property
    def activation_bytes(self) -> int:
        """Bytes reserved for activations."""
        return parse_size(self.activations, option="memory.activations")

    @property
    def least_activation_bytes(self) -> int | None:
        """Least device memory for activations in bytes; None: all of ``activation_bytes``."""
        least = self.least_activations
        return None if least is None else parse_size(least, option="memory.least_activations")


Replay: TypeAlias = Literal["auto", "host", "device"]
# if the device replays, blocks are copied back
LowBitTransfer: TypeAlias = Literal["device", "host"]


def choose_low_bit_transfer(
    replay: Replay, layouts: Sequence[BlockLayout], noise: NoiseGenerator, *, in_place: bool
) -> LowBitTransfer | None:
    """Choose who replays blocks that are copied in fewer bits than they are stored in; None: they
    are copied as stored.
    """
    if replay not in ("auto", "host", "device"):
        raise OptionError(
            "replay", repr(replay), "'auto', 'host' or 'device'", "pass one of the three"
        )
    low_bit = [spec for layout in layouts for spec in layout.parameters if spec.is_low_bit]
    require_drawable(layouts, noise, by_host=replay == "host")
    comes_back = all(spec.transfer_back for spec in low_bit)
    if in_place:
        if replay != "auto":
            expected = "a device with its own memory, such as a GPU, for this option"
            raise without_effect(
                "replay", f"{replay!r} on a device that computes in host memory", expected
            )
        return None
    if replay == "device" and not comes_back:
        expected = (
            "'host', or weights rounded to the transfer dtype (`Precision(transfer_back=True)`)"
        )
        found = "'device', to which weights are copied in fewer bits than they are stored in"
        raise without_effect("replay", found, expected)
    if replay == "host" or not comes_back:
        return "host"
    return "device" if low_bit else None


def require_drawable(
    layouts: Sequence[BlockLayout], noise: NoiseGenerator, *, by_host: bool = False
) -> None:
    """Refuse noise that is not counter-based if weights are rounded for transfer, or the host
    replays.
    """
    low_bit = any(spec.is_low_bit for layout in layouts for spec in layout.parameters)
    if (low_bit or by_host) and not isinstance(noise, CounterNoise):
        raise OptionError(
            "noise",
            found=f"{noise.name}, which only the computing device can draw",
            expected=(
                "counter-based noise, since weights are rounded for transfer or the host replays"
            ),
            remedy="pass `PhiloxNoise()`, or copy the weights as they are stored and replay on the "
            "device",
        )


# Note: Headroom. The allocators of Python and torch keep more memory than is counted here, and
# other programs may allocate some meanwhile.
AUTO_SHARE = 0.9  # of the free memory
DEVICE_SHARE = 0.95  # of the free memory; the rest is left to the allocator


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The model and the caller's options on which a plan depends."""

    layouts: Sequence[BlockLayout]  # in visiting order
    # the same, laid out as in the buckets of a streamed source (``laid_out_as_on_disk``)
    on_disk: Sequence[BlockLayout]
    noise: NoiseGenerator = PhiloxNoise()  # noqa: RUF009 - frozen
    perturbation: Perturbation = DensePerturbation()  # noqa: RUF009 - frozen
    perturb_in_place: bool = False  # from one evaluation to the next
    takes_steps: bool = False  # whether there is an estimator
    directions: int = 1  # most of a step, new or replayed
    updates: int = 0  # steps taken so far
    memory: MemoryPolicy = MemoryPolicy()
    write_back: WriteBackPolicy | None = None
    replay: Replay = "auto"
    overlap: bool = True
    # copies of trained parameters that first-order steps keep, with gradients and optimizer state
    trained_copies: int = 0
    gradient_bytes: int = 0  # of one segment, where weights change where they are stored
    optimizer_bytes: int = 0  # of the optimizer's state, in host memory
    # whether all blocks have to stay in memory, since changes are not written to disk
    stays_in_memory: bool = False
    # streamed blocks that change from one generation on disk to the next; one bucket keeps one of
    # them
    changing: int = 0
    is_read_only: bool = False  # whether stored weights never change, though none is frozen
    further: Sequence[MemoryPart] = ()  # in the memory in which forwards run

    @classmethod
    def of_base(
        cls,
        layouts: Sequence[BlockLayout],
        on_disk: Sequence[BlockLayout],
        memory: MemoryPolicy,
        runs: Sequence[Self],
    ) -> Self:
        """The request of a base for several runs, with what each needs beside it."""
        activations = max(1, sum(run.memory.activation_bytes for run in runs))
        beside = sum(run.factor_bytes + run.trained_bytes for run in runs)
        return cls(
            layouts=layouts,
            on_disk=on_disk,
            memory=MemoryPolicy(host=memory.host, device=memory.device, activations=activations),
            is_read_only=True,
            further=[
                MemoryPart("a decoded block", decoded_bytes(layouts)),
                MemoryPart(f"factors, parameters, optimizers of {len(runs)} runs", beside),
            ],
        )

    @property
    def trained_bytes(self) -> int:
        """Bytes of a first-order method's copies of the trained parameters, and of a segment's
        gradients.
        """
        return (
            self.trained_copies * sum(spec.nbytes for spec in trained(self.layouts))
            + self.gradient_bytes
        )

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors of low-rank perturbations."""
        if isinstance(self.perturbation, DensePerturbation):
            return 0
        updates = max(self.updates, self.memory.steps)
        return self.perturbation.factor_bytes(self.layouts, updates)

    def with_least_activations(self, *, in_place: bool) -> Self:
        """The request of a run of a shared base, with as little memory for activations as it can do
        with.
        """
        least = self.memory.least_activations
        if least is None or not (in_place and self.spills):
            return self
        return replace(self, memory=replace(self.memory, activations=least))

    @property
    def spills(self) -> bool:
        """Whether inputs of blocks that have no room in memory are written to disk, as in
        first-order steps.
        """
        return self.trained_copies > 0 or self.stays_in_memory or self.changing > 0

    @property
    def changes_weights(self) -> bool:
        """Whether stored weights change: if not, they are neither offloaded nor written back."""
        frozen = any(spec.frozen for layout in self.layouts for spec in layout.parameters)
        return isinstance(self.perturbation, DensePerturbation) and not (
            frozen or self.is_read_only
        )

    @property
    def has_to_write(self) -> bool:
        """Whether the caller asked for segments to be written at certain steps."""
        return (
            self.changes_weights
            and self.write_back is not None
            and not self.write_back.is_automatic
        )

    @property
    def work_bytes(self) -> int:
        """Bytes of the work buffer."""
        unrounded = unrounded_bytes(self.layouts, perturbs_in_place=self.perturb_in_place)
        return work_bytes(self.layouts) + unrounded + low_bit_bytes(self.layouts)


@dataclass(frozen=True)
class RunSpec:
    """The parts of a run. The sums of ``host_plan`` and ``device_plan`` are its expected memory."""

    layouts: Sequence[BlockLayout]  # of the buckets
    host_plan: HostPlan
    # None if it computes in host memory, or transfers do not overlap
    device_plan: DevicePlan | None
    # who replays blocks that are copied in fewer bits; None: they are copied as stored
    low_bit: LowBitTransfer | None
    activation_bytes: int  # for activations in the memory in which forwards run
    waiting_bytes: int  # host memory for activations that do not fit there
    write_back: WriteBackPolicy | None  # None: no segment is written back
    # versions that a segment may be ahead of its bytes on disk; None: never written
    write_back_every: int | None = None

    @property
    def kept(self) -> int:
        """Blocks that stay on the device."""
        return 0 if self.device_plan is None else self.device_plan.kept

    def spare_bytes(self, *, in_place: bool) -> int:
        """Bytes that the plan leaves over in the memory in which forwards run, which is that of the
        host if ``in_place``.
        """
        plan = self.host_plan if self.device_plan is None and in_place else self.device_plan
        return 0 if plan is None else max(plan.spare, 0)


def plan(request: RunRequest, machine: Machine, speeds: MeasuredSpeeds) -> RunSpec:
    """Plan a run. Speeds of the machine are measured only if a choice depends on them.

    Raises:
        MemoryBudgetError: if not even the smallest plan fits.
        OptionError: if options exclude each other, or do not fit the machine.
        CheckpointError, ScratchError: if a speed cannot be measured.
    """
    layouts = request.layouts
    low_bit = choose_low_bit_transfer(
        request.replay, layouts, request.noise, in_place=machine.in_place
    )
    _require_memory_options_used(request, machine)
    device_plan = _device_plan(request, machine, is_low_bit=low_bit is not None)
    staging = 0 if low_bit is None else staging_bytes(layouts)
    host_plan, activations = _host_plan(
        request, machine, _ActivationPlan.beside(device_plan, request.memory), staging
    )
    spec = RunSpec(
        layouts if host_plan.buckets is None else request.on_disk,
        host_plan,
        device_plan,
        low_bit,
        activations.forward,
        activations.waiting,
        request.write_back if request.changes_weights else None,
    )
    if spec.write_back is None:
        return spec
    every = write_interval(
        spec.write_back,
        spec.layouts,
        request.noise,
        speeds,
        in_place=request.perturb_in_place or not request.takes_steps,
        buckets=host_plan.buckets,
        kept=spec.kept,
    )
    return replace(spec, write_back_every=every)


class _ActivationPlan(NamedTuple):
    """Memory for activations, in bytes."""

    forward: int  # in the memory in which forwards run
    waiting: int  # in host memory, for activations that do not fit there

    @classmethod
    def beside(cls, device_plan: DevicePlan | None, memory: MemoryPolicy) -> Self:
        """All that a caller asks for; what the device has no room for waits in host memory."""
        if device_plan is None:
            return cls(memory.activation_bytes, 0)
        all_fit = device_plan.activation_bytes >= memory.activation_bytes
        return cls(device_plan.activation_bytes, 0 if all_fit else memory.activation_bytes)

    def on_host(self, machine: Machine) -> int:
        """Bytes of host memory."""
        return self.forward if machine.in_place else self.waiting

    def with_most_on_host(self, most: int, machine: Machine) -> Self:
        """The same with at most so many bytes of host memory."""
        forward = min(most, self.forward) if machine.in_place else self.forward
        return self._replace(forward=forward, waiting=min(most, self.waiting))


def _has_slots(request: RunRequest, machine: Machine) -> bool:
    """Whether blocks pass through slots in a device's own memory."""
    return request.overlap and not machine.in_place


def _require_memory_options_used(request: RunRequest, machine: Machine) -> None:
    """Refuse limits of memory that this run does not have."""
    memory = request.memory
    if machine.in_place and memory.least_activations is not None and not request.spills:
        found = f"{memory.least_activations!r} on a device that computes in host memory"
        raise without_effect(
            "memory.least_activations", found, "a GPU, where activations can wait in host memory"
        )
    if memory.device != "auto" and not _has_slots(request, machine):
        expected = (
            "a GPU and overlapping transfers for this option; `memory.host` limits host memory"
        )
        raise without_effect("memory.device", repr(memory.device), expected)


def _device_plan(request: RunRequest, machine: Machine, *, is_low_bit: bool) -> DevicePlan | None:
    """The caller's plan of a device's memory, or one that is made; None if blocks need no slots."""
    if isinstance(request.memory.device, DevicePlan):
        return request.memory.device
    if not _has_slots(request, machine):
        return None
    further = [MemoryPart(_TRAINED, request.trained_bytes)]
    if not machine.on_host:
        further = [_factors(request), *further, *request.further]
    return plan_device_memory(request, machine, further, is_low_bit=is_low_bit)


def _host_plan(
    request: RunRequest, machine: Machine, activations: _ActivationPlan, staging: int
) -> tuple[HostPlan, _ActivationPlan]:
    """The caller's plan of host memory, or one that is made, and the activations that it has room
    for.
    """
    if isinstance(request.memory.host, HostPlan):
        return request.memory.host, activations
    trained_bytes = request.trained_bytes if machine.in_place else 0
    further = [
        MemoryPart("blocks in their transfer dtypes", staging),
        *([_factors(request), *request.further] if machine.on_host else []),
        MemoryPart(_TRAINED, request.optimizer_bytes + trained_bytes),
    ]
    try:
        host_plan = plan_host(request, machine, activations.on_host(machine), further)
    except MemoryBudgetError:
        least = request.memory.least_activation_bytes
        if least is None or not request.spills:
            raise
        activations = activations.with_most_on_host(least, machine)
        host_plan = plan_host(
            request,
            machine,
            activations.on_host(machine),
            further,
            most_buckets=MOST_USEFUL_BUCKETS,
        )
    return host_plan, activations


_TRAINED = "trained parameters, gradients, optimizer"


def _factors(request: RunRequest) -> MemoryPart:
    return MemoryPart("factors of directions", request.factor_bytes)


def plan_host(
    request: RunRequest,
    machine: Machine,
    activation_bytes: int,
    further: Sequence[MemoryPart] = (),
    *,
    most_buckets: int | None = None,
) -> HostPlan:
    """Choose the fastest plan that fits: all blocks resident, else as many buckets as fit; z stays
    in memory if it fits.
    """
    process = memory_in_use()
    memory = request.memory.host
    layouts = request.layouts
    assert not isinstance(memory, HostPlan), "it is planned already"
    budget = (
        process + int(AUTO_SHARE * free_memory() / machine.neighbours)
        if memory == "auto"
        else parse_size(memory)
    )
    blocks = sum(not layout.resident for layout in layouts)
    work = request.work_bytes if machine.on_host else 0
    noise = noise_bytes(layouts) if machine.on_host else 0
    may_keep_noise = not isinstance(request.noise, CounterNoise)

    def plan_with(buckets: int | None, *, keep_noise: bool) -> HostPlan:
        used = layouts if buckets is None else request.on_disk
        sizes = [whole_pages(layout.nbytes) for layout in used if not layout.resident]
        resident = sum(whole_pages(layout.nbytes) for layout in used if layout.resident)
        in_buckets = sum(sizes) if buckets is None else buckets * max(sizes, default=0)
        noise_buffer = [MemoryPart("noise buffer", noise)] if keep_noise else []
        kept_free = []
        if request.memory.kept_free:
            kept_free = [MemoryPart("kept free, to resume the run", request.memory.kept_free)]
        if may_keep_noise and not keep_noise:
            noise_buffer = [MemoryPart("no noise buffer: z is drawn again", 0)]
        parts = (
            MemoryPart("this process at present", process),
            MemoryPart("activations, reserved", activation_bytes),
            MemoryPart("embedding and head", resident),
            MemoryPart(f"{blocks if buckets is None else buckets} of {blocks} blocks", in_buckets),
            MemoryPart("work buffer", work),
            *noise_buffer,
            *(part for part in further if part.nbytes),
            MemoryPart("reading buffers", READERS * STAGING),
            *kept_free,
        )
        return HostPlan(parts, budget, buckets, keep_noise)

    for buckets, keep_noise in _host_choices(request, blocks, most_buckets):
        planned = plan_with(buckets, keep_noise=keep_noise)
        if planned.nbytes <= budget:
            return planned
    raise planned.too_large(
        "memory", "free memory, allow more, or take smaller batches or a 16-bit dtype"
    )


class _HostChoice(NamedTuple):
    """What a ``HostPlan`` chooses."""

    buckets: int | None
    keep_noise: bool


def _host_choices(
    request: RunRequest, blocks: int, most_buckets: int | None
) -> Sequence[_HostChoice]:
    """The ways in which a run can use host memory, the fastest first."""
    choices = _ordered_choices(blocks, may_keep_noise=not isinstance(request.noise, CounterNoise))
    if request.stays_in_memory:
        choices = [choice for choice in choices if choice.buckets is None]
    if most_buckets is not None:
        choices = [
            choice for choice in choices if choice.buckets is None or choice.buckets <= most_buckets
        ]
    if not request.changing:
        return choices
    several = [choice for choice in choices if choice.buckets is not None and choice.buckets > 1]
    return several or [_HostChoice(min(2, blocks), keep_noise=False)]


def _ordered_choices(blocks: int, *, may_keep_noise: bool) -> list[_HostChoice]:
    """All blocks or as many buckets as possible; more buckets than are useful only beside z."""
    if not may_keep_noise:
        numbers = (None, *range(blocks - 1, 0, -1))
        return [_HostChoice(buckets, keep_noise=False) for buckets in numbers]
    useful = min(MOST_USEFUL_BUCKETS, blocks - 1)
    return [
        _HostChoice(None, keep_noise=True),
        _HostChoice(None, keep_noise=False),
        *(_HostChoice(buckets, keep_noise=True) for buckets in range(blocks - 1, 1, -1)),
        *(_HostChoice(buckets, keep_noise=False) for buckets in range(useful, 0, -1)),
    ]


def plan_device_memory(
    request: RunRequest,
    machine: Machine,
    further: Sequence[MemoryPart] = (),
    *,
    is_low_bit: bool = False,
) -> DevicePlan:
    """Keep as many blocks on the device as fit."""
    memory = request.memory.device
    layouts = request.layouts
    noise = request.noise
    assert not isinstance(memory, DevicePlan), "it is planned already"
    is_automatic = memory == "auto"
    budget = (
        int(DEVICE_SHARE * machine.device_free())
        if is_automatic
        else parse_size(memory, option="device_memory")
    )
    blocks = [layout.nbytes for layout in layouts if not layout.resident]
    largest = max(blocks, default=0)
    transferred = [
        low_bit_layout(layout) if is_low_bit else layout
        for layout in layouts
        if not layout.resident
    ]
    slot = max((layout.nbytes for layout in transferred), default=0)
    drawn = 0 if isinstance(noise, CounterNoise) else drawn_bytes(layouts, noise)
    most, allowed = request.memory.activation_bytes, request.memory.least_activation_bytes
    least = most if allowed is None else min(allowed, most)

    def plan_with(resident_count: int, activations: int) -> DevicePlan:
        moving = len(blocks) - resident_count
        slots = min(SLOTS, moving)
        parts = (
            MemoryPart(
                "embedding and head", sum(layout.nbytes for layout in layouts if layout.resident)
            ),
            MemoryPart(f"{slots} slots for {moving} blocks", slots * slot),
            MemoryPart(f"{resident_count} blocks that stay", resident_count * largest),
            MemoryPart("work buffer", request.work_bytes),
            MemoryPart("noise as it is drawn", (request.directions + 1) * drawn),
            *(part for part in further if part.nbytes),
            MemoryPart("activations, reserved", activations),
        )
        return DevicePlan(parts, budget, resident_count, activations)

    for resident_count in range(len(blocks), -1, -1):
        planned = plan_with(resident_count, most)
        if planned.nbytes <= budget:
            return planned
    smallest = plan_with(0, least)
    if smallest.nbytes <= budget:
        return plan_with(0, least + budget - smallest.nbytes)
    raise smallest.too_large(
        "device_memory", "use a larger device, smaller batches, a loss in chunks, or a 16-bit dtype"
    )


def decoded_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of the largest block's decoded weights; 0 if no block is encoded."""
    return max(
        sum(aligned(spec.decoded.nbytes) for spec in layout.parameters if spec.encoding is not None)
        for layout in layouts
        if layout.kind is SegmentKind.BLOCK
    )
