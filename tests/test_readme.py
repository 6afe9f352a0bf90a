"""README and docs: commands and examples run as printed, links lead somewhere, and the house is the
one that is drawn.
"""

import argparse
import ast
import importlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import sys
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from command_lines import write_rows
from crews import Crew
from gguf_models import save_gguf
from models import WORDS, save_model, save_tokenizer, small_config
from profiles import short_first
from safetensors.torch import load_file
from torch.distributed.run import parse_args
from transformers import MistralConfig

from zo2adapters.cli import main
from zo2core import Journal
from zo2core.ranges import parse_size

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
OTHER_PAGES = [
    ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
]
CHAT = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
FIRST_PAGES = [page for page in PAGES if page.stem in {"README", "library"}]
first_pages = pytest.mark.parametrize(
    "page",
    short_first(FIRST_PAGES, [page for page in PAGES if page not in FIRST_PAGES]),
    ids=lambda page: page.stem,
)


def fences(page: Path) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The commands of a shell block, those that go on after a backslash as one each."""
    return text.replace("\\\n", " ").splitlines()


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models and files that the pages speak of, and a finished run."""
    folder = tmp_path_factory.mktemp("pages")
    save_tokenizer(
        save_model(
            folder / "model",
            small_config("llama", vocab_size=len(WORDS), max_position_embeddings=64),
        )
    )
    settings = folder / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": CHAT}))
    save_gguf(folder / "model.gguf", "llama", {"token_embd": "Q8_0", "": "Q4_0"})
    sizes: Any = {
        "vocab_size": 17,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "head_dim": 4,
    }
    mistral = MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    save_tokenizer(save_model(folder / "mistral", mistral))
    (folder / "pickled").mkdir()
    shutil.copy(folder / "model" / "config.json", folder / "pickled")
    torch.save(
        load_file(folder / "model" / "model.safetensors"), folder / "pickled" / "pytorch_model.bin"
    )
    for name in ("train.jsonl", "eval.jsonl"):
        write_rows(
            folder / name, [{"prompt": "a b", "completion": f" c {word}"} for word in WORDS[2:6]]
        )
    write_rows(folder / "texts.jsonl", [{"text": "the cat sat"}, {"text": "the dog ran"}])
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    write_rows(folder / "messages.jsonl", [{"messages": messages}])
    write_rows(folder / "answers.jsonl", [{"prompt": "the cat", "answers": ["sat", "ran"]}])
    [runs, *_] = [
        text for language, text in fences(ROOT / "docs" / "runs.md") if language == "text"
    ]
    (folder / "runs.yaml").write_text(runs)
    (folder / "tweets.csv").write_text("text,reply,mood\nthe cat,sat,yes\nthe dog,ran,no\n")
    for name in ("reviews", "held-out"):
        lines = (
            f"the {word},{'good' if number % 2 else 'bad'}\n"
            for number, word in enumerate(WORDS[2:] * 3)
        )
        (folder / f"{name}.csv").write_text("text,sentiment\n" + "".join(lines))
    datasets = importlib.import_module("datasets")
    tweets = datasets.Dataset.from_csv(str(folder / "tweets.csv"), cache_dir=str(folder / "cache"))
    tweets.to_parquet(folder / "tweets.parquet")
    datasets.DatasetDict({"train": tweets}).save_to_disk(folder / "saved")
    (folder / "sst2").mkdir()
    for name in ("train", "validation"):
        rows = [
            {"sentence": f"the {word}", "label": number % 2} for number, word in enumerate(WORDS)
        ]
        write_rows(folder / "sst2" / f"{name}.jsonl", rows)
    [reward] = [
        text
        for language, text in fences(ROOT / "docs" / "rewards.md")
        if "def short_and_right" in text
    ]
    (folder / "rewards.py").write_text(reward)
    write_rows(
        folder / "choices.jsonl",
        [{"prompt": "the cat is", "candidates": [" yes", " no"], "answer": " no"}],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        main(
            shlex.split(
                "train --method zeroth-order --model model --data train.jsonl --output run "
                "--steps 20 --lr 1e-6"
            )
        )
    return folder


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi", MagicMock())  # no test connects to it


class UnderstoodError(Exception):
    """Stops a program once its command line was understood."""


def require_understood(program: str, arguments: Sequence[str]) -> None:
    """Run a program of tools/ up to where its measuring, which takes minutes, would begin."""
    path = ROOT / program
    assert path.is_file(), program
    if path.stem == "run_within":
        limit, separator, python, *rest = arguments
        assert parse_size(limit) > 0
        assert (separator, python) == ("--", "python")
        require_understood(rest[0], rest[1:])
        return
    with pytest.MonkeyPatch.context() as patch:
        parse_args = argparse.ArgumentParser.parse_args

        def stop(parser: argparse.ArgumentParser, *given: list[str]) -> None:
            parse_args(parser, *given)
            raise UnderstoodError

        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [program, *arguments])
        with pytest.raises(UnderstoodError):
            importlib.import_module(path.stem).main()


