"""Goldens of engines, for what no command decides: where weights lie, what a device is given, and
what is kept.

Only ``_zeroth_order``, ``_adapter`` and ``_full`` open an engine. Sources and schedules do not
change a result, so that many of these goldens have the same numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from engines import behind_copies, memory, open_engine
from models import make_batch, save_model, small_config

from goldens.trajectory import Trajectory, exact, journal_of, weights_digest
from zo2adapters import Adapter, Precision, open_checkpoint
from zo2adapters.models.conversion import quantize
from zo2core import (
    BlockUpdate,
    Distribution,
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
from zo2core.optimizers.registry import make_block_update
from zo2core.ranges import OptimizerName

STEPS, RESUMED_AFTER = 4, 2
BATCHES = [make_batch(40, [7, 5, 6, 4], seed=seed) for seed in range(STEPS)]
ROOM = 1 << 28  # bytes for activations, enough to keep everything
WIDE: Any = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Base = Callable[[Path], Path]  # saves a checkpoint in a folder
MEZO = MeZOSGD(lr=1e-2, zo_eps=1e-2, weight_decay=0.1)
QUERIES = MultiQueryRGE(lr=1e-2, zo_eps=1e-2, weight_decay=0.1, q=3)
ROWS = PerRowRGE(lr=1e-2, zo_eps=1e-2, perturb_in_place=False, q=4)
RADEMACHER = PhiloxNoise(Distribution.RADEMACHER)
STREAMED: Mapping[str, Any] = {"buckets": 2, "write_every": 3, "resumed": True}
LOW_RANK: Mapping[str, Any] = {
    "estimator": ROWS,
    "perturbation": LowRankPerturbation(rank=2, period=3),
}
HALVES = Precision(stored=torch.float32, computed=torch.bfloat16)
EIGHTS = Precision(
    stored=torch.float32, computed=torch.bfloat16, transfer_dtype=torch.float8_e4m3fn
)
BACK = Precision(stored=torch.float32, transfer_dtype=torch.bfloat16, transfer_back=True)
FLOAT16 = Precision(stored=torch.float32, computed=torch.float16)
SCALING = LossScaling(initial=2.0**28, backoff=1 / 8, interval=2)
ADAMW = partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1)


def base(
    folder: Path, model_type: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Four blocks; OPT's head is its embedding."""
    return save_model(
        folder / "base", small_config(model_type, num_hidden_layers=4, **changes), dtype
    )


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
    saved: Base = base,
    estimator: ZOEstimator = QUERIES,
    *,
    # blocks in host memory, of those that stream from disk; None: all stay there
    buckets: int | None = None,
    # blocks that stay on a device with memory of its own; None: the device computes in host memory
    kept: int | None = None,
    # "auto" writes factors of low-rank directions; None writes nothing
    write_every: int | Literal["auto"] | None = None,
    adapter: Callable[[], Adapter] | None = None,  # None: the base's weights are trained
    precision: Precision | str = "exact",
    resumed: bool = False,  # whether the engine is closed in the middle and another one goes on
    noise: NoiseGenerator | None = RADEMACHER,
    perturbation: LowRankPerturbation | None = None,
    **options: Any,
) -> Trajectory:
    method = ZerothOrder(estimator, noise=noise, perturbation=perturbation)
    path, journal = saved(folder), folder / "journal.jsonl"
    write_back = (
        None
        if write_every is None
        else WriteBackPolicy(directory=folder / "scratch", every=write_every)
    )
    made: Trajectory = {}
    for batches in (BATCHES[:RESUMED_AFTER], BATCHES[RESUMED_AFTER:]) if resumed else (BATCHES,):
        model = open_checkpoint(
            path, precision=precision, adapter=None if adapter is None else adapter()
        )
        options |= {
            "memory": memory(buckets, kept=kept, budget=1 << 40),
            "write_back": write_back,
            "journal": journal,
        }
        with (
            device_of(kept) as device,
            open_engine(model, method, device=device, **options) as engine,
        ):
            made = steps_of(engine, batches)
    return made | journal_of(journal)


def _lora() -> Adapter:
    from peft import LoraConfig

    return Adapter(
        config=LoraConfig(
            r=3, lora_alpha=16, target_modules=["q_proj", "up_proj"], init_lora_weights=False
        ),
        seed=1,
    )


def _vera() -> Adapter:
    from peft import VeraConfig

    config = VeraConfig(r=5, target_modules=["q_proj", "up_proj"], init_weights=False)
    return Adapter(config=config, seed=1)


def _adapter(
    folder: Path,
    saved: Base = base,
    *,
    adapter: Callable[[], Adapter] = _lora,
    buckets: int | None = None,
    kept: int | None = None,
    # bytes for what is kept between forward and backward; with 1 each block is run anew
    room: int = ROOM,
    accumulated: bool = False,  # whether each step takes two batches
    **options: Any,
) -> Trajectory:
    """Train an adapter by AdamW."""
    model, make = (
        open_checkpoint(saved(folder), adapter=adapter()),
        partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    )
    steps = [[batch, make_batch(40, [9], seed=7)] for batch in BATCHES] if accumulated else BATCHES
    options |= {"memory": memory(buckets, room, kept=kept, budget=1 << 40)}
    with (
        device_of(kept) as device,
        open_engine(model, FirstOrder(make, clip=0.5), device=device, **options) as engine,
    ):
        return steps_of(engine, steps)


def _decaying(step: int) -> float:
    return 1e-2 / (step + 1)


