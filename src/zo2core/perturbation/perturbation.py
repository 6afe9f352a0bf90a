"""Where a direction lives while its losses are measured: in the weights, or beside the activations."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from zo2core.errors import JournalError, OptionError, UnsupportedModelError
from zo2core.journal import Journal
from zo2core.perturbation.stacked_model import StackedModel
from zo2core.protocols import BlockModel, CounterNoise, NoiseGenerator, ZOEstimator
from zo2core.types import trained

_KIND = "beside-activations"
_FIRST_PERIOD_SEED = 1 << 62  # seeds of directions are below it, those of periods are not


@dataclass(frozen=True)
class DensePerturbation:
    """Weights are written at every evaluation: a direction has any form, and each layer its own forward. Exact MeZO's."""


@dataclass(frozen=True, kw_only=True)
class LowRankPerturbation:
    """Directions of low rank, ``z = U V^T / sqrt(rank)`` for a matrix, taken beside what a layer computes.

    A linear layer gives ``x W^T + (x V) (A + shift * zo_eps * U)^T``, where V is divided by the root of the rank. W is only
    read: nothing is written, sent back or written back. All evaluations of a step run as one batch, stacked along its rows.
    Parameters of one dimension have dense directions, one value a stream.

    U is drawn anew for each direction; V stays for a period, so that a period's updates add up to one factor, A, in float32
    (LOZO, arXiv 2410.07698, with the scale of z that dense directions have: a LOZO ``zo_eps`` is this one's divided by the
    root of the rank, and learning rates are the same). The weights of a step are the base's plus ``A V^T`` of each period,
    as if they were kept in float32, whatever the base is in. Both factors follow from the journal and the run's seed.

    Args:
        rank: Columns of U and V.
        period: Steps for which V stays.
        stack: Most evaluations of a step that run as one batch; None: all of them. Losses depend on it, by the order in
            which floats are summed, and so it is part of the run.

    Raises:
        OptionError: if one of them is no whole number of at least 1.
    """

    rank: int
    period: int = 100
    stack: int | None = None

    def __post_init__(self) -> None:
        for option, value in (
            ("rank", self.rank),
            ("period", self.period),
            ("stack", 1 if self.stack is None else self.stack),
        ):
            if type(value) is not int or value < 1:
                raise OptionError(
                    f"perturbation.{option}",
                    found=repr(value),
                    expected="a whole number of at least 1",
                    remedy="pass a number in this range",
                )

    @property
    def options(self) -> Mapping[str, Any]:
        """What decides the result, as JSON values, for the journal."""
        return {"kind": _KIND, "rank": self.rank, "period": self.period, "stack": self.stack}

    def period_seed(self, run_seed: int, step: int) -> int:
        """The seed of V in the period of a step: from the run's seed and the period alone, and no direction's."""
        rng = random.Random(f"{run_seed}/period/{step // self.period}")  # noqa: S311 - no secret
        return _FIRST_PERIOD_SEED + rng.randrange(_FIRST_PERIOD_SEED)


Perturbation: TypeAlias = DensePerturbation | LowRankPerturbation


def choose_perturbation(perturbation: Perturbation | None, journal: Journal) -> Perturbation:
    """What was asked for; without, what the journal was begun with; without a journal, directions in the weights.

    Raises:
        JournalError: if the journal was begun with another one, or with one that this version does not know.
    """
    if journal.header is None:
        return DensePerturbation() if perturbation is None else perturbation
    options = journal.header.get("perturbation")
    recorded: Perturbation = DensePerturbation()
    if options is not None:
        known = {"kind", "rank", "period", "stack"}
        if not isinstance(options, dict) or options.get("kind") != _KIND or set(options) != known:
            raise JournalError(
                journal.name,
                found=f"perturbation {str(options)[:80]}",
                expected=f"none, or {_KIND} with rank, period and stack",
                remedy="use the version that the journal was made with",
            )
        recorded = LowRankPerturbation(rank=options["rank"], period=options["period"], stack=options["stack"])
    if perturbation is not None and perturbation != recorded:
        raise JournalError(
            journal.name,
            found=f"perturbation {recorded}",
            expected=str(perturbation),
            remedy="continue with the perturbation that the journal was begun with, or begin a new one",
        )
    return recorded


