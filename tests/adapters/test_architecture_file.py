"""A declaration in a file: what every command that opens a model makes of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from command_lines import make_place, refusal, run_here
from families import small_config, small_model
from models import WORDS, save_tokenizer

from zo2adapters import open_checkpoint
from zo2adapters.models.derivation import derive_architecture
from zo2adapters.models.skeleton import build_skeleton
from zo2core.errors import OptionError

DECLARED: dict[str, Any] = {
    "model_type": "mistral",
    "embedding": ["model.embed_tokens"],
    "blocks": "model.layers",
    "head": ["model.norm", "lm_head"],
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Rows, and a Mistral with a declaration beside it."""
    make_place(tmp_path)
    config = small_config("mistral")
    assert config.vocab_size >= len(WORDS)
    small_model(config).save_pretrained(tmp_path / "mistral")
    save_tokenizer(tmp_path / "mistral")
    (tmp_path / "mistral.json").write_text(json.dumps(DECLARED))
    return tmp_path


def test_a_declaration_in_a_file_is_what_is_derived(place: Path) -> None:
    declared = open_checkpoint(place / "mistral", architecture=place / "mistral.json").layouts
    assert declared == open_checkpoint(place / "mistral").layouts
    derived = derive_architecture(build_skeleton(small_config("mistral"), declared[0].parameters[0].dtype))
    (place / "derived.json").write_text(json.dumps(asdict(derived)))
    assert open_checkpoint(place / "mistral", architecture=place / "derived.json").layouts == declared


def test_every_command_that_opens_a_model_takes_a_declaration(place: Path) -> None:
    model, data = ("--model", place / "mistral", "--architecture", place / "mistral.json"), ("--data", place / "rows.jsonl")
    for command in (
        ("plan", *model, "--batch-size", 1, "--sequence-length", 8),
        ("verify", *model, "--steps", 1, "--tokens", 4),
        ("train", *model, *data, "--output", place / "run", "--steps", 2),
        ("evaluate", *model, *data),
        ("generate", *model, "--prompt", "the cat", "--max-new-tokens", 1),
        ("tune", *model, *data, "--output", place / "tuned", "--forwards", 40, "--learning-rates", 1e-5, 1e-4),
        ("evaluate", "--run", place / "run", *data),
        ("export", "--run", place / "run", "--output", place / "out"),
    ):
        ended = run_here(*command)
        assert ended.status == 0, (command, ended)


def test_a_run_keeps_its_declaration(place: Path) -> None:
    model = ("--model", place / "mistral", "--architecture", place / "mistral.json")
    data = ("--data", place / "rows.jsonl")
    assert run_here("train", *model, *data, "--output", place / "run", "--steps", 2).status == 0
    assert "architecture: " in refusal("evaluate", "--run", place / "run", "--architecture", place / "rows.jsonl", *data)
    (place / "mistral.json").write_text(json.dumps({**DECLARED, "ignored": ["nothing"]}))
    assert "mistral.json, with sha256" in refusal("train", "--resume", place / "run", "--steps", 3)
    (place / "mistral.json").unlink()
    assert "mistral.json" in refusal("export", "--run", place / "run", "--output", place / "out")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "llama"}, "found a declaration of llama; expected a declaration of mistral"),
        ({"model_type": None}, "model_type: found 'None'; expected a name"),
        ({"head": "lm_head"}, "head: found 'lm_head'; expected a list of names"),
        ({"returned": 4}, "returned: found '4'; expected an integer from 0 to 3"),
        ({"returned": True}, "returned: found 'True'"),
        ({"axes": [1, 1]}, "axes: found '[1, 1]'; expected a list of two different integers from 0 to 7"),
        ({"axes": [0, "1"]}, "axes: found"),
        ({"axes": [1, 2]}, "model type mistral: found hidden states of shape"),
        ({"extra": 1}, "found a field 'extra'"),
        ({"blocks": ...}, "found no 'blocks'"),
        ({"blocks": "model.nothing"}, "model.nothing"),
        ({"blocks": "model.norm"}, "model.norm"),
        ({"head": ["lm_head"]}, "model.norm.weight"),
    ],
)
def test_a_declaration_that_is_none_is_refused(changes: dict[str, Any], said: str, place: Path) -> None:
    values = {name: value for name, value in {**DECLARED, **changes}.items() if value is not ...}
    (place / "wrong.json").write_text(json.dumps(values))
    model = ("--model", place / "mistral", "--architecture", place / "wrong.json")
    assert said in refusal("generate", *model, "--prompt", "the cat", "--max-new-tokens", 1)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_files_that_hold_no_declaration_are_refused(content: bytes, place: Path) -> None:
    (place / "wrong.json").write_bytes(content)
    with pytest.raises(OptionError, match=r"wrong\.json"):
        open_checkpoint(place / "mistral", architecture=place / "wrong.json")
    with pytest.raises(OptionError, match="readable"):
        open_checkpoint(place / "mistral", architecture=place / "nowhere.json")
