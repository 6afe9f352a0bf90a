"""The models that ollama has pulled: manifests that name blobs by their digests, one of which is a
GGUF file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from zo2core.errors import CheckpointError, UnsupportedModelError, ZO2Error, system_errors_as
from zo2core.io.durable import open_regular, read_regular

PREFIX = "ollama:"
_LAYER = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_PART = re.compile(r"[\w][\w.-]*(:\d+)?", re.ASCII)  # of a name; a host may have a port
_UNSUPPORTED = {
    "adapter": ("an adapter beside its weights", "a model without one"),
    "projector": ("a projector of images beside its weights", "a model of text alone"),
    "tensor": ("weights in safetensors layers", "weights in one GGUF file"),
}
_AGAIN = "pull the model again, by ollama pull and its name"


class OllamaModel(NamedTuple):
    """A model of the store, whose files have the digests that its manifest names."""

    weights: Path  # a GGUF file
    template: str | None  # of its chats, in ollama's language
    system: str | None
    parameters: dict[str, Any]  # such as the texts at which generation stops
    licenses: tuple[str, ...]


def is_ollama_name(model: str | Path) -> bool:
    """Whether a model is named as one of ollama's store, such as ``ollama:llama3.2:1b``."""
    return str(model).startswith(PREFIX)


def weights_of_ollama(name: str) -> Path:
    """The GGUF file of a model of the store, which is there and has its size.

    Raises:
        CheckpointError: if the store has no such model, or its files are incomplete.
        UnsupportedModelError: for a model of several files.
    """
    return _Manifest.read(name).blob("model")


def read_ollama_model(name: str) -> OllamaModel:
    """Read a model of the store, and compare all its files with their digests.

    Raises:
        CheckpointError: if the store has no such model, or a file is missing or damaged.
        UnsupportedModelError: for a model of several files.
    """
    manifest = _Manifest.read(name)
    parameters = manifest.text("params")
    return OllamaModel(
        weights=manifest.checked("model"),
        template=manifest.text("template"),
        system=manifest.text("system"),
        parameters={} if parameters is None else _json_object(manifest.path, parameters),
        licenses=manifest.licenses(),
    )


class _Manifest(NamedTuple):
    """The layers of a model."""

    name: str  # with its prefix
    path: Path
    layers: list[dict[str, Any]]

    @classmethod
    def read(cls, name: str) -> _Manifest:
        path = _manifest_path(name)
        if not path.is_file():
            raise CheckpointError(
                name,
                f"no manifest {path}",
                _present(path),
                f"pull it: ollama pull {name.removeprefix(PREFIX)}",
            )
        with system_errors_as(
            CheckpointError, path, expected="a readable manifest", remedy="check its permissions"
        ):
            content = read_regular(path)
        layers = _json_object(path, content).get("layers")
        manifest = cls(name, path, layers if isinstance(layers, list) else [])
        for layer in manifest.layers:
            manifest._require_valid(layer)
        manifest._require_supported()
        return manifest

    def blob(self, kind: str) -> Path:
        """The file of the only layer of a kind; its size is checked."""
        [layer] = self._of_kind(kind)
        return self._file(layer)

    def checked(self, kind: str) -> Path:
        """The file of the only layer of a kind; its content is checked."""
        [layer] = self._of_kind(kind)
        return self._checked(layer)

    def _checked(self, layer: dict[str, Any]) -> Path:
        """The file of a layer, whose content has the layer's digest."""
        path = self._file(layer)
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if layer["digest"] != f"sha256:{digest}":
            raise self._damaged(path, f"SHA-256 {digest}", f"{layer['digest']}, as in its manifest")
        return path

    def text(self, kind: str) -> str | None:
        """The content of a layer; None: there is none."""
        if not self._of_kind(kind):
            return None
        return self._decoded(self.checked(kind))

    def licenses(self) -> tuple[str, ...]:
        """The content of all layers that are licenses."""
        return tuple(self._decoded(self._checked(layer)) for layer in self._of_kind("license"))

    def _decoded(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(path, "bytes that are no UTF-8", "text") from error

    def _of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [layer for layer in self.layers if layer["mediaType"] == f"{_LAYER}{kind}"]

    def _require_valid(self, layer: object) -> None:
        """Refuse a layer without a kind, a digest and a size."""
        is_valid = (
            isinstance(layer, dict)
            and isinstance(layer.get("mediaType"), str)
            and _DIGEST.fullmatch(str(layer.get("digest"))) is not None
            and type(layer.get("size")) is int
        )
        if not is_valid:
            expected = "layers with mediaType, digest and size"
            raise self._damaged(self.path, f"the layer {str(layer)[:80]}", expected)

    def _require_supported(self) -> None:
        for kind, (found, expected) in _UNSUPPORTED.items():
            if self._of_kind(kind):
                remedy = "pass the path of its GGUF file, which is trained without it"
                if kind == "tensor":
                    remedy = "pass the model's directory in the Hugging Face layout"
                raise UnsupportedModelError(self.name, found, expected, remedy)
        for kind in ("model", "template", "system", "params"):
            layers = len(self._of_kind(kind))
            if layers > 1 or (kind == "model" and layers == 0):
                found = f"{layers} layers of the kind {kind}"
                raise self._damaged(self.path, found, "one")

    def _file(self, layer: dict[str, Any]) -> Path:
        """The file of a layer, which has the layer's size."""
        digest: str = layer["digest"]
        path = _store() / "blobs" / digest.replace(":", "-")
        if not path.is_file():
            raise self._damaged(path, "No such file or directory", "a file that its manifest names")
        size = path.stat().st_size
        if size != layer["size"]:
            raise self._damaged(path, f"{size} bytes", f"{layer['size']}, as in its manifest")
        return path

    def _damaged(self, path: Path, found: str, expected: str) -> ZO2Error:
        remedy = f"pull it again: ollama pull {self.name.removeprefix(PREFIX)}"
        return CheckpointError(path, found, expected, remedy)


def _store() -> Path:
    """The directory of ollama's models."""
    return Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")


def _manifest_path(name: str) -> Path:
    """The manifest of a name, whose registry, namespace and tag may be left out, as for ollama."""
    path, _, tag = name.removeprefix(PREFIX).partition(":")
    if "/" in tag:  # the colon was that of the registry's port
        path, _, tag = name.removeprefix(PREFIX).rpartition(":")
    parts = path.split("/")
    if len(parts) > 3 or not all(map(_PART.fullmatch, [*parts, tag or "latest"])):
        expected = f"a name such as {PREFIX}llama3.2 or {PREFIX}llama3.2:1b"
        raise CheckpointError(name, "no name of a model", expected, "correct it")
    defaults = ["registry.ollama.ai", "library"]
    whole = [*defaults[: 3 - len(parts)], *parts]
    return _store().joinpath("manifests", *whole, tag or "latest")


def _present(path: Path) -> str:
    """What the store has, for messages."""
    manifests = _store() / "manifests"
    if not manifests.is_dir():
        return f"a store of ollama in {_store()}, or in the directory of OLLAMA_MODELS"
    names = sorted(
        f"{manifest.parent.name}:{manifest.name}"
        for manifest in manifests.rglob("*")
        if manifest.is_file()
    )
    return f"one of {', '.join(names[:12])}" if names else f"a model in {path.parents[2]}"


def _json_object(path: Path, content: bytes | str) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"no JSON ({error})", "a JSON object", _AGAIN) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(path, f"{str(parsed)[:80]}", "a JSON object", _AGAIN)
    return parsed
