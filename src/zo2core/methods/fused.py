"""First-order steps of all parameters: each segment is updated in the backward pass, as soon as its gradients are there.

One segment's gradients are in memory at a time. A norm of all gradients is then known only when all updates are made. So
clipping by norm takes a backward pass before, which only measures (LOMO, arXiv 2306.09782, section 3.3.1), unless a single
segment is trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from zo2core.errors import NonFiniteLossError
from zo2core.methods.first_order import FirstOrder, step_result
from zo2core.methods.loss_scale import LossScale
from zo2core.methods.row_shards import StepRows
from zo2core.methods.states import GenerationState, StoredState
from zo2core.protocols import BlockUpdate, Forward, Objective, Store, UpdateInputs
from zo2core.runner import Runner
from zo2core.sweep.gradient_memory import GradientMemory
from zo2core.sweep.gradient_visitor import GradientVisits
from zo2core.sweep.microbatch import batches_of, split_batches
from zo2core.sweep.stored_parameters import SegmentStep
from zo2core.types import HALVES, Batch, Commit, StepResult, widened


class _Norms:
    """The norms of a sweep's gradients, collected segment by segment."""

    def __init__(self, step: int, joint_loss: Callable[[Sequence[torch.Tensor]], torch.Tensor], scale: LossScale) -> None:
        self.outputs: Sequence[torch.Tensor] = ()  # of the head, once it has run
        self.overflowed = False  # whether a gradient of the scaled loss is not finite
        self._scale = scale
        self._step = step
        self._joint_loss = joint_loss
        self._norms: dict[str, torch.Tensor] = {}  # by name, 0-d

    def add(self, gradients: Mapping[str, torch.Tensor], changed: int) -> None:
        """Add the norms of a segment's gradients."""
        norms = {name: torch.linalg.vector_norm(gradient) for name, gradient in gradients.items()}
        loss = float(self._joint_loss(self.outputs))
        wrong = [name for name, norm in norms.items() if not math.isfinite(norm.item())]
        if wrong and math.isfinite(loss) and self._scale.may_skip:
            self.overflowed = True
        elif wrong or not math.isfinite(loss):
            state = f"{changed} segments had been changed: resume from the last snapshot" if changed else "no step was taken"
            raise NonFiniteLossError(
                f"step {self._step}",
                found=f"loss {loss}" + (f", and a gradient of {wrong[0]} that is not finite" if wrong else ""),
                expected="a finite loss and finite gradients",
                remedy=f"lower the learning rate, or use bfloat16 or float32 where float16 overflows; {state}",
            )
        self._norms.update(norms)

    def total(self, names: Collection[str]) -> torch.Tensor:
        """The norm of all gradients together, 0-d; 0 if one overflowed. The order of the names decides its last bit."""
        if self.overflowed:
            return torch.zeros(())
        norms = [self._norms[name] for name in names if name in self._norms]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


class _Measuring:
    """The step of segments in a sweep that measures gradients and changes nothing."""

    def __init__(self, norms: _Norms, update: BlockUpdate, scale: LossScale) -> None:
        self._norms = norms
        self._update = update
        self._scale = scale

    def complete(self, segment: int, gradients: dict[str, torch.Tensor]) -> None:
        """Add the norms."""
        _convert(gradients, self._update, self._scale)
        self._norms.add(gradients, 0)

    def update(
        self, segment: int, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], store: Store
    ) -> bool:
        """Change nothing."""
        return False


