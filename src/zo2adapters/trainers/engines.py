"""The engine of a run, and what its plan asks for: the one module here that knows the engines of zo2core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.tasks.task import TrainingEngine
from zo2adapters.trainers.batch_shapes import BatchShape
from zo2adapters.trainers.options import Execution, TrainedState, TrainOptions
from zo2adapters.trainers.run_directory import JOURNAL
from zo2adapters.trainers.worker_options import local_device, worker_trace
from zo2core import (
    BlockLayout,
    BlockUpdate,
    DurableBackpropEngine,
    FullBackpropEngine,
    GradientPolicy,
    Journal,
    LossScaling,
    MemoryPolicy,
    Replayer,
    Runner,
    RunRecord,
    RunRequest,
    SequentialNoise,
    SharedBase,
    StreamedFullBackpropEngine,
    Workers,
    WriteBackPolicy,
    ZOEngine,
)
from zo2core.build import RunOptions as EngineOptions
from zo2core.build import request_of
from zo2core.checkpoint import Snapshots
from zo2core.engine import SnapshotReplayer
from zo2core.engine.backprop_engine import TRAINED_COPIES
from zo2core.engine.full_backprop_engine import options_in_memory, trained_bytes
from zo2core.engine.streamed_full_engine import kept_blocks, options_on_disk, read_bytes
from zo2core.io.direct_file import whole_pages
from zo2core.optimizers import OPTIMIZERS, state_bytes
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.types import trained

__all__ = ["read_bytes", "trained_bytes"]


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a run's engine is made of, in addition to the run's options."""

    model: HFBlockModel
    activations: int  # bytes that activations may use
    least_activations: int  # least bytes of activations on a device
    decides: Mapping[str, Any]  # the run's provenance, as JSON values
    execution: Execution
    workers: Workers | None  # processes that work on the same run; None: this process works alone
    shared: SharedBase | None  # the base that the run shares with others; None: it reads its base alone


def open_engine(options: TrainOptions, opening: Opening) -> TrainingEngine:
    """The engine of a run, at the step from which the run continues."""
    model, execution, workers, shared = opening.model, opening.execution, opening.workers, opening.shared
    journal, state, optimization = options.output / JOURNAL, options.state, options.optimization
    spills = state in (TrainedState.ADAPTER, TrainedState.MEMORY) or options.storage.device != "cpu"
    least = opening.least_activations if spills and state is not TrainedState.DISK else None
    given: dict[str, Any] = {
        "memory": memory_policy(options, opening.activations, least, shared),
        "micro_batch_size": options.batching.micro_batch_size,
        "trace": worker_trace(execution.trace, workers),
    }
    if state is not TrainedState.DISK:
        given["device"] = local_device(options.storage.device, workers)
    if state in (TrainedState.JOURNAL, TrainedState.ADAPTER):
        given |= {"journal": journal, "provenance": opening.decides, "workers": workers, "shared": shared}
    if state is TrainedState.JOURNAL:
        return ZOEngine(
            model,
            options.estimator(),
            noise=optimization.generator(model.layouts),
            seed=options.seed,
            write_back=write_back_policy(options),
            perturbation=optimization.perturbation,
            **given,
        )
    if state is TrainedState.ADAPTER:
        name, limit = options.first_order.method, options.first_order.max_grad_norm
        optimizer = None if name is None else OPTIMIZERS[name].of_adapter
        assert optimizer is not None, "other methods were refused with an adapter"
        rates = {"lr": optimization.rate, "weight_decay": optimization.weight_decay, **options.first_order.optimizer_options}
        method = {"name": name, **rates, "max_grad_norm": limit}
        factory, directory = partial(optimizer, **rates), options.output
        return DurableBackpropEngine(
            model, factory, directory=directory, method=method, lr=options.learning_rate(), clip=limit, **given
        )
    given |= {
        "lr": options.learning_rate(),
        "gradients": GradientPolicy(
            clip_value=options.first_order.max_grad_value,
            clip_norm=options.first_order.max_grad_norm,
            loss_scaling=LossScaling() if options.first_order.loss_scaling else None,
        ),
        "run": RunRecord(directory=options.output, journal=journal, provenance=opening.decides),
    }
    update = options.update()
    if state is TrainedState.DISK:
        return StreamedFullBackpropEngine(model, update, commit_every=options.commit_every, **given)
    return FullBackpropEngine(model, update, **given)


