"""The small files beside a model's weights (tokenizer, configs, templates): which are read and copied, which are refused.

A model directory is untrusted. A link in it could copy any file of this machine into an export, a FIFO would block for
ever, and a file of absurd size would be read whole. The links of the hub's cache are accepted. Sizes in a config are
checked before transformers reads it, under their standard names and under the config class's aliases (``n_layer`` of
GPT-2), also in nested configs (``text_config``). Other sizes are bounded while the model is built: see ``Bounds`` in
``skeleton``.
"""

from __future__ import annotations

import json
import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.quantized import EncodedTensor, Quantization
from zo2core.checkpoint.shards import Piece, SafetensorsReader, TensorEntry, find_tensors, require_own_file
from zo2core.errors import CheckpointError, UnsupportedModelError, ZO2Warning, reason
from zo2core.io.durable import open_regular
from zo2core.protocols import TensorReader

GENERATION = "generation_config.json"
PROMPT = "zo2_prompt.json"  # of the run that made a model or an adapter; another run's export has its own
SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja"})  # of the files beside the weights

_MAX_BYTES = 1 << 28  # the largest tokenizers take a tenth of it
_MAX_CONFIG_BYTES = 1 << 24  # configs are parsed here
_LIMITS = {"num_hidden_layers": 1 << 10, "hidden_size": 1 << 20, "head_dim": 1 << 20, "num_labels": 1 << 20}
_REMOTE_CODE = "auto_map"  # the key under which a config names code to download and run


