"""A model directory's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from zo2adapters.models.companions import companion_files
from zo2core import DataError


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load a model directory's tokenizer, without running remote code.

    Raises:
        DataError: if there is none.
        CheckpointError: if its files are not to be read.
    """
    companion_files(directory)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    # transformers meets damaged files with whatever they lead to, and tokenizers with a bare Exception.
    except Exception as error:
        raise DataError(
            directory,
            found=f"no usable tokenizer ({(str(error).splitlines() or [type(error).__name__])[0][:200]})",
            expected="tokenizer files beside the model",
            remedy="copy the tokenizer files of the base model into the directory",
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Token id to pad with: the tokenizer's padding token, else its EOS, else 0."""
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if isinstance(token, int)), 0)
