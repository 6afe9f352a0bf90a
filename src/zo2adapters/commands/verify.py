"""``zo2 verify``: compare training block by block with training of the whole model, bit for bit."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypeAlias

from zo2adapters.commands.options import Command
from zo2adapters.models.model_files import require_model
from zo2adapters.tasks.option_tree import MOST_ROWS, Option, whole
from zo2adapters.trainers.optimization import StepSize, optimizer_of
from zo2adapters.trainers.option_checks import require_valid
from zo2adapters.trainers.options import AdapterOptions, ModelOptions
from zo2core.ranges import LARGEST_WHOLE, counted, require_whole

VerifiedName: TypeAlias = Literal["mezo", "lora", "adamw", "sgd", "lomo", "adalomo", "badam"]


@dataclass(frozen=True, kw_only=True)
class Verify(Command):
    """Run a few steps block by block and on the whole model with your checkpoint, and compare every
    bit.
    """

    needs: ClassVar = ("zo2adapters.trainers.verification",)
    first_options: ClassVar = "model method lora_rank steps batch_size tokens lr"

    model: str
    """Model directory with safetensors weights, a GGUF file, or a hub id.

    The model is held in memory twice.
    """
    model_options: ModelOptions = field(default_factory=ModelOptions)
    method: Annotated[VerifiedName, Option("method")] = "mezo"
    """Steps to compare: mezo's with MeZO on the whole model, those of the others, of an adapter or
    of all parameters, with transformers, peft and torch.optim.
    """
    adapter_options: AdapterOptions = field(default_factory=AdapterOptions)
    steps: Annotated[int, Option("schedule", check=whole(1))] = 3
    """Steps to take block by block and on the whole model."""
    batch_size: Annotated[int, Option("data", check=whole(1, MOST_ROWS))] = 2
    """Rows of a batch; their tokens are random."""
    tokens: Annotated[int, Option("data", check=whole(2))] = 32
    """Tokens of a row."""
    step_size: StepSize = field(default_factory=lambda: StepSize(lr=1e-4, weight_decay=0.1))
    seed: int = 0
    """Seed of batches and directions."""

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        require_valid(self, given=self.given)
        require_whole("seed", self.seed, 0, LARGEST_WHOLE - self.steps)
        self.adapter_options.require_valid()
        self.step_size.require_sane()
        require_model(self.model, has_tokenizer=False)

    def run(self) -> None:
        """Print the result; the exit status is 1 if a bit differs."""
        from zo2adapters.models.checkpoint import resolve_directory
        from zo2adapters.trainers.verification import RandomSteps, summary, verify
        from zo2core import MeZOSGD

        self.check()  # also where the library is called
        size, opening = self.step_size, self.model_options
        # refuses values out of range
        MeZOSGD(lr=size.rate, zo_eps=size.zo_eps, weight_decay=size.weight_decay)
        directory = resolve_directory(self.model)
        adapter_options = self.adapter_options.of_method(self.method)
        adapter = adapter_options.adapter_of(opening.head, seed=self.seed)
        optimizer = optimizer_of(self.method)
        result = verify(
            directory,
            opening,
            size,
            RandomSteps(self.steps, self.batch_size, self.tokens, self.seed),
            method=optimizer,
            adapter=adapter,
        )
        if result.difference is not None:
            print(f"DIFFERENT: {result.difference}")
            print(summary(result))
            sys.exit(1)
        scalars = "losses, projected gradients" if optimizer is None else "losses, gradient norms"
        kind = "trained parameters" if adapter_options.trains_adapter else "parameters"
        compared = f"{scalars} and all {result.parameters} {kind}"
        print(f"EQUAL over {counted(self.steps, 'step')}, bit for bit: {compared}")
        print(summary(result))
