"""Goldens of engines, for what no command decides: where weights lie, what a device is given, and what is kept.

Only ``_zeroth_order``, ``_adapter`` and ``_full`` open an engine. Sources and schedules do not change a result, so that many
of these goldens have the same numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from engines import behind_copies, memory
from models import make_batch, save_model, small_config

from goldens.trajectory import Trajectory, exact, journal_of, weights_digest
from zo2adapters import Adapter, Precision, open_checkpoint
from zo2adapters.models.conversion import quantize
from zo2core import (
    BlockUpdate,
    Distribution,
    Engine,
    FirstOrder,
    LossScaling,
    LowRankPerturbation,
    MeZOSGD,
    MultiQueryRGE,
    NoiseGenerator,
    PerRowRGE,
    PhiloxNoise,
    TorchOptimizer,
    WriteBackPolicy,
    ZerothOrder,
    ZOEstimator,
)
from zo2core.optimizers import make_block_update
from zo2core.ranges import OptimizerName

STEPS, RESUMED_AFTER = 4, 2
BATCHES = [make_batch(40, [7, 5, 6, 4], seed=seed) for seed in range(STEPS)]
ROOM = 1 << 28  # bytes for activations, enough to keep everything
WIDE: Any = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
Base = Callable[[Path], Path]  # saves a checkpoint in a folder


def base(folder: Path, model_type: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Four blocks; OPT's head is its embedding."""
    return save_model(folder / "base", small_config(model_type, num_hidden_layers=4, **changes), dtype)


def quantized(folder: Path, method: Literal["int8", "nf4"]) -> Path:
    """A base whose matrices are stored in fewer bits."""
    quantize(base(folder, dtype=torch.bfloat16, **WIDE), folder / method, method)
    return folder / method


def steps_of(engine: Any, batches: Sequence[Any]) -> Trajectory:
    """Take steps, evaluate, and look at the weights."""
    results = [engine.step(batch) for batch in batches]
    made: Trajectory = {"losses": exact([result.loss for result in results])}
    if results[0].grad_norm is not None:
        made["grad_norms"] = exact([result.grad_norm for result in results])
    made["evaluation"] = exact(engine.evaluate(BATCHES).losses)
    made["weights"] = weights_digest(engine.parameters_now())
    return made


def device_of(kept: int | None) -> AbstractContextManager[Any]:
    """The CPU, or a device that copies blocks to memory of its own and works behind the host."""
    return nullcontext("cpu") if kept is None else behind_copies()


def _zeroth_order(
    folder: Path,
    saved: Base,
    estimator: ZOEstimator,
    *,
    buckets: int | None = None,
    kept: int | None = None,
    write_every: int | Literal["auto"] | None = None,
    adapter: Callable[[], Adapter] | None = None,
    precision: Precision | str = "exact",
    resumed: bool = False,
    noise: NoiseGenerator | None = None,
    perturbation: LowRankPerturbation | None = None,
    **options: Any,
) -> Trajectory:
    """Take zeroth-order steps.

    Args:
        folder: Empty directory.
        saved: Saves the base.
        estimator: Of the steps.
        buckets: Blocks in host memory, of those that stream from disk; None: all stay there.
        kept: Blocks that stay on a device with memory of its own; None: the device computes in host memory.
        write_every: Steps between two writes of a block; "auto" writes factors of low-rank directions; None writes nothing.
        adapter: Makes the adapter to train; None: the base's weights are trained.
        precision: Of the model.
        resumed: Whether the engine is closed in the middle and another one goes on.
        noise: Of the method.
        perturbation: Of the method.
        options: Further options of the engine.
    """
    method = ZerothOrder(estimator, noise=noise, perturbation=perturbation)
    path, journal = saved(folder), folder / "journal.jsonl"
    write_back = None if write_every is None else WriteBackPolicy(directory=folder / "scratch", every=write_every)
    made: Trajectory = {}
    for batches in (BATCHES[:RESUMED_AFTER], BATCHES[RESUMED_AFTER:]) if resumed else (BATCHES,):
        model = open_checkpoint(path, precision=precision, adapter=None if adapter is None else adapter())
        options |= {"memory": memory(buckets, kept=kept, budget=1 << 40), "write_back": write_back, "journal": journal}
        with device_of(kept) as device, Engine(model, method, device=device, **options) as engine:
            made = steps_of(engine, batches)
    return made | journal_of(journal)


def _lora() -> Adapter:
    from peft import LoraConfig

    return Adapter(
        config=LoraConfig(r=3, lora_alpha=16, target_modules=["q_proj", "up_proj"], init_lora_weights=False), seed=1
    )


