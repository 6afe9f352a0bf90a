"""Optimizers that change one segment at a time, as soon as the gradients of that segment are
computed, and their states.

``OPTIMIZERS`` has the names by which users choose them, with what depends on the name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zo2core.errors import CheckpointError, OptionError
from zo2core.protocols import BlockUpdate, Store, UpdateInputs
from zo2core.ranges import OptimizerName, require_number, require_whole
from zo2core.types import HALVES, MAX_SEED, BlockLayout, StateSpec, widened


@dataclass(frozen=True, kw_only=True)
class LOMO(BlockUpdate):
    """Gradient descent in float32 arithmetic: ``theta <- (1 - lr * weight_decay) * theta - lr *
    g``.

    This is LOMO (arXiv 2306.09782, Algorithm 1): descent without a state, fused into the backward
    pass. 16-bit weights are converted to float32 and rounded once, as in the authors' program.

    Args:
        weight_decay: Decoupled weight decay, for all parameters.

    Raises:
        OptionError: if ``weight_decay`` is out of its range.
    """

    name: ClassVar[str] = "lomo"  # in a run's record
    copies = 1  # a 16-bit weight

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require_number("weight_decay", self.weight_decay, least=0)

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options. See the contract."""
        return {"name": self.name, **asdict(self)}

    def apply(self, inputs: UpdateInputs) -> None:
        """Change a segment's weights in place. See the contract."""
        for name in inputs.gradients:
            weight = inputs.weights[name]
            theta = widened(weight)  # the weight itself, unless it has 16 bits
            update, rate = self._descent(name, theta, inputs)
            if self.weight_decay:
                theta.mul_(1.0 - rate * self.weight_decay)
            theta.add_(update, alpha=-rate)
            if theta is not weight:
                weight.copy_(theta)

    def _descent(
        self, name: str, theta: torch.Tensor, inputs: UpdateInputs
    ) -> tuple[torch.Tensor, Any]:
        """What is subtracted from a parameter, and with which rate."""
        return inputs.gradients[name], inputs.lr


@dataclass(frozen=True, kw_only=True)
class AdaLOMO(LOMO):
    """Gradient descent whose steps are normalised by the second moment of the gradients, kept for
    rows and columns only.

    For a matrix, ``r`` and ``c`` are running means of ``g * g + eps[0]`` over rows and columns,
    with the decay ``1 - t ** decay_rate`` at the 1-based step t. The update ``u = g / sqrt(r c /
    mean(r))`` is divided by ``max(1, rms(u) / clip_threshold)``, and ``theta <- (1 - a *
    weight_decay) * theta - a * u`` with ``a = lr * max(eps[1], rms(theta))``. Vectors keep the
    second moment of each element. All arithmetic is float32. This is AdaLomo (arXiv 2310.10195,
    Algorithm 1).

    Args:
        weight_decay: Decoupled weight decay, for all parameters.
        eps: Term added to squared gradients; and the least root mean square by which a parameter's
            rate is scaled.
        clip_threshold: Largest root mean square of an update.
        decay_rate: Exponent of the running means' decay.

    Raises:
        OptionError: if ``weight_decay``, ``eps`` or ``clip_threshold`` is out of its range.
    """

    name = "adalomo"
    # a 16-bit weight, the squared gradient with and without its term, and then the update
    copies = 3

    eps: tuple[float, float] = (1e-30, 1e-3)
    clip_threshold: float = 1.0
    decay_rate: float = -0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        for value in self.eps:
            require_number("eps", value, least=0)
        require_number("clip_threshold", self.clip_threshold, above=0)

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options. See the contract."""
        return {**super().options, "eps": list(self.eps)}

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """One row and one column of each matrix, and each element of vectors, in float32.

        See the contract.
        """
        return [
            StateSpec(f"{spec.name}.{side}", shape, torch.float32)
            for spec in layout.parameters
            for side, shape in _moment_shapes(spec.shape).items()
        ]

    def _descent(
        self, name: str, theta: torch.Tensor, inputs: UpdateInputs
    ) -> tuple[torch.Tensor, Any]:
        decay = 1.0 - math.pow(inputs.step + 1, self.decay_rate)
        update = self._update(name, inputs.gradients[name], decay, inputs.states)
        update.div_((_rms(update) / self.clip_threshold).clamp_(min=1.0))
        scale = torch.norm(theta, 2.0) / math.sqrt(theta.numel())
        # a float32 tensor, as its authors' program has it
        return update, inputs.lr * max(self.eps[1], scale)

    def _update(
        self, name: str, gradient: torch.Tensor, decay: float, states: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Update a parameter's moments with a gradient, and return the gradient divided by their
        root.
        """
        squares = gradient**2 + self.eps[0]
        means = {"squares": squares}
        if gradient.dim() > 1:
            means = {"rows": squares.mean(dim=-1), "columns": squares.mean(dim=-2)}
        moments = {}
        for side, mean in means.items():
            kept = states[f"{name}.{side}"]
            moments[side] = kept.to(mean.device).mul_(decay).add_(mean, alpha=1.0 - decay)
            if moments[side] is not kept:
                kept.copy_(moments[side])
        if gradient.dim() < 2:
            return moments["squares"].rsqrt().mul_(gradient)
        rows, columns = moments["rows"], moments["columns"]
        rows = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        return torch.mul(rows, columns.unsqueeze(-2).rsqrt()).mul_(gradient)


