"""Low-rank perturbations computed beside the activations of Hugging Face's modules.

Each kind of module is handled once for all architectures, by a forward that replaces the module's.
The rows of its input belong to streams, in order and in equal numbers; every stream has its own
factors. The order of sums is fixed: the product with the weights first, then one product with all
thin columns, including the bias.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zo2adapters.models.library_names import Conv1D
from zo2core.errors import UnsupportedModelError
from zo2core.estimators.perturbation import Factors, PerturbedParameter

_PROBE_STREAMS, _PROBE_ROWS = 2, 3


class LowRankModules:
    """The modules of a model that own parameters, patched.

    Without perturbations they compute what they did before.
    """

    rows = tokens = 1  # of the running batch, by which rows are assigned to streams

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._patches: dict[str, _Patch] = {}  # by the module's path
        self._perturbed: list[_Patch] = []
        patched: dict[int, _Patch] = {}
        for path, module in modules.items():
            if not any(True for _ in module.parameters(recurse=False)):
                continue
            if id(module) not in patched:
                patched[id(module)] = _make_patch(path, module, self)
            self._patches[path] = patched[id(module)]
        for patch in patched.values():
            patch.module.forward = patch.run

    def perturb(self, perturbations: Mapping[str, PerturbedParameter], streams: int) -> None:
        """Perturb these parameters, and no others, in the next forwards."""
        for patch in self._perturbed:
            patch.reset()
        by_module: dict[str, dict[str, PerturbedParameter]] = {}
        for name, value in perturbations.items():
            path, _, leaf = name.rpartition(".")
            by_module.setdefault(path, {})[leaf] = value
        self._perturbed = [self._patches[path] for path in by_module]
        for patch, values in zip(self._perturbed, by_module.values(), strict=True):
            patch.set_perturbations(values, streams)


def set_batch_shape(modules: LowRankModules | None, tokens: torch.Tensor) -> None:
    """Set the shape of patched modules' next batch, (rows, tokens, ...); None does nothing."""
    if modules is not None:
        modules.rows, modules.tokens = tokens.shape[:2]


