"""The first-order method: its options, the memory that it needs, what it refuses, and its steps.

A sweep forward and backward computes gradients, and an optimizer changes the parameters.

An adapter's parameters are in memory. All parameters of a model change where they are stored: in
memory, or on disk.

Each of several workers computes the gradients of its rows. All workers add up these gradients in
the order of ranks, as one process does that runs the shards as micro-batches. So all have the same
bits, and the same optimizer gives them the same parameters.
"""

from __future__ import annotations

import math
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zo2core.errors import BatchError, NonFiniteLossError, OptionError, without_effect
from zo2core.journal.records import json_object
from zo2core.journal.snapshots import Snapshots
from zo2core.optimizers.delayed import Delayed
from zo2core.optimizers.states import (
    StateMemory,
    StatesInStores,
    copied_state,
    require_optimizer_state,
    state_bytes,
    unusable_state,
)
from zo2core.optimizers.torch_optimizer import OptimizerFactory, make_optimizer
from zo2core.planning.speeds import kept_blocks
from zo2core.protocols import (
    BlockModel,
    BlockUpdate,
    DifferentiableModel,
    Forward,
    Objective,
    Store,
    UpdateInputs,
)
from zo2core.ranges import require_number, require_whole
from zo2core.runner import Runner, RunOptions, StepBatch, Steps, Trained, TrainedSteps
from zo2core.sources import SegmentStore
from zo2core.sweep import microbatch
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
from zo2core.types import HALVES, LARGEST, Batch, BlockLayout, Commit, StepResult, widened
from zo2core.workers.workers import Split, Workers, require_equal

# parameters, gradients, and two moments, as AdamW has them: no common optimizer keeps more
TRAINED_COPIES = 4


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the scale of the loss changes, so that small gradients do not vanish in float16.

    See ``torch.amp.GradScaler``, whose defaults these are.

    Args:
        initial: The scale at first.
        growth: Factor of the scale after ``interval`` steps in a row without overflow.
        backoff: Factor of the scale after a step whose gradients overflow, and which is skipped.
        interval: Number of these steps.

    Raises:
        OptionError: if a number is out of its range.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        require_number("loss_scaling.initial", self.initial, least=1)
        require_number("loss_scaling.growth", self.growth, above=1)
        require_number("loss_scaling.backoff", self.backoff, above=0, below=1)
        require_whole("loss_scaling.interval", self.interval, 1)


