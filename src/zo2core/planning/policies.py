"""What a caller may say about memory and write-backs: options that belong together are one object that checks itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zo2core.errors import OptionError
from zo2core.planning.device_plan import DevicePlan, plan_device_memory
from zo2core.planning.host_budget import parse_size
from zo2core.planning.host_plan import HostPlan
from zo2core.protocols import NoiseGenerator
from zo2core.types import BlockLayout

ACTIVATIONS = 256 << 20  # bytes reserved for activations by default


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """How much memory a run may take.

    Args:
        host: Host memory that the process may have in all, in bytes or as a size ("6GiB"); "auto" takes what is free. A
            ``HostPlan`` is taken as it is: it says how many buckets there are.
        device: Device memory that the run may use, in bytes or as a size; "auto" takes what is free. A ``DevicePlan`` is
            taken as it is: it says how many blocks stay on the device.
        activations: Memory reserved for activations and logits, in host memory on the CPU and in device memory on a GPU. It
            also says how many batches an evaluation takes a sweep.
        least_activations: Device memory for activations that will do where there is no room for ``activations``: what the
            streams at work take, while the others wait in host memory. None: all have to be on the device.

    Raises:
        OptionError: if a value is not a size.
    """

    host: int | str | HostPlan = "auto"
    device: int | str | DevicePlan = "auto"
    activations: int | str = ACTIVATIONS
    least_activations: int | str | None = None

    def __post_init__(self) -> None:
        for option, size in (("memory.host", self.host), ("memory.device", self.device)):
            if isinstance(size, (int, str)) and size != "auto":
                parse_size(size, option=option)
        self.activation_bytes, self.least_activation_bytes  # noqa: B018 - refuse what is no size

    @property
    def activation_bytes(self) -> int:
        """Bytes reserved for activations."""
        return parse_size(self.activations, option="memory.activations")

    @property
    def least_activation_bytes(self) -> int | None:
        """Bytes of a device that activations take at least; None: all of them."""
        least = self.least_activations
        return None if least is None else parse_size(least, option="memory.least_activations")

    def plan_device(
        self,
        layouts: Sequence[BlockLayout],
        noise: NoiseGenerator,
        *,
        in_place: bool,
        free: Callable[[], int],
        overlap: bool,
        perturbs_in_place: bool,
        probes: int,
        is_low_bit: bool,
        factors: int,
        trained: int = 0,
    ) -> DevicePlan | None:
        """The plan for a device's memory; None where it computes in host memory, or one thing is done after the other.

        Args:
            layouts: Segments in visiting order.
            noise: Says how much of z is drawn at a time.
            in_place: Whether segments are computed on in host memory.
            free: Says how many bytes of the device are free.
            overlap: Whether transfers overlap with compute.
            perturbs_in_place: As for ``plan_device_memory``, and so are the others.
            probes: As there.
            is_low_bit: As there.
            factors: As there.
            trained: As there.

        Raises:
            OptionError: if a size was given that nothing would heed.
            MemoryBudgetError: if the device is too small for any plan.
        """
        if in_place and self.least_activations is not None:
            raise OptionError(
                "memory.least_activations",
                found=f"{self.least_activations!r} on a device that computes in host memory",
                expected="a GPU, where activations can wait in host memory",
                remedy="leave it out",
            )
        if in_place or not overlap:
            if self.device != "auto":
                raise OptionError(
                    "memory.device",
                    found=repr(self.device),
                    expected="a GPU, and transfers that overlap, where it is given",
                    remedy="leave it out; `memory.host` bounds what the CPU takes",
                )
            return None
        if isinstance(self.device, DevicePlan):
            return self.device
        return plan_device_memory(
            layouts,
            noise,
            memory=self.device,
            free=free(),
            activation_bytes=self.activation_bytes,
            least_activation_bytes=self.least_activation_bytes,
            perturbs_in_place=perturbs_in_place,
            probes=probes,
            is_low_bit=is_low_bit,
            factors=factors,
            trained=trained,
        )


@dataclass(frozen=True, kw_only=True)
class WriteBackPolicy:
    """Whether and when changed segments are written to disk. The base checkpoint is never written.

    Args:
        directory: Directory of the scratch file, or beside the activations of the factors of periods that have ended.
            Together with the journal's file it is what a later engine goes on from.
        every: A segment is written once it is this many steps ahead of its bytes on disk; "auto" measures noise and disk,
            and writes as seldom as costs at most a tenth of a step; None reads what was written there before, and writes
            only as ``snapshot_every`` says.
        snapshot_every: Bounds what a resumed run has to replay: a segment is written at least this often.
        terabytes_per_1000_steps: Most that 1,000 steps may write, 10^12 bytes each: "auto" keeps to it, and numbers above
            that write more are refused. None: no limit.

    Raises:
        OptionError: if a number is out of its range.
    """

    directory: Path | str
    every: int | Literal["auto"] | None = "auto"
    snapshot_every: int | None = None
    terabytes_per_1000_steps: float | None = None

    @property
    def is_left_to_us(self) -> bool:
        """Whether no number was asked for: nothing needs to be written, then, where there are reasons against it."""
        return self.every in ("auto", None) and self.snapshot_every is None

    @property
    def bytes_a_step(self) -> float | None:
        """Most that what is left to us may write; None: no limit."""
        if self.every is None:
            return 0.0
        return None if self.terabytes_per_1000_steps is None else self.terabytes_per_1000_steps * 1e9

    def __post_init__(self) -> None:
        limit = self.terabytes_per_1000_steps
        if limit is not None and not (type(limit) in (int, float) and 0 < limit < math.inf):
            raise OptionError(
                "write_back.terabytes_per_1000_steps",
                found=repr(limit),
                expected="a number above 0, or None for no limit",
                remedy="pass a number in this range; every=None writes nothing",
            )
        for option, value in (("every", self.every), ("snapshot_every", self.snapshot_every)):
            if value is None or (option == "every" and value == "auto"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(
                    f"write_back.{option}",
                    found=repr(value),
                    expected="a whole number of at least 1" + (", 'auto' or None" if option == "every" else " or None"),
                    remedy="pass a number in this range",
                )
