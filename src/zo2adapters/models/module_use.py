"""How a model's forward uses its modules, found by running it once on the meta device.

A forward may take a layer's weight without calling the layer (``self.dt_proj.weight @ x``), or
never use a layer at all (an adapter of another layer, in what Zamba2's layers share). What changes
a layer's output then has no effect, although its parameters are trained: an adapter's drift in
zeroth-order steps, and are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from contextlib import suppress
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from zo2adapters.models.architecture import Architecture
from zo2adapters.models.batches import without_router_losses
from zo2adapters.models.meta_forward import MetaForward, meta_copy

_TOKENS = 4


class ModuleUse(NamedTuple):
    """What one forward of text shows.

    Modules are known by the paths that ``named_modules`` gives them. Only those with parameters of
    their own are looked at.
    """

    # never called, although the module that would call them ran to its end; without the parts of
    # the embedding that text does not reach, such as a vision tower
    idle: frozenset[str]
    # parameters that are read while no module that has them runs, and by which function
    read_outside: Mapping[str, str]


# What this process has found. The keys are values, all that a forward's calls follow from.
_FOUND: dict[Hashable, ModuleUse] = {}


def module_use(model: PreTrainedModel, architecture: Architecture) -> ModuleUse:
    """Run a model's forward on the meta device, once in a process for models that are alike.

    A layer that cannot run there is left where it fails: what it has not reached is not said to be
    idle.
    """
    structure = _structure(model, architecture)
    if structure not in _FOUND:
        _FOUND[structure] = _module_use(model, architecture)
    return _FOUND[structure]


def _structure(model: PreTrainedModel, architecture: Architecture) -> Hashable:
    """The model's config, and its modules with their parameters and their code, without the model,
    which would stay in memory.
    """
    modules = (
        (path, type(module), type(module).forward, type(vars(module).get("forward")))
        for path, module in model.named_modules()
    )
    parameters = (name for name, _ in model.named_parameters(remove_duplicate=False))
    parts = (architecture.blocks, architecture.returned, tuple(architecture.embedding))
    return (model.config.to_json_string(), parts, tuple(modules), tuple(parameters))


def _module_use(model: PreTrainedModel, architecture: Architecture) -> ModuleUse:
    run = _RecordedForward(model, architecture)
    run.forward()
    unseen = [
        path
        for path in architecture.embedding
        if not any(_contains(path, called) for called in run.called)
    ]
    idle = {
        path
        for path in run.owners
        if path not in run.called
        and _around(path, run.called) in run.ended
        and not any(_contains(part, path) for part in unseen)
    }
    return ModuleUse(frozenset(idle), run.read_outside)


def _contains(outer: str, path: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _around(path: str, called: Collection[str]) -> str:
    """The innermost module around another that was called; the model itself, if none was."""
    while path:
        path = path.rpartition(".")[0]
        if path in called:
            break
    return path


class _RecordedForward(MetaForward):
    """A forward on the meta device, and the record of the modules that run in it."""

    def __init__(self, model: PreTrainedModel, architecture: Architecture) -> None:
        super().__init__(read_as=True)
        self.called: set[str] = set()
        self.ended: set[str] = set()  # modules that have run to their end
        self.read_outside: dict[str, str] = {}
        # in 16 bits: products of stacks of experts take no others there
        self.model: Any = meta_copy(model).to(torch.bfloat16)
        self.owners: set[str] = set()
        # names of parameters and modules that have them, by the parameters' ids
        self._places: dict[int, tuple[str, list[nn.Module]]] = {}
        self._running: list[nn.Module] = []
        layers: Any = self.model.get_submodule(architecture.blocks)
        for path, module in self.model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                self.owners.add(path)
                place = self._places.setdefault(id(parameter), (f"{path}.{leaf}", []))
                place[1].append(module)
            is_layer = any(module is layer for layer in layers)
            unchanged = partial(_unchanged, architecture.returned)
            self._record(path, module, unchanged if is_layer else None)

    def forward(self) -> None:
        """Run the forward of one row of text, as far as it runs without values."""
        off = without_router_losses(self.model)
        with torch.inference_mode(), torch.device("meta"), self:
            ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
            with suppress(Exception):  # any, as within a layer: the record says how far it came
                self.model(input_ids=ids, use_cache=False, **off)

    def followed(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """See the base class: parameters that a result is computed from are read."""
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            return
        for leaf in tree_leaves((args, kwargs)):
            name, modules = self._places.get(id(leaf), ("", []))
            if modules and not any(module in self._running for module in modules):
                self.read_outside.setdefault(name, getattr(func, "__name__", str(func)))

    def _record(self, path: str, module: Any, otherwise: Callable[..., Any] | None) -> None:
        """Record the calls of a module's forward, also those that leave its hooks out.

        Args:
            path: The module's path.
            module: The module.
            otherwise: Gives the output in place of a forward that needs values; None: none does.
        """
        forward = module.forward

        @wraps(forward)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.called.add(path)
            self._running.append(module)
            try:
                output = forward(*args, **kwargs)
            except Exception:  # any: values that are not there lead to all kinds of errors
                if otherwise is None:
                    raise
                return otherwise(*args)
            finally:
                self._running.pop()
            self.ended.add(path)
            return output

        module.forward = recorded


def _unchanged(returned: int, hidden: torch.Tensor, *others: object) -> Any:
    """A layer's input in the form of its output."""
    return (hidden, *[None] * (returned - 1)) if returned else hidden
