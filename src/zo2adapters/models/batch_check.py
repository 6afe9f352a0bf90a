"""What a Hugging Face causal language model takes as a batch, checked before it runs."""

from __future__ import annotations

from transformers import PretrainedConfig

from zo2core import BatchError
from zo2core.types import Batch

IGNORE_INDEX = -100  # label of a token without loss, as in Hugging Face


def check_batch(batch: Batch, config: PretrainedConfig) -> None:
    """Refuse a batch that the model cannot take or learn from.

    Raises:
        BatchError: naming the entry.
    """
    for key in ("input_ids", "labels"):
        if key not in batch:
            raise _refusal(key, f"no {key}", "a (batch, tokens) tensor", "pass input_ids and labels")
    ids, labels = batch["input_ids"], batch["labels"]
    if ids.dim() != 2 or ids.is_floating_point() or ids.numel() == 0:
        raise _refusal(
            "input_ids", f"{ids.dtype} of shape {tuple(ids.shape)}", "integers (batch, tokens)", "pad to one length"
        )
    for key in ("labels", "attention_mask"):
        if key in batch and batch[key].shape != ids.shape:
            raise _refusal(key, f"shape {tuple(batch[key].shape)}", f"{tuple(ids.shape)} as input_ids", "pad alike")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and ids.shape[1] > longest:
        raise _refusal("input_ids", f"{ids.shape[1]} tokens", f"at most {longest}", "cut the sequences")
    for key, values in (("input_ids", ids), ("labels", labels[labels != IGNORE_INDEX])):
        if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < config.vocab_size:
            found = f"token {int(values.min())} to {int(values.max())}"
            raise _refusal(key, found, f"0 to {config.vocab_size - 1}", "use this model's own tokenizer")
    if not bool((labels[:, 1:] != IGNORE_INDEX).any()):
        raise _refusal("labels", "no token to predict", "a label beyond the first token", "leave this batch out")


def _refusal(key: str, found: str, expected: str, remedy: str) -> BatchError:
    return BatchError(f"batch[{key!r}]", found=found, expected=expected, remedy=remedy)
