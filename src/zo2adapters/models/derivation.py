"""Where a decoder's parts are, learned from Hugging Face's own forward: a dry run on the meta device, with stubs for layers.

Modules that the forward calls before the first layer are the embedding, those after the last one the head. Each layer has to
get exactly what the one before returned, which nothing else may. What cannot be told apart so is refused: it takes a
declaration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from zo2adapters.models.architecture import Architecture
from zo2adapters.models.heads import CAUSAL_LM, Head
from zo2adapters.models.stubs import StandIn
from zo2core import UnsupportedModelError

_MOST_RETURNED = 3  # values that a layer returns, hidden states first
_QUESTIONS: dict[Any, type] = {
    torch.Tensor.__bool__: bool,
    torch.Tensor.__contains__: bool,
    torch.Tensor.__int__: int,
    torch.Tensor.__index__: int,
    torch.Tensor.__float__: float,
}
_KEEPING = (torch.Tensor.to, torch.Tensor.contiguous)  # return the tensor itself if it is as wanted
_UNPACKING = (torch.Tensor.__getitem__, torch.Tensor.__iter__, torch.Tensor.unbind)  # what is done to tuples
_TOKENS = 4  # of the dry run's one row
_SHORT_ROWS = 2  # of one token each, in another dry run


class _Seen:
    """What one dry run has seen."""

    def __init__(self, layers: int, returned: int) -> None:
        self.layers = layers
        self.returned = returned  # values in the tuple that a layer returns; 0: hidden states alone
        self.reached = 0  # layers called so far
        self.before: list[str] = []  # modules called before the first layer
        self.between: list[str] = []
        self.after: list[str] = []
        self.shapes: list[torch.Size] = []  # of the hidden states that each run gives the first layer
        self.passed: list[torch.Tensor] = []  # what each layer returned as hidden states
        self.embedded: dict[int, torch.Tensor] = {}  # by id: what parameters before the last layer have gone into
        self.others = [object() for _ in range(max(returned - 1, 0))]  # and what beside them

    def again(self) -> None:
        """Forget the calls of a run, for another one."""
        self.reached, self.before, self.between, self.after = 0, [], [], []
        self.passed, self.embedded = [], {}

    def called(self, name: str) -> None:
        """Note a call of a module that owns parameters."""
        place = self.before if self.reached == 0 else self.after if self.reached == self.layers else self.between
        place.append(name)


class _Loss:
    """Stands in for the model's loss function: notes what it is asked."""

    def __init__(self) -> None:
        self.logits: object = None
        self.labels: object = None
        self.value: object = None

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.logits, self.labels, self.value = logits, labels, logits.new_empty(())
        return self.value


