"""What a run on a GPU would take, without one: memory on both sides, and what is moved in a step."""

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
from zo2core.sweep.activation_offload import ROOMS, streams_that_stay
from zo2core.types import shown_bytes


@dataclass(frozen=True)
class DeviceRunPlan:
    """A run on a GPU as it is expected to be."""

    host_plan: HostPlan  # what takes host memory
    device_plan: DevicePlan  # what takes the device's
    blocks: int  # how many the model has
    read_bytes: int  # a step, from the disk
    moved_bytes: int  # a step, to the device
    returned_bytes: int  # a step, back from it
    waiting_bytes: int  # activations that wait in host memory; moved each way at every segment
    terabytes_per_1000_steps: float  # written at most: at every step, or as many as are allowed
    bus: int  # bytes a second, each way at the same time

    @property
    def transfer_seconds(self) -> float:
        """Seconds of a step's transfers, beside the compute; uploads and offloads go at the same time."""
        return (max(self.moved_bytes, self.returned_bytes) + (self.blocks + 1) * self.waiting_bytes) / self.bus

    def to_json(self) -> str:
        """Give programs the fields, and the seconds that follow from them."""
        return json.dumps({**asdict(self), "transfer_seconds": self.transfer_seconds, "compute_seconds": None})

    def table(self) -> str:
        """Give people a table."""
        back = shown_bytes(self.returned_bytes) if self.returned_bytes else "nothing"
        written = shown_bytes(1e12 * self.terabytes_per_1000_steps)
        written = f"at most {written}; a run measures what is worth it" if self.terabytes_per_1000_steps else "nothing"
        rows = [
            ("blocks that stay", f"{self.device_plan.kept} of {self.blocks}"),
            ("read from disk a step", shown_bytes(self.read_bytes)),
            ("written in 1,000 steps", written),
            ("uploaded a step", shown_bytes(self.moved_bytes)),
            ("offloaded beside it", back),
            ("activations that wait", f"{shown_bytes(self.waiting_bytes)} in host memory, moved at every block"),
            ("transfers", f"{self.transfer_seconds:.2f} s, at {shown_bytes(self.bus)}/s each way (assumed)"),
            ("compute, beside them", "not predicted"),
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
    """Plan a run on a GPU that need not be here. Nothing is loaded or measured.

    Args:
        model: From ``open_checkpoint``.
        memory: Host memory the process may take in all.
        device_memory: Memory of the GPU that the run may use.
        bus: Bytes a second that the bus moves, each way at the same time.
        rows: Rows of a batch.
        tokens: Tokens of a row.
        micro_rows: Rows that run at a time; None: all of a batch.
        noise: Draws z; None is MeZO's, as a GPU draws it.
        queries: Directions a step.
        evaluations: Forwards of a batch in a step; None: two a direction.
        write_limit_tb: Most terabytes that 1,000 steps may write; None: no limit.
        replay: Who replays.
        perturbation: Where directions live. Factors are those of a run that begins: each period adds as many.
        stacked: Number of a step's forwards that run as one batch.

    Raises:
        MemoryBudgetError: if the host, or the device, is too small for any arrangement.
        OptionError: if a size cannot be read.
    """
    evaluations = 2 * queries if evaluations is None else evaluations
    layouts = model.layouts
    config, chunk = model.config, model.loss_chunk
    running = rows if micro_rows is None else min(rows, micro_rows)
    batch: dict[str, Any] = {"micro_rows": micro_rows, "loss_chunk": chunk, "stacked": stacked}
    needed = activation_bytes(config, rows, tokens, streams=evaluations, **batch)
    drawn = SequentialNoise(layouts, "cuda") if noise is None else noise
    request = RunRequest(
        layouts=layouts,
        on_disk=laid_out_as_on_disk(layouts, model.weights),
        noise=drawn,
        perturbation=perturbation,
        perturb_in_place=not isinstance(drawn, CounterNoise),
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
    device_plan, host_plan, low_bit, used = spec.device_plan, spec.host_plan, spec.low_bit, spec.layouts
    assert device_plan is not None, "a device of its own has a plan"
    own, streams = expected_held_bytes(config, running * stacked, tokens), -(-evaluations // stacked) * -(-rows // running)
    left = device_plan.activation_bytes - forward_bytes(
        config, running * stacked, tokens, loss_chunk=chunk, loss_rows=running
    )
    waiting = own * (streams - streams_that_stay(streams, own, left, rooms=ROOMS * own))
    blocks = [layout.nbytes for layout in used if not layout.resident]
    read = 0
    if host_plan.buckets is not None:
        read = _share(blocks, len(blocks) - device_plan.kept - max(host_plan.buckets - MOST_USEFUL_BUCKETS, 0))
    moving = [(layout if low_bit is None else low_bit_layout(layout)).nbytes for layout in used if not layout.resident]
    moved = _share(moving, len(blocks) - device_plan.kept)
    is_changed = isinstance(perturbation, DensePerturbation)  # else weights are only read
    every = 1 if write_limit_tb is None else interval_within(used, write_limit_tb)
    kept = kept_bytes_a_step(perturbation, used, None if write_limit_tb is None else write_limit_tb * 1e9)
    return DeviceRunPlan(
        host_plan=host_plan,
        device_plan=device_plan,
        blocks=len(blocks),
        read_bytes=read,
        moved_bytes=moved,
        returned_bytes=moved if is_changed and (low_bit is None or low_bit.comes_back) else 0,
        waiting_bytes=waiting,
        terabytes_per_1000_steps=terabytes_written(used, every) if is_changed else kept / 1e9,
        bus=parse_size(bus, option="bus"),
    )


def _share(blocks: list[int], count: int) -> int:
    """Bytes of some of the blocks, which need not be of one size."""
    return sum(blocks) * max(count, 0) // max(len(blocks), 1)
