"""Model cards of exports, and pushing exports to the hub."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
from command_lines import done, refusal, run_here
from huggingface_hub import ModelCard
from runs import data_sha256, finish, small_run
from transformers import AutoTokenizer

from zo2adapters.tasks.row_options import RowOptions
from zo2adapters.trainers.model_card import ExportedModel, model_card, prompt_of
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import RunModelOptions
from zo2core import Journal


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    options = small_run(folder, optimization=Optimization(method="zeroth-order", lr=1e-2, rank=2))
    options = replace(options, evaluation=options.data, evaluate_every=2)
    finish(options)
    return options.output


def card_of(directory: Path) -> Any:  # its data has the entries of the header as attributes
    return ModelCard.load(directory / "README.md", ignore_metadata_errors=False)


def test_a_run_exports_a_card_with_a_header_that_the_hub_reads(run_directory: Path) -> None:
    card = card_of(run_directory / "model")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert {"zo2core", "zeroth-order"} <= set(card.data.tags)
    assert card.data.base_model is None, "a local directory is no name on the hub"
    parts = [
        "`base` after 3 zeroth-order steps",
        "## Results",
        "## How to load it",
        '"lr": 0.01,',
        '"zo_eps": 0.001',
    ]
    assert [part for part in [*parts, '"batch size": 3'] if part not in card.text] == []
    assert data_sha256(run_directory.parent / "rows.jsonl") in card.text
    assert str(run_directory.parent) not in (run_directory / "model" / "README.md").read_text()
    lines = [line.split("|")[1].strip() for line in card.text.splitlines() if line.startswith("| ")]
    assert lines == ["step", "0", "2", "3"]
    journal = Journal(run_directory / "journal.jsonl")
    for base, named in (("org/name", "BASE.gguf"), ("base.gguf", '"base.gguf"')):
        exported = ExportedModel(version=3, is_adapter=True, is_gguf_file=True)
        card = model_card(journal, exported, base=base).decode()
        assert f"llama-cli --model {named} --lora adapter.gguf" in card


def test_an_adapter_has_a_card_that_loads_it_with_peft(run_directory: Path, tmp_path: Path) -> None:
    done("export", "--run", run_directory, "--as-adapter", "--output", tmp_path / "adapter")
    card = card_of(tmp_path / "adapter")
    assert (card.data.library_name, "lora" in card.data.tags) == ("peft", True)
    assert "PeftModel.from_pretrained" in card.text
    assert "AutoTokenizer.from_pretrained" in card.text
    tokenizers: list[Any] = [
        AutoTokenizer.from_pretrained(path)
        for path in (tmp_path / "adapter", run_directory / "model")
    ]
    assert tokenizers[0]("the cat").input_ids == tokenizers[1]("the cat").input_ids
    # a run that trains one
    options = small_run(tmp_path, model_options=RunModelOptions(lora_rank=2))
    finish(options)
    assert card_of(options.output / "model").data.library_name == "peft"


def test_names_of_the_hub_are_in_the_header_and_those_of_directories_cannot_break_it(
    tmp_path: Path,
) -> None:
    exported = ExportedModel(version=1, is_adapter=True)
    content = model_card(Journal(), exported, base="user/base", data="user/tweets:train").decode()
    data: Any = ModelCard(content).data
    assert (data.base_model, data.base_model_relation, data.datasets) == (
        "user/base",
        "adapter",
        ["user/tweets"],
    )
    base = tmp_path / 'a`\n---\nb"c'
    base.mkdir()
    content = model_card(Journal(), ExportedModel(version=0), base=str(base)).decode()
    assert "`a__---_b_c`" in ModelCard(content).text


def test_an_export_has_the_card_of_its_step_and_without_steps_claims_no_training(
    run_directory: Path, tmp_path: Path
) -> None:
    base, journal = (
        ("--model", run_directory.parent / "base"),
        ("--journal", run_directory / "journal.jsonl"),
    )
    exports: dict[str, tuple[object, ...]] = {
        "two": ("--run", run_directory, "--at", 2),
        "last": (*base, *journal),
        "plain": base,
        "start": ("--run", run_directory, "--at", 0),
    }
    for name, given in exports.items():
        done("export", *given, "--output", tmp_path / name)
    cards = {name: card_of(tmp_path / name) for name in exports}
    assert "after 2 zeroth-order steps" in cards["two"].text
    assert "| 3 |" not in cards["two"].text
    assert "after 3 zeroth-order steps" in cards["last"].text
    for card in (cards["plain"], cards["start"]):
        assert "The weights of `base` without a step of training." in card.text
        assert not any(part in card.text for part in ("fine-tuned", "after 0"))
        assert card.data.tags == ["zo2core"]
    assert not any(
        part in cards["plain"].text for part in ("steps", "## Results", "## Data", "## Options")
    )


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for the hub: keeps what is asked of it."""
    asked = MagicMock()
    monkeypatch.setattr(huggingface_hub, "HfApi", asked)
    return asked.return_value


def test_a_push_creates_a_private_repository_and_uploads_the_export_alone(
    run_directory: Path, hub: Any
) -> None:
    ended = run_here("push", run_directory, "--to", "user/mine")
    assert ended.out == "https://huggingface.co/user/mine\n"
    hub.create_repo.assert_called_once_with("user/mine", private=True, exist_ok=True)
    uploaded = hub.upload_folder.call_args.kwargs
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("user/mine", run_directory / "model")
    assert matched(hub, run_directory / "model") == {
        path.name for path in (run_directory / "model").iterdir()
    }
    run_here("push", run_directory / "model", "--to", "user/mine", "--public")
    assert hub.create_repo.call_args.kwargs["private"] is False


def matched(hub: Any, directory: Path) -> set[str]:
    patterns = hub.upload_folder.call_args.kwargs["allow_patterns"]
    return {path.name for pattern in patterns for path in directory.glob(pattern)}


@pytest.mark.parametrize("weights", ["model.gguf", "adapter.gguf"])
def test_a_push_uploads_a_gguf_export(weights: str, hub: Any, tmp_path: Path) -> None:
    for name in (weights, "Modelfile", "README.md"):
        (tmp_path / name).write_bytes(b"")
    run_here("push", tmp_path, "--to", "user/mine")
    # it names the base's path on this machine
    local = {"Modelfile"} if weights == "adapter.gguf" else set()
    assert matched(hub, tmp_path) == {weights, "Modelfile", "README.md"} - local


def test_a_push_of_anything_but_an_export_is_refused_by_name(
    run_directory: Path, hub: Any, tmp_path: Path
) -> None:
    (tmp_path / "options.json").write_text("{}")
    for directory in (
        run_directory.parent,
        tmp_path,
        tmp_path / "absent",
        run_directory / "journal.jsonl",
    ):
        assert str(directory) in refusal("push", directory, "--to", "user/mine")
    assert "zo2 export --run" in refusal("push", tmp_path, "--to", "user/mine")
    for name in ("mine", "a/b/c", "user/m ine"):
        assert "--to" in refusal("push", run_directory, "--to", name)
    assert hub.mock_calls == []
    hub.create_repo.side_effect = PermissionError("403 forbidden")
    assert "403 forbidden" in refusal("push", run_directory, "--to", "user/mine")


def test_the_prompt_beside_a_model_has_its_line_breaks() -> None:
    rows = RowOptions(prompt_template=r"Tweet: {text}\nMood:", labels=("good", "bad"))
    assert prompt_of(rows) == {
        "prompt_template": "Tweet: {text}\nMood:",
        "labels": ("good", "bad"),
    }
