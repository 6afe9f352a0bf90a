"""Workers of a run are killed at random: torchrun starts them again, and nothing is lost but the step under way."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import worker_program
from command_lines import SECONDS, torchrun_command

SIZE = 3
STEPS = 100
PROGRAM = Path(worker_program.__file__)


def launched(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """``torchrun`` with workers that it starts again as often as need be."""
    launcher = torchrun_command(SIZE, "--max-restarts", 1000, PROGRAM, folder, steps)
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(launcher, stdout=output, stderr=output)


def longest_journal(folder: Path) -> bytes:
    """The whole lines of the longest journal."""
    contents = [path.read_bytes() for path in folder.glob("*.jsonl")]
    return max((content[: content.rfind(b"\n") + 1] for content in contents), key=len, default=b"")


def pid_of(folder: Path, rank: int) -> int | None:
    """The process of a worker, if it has said which it is."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / f"{rank}.pid").read_text())
    return None


def run_with_kills(folder: Path, rng: random.Random, kills: int, *, begun: bool) -> list[bytes]:
    """One run to its end; ``begun``: no worker is killed before the first step. Returns the longest journal at each kill."""
    folder.mkdir()
    process = launched(folder, STEPS)
    seen: list[bytes] = []
    killed: set[int] = set()
    try:
        end = time.monotonic() + SECONDS * (1 + kills)
        while process.poll() is None and time.monotonic() < end:
            pid = pid_of(folder, rng.randrange(SIZE))
            if len(seen) < kills and pid is not None and pid not in killed and (longest_journal(folder) or not begun):
                time.sleep(rng.uniform(0.0, 0.5 if begun else 6.0))  # a worker takes about half of that to start
                seen.append(longest_journal(folder))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed |= {own for rank in range(SIZE) if (own := pid_of(folder, rank)) is not None}  # all start again
            time.sleep(0.01)
        output = (folder / "output").read_text()
        assert process.poll() == 0, output[-2000:]
        assert "Connection refused" not in output, "workers that started again were sent to those that were stopped"
    finally:
        process.kill()
    return seen


@pytest.mark.long_profile
@pytest.mark.parametrize("seed", [0])
def test_killed_workers_lose_the_step_under_way_and_nothing_else(
    tmp_path: Path, seed: int, request: pytest.FixtureRequest
) -> None:
    is_long = request.config.getoption("--long")
    kills = 200 if is_long else 1
    rng = random.Random(seed)
    alone = b"".join(worker_program.trained(tmp_path, 99, STEPS, None))
    done = runs = 0
    while done < kills:
        folder = tmp_path / f"run {runs}"
        seen = run_with_kills(folder, rng, min(kills - done, rng.randrange(2, 6)), begun=not is_long)
        journals = [(folder / f"{rank}.jsonl").read_bytes() for rank in range(SIZE)]
        assert journals[0] == journals[1] == journals[2]
        assert journals[0].count(b'"step"') == STEPS
        for before in seen:
            assert journals[0].startswith(before), "a record that was durable is gone"
        assert [(folder / f"{rank}.weights").read_bytes() for rank in range(SIZE)] == [alone] * SIZE
        done, runs = done + len(seen), runs + 1
