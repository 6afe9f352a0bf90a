"""How a run turns losses into steps: its estimator, its directions and its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from zo2adapters.ranges import require_between
from zo2adapters.trainers.estimator_name import EstimatorName
from zo2adapters.trainers.lr_schedules import Decay, LearningRate
from zo2adapters.trainers.step_size import StepSize
from zo2core import (
    FZOO,
    MEAZO,
    BesideActivations,
    BlockLayout,
    Clipped,
    Distribution,
    Guarded,
    InWeights,
    MeZOSGD,
    MultiQueryRGE,
    NoiseGenerator,
    OptionError,
    PerRowRGE,
    Perturbation,
    PhiloxNoise,
    ZOEstimator,
)

MOST_QUERIES = 1 << 16


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
class Directions:
    """Along which directions a step evaluates: what says how much memory and time it takes."""

    estimator: EstimatorName = EstimatorName.MEZO
    """What turns losses into steps. fzoo takes one side of each of several --queries, and divides by how far their losses
    spread; meazo divides by how large projected gradients have been. Their --lr is about how far a step moves a weight,
    such as 1e-5: another scale than MeZO's."""
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
        """Of these forwards, how many run as one batch."""
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
            return InWeights()
        return BesideActivations(rank=self.rank, period=self.period, stack=self.stack)


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
        self.estimator.require_consistent(
            exact_mezo=self.exact_mezo,
            noise=self.noise.value,
            perturb_in_place=self.perturb_in_place,
            queries=self.queries,
        )
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
            steps: Of the run.
            rows: Of a batch.

        Raises:
            OptionError: if a number is out of its range, or options do not go together.
        """
        require_between("queries", self.queries, 1, MOST_QUERIES)
        self.require_consistent()
        if self.per_row and self.estimator is not EstimatorName.MEZO:
            raise OptionError(
                "per_row", found=f"--estimator {self.estimator.value}", expected="mezo", remedy="leave one of the two out"
            )
        in_place = self.perturb_in_place or self.exact_mezo
        estimator = MeZOSGD(  # refuses a bad peak before it is scheduled
            lr=self.lr, zo_eps=self.zo_eps, weight_decay=self.weight_decay, perturb_in_place=in_place
        )
        self.require_sane()
        lr = LearningRate(peak=self.lr, decay=self.decay, warmup_steps=self.warmup_steps, steps=steps)
        if self.estimator is EstimatorName.FZOO:
            return FZOO(lr=lr, zo_eps=self.zo_eps, weight_decay=self.weight_decay, q=self.queries)
        estimator = replace(estimator, lr=lr)
        if self.per_row:
            return PerRowRGE(**vars(estimator), q=rows if self.queries == 1 else self.queries)
        if self.estimator is EstimatorName.MEAZO:
            return MEAZO(**vars(estimator), q=self.queries)
        return estimator if self.queries == 1 else MultiQueryRGE(**vars(estimator), q=self.queries)

    def guarded(self, estimator: ZOEstimator) -> ZOEstimator:
        """An estimator with the clipping and the guard that were asked for.

        Raises:
            OptionError: if a number is out of its range.
        """
        if self.clip_grad is not None or self.clip_median is not None:
            estimator = Clipped(estimator=estimator, value=self.clip_grad, medians=self.clip_median)
        return Guarded(estimator=estimator) if self.guard else estimator
