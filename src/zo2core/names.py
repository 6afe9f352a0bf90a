"""Names by which users choose estimators and optimizers, without what they stand for."""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias

OptimizerName: TypeAlias = Literal["adamw", "sgd", "lomo", "adalomo", "badam"]
OF_ADAPTERS: tuple[OptimizerName, ...] = ("adamw", "sgd")  # those that train an adapter, too


class EstimatorName(Enum):
    """Name of an estimator, as users choose it."""

    MEZO = "mezo"
    FZOO = "fzoo"
    ES = "es"


class Fitness(Enum):
    """How the losses of a step become weights of its directions."""

    SCALED = "scaled"
    RANKS = "ranks"
