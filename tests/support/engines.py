"""Engines from mixed options: those of a method go to the method."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from zo2core import Engine, FirstOrder, ZerothOrder


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
