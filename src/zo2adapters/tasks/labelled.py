"""Data files of texts with labels, for models that classify or predict numbers: rows of ``text`` and ``label``."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2adapters.tasks.row_source import Cell, location
from zo2adapters.tasks.rows import TOO_LONG, TokenRows, converted_rows, require_kept, require_known
from zo2core.errors import DataError, OptionError

Label = int | float | tuple[float, ...]  # a class, a number, or a number for each class


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """One row, as tokens."""

    input_ids: array[int]  # (length,), int32
    token_type_ids: array[int]  # (length,), int32; empty if the tokenizer makes none
    label: Label

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """The sequences of the row: tokens of each, and for how many of these the loss needs logits."""
        return [(len(self.input_ids), 1)]


@dataclass(frozen=True, slots=True)
class LabelledRows(TokenRows[LabelledRow]):
    """Texts with labels."""

    format: ClassVar = RowFormat.LABELS

    def digest(self) -> str:
        """SHA-256 over tokens and labels."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(json.dumps([row.input_ids.tolist(), row.token_type_ids.tolist(), row.label]).encode())
        return digest.hexdigest()


def read_labelled_rows(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    *,
    sequence_length: int,
    options: RowOptions | None = None,
    vocabulary: int | None = None,
) -> LabelledRows:
    """Read and tokenise a file of texts with labels."""
    options = RowOptions() if options is None else options
    rows, truncated, dropped = [], 0, 0
    for line, row in converted_rows(path, options, takes_labels=True):

        def refuse(found: str, expected: str, remedy: str, line: int = line) -> DataError:
            return DataError(location(path, line), found=found, expected=expected, remedy=remedy)

        texts = [row[key] for key in ("text", "text_pair") if key in row]
        if "text" not in row or not all(isinstance(text, str) and text for text in texts):
            raise refuse(
                f"the keys {', '.join(map(repr, row))}", "a text 'text', perhaps 'text_pair'", "add or correct them"
            )
        label, expected = _label(row.get("label"), config)
        if label is None:
            raise refuse(f"{json.dumps(row.get('label'))[:40]} as 'label'", expected, "correct the label")
        whole = tokenizer(*texts, verbose=False)
        kept = tokenizer(*texts, verbose=False, truncation=True, max_length=sequence_length)
        if not kept["input_ids"]:
            raise refuse("a text of no tokens", "at least 1 token", "lengthen the text, or remove the row")
        is_long = len(whole["input_ids"]) > sequence_length
        if is_long and options.too_long == "drop":
            dropped += 1
            continue
        if is_long and options.too_long == "refuse":
            found, expected = f"{len(whole['input_ids'])} tokens", f"at most {sequence_length} with --too-long refuse"
            raise refuse(found, expected, f"{TOO_LONG}; or pass --too-long cut or drop")
        require_known(location(path, line), kept["input_ids"], tokenizer, vocabulary)
        truncated += is_long
        rows.append(LabelledRow(array("i", kept["input_ids"]), array("i", kept.get("token_type_ids", [])), label))
    require_kept(path, len(rows), dropped, sequence_length)
    return LabelledRows(tuple(rows), truncated, dropped)


def labelled_batch(rows: Sequence[LabelledRow], *, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad rows on the right into one batch."""

    def padded(values: Sequence[array[int]], padding: int) -> torch.Tensor:
        tensors = [torch.tensor(row, dtype=torch.int64) for row in values]
        return pad_sequence(tensors, batch_first=True, padding_value=padding)

    ids = [row.input_ids for row in rows]
    batch = {
        "input_ids": padded(ids, pad_token_id),
        "attention_mask": padded([array("i", [1] * len(tokens)) for tokens in ids], 0),
        "labels": torch.tensor([row.label for row in rows]),
    }
    if rows[0].token_type_ids:
        batch["token_type_ids"] = padded([row.token_type_ids for row in rows], 0)
    return batch


def padding_of(config: PretrainedConfig) -> int:
    """The config's padding token, by which a decoder that classifies finds the last token of a row."""
    pad, vocabulary = getattr(config, "pad_token_id", None), config.get_text_config().vocab_size
    if pad is None or not 0 <= pad < vocabulary:
        raise OptionError(
            "model",
            found=f"{pad} as the config's pad_token_id",
            expected=f"a token from 0 to {vocabulary - 1}, by which the model finds the end of a row",
            remedy="write the tokenizer's padding token into config.json",
        )
    return int(pad)


def classifies(config: PretrainedConfig) -> bool:
    """Whether a model's rows have one class each."""
    if config.problem_type is None:
        return int(config.num_labels or 1) > 1
    return bool(config.problem_type == "single_label_classification")


def rates_once(config: PretrainedConfig) -> bool:
    """Whether a model's rows, if they have no class, have one number each instead of a list."""
    return int(config.num_labels or 1) == 1 and config.problem_type != "multi_label_classification"


def _label(value: Any, config: PretrainedConfig) -> tuple[Label | None, str]:
    """A row's label, None if it is not valid, and a description of valid labels."""
    classes = int(config.num_labels or 1)
    held = value.value if isinstance(value, Cell) else None
    if classifies(config):
        by_name: dict[str, Any] = dict(config.label2id or {})
        index: Any = by_name.get(value, held) if isinstance(value, str) else value
        index = int(index) if isinstance(index, float) and index.is_integer() else index
        expected = f"a class from 0 to {classes - 1}, or one of {', '.join(list(by_name)[:8])}"
        return (index if type(index) is int and 0 <= index < classes else None), expected
    value = value if held is None else held
    numbers = value if isinstance(value, list) else [value]
    are_numbers = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
    if not are_numbers or len(numbers) != classes or isinstance(value, list) == rates_once(config):
        return None, "a number" if rates_once(config) else f"a list of {classes} numbers"
    return (float(value) if rates_once(config) else tuple(map(float, numbers))), ""
