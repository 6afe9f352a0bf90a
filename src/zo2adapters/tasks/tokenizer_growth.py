"""How much larger than a text its tokens can be: seen from what a tokenizer does, without doing it.

A tokenizer.json is a program: its normalizers replace texts, and thirty of them that double a
letter make a gigabyte of it. Patterns that backtrack can take years. What is listed here is known
to take a time and a memory that are proportional to the text, by a factor that follows from it.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.models import BPE

from zo2adapters.models.gguf_model import SPLIT_PATTERNS

_Step = Mapping[str, Any]  # one part of a tokenizer.json, which has a type

_ESCAPES = re.compile(r"\\[pP]\{\^?\w{1,40}\}|\\[^1-9kgGXpP]")  # of classes of letters, and letters
_REPEATED = re.compile(r"(?:[*+]|\{\d{1,3}(?:,\d{0,3})?\})\Z")  # how the end of a pattern is
_MOST_OPTIONAL = 3  # letters of a pattern that may be left out
_MOST_STEPS = 64  # of a part of a tokenizer
_LONGEST_WORD = 1000  # characters of a word that a model divides in a time of their square
_LONGEST_PART = 64  # characters that a step may add once to a text or a word
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


class Growth(NamedTuple):
    """How much a tokenizer may make of what it takes; None: it is not known."""

    encoding: float | None  # bytes that are tokenised, for each byte of a text
    decoding: float | None  # bytes of text for each token id


class _UnknownError(Exception):
    """A part of a tokenizer whose time and memory are not known."""


def parsed(text: str) -> Any:
    """The definition in a tokenizer.json; None if it cannot be read, or not in one way alone."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):  # readers differ in which one they take
            raise ValueError("a key twice")
        return values

    try:
        return json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError):
        return None


