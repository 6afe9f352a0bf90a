"""Derive an ``Architecture`` from a dry run of Hugging Face's own forward on the meta device, with stubs for layers.

Modules that the forward calls before the first layer are the embedding, those after the last one the head. Each layer must
take exactly the output of the one before, and nothing else may use it. Models that do otherwise need a declaration.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from zo2adapters.models.architecture import Architecture
from zo2adapters.models.heads import CAUSAL_LM, Head
from zo2adapters.models.losses import without_router_losses
from zo2adapters.models.skeleton import StandIn
from zo2core.errors import UnsupportedModelError

_MAX_RETURNED = 3  # length of the tuple that a layer returns
_VALUE_READS: dict[Any, type] = {
    torch.Tensor.__bool__: bool,
    torch.Tensor.__contains__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__index__: int,
    torch.Tensor.__float__: float,
}
_IDENTITY_OPS = (torch.Tensor.to, torch.Tensor.contiguous)  # may return the tensor itself
_TUPLE_OPS = (torch.Tensor.__getitem__, torch.Tensor.__iter__, torch.Tensor.unbind)  # operations that unpack tuples
_TOKENS = 4  # in the one row of the dry run
_SHORT_ROWS = 2  # rows of one token each in a second dry run


class _DryRun(TorchFunctionMode):
    """Forwards of a copy of a model on the meta device, with stubs for its layers, and the record of the last one.

    Data may flow from part to part only through the layers' hidden states. Meta tensors have no values. Where the forward
    reads one (is a row packed?), it gets ``read_as``, on which the place of the layers does not depend; if that leads to an
    error, the caller tries the other value.
    """

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList, returned: int, *, read_as: bool) -> None:
        super().__init__()
        self.read_as = read_as
        self.returned = returned  # length of the tuple that a layer returns; 0: a bare tensor
        self.others = [object() for _ in range(max(returned - 1, 0))]  # the other values of a layer's tuple
        self.shapes: list[torch.Size] = []  # hidden states' shape before the first layer, for each forward
        self.layers = len(layers)
        stubs = nn.ModuleList(_DryLayer(layer, index, self) for index, layer in enumerate(layers))
        copy: nn.Module = deepcopy(model, {id(layers): stubs})
        self.model: Any = copy.to("meta")  # with tensors on two devices its forward would not run
        modules = self.model.named_modules()
        self.owners = {name: module for name, module in modules if any(p is not None for p in module._parameters.values())}
        for name, module in self.owners.items():
            module.register_forward_pre_hook(partial(self._called, name))

    def forward(self, rows: int, tokens: int, **inputs: torch.Tensor) -> Any:
        """Run the forward."""
        self.reached = 0  # layers called so far
        self.before: list[str] = []  # modules called before the first layer
        self.between: list[str] = []
        self.after: list[str] = []
        self.layer_outputs: list[torch.Tensor] = []  # each layer's hidden states
        self.from_embedding: dict[int, torch.Tensor] = {}  # by id: tensors computed from parameters before the last layer
        off = without_router_losses(self.model)
        with torch.inference_mode(), torch.device("meta"), self:
            ids = torch.zeros(rows, tokens, dtype=torch.int64)
            return self.model(input_ids=ids, use_cache=False, **off, **inputs)

    def _called(self, name: str, module: nn.Module, inputs: object) -> None:
        names = self.before if self.reached == 0 else self.after if self.reached == self.layers else self.between
        names.append(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and args[0].is_meta:
            return self.read_as if args[0].dtype is torch.bool else int(self.read_as)
        if func in _VALUE_READS and args[0].is_meta:
            return _VALUE_READS[func](self.read_as)
        result = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if results and not (func in _IDENTITY_OPS and result is args[0]):
            self._follow(func, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)], results)
        return result

    def _follow(self, func: Any, arguments: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        is_past = self.reached == self.layers
        for index, hidden in enumerate(self.layer_outputs[:-1] if is_past else self.layer_outputs):
            if any(tensor is hidden for tensor in arguments):
                if func in _TUPLE_OPS:
                    raise IndexError(f"layer {index} returned no tuple")
                raise _MismatchError(f"what layer {index} returned is used outside of layer {index + 1}")
        is_from_embedding = any(id(tensor) in self.from_embedding for tensor in arguments)
        if is_past and is_from_embedding:
            raise _MismatchError("what is computed before the layers is used after them")
        if not is_past and (is_from_embedding or any(isinstance(tensor, nn.Parameter) for tensor in arguments)):
            self.from_embedding |= {id(tensor): tensor for tensor in results}


class _MismatchError(Exception):
    """A layer does not take exactly the output of the one before."""


class _DryLayer(StandIn):
    """Stands in for a layer of the dry run."""

    def __init__(self, layer: nn.Module, index: int, run: _DryRun) -> None:
        super().__init__(layer)
        self.index = index
        self.run = run

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Check the order of calls, and return a new tensor."""
        run = self.run
        if self.index != run.reached:
            raise _MismatchError(f"layer {self.index} is called after {run.reached} layers")
        if self.index > 0 and hidden_states is not run.layer_outputs[-1]:
            raise _MismatchError(f"layer {self.index} does not get what layer {self.index - 1} returned")
        if any(value is other for value in (*args, *kwargs.values()) for other in run.others):
            raise _MismatchError(f"layer {self.index} gets more of layer {self.index - 1} than its hidden states")
        run.shapes += [hidden_states.shape] if self.index == 0 else []
        run.reached += 1
        output = torch.empty(hidden_states.shape, dtype=hidden_states.dtype)
        run.layer_outputs.append(output)
        return output if run.returned == 0 else (output, *run.others)


