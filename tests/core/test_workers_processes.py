"""Workers on machines of other kinds, and workers that are killed: one journal, and nothing is lost
but a step under way.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import environment, run_here, torchrun_command
from crews import SECONDS, all_equal, distributed, free_port, group_of
from engines import memory, outcome
from models import make_batch
from runs import small_run
from toy import ToyBlockModel

from zo2adapters import open_checkpoint
from zo2core import (
    Distribution,
    Engine,
    EngineOptions,
    MultiQueryRGE,
    PhiloxNoise,
    Workers,
    ZerothOrder,
)
from zo2core.errors import ZO2Error
from zo2core.kernels import native

KINDS = ("default", "avx2", "avx512")  # of vector instructions that torch uses
STEPS = 4


def without_kernels(kind: str) -> None:
    """The oldest machine has no compiled kernels either."""
    if kind == KINDS[0]:
        native.library = lambda: None  # type: ignore[assignment]


def trained(
    base: Path, folder: Path, rank: int, size: int, port: int, split: str, exact: bool
) -> tuple[list[float], bytes] | str:
    """Losses that this machine computes alone, and the weights that the workers come to; or what it
    was refused with.

    The port is of the store; ``exact`` draws MeZO's noise.
    """
    batches = [make_batch(40, [9, 3, 7, 5], seed=step) for step in range(STEPS)]
    with Engine(open_checkpoint(base)) as replayer:
        alone = [replayer.evaluate([batch]).loss for batch in batches]
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    noise = None if exact else PhiloxNoise(Distribution.GAUSSIAN)
    method = ZerothOrder(MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=3, weight_decay=0.1), noise=noise)
    try:
        with Workers(group_of(store, rank, size), split=split) as workers:
            _, made = outcome(
                Engine(
                    open_checkpoint(base),
                    method,
                    journal=folder / "journal.jsonl",
                    memory=memory(1, budget=2**28),
                    options=EngineOptions(workers=workers),
                ),
                batches,
            )
            return alone, b"".join(tensor.numpy().tobytes() for tensor in made.values())
    except ZO2Error as error:
        return str(error)


# one of each kind, for one test after the other: starting them takes seconds
Machines = dict[str, ProcessPoolExecutor]


def train_on(
    machines: Machines, base: Path, folder: Path, kinds: Sequence[str], split: str, *, exact: bool
) -> list[Any]:
    """Train as workers of one run, on machines of these kinds."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    futures = []
    for rank, kind in enumerate(kinds):
        own = folder / str(rank)
        own.mkdir()
        futures.append(
            machines[kind].submit(trained, base, own, rank, len(kinds), store.port, split, exact)
        )
    return [future.result(SECONDS) for future in futures]


pytestmark = pytest.mark.long_profile  # processes that import everything
several_kinds = pytest.mark.skipif(
    native.library() is None or torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="this machine is of one kind",
)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    made: Machines = {}
    with contextlib.ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        for kind in KINDS:
            patch.setenv("ATEN_CPU_CAPABILITY", kind)
            options: Any = {
                "mp_context": multiprocessing.get_context("spawn"),
                "initializer": without_kernels,
            }
            made[kind] = opened.enter_context(ProcessPoolExecutor(1, **options, initargs=(kind,)))
            made[kind].submit(int).result()  # starts the process
        yield made


@several_kinds
@pytest.mark.parametrize("split", ["directions", "rows"])
def test_machines_whose_forwards_differ_have_one_journal_and_the_same_bits(
    base: Path, tmp_path: Path, split: str, machines: Machines
) -> None:
    made = train_on(machines, base, tmp_path, KINDS, split, exact=False)
    assert not all_equal([losses for losses, _ in made]), "machines of one kind show nothing"
    assert all_equal([weights for _, weights in made])
    assert all_equal(
        [(tmp_path / str(rank) / "journal.jsonl").read_bytes() for rank in range(len(KINDS))]
    )


@several_kinds
def test_machines_that_draw_other_noise_are_refused(
    base: Path, tmp_path: Path, machines: Machines
) -> None:
    """Torch draws normal numbers in another way without vector instructions: the same record would
    be another update.
    """
    first, second = train_on(machines, base, tmp_path, KINDS[::2], "directions", exact=True)
    assert "other torch-cpu-sequential noise than worker 0's" in first
    assert "PhiloxNoise" in first
    assert "found noise that torch" in second, "which has worker 0's header"
    assert not list(tmp_path.glob("*/journal.jsonl"))


