"""Forwards of a copy of a model on the meta device, where tensors have shapes and no values."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_VALUE_READS: dict[Any, type] = {
    torch.Tensor.__bool__: bool,
    torch.Tensor.__contains__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__index__: int,
    torch.Tensor.__float__: float,
}


def meta_copy(model: nn.Module, replaced: Mapping[int, nn.Module] | None = None) -> nn.Module:
    """A copy of a model whose tensors take no memory.

    Args:
        model: The model, which stays as it is.
        replaced: Modules that take the place of the model's own, by the ids of those.
    """
    memo: dict[int, Any] = dict(replaced or {})
    for parameter in model.parameters():
        meta = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    copy: nn.Module = deepcopy(model, memo)
    return copy.to("meta")  # the buffers: with tensors on two devices its forward would not run


class MetaForward(TorchFunctionMode):
    """A context for forwards on the meta device.

    Where a forward reads a tensor's value (is a row packed?), it gets ``read_as``, on which the
    order of the model's parts does not depend.
    """

    def __init__(self, *, read_as: bool) -> None:
        super().__init__()
        self.read_as = read_as

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and args[0].is_meta:
            return self.read_as if args[0].dtype is torch.bool else int(self.read_as)
        if func in _VALUE_READS and args[0].is_meta:
            return _VALUE_READS[func](self.read_as)
        result = func(*args, **(kwargs or {}))
        self.followed(func, args, kwargs or {}, result)
        return result

    def followed(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Look at a call of a function that has returned."""
