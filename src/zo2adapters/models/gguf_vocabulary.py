"""Byte-level BPE in the metadata of a GGUF file: llama.cpp knows by names how text is split and whether merges bind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from zo2core.checkpoint.gguf import GGUFFile, StoredText
from zo2core.errors import UnsupportedModelError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # llama.cpp's types of tokens
FURTHER_ENDS = ("eot", "eom")  # tokens at which llama.cpp stops beside EOS: the end of a turn, and of a message
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_WRITTEN = ("gpt-2", "smollm", "llama-bpe", "tekken", "qwen2", "gpt-4o")  # by exports, each for all that split so

_DIGIT, _WORDS = r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's
_SHORT, _SPACE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_SHORT}|{_MARKS}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACE}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = _QWEN2.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
_GPT_4O, _TEKKEN = (
    rf"{_MARKS}{_UPPER}*{_LOWER}+{short}|{_MARKS}{_UPPER}+{_LOWER}*{short}|\p{{N}}{digits}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACE}"
    for short, digits in ((f"{_SHORT}?", "{1,3}"), ("", ""))
)
_GROUPS = {
    (_WORDS,): "gpt-2, phi-2, olmo, mpt, jais, trillion, exaone4, gigachat, a.x-4.0, mellum, granite-docling",
    (_DIGIT, _WORDS): "smollm, starcoder, refact, command-r, codeshell, exaone, minerva-7b",
    (_LLAMA3,): "llama3, llama-v3, llama-bpe, falcon3, falcon-h1, pixtral, midm-2.0, lfm2, jina-v5-nano, dbrx, smaug-bpe, "
    "glm4, chatglm-bpe",
    (_TEKKEN,): "tekken",
    (_QWEN2,): "qwen2, deepseek-r1-qwen, kormo, f2llmv2, megrez, stablelm2, hunyuan, solar-open, grok-2",
    (_QWEN35,): "qwen35",
    (_GPT_4O,): "gpt-4o, llama4, kanana2, talkie, minimax-m2",
    (r"[\p{P}$+<=>^~|]+", _WORDS, r"\p{N}+", "[0-9]{3}"): "default",
}
# The patterns that split text one after the other, by llama.cpp's names (llama-vocab.cpp).
_SPLITS = {name: patterns for patterns, names in _GROUPS.items() for name in names.split(", ")}
# Names of vocabularies that take a whole piece which is a token, whatever the merges; they begin with BOS by default.
_WHOLE = {name for name in _SPLITS if _SPLITS[name] in (_SPLITS["llama3"], _SPLITS["tekken"])}
_WHOLE -= {"dbrx", "smaug-bpe", "glm4", "chatglm-bpe"}


def byte_level_tokenizer(file: GGUFFile) -> PreTrainedTokenizerBase:
    """The tokenizer that a file with byte-level BPE describes.

    Transformers' own reader splits by few names, merges what llama.cpp takes whole, and gives special tokens that are
    written in other characters, such as DeepSeek's, ids beyond the vocabulary.
    """
    values: dict[str, Any] = {
        key.removeprefix("tokenizer.ggml."): file.text(key) if isinstance(value, StoredText) else value
        for key, value in file.metadata.items()
    }
    name = values.get("pre")
    if name not in _SPLITS:
        raise UnsupportedModelError(
            f"{file.path}: tokenizer.ggml.pre",
            found="none" if name is None else repr(str(name)[:40]),
            expected=f"the name of a known way to split text: {', '.join(_SPLITS)}",
            remedy="use a file of a newer convert_hf_to_gguf.py, or the model in the Hugging Face layout",
        )
    tokens = [str(token) for token in file.array("tokenizer.ggml.tokens")]
    merges: Any = [tuple(str(merge).split(" ")) for merge in file.array("tokenizer.ggml.merges")]
    is_whole = name in _WHOLE
    model: Any = BPE({token: index for index, token in enumerate(tokens)}, merges, ignore_merges=is_whole)
    backend: Any = Tokenizer(model)
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()  # of these models' own tokenizers
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[name]]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Sequence(steps), decoders.ByteLevel()
    kinds = file.array("tokenizer.ggml.token_type") if "token_type" in values else ()
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    special = {
        attribute: tokens[values[f"{called}_token_id"]]
        for called, attribute in _SPECIAL.items()
        if f"{called}_token_id" in values
    }
    first = [special["bos_token"]] if values.get("add_bos_token", is_whole) else []
    last = [special["eos_token"]] if values.get("add_eos_token") else []
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(token, tokens.index(token)) for token in {*first, *last}],
        )
    template = values.get("tokenizer.chat_template")
    make: Any = PreTrainedTokenizerFast  # its constructor is untyped
    tokenizer: PreTrainedTokenizerBase = make(
        tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False, **special
    )
    return tokenizer


def vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, where: Path) -> dict[str, Any]:
    """The metadata of a tokenizer, by key."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    found, is_whole = _splits(backend), bool(backend["model"].get("ignore_merges"))
    name = next((name for name in _WRITTEN if _SPLITS[name] == found and (name in _WHOLE) == is_whole), None)
    if name is None:
        steps = " and ".join(step["type"] for step in _steps(backend)) or "whole text"
        kind = f"{backend['model']['type']} over {steps}{', whole tokens first' if is_whole else ''}"
        raise UnsupportedModelError(
            where,
            found=f"a tokenizer of {kind[:200]}",
            expected=f"byte-level BPE that splits and merges text as {', '.join(_WRITTEN)}",
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
        token = getattr(tokenizer, f"{attribute}_id")
        if isinstance(token, int):
            values[f"tokenizer.ggml.{called}_token_id"] = token
    first = tokenizer("a").input_ids[:1]
    values["tokenizer.ggml.add_bos_token"] = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    if isinstance(tokenizer.chat_template, str):
        values["tokenizer.chat_template"] = tokenizer.chat_template
    return values


def _splits(backend: dict[str, Any]) -> tuple[str, ...] | None:
    """The patterns that split text one after the other; None if it is split, normalised or encoded in another way."""
    if backend["model"]["type"] != "BPE" or (backend["normalizer"] or {"type": "NFC"})["type"] != "NFC":
        return None
    *steps, last = _steps(backend) or [{"type": "none"}]
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        return None
    patterns: list[str] = []
    for step in steps:
        is_split = step["type"] == "Split" and step["behavior"] == "Isolated" and "Regex" in step["pattern"]
        if not is_split and not (step["type"] == "Digits" and step["individual_digits"]):
            return None
        patterns.append(step["pattern"]["Regex"] if is_split else _DIGIT)
    return (*patterns, *((_WORDS,) if last.get("use_regex", True) else ()))


def _steps(backend: dict[str, Any]) -> list[dict[str, Any]]:
    step = backend["pre_tokenizer"]
    return [] if step is None else step.get("pretokenizers", [step])
