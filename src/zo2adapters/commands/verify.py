"""``zo2 verify``: compare training block by block with monolithic MeZO, bit for bit."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from zo2adapters.ranges import LARGEST, require_at_least, require_between
from zo2adapters.trainers.batching import MOST_ROWS
from zo2adapters.trainers.model_options import ModelOptions, precision_of_run
from zo2adapters.trainers.optimization import StepSize
from zo2core import MeZOSGD


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Run a few steps block by block and as monolithic MeZO on your checkpoint, and compare every bit."""

    model: str
    """Model directory with safetensors weights, or a hub id. The model is held in memory twice."""
    model_options: ModelOptions = field(default_factory=ModelOptions)
    steps: int = 3
    """Steps to take block by block and as monolithic MeZO."""
    batch_size: int = 2
    """Rows of a batch; their tokens are random."""
    tokens: int = 32
    """Tokens of a row."""
    step_size: StepSize = field(default_factory=lambda: StepSize(lr=1e-4, weight_decay=0.1))
    seed: int = 0
    """Seed of batches and directions."""

    def run(self) -> None:
        """Print the result; the exit status is 1 if a bit differs."""
        from zo2adapters.models.checkpoint import resolve_directory
        from zo2adapters.trainers.verification import verify

        require_at_least("steps", self.steps, 1)
        require_between("batch_size", self.batch_size, 1, MOST_ROWS)
        require_at_least("tokens", self.tokens, 2)
        require_between("seed", self.seed, 0, LARGEST - self.steps)
        size, options = self.step_size, self.model_options
        MeZOSGD(lr=size.lr, zo_eps=size.zo_eps, weight_decay=size.weight_decay)  # refuses values out of range
        size.require_sane()
        result = verify(
            resolve_directory(self.model),
            head=options.head,
            architecture=options.architecture,
            dtype=options.dtype,
            precision=precision_of_run(options.precision, exact_mezo=True, on_cpu=True),
            lr=size.lr,
            zo_eps=size.zo_eps,
            weight_decay=size.weight_decay,
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
