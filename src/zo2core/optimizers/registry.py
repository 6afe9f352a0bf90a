"""The names by which users choose first-order optimizers, with what depends on the name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from zo2core.names import OptimizerName
from zo2core.optimizers.badam import BAdam
from zo2core.optimizers.lomo import LOMO, AdaLOMO
from zo2core.optimizers.torch_optimizer import TorchOptimizer
from zo2core.protocols import BlockUpdate

SWITCH_EVERY = 50  # steps for which badam trains a block, as its authors' program does by default


class _Arguments(NamedTuple):
    """What an optimizer of all parameters is made from."""

    rates: Mapping[str, Any]  # weight decay and further options, under the names that torch.optim has
    switch_every: int
    seed: int
    options: Mapping[str, Any]  # the name with the rates, for the journal


class OptimizerEntry(NamedTuple):
    """An optimizer of the registry."""

    title: str
    learning_rates: Sequence[float]  # to try for all parameters of a pre-trained model, ascending
    make: Callable[[_Arguments], BlockUpdate]  # for all parameters
    options: tuple[str, ...] = ()  # further options, under the names that torch.optim has
    of_adapter: Callable[..., torch.optim.Optimizer] | None = None  # for the parameters of an adapter; None: not supported


def _adamw(rates: Mapping[str, Any]) -> Callable[..., torch.optim.Optimizer]:
    return partial(torch.optim.AdamW, **rates, fused=True)  # torch's kernel that passes once over memory


def _sgd(given: _Arguments) -> BlockUpdate:
    return TorchOptimizer(partial(torch.optim.SGD, **given.rates), options=given.options)


def _badam(given: _Arguments) -> BlockUpdate:
    return BAdam(_adamw(given.rates), every=given.switch_every, seed=given.seed, options=given.options)


_ADAM_RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
_SGD_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)

OPTIMIZERS: dict[OptimizerName, OptimizerEntry] = {
    "adamw": OptimizerEntry(
        "AdamW",
        _ADAM_RATES,
        lambda given: TorchOptimizer(_adamw(given.rates), options=given.options),
        options=("betas", "eps"),
        of_adapter=torch.optim.AdamW,
    ),
    "sgd": OptimizerEntry("SGD", _SGD_RATES, _sgd, options=("momentum", "nesterov"), of_adapter=torch.optim.SGD),
    "lomo": OptimizerEntry("LOMO", _SGD_RATES, lambda given: LOMO(**given.rates)),
    "adalomo": OptimizerEntry("AdaLOMO", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2), lambda given: AdaLOMO(**given.rates)),
    "badam": OptimizerEntry("BAdam", _ADAM_RATES, _badam),
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
    every = SWITCH_EVERY if switch_every is None else switch_every
    return OPTIMIZERS[name].make(_Arguments(rates, every, seed, {"name": name, **rates}))
