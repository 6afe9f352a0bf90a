"""What ``torchrun`` starts in tests: a worker that trains the toy until its steps are taken.

torchrun --standalone --nproc-per-node 3 worker_program.py FOLDER STEPS
"""

import os
import sys
from pathlib import Path

import torch
from toy import ToyBlockModel

from zo2core import Engine, MultiQueryRGE, Workers, ZerothOrder


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    """Rows that depend on the step alone."""
    ids = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def trained(folder: Path, rank: int, steps: int, workers: Workers | None) -> list[bytes]:
    """Go on until the journal of this rank has so many steps; the bytes of the weights."""
    model = ToyBlockModel(11, 8, 3, tied=True, dtype=torch.float32, file=folder / f"{rank}.safetensors")
    estimator = MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=3)
    with Engine(model, ZerothOrder(estimator), journal=folder / f"{rank}.jsonl", workers=workers) as engine:
        for step in range(engine.version, steps):
            engine.step(batch_of(step))
        return [tensor.numpy().tobytes() for _, tensor in engine.parameters_now()]


def main(folder: Path, steps: int) -> None:
    """Train as one of several workers."""
    (folder / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    with Workers.from_torchrun(split="directions", timeout=20.0) as workers:
        weights = trained(folder, workers.rank, steps, workers)
        (folder / f"{workers.rank}.weights").write_bytes(b"".join(weights))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
