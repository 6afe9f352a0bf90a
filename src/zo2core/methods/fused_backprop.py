"""First-order steps of all parameters: each segment is updated in the backward pass, as soon as its gradients are there.

One segment's gradients are in memory at a time. A norm of all gradients is then known only when all updates are made. So
clipping by norm takes a backward pass before, which only measures (LOMO, arXiv 2306.09782, section 3.3.1), unless a single
segment is trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from zo2core.errors import NonFiniteLossError, OptionError
from zo2core.methods.backprop import GradientSweeps
from zo2core.methods.row_shards import AllRows, StepRows
from zo2core.profiling import Sweep
from zo2core.protocols import BlockUpdate, Forward, Objective
from zo2core.sweep.gradient_memory import GradientMemory
from zo2core.sweep.gradient_visitor import GradientVisits
from zo2core.sweep.objective import batches_of
from zo2core.sweep.stored_parameters import SegmentStep, StoredParameters
from zo2core.types import Batch, GradientStepResult, widened


@dataclass(frozen=True, kw_only=True)
class GradientClipping:
    """How gradients are clipped: by value first, then by the norm that they had before.

    Args:
        value: Largest absolute value of a gradient's elements; None does not clip them.
        norm: Largest 2-norm of all gradients together; None does not scale them.

    Raises:
        OptionError: if one is not above 0.
    """

    value: float | None = None
    norm: float | None = None

    def __post_init__(self) -> None:
        for option, limit in (("clip_value", self.value), ("clip_norm", self.norm)):
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise OptionError(
                    option, found=repr(limit), expected="a number above 0", remedy="leave it out, to clip nothing"
                )


class _Norms:
    """The norms of a sweep's gradients, collected segment by segment.

    Args:
        step: 0-based.
        joint_loss: Computes the step's loss from the head's outputs.
    """

    def __init__(self, step: int, joint_loss: Callable[[Sequence[torch.Tensor]], torch.Tensor]) -> None:
        self.outputs: Sequence[torch.Tensor] = ()  # of the head, once it has run
        self._step = step
        self._joint_loss = joint_loss
        self._norms: dict[str, torch.Tensor] = {}  # by name, 0-d

    def add(self, gradients: Mapping[str, torch.Tensor], changed: int) -> None:
        """Add the norms of a segment's gradients.

        Args:
            gradients: By name.
            changed: Number of segments that the step has changed already.

        Raises:
            NonFiniteLossError: if the loss or a norm is not finite.
        """
        norms = {name: torch.linalg.vector_norm(gradient) for name, gradient in gradients.items()}
        loss = float(self._joint_loss(self.outputs))
        wrong = [name for name, norm in norms.items() if not math.isfinite(norm.item())]
        if wrong or not math.isfinite(loss):
            state = f"{changed} segments had been changed: resume from the last snapshot" if changed else "no step was taken"
            raise NonFiniteLossError(
                f"step {self._step}",
                found=f"loss {loss}" + (f", and a gradient of {wrong[0]} that is not finite" if wrong else ""),
                expected="a finite loss and finite gradients",
                remedy=f"lower the learning rate, or use bfloat16 or float32 where float16 overflows; {state}",
            )
        self._norms.update(norms)

    def total(self, names: Collection[str]) -> torch.Tensor:
        """The norm of all gradients together, 0-d. The order of the names decides its last bit."""
        norms = [self._norms[name] for name in names if name in self._norms]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


class _Measuring:
    """The step of segments in a sweep that measures gradients and changes nothing."""

    def __init__(self, norms: _Norms, update: BlockUpdate) -> None:
        self._norms = norms
        self._update = update

    def complete(self, segment: int, gradients: dict[str, torch.Tensor]) -> None:
        """Add the norms. See the contract."""
        _convert(gradients, self._update)
        self._norms.add(gradients, 0)

    def update(self, segment: int, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> bool:
        """Change nothing. See the contract."""
        return False


class _Updating:
    """The step of segments in a sweep that clips gradients and changes weights.

    Args:
        norms: Collects norms, or has them all.
        total: The norm of all gradients together, if a sweep has measured it; None: it is that of the first segment.
        names: Names of all trained parameters, in registration order.
        clipping: How gradients are clipped.
        update: The optimizer.
        step: 0-based.
        lr: Learning rate of the step.
    """

    def __init__(
        self,
        norms: _Norms,
        total: torch.Tensor | None,
        names: Collection[str],
        clipping: GradientClipping,
        update: BlockUpdate,
        *,
        step: int,
        lr: float,
    ) -> None:
        self._norms = norms
        self._total = total
        self._names = names
        self._clipping = clipping
        self._update = update
        self._step = step
        self._lr = lr
        self.changed = 0  # segments that are changed, or were being changed when it failed

    def complete(self, segment: int, gradients: dict[str, torch.Tensor]) -> None:
        """Add the norms, and clip. See the contract."""
        _convert(gradients, self._update)
        if self._total is None:
            self._norms.add(gradients, self.changed)
        value, norm, scale = self._clipping.value, self._clipping.norm, None
        if norm is not None:
            total = self._norms.total(self._names) if self._total is None else self._total
            scale = torch.clamp(norm / (total + 1e-6), max=1.0)
        for name in gradients:
            if value is not None:
                gradients[name] = gradients[name].clamp(-value, value)
            if scale is not None:
                gradients[name] = gradients[name] * scale

    def update(self, segment: int, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> bool:
        """Change the weights. See the contract."""
        self.changed += 1
        self._update.apply(segment, weights, gradients, step=self._step, lr=self._lr)
        return True


def _convert(gradients: dict[str, torch.Tensor], update: BlockUpdate) -> None:
    """Convert 16-bit gradients to float32, if the optimizer wants them so."""
    if update.widens_gradients:
        for name in gradients:
            gradients[name] = widened(gradients[name])


class _Batches(NamedTuple):
    """What the sweeps of one step run."""

    forward: Forward
    rows: StepRows
    batches: Sequence[Batch]  # prepared
    segments: Collection[int]  # that are trained


class FusedBackprop:
    """The first-order method for all parameters, where they are stored.

    Args:
        update: The optimizer.
        lr: Learning rate of a 0-based step.
        clipping: How gradients are clipped.
        sweeps: Runs the sweeps.
        model: The default forward of a step.
        parameters: The trained parameters.
        visits: Makes the visitor of each sweep; its leaves are those of all trained parameters.
        micro_batch_size: Rows of a micro-batch; None does not split batches.
        commit: Called with a step's loss and gradient norm when all segments are updated.
        memory: Memory for inputs and graphs that micro-batches keep from their forward to their backward pass.
        versions_are_steps: Whether the version of a segment is the number of steps after its last update, as where segments
            are written back, and not the number of its updates.
    """

    def __init__(
        self,
        update: BlockUpdate,
        *,
        lr: Callable[[int], float],
        clipping: GradientClipping,
        sweeps: GradientSweeps,
        model: Forward,
        parameters: StoredParameters,
        visits: GradientVisits,
        micro_batch_size: int | None,
        commit: Callable[[float, float], None],
        memory: GradientMemory,
        versions_are_steps: bool = False,
    ) -> None:
        self.steps = 0
        self.broken_at: int | None = None  # the step that changed a part of the segments, and failed
        self._update = update
        self._lr = lr
        self._clipping = clipping
        self._sweeps = sweeps
        self._model = model
        self._parameters = parameters
        self._visits = visits
        self._leaves = visits.leaves
        self._trained: Collection[int] = ()  # segments whose leaves require gradients
        self._micro_batch_size = micro_batch_size
        self._commit = commit
        self._memory = memory
        self._versions_are_steps = versions_are_steps

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> GradientStepResult:
        """Take a step on a batch. See ``FullBackpropEngine.step``."""
        started, step = time.perf_counter(), self.steps
        is_model_loss = forward is None and not isinstance(self._model, Objective)
        forward = self._model if forward is None else forward
        rows = AllRows().of_step(batches_of(batch), self._micro_batch_size, None if is_model_loss else forward)
        prepared = list(self._sweeps.prepared(rows.batches, forward))
        segments = self._update.segments(step, self._parameters.segments)
        self._train_only(segments)
        run = _Batches(forward, rows, prepared, segments)
        norms, names = _Norms(step, rows.joint_loss), self._parameters.names
        total = None
        if self._clipping.norm is not None and len(segments) > 1:
            self._sweep(run, _Measuring(norms, self._update), norms)
            total = norms.total(names)
        updating = _Updating(norms, total, names, self._clipping, self._update, step=step, lr=self._lr(step))
        try:
            loss = self._sweep(run, updating, norms)
            norm = norms.total(names).item()
            self._commit(loss, norm)
        except BaseException:
            if updating.changed:
                self.broken_at = step
            raise
        self.steps += 1
        sweep = Sweep.of_step(step, started, time.perf_counter())
        return GradientStepResult(step, loss, norm, sweep.done - started, self._sweeps.ended(sweep))

    def _sweep(self, run: _Batches, work: SegmentStep, norms: _Norms) -> float:
        """Sweep forward and backward; returns the loss."""
        version = self.steps + 1 if self._versions_are_steps else None
        self._parameters.expect(run.segments, work, version)
        [group] = self._memory.groups(run.forward, run.batches, together=True)
        visitor = self._visits.visitor(
            run.forward,
            run.batches,
            weights=run.rows.weights,
            joint_loss=run.rows.joint_loss,
            kept_bytes=group.kept_bytes,
        )
        norms.outputs = visitor.outputs[0]
        try:
            return run.rows.finish(self._sweeps.run(visitor, visitor.order)[0])
        finally:
            self._parameters.clear_gradients()

    def _train_only(self, segments: Collection[int]) -> None:
        """Have autograd compute the gradients of these segments' own parameters, wherever they are used, and no others."""
        if segments == self._trained:
            return
        self._trained = segments
        names = {name for segment in segments for name in self._parameters.names_of(segment)}
        trained = []
        for leaves in self._leaves:
            for name, leaf in leaves.items():
                leaf.requires_grad_(name in names)
            trained.append({name: leaf for name, leaf in leaves.items() if name in names})
        self._visits = replace(self._visits, leaves=trained)
