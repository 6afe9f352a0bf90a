"""Stubs that stand in for a decoder's layers while Hugging Face's own forward runs.

The arguments that a model's forward passes to its layers besides the hidden state: masks,
positions, caches.

Build a model from its config alone: parameters without memory, buffers with transformers' values.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import Cache, PretrainedConfig, PreTrainedModel

from zo2adapters.models.batches import CAUSAL_LM, Head
from zo2adapters.models.library_names import build_glob_alternation
from zo2core.errors import UnsupportedModelError


class CutError(UnsupportedModelError):
    """Interrupts HF's forward at the last stub.

    Callers see it if they call the skeleton outside of a sweep.
    """

    def __init__(self) -> None:
        super().__init__(
            "the model's skeleton",
            "a call outside of a sweep",
            "a call of the model that is passed to compute_loss",
            "call that model; to generate, export it first",
        )


class CallRecorder:
    """State that the stubs of one model share."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Clear the records."""
        self.calls: list[LayerCall] = []
        self.hidden: torch.Tensor | None = None  # the last layer's input
        self.final: torch.Tensor | None = None  # set during the epilogue
        self.at_end: Callable[[], object] | None = None  # called by the last stub in the epilogue

    def has_cache(self) -> bool:
        """Whether a layer is called with keys and values of earlier tokens."""
        return any(
            isinstance(value, Cache)
            for args, kwargs in self.calls
            for value in (*args, *kwargs.values())
        )


class StandIn(nn.Module):
    """Replaces a layer inside HF's forward, with its attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # not a submodule: its parameters are not this model's
        object.__setattr__(self, "layer", layer)

    def __getattr__(self, name: str) -> Any:
        # HF's loops may read a layer's attributes, such as its kind of attention.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)


class Stub(StandIn):
    """Replaces a layer: records its call, or returns the final hidden state."""

    def __init__(
        self, layer: nn.Module, recorder: CallRecorder, *, last: bool, returned: int
    ) -> None:
        super().__init__(layer)
        self.recorder = recorder
        self.last = last
        self.returned = returned

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Run in place of the layer's forward."""
        recorder = self.recorder
        if recorder.final is not None:
            hidden_states = recorder.final
            if self.last and recorder.at_end is not None:
                recorder.at_end()
        else:
            recorder.calls.append((args, kwargs))
            if self.last:
                recorder.hidden = hidden_states
                raise CutError
        return (hidden_states, *[None] * (self.returned - 1)) if self.returned else hidden_states


LayerCall: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]  # positional and keyword arguments


class LayerCalls(NamedTuple):
    """The calls of all layers.

    Most layers of most models get the very same objects, and share one entry.
    """

    distinct: Sequence[LayerCall]
    # of each layer's call; an array, which those who take nested activations apart pass on as it is
    numbers: array[int]

    @classmethod
    def of(cls, calls: Iterable[LayerCall]) -> LayerCalls:
        """Join the calls of all layers, in order."""
        distinct: dict[tuple[object, ...], LayerCall] = {}  # by the objects' identities
        keys = []
        for args, kwargs in calls:
            keys.append((*map(id, args), *kwargs, *map(id, kwargs.values())))
            distinct.setdefault(keys[-1], (args, kwargs))
        numbers = {key: number for number, key in enumerate(distinct)}
        return cls([*distinct.values()], array("I", [numbers[key] for key in keys]))

    def layer(self, index: int) -> LayerCall:
        """The call of one layer."""
        return self.distinct[self.numbers[index]]

    def by_layer(self) -> Iterator[LayerCall]:
        """The calls of all layers, in order."""
        return map(self.layer, range(len(self.numbers)))


_FACTORIES = {
    torch.zeros,
    torch.ones,
    torch.full,
    torch.eye,
    torch.arange,
    torch.linspace,
    torch.rand,
    torch.randn,
}
_MIN_PARAMETERS = 1 << 12  # every model may have so many, whatever its checkpoint holds
_MIN_NUMBERS = 1 << 27


class OversizedError(Exception):
    """A config asks for far more than its checkpoint can hold."""


class Bounds(NamedTuple):
    """Limits on what a model may create as it is built, far above what its checkpoint needs."""

    parameters: int = sys.maxsize  # number of uninitialised tensors
    numbers: int = sys.maxsize  # numbers in one tensor with values

    @classmethod
    def of(cls, shapes: Iterable[Sequence[int]]) -> Bounds:
        """The bounds for a checkpoint's tensors; models may have more, such as tied weights or
        position tables.
        """
        sizes = [math.prod(shape) for shape in shapes]
        return cls(4 * len(sizes) + _MIN_PARAMETERS, max(2 * sum(sizes), _MIN_NUMBERS))


