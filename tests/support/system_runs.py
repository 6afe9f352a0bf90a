"""Runs that use every kind of file, and the bits that they leave: as a program, those of a process.

Usage: python system_runs.py FOLDER
"""

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from engines import memory, open_engine
from models import save_model, small_config

from zo2adapters import open_checkpoint
from zo2adapters.models.peft_adapter import Adapter
from zo2core import (
    Engine,
    FirstOrder,
    LowRankPerturbation,
    MeZOSGD,
    TorchOptimizer,
    WriteBackPolicy,
    ZerothOrder,
)

IDS = torch.tensor([[2, 5, 7, 6, 4, 3], [8, 3, 3, 9, 1, 2]])
BATCH = {"input_ids": IDS, "labels": IDS}
STEPS = 4


def dense(base: Path, run: Path) -> Engine:
    """One block in memory at a time, the others read from disk and written back to it."""
    estimator = MeZOSGD(lr=1e-2, zo_eps=1e-3)
    written = WriteBackPolicy(directory=run, every=2)
    return open_engine(
        open_checkpoint(base), ZerothOrder(estimator), run=run, memory=memory(1), write_back=written
    )


def low_rank(base: Path, run: Path) -> Engine:
    """Factors of ended periods are kept in a file, and read from it."""
    method = ZerothOrder(MeZOSGD(lr=1e-2, zo_eps=1e-3), LowRankPerturbation(rank=2, period=1))
    written = WriteBackPolicy(directory=run)
    return open_engine(open_checkpoint(base), method, run=run, memory=memory(1), write_back=written)


def first_order(base: Path, run: Path) -> Engine:
    """All weights by gradients, with states on disk."""
    method = FirstOrder(TorchOptimizer(partial(torch.optim.AdamW, lr=1e-2)), lr=1e-2)
    return open_engine(open_checkpoint(base), method, run=run, memory=memory(2), commit_every=1)


def adapter(base: Path, run: Path) -> Engine:
    """A LoRA by gradients; what the backward pass needs of blocks is in a file without a name."""
    chosen = peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"])
    model = open_checkpoint(base, adapter=Adapter(config=chosen, seed=1))
    method = FirstOrder(partial(torch.optim.AdamW, lr=1e-2))
    spill = run.parent
    return open_engine(model, method, run=run, memory=memory(2, 1), micro_batch_size=1, spill=spill)


KINDS: Mapping[str, Callable[[Path, Path], Engine]] = {
    "dense": dense,
    "low rank": low_rank,
    "first order": first_order,
    "adapter": adapter,
}


def bits(folder: Path, kind: str) -> dict[str, str]:
    """Digests of what a run leaves that was stopped after half of its steps, and resumed."""
    base = folder / "base"
    if not base.exists():
        save_model(base, small_config("llama", num_hidden_layers=3))
    run = folder / kind
    losses = []
    for _ in range(2):
        with KINDS[kind](base, run) as engine:
            losses += [engine.step(BATCH).losses for _ in range(STEPS // 2)]
    digest = hashlib.sha256()
    with KINDS[kind](base, run) as engine:
        for name, value in engine.parameters_now():
            digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return {"losses": repr(losses), "weights": digest.hexdigest()}


def main() -> None:
    folder = Path(sys.argv[1])
    simulated = importlib.import_module("sitecustomize")
    found: dict[str, Any] = {kind: bits(folder, kind) for kind in KINDS}
    print(json.dumps({"bits": found, "controls": dict(simulated.controls)}))


if __name__ == "__main__":
    main()
