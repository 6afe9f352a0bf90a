"""The contracts between the parts of the library.

A new part is a class that satisfies one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from zo2core.types import (
    Batch,
    BlockLayout,
    Bucket,
    Distribution,
    Evaluation,
    Event,
    Lane,
    ParameterSpec,
    StateSpec,
    Update,
)

Activations: TypeAlias = Any  # values that a model passes from segment to segment
SEEDS_IN_TURN = 256  # most seeds from which a thread draws alternately, one chunk after the other
# a segment's owned parameters on the compute device: flat, in layout order
Store: TypeAlias = Sequence[torch.Tensor]
# stores of a segment and of the segments that it borrows from, by segment
Stores: TypeAlias = Mapping[int, Store]
# The work of a sweep at a segment, given its index, store and version, and ``commit``. See
# ``Scheduler.sweep``.
VisitSegment: TypeAlias = Callable[[int, Store, int, Callable[[int], None]], None]
# Brings a segment to the present version, given its index, store and version, and returns that
# version.
ReplaySegment: TypeAlias = Callable[[int, Store, int], int]


class BlockSource(Protocol):
    """Stores segments between visits, and reads ahead in the order that the scheduler requests."""

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """Segments in visiting order: embedding, blocks, head."""

    @property
    def capacity(self) -> int:
        """Number of blocks that can be acquired at a time, in addition to embedding and head."""

    @property
    def write_back_every(self) -> int | None:
        """Versions that a segment may be ahead of its bytes on disk; None: segments are never
        written.
        """

    def prefetch(self, order: Sequence[int]) -> int:
        """Set the order of the next acquisitions, and start to read ahead. Returns at once.

        Segments that are needed soon replace segments that are needed later. An order only affects
        speed: it is optional, may be replaced, and need not be followed.

        Args:
            order: Indices of segments in the order of their acquisition, each once. It repeats
                until the next call. Acquired segments may be left out; other segments that are not
                listed are not needed.

        Returns:
            Number of segments at the start of the order that can be acquired without waiting for a
            disk, at most as many as are read ahead.
        """

    def acquire(self, index: int) -> Bucket:
        """Wait for a segment's bucket, which belongs to the caller until it is released.

        Raises:
            CheckpointError: if the bytes cannot be read.
            ClosedError: after ``close``.
        """

    def release(self, bucket: Bucket, version: int | None) -> None:
        """Return a bucket to the source.

        Args:
            bucket: A bucket from ``acquire``.
            version: Version of its bytes. None: a visit failed and the bytes are invalid; the next
                ``acquire`` starts again from bytes of a known version.
        """

    def close(self) -> None:
        """Stop all work, and free memory and file descriptors. May be called twice."""


class Scheduler(Protocol):
    """Decides the order of uploads, compute and offloads. All schedulers give the same bits."""

    def sweep(self, visit: VisitSegment, order: Sequence[int]) -> None:
        """Visit the segments in this order. The next sweep is expected to have the same order.

        A visit gets the index of the segment in visiting order; its parameters, which it changes in
        place before ``commit`` and only reads afterwards (those of a resident segment stay valid
        until the end of the sweep); the version of its bytes; and ``commit``, which it calls at
        most once, with the new version, when the bytes are final for this sweep: the scheduler may
        offload them from then on. A visit that does not call it has changed nothing.

        A block may be in the order more than once: it is released between two visits, and a source
        keeps segments that are visited again soon. Embedding and head are in the order once, except
        that a first-order sweep visits the embedding again where it is trained.

        However the sweep ends, all buckets are released, except those that were acquired early for
        the next sweep.
        """

    def replayed(self, replay: ReplaySegment, index: int) -> AbstractContextManager[Bucket]:
        """Bring one segment to the present version, with its bytes in its bucket, which is released
        at the end.

        The following segments are expected to be requested next.
        """

    def release_all(self) -> None:
        """Offload newer bytes that stay on the device, and release all buckets.

        Further sweeps may follow.
        """


class ZOEstimator(Protocol):
    """Chooses the evaluations of a step, and computes an update from their losses.

    It never accesses weights.
    """

    @property
    def lr(self) -> float | Callable[[int], float]:
        """Learning rate, or a function of the 0-based step."""

    @property
    def zo_eps(self) -> float:
        """Perturbation scale."""

    @property
    def perturb_in_place(self) -> bool | None:
        """Whether weights are perturbed in place from one evaluation to the next, as in MeZO, or
        each time from the weights.

        None: an engine chooses by its perturbation, and uses a copy with that value. The estimator
        is then a dataclass with this field.
        """

    @property
    def distribution(self) -> Distribution | None:
        """Distribution that its directions must have; None: any with mean 0 and variance 1."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options as JSON values, for the journal: two estimators with equal options compute the
        same updates.
        """

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """List the evaluations of a step.

        Args:
            step: 0-based step.
            rng: Yields seeds for directions.
        """

    def update(
        self,
        step: int,
        evaluations: Sequence[Evaluation],
        losses: Sequence[torch.Tensor],
        lr: float,
        past: Sequence[Update],
    ) -> Update:
        """Compute the update from losses.

        An estimator has no state: values of earlier steps are computed from ``past``, so that a
        resumed run has the same bits.

        Args:
            step: 0-based step.
            evaluations: The evaluations of the step.
            losses: Loss of each evaluation, 0-d, with the dtype and device of the model's loss, in
                which MeZO subtracts them.
            lr: Learning rate of this step.
            past: The run's updates from the journal, of which only the first ``step`` precede this
                step.
        """


class UpdateInputs(NamedTuple):
    """What an optimizer changes at a segment, and by what."""

    segment: int  # index of the segment
    # trained parameters by name, as stored: on the device, shaped; changed in place
    weights: Mapping[str, torch.Tensor]
    # by name, contiguous, only read; none of what the loss does not depend on
    gradients: Mapping[str, torch.Tensor]
    # Its states by name, as ``states`` lists them, in host memory; changed in place. Those that are
    # not in the dictionary yet are made when they are asked for, unless another tensor is put in
    # their place.
    states: dict[str, torch.Tensor]
    step: int  # 0-based
    lr: float  # of the step


@runtime_checkable
class BlockUpdate(Protocol):
    """An optimizer that changes one segment at a time: its weights as soon as their gradients are
    there.

    What it keeps from step to step belongs to single parameters or segments, never to all
    parameters together. A class that inherits from this one need only define what differs from the
    bodies here: no state, and all segments at each step.
    """

    @property
    def options(self) -> Mapping[str, Any]:
        """The optimizer with its options, as JSON values, for the journal."""

    @property
    def rates(self) -> Mapping[str, Any]:
        """The learning rates that it has beside that of ``FirstOrder``, as JSON values, for the
        journal.
        """
        return {}

    @property
    def widens_gradients(self) -> bool:
        """Whether 16-bit gradients are converted to float32 before they are measured, clipped and
        applied.
        """
        return True

    @property
    def copies(self) -> int:
        """Most float32 tensors of the size of one parameter that ``apply`` has at a time, by which
        memory is planned.
        """
        return 0

    @property
    def turn(self) -> int | None:
        """Steps after each multiple of which all states are forgotten; None: never."""
        return None

    def segments(self, step: int, trained: Sequence[int]) -> Collection[int]:
        """Choose the segments that a step changes.

        Args:
            step: 0-based.
            trained: All segments that own trained parameters.
        """
        return trained

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """List the tensors that it keeps from step to step beside a segment's weights.

        They are zero at first.
        """
        return ()

    def apply(self, inputs: UpdateInputs) -> None:
        """Change a segment's weights in place."""

    def settle(self) -> None:
        """Finish work on weights and states that ``apply`` has left to another thread."""
        return


