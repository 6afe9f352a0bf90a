"""Runs as people start them: the base is compared, what is written is told and limited."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_lines import refusal
from runs import small_run

from zo2adapters.cli import main
from zo2adapters.commands.export import Export
from zo2adapters.trainers.options import Execution, Storage, TrainOptions
from zo2adapters.trainers.trainer import Trainer
from zo2core import Journal
from zo2core.checkpoint.shards import SafetensorsReader, parse_header
from zo2core.errors import CheckpointError, JournalError, OptionError
from zo2core.planning.speeds import terabytes_written


@pytest.fixture
def options(tmp_path: Path) -> TrainOptions:
    return small_run(tmp_path, storage=Storage(write_back_every=2))


def test_the_first_line_says_how_many_terabytes_are_written_and_a_limit_is_kept_to(options: TrainOptions) -> None:
    with Trainer(options, quiet=True) as trainer:
        assert re.search(r"Disk writes: negligible, [0-9.]+ MB in 1,000 steps", trainer.first_lines()[0])
    beside = replace(options, optimization=replace(options.optimization, rank=2, period=2), storage=Storage())
    for number, (storage, kept) in enumerate(
        (
            (Storage(), r"factors of finished periods, [0-9.]+ [kM]B in 1,000 steps"),
            (Storage(write_limit_tb=1e-12), "no factors of finished periods, because of --write-limit-tb"),
            (Storage(write_back_every="never"), "no factors of finished periods, because of --write-back-every never"),
        )
    ):
        told = replace(beside, storage=storage, output=options.output.with_name(f"beside {number}"))
        with Trainer(told, quiet=True) as trainer:
            assert re.search(f"Disk writes: {kept}", trainer.first_lines()[0])
            trainer.train()
        assert (told.output / "factors.bin").exists() == (storage == Storage())
    storage = replace(options.storage, write_limit_tb=1e-6)
    with pytest.raises(OptionError, match=r"write_back: found writing every 2 steps.*MB in 1,000; expected at most"):
        Trainer(replace(options, output=options.output.with_name("other"), storage=storage), quiet=True)
    storage = replace(storage, write_back_every="auto")
    with Trainer(replace(options, output=options.output.with_name("third"), storage=storage), quiet=True) as trainer:
        every = trainer.engine.write_back_every
        assert every is not None
        layouts = trainer.engine._runner.layouts
        assert terabytes_written(layouts, every) <= 1e-6


def test_the_whole_base_is_compared_when_that_is_asked_for(
    options: TrainOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(options.output)
    with Trainer(options, quiet=True) as trainer:
        trainer.run()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # bars are drawn in terminals
    main(["train", "--resume", run, "--verify-base"])
    main(["export", "--run", run, "--output", str(tmp_path / "out"), "--verify-base"])
    main(["evaluate", "--run", run, "--data", str(tmp_path / "rows.jsonl"), "--verify-base"])
    assert capsys.readouterr().err.count("base: 100%") >= 3
    with pytest.raises(OptionError, match="verify_base: found no journal"):
        Export(model=options.model, output=tmp_path / "more", verify_base=True).run()
    shard = Path(options.model) / "model.safetensors"
    name, entry = max(parse_header(shard).items(), key=lambda item: item[1].nbytes)
    data = bytearray(shard.read_bytes())
    data[entry.start + entry.nbytes // 3] ^= 1
    with pytest.MonkeyPatch.context() as patch:  # as if no sample had met it
        patch.setattr(SafetensorsReader, "fingerprint", Journal(options.output / "journal.jsonl").header["base"])  # type: ignore[index]
        shard.write_bytes(data)
        for verify in (True, False):
            with pytest.raises(CheckpointError, match=r"model\.safetensors: .*: found content of digest"):
                Export(run_directory=options.output, output=tmp_path / "more", verify_base=verify).run()
    assert name
    assert not (tmp_path / "more").exists()


def test_a_journal_without_digests_cannot_verify_a_base(options: TrainOptions, tmp_path: Path) -> None:
    with Trainer(options, quiet=True):
        pass
    with pytest.raises(JournalError, match="no digest for 5 of 5 segments of the base"):
        Export(run_directory=options.output, output=tmp_path / "out", verify_base=True).run()
    with Trainer(options, resume=True, quiet=True, execution=Execution(verify_base=True)) as trainer:
        assert len(trainer.engine.journal.base_digests) == 5
    Export(run_directory=options.output, output=tmp_path / "out", verify_base=True).run()


def test_a_plan_says_how_many_terabytes_are_written(options: TrainOptions, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--model", options.model, "--output", str(options.data.parent), "--batch-size", "1"]
    main(plan)
    assert re.search(r"written per 1,000 steps +[0-9.]+ [kM]B", capsys.readouterr().out)
    for more in ([], ["--device-memory", "1GB"]):
        written = []
        for limit in ([], ["--write-limit-tb", "1e-8"]):
            main([*plan, *more, *limit, "--json"])
            written.append(json.loads(capsys.readouterr().out)["terabytes_per_1000_steps"])
        assert 0 < written[1] <= 1e-8 < written[0]
    assert "found 0.0; expected a finite number above 0" in refusal(*plan, "--write-limit-tb", "0")
