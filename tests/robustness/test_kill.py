"""Runs killed at any moment, again and again, end as the undisturbed ones: weights, losses and
journal, bit for bit.

They are killed by SIGKILL in three ways: at a named call, at the n-th call that changes a file (in
its middle, or after it where it has none), and by the clock, which hits what nobody thought of.
"""

import mmap
import random
import re
import shutil
import signal
import struct
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import pytest
from command_lines import Apart, Ended, done, make_place, refusal, wait_until
from models import save_tokenizer
from profiles import LONG, short_first
from runs import outcome
from strikes import (
    JOURNAL,
    METRICS,
    PHASES,
    SNAPSHOTS,
    STEP,
    TRAINER,
    arrange,
    beforehand,
    die_at_write,
    keep_temporary_files,
    mark_phases,
    strike,
)

from zo2adapters.models.conversion import quantize

STEPS = 6
MOST_KILLS = 6  # of one run, which then goes on to its end
FILES = {"options.json", "recipe.yaml", "journal.jsonl", "metrics.jsonl", "lock", "model"}
# by some kinds of runs
KEPT = {"scratch.bin", "scratch.jsonl", "factors.bin", "factors.jsonl", "samples.jsonl"}

Place = tuple[str, str, str, int, str]  # module, owner, function, call from 1, moment
SLOTS, RECORDS = "zo2core.sources.slot_file", "zo2core.io.durable"
GENERATION, TASK = "zo2adapters.tasks.generation", "zo2adapters.tasks.task"
DIRECTORY = "zo2adapters.trainers.run_directory"
TORCH_UPDATE = (
    "zo2core.optimizers.torch_optimizer",
    "TorchOptimizer",
    "apply",
)  # four calls a step
PROBES = 4  # of them, by which the plan of a run measures the optimizer, before its first step

ENDS: Mapping[str, Place] = {
    "before the first commit": (JOURNAL, "Journal", "append", 1, "before"),
    "the last step is taken, and not exported": (TRAINER, "Trainer", "_export", 1, "before"),
}
SNAPSHOT_PLACES: Mapping[str, Place] = {
    **ENDS,
    "a commit is durable, and no parameter has changed": (JOURNAL, "Journal", "append", 4, "after"),
    "before a row of metrics": (METRICS, "", "write_row", 6, "before"),
    "a snapshot is half written": (SNAPSHOTS, "", "replace_file", 2, "half"),
    "a snapshot is durable, and the older ones are still there": (
        SNAPSHOTS,
        "",
        "replace_file",
        3,
        "after",
    ),
    "an evaluation is made, and not noted": (JOURNAL, "Journal", "note_evaluation", 3, "before"),
}
UPDATE_PLACES: Mapping[str, Place] = {
    f"{moment} update {at}": (*TORCH_UPDATE, PROBES + at, moment)
    for at in (1, 5, 9, 14)
    for moment in ("after", "before")
}
TURN_PLACES: Mapping[str, Place] = {
    **ENDS,
    "a commit is durable, and the turn is not written": (JOURNAL, "Journal", "append", 4, "after"),
    "before a block is written": (SLOTS, "Generations", "write", 2, "before"),
    "a block is written, and not named": (RECORDS, "RecordFile", "append", 8, "before"),
    "a block is written, and not durable": (SLOTS, "Generations", "write", 2, "after"),
    "a block is written and named": (SLOTS, "Generations", "commit", 2, "after"),
    "between two updates": ("zo2core.optimizers.torch_optimizer", "BAdam", "apply", 5, "before"),
}
COMMIT_PLACES: Mapping[str, Place] = {
    **ENDS,
    "a step is recorded, and its blocks are not committed": (
        JOURNAL,
        "Journal",
        "append",
        4,
        "after",
    ),
    "before a block is written": (SLOTS, "Generations", "write", 9, "before"),
    "a block is written": (SLOTS, "Generations", "write", 10, "after"),
    "all blocks are written, and none is durable": (SLOTS, "Generations", "commit", 3, "before"),
    "all blocks are durable, and not named": (RECORDS, "RecordFile", "append", 8, "before"),
    "the commit is durable": (SLOTS, "Generations", "commit", 3, "after"),
    "between two updates": (*TORCH_UPDATE, PROBES + 7, "before"),
    "before a row of metrics": (METRICS, "", "write_row", 6, "before"),
}
REWARD_PLACES: Mapping[str, Place] = {
    "all is generated, and no reward is computed": (TASK, "Rewards", "of", 4, "before"),
    "the base has not continued all prompts": (GENERATION, "Generation", "_advance", 2, "after"),
    "a token of all rows is generated": (GENERATION, "Generation", "_advance", 30, "after"),
    "all rewards are computed": (TASK, "Rewards", "of", 4, "after"),
    "what a step has measured is noted": (JOURNAL, "Journal", "note_measured", 3, "after"),
    "before the record of a step": (JOURNAL, "Journal", "append", 4, "before"),
    "a record is durable": (JOURNAL, "Journal", "append", 4, "after"),
    "the drift of the eleventh step is measured": (TASK, "RewardTask", "drift", 5, "after"),
    "samples are answered, and not written": (
        DIRECTORY,
        "HeldRun",
        "write_samples",
        2,
        "before",
    ),
}


