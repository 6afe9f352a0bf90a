"""The logits of a mixture's routers, of which transformers computes a loss that keeps the experts' loads even.

transformers records the outputs of modules of a class that the model declares, and computes the loss at the end of its
forward. Here blocks run one at a time, so the logits travel with the hidden state, and the stub of the last layer has a
module of that class, which returns them to transformers' own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from zo2core.errors import OptionError, UnsupportedModelError

_OPTION = "output_router_logits"  # of configs and forwards
_OUTPUT = "router_logits"


def without_router_losses(model: PreTrainedModel) -> Mapping[str, bool]:
    """The arguments with which a forward computes no router loss; none where the config does not ask for it."""
    asks = getattr(model.config.get_text_config(), _OPTION, False)
    return {_OPTION: False} if asks and _OPTION in inspect.signature(model.forward).parameters else {}


class RouterLogits:
    """The logits of all routers of a model whose config asks for their loss.

    Args:
        model: The skeleton, before its layers are replaced by stubs.
        layers: Its layers.

    Raises:
        UnsupportedModelError: if transformers does not record the routers of this model.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
        self.off = without_router_losses(model)
        self._recorder = _recorder(model) if self.off else None
        self._routed: list[torch.Tensor | None] = []
        routers = [] if self._recorder is None else [m for layer in layers for m in layer.modules() if self._is_router(m)]
        for number, router in enumerate(routers):
            router.register_forward_hook(self._hook(number))
        self.none: tuple[torch.Tensor | None, ...] = (None,) * len(routers)  # before the first block
        self._replay = self._stand_in() if routers else None

    def require_asked(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a call of the model that asks for router logits which the config does not ask for."""
        if arguments.get(_OPTION) and not self.none:
            raise UnsupportedModelError(
                f"the model's argument {_OPTION}",
                found="true, for a model whose blocks do not keep them",
                expected=f"{_OPTION}: true in a mixture's config.json",
                remedy="set it there, or leave the argument out",
            )

    def require_none(self, where: str, found: str) -> None:
        """Refuse what computes the loss from logits alone."""
        if self.none:
            expected = f"the model's own loss as a whole, since {_OPTION} is true in config.json"
            raise OptionError(where, found=found, expected=expected, remedy="leave it out, or set it to false there")

    @contextmanager
    def recorded(self, routed: Sequence[torch.Tensor | None]) -> Iterator[list[torch.Tensor | None]]:
        """A context in which a layer runs, whose routers' logits are added to those of the layers before."""
        self._routed = added = list(routed)
        try:
            yield added
        finally:
            self._routed = []

    def join(self, stub: nn.Module) -> None:
        """Give the last layer's stub a router, where transformers looks for one."""
        if self._replay is not None and self._recorder is not None:
            *path, name = (self._recorder.layer_name or "router").split(".")
            for part in path:  # a stub has the attributes of its layer, which ``add_module`` would not hide
                stub._modules[part] = stub = nn.Module()
            stub._modules[name] = self._replay

    def replay(self, routed: Sequence[torch.Tensor | None]) -> None:
        """Return the logits of all layers to transformers, in order, within its forward."""
        if self._replay is not None:
            for logits in routed:
                self._replay(logits)

    def _hook(self, number: int) -> Any:
        def record(module: nn.Module, inputs: object, output: Any) -> None:
            if self._routed:
                assert self._recorder is not None, "only recorded routers have hooks"
                self._routed[number] = output[self._recorder.index] if isinstance(output, tuple) else output

        return record

    def _is_router(self, module: nn.Module) -> bool:
        return self._recorder is not None and isinstance(module, self._recorder.target_class)

    def _stand_in(self) -> nn.Module:
        """A router without weights, which returns what it is given."""
        assert self._recorder is not None, "the model has routers"
        router = self._recorder.target_class.__new__(self._recorder.target_class)
        nn.Module.__init__(router)
        before = [None] * self._recorder.index
        router.forward = lambda logits: (*before, logits)
        return router


def _recorder(model: PreTrainedModel) -> OutputRecorder:
    """The declaration by which transformers records the routers."""
    for module in model.modules():
        declared = getattr(module, "_can_record_outputs", None) or {}
        if isinstance(module, PreTrainedModel) and isinstance(recorder := declared.get(_OUTPUT), OutputRecorder):
            return recorder
    raise UnsupportedModelError(
        f"model type {model.config.model_type}",
        found=f"{_OPTION}: true, and no routers that transformers records",
        expected="routers whose outputs the model's class declares",
        remedy=f"set {_OPTION} to false in config.json: the loss is then without that of the routers",
    )
