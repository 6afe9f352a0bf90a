"""The values that pass between the parts: parameters, layouts, buckets, evaluations, updates, results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

import torch

from zo2core.errors import NonFiniteLossError, OptionError

# Note: Alignment. Parameters start at multiples of a cache line inside a bucket and inside the work buffer, as torch's own
# allocator would place them: matrix kernels may choose another path, and other roundings, for unaligned weights.
ALIGNMENT = 64  # bytes

MAX_SEED = 2**63 - 1
LARGEST = torch.finfo(torch.float32).max  # of what may be added to a weight: beyond it float32 weights are infinite

Batch: TypeAlias = Mapping[str, torch.Tensor]  # what the model's forward takes: input_ids, attention_mask, labels, ...


def aligned(nbytes: int) -> int:
    """Round a size in bytes up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One trainable tensor of the model. A tied weight is one parameter."""

    name: str  # as in the model's named_parameters()
    shape: tuple[int, ...]
    dtype: torch.dtype  # in which the weight is stored, and all its noise and arithmetic are
    index: int  # position in named_parameters(): the order in which MeZO draws z
    decays: bool  # weight decay applies
    forward_dtype: torch.dtype | None = None  # to which the forward's copy is rounded, once; None: as stored

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes, without alignment."""
        return self.numel * self.dtype.itemsize

    @property
    def is_rounded(self) -> bool:
        """Whether the forward has the weight in another dtype."""
        return self.forward_dtype not in (None, self.dtype)

    def in_forward(self) -> ParameterSpec:
        """The forward's copy, as a parameter of its own."""
        return self if self.forward_dtype is None else replace(self, dtype=self.forward_dtype)


class SegmentKind(Enum):
    """What a segment is in the decoder."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


@dataclass(frozen=True)
class BlockLayout:
    """How one segment's parameters lie in its bucket: one after the other, each aligned, unless told otherwise.

    Embedding and head are *resident*: their bytes stay reachable for the whole of a sweep, so that the head can borrow the
    embedding's tied weight.
    """

    name: str
    kind: SegmentKind
    parameters: tuple[ParameterSpec, ...]  # owned: their bytes are in this segment's bucket
    borrowed: tuple[ParameterSpec, ...] = ()  # tied: used here, owned by an earlier resident segment
    offsets: tuple[int, ...] | None = None  # bytes from the bucket's start to each owned parameter; None: packed

    @property
    def resident(self) -> bool:
        """Whether the segment stays reachable during a sweep."""
        return self.kind is not SegmentKind.BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket, alignment included."""
        if self.offsets is None:
            return sum(aligned(spec.nbytes) for spec in self.parameters)
        return max((at + spec.nbytes for at, spec in zip(self.offsets, self.parameters, strict=True)), default=0)

    @property
    def used(self) -> tuple[ParameterSpec, ...]:
        """All parameters of the segment's forward, its own first."""
        return (*self.parameters, *self.borrowed)

    def views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Flat typed views of the owned parameters in a buffer.

        Args:
            buffer: uint8, 1-D, at least ``nbytes`` long, page-aligned.

        Returns:
            One 1-D tensor a parameter, in the order of ``parameters``, sharing the buffer's memory.
        """
        if self.offsets is None:
            return tuple(flat_views(self.parameters, buffer))
        pairs = zip(self.offsets, self.parameters, strict=True)
        return tuple(buffer[at : at + spec.nbytes].view(spec.dtype) for at, spec in pairs)


def flat_views(specs: Sequence[ParameterSpec], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a flat typed view of a uint8 buffer for each parameter, one after the other, each aligned."""
    offset = 0
    for spec in specs:
        yield buffer[offset : offset + spec.nbytes].view(spec.dtype)
        offset += aligned(spec.nbytes)


def work_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of a work buffer for segments of these layouts: of the largest one, with what it borrows."""
    return max(packed_bytes([spec.in_forward() for spec in layout.used]) for layout in layouts)


def walk_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes in which weights walk from evaluation to evaluation, where the work buffer has them rounded."""
    return max(packed_bytes([spec for spec in layout.used if spec.is_rounded]) for layout in layouts)


def divide_tied(layouts: Sequence[BlockLayout]) -> tuple[list[ParameterSpec], list[list[ParameterSpec]]]:
    """Tell the parameters that several segments use from those of one: the tied ones, and each segment's others."""
    tied = {spec.name: spec for layout in layouts for spec in layout.borrowed}
    return list(tied.values()), [[spec for spec in layout.parameters if spec.name not in tied] for layout in layouts]


def packed_bytes(specs: Sequence[ParameterSpec]) -> int:
    """Bytes of these parameters one after the other, each aligned: what ``flat_views`` cuts up."""
    return sum(aligned(spec.nbytes) for spec in specs)


class Bucket(NamedTuple):
    """Host memory that holds one segment's bytes at one version."""

    segment: int  # its position in visiting order
    data: torch.Tensor  # uint8, (layout.nbytes,)
    views: tuple[torch.Tensor, ...]  # layout.views(data), made once
    version: int  # updates 0..version-1 are applied to the bytes, nothing else is


