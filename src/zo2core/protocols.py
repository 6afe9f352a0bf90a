"""The contracts: three at the core, four that help. A new part is one class that satisfies one of these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from zo2core.types import Batch, BlockLayout, Bucket, Distribution, Evaluation, Event, Lane, ParameterSpec, Update

Activations: TypeAlias = Any  # what a model hands from segment to segment; opaque to the core
SEEDS_IN_TURN = 256  # of a noise generator, at most, that a thread draws from in turn, one chunk after the other
Store: TypeAlias = Sequence[torch.Tensor]  # a segment's owned parameters on the compute device: flat, in layout order
Stores: TypeAlias = Mapping[int, Store]  # those of a segment and of the segments it borrows from, by their positions


class BlockSource(Protocol):
    """Where segments live between visits.

    It brings in what it is told is needed next. Only the scheduler knows that: it alone knows what stays on the device.
    """

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """Segments in visiting order: embedding, blocks, head."""

    @property
    def capacity(self) -> int:
        """How many blocks can be acquired at a time. Embedding and head can always be acquired besides."""

    @property
    def write_back_every(self) -> int | None:
        """How many versions ahead of its bytes on disk a released segment is written. None: it is never written."""

    def prefetch(self, order: Sequence[int]) -> int:
        """Tell which segments are acquired next, and start bringing in as many as is useful. Returns at once.

        Bytes that are needed soon displace bytes that are needed later. An order changes nothing but time: it may be left
        out, be replaced by another one, or not be kept to.

        Args:
            order: Segments in the order in which they are acquired, each once; after the last one comes the first one again,
                until another order is told. What is acquired now may be left out. What else is not listed is not needed.

        Returns:
            How many segments at the head of the order ``acquire`` would give without waiting for a disk. Those further on
            than is read ahead do not count.
        """

    def acquire(self, index: int) -> Bucket:
        """Wait for a segment's bucket. It belongs to the caller until released.

        Raises:
            CheckpointError: if the bytes cannot be read.
            ClosedError: after ``close``.
        """

    def release(self, bucket: Bucket, version: int | None) -> None:
        """Give a bucket back.

        Args:
            bucket: From ``acquire``.
            version: Version of the bytes that the bucket holds now. ``None`` if a visit failed half-way and they are lost:
                the next ``acquire`` then starts again from bytes whose version is known.
        """

    def close(self) -> None:
        """Stop all work and give memory and descriptors back. May be called twice."""


class Visitor(Protocol):
    """What a sweep does at each segment; the scheduler decides when."""

    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        """Do at a segment what the sweep is for.

        Args:
            index: The segment's position in visiting order.
            store: Its parameters, changed in place until ``commit`` and only read afterwards. A resident segment's stay
                valid until the sweep has ended.
            version: Version of ``store`` before.
            commit: Called at most once, with the version of ``store``, as soon as its bytes are final for this sweep: the
                scheduler starts their way back there. A visit that does not call it has changed nothing.
        """

    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the present version, and do nothing else.

        Args:
            index: As for ``visit``.
            store: Changed in place; final when this returns.
            version: Version of ``store`` before.

        Returns:
            The version after.
        """


class Scheduler(Protocol):
    """In which order upload, compute and offload happen. All schedulers give the same bits."""

    def sweep(self, visitor: Visitor, order: Sequence[int]) -> None:
        """Visit the segments in this order. The next sweep is expected to have the same order.

        A segment may be in the order more than once. Between two visits a block is released, and a source keeps what is
        visited again soon; embedding and head stay acquired.

        However the sweep ends, every bucket has been released except those that were brought in for the next sweep already.
        """

    def replayed(self, visitor: Visitor, index: int) -> AbstractContextManager[Bucket]:
        """Bring one segment to the present version, and its bytes to its bucket, which is released at the end.

        The segments after it are expected to be asked for next.
        """

    def release_all(self) -> None:
        """Give back all buckets, after what is newer on the device was brought to them. Sweeps may follow as before."""


class ZOEstimator(Protocol):
    """Scalars only; it never sees a weight."""

    @property
    def lr(self) -> float | Callable[[int], float]:
        """Learning rate, or a function of the 0-based step."""

    @property
    def zo_eps(self) -> float:
        """Perturbation scale."""

    @property
    def perturb_in_place(self) -> bool | None:
        """Whether evaluations walk from one to the next, as MeZO's weights do, or each start from the weights.

        None leaves it to where directions are. An engine then takes a copy that says it: the estimator is a dataclass with
        this field.
        """

    @property
    def distribution(self) -> Distribution | None:
        """How its directions have to be distributed; None: they may be any that have mean 0 and variance 1."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What it computes, as JSON values, for the journal: two estimators of equal options give the same updates."""

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """List what to evaluate.

        Args:
            step: 0-based.
            rng: Seeds for directions, as many as are asked for.
        """

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """Turn losses into an update.

        An estimator has no state: what depends on earlier steps follows from ``past``, so that a resumed run goes on with
        the same bits.

        Args:
            step: 0-based.
            evaluations: What ``evaluations`` gave; of a run of several workers with a deadline, those pairs that were made.
            losses: 0-d tensors, one an evaluation, in the dtype and on the device in which the model computed them: MeZO
                takes their difference there.
            lr: Learning rate of this step.
            past: The run's updates as the journal has them, of which only the first ``step`` are this step's past.
        """


