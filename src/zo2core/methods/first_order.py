"""First-order steps: a sweep forward and backward computes gradients, and an optimizer changes the parameters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zo2core.errors import NonFiniteLossError, OptionError
from zo2core.methods.loss_scale import LossScaling
from zo2core.methods.row_shards import RowShards
from zo2core.methods.states import AdapterState
from zo2core.optimizer_states import state_bytes
from zo2core.optimizers import Delayed, OptimizerFactory
from zo2core.profiling import Sweep
from zo2core.protocols import BlockModel, BlockUpdate, Forward, Objective
from zo2core.runner import Runner
from zo2core.sweep.activations import ActivationFile, ActivationOffload, KeptActivations
from zo2core.sweep.gradient_memory import GradientMemory, MemoryLimit
from zo2core.sweep.gradient_visitor import GradientVisits
from zo2core.sweep.microbatch import batches_of
from zo2core.sweep.trained_parameters import PresentWeights
from zo2core.types import Batch, BlockLayout, Commit, StepResult

TRAINED_COPIES = 4  # parameters, gradients, and two moments, as AdamW has them: no common optimizer keeps more


@dataclass(frozen=True)
class FirstOrder:
    """The first-order method.

    With a function that makes a ``torch.optim`` optimizer, an adapter is trained, which stays in memory over a base that is
    only read. With a ``BlockUpdate`` all parameters are: each segment is updated in the backward pass, where it is stored.
    Losses, gradients and parameters are those of ``torch.autograd`` and the same optimizer on the whole model, bit for bit.

    Args:
        optimizer: ``partial(torch.optim.AdamW, lr=2e-4)``, called with the trained parameters in registration order; or a
            ``BlockUpdate``: ``LOMO()``, ``TorchOptimizer(...)``, ``BAdam(...)``. None: for a custom training loop, which
            calls ``gradients`` and changes ``parameters`` itself.
        lr: Learning rate, or a function of the 0-based step. None: that of a ``torch.optim`` optimizer.
        clip: Largest 2-norm of all gradients together; None does not clip. With a ``BlockUpdate`` each step sweeps twice
            then, first to measure the norm (LOMO, arXiv 2306.09782, section 3.3.1), unless a single segment is trained.
        clip_value: Largest absolute value of a gradient's elements, before the norm is clipped; None does not clip them.
            For a ``BlockUpdate``.
        scaling: How the loss is scaled, for forwards in float16; None does not scale it. A step whose gradients overflow is
            skipped. To find this before the first update, each step sweeps twice. For a ``BlockUpdate``.
        options: The ``torch.optim`` optimizer and its options, as JSON values for the journal of a run that is kept. None:
            its class and the options that its state has.

    Raises:
        OptionError: if an option is out of its range, or has no effect.
    """

    optimizer: OptimizerFactory | BlockUpdate | None
    lr: float | Callable[[int], float] | None = None
    clip: float | None = None
    clip_value: float | None = None
    scaling: LossScaling | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for option, limit in (("clip_value", self.clip_value), ("clip", self.clip)):
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise OptionError(
                    option, found=repr(limit), expected="a number above 0", remedy="leave it out, to clip nothing"
                )
        if self.update is not None and self.lr is None:
            raise OptionError(
                "lr", found="None", expected="a learning rate of the BlockUpdate", remedy="pass FirstOrder(lr=...)"
            )
        if self.update is None and (self.clip_value is not None or self.scaling is not None):
            raise OptionError(
                "clip_value" if self.scaling is None else "scaling",
                found="an optimizer of an adapter",
                expected="a BlockUpdate, which trains all parameters",
                remedy="leave it out",
            )

    @property
    def update(self) -> BlockUpdate | None:
        """The optimizer, if it changes all parameters, one segment at a time."""
        return self.optimizer if isinstance(self.optimizer, BlockUpdate) else None

    @property
    def factory(self) -> OptimizerFactory | None:
        """The function that makes the optimizer of an adapter; None if there is none."""
        return None if isinstance(self.optimizer, BlockUpdate) else self.optimizer

    @property
    def journal_options(self) -> Mapping[str, Any]:
        """The method as JSON values, for the journal."""
        if self.update is None:
            fixed = {} if self.lr is None or callable(self.lr) else {"lr": self.lr}
            return {**_described(self.optimizer), "clip_norm": self.clip, **fixed} if self.options is None else self.options
        scaling = {} if self.scaling is None else {"loss_scaling": asdict(self.scaling)}
        return {**self.update.options, "clip_value": self.clip_value, "clip_norm": self.clip, **scaling}

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        assert self.lr is not None, "it is required of a BlockUpdate"
        return self.lr(step) if callable(self.lr) else self.lr

    def measures_first(self, segments: int) -> bool:
        """Whether a step that trains so many segments has to measure all gradients before the first update."""
        return self.scaling is not None or (self.clip is not None and segments > 1)


def _described(factory: Any) -> dict[str, Any]:
    """Name and options of an optimizer that a function makes."""
    plain, keywords = (bool, int, float, str, list, tuple, type(None)), getattr(factory, "keywords", {})
    made = getattr(factory, "func", factory)
    options = {name: value if isinstance(value, plain) else repr(value) for name, value in keywords.items()}
    return {"name": getattr(made, "__name__", type(made).__name__), **options}


def require_trainable(
    model: BlockModel,
    method: FirstOrder,
    update: BlockUpdate,
    *,
    run: Path | str | None,
    commit_every: int | None,
    workers: int,
) -> None:
    """Refuse what first-order steps of all parameters cannot do right."""
    halves = [spec.name for layout in model.layouts for spec in layout.parameters if spec.dtype is torch.float16]
    if method.scaling is not None and halves and not update.widens_gradients:
        raise OptionError(
            "scaling",
            found=f"float16 gradients of {halves[0]}, which the optimizer takes as they are",
            expected="float32 gradients, into which those of the scaled loss are converted",
            remedy="open the model with precision='mixed', or use LOMO or AdaLOMO",
        )
    if workers > 1:
        raise OptionError(
            "workers",
            found=f"{workers} workers",
            expected="one, where all parameters are trained",
            remedy="leave it out",
        )
    if commit_every is None:
        return
    if run is None:
        raise OptionError(
            "run", found="None", expected="a directory for the segments of commit_every", remedy="pass run=..."
        )
    if not isinstance(commit_every, int) or commit_every < 1:
        raise OptionError(
            "commit_every", found=repr(commit_every), expected="a number of steps of at least 1", remedy="pass such a number"
        )
    blocks = sum(not layout.resident for layout in model.layouts)
    if blocks < 2:
        raise OptionError("model", found=f"{blocks} block", expected="at least 2", remedy="leave commit_every out")
    if isinstance(update, Delayed):
        raise OptionError(
            "update",
            found="Delayed, whose thread changes states while they are written",
            expected="an optimizer that has ended with a segment when it is written",
            remedy="pass the optimizer that it delays, or leave commit_every out",
        )


def trained_bytes(update: BlockUpdate, layouts: Sequence[BlockLayout]) -> tuple[int, int]:
    """Memory for gradients and for the optimizer's states: of the segment that takes most, if states last for a turn."""
    if update.turn is None:
        return gradient_bytes(update, layouts), state_bytes(update, layouts)
    return max(((gradient_bytes(update, [layout]), state_bytes(update, [layout])) for layout in layouts), key=sum)


