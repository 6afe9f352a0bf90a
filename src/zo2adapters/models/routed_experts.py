"""Experts of a mixture, read and decoded when tokens are routed to them.

A forward of a few tokens, as generation has, passes a few of a block's experts: a token of
Qwen3-30B-A3B 8 of 128. A block's attention and router stream as ever; once the router has chosen,
the chosen experts are read by range, and what was used last stays in memory. The bits are those of
reading all: transformers' loops over experts leave the others alone.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from zo2core.encodings.decoding import decode
from zo2core.encodings.forms import MatrixStack, MXFP4Stack
from zo2core.protocols import TensorReader
from zo2core.types import ParameterSpec, encoded_bytes

# share of the experts from which all are read ahead, while the blocks before are computed
MOST = 0.5
# arguments of such a module's forward: itself, hidden states, each token's experts, their weights
_ARGUMENTS = 4


def routed_stacks(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """The parameters of these modules that have a matrix for each expert, in modules that are told
    which they need.
    """
    for module in modules:
        if len(inspect.signature(type(module).forward).parameters) == _ARGUMENTS:
            stacks = {
                name: value
                for name, value in module._parameters.items()
                if value is not None and value.ndim == 3
            }
            yield from (
                (module, name)
                for name, value in stacks.items()
                if len(value) == getattr(module, "num_experts", 0)
            )


def expected_share(experts: int, per_token: int, tokens: int) -> float:
    """The share of experts that tokens are routed to, if each token's are drawn evenly and by
    itself.
    """
    return 1 - (1 - min(per_token / experts, 1)) ** tokens


class _Ranges(NamedTuple):
    """Where one expert's matrix of a stack is stored, and how."""

    spec: ParameterSpec  # of a stack of this matrix alone
    ranges: tuple[tuple[int, int], ...]  # of stored elements: bytes if it is encoded


class RoutedExperts:
    """Stacks of experts, with memory for the weights of one block's, and for stored experts.

    Args:
        weights: The checkpoint.
        stacks: The parameters, each with the module that has it and its name there.
    """

    def __init__(
        self, weights: TensorReader, stacks: Sequence[tuple[ParameterSpec, nn.Module, str]]
    ) -> None:
        self.capacity = 0  # bytes of stored experts that are kept
        self.read_bytes = 0  # so far
        self._weights = weights
        # stored experts, the last used at the end
        self._kept: OrderedDict[tuple[str, int], torch.Tensor] = OrderedDict()
        self.kept_bytes = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="zo2-experts")
        self._ranges: dict[str, list[_Ranges]] = {}
        # blocks take turns
        self.buffers: dict[tuple[str, torch.Size, torch.dtype], torch.Tensor] = {}
        self._targets: dict[str, torch.Tensor] = {}  # each parameter's memory for weights
        by_module: dict[nn.Module, list[ParameterSpec]] = {}
        for spec, module, leaf in stacks:
            key = leaf, torch.Size(spec.shape), spec.in_forward().dtype
            if key not in self.buffers:
                self.buffers[key] = torch.empty(key[1], dtype=key[2])
            buffer = self.buffers[key]
            # Kernels are chosen by requires_grad, as where all experts are read: see
            # ``HFBlockModel.bind``.
            module._parameters[leaf] = nn.Parameter(
                buffer, not spec.frozen and buffer.dtype == spec.dtype
            )
            by_module.setdefault(module, []).append(spec)
            self._ranges[spec.name] = list(_ranges_of(spec))
            self._targets[spec.name] = buffer
        for module, specs in by_module.items():
            module.register_forward_pre_hook(partial(self._load, specs))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the memory for weights."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def _load(
        self, specs: Sequence[ParameterSpec], module: nn.Module, arguments: tuple[Any, ...]
    ) -> None:
        """Fill the rows of the experts that a forward is about to use: transformers passes them as
        its second argument.
        """
        count = specs[0].shape[0]  # the number of masked tokens' expert
        chosen = [expert for expert in arguments[1].unique().tolist() if expert < count]
        filled = [
            self._pool.submit(self._fill, spec, expert) for spec in specs for expert in chosen
        ]
        wait(filled)  # also after a failure, so that none reads or writes later
        for reading in filled:
            reading.result()

    @torch.inference_mode()
    def _fill(self, spec: ParameterSpec, expert: int) -> None:
        of_expert = self._ranges[spec.name][expert]
        target = self._targets[spec.name][expert]
        stored = self._stored(spec, expert, of_expert)
        if spec.encoding is None:
            target.view(-1).copy_(stored)
        else:
            decode(of_expert.spec, stored, target, in_threads=False)

    def _stored(self, spec: ParameterSpec, expert: int, of_expert: _Ranges) -> torch.Tensor:
        """An expert's bytes: kept ones, or read, and then kept in place of those that were used
        longer ago.
        """
        with self._lock:
            stored = self._kept.get((spec.name, expert))
            if stored is not None:
                self._kept.move_to_end((spec.name, expert))
                return stored
        read = torch.empty(
            sum(stop - start for start, stop in of_expert.ranges), dtype=spec.stored_dtype
        )
        done = 0
        for start, stop in of_expert.ranges:
            self._weights.read_into(spec.name, read[done : done + stop - start], start)
            done += stop - start
        with self._lock:
            self._kept[spec.name, expert] = read
            self.read_bytes += read.nbytes
            self.kept_bytes += read.nbytes
            while self.kept_bytes > self.capacity:
                self.kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return read


def _ranges_of(spec: ParameterSpec) -> Iterator[_Ranges]:
    """Where each expert's matrix is among the stored elements of its stack."""
    count, *shape = spec.shape
    alone = replace(spec, shape=(1, *shape))
    if isinstance(spec.encoding, MatrixStack):
        matrices = spec.encoding.matrices
        each = len(matrices) // count
        ends = [
            0,
            *accumulate(encoded_bytes(encoding, (rows, shape[-1])) for encoding, rows in matrices),
        ]
        for first in range(0, len(matrices), each):
            encoding = MatrixStack(matrices[first : first + each])
            yield _Ranges(replace(alone, encoding=encoding), ((ends[first], ends[first + each]),))
        return
    assert spec.encoding is None or isinstance(spec.encoding, MXFP4Stack), (
        "other encodings are of matrices"
    )
    sizes = (
        [spec.numel]
        if spec.encoding is None
        else [part.nbytes for part in spec.encoding.parts(spec.shape)]
    )
    begins = [0, *accumulate(sizes)]
    for expert in range(count):
        ranges = (
            (begin + expert * size // count, begin + (expert + 1) * size // count)
            for begin, size in zip(begins, sizes, strict=False)
        )
        yield _Ranges(alone, tuple(ranges))