def run_command(command: str, capsys: pytest.CaptureFixture[str], crew: Crew) -> None:
    """Run one line of a shell block. What takes minutes is checked as far as a moment allows.

    A ``torchrun`` of two workers is understood by its own parser; the workers are forked.
    """
    program, *arguments = shlex.split(command)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {argument for argument in arguments if argument != "TORCH=cpu"} <= set(targets)
    elif program == "python":
        require_understood(arguments[0], arguments[1:])
    elif program == "torchrun":
        launched = parse_args(arguments)  # type: ignore[no-untyped-call]
        assert (launched.standalone, launched.module, launched.training_script) == (
            True,
            True,
            "zo2adapters",
        )
        assert launched.nproc_per_node == "2"
        workers = crew.run(*launched.training_script_args)
        assert all(worker.status == 0 for worker in workers), workers
        assert workers[0].out, command
    else:
        assert program == "zo2", command
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO("the cat\n/adapter\n/quit\n"))
            main(arguments)
        assert capsys.readouterr().out, command


@first_pages
def test_commands_and_examples_run_as_printed(
    page: Path,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    crew: Crew,
) -> None:
    if page.stem == "trainers":  # of others, who warn of much
        warnings.simplefilter("ignore")
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", here / "cache")
    if page == README:
        shutil.rmtree(here / "run")  # it makes its own
    for language, text in fences(page):
        assert language in {"sh", "python", "text", "diff"}  # test_new_option.py applies the diff
        if language == "sh":
            for command in commands(text):
                run_command(command, capsys, crew)
        elif language == "python" and (
            "write_program" not in text or importlib.util.find_spec("executorch")
        ):
            exec(compile(text, page.name, "exec"), {"__name__": page.stem})


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_loop_with_accelerate_resumes_where_its_journal_ends(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    page = ROOT / "docs" / "trainers.md"
    [example] = [
        text for language, text in fences(page) if language == "python" and "Accelerator" in text
    ]
    run = compile(example, page.name, "exec")
    shutil.copytree(prepared / "model", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    exec(run, {})
    journal = tmp_path / "accelerate" / "journal.jsonl"
    whole = Journal(journal).updates
    lines = journal.read_text().splitlines(keepends=True)  # updates come last
    journal.write_text("".join(lines[: len(lines) - len(whole) + steps]))
    shutil.rmtree(tmp_path / "accelerate" / "model")
    assert len(Journal(journal).updates) == steps
    exec(run, {})
    assert Journal(journal).updates == whole
    assert len(whole) == 4
    assert len({update.losses for update in whole}) == 4


def test_every_subcommand_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line
        for page in PAGES
        for language, text in fences(page)
        if language == "sh"
        for line in commands(text)
    ]
    shown = {line.split()[1] for line in lines if line.startswith("zo2 ")}
    shown.add("demo")  # behind `make demo`
    main(["--help"])
    assert shown == set(re.findall(r"^  ([a-z]+)$", capsys.readouterr().out, re.MULTILINE))


def test_the_readme_is_read_in_five_minutes() -> None:
    text = README.read_text()
    assert "](docs/index.md)" in text
    assert len(text.splitlines()) <= 120
    assert text.index("make demo") < 1200, "the first command is in the first screen"
    assert fences(README)[0] == ("sh", "make demo TORCH=cpu\nmake test\n")


def test_the_index_lists_each_page_once() -> None:
    index = ROOT / "docs" / "index.md"
    listed = re.findall(r"^\| \[.*\]\(([\w-]+\.md)\)", index.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in PAGES[1:] if page != index)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_a_page_begins_with_what_it_is_for(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("# ")
    assert text.split("\n", 2)[2].startswith("This page ")
    assert text.count("\nThis page ") == 1, "one page, one question"


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: page.stem)
def test_lines_are_short_and_links_and_paths_lead_somewhere(page: Path) -> None:
    most = {
        number: line
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 125
    }
    assert not {
        number: line for number, line in most.items() if page == README or not line.startswith("|")
    }
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), target
    for path in re.findall(r"`((?:src|tests|tools|docs)/[^` ]+)`", page.read_text()):
        assert (ROOT / path).exists(), path


