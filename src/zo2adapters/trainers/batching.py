"""How rows become batches: what a user may say of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zo2adapters.ranges import require_at_least, require_between
from zo2core import OptionError

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel  # a command line is read without transformers

DEFAULT_LENGTH = 1024  # tokens, where the model takes as many
MOST_ROWS = 1 << 16  # of a batch: each is an object, whatever memory there is


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How rows become batches."""

    batch_size: int = 16
    """Rows a batch has."""
    micro_batch_size: int | None = None
    """Rows that run at a time, where a whole batch does not fit. Each block serves all micro-batches in its one visit."""
    loss_chunk: int | None = None
    """Labelled tokens whose logits are in memory at a time. By default all of a batch's in exact precision, and in mixed
    precision what a cache holds. The loss differs by the order of its sum only."""
    pack: bool = False
    """Lay a batch's rows one behind the other instead of padding them to one length: rows of text, by the model's own loss,
    where the model's attention keeps packed rows apart. The loss differs by the order of its sums only."""
    sequence_length: int | None = None
    """Longest row in tokens; longer ones are cut at the end. By default 1024, or what the model takes if that is less."""

    def require_valid(self) -> None:
        """Refuse numbers that no model and no data could take.

        Raises:
            OptionError: naming the option.
        """
        require_between("batch_size", self.batch_size, 1, MOST_ROWS)
        for option in ("micro_batch_size", "loss_chunk"):
            value = getattr(self, option)
            if value is not None:
                require_at_least(option, value, 1)
        if self.pack and self.micro_batch_size is not None:
            expected = "packed rows, which run as one"
            raise OptionError("pack", found="--micro-batch-size", expected=expected, remedy="leave one of the two out")
        if self.sequence_length is not None:
            require_at_least("sequence_length", self.sequence_length, 2)

    def shape(self, rows: int, tokens: int) -> tuple[int, int]:
        """How many rows a batch has, and tokens in each, of so many rows with at most so many tokens."""
        return (1, rows * tokens) if self.pack else (rows, tokens)

    def length_for(self, model: HFBlockModel) -> int:
        """The longest row for a model.

        Raises:
            OptionError: if more was asked for than the model takes.
        """
        longest = model.longest_row
        if self.sequence_length is None:
            return min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
        if longest is not None and self.sequence_length > longest:
            raise OptionError(
                "sequence_length",
                found=repr(self.sequence_length),
                expected=f"at most {longest}, the longest sequence the model takes",
                remedy="choose a shorter length",
            )
        return self.sequence_length