class WrappedUpdate(BlockUpdate):
    """Another optimizer, without what a class that inherits from this one defines otherwise.

    Args:
        update: The optimizer. It changes all segments at each step.
    """

    def __init__(self, update: BlockUpdate) -> None:
        self._update = update

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the optimizer."""
        return self._update.options

    @property
    def rates(self) -> Mapping[str, Any]:
        """The learning rates that the optimizer has of its own."""
        return self._update.rates

    @property
    def widens_gradients(self) -> bool:
        """Whether the optimizer gets 16-bit gradients in float32."""
        return self._update.widens_gradients

    @property
    def copies(self) -> int:
        """Most float32 tensors of the size of one parameter that the optimizer has at a time."""
        return self._update.copies

    def segments(self, step: int, trained: Sequence[int]) -> Collection[int]:
        """The segments that the optimizer changes in a step."""
        return self._update.segments(step, trained)

    def settle(self) -> None:
        """Finish the work of the optimizer."""
        self._update.settle()


class NoiseGenerator(Protocol):
    """Draws z, which depends only on seed and parameter."""

    @property
    def name(self) -> str:
        """Name for the journal: two generators with the same name draw the same numbers."""

    def chunks(self, parameter: ParameterSpec) -> list[tuple[int, int]]:
        """Divide a parameter's elements into the ``(start, stop)`` chunks in which its z is drawn,
        in ascending order.
        """

    def fill(self, out: torch.Tensor, seed: int, parameter: ParameterSpec, start: int = 0) -> None:
        """Write one chunk of one parameter's z. May be called from several threads.

        Args:
            out: 1-D, contiguous, with the parameter's dtype and the chunk's length.
            seed: Seed of the direction.
            parameter: The parameter.
            start: First element of the chunk. Drawing is fastest with parameters in drawing order
                and chunks in ascending order, alternating between at most ``SEEDS_IN_TURN`` seeds.
        """

    def retain(self, seeds: Collection[int]) -> None:
        """Free the state of all other seeds."""


@runtime_checkable
class CounterNoise(NoiseGenerator, Protocol):
    """A noise generator with random access: z by Philox, as ``kernels/reference.py`` documents it.

    Kernels draw z themselves, again in each pass that uses it, which is faster than to keep it in
    memory.
    """

    @property
    def distribution(self) -> Distribution:
        """Distribution of the numbers."""


class Wait(Enum):
    """The reason of a wait. Each is one ordering of work that is only guaranteed by the wait."""

    UPLOADED = "replay changes a slot only after the upload into it"
    REPLAYED = "an offload reads a slot only after the replay in it"
    OFFLOADED = "an upload overwrites a slot only after the offload of what was in it"
    EVALUATED = "an upload overwrites a slot only after the forwards that read what was in it"
    RETURNED = "a bucket is released only after the offload into it"
    SENT = "a bucket is released only after the upload from it"
    COMPUTED = "activations are offloaded only after the forward that computed them"
    STAGING_OFFLOADED = (
        "freed memory is used again, and what was in it uploaded, only after its offload"
    )
    ACTIVATIONS_UPLOADED = "a forward reads activations only after their upload"
    INPUT_OFFLOADED = (
        "activations in host memory are written to disk only after their copy from the device"
    )
    INPUT_UPLOADED = "the host uses memory of activations again only after their copy to the device"
    STAGING_READ = "freed memory is uploaded into only after the forward that read what was in it"


class Transfer(NamedTuple):
    """A copy in flight. The object keeps both buffers alive."""

    target: torch.Tensor
    source: torch.Tensor
    started: Event
    done: Event


class Streams(Protocol):
    """A device's queues of work: one for compute and one for each lane of copies.

    Each queue runs in order.
    """

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]
    ) -> Transfer:
        """Start a copy and return at once.

        Args:
            lane: UPLOAD, OFFLOAD, ACTIVATIONS_IN or ACTIVATIONS_OUT.
            target: uint8, 1-D.
            source: uint8, 1-D, with the length of ``target``.
            after: Events for which the copy waits on the device, by reason.
        """

    def mark(self) -> Event:
        """Return an event that passes when all compute issued so far is done."""

    def order(self, event: Event, why: Wait) -> None:
        """Make compute that is issued from now on start after an event. The host does not wait."""

    def wait(self, event: Event, why: Wait) -> None:
        """Block the host until an event has passed. No other method blocks it."""


class Device(Protocol):
    """The device that runs the forwards of segments."""

    @property
    def torch_device(self) -> torch.device:
        """Device of activations and the work buffer."""

    @property
    def in_place(self) -> bool:
        """Whether the device computes in the buckets in host memory, without uploads and
        offloads.
        """

    @property
    def streams(self) -> Streams:
        """The device's queues of work."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate page-aligned uint8 host memory of exactly this size, page-locked if the device
        benefits from it.
        """

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate uninitialised uint8 memory on the device."""

    def free_memory(self) -> int:
        """Return the free memory of the device in bytes."""

    def close(self) -> None:
        """Wait for work in flight and free all memory. May be called twice."""


