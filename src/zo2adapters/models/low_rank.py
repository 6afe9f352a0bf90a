"""Directions beside the activations of Hugging Face's modules: their forwards, with what a direction adds.

Each kind of module is handled once for all architectures, by a forward of its own that stands before the module's. The rows
of what it is given belong to streams, in order, as many each; every stream has factors of its own. The order of sums is part
of the contract: a module's own product first, then one product with all thin columns, the bias among them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from zo2core import UnsupportedModelError
from zo2core.perturbation import Factors, Moved

_PROBED_STREAMS, _PROBED_ROWS = 2, 3


class LowRankModules:
    """The modules of a model that own parameters, patched: unless told otherwise they do what they did.

    Args:
        modules: All of a model, by their paths. Their forwards are replaced.

    Raises:
        UnsupportedModelError: naming a module that cannot take a direction beside its activations.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._patches: dict[str, _Patch] = {}  # by the module's path
        self._batch = _Shape()
        self._moved: list[_Patch] = []
        patched: dict[int, _Patch] = {}
        for path, module in modules.items():
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            if id(module) not in patched:
                patched[id(module)] = _patch(path, module, self._batch)
            self._patches[path] = patched[id(module)]
        for patch in patched.values():
            patch.install()

    def begin(self, rows: int, tokens: int) -> None:
        """Tell the shape of the batch whose forward begins, by which a stream is known."""
        self._batch.rows, self._batch.tokens = rows, tokens

    def perturb(self, moved: Mapping[str, Moved], streams: int) -> None:
        """Move these parameters, and no others, in the next forwards.

        Args:
            moved: By the parameter's path in the model.
            streams: In the batches to come.
        """
        for patch in self._moved:
            patch.rest()
        by_module: dict[str, dict[str, Moved]] = {}
        for name, value in moved.items():
            path, _, leaf = name.rpartition(".")
            by_module.setdefault(path, {})[leaf] = value
        self._moved = [self._patches[path] for path in by_module]
        for patch, values in zip(self._moved, by_module.values(), strict=True):
            patch.take(values, streams)


def tell_shape(modules: LowRankModules | None, tokens: torch.Tensor) -> None:
    """Tell patched modules, if they are, that a forward of (rows, tokens, ...) begins."""
    if modules is not None:
        modules.begin(*tokens.shape[:2])


class _Shape:
    """The shape of the batch that runs."""

    rows = tokens = 1


class _Patch(ABC):
    """A module's forward, and the one that stands before it."""

    def __init__(self, path: str, module: nn.Module, batch: _Shape) -> None:
        self.path = path
        self.batch = batch
        self.module = module
        self.own: Callable[..., torch.Tensor] = module.forward
        self.moved: dict[str, Moved] = {}
        self.streams = 1

    def install(self) -> None:
        """Stand before the module's forward."""
        self.module.forward = self._forward

    def take(self, moved: dict[str, Moved], streams: int) -> None:
        """Move the module's parameters in the next forwards."""
        self.moved, self.streams = moved, streams

    def rest(self) -> None:
        """Move nothing in the next forwards, and keep no memory for it: every block has modules of its own."""
        self.moved = {}

    def _forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.forward(*args, **kwargs) if self.moved else self.own(*args, **kwargs)

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the module gives where its parameters are moved."""

    def _factors(self) -> Factors:
        weight = self.moved["weight"]
        assert isinstance(weight, Factors)
        return weight

    def _values(self, leaf: str) -> torch.Tensor | None:
        values = self.moved.get(leaf)
        assert not isinstance(values, Factors)
        return values

    def _by_stream(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, ..., n), or all tokens in a row (rows x tokens, n), to (streams, what is a stream's, n)."""
        self._require_in_order(rows)
        return rows.reshape(self.streams, -1, rows.shape[-1])

    def _require_in_order(self, rows: torch.Tensor) -> None:
        """Refuse what is not the batch's rows in their order: tokens before rows, say, or an expert's tokens.

        Raises:
            UnsupportedModelError: naming the module.
        """
        shape = self.batch
        in_a_row = rows.dim() == 2 and rows.shape[0] == shape.rows * shape.tokens
        if self.streams > 1 and rows.shape[0] != shape.rows and not in_a_row:
            raise UnsupportedModelError(
                self.path,
                found=f"input of shape {list(rows.shape)} in a batch of {shape.rows} rows of {shape.tokens} tokens",
                expected="the batch's rows, one after the other, for directions beside the activations",
                remedy="leave --rank out, or use DensePerturbation(): directions in the weights take any layer",
            )


class _Linear(_Patch):
    """``x W^T + [x V, 1] [C, b]^T`` with C and b of each stream."""

    def take(self, moved: dict[str, Moved], streams: int) -> None:
        """Lay the bias behind the factors, each as a row: both are added in one product, which is fastest from rows."""
        super().take(moved, streams)
        rows, bias = self._factors().own.transpose(1, 2), self._values("bias")
        self._columns = rows.contiguous() if bias is None else torch.cat([rows, bias[:, None]], dim=1)

    def rest(self) -> None:
        """As above."""
        super().rest()
        del self._columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        module, shared = self.module, self._factors().shared
        out = functional.linear(x, module.weight)  # type: ignore[arg-type]
        thin = self._by_stream(x) @ shared
        if "bias" in self.moved:
            thin = functional.pad(thin, (0, 1), value=1.0)
        self._by_stream(out).baddbmm_(thin, self._columns)
        return out


