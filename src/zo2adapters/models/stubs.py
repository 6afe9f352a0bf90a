"""Stubs that stand in for a decoder's layers while Hugging Face's own forward runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zo2adapters.models.layer_calls import LayerCall
from zo2core.errors import UnsupportedModelError


class CutError(UnsupportedModelError):
    """Interrupts HF's forward at the last stub. Callers see it if they call the skeleton outside of a sweep."""

    def __init__(self) -> None:
        super().__init__(
            "the model's skeleton",
            found="a call outside of a sweep",
            expected="a call of the model that is passed to compute_loss",
            remedy="call that model; to generate, export it first",
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


class StandIn(nn.Module):
    """Replaces a layer inside HF's forward, with its attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not a submodule: its parameters are not this model's

    def __getattr__(self, name: str) -> Any:
        # HF's loops may read a layer's attributes, such as its kind of attention.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)


class Stub(StandIn):
    """Replaces a layer: records its call, or returns the final hidden state."""

    def __init__(self, layer: nn.Module, recorder: CallRecorder, *, last: bool, returned: int) -> None:
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
        else:
            recorder.calls.append((args, kwargs))
            if self.last:
                recorder.hidden = hidden_states
                raise CutError
        return (hidden_states, *[None] * (self.returned - 1)) if self.returned else hidden_states