def request_of_run(options: TrainOptions, model: HFBlockModel, longest: BatchShape, memory: MemoryPolicy) -> RunRequest:
    """What the plan of a run that has taken no steps depends on, as its engine asks for it.

    Args:
        options: The run's options.
        model: The model.
        longest: Shape of the largest batch.
        memory: Memory that the run may use.
    """
    if options.state is not TrainedState.JOURNAL:
        asked = EngineOptions(trained_copies=TRAINED_COPIES)
        if options.state is TrainedState.DISK:
            asked = options_on_disk(options.update(), model.layouts, options.output)
        elif options.state is TrainedState.MEMORY:
            asked = options_in_memory(options.update(), model.layouts)
        return request_of(model, replace(asked, memory=memory))
    optimization, on_cpu = options.optimization, options.storage.device == "cpu"
    drawn = optimization.generator(model.layouts) or SequentialNoise(model.layouts, "cpu" if on_cpu else "cuda")
    return RunRequest(
        layouts=model.layouts,
        on_disk=laid_out_as_on_disk(model.layouts, model.weights),
        noise=drawn,
        perturbation=optimization.perturbation,
        perturb_in_place=bool(optimization.estimator_of(options.steps).perturb_in_place),
        directions=longest.rows if optimization.per_row and optimization.queries == 1 else optimization.queries,
        memory=memory,
        write_back=write_back_policy(options) if on_cpu else None,
    )


def memory_policy(
    options: TrainOptions, activations: int, least: int | None = None, shared: SharedBase | None = None
) -> MemoryPolicy:
    """The memory that a run may use; a shared base has the limits of its runs."""
    storage = options.storage
    given: Any = {} if shared is not None else {"host": storage.memory, "device": storage.device_memory}
    return MemoryPolicy(**given, activations=activations, least_activations=least)


def write_back_policy(options: TrainOptions) -> WriteBackPolicy:
    """When a zeroth-order run writes blocks to disk."""
    storage = options.storage
    return WriteBackPolicy(
        directory=options.output,
        every=None if storage.write_back_every == "never" else storage.write_back_every,
        snapshot_every=storage.snapshot_every,
        terabytes_per_1000_steps=storage.write_limit_tb,
    )


def replayer(
    options: TrainOptions,
    model: HFBlockModel,
    activations: int,
    workers: Workers | None,
    *,
    journal: Journal | None = None,
    shared: SharedBase | None = None,
) -> Replayer:
    """Open the weights of a step for evaluation. The run's engine, which uses the same model, must be closed.

    Args:
        options: The run's options.
        model: Model that was opened with these options.
        activations: Bytes that activations may use.
        workers: Processes that evaluate the same rows; None: this process works alone.
        journal: The run's journal up to the step; None: the base.
        shared: The base that the run shares with others; None: it reads its base alone.
    """
    return Replayer(
        model,
        journal,
        micro_batch_size=options.batching.micro_batch_size,
        device=local_device(options.storage.device, workers),
        memory=memory_policy(options, activations, shared=shared),
        workers=workers,
        shared=shared,
    )


def snapshot_replayer(
    options: TrainOptions, engine: Any, model: HFBlockModel, activations: int, step: int, shared: SharedBase | None
) -> Runner:
    """Open the parameters of a step's snapshot for evaluation. The run's engine must be closed."""
    return SnapshotReplayer(
        model,
        step,
        parameters_at(engine.snapshots, step),
        micro_batch_size=options.batching.micro_batch_size,
        device=local_device(options.storage.device, None),
        memory=memory_policy(options, min(activations, engine.activation_bytes), shared=shared),
        shared=shared,
    )


def parameters_at(snapshots: Snapshots, step: int) -> Mapping[str, torch.Tensor] | None:
    """The trained parameters after so many steps, by name; None at step 0, where they are those that the run began with.

    Raises:
        CheckpointError: if the step has no snapshot, or a damaged one.
        JournalError: if the journal has lost the step.
    """
    if step == 0:
        return None
    parameters: Mapping[str, torch.Tensor] = snapshots.read(step).state.get("parameters", {})  # refused if incomplete
    return parameters


def snapshot_bytes(model: HFBlockModel, update: BlockUpdate | None) -> int:
    """Largest size of a snapshot: what is trained, without its gradients, and the optimizer's state."""
    if update is None:
        return (TRAINED_COPIES - 1) * sum(spec.nbytes for spec in trained(model.layouts))
    return sum(layout.nbytes for layout in model.layouts) + state_bytes(update, model.layouts)


def written_bytes(layouts: Sequence[BlockLayout], update: BlockUpdate, buckets: int, commit_every: int) -> float:
    """Bytes that a step of a run over blocks that change on disk writes on average.

    Args:
        layouts: Segments in visiting order, with the states that are stored with them.
        update: The optimizer. If it has turns, each segment is written once in an epoch of them.
        buckets: Number of buckets for blocks.
        commit_every: Steps between two commits.
    """
    sizes = [whole_pages(layout.nbytes) for layout in layouts if layout.parameters]
    if update.turn is not None:
        return sum(sizes) / len(sizes) / update.turn
    if commit_every == 1:
        return sum(sizes)
    blocks = [whole_pages(layout.nbytes) for layout in layouts if not layout.resident]
    seldom = sum(sizes) - sum(blocks) + sum(blocks[: kept_blocks(buckets, commit_every)])
    return sum(sizes) - seldom + seldom / commit_every


def stored_layouts(options: TrainOptions, model: HFBlockModel) -> Sequence[BlockLayout]:
    """The segments of a run over blocks that change on disk, with the states that are stored with them."""
    return request_of(model, options_on_disk(options.update(), model.layouts, Path())).on_disk