def gradient_bytes(update: BlockUpdate, layouts: Sequence[BlockLayout]) -> int:
    """Memory for the gradients of the largest segment, and for what the optimizer makes of them.

    While gradients are summed, there are two of each. While they are converted and clipped, there are two of one parameter
    at a time. Then the optimizer has its copies of one parameter beside the gradients of the whole segment.
    """
    most = 0
    for layout in layouts:
        trained = [spec for spec in layout.parameters if not spec.frozen]
        in_float32 = [4 * spec.numel for spec in trained]
        given = sum(spec.nbytes for spec in trained)
        held = max(given, sum(in_float32)) if update.widens_gradients else given
        largest = max((spec.nbytes for spec in trained), default=0)
        most = max(most, 2 * given, held + max(largest, update.copies * max(in_float32, default=0)))
    return most


def gradient_visits(runner: Runner, leaves: Sequence[Mapping[str, torch.Tensor]], spill: Path) -> GradientVisits:
    """What makes the visitors of first-order steps."""
    device, timeline, trained = runner.device, runner.recorder.timeline, runner.trained
    assert trained is not None, "it was built for first-order steps"
    file = ActivationFile(spill, timeline)
    inputs = KeptActivations(file if device.in_place else ActivationOffload(device, timeline, file, runner.waiting_bytes))
    runner.opened.callback(inputs.close)
    return GradientVisits(
        layouts=runner.model.layouts,
        present=PresentWeights(trained, runner.work_buffer),
        leaves=leaves,
        weights=runner.work_buffer.bound,
        inputs=inputs,
        limit=MemoryLimit(runner.host_limit),
        streams=device.streams,
        timeline=timeline,
    )


