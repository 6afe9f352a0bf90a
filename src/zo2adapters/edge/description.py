"""A program's description: the shape of its batches, and the names of its adapter in peft's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from zo2adapters.edge.signs import GROUP, groups_of
from zo2core.errors import CheckpointError

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ProgramDescription:
    """The properties of a program, which are fixed when it is written."""

    rows: int  # most rows of a batch
    tokens: int  # most tokens of a row
    vocabulary: int  # size of the vocabulary
    zo_eps: float  # perturbation scale
    config: Mapping[str, Any]  # peft's config, from ``plain_config``
    trained: Mapping[str, tuple[int, int]]  # (outputs, rank) of each layer's B by name in peft's files, in the state's order
    frozen: tuple[str, ...]  # name of each layer's A in peft's files, in the same order

    def to_json(self) -> str:
        """The description as text, which is stored in the program."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str, path: Path) -> Self:
        """Read the text of ``to_json``."""
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
        """B of each layer, by its name in peft's files."""
        values: dict[str, torch.Tensor] = {}
        start = 0
        for name, shape in self.trained.items():
            size = shape[0] * shape[1]
            values[name] = adapter[start : start + size].view(shape)
            start += groups_of(size) * GROUP
        return values