class _Patch(ABC):
    """A replacement of a module's forward."""

    factors: Any  # of the weight, ``Factors``; None if it is not perturbed by factors
    vectors: dict[str, torch.Tensor]  # values of the other perturbed parameters, (streams, size)
    joined: Any  # what forwards need of the perturbations, in one tensor

    def __init__(self, path: str, module: nn.Module, batch: LowRankModules) -> None:
        self.path, self.batch = path, batch
        self.module: Any = module
        self.original: Callable[..., torch.Tensor] = module.forward
        self.streams = 1
        self.reset()

    def set_perturbations(
        self, perturbations: Mapping[str, PerturbedParameter], streams: int
    ) -> None:
        """Perturb the module's parameters in the next forwards."""
        self.factors = next(
            (value for value in perturbations.values() if isinstance(value, Factors)), None
        )
        self.vectors = {
            leaf: value for leaf, value in perturbations.items() if not isinstance(value, Factors)
        }
        self.streams = streams
        self.joined = self._join()

    def reset(self) -> None:
        """Perturb nothing in the next forwards, and free the memory: every block has its own
        modules.
        """
        self.factors = None
        self.vectors = {}
        self.joined = None

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replaces the module's forward."""
        is_perturbed = self.factors is not None or self.vectors
        return self.forward(*args, **kwargs) if is_perturbed else self.original(*args, **kwargs)

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the module's output with perturbed parameters."""

    @contextmanager
    def _parameters(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """A context in which the module has these parameters."""
        parameters = self.module._parameters
        original = dict(self.module._parameters)
        parameters.update(
            {leaf: nn.Parameter(value, requires_grad=False) for leaf, value in values.items()}
        )
        try:
            yield
        finally:
            parameters.update(original)

    def _join(self) -> torch.Tensor | None:
        return None

    def _by_stream(self, rows: torch.Tensor) -> torch.Tensor:
        """View (rows, ..., n), or flattened (rows x tokens, n), as (streams, a stream's rows or
        tokens, n).
        """
        self._require_row_order(rows)
        return rows.reshape(self.streams, -1, rows.shape[-1])

    def _require_row_order(self, rows: torch.Tensor) -> None:
        """Refuse inputs that are not the batch's rows in order: tokens before rows, say, or an
        expert's tokens.
        """
        shape = self.batch
        is_flattened = rows.dim() == 2 and rows.shape[0] == shape.rows * shape.tokens
        if self.streams > 1 and rows.shape[0] != shape.rows and not is_flattened:
            found = (
                f"input of shape {list(rows.shape)} in a batch of {shape.rows} rows of "
                f"{shape.tokens} tokens"
            )
            raise _unfit(self.path, found, "the batch's rows in order")


class _Linear(_Patch):
    """``x W^T + [x V, 1] [C, b]^T`` with C and b per stream."""

    def _join(self) -> torch.Tensor:
        """Factors and bias as rows: one product adds both, and is fastest from rows."""
        rows = self.factors.left.transpose(1, 2)
        bias = self.vectors.get("bias")
        return rows.contiguous() if bias is None else torch.cat([rows, bias[:, None]], dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        out = functional.linear(x, self.module.weight)
        thin = self._by_stream(x) @ self.factors.right
        if "bias" in self.vectors:
            thin = functional.pad(thin, (0, 1), value=1.0)
        self._by_stream(out).baddbmm_(thin, self.joined)
        return out


class _Conv1D(_Patch):
    """``x W + (x C) V^T + b``: the weight of GPT-2's layers is (inputs, outputs)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        columns, shared = self.factors
        out: torch.Tensor = x @ self.module.weight
        sums = self._by_stream(out).baddbmm_(
            torch.bmm(self._by_stream(x), columns), shared.t().expand(self.streams, -1, -1)
        )
        if "bias" in self.vectors:
            sums += self.vectors["bias"][:, None]
        return out


class _LayerNorm(_Patch):
    """Normalised without weights, then ``x * w + b`` with w and b per stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        out = functional.layer_norm(x, self.module.normalized_shape, None, None, self.module.eps)
        sums = self._by_stream(out)
        for leaf, combine in (("weight", torch.Tensor.mul_), ("bias", torch.Tensor.add_)):
            if leaf in self.vectors:
                combine(sums, self.vectors[leaf][:, None])
        return out


class _Vectors(_Patch):
    """The module's original forward, with a leading dimension for streams, along which its vectors
    differ.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        self._require_row_order(x)
        by_stream = x.reshape(self.streams, x.shape[0] // self.streams, *x.shape[1:])
        shape = self.streams, *[1] * (x.dim() - 1), -1
        with self._parameters({leaf: values.view(shape) for leaf, values in self.vectors.items()}):
            return self.original(by_stream).view(x.shape)

    def works(self) -> bool:
        """Whether the module's forward computes right with vectors of this shape, tried on random
        numbers.
        """
        sizes = {
            leaf: parameter.shape
            for leaf, parameter in self.module._parameters.items()
            if parameter is not None
        }
        if any(len(size) != 1 for size in sizes.values()) or len({*sizes.values()}) != 1:
            return False
        size = next(iter(sizes.values()))[0]
        generator = torch.Generator().manual_seed(0)
        values = {leaf: torch.randn(_PROBE_STREAMS, size, generator=generator) for leaf in sizes}
        x = torch.randn(_PROBE_STREAMS * _PROBE_ROWS, 2, size, generator=generator)
        try:
            self.batch.rows = len(x)
            self.set_perturbations(values, _PROBE_STREAMS)
            stacked = self.forward(x)
            alone = []
            for stream, rows in enumerate(torch.split(x, _PROBE_ROWS)):
                with self._parameters({leaf: value[stream] for leaf, value in values.items()}):
                    alone.append(self.original(rows))
            return torch.equal(stacked, torch.cat(alone))
        except (RuntimeError, TypeError, AttributeError):
            return False
        finally:
            self.reset()


class _Embedding(_Patch):
    """``E[i] + C[i] V^T``.

    The original forward looks up C as well, since it may scale the rows or shift i.
    """

    def _join(self) -> torch.Tensor:
        """The factors of all streams side by side in one table."""
        sums: torch.Tensor = self.factors.left
        return sums.transpose(0, 1).reshape(sums.shape[1], -1)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See the class."""
        (factors, shared) = self.factors
        out = self.original(*args, **kwargs)
        with self._parameters({"weight": self.joined}):
            thin = self.original(*args, **kwargs)
        if out.shape[0] == 1 and self.streams > 1:  # positions, until now shared by all rows
            out, thin = (
                value.expand(self.batch.rows, *value.shape[1:]).clone() for value in (out, thin)
            )
        streams = torch.arange(self.streams, device=out.device)
        columns = self._by_stream(thin).view(self.streams, -1, self.streams, factors.shape[2])
        columns = columns.transpose(1, 2)[streams, streams]
        sums = self._by_stream(out).baddbmm_(columns, shared.t().expand(self.streams, -1, -1))
        return sums.view(out.shape)


_BY_FORWARD: Mapping[Any, type[_Patch]] = {
    nn.Linear.forward: _Linear,
    nn.LayerNorm.forward: _LayerNorm,
    Conv1D.forward: _Conv1D,
}


def _make_patch(path: str, module: nn.Module, batch: LowRankModules) -> _Patch:
    """Make the patch for a module."""
    kind = (
        _Embedding
        if isinstance(module, nn.Embedding)
        else _BY_FORWARD.get(type(module).forward, _Vectors)
    )
    patch = kind(path, module, batch)
    if not isinstance(patch, _Vectors) or patch.works():
        return patch
    names = ", ".join(
        f"{name} {list(parameter.shape)}"
        for name, parameter in module.named_parameters(recurse=False)
    )
    raise _unfit(
        path, f"a {type(module).__name__} with {names}", "linear layers, embeddings and norms"
    )


def _unfit(path: str, found: str, expected: str) -> UnsupportedModelError:
    remedy = "choose `DensePerturbation()` for any layer"
    return UnsupportedModelError(path, found, f"{expected}, for low-rank perturbations", remedy)
