"""First-order steps: loops over sweeps forward and backward.

``AdapterSteps``: gradients of parameters in memory are computed and clipped, then the optimizer
changes the parameters.

``FusedSteps``: each segment is updated as soon as its gradients are there, in the backward pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from zo2core.errors import OptionError, without_effect
from zo2core.methods.first_order import FirstOrder
from zo2core.methods.states import AdapterState, FusedState
from zo2core.protocols import BlockUpdate, DifferentiableModel, Forward
from zo2core.run import Run, StepBatch
from zo2core.sweep import microbatch
from zo2core.sweep.activations import (
    ActivationFile,
    ActivationOffload,
    KeptActivations,
    OffloadTarget,
)
from zo2core.sweep.fused_step import FusedStep, GradientLimits, step_not_finite
from zo2core.sweep.gradient_visitor import (
    GradientVisits,
    backward_bytes,
    gradient_bytes,
)
from zo2core.sweep.trained_weights import TrainedWeights
from zo2core.types import Commit, StepResult
from zo2core.workers.gradients import summed


class GradientSweeps:
    """Sweeps forward and backward, which compute the loss and the gradients of a step's rows."""

    def __init__(self, run: Run, model: DifferentiableModel, trained: TrainedWeights) -> None:
        workers = run.workers
        if workers.size > 1 and workers.split not in ("auto", "rows", f"1x{workers.size}"):
            raise without_effect(
                "split",
                f"{workers.split}, {workers.size} workers for one gradient",
                "rows, since a first-order step has no directions to split",
            )
        self._run = run
        self._model = model
        self._leaves = [
            model.leaves(index) if layout.used else {} for index, layout in enumerate(model.layouts)
        ]
        self._visits = GradientVisits(
            layouts=model.layouts,
            trained=trained,
            leaves=self._leaves,
            inputs=_open_inputs(run),
            make_room=run.visits.make_room,
            streams=run.device.streams,
            timeline=run.recorder.timeline,
        )

    def rows(self, batch: StepBatch, forward: Forward | None) -> microbatch.StepRows:
        """Divide the batch of a step into the micro-batches that this process runs."""
        return microbatch.StepRows(
            microbatch.batches_of(batch),
            forward,
            self._model,
            micro_batch_size=self._run.micro_batch_size,
            workers=self._run.workers,
            device=self._run.device.torch_device,
        )

    def differentiate(self, names: Collection[str]) -> None:
        """Have autograd compute the gradients of these parameters, wherever they are used, and of
        no others.
        """
        trained = []
        for leaves in self._leaves:
            for name, leaf in leaves.items():
                leaf.requires_grad_(name in names)
            trained.append({name: leaf for name, leaf in leaves.items() if name in names})
        self._visits = replace(self._visits, leaves=trained)

    def sweep(self, rows: microbatch.StepRows, *, together: bool, loss_scale: float = 1.0) -> float:
        """Compute gradients and the loss: as many micro-batches are in a sweep as have room at a
        block, or all of them ``together``.
        """
        segments, division = self._run.segments, self._run.division
        together |= division.is_divided
        allowed = segments.activation_bytes + segments.spare_bytes()
        outputs: list[torch.Tensor] = []

        def left_over(held: int, backward: int) -> int:
            return allowed - gradient_bytes(held, backward, 0)

        groups = microbatch.grouped(
            rows.batches,
            rows.forward,
            lambda held, backward: together or left_over(held, backward) >= 0,
            running=partial(backward_bytes, rows.forward),
        )
        for group, held, backward in list(groups) or [([], 0, 0)]:
            visitor = division.visitor(
                self._visits,
                rows,
                slice(len(outputs), len(outputs) + len(group)),
                kept_bytes=max(left_over(held, backward), 0),
                loss_scale=loss_scale,
            )
            rows.outputs = visitor.outputs[0]
            outputs += self._run.sweep(visitor)[0]
        return float(rows.loss(outputs))


def _open_inputs(run: Run) -> KeptActivations[torch.UntypedStorage]:
    """Open where inputs of segments wait for the backward pass."""
    timeline = run.recorder.timeline
    file = ActivationFile(run.spill, timeline)
    target: OffloadTarget[torch.UntypedStorage] = file
    if not run.device.in_place:
        target = ActivationOffload(run.device, timeline, file, run.segments.waiting_bytes)
    inputs = KeptActivations(target)
    run.opened.callback(inputs.close)
    return inputs


