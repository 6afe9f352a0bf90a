"""The names by which users choose optimizers, with what depends on the name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from zo2core.optimizers.lomo import LOMO, AdaLOMO
from zo2core.optimizers.torch_optimizer import BAdam, TorchOptimizer
from zo2core.protocols import BlockUpdate
from zo2core.ranges import OptimizerName

SWITCH_EVERY = 50  # steps for which badam trains a block, as its authors' program does by default


class OptimizerEntry(NamedTuple):
    """An optimizer of the registry."""

    title: str
    learning_rates: Sequence[float]  # to try for all parameters of a pre-trained model, ascending
    options: tuple[str, ...] = ()  # further options, under the names that torch.optim has
    # for the parameters of an adapter; None: not supported
    of_adapter: Callable[..., torch.optim.Optimizer] | None = None


_ADAM_RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
_SGD_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)

OPTIMIZERS: dict[OptimizerName, OptimizerEntry] = {
    "adamw": OptimizerEntry(
        "AdamW", _ADAM_RATES, options=("betas", "eps"), of_adapter=torch.optim.AdamW
    ),
    "sgd": OptimizerEntry(
        "SGD", _SGD_RATES, options=("momentum", "nesterov"), of_adapter=torch.optim.SGD
    ),
    "lomo": OptimizerEntry("LOMO", _SGD_RATES),
    "adalomo": OptimizerEntry("AdaLOMO", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)),
    "badam": OptimizerEntry("BAdam", _ADAM_RATES),
}


def make_block_update(
    name: OptimizerName,
    *,
    weight_decay: float,
    switch_every: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> BlockUpdate:
    """The optimizer of all parameters."""
    rates = {"weight_decay": weight_decay, **options}
    recorded = {"name": name, **rates}
    # torch's kernel that passes once over memory
    adamw = partial(torch.optim.AdamW, **rates, fused=True)
    match name:
        case "adamw":
            return TorchOptimizer(adamw, options=recorded)
        case "sgd":
            return TorchOptimizer(partial(torch.optim.SGD, **rates), options=recorded)
        case "lomo":
            return LOMO(**rates)
        case "adalomo":
            return AdaLOMO(**rates)
        case "badam":
            every = SWITCH_EVERY if switch_every is None else switch_every
            return BAdam(adamw, every=every, seed=seed, options=recorded)
