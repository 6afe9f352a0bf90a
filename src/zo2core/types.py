"""The values that the parts of the library exchange: layouts of segments, programs, steps and their
records, results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

import torch

from zo2core.errors import BatchError, NonFiniteLossError, OptionError

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_NEXT_UNIT_FROM = 999.5  # a number that rounds to 1000 is written as 1 of the next unit


def shown_bytes(nbytes: float) -> str:
    """Write a size in a decimal unit, with three digits: ``0``, ``812 bytes``, ``1.45 GB``.

    Args:
        nbytes: Number of bytes, at least 0; may be a fraction.
    """
    if nbytes <= 0:
        return "0"
    units = iter(_UNITS)
    unit = next(units)
    while nbytes >= _NEXT_UNIT_FROM and unit != _UNITS[-1]:
        nbytes = nbytes / 1000
        unit = next(units)
    if unit == "bytes":
        return f"{nbytes:.3g} bytes"
    digits = 0
    if nbytes < 99.95:
        digits = 1
    if nbytes < 9.995:
        digits = 2
    return f"{nbytes:.{digits}f} {unit}"


# Note: Alignment. Parameters start at multiples of a cache line in a bucket and in the work buffer,
# as in memory that torch allocates: matrix kernels may choose another path, with other roundings,
# for unaligned weights.
ALIGNMENT = 64  # bytes


HALVES = (torch.bfloat16, torch.float16)


def widened(values: torch.Tensor) -> torch.Tensor:
    """Convert 16-bit values to float32; others are returned as they are."""
    return values.float() if values.dtype in HALVES else values


def aligned(nbytes: int) -> int:
    """Round a size in bytes up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class EncodedPart(NamedTuple):
    """One of the tensors of an encoded matrix."""

    role: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes. Parts follow each other without alignment, as in a checkpoint."""
        return math.prod(self.shape) * self.dtype.itemsize


class Encoding(Protocol):
    """How the weights of a matrix are stored in fewer bits: one of ``encodings/forms.py``."""

    @property
    def name(self) -> str:
        """Name of the encoding."""

    def parts(self, shape: Sequence[int], /) -> tuple[EncodedPart, ...]:
        """Tensors in which a matrix of this shape is stored, in their order in memory."""


def encoded_bytes(encoding: Encoding, shape: Sequence[int]) -> int:
    """Return the size of an encoded matrix in bytes."""
    return sum(part.nbytes for part in encoding.parts(shape))


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of the model. A tied weight is one parameter."""

    name: str  # as in the model's named_parameters()
    shape: tuple[int, ...]
    # dtype of the noise and of updates, and of the stored weight unless it is encoded
    dtype: torch.dtype
    index: int  # position in named_parameters(): the order in which MeZO draws z
    decays: bool  # whether weight decay applies
    # dtype of the forward's rounded copy; None: the stored dtype
    forward_dtype: torch.dtype | None = None
    # dtype to which it is rounded before perturbations; None: no rounding
    transfer_dtype: torch.dtype | None = None
    # whether the result of every update is rounded to the transfer dtype as well
    transfer_back: bool = False
    # encoding of the stored weight, which is only read; None: stored in its dtype
    encoding: Encoding | None = None
    # whether the weight is only read: it has no noise, no updates and no version
    frozen: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the stored elements; uint8 for encoded weights."""
        return self.dtype if self.encoding is None else torch.uint8

    @property
    def stored_numel(self) -> int:
        """Number of stored elements."""
        return self.numel if self.encoding is None else encoded_bytes(self.encoding, self.shape)

    @property
    def nbytes(self) -> int:
        """Stored size in bytes, without alignment."""
        return self.stored_numel * self.stored_dtype.itemsize

    @property
    def is_rounded(self) -> bool:
        """Whether the forward uses another dtype than the stored one."""
        return self.forward_dtype not in (None, self.dtype)

    @property
    def is_low_bit(self) -> bool:
        """Whether the weight is transferred to a device in another dtype, and perturbed from
        that.
        """
        return self.transfer_dtype not in (None, self.dtype)

    def in_forward(self) -> ParameterSpec:
        """Return the specification of the forward's copy."""
        return (
            self.decoded
            if self.forward_dtype is None
            else replace(self.decoded, dtype=self.forward_dtype)
        )

    @property
    def decoded(self) -> ParameterSpec:
        """The specification of the decoded parameter."""
        return self if self.encoding is None else replace(self, encoding=None)


