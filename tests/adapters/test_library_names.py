"""Names inside the libraries: all are imported where a release that lacks one is refused by its
version, and the releases that are told are those that the tests run with.
"""

import ast
import importlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import save_model, small_config
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from zo2adapters import open_checkpoint
from zo2adapters.frameworks import arguments, trainer_mixins
from zo2adapters.models.library_names import TESTED, names_of, require_attributes
from zo2core import Engine
from zo2core.errors import MissingPackageError, UnsupportedModelError

ROOT = Path(__file__).parents[2]


def pins(path: Path) -> dict[str, str]:
    """The versions that a constraints file names."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def test_the_releases_that_are_told_are_those_of_the_tests() -> None:
    common = pins(ROOT / "constraints.txt")
    oldest, newest = (
        {**common, **pins(ROOT / f"constraints-{name}.txt")} for name in ("oldest", "newest")
    )
    assert {package: (oldest[package], newest[package]) for package in TESTED} == TESTED


def imports_outside(node: ast.AST, package: str) -> Iterator[str]:
    """Modules within a package that are imported other than in ``names_of(package)``."""
    if isinstance(node, ast.With) and ast.unparse(node.items[0]) == f"names_of('{package}')":
        return
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
        yield node.module or ""
    for child in ast.iter_child_nodes(node):
        yield from imports_outside(child, package)


def test_names_inside_libraries_are_imported_where_their_absence_is_told() -> None:
    apart = {"tasks/template_rendering.py"}  # the program of a child, which imports nothing of ours
    files = {
        str(path.relative_to(ROOT / "src/zo2adapters")): path
        for path in ROOT.glob("src/zo2adapters/**/*.py")
    }
    for name in files.keys() - apart:
        tree = ast.parse(files[name].read_text())
        for package in TESTED:
            assert list(imports_outside(tree, package)) == [], name


def test_a_release_without_a_name_is_refused_by_its_version() -> None:
    version = importlib.metadata.version("transformers")
    newest = TESTED["transformers"][1]
    told = rf"^transformers {version}: found .*{{}}.*pip install 'transformers=={newest}'"
    with pytest.raises(MissingPackageError, match=told.format("gone")), names_of("transformers"):
        importlib.import_module("transformers.gone")
    with pytest.raises(MissingPackageError, match=told.format("Trainer.gone")):
        require_attributes(Trainer, "train", "gone")
    with pytest.raises(ModuleNotFoundError, match=r"^No module"), names_of("transformers"):
        importlib.import_module("gone")  # of another package


def test_a_method_that_a_mixin_replaces_must_be_the_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl: Any = pytest.importorskip("trl")
    bases = {"Trainer": Trainer, "DPOTrainer": trl.DPOTrainer, "GRPOTrainer": trl.GRPOTrainer}
    mixins = [kind for name, kind in vars(trainer_mixins).items() if name.endswith("Mixin")]
    ours = {name for kind in mixins for name in vars(kind) if not name.startswith("__")}
    of_all = {method for method in ours if callable(getattr(Trainer, method, None))}
    for name, base in bases.items():
        replaced = {method for method in ours - of_all if callable(getattr(base, method, None))}
        assert set(arguments.REPLACED[name]) == (replaced or of_all), name

    class ZOTrainer(trainer_mixins.ZOTrainerMixin, Trainer):
        pass

    monkeypatch.delattr(Trainer, "_move_model_to_device")
    options = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(MissingPackageError, match=r"Trainer\._move_model_to_device"):
        ZOTrainer(save_model(tmp_path / "base", small_config("llama")), options)


def test_a_loss_that_ignores_the_arguments_of_a_chunk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_model(tmp_path / "base", small_config("llama"))
    config: Any = small_config("llama")
    usual = LlamaForCausalLM(config).loss_function

    def renamed(*given: Any, num_items_in_batch: object = None, **others: Any) -> torch.Tensor:
        loss: torch.Tensor = usual(*given, **others)
        return loss

    monkeypatch.setattr(LlamaForCausalLM, "loss_function", staticmethod(renamed))
    open_checkpoint(base)
    with pytest.raises(UnsupportedModelError, match=r"found a loss of 0\.693 .*expected 0\.173"):
        open_checkpoint(base, loss_chunk=4)


def test_a_forward_that_makes_a_cache_all_the_same_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_checkpoint(save_model(tmp_path / "base", small_config("llama")))
    forward = model.skeleton.forward
    monkeypatch.setattr(
        model.skeleton, "forward", lambda use_cache, **inputs: forward(use_cache=True, **inputs)
    )
    ids = torch.tensor([[3, 4, 5]])
    with (
        Engine(model) as engine,
        pytest.raises(UnsupportedModelError, match="called with a cache, although use_cache"),
    ):
        engine.evaluate([{"input_ids": ids, "labels": ids}])
