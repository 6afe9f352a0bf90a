"""A model built from its config alone: parameters without memory, buffers with the values that transformers gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from zo2adapters.models.heads import CAUSAL_LM, Head
from zo2core import UnsupportedModelError

_CREATING = {torch.zeros, torch.ones, torch.full, torch.eye, torch.arange, torch.linspace, torch.rand, torch.randn}
_FEWEST_PARAMETERS = 1 << 12  # of a bound: a model is allowed so many, whatever its checkpoint holds
_FEWEST_NUMBERS = 1 << 27


class OversizedError(Exception):
    """A config asks for far more than its checkpoint can hold."""


class Bounds(NamedTuple):
    """What the building of a model may make before it is given up: far more than the model of a checkpoint needs."""

    parameters: int | None = None  # tensors without values, one after the other; None: any number
    numbers: int | None = None  # in one tensor with values; None: any number

    @classmethod
    def of(cls, shapes: Iterable[Sequence[int]]) -> Bounds:
        """The bounds for a checkpoint's tensors. A model may have more than these: tied weights, or tables of positions."""
        sizes = [math.prod(shape) for shape in shapes]
        return cls(4 * len(sizes) + _FEWEST_PARAMETERS, max(2 * sum(sizes), _FEWEST_NUMBERS))


UNBOUNDED = Bounds()  # for configs of one's own


class _ParametersOnMeta(TorchFunctionMode):
    """Uninitialised tensors go to the meta device, computed ones (rotary tables and other buffers) stay real.

    Raises:
        OversizedError: before more is made than the bounds allow.
    """

    def __init__(self, bounds: Bounds) -> None:
        super().__init__()
        self._bounds = bounds
        self._made = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            self._made += 1
            if self._bounds.parameters is not None and self._made > self._bounds.parameters:
                raise OversizedError(f"more than {self._bounds.parameters} parameters")
            return func(*args, **{**kwargs, "device": "meta"})
        if self._bounds.numbers is not None:
            self._require_small(func, args, kwargs, self._bounds.numbers)
        return func(*args, **kwargs)

    def _require_small(self, func: Callable[..., Any], args: Any, kwargs: Any, most: int) -> None:
        """Find out how large a result will be, where it may be larger than what it is made of."""
        sizes = [leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        if func not in _CREATING and (len(sizes) < 2 or math.prod(sizes) <= most):
            return
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        try:
            made = func(*args, **{**kwargs, "device": "meta"} if func in _CREATING else kwargs)
        except Exception:  # any: what is wrong, the call itself says
            return
        numbers = max((leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)), default=0)
        if numbers > most:
            raise OversizedError(f"a table of {numbers} numbers")


def _keep_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give what transformers keeps in another dtype as it loads a model, float32 norms say, that dtype."""
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, by_group, _ = build_glob_alternation(list(plan))
        kept = model.state_dict().keys()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            match = pattern.search(name)
            if match is not None and match.lastgroup is not None and name in kept:
                tensor.data = tensor.data.to(plan[by_group[match.lastgroup]])


class _Written(TorchFunctionMode):
    """Notes what is written in place to a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {parameter.untyped_storage()._cdata: name for name, parameter in model.named_parameters()}
        self.written: list[tuple[str, str]] = []  # parameter and function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        is_in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        if is_in_place and isinstance(first, torch.Tensor):  # a part of a parameter has its memory, too
            parameter = self.names.get(first.untyped_storage()._cdata)
            self.written += [] if parameter is None else [(parameter, name)]
        return func(*args, **(kwargs or {}))


def _initialize_again(model: PreTrainedModel, where: str) -> None:
    """Do what transformers does once more after it has loaded a model: compute tables that no checkpoint holds.

    What it loaded it leaves alone there, but for models that do not heed the mark.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    written = _Written(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), written:
        model.initialize_weights()  # type: ignore[no-untyped-call]
    if written.written:
        name, function = written.written[0]
        raise UnsupportedModelError(
            f"{where}: {name.rpartition('.')[0]}",
            found=f"weights that transformers writes over after it has loaded them ({function})",
            expected="the checkpoint's own",
            remedy="report it to transformers: its model is not that of the checkpoint",
        )


def build_skeleton(
    config: PretrainedConfig, dtype: torch.dtype, head: Head = CAUSAL_LM, *, bounds: Bounds = UNBOUNDED
) -> PreTrainedModel:
    """Build a model whose parameters take no memory, ready to be cut.

    Args:
        config: The checkpoint's config. Remote code is not run.
        dtype: Dtype of the parameters, save those that transformers keeps in another one.
        head: What it ends in.
        bounds: What it may ask for.

    Raises:
        UnsupportedModelError: if the model cannot be built so.
        OversizedError: if it asks for more.
    """
    where = f"model type {config.model_type}"
    with _ParametersOnMeta(bounds):
        model: PreTrainedModel = head.class_of(config).from_config(config, dtype=dtype, trust_remote_code=False)
    model.train(mode=False)
    _initialize_again(model, where)
    _keep_dtypes(model, dtype)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in model.state_dict():  # else the checkpoint has its values
            raise UnsupportedModelError(
                f"{where}: {name}",
                found="a buffer without values",
                expected="buffers that follow from the config",
                remedy="this architecture needs an adapter of its own",
            )
    return model