class LossScale:
    """The present scale of the loss, as in ``torch.amp.GradScaler``."""

    def __init__(self, scaling: LossScaling | None) -> None:
        self._scaling = scaling
        self.scale = 1.0 if scaling is None else scaling.initial
        self._good_steps = 0  # in a row, without overflow

    @property
    def may_skip(self) -> bool:
        """Whether a step whose gradients overflow is skipped, and the next one scaled by less.

        A loss that is not scaled up has gradients that are too large by themselves.
        """
        return self._scaling is not None and self.scale > 1.0

    def unscaled(self, gradient: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Divide a float32 gradient of the scaled loss by the scale; into ``out``, if it is
        given.
        """
        if self._scaling is None:
            return gradient
        return torch.mul(gradient, torch.tensor(1.0 / self.scale, dtype=torch.float32), out=out)

    def update(self, *, overflowed: bool) -> None:
        """Choose the scale of the next step."""
        if self._scaling is None:
            return
        if overflowed:
            self.scale, self._good_steps = max(self.scale * self._scaling.backoff, 1.0), 0
            return
        self._good_steps += 1
        if self._good_steps == self._scaling.interval:
            grown, self._good_steps = self.scale * self._scaling.growth, 0
            self.scale = grown if grown <= LARGEST else self.scale

    def values(self) -> dict[str, Any]:
        """What later steps depend on, as JSON."""
        return (
            {}
            if self._scaling is None
            else {"loss_scale": self.scale, "good_steps": self._good_steps}
        )

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Continue with what ``values`` returned."""
        values = values if isinstance(values, Mapping) else {"loss_scale": values}
        scale, steps = values.get("loss_scale", 1.0), values.get("good_steps", 0)
        if (
            not isinstance(scale, float)
            or not 1.0 <= scale <= LARGEST
            or type(steps) is not int
            or steps < 0
        ):
            raise unusable_state(f"{values!r:.80} as the scale of the loss")
        if self._scaling is not None and "loss_scale" in values:
            self.scale, self._good_steps = scale, steps


@dataclass(frozen=True)
class FirstOrder:
    """The first-order method.

    With a function that makes a ``torch.optim`` optimizer, an adapter is trained, which stays in
    memory over a base that is only read. With a ``BlockUpdate`` all parameters are: each segment is
    updated in the backward pass, where it is stored. Losses, gradients and parameters are those of
    ``torch.autograd`` and the same optimizer on the whole model, bit for bit.

    Args:
        optimizer: ``partial(torch.optim.AdamW, lr=2e-4)``, called with the trained parameters in
            registration order; or a ``BlockUpdate``: ``LOMO()``, ``TorchOptimizer(...)``,
            ``BAdam(...)``. None: for a custom training loop, which calls ``gradients`` and changes
            ``parameters`` itself.
        lr: Learning rate, or a function of the 0-based step. None: that of a ``torch.optim``
            optimizer.
        clip: Largest 2-norm of all gradients together; None does not clip. With a ``BlockUpdate``
            each step sweeps twice then, first to measure the norm (LOMO, arXiv 2306.09782, section
            3.3.1), unless a single segment is trained.
        clip_value: Largest absolute value of a gradient's elements, before the norm is clipped;
            None does not clip them. For a ``BlockUpdate``.
        scaling: How the loss is scaled, for forwards in float16; None does not scale it. A step
            whose gradients overflow is skipped. To find this before the first update, each step
            sweeps twice. For a ``BlockUpdate``.
        options: The ``torch.optim`` optimizer and its options, as JSON values for the journal of a
            run that is kept. None: its class and the options that its state has.

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
            if limit is not None:
                require_number(option, limit, above=0, remedy="leave it out, to clip nothing")
        if self.update is not None and self.lr is None:
            expected = "a learning rate of the BlockUpdate"
            raise OptionError("lr", "None", expected, "pass FirstOrder(lr=...)")
        if self.update is None and (self.clip_value is not None or self.scaling is not None):
            option = "clip_value" if self.scaling is None else "scaling"
            raise without_effect(
                option, "an optimizer of an adapter", "a BlockUpdate, which trains all parameters"
            )

    @property
    def update(self) -> BlockUpdate | None:
        """The optimizer, if it changes all parameters, one segment at a time."""
        return self.optimizer if isinstance(self.optimizer, BlockUpdate) else None

    @property
    def journal_options(self) -> Mapping[str, Any]:
        """The method as JSON values, for the journal."""
        if self.update is None:
            fixed = {} if self.lr is None or callable(self.lr) else {"lr": self.lr}
            return (
                {**_described(self.optimizer), "clip_norm": self.clip, **fixed}
                if self.options is None
                else self.options
            )
        scaling = {} if self.scaling is None else {"loss_scaling": asdict(self.scaling)}
        return {
            **self.update.options,
            "clip_value": self.clip_value,
            "clip_norm": self.clip,
            **scaling,
        }

    def rate(self, step: int) -> float:
        """Learning rate of a step."""
        assert self.lr is not None, "it is required of a BlockUpdate"
        return self.lr(step) if callable(self.lr) else self.lr

    def measures_first(self, segments: int) -> bool:
        """Whether a step that trains so many segments has to measure all gradients before the first
        update.
        """
        return self.scaling is not None or (self.clip is not None and segments > 1)


@dataclass(frozen=True)
class AtSnapshot:
    """The method of an engine that evaluates and exports the parameters of a snapshot, and takes no
    steps.

    Args:
        step: Number of steps taken when the snapshot was taken.
        parameters: Values of the trained parameters, by name; None: the initial values of the run.
    """

    step: int
    parameters: Mapping[str, torch.Tensor] | None


def _described(factory: Any) -> dict[str, Any]:
    """Name and options of an optimizer that a function makes."""
    plain, keywords = (
        (bool, int, float, str, list, tuple, type(None)),
        getattr(factory, "keywords", {}),
    )
    made = getattr(factory, "func", factory)
    options = {
        name: value if isinstance(value, plain) else repr(value) for name, value in keywords.items()
    }
    return {"name": getattr(made, "__name__", type(made).__name__), **options}


def require_trainable(
    model: BlockModel, method: FirstOrder, update: BlockUpdate, options: RunOptions
) -> None:
    """Refuse what first-order steps of all parameters cannot do right."""
    halves = [
        spec.name
        for layout in model.layouts
        for spec in layout.parameters
        if spec.dtype is torch.float16
    ]
    if method.scaling is not None and halves and not update.widens_gradients:
        raise OptionError(
            "scaling",
            found=f"float16 gradients of {halves[0]}, which the optimizer takes as they are",
            expected="float32 gradients, into which those of the scaled loss are converted",
            remedy="open the model with precision='mixed', or use LOMO or AdaLOMO",
        )
    if options.commit_every is None:
        return
    if options.run is None:
        expected = "a directory for the segments of commit_every"
        raise OptionError("run", "None", expected, "pass run=...")
    require_whole("commit_every", options.commit_every, 1)
    blocks = sum(not layout.resident for layout in model.layouts)
    if blocks < 2:
        raise OptionError("model", f"{blocks} block", "at least 2", "leave commit_every out")
    if isinstance(update, Delayed):
        raise OptionError(
            "update",
            found="Delayed, whose thread changes states while they are written",
            expected="an optimizer that has ended with a segment when it is written",
            remedy="pass the optimizer that it delays, or leave commit_every out",
        )


def trained_bytes(update: BlockUpdate, layouts: Sequence[BlockLayout]) -> tuple[int, int]:
    """Memory for gradients and for the optimizer's states: of the segment that takes most, if
    states last for a turn.
    """
    apart: Sequence[Sequence[BlockLayout]] = (
        [layouts] if update.turn is None else [[layout] for layout in layouts]
    )
    return max(
        ((segment_gradient_bytes(update, one), state_bytes(update, one)) for one in apart),
        key=sum,
    )


def segment_gradient_bytes(update: BlockUpdate, layouts: Sequence[BlockLayout]) -> int:
    """Memory for the gradients of the largest segment, and for what the optimizer makes of them.

    While gradients are summed, there are two of each. While they are converted and clipped, there
    are two of one parameter at a time. Then the optimizer has its copies of one parameter beside
    the gradients of the whole segment.
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


class StepRows:
    """The micro-batches of a step, of which this process runs its part, and adds up gradients with
    the other workers.
    """

    outputs: Sequence[torch.Tensor]  # of the head, in the present sweep, once it has run

    def __init__(
        self, runner: Runner, trained: Trained, batch: StepBatch, forward: Forward | None
    ) -> None:
        wholes, workers = microbatch.batches_of(batch), runner.workers
        self.forward, objective = microbatch.with_objective(forward, runner.model)
        self._trained, self._workers, self._digest = trained, workers, workers.digest(wholes)
        self._whole, own = _divided(wholes, runner.options.micro_batch_size, objective, workers)
        weights = self._whole.weights
        self.weights = None if weights is None else weights[own]
        if workers.rank > 0:  # earlier gradients are the same on all workers, and rank 0 adds them
            trained.clear_gradients()
        self.batches = list(runner.prepared(self._whole.batches[own], self.forward))

    def loss(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of all workers' outputs, of which this worker's have a gradient."""
        if self._workers.size == 1:
            return self._whole.loss(outputs)
        # all bits, as JSON
        listed = [[str(output.dtype).removeprefix("torch."), output.tolist()] for output in outputs]
        digests, gathered = zip(*self._workers.all_gather([self._digest, listed]), strict=True)
        require_equal(digests, "batches")
        of_workers = [
            [torch.tensor(value, dtype=getattr(torch, dtype)) for dtype, value in listed]
            for listed in gathered
        ]
        of_workers[self._workers.rank] = [output.cpu() for output in outputs]
        return self._whole.loss(list(chain.from_iterable(of_workers)))

    def finish(self, outputs: Sequence[torch.Tensor]) -> float:
        """Add up the gradients of all workers, and return the loss."""
        loss = float(self.loss(outputs))
        if self._workers.size > 1:
            assert isinstance(self._trained, TrainedParameters), (
                "workers were refused where all parameters are trained"
            )
            add_up(list(self._trained.parameters.values()), self._workers)
        return loss


def _divided(
    wholes: Sequence[Batch], rows: int | None, forward: Forward | None, workers: Workers
) -> tuple[microbatch.MicroBatches, slice]:
    """Divide the batches of a step into micro-batches, and choose those that this process runs."""
    if workers.size == 1:
        return microbatch.split_batches(wholes, rows, forward), slice(None)
    parts = [_parts_of_workers(whole, forward, workers.size) for whole in wholes]
    shards = [
        [batch for of_whole in parts for batch in of_whole[rank]] for rank in range(workers.size)
    ]
    cuts = [list(microbatch.split_batches(shard, rows, forward).batches) for shard in shards]
    if forward is None:
        # parts without a labelled token have no loss; where none has any, one is left and refused
        cuts = [
            [batch for batch in batches if microbatch.labelled_tokens(batch)] for batches in cuts
        ]
        cuts[0] = cuts[0] if any(cuts) else shards[0][:1]
    batches = list(chain.from_iterable(cuts))
    tokens = [microbatch.labelled_tokens(batch) for batch in batches] if forward is None else []
    start = sum(map(len, cuts[: workers.rank]))
    micro_batches = microbatch.MicroBatches(
        forward if isinstance(forward, Objective) else None, batches, tokens
    )
    return micro_batches, slice(start, start + len(cuts[workers.rank]))


def _parts_of_workers(whole: Batch, forward: Forward | None, size: int) -> list[list[Batch]]:
    """Each worker's part of a batch, in the order of ranks."""
    if forward is None:
        if (count := microbatch.rows_to_shard([whole])) is None:
            found, expected = (
                "no labels of shape (rows, tokens)",
                "a batch with labels, whose rows are split among workers",
            )
            raise BatchError("batch", found, expected, "add labels")
        return [
            [microbatch.shard_of_rows(whole, rows.start, rows.stop)]
            for rows in _slices(count, size)
        ]
    if not isinstance(forward, Objective):
        raise OptionError(
            "forward",
            found=f"one that does not say how parts of a batch join, and {size} workers",
            expected="the model's own loss, or an Objective, which has split and loss",
            remedy="start one process, or add these two",
        )
    # An objective's own micro-batches, the largest of which there is one for each worker at least.
    count = max((len(value) for value in whole.values() if value.dim()), default=0)
    larger = (forward.split(whole, rows) for rows in range(-(-count // size), 1, -1))
    parts = next((parts for parts in larger if len(parts) >= size), None) or forward.split(whole, 1)
    return [list(parts[indices]) for indices in _slices(len(parts), size)]


def _slices(count: int, size: int) -> list[slice]:
    """Each worker's part of so many rows."""
    if count >= size:
        return [Split(1, size).rows(rank, count) for rank in range(size)]
    found = f"{count} rows that can be separated, and {size} workers"
    expected = "a row for each worker; a packed batch is one row"
    raise BatchError("batch", found, expected, "start fewer workers, or pass more rows")


def add_up(parameters: Sequence[nn.Parameter], workers: Workers) -> None:
    """Set each parameter's gradient to the sum of all workers', in the order of ranks.

    All gradients are exchanged as one tensor of bytes, which ends with a byte for each that says
    whether it is there.
    """
    # so that offsets are aligned
    ordered = sorted(parameters, key=lambda parameter: -parameter.element_size())
    # A gradient that is missing is -0.0, which changes no bit of a sum.
    own = [
        torch.full_like(parameter, -0.0) if parameter.grad is None else parameter.grad
        for parameter in ordered
    ]
    present = torch.tensor(
        [parameter.grad is not None for parameter in ordered],
        dtype=torch.uint8,
        device=own[0].device,
    )
    message = torch.cat(
        [*(gradient.detach().reshape(-1).view(torch.uint8) for gradient in own), present]
    )
    sizes = [*(gradient.nbytes for gradient in own), len(own)]
    *of_parameters, presents = zip(
        *(torch.split(received, sizes) for received in workers.all_gather_tensors(message)),
        strict=True,
    )
    any_present = torch.stack(presents).any(dim=0).tolist()
    for parameter, parts, has_gradient in zip(ordered, of_parameters, any_present, strict=True):
        total, *others = [part.view(parameter.dtype) for part in parts]
        for other in others:
            total += other
        parameter.grad = total.view(parameter.shape).clone() if has_gradient else None


def _not_finite(step: int, found: str, expected: str, state: str) -> NonFiniteLossError:
    remedy = f"lower the learning rate, or use bfloat16 or float32 where float16 overflows; {state}"
    return NonFiniteLossError(f"step {step}", found, expected, remedy)


class GradientSteps(TrainedSteps, ABC):
    """First-order steps, by sweeps forward and backward."""

    def __init__(self, runner: Runner, method: FirstOrder) -> None:
        super().__init__(runner)
        workers, device, timeline = runner.workers, runner.device, runner.recorder.timeline
        if workers.size > 1 and workers.split not in ("auto", "rows", f"1x{workers.size}"):
            found = f"{workers.split}, {workers.size} workers for one gradient"
            raise without_effect(
                "split", found, "rows, since a first-order step has no directions to split"
            )
        model, options = runner.model, runner.options
        spill = next(
            (path for path in (options.spill, options.run) if path is not None),
            tempfile.gettempdir(),
        )
        file = ActivationFile(Path(spill), timeline)
        inputs = KeptActivations(
            file
            if device.in_place
            else ActivationOffload(device, timeline, file, runner.waiting_bytes)
        )
        runner.opened.callback(inputs.close)
        assert isinstance(model, DifferentiableModel), "it was required"
        self._method, self._leaves = (
            method,
            [model.leaves(index) for index in range(len(model.layouts))],
        )
        self._visits = GradientVisits(
            layouts=model.layouts,
            trained=self.trained,
            leaves=self._leaves,
            inputs=inputs,
            limit=runner.host_limit,
            streams=device.streams,
            timeline=timeline,
        )

    def step(self, batch: StepBatch, forward: Forward | None, *, seed: int | None) -> StepResult:
        """Take a step on a batch. See ``Engine.step``."""
        if seed is not None:
            expected = "a zeroth-order step, which has directions"
            raise without_effect("step", "a seed of a first-order step", expected)
        started, commit = time.perf_counter(), self._taken(batch, forward)
        self.version += 1
        return self._runner.step_result(commit, started)

    @abstractmethod
    def _taken(self, batch: StepBatch, forward: Forward | None) -> Commit:
        """Change the parameters, and record the step."""

    def _differentiate(self, names: Collection[str]) -> None:
        """Have autograd compute the gradients of these parameters, wherever they are used, and of
        no others.
        """
        trained = []
        for leaves in self._leaves:
            for name, leaf in leaves.items():
                leaf.requires_grad_(name in names)
            trained.append({name: leaf for name, leaf in leaves.items() if name in names})
        self._visits = replace(self._visits, leaves=trained)

    def _swept(self, rows: StepRows, *, together: bool, loss_scale: float = 1.0) -> float:
        """Compute gradients and the loss: as many micro-batches are in a sweep as have room at a
        block, or all of them.
        """
        runner, outputs, start = self._runner, list[torch.Tensor](), 0
        allowed = runner.activation_bytes + runner.spare_bytes()

        def left(held: int, running: int) -> int:
            return allowed - gradient_bytes(held, running, 0)

        groups = microbatch.grouped(
            rows.batches, rows.forward, lambda held, running: together or left(held, running) >= 0
        )
        for group, held, running in list(groups) or [([], 0, 0)]:
            visitor = GradientVisitor(
                self._visits,
                rows.forward,
                group,
                weights=None if rows.weights is None else rows.weights[start : start + len(group)],
                joint_loss=rows.loss,
                kept_bytes=max(left(held, running), 0),
                loss_scale=loss_scale,
            )
            rows.outputs = visitor.outputs[0]
            outputs += runner.run(visitor, visitor.order)[0]
            start += len(group)
        return rows.finish(outputs)


class AdapterSteps(GradientSteps):
    """Steps of parameters in memory, such as an adapter's: gradients are computed and clipped, then
    the optimizer steps.
    """

    trained: TrainedParameters

    def __init__(self, runner: Runner, method: FirstOrder) -> None:
        super().__init__(runner, method)
        assert not isinstance(method.optimizer, BlockUpdate), "it trains what is in memory"
        self._factory, parameters = method.optimizer, list(self.trained.parameters.values())
        self.optimizer: Any = (
            None if self._factory is None else make_optimizer(self._factory, parameters)
        )
        self._differentiate(self.trained.parameters)

    def gradients(self, batch: StepBatch, forward: Forward | None) -> float:
        """Add the gradients of a batch to those of the parameters. See ``Engine.gradients``."""
        try:
            rows = StepRows(self._runner, self.trained, batch, forward)
            return self._swept(rows, together=rows.weights is None)
        except BaseException:
            self.trained.clear_gradients()
            raise

    def snapshot(self) -> dict[str, Any]:
        """All on which later steps depend, as copies."""
        return {
            "steps": self.version,
            "parameters": {
                name: value.detach().cpu().clone()
                for name, value in self.trained.parameters.items()
            },
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a snapshot."""
        _require_state(state)
        if self._factory is not None:
            require_optimizer_state(
                state["optimizer"], self._factory, list(self.trained.parameters.values())
            )
        self.load(state["parameters"])
        if self._factory is not None:
            self.optimizer.load_state_dict(copied_state(state["optimizer"]))
        self.version = state["steps"]

    def _taken(self, batch: StepBatch, forward: Forward | None) -> Commit:
        optimizer = self.optimizer
        if optimizer is None:
            raise OptionError(
                "optimizer",
                found="None, and a call of step",
                expected="an optimizer",
                remedy=(
                    "pass an optimizer to the engine, or call gradients and then the step of your "
                    "optimizer"
                ),
            )
        if self._method.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = self._method.rate(self.version)
        try:
            loss = self.gradients(batch, forward)
            norm = self._clipped(loss)
            commit = Commit(
                self.version, loss, norm, float(optimizer.param_groups[0].get("lr", 0.0))
            )
            self.record(commit)
            optimizer.step()
        finally:
            self.trained.clear_gradients()
        return commit

    def _clipped(self, loss: float) -> float:
        """Clip the gradients, and return their norm before clipping."""
        parameters = [
            parameter
            for parameter in self.trained.parameters.values()
            if parameter.grad is not None
        ]
        norm = nn.utils.get_total_norm(
            [parameter.grad for parameter in parameters if parameter.grad is not None]
        )
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            found = f"loss {loss}, norm of the gradients {norm.item()}"
            raise _not_finite(
                self.version, found, "a finite loss and a finite norm", "no step was taken"
            )
        if self._method.clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self._method.clip, norm)
        return norm.item()


class _FusedStep:
    """What a step does with the gradients of each segment: they are measured, clipped, and change
    the weights.
    """

    def __init__(self, method: FirstOrder, steps: FusedSteps, rows: StepRows) -> None:
        self._method, self._steps, self._rows = method, steps, rows
        self._norms: dict[str, torch.Tensor] = {}  # by name, 0-d
        # of the sweep that measures the norms, once the head has run
        self._loss: float | None = None
        self.overflowed = False  # whether a gradient of the scaled loss is not finite
        # norm of all gradients, if a sweep before has measured it
        self.total: torch.Tensor | None = None
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
            scale = torch.clamp(
                norm / ((self.norm() if self.total is None else self.total) + 1e-6), max=1.0
            )
        for name, gradient in gradients.items():
            out = gradient if name in converted else None  # others may share memory
            if value is not None:
                gradients[name] = torch.clamp(gradients[name], -value, value, out=out)
            if scale is not None:
                gradients[name] = torch.mul(gradients[name], scale, out=out)

    def update(
        self,
        segment: int,
        weights: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        store: Store,
    ) -> None:
        """Change a segment's weights."""
        self.changed += 1
        steps = self._steps
        states = steps.states.of(segment, store)
        steps.update.apply(
            UpdateInputs(segment, weights, gradients, states, steps.version, self.lr)
        )

    def norm(self) -> torch.Tensor:
        """The norm of all gradients together, 0-d; 0 if one overflowed.

        The order of the names decides its last bit.
        """
        norms = (
            []
            if self.overflowed
            else [self._norms[name] for name in self._steps.trained.forms if name in self._norms]
        )
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def _convert(self, gradients: dict[str, torch.Tensor]) -> set[str]:
        """Convert 16-bit gradients to float32, if the optimizer wants them so, and divide them by
        the scale of the loss.
        """
        widens, scale = self._steps.update.widens_gradients, self._steps.scale
        converted = {
            name for name, gradient in gradients.items() if widens and gradient.dtype in HALVES
        }
        for name, gradient in gradients.items():
            if name in converted:
                gradients[name] = widened(gradient)
            gradients[name] = scale.unscaled(
                gradients[name], gradients[name] if name in converted else None
            )
        return converted

    def _add_norms(self, gradients: Mapping[str, torch.Tensor]) -> None:
        norms = {name: torch.linalg.vector_norm(gradient) for name, gradient in gradients.items()}
        if self._loss is None:
            self._loss = float(self._rows.loss(self._rows.outputs))
        loss = self._loss
        wrong = [name for name, norm in norms.items() if not math.isfinite(norm.item())]
        if wrong and math.isfinite(loss) and self._steps.scale.may_skip:
            self.overflowed = True
        elif wrong or not math.isfinite(loss):
            changed = f"{self.changed} segments had been changed: resume from the last snapshot"
            raise _not_finite(
                self._steps.version,
                f"loss {loss}"
                + (f", and a gradient of {wrong[0]} that is not finite" if wrong else ""),
                "a finite loss and finite gradients",
                changed if self.changed else "no step was taken",
            )
        self._norms.update(norms)


class FusedSteps(GradientSteps):
    """Steps of all parameters, in host memory: each segment is updated as soon as its gradients are
    there.

    One segment's gradients are in memory at a time. A norm of all gradients is then known only when
    all updates are made. So clipping by norm takes a backward pass before, which only measures
    (LOMO, arXiv 2306.09782, section 3.3.1), unless a single segment is trained.
    """

    trained: StoredParameters
    _segments: Collection[int] = ()  # whose leaves require gradients

    def __init__(self, runner: Runner, method: FirstOrder) -> None:
        assert method.update is not None, "it trains what is stored"
        super().__init__(runner, method)
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
                found=f"a run of {self.version} steps, whose optimizer's state belongs to its "
                "weights",
                expected="a run without steps",
                remedy="use load_state_dict, or a new engine",
            )
        super().load(parameters)

    def snapshot(self) -> dict[str, Any]:
        """All on which later steps depend, which is not copied: the next step changes it."""
        assert isinstance(self.states, StateMemory), "other states are committed on disk"
        self.update.settle()
        weights = self._runner.parameters_at(0, range(len(self._runner.layouts)))
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

    def _taken(self, batch: StepBatch, forward: Forward | None) -> Commit:
        rows = StepRows(self._runner, self.trained, batch, forward)
        segments = self.update.segments(self.version, self.trained.segments)
        if segments != self._segments:
            self._segments = segments
            self._differentiate(
                {name for segment in segments for name in self.trained.names_of(segment)}
            )
        step = _FusedStep(self._method, self, rows)
        self.states.begin(self.version)
        if self._method.measures_first(len(segments)):
            loss = self._sweep(rows, step.measure, None)
            step.total = step.norm()
        try:
            if not step.overflowed:
                step.lr = self._method.rate(self.version)
                loss = self._sweep(rows, step.clip, step.update)
            commit = Commit(self.version, loss, step.norm().item(), step.lr)
            self.record(commit)  # of a step that is skipped, norm and learning rate are 0
        except BaseException:
            if step.changed:
                self._runner.use.close()  # segments are of two steps
            raise
        self.scale.update(overflowed=step.overflowed)
        return commit

    def _sweep(self, rows: StepRows, complete: Complete, update: Update | None) -> float:
        """Sweep forward and backward; returns the loss."""
        self.trained.expect(self._segments, complete, update, self._next_version)
        try:
            return self._swept(rows, together=True, loss_scale=self.scale.scale)
        finally:
            self.trained.clear_gradients()


class CommittedSteps(FusedSteps):
    """Steps of all parameters on disk, where those of a step, with its states, are a generation
    that is committed together.

    An optimizer that forgets its states after a turn, as ``BAdam`` does, keeps them in memory. The
    segment of the turn stays there, too, and is written once, when the turn ends; that is the
    commit.
    """

    refusal = (
        "an engine whose weights and states are committed on disk",
        "an engine that keeps them in memory",
        "call commit(), from which the run resumes; for other weights, begin a run of a "
        "checkpoint with them",
    )
    load, snapshot, restore = Steps.load, Steps.snapshot, Steps.restore

    def __init__(self, runner: Runner, method: FirstOrder) -> None:
        super().__init__(runner, method)
        every = runner.options.commit_every if self.update.turn is None else self.update.turn
        assert isinstance(runner.source, SegmentStore), "it was planned"
        assert runner.generations is not None, "it was planned"
        assert every is not None, "it was required"
        self._source, self._generations = runner.source, runner.generations
        if any(layout.states for layout in runner.layouts):
            self.states = StatesInStores(runner.layouts, runner.source.read_states)
        self._every = every
        self.version = self._generations.step
        self.scale.load_values(self._generations.values)
        versions = {
            segment: self._generations.version(segment) for segment in range(len(runner.layouts))
        }
        self.trained.versions = versions
        self._source.pin(self._kept())

    def resume(self, directory: Path) -> None:
        """Do nothing: the segments on disk are those of the last commit."""

    @property
    def committed(self) -> int:
        """The step of the last commit, from which a run resumes."""
        return self._generations.step

    @property
    def _next_version(self) -> int:
        """Where segments are written, their version is the number of steps, and not that of their
        updates.
        """
        return self.version + 1

    def step(self, batch: StepBatch, forward: Forward | None, *, seed: int | None) -> StepResult:
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
        """Commit the present step durably.

        An optimizer with turns is committed at their ends only.
        """
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
    missing = {"steps", "parameters", "optimizer"} - (
        state.keys() if isinstance(state, Mapping) else set()
    )
    if missing:
        raise unusable_state(f"a state without {', '.join(sorted(missing))}")
    if type(state["steps"]) is not int or state["steps"] < 0:
        raise unusable_state(f"{state['steps']!r:.40} as the number of steps")


def steps_of(runner: Runner, method: FirstOrder) -> GradientSteps:
    """Choose the kind of steps by where trained parameters are, and go on from what a run has
    kept.
    """
    fused = FusedSteps if runner.options.commit_every is None else CommittedSteps
    steps = (AdapterSteps if isinstance(runner.trained, TrainedParameters) else fused)(
        runner, method
    )
    if runner.options.run is not None:
        steps.resume(Path(runner.options.run))
    return steps
