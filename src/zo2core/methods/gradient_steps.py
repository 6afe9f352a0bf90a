"""First-order steps: a sweep forward and backward computes gradients, and an optimizer changes the parameters.

An adapter's parameters are in memory. All parameters of a model change where they are stored: in memory, or on disk.

Each of several workers computes the gradients of its rows. All workers add up these gradients in the order of ranks, as one
process does that runs the shards as micro-batches. So all have the same bits, and the same optimizer gives them the same
parameters.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zo2core.checkpoint.snapshots import Snapshots
from zo2core.errors import BatchError, NonFiniteLossError, OptionError, without_effect
from zo2core.journal import json_object
from zo2core.methods.first_order import FirstOrder, LossScale
from zo2core.optimizers import (
    StateMemory,
    StatesInStores,
    copied_state,
    make_optimizer,
    require_optimizer_state,
    unusable_state,
)
from zo2core.planning.speeds import kept_blocks
from zo2core.protocols import BlockUpdate, DifferentiableModel, Forward, Objective, Store, UpdateInputs
from zo2core.runner import Runner, Steps, TrainedSteps
from zo2core.sources import SegmentStore
from zo2core.sweep.activations import ActivationFile, ActivationOffload, KeptActivations
from zo2core.sweep.gradient_visitor import (
    Complete,
    GradientVisitor,
    GradientVisits,
    StoredParameters,
    TrainedParameters,
    Update,
    gradient_bytes,
)
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
from zo2core.types import HALVES, Batch, Commit, StepResult, widened
from zo2core.workers import Split, Workers, require_equal


class StepRows:
    """The micro-batches of a step, of which this process runs its part, and adds up gradients with the other workers."""

    def __init__(
        self, runner: Runner, trained: TrainedParameters | StoredParameters, wholes: Sequence[Batch], forward: Forward | None
    ) -> None:
        workers = self._workers = runner.workers
        self._trained, self._digest = trained, workers.digest(wholes)
        self._whole, own = _divided(wholes, runner.micro_batch_size, forward, workers)
        self.batches, weights = self._whole.batches[own], self._whole.weights
        self.weights = None if weights is None else weights[own]
        if workers.rank > 0:  # earlier gradients are the same on all workers, and rank 0 adds them
            trained.clear_gradients()

    def loss(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of all workers' outputs, of which this worker's have a gradient."""
        if self._workers.size == 1:
            return self._whole.loss(outputs)
        return self._joint_loss(outputs, self._workers.all_gather(self._note(outputs)))

    def finish(self, outputs: Sequence[torch.Tensor]) -> float:
        """Add up the gradients of all workers, and return the loss."""
        if self._workers.size == 1:
            return float(self._whole.loss(outputs))
        notes = self._workers.all_gather(self._note(outputs))
        loss = self._joint_loss(outputs, notes)
        add_up(self._parameters, self._workers, [note["present"] for note in notes])
        return float(loss)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        assert isinstance(self._trained, TrainedParameters), "several workers were refused where all parameters are trained"
        return list(self._trained.parameters.values())

    def _note(self, outputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        """What this worker says of its gradients, as JSON values with all their bits."""
        listed = [[str(output.dtype).removeprefix("torch."), output.tolist()] for output in outputs]
        present = [parameter.grad is not None for parameter in self._parameters]
        return {"batches": self._digest, "present": present, "outputs": listed}

    def _joint_loss(self, outputs: Sequence[torch.Tensor], notes: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """The step's loss, from the outputs of all workers; this worker's stay in their graph."""
        require_equal([note["batches"] for note in notes], "batches")
        of_workers = [
            [torch.tensor(values, dtype=getattr(torch, dtype)) for dtype, values in note["outputs"]] for note in notes
        ]
        of_workers[self._workers.rank] = [output.cpu() for output in outputs]
        return self._whole.loss([output for of_worker in of_workers for output in of_worker])


def _divided(
    wholes: Sequence[Batch], rows: int | None, forward: Forward | None, workers: Workers
) -> tuple[MicroBatches, slice]:
    """Divide the batches of a step into micro-batches, and choose those that this process runs."""
    if workers.size == 1:
        return split_batches(wholes, rows, forward), slice(None)
    parts = [_parts_of_workers(whole, forward, workers.size) for whole in wholes]
    shards = [[batch for of_whole in parts for batch in of_whole[rank]] for rank in range(workers.size)]
    cuts = [list(split_batches(shard, rows, forward).batches) for shard in shards]
    if forward is None:  # parts without a labelled token have no loss; where none has any, one is left and refused
        cuts = [[batch for batch in batches if labelled_tokens(batch)] for batches in cuts]
        cuts[0] = cuts[0] if any(cuts) else shards[0][:1]
    batches = [batch for of_worker in cuts for batch in of_worker]
    tokens = [labelled_tokens(batch) for batch in batches] if forward is None else []
    start = sum(map(len, cuts[: workers.rank]))
    micro_batches = MicroBatches(forward if isinstance(forward, Objective) else None, batches, tokens)
    return micro_batches, slice(start, start + len(cuts[workers.rank]))


def _parts_of_workers(whole: Batch, forward: Forward | None, size: int) -> list[list[Batch]]:
    """Each worker's part of a batch, in the order of ranks."""
    if forward is None:
        if (count := rows_to_shard([whole])) is None:
            raise BatchError(
                "batch",
                found="no labels of shape (rows, tokens)",
                expected="a batch with labels, whose rows are split among workers",
                remedy="add labels",
            )
        return [[shard_of_rows(whole, rows.start, rows.stop)] for rows in _slices(count, size)]
    if not isinstance(forward, Objective):
        raise OptionError(
            "forward",
            found=f"one that does not say how parts of a batch join, and {size} workers",
            expected="the model's own loss, or an Objective, which has split and loss",
            remedy="start one process, or add these two",
        )
    # An objective's own micro-batches, the largest of which there is one for each worker at least.
    parts, count = forward.split(whole, 1), max((len(value) for value in whole.values() if value.dim()), default=0)
    for rows in range(-(-count // size), 1, -1):
        if len(larger := forward.split(whole, rows)) >= size:
            parts = larger
            break
    return [list(parts[indices]) for indices in _slices(len(parts), size)]


def _slices(count: int, size: int) -> list[slice]:
    """Each worker's part of so many rows."""
    if count >= size:
        return [Split(1, size).rows(rank, count) for rank in range(size)]
    raise BatchError(
        "batch",
        found=f"{count} rows that can be separated, and {size} workers",
        expected="a row for each worker; a packed batch is one row",
        remedy="start fewer workers, or pass more rows",
    )


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


class GradientSteps(TrainedSteps, ABC):
    """First-order steps, by sweeps forward and backward."""

    def __init__(
        self, runner: Runner, trained: TrainedParameters | StoredParameters, method: FirstOrder, spill: Path
    ) -> None:
        super().__init__(runner, trained)
        workers, device, timeline = runner.workers, runner.device, runner.recorder.timeline
        if workers.size > 1 and workers.split not in ("auto", "rows", f"1x{workers.size}"):
            found = f"{workers.split}, {workers.size} workers for one gradient"
            raise without_effect("split", found, "rows, since a first-order step has no directions to split")
        file = ActivationFile(spill, timeline)
        inputs = KeptActivations(
            file if device.in_place else ActivationOffload(device, timeline, file, runner.waiting_bytes)
        )
        runner.opened.callback(inputs.close)
        model = runner.model
        assert isinstance(model, DifferentiableModel), "it was required"
        self._method, self._leaves = method, [model.leaves(index) for index in range(len(model.layouts))]
        self._visits = GradientVisits(
            layouts=model.layouts,
            trained=trained,
            leaves=self._leaves,
            inputs=inputs,
            limit=runner.host_limit,
            streams=device.streams,
            timeline=timeline,
        )

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None, *, seed: int | None) -> StepResult:
        """Take a step on a batch. See ``Engine.step``."""
        if seed is not None:
            expected = "a zeroth-order step, which has directions"
            raise without_effect("step", "a seed of a first-order step", expected)
        started, commit = time.perf_counter(), self._taken(batch, forward)
        self.version += 1
        return self._runner.step_result(commit, started)

    @abstractmethod
    def _taken(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> Commit:
        """Change the parameters, and record the step."""

    def _differentiate(self, names: Collection[str]) -> None:
        """Have autograd compute the gradients of these parameters, wherever they are used, and of no others."""
        trained = []
        for leaves in self._leaves:
            for name, leaf in leaves.items():
                leaf.requires_grad_(name in names)
            trained.append({name: leaf for name, leaf in leaves.items() if name in names})
        self._visits = replace(self._visits, leaves=trained)

    def _divided(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> tuple[Forward, StepRows, Sequence[Batch]]:
        """Return a step's forward, its micro-batches, and these on the device."""
        runner = self._runner
        chosen, objective = with_objective(forward, runner.model)
        rows = StepRows(runner, self.trained, batches_of(batch), objective)
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


class AdapterSteps(GradientSteps):
    """Steps of parameters in memory, such as an adapter's: gradients are computed and clipped, then the optimizer steps."""

    trained: TrainedParameters

    def __init__(self, runner: Runner, trained: TrainedParameters, method: FirstOrder, spill: Path) -> None:
        super().__init__(runner, trained, method, spill)
        assert not isinstance(method.optimizer, BlockUpdate), "it trains what is in memory"
        self._factory, parameters = method.optimizer, list(trained.parameters.values())
        self.optimizer: Any = None if self._factory is None else make_optimizer(self._factory, parameters)
        self._differentiate(trained.parameters)

    def gradients(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> float:
        """Add the gradients of a batch to those of the parameters. See ``Engine.gradients``."""
        try:
            forward, rows, prepared = self._divided(batch, forward)
            outputs: list[torch.Tensor] = []
            for visitor in self._visitors(forward, rows, prepared, together=rows.weights is None):
                outputs += self._runner.run(visitor, visitor.order)[0]
            return rows.finish(outputs)
        except BaseException:
            self.trained.clear_gradients()
            raise

    def snapshot(self) -> dict[str, Any]:
        """All on which later steps depend, as copies."""
        return {
            "steps": self.version,
            "parameters": {name: value.detach().cpu().clone() for name, value in self.trained.parameters.items()},
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a snapshot."""
        _require_state(state)
        if self._factory is not None:
            require_optimizer_state(state["optimizer"], self._factory, list(self.trained.parameters.values()))
        self.load(state["parameters"])
        if self._factory is not None:
            self.optimizer.load_state_dict(copied_state(state["optimizer"]))
        self.version = state["steps"]

    def _taken(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> Commit:
        optimizer = self.optimizer
        if optimizer is None:
            raise OptionError(
                "optimizer",
                found="None, and a call of step",
                expected="an optimizer",
                remedy="pass an optimizer to the engine, or call gradients and then the step of your optimizer",
            )
        if self._method.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = self._method.rate(self.version)
        try:
            loss = self.gradients(batch, forward)
            norm = self._clipped(loss)
            commit = Commit(self.version, loss, norm, float(optimizer.param_groups[0].get("lr", 0.0)))
            self.record(commit)
            optimizer.step()
        finally:
            self.trained.clear_gradients()
        return commit

    def _clipped(self, loss: float) -> float:
        """Clip the gradients, and return their norm before clipping."""
        parameters = [parameter for parameter in self.trained.parameters.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            found = f"loss {loss}, norm of the gradients {norm.item()}"
            raise _not_finite(self.version, found, "a finite loss and a finite norm", "no step was taken")
        if self._method.clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._method.clip, norm)
        return norm.item()


class _SegmentSteps:
    """What a step does with the gradients of each segment: they are measured, clipped, and change the weights."""

    def __init__(
        self,
        method: FirstOrder,
        state: FusedSteps,
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


class FusedSteps(GradientSteps):
    """Steps of all parameters, in host memory: each segment is updated as soon as its gradients are there.

    One segment's gradients are in memory at a time. A norm of all gradients is then known only when all updates are made. So
    clipping by norm takes a backward pass before, which only measures (LOMO, arXiv 2306.09782, section 3.3.1), unless a
    single segment is trained.
    """

    trained: StoredParameters
    _segments: Collection[int] = ()  # whose leaves require gradients

    def __init__(self, runner: Runner, trained: StoredParameters, method: FirstOrder, spill: Path) -> None:
        assert method.update is not None, "it trains what is stored"
        super().__init__(runner, trained, method, spill)
        self.update, self.scale = method.update, LossScale(method.scaling)
        self._options = json_object("update", method.journal_options)
        self.states: StateMemory | StatesInStores = StateMemory(self.update, runner.layouts)

    @property
    def _next_version(self) -> int | None:
        """Version of a segment after its next update; None: the next number."""
        return None

    def load(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of all parameters, before the first step."""
        if self.version:
            raise OptionError(
                "load_parameters",
                found=f"a run of {self.version} steps, whose optimizer's state belongs to its weights",
                expected="a run without steps",
                remedy="use load_state_dict, or a new engine",
            )
        super().load(parameters)

    def snapshot(self) -> dict[str, Any]:
        """All on which later steps depend, which is not copied: the next step changes it."""
        assert isinstance(self.states, StateMemory), "other states are committed on disk"
        self.update.settle()
        segments = range(len(self._runner.layouts))
        weights = self._runner.parameters_at(0, segments)
        return {
            "steps": self.version,
            "parameters": {spec.name: view.view(spec.shape) for spec, view in weights},
            "optimizer": self.states.state_dict(),
            "values": self.scale.values(),
            "method": self._options,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a snapshot."""
        assert isinstance(self.states, StateMemory), "other states are committed on disk"
        _require_state(state)
        if state.get("method") != self._options:
            raise unusable_state(f"a state of the optimizer {state.get('method')!r:.200}")
        self.require(state["parameters"])
        self.update.settle()
        self.scale.load_values(state.get("values", {}))
        self.states.load_state_dict(state["optimizer"])
        super().load(state["parameters"])
        self.version = state["steps"]

    def _taken(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> Commit:
        forward, rows, prepared = self._divided(batch, forward)
        segments = self.update.segments(self.version, self.trained.segments)
        if segments != self._segments:
            self._segments = segments
            self._differentiate({name for segment in segments for name in self.trained.names_of(segment)})
        work = _SegmentSteps(self._method, self, self.trained.forms, rows.loss)
        sweep = partial(self._sweep, forward, rows, prepared, segments, work)
        self.states.begin(self.version)
        if self._method.measures_first(len(segments)):
            loss = sweep(work.measure, None)
            work.total = work.norm()
        try:
            if not work.overflowed:
                work.lr = self._method.rate(self.version)
                loss = sweep(work.clip, work.update)
            commit = Commit(self.version, loss, work.norm().item(), work.lr)
            self.record(commit)  # of a step that is skipped, norm and learning rate are 0
        except BaseException:
            if work.changed:
                self._runner.use.close()  # segments are of two steps
            raise
        self.scale.update(overflowed=work.overflowed)
        return commit

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
        self.trained.expect(segments, complete, update, self._next_version)
        [visitor] = self._visitors(forward, rows, batches, together=True, loss_scale=self.scale.scale)
        work.outputs = visitor.outputs[0]
        try:
            return rows.finish(self._runner.run(visitor, visitor.order)[0])
        finally:
            self.trained.clear_gradients()


class CommittedSteps(FusedSteps):
    """Steps of all parameters on disk, where those of a step, with its states, are a generation that is committed together.

    An optimizer that forgets its states after a turn, as ``BAdam`` does, keeps them in memory. The segment of the turn stays
    there, too, and is written once, when the turn ends; that is the commit.
    """

    refusal = (
        "an engine whose weights and states are committed on disk",
        "an engine that keeps them in memory",
        "call commit(), from which the run resumes; for other weights, begin a run of a checkpoint with them",
    )
    load, snapshot, restore = Steps.load, Steps.snapshot, Steps.restore

    def __init__(
        self, runner: Runner, trained: StoredParameters, method: FirstOrder, spill: Path, commit_every: int
    ) -> None:
        super().__init__(runner, trained, method, spill)
        assert isinstance(runner.source, SegmentStore), "it was planned"
        assert runner.generations is not None, "it was planned"
        self._source, self._generations = runner.source, runner.generations
        if any(layout.states for layout in runner.layouts):
            self.states = StatesInStores(runner.layouts, runner.source.read_states)
        self._every = commit_every if self.update.turn is None else self.update.turn
        self.version = self._generations.step
        self.scale.load_values(self._generations.values)
        trained.versions = {segment: self._generations.version(segment) for segment in range(len(runner.layouts))}
        self._source.pin(self._kept())

    @property
    def committed(self) -> int:
        """The step of the last commit, from which a run resumes."""
        return self._generations.step

    @property
    def _next_version(self) -> int:
        """Where segments are written, their version is the number of steps, and not that of their updates."""
        return self.version + 1

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None, *, seed: int | None) -> StepResult:
        """Take a step, and commit it if that is due."""
        result = super().step(batch, forward, seed=seed)
        self._source.skip_states()
        if self.version % self._every == 0:
            self.commit()
        return result

    def require_snapshots(self, asked: str) -> Snapshots:
        """Refuse: there are commits instead."""
        self.refuse(asked)

    def commit(self) -> None:
        """Commit the present step durably. An optimizer with turns is committed at their ends only."""
        turn = self.update.turn
        if self.version == self.committed or (turn is not None and self.version % turn):
            return
        try:
            self._source.write_kept()
            self._generations.commit(self.version, self.scale.values())
        except BaseException:
            self._runner.use.close()  # memory and disk may disagree about the segments
            raise
        self._source.pin(self._kept())

    def _kept(self) -> Sequence[int]:
        """Segments that stay in memory until the next commit."""
        if self.update.turn is not None:
            return tuple(self.update.segments(self.version, self.trained.segments))
        if self._every == 1:
            return ()
        layouts = self._runner.layouts
        residents = [index for index, layout in enumerate(layouts) if layout.resident]
        blocks = [index for index, layout in enumerate(layouts) if not layout.resident]
        return (*residents, *blocks[: kept_blocks(self._source.capacity, self._every)])


def _require_state(state: Mapping[str, Any]) -> None:
    missing = {"steps", "parameters", "optimizer"} - (state.keys() if isinstance(state, Mapping) else set())
    if missing:
        raise unusable_state(f"a state without {', '.join(sorted(missing))}")
    if type(state["steps"]) is not int or state["steps"] < 0:
        raise unusable_state(f"{state['steps']!r:.40} as the number of steps")
