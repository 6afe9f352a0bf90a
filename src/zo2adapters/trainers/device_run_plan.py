"""Plan of a run on a GPU, made without one: host memory, device memory, and bytes transferred in a step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from zo2adapters.models.footprint import activation_bytes, expected_held_bytes, forward_bytes, least_activation_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2core import (
    DensePerturbation,
    DevicePlan,
    HostPlan,
    Machine,
    MemoryPolicy,
    NoiseGenerator,
    RunRequest,
    SequentialNoise,
    plan,
)
from zo2core.kernels.low_bit import low_bit_layout
from zo2core.perturbation import Perturbation, kept_bytes_a_step
from zo2core.planning.host_budget import parse_size
from zo2core.planning.host_plan import MOST_USEFUL_BUCKETS
from zo2core.planning.low_bit import Replay
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.planning.write_interval import interval_within, terabytes_written
from zo2core.protocols import CounterNoise
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.sweep.activation_offload import STAGING_BUFFERS, streams_on_device
from zo2core.types import shown_bytes


@dataclass(frozen=True)
class DeviceRunPlan:
    """Expected memory and transfers of a run on a GPU."""

    host_plan: HostPlan  # use of host memory
    device_plan: DevicePlan  # use of device memory
    blocks: int  # number of the model's blocks
    read_bytes: int  # bytes read from disk per step
    moved_bytes: int  # bytes of weights uploaded to the device per step
    returned_bytes: int  # bytes of weights transferred back per step
    waiting_bytes: int  # activations offloaded to host memory, which are transferred each way at every segment
    terabytes_per_1000_steps: float  # upper bound of writes: with a write at every step, or the limit
    bus: int  # bytes per second that the bus transfers in each direction at the same time

    @property
    def transfer_seconds(self) -> float:
        """Seconds of a step's transfers, which overlap compute; both directions transfer at the same time."""
        return (max(self.moved_bytes, self.returned_bytes) + (self.blocks + 1) * self.waiting_bytes) / self.bus

    def to_json(self) -> str:
        """The plan as JSON, with the seconds that follow from it."""
        return json.dumps({**asdict(self), "transfer_seconds": self.transfer_seconds, "compute_seconds": None})

    def table(self) -> str:
        """The plan as a table."""
        back = shown_bytes(self.returned_bytes) if self.returned_bytes else "nothing"
        written = shown_bytes(1e12 * self.terabytes_per_1000_steps)
        written = f"at most {written}; the run measures its interval" if self.terabytes_per_1000_steps else "nothing"
        rows = [
            ("blocks kept on the device", f"{self.device_plan.kept} of {self.blocks}"),
            ("read from disk per step", shown_bytes(self.read_bytes)),
            ("written per 1,000 steps", written),
            ("uploaded per step", shown_bytes(self.moved_bytes)),
            ("transferred back per step", back),
            ("offloaded activations", f"{shown_bytes(self.waiting_bytes)} in host memory, transferred at every block"),
            ("transfers", f"{self.transfer_seconds:.2f} s, at {shown_bytes(self.bus)}/s each way (assumed)"),
            ("compute, overlapped", "not predicted"),
        ]
        lines = [f"{name:26s} {value}" for name, value in rows]
        return "\n".join(["host memory", self.host_plan.table(), "", "device memory", self.device_plan.table(), "", *lines])


