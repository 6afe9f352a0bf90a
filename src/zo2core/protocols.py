"""The contracts: three at the core, four that help. A new part is one class that satisfies one of these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from zo2core.types import Batch, BlockLayout, Bucket, Evaluation, ParameterSpec, Update

Activations: TypeAlias = Any  # what a model hands from segment to segment; opaque to the core
SEEDS_IN_TURN = 256  # of a noise generator, at most, that a thread draws from in turn, one piece after the other
Store: TypeAlias = Sequence[torch.Tensor]  # a segment's owned parameters on the compute device: flat, in layout order


class BlockSource(Protocol):
    """Where segments live between visits."""

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """Segments in visiting order: embedding, blocks, head."""

    def prefetch(self, index: int) -> None:
        """Start bringing a segment into its bucket and return at once. A hint: it may be left out or repeated."""

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
            version: Of the bytes that are in it now; ``None`` if they are lost (a visit failed half-way), so that the next
                ``acquire`` has to start again from bytes whose version is known.
        """

    def close(self) -> None:
        """Stop all work and give memory and descriptors back. May be called twice."""


class Visitor(Protocol):
    """What a sweep does at each segment; the scheduler decides when."""

    def replay(self, index: int, store: Store, version: int) -> int:
        """Bring a segment to the present version. Its bytes are final for this sweep when this returns.

        Args:
            index: Of the segment.
            store: Its parameters, changed in place.
            version: Of ``store`` before.

        Returns:
            The version after.
        """

    def evaluate(self, index: int, store: Store) -> None:
        """Run the segment's forwards at the perturbed weights. ``store`` is read only.

        A resident segment's ``store`` must stay valid until the sweep has ended.
        """


class Scheduler(Protocol):
    """In which order upload, compute and offload happen. All schedulers give the same bits."""

    def sweep(self, visitor: Visitor, order: Sequence[int]) -> None:
        """Visit the segments once each, in this order. However it ends, every bucket has been released."""


class ZOEstimator(Protocol):
    """Scalars only; it never sees a weight."""

    @property
    def lr(self) -> float | Callable[[int], float]:
        """Learning rate, or a function of the 0-based step."""

    @property
    def zo_eps(self) -> float:
        """Perturbation scale."""

    @property
    def perturb_in_place(self) -> bool:
        """Whether evaluations walk from one to the next, as MeZO's weights do, or each start from the weights."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What it computes, as JSON values, for the journal: two estimators of equal options give the same updates."""

    def evaluations(self, step: int, rng: Iterator[int]) -> tuple[Evaluation, ...]:
        """List what to evaluate.

        Args:
            step: 0-based.
            rng: Seeds for directions, as many as are asked for.
        """

    def update(self, step: int, evaluations: Sequence[Evaluation], losses: Sequence[torch.Tensor], lr: float) -> Update:
        """Turn losses into an update.

        Args:
            step: 0-based.
            evaluations: What ``evaluations`` gave.
            losses: 0-d tensors, one an evaluation, in the dtype and on the device in which the model computed them: MeZO
                takes their difference there.
            lr: Of this step.
        """


class NoiseGenerator(Protocol):
    """z, a function of (seed, parameter) only."""

    @property
    def name(self) -> str:
        """What z is, for the journal: two generators of one name give the same numbers."""

    def pieces(self, parameter: ParameterSpec) -> list[tuple[int, int]]:
        """Cut a parameter's elements into the ``(start, stop)`` pieces in which its z is drawn, in ascending order."""

    def fill(self, out: torch.Tensor, seed: int, parameter: ParameterSpec, start: int = 0) -> None:
        """Write one piece of one parameter's z. May be called from several threads.

        Args:
            out: 1-D, contiguous, of the parameter's dtype; as long as the piece.
            seed: Of the direction.
            parameter: Whose noise.
            start: The piece's first element. Parameters in drawing order and pieces in ascending order is the fast way, for
                up to ``SEEDS_IN_TURN`` seeds in turn.
        """

    def retain(self, seeds: Collection[int]) -> None:
        """Forget what was kept for all other seeds."""


class Device(Protocol):
    """Where segments are computed on."""

    @property
    def torch_device(self) -> torch.device:
        """Of activations and of the work buffer."""

    @property
    def bytes_moved(self) -> int:
        """Bytes uploaded and offloaded since construction."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate an exact-size, page-aligned uint8 arena in host memory, as fast to copy from as the device allows."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate uninitialised uint8 memory on the device."""

    def upload(self, bucket: Bucket, layout: BlockLayout) -> Store:
        """Make a bucket's parameters reachable on the device."""

    def offload(self, store: Store, bucket: Bucket) -> None:
        """Bring an uploaded store's bytes back to its bucket."""

    def close(self) -> None:
        """Give all memory back; nobody uses it any more. May be called twice."""


class TensorReader(Protocol):
    """Where the base checkpoint's bytes come from."""

    @property
    def fingerprint(self) -> str:
        """Identifies the base weights, by samples of them: tells two bases apart unless somebody takes pains."""

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill memory with a range of one parameter. May be called from several threads.

        Args:
            parameter: Its name.
            out: 1-D, contiguous host memory of the parameter's dtype, as long as the range.
            start: The range's first element.

        Raises:
            CheckpointError: if the bytes cannot be read whole.
        """

    def close(self) -> None:
        """Give descriptors back. May be called twice."""


class BlockModel(Protocol):
    """A model cut into embedding, blocks and head: what an adapter gives."""

    @property
    def layouts(self) -> Sequence[BlockLayout]:
        """Segments in visiting order: embedding, blocks, head."""

    @property
    def weights(self) -> TensorReader:
        """The base checkpoint."""

    @property
    def companions(self) -> Mapping[str, Path | bytes]:
        """Files an exported model needs beside its weights: name to content, or to the file to copy."""

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Make these tensors the model's parameters, for good. Called once; their contents change from visit to visit.

        Args:
            parameters: Parameter name to a shaped view of the work buffer. Different segments' share memory.
        """

    def embed(self, batch: Batch) -> Activations:
        """Run what comes before the blocks.

        Raises:
            BatchError: if the model cannot take the batch.
        """

    def block(self, index: int, activations: Activations) -> Activations:
        """Run one block; ``index`` counts blocks from 0."""

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Run what comes after the blocks and return the loss, 0-d, as the model itself computes it."""
