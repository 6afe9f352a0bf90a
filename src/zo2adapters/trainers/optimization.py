"""Options that say how a run turns losses into steps: estimator, directions and learning-rate
schedule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from zo2adapters.optional_package import optional_package
from zo2adapters.tasks.option_tree import (
    ADAMW,
    BADAM,
    BOTH,
    ESTIMATED,
    FULL,
    FULL_ADAMW,
    FULL_AT_ONCE,
    GRADIENTS,
    MOST_QUERIES,
    OF_BOTH,
    SGD,
    ZEROTH,
    Change,
    MethodName,
    Option,
    Refusal,
    number,
    rates,
    refuse,
    whole,
)
from zo2core.errors import OptionError
from zo2core.ranges import (
    EstimatorName,
    Fitness,
    NormGroup,
    OptimizerName,
    require_number,
    require_whole,
)

if TYPE_CHECKING:
    from zo2core import BlockUpdate, NoiseGenerator, ZOEstimator
    from zo2core.estimators.perturbation import Perturbation
    from zo2core.estimators.registry import EstimatorClasses


# learning rates by default, of the methods that have one
DEFAULT_RATES: Mapping[MethodName, float] = {
    "lora": 2e-4,
    BOTH: 2e-4,
    "mezo": 1e-6,
    "zeroth-order": 1e-6,
}


def optimizer_of(method: MethodName) -> OptimizerName | None:
    """The optimizer of a first-order method, of the base if there are two; None: its steps are
    zeroth-order.
    """
    if method == "lora":
        return "adamw"
    if method == "lora+lomo":
        return "lomo"
    return None if method == "mezo" or method == "zeroth-order" else method


_CONSTANT = (
    "constant, because the best trial is continued, and a schedule that ends cannot be lengthened"
)


class Decay(Enum):
    """Shape of the learning rate's decay after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Linear warm-up to a peak, then decay towards 0.

    The rate is positive at every step of the run.
    """

    peak: float
    decay: Decay
    warmup_steps: int
    steps: int

    def __post_init__(self) -> None:
        require_whole(
            "warmup_steps",
            self.warmup_steps,
            0,
            max(self.steps - 1, 0),
            otherwise=", fewer than the run's steps",
        )

    def __call__(self, step: int) -> float:
        """The learning rate of a 0-based step."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = min((step - self.warmup_steps) / (self.steps - self.warmup_steps), 1.0)
        if self.decay is Decay.LINEAR:
            return self.peak * (1.0 - progress)
        if self.decay is Decay.COSINE:
            return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak


def with_peak_rates(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """A method's options from a journal, for a reader: the peak in place of the text that stands
    for a schedule.
    """
    return {name: _peak_of(value) for name, value in options.items()}


def _peak_of(value: object) -> object:
    """The peak of a schedule that is written as text; any other value as it is."""
    schedule = re.match(
        rf"{LearningRate.__name__}\(peak=(\d+(?:\.\d+)?(?:e[+-]?\d+)?),", str(value)
    )
    return value if schedule is None else float(schedule[1])


# Note: Largest steps. An update moves a weight by lr times the projected gradient, which is between
# 0.1 and 1000 for a pre-trained model, whose weights are below 1. Useful rates lie between 1e-8 and
# 1e-2. With a rate above 1 a single step destroys the model, and so does a perturbation that is
# larger than the weights.
LARGEST_LR = 1.0
LARGEST_EPS = 1.0

_OF_FZOO = "'rademacher', which fzoo requires"


class Noise(Enum):
    """What random directions are drawn from."""

    MEZO = "mezo"
    GAUSSIAN = "gaussian"
    RADEMACHER = "rademacher"


@dataclass(frozen=True, kw_only=True)
class PerturbationScale:
    """How far the weights are perturbed."""

    zo_eps: Annotated[float, Option("method", Change.BRANCH, ZEROTH, number(above=0))] = 1e-3
    """Perturbation scale.

    The loss is evaluated at the weights plus and minus zo_eps times a random direction.
    """


@dataclass(frozen=True, kw_only=True)
class StepSize(PerturbationScale):
    """How far a step moves the weights."""

    lr: Annotated[
        float | Literal["auto"] | None,
        Option(
            "schedule",
            Change.BRANCH,
            check=number(above=0),
            library=("peak",),
            untried="none: --learning-rates names those to try",
        ),
    ] = None
    """Peak learning rate; auto tries several in short runs before the first step.

    By default 2e-4 with lora and lora+lomo, and 1e-6 with mezo and zeroth-order, which suits large
    models. Other methods have no default.
    """
    weight_decay: Annotated[float, Option("schedule", Change.BRANCH, check=number(least=0))] = 0.0
    """Weight decay of the optimizer, for all trained parameters.

    That of zeroth-order steps is MeZO's, which leaves out biases and layer norms.
    """

    @property
    def rate(self) -> float:
        """The peak learning rate, as a number."""
        if isinstance(self.lr, str):
            raise OptionError("lr", "auto", "a number", "pass one; zo2 train and init take auto")
        if self.lr is None:
            raise OptionError("lr", "nothing", "a learning rate", "pass one, or auto")
        return self.lr

    def require_sane(self) -> None:
        """Refuse numbers with which a single step destroys the model, or that are none."""
        require_number("lr", self.rate, above=0)
        by_lr = "an update moves each weight by lr times the projected gradient"
        by_eps = "weights are perturbed by this much, and most are smaller"
        by_decay = "a step subtracts lr times weight_decay times the weight"
        refuse(
            _above("lr", self.rate, LARGEST_LR, by_lr),
            _above("zo_eps", self.zo_eps, LARGEST_EPS, by_eps),
            _above("weight_decay", self.weight_decay, 1 / self.rate, by_decay),
        )


def _above(option: str, value: float, most: float, why: str) -> Refusal:
    expected = f"at most {most:g}: {why}"
    return Refusal(value > most, option, repr(value), expected, f"lower `{option}`")


@dataclass(frozen=True, kw_only=True)
class StepMethod:
    """What is trained, and how."""

    method: Annotated[
        MethodName,
        Option(
            "method",
            elsewhere=(
                "exact_mezo",
                "optim",
            ),
            library=("optimizer",),
            decides=True,
        ),
    ] = "lora"
    """What is trained, and how. lora: a new LoRA adapter, by AdamW. lora+lomo: the same, and the
    base under it by LOMO. adamw, sgd, lomo, adalomo and badam: all parameters, by gradients.
    zeroth-order: all parameters, without gradients; mezo: the same with MeZO's bits. All but lomo,
    adalomo and badam train an adapter, if there is one.
    """

    @property
    def optimizer(self) -> OptimizerName | None:
        """The optimizer of first-order steps; None: steps are zeroth-order."""
        return optimizer_of(self.method)

    @property
    def trains_both(self) -> bool:
        """Whether an adapter and the base under it are trained."""
        return self.method == BOTH

    @property
    def is_exact(self) -> bool:
        """Whether steps have the bits of MeZO."""
        return self.method == "mezo"


@dataclass(frozen=True, kw_only=True)
class ZerothOrderSteps(StepMethod, PerturbationScale):
    """How zeroth-order steps estimate a gradient."""

    estimator: Annotated[EstimatorName, Option("method", Change.BRANCH, ESTIMATED)] = (
        EstimatorName.MEZO
    )
    """Gradient estimator. mezo evaluates both sides of each direction. fzoo evaluates one side of
    each of several --queries and divides by the standard deviation of their losses; its --lr is
    about the distance that a step moves a weight, such as 1e-5. es, for --reward, evaluates both
    sides of several --queries and compares their losses; its --lr is such a distance, too.
    """
    fitness: Annotated[
        Fitness, Option("method", Change.BRANCH, ESTIMATED, needs=("estimator=es",))
    ] = Fitness.SCALED
    """With --estimator es: how the losses of a step are compared. scaled subtracts their mean and
    divides by their standard deviation; ranks replaces them by their ranks.
    """
    noise: Annotated[Noise, Option("method", effect=ESTIMATED)] = Noise.RADEMACHER
    """Random directions. mezo draws the same numbers as MeZO; the others are counter-based and much
    faster to draw.
    """
    queries: Annotated[
        int, Option("method", Change.BRANCH, ZEROTH, whole(1, MOST_QUERIES), library=("q",))
    ] = 1
    """Directions per step.

    Each adds two forward passes, or one with fzoo, but no transfers. The update along each
    direction uses lr / queries.
    """
    rank: Annotated[
        int | None,
        Option(
            "method",
            effect=ESTIMATED,
            excludes={"snapshot_every": "no snapshots, because no weights change"},
            library=(
                "perturbation",
                "perturbation.rank",
            ),
            check=whole(1),
        ),
    ] = None
    """Perturb by directions of this rank, such as 8, without changing the weights: they are only
    read, the forward passes of a step run as one batch, and updates add up in float32. By default
    directions have full rank and perturb the weights.
    """
    period: Annotated[
        int,
        Option(
            "method",
            effect=ESTIMATED,
            needs=("rank",),
            library=("perturbation.period",),
            check=whole(1),
        ),
    ] = 100
    """With --rank: steps after which the factor that consecutive directions share is drawn anew."""
    stack: Annotated[
        int | None,
        Option(
            "method",
            effect=ESTIMATED,
            needs=("rank",),
            library=("perturbation.stack",),
            check=whole(1),
        ),
    ] = None
    """With --rank: largest number of evaluations that run as one batch, by default all of a step.

    Fewer need less memory.
    """
    per_row: Annotated[
        bool,
        Option(
            "method",
            Change.BRANCH,
            ESTIMATED,
            needs=("estimator=mezo",),
            excludes={
                "head": "a causal language model",
                "objective": "loss, which each row has separately",
                "pack": "padded rows, whose losses can be told apart",
                "micro_batch_size": "whole batches",
            },
        ),
    ] = False
    """Use a separate direction for each row of a batch, at no more forward passes.

    With --queries the rows are divided among so many directions. With --rank all rows run as one
    batch.
    """
    clip_grad: Annotated[
        float | None, Option("method", Change.BRANCH, ZEROTH, check=number(above=0))
    ] = None
    """Clip projected gradients, those of zeroth-order steps, to this absolute value."""
    clip_median: Annotated[
        float | None,
        Option(
            "method",
            Change.BRANCH,
            ZEROTH,
            check=number(least=1, remedy="choose `clip_median` such as 3"),
        ),
    ] = None
    """Clip projected gradients to this multiple, at least 1, of the median of the last 50 absolute
    values.
    """
    guard: Annotated[bool, Option("method", Change.BRANCH, ZEROTH)] = True
    """Skip steps whose losses are far outside the recent range, and stop a run whose loss has
    diverged.
    """

    def generator(self) -> NoiseGenerator | None:
        """Generator of the directions; None leaves the choice to the engine, which draws MeZO's
        numbers.
        """
        from zo2core import Distribution, PhiloxNoise

        is_sequential = self.is_exact or self.noise is Noise.MEZO
        return None if is_sequential else PhiloxNoise(Distribution(self.noise.value))

    @property
    def _classes(self) -> EstimatorClasses:
        from zo2core.estimators.registry import ESTIMATORS

        return ESTIMATORS[self.estimator]

    @property
    def evaluations(self) -> int:
        """Forward passes of a batch in a step."""
        return 2 if self.per_row else self._classes.multi_query.forwards(self.queries)

    @property
    def stacked(self) -> int:
        """Number of these forwards that run as one batch."""
        return 1 if self.rank is None else min(self.evaluations, self.stack or self.evaluations)

    def loss_rows(self, rows: int) -> int:
        """Rows that share one loss, in a batch of so many rows."""
        if not self.per_row:
            return rows
        groups = rows if self.queries == 1 else self.queries
        return -(-rows // groups)

    @property
    def perturbation(self) -> Perturbation:
        """How directions are applied: to the weights, or as low-rank terms beside the
        activations.
        """
        from zo2core import DensePerturbation, LowRankPerturbation

        if self.rank is None:
            return DensePerturbation()
        return LowRankPerturbation(rank=self.rank, period=self.period, stack=self.stack)

    def require_consistent(self) -> None:
        """Refuse options that cannot be combined with the estimator, or with directions of low
        rank.
        """
        is_fzoo = self.estimator is EstimatorName.FZOO
        in_order = self.rank is not None and self.noise is Noise.MEZO
        refuse(
            Refusal(
                is_fzoo and self.noise is not Noise.RADEMACHER,
                "noise",
                repr(self.noise.value),
                _OF_FZOO,
            ),
            Refusal(
                in_order,
                "noise",
                "MeZO's numbers, which are drawn in sequence",
                "other noise with --rank, whose factors are drawn in any order",
            ),
            Refusal(
                is_fzoo and self.queries < 2,
                "queries",
                str(self.queries),
                "at least 2 with fzoo",
                "pass 8, as FZOO's authors do",
            ),
        )

    def estimator_of(
        self, lr: Callable[[int], float], weight_decay: float, rows: int = 1
    ) -> ZOEstimator:
        """The estimator of a run, with the clipping and the guard that the options ask for.

        Args:
            lr: The learning rate of a 0-based step.
            weight_decay: MeZO's weight decay.
            rows: Rows of a batch.
        """
        from zo2core import Clipped, Guarded

        classes, q = self._classes, self.queries
        kind: Callable[..., Any] = classes.multi_query  # a dataclass
        if self.per_row and classes.per_row is not None:
            kind = classes.per_row
            q = rows if q == 1 else q
        elif q == 1 and classes.single_query is not None:
            kind = classes.single_query
        known = {option.name for option in fields(kind)}  # type: ignore[arg-type]
        given = {"q": q, "perturb_in_place": self.is_exact, "fitness": self.fitness}
        options = {name: value for name, value in given.items() if name in known}
        estimator: ZOEstimator = kind(
            lr=lr, zo_eps=self.zo_eps, weight_decay=weight_decay, **options
        )
        if self.clip_grad is not None or self.clip_median is not None:
            estimator = Clipped(estimator=estimator, value=self.clip_grad, medians=self.clip_median)
        return Guarded(estimator=estimator) if self.guard else estimator


@dataclass(frozen=True, kw_only=True)
class BlockUpdates(StepMethod):
    """How a first-order step changes all parameters."""

    max_grad_value: Annotated[
        float | None, Option("method", effect=FULL, check=number(above=0), library=("clip_value",))
    ] = None
    """With a first-order --method, for all parameters: largest absolute value of a gradient's
    elements; larger ones are cut to it.
    """
    switch_every: Annotated[int | None, Option("method", effect=BADAM, check=whole(1))] = None
    """With --method badam: steps for which one block is trained before the next one's turn.

    By default 50.
    """
    loss_scaling: Annotated[bool, Option("method", effect=FULL)] = False
    """With a first-order --method and no adapter: scale the loss, so that small gradients do not
    vanish in float16, by the rules of torch.amp.GradScaler. Steps whose gradients overflow are
    skipped. It takes a second backward pass.
    """
    base_lr: Annotated[
        float | None, Option("schedule", Change.BRANCH, OF_BOTH, number(above=0, most=1))
    ] = None
    """With --method lora+lomo: peak learning rate of the base, by LOMO, such as 1e-3; --lr is that
    of the adapter. Both decay alike.
    """

    def require_base_lr(self) -> None:
        """Refuse a method that trains the base under an adapter without a learning rate of it."""
        expected = "a learning rate of the base, which has none by default"
        is_missing = self.trains_both and self.base_lr is None
        refuse(Refusal(is_missing, "base_lr", "nothing", expected, "pass one, such as 1e-3"))


@dataclass(frozen=True, kw_only=True)
class FirstOrderSteps(BlockUpdates):
    """How first-order steps are taken."""

    max_grad_norm: Annotated[
        float | None,
        Option(
            "method",
            effect=GRADIENTS,
            check=number(above=0),
            library=(
                "clip",
                "clip_norm",
            ),
        ),
    ] = None
    """With a first-order --method: largest 2-norm of all gradients together; larger ones are scaled
    down to it.

    Where all parameters are trained, it takes a second backward pass, except with badam and with
    --max-grad-norm-per layer.
    """
    max_grad_norm_per: Annotated[
        NormGroup, Option("method", effect=FULL_AT_ONCE, needs=("max_grad_norm",))
    ] = "all"
    """Which gradients --max-grad-norm takes together: all; or with a method of all parameters
    layer, those of a layer, which takes no second backward pass. Layers then have learning rates of
    their own, as it were.
    """
    delayed_update: Annotated[
        bool,
        Option(
            "method",
            effect=FULL_ADAMW,
            excludes={"stream_blocks": "none: the host computes all of a step"},
        ),
    ] = False
    """With --method adamw and no adapter: change the weights one step late, so that the host
    updates while the device computes the next step, as ZeRO-Offload does. This is another run:
    gradients are those of weights one step older.
    """
    state_bits: Annotated[Literal[8, 32], Option("method", effect=FULL_ADAMW)] = 32
    """With --method adamw and no adapter: 8 keeps the moments in 8 bits, by bitsandbytes'
    AdamW8bit, in a quarter of the memory.
    """
    betas: Annotated[
        tuple[float, float] | None,
        Option(
            "method",
            effect=ADAMW,
            check=rates,
            elsewhere=(
                "adam_beta1",
                "adam_beta2",
            ),
        ),
    ] = None
    """With --method lora or adamw: decay rates of the running means of gradients and of their
    squares; by default 0.9 and 0.999.
    """
    momentum: Annotated[float | None, Option("method", effect=SGD, check=rates)] = None
    """With --method sgd: factor by which the previous change is repeated; by default 0."""

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """The options of the method's optimizer that were given, under the names that torch.optim
        has.
        """
        given = {"betas": self.betas, "momentum": self.momentum}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def measures_gradients(self) -> bool:
        """Whether a step of all parameters sweeps twice: first to measure the gradients of more
        than one segment.
        """
        clips_together = self.max_grad_norm is not None and self.max_grad_norm_per == "all"
        return (clips_together and self.optimizer != "badam") or self.loss_scaling

    def block_update(
        self,
        *,
        weight_decay: float,
        base_lr: Callable[[int], float] | None = None,
        seed: int = 0,
    ) -> BlockUpdate:
        """The optimizer of all parameters; ``base_lr``: that of the base under an adapter."""
        from zo2core import Delayed, TorchOptimizer
        from zo2core.optimizers.registry import make_block_update

        assert self.optimizer is not None, "zeroth-order steps have none"
        if base_lr is not None:
            return self._of_both(weight_decay, base_lr)
        options = self.optimizer_options
        update = make_block_update(
            self.optimizer,
            weight_decay=weight_decay,
            switch_every=self.switch_every,
            seed=seed,
            options=options,
        )
        if self.state_bits == 8:
            optimizers = optional_package("bitsandbytes", install="bitsandbytes").optim
            factory = partial(optimizers.AdamW8bit, weight_decay=weight_decay, **options)
            update = TorchOptimizer(factory, options={**update.options, "state_bits": 8})
        return Delayed(update) if self.delayed_update else update

    def _of_both(self, weight_decay: float, base_lr: Callable[[int], float]) -> BlockUpdate:
        """AdamW for the adapter, and LOMO for the base."""
        import torch

        from zo2adapters.models.peft_adapter import is_of_adapter
        from zo2core import LOMO, TorchOptimizer
        from zo2core.optimizers.adapter_and_base import AdapterAndBase

        given: dict[str, Any] = {"weight_decay": weight_decay, **self.optimizer_options}
        adamw = partial(torch.optim.AdamW, **given)
        return AdapterAndBase(
            TorchOptimizer(adamw, options={"name": "adamw", **given}),
            LOMO(weight_decay=weight_decay),
            base_lr=base_lr,
            is_of_adapter=is_of_adapter,
        )


@dataclass(frozen=True, kw_only=True)
class Optimization(FirstOrderSteps, ZerothOrderSteps, StepSize):
    """How a step moves the weights."""

    decay: Annotated[
        Decay,
        Option("schedule", Change.BRANCH, elsewhere=("lr_scheduler_type",), untried=_CONSTANT),
    ] = Decay.CONSTANT
    """Shape of the learning rate's decay after the warm-up."""
    warmup_steps: Annotated[
        int, Option("schedule", Change.BRANCH, elsewhere=("warmup_ratio",), check=whole(0))
    ] = 0
    """Steps over which the learning rate rises linearly."""
    stream_blocks: Annotated[bool, Option("method", effect=FULL)] = False
    """With a first-order --method and no adapter: stream blocks from disk, for a model that is
    larger than memory. With badam a block is written once, when its turn ends; with other methods
    each step writes all changed blocks and their optimizer states, and --snapshot-every says how
    often they are committed, by default at each step. More than 1.2 TB in 1,000 steps have to be
    allowed by --write-limit-tb.
    """
    divide_states: Annotated[
        bool,
        Option(
            "memory",
            Change.RESUME,
            effect=FULL_AT_ONCE,
            excludes={"stream_blocks": "none: states are on each worker's own disk then"},
        ),
    ] = False
    """With several workers and a first-order --method of all parameters: each keeps the optimizer's
    states of a share of the layers, and sends the others the weights that it has changed, as ZeRO's
    second stage does. Results are the same; a step sends all weights once more.
    """

    def scheduled_estimator(self, steps: int, rows: int = 1) -> ZOEstimator:
        """The estimator of a run of so many steps."""
        self.require_sane()
        return self.estimator_of(self.learning_rate(steps), self.weight_decay, rows)

    def base_learning_rate(self, steps: int) -> LearningRate | None:
        """The learning rate of the base under an adapter; None: it is not trained, too."""
        if self.base_lr is None:
            return None
        return replace(self.learning_rate(steps), peak=self.base_lr)

    def learning_rate(self, steps: int) -> LearningRate:
        """The learning rate of each of so many steps."""
        return LearningRate(
            peak=self.rate, decay=self.decay, warmup_steps=self.warmup_steps, steps=steps
        )
