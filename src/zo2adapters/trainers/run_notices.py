"""Lines that are printed before a run starts: precision, data and storage."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.precision import product_seconds
from zo2adapters.tasks.registry import names_model_loss
from zo2adapters.tasks.row_options import RowFormat
from zo2adapters.tasks.rows import Rows
from zo2adapters.trainers.options import Resources, TrainOptions
from zo2core import BlockLayout, DevicePlan, HostPlan
from zo2core.factors import kept_bytes_a_step
from zo2core.planning.speeds import terabytes_written
from zo2core.ranges import counted
from zo2core.types import shown_bytes

_MOST_COLUMNS = 12  # that a line lists
_NEGLIGIBLE = 0.01  # terabytes in 1,000 steps, which wear no disk out


def notices(options: TrainOptions, model: HFBlockModel, data: Rows, evaluation: Rows | None) -> list[str]:
    """Lines about precision and data."""
    rows, batch_size = len(data), options.batching.batch_size
    lines = [_precision(options, model)]
    if options.first_order.method is not None:
        lines += _dropout(model)
    lines += _unused_columns(options, data)
    lines += length_notices(data)
    if options.eval_split is not None and evaluation is not None:
        lines.append(f"{len(evaluation)} of {rows + len(evaluation)} rows are evaluated on instead of trained on")
    elif evaluation is not None:
        lines += [f"evaluation: {line}" for line in length_notices(evaluation)]
    if batch_size > rows:
        lines.append(f"the data has {counted(rows, 'row')}: a batch of {batch_size} contains the same ones more than once")
    return lines


def _unused_columns(options: TrainOptions, data: Rows) -> list[str]:
    """A line about the other columns of rows whose text alone is trained on, although nobody has named it."""
    is_plain = data.format is RowFormat.TEXT and names_model_loss(options.objective) and not options.rows.names_columns
    others = [column for column in data.columns if column != "text"]
    if not is_plain or "text" not in data.columns or not others:
        return []
    listed = ", ".join(others[:_MOST_COLUMNS]) + (", ..." if len(others) > _MOST_COLUMNS else "")
    return [f"trained on: the column text; not used: {listed}. --prompt-template and --columns, or zo2 init, use more"]


def length_notices(rows: Rows) -> list[str]:
    """Lines about rows that are longer than the sequence length."""
    numbers = {"cut to the sequence length": rows.truncated, "left out, since longer": rows.dropped}
    return [f"{words}: {counted(number, 'row')}" for words, number in numbers.items() if number]


def storage(host: HostPlan, device: DevicePlan | None, limits: Resources, disk_writes: str) -> str:
    """A line that says where a run's weights are kept and what it writes."""
    streaming = "" if host.buckets is None else f"; blocks are streamed from disk, {host.buckets} at a time"
    memory = f"Memory: {shown_bytes(host.nbytes)} of {shown_bytes(host.budget)} {_kind(limits.memory)}{streaming}."
    if device is not None:
        used = f"{shown_bytes(device.nbytes)} of {shown_bytes(device.budget)} {_kind(limits.device_memory)}"
        memory += f" Memory of {limits.device}: {used}; {device.kept} blocks stay on it."
    return f"{memory} Disk writes: {disk_writes}."


def _kind(limit: str) -> str:
    """What a plan's budget is: memory that is free, or what the options allow."""
    return "free" if limit == "auto" else "allowed"


def disk_writes(options: TrainOptions, every: int | None, layouts: Sequence[BlockLayout]) -> str:
    """What a zeroth-order run writes of its weights."""
    if every is not None:
        written = terabytes_written(layouts, every)
        what = "negligible" if written < _NEGLIGIBLE else f"each block every {every} steps"
        return f"{what}, {_terabytes(written)}"
    return "negligible" if options.optimization.rank is None else _period_writes(options, layouts)


def _period_writes(options: TrainOptions, layouts: Sequence[BlockLayout]) -> str:
    """What a low-rank run writes of finished periods."""
    if options.storage.write_back_every == "never":
        return "no factors of finished periods, because of --write-back-every never"
    limit = options.storage.write_limit_tb
    most = None if limit is None else limit * 1e9
    nbytes = kept_bytes_a_step(options.optimization.perturbation, layouts, most)
    what = "factors of finished periods"
    return f"{what}, {_terabytes(nbytes / 1e9)}" if nbytes else f"no {what}, because of --write-limit-tb"


def _dropout(model: HFBlockModel) -> list[str]:
    """A line about probabilities of dropout in the model's config, which have no effect."""
    values = model.config.get_text_config().to_dict().items()
    rates = {name: value for name, value in values if "drop" in name and isinstance(value, float) and value > 0}
    if not rates:
        return []
    return [f"no dropout: steps run in evaluation mode; {', '.join(f'{n} {v:g}' for n, v in rates.items())} has no effect"]


def _terabytes(count: float) -> str:
    return f"{shown_bytes(1e12 * count)} in 1,000 steps"


def _precision(options: TrainOptions, model: HFBlockModel) -> str:
    specs = [spec for layout in model.layouts for spec in layout.parameters]
    if any(spec.frozen for spec in specs):
        precision = "exact" if model.autocast is None else f"mixed, computed in {_name(model.autocast)}"
        line = f"precision: {precision}; an adapter in float32 on weights that are only read"
        layers = (re.search(r"(\w+)(\.base_layer)*\.lora_A\.", spec.name) for spec in specs)
        names = dict.fromkeys(found[1] for found in layers if found is not None)
        return f"{line}: LoRA of {', '.join(names)}" if names else line
    stored = specs[0].dtype
    if model.autocast is not None:
        return f"precision: mixed, weights in {_name(stored)}, computed in {_name(model.autocast)}"
    line = f"precision: exact, all in {_name(stored)}"
    if options.optimization.rank is not None:
        line = f"precision: exact, computed in {_name(stored)}; weights are only read, updates add up in float32"
    elif stored in (torch.float16, torch.bfloat16):
        line += "; small updates are rounded away, which --precision mixed avoids"
    if stored is torch.float16 and options.storage.device == "cpu":
        times = product_seconds(torch.float16) / product_seconds(torch.bfloat16)
        line += f"; on this CPU a matrix product takes {times:.1f} times as long as in bfloat16"
    return line


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