def step_result(runner: Runner, commit: Commit, started: float) -> StepResult:
    """The result of a step that began at a time of ``time.perf_counter``, and has ended."""
    sweep = Sweep.of_step(commit.step, started, time.perf_counter())
    lanes, seconds = runner.recorder.ended(sweep), sweep.done - started
    return StepResult(
        commit.step, commit.loss, (commit.loss,), (), (), commit.lr, seconds, lanes=lanes, grad_norm=commit.grad_norm
    )


class AdapterSteps:
    """Takes first-order steps of parameters in memory: gradients are computed and clipped, then the optimizer steps."""

    def __init__(self, runner: Runner, method: FirstOrder, state: AdapterState, visits: GradientVisits) -> None:
        self._runner, self._method, self._state, self._visits = runner, method, state, visits
        self._rows = RowShards(runner.workers, state.trained)
        self._memory = GradientMemory(budget=runner.activation_bytes, spare=runner.spare_bytes)

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
        return step_result(self._runner, commit, started)

    def gradients(self, batch: Batch | Sequence[Batch], forward: Forward | None) -> float:
        """Add the gradients of a batch to those of the parameters. See ``Engine.gradients``."""
        runner = self._runner
        is_model_loss = forward is None and not isinstance(runner.model, Objective)
        forward = runner.model if forward is None else forward
        rows = self._rows.of_step(batches_of(batch), runner.micro_batch_size, None if is_model_loss else forward)
        prepared = list(runner.prepared(rows.batches, forward))
        outputs: list[torch.Tensor] = []
        for start, stop, kept_bytes in self._memory.groups(forward, prepared, together=rows.weights is None):
            visitor = self._visits.visitor(
                forward,
                prepared[start:stop],
                weights=None if rows.weights is None else rows.weights[start:stop],
                joint_loss=rows.joint_loss,
                kept_bytes=kept_bytes,
            )
            outputs += runner.run(visitor, visitor.order)[0]
        return rows.finish(outputs)

    def _clipped(self, loss: float) -> float:
        """Clip the gradients, and return their norm before clipping."""
        parameters = [parameter for parameter in self._state.trained.parameters.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            raise NonFiniteLossError(
                f"step {self._state.version}",
                found=f"loss {loss}, norm of the gradients {norm.item()}",
                expected="a finite loss and a finite norm",
                remedy="lower the learning rate, or use bfloat16 or float32 where float16 overflows; no step was taken",
            )
        if self._method.clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._method.clip, norm)
        return norm.item()
