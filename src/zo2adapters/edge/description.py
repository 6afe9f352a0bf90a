"""What a program says about itself: which batches it takes, and what its adapter is called in peft's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from zo2adapters.edge.signs import GROUP, groups_of
from zo2core import CheckpointError

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ProgramDescription:
    """What is settled when a program is written."""

    rows: int  # of a batch, at most
    tokens: int  # of a row, at most
    vocabulary: int  # tokens are below it
    zo_eps: float
    config: Mapping[str, Any]  # peft's, as it is saved
    trained: Mapping[str, tuple[int, int]]  # B of each layer: name in peft's files, (outputs, rank); in the state's order
    frozen: tuple[str, ...]  # names of A of each layer, in the same order

    def to_json(self) -> str:
        """The text that a program keeps."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str, path: Path) -> Self:
        """Read what ``to_json`` wrote.

        Args:
            text: Text of the program.
            path: Where the program is, for messages.

        Raises:
            CheckpointError: if it is of another format.
        """
        values = json.loads(text)
        if values.pop("format", None) != _FORMAT:
            raise CheckpointError(
                f"{path}: description",
                found="another format",
                expected=f"format {_FORMAT}",
                remedy="write the program again, or run it with the version of zo2core that wrote it",
            )
        trained = {name: (int(outputs), int(rank)) for name, (outputs, rank) in values["trained"].items()}
        return cls(**{**values, "trained": trained, "frozen": tuple(values["frozen"])})

    def split(self, adapter: torch.Tensor) -> dict[str, torch.Tensor]:
        """B of each layer, by its name in peft's files.

        Args:
            adapter: The state's, float32, flat; only read.
        """
        values: dict[str, torch.Tensor] = {}
        start = 0
        for name, shape in self.trained.items():
            size = shape[0] * shape[1]
            values[name] = adapter[start : start + size].view(shape)
            start += groups_of(size) * GROUP
        return values
