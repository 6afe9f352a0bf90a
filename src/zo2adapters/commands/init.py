"""``zo2 init``: write a recipe for a model and its data, with a reason for each choice."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from zo2adapters.commands.options import Command, Written
from zo2adapters.models.model_files import require_model
from zo2adapters.tasks.registry import AUTO, function_file
from zo2adapters.tasks.rewards import function_source
from zo2adapters.tasks.row_options import RowOptions, require_columns
from zo2adapters.trainers.options import HeadName, RunModelOptions, Storage, TrainOptions
from zo2core.errors import OutputError, system_errors_as
from zo2core.io.durable import replace_file, require_new_file

_FREE = {
    "expected": "a new file in a directory that can be written",
    "remedy": "pass --output with another path",
}


@dataclass(frozen=True, kw_only=True)
class Init(Command):
    """Look at a model and its data, and write a recipe for zo2 train that says why each option was
    chosen.
    """

    needs: ClassVar = ("zo2adapters.trainers.initial_recipe",)
    first_options: ClassVar = (
        "model data output evaluation prompt_template prompt_column completion_column memory"
    )

    model: str
    """Model directory with safetensors weights, or a hub id."""
    data: Path
    """File to train on, as for zo2 train."""
    output: Annotated[Path, Written(aliases=("-o",))] = Path("recipe.yaml")
    """Recipe to write; it must not exist."""
    evaluation: Path | None = None
    """File to evaluate on. By default a tenth of the rows is held out, at most 500."""
    objective: str = AUTO
    """Objective to minimize, as for zo2 train."""
    head: HeadName = "causal-lm"
    """Head of the model, as for zo2 train."""
    memory: str = "auto"
    """Host memory that the run may use in total, such as 6GiB; auto uses what is free."""
    seed: int = 0
    """Seed of the run."""
    rows: RowOptions = field(default_factory=RowOptions)

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        self._require_free()
        self._options().require_valid()
        require_model(self.model)
        if (file := function_file(self.objective)) is not None:
            function_source(file, self.objective.rpartition(":")[2], option="objective")
        for path in filter(None, (self.data, self.evaluation)):
            require_columns(path, self.rows)

    def run(self) -> None:
        """Write the recipe, and print what its run would take and the command that starts it."""
        from zo2adapters.trainers.initial_recipe import initial_recipe

        print(
            "zo2 init reads the data and measures the model, which takes some seconds.",
            file=sys.stderr,
            flush=True,
        )
        recipe = initial_recipe(self._options())
        self._require_free()  # measuring takes a while
        with system_errors_as(OutputError, self.output, **_FREE):
            replace_file(self.output, recipe.text().encode())
        consent = "" if function_file(self.objective) is None else f" --objective {self.objective}"
        print(
            "\n".join(
                [
                    recipe.rows,
                    *recipe.left_out,
                    recipe.summary,
                    f"next: zo2 train {self.output}{consent}",
                ]
            )
        )

    def _require_free(self) -> None:
        with system_errors_as(OutputError, self.output, **_FREE):
            require_new_file(self.output)

    def _options(self) -> TrainOptions:
        names = itertools.chain(["run"], (f"run-{number}" for number in itertools.count(2)))
        output = next(path for path in map(Path, names) if not os.path.lexists(path))
        return TrainOptions(
            model=self.model,
            data=self.data,
            output=output,
            evaluation=self.evaluation,
            objective=self.objective,
            seed=self.seed,
            rows=self.rows,
            model_options=RunModelOptions(head=self.head),
            storage=Storage(memory=self.memory),
        )
