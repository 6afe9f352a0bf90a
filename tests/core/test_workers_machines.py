"""Workers on machines of different kinds, and on several hosts: one journal, and the same bits of every weight."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_lines import SECONDS, run_here, torchrun_command
from crews import all_equal, free_port
from machines import KINDS, Machines
from models import save_model, small_config
from runs import small_run

from zo2core.kernels import native

pytestmark = pytest.mark.long_profile  # processes that import everything
several_kinds = pytest.mark.skipif(
    native.library() is None or torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this machine is of one kind"
)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with contextlib.closing(Machines()) as made:
        yield made


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_model(tmp_path / "base", small_config("llama"))


@several_kinds
@pytest.mark.parametrize("split", ["directions", "rows"])
def test_machines_whose_forwards_differ_have_one_journal_and_the_same_bits(
    base: Path, tmp_path: Path, split: str, machines: Machines
) -> None:
    made = machines.train(base, tmp_path, KINDS, split, exact=False)
    assert not all_equal([losses for losses, _ in made]), "machines of one kind show nothing"
    assert all_equal([weights for _, weights in made])
    assert all_equal([(tmp_path / str(rank) / "journal.jsonl").read_bytes() for rank in range(len(KINDS))])


@several_kinds
def test_machines_that_draw_other_noise_are_refused(base: Path, tmp_path: Path, machines: Machines) -> None:
    """Torch draws normal numbers in another way without vector instructions: the same record would be another update."""
    for said in machines.train(base, tmp_path, KINDS[::2], "directions", exact=True):
        assert "other torch-cpu-sequential noise than worker 0's" in said
        assert "PhiloxNoise" in said
    assert not list(tmp_path.glob("*/journal.jsonl"))


def test_hosts_that_meet_train_the_model_of_one_process(tmp_path: Path) -> None:
    """Two hosts, each with a torchrun and a run directory of its own, here on one machine."""
    options = small_run(tmp_path)
    asked = ["train", "--model", options.model, "--data", options.data, "--steps", 3, "--lr", 1e-3, "--batch-size", 4]
    outputs = [tmp_path / "first host", tmp_path / "second host"]
    meeting = f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_port()} --rdzv-id=1 --local-addr=127.0.0.1"
    agents = []
    for output in outputs:
        command = torchrun_command(1, "-m", "zo2adapters", *asked, "--output", output)
        place = command.index("--standalone")
        command[place : place + 1] = meeting.split()
        agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [agent.communicate(timeout=SECONDS)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum("journal: " in own for own in said) == 1
    journals = [(output / "journal.jsonl").read_bytes() for output in outputs]
    assert journals[0] == journals[1]
    assert run_here(*asked, "--output", tmp_path / "alone").status == 0
    [exported] = [path for output in outputs if (path := output / "model" / "model.safetensors").exists()]
    assert exported.read_bytes() == (tmp_path / "alone" / "model" / "model.safetensors").read_bytes()