class SavedPart(NamedTuple):
    """A range of a parameter's elements, stored as a range of a checkpoint's tensor."""

    tensor: str  # name of the tensor
    shape: tuple[int, ...]  # shape of the whole tensor
    start: int  # first element of the range in the tensor
    numel: int  # number of elements of the range


class FileRange(NamedTuple):
    """A range of a file's bytes."""

    path: Path
    start: int  # byte offset in the file
    nbytes: int


class CopiedTensor(NamedTuple):
    """A tensor of a checkpoint that no parameter takes, and that an export copies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[FileRange, ...]  # one; of an encoded tensor, which is decoded, its parts in order
    encoding: Encoding | None = None


@dataclass(frozen=True)
class SavedForm:
    """The tensors of a checkpoint, and of an export, that does not store one tensor for each
    parameter.
    """

    # by parameter, in the order of its elements
    parts: Mapping[str, Sequence[SavedPart]] = field(default_factory=dict)
    # tensors that no update changes, by name
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # tensors of no parameter, by name
    copied: Mapping[str, CopiedTensor] = field(default_factory=dict)

    def parts_of(self, spec: ParameterSpec) -> Sequence[SavedPart]:
        """Return the parts of tensors that store a parameter; by default one tensor of its name."""
        return self.parts.get(spec.name) or (SavedPart(spec.name, spec.shape, 0, spec.numel),)


def saved_form(model: object) -> SavedForm:
    """Return a model's ``saved_form``: one tensor for each parameter if it has none."""
    form: SavedForm = getattr(model, "saved_form", SavedForm())
    return form


class StateSpec(NamedTuple):
    """A tensor that an optimizer keeps from step to step beside a segment's weights.

    At first it is zero.
    """

    name: str
    shape: tuple[int, ...]
    stored_dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes, without alignment."""
        return math.prod(self.shape) * self.stored_dtype.itemsize


class SegmentKind(Enum):
    """The kind of a segment."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


@dataclass(frozen=True)
class BlockLayout:
    """The layout of one segment's parameters in its bucket: by default packed, each aligned.

    Embedding and head are *resident*: their bytes stay in memory for a whole sweep, so that the
    head can borrow the embedding's tied weight. If blocks are frozen except for a few parameters,
    the embedding owns these few and the blocks borrow them: then blocks never change, and need no
    offload.
    """

    name: str
    kind: SegmentKind
    # owned parameters, whose bytes are in this segment's bucket
    parameters: tuple[ParameterSpec, ...]
    # used parameters that an earlier resident segment owns
    borrowed: tuple[ParameterSpec, ...] = ()
    # offset of each parameter and state in the bucket, in bytes; None: packed
    offsets: tuple[int, ...] | None = None
    # tensors of an optimizer, stored in the bucket after the parameters
    states: tuple[StateSpec, ...] = ()

    @cached_property
    def resident(self) -> bool:
        """Whether the segment stays in memory for a whole sweep."""
        return self.kind is not SegmentKind.BLOCK

    @cached_property
    def nbytes(self) -> int:
        """Size of the bucket in bytes, with alignment."""
        if self.offsets is None:
            return sum(aligned(spec.nbytes) for spec in self.stored)
        return max(
            (start + spec.nbytes for start, spec in zip(self.offsets, self.stored, strict=True)),
            default=0,
        )

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the start of the bucket that has all parameters and, unless states are
        packed, no state.
        """
        if self.offsets is None or not self.states:
            return self.nbytes
        return self.offsets[len(self.parameters)]

    @property
    def stored(self) -> tuple[ParameterSpec | StateSpec, ...]:
        """All tensors in the bucket: owned parameters, then states."""
        return (*self.parameters, *self.states)

    @property
    def used(self) -> tuple[ParameterSpec, ...]:
        """All parameters of the segment's forward, owned ones first."""
        return (*self.parameters, *self.borrowed)

    @cached_property
    def trains(self) -> bool:
        """Whether updates change the segment: False if it owns parameters and all are frozen."""
        return not self.parameters or not all(spec.frozen for spec in self.parameters)

    def views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return flat typed views of the owned parameters in a buffer, and of the states after
        them.

        Args:
            buffer: uint8, 1-D, at least ``nbytes`` long, page-aligned.

        Returns:
            One 1-D tensor for each of ``stored``, which shares the buffer's memory.
        """
        if self.offsets is None:
            return tuple(flat_views(self.stored, buffer))
        pairs = zip(self.offsets, self.stored, strict=True)
        return tuple(
            buffer[start : start + spec.nbytes].view(spec.stored_dtype) for start, spec in pairs
        )


def flat_views(
    specs: Sequence[ParameterSpec | StateSpec], buffer: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Yield a flat typed view of a uint8 buffer for each parameter, packed with alignment."""
    offset = 0
    for spec in specs:
        yield buffer[offset : offset + spec.nbytes].view(spec.stored_dtype)
        offset += aligned(spec.nbytes)


