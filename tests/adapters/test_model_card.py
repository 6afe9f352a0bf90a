"""Model cards of exports, and pushing exports to the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from command_lines import refusal, run_here
from huggingface_hub import ModelCard
from runs import finish, small_run
from transformers import AutoTokenizer

from zo2adapters.tasks.row_source import data_sha256
from zo2adapters.trainers.model_card import model_card
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.options import RunModelOptions
from zo2core import Journal


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    options = small_run(folder, optimization=Optimization(lr=1e-2, rank=2))
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
    for part in (
        "`base` after 3 zeroth-order steps",
        "## Results",
        "## How to load it",
        '"lr": 0.01,',
        '"zo_eps": 0.001',
        '"batch size": 3',
    ):
        assert part in card.text, part
    assert data_sha256(run_directory.parent / "rows.jsonl") in card.text
    assert [line.split("|")[1].strip() for line in card.text.splitlines() if line.startswith("| ")] == [
        "step",
        "0",
        "2",
        "3",
    ]


def test_a_gguf_adapter_of_a_directory_names_the_base_that_llama_cpp_needs(run_directory: Path) -> None:
    journal = Journal(run_directory / "journal.jsonl")
    for base, named in (("org/name", "BASE.gguf"), ("base.gguf", '"base.gguf"')):
        card = model_card(journal, version=3, base=base, is_adapter=True, is_gguf_file=True).decode()
        assert f"llama-cli --model {named} --lora adapter.gguf" in card


def test_a_card_has_no_path_of_this_machine(run_directory: Path) -> None:
    assert str(run_directory.parent) not in (run_directory / "model" / "README.md").read_text()


def test_an_export_of_a_step_has_the_card_of_this_step(run_directory: Path, tmp_path: Path) -> None:
    run_here("export", "--run", run_directory, "--at", 2, "--output", tmp_path / "two")
    card = card_of(tmp_path / "two")
    assert "after 2 zeroth-order steps" in card.text
    assert "| 3 |" not in card.text
    journal = ("--journal", run_directory / "journal.jsonl")
    run_here("export", "--model", run_directory.parent / "base", *journal, "--output", tmp_path / "last")
    assert "after 3 zeroth-order steps" in card_of(tmp_path / "last").text


def test_an_adapter_has_a_card_that_loads_it_with_peft(run_directory: Path, tmp_path: Path) -> None:
    run_here("export", "--run", run_directory, "--as-adapter", "--output", tmp_path / "adapter")
    card = card_of(tmp_path / "adapter")
    assert (card.data.library_name, "lora" in card.data.tags) == ("peft", True)
    assert "PeftModel.from_pretrained" in card.text
    assert "AutoTokenizer.from_pretrained" in card.text
    tokenizers: list[Any] = [AutoTokenizer.from_pretrained(path) for path in (tmp_path / "adapter", run_directory / "model")]
    assert tokenizers[0]("the cat").input_ids == tokenizers[1]("the cat").input_ids


def test_a_run_that_trains_an_adapter_exports_its_card(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    peft.LoraConfig(r=2, target_modules=["q_proj"]).save_pretrained(tmp_path / "lora")
    options = small_run(tmp_path, model_options=RunModelOptions(adapter=tmp_path / "lora" / "adapter_config.json"))
    finish(options)
    assert card_of(options.output / "model").data.library_name == "peft"


def test_names_of_the_hub_are_in_the_header() -> None:
    content = model_card(Journal(), version=1, base="user/base", is_adapter=True, data="user/tweets:train").decode()
    data: Any = ModelCard(content).data
    assert (data.base_model, data.base_model_relation, data.datasets) == ("user/base", "adapter", ["user/tweets"])


def test_names_of_directories_cannot_break_the_card(tmp_path: Path) -> None:
    base = tmp_path / 'a`\n---\nb"c'
    base.mkdir()
    text = ModelCard(model_card(Journal(), version=0, base=str(base)).decode()).text
    assert "`a__---_b_c`" in text


def test_a_card_without_steps_claims_no_training(run_directory: Path, tmp_path: Path) -> None:
    run_here("export", "--model", run_directory.parent / "base", "--output", tmp_path / "plain")
    run_here("export", "--run", run_directory, "--at", 0, "--output", tmp_path / "start")
    for directory in (tmp_path / "plain", tmp_path / "start"):
        card = card_of(directory)
        assert "The weights of `base` without a step of training." in card.text
        assert not any(part in card.text for part in ("fine-tuned", "after 0"))
        assert card.data.tags == ["zo2core"]
    assert not any(part in card_of(tmp_path / "plain").text for part in ("steps", "## Results", "## Data", "## Options"))


class Hub:
    """Stands in for the hub: keeps what is asked of it."""

    asked: Sequence[tuple[str, dict[str, Any]]] = ()
    error: Exception | None = None

    def create_repo(self, name: str, **options: Any) -> None:
        if Hub.error is not None:
            raise Hub.error
        Hub.asked = [("create", {"name": name, **options})]

    def upload_folder(self, **options: Any) -> None:
        Hub.asked = [*Hub.asked, ("upload", options)]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    Hub.asked, Hub.error = (), None
    return Hub


def test_a_push_creates_a_private_repository_and_uploads_the_export_alone(run_directory: Path, hub: type[Hub]) -> None:
    ended = run_here("push", run_directory, "--to", "user/mine")
    assert ended.out == "https://huggingface.co/user/mine\n"
    (_, created), (_, uploaded) = hub.asked
    assert created == {"name": "user/mine", "private": True, "exist_ok": True}
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("user/mine", run_directory / "model")
    matched = {path.name for pattern in uploaded["allow_patterns"] for path in (run_directory / "model").glob(pattern)}
    assert matched == {path.name for path in (run_directory / "model").iterdir()}
    run_here("push", run_directory / "model", "--to", "user/mine", "--public")
    assert hub.asked[0][1]["private"] is False


@pytest.mark.parametrize("weights", ["model.gguf", "adapter.gguf"])
def test_a_push_uploads_a_gguf_export(weights: str, hub: type[Hub], tmp_path: Path) -> None:
    for name in (weights, "Modelfile", "README.md"):
        (tmp_path / name).write_bytes(b"")
    run_here("push", tmp_path, "--to", "user/mine")
    (_, uploaded) = hub.asked[1]
    matched = {path.name for pattern in uploaded["allow_patterns"] for path in tmp_path.glob(pattern)}
    local = {"Modelfile"} if weights == "adapter.gguf" else set()  # it names the base's path on this machine
    assert matched == {weights, "Modelfile", "README.md"} - local


def test_a_push_of_anything_but_an_export_is_refused_by_name(run_directory: Path, hub: type[Hub], tmp_path: Path) -> None:
    (tmp_path / "options.json").write_text("{}")
    for directory in (run_directory.parent, tmp_path, tmp_path / "absent", run_directory / "journal.jsonl"):
        assert str(directory) in refusal("push", directory, "--to", "user/mine")
    assert "zo2 export --run" in refusal("push", tmp_path, "--to", "user/mine")
    for name in ("mine", "a/b/c", "user/m ine"):
        assert "--to" in refusal("push", run_directory, "--to", name)
    assert hub.asked == ()


def test_what_the_hub_refuses_is_one_typed_line(run_directory: Path, hub: type[Hub]) -> None:
    hub.error = PermissionError("403 forbidden")
    assert "403 forbidden" in refusal("push", run_directory, "--to", "user/mine")
