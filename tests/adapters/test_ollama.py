"""Models of ollama's store: named by their tags, checked by their digests, put on a run's adapter.

The stores are written by hand, as ollama 0.12 lays them out.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from command_lines import done, refusal
from gguf_models import save_gguf

from zo2adapters.models.model_files import is_gguf
from zo2adapters.trainers.metrics import losses_of
from zo2core import Journal

TEMPLATE = "{{ if .System }}<|{{ .System }}|>{{ end }}{{ .Prompt }}> {{ .Response }}"
LICENSE = 'Use "freely".\nWithout warranty.\n'
PARAMETERS = {"stop": ["<|a|>", "<|b|>"], "temperature": 0.6}


class Store:
    """A store of ollama, in which models are written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "blobs").mkdir(parents=True)

    def put(self, content: bytes) -> dict[str, Any]:
        """Write a blob, and return its digest and size."""
        digest = hashlib.sha256(content).hexdigest()
        (self.directory / "blobs" / f"sha256-{digest}").write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    def add(self, path: str, contents: Mapping[str, bytes]) -> Path:
        """Write a model, such as library/tiny/latest, and return the blob of its weights."""
        layers = [
            {"mediaType": f"application/vnd.ollama.image.{kind}", **self.put(content)}
            for kind, content in contents.items()
        ]
        manifest = self.directory / "manifests" / "registry.ollama.ai" / path
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
        return self.blob(layers[0])

    def blob(self, layer: Mapping[str, Any]) -> Path:
        digest: str = layer["digest"]
        return self.directory / "blobs" / digest.replace(":", "-")


@pytest.fixture
def weights(tmp_path: Path) -> bytes:
    return save_gguf(tmp_path / "tiny.gguf", "llama").read_bytes()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    return Store(tmp_path / "ollama")


def whole(weights: bytes) -> dict[str, bytes]:
    """The layers of a model."""
    return {
        "model": weights,
        "template": TEMPLATE.encode(),
        "params": json.dumps(PARAMETERS).encode(),
        "system": b"Be brief.",
        "license": LICENSE.encode(),
    }


def train(model: object, output: Path) -> list[float]:
    """The losses of two steps of an adapter."""
    rows = output.with_suffix(".jsonl")
    rows.write_text("".join(json.dumps({"text": f"a b c {number}"}) + "\n" for number in range(4)))
    lora = ("--method", "adamw", "--lora-rank", 2, "--lr", 1e-3)
    size = ("--steps", 2, "--batch-size", 2, "--seed", 1)
    done(
        "train",
        "--method",
        "zeroth-order",
        "--model",
        model,
        "--data",
        rows,
        "--output",
        output,
        *lora,
        *size,
    )
    with closing(Journal(output / "journal.jsonl")) as journal:
        return losses_of(journal)


@pytest.mark.parametrize(
    "name",
    [
        "ollama:tiny",
        "ollama:tiny:latest",
        "ollama:library/tiny",
        "ollama:registry.ollama.ai/library/tiny:latest",
    ],
)
def test_a_name_opens_the_blob_of_its_manifest(name: str, store: Store, weights: bytes) -> None:
    from zo2adapters.models.checkpoint import resolve_directory

    blob = store.add("library/tiny/latest", whole(weights))
    store.add("library/tiny/1b", {"model": weights + b"\0"})
    assert resolve_directory(name) == blob
    assert is_gguf(blob)


def test_a_run_of_a_name_is_that_of_its_file(store: Store, weights: bytes, tmp_path: Path) -> None:
    blob = store.add("library/tiny/latest", whole(weights))
    losses = train(tmp_path / "tiny.gguf", tmp_path / "file")
    assert train("ollama:tiny", tmp_path / "named") == losses
    assert train(blob, tmp_path / "blob") == losses
    # the tag may be that of another model later; the run stays with its weights
    store.add("library/tiny/latest", {"model": weights + b"\0"})
    options = json.loads((tmp_path / "named" / "options.json").read_text())
    assert options["options"]["model"] == str(blob)
    done("train", "--resume", tmp_path / "named", "--steps", 3)


