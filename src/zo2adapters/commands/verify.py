"""``zo2 verify``: block by block against monolithic MeZO, bit for bit."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zo2adapters.ranges import LARGEST, require_at_least, require_between
from zo2adapters.trainers.batching import MOST_ROWS
from zo2adapters.trainers.optimization import require_sane_step
from zo2adapters.trainers.options import DtypeName, HeadName
from zo2core import MeZOSGD


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Run a few steps block by block and as monolithic MeZO on your checkpoint, and compare every bit."""

    model: str
    """Model directory with safetensors weights, or a hub id. The model is held in memory twice."""
    architecture: Path | None = None
    """JSON file that says where the model's parts are; by default they are learned."""
    head: HeadName = "causal-lm"
    """What the model ends in, as for training."""
    dtype: DtypeName = "auto"
    """Dtype of the weights; auto is the checkpoint's own. In mixed precision the dtype that is computed with."""
    precision: Literal["exact", "mixed"] = "exact"
    """exact compares with MeZO in one dtype, mixed with MeZO in float32 under autocast."""
    steps: int = 3
    """Steps to take both ways."""
    batch_size: int = 2
    """Rows of random tokens a batch."""
    tokens: int = 32
    """Tokens a row."""
    lr: float = 1e-4
    """Learning rate of every step."""
    zo_eps: float = 1e-3
    """Perturbation scale of every step."""
    weight_decay: float = 0.1
    """Weight decay of MeZO's update; biases and layer norms do not decay."""
    seed: int = 0
    """Seed of batches and directions."""

    def run(self) -> None:
        """Compare; exit with 1 if a bit differs."""
        from zo2adapters.models.checkpoint import resolve_directory
        from zo2adapters.trainers.verification import verify

        require_at_least("steps", self.steps, 1)
        require_between("batch_size", self.batch_size, 1, MOST_ROWS)
        require_at_least("tokens", self.tokens, 2)
        require_between("seed", self.seed, 0, LARGEST - self.steps)
        MeZOSGD(lr=self.lr, zo_eps=self.zo_eps, weight_decay=self.weight_decay)  # refuses what is no number
        require_sane_step(self.lr, self.zo_eps, self.weight_decay)
        result = verify(
            resolve_directory(self.model),
            head=self.head,
            architecture=self.architecture,
            dtype=self.dtype,
            precision=self.precision,
            lr=self.lr,
            zo_eps=self.zo_eps,
            weight_decay=self.weight_decay,
            steps=self.steps,
            batch_size=self.batch_size,
            tokens=self.tokens,
            seed=self.seed,
        )
        if result.difference is not None:
            print(f"DIFFERENT: {result.difference}")
            sys.exit(1)
        equal = f"losses, projected gradients and all {result.parameters} parameters"
        print(f"EQUAL over {result.steps} steps, bit for bit: {equal}")