def work_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Return the bytes of a work buffer: those of the largest segment, with its borrowed
    parameters.
    """
    return max(packed_bytes([spec.in_forward() for spec in layout.used]) for layout in layouts)


def keeps_unrounded(spec: ParameterSpec, *, perturbs_in_place: bool) -> bool:
    """Whether a weight is perturbed unrounded, in memory of its own, while the work buffer has the
    rounded weight.

    Args:
        spec: The parameter.
        perturbs_in_place: Whether weights are perturbed in place from one evaluation to the next.
            Low-bit weights are always converted before they are perturbed.
    """
    return not spec.frozen and spec.is_rounded and (perturbs_in_place or spec.is_low_bit)


def unrounded_bytes(layouts: Sequence[BlockLayout], *, perturbs_in_place: bool) -> int:
    """Return the bytes of unrounded weights of the largest segment, if the work buffer has rounded
    ones.
    """
    return max(
        packed_bytes(
            [
                spec
                for spec in layout.used
                if keeps_unrounded(spec, perturbs_in_place=perturbs_in_place)
            ]
        )
        for layout in layouts
    )


def divide_tied(
    layouts: Sequence[BlockLayout],
) -> tuple[list[ParameterSpec], list[list[ParameterSpec]]]:
    """Divide trained parameters into those that several segments use and those of a single segment.

    Returns:
        The tied parameters, and the untied parameters of each segment.
    """
    tied = {spec.name: spec for layout in layouts for spec in layout.borrowed if not spec.frozen}
    untied = [
        [spec for spec in layout.parameters if spec.name not in tied and not spec.frozen]
        for layout in layouts
    ]
    return list(tied.values()), untied


def trained(layouts: Sequence[BlockLayout]) -> list[ParameterSpec]:
    """Return the parameters that are not frozen, in visiting order."""
    return [spec for layout in layouts for spec in layout.parameters if not spec.frozen]


def packed_bytes(specs: Sequence[ParameterSpec]) -> int:
    """Return the bytes of these parameters, packed with alignment as in ``flat_views``."""
    return sum(aligned(spec.nbytes) for spec in specs)


class Bucket(NamedTuple):
    """Host memory that holds one segment's bytes at one version."""

    segment: int  # index in visiting order
    data: torch.Tensor  # uint8, (layout.nbytes,)
    views: tuple[torch.Tensor, ...]  # layout.views(data)
    version: int  # exactly updates 0..version-1 are applied to the bytes


class Perturb(NamedTuple):
    """``theta <- theta + ((shift * z) * zo_eps)``."""

    direction: int  # index of z's seed in the program's seeds
    shift: float  # signed multiple of zo_eps
    zo_eps: float


