"""A function that calls the model, run segment by segment: somebody else's loss, without a line of it written again.

Such a function, a trainer's ``compute_loss`` say, calls the model once and makes something of what it returns. It is asked
twice. Before the first sweep it is left as soon as it calls the model: so it is learned what the embedding takes. In the
head's visit the model answers it with what Hugging Face's own forward makes of the last layer's output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zo2adapters.models.footprint import forward_bytes
from zo2adapters.models.hf import Activations, HFBlockModel
from zo2adapters.models.prepared_batch import branches_of
from zo2core import Batch, BatchError, UnsupportedModelError

Call = Callable[[Any, dict[str, Any]], Any]  # of the model and a batch

_OF_THE_HEAD = {  # arguments that decide nothing before the last layer's output
    *("labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "fused_lm_head", "use_cache", "return_dict"),
}


class _LeaveError(Exception):
    """Leaves the function as soon as it calls the model."""


class CalledModel:
    """What the function takes for the model: it is called as the model is, and has its attributes.

    Args:
        model: The model.
        answer: What calls it, with the arguments by name.
    """

    def __init__(self, model: HFBlockModel, answer: Callable[..., Any]) -> None:
        self._skeleton = model.skeleton
        self._answer = answer

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the model."""
        places = inspect.signature(type(self._skeleton).forward).bind_partial(self._skeleton, *arguments).arguments
        return self._answer(**dict(list(places.items())[1:]), **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._skeleton, name)


class CalledBatch(dict[str, Any]):
    """A batch as the function takes it, and as the function passes it on to the model.

    Args:
        batch: What the function takes; entries may be anything.
        inputs: What the model's forward takes up to its first layer, prepared.
    """

    def __init__(self, batch: Batch, inputs: Batch) -> None:
        super().__init__(batch)
        self.inputs = inputs


class CalledForward:
    """A forward that ends in what a function makes of the model. See ``Forward``.

    Args:
        model: The model.
        call: Takes the model and a batch of its own, as a dictionary. It calls the model, once or more often, but always
            with the same tokens; what it returns is what the head gives.
        keeps_logits: Whether what it returns holds all logits, which then stay until the sweep is over.
    """

    def __init__(self, model: HFBlockModel, call: Call, *, keeps_logits: bool = False) -> None:
        self._model = model
        self._keeps_logits = keeps_logits
        self._call = call
        self.block = model.block

    def prepared(self, batch: Batch) -> Batch:
        """Learn what the function passes to the model, and check it. See the contract.

        Raises:
            BatchError: if the model cannot take it.
            UnsupportedModelError: if the function does not call the model, or asks it for more than its layers give.
        """
        passed: dict[str, Any] = {}

        def leave(**inputs: Any) -> None:
            passed.update(inputs)
            raise _LeaveError

        try:
            self._call(CalledModel(self._model, leave), dict(batch))
        except _LeaveError:
            inputs = {key: value for key, value in passed.items() if _goes_to_the_layers(key, value)}
            return CalledBatch(batch, self._model.prepared_inputs(inputs))
        raise UnsupportedModelError(
            "what is called with the model",
            found="a function that returned without calling it",
            expected="a function of what the model returns",
            remedy="call the model within it",
        )

    def embed(self, batch: Batch) -> Activations:
        """Run what comes before the layers on what the function passes to the model."""
        return self._model.embed(_inputs(batch))

    def head(self, batch: Batch, activations: Activations) -> Any:
        """Run the function; the model that it calls goes on from the last layer's output."""
        inputs = _inputs(batch)

        def answer(**again: Any) -> Any:
            _require_same(inputs, again)
            with branches_of(inputs):
                output = self._model.epilogue(activations.hidden, **again)
            return _in_float32(output) if self._model.autocast is not None else output

        return self._call(CalledModel(self._model, answer), dict(batch))

    def forward_bytes(self, batch: Batch) -> int:
        """Expected bytes, with all logits. See the contract."""
        if self._model.loss_chunk is None:
            return self._model.forward_bytes(_inputs(batch))
        rows, tokens = _inputs(batch)["input_ids"].shape
        return forward_bytes(self._model.config, rows, tokens)

    def held_bytes(self, batch: Batch) -> int:
        """Expected bytes, with the logits that are kept. See the contract."""
        inputs = _inputs(batch)
        kept = inputs["input_ids"].numel() * self._model.config.get_text_config().vocab_size * 4 if self._keeps_logits else 0
        return self._model.held_bytes(inputs) + kept


def _inputs(batch: Batch) -> Batch:
    assert isinstance(batch, CalledBatch), "a batch is prepared before it runs"
    return batch.inputs


def _goes_to_the_layers(key: str, value: Any) -> bool:
    """Whether an argument of the model's forward decides what its layers compute.

    Raises:
        UnsupportedModelError: if it asks for what comes out of the layers beside their output.
    """
    if key in _OF_THE_HEAD or value is None or value is False:
        return False
    if isinstance(value, torch.Tensor):
        return True
    raise UnsupportedModelError(
        f"the model's argument {key}",
        found=repr(value)[:80],
        expected="tensors, which go through the layers one after the other",
        remedy="turn off what asks for it: attentions, hidden states or a router's logits are not kept",
    )


def _require_same(inputs: Batch, again: Mapping[str, Any]) -> None:
    """Refuse a call of the model with other inputs than those that went through the layers."""
    for key in inputs.keys() | {key for key, value in again.items() if _goes_to_the_layers(key, value)}:
        first, second = inputs.get(key), again.get(key)
        if first is not second and (first is None or second is None or not torch.equal(first, second)):
            raise BatchError(
                f"batch[{key!r}]",
                found="another one in a second call of the model",
                expected="the same in each call within one loss",
                remedy="join both into one batch, or compute one of them beforehand",
            )


def _in_float32(output: Any) -> Any:
    """What a forward under autocast returns to a loss that is computed without: as accelerate hands it on."""
    halves = (torch.bfloat16, torch.float16)
    return tree_map_only(torch.Tensor, lambda value: value.float() if value.dtype in halves else value, output)