class _Conv1D(_Patch):
    """``x W + (x C) V^T + b``: the weight of GPT-2's layers is (inputs, outputs)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        module, (own, shared) = self.module, self._factors()
        weight, bias = module.weight, self._values("bias")
        assert isinstance(weight, torch.Tensor)
        out = x @ weight
        sums = self._by_stream(out).baddbmm_(torch.bmm(self._by_stream(x), own), shared.t().expand(self.streams, -1, -1))
        if bias is not None:
            sums += bias[:, None]
        return out


class _LayerNorm(_Patch):
    """Normalised without weights, then ``x * w + b`` with w and b of each stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        module = self.module
        assert isinstance(module, nn.LayerNorm)
        out = functional.layer_norm(x, module.normalized_shape, None, None, module.eps)
        sums = self._by_stream(out)
        for leaf, combine in (("weight", torch.Tensor.mul_), ("bias", torch.Tensor.add_)):
            values = self._values(leaf)
            if values is not None:
                combine(sums, values[:, None])
        return out


class _Vectors(_Patch):
    """The module's own forward, with a dimension for streams before all others, along which its vectors differ."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        module, own = self.module, dict(self.module._parameters)
        self._require_in_order(x)
        by_stream = x.reshape(self.streams, x.shape[0] // self.streams, *x.shape[1:])
        try:
            for leaf in self.moved:
                values = self._values(leaf)
                assert values is not None
                module._parameters[leaf] = nn.Parameter(
                    values.view(self.streams, *[1] * (x.dim() - 1), -1), requires_grad=False
                )
            return self.own(by_stream).view(x.shape)
        finally:
            module._parameters.update(own)

    def works(self) -> bool:
        """Whether the module's forward takes vectors of such a shape for what they are: tried on random numbers."""
        module, own = self.module, dict(self.module._parameters)
        generator = torch.Generator().manual_seed(0)
        sizes = {leaf: parameter.shape for leaf, parameter in own.items() if parameter is not None}
        if any(len(size) != 1 for size in sizes.values()) or len({*sizes.values()}) != 1:
            return False
        size = next(iter(sizes.values()))[0]
        values = {leaf: torch.randn(_PROBED_STREAMS, size, generator=generator) for leaf in sizes}
        x = torch.randn(_PROBED_STREAMS * _PROBED_ROWS, 2, size, generator=generator)
        try:
            self.batch.rows = len(x)
            self.take(dict(values), _PROBED_STREAMS)
            stacked = self.forward(x)
            alone = []
            for stream, rows in enumerate(torch.split(x, _PROBED_ROWS)):
                for leaf in sizes:
                    module._parameters[leaf] = nn.Parameter(values[leaf][stream], requires_grad=False)
                alone.append(self.own(rows))
            return torch.equal(stacked, torch.cat(alone))
        except (RuntimeError, TypeError, AttributeError):
            return False
        finally:
            self.moved = {}
            module._parameters.update(own)


class _Embedding(_Patch):
    """``E[i] + C[i] V^T``. The module's own forward looks up C as well: it may scale what it finds, or shift i."""

    def take(self, moved: dict[str, Moved], streams: int) -> None:
        """Lay the factors of all streams side by side, as one table."""
        super().take(moved, streams)
        own = self._factors().own
        self._table = nn.Parameter(own.transpose(0, 1).reshape(own.shape[1], -1), requires_grad=False)

    def rest(self) -> None:
        """As above."""
        super().rest()
        del self._table

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See the class."""
        module, (own, shared) = self.module, self._factors()
        out, weight = self.own(*args, **kwargs), module._parameters["weight"]
        try:
            module._parameters["weight"] = self._table
            thin = self.own(*args, **kwargs)
        finally:
            module._parameters["weight"] = weight
        if out.shape[0] == 1 and self.streams > 1:  # positions that all rows share, which no longer look up the same
            out, thin = (found.expand(self.batch.rows, *found.shape[1:]).clone() for found in (out, thin))
        streams = torch.arange(self.streams, device=out.device)
        columns = self._by_stream(thin).view(self.streams, -1, self.streams, own.shape[2])
        columns = columns.transpose(1, 2)[streams, streams]
        sums = self._by_stream(out).baddbmm_(columns, shared.t().expand(self.streams, -1, -1))
        return sums.view(out.shape)


def _patch(path: str, module: nn.Module, batch: _Shape) -> _Patch:
    """The patch for a module.

    Raises:
        UnsupportedModelError: if there is none.
    """
    if type(module).forward is nn.Linear.forward:
        return _Linear(path, module, batch)
    if isinstance(module, Conv1D):
        return _Conv1D(path, module, batch)
    if type(module).forward is nn.LayerNorm.forward:
        return _LayerNorm(path, module, batch)
    if isinstance(module, nn.Embedding):
        return _Embedding(path, module, batch)
    vectors = _Vectors(path, module, batch)
    if vectors.works():
        return vectors
    names = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in module.named_parameters(recurse=False))
    raise UnsupportedModelError(
        path,
        found=f"a {type(module).__name__} with {names}",
        expected="linear layers, embeddings and norms, for directions beside the activations",
        remedy="leave --rank out, or use DensePerturbation(): directions in the weights take any layer",
    )