class Descend(NamedTuple):
    """``theta <- theta - lr * ((projected_grad * z) + (weight_decay * theta))``."""

    direction: int  # index of z's seed in the program's seeds
    projected_grad: float
    lr: float
    weight_decay: float  # 0: the term is omitted


class Table(NamedTuple):
    """A program in a device's memory, encoded for compiled kernels."""

    # int32 (n, 5): kind, direction, and the bits of three float32 scalars
    instructions: torch.Tensor
    # float32 (n, 5): the same memory; scale, rate and weight decay in the last three columns
    scalars: torch.Tensor
    directions: torch.Tensor  # int64 (m, 2): seed, and the address of a drawn z, here 0


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """The instructions for each weight of a parameter, in order; kernels run them in one pass over
    memory.

    A program keeps its encoded tables, which live as long as it does: for a sweep.
    """

    seeds: tuple[int, ...]  # of the directions
    instructions: tuple[Perturb | Descend, ...]  # change the weights
    then: Perturb | None = None  # makes a perturbed copy of the weights afterwards
    # filled by the kernels
    tables: dict[torch.device, Table] = field(default_factory=dict, init=False, repr=False)


class Distribution(Enum):
    """The distribution of independent random numbers with mean 0 and variance 1."""

    GAUSSIAN = "gaussian"
    RADEMACHER = "rademacher"  # +1 or -1

    @property
    def group(self) -> int:
        """Number of elements that counter-based generators draw together."""
        return 256 if self is Distribution.GAUSSIAN else 1024


MAX_SEED = 2**63 - 1
# largest number that may be added to a weight: more overflows float32
LARGEST_FLOAT32 = torch.finfo(torch.float32).max

# inputs of the model's forward: input_ids, attention_mask, labels, ...
Batch: TypeAlias = Mapping[str, torch.Tensor]


def require_tensors(batch: Mapping[str, object]) -> None:
    """Refuse a batch with values that are not tensors.

    Raises:
        BatchError: naming the entry.
    """
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise BatchError(f"batch[{key!r}]", f"a {kind}", "a tensor", "pass only tensors")


class RowGroup(NamedTuple):
    """The rows of a batch on which an evaluation runs: one of several groups of equally many
    rows.
    """

    number: int  # index of the group, from 0
    groups: int  # number of groups


class Evaluation(NamedTuple):
    """One forward at ``theta + shift * zo_eps * z(seed)``."""

    seed: int  # of the direction z
    shift: float  # signed multiple of zo_eps
    rows: RowGroup | None = None  # rows of the batch that it runs on; None: all

    def require_finite(self, loss: torch.Tensor, *, step: int) -> None:
        """Refuse a loss of this evaluation, 0-d, that is not finite.

        Raises:
            NonFiniteLossError: naming the evaluation.
        """
        if not math.isfinite(loss.item()):
            raise NonFiniteLossError(
                f"step {step}, seed {self.seed}, shift {self.shift:+g}",
                found=f"loss {loss.item()}",
                expected="a finite loss",
                remedy=(
                    "lower `lr` or `zo_eps`, or use bfloat16 or float32 where float16 overflows; "
                    "no step was taken"
                ),
            )

    def validated(self) -> Evaluation:
        """Return itself if the seed is in range and the shift is finite.

        Raises:
            OptionError: otherwise.
        """
        if not 0 <= self.seed <= MAX_SEED:
            raise OptionError("seed", repr(self.seed), f"0 to {MAX_SEED}", "pass another seed")
        if not math.isfinite(self.shift):
            raise OptionError("shift", repr(self.shift), "a finite number", "correct the estimator")
        return self


