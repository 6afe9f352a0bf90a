"""Engines from mixed options: those of a method go to the method."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from zo2core import Engine, FirstOrder, HostPlan, MemoryPolicy, ZerothOrder


def zeroth_order(model: Any, estimator: Any, **options: Any) -> Engine:
    """An engine of zeroth-order steps."""
    return _engine(ZerothOrder, model, estimator, options)


def first_order(model: Any, optimizer: Any, **options: Any) -> Engine:
    """An engine of first-order steps."""
    return _engine(FirstOrder, model, optimizer, options)


def _engine(kind: Any, model: Any, what: Any, options: dict[str, Any]) -> Engine:
    own = {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
    return Engine(model, kind(what, **own), **options)


def inner(engine: Engine) -> Any:
    """An engine, for a look at its private parts."""
    return engine


def weights(engine: Engine, part: str = "") -> dict[str, torch.Tensor]:
    """Copies of the present parameters whose names contain a part."""
    return {name: value.clone() for name, value in engine.parameters_now() if part in name}


def memory(buckets: int | None = None, activations: int = 1 << 28) -> MemoryPolicy:
    """Host memory for so many blocks, for all of them if None, and so many bytes for activations."""
    return MemoryPolicy(host=HostPlan((), 0, buckets, keep_noise=False), activations=activations)
