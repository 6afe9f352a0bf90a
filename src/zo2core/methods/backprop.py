"""First-order steps: a sweep forward and backward computes gradients, then an optimizer changes the parameters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from zo2core.errors import NonFiniteLossError, OptionError
from zo2core.methods.row_shards import RowShards
from zo2core.optimizers import OptimizerFactory, make_optimizer
from zo2core.profiling import Sweep
from zo2core.protocols import Forward, Objective
from zo2core.sweep.gradient_memory import GradientMemory
from zo2core.sweep.gradient_visitor import GradientVisits
from zo2core.sweep.objective import batches_of
from zo2core.sweep.trained_parameters import TrainedParameters
from zo2core.sweep.visits import SweepVisitor
from zo2core.types import Batch, GradientStepResult, Lane, LaneUse


class GradientSweeps(Protocol):
    """The methods of the runner that a first-order method calls."""

    def prepared(self, batches: Iterable[Batch], forward: Forward) -> Iterator[Batch]:
        """Yield the batches on the device, checked by their forward."""

    def run(self, visitor: SweepVisitor, order: Sequence[int]) -> list[list[torch.Tensor]]:
        """Visit segments in this order, and return the head's outputs."""

    def ended(self, sweep: Sweep) -> Mapping[Lane, LaneUse]:
        """Record that a step ended, and return the use of each lane in it."""


class Backprop:
    """The first-order method: it computes and clips the gradients of the trained parameters, and calls the optimizer.

    Args:
        optimizer: Called with the trained parameters in registration order: ``partial(torch.optim.AdamW, lr=2e-4)``. None:
            the caller changes the parameters, and ``step`` is refused.
        clip: Largest 2-norm of all gradients together; None does not clip.
        sweeps: Runs the sweeps.
        model: The default forward of a step.
        trained: The trained parameters and their gradients.
        visits: Makes the visitor of each sweep.
        row_shards: Chooses this process's rows of each step, and completes their gradients.
        micro_batch_size: Rows of a micro-batch; None does not split batches.
        commit: Called with a step's loss and gradient norm before the optimizer changes a parameter. If it raises an error,
            the step is not taken.
        memory: Memory for inputs and graphs that micro-batches keep from their forward to their backward pass.

    Raises:
        OptionError: if the factory returns no optimizer, the optimizer needs a closure, or ``clip`` is not above 0.
    """

    def __init__(
        self,
        optimizer: OptimizerFactory | None,
        *,
        clip: float | None,
        sweeps: GradientSweeps,
        model: Forward,
        trained: TrainedParameters,
        visits: GradientVisits,
        row_shards: RowShards,
        micro_batch_size: int | None,
        commit: Callable[[float, float], None],
        memory: GradientMemory,
    ) -> None:
        if clip is not None and not (math.isfinite(clip) and clip > 0):
            raise OptionError("clip", found=repr(clip), expected="a norm above 0", remedy="leave it out to clip nothing")
        self.optimizer: Any = None if optimizer is None else make_optimizer(optimizer, list(trained.parameters.values()))
        self.steps = 0
        self._clip = clip
        self._sweeps = sweeps
        self._model = model
        self._trained = trained
        self._visits = visits
        self._row_shards = row_shards
        self._micro_batch_size = micro_batch_size
        self._commit = commit
        self._memory = memory

    def step(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> GradientStepResult:
        """Take a step on a batch. See ``GradientEngine.step``."""
        if self.optimizer is None:
            raise OptionError(
                "optimizer",
                found="None, and a call of step",
                expected="an optimizer",
                remedy="pass an optimizer to the engine, or call gradients and then the step of your optimizer",
            )
        started = time.perf_counter()
        try:
            loss = self.gradients(batch, forward)
            norm = self._clipped(loss)
            self._commit(loss, norm)
            self.optimizer.step()
        finally:
            self._trained.clear_gradients()
        self.steps += 1
        sweep = Sweep.of_step(self.steps - 1, started, time.perf_counter())
        return GradientStepResult(self.steps - 1, loss, norm, sweep.done - started, self._sweeps.ended(sweep))

    def gradients(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> float:
        """Add the gradients of a batch to those of the parameters. See ``BackpropEngine.gradients``."""
        is_model_loss = forward is None and not isinstance(self._model, Objective)
        forward = self._model if forward is None else forward
        rows = self._row_shards.of_step(batches_of(batch), self._micro_batch_size, None if is_model_loss else forward)
        prepared = list(self._sweeps.prepared(rows.batches, forward))
        outputs: list[torch.Tensor] = []
        for start, stop, kept_bytes in self._memory.groups(forward, prepared, together=rows.weights is None):
            visitor = self._visits.visitor(
                forward,
                prepared[start:stop],
                weights=None if rows.weights is None else rows.weights[start:stop],
                joint_loss=rows.joint_loss,
                kept_bytes=kept_bytes,
            )
            outputs += self._sweeps.run(visitor, visitor.order)[0]
        return rows.finish(outputs)

    def _clipped(self, loss: float) -> float:
        """Clip the gradients, and return their norm before clipping."""
        parameters = [parameter for parameter in self._trained.parameters.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            raise NonFiniteLossError(
                f"step {self.steps}",
                found=f"loss {loss}, norm of the gradients {norm.item()}",
                expected="a finite loss and a finite norm",
                remedy="lower the learning rate, or use bfloat16 or float32 where float16 overflows; no step was taken",
            )
        if self._clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._clip, norm)
        return norm.item()
