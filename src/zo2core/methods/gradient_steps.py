"""First-order steps: a sweep forward and backward computes gradients, and an optimizer changes the parameters.

Each of several workers computes the gradients of its rows. All workers add up these gradients in the order of ranks, as one
process does that runs the shards as micro-batches. So all have the same bits, and the same optimizer gives them the same
parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import nn

from zo2core.errors import BatchError, NonFiniteLossError, OptionError, WorkerError
from zo2core.methods.first_order import FirstOrder
from zo2core.methods.states import AdapterState, GenerationState, StoredState
from zo2core.protocols import Forward, Objective, Store, UpdateInputs
from zo2core.runner import Runner
from zo2core.sweep.activations import ActivationFile, ActivationOffload, KeptActivations
from zo2core.sweep.gradient_visitor import GradientVisitor, GradientVisits, gradient_bytes
from zo2core.sweep.microbatch import (
    MicroBatches,
    batches_of,
    grouped,
    labelled_tokens,
    rows_to_shard,
    shard_of_rows,
    split_batches,
    with_objective,
)
from zo2core.sweep.trained import Complete, PresentWeights, StoredParameters, TrainedParameters, Update
from zo2core.types import HALVES, Batch, Commit, StepResult, widened
from zo2core.workers import Split, Workers


class RowShards:
    """Chooses the rows of each step that this process runs."""

    def __init__(self, workers: Workers, trained: TrainedParameters | StoredParameters) -> None:
        if workers.size > 1 and workers.split not in ("auto", "rows", f"1x{workers.size}"):
            raise OptionError(
                "split",
                found=f"{workers.split}, {workers.size} workers for one gradient",
                expected="rows, since a first-order step has no directions to split",
                remedy="pass rows, or leave it out",
            )
        self.workers, self.trained = workers, trained
        self.split = Split(1, workers.size)

    def of_step(self, wholes: Sequence[Batch], rows: int | None, forward: Forward | None) -> StepRows:
        """The rows of a step."""
        if self.workers.size == 1:
            return split_batches(wholes, rows, forward)
        shards = self._shards(wholes, forward)
        cuts = [list(split_batches(shard, rows, forward).batches) for shard in shards]
        if forward is None:  # parts without a labelled token have no loss; where none has any, one is left and refused
            cuts = [[batch for batch in batches if labelled_tokens(batch)] for batches in cuts]
            cuts[0] = cuts[0] if any(cuts) else shards[0][:1]
        batches = [batch for of_worker in cuts for batch in of_worker]
        tokens = [labelled_tokens(batch) for batch in batches] if forward is None else []
        start = sum(map(len, cuts[: self.workers.rank]))
        micro_batches = MicroBatches(forward if isinstance(forward, Objective) else None, batches, tokens)
        own = slice(start, start + len(cuts[self.workers.rank]))
        return _ShardOfStep(self, micro_batches, own, self.workers.digest(wholes))

    def _shards(self, wholes: Sequence[Batch], forward: Forward | None) -> list[list[Batch]]:
        """Each worker's part of each batch, in the order of ranks."""
        if forward is None:
            parts = [self._row_parts(whole) for whole in wholes]
        elif isinstance(forward, Objective):
            parts = [self._objective_parts(whole, forward) for whole in wholes]
        else:
            raise OptionError(
                "forward",
                found=f"one that does not say how parts of a batch join, and {self.workers.size} workers",
                expected="the model's own loss, or an Objective, which has split and loss",
                remedy="start one process, or add these two",
            )
        return [[batch for of_whole in parts for batch in of_whole[rank]] for rank in range(self.workers.size)]

    def _row_parts(self, whole: Batch) -> list[list[Batch]]:
        if (count := rows_to_shard([whole])) is None:
            raise BatchError(
                "batch",
                found="no labels of shape (rows, tokens)",
                expected="a batch with labels, whose rows are split among workers",
                remedy="add labels",
            )
        return [[shard_of_rows(whole, rows.start, rows.stop)] for rows in self._slices(count)]

    def _objective_parts(self, whole: Batch, objective: Objective) -> list[list[Batch]]:
        """An objective's own micro-batches, the largest of which there is one for each worker at least."""
        parts, count = objective.split(whole, 1), max((len(value) for value in whole.values() if value.dim()), default=0)
        for rows in range(-(-count // self.workers.size), 1, -1):
            if len(larger := objective.split(whole, rows)) >= self.workers.size:
                parts = larger
                break
        return [list(parts[indices]) for indices in self._slices(len(parts))]

    def _slices(self, count: int) -> list[slice]:
        """Each worker's part of so many rows."""
        if count >= self.workers.size:
            return [self.split.shard(rank, 1).rows(count) for rank in range(self.workers.size)]
        raise BatchError(
            "batch",
            found=f"{count} rows that can be separated, and {self.workers.size} workers",
            expected="a row for each worker; a packed batch is one row",
            remedy="start fewer workers, or pass more rows",
        )


class _ShardOfStep:
    """One worker's micro-batches of a step."""

    def __init__(self, shards: RowShards, whole: MicroBatches, own: slice, digest: int) -> None:
        assert isinstance(shards.trained, TrainedParameters), "several workers were refused where all parameters are trained"
        self._workers, self._trained, self._whole, self._digest = shards.workers, shards.trained, whole, digest
        self.batches, weights = whole.batches[own], whole.weights
        self.weights = None if weights is None else weights[own]
        if self._workers.rank > 0:  # earlier gradients are the same on all workers, and rank 0 adds them
            self._trained.clear_gradients()

    def loss(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of all workers' outputs, of which this worker's have a gradient."""
        return self._loss(outputs, self._workers.all_gather(self._note(outputs)))

    def finish(self, outputs: Sequence[torch.Tensor]) -> float:
        """Add up the gradients of all workers, and return the loss."""
        notes = self._workers.all_gather(self._note(outputs))
        loss = self._loss(outputs, notes)
        add_up(list(self._trained.parameters.values()), self._workers, [note["present"] for note in notes])
        return float(loss)

    def _note(self, outputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        """What this worker says of its gradients, as JSON values with all their bits."""
        listed = [[str(output.dtype).removeprefix("torch."), output.tolist()] for output in outputs]
        present = [parameter.grad is not None for parameter in self._trained.parameters.values()]
        return {"batches": self._digest, "present": present, "outputs": listed}

    def _loss(self, outputs: Sequence[torch.Tensor], notes: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """The step's loss, from the outputs of all workers; this worker's stay in their graph."""
        for rank, note in enumerate(notes):
            if note["batches"] != notes[0]["batches"]:
                raise WorkerError(
                    f"worker {rank}",
                    found="other batches than worker 0's",
                    expected="the same",
                    remedy="start all workers with the same command and the same rows",
                )
        of_workers = [
            [torch.tensor(values, dtype=getattr(torch, dtype)) for dtype, values in note["outputs"]] for note in notes
        ]
        of_workers[self._workers.rank] = [output.cpu() for output in outputs]
        return self._whole.loss([output for of_worker in of_workers for output in of_worker])


StepRows: TypeAlias = MicroBatches | _ShardOfStep  # the micro-batches of a step that this process runs


def add_up(parameters: Sequence[nn.Parameter], workers: Workers, present: Sequence[Sequence[bool]]) -> None:
    """Set each parameter's gradient to the sum of all workers', in the order of ranks.

    Args:
        parameters: The parameters.
        workers: The workers, which exchange all gradients as one tensor of bytes.
        present: Whether each worker has a gradient of each parameter.
    """
    pairs = zip(parameters, map(any, zip(*present, strict=True)), strict=True)
    ordered = sorted(pairs, key=lambda pair: -pair[0].element_size())  # so that offsets are aligned
    # A gradient that is missing is -0.0, which changes no bit of a sum.
    own = [torch.full_like(parameter, -0.0) if parameter.grad is None else parameter.grad for parameter, _ in ordered]
    message = torch.cat([gradient.detach().reshape(-1).view(torch.uint8) for gradient in own])
    sizes = [gradient.nbytes for gradient in own]
    messages = [torch.split(received, sizes) for received in workers.all_gather_tensors(message)]
    for (parameter, has_gradient), parts in zip(ordered, zip(*messages, strict=True), strict=True):
        total, *others = [part.view(parameter.dtype) for part in parts]
        for other in others:
            total += other
        parameter.grad = total.view(parameter.shape).clone() if has_gradient else None


def _not_finite(step: int, found: str, expected: str, state: str) -> NonFiniteLossError:
    remedy = f"lower the learning rate, or use bfloat16 or float32 where float16 overflows; {state}"
    return NonFiniteLossError(f"step {step}", found=found, expected=expected, remedy=remedy)


StateT = TypeVar("StateT", AdapterState, StoredState)


class _GradientSteps(Generic[StateT]):
    """The sweeps of first-order steps."""

    def __init__(
        self, runner: Runner, method: FirstOrder, state: StateT, leaves: Sequence[Mapping[str, torch.Tensor]], spill: Path
    ) -> None:
        device, timeline = runner.device, runner.recorder.timeline
        file = ActivationFile(spill, timeline)
        inputs = KeptActivations(
            file if device.in_place else ActivationOffload(device, timeline, file, runner.waiting_bytes)
        )
        runner.opened.callback(inputs.close)
        self._runner, self._method, self._leaves = runner, method, leaves
        self._state: StateT = state
        self._rows = RowShards(runner.workers, state.trained)
        self._visits = GradientVisits(
            layouts=runner.model.layouts,
            present=PresentWeights(state.trained, runner.work_buffer),
            leaves=leaves,
            inputs=inputs,
            limit=runner.host_limit,
            streams=device.streams,
            timeline=timeline,
        )

    def _divided(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> tuple[Forward, StepRows, Sequence[Batch]]:
        """Return a step's forward, its micro-batches, and these on the device."""
        runner = self._runner
        chosen, objective = with_objective(forward, runner.model)
        rows = self._rows.of_step(batches_of(batch), runner.micro_batch_size, objective)
        return chosen, rows, list(runner.prepared(rows.batches, chosen))

    def _visitors(
        self, forward: Forward, rows: StepRows, batches: Sequence[Batch], *, together: bool, loss_scale: float = 1.0
    ) -> Iterator[GradientVisitor]:
        """Make the visitors of a step's sweeps: as many micro-batches are in one as have room at a block, or all of them."""
        allowed, start = self._runner.activation_bytes + self._runner.spare_bytes(), 0

        def left(held: int, running: int) -> int:
            return allowed - gradient_bytes(held, running, 0)

        groups = grouped(batches, forward, lambda held, running: together or left(held, running) >= 0)
        for group, held, running in list(groups) or [([], 0, 0)]:
            yield GradientVisitor(
                self._visits,
                forward,
                group,
                weights=None if rows.weights is None else rows.weights[start : start + len(group)],
                joint_loss=rows.loss,
                kept_bytes=max(left(held, running), 0),
                loss_scale=loss_scale,
            )
            start += len(group)


class AdapterSteps(_GradientSteps[AdapterState]):
    """Takes first-order steps of parameters in memory: gradients are computed and clipped, then the optimizer steps."""

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> StepResult:
        """Take a step on a batch. See ``Engine.step``."""
        state, optimizer, started = self._state, self._state.optimizer, time.perf_counter()
        if optimizer is None:
            raise OptionError(
                "optimizer",
                found="None, and a call of step",
                expected="an optimizer",
                remedy="pass an optimizer to the engine, or call gradients and then the step of your optimizer",
            )
        if self._method.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = self._method.rate(state.version)
        try:
            loss = self.gradients(batch, forward)
            norm = self._clipped(loss)
            commit = Commit(state.version, loss, norm, float(optimizer.param_groups[0].get("lr", 0.0)))
            state.commit(commit)
            optimizer.step()
        finally:
            state.trained.clear_gradients()
        state.version += 1
        return self._runner.step_result(commit, started)

    def gradients(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> float:
        """Add the gradients of a batch to those of the parameters. See ``Engine.gradients``."""
        forward, rows, prepared = self._divided(batch, forward)
        outputs: list[torch.Tensor] = []
        for visitor in self._visitors(forward, rows, prepared, together=rows.weights is None):
            outputs += self._runner.run(visitor, visitor.order)[0]
        return rows.finish(outputs)

    def _clipped(self, loss: float) -> float:
        """Clip the gradients, and return their norm before clipping."""
        parameters = [parameter for parameter in self._state.trained.parameters.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            found = f"loss {loss}, norm of the gradients {norm.item()}"
            raise _not_finite(self._state.version, found, "a finite loss and a finite norm", "no step was taken")
        if self._method.clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._method.clip, norm)
        return norm.item()


class _SegmentSteps:
    """What a step does with the gradients of each segment: they are measured, clipped, and change the weights."""

    def __init__(
        self,
        method: FirstOrder,
        state: StoredState,
        names: Collection[str],
        joint_loss: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    ) -> None:
        self._method, self._state, self._names, self._joint_loss = method, state, names, joint_loss
        self._norms: dict[str, torch.Tensor] = {}  # by name, 0-d
        self.outputs: Sequence[torch.Tensor] = ()  # of the head, once it has run
        self.overflowed = False  # whether a gradient of the scaled loss is not finite
        self.total: torch.Tensor | None = None  # norm of all gradients, if a sweep before has measured it
        self.lr = 0.0
        self.changed = 0  # segments that are changed, or were being changed when it failed

    def measure(self, gradients: dict[str, torch.Tensor]) -> None:
        """Add a segment's norms, in a sweep that changes nothing."""
        self._convert(gradients)
        self._add_norms(gradients)

    def clip(self, gradients: dict[str, torch.Tensor]) -> None:
        """Add a segment's norms, unless they were measured, and clip."""
        converted = self._convert(gradients)
        if self.total is None:
            self._add_norms(gradients)
        value, norm, scale = self._method.clip_value, self._method.clip, None
        if norm is not None:
            scale = torch.clamp(norm / ((self.norm() if self.total is None else self.total) + 1e-6), max=1.0)
        for name, gradient in gradients.items():
            out = gradient if name in converted else None  # others may share memory
            if value is not None:
                gradients[name] = torch.clamp(gradients[name], -value, value, out=out)
            if scale is not None:
                gradients[name] = torch.mul(gradients[name], scale, out=out)

    def update(
        self, segment: int, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], store: Store
    ) -> None:
        """Change a segment's weights."""
        self.changed += 1
        state = self._state
        states = state.states.of(segment, store)
        state.update.apply(UpdateInputs(segment, weights, gradients, states, state.version, self.lr))

    def norm(self) -> torch.Tensor:
        """The norm of all gradients together, 0-d; 0 if one overflowed. The order of the names decides its last bit."""
        if self.overflowed:
            return torch.zeros(())
        norms = [self._norms[name] for name in self._names if name in self._norms]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def _convert(self, gradients: dict[str, torch.Tensor]) -> set[str]:
        """Convert 16-bit gradients to float32, if the optimizer wants them so, and divide them by the scale of the loss."""
        widens, scale = self._state.update.widens_gradients, self._state.scale
        converted = {name for name, gradient in gradients.items() if widens and gradient.dtype in HALVES}
        for name, gradient in gradients.items():
            if name in converted:
                gradients[name] = widened(gradient)
            gradients[name] = scale.unscaled(gradients[name], gradients[name] if name in converted else None)
        return converted

    def _add_norms(self, gradients: Mapping[str, torch.Tensor]) -> None:
        norms = {name: torch.linalg.vector_norm(gradient) for name, gradient in gradients.items()}
        loss = float(self._joint_loss(self.outputs))
        wrong = [name for name, norm in norms.items() if not math.isfinite(norm.item())]
        if wrong and math.isfinite(loss) and self._state.scale.may_skip:
            self.overflowed = True
        elif wrong or not math.isfinite(loss):
            changed = f"{self.changed} segments had been changed: resume from the last snapshot"
            raise _not_finite(
                self._state.version,
                f"loss {loss}" + (f", and a gradient of {wrong[0]} that is not finite" if wrong else ""),
                "a finite loss and finite gradients",
                changed if self.changed else "no step was taken",
            )
        self._norms.update(norms)


class FusedSteps(_GradientSteps[StoredState]):
    """Takes first-order steps of all parameters: each segment is updated as soon as its gradients are there.

    One segment's gradients are in memory at a time. A norm of all gradients is then known only when all updates are made. So
    clipping by norm takes a backward pass before, which only measures (LOMO, arXiv 2306.09782, section 3.3.1), unless a
    single segment is trained.
    """

    _trained: Collection[int] = ()  # segments whose leaves require gradients

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> StepResult:
        """Take a step on a batch. See ``Engine.step``."""
        started, state, runner = time.perf_counter(), self._state, self._runner
        forward, rows, prepared = self._divided(batch, forward)
        segments = state.update.segments(state.version, state.trained.segments)
        self._train_only(segments)
        work = _SegmentSteps(self._method, state, state.trained.forms, rows.loss)
        sweep = partial(self._sweep, forward, rows, prepared, segments, work)
        state.states.begin(state.version)
        if self._method.measures_first(len(segments)):
            loss = sweep(work.measure, None)
            work.total = work.norm()
        try:
            if not work.overflowed:
                work.lr = self._method.rate(state.version)
                loss = sweep(work.clip, work.update)
            commit = Commit(state.version, loss, work.norm().item(), work.lr)
            state.commit(commit)  # of a step that is skipped, norm and learning rate are 0
        except BaseException:
            if work.changed:
                runner.use.close()  # segments are of two steps
            raise
        state.scale.update(overflowed=work.overflowed)
        state.version += 1
        return self._runner.step_result(commit, started)

    def _sweep(
        self,
        forward: Forward,
        rows: StepRows,
        batches: Sequence[Batch],
        segments: Collection[int],
        work: _SegmentSteps,
        complete: Complete,
        update: Update | None,
    ) -> float:
        """Sweep forward and backward; returns the loss."""
        state = self._state
        # Where segments are written, their version is the number of steps, and not that of their updates.
        version = state.version + 1 if isinstance(state, GenerationState) else None
        state.trained.expect(segments, complete, update, version)
        [visitor] = self._visitors(forward, rows, batches, together=True, loss_scale=state.scale.scale)
        work.outputs = visitor.outputs[0]
        try:
            return rows.finish(self._runner.run(visitor, visitor.order)[0])
        finally:
            state.trained.clear_gradients()

    def _train_only(self, segments: Collection[int]) -> None:
        """Have autograd compute the gradients of these segments' own parameters, wherever they are used, and no others."""
        if segments == self._trained:
            return
        self._trained = segments
        names = {name for segment in segments for name in self._state.trained.names_of(segment)}
        trained = []
        for leaves in self._leaves:
            for name, leaf in leaves.items():
                leaf.requires_grad_(name in names)
            trained.append({name: leaf for name, leaf in leaves.items() if name in names})
        self._visits = replace(self._visits, leaves=trained)