class Kind(NamedTuple):
    options: tuple[object, ...]
    places: Mapping[str, Place] = {}
    reference: str | None = None  # the kind of run that has the same journal and weights
    patch: str = ""  # Python that each process runs beforehand
    steps: int = STEPS
    again: tuple[object, ...] = ()  # options that a resumed run is given again

    @property
    def command(self) -> list[object]:
        told = [
            "train",
            "--method",
            "zeroth-order",
            "--data",
            "rows.jsonl",
            "--output",
            "run",
            "--steps",
            self.steps,
            "--batch-size",
            3,
            "--seed",
            3,
        ]
        return [*told, "--evaluation", "rows.jsonl", *self.options]


def zeroth(
    buckets: int | None, write: int | Literal["never"], *more: object, keeps: bool = True
) -> Kind:
    """Zeroth-order steps, with blocks in memory, or some at a time."""
    options = (
        "--model",
        "base",
        "--lr",
        1e-2,
        "--decay",
        "linear",
        "--warmup-steps",
        2,
        "--evaluate-every",
        2,
    )
    patch = beforehand(arrange, buckets=buckets, keep_noise=keeps)
    return Kind((*options, "--write-back-every", write, *more), {}, "zeroth, never written", patch)


def first_order(method: str, *more: object) -> tuple[object, ...]:
    turns = ("--switch-every", "2") if method == "badam" else ()
    return (
        "--model",
        "base",
        "--method",
        method,
        "--lr",
        1e-2,
        "--evaluate-every",
        2,
        *turns,
        *more,
    )


SNAPSHOTS_KEPT = ("--keep-best", "--snapshot-every", 2)
ADAPTER = ("--lora-rank", 3, "--lora-alpha", 16)
STREAMED = ("--stream-blocks",)
BOTH = ("--base-lr", 1e-2, "--lora-rank", 2)
REWARDS = ("rewards.py:fingerprint", "length=0.1")


def rewarded(*more: object, patch: str = "") -> Kind:
    """Steps that learn from rewards, in which the drift is measured before the first and the
    eleventh.
    """
    options: tuple[object, ...] = (
        "--reward",
        *REWARDS,
        "--estimator",
        "es",
        "--queries",
        3,
        "--lr",
        0.05,
        "--zo-eps",
        0.1,
    )
    options += ("--max-new-tokens", "4", "--evaluate-every", 4, "--samples", 2)
    temporary = beforehand(keep_temporary_files, "temporary")
    return Kind((*options, *more), {}, None, temporary + patch, 12, ("--reward", *REWARDS))


