"""``zo2 export``, ``merge``, ``convert`` and ``push``: write a model in another form, or
upload it.
"""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from zo2adapters.commands.at_step import EXPORT_BYTES, AtStep
from zo2adapters.commands.options import POSITIONAL, Command
from zo2adapters.models.model_files import ADAPTER_FOLDER, BASE_FOLDER, require_model
from zo2adapters.optional_package import require_package
from zo2adapters.tasks.option_tree import BOTH, Change, Option
from zo2adapters.trainers.metrics import export_bar, progress_bar
from zo2adapters.trainers.option_checks import require_valid
from zo2adapters.trainers.options import DtypeName
from zo2adapters.trainers.run_directory import JOURNAL, MODEL, OPTIONS
from zo2core.checkpoint.unused import refuse_used
from zo2core.errors import CheckpointError, OptionError, OutputError
from zo2core.ranges import counted

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel
    from zo2adapters.models.ollama import OllamaModel
    from zo2adapters.trainers.model_card import ExportedModel
    from zo2core import Engine

_FILES = (".gguf", ".safetensors", ".bin", ".pt")  # endings of files, which no output directory has


def _refuse_name_of_file(output: Path) -> None:
    """Refuse an output with the ending of a file, and say how a GGUF file is written."""
    if output.suffix.lower() not in _FILES:
        return
    name = output.with_suffix("")
    remedy = f"pass --output {name}, a directory for the files"
    if output.suffix.lower() == ".gguf":
        remedy += f"; zo2 export --run RUN --format gguf --output {name} writes a GGUF file into it"
    raise OutputError(
        output, "the name of a file", "a directory, which gets the model's files", remedy
    )


@dataclass(frozen=True, kw_only=True)
class WritesDirectory(AtStep):
    """A command that writes the model of a step into a directory, which appears complete or not at
    all.
    """

    output: Path
    """Directory to write; it must not exist, or be empty."""

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        super().check()
        refuse_used(self.output)
        _refuse_name_of_file(self.output)

    def run(self) -> None:
        """Replay the run and write the model."""
        self.check()  # also where the library is called
        self._write(self.resolved())

    def _write(self, at: AtStep) -> None:
        """Write the model of a step whose base is known."""
        raise NotImplementedError

    def _files(self, at: AtStep, exported: ExportedModel) -> dict[str, bytes]:
        """The files beside a model or an adapter that a run has made."""
        from zo2adapters.trainers.model_card import files_of_run, rows_of_run
        from zo2core import Journal

        base = str(at.model)
        rows = rows_of_run(self.saved)
        with closing(Journal(at.journal)) as journal:
            return files_of_run(journal, exported, base=base, options=self.saved, rows=rows)

    def _export(
        self, at: AtStep, model: HFBlockModel, engine: Engine, files: dict[str, bytes]
    ) -> None:
        """Export the engine's model, with a bar."""
        with export_bar(model, type(self).__name__.lower()) as progress:
            engine.export(self.output, files=files, progress=progress)

    def _print(self, what: str, at: AtStep, engine: Engine) -> None:
        after = "" if at.journal is None else f" after {counted(engine.version, 'step')}"
        print(f"{self.output}: the {what}{after}")

    def after_interruption(self) -> str:
        """Whether the directory was written."""
        if self.output.is_dir() and any(self.output.iterdir()):
            return f"{self.output} is complete"
        return f"{self.output} was not written; run the same command again to write it"