class _Updating:
    """The step of segments in a sweep that clips gradients and changes weights."""

    def __init__(
        self,
        norms: _Norms,
        total: torch.Tensor | None,
        names: Collection[str],
        method: FirstOrder,
        state: StoredState,
        *,
        step: int,
        lr: float,
    ) -> None:
        self._norms, self._total, self._names = norms, total, names
        self._method, self._state = method, state
        self._step, self._lr = step, lr
        self.changed = 0  # segments that are changed, or were being changed when it failed

    def complete(self, segment: int, gradients: dict[str, torch.Tensor]) -> None:
        """Add the norms, and clip."""
        converted = _convert(gradients, self._state.update, self._state.scale)
        if self._total is None:
            self._norms.add(gradients, self.changed)
        value, norm, scale = self._method.clip_value, self._method.clip, None
        if norm is not None:
            total = self._norms.total(self._names) if self._total is None else self._total
            scale = torch.clamp(norm / (total + 1e-6), max=1.0)
        for name, gradient in gradients.items():
            out = gradient if name in converted else None  # others may share memory
            if value is not None:
                gradients[name] = torch.clamp(gradients[name], -value, value, out=out)
            if scale is not None:
                gradients[name] = torch.mul(gradients[name], scale, out=out)

    def update(
        self, segment: int, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], store: Store
    ) -> bool:
        """Change the weights."""
        self.changed += 1
        states = self._state.states.of(segment, store)
        self._state.update.apply(UpdateInputs(segment, weights, gradients, states, self._step, self._lr))
        return True


def _convert(gradients: dict[str, torch.Tensor], update: BlockUpdate, scale: LossScale) -> set[str]:
    """Convert 16-bit gradients to float32, if the optimizer wants them so, and divide them by the scale of the loss."""
    converted = {name for name, gradient in gradients.items() if update.widens_gradients and gradient.dtype in HALVES}
    for name, gradient in gradients.items():
        if name in converted:
            gradients[name] = widened(gradient)
        gradients[name] = scale.unscaled(gradients[name], gradients[name] if name in converted else None)
    return converted


class FusedSteps:
    """Takes first-order steps of all parameters, where they are stored."""

    def __init__(self, runner: Runner, method: FirstOrder, state: StoredState, visits: GradientVisits) -> None:
        self._runner, self._method, self._state = runner, method, state
        self._visits, self._leaves = visits, visits.leaves
        self._trained: Collection[int] = ()  # segments whose leaves require gradients
        self._memory = GradientMemory(budget=runner.activation_bytes, spare=runner.spare_bytes)

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> StepResult:
        """Take a step on a batch. See ``Engine.step``."""
        started, state, runner = time.perf_counter(), self._state, self._runner
        step, update, scale, trained = state.version, state.update, state.scale, state.trained
        is_model_loss = forward is None and not isinstance(runner.model, Objective)
        forward = runner.model if forward is None else forward
        rows = StepRows(split_batches(batches_of(batch), runner.micro_batch_size, None if is_model_loss else forward))
        prepared = list(runner.prepared(rows.batches, forward))
        segments = update.segments(step, trained.segments)
        self._train_only(segments)
        sweep_of = partial(self._sweep, forward, rows, prepared, segments)
        norms, total = _Norms(step, rows.joint_loss, scale), None
        state.states.begin(step)
        if self._method.measures_first(len(segments)):
            loss = sweep_of(_Measuring(norms, update, scale), norms)
            total = norms.total(trained.names)
        lr = 0.0 if norms.overflowed else self._method.rate(step)
        updating = _Updating(norms, total, trained.names, self._method, state, step=step, lr=lr)
        try:
            if not norms.overflowed:
                loss = sweep_of(updating, norms)
            norm = norms.total(trained.names).item()
            commit = Commit(step, loss, norm, lr)
            state.commit(commit)  # of a step that is skipped, norm and learning rate are 0
        except BaseException:
            if updating.changed:
                runner.use.close()  # segments are of two steps
            raise
        scale.update(overflowed=norms.overflowed)
        state.version += 1
        return step_result(runner, commit, started)

    def _sweep(
        self,
        forward: Forward,
        rows: StepRows,
        batches: Sequence[Batch],
        segments: Collection[int],
        work: SegmentStep,
        norms: _Norms,
    ) -> float:
        """Sweep forward and backward; returns the loss."""
        state = self._state
        # Where segments are written, their version is the number of steps, and not that of their updates.
        state.trained.expect(segments, work, state.version + 1 if isinstance(state, GenerationState) else None)
        [group] = self._memory.groups(forward, batches, together=True)
        visitor = self._visits.visitor(
            forward,
            batches,
            weights=rows.weights,
            joint_loss=rows.joint_loss,
            kept_bytes=group.kept_bytes,
            loss_scale=state.scale.scale,
        )
        norms.outputs = visitor.outputs[0]
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
