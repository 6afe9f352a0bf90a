"""A small run: model, tokenizer and rows in a folder, and the options that train on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models import WORDS, save_model, save_tokenizer, small_config

from zo2adapters.trainers.batching import Batching
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import TrainOptions


def small_run(folder: Path, *, layers: int = 3, dtype: torch.dtype = torch.float32, **changes: Any) -> TrainOptions:
    """Make ``base`` and ``rows.jsonl`` in a folder.

    Args:
        folder: Exists.
        layers: Of a Llama.
        dtype: Of its checkpoint.
        changes: To the options of the run, which is to be in ``run``.
    """
    base = save_model(folder / "base", small_config("llama", vocab_size=len(WORDS), num_hidden_layers=layers), dtype)
    save_tokenizer(base)
    rows = [{"prompt": f"the cat {word}", "completion": f" {other}"} for word in WORDS[5:] for other in WORDS[8:]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = TrainOptions(
        model=str(base),
        data=folder / "rows.jsonl",
        output=folder / "run",
        steps=3,
        optimization=Optimization(lr=1e-2),
        batching=Batching(batch_size=3),
    )
    return replace(options, **changes)
