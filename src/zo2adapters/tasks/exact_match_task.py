"""A task for prompts and completions: the share of prompts that the model does not continue with their completion."""

from __future__ import annotations

from collections.abc import Sequence

from zo2adapters.tasks.generated_task import Continued, GeneratedTask
from zo2adapters.tasks.rows import Dataset, TokenizedRow
from zo2adapters.tasks.task import gather_in_order
from zo2core import Engine


class ExactMatch(GeneratedTask):
    """A task that compares completions, token for token, with greedy generation. See ``Task``."""

    def evaluate(self, engine: Engine, rows: Dataset) -> dict[str, float]:
        """Compute the share of rows that match, and ``loss``, 1 minus that share."""
        parts, continued = self._evaluated(engine, rows)
        counts = list(map(len, parts))
        mismatches = int(sum(gather_in_order(engine, self._losses(continued), counts, rows.rows)))
        return {"loss": mismatches / len(rows), "exact_match": 1 - mismatches / len(rows)}

    def _new_tokens(self, row: TokenizedRow) -> int:
        return len(row.input_ids) - row.prompt_length

    def _losses(self, continued: Sequence[Continued]) -> list[float]:
        """1 for each row that does not match."""
        return [
            float(list(tokens[: self._new_tokens(row)]) != list(row.input_ids[row.prompt_length :]))
            for row, tokens in continued
        ]