@dataclass(frozen=True, slots=True)
class Update:
    """The record of a zeroth-order step, from which its change of the weights is replayed exactly.

    ``theta <- theta - lr * ((g * z) + (weight_decay * theta))`` for one direction after the other.
    With ``perturb_in_place`` the weights are first perturbed through all evaluations and back,
    whose rounding is part of MeZO's trajectory (MeZO, arXiv 2305.17333, Algorithm 1).
    """

    step: int  # 0-based; the update leads from version step to step + 1
    evaluations: tuple[Evaluation, ...]  # in order
    seeds: tuple[int, ...]  # of each direction
    projected_grads: tuple[float, ...]  # the scalar g of each direction
    lr: float  # applied to each direction
    zo_eps: float
    weight_decay: float
    perturb_in_place: bool
    losses: tuple[float, ...]  # of each evaluation; not needed to replay

    def validated(self) -> Update:
        """Return itself if its projected gradients are finite.

        Raises:
            NonFiniteLossError: if a projected gradient is not finite.
        """
        if not all(math.isfinite(grad) for grad in self.projected_grads):
            raise NonFiniteLossError(
                f"step {self.step}",
                found=f"projected gradients {self.projected_grads}",
                expected="finite projected gradients",
                remedy="raise `zo_eps`: the losses' difference was divided by too small a number; "
                "the step was not taken",
            )
        return self

    def contradiction(self) -> tuple[str, str] | None:
        """Find a value that no estimator can have made.

        Weights in float32 have to stay finite: lr, zo_eps, weight decay, the projected gradients,
        and each product that is added to a weight, ``lr * g``, ``lr * weight_decay`` and ``shift *
        zo_eps``, are at most ``LARGEST_FLOAT32``.

        Returns:
            The finding and the expectation, in words; None if all values are valid.
        """
        return (
            self._contradiction_of_counts()
            or self._contradiction_of_seeds()
            or self._contradiction_of_numbers()
        )

    def _contradiction_of_counts(self) -> tuple[str, str] | None:
        for name, values in (("evaluations", self.evaluations), ("seeds", self.seeds)):
            if not values:
                return f"no {name}", "at least one"
        if len(self.losses) != len(self.evaluations):
            return f"{len(self.losses)} losses", f"{len(self.evaluations)}, one for each evaluation"
        if len(self.projected_grads) != len(self.seeds):
            return (
                f"{len(self.projected_grads)} projected gradients",
                f"{len(self.seeds)}, one for each seed",
            )
        return None

    def _contradiction_of_seeds(self) -> tuple[str, str] | None:
        seeds = {evaluation.seed for evaluation in self.evaluations}
        for seed in seeds:
            if not 0 <= seed <= MAX_SEED:
                return _seed_in_words(seed), f"a seed from 0 to {MAX_SEED}"
        for seed in self.seeds:
            if seed not in seeds:
                return f"an update along {_seed_in_words(seed)}", "the seed of an evaluation"
        return None

    def _contradiction_of_numbers(self) -> tuple[str, str] | None:
        if not 0 < self.zo_eps <= LARGEST_FLOAT32:
            return f"zo_eps {self.zo_eps}", f"a positive number of at most {LARGEST_FLOAT32:.4g}"
        for name, value in (("lr", self.lr), ("weight_decay", self.weight_decay)):
            if not 0 <= value <= LARGEST_FLOAT32:
                return f"{name} {value}", f"a number from 0 to {LARGEST_FLOAT32:.4g}"
        for loss in self.losses:
            if not math.isfinite(loss):
                return f"loss {loss}", "a finite loss"
        bounded = [("projected gradient", grad) for grad in self.projected_grads]
        bounded += [("lr * projected gradient", self.lr * grad) for grad in self.projected_grads]
        bounded += [("shift * zo_eps", shift * self.zo_eps) for _, shift, _ in self.evaluations]
        for name, value in [*bounded, ("lr * weight_decay", self.lr * self.weight_decay)]:
            if not abs(value) <= LARGEST_FLOAT32:
                return (
                    f"{name} {value:.6g}",
                    f"a number from -{LARGEST_FLOAT32:.4g} to {LARGEST_FLOAT32:.4g}",
                )
        return None


