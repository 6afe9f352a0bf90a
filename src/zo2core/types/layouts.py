"""Parameters, how a segment's lie in memory, and the memory that holds them at a version."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from zo2core.types.encodings import Encoding, encoded_bytes

# Note: Alignment. Parameters start at multiples of a cache line inside a bucket and inside the work buffer, as torch's own
# allocator would place them: matrix kernels may choose another path, and other roundings, for unaligned weights.
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
    """One trainable tensor of the model. A tied weight is one parameter."""

    name: str  # as in the model's named_parameters()
    shape: tuple[int, ...]
    dtype: torch.dtype  # in which all the weight's noise and arithmetic are, and it is stored unless it is encoded
    index: int  # position in named_parameters(): the order in which MeZO draws z
    decays: bool  # weight decay applies
    forward_dtype: torch.dtype | None = None  # to which the forward's copy is rounded, once; None: as stored
    transfer_dtype: torch.dtype | None = None  # to which the weight is rounded before it is perturbed; None: it is not
    transfer_back: bool = False  # every update is rounded to it, too: what the store holds is what a device gave back
    encoding: Encoding | None = None  # in which the weight is stored, to be read only; None: it is stored in its dtype
    frozen: bool = False  # it has no noise, no updates and no version: it is only read

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
        """Number of elements that are stored."""
        return self.numel if self.encoding is None else encoded_bytes(self.encoding, self.shape)

    @property
    def nbytes(self) -> int:
        """Stored size in bytes, without alignment."""
        return self.stored_numel * self.stored_dtype.itemsize

    @property
    def is_rounded(self) -> bool:
        """Whether the forward has the weight in another dtype."""
        return self.forward_dtype not in (None, self.dtype)

    @property
    def is_low_bit(self) -> bool:
        """Whether the weight is perturbed from what a device of its own memory is given of it."""
        return self.transfer_dtype not in (None, self.dtype)

    def in_forward(self) -> ParameterSpec:
        """The forward's copy, as a parameter of its own."""
        return self.decoded if self.forward_dtype is None else replace(self.decoded, dtype=self.forward_dtype)

    @property
    def decoded(self) -> ParameterSpec:
        """The parameter as it is after decoding."""
        return self if self.encoding is None else replace(self, encoding=None)


class SavedPart(NamedTuple):
    """A run of a parameter's elements, and the run of a checkpoint's tensor that holds them."""

    tensor: str  # its name
    shape: tuple[int, ...]  # of the whole tensor
    start: int  # the run's first element there
    numel: int  # its elements


@dataclass(frozen=True)
class SavedForm:
    """How a checkpoint keeps a model's tensors where that is not one for each parameter; exports are kept so, too."""

    parts: Mapping[str, Sequence[SavedPart]] = field(default_factory=dict)  # by parameter, in the order of its elements
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by name: tensors that no update changes

    def parts_of(self, spec: ParameterSpec) -> Sequence[SavedPart]:
        """The tensors that hold a parameter; one of its own where nothing else is said."""
        return self.parts.get(spec.name) or (SavedPart(spec.name, spec.shape, 0, spec.numel),)


@runtime_checkable
class KeptOtherwise(Protocol):
    """A model whose checkpoint keeps its tensors in another form than one a parameter."""

    @property
    def saved_form(self) -> SavedForm:
        """In which tensors the checkpoint has the parameters, and what else it has: exported models are kept so, too."""


def saved_form(model: object) -> SavedForm:
    """In which tensors a model's checkpoint is kept."""
    return model.saved_form if isinstance(model, KeptOtherwise) else SavedForm()


class SegmentKind(Enum):
    """What a segment is in the decoder."""

    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


@dataclass(frozen=True)
class BlockLayout:
    """How one segment's parameters lie in its bucket: one after the other, each aligned, unless told otherwise.

    Embedding and head are *resident*: their bytes stay reachable for the whole of a sweep, so that the head can borrow the
    embedding's tied weight. Where blocks are frozen but for a few parameters, these few are the embedding's, too, and the
    blocks borrow them: then blocks never change, and nothing has to go back.
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

    @property
    def trains(self) -> bool:
        """Whether updates lead the segment to new versions: unless it has parameters of its own, and all are frozen."""
        return not self.parameters or not all(spec.frozen for spec in self.parameters)

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
        return tuple(buffer[at : at + spec.nbytes].view(spec.stored_dtype) for at, spec in pairs)


def flat_views(specs: Sequence[ParameterSpec], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a flat typed view of a uint8 buffer for each parameter, one after the other, each aligned."""
    offset = 0
    for spec in specs:
        yield buffer[offset : offset + spec.nbytes].view(spec.stored_dtype)
        offset += aligned(spec.nbytes)


def work_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of a work buffer for segments of these layouts: of the largest one, with what it borrows."""
    return max(packed_bytes([spec.in_forward() for spec in layout.used]) for layout in layouts)


def keeps_unrounded(spec: ParameterSpec, *, perturbs_in_place: bool) -> bool:
    """Whether a weight, as it is stored, is perturbed beside the work buffer, which has it rounded.

    Args:
        spec: The parameter.
        perturbs_in_place: Whether evaluations walk from one to the next. A carried weight is widened before it is
            perturbed, anyway.
    """
    return not spec.frozen and spec.is_rounded and (perturbs_in_place or spec.is_low_bit)


def unrounded_bytes(layouts: Sequence[BlockLayout], *, perturbs_in_place: bool) -> int:
    """Bytes in which weights are perturbed as they are stored, where the work buffer has them rounded."""
    return max(
        packed_bytes([spec for spec in layout.used if keeps_unrounded(spec, perturbs_in_place=perturbs_in_place)])
        for layout in layouts
    )


def divide_tied(layouts: Sequence[BlockLayout]) -> tuple[list[ParameterSpec], list[list[ParameterSpec]]]:
    """Tell the parameters that several segments use from those of one: the tied ones, and each segment's others.

    What is frozen is neither.
    """
    tied = {spec.name: spec for layout in layouts for spec in layout.borrowed if not spec.frozen}
    own = [[spec for spec in layout.parameters if spec.name not in tied and not spec.frozen] for layout in layouts]
    return list(tied.values()), own


def trained(layouts: Sequence[BlockLayout]) -> list[ParameterSpec]:
    """The parameters that have updates, in visiting order."""
    return [spec for layout in layouts for spec in layout.parameters if not spec.frozen]


def packed_bytes(specs: Sequence[ParameterSpec]) -> int:
    """Bytes of these parameters one after the other, each aligned: what ``flat_views`` cuts up."""
    return sum(aligned(spec.nbytes) for spec in specs)


class Bucket(NamedTuple):
    """Host memory that holds one segment's bytes at one version."""

    segment: int  # its position in visiting order
    data: torch.Tensor  # uint8, (layout.nbytes,)
    views: tuple[torch.Tensor, ...]  # layout.views(data), made once
    version: int  # updates 0..version-1 are applied to the bytes, nothing else is
