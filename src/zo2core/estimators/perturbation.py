"""How weights are perturbed: dense directions in the weights, or low-rank ones beside the
activations.

Models that take low-rank ones satisfy ``StackedModel``; forwards that run several of them as one
batch, ``StackedForward``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from zo2core.errors import (
    JournalError,
    OptionError,
    UnsupportedModelError,
)
from zo2core.journal.journal import Journal
from zo2core.protocols import (
    Activations,
    BlockModel,
    CounterNoise,
    Forward,
    NoiseGenerator,
    ZOEstimator,
)
from zo2core.ranges import require_whole
from zo2core.types import (
    Batch,
    BlockLayout,
    trained,
)


class Factors(NamedTuple):
    """Factors of the change of a matrix W (m, n): ``left @ right^T``, or ``left[s] @ right^T`` for
    stream s.

    Those of several periods are side by side.
    """

    left: torch.Tensor  # learned: (m, R), float32; of streams: (streams, m, R), in W's dtype
    right: torch.Tensor  # (n, R), in W's dtype

    def joined(self, other: Factors) -> Factors:
        """These columns followed by the other's."""
        return Factors(*(torch.cat(pair, dim=-1) for pair in zip(self, other, strict=True)))


# factors for a matrix; (streams, n) values for a vector
PerturbedParameter: TypeAlias = Factors | torch.Tensor


@runtime_checkable
class StackedForward(Forward, Protocol):
    """A forward that runs several streams as one batch, each with another perturbation.

    A stack has the rows of its first stream, then those of the second, and so on, with equal
    numbers of rows.
    """

    def stacked(self, batches: Sequence[Batch]) -> Batch | None:
        """Join prepared batches, one for each stream, to a prepared batch; None if they cannot be
        joined.
        """

    def heads(self, batches: Sequence[Batch], activations: Activations) -> list[torch.Tensor]:
        """Run the layers after the blocks on a stack; return the output of each stream, of a model
        its loss, 0-d.
        """


@runtime_checkable
class StackedModel(BlockModel, StackedForward, Protocol):
    """A model that takes low-rank perturbations."""

    def require_stackable(self) -> None:
        """Prepare for ``perturb``. Called before anything is read."""

    def perturb(
        self, index: int, perturbations: Mapping[str, PerturbedParameter], streams: int
    ) -> None:
        """Perturb a segment's next forwards, and stop perturbing every other segment's."""


_KIND = "beside-activations"
_FIRST_PERIOD_SEED = 1 << 62  # seeds of periods start here; seeds of directions are below


@dataclass(frozen=True)
class DensePerturbation:
    """Exact MeZO: perturbed weights are written for every evaluation, whatever their shape and the
    layers' forwards.
    """


@dataclass(frozen=True, kw_only=True)
class LowRankPerturbation:
    """Low-rank directions, ``z = U V^T / sqrt(rank)`` for a matrix, computed beside a layer's
    activations.

    A linear layer computes ``x W^T + (x V) (A + shift * zo_eps * U)^T``, where V is divided by the
    root of the rank. W is only read: it is never offloaded or written back. All evaluations of a
    step run as one batch, stacked along its rows. Parameters of one dimension have dense
    directions, with separate values for each stream.

    U is drawn for each direction; V stays for a period, so that a period's updates add up to one
    factor, A, in float32 (LOZO, arXiv 2410.07698, with z scaled as dense directions are: LOZO's
    ``zo_eps`` is this one divided by the root of the rank, and learning rates are the same). The
    weights of a step are the base plus ``A V^T`` of each period, with float32 precision whatever
    the base's dtype. Both factors follow from the journal and the run's seed.

    Args:
        rank: Columns of U and V.
        period: Steps for which V stays.
        stack: Most evaluations of a step that run as one batch; None: all of them. It is recorded
            with the run, since it changes the order in which floats are summed, and so the losses.

    Raises:
        OptionError: if a value is not an integer of at least 1.
    """

    rank: int
    period: int = 100
    stack: int | None = None

    def __post_init__(self) -> None:
        require_whole("perturbation.rank", self.rank, 1)
        require_whole("perturbation.period", self.period, 1)
        if self.stack is not None:
            require_whole("perturbation.stack", self.stack, 1)

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that change the result, as JSON values for the journal."""
        return {"kind": _KIND, "rank": self.rank, "period": self.period, "stack": self.stack}

    def period_seed(self, run_seed: int, step: int) -> int:
        """Seed of V in the period of a step, derived from the run's seed and the period; no
        direction has it.
        """
        rng = random.Random(f"{run_seed}/period/{step // self.period}")  # noqa: S311 - not a secret
        return _FIRST_PERIOD_SEED + rng.randrange(_FIRST_PERIOD_SEED)

    def factor_bytes(self, layouts: Sequence[BlockLayout], updates: int = 0) -> int:
        """Bytes of a run's factors in memory, of ended periods and of the present one."""
        periods = updates // self.period + 1
        specs = trained(layouts)
        matrices = [spec for spec in specs if len(spec.shape) == 2]
        columns = sum(4 * spec.shape[0] + spec.dtype.itemsize * spec.shape[1] for spec in matrices)
        vectors = sum(4 * spec.numel for spec in specs if len(spec.shape) == 1)
        return columns * self.rank * periods + vectors