@dataclass(frozen=True, slots=True)
class Commit:
    """The record of a first-order step, which cannot be replayed, since a gradient is not a
    scalar.
    """

    step: int  # 0-based
    loss: float  # before the update
    grad_norm: float  # 2-norm of all gradients together, before clipping
    lr: float

    def contradiction(self) -> tuple[str, str] | None:
        """Find a value that no step can have made.

        Returns:
            The finding and the expectation, in words; None if all values are valid.
        """
        for name, value, least in (
            ("loss", self.loss, -math.inf),
            ("grad_norm", self.grad_norm, 0),
            ("lr", self.lr, 0),
        ):
            if not math.isfinite(value):
                return f"{name} {value}", "a finite number"
            if value < least:
                return f"{name} {value}", "a number of at least 0"
        return None


def _seed_in_words(seed: int) -> str:
    return f"seed {seed}" if seed.bit_length() <= 128 else f"a seed of {seed.bit_length()} bits"


class Lane(Enum):
    """A kind of work and the hardware that does it."""

    READ = "read"  # disk to host
    # the host's arithmetic for a device: replays, and conversions to and from the transfer dtype
    HOST = "host"
    UPLOAD = "upload"  # host to device
    ACTIVATIONS_IN = "activations in"  # host to device, for activations
    REPLAY = "replay"  # replays on the device
    EVALUATE = "evaluate"  # perturbations, forwards and backward passes on the device
    OFFLOAD = "offload"  # device to host
    ACTIVATIONS_OUT = "activations out"  # device to host, for activations
    WRITE = "write"  # host to disk


COMPUTE = (Lane.REPLAY, Lane.EVALUATE)  # never at the same time: together they are one lane


class Event(Protocol):
    """A point in the order of work."""

    @property
    def passed(self) -> bool:
        """Whether all work before it is done."""

    @property
    def seconds(self) -> float:
        """When it passed, on the clock of ``time.perf_counter``. Only read once it has passed."""


class LaneUse(NamedTuple):
    """The work of a lane during a step or sweep."""

    busy_seconds: float
    nbytes: int


def bound_seconds(uses: Mapping[Lane, LaneUse]) -> float:
    """Return the busy time of the slowest lane; replays and forwards count as one lane."""
    compute = sum(uses[lane].busy_seconds for lane in COMPUTE)
    return max(compute, *(use.busy_seconds for lane, use in uses.items() if lane not in COMPUTE))


class StepResult(NamedTuple):
    """The result of one step.

    Of a first-order step, the loss is that before the update, and there are no directions.
    """

    step: int  # 0-based
    loss: float  # of the first evaluation, as MeZO reports it
    losses: tuple[float, ...]  # by evaluation; the loss of a first-order step
    projected_grads: tuple[float, ...]  # by direction
    seeds: tuple[int, ...]  # by direction
    lr: float  # applied to each direction, or by the optimizer
    seconds: float  # wall time
    lanes: Mapping[Lane, LaneUse]  # busy seconds and bytes of disk, transfers and compute
    # share of sampled weights that the update changes; None: it was not measured
    share_applied: float | None = None
    # 2-norm of all gradients together, before clipping; None for a zeroth-order step
    grad_norm: float | None = None

    @property
    def bytes_moved(self) -> int:
        """Bytes of blocks and activations that were uploaded and offloaded; 0 if the device
        computes in host memory.
        """
        moving = (Lane.UPLOAD, Lane.OFFLOAD, Lane.ACTIVATIONS_IN, Lane.ACTIVATIONS_OUT)
        return sum(self.lanes[lane].nbytes for lane in moving)

    @property
    def bound_seconds(self) -> float:
        """Busy time of the slowest lane: no order of work makes a step faster."""
        return bound_seconds(self.lanes)


class EvaluationResult(NamedTuple):
    """The result of an evaluation."""

    loss: float  # mean over labelled tokens
    losses: tuple[float, ...]  # by batch
    tokens: int  # labelled tokens; 0 for an objective, which may not be a mean over tokens
    sweeps: int
    seconds: float  # wall time
