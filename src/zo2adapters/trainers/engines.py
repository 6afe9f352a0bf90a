"""The engine of a run, and what its plan asks for: the one module here that knows the engines of zo2core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from zo2adapters.models.checkpoint import resolve_directory
from zo2adapters.models.footprint import activation_bytes, expected_held_bytes, forward_bytes, least_activation_bytes
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_model import PeftBlockModel
from zo2adapters.tasks.generation import plan_generation
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import Execution, TrainedState, TrainOptions
from zo2adapters.trainers.progress_bar import progress_bar
from zo2adapters.trainers.run_directory import JOURNAL
from zo2adapters.trainers.run_inputs import BatchShape
from zo2adapters.trainers.worker_options import local_device, worker_trace
from zo2core import (
    AtSnapshot,
    BlockLayout,
    BlockUpdate,
    Engine,
    FirstOrder,
    Journal,
    LossScaling,
    MemoryPolicy,
    SegmentKind,
    SequentialNoise,
    SharedBase,
    Workers,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.build import RunOptions as EngineOptions
from zo2core.build import request_of
from zo2core.checkpoint.snapshots import Snapshots
from zo2core.errors import CheckpointError, OptionError
from zo2core.io.direct_file import whole_pages
from zo2core.kernels.encoding import decoded
from zo2core.methods.first_order import TRAINED_COPIES, trained_bytes
from zo2core.optimizers import OPTIMIZERS, state_bytes
from zo2core.planning.memory import RunRequest, free_memory
from zo2core.planning.speeds import kept_blocks
from zo2core.sources.segment_store import laid_out_as_on_disk, verify_base
from zo2core.sweep.gradient_visitor import gradient_bytes
from zo2core.types import divide_tied, packed_bytes, trained

_CHUNK = 1 << 20  # elements read at once


def verify_with_progress(model: HFBlockModel, journal: Journal, *, quiet: bool = False) -> Mapping[str, str]:
    """Call ``verify_base`` with a progress bar."""
    total = sum(spec.nbytes for layout in model.layouts for spec in layout.parameters)
    with progress_bar(total=total, unit="B", desc="base", quiet=quiet) as bar:
        return verify_base(model, journal, bar.update)


def require_finite_base(model: HFBlockModel, where: object) -> None:
    """Refuse a checkpoint with a weight that is not finite. Called when a loss is not finite, to find the cause."""
    for layout in model.layouts:
        for spec in layout.parameters:
            length = _CHUNK if spec.encoding is None else max(spec.stored_numel, 1)  # encoded parameters are read whole
            for start in range(0, spec.stored_numel, length):
                values = torch.empty(min(length, spec.stored_numel - start), dtype=spec.stored_dtype)
                model.weights.read_into(spec.name, values, start)
                values = values if spec.encoding is None else decoded(spec, values)
                non_finite = (~values.isfinite()).nonzero()
                if len(non_finite):
                    index = int(non_finite[0])
                    raise CheckpointError(
                        f"{where}: {spec.name}",
                        found=f"{values[index].item()} at element {start + index}",
                        expected="finite weights in the checkpoint",
                        remedy="download the checkpoint again, or choose a dtype with a larger range",
                    )


# Share of the free memory that generation may take if it needs more; the other rows then wait.
_GENERATION_SHARE = 0.5


class StepMemory(NamedTuple):
    """Memory for the activations and logits of a step."""

    nbytes: int  # bytes to reserve
    least: int  # least bytes that a device needs


def step_memory(
    model: HFBlockModel,
    longest: BatchShape,
    optimization: Optimization,
    micro_rows: int | None,
    *,
    new_tokens: int | None = None,
) -> StepMemory:
    """Expected memory of a zeroth-order step."""
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
    if new_tokens is not None:
        shape = {"evaluations": streams, "rows": rows, "prompt_tokens": tokens, "new_tokens": new_tokens}
        needed, fewest = (plan_generation(model.config, **shape, allowed=most).nbytes for most in (None, 0))
        nbytes = adapter + min(needed, max(fewest, round(_GENERATION_SHARE * free_memory())))
        least = max(least, nbytes)  # keys and values stay on a device
    if optimization.rank is None:
        return StepMemory(nbytes, least)
    columns = max(  # bytes of one column of the factors of a segment's matrices, which are in memory twice
        sum(spec.shape[0] * spec.dtype.itemsize for spec in layout.used if len(spec.shape) == 2 and not spec.frozen)
        for layout in model.layouts
    )
    return StepMemory(nbytes + 2 * columns * optimization.rank * stacked * -(-rows // loss_rows), least)


def reserved_bytes(
    model: HFBlockModel, rows: int, tokens: int, micro_rows: int | None, update: BlockUpdate | None = None
) -> StepMemory:
    """Memory of a first-order step: the inputs of blocks, one segment's graph, and what adapter or tied weights take."""
    micro_rows = rows if micro_rows is None else min(rows, micro_rows)
    blocks = sum(layout.kind is SegmentKind.BLOCK for layout in model.layouts)
    if isinstance(model, PeftBlockModel):
        beside = model.adapter_bytes(micro_rows, 1)
    else:  # gradients of tied weights, one for each micro-batch, wait for the last segment that uses the weights
        tied, _ = divide_tied(model.layouts)
        beside = -(-rows // micro_rows) * packed_bytes(tied)
        if update is not None and update.turn is not None:  # in the turn of another segment they have no gradient
            most, first = (sum(trained_bytes(update, part)) for part in (model.layouts, model.layouts[:1]))
            beside = max(beside + first - most, 0)
    held = expected_held_bytes(model.config, rows, tokens)
    running = forward_bytes(model.config, micro_rows, tokens, loss_chunk=model.loss_chunk)
    return StepMemory(gradient_bytes(held, running, blocks) + beside, gradient_bytes(held, running, 0) + beside)


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


def open_engine(options: TrainOptions, opening: Opening) -> Engine:
    """The engine of a run, at the step from which the run continues."""
    model, execution, state, workers = opening.model, opening.execution, options.state, opening.workers
    is_first_order = state is not TrainedState.JOURNAL
    spills = state in (TrainedState.ADAPTER, TrainedState.MEMORY) or options.storage.device != "cpu"
    least = opening.least_activations if spills and state is not TrainedState.DISK else None
    return Engine(
        model,
        method_of_run(options, model),
        journal=options.output / JOURNAL,
        run=options.output if is_first_order else None,
        provenance=opening.decides,
        device=local_device(options.storage.device, workers),
        memory=memory_policy(options, opening.activations, least, opening.shared),
        write_back=None if is_first_order else write_back_policy(options),
        commit_every=options.commit_every if state is TrainedState.DISK else None,
        micro_batch_size=options.batching.micro_batch_size,
        trace=worker_trace(execution.trace, workers),
        workers=workers,
        shared=opening.shared,
    )


def method_of_run(options: TrainOptions, model: HFBlockModel) -> ZerothOrder | FirstOrder:
    """How the steps of a run are made."""
    optimization, asked = options.optimization, options.first_order
    if options.state is TrainedState.JOURNAL:
        noise, perturbation = optimization.generator(model.layouts), optimization.perturbation
        return ZerothOrder(options.estimator(), noise=noise, perturbation=perturbation, seed=options.seed)
    if options.state is TrainedState.ADAPTER:
        optimizer = None if asked.method is None else OPTIMIZERS[asked.method].of_adapter
        assert optimizer is not None, "other methods were refused with an adapter"
        rates = {"lr": optimization.rate, "weight_decay": optimization.weight_decay, **asked.optimizer_options}
        recorded = {"name": asked.method, **rates, "max_grad_norm": asked.max_grad_norm}
        factory = partial(optimizer, **rates)
        return FirstOrder(factory, lr=options.learning_rate(), clip=asked.max_grad_norm, options=recorded)
    return FirstOrder(
        options.update(),
        lr=options.learning_rate(),
        clip=asked.max_grad_norm,
        clip_value=asked.max_grad_value,
        scaling=LossScaling() if asked.loss_scaling else None,
    )


def request_of_run(options: TrainOptions, model: HFBlockModel, longest: BatchShape, memory: MemoryPolicy) -> RunRequest:
    """What the plan of a run that has taken no steps depends on, as its engine asks for it."""
    if options.state is not TrainedState.JOURNAL:
        commits = options.commit_every if options.state is TrainedState.DISK else None
        asked = EngineOptions(memory=memory, run=options.output, commit_every=commits)
        return request_of(model, method_of_run(options, model), asked)
    optimization, on_cpu = options.optimization, options.storage.device == "cpu"
    return RunRequest(
        layouts=model.layouts,
        on_disk=laid_out_as_on_disk(model.layouts, model.weights),
        noise=optimization.generator(model.layouts) or SequentialNoise(model.layouts, "cpu" if on_cpu else "cuda"),
        perturbation=optimization.perturbation,
        takes_steps=True,
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
    at: AtSnapshot | None = None,
    shared: SharedBase | None = None,
) -> Engine:
    """Open the weights of a step for evaluation. The run's engine, which uses the same model, must be closed."""
    return Engine(
        model,
        at,
        journal=journal,
        micro_batch_size=options.batching.micro_batch_size,
        device=local_device(options.storage.device, workers),
        memory=memory_policy(options, activations, shared=shared),
        workers=workers,
        shared=shared,
    )


def parameters_at(snapshots: Snapshots, step: int) -> Mapping[str, torch.Tensor] | None:
    """The trained parameters after so many steps, by name; None at step 0, where they are those that the run began with."""
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
    """Bytes that a step of a run over blocks that change on disk writes on average."""
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
    asked = EngineOptions(run=options.output, commit_every=options.commit_every)
    return request_of(model, method_of_run(options, model), asked).on_disk


def can_share(options: TrainOptions) -> bool:
    """Whether a run only reads its base: one with low-rank perturbations, or of an adapter by any method."""
    reads = options.optimization.rank is not None or options.model_options.trains_adapter
    return reads and not options.takes_labels


def require_shareable(options: TrainOptions) -> None:
    """Refuse a run that changes its base, or that has a new head."""
    if not can_share(options):
        found = f"--head {options.model_options.head}" if options.takes_labels else "a run that trains all weights"
        raise OptionError(
            "runs",
            found=found,
            expected="runs of a causal language model that only read its weights",
            remedy="pass --rank 8 or --lora-rank 8, or train it alone",
        )


def shared_base_model(options: TrainOptions) -> HFBlockModel:
    """Open the model of a base, without an adapter."""
    base = replace(
        options.model_options,
        precision=options.precision_asked(),
        adapter=None,
        adapter_frozen=(),
        lora_rank=None,
        lora_targets=(),
        lora_alpha=None,
    )
    return base.opened(resolve_directory(options.model), seed=options.seed)


def open_shared_base(options: TrainOptions) -> SharedBase:
    """Open the base of runs with these options. See ``shared_base_model``."""
    require_shareable(options)
    storage = options.storage
    return SharedBase(
        shared_base_model(options),
        device=storage.device,
        memory=MemoryPolicy(host=storage.memory, device=storage.device_memory),
    )