def _moment_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of a parameter's moments, by their side."""
    if len(shape) < 2:
        return {"squares": shape}
    return {"rows": shape[:-1], "columns": (*shape[:-2], shape[-1])}


def _rms(values: torch.Tensor) -> torch.Tensor:
    root: torch.Tensor = torch.norm(values, 2.0) / (values.numel() ** 0.5)
    return root


# the result has the interface of torch.optim.Optimizer
OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Any]

# elements of the tensor on which an optimizer shows its states: some keep others for small tensors
_PROBED = 8192
_HAS_STATE = "has_state"  # name of the flag that a parameter's states have been set
_HAS_MASTERS = "begun"  # name of the flag that the float32 copies of a segment have been made
_HAS_NEXT = "delayed.begun"  # name of the flag that a segment has next weights


def make_optimizer(factory: OptimizerFactory, parameters: list[nn.Parameter]) -> Any:
    """Make the optimizer of these parameters."""
    optimizer = factory(parameters) if callable(factory) else None
    step = getattr(optimizer, "step", None)
    if not callable(step):
        raise OptionError(
            "optimizer",
            found=repr(factory)[:80],
            expected=(
                "a factory that is called with the parameters, such as partial(torch.optim.AdamW, "
                "lr=2e-4)"
            ),
            remedy="pass such a factory",
        )
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise OptionError(
            "optimizer",
            found=f"{type(optimizer).__name__}, whose step evaluates the loss again by a closure",
            expected="an optimizer whose step only reads gradients",
            remedy="use another optimizer, such as torch.optim.AdamW",
        )
    return optimizer