TIGHT = beforehand(arrange, is_tight=True, buckets=1)
KINDS: dict[str, Kind] = {
    "zeroth, never written": zeroth(None, "never"),
    "zeroth, written every step": zeroth(None, 1),
    "zeroth, written every second step": zeroth(None, 2, keeps=False),
    "zeroth, snapshots": zeroth(None, "never", "--snapshot-every", 3),
    "zeroth, streamed, written every step": zeroth(2, 1),
    "zeroth, streamed, written every second step": zeroth(1, 2, keeps=False),
    "zeroth, streamed, never written": zeroth(2, "never", keeps=False),
    "zeroth, streamed, snapshots": zeroth(1, 4, "--snapshot-every", 3),
    "adapter": Kind(first_order("adamw", *ADAPTER, *SNAPSHOTS_KEPT), SNAPSHOT_PLACES),
    "adapter, streamed, inputs on disk": Kind(
        first_order(
            "adamw",
            *ADAPTER,
            *SNAPSHOTS_KEPT,
            "--activation-memory",
            "1B",
            "--micro-batch-size",
            1,
        ),
        patch=TIGHT,
    ),
    "adamw": Kind(first_order("adamw", *SNAPSHOTS_KEPT), {**SNAPSHOT_PLACES, **UPDATE_PLACES}),
    "adamw, streamed": Kind(first_order("adamw", *STREAMED), COMMIT_PLACES, "adamw"),
    "badam": Kind(first_order("badam", *SNAPSHOTS_KEPT)),
    "badam, streamed": Kind(first_order("badam", *STREAMED), TURN_PLACES, "badam"),
    "lomo": Kind(first_order("lomo", *SNAPSHOTS_KEPT)),
    "lomo, streamed": Kind(first_order("lomo", *STREAMED, "--snapshot-every", 2), {}, "lomo"),
    "lora and lomo": Kind(first_order("lora+lomo", *BOTH, *SNAPSHOTS_KEPT)),
    "lora and lomo, streamed": Kind(
        first_order("lora+lomo", *BOTH, *STREAMED), {}, "lora and lomo"
    ),
    "adalomo": Kind(first_order("adalomo", *SNAPSHOTS_KEPT)),
    "adalomo, streamed": Kind(
        first_order("adalomo", *STREAMED, "--snapshot-every", 2), {}, "adalomo"
    ),
    "rewards": rewarded(
        "--model", "base", "--rank", 2, "--temperature", "0.8", "--reward-seconds", "500"
    )._replace(places=REWARD_PLACES),
    "rewards, a quantised base, one row at a time": rewarded(
        *(
            "--model",
            "nf4",
            "--rank",
            "2",
            "--period",
            "3",
            "--activation-memory",
            "1B",
            "--estimator",
            "es",
            "--fitness",
            "ranks",
        ),
        patch=TIGHT,
    ),
    "rewards, weights on disk": rewarded(
        *(
            "--model",
            "base",
            "--write-back-every",
            2,
            "--temperature",
            "0.8",
            "--top-p",
            "0.9",
        ),
        patch=TIGHT,
    ),
}

