"""A model built from its config alone: parameters without memory, buffers with the values that transformers gives them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from zo2adapters.models.heads import CAUSAL_LM, Head
from zo2core import UnsupportedModelError


class _ParametersOnMeta(TorchFunctionMode):
    """Uninitialised tensors go to the meta device, computed ones (rotary tables and other buffers) stay real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            kwargs = {**(kwargs or {}), "device": "meta"}
        return func(*args, **(kwargs or {}))


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


def build_skeleton(config: PretrainedConfig, dtype: torch.dtype, head: Head = CAUSAL_LM) -> PreTrainedModel:
    """Build a model whose parameters take no memory, ready to be cut.

    Args:
        config: The checkpoint's config. Remote code is not run.
        dtype: Dtype of the parameters, save those that transformers keeps in another one.
        head: What it ends in.

    Raises:
        UnsupportedModelError: if the model cannot be built so.
    """
    where = f"model type {config.model_type}"
    with _ParametersOnMeta():
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
