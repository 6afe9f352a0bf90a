"""``zo2 export``: write the model of any step as a directory that ``from_pretrained`` or llama.cpp loads."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar, Literal

from zo2adapters.commands.at_step import WritesDirectory
from zo2adapters.trainers.model_options import DtypeName
from zo2adapters.trainers.run_directory import RunDirectory
from zo2core.errors import OptionError
from zo2core.ranges import counted


@dataclass(frozen=True, kw_only=True)
class Export(WritesDirectory):
    """Write the model of any step of a run, or of a base and a journal, in the Hugging Face layout or as a GGUF file."""

    first_options: ClassVar = (
        "run_directory",
        "output",
        "at",
        "format",
        "gguf_type",
        "output_dtype",
        "as_adapter",
        "model",
        "adapter",
        "memory",
    )

    output_dtype: DtypeName = "auto"
    """Dtype in which weights are written. auto is the dtype in which the run stores them or, in mixed precision, the
    base's."""
    format: Literal["huggingface", "gguf"] = "huggingface"
    """huggingface is a directory that from_pretrained loads. gguf is a directory with a GGUF file for llama.cpp, the merged
    model or a run's LoRA adapter, and a Modelfile for ollama."""
    gguf_type: Literal["auto", "F32", "F16", "BF16", "Q8_0"] = "auto"
    """Type of the matrices in a GGUF file; vectors are F32. auto is the dtype in which the run stores weights, or decodes
    them."""
    as_adapter: bool = False
    """Write what a run with --rank learned as a LoRA adapter in the format of peft instead of a whole model."""

    def run(self) -> None:
        """Replay the run and write the model."""
        from zo2adapters.models.export import export_adapter
        from zo2adapters.trainers.model_card import CARD, model_card
        from zo2adapters.trainers.progress_bar import export_bar
        from zo2core import Journal

        self.require_output()
        self._require_format()
        if self.as_adapter and self.output_dtype != "auto":
            expected = "auto for an adapter, which is float32"
            raise OptionError("output_dtype", found=self.output_dtype, expected=expected, remedy="leave it out")
        at = self.resolved()
        model = at.open_model(export_dtype=self.output_dtype)
        data = None if self.run_directory is None else str(RunDirectory.options(self.run_directory).data)
        with at.engine(model) as engine, closing(Journal(at.journal)) as journal:
            card = model_card(
                journal,
                version=engine.version,
                base=str(at.model),
                head=at.model_options.head,
                is_adapter=self.as_adapter or at.model_options.trains_adapter,
                is_gguf_file=self.format == "gguf",
                data=data,
            )
            if self.as_adapter:
                export_adapter(engine, model, self.output, base=str(at.model), files={CARD: card})
            elif self.format == "gguf":
                from zo2adapters.models.gguf.export import export_gguf
                from zo2adapters.tasks.tokenizer import load_tokenizer

                base, kind = at.base(), self.gguf_type
                export_gguf(engine, model, self.output, base=base, tokenizer=load_tokenizer, kind=kind, files={CARD: card})
            else:
                with export_bar(model) as progress:
                    engine.export(self.output, files={CARD: card}, progress=progress)
            is_adapter = self.as_adapter or at.model_options.trains_adapter
            after = "" if at.journal is None else f" after {counted(engine.version, 'step')}"
            print(f"{self.output}: the {'adapter' if is_adapter else 'model'}{after}")
            if is_adapter and self.format == "gguf" and self.run_directory is not None:
                print(f"for one GGUF file with base and adapter: zo2 merge --run {self.run_directory} --output merged")
                print("then: zo2 export --model merged --format gguf --output merged-gguf")

    def _require_format(self) -> None:
        """Refuse options of the other format."""
        if self.format == "huggingface" and self.gguf_type != "auto":
            remedy = "pass --format gguf as well, or leave it out"
            raise OptionError("gguf_type", found=self.gguf_type, expected="auto without --format gguf", remedy=remedy)
        if self.format == "gguf" and self.as_adapter:
            raise OptionError(
                "as_adapter",
                found="norms and embeddings, which a run with --rank changes, too",
                expected="a merged model, since llama.cpp's adapters change linear layers alone",
                remedy="leave it out",
            )
        if self.format == "gguf" and self.output_dtype != "auto":
            expected = "auto with --format gguf"
            raise OptionError("output_dtype", found=self.output_dtype, expected=expected, remedy="pass --gguf-type instead")
