"""The caller's options for memory and write-backs, checked together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zo2core.planning.memory import DevicePlan, HostPlan
from zo2core.ranges import parse_size, require_number, require_whole

ACTIVATIONS = 256 << 20  # bytes reserved for activations by default


@dataclass(frozen=True, kw_only=True)
class MemoryPolicy:
    """How much memory a run may take.

    Args:
        host: Total host memory of the process, in bytes or as a size ("6GiB"); "auto" uses the free memory. A ``HostPlan``
            is used as it is.
        device: Device memory of the run, in bytes or as a size; "auto" uses the free memory. A ``DevicePlan`` is used as it
            is.
        activations: Memory reserved for activations and logits, in host memory on the CPU and in device memory on a GPU. It
            limits how many batches of an evaluation run in one sweep.
        least_activations: Memory for activations if ``activations`` does not fit: on a device with memory of its own enough
            for the running streams, while those of the others wait in host memory; on the CPU, for first-order steps alone,
            enough for what is not written to disk. First-order steps also use it for what waits in host memory, if there is
            no room for more. None: all activations stay where forwards run.

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


@dataclass(frozen=True, kw_only=True)
class WriteBackPolicy:
    """Whether and when changed segments are written to disk. The base checkpoint is never written.

    Args:
        directory: Directory of the scratch file or, with low-rank perturbations, of the factors of ended periods. A later
            engine resumes from it and the journal.
        every: A segment is written once it is this many steps ahead of its bytes on disk; "auto" measures noise and disk,
            and writes as seldom as costs at most a tenth of a step; None reads earlier files, and writes only as often as
            ``snapshot_every`` asks.
        snapshot_every: Most steps between two writes of a segment, which limits the replay of a resumed run.
        terabytes_per_1000_steps: Limit of writes in 1,000 steps, in units of 10^12 bytes: "auto" stays below it, and numbers
            above that exceed it are refused. None: no limit.

    Raises:
        OptionError: if a number is out of its range.
    """

    directory: Path | str
    every: int | Literal["auto"] | None = "auto"
    snapshot_every: int | None = None
    terabytes_per_1000_steps: float | None = None

    @property
    def is_automatic(self) -> bool:
        """Whether the caller set no interval: then writing may be left out."""
        return self.every in ("auto", None) and self.snapshot_every is None

    @property
    def bytes_a_step(self) -> float | None:
        """Most bytes a step that may be written without an explicit interval; None: no limit."""
        if self.every is None:
            return 0.0
        return None if self.terabytes_per_1000_steps is None else self.terabytes_per_1000_steps * 1e9

    def __post_init__(self) -> None:
        limit, remedy = self.terabytes_per_1000_steps, "pass a limit above 0; every=None writes nothing"
        if limit is not None:
            require_number("write_back.terabytes_per_1000_steps", limit, above=0, remedy=remedy)
        if self.every not in (None, "auto"):
            require_whole("write_back.every", self.every, 1, otherwise=", 'auto' or None")
        if self.snapshot_every is not None:
            require_whole("write_back.snapshot_every", self.snapshot_every, 1, otherwise=", or None")
