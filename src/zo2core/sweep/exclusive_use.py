"""Exclusive use: an engine does one thing at a time, and nothing after it was closed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar
from weakref import WeakValueDictionary

from zo2core.errors import BusyError, ClosedError
from zo2core.protocols import BlockModel


class ModelUse:
    """The use of a model by one engine, whose buffers its modules read: a second engine would make the first read others.

    Args:
        model: The model, which is used until ``end``, or until no engine that was left open can be reached.

    Raises:
        BusyError: if another engine uses it.
    """

    _present: ClassVar[WeakValueDictionary[int, ModelUse]] = WeakValueDictionary()

    def __init__(self, model: BlockModel) -> None:
        if id(model) in self._present:
            raise BusyError(
                f"model {type(model).__name__}",
                found="an engine or a replayer that is open on it",
                expected="one at a time",
                remedy="close() that one first, or open the model a second time",
            )
        self._model = model  # its id stays its own
        self._present[id(model)] = self

    def end(self) -> None:
        """Leave the model to another engine."""
        self._present.pop(id(self._model), None)


class ExclusiveUse:
    """Refuses to start a sweep, or an iteration over parameters, before the last one has ended.

    Args:
        owner: Name of the engine, for errors.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._closed = self._busy = False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse any other use within the context.

        Raises:
            BusyError: if another use has not ended.
        """
        if self._busy:
            raise BusyError(
                self._owner,
                found="an iteration over parameters_now() that has not ended",
                expected="one use at a time",
                remedy="exhaust the iterator or close() it first",
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def require_open(self) -> None:
        """Refuse a use after ``close``.

        Raises:
            ClosedError: if it was closed.
        """
        if self._closed:
            owner = self._owner
            raise ClosedError(owner, found=f"a closed {owner}", expected="an open one", remedy="build a new one")

    def close(self) -> None:
        """Refuse all later uses."""
        self._closed = True