class BlockUpdate(Protocol):
    """An optimizer that changes one segment at a time: its weights as soon as their gradients are there.

    What it keeps from step to step belongs to single parameters or segments, never to all parameters together.
    """

    @property
    def options(self) -> Mapping[str, Any]:
        """The optimizer with its options, as JSON values, for the journal."""

    @property
    def widens_gradients(self) -> bool:
        """Whether 16-bit gradients are converted to float32 before they are measured, clipped and applied."""

    def segments(self, step: int, trained: Sequence[int]) -> Collection[int]:
        """Choose the segments that a step changes.

        Args:
            step: 0-based.
            trained: All segments that own trained parameters.
        """

    def apply(
        self,
        segment: int,
        weights: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        *,
        step: int,
        lr: float,
    ) -> None:
        """Change a segment's weights in place.

        Args:
            segment: Index of the segment.
            weights: Its trained parameters by name, as they are stored: on the device, shaped.
            gradients: Their gradients by name, contiguous; only read. A parameter that the loss does not depend on has none.
            step: 0-based.
            lr: Learning rate of the step.
        """

    def state_bytes(self, layouts: Sequence[BlockLayout]) -> int:
        """Return the most bytes of host memory that its state takes for segments of these layouts."""

    def state_dict(self) -> dict[str, Any]:
        """All that later steps depend on: nested mappings of tensors, which are not copied, and numbers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a copy of what ``state_dict`` returned, of the same optimizer and model."""


class NoiseGenerator(Protocol):
    """z, a function of (seed, parameter) only."""

    @property
    def name(self) -> str:
        """What z is, for the journal: two generators of one name give the same numbers."""

    def chunks(self, parameter: ParameterSpec) -> list[tuple[int, int]]:
        """Cut a parameter's elements into the ``(start, stop)`` chunks in which its z is drawn, in ascending order."""

    def fill(self, out: torch.Tensor, seed: int, parameter: ParameterSpec, start: int = 0) -> None:
        """Write one chunk of one parameter's z. May be called from several threads.

        Args:
            out: 1-D, contiguous, of the parameter's dtype; as long as the chunk.
            seed: Seed of the direction.
            parameter: Whose noise is drawn.
            start: The chunk's first element. Drawing is fastest with parameters in drawing order and chunks in ascending
                order, for up to ``SEEDS_IN_TURN`` seeds in turn.
        """

    def retain(self, seeds: Collection[int]) -> None:
        """Forget what was kept for all other seeds."""


@runtime_checkable
class CounterNoise(NoiseGenerator, Protocol):
    """A noise generator with random access: z by Philox, as ``kernels/philox.py`` numbers it.

    Kernels draw it themselves, again in each pass that uses it, which is faster than to keep it.
    """

    @property
    def distribution(self) -> Distribution:
        """Distribution of the numbers: all that kernels need to know to draw them."""


class Wait(Enum):
    """Why something waits. Each name stands for one order of work that would be broken without the wait."""

    UPLOADED = "replay changes a slot only after the upload into it"
    REPLAYED = "an offload reads a slot only after the replay in it"
    OFFLOADED = "an upload overwrites a slot only after the offload of what was in it"
    EVALUATED = "an upload overwrites a slot only after the forwards that read what was in it"
    RETURNED = "a bucket is released only after the offload into it"
    SENT = "a bucket is released only after the upload from it"
    COMPUTED = "activations are offloaded only after the forward that computed them"
    ACTIVATIONS_OFFLOADED = "activations are uploaded only after their offload"
    STAGING_OFFLOADED = "activations are uploaded into a staging buffer only after the offload of what was in it"
    ACTIVATIONS_UPLOADED = "a forward reads activations only after their upload"
    STAGING_READ = "activations are uploaded into a staging buffer only after the forward that read what was in it"


class Transfer(NamedTuple):
    """A copy in flight. Whoever holds this object keeps both buffers alive."""

    target: torch.Tensor
    source: torch.Tensor
    started: Event
    done: Event


class Streams(Protocol):
    """A device's queues of work: one for compute and one for each lane of copies. Each queue keeps its own order."""

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]) -> Transfer:
        """Start a copy and return at once.

        Args:
            lane: UPLOAD, OFFLOAD, ACTIVATIONS_IN or ACTIVATIONS_OUT.
            target: uint8, 1-D.
            source: uint8, 1-D, as long as ``target``.
            after: Events that the copy waits for, on the device, by the reason.
        """

    def mark(self) -> Event:
        """Return an event that passes once all compute issued so far is done."""

    def order(self, event: Event, why: Wait) -> None:
        """Let compute that is issued from now on begin after an event. The host does not wait."""

    def wait(self, event: Event, why: Wait) -> None:
        """Block the host until an event has passed. No other method does."""