def _adapter(
    folder: Path,
    saved: Base,
    *,
    buckets: int | None = None,
    kept: int | None = None,
    room: int = ROOM,
    accumulated: bool = False,
    **options: Any,
) -> Trajectory:
    """Train a LoRA adapter by AdamW.

    Args:
        folder: Empty directory.
        saved: Saves the base.
        buckets: As above.
        kept: As above.
        room: Bytes for what is kept between forward and backward; with 1 each block is run anew.
        accumulated: Whether each step takes two batches.
        options: Further options of the engine.
    """
    model, make = open_checkpoint(saved(folder), adapter=_lora()), partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    steps = [[batch, make_batch(40, [9], seed=7)] for batch in BATCHES] if accumulated else BATCHES
    options |= {"memory": memory(buckets, room, kept=kept, budget=1 << 40)}
    with device_of(kept) as device, Engine(model, FirstOrder(make, clip=0.5), device=device, **options) as engine:
        return steps_of(engine, steps)


def _decaying(step: int) -> float:
    return 1e-2 / (step + 1)


def _full(
    folder: Path,
    update: BlockUpdate | OptimizerName,
    *,
    streamed: bool = False,
    room: int = ROOM,
    dtype: torch.dtype = torch.float32,
    model_type: str = "opt",
    precision: Precision | str = "exact",
    scaling: LossScaling | None = None,
    **options: Any,
) -> Trajectory:
    """Train all parameters by gradients.

    Args:
        folder: Empty directory.
        update: The optimizer, or its name.
        streamed: Whether blocks stream from two buckets, and each step commits a generation; the engine is then closed in
            the middle, and another one goes on.
        room: Bytes for what is kept between forward and backward; with 1 each block is run anew.
        dtype: The base's.
        model_type: The base's.
        precision: Of the model.
        scaling: Of the loss; None clips the gradients' norm instead.
        options: Further options of the engine.
    """
    path, journal = base(folder, model_type, dtype), folder / "journal.jsonl"
    made: Trajectory = {}
    for batches in (BATCHES[:RESUMED_AFTER], BATCHES[RESUMED_AFTER:]) if streamed else (BATCHES,):
        fresh = make_block_update(update, weight_decay=0.1, switch_every=2) if isinstance(update, str) else update
        method = FirstOrder(fresh, lr=_decaying, clip=0.5 if scaling is None else None, scaling=scaling)
        options |= {"memory": memory(2 if streamed else None, room, budget=1 << 40), "commit_every": 1 if streamed else None}
        model = open_checkpoint(path, precision=precision)
        with Engine(model, method, run=folder, **options) as engine:
            made = steps_of(engine, batches)
    return made | journal_of(journal)


MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-2, weight_decay=0.1)
QUERIES = MultiQueryRGE(lr=1e-2, zo_eps=1e-2, weight_decay=0.1, q=3)
ROWS = PerRowRGE(lr=1e-2, zo_eps=1e-2, perturb_in_place=False, q=4)
STREAMED: Mapping[str, Any] = {"buckets": 2, "write_every": 3, "resumed": True}
LOW_RANK = LowRankPerturbation(rank=2, period=3)
COUNTED: Mapping[str, Any] = {"noise": PhiloxNoise(Distribution.RADEMACHER)}
HALVES = Precision(stored=torch.float32, computed=torch.bfloat16)
EIGHTS = Precision(stored=torch.float32, computed=torch.bfloat16, transfer_dtype=torch.float8_e4m3fn)
BACK = Precision(stored=torch.float32, transfer_dtype=torch.bfloat16, transfer_back=True)
FLOAT16 = Precision(stored=torch.float32, computed=torch.float16)
PLAIN = partial(base)
ADAMW = partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1)

