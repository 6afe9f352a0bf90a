"""The formats of rows in data files."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


class RowFormat(Enum):
    """The format of a row; the value lists its keys, for messages."""

    TEXT = "text, or prompt and completion"
    CANDIDATES = "prompt, candidates and answer"
    PREFERENCES = "prompt, chosen and rejected"
    ANSWERS = "prompt and answers"
    LABELS = "text and label"

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> RowFormat:
        """Recognise the format of a row for a causal language model by its keys.

        Args:
            row: A JSON object of a file.
        """
        formats = {"candidates": cls.CANDIDATES, "chosen": cls.PREFERENCES, "answers": cls.ANSWERS}
        return next((known for key, known in formats.items() if key in row), cls.TEXT)
