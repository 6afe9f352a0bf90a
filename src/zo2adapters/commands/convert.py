"""``zo2 convert``: pickled weights to safetensors, or weights of 16 and 32 bits to fewer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Turn pickled .bin shards into safetensors, one at a time and without running code in them, or quantise a model."""

    model: Path
    """Model directory with pytorch_model*.bin; to quantise, one with safetensors."""
    output: Path
    """Directory to write; it must not exist, or be empty."""
    quantize: Literal["int8", "nf4", "fp8"] | None = None
    """Store the layers' linear weights so, one tensor at a time. Such a model trains with --rank, its weights only read."""

    def run(self) -> None:
        """Convert, and name each shard, or each segment."""
        if self.quantize is not None:
            from zo2adapters.models.quantizer import quantize

            quantize(self.model, self.output, self.quantize)
            return
        from zo2adapters.models.pickle_conversion import convert

        convert(self.model, self.output, report=print)
