"""A model directory's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from zo2adapters.models.gguf_model import gguf_tokenizer
from zo2adapters.models.model_directory import companion_files
from zo2core import ZO2Error
from zo2core.checkpoint import is_gguf
from zo2core.errors import DataError

# Beginnings of the names of the files that hold a tokenizer.
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "spm", "tekken", "bpe", "dict", "prophetnet")


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory or of a GGUF file, without running remote code."""
    if not is_gguf(directory):
        companion_files(directory)  # refuses links that lead out of the directory
        names = {path.name for path in directory.iterdir()}
        if not any(name.startswith(_TOKENIZER_FILES) for name in names):  # transformers' own errors mislead
            raise _unusable(directory, "none of its files has one")
        for path in directory.iterdir():
            if path.exists() and not (path.is_file() or path.is_dir()):  # reading a pipe would hang
                raise _unusable(directory, f"{path.name} is not a regular file")
    try:
        tokenizer: Any = (
            gguf_tokenizer(directory)
            if is_gguf(directory)
            else AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        )
    except (KeyboardInterrupt, SystemExit, ZO2Error):
        raise
    # A damaged tokenizer.json may raise anything: a panic of the Rust library is not even an Exception.
    except BaseException as error:
        raise _unusable(directory, (str(error).splitlines() or [type(error).__name__])[0][:200]) from error
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise _unusable(directory, f"a {type(tokenizer).__name__}")
    return tokenizer


def _unusable(directory: Path, why: str) -> DataError:
    return DataError(
        directory,
        found=f"no usable tokenizer ({why})",
        expected="tokenizer files in the model's directory",
        remedy="copy the tokenizer files of the base model into the directory",
    )


def vocabulary_of(config: PretrainedConfig) -> int | None:
    """Rows of a model's embedding; None if its config does not say."""
    size = getattr(config.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token id for padding: the tokenizer's padding token, else its EOS, else 0."""
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if isinstance(token, int)), 0)
