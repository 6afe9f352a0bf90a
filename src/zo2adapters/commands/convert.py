"""``zo2 convert``: pickled weights to safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Turn pickled .bin shards into safetensors, one shard at a time; code in the pickles is not run."""

    model: Path
    """Model directory with pytorch_model*.bin."""
    output: Path
    """Directory to write; it must not exist, or be empty."""

    def run(self) -> None:
        """Convert, and name each shard."""
        from zo2adapters.models.pickle_conversion import convert

        convert(self.model, self.output, report=print)
