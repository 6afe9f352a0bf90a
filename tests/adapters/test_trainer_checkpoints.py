"""Checkpoints of other people's trainers: damaged copies are refused, and a kill while saving leaves a whole model."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import ROWS, trainer_options
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import zo2core.engine
from zo2adapters import ZOArguments, ZOTrainerMixin, open_checkpoint
from zo2core import Engine, Journal
from zo2core.checkpoint.shards import write_checkpoint
from zo2core.errors import JournalError


class ZOTrainer(ZOTrainerMixin, Trainer):
    pass


def made(base: Path, output: Path, **options: Any) -> Any:
    told = {"max_steps": 4, "learning_rate": 1e-3, "weight_decay": 0.0, "warmup_steps": 0, "save_strategy": "steps"}
    args = TrainingArguments(**trainer_options(output, **{**told, "save_steps": 2, **options}))
    zo = ZOArguments(export_checkpoints=False)
    return ZOTrainer(model=base, args=args, zo=zo, train_dataset=ROWS, processing_class=AutoTokenizer.from_pretrained(base))


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with checkpoints at steps 2 and 4."""
    directory: Path = tmp_path_factory.mktemp("checkpoints") / "run"
    made(base, directory).train()
    return directory


def without_last_line(text: str) -> str:
    return "".join(text.splitlines(keepends=True)[:-1])


DAMAGES: dict[str, tuple[Callable[[str], str], str]] = {
    "the last line is cut": (lambda text: text[:-9], "a last record that is cut or damaged, after 3 steps"),
    "a digit of the last line is another one": (
        lambda text: text[:-30] + str((int(text[-30], 16) + 1) % 10) + text[-29:],
        "a last record that is cut or damaged, after 3 steps",
    ),
    "a whole line is missing": (without_last_line, "found 3 steps; expected 4"),
    "a line in the middle is damaged": (lambda text: text.replace('"step":1', '"step":7'), "found a damaged record"),
    "nothing is left": (lambda text: "", "an empty file, after 0 steps"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_a_checkpoint_with_a_damaged_journal_is_refused(
    base: Path, trained: Path, tmp_path: Path, damage: Callable[[str], str], said: str
) -> None:
    copy = Path(shutil.copytree(trained / "checkpoint-4", tmp_path / "run" / "checkpoint-4"))
    text = (copy / "journal.jsonl").read_text()
    assert damage(text) != text
    (copy / "journal.jsonl").write_text(damage(text))
    trainer = made(base, tmp_path / "run")
    with pytest.raises(JournalError, match=said):
        trainer.train(resume_from_checkpoint=str(copy))
    trainer.state.best_model_checkpoint = str(copy)
    with pytest.raises(JournalError, match=said):
        trainer._load_best_model()
    assert trainer.engine.version == 0


def test_the_journal_of_another_checkpoint_is_refused(base: Path, trained: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(trained / "checkpoint-2", tmp_path / "run" / "checkpoint-2"))
    shutil.copy(trained / "checkpoint-4" / "journal.jsonl", copy)
    with pytest.raises(JournalError, match=r"checkpoint-2/journal\.jsonl: found 4 steps; expected 2"):
        made(base, tmp_path / "run").train(resume_from_checkpoint=str(copy))


def test_a_checkpoint_of_a_second_call_of_train_goes_on_though_its_step_counts_from_zero(base: Path, tmp_path: Path) -> None:
    twice = made(base, tmp_path / "run")
    twice.train()
    twice.train()
    assert json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2
    resumed = made(base, tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert resumed.engine.journal.updates == twice.engine.journal.updates
    assert resumed.engine.version == 8


def test_a_checkpoint_that_names_no_version_is_held_against_the_trainers_step(
    base: Path, trained: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(trained / "checkpoint-4", tmp_path / "run" / "checkpoint-4"))
    state = json.loads((copy / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["ZOTrainerMixin"]
    (copy / "trainer_state.json").write_text(json.dumps(state))
    trainer = made(base, tmp_path / "run", max_steps=5)
    trainer.train(resume_from_checkpoint=str(copy))
    assert trainer.engine.version == 5
    (copy / "journal.jsonl").write_text(without_last_line((copy / "journal.jsonl").read_text()))
    with pytest.raises(JournalError, match="found 3 steps; expected 4"):
        made(base, tmp_path / "run").train(resume_from_checkpoint=str(copy))


class Killed(BaseException):
    """Ends a save where a process is killed."""


@contextmanager
def killed_at(place: int) -> Iterator[None]:
    """Ends what runs at its change number ``place`` of names in a directory. A killed process removes nothing."""
    left = [place]

    def counted(change: Any) -> Any:
        def changing(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return change(*arguments, **options)

        return changing

    with pytest.MonkeyPatch.context() as patched:
        for method in ("replace", "rename", "unlink"):
            patched.setattr(Path, method, counted(getattr(Path, method)))
        patched.setattr(tempfile.TemporaryDirectory, "__exit__", lambda self, *_: self._finalizer.detach())
        yield


def saved_weights(directory: Path) -> dict[str, torch.Tensor]:
    AutoTokenizer.from_pretrained(directory)
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    return {name: value.clone() for name, value in model.state_dict().items()}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def contents(directory: Path) -> tuple[set[str], list[bytes]]:
    """Names of files, but for those of shards, and what the weights and the journal are."""
    names = {path.name for path in directory.iterdir() if "model-" not in path.name}
    shards = sorted(directory.glob("model*.safetensors"))
    return names, [path.read_bytes() for path in (*shards, directory / "journal.jsonl")]


def shards_of(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    writing = partial(write_checkpoint, max_shard=nbytes)
    monkeypatch.setattr(zo2core.engine, "write_checkpoint", writing)


WHOLE, CUT = 10**9, 4000  # bytes of a shard


@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "after"), [(WHOLE, WHOLE), (CUT, CUT), (WHOLE, CUT), (CUT, WHOLE)])
def test_a_kill_while_a_model_is_saved_again_leaves_a_whole_one(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    trainer = made(base, tmp_path / "run", max_steps=1, save_strategy="no", lr_scheduler_type="constant")
    trainer.train()
    shards_of(monkeypatch, before)
    trainer.save_model(tmp_path / "earlier")
    trainer.engine.step({key: value[None] for key, value in ROWS[5].items()})
    shards_of(monkeypatch, after)
    trainer.save_model(tmp_path / "later")
    earlier, later = saved_weights(tmp_path / "earlier"), saved_weights(tmp_path / "later")
    assert not are_equal(earlier, later)
    seen = set()
    for place in range(100):
        directory = Path(shutil.copytree(tmp_path / "earlier", tmp_path / str(place)))
        with killed_at(place), suppress(Killed):
            trainer.save_model(directory)
            break
        found = saved_weights(directory)
        assert are_equal(found, earlier) or are_equal(found, later), place
        opened = dict(Engine(open_checkpoint(directory)).parameters_now())
        assert are_equal(opened, earlier) or are_equal(opened, later), place
        version = len(Journal(directory / "journal.jsonl").updates)
        assert version in (1, 2)
        assert version == 1 or are_equal(found, later), "a journal is never ahead of the model beside it"
        seen.add((are_equal(found, later), version))
        trainer.save_model(directory)
        assert contents(directory) == contents(tmp_path / "later")
    assert {(False, 1), (True, 1)} <= seen
