"""``zo2 merge``: write a whole model whose weights contain an adapter."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

from zo2adapters.commands.at_step import WritesDirectory
from zo2adapters.trainers.run_directory import RunDirectory
from zo2core.errors import OptionError
from zo2core.ranges import counted


@dataclass(frozen=True, kw_only=True)
class Merge(WritesDirectory):
    """Write the base with an adapter, or with what a run has learned, merged into its weights, one block at a time."""

    first_options: ClassVar = ("run_directory", "model", "adapter", "output", "at", "memory")

    def run(self) -> None:
        """Merge, and write the model."""
        from zo2adapters.models.export import export_merged, merging_bytes
        from zo2adapters.models.peft_kinds import PeftBlockModel
        from zo2adapters.models.peft_layers import WEIGHTS_FILE
        from zo2adapters.trainers.model_card import CARD, files_of_run, merged_card
        from zo2adapters.trainers.progress_bar import export_bar, progress_bar
        from zo2adapters.trainers.provenance import file_sha256
        from zo2core import Journal

        self.require_output()
        at = self.resolved()
        adapter = at.model_options.adapter
        if at.journal is None and adapter is None:
            raise OptionError(
                "adapter",
                found="none",
                expected="the directory of an adapter, or a run",
                remedy="pass --model BASE --adapter DIR, or --run DIR",
            )
        model = at.open_model()
        options = None if self.run_directory is None else RunDirectory.options(self.run_directory)
        is_adapter, head = isinstance(model, PeftBlockModel), at.model_options.head
        with at.engine(model, activation_bytes=merging_bytes(model)) as engine:
            if at.journal is None:
                assert adapter is not None, "one of the two was required"
                digest = file_sha256(adapter / WEIGHTS_FILE)
                files = {CARD: merged_card(base=str(at.model), adapter=adapter, digest=digest, head=head)}
            else:
                with closing(Journal(at.journal)) as journal:
                    kind: dict[str, Any] = {"version": engine.version, "head": head, "is_merged": is_adapter}
                    files = files_of_run(journal, base=str(at.model), options=options, **kind)
            if isinstance(model, PeftBlockModel):
                specs = [spec.decoded for layout in model.layouts for spec in layout.parameters]
                total = sum(spec.nbytes for spec in specs if spec.name not in model.exported_parameters)
                with progress_bar(total=total, unit="B", desc="merge") as bar:
                    export_merged(engine, model, self.output, files=files, progress=bar.update)
            else:
                with export_bar(model, "merge") as progress:
                    engine.export(self.output, files=files, progress=progress)
            print(f"{self.output}: the model" + ("" if at.journal is None else f" after {counted(engine.version, 'step')}"))
