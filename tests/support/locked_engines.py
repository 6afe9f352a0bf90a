"""Engines that hold a write-back directory: the toy model, and a small Llama with low-rank updates."""

from __future__ import annotations

from pathlib import Path

import torch
from engines import zeroth_order
from models import save_model, small_config
from toy import ToyBlockModel

from zo2adapters import open_checkpoint
from zo2core import (
    Engine,
    HostPlan,
    Journal,
    LowRankPerturbation,
    MemoryPolicy,
    MeZOSGD,
    PhiloxNoise,
    WriteBackPolicy,
    ZerothOrder,
)

IDS = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}


def toy(run: Path) -> ToyBlockModel:
    return ToyBlockModel(50, 40, 4, tied=True, dtype=torch.float32, file=run.parent / "toy.safetensors")


def engine(run: Path, *, journal: Journal | Path | None = None, every: int = 1, lr: float = 1e-2) -> Engine:
    return zeroth_order(
        toy(run),
        MeZOSGD(lr=lr, zo_eps=1e-3),
        noise=PhiloxNoise(),
        journal=journal,
        memory=MemoryPolicy(host=HostPlan((), budget=2**28, buckets=1, keep_noise=False)),
        write_back=WriteBackPolicy(directory=run, every=every),
    )


def small_llama(folder: Path) -> Path:
    return save_model(folder / "base", small_config("llama"), torch.bfloat16)


def beside(base: Path, run: Path, journal: Path) -> Engine:
    return Engine(
        open_checkpoint(base),
        ZerothOrder(
            MeZOSGD(lr=1e-2, zo_eps=1e-2, perturb_in_place=False), perturbation=LowRankPerturbation(rank=2, period=2)
        ),
        journal=journal,
        write_back=WriteBackPolicy(directory=run),
    )
