"""The files of a model's directory. What is missing is seen before torch and transformers are
imported, and nothing is parsed but the names of shards.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from zo2adapters.models.ollama import is_ollama_name, weights_of_ollama
from zo2core.errors import CheckpointError, DataError, UnsupportedModelError
from zo2core.io.durable import open_regular, read_regular

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
# of an export of an adapter and its base
ADAPTER_FOLDER, BASE_FOLDER = "adapter", "base"
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_HUB_SECONDS = 10.0  # of waiting for the hub's answer whether it has a model
_GGUF, _GGUF_MAGIC = ".gguf", b"GGUF"
# Beginnings of the names of the files that hold a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer",
    "vocab",
    "merges",
    "spiece",
    "sentencepiece",
    "spm",
    "tekken",
    "bpe",
    "dict",
    "prophetnet",
)


def is_gguf(path: Path | str) -> bool:
    """Whether a path is that of a GGUF file, by its first bytes or by its ending."""
    return str(path).endswith(_GGUF) or _begins_as_gguf(Path(path))


def _begins_as_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does, such as a blob of ollama, whose name is a
    digest.
    """
    if not path.is_file():
        return False
    with contextlib.suppress(OSError), open_regular(path) as file:
        return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    return False


def require_model(model: str | Path, *, has_tokenizer: bool = True) -> None:
    """Refuse the path of no model, and that of one without config, weights or tokenizer; and a name
    that the hub does not know.
    """
    if is_ollama_name(model):
        weights_of_ollama(str(model))
        return
    path = Path(model)
    if is_gguf(path):
        if not path.is_file():
            expected, remedy = "a readable GGUF file", "check the path"
            raise CheckpointError(path, "No such file or directory", expected, remedy)
        return
    if not path.is_dir():
        if not may_be_of_hub(model):
            raise no_model(model)
        _require_on_hub(str(model))
        return
    refuse_adapter(path)
    require_config(path)
    _require_weights(path)
    if has_tokenizer:
        require_tokenizer(path)


def saved_model(model: str) -> str:
    """How a run saves its model: the path of its files, which does not change with a tag of
    ollama's, or its name on the hub.
    """
    path = weights_of_ollama(model) if is_ollama_name(model) else Path(model)
    return str(path.resolve()) if path.exists() else model


def may_be_of_hub(model: str | Path) -> bool:
    """Whether a model that is no directory may be a name of the hub."""
    text = str(model)
    is_name = isinstance(model, str) and not text.startswith((".", "/", "~"))
    return is_name and text.count("/") <= 1 and not Path(model).exists()


def _require_on_hub(name: str) -> None:
    """Refuse a name that is in the hub's cache no more than on the hub: it is misspelled."""
    import huggingface_hub

    try:
        if not isinstance(huggingface_hub.try_to_load_from_cache(name, CONFIG), str):
            huggingface_hub.model_info(name, timeout=_HUB_SECONDS)
    except Exception as error:  # any: names that are none, answers of the hub, its HTTP client's
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        found = f"neither a directory nor a model of the hub ({reason})"
        raise no_model(name, found) from error


def no_model(
    model: str | Path,
    found: str = "no directory",
    remedy: str = "check the spelling and the network",
) -> CheckpointError:
    """The error for a path that is no model's."""
    expected = "a model directory in the Hugging Face layout, or a hub id"
    return CheckpointError(str(model), found, expected, remedy)


def refuse_adapter(directory: Path) -> None:
    """Refuse the directory of an adapter alone."""
    if (directory / ADAPTER_CONFIG).exists() and not (directory / CONFIG).exists():
        remedy = f"pass --adapter {directory}, or --run with the directory of the run"
        raise CheckpointError(
            directory, "an adapter", "the directory of a whole model", f"{remedy} that trained it"
        )


def require_config(directory: Path) -> None:
    """Refuse a directory without a config."""
    if not (directory / CONFIG).exists():
        expected = "a model directory, which holds config.json"
        raise CheckpointError(directory, "no config.json", expected, "get the model's files again")


def _require_weights(directory: Path) -> None:
    """Refuse a directory without weights, or with an index of shards that are not all there."""
    if not any(path.suffix in (".safetensors", _GGUF) for path in directory.iterdir()):
        refuse_pickles(directory)
        remedy = "pass a directory with a model in the Hugging Face layout"
        raise CheckpointError(directory, "no safetensors weights", f"{_WHOLE} or {_INDEX}", remedy)
    shards: set[object] = set()
    if not (directory / _WHOLE).exists():
        with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
            shards = set(json.loads(read_regular(directory / _INDEX))["weight_map"].values())
    for shard in sorted(shard for shard in shards if isinstance(shard, str)):
        if not (directory / shard).exists():
            remedy = "download the model again: its index names this file"
            raise CheckpointError(
                directory / shard, "No such file or directory", "a safetensors file", remedy
            )


def refuse_pickles(directory: Path) -> None:
    """Refuse pickled weights."""
    for pickled in sorted(directory.glob("pytorch_model*.bin")):
        remedy = f"convert it once: zo2 convert --model {directory} --output NEW"
        raise UnsupportedModelError(pickled, "pickled weights", "safetensors", remedy)


def require_tokenizer(directory: Path) -> None:
    """Refuse a directory without the files of a tokenizer."""
    if not any(path.name.startswith(_TOKENIZER_FILES) for path in directory.iterdir()):
        raise unusable_tokenizer(directory, "none of its files has one")


def unusable_tokenizer(directory: Path, why: str) -> DataError:
    """The error for a directory whose tokenizer cannot be used."""
    remedy = "copy the tokenizer files of the base model into it"
    return DataError(
        directory,
        f"no usable tokenizer ({why})",
        "tokenizer files in the model's directory",
        remedy,
    )
