"""First-order steps of all parameters: each segment is updated in the backward pass, as soon as its gradients are there.

One segment's gradients are in memory at a time. A norm of all gradients is then known only when all updates are made. So
clipping by norm takes a backward pass before, which only measures (LOMO, arXiv 2306.09782, section 3.3.1), unless a single
segment is trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from zo2core.errors import NonFiniteLossError, OptionError
from zo2core.methods.backprop import GradientSweeps
from zo2core.methods.loss_scale import LossScale, LossScaling
from zo2core.methods.row_shards import AllRows, StepRows
from zo2core.optimizers import OptimizerStates
from zo2core.profiling import Sweep
from zo2core.protocols import BlockUpdate, Forward, Objective, Store, UpdateInputs
from zo2core.sweep.gradient_memory import GradientMemory
from zo2core.sweep.gradient_visitor import GradientVisits
from zo2core.sweep.objective import batches_of
from zo2core.sweep.stored_parameters import SegmentStep, StoredParameters
from zo2core.types import HALVES, Batch, Commit, GradientStepResult, widened


@dataclass(frozen=True, kw_only=True)
class GradientPolicy:
    """What is done with gradients before the update: clipped by value first, then by the norm that they had before.

    Args:
        clip_value: Largest absolute value of a gradient's elements; None does not clip them.
        clip_norm: Largest 2-norm of all gradients together; None does not scale them. Unless a single segment is trained,
            each step then sweeps twice: first to measure the norm.
        loss_scaling: How the loss is scaled, for forwards in float16; None does not scale it. A step whose gradients
            overflow is skipped. To find this before the first update, each step sweeps twice.

    Raises:
        OptionError: if a limit is not above 0.
    """

    clip_value: float | None = None
    clip_norm: float | None = None
    loss_scaling: LossScaling | None = None

    def __post_init__(self) -> None:
        for option, limit in (("clip_value", self.clip_value), ("clip_norm", self.clip_norm)):
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise OptionError(
                    option, found=repr(limit), expected="a number above 0", remedy="leave it out, to clip nothing"
                )

    @property
    def options(self) -> dict[str, Any]:
        """The options as JSON values, for the journal."""
        scaling = {} if self.loss_scaling is None else {"loss_scaling": asdict(self.loss_scaling)}
        return {"clip_value": self.clip_value, "clip_norm": self.clip_norm, **scaling}

    def measures_first(self, segments: int) -> bool:
        """Whether a step that trains so many segments has to measure all gradients before the first update."""
        return self.loss_scaling is not None or (self.clip_norm is not None and segments > 1)


class _Norms:
    """The norms of a sweep's gradients, collected segment by segment.

    Args:
        step: 0-based.
        joint_loss: Computes the step's loss from the head's outputs.
        scale: Scale of the loss.
    """

    def __init__(self, step: int, joint_loss: Callable[[Sequence[torch.Tensor]], torch.Tensor], scale: LossScale) -> None:
        self.outputs: Sequence[torch.Tensor] = ()  # of the head, once it has run
        self.overflowed = False  # whether a gradient of the scaled loss is not finite
        self._scale = scale
        self._step = step
        self._joint_loss = joint_loss
        self._norms: dict[str, torch.Tensor] = {}  # by name, 0-d

    def add(self, gradients: Mapping[str, torch.Tensor], changed: int) -> None:
        """Add the norms of a segment's gradients.

        Args:
            gradients: By name.
            changed: Number of segments that the step has changed already.

        Raises:
            NonFiniteLossError: if the loss or a norm is not finite, and the step cannot be skipped.
        """
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
        """Add the norms. See the contract."""
        _convert(gradients, self._update, self._scale)
        self._norms.add(gradients, 0)

    def update(
        self, segment: int, weights: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], store: Store
    ) -> bool:
        """Change nothing. See the contract."""
        return False


class _Updating:
    """The step of segments in a sweep that clips gradients and changes weights.

    Args:
        norms: Collects norms, or has them all.
        total: The norm of all gradients together, if a sweep has measured it; None: it is that of the first segment.
        names: Names of all trained parameters, in registration order.
        policy: How gradients are clipped.
        update: The optimizer.
        states: Its states.
        scale: Scale of the loss.
        step: 0-based.
        lr: Learning rate of the step.
    """

    def __init__(
        self,
        norms: _Norms,
        total: torch.Tensor | None,
        names: Collection[str],
        policy: GradientPolicy,
        update: BlockUpdate,
        states: OptimizerStates,
        scale: LossScale,
        *,
        step: int,
        lr: float,
    ) -> None:
        self._norms = norms
        self._total = total
        self._names = names
        self._policy = policy
        self._update = update
        self._states = states
        self._scale = scale
        self._step = step
        self._lr = lr
        self.changed = 0  # segments that are changed, or were being changed when it failed

    def complete(self, segment: int, gradients: dict[str, torch.Tensor]) -> None:
        """Add the norms, and clip. See the contract."""
        converted = _convert(gradients, self._update, self._scale)
        if self._total is None:
            self._norms.add(gradients, self.changed)
        value, norm, scale = self._policy.clip_value, self._policy.clip_norm, None
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
        """Change the weights. See the contract."""
        self.changed += 1
        states = self._states.of(segment, store)
        self._update.apply(UpdateInputs(segment, weights, gradients, states, self._step, self._lr))
        return True


def _convert(gradients: dict[str, torch.Tensor], update: BlockUpdate, scale: LossScale) -> set[str]:
    """Convert 16-bit gradients to float32, if the optimizer wants them so, and divide them by the scale of the loss.

    Returns:
        The names of those that were converted.
    """
    converted = {name for name, gradient in gradients.items() if update.widens_gradients and gradient.dtype in HALVES}
    for name, gradient in gradients.items():
        if name in converted:
            gradients[name] = widened(gradient)
        gradients[name] = scale.unscaled(gradients[name], gradients[name] if name in converted else None)
    return converted


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
        states: Its states.
        lr: Learning rate of a 0-based step.
        policy: How gradients are clipped, and the loss scaled.
        sweeps: Runs the sweeps.
        model: The default forward of a step.
        parameters: The trained parameters.
        visits: Makes the visitor of each sweep; its leaves are those of all trained parameters.
        micro_batch_size: Rows of a micro-batch; None does not split batches.
        commit: Called with a step's record when all segments are updated. Of a step that was skipped, since gradients
            overflowed, norm and learning rate are 0.
        memory: Memory for inputs and graphs that micro-batches keep from their forward to their backward pass.
        versions_are_steps: Whether the version of a segment is the number of steps after its last update, as where segments
            are written back, and not the number of its updates.
    """

    def __init__(
        self,
        update: BlockUpdate,
        states: OptimizerStates,
        *,
        lr: Callable[[int], float],
        policy: GradientPolicy,
        sweeps: GradientSweeps,
        model: Forward,
        parameters: StoredParameters,
        visits: GradientVisits,
        micro_batch_size: int | None,
        commit: Callable[[Commit], None],
        memory: GradientMemory,
        versions_are_steps: bool = False,
    ) -> None:
        self.steps = 0
        self.broken_at: int | None = None  # the step that changed a part of the segments, and failed
        self._update = update
        self._states = states
        self._lr = lr
        self._policy = policy
        self._scale = LossScale(policy.loss_scaling)
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
        """Take a step on a batch. See ``GradientEngine.step``."""
        started, step = time.perf_counter(), self.steps
        is_model_loss = forward is None and not isinstance(self._model, Objective)
        forward = self._model if forward is None else forward
        rows = AllRows().of_step(batches_of(batch), self._micro_batch_size, None if is_model_loss else forward)
        prepared = list(self._sweeps.prepared(rows.batches, forward))
        segments = self._update.segments(step, self._parameters.segments)
        self._train_only(segments)
        run = _Batches(forward, rows, prepared, segments)
        norms, names = _Norms(step, rows.joint_loss, self._scale), self._parameters.names
        total = None
        self._states.begin(step)
        if self._policy.measures_first(len(segments)):
            loss = self._sweep(run, _Measuring(norms, self._update, self._scale), norms)
            total = norms.total(names)
        lr = 0.0 if norms.overflowed else self._lr(step)
        updating = _Updating(norms, total, names, self._policy, self._update, self._states, self._scale, step=step, lr=lr)
        try:
            if not norms.overflowed:
                loss = self._sweep(run, updating, norms)
            norm = norms.total(names).item()
            self._commit(Commit(step, loss, norm, lr))
        except BaseException:
            if updating.changed:
                self.broken_at = step
            raise
        self._scale.update(overflowed=norms.overflowed)
        self.steps += 1
        sweep = Sweep.of_step(step, started, time.perf_counter())
        return GradientStepResult(step, loss, norm, sweep.done - started, self._sweeps.ended(sweep))

    def values(self) -> dict[str, Any]:
        """What later steps depend on besides weights and optimizer states, as JSON."""
        return self._scale.values()

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Continue with what ``values`` returned."""
        self._scale.load_values(values)

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
            loss_scale=self._scale.scale,
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
