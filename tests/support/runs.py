"""A small run: model, tokenizer and rows in a folder, and the options that train on them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import write_rows
from engines import fails_at
from models import WORDS, save_model, save_tokenizer, small_config
from safetensors.torch import load_file

from zo2adapters.tasks.row_source import DataFile
from zo2adapters.trainers.optimization import Decay, Optimization
from zo2adapters.trainers.options import Batching, Storage, TrainOptions
from zo2adapters.trainers.run_inputs import RunStart
from zo2adapters.trainers.trainer import QUIET, open_run

TIMED = {
    "tokens_per_second",
    "seconds",
    "bound_seconds",
    "evaluation_seconds",
    "lanes",
    "rss_bytes",
    "peak_rss_bytes",
}
# lost with the others where a row was made up from the journal
TIMED |= {"bytes_moved", "snapshot_bytes", "tokens"}


def small_run(
    folder: Path, *, layers: int = 3, dtype: torch.dtype = torch.float32, **changes: Any
) -> TrainOptions:
    """Make ``base`` and ``rows.jsonl`` in a folder."""
    base = save_model(
        folder / "base",
        small_config("llama", vocab_size=len(WORDS), num_hidden_layers=layers),
        dtype,
    )
    save_tokenizer(base)
    rows = [
        {"prompt": f"the cat {word}", "completion": f" {other}"}
        for word in WORDS[5:]
        for other in WORDS[8:]
    ]
    write_rows(folder / "rows.jsonl", rows)
    options = TrainOptions(
        model=str(base),
        data=folder / "rows.jsonl",
        output=folder / "run",
        steps=3,
        optimization=Optimization(method="zeroth-order", lr=1e-2),
        batching=Batching(batch_size=3),
    )
    return replace(options, **changes)


def data_sha256(path: Path) -> str:
    """The digest of a data file."""
    with DataFile(path) as file:
        return file.sha256()


STEPS = 6


def resumable_run(tmp_path: Path) -> TrainOptions:
    """Six steps, with evaluations, a decay and weights on disk."""
    return small_run(
        tmp_path,
        evaluation=tmp_path / "rows.jsonl",
        evaluate_every=2,
        steps=STEPS,
        seed=3,
        optimization=Optimization(
            method="zeroth-order", lr=1e-2, decay=Decay.LINEAR, warmup_steps=2
        ),
        storage=Storage(write_back_every=2),
    )


def finish(options: TrainOptions, *, resume: bool = False) -> None:
    with open_run(RunStart(options, resumes=resume), display=QUIET) as trainer:
        trainer.run()


def interrupt_after(options: TrainOptions, steps: int) -> None:
    """Train for some steps and end as a killed process does: nothing is flushed, exported or closed
    in order.
    """
    with open_run(RunStart(options), display=QUIET) as trainer:
        engine: Any = trainer.engine
        engine.step = fails_at(trainer.engine.step, steps + 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            trainer.run()


def rows_of(path: str | Path) -> list[Any]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def weights_of(directory: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a saved model or adapter in one file."""
    [path] = Path(directory).glob("*.safetensors")
    return load_file(path)


def bits_of(run: str | Path) -> dict[str, Any]:
    """The journal of a run, and the weights of its whole model or adapter, or of both."""
    weights = [path.read_bytes() for path in sorted(Path(run, "model").rglob("*.safetensors"))]
    assert weights
    return {"journal": Path(run, "journal.jsonl").read_bytes(), "weights": weights}


def outcome(run: str | Path) -> dict[str, Any]:
    """Everything of a run that does not measure time."""
    rows = rows_of(Path(run, "metrics.jsonl"))
    return {
        **bits_of(run),
        "metrics": [{key: value for key, value in row.items() if key not in TIMED} for row in rows],
    }
