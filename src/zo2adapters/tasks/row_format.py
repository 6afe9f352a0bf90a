"""The kinds of rows that files hold."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


class RowFormat(Enum):
    """What a row of a file has; the value names its keys, for messages."""

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
        return next((own for key, own in formats.items() if key in row), cls.TEXT)
