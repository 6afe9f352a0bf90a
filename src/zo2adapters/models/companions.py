"""The small files beside a model's weights: tokenizer, configs, templates. Which are read and copied, and which are refused.

A model directory may come from anywhere. A link in it could carry any file of this machine into an export, a FIFO would be
waited for without end, and a file of absurd size would be read whole. The links that the hub's cache consists of are fine.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from zo2core import CheckpointError, UnsupportedModelError
from zo2core.checkpoint import require_own_file
from zo2core.errors import reason
from zo2core.io.durable import open_regular

SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})  # what a model directory holds besides the weights

_LARGEST = 1 << 28  # bytes; the largest tokenizers take a tenth of it
_LARGEST_CONFIG = 1 << 24  # bytes of a file that is parsed here
_REMOTE_CODE = "auto_map"  # the key under which a config names code to download and run


def companion_files(directory: Path) -> dict[str, Path]:
    """Find what a model directory holds beside the weights and their index: config, tokenizer, generation config.

    Returns:
        Each file's name, to the file itself, with links followed.

    Raises:
        CheckpointError: if one leads out of the directory and its hub cache, is no regular file, or is of absurd size.
    """
    files = {}
    for path in sorted(directory.iterdir()):
        if path.suffix in SUFFIXES and not path.name.endswith(".index.json"):
            files[path.name] = _checked(path, directory)
    for path in directory.glob("additional_chat_templates/*.jinja"):  # which tokenizers read; they are not copied
        _checked(path, directory)
    return files


def portable_companions(directory: Path) -> tuple[dict[str, Path | bytes], list[str]]:
    """Find the files to lay beside weights that are written anew: those of ``companion_files``, without remote code.

    Returns:
        Each file's name, to the file to copy or to its new content; and the names of those that lost ``auto_map``.

    Raises:
        CheckpointError: as ``companion_files``, or if a config that names remote code is no JSON object.
    """
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
    """Leave ``auto_map`` out of a JSON value, at any depth."""
    if isinstance(value, dict):
        return {key: without_remote_code(inner) for key, inner in value.items() if key != _REMOTE_CODE}
    return [without_remote_code(inner) for inner in value] if isinstance(value, list) else value


def refuse_hub_kernels(config: PretrainedConfig, path: Path) -> None:
    """Refuse a config that names a repository of the hub whose code transformers would download and import as attention.

    Args:
        config: As transformers has read it; the configs in it are looked at, too.
        path: Path of its file, for the error.

    Raises:
        UnsupportedModelError: naming the repository.
    """
    named = getattr(config, "_attn_implementation", None)
    if isinstance(named, str) and "/" in named:
        raise UnsupportedModelError(
            path,
            found=f"{named[:80]!r} as attn_implementation, code from the hub",
            expected="an implementation of transformers itself, such as 'sdpa', or none",
            remedy="remove the entry from the file; remote code is never run",
        )
    for name in getattr(config, "sub_configs", ()):
        inner = getattr(config, name, None)
        if inner is not None:
            refuse_hub_kernels(inner, path)


def remote_code_note(names: list[str]) -> str:
    """Say in one line that code was left behind."""
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
    largest = _LARGEST_CONFIG if path.name.endswith("config.json") else _LARGEST
    if info.st_size > largest:
        raise _refused(path, f"{info.st_size} bytes", f"at most {largest}")
    return target


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise _refused(path, reason(error), "a readable file") from error


def _refused(path: Path, found: str, expected: str) -> CheckpointError:
    return CheckpointError(path, found=found, expected=expected, remedy="get the model's files again")