class _Watch(TorchFunctionMode):
    """Sees that what the parts compute takes no other way than through the layers.

    A forward that asks for a value of the batch (is a row packed?) gets an answer: there is none on the meta device. Where
    the layers are does not depend on it; any answer will do that does not end in an error.
    """

    def __init__(self, seen: _Seen, *, answer: bool) -> None:
        super().__init__()
        self.seen = seen
        self.answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and args[0].is_meta:
            return self.answer if args[0].dtype is torch.bool else int(self.answer)
        if func in _QUESTIONS and args[0].is_meta:
            return _QUESTIONS[func](self.answer)
        result = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if results and not (func in _KEEPING and result is args[0]):
            self._follow(func, [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)], results)
        return result

    def _follow(self, func: Any, given: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        seen = self.seen
        is_past = seen.reached == seen.layers
        for index, hidden in enumerate(seen.passed[:-1] if is_past else seen.passed):
            if any(tensor is hidden for tensor in given):
                if func in _UNPACKING:
                    raise IndexError(f"layer {index} returned no tuple")
                raise _MismatchError(f"what layer {index} returned is used outside of layer {index + 1}")
        if is_past and any(id(tensor) in seen.embedded for tensor in given):
            raise _MismatchError("what is computed before the layers is used after them")
        if not is_past and any(isinstance(tensor, nn.Parameter) or id(tensor) in seen.embedded for tensor in given):
            seen.embedded |= {id(tensor): tensor for tensor in results}


class _MismatchError(Exception):
    """The layers do not follow each other as they would have to."""


class _DryLayer(StandIn):
    """Stands in for a layer of the dry run."""

    def __init__(self, layer: nn.Module, index: int, seen: _Seen) -> None:
        super().__init__(layer)
        self.index = index
        self.seen = seen

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Check the order, and return a tensor that can be told from all others."""
        seen = self.seen
        if self.index != seen.reached:
            raise _MismatchError(f"layer {self.index} is called after {seen.reached} layers")
        if self.index > 0 and hidden_states is not seen.passed[-1]:
            raise _MismatchError(f"layer {self.index} does not get what layer {self.index - 1} returned")
        if any(value is other for value in (*args, *kwargs.values()) for other in seen.others):
            raise _MismatchError(f"layer {self.index} gets more of layer {self.index - 1} than its hidden states")
        seen.shapes += [hidden_states.shape] if self.index == 0 else []
        seen.reached += 1
        passed = torch.empty(hidden_states.shape, dtype=hidden_states.dtype)
        seen.passed.append(passed)
        return passed if seen.returned == 0 else (passed, *seen.others)


def derive_architecture(model: PreTrainedModel, head: Head = CAUSAL_LM) -> Architecture:
    """Learn where a model's parts are.

    Args:
        model: From ``build_skeleton``. It is the same afterwards.
        head: What it ends in. That of a causal language model has to give the loss of the next token.

    Raises:
        UnsupportedModelError: naming what cannot be told apart.
    """
    where = f"model type {model.config.model_type}"
    path, layers = _outermost_layers(model, where)
    owners = {
        name: module
        for name, module in model.named_modules()
        if not f"{name}.".startswith(f"{path}.") and any(p is not None for p in module._parameters.values())
    }
    problem, mismatch, between = "", "", ""
    for returned, answer in product(range(_MOST_RETURNED + 1), (True, False)):
        seen = _Seen(len(layers), returned)
        try:
            with _stubbed(model, layers, owners, seen), _Watch(seen, answer=answer):
                is_next_token = _asks_for_next_token(model, learns=head is CAUSAL_LM)
                architecture = _architecture(model, path, owners, seen, where)
                if head is CAUSAL_LM:
                    seen.again()
                    _require_short_rows(model, where)
                    architecture = replace(architecture, axes=_axes(*seen.shapes, where=where))
        except UnsupportedModelError:
            raise
        except _MismatchError as error:
            mismatch, between = mismatch or str(error), between or next(iter(seen.between), "")
            continue
        except Exception as error:  # any: what a forward makes of a value that it does not expect is its own
            problem = problem or " ".join(f"{type(error).__name__}: {error}".split())[:200]
            continue
        if not is_next_token:
            raise _refused(where, "a loss other than that of the next token, as transformers computes it from all logits")
        return architecture
    if between:
        raise _refused(where, f"{between}, called between two layers")
    raise _refused(where, f"layers in {path} that do not follow each other ({mismatch or problem})")


def _outermost_layers(model: PreTrainedModel, where: str) -> tuple[str, nn.ModuleList]:
    """The list of layers with the most parameters among those that are in no other one."""
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((name, module))
    if not lists:
        raise _refused(where, "no list of layers")
    return max(lists, key=lambda pair: sum(parameter.numel() for parameter in pair[1].parameters()))


@contextlib.contextmanager
def _stubbed(model: nn.Module, layers: nn.ModuleList, owners: dict[str, nn.Module], seen: _Seen) -> Iterator[None]:
    """The model on the meta device with stubs for its layers, within the context."""
    own = list(layers)
    with contextlib.ExitStack() as undone:
        for name, module in owners.items():
            hook = module.register_forward_pre_hook(lambda module, inputs, name=name: seen.called(name))
            undone.callback(hook.remove)
        for index, layer in enumerate(own):
            layers[index] = _DryLayer(layer, index, seen)
            undone.callback(layers.__setitem__, index, layer)
        undone.enter_context(_all_on_meta(model))
        with torch.inference_mode(), torch.device("meta"):
            yield


def _run(model: nn.Module, *, rows: int, tokens: int, **inputs: torch.Tensor) -> Any:
    return model(input_ids=torch.zeros(rows, tokens, dtype=torch.int64), use_cache=False, **inputs)


def _require_short_rows(model: nn.Module, where: str) -> None:
    """Refuse a forward that takes no rows of one token: so final hidden states are brought to logits."""
    try:
        _run(model, rows=_SHORT_ROWS, tokens=1)
    except Exception as error:  # any, as in a dry run of longer rows
        raise _refused(where, f"a forward that takes no rows of one token ({type(error).__name__}: {error})") from error


def _axes(long: torch.Size, short: torch.Size, *, where: str) -> tuple[int, int]:
    """Along which axes of hidden states rows and tokens lie: those whose sizes are the batch's in both dry runs.

    Args:
        long: Shape of the hidden states of one row of ``_TOKENS`` tokens.
        short: Shape of those of ``_SHORT_ROWS`` rows of one token.
        where: For the error.

    Raises:
        UnsupportedModelError: if it cannot be told.
    """
    sizes = list(zip(long, short, strict=False))
    wanted = [(1, _SHORT_ROWS), (_TOKENS, 1)]
    others = [pair for pair in sizes if pair not in wanted]
    if len(long) != len(short) or len(sizes) != len(others) + 2 or any(first != second for first, second in others):
        found = f"hidden states of shape {list(long)} for a row of {_TOKENS} tokens, {list(short)} for {_SHORT_ROWS} of one"
        raise _refused(where, f"{found}: no axis of rows and one of tokens")
    rows, tokens = (sizes.index(pair) for pair in wanted)
    return rows, tokens


def _asks_for_next_token(model: nn.Module, *, learns: bool) -> bool:
    """Run the forward; whether its loss is the model's loss function of its logits and the labels, and nothing else.

    Labelled tokens are counted, and logits computed in chunks, on that ground. Of a model that does not learn next tokens
    nothing is asked.
    """
    if not learns:
        _run(model, rows=1, tokens=_TOKENS)
        return True
    loss, labels, own = _Loss(), torch.zeros(1, _TOKENS, dtype=torch.int64), vars(model).get("_loss_function")
    vars(model)["_loss_function"] = loss
    try:
        output = _run(model, rows=1, tokens=_TOKENS, labels=labels)
    finally:
        if own is None:
            del vars(model)["_loss_function"]
        else:
            vars(model)["_loss_function"] = own
    return loss.labels is labels and loss.logits is output.logits and loss.value is output.loss


@contextlib.contextmanager
def _all_on_meta(model: nn.Module) -> Iterator[None]:
    """Tensors without values, within the context: a forward whose tensors are on two devices would not run."""
    kept: list[tuple[Any, dict[str, Any]]] = []
    for module in model.modules():
        kept += [(tensors, dict(tensors)) for tensors in (module._buffers, module._parameters)]
    try:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to("meta")
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:  # such as norms, which begin as ones
                    module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        yield
    finally:
        for tensors, own in kept:
            tensors.update(own)


def _architecture(model: PreTrainedModel, path: str, owners: dict[str, nn.Module], seen: _Seen, where: str) -> Architecture:
    """What a run has seen, as a declaration; refused where a module is in no place, or in two."""
    if seen.reached != seen.layers:
        raise _MismatchError(f"{seen.reached} of {seen.layers} layers are called")
    if seen.between:
        raise _refused(where, f"{seen.between[0]}, called between two layers")
    both = [name for name in seen.before if name in seen.after]
    if both:
        raise _refused(where, f"{both[0]}, called before the layers and after them")
    called = {*seen.before, *seen.after}
    tied = {id(p) for name in called for p in owners[name]._parameters.values()}
    for name, module in owners.items():
        idle = [leaf for leaf, p in module._parameters.items() if p is not None and id(p) not in tied]
        if name not in called and idle:
            raise _refused(where, f"{name}.{idle[0]}, a parameter whose module is never called")
    return Architecture(
        model_type=model.config.model_type,
        embedding=tuple(dict.fromkeys(seen.before)),
        blocks=path,
        head=tuple(dict.fromkeys(seen.after)),
        returned=seen.returned,
    )


def _refused(where: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        where,
        found=found,
        expected="an embedding, a list of layers that each take what the one before returned, and a head",
        remedy="declare an Architecture and pass it to open_checkpoint; docs/models.md shows how",
    )
