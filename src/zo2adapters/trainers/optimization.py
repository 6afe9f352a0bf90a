"""How a run turns losses into steps: its estimator, its directions and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from zo2adapters.ranges import require_between
from zo2adapters.trainers.lr_schedules import Decay, LearningRate
from zo2core import (
    BlockLayout,
    Clipped,
    DensePerturbation,
    Distribution,
    Guarded,
    LowRankPerturbation,
    NoiseGenerator,
    OptionError,
    PhiloxNoise,
    ZOEstimator,
)
from zo2core.estimators import EstimatorName
from zo2core.perturbation import Perturbation

MOST_QUERIES = 1 << 16

# Note: Largest steps. An update moves a weight by lr times the projected gradient, which for a pre-trained model is between
# 0.1 and 1000, and weights are below 1. What is used lies between 1e-8 and 1e-2. Beyond 1 one step leaves nothing of a
# model, however its loss turns out; the same holds of a perturbation by more than the weights themselves.
LARGEST_LR = 1.0
LARGEST_EPS = 1.0


class Noise(Enum):
    """Where directions come from."""

    MEZO = "mezo"
    GAUSSIAN = "gaussian"
    RADEMACHER = "rademacher"

    @property
    def distribution(self) -> Distribution | None:
        """The distribution of counter-based noise; None for MeZO's numbers, which have none of their own."""
        return None if self is Noise.MEZO else Distribution(self.value)


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """How far a step moves the weights."""

    lr: float = 1e-6
    """Peak learning rate. MeZO's range for full fine-tuning of OPT is 1e-7 to 1e-6; small models take more. With --method
    another scale, such as 2e-4, has to be given."""
    zo_eps: float = 1e-3
    """Perturbation scale: evaluations are made at the weights plus and minus zo_eps times a random direction."""
    weight_decay: float = 0.0
    """Weight decay of MeZO's update; biases and layer norms do not decay. With --method: of the optimizer, for all that is
    trained."""

    def require_sane(self) -> None:
        """Refuse numbers with which a single step leaves nothing of a model.

        Raises:
            OptionError: naming the option, and why.
        """
        for option, value, most, why in (
            ("lr", self.lr, LARGEST_LR, "an update moves each weight by lr times the projected gradient"),
            ("zo_eps", self.zo_eps, LARGEST_EPS, "weights are perturbed by this much, and are mostly smaller"),
            ("weight_decay", self.weight_decay, 1 / self.lr, "a step takes lr times weight_decay of a weight away"),
        ):
            if value > most:
                expected = f"at most {most:g}: {why}"
                raise OptionError(option, found=repr(value), expected=expected, remedy=f"lower `{option}`")