class Device(Protocol):
    """Where segments are computed on."""

    @property
    def torch_device(self) -> torch.device:
        """The device that activations and the work buffer are on."""

    @property
    def in_place(self) -> bool:
        """Whether segments are computed on in their buckets, so that nothing is uploaded or offloaded."""

    @property
    def streams(self) -> Streams:
        """The device's queues of work."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate an exact-size, page-aligned uint8 arena in host memory, as fast to copy from as the device allows."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate uninitialised uint8 memory on the device."""

    def free_memory(self) -> int:
        """Return how many bytes can still be allocated on the device."""

    def close(self) -> None:
        """Wait for work in flight and give all memory back. May be called twice."""


class TensorReader(Protocol):
    """Where the base checkpoint's bytes come from."""

    @property
    def fingerprint(self) -> str:
        """A checksum over samples of the base weights. It tells two bases apart, but not one that was forged."""

    def page_offset(self, spec: ParameterSpec) -> int | None:
        """Return how many bytes behind a page's start a parameter begins on disk.

        None if its bytes on disk are not those it has in memory.
        """

    def itemsize(self, parameter: str) -> int:
        """Return the bytes of an element on disk."""

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill memory with a range of one parameter. May be called from several threads.

        Args:
            parameter: The parameter's name.
            out: 1-D, contiguous host memory of the parameter's dtype, as long as the range.
            start: The range's first element.

        Raises:
            CheckpointError: if the bytes cannot be read whole.
        """

    def origin(self, parameter: str) -> str:
        """Return where a parameter comes from, for messages: the path of its file."""

    def close(self) -> None:
        """Give descriptors back. Whoever reads afterwards opens the files again."""


class Forward(Protocol):
    """How a batch runs through the segments: a model's own way, to its loss, or another that ends in something else."""

    def prepared(self, batch: Batch) -> Batch:
        """Check a batch, on the device and before any sweep: whatever makes the host wait for the device belongs here.

        Returns:
            What ``embed`` and ``head`` take.

        Raises:
            BatchError: if the model cannot take the batch.
        """

    def embed(self, batch: Batch) -> Activations:
        """Run what comes before the blocks.

        Returns:
            All that the batch holds until its next segment: tensors, nested in tuples, lists and dicts at will. None of them
            may share memory with the weights.
        """

    def block(self, index: int, activations: Activations) -> Activations:
        """Run one block; ``index`` counts blocks from 0."""

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Run what comes after the blocks. A model returns the loss, 0-d, as it computes it."""

    def forward_bytes(self, batch: Batch) -> int:
        """Expected peak of what one segment's forward takes, beside what batches hold between segments."""

    def held_bytes(self, batch: Batch) -> int:
        """Expected bytes that the batch holds between segments; nothing is run to learn it."""


@runtime_checkable
class Objective(Forward, Protocol):
    """A forward whose outputs become one number, which steps make smaller. It need not have a gradient."""

    def split(self, batch: Batch, rows: int | None) -> Sequence[Batch]:
        """Cut a batch into micro-batches of at most so many rows, which run one after the other; None leaves it whole.

        A batch that says nothing may have none: beside others it is then left out.
        """

    def loss(self, outputs: Sequence[torch.Tensor], micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Make one number, 0-d, of what the head gave for all micro-batches: of a batch, or of an evaluation."""


class BlockModel(Forward, Protocol):
    """A model cut into embedding, blocks and head: what an adapter gives."""

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """Segments in visiting order: embedding, blocks, head."""

    @property
    def weights(self) -> TensorReader:
        """The base checkpoint."""

    @property
    def description(self) -> Mapping[str, Any]:
        """What beside the weights decides the forwards, as JSON values, for the journal: a config, say."""

    @property
    def companions(self) -> Mapping[str, Path | bytes]:
        """Files an exported model needs beside its weights: name to content, or to the file to copy."""

    @property
    def export_dtype(self) -> torch.dtype | None:
        """To which exported weights are rounded; None: they are written as they are stored."""

    def bind(self, index: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Make these tensors a segment's parameters, until they are bound anew; contents change from visit to visit.

        Args:
            index: The segment's position in visiting order.
            parameters: The name of each parameter that the segment owns or borrows, to a shaped view of the work buffer, in
                the dtype of the forward; different segments' share memory. Later the names of frozen ones alone, to views of
                the bytes that the visited segment brought.
        """


@runtime_checkable
class DifferentiableModel(BlockModel, Protocol):
    """A model whose segments' forwards ``torch.autograd`` can differentiate."""

    def leaves(self, index: int) -> Mapping[str, torch.Tensor]:
        """The parameters that a segment's own modules have since ``bind``, by name: gradients are taken for them."""
