"""Reports the metrics of a running run to TensorBoard or Weights & Biases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from zo2adapters.optional_package import optional_package

TrackerName: TypeAlias = Literal["none", "tensorboard", "wandb"]


class LiveMetrics:
    """Reports the rows of ``metrics.jsonl`` to a tracker as they are written."""

    def __init__(self, tracker: TrackerName, directory: Path, options: Mapping[str, Any]) -> None:
        self._writer: Any = None
        self._run: Any = None
        if tracker == "tensorboard":
            module = optional_package("torch.utils.tensorboard", install="tensorboard")
            self._writer = module.SummaryWriter(log_dir=str(directory / "tensorboard"))
        elif tracker == "wandb":
            self._run = optional_package("wandb", install="wandb").init(
                project="zo2", name=directory.name, dir=str(directory), config=dict(options)
            )

    def row(self, row: Mapping[str, Any]) -> None:
        """Report the row of a step or of an evaluation."""
        numbers = {key: value for key, value in row.items() if key != "step" and _is_number(value)}
        if self._writer is not None:
            for key, value in numbers.items():
                self._writer.add_scalar(key, value, row["step"])
        if self._run is not None:
            self._run.log({"step": row["step"], **numbers})

    def close(self) -> None:
        """Close the tracker. May be called twice."""
        writer, run, self._writer, self._run = self._writer, self._run, None, None
        if writer is not None:
            writer.close()
        if run is not None:
            run.finish()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
