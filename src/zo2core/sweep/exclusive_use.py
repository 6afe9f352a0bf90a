"""Exclusive use: an engine does one thing at a time, and nothing after it was closed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zo2core.errors import BusyError, ClosedError

_IN_USE: set[int] = set()  # ids of models and sources, which those who use them keep alive


@contextlib.contextmanager
def sole_use(used: object) -> Iterator[None]:
    """The use of a model, or of a source, by one engine: a second one would make the first read other weights."""
    if id(used) in _IN_USE:
        raise BusyError(
            type(used).__name__,
            found="an engine that is open on it",
            expected="one at a time",
            remedy="close() that one first, or open the model a second time",
        )
    _IN_USE.add(id(used))
    try:
        yield
    finally:  # also of an engine that is dropped without being closed
        _IN_USE.remove(id(used))


class ExclusiveUse:
    """Refuses to start a sweep, or an iteration over parameters, before the last one has ended."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._closed = self._busy = False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse any other use within the context."""
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
        """Refuse a use after ``close``."""
        if self._closed:
            owner = self._owner
            raise ClosedError(owner, found=f"a closed {owner}", expected="an open one", remedy="build a new one")

    def close(self) -> None:
        """Refuse all later uses."""
        self._closed = True
