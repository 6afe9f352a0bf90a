"""Examples: each program does what its first lines say, in seconds; each is a page long."""

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from zo2core.errors import UnsupportedModelError

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if path.stem != "tiny")
MOST_LINES = 100

# a call of peft's own, which the newest transformers deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def run(name: str, folder: Path) -> Any:
    return importlib.import_module(name).main(folder)


def test_an_adapter_that_was_trained_lowers_the_loss_and_has_the_same_in_peft(
    tmp_path: Path,
) -> None:
    pytest.importorskip("peft")
    before, after, in_peft = run("lora_on_a_cpu", tmp_path)
    assert after < before - 0.3
    assert in_peft == pytest.approx(after, rel=1e-5)


def test_a_model_that_does_not_fit_has_the_losses_of_one_that_does(
    tmp_path: Path, process_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The example asks the system how much the process has, which earlier tests have raised.
    monkeypatch.setattr(
        psutil.Process, "memory_info", lambda process: SimpleNamespace(rss=process_memory)
    )
    blocks, limited, unlimited = run("larger_than_memory", tmp_path)
    assert blocks is not None
    assert 1 <= blocks < 12
    assert limited == unlimited


def test_a_rule_without_a_gradient_is_followed_more_often(tmp_path: Path) -> None:
    first, last, journal_bytes = run("loss_without_a_gradient", tmp_path)
    assert last < first - 0.2
    assert journal_bytes < 20_000 < os.path.getsize(tmp_path / "base" / "model.safetensors")


def test_a_declared_architecture_has_the_losses_of_the_whole_model(tmp_path: Path) -> None:
    ours, theirs = run("own_architecture", tmp_path)
    assert len(ours) == 6
    assert ours == theirs


def test_an_architecture_whose_config_lacks_a_size_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = importlib.import_module("own_architecture")
    monkeypatch.delattr(module.MixerConfig, "vocab_size")
    with pytest.raises(UnsupportedModelError, match="MixerConfig: found no vocab_size; expected"):
        module.main(tmp_path)


def test_an_own_loop_lowers_the_loss(tmp_path: Path) -> None:
    losses = run("own_training_loop", tmp_path)
    assert losses[-1] < losses[0] - 0.1


def test_runs_over_one_base_end_as_each_alone(tmp_path: Path) -> None:
    losses, alone = run("several_runs_over_one_base", tmp_path)
    assert len(losses) == 3
    assert min(losses.values()) == alone


def test_each_example_is_a_page_and_is_listed_and_tested() -> None:
    here = Path(__file__).read_text()
    listed = (EXAMPLES / "README.md").read_text()
    assert len(PROGRAMS) == 6
    for path in PROGRAMS:
        assert len(path.read_text().splitlines()) <= MOST_LINES, path
        assert f'run("{path.stem}"' in here
        assert f"]({path.name})" in listed
