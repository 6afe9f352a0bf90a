"""``zo2 push``: upload an exported model or adapter to the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from zo2adapters.commands.options import POSITIONAL, Command
from zo2adapters.trainers.run_directory import JOURNAL, MODEL, OPTIONS
from zo2core.errors import OptionError

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