REWARD = '''
import hashlib, os, pathlib, signal, time

def fingerprint(prompt, completion, row):
    """A number that differs for any two texts, so that the losses in the journal tell what
    was generated.
    """
    time.sleep(0.001)
    strike = pathlib.Path("strike")
    if strike.exists() and pathlib.Path("run/journal.jsonl").read_bytes().count(b"seeds") == 3:
        strike.unlink()
        os.kill(int(pathlib.Path("pid").read_text()), signal.SIGKILL)
        time.sleep(600)
    digest = hashlib.sha256(f"{row['completion']} {completion}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32
'''


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, the same one quantised, rows, and a reward."""
    folder = make_place(tmp_path_factory.mktemp("kill"))
    quantize(folder / "base", folder / "nf4", "nf4")
    save_tokenizer(folder / "nf4")
    (folder / "rewards.py").write_text(REWARD)
    (folder / "temporary").mkdir()
    return folder


def ended(run: Path) -> dict[str, object]:
    """Everything of a finished run that does not measure time; nothing else is left behind."""
    names = {path.name for path in run.iterdir()}
    snapshots = {name for name in names if name.startswith("snapshot")}
    assert len(snapshots) <= 3, "the last two, and the best"
    assert FILES <= names - snapshots <= FILES | KEPT, (
        "a killed process's leavings are cleared away"
    )
    wait_until(lambda: not reward_processes())  # none outlives its run
    assert not list(Path("temporary").iterdir())
    return {
        **outcome(run),
        "samples": (run / "samples.jsonl").read_bytes() if "samples.jsonl" in names else b"",
    }


def reward_processes() -> list[psutil.Process]:
    """The processes of rewards that were started in the present directory and have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(Path.cwd()) and any(
                part.endswith("reward_program.py") for part in process.cmdline()
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


class Undisturbed(NamedTuple):
    outcome: dict[str, object]
    calls: int  # that change files
    seconds: float  # from the beginning of its first step to the end of its last step or evaluation


class Runs:
    """Runs of one kind in the directory ``run``, begun and resumed in processes of their own."""

    def __init__(self, name: str, apart: Apart, undisturbed: dict[str, Undisturbed]) -> None:
        self.kind = KINDS[name]
        self.hits = Counter[str]()  # kills by the clock, by phase
        self._apart = apart
        self._phase, self._calls = (
            self._mapped(file, nbytes) for file, nbytes in (("phase", 1), ("calls", 8))
        )
        if name not in undisturbed:
            undisturbed[name] = self._undisturbed()
        self.expected = undisturbed[name]

    def start(self, patch: str = "") -> None:
        run = Path("run")
        is_begun = (run / "options.json").exists()
        if not is_begun and run.exists():
            assert {path.name for path in run.iterdir()} <= {"lock", ".options.json.partial"}, (
                "nothing was begun"
            )
            shutil.rmtree(run)
        self._phase[0] = 0
        command = ["train", "--resume", "run", *self.kind.again] if is_begun else self.kind.command
        self._apart.start(*command, patch=self.kind.patch + patch)

    def finish(self) -> bool:
        status = self._apart.finish()
        assert status.status in (0, -signal.SIGKILL), status
        return status.status != 0

    def is_killed(self, patch: str) -> bool:
        self.start(patch)
        return self.finish()

    def require_same_end(self) -> None:
        """Let the run go on to its end, and compare it with the undisturbed one."""
        assert not self.is_killed("")
        self.compare()
        shutil.rmtree("run")

    def compare(self) -> None:
        found, expected = ended(Path("run")), self.expected.outcome
        assert found == expected, [name for name, value in expected.items() if found[name] != value]

    def killed_by_the_clock(self, rng: random.Random, most: int) -> None:
        """Run and kill, at most so often, and then run to the end."""
        for _ in range(rng.randint(1, min(most, MOST_KILLS))):
            left = (
                max(self.kind.steps - _recorded(), 1) / self.kind.steps
                if Path("run/options.json").exists()
                else 1.0
            )
            self.start(beforehand(mark_phases) + beforehand(die_at_write, pauses=True))
            self._wait_for_a_step()
            time.sleep(rng.uniform(0, left * self.expected.seconds))
            self._apart.send(signal.SIGKILL)
            if not self.finish():
                return self.compare()
            self.hits[PHASES[self._phase[0]]] += 1
        return self.require_same_end()

    def _undisturbed(self) -> Undisturbed:
        self.start(beforehand(mark_phases) + beforehand(die_at_write, pauses=True))
        self._wait_for_a_step()
        began = last = time.perf_counter()
        while self._apart.is_running:
            last = time.perf_counter() if self._phase[0] > 1 else last
            time.sleep(0.001)
        assert not self.finish()
        made = Undisturbed(
            ended(Path("run")), struct.unpack_from("<q", self._calls)[0], last - began
        )
        shutil.rmtree("run")
        return made

    def _wait_for_a_step(self) -> None:
        """Wait until the first step begins, or the process has ended without one."""
        while self._phase[0] == 0 and self._apart.is_running:
            time.sleep(0.001)

    @staticmethod
    def _mapped(name: str, nbytes: int) -> mmap.mmap:
        Path(name).write_bytes(bytes(nbytes))
        with Path(name).open("r+b") as file:
            return mmap.mmap(file.fileno(), nbytes)


def _recorded() -> int:
    """Steps in the journal."""
    path = Path("run/journal.jsonl")
    raw = path.read_bytes() if path.exists() else b""
    return raw.count(b'"commit"') + raw.count(b'"projected_grads"')


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Undisturbed]:
    return {}


@pytest.fixture
def runs(kind: str, here: Path, apart: Apart, undisturbed: dict[str, Undisturbed]) -> Runs:
    return Runs(kind, apart, undisturbed)


def kinds(*short: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "kind", short_first(short, [name for name in KINDS if name not in short])
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.reference])
def test_where_weights_are_changes_no_bit(
    kind: str, here: Path, apart: Apart, undisturbed: dict[str, Undisturbed]
) -> None:
    reference = KINDS[kind].reference
    assert reference is not None
    found, expected = (
        Runs(name, apart, undisturbed).expected.outcome for name in (kind, reference)
    )
    assert (found["journal"], found["weights"]) == (expected["journal"], expected["weights"])


def places() -> list[Any]:
    """Each place of each kind; one of each in the default profile."""
    return [
        pytest.param(
            name,
            place,
            id=f"{name}: {place}",
            marks=() if at == number % len(kind.places) else LONG,
        )
        for number, (name, kind) in enumerate(KINDS.items())
        for at, place in enumerate(kind.places)
    ]


@pytest.mark.parametrize(("kind", "place"), places())
def test_a_run_killed_at_a_place_ends_as_the_undisturbed_one(runs: Runs, place: str) -> None:
    assert runs.is_killed(strike(*runs.kind.places[place]))
    runs.require_same_end()