@dataclass(frozen=True, kw_only=True)
class Directions:
    """Along which directions a step evaluates: what says how much memory and time it takes."""

    estimator: EstimatorName = EstimatorName.MEZO
    """What turns losses into steps. fzoo takes one side of each of several --queries, and divides by how far their losses
    spread. Its --lr is about how far a step moves a weight, such as 1e-5: another scale than MeZO's."""
    noise: Noise = Noise.RADEMACHER
    """Random directions: mezo draws MeZO's own numbers; the others are counter-based and cost next to nothing."""
    exact_mezo: bool = False
    """Take MeZO's steps bit for bit, with its noise and its walk, whatever --noise and --perturb-in-place say."""
    queries: int = 1
    """Directions a step. Each costs two more forwards, with fzoo one, but no block is moved once more; its update takes
    lr / queries."""
    rank: int | None = None
    """Take directions of this rank, such as 8, beside the activations: weights are only read, a step's forwards run as one
    batch, and updates add up in float32. By default directions are in the weights, and have no such limit."""
    period: int = 100
    """Steps for which one of the two factors of --rank stays."""
    stack: int | None = None
    """With --rank: most evaluations that run as one batch, by default all of a step. Fewer take less memory."""
    per_row: bool = False
    """Give each row of a batch a direction of its own, for no more forwards; with --queries so many directions share the
    rows out. With --rank all rows run as one batch."""

    def generator(self, layouts: Sequence[BlockLayout]) -> NoiseGenerator | None:
        """Where directions come from; None is the engine's own choice, MeZO's numbers."""
        distribution = None if self.exact_mezo else self.noise.distribution
        return None if distribution is None else PhiloxNoise(distribution)

    @property
    def evaluations(self) -> int:
        """Forwards of a batch in a step."""
        return 2 if self.per_row else self.estimator.evaluations(self.queries)

    @property
    def stacked(self) -> int:
        """Number of these forwards that run as one batch."""
        return 1 if self.rank is None else min(self.evaluations, self.stack or self.evaluations)

    def loss_rows(self, rows: int) -> int:
        """Rows of a batch of so many of which one loss is made."""
        groups = (rows if self.queries == 1 else self.queries) if self.per_row else 1
        return -(-rows // groups)

    @property
    def perturbation(self) -> Perturbation:
        """Where directions live.

        Raises:
            OptionError: if rank or period is out of its range.
        """
        if self.rank is None:
            return DensePerturbation()
        return LowRankPerturbation(rank=self.rank, period=self.period, stack=self.stack)


@dataclass(frozen=True, kw_only=True)
class Optimization(StepSize, Directions):
    """How a step moves the weights."""

    perturb_in_place: bool = False
    """Walk from evaluation to evaluation and back, as MeZO does, with the rounding that this leaves in the weights. By
    default each evaluation starts from the weights."""
    decay: Decay = Decay.CONSTANT
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""
    clip_grad: float | None = None
    """Largest absolute projected gradient; a larger one is cut to it."""
    clip_median: float | None = None
    """Largest multiple of the median of the last 50 absolute projected gradients; a larger one is cut to it. At least 1."""
    guard: bool = True
    """Leave out steps whose losses lie far outside their running range, and stop a run that has got worse for good."""

    def require_consistent(self) -> None:
        """Refuse options that do not go with the estimator.

        Raises:
            OptionError: naming the option.
        """
        name, several = self.estimator.value, self.estimator.classes.several
        if self.estimator is not EstimatorName.MEZO and self.exact_mezo:
            raise OptionError(
                "exact_mezo",
                found=f"it beside the estimator {name}",
                expected="MeZO's own estimator, whose bits it asks for",
                remedy="leave out one of the two",
            )
        if several.distribution not in (None, self.noise.distribution):
            needed = several.distribution.value
            raise OptionError(
                "noise",
                found=repr(self.noise.value),
                expected=f"{needed!r}, which {name} is made for",
                remedy="leave it out",
            )
        if self.perturb_in_place and not _takes(several, "perturb_in_place"):
            raise OptionError(
                "perturb_in_place",
                found=f"it beside the estimator {name}",
                expected=f"evaluations that each start from the weights, as those of {name} do",
                remedy="leave it out",
            )
        if self.queries < several.least_queries:
            raise OptionError(
                "queries",
                found=str(self.queries),
                expected=f"at least {several.least_queries} with {name}",
                remedy="pass 8, as the authors of FZOO do",
            )
        if self.per_row and self.estimator.classes.per_row is None:
            raise OptionError("per_row", found=f"--estimator {name}", expected="mezo", remedy="leave one of the two out")
        if self.rank is None:
            for option in ("period", "stack"):
                if (value := getattr(self, option)) != getattr(Optimization, option):
                    raise OptionError(
                        option, found=str(value), expected="--rank beside it", remedy="give a rank, or leave it out"
                    )
            return
        # The engine refuses the rest, by the names that it has here. It is not told that these two were asked for.
        for option, asked in (("exact_mezo", self.exact_mezo), ("noise", self.noise is Noise.MEZO)):
            if asked:
                raise OptionError(
                    option,
                    found="MeZO's own numbers",
                    expected="gaussian or rademacher noise with --rank, whose factors are drawn at any time",
                    remedy="leave one of the two out",
                )

    def estimator_of(self, steps: int, rows: int = 1) -> ZOEstimator:
        """The estimator of a run.

        Args:
            steps: Steps of the run.
            rows: Rows of a batch.

        Raises:
            OptionError: if a number is out of its range, or options do not go together.
        """
        require_between("queries", self.queries, 1, MOST_QUERIES)
        self.require_consistent()
        classes, q = self.estimator.classes, self.queries
        kind: Callable[..., Any] = classes.several  # a dataclass
        if self.per_row and classes.per_row is not None:
            kind, q = classes.per_row, rows if q == 1 else q
        elif q == 1 and classes.one is not None:
            kind = classes.one
        options = {"q": q, "perturb_in_place": self.perturb_in_place or self.exact_mezo}
        options = {name: value for name, value in options.items() if _takes(kind, name)}
        # A bad peak is refused here, before it is scheduled.
        estimator = kind(lr=self.lr, zo_eps=self.zo_eps, weight_decay=self.weight_decay, **options)
        self.require_sane()
        lr = LearningRate(peak=self.lr, decay=self.decay, warmup_steps=self.warmup_steps, steps=steps)
        scheduled: ZOEstimator = replace(estimator, lr=lr)
        return scheduled

    def guarded(self, estimator: ZOEstimator) -> ZOEstimator:
        """An estimator with the clipping and the guard that were asked for.

        Raises:
            OptionError: if a number is out of its range.
        """
        if self.clip_grad is not None or self.clip_median is not None:
            estimator = Clipped(estimator=estimator, value=self.clip_grad, medians=self.clip_median)
        return Guarded(estimator=estimator) if self.guard else estimator


def _takes(kind: Any, option: str) -> bool:
    """Whether an estimator's class, a dataclass, has such a field."""
    return any(field.name == option for field in fields(kind))