def test_an_adapter_goes_on_the_model_that_it_was_trained_on(
    store: Store, weights: bytes, tmp_path: Path
) -> None:
    blob = store.add("library/tiny/latest", whole(weights))
    store.add("me/other/latest", {"model": weights + b"\0"})
    train("ollama:tiny", tmp_path / "run")
    refused = refusal("export", "--run", tmp_path / "run", "--output", "x", "--ollama", "me/other")
    assert "--ollama" in refused
    assert "the run's base" in refused
    done("export", "--run", tmp_path / "run", "--output", tmp_path / "out", "--ollama", "tiny")
    assert (tmp_path / "out" / "adapter.gguf").is_file()
    assert (tmp_path / "out" / "Modelfile").read_text() == (
        f"FROM {blob}\nADAPTER ./adapter.gguf\n"
        'PARAMETER stop "<|a|>"\nPARAMETER stop "<|b|>"\nPARAMETER temperature 0.6\n'
        f'TEMPLATE "{TEMPLATE}"\nSYSTEM "Be brief."\nLICENSE """{LICENSE}"""\n'
    )


def test_a_blob_may_be_a_link(store: Store, weights: bytes, tmp_path: Path) -> None:
    from zo2adapters.models.checkpoint import resolve_directory

    blob = store.add("library/tiny/latest", whole(weights))
    moved = blob.rename(tmp_path / "other disk")
    blob.symlink_to(moved)
    assert resolve_directory("ollama:tiny") == blob


def test_what_the_store_lacks_is_refused(store: Store, weights: bytes) -> None:
    blob = store.add("library/tiny/latest", whole(weights))
    model = ("verify", "--model")
    missing = refusal(*model, "ollama:tiny:70b")
    assert "one of tiny:latest" in missing
    assert "ollama pull tiny:70b" in missing
    assert "no name of a model" in refusal(*model, "ollama:../../tiny")
    blob.write_bytes(weights[:-1])
    assert f"{len(weights) - 1} bytes" in refusal(*model, "ollama:tiny")
    blob.write_bytes(weights[:-1] + b"\xff")
    assert "SHA-256" in refusal(*model, "ollama:tiny")
    blob.unlink()
    assert "No such file" in refusal(*model, "ollama:tiny")


@pytest.mark.parametrize("kind", ["template", "params", "system", "license"])
def test_every_layer_is_compared_with_its_digest(kind: str, store: Store, weights: bytes) -> None:
    layers = whole(weights)
    store.add("library/tiny/latest", layers)
    content = layers[kind]
    damaged = store.blob(store.put(content))
    damaged.write_bytes(b" " * len(content))
    told = refusal("verify", "--model", "ollama:tiny")
    assert f"{damaged}: found SHA-256" in told
    assert "ollama pull tiny" in told


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ({"model": b"", "adapter": b"a"}, "an adapter beside its weights"),
        ({"model": b"", "projector": b"a"}, "a projector of images"),
        ({"tensor": b"a"}, "weights in safetensors layers"),
        ({"template": b"a"}, "0 layers of the kind model"),
    ],
)
def test_models_of_several_files_are_refused(
    layers: dict[str, bytes], found: str, store: Store
) -> None:
    store.add("library/tiny/latest", layers)
    assert found in refusal("verify", "--model", "ollama:tiny")


@pytest.mark.parametrize(
    ("manifest", "found"),
    [
        ("{", "no JSON"),
        ("[]", "[]"),
        ('{"layers": [{"mediaType": "a", "digest": "sha256:..", "size": 1}]}', "the layer"),
    ],
)
def test_a_damaged_manifest_is_refused(manifest: str, found: str, store: Store) -> None:
    store.add("library/tiny/latest", {"model": b""})
    path = store.directory / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    path.write_text(manifest)
    assert found in refusal("verify", "--model", "ollama:tiny")
