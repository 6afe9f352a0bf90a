"""A forward that ends in a function that calls the model, such as a trainer's ``compute_loss``, run segment by segment.

The function runs twice. Before the first sweep it is interrupted where it calls the model, to get the arguments.
In the head's visit its call returns what Hugging Face's forward computes from the last layer's output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zo2adapters.models.batches import branches_of
from zo2adapters.models.footprint import forward_bytes
from zo2adapters.models.hf import Activations, HFBlockModel
from zo2core import Batch
from zo2core.errors import BatchError, UnsupportedModelError

Call = Callable[[Any, dict[str, Any]], Any]  # takes the model and a batch

_HEAD_ARGUMENTS = {  # arguments of the model's forward that have no effect before the last layer's output
    *("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "fused_lm_head", "use_cache", "return_dict"),
    "output_router_logits",
}


class _LeaveError(Exception):
    """Interrupts the function where it calls the model."""


class CalledModel:
    """Stands in for the model in the function: it has the model's attributes, and calls are passed on."""

    def __init__(self, model: HFBlockModel, on_call: Callable[..., Any]) -> None:
        self._skeleton = model.skeleton
        self._on_call = on_call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the model."""
        by_name = inspect.signature(type(self._skeleton).forward).bind_partial(self._skeleton, *arguments).arguments
        return self._on_call(**dict(list(by_name.items())[1:]), **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._skeleton, name)


class CalledBatch(dict[str, Any]):
    """The function's batch, and the inputs that the function passes to the model."""

    def __init__(self, batch: Batch, inputs: Batch) -> None:
        super().__init__(batch)
        self.inputs = inputs


class CalledForward:
    """A forward that ends in a function of the model. See ``Forward``.

    Args:
        model: The model.
        call: A function of the model and a batch (a dictionary). It may call the model several times, but always with the
            same tokens; its result is the head's result.
        keeps_logits: Whether the function's result holds all logits, which then stay in memory until the sweep ends.
    """

    def __init__(self, model: HFBlockModel, call: Call, *, keeps_logits: bool = False) -> None:
        self._model = model
        self._keeps_logits = keeps_logits
        self._call = call
        self.block = model.block

    def prepared(self, batch: Batch) -> Batch:
        """Record and check what the function passes to the model. See the contract.

        Raises:
            BatchError: if the model cannot take it.
            UnsupportedModelError: if the function does not call the model, or requests outputs that are not kept.
        """
        passed: dict[str, Any] = {}

        def leave(**inputs: Any) -> None:
            passed.update(inputs)
            raise _LeaveError

        try:
            self._call(CalledModel(self._model, leave), dict(batch))
        except _LeaveError:
            self._model.routers.require_asked(passed)
            inputs = {key: value for key, value in passed.items() if _affects_layers(key, value)}
            return CalledBatch(batch, self._model.prepared_inputs(inputs))
        raise UnsupportedModelError(
            "what is called with the model",
            found="a function that returned without calling it",
            expected="a function of what the model returns",
            remedy="call the model within it",
        )

    def embed(self, batch: Batch) -> Activations:
        """Run the embedding on the inputs that the function passes to the model."""
        return self._model.embed(_inputs(batch))

    def head(self, batch: Batch, activations: Activations) -> Any:
        """Run the function; its call of the model continues from the last layer's output."""
        inputs = _inputs(batch)

        def resume(**arguments: Any) -> Any:
            _require_same(inputs, arguments)
            with branches_of(inputs):
                output = self._model.epilogue(activations, **arguments)
            return _in_float32(output) if self._model.autocast is not None else output

        return self._call(CalledModel(self._model, resume), dict(batch))

    def forward_bytes(self, batch: Batch) -> int:
        """Return the expected bytes, with all logits. See the contract."""
        if self._model.loss_chunk is None:
            return self._model.forward_bytes(_inputs(batch))
        rows, tokens = _inputs(batch)["input_ids"].shape
        return forward_bytes(self._model.config, rows, tokens)

    def held_bytes(self, batch: Batch) -> int:
        """Return the expected bytes, with the logits that are kept. See the contract."""
        inputs = _inputs(batch)
        kept = inputs["input_ids"].numel() * self._model.config.get_text_config().vocab_size * 4 if self._keeps_logits else 0
        return self._model.held_bytes(inputs) + kept


def _inputs(batch: Batch) -> Batch:
    assert isinstance(batch, CalledBatch), "a batch is prepared before it runs"
    return batch.inputs


def _affects_layers(key: str, value: Any) -> bool:
    """Whether an argument of the model's forward affects what its layers compute."""
    if key in _HEAD_ARGUMENTS or value is None or value is False:
        return False
    if isinstance(value, torch.Tensor):
        return True
    raise UnsupportedModelError(
        f"the model's argument {key}",
        found=repr(value)[:80],
        expected="tensors, which go through the layers one after the other",
        remedy="leave it out: attentions, hidden states and router logits are not kept",
    )


def _require_same(inputs: Batch, arguments: Mapping[str, Any]) -> None:
    """Refuse a call of the model with other inputs than those that the layers have run on."""
    for key in inputs.keys() | {key for key, value in arguments.items() if _affects_layers(key, value)}:
        first, second = inputs.get(key), arguments.get(key)
        if first is not second and (first is None or second is None or not torch.equal(first, second)):
            raise BatchError(
                f"batch[{key!r}]",
                found="different values in a second call of the model",
                expected="the same values in each call within one loss",
                remedy="join both into one batch, or compute one of the calls beforehand",
            )


def _in_float32(output: Any) -> Any:
    """Convert 16-bit outputs of a forward under autocast to float32, as accelerate does."""
    halves = (torch.bfloat16, torch.float16)
    return tree_map_only(torch.Tensor, lambda value: value.float() if value.dtype in halves else value, output)
