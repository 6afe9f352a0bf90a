"""Any ``torch.optim`` optimizer with a state for each parameter, one segment at a time. The state is on the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from zo2core.errors import OptionError
from zo2core.optimizers.lomo import EverySegment
from zo2core.protocols import UpdateInputs
from zo2core.types import BlockLayout, ParameterSpec, StateSpec

OptimizerFactory: TypeAlias = Callable[[list[nn.Parameter]], Any]  # the result has the interface of torch.optim.Optimizer

_PROBED = 8192  # elements of the tensor on which an optimizer shows its states: some keep others for small tensors
_HAS_STATE = "has_state"  # name of the flag that a parameter's states have been set


def make_optimizer(factory: OptimizerFactory, parameters: list[nn.Parameter]) -> Any:
    """Make the optimizer of these parameters."""
    optimizer = factory(parameters) if callable(factory) else None
    step = getattr(optimizer, "step", None)
    if not callable(step):
        raise OptionError(
            "optimizer",
            found=repr(factory)[:80],
            expected="a factory that is called with the parameters, such as partial(torch.optim.AdamW, lr=2e-4)",
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

    key: str  # in the optimizer's state
    number: type | None  # type of an entry that is a Python number; None: it is a tensor
    spec: StateSpec


class TorchOptimizer(EverySegment):
    """The optimizer that a factory makes, for one segment at a time. Each step has the bits of one over all parameters.

    The arithmetic is done by the host, where the states are: ZeRO-Offload's arrangement (arXiv 2101.06840). Weights that a
    device holds are copied to the host and back. The optimizer is made anew for each segment and step, and given the
    segment's states, which a first step on a small tensor has shown.

    Args:
        factory: Called with a segment's parameters: ``partial(torch.optim.AdamW, lr=1e-5, fused=True)``. The learning rate
            of each step replaces the factory's.
        options: Name and options of the optimizer, as JSON values, for the journal.
        by_name: Whether the factory is called with pairs of a parameter's name and the parameter, from which it may make
            groups.

    Raises:
        OptionError: if the factory returns no optimizer, the optimizer's step needs a closure, or its state does not belong
            to single parameters.
    """

    def __init__(
        self, factory: Callable[[Any], Any], *, options: Mapping[str, Any] | None = None, by_name: bool = False
    ) -> None:
        self._factory = factory
        self._by_name = by_name
        made = make_optimizer(self._made, [nn.Parameter(torch.empty(0))])
        self._name = type(made).__name__
        self._options = {"name": self._name} if options is None else options
        self._forms: dict[tuple[tuple[int, ...], torch.dtype], Sequence[_State]] = {}  # of a parameter's states
        self._states: dict[str, Sequence[_State]] = {}  # by parameter
        self._form((1, _PROBED), torch.float32)  # refuses an optimizer that cannot be taken apart

    @property
    def options(self) -> Mapping[str, Any]:
        """Name and options. See the contract."""
        return self._options

    @property
    def widens_gradients(self) -> bool:
        """Whether 16-bit gradients are converted to float32 first: no, as in a loop over the whole model."""
        return False

    def states(self, layout: BlockLayout) -> Sequence[StateSpec]:
        """What the optimizer keeps of each parameter, and whether it has begun to. See the contract."""
        specs: list[StateSpec] = []
        for parameter in layout.parameters:
            if parameter.frozen:
                continue
            states = self._states_of(parameter)
            if states:
                specs.append(StateSpec(f"{parameter.name}.{_HAS_STATE}", (), torch.uint8))
                specs += [state.spec for state in states]
        return specs

    def apply(self, inputs: UpdateInputs) -> None:
        """Change a segment's weights in place. See the contract."""
        weights, states = inputs.weights, inputs.states
        parameters = {name: nn.Parameter(weight.cpu()) for name, weight in weights.items()}
        for name, gradient in inputs.gradients.items():
            parameters[name].grad = gradient.cpu()
        optimizer = self._factory(list(parameters.items() if self._by_name else parameters.values()))
        for group in optimizer.param_groups:
            group["lr"] = inputs.lr
        for name, parameter in parameters.items():
            if self._states[name] and states[f"{name}.{_HAS_STATE}"]:
                kept = {state.key: _value(state, states) for state in self._states[name]}
                optimizer.state[parameter] = kept
        optimizer.step()
        for name, parameter in parameters.items():
            self._keep(name, optimizer.state.get(parameter, {}), states)
            if weights[name].device.type != "cpu":
                weights[name].copy_(parameter.detach())

    def _made(self, parameters: list[nn.Parameter]) -> Any:
        """An optimizer of parameters without names."""
        return self._factory([("", parameter) for parameter in parameters] if self._by_name else parameters)

    def _keep(self, name: str, state: Mapping[str, Any], kept: dict[str, torch.Tensor]) -> None:
        """Put a parameter's state where it is kept, unless the optimizer has changed it there.

        A new state is taken over where there is none yet: copying it would take the memory of both.
        """
        for entry in self._states[name]:
            if entry.key not in state:
                continue
            value, place = state[entry.key], entry.spec.name
            if entry.number is not None:
                kept[place].fill_(value)
            elif place not in kept:
                kept[place] = value
            elif value is not kept[place]:
                kept[place].copy_(value)
            kept[f"{name}.{_HAS_STATE}"].fill_(1)

    def _states_of(self, parameter: ParameterSpec) -> Sequence[_State]:
        """The states of a parameter, under names of its own."""
        form = self._form(parameter.shape, parameter.dtype)
        self._states[parameter.name] = [
            state._replace(spec=state.spec._replace(name=f"{parameter.name}.{state.key}")) for state in form
        ]
        return self._states[parameter.name]

    def _form(self, shape: tuple[int, ...], dtype: torch.dtype) -> Sequence[_State]:
        """The states of a parameter of this shape, from those of a small one of as many dimensions.

        A state whose dimensions are not all the parameter's is looked at in the parameter's own shape.
        """
        key = (shape, dtype)
        if key not in self._forms:
            probed = _probed_shape(len(shape))
            form = self._shown(probed, dtype)
            sides = dict(zip(probed, shape, strict=True))
            if all(side in sides or side == 1 for state in form for side in state.spec.shape):
                form = [
                    state._replace(spec=state.spec._replace(shape=tuple(sides.get(side, 1) for side in state.spec.shape)))
                    for state in form
                ]
            else:
                form = self._shown(shape, dtype)
            self._forms[key] = form
        return self._forms[key]

    def _shown(self, shape: tuple[int, ...], dtype: torch.dtype) -> Sequence[_State]:
        """The states that the optimizer has of a parameter of this shape after a step."""
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        parameter.grad = torch.zeros(shape, dtype=dtype)
        optimizer = make_optimizer(self._made, [parameter])
        before = [_shared(group) for group in optimizer.param_groups]
        optimizer.step()
        if before != [_shared(group) for group in optimizer.param_groups]:
            raise self._refusal("a state of all parameters together", "a state of each parameter's own")
        states = []
        for key, value in optimizer.state.get(parameter, {}).items():
            if type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided:
                states.append(_State(key, None, StateSpec("", tuple(value.shape), value.dtype)))
            elif type(value) in (int, float):
                states.append(_State(key, type(value), StateSpec("", (), torch.float64)))
            elif value is not None:
                raise self._refusal(f"a {type(value).__name__} as {key}", "plain tensors and numbers in its state")
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


def _shared(group: Mapping[str, Any]) -> str:
    """What a group of parameters has in common, comparable."""
    return repr({key: value for key, value in group.items() if key != "params"})


def _value(state: _State, states: Mapping[str, torch.Tensor]) -> Any:
    kept = states[state.spec.name]
    return kept if state.number is None else state.number(kept.item())