def growth_of(definition: Any) -> Growth:
    """The growth of a tokenizer, by its tokenizer.json."""

    def known(growth: Callable[[], float]) -> float | None:
        try:
            return growth()
        except (_UnknownError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
            return None  # also what has another form than a tokenizer.json of today

    return Growth(
        known(lambda: _encoding_growth(definition)), known(lambda: _decoding_growth(definition))
    )


def pipeline_of(backend: Any) -> dict[str, Any]:
    """What a loaded tokenizer does, as a tokenizer.json has it, without its tokens.

    Raises:
        Exception: if a part is written in Python, which no file defines.
    """
    shell = Tokenizer(BPE())
    for part in _PARTS:
        if getattr(backend, part) is not None:
            setattr(shell, part, getattr(backend, part))
    names = ("continuing_subword_prefix", "end_of_word_suffix", "max_input_chars_per_word")
    model = {name: getattr(backend.model, name, None) for name in names}
    return {**json.loads(shell.to_str()), "model": {**model, "vocab": ()}}


def _encoding_growth(definition: _Step) -> float:
    _require_plain_model(definition["model"])
    growth = 1.0
    for part, steps in (
        ("normalizer", _NORMALIZERS),
        ("pre_tokenizer", _PRE_TOKENIZERS),
        ("post_processor", _POST_PROCESSORS),
    ):
        growth *= _growth(definition[part], steps)
    return growth


def _decoding_growth(definition: _Step) -> float:
    # names, or pairs of a name and a score
    vocabulary = definition["model"]["vocab"]
    names = [token if isinstance(token, str) else token[0] for token in vocabulary]
    names += [token["content"] for token in definition["added_tokens"]]
    longest = max((len(name.encode()) for name in names), default=1)
    return longest * _growth(definition["decoder"], _DECODERS)


def _growth(step: _Step | None, known: Mapping[str, Callable[[_Step], float]]) -> float:
    """The growth by one part of a tokenizer, or by the steps that it consists of."""
    if step is None:
        return 1.0
    if step["type"] == "Sequence":
        [steps] = (value for name, value in step.items() if name != "type")
        if len(steps) > _MOST_STEPS:
            raise _UnknownError
        return math.prod(known.get(step["type"], _refuse)(step) for step in steps)
    return known.get(step["type"], _refuse)(step)


def _refuse(_: _Step | None = None) -> float:
    raise _UnknownError


def _require_plain_model(model: _Step) -> None:
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(model.get(name) or "") > _LONGEST_PART:
            raise _UnknownError
    if (model.get("max_input_chars_per_word") or 0) > _LONGEST_WORD:
        raise _UnknownError


def _bounded(key: str, growth: float) -> Callable[[_Step], float]:
    """The growth by a step that adds the short text under a key once to a text or a word."""
    return lambda step: growth if len(step.get(key) or "") <= _LONGEST_PART else _refuse()


def _constant(growth: float) -> Callable[[_Step], float]:
    return lambda _: growth


def _replaced(step: _Step) -> float:
    """The growth by a replacement, which a pattern may find between any two letters."""
    content = len(step["content"].encode())
    [(kind, pattern)] = step["pattern"].items()
    if kind == "String":
        return max(1.0, content / len(pattern.encode()))
    _require_plain_pattern(pattern)
    return 1.0 + content


def _split(step: _Step) -> float:
    [(kind, pattern)] = step["pattern"].items()
    if kind != "String":
        _require_plain_pattern(pattern)
    return 1.0 if pattern else _refuse()


def _require_plain_pattern(pattern: str) -> None:
    """Refuse a pattern that may backtrack: it is a known one, or has no groups and alternatives,
    and repeats nothing but its end.
    """
    if pattern in SPLIT_PATTERNS:
        return
    rest = _ESCAPES.sub("", _REPEATED.sub("", pattern))
    if {*"()|*+{}\\"} & {*rest} or rest.count("?") > _MOST_OPTIONAL:
        raise _UnknownError


def _precompiled(step: _Step) -> float:
    """The longest text by which sentencepiece's table replaces anything."""
    table = base64.b64decode(step["precompiled_charsmap"])
    index = int.from_bytes(table[:4], "little")  # bytes of the index, behind which the texts are
    return float(max(map(len, table[4 + index :].split(b"\0"))) or 1)


def _template(step: _Step) -> float:
    """1: a text is once in a template. More often, cutting it makes the square of its parts."""
    special = step["special_tokens"].values()
    if sum(len(token["ids"]) for token in special) > _LONGEST_PART:
        return _refuse()
    if max(len(step["single"]), len(step["pair"])) > _LONGEST_PART:
        return _refuse()
    return 1.0 if max(_most(step["single"]), _most(step["pair"])) <= 1 else _refuse()


def _most(pieces: Iterable[Mapping[str, Any]]) -> int:
    """How often the text that occurs most often is in a template."""
    counts = Counter(piece["Sequence"]["id"] for piece in pieces if "Sequence" in piece)
    return max(counts.values(), default=0)


# How many bytes of UTF-8, or tokens, a byte may become. The largest factors of Unicode's forms are
# those of single letters, such as U+FDFA, whose three bytes are 33 in NFKC.
_NORMALIZERS: Mapping[str, Callable[[_Step], float]] = {
    "BertNormalizer": _constant(9),
    "ByteLevel": _constant(2),
    "Lowercase": _constant(2),
    "NFC": _constant(3),
    "NFD": _constant(4),
    "NFKC": _constant(11),
    "NFKD": _constant(11),
    "Nmt": _constant(1),
    "Precompiled": _precompiled,
    "Prepend": _bounded("prepend", 1),
    "Replace": _replaced,
    "Strip": _constant(1),
    "StripAccents": _constant(4),
}
_PRE_TOKENIZERS: Mapping[str, Callable[[_Step], float]] = {
    "BertPreTokenizer": _constant(1),
    "ByteLevel": _constant(1),
    "CharDelimiterSplit": _constant(1),
    "Digits": _constant(1),
    "FixedLength": _constant(1),
    "Metaspace": _bounded("replacement", 3),
    "Punctuation": _constant(1),
    "Split": _split,
    "UnicodeScripts": _constant(1),
    "Whitespace": _constant(1),
    "WhitespaceSplit": _constant(1),
}
_POST_PROCESSORS: Mapping[str, Callable[[_Step], float]] = {
    "BertProcessing": _constant(1),
    "ByteLevel": _constant(1),
    "RobertaProcessing": _constant(1),
    "TemplateProcessing": _template,
}
_DECODERS: Mapping[str, Callable[[_Step], float]] = {
    "BPEDecoder": _constant(1),
    "ByteFallback": _constant(3),
    "ByteLevel": _constant(3),
    "CTC": _bounded("word_delimiter_token", 1),
    "Fuse": _constant(1),
    "Metaspace": _constant(1),
    "Replace": _replaced,
    "Strip": _constant(1),
    "WordPiece": _constant(2),
}
