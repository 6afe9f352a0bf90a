"""``zo2 convert``: convert pickled weights to safetensors, or quantise weights of 16 or 32 bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from zo2adapters.commands.options import Command


@dataclass(frozen=True, kw_only=True)
class Convert(Command):
    """Convert pickled .bin shards to safetensors, one at a time and without running code in them, or quantise a model."""

    needs: ClassVar = ("zo2adapters.models.pickle_conversion",)

    model: Path
    """Model directory with pytorch_model*.bin or, with --quantize, with safetensors."""
    output: Path
    """Directory to write; it must not exist, or be empty."""
    quantize: Literal["int8", "nf4", "fp8"] | None = None
    """Format in which the layers' linear weights are stored. Such a model is trained with --rank or an adapter;
    its own weights do not change."""

    def run(self) -> None:
        """Convert, and print each shard, or show a bar while weights are quantised."""
        if self.quantize is not None:
            self._quantize(self.quantize)
            return
        from zo2adapters.models.pickle_conversion import convert

        convert(self.model, self.output, report=print)

    def _quantize(self, method: Literal["int8", "nf4", "fp8"]) -> None:
        from zo2adapters.models.quantizer import quantize
        from zo2adapters.trainers.progress_bar import progress_bar
        from zo2core.types import shown_bytes

        with progress_bar(total=0, unit="B", desc=method) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            before, after, left = quantize(self.model, self.output, method, progress=progress)
        print(f"{self.output}: the model in {method}, {shown_bytes(after)}; it was {shown_bytes(before)}")
        if left:
            print(
                f"not in {method}: {len(left)} of the layers' matrices, {shown_bytes(sum(spec.nbytes for spec in left))}, "
                f"such as {max(left, key=lambda spec: spec.numel).name}; only linear layers and experts are encoded"
            )