class AdapterSteps:
    """Steps of parameters in memory, such as an adapter's."""

    def __init__(
        self, run: Run, model: DifferentiableModel, method: FirstOrder, state: AdapterState
    ) -> None:
        self._run = run
        self._method = method
        self._state = state
        self._sweeps = GradientSweeps(run, model, state.weights)
        self._sweeps.differentiate(state.weights.parameters)

    def step(self, batch: StepBatch, forward: Forward | None, *, seed: int | None) -> StepResult:
        """Take a step on a batch. See ``Engine.step``."""
        require_no_seed(seed)
        started = time.perf_counter()
        state, step = self._state, self._state.version
        if state.optimizer is None:
            raise OptionError(
                "optimizer",
                found="None, and a call of step",
                expected="an optimizer",
                remedy=(
                    "pass an optimizer to the engine, or call gradients and then the step of your "
                    "optimizer"
                ),
            )
        groups = state.optimizer.param_groups
        if self._method.lr is not None:
            for group in groups:
                group["lr"] = self._method.rate(step)
        try:
            loss = self.gradients(batch, forward)
            norm = self._clip(loss)
            record = Commit(step, loss, norm, float(groups[0].get("lr", 0.0)))
            state.commit(record)
        finally:
            state.weights.clear_gradients()
        return self._run.step_result(record, started)

    def gradients(self, batch: StepBatch, forward: Forward | None) -> float:
        """Add the gradients of a batch to those of the parameters. See ``Engine.gradients``."""
        weights, division = self._state.weights, self._run.division
        peers = division.peers
        try:
            rows = self._sweeps.rows(batch, forward)
            # earlier gradients are the same on all workers, of which one adds them
            weights.keep_gradients(division.adds_earlier_gradient)
            loss = self._sweeps.sweep(rows, together=rows.weights is None)
            if peers.size > 1:
                own = weights.take_gradients()
                device = self._run.device.torch_device
                weights.set_gradients(summed(own, weights.forms, peers, device))
        except BaseException:
            weights.clear_gradients()
            raise
        return loss

    def _clip(self, loss: float) -> float:
        """Clip the gradients, and return their norm before clipping."""
        parameters = [
            parameter
            for parameter in self._state.weights.parameters.values()
            if parameter.grad is not None
        ]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            raise step_not_finite(
                self._state.version,
                found=f"loss {loss}, norm of the gradients {norm.item()}",
                expected="a finite loss and a finite norm",
                state="no step was taken",
            )
        if self._method.clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._method.clip, norm)
        return norm.item()


class FusedSteps:
    """Steps of all parameters, where they are stored."""

    def __init__(
        self, run: Run, model: DifferentiableModel, method: FirstOrder, state: FusedState
    ) -> None:
        self._run = run
        self._method = method
        self._state = state
        self._update: BlockUpdate = state.update
        self._sweeps = GradientSweeps(run, model, state.weights)
        self._segments: Collection[int] = ()  # those whose leaves require gradients

    def step(self, batch: StepBatch, forward: Forward | None, *, seed: int | None) -> StepResult:
        """Take a step on a batch. See ``Engine.step``."""
        require_no_seed(seed)
        started = time.perf_counter()
        state = self._state
        rows = self._sweeps.rows(batch, forward)
        self._choose_segments()
        state.states.begin(state.version)
        step = FusedStep(
            self._update,
            state.states,
            state.scale,
            GradientLimits(
                norm=self._method.clip,
                value=self._method.clip_value,
                norm_per=self._method.clip_per,
            ),
            rows,
            list(state.weights.forms),
            state.version,
        )
        if self._method.measures_first(len(self._segments)):
            step.is_measuring = True
            loss = self._sweep(rows, step)
            step.total = step.norm()
            step.is_measuring = False
        try:
            if not step.overflowed:
                step.lr = self._method.rate(state.version)
                loss = self._sweep(rows, step)
            # of a step that is skipped, norm and learning rate are 0
            record = Commit(state.version, loss, step.norm().item(), step.lr)
            state.commit(record, overflowed=step.overflowed)
        except BaseException:
            if step.changed_segments:
                self._run.use.close()  # segments are of two steps
            raise
        result = self._run.step_result(record, started)
        state.end_step()
        return result

    def _choose_segments(self) -> None:
        """Choose the segments that the step trains, and have their leaves require gradients."""
        state = self._state
        segments = self._update.segments(state.version, state.weights.segments)
        if segments != self._segments:
            self._segments = segments
            self._sweeps.differentiate(
                {name for segment in segments for name in state.weights.names_of(segment)}
            )

    def _sweep(self, rows: microbatch.StepRows, step: FusedStep) -> float:
        """Sweep forward and backward; returns the loss."""
        state = self._state
        state.weights.plan_updates(self._segments, step, state.next_version)
        try:
            return self._sweeps.sweep(rows, together=True, loss_scale=state.scale.scale)
        finally:
            state.weights.clear_gradients()


def require_no_seed(seed: int | None) -> None:
    """Refuse a seed: a first-order step has no directions."""
    if seed is not None:
        expected = "a zeroth-order step, which has directions"
        raise without_effect("step", "a seed of a first-order step", expected)
