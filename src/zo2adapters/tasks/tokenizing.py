"""The program of a limited process that tokenises texts and decodes tokens."""

from __future__ import annotations

import base64
import os
from array import array
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads take address space

from tokenizers import Tokenizer

_held: dict[str, Tokenizer] = {}  # the last tokenizer that was defined, by its name


def answer(request: dict[str, Any]) -> Any:
    """Define a tokenizer, or let a defined one do something; None: it is not defined."""
    try:
        return _answer(request)
    except BaseException as error:
        # A panic of the Rust library is not an Exception, and would end this process untold.
        if isinstance(error, (Exception, SystemExit, KeyboardInterrupt)):
            raise
        raise RuntimeError(str(error)) from error


def _answer(request: dict[str, Any]) -> Any:
    if "definition" in request:
        _held.clear()
        tokenizer = Tokenizer.from_str(request["definition"])
        if tokenizer.normalizer is not None:
            for name in request["names"]:
                tokenizer.normalizer.normalize_str(name)
        _held[request["name"]] = tokenizer
        return True
    if request["name"] not in _held:
        return None
    tokenizer = _held[request["name"]]
    if "ids" in request:
        ids = array("I", base64.b64decode(request["ids"])).tolist()
        return tokenizer.decode(ids, skip_special_tokens=request["skip_special_tokens"])
    _set_lengths(tokenizer, request["truncation"], request["padding"])
    tokenizer.encode_special_tokens = request["encode_special_tokens"]
    encodings = tokenizer.encode_batch_fast(
        [text if isinstance(text, str) else tuple(text) for text in request["texts"]],
        add_special_tokens=request["add_special_tokens"],
    )
    parts = [(encoding.ids, encoding.type_ids, encoding.attention_mask) for encoding in encodings]
    return [
        [base64.b64encode(array("I", part)).decode() for part in parts_of_text]
        for parts_of_text in parts
    ]


def _set_lengths(
    tokenizer: Tokenizer, truncation: dict[str, Any] | None, padding: dict[str, Any] | None
) -> None:
    if truncation is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(**truncation)
    if padding is None:
        tokenizer.no_padding()
    else:
        tokenizer.enable_padding(**padding)