@kinds("zeroth, streamed, written every second step", "badam, streamed")
def test_a_run_killed_at_any_change_of_a_file_ends_as_undisturbed(
    kind: str, runs: Runs, request: pytest.FixtureRequest
) -> None:
    """After one is before the next. Or at one call a kind, each time later."""
    last = runs.expected.calls - 9
    one = 1 + list(KINDS).index(kind) * (last - 1) // (len(KINDS) - 1)
    calls = range(1, runs.expected.calls + 1) if request.config.getoption("--long") else [one]
    kills = 0
    for call in calls:
        kills += runs.is_killed(beforehand(die_at_write, call))
        runs.require_same_end()
    assert kills >= 0.9 * len(calls), "nearly every call comes in every run"


@kinds("adamw, streamed")
def test_a_run_killed_by_the_clock_ends_as_the_undisturbed_one(
    kind: str, runs: Runs, request: pytest.FixtureRequest
) -> None:
    wanted, rng = 60 if request.config.getoption("--long") else 2, random.Random(kind)
    while runs.hits.total() < wanted:
        shutil.rmtree("run", ignore_errors=True)
        runs.killed_by_the_clock(rng, wanted - runs.hits.total())
    assert runs.hits[PHASES[0]] == 0, "each kill waited for a step to begin"
    within = sum(runs.hits[phase] for phase in PHASES[STEP:])
    print(f"{kind}: {dict(runs.hits)}; {within} kills within a step")


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("zeroth")])
def test_writes_cut_in_half_are_made_up_for(kind: str, runs: Runs) -> None:
    is_written = "written every" in kind or "snapshots" in kind
    for file in (
        "journal.jsonl",
        *(("scratch.bin", "scratch.jsonl") if is_written else ()),
        "metrics.jsonl",
    ):
        assert runs.is_killed(beforehand(die_at_write, 2, file)), file
    runs.require_same_end()


@pytest.mark.long_profile
@pytest.mark.parametrize(
    "kind", ["zeroth, written every step", "zeroth, streamed, written every second step"]
)
def test_a_run_killed_while_it_measures_the_disk_leaves_nothing(kind: str, runs: Runs) -> None:
    options = runs.kind.options[: runs.kind.options.index("--write-back-every")]
    runs.kind = runs.kind._replace(options=(*options, "--write-back-every", "auto"))
    for call in range(1, 12):
        # at each start, a little later: among them are all calls of the probe
        assert runs.is_killed(beforehand(die_at_write, call))
    runs.require_same_end()


@pytest.mark.parametrize(
    ("kind", "place", "told"),
    [
        (
            "adapter",
            (METRICS, "", "write_row", 8),
            "from the snapshot of step 4, or to get its adapter",
        ),
        pytest.param(
            "adamw",
            (METRICS, "", "write_row", 8),
            "from the snapshot of step 4, or to get its model",
            marks=LONG,
        ),
        pytest.param(
            "adamw",
            (*TORCH_UPDATE, PROBES + 18),
            "from the snapshot of step 4, or to get its model",
            marks=LONG,
        ),
        (
            "adamw, streamed",
            (METRICS, "", "write_row", 5),
            "the run goes on from the commit of step ",
        ),
    ],
)
def test_interrupted_runs_say_how_to_go_on(
    runs: Runs, apart: Apart, place: tuple[str, str, str, int], told: str
) -> None:
    interrupted: Ended = apart.run(*runs.kind.command, patch=strike(*place, "SIGTERM"))
    assert interrupted.status == 143, interrupted
    assert told in interrupted.err
    for command in re.findall(r"zo2 (export --run run --at \d --output) DIR", interrupted.err):
        done(*command.split(), "half")
        assert Path("half").exists()
    runs.require_same_end()


@pytest.mark.parametrize("kind", ["rewards"])
def test_a_run_killed_while_its_rewards_are_computed_leaves_no_process(runs: Runs) -> None:
    Path("strike").touch()
    assert runs.is_killed("")
    assert not Path("strike").exists(), "the reward has ended its parent"
    runs.require_same_end()


@pytest.mark.long_profile
def test_a_resumed_run_has_the_drift_that_ends_it(here: Path, apart: Apart) -> None:
    kind = KINDS["rewards"]
    bounded = [*kind.command, "--max-drift", "1e-9"]
    told = refusal(*bounded)
    assert "step 10: found a drift of" in told
    shutil.move("run", "whole")
    assert apart.run(*bounded, patch=strike(JOURNAL, "Journal", "append", 9, "after")).status == -9
    resumed = refusal("train", "--resume", "run", *kind.again)
    assert resumed.partition(". What to do")[0] == told.partition(". What to do")[0]
    assert Path("run/journal.jsonl").read_bytes() == Path("whole/journal.jsonl").read_bytes()
    assert not reward_processes()
