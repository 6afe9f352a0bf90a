"""Runs that the clock kills again and again, most often inside a step, until they end."""

from __future__ import annotations

import mmap
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from command_lines import Apart

MARKED = {  # phases of a process, with the functions during which it is in them
    "snapshot or commit": (
        ("zo2core.checkpoint.snapshots", "Snapshots", "write"),
        ("zo2core", "Engine", "commit"),
        ("zo2core.perturbation.factor_file", "FactorFile", "keep"),
    ),
    "evaluation": (("zo2core", "Engine", "evaluate"), ("zo2adapters.tasks.reward_task", "RewardTask", "evaluate")),
    "step": (
        ("zo2core", "Engine", "step"),
        ("zo2core", "Engine", "step"),
        ("zo2adapters.tasks.reward_task", "RewardTask", "step"),
    ),
    "record": (("zo2core.journal", "Journal", "append"),),
    "generation": (("zo2adapters.tasks.generation", "Generation", "continuations"),),
    "rewards": (("zo2adapters.tasks.rewards", "Rewards", "of"),),
}
PHASES = ("start-up", "outside of a step", *MARKED)
STEP = PHASES.index("step")
WITHIN_A_STEP = PHASES[STEP:]  # those after the step itself are parts of one, and are told apart nowhere else
MOST_KILLS = 6  # of one run, which then goes on to its end

_MARKS = """
import importlib, mmap, os
os.chdir({folder!r})
file = open("phase", "r+b")
phase = mmap.mmap(file.fileno(), 1)
def mark(number, module, owner, name):
    owner = getattr(importlib.import_module(module), owner)
    real = getattr(owner, name)
    def marked(*args, **kwargs):
        before = phase[0]
        phase[0] = number if number <= {step} or before == {step} else before
        result = real(*args, **kwargs)
        phase[0] = before if number > {step} else max(before, 1)
        return result
    setattr(owner, name, marked)
for number, name in enumerate({phases!r}):
    for place in {marked!r}.get(name, ()):
        mark(number, *place)
"""


class KilledRuns:
    """Runs of one command in the directory ``run``, killed at moments that are drawn over the time of their steps.

    Args:
        folder: The directory in which the command is given.
        apart: Forks the processes.
        command: The command of a whole run.
        steps: Steps of a run.
        patch: Python to run in each process beforehand.
    """

    def __init__(self, folder: Path, apart: Apart, command: Sequence[object], steps: int, patch: str = "") -> None:
        self._apart, self._command, self._steps = apart, command, steps
        marks = _MARKS.format(folder=str(folder), step=STEP, phases=PHASES, marked=MARKED)
        self._patch = marks + patch
        Path("phase").write_bytes(b"\0")
        with Path("phase").open("r+b") as file:
            self._phase = mmap.mmap(file.fileno(), 1)
        self._seconds = 0.0  # from the first step of a whole run to its last step or evaluation
        self.hits = Counter[str]()  # kills by phase

    def undisturbed(self, outcome: Callable[[str], dict[str, object]]) -> dict[str, object]:
        """The outcome of a run that is not killed, whose time is measured."""
        self._start(is_begun=False)
        self._wait_for_a_step()
        began = last = time.perf_counter()
        while self._apart.is_running:
            last = time.perf_counter() if self._phase[0] > 1 else last
            time.sleep(0.001)
        ended = self._apart.finish()
        assert ended.status == 0, ended
        self._seconds = last - began
        made = outcome("run")
        shutil.rmtree("run")
        return made

    named: Sequence[object] = ()  # options that name the run's own functions again

    def killed(self, rng: random.Random, most: int) -> int:
        """Run and kill, at most so often, and then run to the end; returns the number of kills."""
        kills, wanted = 0, rng.randint(1, min(most, MOST_KILLS))
        shutil.rmtree("run", ignore_errors=True)
        while True:
            is_begun = Path("run/options.json").exists()
            if not is_begun:
                shutil.rmtree("run", ignore_errors=True)
            left = max(self._steps - _recorded(), 1) / self._steps if is_begun else 1.0
            self._start(is_begun=is_begun)
            if kills < wanted:
                self._wait_for_a_step()
                time.sleep(rng.uniform(0, left * self._seconds))
                self._apart.send(signal.SIGKILL)
            ended = self._apart.finish()
            assert ended.status in (0, -signal.SIGKILL), ended
            if ended.status == 0:
                return kills
            kills += 1
            self.hits[PHASES[self._phase[0]]] += 1

    def _start(self, *, is_begun: bool) -> None:
        self._phase[0] = 0
        command = ("train", "--resume", "run", *self.named) if is_begun else self._command
        self._apart.start(*command, patch=self._patch)

    def _wait_for_a_step(self) -> None:
        """Wait until the first step begins, or the process has ended without one."""
        while self._phase[0] == 0 and self._apart.is_running:
            time.sleep(0.001)


def _recorded() -> int:
    """Steps in the journal."""
    path = Path("run/journal.jsonl")
    raw = path.read_bytes() if path.exists() else b""
    return raw.count(b'"commit"') + raw.count(b'"projected_grads"')


def require_same_outcome(
    runs: KilledRuns, outcome: Callable[[str], dict[str, object]], rng: random.Random, kills: int
) -> str:
    """Kill so often, and compare each run that ends with the undisturbed one; returns what was seen."""
    expected, ends = runs.undisturbed(outcome), 0
    while runs.hits.total() < kills:
        runs.killed(rng, kills - runs.hits.total())
        found = outcome("run")
        assert found == expected, [name for name, value in expected.items() if found[name] != value]
        ends += 1
    assert runs.hits[PHASES[0]] == 0, "each kill waited for a step to begin"
    return f"{runs.hits.total()} kills, {dict(runs.hits)}; {ends} runs ended as the undisturbed one"
