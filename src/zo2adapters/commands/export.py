"""``zo2 export``, ``merge``, ``convert`` and ``push``: write a model in another form, or upload it."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from zo2adapters.commands.at_step import EXPORT_BYTES, WritesDirectory
from zo2adapters.commands.options import POSITIONAL, Command
from zo2adapters.trainers.model_options import DtypeName
from zo2adapters.trainers.run_directory import JOURNAL, MODEL, OPTIONS, RunDirectory
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
                from zo2adapters.tasks.chat_template import template_of_chats, template_of_rows
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


@dataclass(frozen=True, kw_only=True)
class Convert(Command):
    """Convert pickled .bin shards to safetensors, one at a time and without running code in them, or quantise a model."""

    needs: ClassVar = ("zo2adapters.models.pickle_conversion",)

    model: Path
    """Model directory with pytorch_model*.bin or, with --quantize, with safetensors."""
    output: Path
    """Directory to write; it must not exist, or be empty."""
    quantize: Literal["int8", "nf4", "fp8"] | None = None
    """Format in which the layers' linear weights are stored. Such a model is trained with --rank or an adapter;
    its own weights do not change."""

    def run(self) -> None:
        """Convert, and print each shard, or show a bar while weights are quantised."""
        if self.quantize is not None:
            self._quantize(self.quantize)
            return
        from zo2adapters.models.pickle_conversion import convert

        convert(self.model, self.output, report=print)

    def _quantize(self, method: Literal["int8", "nf4", "fp8"]) -> None:
        from zo2adapters.models.quantizer import quantize
        from zo2adapters.trainers.progress_bar import progress_bar
        from zo2core.types import shown_bytes

        with progress_bar(total=0, unit="B", desc=method) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            before, after, left = quantize(self.model, self.output, method, progress=progress)
        print(f"{self.output}: the model in {method}, {shown_bytes(after)}; it was {shown_bytes(before)}")
        if left:
            print(
                f"not in {method}: {len(left)} of the layers' matrices, {shown_bytes(sum(spec.nbytes for spec in left))}, "
                f"such as {max(left, key=lambda spec: spec.numel).name}; only linear layers and experts are encoded"
            )


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "model.gguf", "adapter.gguf")
_CONFIGS = ("config.json", "adapter_config.json", "Modelfile")
_UPLOADED = ("*.safetensors", "*.gguf", "Modelfile", "*.json", "*.txt", "*.model", "*.jinja", "README.md")  # of an export


@dataclass(frozen=True, kw_only=True)
class Push(Command):
    """Upload an exported model or adapter, or the model of a run, to the Hugging Face hub."""

    directory: Annotated[Path, POSITIONAL]
    """Directory that zo2 export wrote, or directory of a finished run, whose model/ is uploaded."""
    to: str
    """Name of the repository on the hub, as user/name. It is created if it does not exist."""
    public: bool = False
    """Create a public repository. By default it is private; an existing one stays as it is."""

    def run(self) -> None:
        """Upload the directory, and print its address."""
        exported = self._exported()
        if re.fullmatch(r"[\w.-]+/[\w.-]+", self.to) is None:
            raise OptionError(
                "to", found=repr(self.to), expected="a name such as user/name", remedy="pass the name of a repository"
            )
        import huggingface_hub

        hub = huggingface_hub.HfApi()
        try:
            hub.create_repo(self.to, private=not self.public, exist_ok=True)
            hub.upload_folder(
                repo_id=self.to,
                folder_path=exported,
                # The Modelfile of an adapter names the base by its path on this machine.
                allow_patterns=[
                    name for name in _UPLOADED if name != "Modelfile" or not (exported / "adapter.gguf").exists()
                ],
                commit_message="Upload with zo2 push",
            )
        except Exception as error:  # the hub, the network and the login fail with many kinds of errors
            raise OptionError(
                "to",
                found=f"{self.to}, which the hub refuses ({type(error).__name__}: {error})".splitlines()[0][:300],
                expected="a repository that you may write to",
                remedy="check the name and the network, and log in with hf auth login",
            ) from error
        print(f"https://huggingface.co/{self.to}")

    def _exported(self) -> Path:
        """The exported directory."""
        is_run = any((self.directory / name).exists() for name in (OPTIONS, JOURNAL))
        path = self.directory / MODEL if is_run else self.directory
        has = [any((path / name).is_file() for name in names) for names in (_WEIGHTS, _CONFIGS)]
        if not all(has):
            missing = " or ".join(_CONFIGS if has[0] else _WEIGHTS)
            found = f"no {missing}" if path.is_dir() else "no directory"
            raise OptionError(
                path,
                found=found,
                expected="an exported model or adapter",
                remedy=f"write it with zo2 export --run {self.directory}"
                if is_run
                else "pass a run, or what zo2 export wrote",
            )
        return path