class ModelDirectory:
    """The config and the tensors of a model in the Hugging Face layout, before the model is built."""

    converts = False  # whether tensors may have another dtype than the model's, to which they are converted

    def __init__(self, directory: Path) -> None:
        self._directory, self.described_in = directory, directory / "config.json"  # the latter is the file of the config
        self.config, quantization = _read_config(self.described_in)
        pickled = sorted(directory.glob("pytorch_model*.bin"))
        if pickled and not list(directory.glob("*.safetensors")):
            raise UnsupportedModelError(
                pickled[0],
                found="pickled weights",
                expected="safetensors",
                remedy=f"convert it once: zo2 convert --model {directory} --output NEW",
            )
        self._entries, self._encoded = find_tensors(directory), dict[str, EncodedTensor]()
        self.is_encoded = quantization is not None  # whether there are tensors that have to be decoded
        if quantization is not None:
            self._entries, self._encoded = quantization.split(self._entries, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The config's dtype, else that of the first tensor."""
        found = (entry.torch_dtype for entry in self._entries.values() if entry.torch_dtype is not None)
        in_config = getattr(self.config, "dtype", None)
        return in_config if isinstance(in_config, torch.dtype) else next(found, torch.float32)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all tensors."""
        return [entry.shape for entry in self._entries.values()]

    def tensors(self, skeleton: PreTrainedModel) -> tuple[dict[str, TensorEntry], dict[str, EncodedTensor]]:
        """All tensors as if none were encoded, and the encoded ones, by name."""
        return self._entries, self._encoded

    def reader(self, pieces: Mapping[str, Sequence[Piece]]) -> TensorReader:
        """A reader of the parameters that consist of these pieces."""
        return SafetensorsReader(pieces)

    def companions(self, skeleton: PreTrainedModel, dtype: torch.dtype) -> dict[str, Path | bytes]:
        """Files to write beside exported weights of this dtype."""
        files, changed = portable_companions(self._directory)
        if changed:
            warnings.warn(remote_code_note(changed), ZO2Warning, stacklevel=3)
        config = without_remote_code(json_object(self.described_in))
        config.pop("torch_dtype", None)
        config.pop("quantization_config", None)  # exported weights are decoded
        config["dtype"] = str(dtype).removeprefix("torch.")
        config["architectures"] = [type(skeleton).__name__]
        files["config.json"] = json.dumps(config, indent=2).encode() + b"\n"
        return files


def _read_config(path: Path) -> tuple[PretrainedConfig, Quantization | None]:
    """Read the config, and split off its quantization."""
    if not path.exists():
        raise _refused(path.parent, "no config.json", "a model directory, which holds config.json")
    companion_files(path.parent)  # refuses unsafe files before transformers reads them
    refuse_oversized(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
    except Exception as error:  # any: a malformed config leads transformers to validation errors, AttributeError, ...
        raise UnsupportedModelError(
            path,
            found=f"a config that transformers cannot load without remote code ({first_line(error)})",
            expected="a model that transformers supports without remote code",
            remedy="use a checkpoint of such an architecture; remote code is never run",
        ) from error
    _refuse_hub_kernels(config, path)
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return config, None
    del config.quantization_config
    return config, Quantization.of(path, quantization)


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


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
        if name.endswith("config.json") and _REMOTE_CODE.encode() in _read(path):
            config = json_object(path)
            kept = without_remote_code(config)
            if kept != config:
                companions[name] = json.dumps(kept, indent=2, ensure_ascii=False).encode() + b"\n"
                changed.append(name)
    return companions, changed


def without_remote_code(value: Any) -> Any:
    """Remove ``auto_map`` from a JSON value, at any depth."""
    if isinstance(value, dict):
        return {key: without_remote_code(inner) for key, inner in value.items() if key != _REMOTE_CODE}
    return [without_remote_code(inner) for inner in value] if isinstance(value, list) else value


def refuse_oversized(path: Path) -> None:
    """Refuse sizes that would cost transformers excessive time or memory."""
    pending: list[tuple[str, dict[str, Any], Any]] = [("", json_object(path), None)]
    while pending:  # no recursion: an untrusted file may be nested deeply
        prefix, values, config_class = pending.pop()  # the latter as the enclosing config declares it
        model_type = str(values.get("model_type"))
        if model_type in CONFIG_MAPPING:
            config_class = CONFIG_MAPPING[model_type]
        aliases = (getattr(config_class, "attribute_map", None) or {}).items()
        named = {other: _LIMITS[known] for pair in aliases for known, other in (pair, pair[::-1]) if known in _LIMITS}
        limits, sub_configs = {**_LIMITS, **named}, getattr(config_class, "sub_configs", None) or {}
        for name, value in values.items():
            if isinstance(value, dict):
                pending.append((f"{prefix}{name}.", value, sub_configs.get(name)))
            elif name in limits and isinstance(value, (int, float)) and value > limits[name]:
                raise _refused(f"{path}: {prefix}{name}", str(value)[:40], f"at most {limits[name]}")


def _refuse_hub_kernels(config: PretrainedConfig, path: Path) -> None:
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
            _refuse_hub_kernels(inner, path)


def end_token_ids(model: HFBlockModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a text: the tokenizer's EOS, and those that the generation config or else the config lists."""
    content, configured = model.companions.get(GENERATION), getattr(model.config.get_text_config(), "eos_token_id", None)
    if content is not None:
        configured = json_object(content).get("eos_token_id")
    ends = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    if not all(type(token) is int or token is None for token in ends):
        expected = "a token id or a list of them as eos_token_id"
        raise _refused(content if isinstance(content, Path) else Path(GENERATION), str(configured)[:80], expected)
    return sorted({token for token in ends if token is not None})


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


def json_object(content: Path | bytes) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        value = json.loads(content if isinstance(content, bytes) else _read(content))
        if isinstance(value, dict):
            return value
        raise ValueError(f"a {type(value).__name__}")
    except (ValueError, RecursionError) as error:
        path = content if isinstance(content, Path) else Path("a file of the model")
        raise _refused(path, first_line(error), "a readable JSON object") from error


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise _refused(path, reason(error), "a readable file") from error


def _refused(where: Path | str, found: str, expected: str) -> CheckpointError:
    return CheckpointError(where, found=found, expected=expected, remedy="get the model's files again")
