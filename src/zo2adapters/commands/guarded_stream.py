"""Standard output and standard error as commands write to them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

STREAMS = {"stdout": "standard output", "stderr": "standard error"}  # their names in errors
# Control characters, which a terminal obeys, and those that reorder or end a line of text.
_CONTROL = re.compile(r"(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_BAR = re.compile(r"\r(?!\n)|\n*(?:\x1b\[A)+\Z")


class GuardedStream:
    """A stream on which control characters of names, metadata, errors and generated texts are
    written as escapes, and whose errors name it.

    Progress bars on standard error move the cursor by writes of their own: a line after a carriage
    return, or line feeds and moves up alone.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text."""
        moves = _BAR.match(text) if self._name == STREAMS["stderr"] else None
        start = 0 if moves is None else moves.end()
        shown = text[:start] + _CONTROL.sub(lambda found: repr(found[0])[1:-1], text[start:])
        with self._naming():
            return self._stream.write(shown)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is in the buffer."""
        with self._naming():
            self._stream.flush()

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self._name
            raise
