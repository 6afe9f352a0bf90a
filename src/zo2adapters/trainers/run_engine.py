"""Makes the engine of a run from its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from zo2adapters.models.footprint import activation_bytes, least_activation_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds.block_model import PeftBlockModel
from zo2adapters.trainers.batch_shapes import BatchShape
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import Execution, Order, TrainOptions
from zo2adapters.trainers.run_directory import JOURNAL
from zo2adapters.trainers.worker_options import local_device, worker_trace
from zo2core import Journal, MemoryPolicy, Replayer, Workers, WriteBackPolicy, ZOEngine, ZOEstimator


class StepMemory(NamedTuple):
    """Memory for the activations and logits of a step."""

    nbytes: int  # bytes to reserve
    least: int  # least bytes that a device needs


def step_memory(model: HFBlockModel, longest: BatchShape, optimization: Optimization, micro_rows: int | None) -> StepMemory:
    """Expected memory of a zeroth-order step.

    Args:
        model: The model.
        longest: Shape of the largest batch.
        optimization: How a step is taken.
        micro_rows: Rows that run at a time; None: all of a batch.
    """
    rows, tokens, stacked = longest.rows, round(longest.tokens), optimization.stacked
    streams, running = optimization.evaluations, (rows if micro_rows is None else min(rows, micro_rows)) * stacked
    loss_rows = optimization.loss_rows(rows)
    adapter = 0
    if isinstance(model, PeftBlockModel):
        adapter = model.adapter_bytes(running, -(-streams // stacked) * -(-rows * stacked // running))
    nbytes = adapter + activation_bytes(
        model.config,
        rows,
        tokens,
        streams=streams,
        micro_rows=micro_rows,
        loss_chunk=model.loss_chunk,
        stacked=stacked,
        loss_rows=loss_rows if optimization.per_row else None,
    )
    least = adapter + least_activation_bytes(model.config, running, tokens, loss_chunk=model.loss_chunk)
    if optimization.rank is None:
        return StepMemory(nbytes, least)
    columns = max(  # bytes of one column of the factors of a segment's matrices, which are in memory twice
        sum(spec.shape[0] * spec.dtype.itemsize for spec in layout.used if len(spec.shape) == 2 and not spec.frozen)
        for layout in model.layouts
    )
    return StepMemory(nbytes + 2 * columns * optimization.rank * stacked * -(-rows // loss_rows), least)


def replayer(
    options: TrainOptions,
    model: HFBlockModel,
    activations: int,
    workers: Workers | None,
    *,
    journal: Journal | None = None,
) -> Replayer:
    """Open the weights of a step for evaluation. The run's engine, which uses the same model, must be closed.

    Args:
        options: The run's options.
        model: Model that was opened with these options.
        activations: Bytes that activations may use.
        workers: Processes that evaluate the same rows; None: this process works alone.
        journal: The run's journal up to the step; None: the base.

    Raises:
        ZO2Error: of the kind that fits.
    """
    storage = options.storage
    return Replayer(
        model,
        journal,
        micro_batch_size=options.batching.micro_batch_size,
        device=local_device(storage.device, workers),
        memory=MemoryPolicy(host=storage.memory, device=storage.device_memory, activations=activations),
        workers=workers,
    )


def build_engine(
    options: TrainOptions,
    model: HFBlockModel,
    estimator: ZOEstimator,
    activations: int,
    least_activations: int,
    decides: Mapping[str, Any],
    *,
    execution: Execution,
    workers: Workers | None,
) -> ZOEngine:
    """The run's engine, at the last step of its journal.

    Args:
        options: The run's options.
        model: Model that was opened with these options.
        estimator: The estimator that the options name.
        activations: Bytes that activations may use.
        least_activations: Least bytes of activations on a device.
        decides: The run's provenance.
        execution: How to execute the run.
        workers: Processes that work on the same run; None: this process works alone.

    Raises:
        ZO2Error: of the kind that fits.
    """
    storage = options.storage
    return ZOEngine(
        model,
        estimator,
        noise=options.optimization.generator(model.layouts),
        journal=options.output / JOURNAL,
        seed=options.seed,
        device=local_device(storage.device, workers),
        memory=MemoryPolicy(
            host=storage.memory,
            device=storage.device_memory,
            activations=activations,
            least_activations=None if storage.device == "cpu" else least_activations,
        ),
        write_back=WriteBackPolicy(
            directory=options.output,
            every=None if storage.write_back_every == "never" else storage.write_back_every,
            snapshot_every=storage.snapshot_every,
            terabytes_per_1000_steps=storage.write_limit_tb,
        ),
        micro_batch_size=options.batching.micro_batch_size,
        overlap=execution.scheduler is Order.OVERLAPPED,
        replay=execution.replay,
        perturbation=options.optimization.perturbation,
        trace=worker_trace(execution.trace, workers),
        provenance=decides,
        workers=workers,
    )