class Evaluation(NamedTuple):
    """One forward at ``theta + shift * zo_eps * z(seed)``."""

    seed: int  # of the probe: the direction z
    shift: float  # signed multiple of zo_eps

    def require_finite(self, loss: torch.Tensor, *, step: int) -> None:
        """Refuse a loss of this evaluation in a step, 0-d, that is not finite.

        Raises:
            NonFiniteLossError: naming the evaluation.
        """
        if not math.isfinite(loss.item()):
            raise NonFiniteLossError(
                f"step {step}, seed {self.seed}, shift {self.shift:+g}",
                found=f"loss {loss.item()}",
                expected="a finite loss",
                remedy="lower lr or zo_eps, or use dtype bfloat16 or float32 where float16 overflows; no step was taken",
            )

    def validated(self) -> Evaluation:
        """Return itself if the seed can be drawn from and the shift is finite.

        Raises:
            OptionError: otherwise.
        """
        if not 0 <= self.seed <= MAX_SEED:
            raise OptionError("seed", found=repr(self.seed), expected=f"0 to {MAX_SEED}", remedy="pass another seed")
        if not math.isfinite(self.shift):
            raise OptionError("shift", found=repr(self.shift), expected="a finite number", remedy="mend the estimator")
        return self


@dataclass(frozen=True, slots=True)
class Update:
    """Everything that one step did to the weights; replaying it is deterministic.

    ``theta <- theta - lr * ((g * z) + (weight_decay * theta))`` for each probe in turn, and before that, with
    ``perturb_in_place``, the walk through the evaluations and back, whose rounding is part of MeZO's trajectory
    (MeZO, arXiv 2305.17333, Algorithm 1).
    """

    step: int  # 0-based; the update leads from version step to step + 1
    evaluations: tuple[Evaluation, ...]  # in the order in which they were made
    seeds: tuple[int, ...]  # one a probe
    projected_grads: tuple[float, ...]  # the scalar g of each probe
    lr: float  # applied to each probe
    zo_eps: float
    weight_decay: float
    perturb_in_place: bool
    losses: tuple[float, ...]  # of the evaluations; a record, not needed to replay

    def validated(self) -> Update:
        """Return itself if it would not destroy the weights.

        Raises:
            NonFiniteLossError: if a projected gradient is not finite.
        """
        if not all(math.isfinite(grad) for grad in self.projected_grads):
            raise NonFiniteLossError(
                f"step {self.step}",
                found=f"projected gradients {self.projected_grads}",
                expected="finite ones",
                remedy="raise zo_eps: the losses' difference was divided by too small a number; the step was not taken",
            )
        return self

    def contradiction(self) -> tuple[str, str] | None:
        """Tell what of it no estimator can have made.

        Weights in float32 have to stay finite: lr, zo_eps, weight decay, the projected gradients, and each product that is
        added to a weight, ``lr * g``, ``lr * weight_decay`` and ``shift * zo_eps``, are at most ``LARGEST``.

        Returns:
            What was found and what was expected; None if nothing is wrong.
        """
        shape = self._contradiction_of_lengths()
        if shape is not None:
            return shape
        seeds = {evaluation.seed for evaluation in self.evaluations}
        for seed in seeds:
            if not 0 <= seed <= MAX_SEED:
                return _seed_in_words(seed), f"a seed from 0 to {MAX_SEED}"
        for seed in self.seeds:
            if seed not in seeds:
                return f"an update along {_seed_in_words(seed)}", "the seed of an evaluation"
        for name, value in (("lr", self.lr), ("zo_eps", self.zo_eps)):
            if not 0 < value <= LARGEST:
                return f"{name} {value}", f"a positive number of at most {LARGEST:.4g}"
        if not 0 <= self.weight_decay <= LARGEST:
            return f"weight_decay {self.weight_decay}", f"a number from 0 to {LARGEST:.4g}"
        for loss in self.losses:
            if not math.isfinite(loss):
                return f"loss {loss}", "a finite loss"
        bounded = [("projected gradient", grad) for grad in self.projected_grads]
        bounded += [("lr * projected gradient", self.lr * grad) for grad in self.projected_grads]
        bounded += [("shift * zo_eps", shift * self.zo_eps) for _, shift in self.evaluations]
        for name, value in [*bounded, ("lr * weight_decay", self.lr * self.weight_decay)]:
            if not abs(value) <= LARGEST:
                return f"{name} {value:.6g}", f"a number from -{LARGEST:.4g} to {LARGEST:.4g}"
        return None

    def _contradiction_of_lengths(self) -> tuple[str, str] | None:
        for name, values in (("evaluations", self.evaluations), ("seeds", self.seeds)):
            if not values:
                return f"no {name}", "one at least"
        if len(self.losses) != len(self.evaluations):
            return f"{len(self.losses)} losses", f"{len(self.evaluations)}, one an evaluation"
        if len(self.projected_grads) != len(self.seeds):
            return f"{len(self.projected_grads)} projected gradients", f"{len(self.seeds)}, one a seed"
        return None