UNBOUNDED = Bounds()  # for trusted configs


class _ParametersOnMeta(TorchFunctionMode):
    """Uninitialised tensors are created on the meta device, computed ones (rotary tables and other
    buffers) as usual.
    """

    def __init__(self, bounds: Bounds) -> None:
        super().__init__()
        self._bounds = bounds
        self._created = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            self._created += 1
            if self._created > self._bounds.parameters:
                raise OversizedError(f"more than {self._bounds.parameters} parameters")
            return func(*args, **{**kwargs, "device": "meta"})
        initialised = kwargs.get("tensor")  # how the functions of torch.nn.init name theirs
        if isinstance(initialised, torch.Tensor) and initialised.is_meta:
            return initialised  # without values; to draw none of them takes torch a fifth of a ms
        self._require_small(func, args, kwargs)
        return func(*args, **kwargs)

    def _require_small(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Check the size of a result that may be larger than its inputs, on the meta device."""
        sizes = [
            leaf.numel()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta
        ]
        if func not in _FACTORIES and (len(sizes) < 2 or math.prod(sizes) <= self._bounds.numbers):
            return
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        try:
            result = func(*args, **{**kwargs, "device": "meta"} if func in _FACTORIES else kwargs)
        except Exception:  # any: the call itself raises it, too
            return
        numbers = max(
            (leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)),
            default=0,
        )
        if numbers > self._bounds.numbers:
            raise OversizedError(f"a table of {numbers} numbers")


def _keep_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert tensors that transformers keeps in another dtype when it loads a model, such as
    float32 norms.
    """
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, by_group, _ = build_glob_alternation(list(plan))
        saved_names = model.state_dict().keys()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            match = pattern.search(name)
            if match is not None and match.lastgroup is not None and name in saved_names:
                tensor.data = tensor.data.to(plan[by_group[match.lastgroup]])


class _InPlaceWrites(TorchFunctionMode):
    """Records in-place writes to a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {
            parameter.untyped_storage()._cdata: name for name, parameter in model.named_parameters()
        }
        self.written: list[tuple[str, str]] = []  # parameter and function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        is_in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if is_in_place and isinstance(first, torch.Tensor):
            # views of a parameter share its storage
            parameter = self.names.get(first.untyped_storage()._cdata)
            self.written += [] if parameter is None else [(parameter, name)]
        return func(*args, **(kwargs or {}))


def _initialize_again(model: PreTrainedModel, where: str) -> None:
    """Initialise as transformers does after it has loaded a model, to compute tables that no
    checkpoint holds.

    Loaded parameters are marked and must not be written; models that ignore the mark are refused.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    written = _InPlaceWrites(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), written:
        model.initialize_weights()  # type: ignore[no-untyped-call]
    if written.written:
        name, function = written.written[0]
        raise UnsupportedModelError(
            f"{where}: {name.rpartition('.')[0]}",
            f"weights that transformers overwrites after it has loaded them ({function})",
            "the checkpoint's weights",
            "report it to transformers, whose model differs from the checkpoint",
        )


def leave_out(model: PreTrainedModel, paths: Iterable[str]) -> dict[str, torch.Tensor]:
    """Remove these modules and parameters, where the model has them; returns their tensors by
    name.
    """
    before = model.state_dict()
    modules = dict(model.named_modules())
    for path in paths:
        parent, _, leaf = path.rpartition(".")
        if parent not in modules:
            continue
        members: Any
        for members in (modules[parent]._modules, modules[parent]._parameters):
            if leaf in members:
                members[leaf] = None
    kept = model.state_dict()
    return {name: value for name, value in before.items() if name not in kept}


def build_skeleton(
    config: PretrainedConfig,
    dtype: torch.dtype,
    head: Head = CAUSAL_LM,
    *,
    bounds: Bounds = UNBOUNDED,
) -> PreTrainedModel:
    """Build a model whose parameters take no memory."""
    where = f"model type {config.model_type}"
    with _ParametersOnMeta(bounds):
        model: PreTrainedModel = head.class_of(config).from_config(
            config, dtype=dtype, trust_remote_code=False
        )
    model.train(mode=False)
    _initialize_again(model, where)
    _keep_dtypes(model, dtype)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in model.state_dict():  # else the checkpoint has its values
            where = f"{where}: {name}"
            found = "a buffer without values"
            remedy = "write an adapter for this architecture"
            raise UnsupportedModelError(where, found, "buffers that follow from the config", remedy)
    return model