def derive_architecture(model: PreTrainedModel, head: Head = CAUSAL_LM) -> Architecture:
    """Derive where a model's parts are."""
    where = f"model type {model.config.model_type}"
    path, layers = _outermost_layers(model, where)
    problem, mismatch, between = "", "", ""
    for returned, read_as in product(range(_MAX_RETURNED + 1), (True, False)):
        run = _DryRun(model, layers, returned, read_as=read_as)
        try:
            is_next_token = head is not CAUSAL_LM or _has_next_token_loss(run)
            if head is not CAUSAL_LM:
                run.forward(1, _TOKENS)
            architecture = _architecture(run, path, where)
            if head is CAUSAL_LM:
                architecture = replace(architecture, axes=_axes(run, where))
        except UnsupportedModelError:
            raise
        except _MismatchError as error:
            mismatch, between = mismatch or str(error), between or next(iter(run.between), "")
            continue
        except Exception as error:  # any: unexpected values lead forwards to all kinds of errors
            problem = problem or " ".join(f"{type(error).__name__}: {error}".split())[:200]
            continue
        if not is_next_token:
            raise _refused(where, "a loss other than that of the next token, as transformers computes it from all logits")
        return architecture
    if between:
        raise _refused(where, f"{between}, called between two layers")
    raise _refused(where, f"layers in {path} that do not follow each other ({mismatch or problem})")


def _outermost_layers(model: PreTrainedModel, where: str) -> tuple[str, nn.ModuleList]:
    """The list of layers with the most parameters, of those not nested in another list."""
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((name, module))
    if not lists:
        raise _refused(where, "no list of layers")
    return max(lists, key=lambda pair: sum(parameter.numel() for parameter in pair[1].parameters()))


def _has_next_token_loss(run: _DryRun) -> bool:
    """Run the forward, and return whether its loss is exactly the model's loss function of logits and labels.

    Counting labelled tokens and computing logits in chunks rely on that. Models with other heads need no such loss.
    """
    calls: list[tuple[torch.Tensor, ...]] = []

    def loss(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((logits, labels, logits.new_empty(())))
        return calls[-1][-1]

    vars(run.model)["_loss_function"], labels = loss, torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    output = run.forward(1, _TOKENS, labels=labels)
    expected = output.logits, labels, output.loss
    return bool(calls) and all(tensor is other for tensor, other in zip(calls[-1], expected, strict=True))


def _axes(run: _DryRun, where: str) -> tuple[int, int]:
    """Find the axes of rows and of tokens in hidden states: those whose sizes are the batch's in both dry runs.

    The second one has rows of one token, which is how logits of final hidden states are computed.
    """
    try:
        run.forward(_SHORT_ROWS, 1)
    except Exception as error:  # any, as in a dry run of longer rows
        raise _refused(where, f"a forward that takes no rows of one token ({type(error).__name__}: {error})") from error
    long, short = run.shapes
    sizes, expected_sizes = list(zip(long, short, strict=False)), [(1, _SHORT_ROWS), (_TOKENS, 1)]
    others = [pair for pair in sizes if pair not in expected_sizes]
    if len(long) != len(short) or len(sizes) != len(others) + 2 or any(first != second for first, second in others):
        found = f"hidden states of shape {list(long)} for a row of {_TOKENS} tokens, {list(short)} for {_SHORT_ROWS} of one"
        raise _refused(where, f"{found}: no axis of rows and one of tokens")
    rows, tokens = (sizes.index(pair) for pair in expected_sizes)
    return rows, tokens


def _architecture(run: _DryRun, path: str, where: str) -> Architecture:
    """Make a declaration of a dry run, in which each module must be called, and on one side of the layers only."""
    if run.reached != run.layers:
        raise _MismatchError(f"{run.reached} of {run.layers} layers are called")
    if run.between:
        raise _refused(where, f"{run.between[0]}, called between two layers")
    both = [name for name in run.before if name in run.after]
    if both:
        raise _refused(where, f"{both[0]}, called before the layers and after them")
    called = {*run.before, *run.after}
    tied = {id(p) for name in called for p in run.owners[name]._parameters.values()}
    for name, module in run.owners.items():
        idle = [leaf for leaf, p in module._parameters.items() if p is not None and id(p) not in tied]
        if name not in called and idle:
            raise _refused(where, f"{name}.{idle[0]}, a parameter whose module is never called")
    return Architecture(
        model_type=run.model.config.model_type,
        embedding=tuple(dict.fromkeys(run.before)),
        blocks=path,
        head=tuple(dict.fromkeys(run.after)),
        returned=run.returned,
    )


def _refused(where: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        where,
        found=found,
        expected="an embedding, a list of layers that each take the output of the one before, and a head",
        remedy="declare an Architecture and pass it to open_checkpoint; docs/models.md shows how",
    )