@dataclass(frozen=True, kw_only=True)
class Export(WritesDirectory):
    """Write the model of any step of a run, or of a base and a journal, in the Hugging Face layout
    or as a GGUF file.
    """

    first_options: ClassVar = (
        "run_directory output at format gguf_type output_dtype as_adapter ollama model adapter "
        "memory"
    )

    output_dtype: Annotated[
        DtypeName,
        Option(
            "output",
            Change.CALL,
            excludes={
                "as_adapter": "auto for an adapter, which is float32",
                "format": "auto with --format gguf, which has --gguf-type",
                "ollama": "auto for an adapter of llama.cpp",
            },
            library=("export_dtype",),
        ),
    ] = "auto"
    """Dtype in which weights are written. auto is the dtype in which the run stores them or, in
    mixed precision, the base's.
    """
    format: Annotated[Literal["huggingface", "gguf"], Option("output", Change.CALL)] = "huggingface"
    """huggingface is a directory that from_pretrained loads. gguf is a directory with a GGUF file
    for llama.cpp, into which a run's adapter is merged, and a Modelfile for ollama.
    """
    gguf_type: Annotated[
        Literal["auto", "F32", "F16", "BF16", "Q8_0"],
        Option("output", Change.CALL, needs=("format=gguf", "ollama")),
    ] = "auto"
    """Type of the matrices in a GGUF file; vectors are F32. auto is the dtype in which the run
    stores weights, or decodes them.
    """
    ollama: Annotated[str | None, Option("output", Change.CALL)] = None
    """Name of the run's base in ollama's store, such as llama3.2. Writes llama.cpp's form of the
    run's adapter, and a Modelfile that puts it on this model with its template, parameters, system
    message and license, for ollama create.
    """
    as_adapter: Annotated[bool, Option("output", Change.CALL)] = False
    """Write a LoRA adapter instead of a whole model: of a run with --rank in peft's format, with
    --format gguf llama.cpp's form of the run's adapter.
    """

    @property
    def _writes_gguf(self) -> bool:
        return self.format == "gguf" or self.ollama is not None

    @property
    def _writes_adapter(self) -> bool:
        return self.as_adapter or self.ollama is not None

    def check(self) -> None:
        """Refuse options of the other format."""
        require_valid(self, only=("output_dtype", "format", "gguf_type", "ollama", "as_adapter"))
        super().check()
        if self._writes_gguf:
            require_package("gguf", install="zo2core[gguf]")

    def _write(self, at: AtStep) -> None:
        from zo2adapters.models.export import export_adapter, merging_bytes
        from zo2adapters.trainers.model_card import ExportedModel

        is_gguf_file = self._writes_gguf
        has_adapter = at.model_options.trains_adapter
        has_both = self._has_both()
        is_adapter = self._writes_adapter or (has_adapter and not is_gguf_file and not has_both)
        self._require_form_of_llama_cpp(has_adapter=has_adapter)
        model = at.open_model(export_dtype=self.output_dtype)
        merges = has_adapter and is_gguf_file and not self._writes_adapter
        with at.engine(
            model, activation_bytes=merging_bytes(model) if merges else EXPORT_BYTES
        ) as engine:
            exported = ExportedModel(
                version=engine.version,
                head=at.model_options.head,
                is_adapter=is_adapter,
                has_both=has_both and not merges,
                is_merged=merges,
                is_gguf_file=is_gguf_file,
            )
            files = self._files(at, exported)
            if is_gguf_file:
                self._write_gguf(at, model, engine, files)
            elif self.as_adapter:
                export_adapter(engine, model, self.output, base=str(at.model), files=files)
            else:
                self._export(at, model, engine, files)
            what = "adapter" if is_adapter else "model"
            self._print("adapter and its base" if exported.has_both else what, at, engine)

    def _require_form_of_llama_cpp(self, *, has_adapter: bool) -> None:
        """Refuse llama.cpp's form of an adapter where there is none."""
        if self._writes_gguf and self._writes_adapter and not has_adapter:
            found = "norms and embeddings, which a run with --rank changes, too"
            expected = "a merged model, since llama.cpp's adapters change linear layers alone"
            option = "as_adapter" if self.ollama is None else "ollama"
            raise OptionError(option, found, expected, "leave it out")

    def _has_both(self) -> bool:
        """Whether the run has trained an adapter and its base, which are not written apart."""
        if self.saved is None or not self.saved.optimization.trains_both:
            return False
        if self._writes_adapter:
            raise OptionError(
                "as_adapter" if self.ollama is None else "ollama",
                f"the adapter of a run with --method {BOTH}",
                "weights with the base, which was trained, too: the adapter alone is of no use",
                "leave it out, or write one model with zo2 merge",
            )
        return True

    def _write_gguf(
        self, at: AtStep, model: HFBlockModel, engine: Engine, files: dict[str, bytes]
    ) -> None:
        """Write a GGUF file, and a Modelfile with the template of the run's prompts or else of the
        model's chats.
        """
        from zo2adapters.models.export import export_gguf
        from zo2adapters.tasks.tokenizer import load_tokenizer, template_of_chats, template_of_rows

        base = at.base()
        template = None if self.saved is None else template_of_rows(self.saved.rows)
        of_ollama = None if self.ollama is None else _base_in_store(self.ollama, base)
        if of_ollama is None:
            template = template or template_of_chats(load_tokenizer(base))
        export_gguf(
            engine,
            model,
            self.output,
            base=base,
            tokenizer=load_tokenizer,
            kind=self.gguf_type,
            as_adapter=self._writes_adapter,
            template=template,
            of_ollama=of_ollama,
            files=files,
        )


