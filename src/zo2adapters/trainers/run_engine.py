"""Makes the engine of a run from its options."""

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
from zo2adapters.trainers.worker_options import local_device, worker_trace
from zo2core import Journal, MemoryPolicy, Replayer, Workers, WriteBackPolicy, ZOEngine, ZOEstimator
from zo2core.planning.host_budget import parse_size


def reserved_for(model: HFBlockModel, longest: BatchShape, optimization: Optimization, micro_rows: int | None) -> int:
    """Bytes to reserve for activations and logits.

    Args:
        model: The model.
        longest: Shape of the largest batch.
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
    columns = max(  # bytes of one column of the factors of a segment's matrices, which are in memory twice
        sum(spec.shape[0] * spec.dtype.itemsize for spec in layout.used if len(spec.shape) == 2 and not spec.frozen)
        for layout in model.layouts
    )
    return activations + 2 * columns * optimization.rank * stacked * -(-rows // loss_rows)


def reserved_bytes(options: TrainOptions, model: HFBlockModel, longest: int, sequences: int) -> tuple[int, int]:
    """Memory for activations.

    Args:
        options: The run's options.
        model: The model.
        longest: Tokens of the longest row.
        sequences: Largest number of sequences that a row has.

    Returns:
        Bytes to reserve, and the least bytes that a device needs.

    Raises:
        OptionError: if ``activation_memory`` cannot be parsed.
    """
    config, batching, given = model.config, options.batching, options.storage.activation_memory
    rows, longest = batching.shape(batching.batch_size * sequences, longest)
    micro_rows, chunk, optimization = batching.micro_batch_size, batching.loss_chunk, options.optimization
    streams, stacked = optimization.evaluations, optimization.stacked
    running = (rows if micro_rows is None else min(rows, micro_rows)) * stacked
    adapter_bytes = 0
    if isinstance(model, PeftBlockModel):
        adapter_bytes = model.adapter_bytes(running, -(-streams // stacked) * -(-rows * stacked // running))
    reserved = (
        reserved_for(model, BatchShape.whole(rows, longest), optimization, micro_rows) + adapter_bytes
        if given is None
        else parse_size(given)
    )
    least = least_activation_bytes(config, running, longest, loss_chunk=chunk)
    return reserved, least + adapter_bytes


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
