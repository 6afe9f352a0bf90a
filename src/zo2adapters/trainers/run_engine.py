"""A run's options become its engine, at the step where its journal ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zo2adapters.models.footprint import activation_bytes, least_activation_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_kinds.block_model import PeftBlockModel
from zo2adapters.trainers.batch_shapes import BatchShape
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import Execution, Order, TrainOptions
from zo2adapters.trainers.run_directory import JOURNAL
from zo2adapters.trainers.worker_options import local_device, own_trace
from zo2core import Journal, MemoryPolicy, Replayer, Workers, WriteBackPolicy, ZOEngine, ZOEstimator
from zo2core.planning.host_budget import parse_size


def reserved_for(model: HFBlockModel, longest: BatchShape, optimization: Optimization, micro_rows: int | None) -> int:
    """Bytes that a run reserves for activations and logits.

    Args:
        model: The model.
        longest: The largest batch.
        optimization: How a step is taken.
        micro_rows: Rows that run at a time; None: all of a batch.
    """
    rows, tokens, stacked = longest.rows, round(longest.tokens), optimization.stacked
    loss_rows = optimization.loss_rows(rows)
    activations = activation_bytes(
        model.config,
        rows,
        tokens,
        streams=optimization.evaluations,
        micro_rows=micro_rows,
        loss_chunk=model.loss_chunk,
        stacked=stacked,
        loss_rows=loss_rows if optimization.per_row else None,
    )
    if optimization.rank is None:
        return activations
    columns = max(  # of the factors that a segment's matrices have of each direction: as drawn, and as modules take them
        sum(spec.shape[0] * spec.dtype.itemsize for spec in layout.used if len(spec.shape) == 2 and not spec.frozen)
        for layout in model.layouts
    )
    return activations + 2 * columns * optimization.rank * stacked * -(-rows // loss_rows)


def reserved_bytes(options: TrainOptions, model: HFBlockModel, longest: int, sequences: int) -> tuple[int, int]:
    """Memory to reserve for activations on rows of so many tokens and sequences, and the least that a device has to have.

    Raises:
        OptionError: if the size given for it cannot be read.
    """
    config, batching, given = model.config, options.batching, options.storage.activation_memory
    rows, longest = batching.shape(batching.batch_size * sequences, longest)
    micro_rows, chunk, optimization = batching.micro_batch_size, batching.loss_chunk, options.optimization
    streams, stacked = optimization.evaluations, optimization.stacked
    running = (rows if micro_rows is None else min(rows, micro_rows)) * stacked
    beside = 0
    if isinstance(model, PeftBlockModel):
        beside = model.adapter_bytes(running, -(-streams // stacked) * -(-rows * stacked // running))
    reserved = (
        reserved_for(model, BatchShape.whole(rows, longest), optimization, micro_rows) + beside
        if given is None
        else parse_size(given)
    )
    least = least_activation_bytes(config, running, longest, loss_chunk=chunk)
    return reserved, least + beside


def replayer(
    options: TrainOptions,
    model: HFBlockModel,
    activations: int,
    workers: Workers | None,
    *,
    journal: Journal | None = None,
) -> Replayer:
    """The weights of a step, to look at while the run's engine is not open: both use the model.

    Args:
        options: The run's.
        model: Opened as they say.
        activations: Bytes that activations may take.
        workers: Others that look at the same rows.
        journal: The run's, up to the step; None is the base.

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
    """The run's engine.

    Args:
        options: The run's.
        model: Opened as they say.
        estimator: The estimator that the options name.
        activations: Bytes that activations may take.
        least_activations: Bytes that they take at least, on a device.
        decides: What beside base and estimator decides the run.
        execution: How to work on it.
        workers: Others that work on the same run.

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
        trace=own_trace(execution.trace, workers),
        provenance=decides,
        workers=workers,
    )
