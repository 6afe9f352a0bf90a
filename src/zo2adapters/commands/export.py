"""``zo2 export``: write the model of any step as a directory that ``from_pretrained`` or llama.cpp loads."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from zo2adapters.commands.at_step import EXPORT_BYTES, WritesDirectory
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
    """huggingface is a directory that from_pretrained loads. gguf is a directory with a GGUF file for llama.cpp, into
    which a run's adapter is merged, and a Modelfile for ollama."""
    gguf_type: Literal["auto", "F32", "F16", "BF16", "Q8_0"] = "auto"
    """Type of the matrices in a GGUF file; vectors are F32. auto is the dtype in which the run stores weights, or decodes
    them."""
    as_adapter: bool = False
    """Write a LoRA adapter instead of a whole model: of a run with --rank in peft's format, with --format gguf llama.cpp's
    form of the run's adapter."""

    def run(self) -> None:
        """Replay the run and write the model."""
        from zo2adapters.models.export import export_adapter, merging_bytes
        from zo2adapters.trainers.model_card import files_of_run
        from zo2adapters.trainers.progress_bar import export_bar
        from zo2core import Journal

        self.require_output()
        self._require_format()
        if self.as_adapter and self.output_dtype != "auto":
            expected = "auto for an adapter, which is float32"
            raise OptionError("output_dtype", found=self.output_dtype, expected=expected, remedy="leave it out")
        at = self.resolved()
        opening, is_gguf_file = at.model_options, self.format == "gguf"
        is_adapter = self.as_adapter or (opening.trains_adapter and not is_gguf_file)
        if is_gguf_file and self.as_adapter and not opening.trains_adapter:
            raise OptionError(
                "as_adapter",
                found="norms and embeddings, which a run with --rank changes, too",
                expected="a merged model, since llama.cpp's adapters change linear layers alone",
                remedy="leave it out",
            )
        model = at.open_model(export_dtype=self.output_dtype)
        options = None if self.run_directory is None else RunDirectory.options(self.run_directory)
        merges = opening.trains_adapter and is_gguf_file and not self.as_adapter
        room = merging_bytes(model) if merges else EXPORT_BYTES
        with (
            at.engine(model, activation_bytes=room) as engine,
            closing(Journal(at.journal)) as journal,
        ):
            kind: dict[str, Any] = {"is_adapter": is_adapter, "is_merged": merges, "is_gguf_file": is_gguf_file}
            base, head = str(at.model), opening.head
            files = files_of_run(journal, version=engine.version, base=base, options=options, head=head, **kind)
            if is_gguf_file:
                from zo2adapters.models.gguf_export import export_gguf
                from zo2adapters.tasks.ollama_template import template_of_chats, template_of_rows
                from zo2adapters.tasks.tokenizer import load_tokenizer

                template = None if options is None else template_of_rows(options.rows)
                export_gguf(
                    engine,
                    model,
                    self.output,
                    base=at.base(),
                    tokenizer=load_tokenizer,
                    kind=self.gguf_type,
                    as_adapter=self.as_adapter,
                    template=template or template_of_chats(load_tokenizer(at.base())),
                    files=files,
                )
            elif self.as_adapter:
                export_adapter(engine, model, self.output, base=base, files=files)
            else:
                with export_bar(model) as progress:
                    engine.export(self.output, files=files, progress=progress)
            after = "" if at.journal is None else f" after {counted(engine.version, 'step')}"
            print(f"{self.output}: the {'adapter' if is_adapter else 'model'}{after}")

    def _require_format(self) -> None:
        """Refuse options of the other format."""
        if self.format == "huggingface" and self.gguf_type != "auto":
            remedy = "pass --format gguf as well, or leave it out"
            raise OptionError("gguf_type", found=self.gguf_type, expected="auto without --format gguf", remedy=remedy)
        if self.format == "gguf" and self.output_dtype != "auto":
            expected = "auto with --format gguf"
            raise OptionError("output_dtype", found=self.output_dtype, expected=expected, remedy="pass --gguf-type instead")