class _State(NamedTuple):
    """One entry of a parameter's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    number: type | None = None  # type of an entry that is a Python number; None: it is a tensor


class TorchOptimizer(BlockUpdate):
    """The optimizer that a factory makes, for one segment at a time.

    Each step has the bits of one over all parameters.

    The arithmetic is done by the host, where the states are: ZeRO-Offload's arrangement (arXiv
    2101.06840). Weights that a device holds are copied to the host and back. The optimizer is made
    anew for each segment and step, and given the segment's states, which a first step on a small
    tensor has shown.

    Args:
        factory: Called with a segment's parameters: ``partial(torch.optim.AdamW, lr=1e-5,
            fused=True)``. The learning rate of each step replaces the factory's.
        options: Name and options of the optimizer, as JSON values, for the journal.
        by_name: Whether the factory is called with pairs of a parameter's name and the parameter,
            from which it may make groups.

    Raises:
        OptionError: if the factory returns no optimizer, the optimizer's step needs a closure, or
            its state does not belong to single parameters.
    """

    widens_gradients = False  # as in a loop over the whole model

    def __init__(
        self,
        factory: Callable[[Any], Any],
        *,
        options: Mapping[str, Any] | None = None,
        by_name: bool = False,
    ) -> None:
        self._factory = factory
        self._by_name = by_name
        made = make_optimizer(self._made, [nn.Parameter(torch.empty(0))])
        self._name = type(made).__name__
        self._options = {"name": self._name} if options is None else options
        # The entries of a parameter's state by their keys in the optimizer's state.
        # by shape and dtype
        self._forms: dict[tuple[tuple[int, ...], torch.dtype], Mapping[str, _State]] = {}
        self._states: dict[str, Mapping[str, _State]] = {}  # by parameter
        self._form((1, _PROBED), torch.float32)  # refuses an optimizer that cannot be taken apart

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options. See the contract."""
        return self._options

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """What the optimizer keeps of each parameter, and whether it has begun to.

        See the contract.
        """
        specs: list[StateSpec] = []
        for parameter in layout.parameters:
            if not parameter.frozen:
                name, form = parameter.name, self._form(parameter.shape, parameter.dtype)
                self._states[name] = form
                specs += [StateSpec(f"{name}.{_HAS_STATE}", (), torch.uint8)] if form else []
                specs += [
                    StateSpec(f"{name}.{key}", state.shape, state.dtype)
                    for key, state in form.items()
                ]
        return specs

    def apply(self, inputs: UpdateInputs) -> None:
        """Change a segment's weights in place. See the contract."""
        weights, states = inputs.weights, inputs.states
        parameters = {name: nn.Parameter(weight.cpu()) for name, weight in weights.items()}
        for name, gradient in inputs.gradients.items():
            parameters[name].grad = gradient.cpu()
        optimizer = self._factory(
            list(parameters.items() if self._by_name else parameters.values())
        )
        for group in optimizer.param_groups:
            group["lr"] = inputs.lr
        for name, parameter in parameters.items():
            if self._states[name] and states[f"{name}.{_HAS_STATE}"]:
                kept = [
                    (key, number, states[f"{name}.{key}"])
                    for key, (_, _, number) in self._states[name].items()
                ]
                optimizer.state[parameter] = {
                    key: value if number is None else number(value.item())
                    for key, number, value in kept
                }
        optimizer.step()
        for name, parameter in parameters.items():
            self._keep(name, optimizer.state.get(parameter, {}), states)
            if weights[name].device.type != "cpu":
                weights[name].copy_(parameter.detach())

    def _made(self, parameters: list[nn.Parameter]) -> Any:
        """An optimizer of parameters without names."""
        return self._factory(
            [("", parameter) for parameter in parameters] if self._by_name else parameters
        )

    def _keep(self, name: str, state: Mapping[str, Any], kept: dict[str, torch.Tensor]) -> None:
        """Put a parameter's state where it is kept, unless the optimizer has changed it there.

        A new state is taken over where there is none yet: copying it would take the memory of both.
        """
        for key, form in self._states[name].items():
            if key not in state:
                continue
            value, place = state[key], f"{name}.{key}"
            if form.number is not None:
                kept[place].fill_(value)
            elif place not in kept:
                kept[place] = value
            elif value is not kept[place]:
                kept[place].copy_(value)
            kept[f"{name}.{_HAS_STATE}"].fill_(1)

    def _form(self, shape: tuple[int, ...], dtype: torch.dtype) -> Mapping[str, _State]:
        """The states of a parameter of this shape, from those of a small one of as many dimensions.

        A state whose dimensions are not all the parameter's is looked at in the parameter's own
        shape.
        """
        key = (shape, dtype)
        if key not in self._forms:
            probed = _probed_shape(len(shape))
            form = self._shown(probed, dtype)
            sides = {1: 1, **dict(zip(probed, shape, strict=True))}
            if all(side in sides for state in form.values() for side in state.shape):
                form = {
                    key: one._replace(shape=tuple(sides[side] for side in one.shape))
                    for key, one in form.items()
                }
            else:
                form = self._shown(shape, dtype)
            self._forms[key] = form
        return self._forms[key]

    def _shown(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, _State]:
        """The states that the optimizer has of a parameter of this shape after a step."""
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.zeros(shape, dtype=dtype)
        optimizer = make_optimizer(self._made, [parameter])
        before = _shared(optimizer)
        optimizer.step()
        if before != _shared(optimizer):
            raise self._refusal(
                "a state of all parameters together", "a state of each parameter's own"
            )
        states = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided:
                states[key] = _State(tuple(value.shape), value.dtype)
            elif type(value) in (int, float):
                states[key] = _State((), torch.float64, type(value))
            elif value is not None:
                raise self._refusal(
                    f"a {type(value).__name__} as {key}", "plain tensors and numbers in its state"
                )
        return states

    def _refusal(self, found: str, expected: str) -> OptionError:
        return OptionError(
            "optimizer",
            found=f"{self._name}, which keeps {found}",
            expected=f"an optimizer with {expected}",
            remedy="use another optimizer, such as torch.optim.AdamW",
        )


