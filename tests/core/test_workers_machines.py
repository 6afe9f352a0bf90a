"""Workers on machines of different kinds, and on several hosts: one journal, and the same bits of every weight."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import queue
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import SECONDS, run_here, torchrun_command
from crews import KEY, all_equal, free_port, opened_store
from models import make_batch, save_model, small_config
from runs import small_run

from zo2adapters import open_checkpoint
from zo2core import Distribution, MemoryPolicy, MultiQueryRGE, PhiloxNoise, Replayer, WorkerError, Workers, ZOEngine
from zo2core.kernels import native
from zo2core.planning.host_plan import HostPlan
from zo2core.workers.exchange import TCPStore

KINDS = ("default", "avx2", "avx512")  # of vector instructions that torch uses
STEPS = 4


def _none() -> None:
    """The compiled kernels of a machine without any."""


def work(base: Path, folder: Path, place: tuple[int, int], port: int, split: str, told: Any, exact: bool) -> None:
    """A worker in a process of its own, with its own bytes of the model; the first one has no compiled kernels.

    Args:
        base: Checkpoint.
        folder: For its journal.
        place: Rank of the worker, and how many there are.
        port: Of the store.
        split: Of a step.
        told: Gets its own losses and its weights, or what it was refused with.
        exact: Whether it draws MeZO's noise.
    """
    try:
        told.put(trained(base, folder, place, port, split, exact=exact))
    except WorkerError as error:
        told.put(str(error))


def trained(
    base: Path, folder: Path, place: tuple[int, int], port: int, split: str, *, exact: bool
) -> tuple[list[float], bytes]:
    """Losses that this machine computes alone, and the weights that the workers come to."""
    rank, size = place
    if rank == 0:
        native.library = _none  # type: ignore[assignment]
    with Replayer(open_checkpoint(base)) as replayer:
        alone = [replayer.evaluate([make_batch(40, [9, 3, 7, 5], seed=step)]).loss for step in range(STEPS)]
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    streamed = MemoryPolicy(host=HostPlan((), budget=2**28, buckets=1, keep_noise=False))
    with (
        Workers.joined(rank=rank, size=size, store=store, key=KEY, split=split, timeout=SECONDS) as workers,
        ZOEngine(
            open_checkpoint(base),
            MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=3, weight_decay=0.1),
            noise=None if exact else PhiloxNoise(Distribution.GAUSSIAN),
            journal=folder / "journal.jsonl",
            memory=streamed,
            workers=workers,
        ) as engine,
    ):
        for step in range(STEPS):
            engine.step(make_batch(40, [9, 3, 7, 5], seed=step))
        return alone, b"".join(tensor.numpy().tobytes() for _, tensor in engine.parameters_now())


def on_machines(
    folder: Path, kinds: Sequence[str], split: str, monkeypatch: pytest.MonkeyPatch, *, exact: bool
) -> list[Any]:
    """What workers on machines of these kinds come to, in no order."""
    context = multiprocessing.get_context("spawn")
    store, told = opened_store(), context.Queue()
    base = save_model(folder / "base", small_config("llama"))
    processes: list[Any] = []
    made: list[Any] = []
    for rank, kind in enumerate(kinds):
        (folder / str(rank)).mkdir()
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", kind)
        given = (base, folder / str(rank), (rank, len(kinds)), store.port, split, told, exact)
        process = context.Process(target=work, args=given, daemon=True)
        process.start()
        processes.append(process)
    while all(process.exitcode in (None, 0) for process in processes) and len(made) < len(kinds):
        with contextlib.suppress(queue.Empty):
            made.append(told.get(timeout=0.1))
    for process in processes:
        process.join(SECONDS)
    assert len(made) == len(kinds), "a worker has failed"
    return made


several_kinds = pytest.mark.skipif(
    native.library() is None or torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this machine is of one kind"
)


@several_kinds
@pytest.mark.parametrize("split", ["directions", "rows"])
def test_machines_whose_forwards_differ_have_one_journal_and_the_same_bits(
    tmp_path: Path, split: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if split == "rows" and not request.config.getoption("--long"):
        pytest.skip("by rows is for the long profile")
    made = on_machines(tmp_path, KINDS, split, monkeypatch, exact=False)
    assert not all_equal([losses for losses, _ in made]), "machines of one kind show nothing"
    assert all_equal([weights for _, weights in made])
    assert all_equal([(tmp_path / str(rank) / "journal.jsonl").read_bytes() for rank in range(len(KINDS))])


@several_kinds
def test_machines_that_draw_other_noise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch draws normal numbers in another way without vector instructions: the same record would be another update."""
    for said in on_machines(tmp_path, KINDS[::2], "directions", monkeypatch, exact=True):
        assert "other torch-cpu-sequential noise than worker 0's" in said
        assert "PhiloxNoise" in said
    assert not list(tmp_path.glob("*/journal.jsonl"))


def test_hosts_that_meet_train_the_model_of_one_process(tmp_path: Path) -> None:
    """Two hosts, each with a torchrun and a run directory of its own, here on one machine."""
    options = small_run(tmp_path)
    asked = ["train", "--model", options.model, "--data", options.data, "--steps", 3, "--lr", 1e-3, "--batch-size", 4]
    outputs = [tmp_path / "first host", tmp_path / "second host"]
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(KEY)
    meeting = f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_port()} --rdzv-id=1 --local-addr=127.0.0.1"
    agents = []
    for output in outputs:
        command = torchrun_command(1, "-m", "zo2adapters", *asked, "--key-file", key, "--output", output)
        place = command.index("--standalone")
        command[place : place + 1] = meeting.split()
        agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [agent.communicate(timeout=SECONDS)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum("journal: " in own for own in said) == 1
    journals = [(output / "journal.jsonl").read_bytes() for output in outputs]
    assert journals[0] == journals[1]
    assert {json.loads(line).get("workers") for line in journals[0].splitlines() if b'"step"' in line} == {"0-1"}
    assert run_here(*asked, "--output", tmp_path / "alone").status == 0
    [exported] = [path for output in outputs if (path := output / "model" / "model.safetensors").exists()]
    assert exported.read_bytes() == (tmp_path / "alone" / "model" / "model.safetensors").read_bytes()