def _base_in_store(name: str, base: Path) -> OllamaModel:
    """The model of ollama's store with this name, whose weights are a run's base."""
    from zo2adapters.models.ollama import PREFIX, read_ollama_model

    model = read_ollama_model(f"{PREFIX}{name.removeprefix(PREFIX)}")
    if not model.weights.samefile(base):
        raise OptionError(
            "ollama",
            f"{name}, whose weights are {model.weights}",
            f"the run's base, {base}",
            "pass the name of the model that the run was started from",
        )
    return model


@dataclass(frozen=True, kw_only=True)
class Merge(WritesDirectory):
    """Write the base with an adapter, or with what a run has learned, merged into its weights, one
    block at a time.
    """

    first_options: ClassVar = "run_directory model adapter output at memory"

    def _write(self, at: AtStep) -> None:
        from zo2adapters.models.adapter_files import weights_of
        from zo2adapters.models.export import export_merged, merging_bytes
        from zo2adapters.models.peft_model import PeftBlockModel
        from zo2adapters.tasks.row_source import file_sha256
        from zo2adapters.trainers.model_card import CARD, ExportedModel, merged_card

        adapter, head = at.model_options.adapter, at.model_options.head
        if at.journal is None and adapter is None:
            remedy = "pass --model BASE --adapter DIR, or --run DIR"
            raise OptionError("adapter", "none", "the directory of an adapter, or a run", remedy)
        model = at.open_model()
        with at.engine(model, activation_bytes=merging_bytes(model)) as engine:
            if at.journal is None:
                assert adapter is not None, "one of the two was required"
                digest = file_sha256(weights_of(adapter))
                files = {
                    CARD: merged_card(base=str(at.model), adapter=adapter, digest=digest, head=head)
                }
            else:
                exported = ExportedModel(
                    version=engine.version, head=head, is_merged=isinstance(model, PeftBlockModel)
                )
                files = self._files(at, exported)
            if isinstance(model, PeftBlockModel):
                specs = [spec.decoded for layout in model.layouts for spec in layout.parameters]
                total = sum(
                    spec.nbytes for spec in specs if spec.name not in model.adapter.parameters
                )
                with progress_bar(total=total, unit="B", desc="merge") as bar:
                    export_merged(engine, model, self.output, files=files, progress=bar.update)
            else:
                self._export(at, model, engine, files)
            self._print("model", at, engine)