def _full(
    folder: Path,
    update: BlockUpdate | OptimizerName,
    *,
    # from two buckets; each step commits a generation; another engine goes on in the middle
    streamed: bool = False,
    room: int = ROOM,
    model_type: str = "opt",
    precision: Precision | str = "exact",
    scaling: LossScaling | None = None,  # of the loss; None clips the gradients' norm instead
    **options: Any,
) -> Trajectory:
    """Train all parameters by gradients."""
    path, journal = base(folder, model_type), folder / "journal.jsonl"
    made: Trajectory = {}
    for batches in (BATCHES[:RESUMED_AFTER], BATCHES[RESUMED_AFTER:]) if streamed else (BATCHES,):
        fresh = (
            make_block_update(update, weight_decay=0.1, switch_every=2)
            if isinstance(update, str)
            else update
        )
        method = FirstOrder(
            fresh, lr=_decaying, clip=0.5 if scaling is None else None, scaling=scaling
        )
        options |= {
            "memory": memory(2 if streamed else None, room, budget=1 << 40),
            "commit_every": 1 if streamed else None,
        }
        model = open_checkpoint(path, precision=precision)
        with open_engine(model, method, run=folder, **options) as engine:
            made = steps_of(engine, batches)
    return made | journal_of(journal)


_HALF = partial(base, dtype=torch.bfloat16)
_OPT = partial(base, model_type="opt")
_INT8, _NF4 = (partial(quantized, method=method) for method in ("int8", "nf4"))
_EXACT = {
    f"exact mezo, {model_type}, {str(dtype).removeprefix('torch.')}, {place}": partial(
        _zeroth_order,
        saved=partial(base, model_type=model_type, dtype=dtype),
        estimator=MEZO,
        noise=None,
        **options,
    )
    for model_type in ("opt", "llama")
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for place, options in (("in memory", {}), ("streamed, written back, resumed", STREAMED))
}
_ZEROTH_ORDER: Mapping[str, Mapping[str, Any]] = {
    "3 queries, MeZO's noise, streamed": {**STREAMED, "noise": None},
    "3 queries, rademacher, on a device": {"buckets": 2, "kept": 1, "write_every": 1},
    "3 queries, rademacher, micro-batches": {"micro_batch_size": 3},
    "3 queries, mixed, in memory": {"saved": _HALF, "precision": HALVES},
    "3 queries, mixed, streamed": {"saved": _HALF, "precision": HALVES, **STREAMED},
    "3 queries, transferred in 8 bits, replayed on the host": {
        "precision": EIGHTS,
        "buckets": 3,
        "kept": 1,
        "write_every": 1,
    },
    "3 queries, transferred in 16 bits and back": {
        "precision": BACK,
        "buckets": 3,
        "kept": 1,
        "write_every": 1,
    },
    "a direction per row, dense, opt": {"saved": _OPT, "estimator": ROWS},
    "a direction per row, low-rank, opt, streamed": {
        "saved": _OPT,
        **LOW_RANK,
        **STREAMED,
        "write_every": "auto",
    },
    "low-rank, wide, factors of past periods beside the activations": {
        "saved": partial(base, **WIDE),
        "estimator": MultiQueryRGE(lr=1e-2, zo_eps=1e-2, perturb_in_place=False, q=3),
        "perturbation": LowRankPerturbation(rank=1, period=1, stack=4),
    },
    "low-rank, bfloat16, on a device": {"saved": _HALF, **LOW_RANK, "kept": 1},
    "low-rank, nf4, streamed": {"saved": _NF4, **LOW_RANK, "buckets": 2},
    "mezo, adapter on int8, streamed": {"saved": _INT8, "adapter": _lora, "buckets": 2},
    "mezo, vera, bfloat16, streamed": {"saved": _HALF, "adapter": _vera, "buckets": 2},
}
_ADAPTER: Mapping[str, Mapping[str, Any]] = {
    "adapter adamw, in memory, graphs kept": {},
    "adapter adamw, in memory, run anew": {"room": 1},
    "adapter adamw, streamed, graphs kept": {"buckets": 2},
    "adapter adamw, streamed, run anew, accumulated": {
        "buckets": 2,
        "room": 1,
        "accumulated": True,
    },
    "adapter adamw, bfloat16, micro-batches, on a device": {
        "saved": _HALF,
        "buckets": 2,
        "kept": 1,
        "micro_batch_size": 2,
    },
    "adapter adamw, int8, streamed": {"saved": _INT8, "buckets": 2},
    "vera adamw, bfloat16, streamed": {"saved": _HALF, "adapter": _vera, "buckets": 2},
}
_FULL: Mapping[str, Mapping[str, Any]] = {
    "full adamw, in memory, graphs kept": {"update": TorchOptimizer(ADAMW)},
    "full adamw, in memory, run anew, micro-batches": {
        "update": TorchOptimizer(ADAMW),
        "room": 1,
        "micro_batch_size": 2,
    },
    "full fused adamw, float16, loss scaled": {
        "update": TorchOptimizer(partial(ADAMW, fused=True)),
        "precision": FLOAT16,
        "scaling": SCALING,
    },
    "full adamw, streamed generations, resumed": {"update": "adamw", "streamed": True},
    "lomo, streamed generations, llama, resumed": {
        "update": "lomo",
        "streamed": True,
        "model_type": "llama",
    },
    "adalomo, streamed generations, resumed": {"update": "adalomo", "streamed": True},
    "badam, streamed generations, llama, resumed": {
        "update": "badam",
        "streamed": True,
        "model_type": "llama",
    },
}
ENGINES: Mapping[str, Callable[..., Trajectory]] = {
    **_EXACT,
    **{name: partial(_zeroth_order, **options) for name, options in _ZEROTH_ORDER.items()},
    **{name: partial(_adapter, **options) for name, options in _ADAPTER.items()},
    **{name: partial(_full, **options) for name, options in _FULL.items()},
}
