"""What a user should know of a run before it starts, a line each."""

from __future__ import annotations

import torch

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.precision import product_seconds
from zo2adapters.trainers.lessons import Rows
from zo2adapters.trainers.options import TrainOptions


def remarks(options: TrainOptions, model: HFBlockModel, data: Rows) -> list[str]:
    """Remarks on precision and data.

    Args:
        options: The run's, with what was chosen for this machine.
        model: Opened in the run's precision.
        data: The rows to train on.
    """
    rows, batch_size = len(data), options.batching.batch_size
    lines = [_precision(model, on_cpu=options.storage.device == "cpu")]
    if data.truncated:
        lines.append(f"{data.truncated} rows were cut to the sequence length")
    if batch_size > rows:
        lines.append(f"a batch of {batch_size} rows takes each of the {rows} rows of the data more than once")
    return lines


def _precision(model: HFBlockModel, *, on_cpu: bool) -> str:
    specs = [spec for layout in model.layouts for spec in layout.parameters]
    if any(spec.frozen for spec in specs):
        return "precision: exact, an adapter in float32 on weights that are only read"
    stored = specs[0].dtype
    if model.autocast is not None:
        return f"precision: mixed, weights in {_name(stored)}, computed in {_name(model.autocast)}"
    line = f"precision: exact, all in {_name(stored)}"
    if stored in (torch.float16, torch.bfloat16):
        line += "; small updates are rounded away, which --precision mixed avoids"
    if stored is torch.float16 and on_cpu:
        times = product_seconds(torch.float16) / product_seconds(torch.bfloat16)
        line += f"; a matrix product takes {times:.1f} times as long as in bfloat16 here"
    return line


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
