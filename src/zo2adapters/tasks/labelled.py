"""JSONL files of texts with labels, for models that classify or rate: rows of ``text`` and ``label``."""

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

from zo2adapters.tasks.row_format import RowFormat
from zo2adapters.tasks.rows import TokenRows, parsed_rows
from zo2core import DataError, OptionError

Label = int | float | tuple[float, ...]  # a class, a number, or one number for each class


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """One row, as tokens."""

    input_ids: array[int]  # (length,), int32
    token_type_ids: array[int]  # the same, of a tokenizer that tells two texts apart so; else empty
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
    path: Path, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, *, sequence_length: int
) -> LabelledRows:
    """Read and tokenise a file of texts with labels.

    Args:
        path: JSONL file. A row has ``text``, where two texts are compared also ``text_pair``, and ``label``: a class by its
            place from 0 or by its name in ``label2id`` of the config; where ``num_labels`` is 1 a number; where
            ``problem_type`` is regression or several classes a row, a number for each class.
        tokenizer: The model's tokenizer.
        config: The model's.
        sequence_length: Most tokens a row may keep; longer ones lose their end.

    Raises:
        DataError: if the file cannot be read, or a row is malformed; it names the line.
    """
    rows, truncated = [], 0
    for line, row in parsed_rows(path):

        def refuse(found: str, expected: str, remedy: str, line: int = line) -> DataError:
            return DataError(f"{path}, line {line}", found=found, expected=expected, remedy=remedy)

        texts = [row[key] for key in ("text", "text_pair") if key in row]
        if "text" not in row or not all(isinstance(text, str) and text for text in texts):
            raise refuse(f"the keys {', '.join(map(repr, row))}", "a text 'text', perhaps 'text_pair'", "write it as such")
        label, expected = _label(row.get("label"), config)
        if label is None:
            raise refuse(f"{json.dumps(row.get('label'))[:40]} as 'label'", expected, "write the label as such")
        whole = tokenizer(*texts, verbose=False)
        kept = tokenizer(*texts, verbose=False, truncation=True, max_length=sequence_length)
        if not kept["input_ids"]:
            raise refuse("a text of no tokens", "one that the tokenizer makes something of", "mend the row, or remove it")
        truncated += len(whole["input_ids"]) > sequence_length
        rows.append(LabelledRow(array("i", kept["input_ids"]), array("i", kept.get("token_type_ids", [])), label))
    return LabelledRows(tuple(rows), truncated)


def labelled_batch(rows: Sequence[LabelledRow], *, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad rows on the right into one batch.

    Args:
        rows: At least one.
        pad_token_id: Token id at padded positions.

    Returns:
        ``input_ids``, ``attention_mask`` and, where the rows have them, ``token_type_ids``, (batch, longest row), int64;
        ``labels``: (batch,), int64 of classes and float32 of numbers, or (batch, classes), float32.
    """

    def padded(values: Sequence[array[int]], padding: int) -> torch.Tensor:
        tensors = [torch.tensor(own, dtype=torch.int64) for own in values]
        return pad_sequence(tensors, batch_first=True, padding_value=padding)

    ids = [row.input_ids for row in rows]
    batch = {
        "input_ids": padded(ids, pad_token_id),
        "attention_mask": padded([array("i", [1] * len(own)) for own in ids], 0),
        "labels": torch.tensor([row.label for row in rows]),
    }
    if rows[0].token_type_ids:
        batch["token_type_ids"] = padded([row.token_type_ids for row in rows], 0)
    return batch


def padding_of(config: PretrainedConfig) -> int:
    """The token that rows are padded with: the config's, by which a decoder that classifies finds where a row ends.

    Raises:
        OptionError: if the config names none of the vocabulary.
    """
    pad, vocabulary = getattr(config, "pad_token_id", None), config.get_text_config().vocab_size
    if pad is None or not 0 <= pad < vocabulary:
        raise OptionError(
            "model",
            found=f"{pad} as the config's pad_token_id",
            expected=f"a token from 0 to {vocabulary - 1}, by which the model finds where a row ends",
            remedy="write it into config.json, as the tokenizer has it",
        )
    return int(pad)


def classifies(config: PretrainedConfig) -> bool:
    """Whether a row has one class."""
    if config.problem_type is None:
        return int(config.num_labels or 1) > 1
    return bool(config.problem_type == "single_label_classification")


def rates_once(config: PretrainedConfig) -> bool:
    """Whether a row that has no class has one number, not a list of them."""
    return int(config.num_labels or 1) == 1 and config.problem_type != "multi_label_classification"


def _label(value: Any, config: PretrainedConfig) -> tuple[Label | None, str]:
    """A row's label, None if it is none, and what is expected."""
    classes = int(config.num_labels or 1)
    if classifies(config):
        by_name: dict[str, Any] = dict(config.label2id or {})
        place: Any = by_name.get(value) if isinstance(value, str) else value
        expected = f"a class from 0 to {classes - 1}, or one of {', '.join(list(by_name)[:8])}"
        return (place if type(place) is int and 0 <= place < classes else None), expected
    numbers = value if isinstance(value, list) else [value]
    are_numbers = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
    if not are_numbers or len(numbers) != classes or isinstance(value, list) == rates_once(config):
        return None, "a number" if rates_once(config) else f"a list of {classes} numbers"
    return (float(value) if rates_once(config) else tuple(map(float, numbers))), ""
