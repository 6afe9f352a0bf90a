"""Plan of a run on a GPU, made without one: host memory, device memory, and bytes transferred in a step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from zo2adapters.models.footprint import expected_held_bytes, forward_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.batch_shapes import RowShapes
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.run_plan import duration, memory_words, run_request, step_memory
from zo2core import DensePerturbation, DevicePlan, HostPlan, MemoryPolicy, SequentialNoise
from zo2core.kernels.low_bit import low_bit_layout
from zo2core.perturbation import kept_bytes_a_step
from zo2core.planning.host_budget import parse_size
from zo2core.planning.low_bit import Replay
from zo2core.planning.machine import Machine
from zo2core.planning.run_spec import plan
from zo2core.planning.speeds import MeasuredSpeeds
from zo2core.planning.write_interval import interval_within, streamed_bytes, terabytes_written
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

    def summary(self) -> list[str]:
        """Lines that say whether the run fits, how long it takes, and how much it writes."""
        device, most = self.device_plan, shown_bytes(1e12 * self.terabytes_per_1000_steps)
        return [
            f"Memory: {memory_words(self.host_plan)}.",
            f"GPU memory: it fits, with {shown_bytes(device.nbytes)} of {shown_bytes(device.budget)}; {device.kept} of "
            f"{self.blocks} blocks stay there.",
            f"Time: compute is not predicted for a GPU; transfers alone take {duration(self.transfer_seconds)} a step.",
            f"Disk writes: {f'at most {most} in 1,000 steps' if self.terabytes_per_1000_steps else 'negligible'}.",
        ]

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
            ("transfers", f"{duration(self.transfer_seconds)}, at {shown_bytes(self.bus)}/s each way (assumed)"),
            ("compute, overlapped", "not predicted"),
        ]
        lines = [f"{name:26s} {value}" for name, value in rows]
        return "\n".join(["host memory", self.host_plan.table(), "", "device memory", self.device_plan.table(), "", *lines])


def plan_device_run(
    model: HFBlockModel,
    shapes: RowShapes,
    optimization: Optimization,
    *,
    memory: int | str = "auto",
    device_memory: int | str,
    bus: int | str,
    write_limit_tb: float | None = None,
    replay: Replay = "auto",
) -> DeviceRunPlan:
    """Plan a run on a GPU, which need not be in this machine. Nothing is loaded or measured.

    Args:
        model: Model from ``open_checkpoint``.
        shapes: Shapes of the run's batches.
        optimization: How a step is taken. Low-rank factors are counted for a new run; each period adds as many.
        memory: Host memory the process may use in total.
        device_memory: Memory of the GPU that the run may use.
        bus: Bytes per second that the bus transfers in each direction at the same time.
        write_limit_tb: Terabytes that 1,000 steps may write; None: no limit.
        replay: Where updates are replayed.

    Raises:
        MemoryBudgetError: if host or device memory is too small for any plan.
        OptionError: if a size cannot be parsed.
    """
    perturbation = optimization.perturbation
    needed = step_memory(model, shapes.longest, optimization, shapes.micro_rows, new_tokens=shapes.new_tokens)
    policy = MemoryPolicy(
        host=memory,
        device=parse_size(device_memory, option="device_memory"),
        activations=needed.nbytes,
        least_activations=needed.least,
    )
    noise = optimization.generator(model.layouts) or SequentialNoise(model.layouts, "cuda")
    request = replace(run_request(model, shapes, optimization, noise, policy), replay=replay)
    spec = plan(request, Machine(in_place=False, on_host=False), MeasuredSpeeds(model.weights))
    device_plan, host_plan, low_bit, layouts = spec.device_plan, spec.host_plan, spec.low_bit, spec.layouts
    assert device_plan is not None, "a device with memory of its own has a plan"
    blocks = [layout for layout in layouts if not layout.resident]
    uploads = sum((layout if low_bit is None else low_bit_layout(layout)).nbytes for layout in blocks)
    moved = uploads * (len(blocks) - device_plan.kept) // max(len(blocks), 1)
    is_changed = isinstance(perturbation, DensePerturbation)  # otherwise weights are only read
    every = 1 if write_limit_tb is None else interval_within(layouts, write_limit_tb)
    written = kept_bytes_a_step(perturbation, layouts, None if write_limit_tb is None else write_limit_tb * 1e9)
    return DeviceRunPlan(
        host_plan=host_plan,
        device_plan=device_plan,
        blocks=len(blocks),
        read_bytes=streamed_bytes(layouts, host_plan.buckets, kept=device_plan.kept),
        moved_bytes=moved,
        returned_bytes=moved if is_changed and (low_bit is None or low_bit.comes_back) else 0,
        waiting_bytes=_waiting_bytes(model, shapes, optimization, device_plan.activation_bytes),
        terabytes_per_1000_steps=terabytes_written(layouts, every) if is_changed else written / 1e9,
        bus=parse_size(bus, option="bus"),
    )


def _waiting_bytes(model: HFBlockModel, shapes: RowShapes, optimization: Optimization, activation_bytes: int) -> int:
    """Bytes of activations between two segments that do not fit in device memory."""
    config, stacked = model.config, optimization.stacked
    rows, tokens = shapes.longest.rows, round(shapes.longest.tokens)
    running = rows if shapes.micro_rows is None else min(rows, shapes.micro_rows)
    held = expected_held_bytes(config, running * stacked, tokens)  # activations of one stream
    streams = -(-optimization.evaluations // stacked) * -(-rows // running)
    forward = forward_bytes(config, running * stacked, tokens, loss_chunk=model.loss_chunk, loss_rows=running)
    return held * (streams - streams_on_device(streams, held, activation_bytes - forward, staging=STAGING_BUFFERS * held))
