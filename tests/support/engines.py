"""Engines from mixed options, of which those of a method go to the method, and what tests do with
engines.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from threaded_device import ThreadedDevice, ThreadedStreams
from torch.utils import _pytree as pytree

from zo2core import (
    Batch,
    Engine,
    EngineOptions,
    FirstOrder,
    Forward,
    HostPlan,
    MemoryPolicy,
    ZerothOrder,
)
from zo2core.estimators import factors
from zo2core.kernels.dispatch import Kernel, choose_kernel
from zo2core.planning.memory import DevicePlan
from zo2core.sweep import perturbers


def zeroth_order(model: Any, estimator: Any, **options: Any) -> Engine:
    """An engine of zeroth-order steps."""
    return _engine(ZerothOrder, model, estimator, options)


def first_order(model: Any, optimizer: Any, **options: Any) -> Engine:
    """An engine of first-order steps."""
    return _engine(FirstOrder, model, optimizer, options)


def _engine(kind: Any, model: Any, what: Any, options: dict[str, Any]) -> Engine:
    of_method = _popped(kind, options)
    return open_engine(model, kind(what, **of_method), **options)


def open_engine(model: Any, method: Any = None, **options: Any) -> Engine:
    """An engine from everyday options and those of ``EngineOptions``."""
    seldom = _popped(EngineOptions, options)
    return Engine(model, method, **options, options=EngineOptions(**seldom))


def _popped(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Take the options that are fields of a class."""
    return {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}


def inner(engine: Engine) -> Any:
    """An engine, for a look at its private parts."""
    return engine


def weights(engine: Engine, part: str = "") -> dict[str, torch.Tensor]:
    """Copies of the present parameters whose names contain a part."""
    return {name: value.clone() for name, value in engine.parameters_now() if part in name}


def memory(
    buckets: int | None = None,
    activations: int = 1 << 28,
    *,
    kept: int | None = None,
    budget: int = 0,
) -> MemoryPolicy:
    """Host memory for so many blocks, for all of them if None; a device of its own memory keeps so
    many of them.
    """
    device = "auto" if kept is None else DevicePlan((), 1 << 40, kept, activations)
    host = HostPlan((), budget, buckets, keep_noise=False)
    return MemoryPolicy(host=host, device=device, activations=activations)


@contextmanager
def behind_copies(seconds: float = 0.0, *, per_byte: float = 0.0) -> Iterator[ThreadedDevice]:
    """A device with memory of its own, to and from which each copy takes so long."""
    with closing(
        ThreadedDevice(ThreadedStreams(lambda lane, nbytes: seconds + nbytes * per_byte))
    ) as device:
        yield device


def assert_same_bits(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
    assert ours.dtype == theirs.dtype, name
    assert torch.equal(
        ours.cpu().contiguous().view(integer), theirs.cpu().contiguous().view(integer)
    ), name


def assert_equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """The same names, and the same bits."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert_same_bits(name, value.detach(), theirs[name].detach())


Outcome = tuple[list[tuple[float, ...]], dict[str, torch.Tensor]]


def outcome(engine: Engine, batches: Iterable[Any], part: str = "") -> Outcome:
    """The losses of steps, and the weights after them, of an engine that is closed then."""
    with engine:
        return [engine.step(batch).losses for batch in batches], weights(engine, part)


def assert_same_outcome(ours: Outcome, theirs: Outcome) -> None:
    assert ours[0] == theirs[0]
    assert_equal(ours[1], theirs[1])


def fails_at(real: Callable[..., Any], at: int, error: BaseException) -> Callable[..., Any]:
    """A function whose call number ``at``, from 1, fails instead."""
    calls = count(1)

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise error
        return real(*arguments, **options)

    return call


@contextmanager
def kernels_in(around: Callable[..., None]) -> Iterator[None]:
    """Within the context, engines are opened that call a function of the kernel and its arguments
    wherever they would call the kernel.
    """

    def choose(*weights: torch.Tensor, copies: Sequence[torch.Tensor | None]) -> Kernel:
        return partial(around, choose_kernel(*weights, copies=copies))

    with (
        patch.object(perturbers, "choose_kernel", choose),
        patch.object(factors, "choose_kernel", choose),
    ):
        yield


class Proxy:
    """An object, some of whose methods are others: each of these gets the object's own method
    first.
    """

    def __init__(self, wrapped: Any, **changed: Any) -> None:
        self._wrapped, self._changed = wrapped, changed

    def __getattr__(self, name: str) -> Any:
        if name in self._changed:
            return partial(self._changed[name], getattr(self._wrapped, name, None))
        return getattr(self._wrapped, name)


def really_held(activations: Any) -> int:
    """Bytes of all storages that tensors in there use, each counted once."""
    tensors = [leaf for leaf in pytree.tree_leaves(activations) if isinstance(leaf, torch.Tensor)]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def check_held_bytes(model: Any, forward: Forward, batch: Batch) -> None:
    """What a forward says it holds of a batch, without running the model, is what it holds, or less
    than twice that.
    """
    prepared = forward.prepared(batch)
    with patch.object(
        model.skeleton, "forward", side_effect=AssertionError("the model must not run")
    ):
        planned, of_batch = forward.held_bytes(prepared), forward.held_bytes(batch)
    assert planned == of_batch
    with torch.inference_mode():
        held = really_held(forward.embed(prepared))
    assert held <= planned <= 2 * held
