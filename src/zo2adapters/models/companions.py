"""The small files beside a model's weights (tokenizer, configs, templates): which are read and copied, which are refused.

A model directory is untrusted. A link in it could copy any file of this machine into an export, a FIFO would block for ever,
and a file of absurd size would be read whole. The links of the hub's cache are accepted.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zo2adapters.models.hf import HFBlockModel
from zo2core.checkpoint import require_own_file
from zo2core.errors import CheckpointError, UnsupportedModelError, reason
from zo2core.io.durable import open_regular

GENERATION = "generation_config.json"
PROMPT = "zo2_prompt.json"  # of the run that made a model or an adapter; another run's export has its own
SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})  # of the files beside the weights

_MAX_BYTES = 1 << 28  # the largest tokenizers take a tenth of it
_MAX_CONFIG_BYTES = 1 << 24  # configs are parsed here
_REMOTE_CODE = "auto_map"  # the key under which a config names code to download and run


def companion_files(directory: Path) -> dict[str, Path]:
    """Find the files of a model directory beside the weights and their index: config, tokenizer, generation config."""
    files = {}
    for path in sorted(directory.iterdir()):
        if path.suffix in SUFFIXES and not path.name.endswith(".index.json") and path.name != PROMPT:
            files[path.name] = _checked(path, directory)
    for path in directory.glob("additional_chat_templates/*.jinja"):  # which tokenizers read; they are not copied
        _checked(path, directory)
    return files


def portable_companions(directory: Path) -> tuple[dict[str, Path | bytes], list[str]]:
    """Find the files to copy beside rewritten weights: those of ``companion_files``, without remote code."""
    companions: dict[str, Path | bytes] = {}
    changed = []
    for name, path in companion_files(directory).items():
        companions[name] = path
        if name.endswith("config.json") and _REMOTE_CODE.encode() in (raw := _read(path)):
            try:
                config = json.loads(raw)
                kept = without_remote_code(config)
            except (ValueError, RecursionError) as error:
                raise _refused(directory / name, str(error), "a readable JSON file") from error
            if kept != config:
                companions[name] = json.dumps(kept, indent=2, ensure_ascii=False).encode() + b"\n"
                changed.append(name)
    return companions, changed


def without_remote_code(value: Any) -> Any:
    """Remove ``auto_map`` from a JSON value, at any depth."""
    if isinstance(value, dict):
        return {key: without_remote_code(inner) for key, inner in value.items() if key != _REMOTE_CODE}
    return [without_remote_code(inner) for inner in value] if isinstance(value, list) else value


def refuse_hub_kernels(config: PretrainedConfig, path: Path) -> None:
    """Refuse a config whose attention implementation is code that transformers would download from the hub and import."""
    named = getattr(config, "_attn_implementation", None)
    if isinstance(named, str) and "/" in named:
        raise UnsupportedModelError(
            path,
            found=f"{named[:80]!r} as attn_implementation, code from the hub",
            expected="an implementation within transformers, such as 'sdpa', or none",
            remedy="remove the entry from the file; remote code is never run",
        )
    for name in getattr(config, "sub_configs", ()):
        inner = getattr(config, name, None)
        if inner is not None:
            refuse_hub_kernels(inner, path)


def end_token_ids(model: HFBlockModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a text: the tokenizer's EOS, and those that the generation config or else the config lists."""
    content, configured = model.companions.get(GENERATION), getattr(model.config.get_text_config(), "eos_token_id", None)
    try:
        if content is not None:
            configured = json.loads(content if isinstance(content, bytes) else _read(content)).get("eos_token_id")
        ends = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])} - {None}
        if not all(type(token) is int for token in ends):
            raise ValueError(f"eos_token_id {str(configured)[:80]}")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        path = content if isinstance(content, Path) else Path(GENERATION)
        raise _refused(path, str(error)[:200], "a JSON object whose eos_token_id is a token id or a list of them") from error
    return sorted(ends)


def remote_code_note(names: list[str]) -> str:
    """A message that remote code was left out of these files."""
    return f"{' and '.join(names)}: {_REMOTE_CODE} is left out, since remote code is never run or passed on"


def _checked(path: Path, directory: Path) -> Path:
    try:
        target = Path(os.path.realpath(path, strict=True))
        info = target.stat()
    except OSError as error:
        raise _refused(path, reason(error), "a readable file") from error
    require_own_file(path, directory)
    if not stat.S_ISREG(info.st_mode):
        raise _refused(path, "no regular file", "a regular file")
    max_bytes = _MAX_CONFIG_BYTES if path.name.endswith("config.json") else _MAX_BYTES
    if info.st_size > max_bytes:
        raise _refused(path, f"{info.st_size} bytes", f"at most {max_bytes} bytes")
    return target


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise _refused(path, reason(error), "a readable file") from error


def _refused(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(path, found=found, expected=expected, remedy="get the model's files again")
