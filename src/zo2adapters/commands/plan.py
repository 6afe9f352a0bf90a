"""``zo2 plan``: print what a run would take in memory, disk and time. It is ``zo2 train --plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from zo2adapters.commands.train import Train, arguments_of_recipe


@dataclass(frozen=True, kw_only=True)
class Plan(Train):
    """Print what a run would take in memory, disk and time, without loading the model."""

    needs: ClassVar = ("zo2adapters.trainers.planning",)
    first_options: ClassVar = (
        "model",
        "data",
        "method",
        "lora_rank",
        "rank",
        "steps",
        "batch_size",
        "memory",
        "device_memory",
        "json",
    )

    plan: bool = True
    """Always on: the other options are those of zo2 train."""

    @classmethod
    def with_recipe(cls, arguments: Sequence[str]) -> list[str]:
        """Replace a recipe at the start of the arguments by the options in it. No function that it names is run."""
        if not arguments or arguments[0].startswith("-"):
            return list(arguments)
        return [*arguments_of_recipe(Path(arguments[0])), *arguments[1:]]