_EXACT = {
    f"exact mezo, {model_type}, {str(dtype).removeprefix('torch.')}, {place}": partial(
        _zeroth_order, saved=partial(base, model_type=model_type, dtype=dtype), estimator=MEZO, **options
    )
    for model_type in ("opt", "llama")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for place, options in (("in memory", {}), ("streamed, written back, resumed", STREAMED))
}
_ZEROTH_ORDER: Mapping[str, Callable[..., Trajectory]] = {
    "3 queries, MeZO's noise, streamed": partial(_zeroth_order, saved=PLAIN, estimator=QUERIES, **STREAMED),
    "3 queries, rademacher, on a device": partial(
        _zeroth_order, saved=PLAIN, estimator=QUERIES, buckets=2, kept=1, write_every=1, **COUNTED
    ),
    "3 queries, rademacher, micro-batches": partial(
        _zeroth_order, saved=PLAIN, estimator=QUERIES, micro_batch_size=3, **COUNTED
    ),
    "3 queries, mixed, in memory": partial(
        _zeroth_order, saved=partial(base, dtype=torch.bfloat16), estimator=QUERIES, precision=HALVES, **COUNTED
    ),
    "3 queries, mixed, streamed": partial(
        _zeroth_order, saved=partial(base, dtype=torch.bfloat16), estimator=QUERIES, precision=HALVES, **STREAMED, **COUNTED
    ),
    "3 queries, transferred in 8 bits, replayed on the host": partial(
        _zeroth_order, saved=PLAIN, estimator=QUERIES, precision=EIGHTS, buckets=3, kept=1, write_every=1, **COUNTED
    ),
    "3 queries, transferred in 16 bits and back": partial(
        _zeroth_order, saved=PLAIN, estimator=QUERIES, precision=BACK, buckets=3, kept=1, write_every=1, **COUNTED
    ),
    "a direction per row, dense, opt": partial(
        _zeroth_order, saved=partial(base, model_type="opt"), estimator=ROWS, **COUNTED
    ),
    "a direction per row, low-rank, opt, streamed": partial(
        _zeroth_order,
        saved=partial(base, model_type="opt"),
        estimator=ROWS,
        perturbation=LOW_RANK,
        buckets=2,
        write_every="auto",
        resumed=True,
        **COUNTED,
    ),
    "low-rank, wide, factors of past periods beside the activations": partial(
        _zeroth_order,
        saved=partial(base, **WIDE),
        estimator=MultiQueryRGE(lr=1e-2, zo_eps=1e-2, perturb_in_place=False, q=3),
        perturbation=LowRankPerturbation(rank=1, period=1, stack=4),
        **COUNTED,
    ),
    "low-rank, bfloat16, on a device": partial(
        _zeroth_order, saved=partial(base, dtype=torch.bfloat16), estimator=ROWS, perturbation=LOW_RANK, kept=1, **COUNTED
    ),
    "low-rank, nf4, streamed": partial(
        _zeroth_order, saved=partial(quantized, method="nf4"), estimator=ROWS, perturbation=LOW_RANK, buckets=2, **COUNTED
    ),
    "mezo, adapter on int8, streamed": partial(
        _zeroth_order, saved=partial(quantized, method="int8"), estimator=QUERIES, adapter=_lora, buckets=2, **COUNTED
    ),
}
_FIRST_ORDER: Mapping[str, Callable[..., Trajectory]] = {
    "adapter adamw, in memory, graphs kept": partial(_adapter, saved=PLAIN),
    "adapter adamw, in memory, run anew": partial(_adapter, saved=PLAIN, room=1),
    "adapter adamw, streamed, graphs kept": partial(_adapter, saved=PLAIN, buckets=2),
    "adapter adamw, streamed, run anew, accumulated": partial(_adapter, saved=PLAIN, buckets=2, room=1, accumulated=True),
    "adapter adamw, bfloat16, micro-batches, on a device": partial(
        _adapter, saved=partial(base, dtype=torch.bfloat16), buckets=2, kept=1, micro_batch_size=2
    ),
    "adapter adamw, int8, streamed": partial(_adapter, saved=partial(quantized, method="int8"), buckets=2),
    "full adamw, in memory, graphs kept": partial(_full, update=TorchOptimizer(ADAMW)),
    "full adamw, in memory, run anew, micro-batches": partial(
        _full, update=TorchOptimizer(ADAMW), room=1, micro_batch_size=2
    ),
    "full fused adamw, float16, loss scaled": partial(
        _full,
        update=TorchOptimizer(partial(ADAMW, fused=True)),
        precision=FLOAT16,
        scaling=LossScaling(initial=2.0**28, backoff=1 / 8, interval=2),
    ),
    "full adamw, streamed generations, resumed": partial(_full, update="adamw", streamed=True),
    "lomo, streamed generations, llama, resumed": partial(_full, update="lomo", streamed=True, model_type="llama"),
    "adalomo, streamed generations, resumed": partial(_full, update="adalomo", streamed=True),
    "badam, streamed generations, llama, resumed": partial(_full, update="badam", streamed=True, model_type="llama"),
}
ENGINES: Mapping[str, Callable[..., Trajectory]] = {**_EXACT, **_ZEROTH_ORDER, **_FIRST_ORDER}