def test_names_of_tables_contracts_and_extras_exist_and_mistral_takes_at_most_15_lines() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        extra
        for page in PAGES
        for extra in re.findall(r"pip install '\.\[(\w+)\]'", page.read_text())
    }
    assert extras
    assert extras <= set(project["optional-dependencies"])
    [example] = [
        text
        for page in PAGES
        for language, text in fences(page)
        if language == "python" and "MISTRAL" in text
    ]
    assert len(example.splitlines()) <= 15
    rows = re.findall(
        r"`(\w+)` in `((?:src|tests)/[\w/]+\.py)`", "".join(page.read_text() for page in PAGES)
    )
    assert len(rows) >= 20
    for name, path in rows:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{name} in {path}"


def test_the_house_has_exactly_the_rooms_and_root_modules_that_are_drawn() -> None:
    drawn: dict[str, set[str]] = {}
    picture = next(
        text for _, text in fences(ROOT / "docs" / "architecture.md") if text.startswith("src/")
    )
    for line in picture.splitlines():
        name, description = line.split(maxsplit=1)
        assert description
        if line.startswith("src/"):
            rooms = drawn[name] = set[str]()
        else:
            rooms.add(name)
    for package, rooms in drawn.items():
        there = [
            path
            for path in (ROOT / package).iterdir()
            if path.name not in {"__init__.py", "__pycache__", "py.typed"}
        ]
        assert rooms == {f"{path.name}/" if path.is_dir() else path.name for path in there}, package
    assert set(drawn) == {
        f"src/{path.name}/" for path in (ROOT / "src").iterdir() if (path / "__init__.py").exists()
    }


def test_each_row_of_the_papers_page_names_code_and_a_test_that_are_there() -> None:
    root = README.parent
    lines = (root / "docs" / "papers.md").read_text().splitlines()
    rows = [re.findall(r"`([^`]+)`", line)[-4:] for line in lines if " `test_" in line]
    assert len(rows) > 40
    missing = []
    for path, name, file, case in rows:
        code = ast.parse((root / path).read_text())
        defined = {getattr(node, "name", getattr(node, "id", None)) for node in ast.walk(code)}
        tests = ast.parse((root / file).read_text())
        cases = {node.name for node in ast.walk(tests) if isinstance(node, ast.FunctionDef)}
        missing += [] if name in defined else [f"{path}: {name}"]
        missing += [] if case in cases else [f"{file}: {case}"]
    assert not missing
