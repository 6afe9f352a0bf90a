"""Stubs that stand in for a decoder's layers while Hugging Face's own forward runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zo2core import UnsupportedModelError


class CutError(UnsupportedModelError):
    """Leaves HF's forward after the last stub; whoever calls the skeleton outside of a sweep sees it."""

    def __init__(self) -> None:
        super().__init__(
            "the model's skeleton",
            found="a call outside of a sweep",
            expected="a call of the model that compute_loss is passed",
            remedy="call that one; to generate, export the model",
        )


class CallRecorder:
    """What the stubs of one model share."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was recorded."""
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.hidden: torch.Tensor | None = None  # what reached the last layer
        self.final: torch.Tensor | None = None  # set during the epilogue


class StandIn(nn.Module):
    """Takes a layer's place inside HF's forward, and answers for it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not a submodule: its parameters are not this model's

    def __getattr__(self, name: str) -> Any:
        # HF's loops may ask a layer for an attribute, such as its kind of attention.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)


class Stub(StandIn):
    """Stands in for a layer: records its call, or returns the final hidden state."""

    def __init__(self, layer: nn.Module, recorder: CallRecorder, *, last: bool, returned: int) -> None:
        super().__init__(layer)
        self.recorder = recorder
        self.last = last
        self.returned = returned

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Take the place of the layer's forward."""
        recorder = self.recorder
        if recorder.final is not None:
            hidden_states = recorder.final
        else:
            recorder.calls.append((args, kwargs))
            if self.last:
                recorder.hidden = hidden_states
                raise CutError
        return (hidden_states, *[None] * (self.returned - 1)) if self.returned else hidden_states
