"""The engine: steps, evaluations and exports of a model that is never whole in its device's memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch

from zo2core.arrangement import Arrangement, arrange, check_lags
from zo2core.checkpoint import require_unused, write_checkpoint
from zo2core.devices import CudaDevice, HostDevice
from zo2core.errors import BatchError, BusyError, ClosedError, NonFiniteLossError, OptionError
from zo2core.estimators import require_positive
from zo2core.journal import Journal
from zo2core.noise import SequentialNoise
from zo2core.protocols import BlockModel, BlockSource, Device, NoiseGenerator, Scheduler, ZOEstimator
from zo2core.schedulers import SerialScheduler
from zo2core.types import Batch, Evaluation, EvaluationResult, ParameterSpec, StepResult, Update
from zo2core.visit import SegmentVisitor
from zo2core.workspace import Workspace


class ZOEngine:
    """Zeroth-order fine-tuning, segment by segment.

    Parts that are not passed are chosen. All parts, also passed ones, belong to the engine and are closed with it.

    Args:
        model: Cut into embedding, blocks and head; of an adapter, or your own. One engine a model.
        estimator: What to evaluate, and what the losses say about the weights. None for an engine that takes no steps, only
            evaluates and exports what a journal holds.
        source: Where segments live; by default a ``PinnedSource`` over the model's checkpoint, or a ``StreamedSource`` if
            that does not fit into ``memory``.
        scheduler: Builds the scheduler from source and device; by default ``SerialScheduler``.
        noise: Draws z; by default ``SequentialNoise``, MeZO's numbers.
        device: "cpu", "cuda", "cuda:N" or a ``Device``.
        journal: Updates so far and to come; by default a new one in memory. A journal with updates continues its run.
        seed: Of the run: each step's directions depend on it and on the step only.
        batches_per_sweep: How many evaluation batches share one pass over the segments; their activations are held.
        memory: Host memory the process may have in all, in bytes or as a size ("6GiB"); "auto" takes what is free.
        activation_bytes: Of that, set aside for activations and logits.
        scratch: Directory to write changed segments back to. Together with the journal's file it is what a later engine
            goes on from; without it blocks are never written, and a resumed run replays the whole journal.
        write_back_every: A segment is written once it is this many steps ahead of its bytes on disk; "auto" weighs the
            measured speeds of noise and disk; None never writes.
        snapshot_every: Bounds what a resumed run has to replay: ``write_back_every`` is at most this.

    Raises:
        OptionError: if an option is out of its range.
        MemoryBudgetError: if not even the smallest arrangement fits into ``memory``.
        ScratchError: if ``scratch`` cannot be written to.
        JournalError: if the journal belongs to another base checkpoint, other parameters or other noise.
        CheckpointError: if the checkpoint cannot be read.
        DeviceError: if the device is not there, or has not the memory.
    """

    def __init__(
        self,
        model: BlockModel,
        estimator: ZOEstimator | None,
        *,
        source: BlockSource | None = None,
        scheduler: Callable[[BlockSource, Device], Scheduler] | None = None,
        noise: NoiseGenerator | None = None,
        device: Device | str = "cpu",
        journal: Journal | None = None,
        seed: int = 0,
        batches_per_sweep: int = 8,
        memory: int | str = "auto",
        activation_bytes: int = 256 << 20,
        scratch: Path | str | None = None,
        write_back_every: int | Literal["auto"] | None = "auto",
        snapshot_every: int | None = None,
    ) -> None:
        if batches_per_sweep < 1:
            raise OptionError(
                "batches_per_sweep",
                found=repr(batches_per_sweep),
                expected="at least 1",
                remedy="leave it at its default",
            )
        check_lags(source, scratch, write_back_every, snapshot_every)
        self._model = model
        self._estimator = estimator
        self._device = _device(device)
        self._noise = SequentialNoise(model.layouts, self._device.torch_device) if noise is None else noise
        self._journal = Journal() if journal is None else journal
        with contextlib.ExitStack() as undo:  # an engine that cannot be made closes its parts, as a made one does
            for part in (self._device, model.weights, self._journal, source):
                if part is not None:
                    undo.callback(part.close)
            self.arrangement: Arrangement | None = None  # of host memory; None for a source that was passed
            self.write_back_every: int | None = None
            if source is None:
                on_host = self._device.torch_device.type == "cpu"
                self.arrangement = arrange(
                    model.layouts, memory=memory, activation_bytes=activation_bytes, compute_on_host=on_host
                )
                if noise is None:
                    self._noise = SequentialNoise(model.layouts, self._device.torch_device, memory=self.arrangement.spare)
            self._journal.begin(
                {
                    "base": model.weights.fingerprint,
                    "parameters": _digest(model),
                    "noise": self._noise.name,
                    "estimator": None if estimator is None else estimator.options,
                    "seed": None if estimator is None else seed,
                }
            )
            if source is None:
                assert self.arrangement is not None
                source, self.write_back_every = self.arrangement.source(
                    model,
                    self._noise,
                    self._device.host_memory,
                    self._journal.chain,
                    scratch=scratch,
                    write_back_every=write_back_every,
                    snapshot_every=snapshot_every,
                )
                undo.callback(source.close)
            self._source = source
            self._scheduler = (SerialScheduler if scheduler is None else scheduler)(self._source, self._device)
            keep_noise = self.arrangement is None or self.arrangement.keep_noise
            self._workspace = Workspace(model.layouts, self._device, self._noise, keep_noise=keep_noise)
            on_cpu = self._device.torch_device.type == "cpu"  # elsewhere one host thread issues the work of all
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="zo2-perturb") if on_cpu else None
            self._seed = seed
            self._batches_per_sweep = batches_per_sweep
            self._closed = False
            self._busy = False
            model.bind(self._workspace.parameters())
            undo.pop_all()

    @property
    def version(self) -> int:
        """Steps taken so far: the present version of the weights."""
        return len(self._journal.updates)

    @property
    def journal(self) -> Journal:
        """The updates of all steps so far."""
        return self._journal

    def step(self, batch: Batch, *, seed: int | None = None) -> StepResult:
        """Take one zeroth-order step: one sweep that evaluates, then one record in the journal.

        The weights follow when they are next visited; ``evaluate``, ``parameters_now`` and ``export`` see them.

        Args:
            batch: What the model's forward takes, with labels.
            seed: Of the (first) direction; drawn from the run's seed if None.

        Returns:
            The step's report.

        Raises:
            BatchError: if the model cannot take the batch.
            NonFiniteLossError: if a loss is not finite.
            OptionError: if the learning rate of this step, or the seed, is out of its range.
            JournalError: if the record cannot be written.
            CheckpointError, ScratchError: if a block cannot be read, or could not be written back.
            In all cases the step was not taken: weights and journal are as before.
        """
        self._require_open()
        estimator = self._estimator
        if estimator is None:
            raise OptionError("estimator", found="none", expected="one", remedy="build the engine with an estimator")
        began, moved, step = time.perf_counter(), self._device.bytes_moved, self.version
        lr = _lr(estimator, step)
        evaluations = estimator.evaluations(step, _directions(self._seed, step, seed))
        for evaluation in evaluations:
            evaluation.validated()
        batch = self._on_device(batch)
        losses = self._sweep([(evaluation, batch) for evaluation in evaluations])
        for evaluation, loss in zip(evaluations, losses, strict=True):
            _require_finite(step, evaluation, loss)
        update = estimator.update(step, evaluations, losses, lr)
        _require_finite_update(update)
        self._journal.append(update)
        return StepResult(
            step=step,
            loss=update.losses[0],
            losses=update.losses,
            projected_grads=update.projected_grads,
            seeds=update.seeds,
            lr=lr,
            seconds=time.perf_counter() - began,
            bytes_moved=self._device.bytes_moved - moved,
        )

    def evaluate(self, batches: Iterable[Batch]) -> EvaluationResult:
        """Evaluate the present weights, unperturbed; several batches share a sweep.

        Args:
            batches: What the model's forward takes, with labels. A batch counts by its labelled tokens.

        Returns:
            The mean loss over labelled tokens, and each batch's.

        Raises:
            BatchError: if the model cannot take a batch, or there is none.
        """
        self._require_open()
        began, stream = time.perf_counter(), iter(batches)
        losses: list[float] = []
        tokens: list[int] = []
        sweeps = 0
        while chunk := list(islice(stream, self._batches_per_sweep)):
            streams = [(None, self._on_device(batch)) for batch in chunk]
            losses += [float(loss.item()) for loss in self._sweep(streams)]
            tokens += [labelled_tokens(batch) for batch in chunk]
            sweeps += 1
        if not losses:
            raise BatchError("batches", found="none", expected="at least one", remedy="pass batches to evaluate")
        total = sum(tokens)
        if total == 0:
            raise BatchError(
                "batches", found="no labelled token", expected="at least one", remedy="pass labels that are not all -100"
            )
        mean = math.fsum(loss * count for loss, count in zip(losses, tokens, strict=True) if count) / total
        return EvaluationResult(mean, tuple(losses), total, sweeps, time.perf_counter() - began)

    def flush(self) -> None:
        """Bring every segment to the present version."""
        self._require_open()
        self._sweep([])

    def parameters_now(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield every parameter at the present version, one at a time, in visiting order.

        Yields:
            Name, and a tensor of its shape and dtype on the CPU. The tensor is a view that is valid until the next one is
            asked for; copy it to keep it, and do not change it.
        """
        self._require_open()
        with self._alone():
            yield from self._parameters_now()

    def _parameters_now(self) -> Iterator[tuple[str, torch.Tensor]]:
        visitor = self._visitor([])
        for index, layout in enumerate(self._model.layouts):
            bucket, version = self._source.acquire(index), None
            try:
                with torch.inference_mode():
                    store = self._device.upload(bucket, layout)
                    replayed = visitor.replay(index, store, bucket.version)
                    if replayed != bucket.version:
                        self._device.offload(store, bucket)
                version = replayed
                for spec, view in zip(layout.parameters, bucket.views, strict=True):
                    yield spec.name, view.view(spec.shape)
            finally:
                self._source.release(bucket, version)
        self._noise.retain(visitor.seeds)

    def export(self, directory: Path | str) -> None:
        """Write the model at the present version: a directory that ``from_pretrained`` loads.

        Args:
            directory: Must not exist, or be empty. It appears whole or not at all.

        Raises:
            OutputError: if the directory is in use or cannot be written.
        """
        self._require_open()
        require_unused(Path(directory))
        specs = [spec for layout in self._model.layouts for spec in layout.parameters]
        with contextlib.closing(self.parameters_now()) as tensors:  # lets go of its bucket, also when writing fails
            write_checkpoint(Path(directory), specs, tensors, self._model.companions)

    def close(self) -> None:
        """Stop all work, give memory, threads and descriptors back. May be called twice."""
        self._closed = True
        with contextlib.ExitStack() as parts:  # each is closed whatever the others do, last things first
            for part in (self._journal, self._model.weights, self._device, self._source):
                parts.callback(part.close)
            if self._worker is not None:
                parts.callback(self._worker.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._busy:
            raise BusyError(
                "ZOEngine",
                found="an iteration over parameters_now() that has not ended",
                expected="one use at a time",
                remedy="exhaust the iterator or close() it first",
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _visitor(self, streams: Sequence[tuple[Evaluation | None, Batch]]) -> SegmentVisitor:
        return SegmentVisitor(
            self._model,
            self._noise,
            self._workspace,
            self._worker,
            updates=self._journal.updates,
            streams=streams,
            zo_eps=1.0 if self._estimator is None else self._estimator.zo_eps,
            perturb_in_place=self._estimator is None or self._estimator.perturb_in_place,
        )

    def _sweep(self, streams: Sequence[tuple[Evaluation | None, Batch]]) -> list[torch.Tensor]:
        visitor = self._visitor(streams)
        try:
            with self._alone(), torch.inference_mode():
                self._scheduler.sweep(visitor, range(len(self._model.layouts)))
        finally:
            visitor.finish()
            self._noise.retain(visitor.seeds)
        return visitor.losses

    def _on_device(self, batch: Batch) -> Batch:
        return {key: value.to(self._device.torch_device) for key, value in batch.items()}

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("ZOEngine", found="a closed engine", expected="an open one", remedy="build a new engine")


def labelled_tokens(batch: Batch) -> int:
    """Count the tokens whose loss a causal language model averages: labels that are not -100, but for the first column."""
    return int((batch["labels"][..., 1:] != -100).sum().item())


def _lr(estimator: ZOEstimator, step: int) -> float:
    value = estimator.lr(step) if callable(estimator.lr) else estimator.lr
    require_positive(f"lr at step {step}", value)
    return float(value)


def _device(device: Device | str) -> Device:
    if not isinstance(device, str):
        return device
    if device == "cpu":
        return HostDevice()
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise OptionError("device", found=repr(device), expected="'cpu', 'cuda' or 'cuda:N'", remedy="choose one of these")
    return CudaDevice(int(index or 0))


def _digest(model: BlockModel) -> str:
    specs: list[ParameterSpec] = [spec for layout in model.layouts for spec in layout.parameters]
    listed = [[spec.name, list(spec.shape), str(spec.dtype), spec.index, spec.decays] for spec in specs]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _directions(run_seed: int, step: int, given: int | None) -> Iterator[int]:
    """Seeds in [0, 1e9), as MeZO draws them, from a generator of the step's own; a given seed comes first."""
    if given is not None:
        yield given
    rng = random.Random(f"{run_seed}/{step}" if given is None else f"given/{given}")  # noqa: S311 - no secret
    while True:
        yield rng.randrange(1_000_000_000)


def _require_finite(step: int, evaluation: Evaluation, loss: torch.Tensor) -> None:
    if not math.isfinite(loss.item()):
        raise NonFiniteLossError(
            f"step {step}, seed {evaluation.seed}, shift {evaluation.shift:+g}",
            found=f"loss {loss.item()}",
            expected="a finite loss",
            remedy="lower lr or zo_eps, or use dtype bfloat16 or float32 where float16 overflows; the step was not taken",
        )


def _require_finite_update(update: Update) -> None:
    if not all(math.isfinite(grad) for grad in update.projected_grads):
        raise NonFiniteLossError(
            f"step {update.step}",
            found=f"projected gradients {update.projected_grads}",
            expected="finite ones",
            remedy="raise zo_eps: the difference of the losses was divided by too small a number; the step was not taken",
        )