def test_hosts_that_meet_train_the_model_of_one_process(tmp_path: Path) -> None:
    """Two hosts, each with a torchrun and a run directory of its own, here on one machine."""
    options = small_run(tmp_path)
    asked = [
        "train",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--data",
        options.data,
        "--steps",
        3,
        "--lr",
        1e-3,
        "--batch-size",
        4,
    ]
    outputs = [tmp_path / "first host", tmp_path / "second host"]
    meeting = (
        f"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_port()} --rdzv-id=1 "
        "--local-addr=127.0.0.1"
    )
    agents = []
    for output in outputs:
        command = torchrun_command(1, "-m", "zo2adapters", *asked, "--output", output)
        place = command.index("--standalone")
        command[place : place + 1] = meeting.split()
        agents.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    said = [agent.communicate(timeout=SECONDS)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum("journal: " in own for own in said) == 1
    journals = [(output / "journal.jsonl").read_bytes() for output in outputs]
    assert journals[0] == journals[1]
    assert run_here(*asked, "--output", tmp_path / "alone").status == 0
    [exported] = [
        path for output in outputs if (path := output / "model" / "model.safetensors").exists()
    ]
    assert (
        exported.read_bytes() == (tmp_path / "alone" / "model" / "model.safetensors").read_bytes()
    )


SIZE = 3
KILLED_STEPS = 100


def toy_batch(seed: int) -> dict[str, torch.Tensor]:
    """Rows that depend on the step alone."""
    ids = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def toy_trained(folder: Path, rank: int, steps: int, workers: Workers | None) -> list[bytes]:
    """Go on until the journal of this rank has so many steps; the bytes of the weights."""
    model = ToyBlockModel(
        11, 8, 3, tied=True, dtype=torch.float32, file=folder / f"{rank}.safetensors"
    )
    estimator = MultiQueryRGE(lr=1e-2, zo_eps=1e-2, q=3)
    with Engine(
        model,
        ZerothOrder(estimator),
        journal=folder / f"{rank}.jsonl",
        options=EngineOptions(workers=workers),
    ) as engine:
        for step in range(engine.version, steps):
            engine.step(toy_batch(step))
        return [tensor.numpy().tobytes() for _, tensor in engine.parameters_now()]


def launched(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """``torchrun`` with workers that it starts again as often as need be."""
    launcher = torchrun_command(SIZE, "--max-restarts", 1000, __file__, folder, steps)
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(launcher, stdout=output, stderr=output, env=environment())


def longest_journal(folder: Path) -> bytes:
    """The whole lines of the longest journal."""
    contents = [path.read_bytes() for path in folder.glob("*.jsonl")]
    return max((content[: content.rfind(b"\n") + 1] for content in contents), key=len, default=b"")


def pid_of(folder: Path, rank: int) -> int | None:
    """The process of a worker, if it has said which it is."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / f"{rank}.pid").read_text())
    return None


def run_with_kills(folder: Path, rng: random.Random, kills: int) -> list[bytes]:
    """One run to its end, of which workers are killed, also while they start.

    Returns the longest journal at each kill.
    """
    folder.mkdir()
    process = launched(folder, KILLED_STEPS)
    seen: list[bytes] = []
    killed: set[int] = set()
    try:
        end = time.monotonic() + 2 * SECONDS * (1 + kills)
        while process.poll() is None and time.monotonic() < end:
            pid = pid_of(folder, rng.randrange(SIZE))
            if len(seen) < kills and pid is not None and pid not in killed:
                time.sleep(rng.uniform(0.0, 6.0))  # a worker takes about half of that to start
                seen.append(longest_journal(folder))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                # all start again
                killed |= {own for rank in range(SIZE) if (own := pid_of(folder, rank)) is not None}
            time.sleep(0.01)
        output = (folder / "output").read_text()
        assert process.poll() == 0, output[-2000:]
        # One that is killed while others connect refuses these, a few times each. Those of the next
        # attempt do not meet it.
        most = 30 * len(seen)
        assert output.count("Connection refused") <= most, (
            "workers that started again were sent to those that were stopped"
        )
    finally:
        process.kill()
    return seen


def test_killed_workers_lose_the_step_under_way_and_nothing_else(tmp_path: Path) -> None:
    rng = random.Random(0)
    alone = b"".join(toy_trained(tmp_path, 99, KILLED_STEPS, None))
    done = runs = 0
    while done < 200:
        folder = tmp_path / f"run {runs}"
        seen = run_with_kills(folder, rng, min(200 - done, rng.randrange(2, 6)))
        journals = [(folder / f"{rank}.jsonl").read_bytes() for rank in range(SIZE)]
        assert journals[0] == journals[1] == journals[2]
        assert journals[0].count(b'"step"') == KILLED_STEPS
        for before in seen:
            assert journals[0].startswith(before), "a record that was durable is gone"
        assert [(folder / f"{rank}.weights").read_bytes() for rank in range(SIZE)] == [alone] * SIZE
        done, runs = done + len(seen), runs + 1


if __name__ == "__main__":
    # what ``torchrun`` starts: a worker that trains the toy until its steps are taken
    own_folder = Path(sys.argv[1])
    (own_folder / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    with Workers.from_torchrun(split="directions", timeout=20.0) as own_workers:
        trained_to = toy_trained(own_folder, own_workers.rank, int(sys.argv[2]), own_workers)
        (own_folder / f"{own_workers.rank}.weights").write_bytes(b"".join(trained_to))