@dataclass(frozen=True, kw_only=True)
class Convert(Command):
    """Convert pickled .bin shards to safetensors, one at a time and without running code in them,
    or quantise a model.
    """

    needs: ClassVar = ("zo2adapters.models.conversion",)

    model: Path
    """Model directory with pytorch_model*.bin or, with --quantize, with safetensors."""
    output: Path
    """Directory to write; it must not exist, or be empty."""
    quantize: Literal["int8", "nf4", "fp8"] | None = None
    """Format in which the layers' linear weights are stored.

    Such a model is trained with --rank or an adapter; its own weights do not change.
    """

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        refuse_used(self.output)
        _refuse_name_of_file(self.output)
        if self.quantize is not None:
            require_model(self.model, has_tokenizer=False)
        elif not self.model.is_dir():
            expected, remedy = "the directory of a model", "check the path"
            raise CheckpointError(self.model, "no directory", expected, remedy)

    def run(self) -> None:
        """Convert, and print each shard, or show a bar while weights are quantised."""
        from zo2adapters.models.conversion import convert, quantize
        from zo2core.types import shown_bytes

        if self.quantize is None:
            convert(self.model, self.output, report=print)
            return
        with progress_bar(total=0, unit="B", desc=self.quantize) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            before, after, left = quantize(
                self.model, self.output, self.quantize, progress=progress
            )
        print(
            f"{self.output}: the model in {self.quantize}, {shown_bytes(after)}; it was "
            f"{shown_bytes(before)}"
        )
        if left:
            nbytes = sum(spec.nbytes for spec in left)
            largest = max(left, key=lambda spec: spec.numel)
            words = (
                f"{len(left)} of the layers' matrices, {shown_bytes(nbytes)}, such as "
                f"{largest.name}"
            )
            print(f"not in {self.quantize}: {words}; only linear layers and experts are encoded")


_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "model.gguf",
    "adapter.gguf",
)
_CONFIGS = ("config.json", "adapter_config.json", "Modelfile")
# of an export
_UPLOADED = (
    "*.safetensors",
    "*.gguf",
    "Modelfile",
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "README.md",
)


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
                "to", repr(self.to), "a name such as user/name", "pass the name of a repository"
            )
        import huggingface_hub

        hub = huggingface_hub.HfApi()
        # The Modelfile of an adapter names the base by its path on this machine.
        names = [
            name
            for name in _UPLOADED
            if name != "Modelfile" or not (exported / "adapter.gguf").exists()
        ]
        try:
            hub.create_repo(self.to, private=not self.public, exist_ok=True)
            hub.upload_folder(
                repo_id=self.to,
                folder_path=exported,
                allow_patterns=names,
                commit_message="Upload with zo2 push",
            )
        except Exception as error:
            # the hub, the network and the login fail with many kinds of errors
            found = (
                f"{self.to}, which the hub refuses ({type(error).__name__}: {error})".splitlines()[
                    0
                ][:300]
            )
            remedy = "check the name and the network, and log in with hf auth login"
            raise OptionError("to", found, "a repository that you may write to", remedy) from error
        print(f"https://huggingface.co/{self.to}")

    def _exported(self) -> Path:
        """The exported directory."""
        is_run = any((self.directory / name).exists() for name in (OPTIONS, JOURNAL))
        path = self.directory / MODEL if is_run else self.directory
        has = [any((path / name).is_file() for name in names) for names in (_WEIGHTS, _CONFIGS)]
        if not all(has):
            found = (
                f"no {' or '.join(_CONFIGS if has[0] else _WEIGHTS)}"
                if path.is_dir()
                else "no directory"
            )
            remedy = (
                f"write it with zo2 export --run {self.directory}"
                if is_run
                else "pass a run, or what zo2 export wrote"
            )
            if (path / BASE_FOLDER).is_dir():
                both = f"{path / BASE_FOLDER} and {path / ADAPTER_FOLDER}"
                remedy = f"push {both}, or what zo2 merge wrote"
            raise OptionError(path, found, "an exported model or adapter", remedy)
        return path
