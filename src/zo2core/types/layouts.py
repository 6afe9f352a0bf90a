"""Readable sizes in bytes.

Parameters, the layout of a segment's parameters in memory, and buckets, which hold their bytes at a version.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from zo2core.types.encodings import Encoding, encoded_bytes

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_LARGEST = 999.5  # a number that rounds to 1000 is written as 1 of the next unit


def shown_bytes(nbytes: float) -> str:
    """Write a size in a decimal unit, with three digits: ``0``, ``812 bytes``, ``1.45 GB``.

    Args:
        nbytes: Number of bytes, at least 0; may be a fraction.
    """
    if nbytes <= 0:
        return "0"
    for unit in _UNITS:
        if nbytes < _LARGEST or unit == _UNITS[-1]:
            break
        nbytes /= 1000
    if unit == "bytes":
        return f"{nbytes:.3g} bytes"
    digits = 2 if nbytes < 9.995 else 1 if nbytes < 99.95 else 0
    return f"{nbytes:.{digits}f} {unit}"


# Note: Alignment. Parameters start at multiples of a cache line in a bucket and in the work buffer, as in memory that torch
# allocates: matrix kernels may choose another path, with other roundings, for unaligned weights.
ALIGNMENT = 64  # bytes


HALVES = (torch.bfloat16, torch.float16)


def widened(values: torch.Tensor) -> torch.Tensor:
    """Convert 16-bit values to float32; others are returned as they are."""
    return values.float() if values.dtype in HALVES else values


def aligned(nbytes: int) -> int:
    """Round a size in bytes up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of the model. A tied weight is one parameter."""

    name: str  # as in the model's named_parameters()
    shape: tuple[int, ...]
    dtype: torch.dtype  # dtype of the noise and of updates, and of the stored weight unless it is encoded
    index: int  # position in named_parameters(): the order in which MeZO draws z
    decays: bool  # whether weight decay applies
    forward_dtype: torch.dtype | None = None  # dtype of the forward's rounded copy; None: the stored dtype
    transfer_dtype: torch.dtype | None = None  # dtype to which it is rounded before perturbations; None: no rounding
    transfer_back: bool = False  # whether the result of every update is rounded to the transfer dtype as well
    encoding: Encoding | None = None  # encoding of the stored weight, which is only read; None: stored in its dtype
    frozen: bool = False  # whether the weight is only read: it has no noise, no updates and no version

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
        """Whether the weight is transferred to a device in another dtype, and perturbed from that."""
        return self.transfer_dtype not in (None, self.dtype)

    def in_forward(self) -> ParameterSpec:
        """Return the specification of the forward's copy."""
        return self.decoded if self.forward_dtype is None else replace(self.decoded, dtype=self.forward_dtype)

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


@dataclass(frozen=True)
class SavedForm:
    """The tensors of a checkpoint, and of an export, that does not store one tensor for each parameter."""

    parts: Mapping[str, Sequence[SavedPart]] = field(default_factory=dict)  # by parameter, in the order of its elements
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)  # tensors that no update changes, by name

    def parts_of(self, spec: ParameterSpec) -> Sequence[SavedPart]:
        """Return the parts of tensors that store a parameter; by default one tensor of its name."""
        return self.parts.get(spec.name) or (SavedPart(spec.name, spec.shape, 0, spec.numel),)


@runtime_checkable
class CustomSavedForm(Protocol):
    """A model whose checkpoint does not store one tensor for each parameter."""

    @property
    def saved_form(self) -> SavedForm:
        """The tensors of the checkpoint, and of exported models."""


def saved_form(model: object) -> SavedForm:
    """Return the tensors of a model's checkpoint."""
    return model.saved_form if isinstance(model, CustomSavedForm) else SavedForm()


class StateSpec(NamedTuple):
    """A tensor that an optimizer keeps from step to step beside a segment's weights. At first it is zero."""

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

    Embedding and head are *resident*: their bytes stay in memory for a whole sweep, so that the head can borrow the
    embedding's tied weight. If blocks are frozen except for a few parameters, the embedding owns these few and the blocks
    borrow them: then blocks never change, and need no offload.
    """

    name: str
    kind: SegmentKind
    parameters: tuple[ParameterSpec, ...]  # owned parameters, whose bytes are in this segment's bucket
    borrowed: tuple[ParameterSpec, ...] = ()  # used parameters that an earlier resident segment owns
    offsets: tuple[int, ...] | None = None  # offset of each parameter and state in the bucket, in bytes; None: packed
    states: tuple[StateSpec, ...] = ()  # tensors of an optimizer, stored in the bucket after the parameters

    @property
    def resident(self) -> bool:
        """Whether the segment stays in memory for a whole sweep."""
        return self.kind is not SegmentKind.BLOCK

    @property
    def nbytes(self) -> int:
        """Size of the bucket in bytes, with alignment."""
        if self.offsets is None:
            return sum(aligned(spec.nbytes) for spec in self.stored)
        return max((start + spec.nbytes for start, spec in zip(self.offsets, self.stored, strict=True)), default=0)

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the start of the bucket that has all parameters and, unless states are packed, no state."""
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

    @property
    def trains(self) -> bool:
        """Whether updates change the segment: False if it owns parameters and all are frozen."""
        return not self.parameters or not all(spec.frozen for spec in self.parameters)

    def views(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return flat typed views of the owned parameters in a buffer, and of the states after them.

        Args:
            buffer: uint8, 1-D, at least ``nbytes`` long, page-aligned.

        Returns:
            One 1-D tensor for each of ``stored``, which shares the buffer's memory.
        """
        if self.offsets is None:
            return tuple(flat_views(self.stored, buffer))
        pairs = zip(self.offsets, self.stored, strict=True)
        return tuple(buffer[start : start + spec.nbytes].view(spec.stored_dtype) for start, spec in pairs)


def flat_views(specs: Sequence[ParameterSpec | StateSpec], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a flat typed view of a uint8 buffer for each parameter, packed with alignment."""
    offset = 0
    for spec in specs:
        yield buffer[offset : offset + spec.nbytes].view(spec.stored_dtype)
        offset += aligned(spec.nbytes)


def work_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Return the bytes of a work buffer: those of the largest segment, with its borrowed parameters."""
    return max(packed_bytes([spec.in_forward() for spec in layout.used]) for layout in layouts)


def keeps_unrounded(spec: ParameterSpec, *, perturbs_in_place: bool) -> bool:
    """Whether a weight is perturbed unrounded, in memory of its own, while the work buffer has the rounded weight.

    Args:
        spec: The parameter.
        perturbs_in_place: Whether weights are perturbed in place from one evaluation to the next. Low-bit weights are always
            converted before they are perturbed.
    """
    return not spec.frozen and spec.is_rounded and (perturbs_in_place or spec.is_low_bit)


def unrounded_bytes(layouts: Sequence[BlockLayout], *, perturbs_in_place: bool) -> int:
    """Return the bytes of unrounded weights of the largest segment, if the work buffer has rounded ones."""
    return max(
        packed_bytes([spec for spec in layout.used if keeps_unrounded(spec, perturbs_in_place=perturbs_in_place)])
        for layout in layouts
    )


def divide_tied(layouts: Sequence[BlockLayout]) -> tuple[list[ParameterSpec], list[list[ParameterSpec]]]:
    """Divide trained parameters into those that several segments use and those of a single segment.

    Returns:
        The tied parameters, and the untied parameters of each segment.
    """
    tied = {spec.name: spec for layout in layouts for spec in layout.borrowed if not spec.frozen}
    untied = [[spec for spec in layout.parameters if spec.name not in tied and not spec.frozen] for layout in layouts]
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