def plan_device_run(
    model: HFBlockModel,
    *,
    memory: int | str = "auto",
    device_memory: int | str,
    bus: int | str,
    rows: int,
    tokens: int,
    micro_rows: int | None = None,
    noise: NoiseGenerator | None = None,
    queries: int = 1,
    evaluations: int | None = None,
    write_limit_tb: float | None = None,
    replay: Replay = "auto",
    perturbation: Perturbation = DensePerturbation(),  # noqa: B008 - frozen
    stacked: int = 1,
) -> DeviceRunPlan:
    """Plan a run on a GPU, which need not be in this machine. Nothing is loaded or measured.

    Args:
        model: Model from ``open_checkpoint``.
        memory: Host memory the process may use in total.
        device_memory: Memory of the GPU that the run may use.
        bus: Bytes per second that the bus transfers in each direction at the same time.
        rows: Rows per batch.
        tokens: Tokens per row.
        micro_rows: Rows that run at a time; None: all of a batch.
        noise: Generator of the directions; None: MeZO's numbers as a GPU draws them.
        queries: Directions per step.
        evaluations: Forward passes of a batch in a step; None: two per direction.
        write_limit_tb: Terabytes that 1,000 steps may write; None: no limit.
        replay: Where updates are replayed.
        perturbation: How directions are applied. Factors are counted for a new run; each period adds as many.
        stacked: Number of a step's forwards that run as one batch.

    Raises:
        MemoryBudgetError: if host or device memory is too small for any plan.
        OptionError: if a size cannot be parsed.
    """
    evaluations = 2 * queries if evaluations is None else evaluations
    config, chunk = model.config, model.loss_chunk
    running = rows if micro_rows is None else min(rows, micro_rows)
    batch: dict[str, Any] = {"micro_rows": micro_rows, "loss_chunk": chunk, "stacked": stacked}
    needed = activation_bytes(config, rows, tokens, streams=evaluations, **batch)
    generator = SequentialNoise(model.layouts, "cuda") if noise is None else noise
    request = RunRequest(
        layouts=model.layouts,
        on_disk=laid_out_as_on_disk(model.layouts, model.weights),
        noise=generator,
        perturbation=perturbation,
        perturb_in_place=not isinstance(generator, CounterNoise),
        directions=queries,
        memory=MemoryPolicy(
            host=memory,
            device=parse_size(device_memory, option="device_memory"),
            activations=needed,
            least_activations=least_activation_bytes(config, running * stacked, tokens, loss_chunk=chunk),
        ),
        replay=replay,
    )
    spec = plan(request, Machine(in_place=False, on_host=False), MeasuredSpeeds(model.weights))
    device_plan, host_plan, low_bit, layouts = spec.device_plan, spec.host_plan, spec.low_bit, spec.layouts
    assert device_plan is not None, "a device with memory of its own has a plan"
    held = expected_held_bytes(config, running * stacked, tokens)  # activations of one stream between two segments
    streams = -(-evaluations // stacked) * -(-rows // running)
    left = device_plan.activation_bytes - forward_bytes(
        config, running * stacked, tokens, loss_chunk=chunk, loss_rows=running
    )
    waiting = held * (streams - streams_on_device(streams, held, left, staging=STAGING_BUFFERS * held))
    blocks = [layout.nbytes for layout in layouts if not layout.resident]
    read = 0
    if host_plan.buckets is not None:
        read = _bytes_of(blocks, len(blocks) - device_plan.kept - max(host_plan.buckets - MOST_USEFUL_BUCKETS, 0))
    uploads = [(layout if low_bit is None else low_bit_layout(layout)).nbytes for layout in layouts if not layout.resident]
    moved = _bytes_of(uploads, len(blocks) - device_plan.kept)
    is_changed = isinstance(perturbation, DensePerturbation)  # otherwise weights are only read
    every = 1 if write_limit_tb is None else interval_within(layouts, write_limit_tb)
    written = kept_bytes_a_step(perturbation, layouts, None if write_limit_tb is None else write_limit_tb * 1e9)
    return DeviceRunPlan(
        host_plan=host_plan,
        device_plan=device_plan,
        blocks=len(blocks),
        read_bytes=read,
        moved_bytes=moved,
        returned_bytes=moved if is_changed and (low_bit is None or low_bit.comes_back) else 0,
        waiting_bytes=waiting,
        terabytes_per_1000_steps=terabytes_written(layouts, every) if is_changed else written / 1e9,
        bus=parse_size(bus, option="bus"),
    )


def _bytes_of(blocks: list[int], count: int) -> int:
    """Expected bytes of ``count`` of the blocks, which may differ in size."""
    return sum(blocks) * max(count, 0) // max(len(blocks), 1)