def require_perturbation(
    perturbation: Perturbation,
    model: BlockModel,
    estimator: ZOEstimator | None,
    noise: NoiseGenerator,
    *,
    replay: str = "auto",
    write_back_every: object = None,
    snapshot_every: object = None,
) -> None:
    """Refuse what directions cannot do where they live, before anything is read.

    Args:
        perturbation: Where they live.
        model: Whose parameters they move.
        estimator: None for a run that takes no steps.
        noise: What draws them.
        replay: Who was asked to replay.
        write_back_every: How often it was asked to write back.
        snapshot_every: How often at least.

    Raises:
        OptionError: naming what does not go together.
        UnsupportedModelError: if the model cannot take directions so.
    """
    if isinstance(perturbation, DensePerturbation):
        _require_dense(model, estimator)
        frozen = [spec for layout in model.layouts for spec in layout.parameters if spec.frozen]
        if frozen:
            what = f"beside frozen weights such as {frozen[0].name}, which never change"
            _require_unwritten(what, replay=replay, write_back_every=write_back_every, snapshot_every=snapshot_every)
    else:
        what = "beside the activations, where no weight changes"
        _require_unwritten(what, replay=replay, write_back_every=write_back_every, snapshot_every=snapshot_every)
        _require_low_rank(model, estimator, noise)


def _require_dense(model: BlockModel, estimator: ZOEstimator | None) -> None:
    """Refuse to perturb weights that are only read."""
    specs = [spec for spec in trained(model.layouts) if spec.encoding is not None]
    if estimator is not None and specs:
        assert specs[0].encoding is not None
        raise _refusal(
            "perturbation",
            f"directions in the weights, of which {specs[0].name} is stored in {specs[0].encoding.name}",
            "directions beside the activations: quantised weights are only read",
            "pass perturbation=LowRankPerturbation(rank=8), or --rank 8; or train an adapter",
        )


def _require_unwritten(what: str, *, replay: str, write_back_every: object, snapshot_every: object) -> None:
    """Refuse what would send back or write back segments that are only read."""
    for option, asked, is_asked in (
        ("replay", replay, replay == "host"),
        ("write_back.every", str(write_back_every), isinstance(write_back_every, int)),
        ("write_back.snapshot_every", str(snapshot_every), snapshot_every is not None),
    ):
        if is_asked:
            raise _refusal(option, asked, f"no such choice {what}", "leave it out")


def _require_low_rank(model: BlockModel, estimator: ZOEstimator | None, noise: NoiseGenerator) -> None:
    """Refuse what directions beside the activations cannot do."""
    if not isinstance(model, StackedModel):
        raise _refusal("perturbation", f"a {type(model).__name__}", "a model that stacks streams", "use DensePerturbation()")
    if not isinstance(noise, CounterNoise):
        raise _refusal(
            "noise", noise.name, "counter-based noise beside the activations", "pass PhiloxNoise(Distribution.GAUSSIAN)"
        )
    # A parameter may be rounded in some of the segments that use it, and not in the one that owns it.
    for spec in (spec for layout in model.layouts for spec in layout.used if not spec.frozen):
        if spec.is_rounded or spec.is_low_bit:
            raise _refusal(
                "precision",
                f"{spec.name} stored in {spec.dtype} and computed with or carried in another dtype",
                "exact precision beside the activations, whose factors are float32 anyway",
                'open the model with precision="exact"',
            )
        if len(spec.shape) not in (1, 2):
            raise UnsupportedModelError(
                spec.name,
                found=f"a parameter of shape {list(spec.shape)}",
                expected="matrices and vectors, for directions beside the activations",
                remedy="leave --rank out, or use DensePerturbation(): directions in the weights have any form",
            )
    if estimator is not None:
        _require_estimator(estimator)
    model.require_stackable()


def _require_estimator(estimator: ZOEstimator) -> None:
    if estimator.perturb_in_place:
        raise _refusal(
            "perturb_in_place", "True", "False beside the activations, where no weight walks", "pass perturb_in_place=False"
        )
    weight_decay = estimator.options.get("weight_decay")
    if weight_decay:
        raise _refusal(
            "weight_decay",
            str(weight_decay),
            "0 beside the activations, where weights are only read",
            "pass weight_decay=0.0",
        )
    if estimator.distribution is not None:
        raise _refusal(
            "estimator",
            f"{estimator.options.get('name')}, which needs {estimator.distribution.value} directions",
            "one that takes directions of any distribution: products of factors have another one",
            "choose another estimator, or DensePerturbation()",
        )


def _refusal(option: str, found: str, expected: str, remedy: str) -> OptionError:
    return OptionError(option, found=found, expected=expected, remedy=remedy)