Perturbation: TypeAlias = DensePerturbation | LowRankPerturbation


def choose_perturbation(perturbation: Perturbation | None, journal: Journal) -> Perturbation:
    """Choose the caller's perturbation, else the journal's, else a dense one."""
    if journal.header is None:
        return DensePerturbation() if perturbation is None else perturbation
    options = journal.header.get("perturbation")
    recorded: Perturbation = DensePerturbation()
    if options is not None:
        keys = {"kind", "rank", "period", "stack"}
        if not isinstance(options, dict) or options.get("kind") != _KIND or set(options) != keys:
            raise JournalError(
                journal.name,
                found=f"perturbation {str(options)[:80]}",
                expected=f"none, or {_KIND} with rank, period and stack",
                remedy="use the version that wrote the journal",
            )
        recorded = LowRankPerturbation(
            rank=options["rank"], period=options["period"], stack=options["stack"]
        )
    if perturbation is not None and perturbation != recorded:
        raise JournalError(
            journal.name,
            found=f"perturbation {recorded}",
            expected=str(perturbation),
            remedy="continue with the journal's perturbation, or start a new journal",
        )
    return recorded


def require_perturbation(
    perturbation: Perturbation,
    model: BlockModel,
    estimator: ZOEstimator | None,
    noise: NoiseGenerator,
) -> None:
    """Check that a perturbation fits model, estimator and noise, before anything is read."""
    if isinstance(perturbation, DensePerturbation):
        if estimator is not None:
            _require_not_quantised(model)
        return
    if not isinstance(model, StackedModel):
        raise OptionError(
            "perturbation",
            f"a {type(model).__name__}",
            "a model that stacks streams",
            "choose `DensePerturbation()`",
        )
    if not isinstance(noise, CounterNoise):
        remedy = "pass `PhiloxNoise(Distribution.GAUSSIAN)`"
        raise OptionError("noise", noise.name, "counter-based noise beside the activations", remedy)
    _require_factorable(model)
    if estimator is not None:
        _require_weights_stay(estimator)
    model.require_stackable()


def _require_not_quantised(model: BlockModel) -> None:
    for spec in trained(model.layouts):
        if spec.encoding is not None:
            raise OptionError(
                "perturbation",
                f"none, for the weights of {spec.name}, which are stored in {spec.encoding.name}",
                "directions of low rank or an adapter, because quantised weights are only read",
                "pass `LowRankPerturbation(rank=8)`, or train an adapter",
            )


def _require_factorable(model: BlockModel) -> None:
    """Refuse parameters that low-rank directions cannot be added to."""
    # A parameter may be rounded in a segment that borrows it, and not in the one that owns it.
    for spec in (spec for layout in model.layouts for spec in layout.used if not spec.frozen):
        if spec.is_rounded or spec.is_low_bit:
            raise OptionError(
                "precision",
                f"{spec.name}, stored in {spec.dtype} and rounded to another dtype in forwards or "
                "transfers",
                "exact precision beside the activations, whose factors are float32 anyway",
                "open the model with `precision='exact'`",
            )
        if len(spec.shape) not in (1, 2):
            raise UnsupportedModelError(
                spec.name,
                found=f"a parameter of shape {list(spec.shape)}",
                expected="matrices and vectors, for directions beside the activations",
                remedy="choose `DensePerturbation()` for parameters of any shape",
            )


def _require_weights_stay(estimator: ZOEstimator) -> None:
    """Refuse an estimator whose steps change the weights themselves, or need directions of one
    distribution.
    """
    if estimator.perturb_in_place:
        expected = "False beside the activations, where weights stay"
        raise OptionError("perturb_in_place", "True", expected, "pass `perturb_in_place=False`")
    weight_decay = estimator.options.get("weight_decay")
    if weight_decay:
        expected = "0 beside the activations, where weights are only read"
        raise OptionError("weight_decay", str(weight_decay), expected, "pass `weight_decay=0`")
    if estimator.distribution is not None:
        name = estimator.options.get("name")
        raise OptionError(
            "estimator",
            f"{name}, which needs {estimator.distribution.value} directions",
            "an estimator for directions of any distribution, since products of factors have "
            "another one",
            "choose another estimator, or `DensePerturbation()`",
        )
