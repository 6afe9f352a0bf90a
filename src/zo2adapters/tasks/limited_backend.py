"""Tokenisation under limits of time and memory: in this process where both are known to be small,
else in a limited process.

Note: why a process tokenises. A tokenizer.json comes with a model and is a program: a sequence of
replacements, each of which doubles a letter, makes gigabytes of it, and a pattern may take years.
One long text takes 200 bytes for each of its own. Nothing in this process could stop the library,
which is written in Rust. Most texts are short and most tokenizers plain, so that a bound of what
they take follows from the file (``tokenizer_growth``); these stay in this process.
"""

from __future__ import annotations

import atexit
import base64
import itertools
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import Tokenizer

from zo2adapters.limited_process import LimitedProcess, LimitedProcessError
from zo2adapters.tasks.tokenizer_growth import Growth, growth_of, pipeline_of
from zo2core.errors import DataError
from zo2core.ranges import counted

MEMORY = 1 << 30  # bytes that the process may take for a request beside what it has
SECONDS = 10.0  # of computing time, for a request
SECONDS_PER_BYTE = 1e-5  # further ones; tokenisers take 1e-6 or less
_ROOM = 1 << 18  # bytes that may be tokenised here: they take some 60 MB
_ROOM_OF_TEXT = 1 << 24  # bytes of text that may be decoded here
_CHANGES = ("add_tokens", "add_special_tokens")  # methods that change what a tokenizer does

_Text: TypeAlias = str | tuple[str, str]


def _bytes_of(text: str) -> int:
    """Bytes of a text in UTF-8. One that cannot be written in it is refused: bytes of arguments and
    of standard input that are no text become halves of surrogate pairs.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        found = f"{text[error.start :][:40]!a}, which is no text in UTF-8"
        remedy = "write it in UTF-8; in a locale of another encoding, set PYTHONUTF8=1"
        raise DataError("text", found, "text in UTF-8", remedy) from error


class LimitedBackend:
    """Stands for the ``tokenizers.Tokenizer`` that a tokenizer of transformers works with.

    Args:
        backend: The tokenizer. Its attributes and methods are those of this object.
        growth: What it makes of texts.
    """

    def __init__(self, backend: Any, growth: Growth) -> None:
        vars(self).update(_backend=backend, _growth=growth, _name=None)

    def encode_batch(
        self,
        input: Sequence[_Text],  # noqa: A002 - as the tokenizer calls it
        is_pretokenized: bool = False,  # noqa: FBT001, FBT002 - likewise
        add_special_tokens: bool = True,  # noqa: FBT001, FBT002 - likewise
    ) -> Any:
        """Tokenise texts, or pairs of texts, as the tokenizer does."""
        texts = list(
            itertools.chain(*([text] if isinstance(text, str) else text for text in input))
        )
        nbytes = sum(map(_bytes_of, texts))
        growth = self._growth.encoding
        options = {"is_pretokenized": is_pretokenized, "add_special_tokens": add_special_tokens}
        if growth is not None and growth * nbytes <= _ROOM:
            return self._backend.encode_batch(input, **options)
        request = {
            "texts": list(input),
            "add_special_tokens": add_special_tokens,
            "encode_special_tokens": self._backend.encode_special_tokens,
            "truncation": self._backend.truncation,
            "padding": self._backend.padding,
        }
        length = counted(sum(map(len, texts)), "character")
        found = f"a text of {length} that its tokenizer does not take"
        answer = self._ask(request, nbytes, found)
        return [_Encoding(*map(_numbers, parts)) for parts in answer]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:  # noqa: FBT001, FBT002
        """Decode tokens as the tokenizer does."""
        growth = self._growth.decoding
        if growth is not None and growth * len(ids) <= _ROOM_OF_TEXT:
            return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))
        request = {
            "ids": base64.b64encode(array("I", ids)).decode(),
            "skip_special_tokens": skip_special_tokens,
        }
        found = f"{counted(len(ids), 'token')} that the tokenizer does not decode"
        return str(self._ask(request, len(ids), found))

    def _ask(self, request: dict[str, Any], nbytes: int, text_summary: str) -> Any:
        try:
            answer = None if self._name is None else _ask({"name": self._name, **request}, nbytes)
            if answer is None:  # the process is a new one, or has another tokenizer
                vars(self)["_name"] = define(self._backend.to_str())
                answer = _ask({"name": self._name, **request}, nbytes)
        except LimitedProcessError as error:
            seconds = SECONDS + nbytes * SECONDS_PER_BYTE
            expected = f"one that takes at most {MEMORY >> 20} MiB and {seconds:.0f} s"
            remedy = "shorten the text or split it into several rows, or use another tokenizer"
            raise DataError("text", f"{text_summary} ({error})", expected, remedy) from error
        return answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy asks for them before it has the tokenizer
            raise AttributeError(name)
        if name in _CHANGES:
            vars(self)["_name"] = None
        return getattr(self._backend, name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_name"] = None
        setattr(self._backend, name, value)


def limit(tokenizer: Any, growth: Growth | None) -> None:
    """Let a tokenizer of transformers work under limits.

    Args:
        tokenizer: The tokenizer. One that is written in Python, or has parts that are, is left as
            it is: these are transformers' own.
        growth: What it makes of texts; None: it is to be seen from what was loaded.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return
    try:
        pipeline = pipeline_of(backend)
    except Exception:  # of a part in Python; the library's errors have no class of their own
        return
    if growth is None:
        pipeline["model"]["vocab"] = backend.get_vocab()
        growth = growth_of(pipeline)
    held = [name for name, value in vars(tokenizer).items() if value is backend]
    assert held, "a tokenizer holds what it works with"
    for name in held:
        setattr(tokenizer, name, LimitedBackend(backend, growth))


class _Encoding:
    """The parts of a ``tokenizers.Encoding`` that are used."""

    def __init__(self, ids: list[int], type_ids: list[int], attention_mask: list[int]) -> None:
        self.ids = ids
        self.type_ids = type_ids
        self.attention_mask = attention_mask
        self.overflowing: list[_Encoding] = []
        self.n_sequences = 1


def _ask(request: dict[str, Any], nbytes: int) -> Any:
    """Let the limited process do something with a text or a definition of so many bytes."""
    seconds = SECONDS + nbytes * SECONDS_PER_BYTE
    return _process().ask(request, seconds=seconds, memory=MEMORY)


def define(definition: str, names: Sequence[str] = ()) -> str:
    """Load a tokenizer.json in the limited process; return the name that it has there.

    Args:
        definition: The tokenizer.json.
        names: Texts that are normalized, as those of added tokens are when they are loaded.

    Raises:
        LimitedProcessError: if that cannot be done within the limits.
    """
    name = str(next(_numbers_of_tokenizers))
    request = {"name": name, "definition": definition, "names": list(names)}
    _ask(request, len(definition))
    return name


_numbers_of_tokenizers = itertools.count()


@cache
def _process() -> LimitedProcess:
    """The child process of this process. It is kept, because loading a tokenizer takes time."""
    process = LimitedProcess(Path(__file__).with_name("tokenizing.py"))
    atexit.register(process.close)
    return process


def release() -> None:
    """End the child process, which holds a tokenizer; a later text starts another."""
    _process().close()


def _numbers(text: str) -> list[int]:
    return array("I", base64.b64decode(text)).tolist()
