"""One use of an engine at a time, and none once it is closed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zo2core.errors import BusyError, ClosedError


class ExclusiveUse:
    """Lets one sweep, or one iteration over parameters, begin at a time.

    Args:
        owner: Name of what is used, for errors.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._closed = self._busy = False

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Be in use meanwhile.

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
        """Let no use begin any more."""
        self._closed = True