class TensorReader(Protocol):
    """Reads the base checkpoint."""

    @property
    def fingerprint(self) -> str:
        """A checksum over samples of the base weights.

        It identifies a base, but does not protect against forgery.
        """

    def page_offset(self, spec: ParameterSpec) -> int | None:
        """Return the offset of a parameter from the start of a page on disk, in bytes.

        None if its bytes on disk differ from those in memory.
        """

    def itemsize(self, parameter: str) -> int:
        """Return the size of an element on disk, in bytes."""

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill memory with a range of one parameter. May be called from several threads.

        Args:
            parameter: Name of the parameter.
            out: 1-D, contiguous host memory with the parameter's dtype and the length of the range.
            start: First element of the range.

        Raises:
            CheckpointError: if not all bytes can be read.
        """

    def origin(self, parameter: str) -> str:
        """Return the path of a parameter's file, for messages."""

    def close(self) -> None:
        """Close file descriptors. A later read opens the files again."""


class Forward(Protocol):
    """Runs a batch through the segments, to the model's loss or another output."""

    def prepared(self, batch: Batch) -> Batch:
        """Check a batch on the device before a sweep.

        Checks for which the host waits for the device belong here.

        Returns:
            The batch for ``embed`` and ``head``.

        Raises:
            BatchError: if the model cannot take the batch.
        """

    def embed(self, batch: Batch) -> Activations:
        """Run the modules before the blocks.

        Returns:
            All values that the batch keeps until the next segment: tensors, nested in tuples, lists
            and dicts. No tensor may share memory with the weights.
        """

    def block(self, index: int, activations: Activations) -> Activations:
        """Run one block; ``index`` counts blocks from 0."""

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Run the modules after the blocks. A model returns its loss, 0-d."""

    def forward_bytes(self, batch: Batch) -> int:
        """Expected peak memory of one segment's forward in bytes, without activations between
        segments.
        """

    def held_bytes(self, batch: Batch) -> int:
        """Expected memory of the batch's activations between segments in bytes, estimated without a
        forward.
        """


@runtime_checkable
class DifferentiatedForward(Forward, Protocol):
    """A forward that knows what its backward takes. Of others, it is estimated."""

    def backward_bytes(self, batch: Batch) -> int:
        """Expected peak memory of one segment's forward and backward in bytes, without activations
        between segments.
        """


@runtime_checkable
class Objective(Forward, Protocol):
    """A forward with a loss that is computed from its outputs and minimised.

    It need not be differentiable.
    """

    def split(self, batch: Batch, rows: int | None) -> Sequence[Batch]:
        """Split a batch into micro-batches of at most ``rows`` rows; None does not split it.

        The result may be empty for a batch without a loss, which is then left out if there are
        others.
        """

    def loss(self, outputs: Sequence[torch.Tensor], micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Compute one number, 0-d, from the head's outputs for all micro-batches of a batch or an
        evaluation.
        """


