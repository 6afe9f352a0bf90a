"""Workers on machines of different kinds, and on several hosts: one journal, and the same bits of every weight."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command_lines import run_here, torchrun_command
from crews import SECONDS, all_equal, distributed, free_port, group_of
from models import make_batch, save_model, small_config
from runs import small_run

from zo2adapters import open_checkpoint
from zo2core import Distribution, Engine, MemoryPolicy, MultiQueryRGE, PhiloxNoise, Workers, ZerothOrder
from zo2core.errors import WorkerError
from zo2core.kernels import dispatch
from zo2core.planning.memory import HostPlan

KINDS = ("default", "avx2", "avx512")  # of vector instructions that torch uses
STEPS = 4


class Asked(NamedTuple):
    """What a machine is to do as a worker of a run."""

    base: Path  # checkpoint
    folder: Path  # for its journal
    rank: int
    size: int  # number of workers
    port: int  # of the store
    split: str  # of a step
    exact: bool  # whether it draws MeZO's noise


def _none() -> None:
    """The compiled kernels of a machine without any."""


def machine(kind: str, asked: Any, told: Any) -> None:
    """A machine: train as it is asked, and tell its own losses and its weights, or what it was refused with."""
    if kind == KINDS[0]:
        dispatch.library = _none  # type: ignore[assignment]
    for one in iter(asked.get, None):
        try:
            told.put(trained(one))
        except WorkerError as error:
            told.put(str(error))


def trained(asked: Asked) -> tuple[list[float], bytes]:
    """Losses that this machine computes alone, and the weights that the workers come to."""
    with Engine(open_checkpoint(asked.base)) as replayer:
        alone = [replayer.evaluate([make_batch(40, [9, 3, 7, 5], seed=step)]).loss for step in range(STEPS)]
    store = distributed.TCPStore("127.0.0.1", asked.port, is_master=False, wait_for_workers=False)
    streamed = MemoryPolicy(host=HostPlan((), budget=2**28, buckets=1, keep_noise=False))
    with (
        Workers(group_of(store, asked.rank, asked.size), split=asked.split) as workers,
        Engine(
            open_checkpoint(asked.base),
            ZerothOrder(
                MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=3, weight_decay=0.1),
                noise=None if asked.exact else PhiloxNoise(Distribution.GAUSSIAN),
            ),
            journal=asked.folder / "journal.jsonl",
            memory=streamed,
            workers=workers,
        ) as engine,
    ):
        for step in range(STEPS):
            engine.step(make_batch(40, [9, 3, 7, 5], seed=step))
        return alone, b"".join(tensor.numpy().tobytes() for _, tensor in engine.parameters_now())


class Machines:
    """One machine of each kind, which tests use one after the other: starting them takes seconds."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._told = context.Queue()
        self._asked = {kind: context.Queue() for kind in KINDS}
        self._processes: list[Any] = []
        for kind, asked in self._asked.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("ATEN_CPU_CAPABILITY", kind)
                self._processes.append(context.Process(target=machine, args=(kind, asked, self._told), daemon=True))
                self._processes[-1].start()

    def train(self, base: Path, folder: Path, kinds: Sequence[str], split: str, *, exact: bool) -> list[Any]:
        """Train as workers of one run, on machines of these kinds."""
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, kind in enumerate(kinds):
            own = folder / str(rank)
            own.mkdir()
            self._asked[kind].put(Asked(base, own, rank, len(kinds), store.port, split, exact))
        made: list[Any] = []
        while len(made) < len(kinds):
            assert all(process.is_alive() for process in self._processes), "a machine has failed"
            with contextlib.suppress(queue.Empty):
                made.append(self._told.get(timeout=0.1))
        return made

    def close(self) -> None:
        for asked in self._asked.values():
            asked.put(None)
        for process in self._processes:
            process.join(SECONDS)


pytestmark = pytest.mark.long_profile  # processes that import everything
several_kinds = pytest.mark.skipif(
    dispatch.library() is None or torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this machine is of one kind"
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
