"""What a run would take: host memory by part, disk, bytes moved and seconds a step, from headers and quick probes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from zo2adapters.models.footprint import activation_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.allocator import with_kept_memory
from zo2core import (
    BesideActivations,
    BlockLayout,
    CounterNoise,
    HostDevice,
    HostPlan,
    InWeights,
    NoiseGenerator,
    Perturbation,
    SequentialNoise,
    aligned,
    decoded,
    evaluation_seconds,
    factor_bytes,
    flat_views,
    interval_within,
    kept_bytes_a_step,
    laid_out_as_on_disk,
    plan_host,
    read_bytes_per_second,
    replay_seconds,
    scratch_bytes,
    streamed_bytes,
    terabytes_written,
    write_back_interval,
    write_bytes_per_second,
)

_PROBED_PRODUCTS = 100_000_000_000  # in a block's matrices, of the forward probe
_ROUNDS = 3  # the best counts

# Note: Updates. Beside the replay, which one thread does, a second one draws and perturbs for the first evaluation; the walk
# to the second one is shared. Measured on steps of OPT-125m and OPT-1.3B, that takes this share of a replay more.
_WALK = 0.25


@dataclass(frozen=True)
class RunPlan:
    """A run as it is expected to be."""

    host_plan: HostPlan
    model_bytes: int
    write_back_every: int | None  # None: no block is written back
    scratch_bytes: int  # on disk, once everything was written back
    read_bytes: int  # a step
    written_bytes: int  # a step, on average
    terabytes_per_1000_steps: float  # that are written: what wears a disk
    forward_seconds: float  # a step's forwards
    update_seconds: float  # a step's noise and arithmetic
    disk_seconds: float  # beside the other two

    @property
    def seconds(self) -> float:
        """Expected seconds a step."""
        return max(self.forward_seconds + self.update_seconds, self.disk_seconds)

    def to_json(self) -> str:
        """Give programs the fields, and the bytes and seconds in all."""
        return json.dumps({**asdict(self), "nbytes": self.host_plan.nbytes, "seconds": self.seconds})

    def table(self) -> str:
        """Give people a table."""
        buckets = self.host_plan.buckets
        where = "all in memory" if buckets is None else f"streamed from disk through {buckets} buckets"
        rows = [
            ("blocks", where),
            ("written back", "never" if self.write_back_every is None else f"every {self.write_back_every} steps"),
            ("scratch on disk, at most", f"{self.scratch_bytes / 1e9:.2f} GB"),
            ("read a step", f"{self.read_bytes / 1e9:.2f} GB"),
            ("written a step", f"{self.written_bytes / 1e9:.2f} GB"),
            ("written in 1,000 steps", f"{self.terabytes_per_1000_steps:.3g} TB"),
            ("forwards", f"{self.forward_seconds:.2f} s"),
            ("noise and arithmetic", f"{self.update_seconds:.2f} s"),
            ("disk, beside them", f"{self.disk_seconds:.2f} s"),
            ("expected a step", f"{self.seconds:.2f} s"),
        ]
        lines = [f"{name:26s} {value}" for name, value in rows]
        return "\n".join(["host memory", self.host_plan.table(), "", *lines])


def plan_run(
    model: HFBlockModel,
    *,
    memory: int | str = "auto",
    rows: int,
    tokens: int,
    scratch: Path,
    micro_rows: int | None = None,
    noise: NoiseGenerator | None = None,
    queries: int = 1,
    evaluations: int | None = None,
    write_limit_tb: float | None = None,
    perturbation: Perturbation = InWeights(),  # noqa: B008 - frozen
    workers: int = 1,
) -> RunPlan:
    """Plan a run on the CPU. Nothing is loaded; the probes take a few seconds.

    Args:
        model: From ``open_checkpoint``.
        memory: Host memory the process may take in all.
        rows: Rows of a batch.
        tokens: Tokens of a row.
        scratch: A directory on the disk to write back to.
        micro_rows: Rows that run at a time; None: all of a batch.
        noise: Draws z; None is MeZO's, with its walk.
        queries: Directions a step.
        evaluations: Forwards of a batch in a step; None: two a direction.
        write_limit_tb: Most terabytes that 1,000 steps may write; None: no limit.
        perturbation: Where directions live. Factors are those of a run that begins: each period adds as many.
        workers: Of this host: memory is that of one of them, which has its part of the blocks that they share. Time is that
            of one worker alone.

    Raises:
        MemoryBudgetError: if no arrangement fits.
        ScratchError: if the directory cannot be written to.
        CheckpointError: if the checkpoint cannot be read.
    """
    evaluations = 2 * queries if evaluations is None else evaluations
    activations = activation_bytes(
        model.config, rows, tokens, streams=evaluations, micro_rows=micro_rows, loss_chunk=model.loss_chunk
    )
    drawn = SequentialNoise(model.layouts) if noise is None else noise
    on_disk = laid_out_as_on_disk(model.layouts, model.weights)
    host_plan = plan_host(
        model.layouts,
        on_disk,
        memory=memory,
        activation_bytes=activations,
        may_keep_noise=not isinstance(drawn, CounterNoise),
        walks=not isinstance(drawn, CounterNoise),
        factors=factor_bytes(perturbation, model.layouts),
        neighbours=workers,
        sharers=workers,
    )
    host_plan = with_kept_memory(host_plan, activations)
    layouts = model.layouts if host_plan.buckets is None else on_disk  # as they will lie in buckets
    model_bytes = sum(layout.nbytes for layout in layouts)
    replay = replay_seconds(drawn, layouts, in_place=not isinstance(drawn, CounterNoise))
    streamed = host_plan.buckets is not None
    read = streamed_bytes(layouts, host_plan.buckets)
    read_seconds = read / read_bytes_per_second(model.weights, layouts) if read else 0.0
    forwards = evaluations * measured_forward_seconds(model, rows, tokens)
    if isinstance(perturbation, BesideActivations):
        drawing = replay * _factor_share(layouts, perturbation.rank) * (evaluations + queries)
        written_a_step = kept_bytes_a_step(perturbation, layouts, None if write_limit_tb is None else write_limit_tb * 1e9)
        return RunPlan(
            host_plan=host_plan,
            model_bytes=model_bytes,
            write_back_every=None,
            scratch_bytes=0,
            read_bytes=read,
            written_bytes=round(written_a_step),
            terabytes_per_1000_steps=written_a_step / 1e9,
            forward_seconds=forwards,
            update_seconds=drawing + decoding_seconds(layouts),
            disk_seconds=read_seconds,
        )
    write_rate = write_bytes_per_second(scratch)
    # As the engine chooses, which does not know what forwards take.
    write_seconds = terabytes_written(layouts, 1, steps=1) * 1e12 / write_rate
    every = write_back_interval(replay, write_seconds, step=max(read_seconds, replay), resident=not streamed)
    if write_limit_tb is not None:
        every = max(every, interval_within(layouts, write_limit_tb))
    written = model_bytes // every
    disk_seconds = read_seconds + written / write_rate if streamed else 0.0
    lag = (every + 1) / 2 if streamed else 1.0
    if isinstance(drawn, CounterNoise):
        first, other = evaluation_seconds(drawn, layouts)
        update = replay * (queries * lag - 1) + first + other * (evaluations - 1)
    else:
        update = replay * queries * (lag + (_WALK if host_plan.keep_noise else 1.0))
    return RunPlan(
        host_plan=host_plan,
        model_bytes=model_bytes,
        write_back_every=every,
        scratch_bytes=scratch_bytes(layouts),
        read_bytes=read,
        written_bytes=written,
        terabytes_per_1000_steps=terabytes_written(layouts, every),
        forward_seconds=forwards,
        update_seconds=update,
        disk_seconds=disk_seconds,
    )


def decoding_seconds(layouts: Sequence[BlockLayout]) -> float:
    """Measure the seconds in which all matrices that are encoded are decoded, from the largest one."""
    encoded = [spec for layout in layouts for spec in layout.parameters if spec.encoding is not None]
    if not encoded:
        return 0.0
    largest = max(encoded, key=lambda spec: spec.numel)
    stored, best = torch.zeros(largest.nbytes, dtype=torch.uint8), math.inf
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        decoded(largest, stored)
        best = min(best, time.perf_counter() - began)
    return best / largest.numel * sum(spec.numel for spec in encoded)


def _factor_share(layouts: Sequence[BlockLayout], rank: int) -> float:
    """Numbers drawn for a direction of low rank, as a share of those of a dense one."""
    specs = [spec for layout in layouts for spec in layout.parameters]
    drawn = sum(spec.shape[0] * rank if len(spec.shape) == 2 else spec.numel for spec in specs)
    return drawn / sum(spec.numel for spec in specs)


def measured_forward_seconds(model: HFBlockModel, rows: int, tokens: int) -> float:
    """Measure the seconds of one forward: a block of the model runs on a batch of this shape, or on a part of it.

    Args:
        model: The model, whose modules are bound to one block's memory, filled with a constant; an engine binds them anew.
        rows: Rows of a batch.
        tokens: Tokens of a row.
    """
    layout = model.layouts[1]
    numel = sum(spec.numel for spec in layout.parameters)
    for index in (0, 1, len(model.layouts) - 1):
        specs = [spec.in_forward() for spec in model.layouts[index].used]
        memory = HostDevice().host_memory(sum(aligned(spec.nbytes) for spec in specs))
        views = zip(specs, flat_views(specs, memory), strict=True)
        model.bind(index, {spec.name: (view.fill_(0.01) if index == 1 else view).view(spec.shape) for spec, view in views})
    probed_rows = min(rows, max(_PROBED_PRODUCTS // (numel * tokens), 1))
    probed_tokens = min(tokens, max(_PROBED_PRODUCTS // (numel * probed_rows), 1))
    ids = torch.ones(probed_rows, probed_tokens, dtype=torch.long)
    best = math.inf
    with torch.inference_mode():
        activations = model.embed({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            model.block(0, activations)
            best = min(best, time.perf_counter() - began)
    head = model.layouts[-1]
    heads = sum(spec.numel for spec in (*head.parameters, *head.borrowed) if len(spec.shape) > 1)
    blocks = sum(spec.numel for layout in model.layouts if not layout.resident for spec in layout.parameters)
    return best * (rows * tokens) / (probed_rows * probed_tokens) * (blocks + heads) / numel
