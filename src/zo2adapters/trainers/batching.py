"""Options that say how rows become batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zo2core.errors import OptionError

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # a command line is read without transformers

DEFAULT_LENGTH = 1024  # longest row in tokens, unless the model's limit is lower


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How rows become batches."""

    batch_size: int = 16
    """Rows per batch."""
    micro_batch_size: int | None = None
    """Rows that run at a time, if a whole batch does not fit in memory. Each block is still read once for all rows."""
    loss_chunk: int | None = None
    """Labelled tokens whose logits are in memory at a time. By default all tokens of a batch in exact precision, and as many
    as fit in the CPU's cache in mixed precision. It changes only the order in which the loss is summed."""
    pack: bool = False
    """Concatenate the rows of a batch instead of padding them. Needs rows of text, the model's own loss, and attention that
    keeps packed rows apart. It changes only the order in which the loss is summed."""
    sequence_length: int | None = None
    """Longest row in tokens; longer rows are cut at the end. By default 1024, or the model's limit if that is lower."""

    def shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """Rows and tokens per row of a batch."""
        return (1, rows * tokens) if self.pack else (rows, tokens)

    def length_for(self, model: HFBlockModel) -> int:
        """Longest row in tokens for a model."""
        longest = model.longest_row
        if self.sequence_length is None:
            return min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
        if longest is not None and self.sequence_length > longest:
            raise OptionError(
                "sequence_length",
                found=repr(self.sequence_length),
                expected=f"at most {longest}, the longest sequence the model takes",
                remedy=f"pass a value of at most {longest}",
            )
        return self.sequence_length
