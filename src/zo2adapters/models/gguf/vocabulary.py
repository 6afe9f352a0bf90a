"""The tokenizer in the metadata of a GGUF file: byte-level BPE whose splitting of text has a name in llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from zo2core import UnsupportedModelError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # llama.cpp's types of tokens
_IGNORES_MERGES = {"llama-bpe": True, "tekken": True, "qwen2": False, "gpt-4o": False}  # as llama.cpp does, by name
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, where: Path) -> dict[str, Any]:
    """The metadata of a tokenizer, by key.

    Args:
        tokenizer: The tokenizer.
        size: Rows of the model's embedding. Ids without a token become unused tokens.
        where: The model's path, for errors.

    Raises:
        UnsupportedModelError: if llama.cpp would split text in another way.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    name = _splitter(backend)
    if name is None:
        kind = f"{backend['model']['type']} over {_described(backend)}"
        raise UnsupportedModelError(
            where,
            found=f"a tokenizer of {kind[:200]}",
            expected=f"byte-level BPE that splits text as GPT-2, SmolLM, {', '.join(_IGNORES_MERGES)}",
            remedy="export in the Hugging Face layout, and convert that by llama.cpp's convert_hf_to_gguf.py",
        )
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(by_id) >= size:
        raise UnsupportedModelError(
            where,
            found=f"a token with id {max(by_id)}",
            expected=f"ids below {size}, the rows of the embedding",
            remedy="use the tokenizer that belongs to the model",
        )
    added = {token["id"]: _CONTROL if token["special"] else _USER_DEFINED for token in backend["added_tokens"]}
    merges = backend["model"]["merges"]
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [by_id.get(index, f"[PAD{index}]") for index in range(size)],
        "tokenizer.ggml.token_type": [added.get(i, _NORMAL) if i in by_id else _UNUSED for i in range(size)],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
    }
    for called, attribute in _SPECIAL.items():
        token = getattr(tokenizer, attribute)
        if isinstance(token, int):
            values[f"tokenizer.ggml.{called}_token_id"] = token
    first = tokenizer("a").input_ids[:1]
    values["tokenizer.ggml.add_bos_token"] = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    if isinstance(tokenizer.chat_template, str):
        values["tokenizer.chat_template"] = tokenizer.chat_template
    return values


def _splitter(backend: dict[str, Any]) -> str | None:
    """llama.cpp's name of the way in which a tokenizer splits text; None if it has no such name."""
    if backend["model"]["type"] != "BPE" or (backend["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return None
    steps = _steps(backend)
    kinds = [step["type"] for step in steps]
    if not steps or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if kinds == ["ByteLevel"] and steps[-1].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[-1].get("use_regex", True):
        return "smollm"
    if kinds != ["Split", "ByteLevel"] or steps[0]["behavior"] != "Isolated" or steps[-1].get("use_regex", True):
        return None
    pattern, ignores = steps[0]["pattern"].get("Regex"), bool(backend["model"].get("ignore_merges"))
    found = (name for name in _IGNORES_MERGES if GGUF_PRE_TOKENIZER_SPLITS[name] == pattern)
    return next((name for name in found if _IGNORES_MERGES[name] == ignores), None)


def _steps(backend: dict[str, Any]) -> list[dict[str, Any]]:
    step = backend["pre_tokenizer"]
    if step is None:
        return []
    steps: list[dict[str, Any]] = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    return steps


def _described(backend: dict[str, Any]) -> str:
    return " and ".join(step["type"] for step in _steps(backend)) or "whole text"