def _probed_shape(dimensions: int) -> tuple[int, ...]:
    """A shape of different sides, none of which is 1."""
    if dimensions < 2:
        return (_PROBED,) * dimensions
    others = [2 ** (exponent + 1) for exponent in range(dimensions - 1)]
    return (*others, max(_PROBED, 2 ** (dimensions + 1)))


def _shared(optimizer: Any) -> str:
    """What groups of parameters have in common, comparable."""
    return repr(
        [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
    )


class BAdam(BlockUpdate):
    """Trains one segment for a number of steps, then another one.

    Each epoch has a new random order of all segments.

    This is block coordinate descent as in BAdam (arXiv 2404.02827, Algorithm 1), with the
    optimizer's state of one segment at a time. A segment begins with a new optimizer. 16-bit
    weights have a float32 copy while their segment is trained. The optimizer changes the copy,
    which is rounded into the weights after each step.

    Args:
        factory: Called with the segment's parameters: ``partial(torch.optim.AdamW, lr=1e-6)``. The
            rate of each step replaces the factory's.
        every: Steps for which a segment is trained.
        seed: Decides the order of segments.
        options: Name and options of the optimizer, as JSON values, for the journal.

    Raises:
        OptionError: if ``every`` or ``seed`` is out of its range, the factory returns no optimizer,
            or the optimizer's step needs a closure.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        *,
        every: int = 50,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        require_whole("every", every, 1)
        require_whole("seed", seed, 0, MAX_SEED)
        self._optimizer, self._every, self._seed = TorchOptimizer(factory), every, seed
        self._options = (
            {"name": "badam", "optimizer": self._optimizer.options["name"]}
            if options is None
            else options
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options. See the contract."""
        return {**self._options, "switch_every": self._every, "switch_seed": self._seed}

    @property
    def turn(self) -> int:
        """Steps for which a segment is trained. See the contract."""
        return self._every

    def segments(self, step: int, trained: Sequence[int]) -> Collection[int]:
        """The one segment whose turn it is. See the contract."""
        epoch, turn = divmod(step // self._every, len(trained))
        generator = torch.Generator().manual_seed((self._seed + epoch) % (MAX_SEED + 1))
        order = torch.randperm(len(trained), generator=generator)
        return (trained[int(order[turn])],)

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """The optimizer's states of float32 weights, and a float32 copy of each 16-bit weight.

        See the contract.
        """
        wide = [
            replace(spec, dtype=torch.float32) if spec.dtype in HALVES else spec
            for spec in layout.parameters
        ]
        masters = [
            StateSpec(f"{spec.name}.master", spec.shape, torch.float32)
            for spec in layout.parameters
            if spec.dtype in HALVES
        ]
        begun = [StateSpec(_HAS_MASTERS, (), torch.uint8)] if masters else []
        return [*begun, *masters, *self._optimizer.states(replace(layout, parameters=tuple(wide)))]

    def apply(self, inputs: UpdateInputs) -> None:
        """Change a segment's weights in place. See the contract."""
        weights, states = inputs.weights, inputs.states
        masters = {
            name: states[f"{name}.master"]
            for name, weight in weights.items()
            if weight.dtype in HALVES
        }
        if masters and not states[_HAS_MASTERS]:
            for name, master in masters.items():
                master.copy_(weights[name])
            states[_HAS_MASTERS].fill_(1)
        self._optimizer.apply(inputs._replace(weights={**weights, **masters}))
        for name, master in masters.items():
            weights[name].copy_(master)


class Delayed(BlockUpdate):
    """Another optimizer, whose update of a step reaches the weights in the next step.

    This is the delayed update of ZeRO-Offload (arXiv 2101.06840, section 5.2). The gradients of
    step t are computed with weights that have the updates of steps 0 to t - 2. So this is another
    run than that of the optimizer alone. The update is computed by a thread of the host, in a copy
    of the weights, between a segment's backward pass and that of the next step. Where a device
    computes forward and backward, the host works beside it. After a step, the weights lack the
    step's own update.

    Args:
        update: The optimizer. It changes all segments at each step.

    Raises:
        OptionError: if the optimizer trains segments in turns.
    """

    def __init__(self, update: BlockUpdate) -> None:
        if update.turn is not None:
            raise OptionError(
                "update",
                found=f"{update.options['name']}, which trains segments in turns",
                expected="an optimizer that changes all segments at each step",
                remedy="delay another optimizer, such as TorchOptimizer(...)",
            )
        self._update = update
        self._pending: dict[int, Future[None]] = {}  # by segment
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="zo2-update")

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options of the optimizer. See the contract."""
        return {**self._update.options, "delayed": True}

    @property
    def widens_gradients(self) -> bool:
        """As the optimizer says. See the contract."""
        return self._update.widens_gradients

    @property
    def copies(self) -> int:
        """As the optimizer says. See the contract."""
        return self._update.copies

    def segments(self, step: int, trained: Sequence[int]) -> Collection[int]:
        """As the optimizer says. See the contract."""
        return self._update.segments(step, trained)

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """The optimizer's states, the weights after the update that is due, and its gradients.

        See the contract.
        """
        kept: list[StateSpec] = []
        for spec in layout.parameters:
            dtype = torch.float32 if self.widens_gradients and spec.dtype in HALVES else spec.dtype
            kept += [StateSpec(f"{spec.name}.next", spec.shape, spec.dtype)]
            kept += [StateSpec(f"{spec.name}.gradient", spec.shape, dtype)]
        return [StateSpec(_HAS_NEXT, (), torch.uint8), *kept, *self._update.states(layout)]

    def apply(self, inputs: UpdateInputs) -> None:
        """Give a segment the weights of the update before, and start this one in another thread.

        See the contract.
        """
        segment, weights, states = inputs.segment, inputs.weights, inputs.states
        self._wait(segment)
        following = {name: states[f"{name}.next"] for name in weights}
        for name, weight in weights.items():
            if states[_HAS_NEXT]:
                weight.copy_(following[name])
            else:
                following[name].copy_(weight)
        states[_HAS_NEXT].fill_(1)
        kept = {
            name: states[f"{name}.gradient"].copy_(gradient)
            for name, gradient in inputs.gradients.items()
        }

        late = inputs._replace(weights=following, gradients=kept)
        # it holds for one thread
        self._pending[segment] = self._worker.submit(torch.no_grad()(self._update.apply), late)

    def settle(self) -> None:
        """Wait for all updates that were started. See the contract."""
        for segment in list(self._pending):
            self._wait(segment)
        self._update.settle()

    def _wait(self, segment: int) -> None:
        if segment in self._pending:
            self._pending.pop(segment).result()


class _Zeros(dict[str, torch.Tensor]):
    """States that are zero, and take memory only once they are asked for."""

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        super().__init__()
        self.specs = {spec.name: spec for spec in specs}

    def __missing__(self, name: str) -> torch.Tensor:
        spec = self.specs[name]
        self[name] = state = torch.zeros(spec.shape, dtype=spec.stored_dtype)
        return state


class StateMemory:
    """States in host memory. Those of a segment are zero before its first step."""

    def __init__(self, update: BlockUpdate, layouts: Sequence[BlockLayout]) -> None:
        self._turn = update.turn
        self._specs = [update.states(layout) for layout in layouts]
        self._states: dict[int, _Zeros] = {}  # by segment

    def begin(self, step: int) -> None:
        """Forget the states that do not outlive the turn before this 0-based step."""
        if self._turn is not None and step % self._turn == 0:
            self._states.clear()

    def of(self, segment: int, store: Store) -> dict[str, torch.Tensor]:
        """The states of a segment by name, which the optimizer changes in place.

        See ``BlockUpdate.apply``.
        """
        return self._states.setdefault(segment, _Zeros(self._specs[segment]))

    def state_dict(self) -> dict[int, dict[str, torch.Tensor]]:
        """The states by segment and name, which are not copied."""
        return {segment: dict(states) for segment, states in self._states.items() if states}

    def load_state_dict(self, state: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Continue with copies of these states."""
        loaded: dict[int, _Zeros] = {}
        if not isinstance(state, Mapping):
            raise unusable_state(f"a {type(state).__name__} as optimizer states")
        for segment, states in state.items():
            if segment not in range(len(self._specs)) or not isinstance(states, Mapping):
                raise unusable_state(f"optimizer states of segment {segment}")
            kept = loaded[segment] = _Zeros(self._specs[segment])
            for name, value in states.items():
                spec = kept.specs.get(name)
                if spec is None or form_of(value) != (spec.shape, spec.stored_dtype):
                    raise unusable_state(f"{name}, an optimizer state of segment {segment}")
                require_finite(name, value)
                kept[name] = value.clone()
        self._states = loaded


class StatesInStores:
    """States in the segments' stores, after the parameters."""

    def __init__(self, layouts: Sequence[BlockLayout], read: Callable[[int], object]) -> None:
        self._layouts = layouts
        self._read = read

    def begin(self, step: int) -> None:
        """Do nothing: all states are kept."""

    def of(self, segment: int, store: Store) -> dict[str, torch.Tensor]:
        """Views of the store by name, which the optimizer changes in place."""
        self._read(segment)
        layout = self._layouts[segment]
        stored = store[len(layout.parameters) :]
        return {
            spec.name: view.view(spec.shape)
            for spec, view in zip(layout.states, stored, strict=True)
        }


def state_bytes(update: BlockUpdate, layouts: Sequence[BlockLayout]) -> int:
    """The most bytes that an optimizer's states take: of all segments, or of the largest one if
    they last for a turn.
    """
    sizes = [sum(spec.nbytes for spec in update.states(layout)) for layout in layouts]
    return sum(sizes) if update.turn is None else max(sizes)


def unusable_state(found: str) -> CheckpointError:
    """The error about a state of another run, or a forged one."""
    return CheckpointError(
        "state",
        found=found,
        expected="a state of this optimizer and model",
        remedy="load the state of a run of the same model, adapter, optimizer and precision",
    )


def form_of(value: object) -> tuple[tuple[int, ...], torch.dtype] | type:
    """Shape and dtype of a tensor; the type of anything else."""
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def require_finite(name: str, value: object) -> None:
    """Refuse tensors with infinite numbers or NaN, which no step leaves behind."""
    if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.isfinite().all():
        raise unusable_state(f"{name} with values that are not finite")


def require_optimizer_state(
    state: Any, factory: OptimizerFactory, parameters: Sequence[nn.Parameter]
) -> None:
    """Compare a state of ``torch.optim`` with that of the factory's own optimizer after a step on
    zeros.
    """
    zeros = [nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
    for parameter in zeros:
        parameter.grad = torch.zeros_like(parameter)
    with torch.random.fork_rng(devices=[]):
        (own := factory(zeros)).step()
    expected = own.state_dict()
    try:
        states, groups = dict(state["state"]), list(map(_kind_of_group, state["param_groups"]))
        has_same_groups = groups == list(map(_kind_of_group, expected["param_groups"]))
        if not has_same_groups or states.keys() - expected["state"].keys():
            raise unusable_state("the state of an optimizer with other options or parameters")
        for index, entries in states.items():
            forms = {name: form_of(value) for name, value in expected["state"][index].items()}
            for name, value in entries.items():
                if name not in forms or (
                    forms[name] != form_of(value) and type(None) not in (forms[name], type(value))
                ):
                    raise unusable_state(f"{name}, a state of parameter {index}")
                require_finite(f"{name} of parameter {index}", value)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise unusable_state(f"no state of an optimizer ({type(error).__name__})") from error


def _kind_of_group(group: Mapping[str, Any]) -> tuple[list[int], dict[str, object]]:
    """What tells optimizers apart: parameters, options and flags.

    Schedules change the numbers, and add initial ones.
    """
    kinds = {
        name: _kind(value)
        for name, value in group.items()
        if name != "params" and not name.startswith("initial_")
    }
    return list(group["params"]), kinds


def _kind(option: Any) -> object:
    """What two values of an option have in common: numbers are alike if they are finite."""
    if isinstance(option, list | tuple):
        return [_kind(one) for one in option]
    is_number = isinstance(option, int | float | torch.Tensor) and not isinstance(option, bool)
    return math.isfinite(option) if is_number else repr(option)


def copied_state(value: Any) -> Any:
    """Copy a state's tensors, which may lie in a file."""
    return tree_map_only(torch.Tensor, torch.clone, value)


SWITCH_EVERY = 50  # steps for which badam trains a block, as its authors' program does by default


class OptimizerEntry(NamedTuple):
    """An optimizer of the registry."""

    title: str
    learning_rates: Sequence[float]  # to try for all parameters of a pre-trained model, ascending
    options: tuple[str, ...] = ()  # further options, under the names that torch.optim has
    # for the parameters of an adapter; None: not supported
    of_adapter: Callable[..., torch.optim.Optimizer] | None = None


_ADAM_RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
_SGD_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)

OPTIMIZERS: dict[OptimizerName, OptimizerEntry] = {
    "adamw": OptimizerEntry(
        "AdamW", _ADAM_RATES, options=("betas", "eps"), of_adapter=torch.optim.AdamW
    ),
    "sgd": OptimizerEntry(
        "SGD", _SGD_RATES, options=("momentum", "nesterov"), of_adapter=torch.optim.SGD
    ),
    "lomo": OptimizerEntry("LOMO", _SGD_RATES),
    "adalomo": OptimizerEntry("AdaLOMO", (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)),
    "badam": OptimizerEntry("BAdam", _ADAM_RATES),
}


def make_block_update(
    name: OptimizerName,
    *,
    weight_decay: float,
    switch_every: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> BlockUpdate:
    """The optimizer of all parameters."""
    rates = {"weight_decay": weight_decay, **options}
    recorded = {"name": name, **rates}
    # torch's kernel that passes once over memory
    adamw = partial(torch.optim.AdamW, **rates, fused=True)
    match name:
        case "adamw":
            return TorchOptimizer(adamw, options=recorded)
        case "sgd":
            return TorchOptimizer(partial(torch.optim.SGD, **rates), options=recorded)
        case "lomo":
            return LOMO(**rates)
        case "adalomo":
            return AdaLOMO(**rates)
        case "badam":
            every = SWITCH_EVERY if switch_every is None else switch_every
            return BAdam(adamw, every=every, seed=seed, options=recorded)