def _seed_in_words(seed: int) -> str:
    return f"seed {seed}" if seed.bit_length() <= 128 else f"a seed of {seed.bit_length()} bits"


class Perturb(NamedTuple):
    """``theta <- theta + ((shift * z) * zo_eps)``."""

    direction: int  # position of z's seed in the program's list
    shift: float  # signed multiple of zo_eps
    zo_eps: float


class Descend(NamedTuple):
    """``theta <- theta - lr * ((projected_grad * z) + (weight_decay * theta))``."""

    direction: int  # position of z's seed in the program's list
    projected_grad: float
    lr: float
    weight_decay: float  # 0 leaves the term out


class Table(NamedTuple):
    """A program in the memory of a device, as compiled kernels read it."""

    instructions: torch.Tensor  # int32 (n, 5): kind, direction, and the bits of three float32 scalars
    scalars: torch.Tensor  # float32 (n, 5): the same memory; scale, rate and weight decay in the last three columns
    directions: torch.Tensor  # int64 (m, 2): seed, and 0 where the address of a z that was drawn before would be


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """What is done to each weight of a parameter, in order: kernels run it in one pass over memory.

    Tables are kept with the program they were coded from, so they live as long as it does: for a sweep.
    """

    seeds: tuple[int, ...]  # of the directions
    instructions: tuple[Perturb | Descend, ...]  # change the weights
    then: Perturb | None = None  # from the weights to a copy of them, which is perturbed
    tables: dict[torch.device, Table] = field(default_factory=dict, init=False, repr=False)  # filled by the kernels


class Distribution(Enum):
    """How independent random numbers with mean 0 and variance 1 are distributed."""

    GAUSSIAN = "gaussian"
    RADEMACHER = "rademacher"  # +1 or -1

    @property
    def group(self) -> int:
        """Elements that counter-based generators draw together."""
        return 256 if self is Distribution.GAUSSIAN else 1024


class Lane(Enum):
    """What kind of work, and who does it."""

    READ = "read"  # disk to host
    UPLOAD = "upload"  # host to device
    ACTIVATIONS_IN = "activations in"  # the same way, for those that waited in host memory
    REPLAY = "replay"  # the device's arithmetic
    EVALUATE = "evaluate"  # the device's perturbing and forwards
    OFFLOAD = "offload"  # device to host
    ACTIVATIONS_OUT = "activations out"  # the same way, to wait there
    WRITE = "write"  # host to disk


COMPUTE = (Lane.REPLAY, Lane.EVALUATE)  # one after the other: together they are one lane


class Event(Protocol):
    """A point in the order of work."""

    @property
    def passed(self) -> bool:
        """Whether all work before it is done."""

    @property
    def seconds(self) -> float:
        """When it passed, on the clock of ``time.perf_counter``; to be asked once it has."""


class LaneUse(NamedTuple):
    """How much of a stretch of time a lane was at work."""

    busy_seconds: float
    nbytes: int


def bound_seconds(uses: Mapping[Lane, LaneUse]) -> float:
    """The time that the slowest lane alone takes; replay and forwards share one."""
    compute = sum(uses[lane].busy_seconds for lane in COMPUTE)
    return max(compute, *(use.busy_seconds for lane, use in uses.items() if lane not in COMPUTE))


class StepResult(NamedTuple):
    """What one step reports."""

    step: int  # 0-based
    loss: float  # of the first evaluation, as MeZO reports it
    losses: tuple[float, ...]  # one an evaluation
    projected_grads: tuple[float, ...]  # one a probe
    seeds: tuple[int, ...]  # one a probe
    lr: float  # applied to each probe, as the journal has it
    seconds: float  # wall time
    lanes: Mapping[Lane, LaneUse]  # busy seconds and bytes of disk, transfers and compute
    landed: float | None  # share of the stored weights that the update changes, by a sample; None: it was not looked at

    @classmethod
    def of(cls, update: Update, seconds: float, lanes: Mapping[Lane, LaneUse], landed: float | None) -> StepResult:
        """The report of a step that led to this update."""
        loss, *_ = update.losses
        grads, seeds = update.projected_grads, update.seeds
        return cls(update.step, loss, update.losses, grads, seeds, update.lr, seconds, lanes=lanes, landed=landed)

    @property
    def bytes_moved(self) -> int:
        """Blocks and activations, uploaded plus offloaded; 0 where the device computes on the buckets themselves."""
        lanes = (Lane.UPLOAD, Lane.OFFLOAD, Lane.ACTIVATIONS_IN, Lane.ACTIVATIONS_OUT)
        return sum(self.lanes[lane].nbytes for lane in lanes)

    @property
    def bound_seconds(self) -> float:
        """What the slowest lane alone takes: no order of work makes a step faster."""
        return bound_seconds(self.lanes)


class EvaluationResult(NamedTuple):
    """What an evaluation reports."""

    loss: float  # mean over labelled tokens
    losses: tuple[float, ...]  # one a batch
    tokens: int  # labelled tokens
    sweeps: int
    seconds: float  # wall time
