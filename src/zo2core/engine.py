"""The engine: steps, evaluations and exports of a model that is never whole in its device's memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch

from zo2core.checkpoint import require_unused, write_checkpoint
from zo2core.devices import choose_device
from zo2core.errors import BusyError, ClosedError, OptionError
from zo2core.journal import Journal, digest
from zo2core.noise import choose_noise
from zo2core.numbers import directions, learning_rate, probes, require_finite, require_finite_update
from zo2core.planning.device_plan import Residency, choose_residency, require_auto
from zo2core.planning.host_plan import Arrangement, arrange, check_lags
from zo2core.profiling.chrome_trace import Sweep, Trace, TraceRecorder
from zo2core.profiling.timeline import Timeline
from zo2core.protocols import (
    BlockModel,
    BlockSource,
    CounterNoise,
    Device,
    Forward,
    NoiseGenerator,
    Scheduler,
    ZOEstimator,
)
from zo2core.schedulers import OverlappedScheduler
from zo2core.sweep.activation_offload import ActivationOffload
from zo2core.sweep.evaluation_loop import evaluate, fill_sweeps
from zo2core.sweep.microbatch import cut, joined_loss, labelled_tokens
from zo2core.sweep.visitor import SegmentVisitor
from zo2core.sweep.work_buffer import Workspace
from zo2core.types import Batch, Evaluation, EvaluationResult, StepResult


class ZOEngine:
    """Zeroth-order fine-tuning, segment by segment.

    Parts that are not passed are chosen. All parts, also passed ones, belong to the engine and are closed with it.

    Args:
        model: Cut into embedding, blocks and head; of an adapter, or your own. One engine a model.
        estimator: What to evaluate, and what the losses say about the weights. None for an engine that takes no steps, only
            evaluates and exports what a journal holds.
        source: Where segments live; by default a ``PinnedSource`` over the model's checkpoint, or a ``StreamedSource`` if
            that does not fit into ``memory``.
        scheduler: Builds the scheduler from source, device and ``timeline=``; by default ``OverlappedScheduler``.
        noise: Draws z; by default what the journal was begun with, else ``SequentialNoise``, MeZO's numbers.
        device: "cpu", "cuda", "cuda:N" or a ``Device``.
        device_memory: Of a GPU, that may be used, in bytes or as a size ("8GiB"); "auto" takes what is free. What is left
            beside a sweep's needs keeps blocks there, which are then visited without transfers.
        journal: Updates so far and to come; by default a new one in memory. A journal with updates continues its run.
        seed: Of the run: each step's directions depend on it and on the step only.
        micro_batch_size: Rows in which a batch is cut; every segment serves all pieces in its one visit. None: not at all.
        memory: Host memory the process may have in all, in bytes or as a size ("6GiB"); "auto" takes what is free.
        activation_bytes: Of that, or of a GPU's memory, set aside for activations and logits. Says how many batches an
            evaluation takes a sweep.
        least_activation_bytes: If a GPU has no room for so much: what the streams at work take, while others wait in host
            memory. None: all have to be there.
        scratch: Directory to write changed segments back to. Together with the journal's file it is what a later engine
            goes on from; without it blocks are never written, and a resumed run replays the whole journal.
        write_back_every: A segment is written once it is this many steps ahead of its bytes on disk; "auto" weighs the
            measured speeds of noise and disk; None never writes.
        trace: Takes down what every sweep did when.
        timeline: Where the parts that are passed note what they do; by default a new one.
        snapshot_every: Bounds what a resumed run has to replay: ``write_back_every`` is at most this.

    Raises:
        OptionError: if an option is out of its range.
        MemoryBudgetError: if not even the smallest arrangement fits into ``memory``, or into ``device_memory``.
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
        scheduler: Callable[..., Scheduler] | None = None,
        noise: NoiseGenerator | None = None,
        device: Device | str = "cpu",
        device_memory: int | str = "auto",
        journal: Journal | None = None,
        seed: int = 0,
        micro_batch_size: int | None = None,
        memory: int | str = "auto",
        activation_bytes: int = 256 << 20,
        least_activation_bytes: int | None = None,
        scratch: Path | str | None = None,
        write_back_every: int | Literal["auto"] | None = "auto",
        snapshot_every: int | None = None,
        trace: Trace | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        if micro_batch_size is not None and micro_batch_size < 1:
            raise OptionError(
                "micro_batch_size", found=repr(micro_batch_size), expected="at least 1", remedy="leave it out for no cutting"
            )
        check_lags(source, scratch, write_back_every, snapshot_every)
        self._model = model
        self._estimator = estimator
        self._device = choose_device(device)
        self._timeline = Timeline() if timeline is None else timeline
        self._journal = Journal() if journal is None else journal
        with contextlib.ExitStack() as undo:  # an engine that cannot be made closes its parts, as a made one does
            for part in (self._device, model.weights, self._journal, source):
                if part is not None:
                    undo.callback(part.close)
            begun_with = None if self._journal.header is None else self._journal.header["noise"]
            choose = partial(choose_noise, begun_with, model.layouts, self._device.torch_device)
            self._noise = choose() if noise is None else noise
            self.residency: Residency | None = None  # of the device's memory; None where that is the host's, too
            if scheduler is None and not self._device.in_place:
                self.residency = choose_residency(
                    model.layouts,
                    self._noise,
                    memory=device_memory,
                    free=self._device.free_memory(),
                    activation_bytes=activation_bytes,
                    least_activation_bytes=least_activation_bytes,
                    probes=probes(estimator, self._journal.updates),
                )
            else:
                require_auto(device_memory)
            room = activation_bytes if self.residency is None else self.residency.activation_bytes
            waiting = activation_bytes if room < activation_bytes else 0  # at most
            self.arrangement: Arrangement | None = None  # of host memory; None for a source that was passed
            if source is None:
                self.arrangement = arrange(
                    model.layouts,
                    memory=memory,
                    activation_bytes=activation_bytes if self._device.in_place else waiting,
                    compute_on_host=self._device.torch_device.type == "cpu",
                    may_keep_noise=not isinstance(self._noise, CounterNoise),
                )
                if noise is None:
                    self._noise = choose(memory=self.arrangement.spare)
            self._journal.begin(
                {
                    "base": model.weights.fingerprint,
                    "parameters": digest(spec for layout in model.layouts for spec in layout.parameters),
                    "noise": self._noise.name,
                    "estimator": None if estimator is None else estimator.options,
                    "seed": None if estimator is None else seed,
                }
            )
            if source is None:
                assert self.arrangement is not None
                source = self.arrangement.source(
                    model,
                    self._noise,
                    self._device.host_memory,
                    self._journal.chain,
                    timeline=self._timeline,
                    scratch=scratch,
                    write_back_every=write_back_every,
                    snapshot_every=snapshot_every,
                    in_place=estimator is None or estimator.perturb_in_place,
                )
                undo.callback(source.close)
            self._source = source
            if scheduler is None:
                scheduler = partial(OverlappedScheduler, kept=0 if self.residency is None else self.residency.kept)
            self._scheduler = scheduler(self._source, self._device, timeline=self._timeline)
            keep_noise = self._device.in_place and (self.arrangement is None or self.arrangement.keep_noise)
            self._workspace = Workspace(model.layouts, self._device, self._noise, keep_noise=keep_noise)
            on_cpu = self._device.torch_device.type == "cpu"  # elsewhere one host thread issues the work of all
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="zo2-perturb") if on_cpu else None
            self._seed = seed
            self._micro_batch_size = micro_batch_size
            self._activation_bytes = room
            self._activations = ActivationOffload(
                self._device, None if least_activation_bytes is None else room, waiting, timeline=self._timeline
            )
            self._recorder = TraceRecorder(self._timeline, trace)
            self._settled = 0  # version at which what stays on the device was last brought back
            self._closed = self._busy = False
            model.bind(self._workspace.parameters())
            undo.pop_all()

    @property
    def version(self) -> int:
        """Steps taken so far: the present version of the weights."""
        return len(self._journal.updates)

    @property
    def write_back_every(self) -> int | None:
        """Steps that a segment may be ahead of its bytes on disk; None: it is never written."""
        return self._source.write_back_every

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
            In all these cases the step was not taken: weights and journal are as before.
            OutputError: if the trace cannot be written; the step was taken.
        """
        self._require_open()
        if (estimator := self._estimator) is None:
            raise OptionError("estimator", found="none", expected="one", remedy="build the engine with an estimator")
        began, step = time.perf_counter(), self.version
        lr = learning_rate(estimator, step)
        evaluations = estimator.evaluations(step, directions(self._seed, step, seed))
        for evaluation in evaluations:
            evaluation.validated()
        if (every := self.write_back_every) is not None and step > self._settled + every:
            self._scheduler.settle()  # what stays on the device, at the last step's version, can be written back then
            self._settled = step - 1
        cuts = cut(batch, self._micro_batch_size)
        tokens = [labelled_tokens(piece) for piece in cuts] if len(cuts) > 1 else [1]
        pieces = [self._model.prepared(self._on_device(piece)) for piece in cuts]
        found = iter(self._sweep([(evaluation, piece) for evaluation in evaluations for piece in pieces]))
        losses = [joined_loss([next(found) for _ in pieces], tokens) for _ in evaluations]
        for evaluation, loss in zip(evaluations, losses, strict=True):
            require_finite(step, evaluation, loss)
        update = estimator.update(step, evaluations, losses, lr)
        require_finite_update(update)
        self._journal.append(update)
        done = time.perf_counter()
        return StepResult(
            step=step,
            loss=update.losses[0],
            losses=update.losses,
            projected_grads=update.projected_grads,
            seeds=update.seeds,
            lr=update.lr,
            seconds=done - began,
            lanes=self._recorder.ended(Sweep.of_step(step, began, done)),
        )

    def evaluate(self, batches: Iterable[Batch]) -> EvaluationResult:
        """Evaluate the present weights, unperturbed; as many batches share a sweep as ``activation_bytes`` holds.

        Args:
            batches: What the model's forward takes, with labels. A batch counts by its labelled tokens.

        Returns:
            The mean loss over labelled tokens, and each batch's.

        Raises:
            BatchError: if the model cannot take a batch, or there is none.
        """
        self._require_open()
        return evaluate(self.forwards, batches, self._micro_batch_size)

    def forwards(self, batches: Iterable[Batch], forward: Forward | None = None) -> Iterator[list[torch.Tensor]]:
        """Run the present weights, unperturbed, with as many batches a sweep as fit into ``activation_bytes``.

        Args:
            batches: What ``forward`` takes; more are taken up only as sweeps run.
            forward: Runs the segments; by default the model itself, whose head gives losses.

        Yields:
            What the head gave for each batch, in order, a list a sweep.

        Raises:
            BatchError: if the model cannot take a batch.
        """
        self._require_open()
        forward = self._model if forward is None else forward
        prepared = (forward.prepared(self._on_device(batch)) for batch in batches)
        for group in fill_sweeps(prepared, forward, self._activation_bytes - self._activations.room_bytes):
            self._require_open()
            began = time.perf_counter()
            found = self._sweep([(None, batch) for batch in group], forward)
            self._recorder.ended(Sweep("evaluation", began, time.perf_counter()))
            yield found

    def flush(self) -> None:
        """Bring every segment to the present version."""
        self._require_open()
        began = time.perf_counter()
        self._sweep([])
        self._recorder.ended(Sweep("flush", began, time.perf_counter()))

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
            with self._scheduler.replayed(visitor, index) as bucket:
                for spec, view in zip(layout.parameters, bucket.views, strict=True):
                    yield spec.name, view.view(spec.shape)
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
            for part in (self._recorder, self._journal, self._model.weights, self._device, self._source):
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

    def _visitor(self, streams: Sequence[tuple[Evaluation | None, Batch]], forward: Forward | None = None) -> SegmentVisitor:
        return SegmentVisitor(
            self._device,
            self._model,
            self._noise,
            self._workspace,
            self._activations,
            self._worker,
            updates=self._journal.updates,
            streams=streams,
            forward=forward,
            zo_eps=1.0 if self._estimator is None else self._estimator.zo_eps,
            perturb_in_place=self._estimator is None or self._estimator.perturb_in_place,
            timeline=self._timeline,
        )

    def _sweep(
        self, streams: Sequence[tuple[Evaluation | None, Batch]], forward: Forward | None = None
    ) -> list[torch.Tensor]:
        visitor = self._visitor(streams, forward)
        try:
            with self._alone():
                self._scheduler.sweep(visitor, range(len(self._model.layouts)))
        finally:
            visitor.finish()
            self._noise.retain(visitor.seeds)
        return visitor.outputs

    def _on_device(self, batch: Batch) -> Batch:
        return {key: value.to(self._device.torch_device) for key, value in batch.items()}

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("ZOEngine", found="a closed engine", expected="an open one", remedy="build a new engine")
