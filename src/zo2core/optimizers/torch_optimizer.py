"""Optimizers of ``torch.optim``, one segment at a time: of all segments at each step, or of one
segment for a number of steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from zo2core.errors import OptionError
from zo2core.protocols import BlockUpdate, UpdateInputs
from zo2core.ranges import require_whole
from zo2core.types import HALVES, MAX_SEED, BlockLayout, StateSpec

# the result has the interface of torch.optim.Optimizer
OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Any]

# elements of the tensor on which an optimizer shows its states: some keep others for small tensors
_PROBED = 8192
_HAS_STATE = "has_state"  # name of the flag that a parameter's states have been set
_HAS_MASTERS = "begun"  # name of the flag that the float32 copies of a segment have been made


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


def described(factory: Any) -> dict[str, Any]:
    """Name and options of the optimizer that a function makes, as JSON values.

    The options are those that ``functools.partial`` was given.
    """
    keywords = getattr(factory, "keywords", {})
    optimizer = getattr(factory, "func", factory)  # the class, or a function of the caller's
    options = {name: _recorded(value) for name, value in keywords.items()}
    return {"name": getattr(optimizer, "__name__", type(optimizer).__name__), **options}


def _recorded(value: Any) -> Any:
    """An option as JSON values that are the same in each process: the text of a function has its
    address, and that of a set an order that is drawn.
    """
    if isinstance(value, bool | int | float | str | list | tuple | None):
        return value
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if callable(value) and not is_dataclass(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return repr(value)


class _StateForm(NamedTuple):
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
        options: Name and options of the optimizer, as JSON values, for the journal. None: its class
            and the options of a ``partial``.
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
        made = make_optimizer(self._make, [nn.Parameter(torch.empty(0))])
        self._name = type(made).__name__
        own_options = {**described(factory), "name": self._name}
        own_options.pop("lr", None)  # each step has another one
        self._options = own_options if options is None else options
        # The entries of a parameter's state by their keys in the optimizer's state.
        # by shape and dtype
        self._forms: dict[tuple[tuple[int, ...], torch.dtype], Mapping[str, _StateForm]] = {}
        self._states: dict[str, Mapping[str, _StateForm]] = {}  # by parameter
        # refuses an optimizer that cannot be taken apart
        self._states_of_shape((1, _PROBED), torch.float32)

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options, for the journal."""
        return self._options

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """What the optimizer keeps of each parameter, and whether it has begun to."""
        specs: list[StateSpec] = []
        for parameter in layout.parameters:
            if not parameter.frozen:
                name = parameter.name
                form = self._states_of_shape(parameter.shape, parameter.dtype)
                self._states[name] = form
                specs += [StateSpec(f"{name}.{_HAS_STATE}", (), torch.uint8)] if form else []
                specs += [
                    StateSpec(f"{name}.{key}", state.shape, state.dtype)
                    for key, state in form.items()
                ]
        return specs

    def apply(self, inputs: UpdateInputs) -> None:
        """Change a segment's weights in place."""
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
                entries = [
                    (key, number, states[f"{name}.{key}"])
                    for key, (_, _, number) in self._states[name].items()
                ]
                optimizer.state[parameter] = {
                    key: value if number is None else number(value.item())
                    for key, number, value in entries
                }
        optimizer.step()
        for name, parameter in parameters.items():
            self._keep(name, optimizer.state.get(parameter, {}), states)
            if weights[name].device.type != "cpu":
                weights[name].copy_(parameter.detach())

    def _make(self, parameters: list[nn.Parameter]) -> Any:
        """An optimizer of parameters without names."""
        return self._factory(
            [("", parameter) for parameter in parameters] if self._by_name else parameters
        )

    def _keep(self, name: str, state: Mapping[str, Any], states: dict[str, torch.Tensor]) -> None:
        """Put a parameter's state where it is kept, unless the optimizer has changed it there.

        A new state is taken over where there is none yet: copying it would take the memory of both.
        """
        for key, form in self._states[name].items():
            if key not in state:
                continue
            value = state[key]
            place = f"{name}.{key}"
            if form.number is not None:
                states[place].fill_(value)
            elif place not in states:
                states[place] = value
            elif value is not states[place]:
                states[place].copy_(value)
            states[f"{name}.{_HAS_STATE}"].fill_(1)

    def _states_of_shape(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Mapping[str, _StateForm]:
        """The states of a parameter of this shape, from those of a small one of as many dimensions.

        A state whose dimensions are not all the parameter's is looked at in the parameter's own
        shape.
        """
        key = (shape, dtype)
        if key not in self._forms:
            probed = _probed_shape(len(shape))
            form = self._probe(probed, dtype)
            sides = {1: 1, **dict(zip(probed, shape, strict=True))}
            if all(side in sides for state in form.values() for side in state.shape):
                form = {
                    key: entry._replace(shape=tuple(sides[side] for side in entry.shape))
                    for key, entry in form.items()
                }
            else:
                form = self._probe(shape, dtype)
            self._forms[key] = form
        return self._forms[key]

    def _probe(self, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, _StateForm]:
        """The states that the optimizer has of a parameter of this shape after a step."""
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.zeros(shape, dtype=dtype)
        optimizer = make_optimizer(self._make, [parameter])
        shared_state = _shared(optimizer)
        optimizer.step()
        if shared_state != _shared(optimizer):
            raise self._refusal(
                "a state of all parameters together", "a state of each parameter's own"
            )
        states = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided:
                states[key] = _StateForm(tuple(value.shape), value.dtype)
            elif type(value) in (int, float):
                states[key] = _StateForm((), torch.float64, type(value))
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
        options: As for ``TorchOptimizer``.

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
        self._optimizer = TorchOptimizer(factory)
        self._every = every
        self._seed = seed
        self._options = (
            {"name": "badam", "optimizer": self._optimizer.options} if options is None else options
        )

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options, for the journal."""
        return {**self._options, "switch_every": self._every, "switch_seed": self._seed}

    @property
    def turn(self) -> int:
        """Steps for which a segment is trained; then all states are forgotten."""
        return self._every

    def segments(self, step: int, trained: Sequence[int]) -> Collection[int]:
        """The one segment whose turn it is."""
        epoch, turn = divmod(step // self._every, len(trained))
        generator = torch.Generator().manual_seed((self._seed + epoch) % (MAX_SEED + 1))
        order = torch.randperm(len(trained), generator=generator)
        return (trained[int(order[turn])],)

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """The optimizer's states of float32 weights, and a float32 copy of each 16-bit weight."""
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
        """Change a segment's weights in place."""
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