class BlockModel(Forward, Protocol):
    """A model that is divided into embedding, blocks and head.

    One that reads parameters outside its segments says so by ``forwards_only = True``: it takes no
    steps. One that adds terms to its loss for training alone has ``measured``, the ``Forward``
    without them, by which it is evaluated.
    """

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """Segments in visiting order: embedding, blocks, head."""

    @property
    def weights(self) -> TensorReader:
        """The base checkpoint."""

    @property
    def description(self) -> Mapping[str, Any]:
        """Further values on which the forwards depend, such as a config, as JSON values for the
        journal.
        """

    @property
    def companions(self) -> Mapping[str, Path | bytes]:
        """Files of an exported model besides its weights: content, or path of the file to copy, by
        name.
        """

    @property
    def export_dtype(self) -> torch.dtype | None:
        """Dtype of exported weights; None: the stored dtype."""

    def bind(self, index: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Make these tensors the parameters of a segment's modules; their contents change at each
        visit.

        Args:
            index: Index of the segment in visiting order.
            parameters: At first, shaped views of the work buffer in the forward's dtype, by name,
                for all parameters of the segment; segments share this memory. In visits, views of
                the segment's store for frozen parameters.
        """


@runtime_checkable
class ModelOfFiles(Protocol):
    """A model that was opened from files, which have to stay as they were."""

    def require_unchanged(self) -> None:
        """Refuse files that have changed since. Called before each step and each export.

        Raises:
            CheckpointError: naming the file.
        """


@runtime_checkable
class RoomTakingModel(BlockModel, Protocol):
    """A model that takes memory again and again within a segment, as for chunks of logits."""

    make_room: Callable[[int], object]
    """Called before so many bytes are taken; freed memory returns to the system, if a limit
    would be exceeded. The engine sets it.
    """


@runtime_checkable
class MeasuredModel(BlockModel, Protocol):
    """A model that has measured what a batch's forward takes, as ``forward_bytes`` says it."""

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:
        """Take the largest of several processes' measurements, by which all of them group batches
        alike.

        Args:
            gather: Sends a JSON value, and returns the values of all processes.
        """


@runtime_checkable
class DifferentiableModel(BlockModel, Protocol):
    """A model whose segments ``torch.autograd`` can differentiate."""

    def leaves(self, index: int) -> Mapping[str, torch.Tensor]:
        """Return the parameters that a segment's modules have since ``bind``, by name, for
        gradients.
        """
