"""Rewards of what the model writes: their process, a step as a plain loop, and runs from the
command line.
"""

import json
import re
import socket
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from command_lines import done, refusal, write_rows
from crews import Crew
from models import WORDS, continuations, save_model, save_tokenizer, small_config
from parity import assert_same_weights
from profiles import short_first
from transformers import AutoModelForCausalLM, AutoTokenizer
from whole_loops import StackedLoop

from zo2adapters import limited_process, open_checkpoint
from zo2adapters.tasks import reward_program
from zo2adapters.tasks.rewards import Completion, RewardName, RewardOptions, Rewards
from zo2adapters.tasks.rows import RowReader
from zo2adapters.tasks.task import RewardTask, TaskOptions
from zo2core import (
    Distribution,
    Engine,
    EvolutionStrategies,
    Journal,
    LowRankPerturbation,
    PhiloxNoise,
    ZerothOrder,
)
from zo2core.errors import DataError, DivergenceError, OptionError
from zo2core.ranges import Fitness

ROWS = [
    {"prompt": "the cat", "completion": " ran", "weight": 2},
    {"prompt": "the dog sat", "completion": " is yes", "weight": 1},
    {"prompt": "no", "weight": 3},
    {"prompt": "cat dog cat", "completion": " the", "weight": 1},
]
FUNCTIONS = """
import ctypes, os, signal, subprocess, sys, time

def cats(prompt, completion, row):
    return row["weight"] * completion.split().count("cat") + len(prompt) / 100

divides = lambda prompt, completion, row: 1 / (row["weight"] - 3)
infinite = lambda prompt, completion, row: float("inf")
huge = lambda prompt, completion, row: 1e308
text = lambda prompt, completion, row: "good"
sleeps = lambda prompt, completion, row: time.sleep(row["weight"] == 3 and 60) is None
computes = lambda prompt, completion, row: sum(range(10**12)) if row["weight"] == 3 else 0.5
allocates = lambda prompt, completion, row: len(bytearray(10**10)) if row["weight"] == 3 else 0.5
leaves = lambda prompt, completion, row: sys.exit(3) if row["weight"] == 3 else 0.5
def kills(prompt, completion, row):
    return os.kill(os.getpid(), signal.SIGKILL) if row["weight"] == 3 else 0.5

loops = lambda prompt, completion, row: Endless() if row["weight"] == 3 else 0.5
number = lambda prompt, completion, row: [0.5, float("nan"), None, "0.5", [1]][int(completion)]

def prints(prompt, completion, row):
    if os.fork() == 0:
        return 7.0
    print("found", file=sys.stderr)
    print('{"answer": [7.0]}', flush=True)
    os.write(1, b'{"answer": [7.0]}\\n')
    return float(sys.stdin.read() == "")

def exits(prompt, completion, row):
    if row["weight"] == 3:
        if os.fork() == 0:
            time.sleep(600)
        os._exit(3)
    return 0.5

def goes_on(prompt, completion, row):
    while row["weight"] == 3:
        try:
            time.sleep(60)
        except Exception:
            pass
    return 0.5

def waits(prompt, completion, row):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(row["weight"] == 3 and 600)
    return 0.5

class Endless:
    def __float__(self):
        while True:
            pass

class Unreadable(Exception):
    __str__ = Endless.__float__

def raises(prompt, completion, row):
    if row["weight"] == 3:
        raise Unreadable
    return 0.5

def starts(prompt, completion, row):
    started = subprocess.Popen(["sleep", "600"])
    away = subprocess.Popen(["sleep", "600"], start_new_session=True)
    command = "setsid sleep 600 > /dev/null & echo $!"
    orphan = subprocess.check_output(command, shell=True, text=True).strip()
    with open(row["file"], "w") as file:
        file.write(f"{os.getpid()} {started.pid} {away.pid} {orphan} ")
    if row["weight"] == 4:
        os.kill(os.getpid(), signal.SIGXCPU)
    goes_on(prompt, completion, row)
    return 1
"""


def completions(*texts: str, **fields: Any) -> list[Completion]:
    return [Completion(text, "a prompt", fields, line) for line, text in enumerate(texts, 1)]


def rewards(*names: str, seconds: float = 5.0, start_seconds: float = 1.0) -> Rewards:
    parsed = [RewardName.parsed(name) for name in names]
    return Rewards(parsed, seconds=seconds, memory=1 << 28, start_seconds=start_seconds)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    base = save_model(
        folder / "base", small_config("llama", vocab_size=len(WORDS), max_position_embeddings=32)
    )
    save_tokenizer(base)
    write_rows(folder / "rows.jsonl", ROWS)
    (folder / "functions.py").write_text(FUNCTIONS)
    return folder


@pytest.fixture
def functions(prepared: Path) -> Path:
    return prepared / "functions.py"


@pytest.mark.parametrize(
    ("name", "fields", "texts", "values"),
    [
        ("exact-match", {"completion": " yes "}, ["yes", "yes\n", "yes.", ""], [1, 1, 0, 0]),
        ("exact-match", {"answers": ["a b", 3], "completion": "c"}, ["a b", "3", "c"], [1, 1, 0]),
        (
            "arithmetic",
            {"completion": "so 1,200"},
            ["3 + 4 is 1200", "1200.0", "12", "none", "1200 or 5"],
            [1, 1, 0, 0, 0],
        ),
        ("arithmetic", {"answer": -7}, ["it is -7.", "7"], [1, 0]),
        # both are beyond the largest float
        ("arithmetic", {"answer": "1" * 400}, ["1" * 400, "2" * 400], [1, 0]),
        ("regex", {"pattern": r"\d+ cats"}, ["12 cats ", "cats", "12 cats\nand"], [1, 0, 0]),
        ("length", {}, ["", "x" * 50], [0, -0.5]),
        (
            "json-schema",
            {
                "schema": '{"type": "object", "required": ["n"], "properties": {"n": {"type": '
                '"integer"}}}'
            },
            ['{"n": 3}', '{"n": "x"}', "[1]", "{n: 3}", "[" * 10000],
            [1, 0.5, 0.5, 0, 0],
        ),
        (
            "json-schema",
            {
                "schema": {
                    "$id": "https://example.com/list",
                    "type": "array",
                    "items": {"$ref": "item"},
                    "$defs": {"one": {"$id": "item", "type": "integer"}},
                }
            },
            ["[1]", '["x"]'],
            [1, 0.5],
        ),
    ],
)
def test_ready_rewards(
    name: str, fields: dict[str, Any], texts: list[str], values: list[float]
) -> None:
    with closing(rewards(name)) as judge:
        assert judge.of(completions(*texts, **fields)) == [values]


def test_what_a_schema_refers_to_is_not_fetched(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "string"}')
    with socket.create_server(("127.0.0.1", 0)) as server, closing(rewards("json-schema")) as judge:
        server.setblocking(False)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/schema"
        for reference in (url, file.as_uri(), "urn:none"):
            for key in ("$ref", "$dynamicRef"):
                schema = {"properties": {"n": {key: reference}}}
                told = rf"line 1 of --data: found .*the schema refers to '{re.escape(reference)}'"
                with pytest.raises(DataError, match=told):
                    judge.of(completions('{"n": "x"}', schema=schema))
        with pytest.raises(BlockingIOError):  # nobody has connected
            server.accept()


def test_rewards_are_numbers_that_are_added_by_their_weights(functions: Path) -> None:
    with closing(rewards(f"{functions}:cats=0.5", "length=2", seconds=1e7)) as judge:
        # a third of a year
        each = judge.of(completions("cat cat", "no", weight=3))
        assert each == [[6.08, 0.08], [-0.07, -0.02]]
        assert judge.total(each) == [6.08 / 2 - 0.14, 0.08 / 2 - 0.04]
    found = {
        "1": "nan, for the completion",
        "2": "NoneType 'None'",
        "3": "str '0.5'",
        "4": "list '[1]', which is not a number",
    }
    with closing(rewards(f"{functions}:number")) as judge:
        assert judge.of(completions("0")) == [[0.5]]
        for text, why in found.items():
            with pytest.raises(DataError, match=f"line 2 of --evaluation: found {re.escape(why)}"):
                judge.of(completions("0", text), option="evaluation")
    told = r"line 2 of .* -1 with a weight of 1e\+31"
    with closing(rewards("length=1e31")) as judge, pytest.raises(DataError, match=told):
        judge.of(completions("", "x" * 100))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("divides", "ZeroDivisionError"),
        ("infinite", "inf, "),
        ("huge", r"1e\+308, .* from -1e\+30 to 1e\+30"),
        ("loops", "TimeoutError: it takes longer than 0.3 s"),
        ("raises", "Unreadable, which gives no text"),
        ("text", "str 'good', which is not a number"),
        ("sleeps", "longer than 0.3 s"),
        ("computes", "longer than"),
        ("allocates", "more memory than allowed"),
        ("leaves", "SystemExit: 3"),
        ("exits", "its process ended with status 3"),
        ("kills", "it ends its process by SIGKILL"),
        ("goes_on", "it takes longer than allowed"),
        ("waits", "it takes longer than allowed"),
    ],
)
def test_a_reward_that_fails_is_told_by_its_row(function: str, why: str, functions: Path) -> None:
    # Code in C ends at the limit of a whole request, which nothing else has to wait for.
    start = {"computes": 1.0, "waits": 0.5}.get(function, 600.0)
    rows = [
        Completion("text", None, {"weight": weight}, line)
        for line, weight in ((4, 1), (5, 3), (6, 1))
    ]
    line = 4 if function in ("infinite", "huge", "text") else 5
    with closing(rewards(f"{functions}:{function}", seconds=0.3, start_seconds=start)) as judge:
        with pytest.raises(
            DataError, match=rf"reward .*{function}, row on line {line} of --data: found .*{why}"
        ):
            judge.of(rows)
        if line == 5 and function != "divides":
            assert judge.of(rows[::2]) == [[1.0, 1.0] if function == "sleeps" else [0.5, 0.5]], (
                "the next request works"
            )


def test_what_a_reward_prints_or_forks_is_no_answer_and_no_request(
    functions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(rewards(f"{functions}:prints")) as judge:
        assert judge.of(completions("a", "b")) == judge.of(completions("c", "d")) == [[1.0, 1.0]]
    assert capfd.readouterr() == ("", "")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def cats(*_): return 1\nraise RuntimeError('not\\ntoday')", "RuntimeError: not today"),
        ("def cats(*_): return 1\nexit(3)", "SystemExit: 3"),
        ("def cats(*_): return 1\nwhile True: pass", "TimeoutError: it takes longer than 1 s"),
        ("def cats(*_): return 1\nwhole = bytearray(10**10)", "it takes more memory than allowed"),
        ("from os import *", "AttributeError: module 'zo2_reward' has no attribute 'cats'"),
        ("cats = 3", "TypeError: cats is not a function"),
    ],
)
def test_a_file_that_does_not_run_is_told_before_generating(
    source: str, why: str, here: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(source)
    with (
        closing(rewards("length", f"{path}:cats")) as judge,
        pytest.raises(
            OptionError, match=rf"reward: found {path}: .*{why}; expected a file that Python runs"
        ),
    ):
        judge.start()
    if "while" not in source:
        assert f"--reward: found {path}: {why}" in refusal(*asked(f"{path}:cats"))
        assert not Path("run").exists()


PARENT = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("limited", sys.argv[1])
limited = importlib.util.module_from_spec(spec)
spec.loader.exec_module(limited)
functions = pathlib.Path(sys.argv[3])
request = {"name": "starts", "file": str(functions), "source": functions.read_text()}
request |= {"seconds": 600, "start_seconds": 600}
calls = [["a prompt", "a completion", {"weight": 3, "file": sys.argv[4]}]]
process = limited.LimitedProcess(pathlib.Path(sys.argv[2]))
process.ask({**request, "calls": calls}, seconds=600, memory=1 << 28)
"""


@pytest.mark.parametrize("end", ["killed", "closed", "crashed"])
def test_a_rewards_process_ends_with_its_parent_and_all_it_started(
    end: str, functions: Path, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    if end == "killed":
        program = (limited_process.__file__, reward_program.__file__, str(functions), str(started))
        parent = subprocess.Popen([sys.executable, "-c", PARENT, *program])
        while not (started.exists() and started.read_text().endswith(" ")):
            assert parent.poll() is None
            time.sleep(0.01)
        parent.kill()
        parent.wait()
    else:
        judge = rewards(f"{functions}:starts")
        if end == "crashed":
            with pytest.raises(DataError, match="takes longer than allowed"):
                judge.of(completions("text", weight=4, file=str(started)))
        else:
            assert judge.of(completions("text", weight=1, file=str(started))) == [[1.0]]
        judge.close()
    last = time.monotonic() + 10
    while any(map(is_running, map(int, started.read_text().split()))):
        assert time.monotonic() < last
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_names_are_written_as_they_are_read_and_what_names_no_reward_is_refused(
    functions: Path,
) -> None:
    for text in (
        "exact",
        "exact-match=",
        "exact-match=nan",
        "f.py",
        "f.py:",
        "f.txt:g",
        "f.py:a-b",
        "",
    ):
        with pytest.raises(
            OptionError, match=r"reward: found .*expected one of exact-match, arithmetic"
        ):
            RewardName.parsed(text)
    for text in ("exact-match", "regex=0.5", f"{functions}:cats", f"{functions}:cats=-2"):
        assert str(RewardName.parsed(text)) == text
    with pytest.raises(OptionError, match="readable file"):
        rewards(f"{functions.parent / 'none.py'}:cats")


CATS = "functions.py:cats"


def task_of(model: Any, batch_size: int, **options: Any) -> tuple[RewardTask, Any]:
    tokenizer, rewards = AutoTokenizer.from_pretrained("base"), RewardOptions(**options)
    rows = RowReader(tokenizer, 32, keeps_sources=True).read(Path("rows.jsonl"))
    given = TaskOptions(
        objective="reward", pad=0, batch_size=batch_size, rewards=rewards, tokenizer=tokenizer
    )
    task = RewardTask(model, rows, given)
    task.prepare(lambda: Engine(model), list)
    return task, rows


@pytest.mark.few(1)
@pytest.mark.parametrize("fitness", Fitness)
def test_a_step_is_a_plain_loop_over_members_and_rows(fitness: Fitness, here: Path) -> None:
    base, eps, q, new = here / "base", 0.1, 3, 5
    tokenizer, model = AutoTokenizer.from_pretrained(base), open_checkpoint(base)
    task, rows = task_of(model, 4, reward=(CATS, "length=0.5"), max_new_tokens=new)
    whole: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loop = StackedLoop(whole, 2, 2, Distribution.RADEMACHER)
    moved = False
    estimator = EvolutionStrategies(
        lr=0.02, zo_eps=eps, q=q, perturb_in_place=False, fitness=fitness
    )
    noise, perturbation = (
        PhiloxNoise(Distribution.RADEMACHER),
        LowRankPerturbation(rank=2, period=2),
    )
    with Engine(model, ZerothOrder(estimator, noise=noise, perturbation=perturbation)) as engine:
        for step in range(3):
            seeds = [at.seed for at in engine.ask()][::2]
            result: Any = task.step(engine, rows.rows, {})
            losses = []
            for seed in seeds:
                for shift in (1.0, -1.0):
                    member: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
                    for name, weights in loop.weights().items():
                        drawn = loop.draw(
                            name, seed, len(weights), *([2] if weights.dim() == 2 else [])
                        )
                        change = (
                            drawn if weights.dim() == 1 else drawn @ loop.shared(name, step // 2).T
                        )
                        member.get_parameter(name).data = weights + shift * eps * change
                    total = 0.0
                    for row in ROWS:
                        prompt = tokenizer(row["prompt"])["input_ids"]
                        [tokens] = continuations(member, [prompt], new, tokenizer.eos_token_id)
                        text = tokenizer.decode(tokens, skip_special_tokens=True)
                        total += (
                            row["weight"] * text.split().count("cat") + len(row["prompt"]) / 100  # type: ignore[arg-type, operator, union-attr]
                        )
                        total -= 0.5 * len(text) / 100
                    losses.append(-total / 4)
            assert result.losses == pytest.approx(losses, rel=1e-14), "sums of the same rewards"
            losses = list(result.losses)
            if fitness is Fitness.RANKS:
                order = sorted(losses)
                mean_rank = {
                    loss: statistics.fmean(i for i, other in enumerate(order) if other == loss)
                    for loss in losses
                }
                scores = [mean_rank[loss] / (2 * q - 1) - 0.5 for loss in losses]
            else:
                deviation = statistics.pstdev(losses)
                scores = [(loss - statistics.fmean(losses)) / deviation for loss in losses]
            grads = [(scores[i] - scores[i + 1]) / 2 for i in range(0, 2 * q, 2)]
            assert result.projected_grads == tuple(grads)
            moved = moved or any(grads)
            loop.updates += [
                (seed, grad, 0.02 / q) for seed, grad in zip(seeds, grads, strict=True)
            ]
            loop.ends.append(len(loop.updates))
            assert task.measured["reward"] == pytest.approx(-statistics.fmean(losses))
        expected = loop.weights()
        assert_same_weights(engine.parameters_now(), expected.items())
        assert engine.version == 3
    task.close()
    assert moved


def test_drift_is_what_the_base_wrote_becoming_less_likely(here: Path) -> None:
    base = here / "base"
    tokenizer, model = AutoTokenizer.from_pretrained(base), open_checkpoint(base)
    task, rows = task_of(model, 2, reward=("length",), max_new_tokens=4, max_drift=0.05)
    estimator = EvolutionStrategies(lr=0.2, zo_eps=0.1, q=2, perturb_in_place=False)
    with Engine(
        model, ZerothOrder(estimator, noise=PhiloxNoise(), perturbation=LowRankPerturbation(rank=2))
    ) as engine:
        assert task.drift(engine) == 0.0
        for _ in range(10):
            task.step(engine, rows.rows[:2], {})
        with pytest.raises(
            DivergenceError, match=r"step 10: found a drift of .*the run.s --max-drift"
        ):
            task.step(engine, rows.rows[:2], {})
        assert engine.version == 10, "a step that is refused is not taken"
        drift = task.drift(engine)
        engine.export(here / "out")
    task.close()
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (base, here / "out")
    )
    sums, count = 0.0, 0
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        [tokens] = continuations(before, [prompt], 4, tokenizer.eos_token_id)
        ids = torch.tensor([[*prompt, *tokens]])
        for sign, whole in ((1, before), (-1, after)):
            log = whole(ids).logits.detach()[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
            sums += sign * float(log.gather(1, ids[0, len(prompt) :, None]).sum())
        count += len(tokens)
    assert drift == pytest.approx(sums / count, rel=1e-4)
    assert drift > 0.05


def asked(reward: str, *more: object, output: str = "run", steps: int = 6) -> list[object]:
    given = [
        "train",
        "--method",
        "zeroth-order",
        "--model",
        "base",
        "--data",
        "rows.jsonl",
        "--output",
        output,
        "--reward",
        reward,
        "--seed",
        3,
    ]
    given += [
        "--estimator",
        "es",
        "--queries",
        3,
        "--rank",
        2,
        "--lr",
        0.02,
        "--zo-eps",
        0.1,
        "--steps",
        steps,
    ]
    return [
        *given,
        "--batch-size",
        3,
        "--max-new-tokens",
        "5",
        "--temperature",
        "0.8",
        *more,
    ]


def journal_of(run: str) -> bytes:
    return Path(run, "journal.jsonl").read_bytes()


def steps_of(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal_of(run).splitlines() if b"seeds" in line]


MEASURED = {"reward", "best_reward", "completion_tokens", "generated_tokens"}


def test_a_run_writes_rewards_and_a_resumed_one_goes_on_with_them(here: Path) -> None:
    evaluated = ("--evaluation", "rows.jsonl", "--evaluate-every", 3, "--samples", 2)
    done(*asked(CATS, *evaluated, steps=3))
    done("train", "--resume", "run", "--steps", 6, "--reward", CATS)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    steps, evaluations = (
        [row for row in rows if "loss" in row],
        [row for row in rows if "evaluation_loss" in row],
    )
    assert all(row.keys() >= MEASURED for row in steps)
    assert all(row["reward"] == pytest.approx(-statistics.fmean(row["losses"])) for row in steps)
    assert len({row["reward"] for row in steps}) > 1
    for row in steps:  # a step has as many completions as losses, on each of its rows
        completions = row["generated_tokens"] / row["completion_tokens"]
        assert completions == len(row["losses"]) * 3, "--batch-size 3"
    assert evaluations[0]["evaluation_drift"] == 0.0 == steps[0]["drift"]
    assert evaluations[-1]["evaluation_reward"] == -evaluations[-1]["evaluation_loss"]
    samples = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    assert sorted({sample["step"] for sample in samples}) == [0, 3, 6]
    Path("run/metrics.jsonl").unlink()
    done("train", "--resume", "run", "--reward", CATS)
    restored = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    for before, after in zip(rows, restored, strict=True):
        assert {key: before[key] for key in after} == after
        assert (before.keys() - after.keys()).isdisjoint(MEASURED), "the journal has them"
    done("report", "run", "--output", "report.html")
    page = Path("report.html").read_text()
    assert all(
        words in page for words in ("<h2>Rewards</h2>", "completion tokens", "drift", "reward")
    )


@pytest.mark.parametrize("queries", short_first([3], [1]))  # 1: a population that does not divide
def test_two_workers_share_the_population(queries: int, here: Path, crew: Crew) -> None:
    done(*asked(CATS, "--queries", queries, output="alone", steps=3))
    ended = crew.run(*asked(CATS, "--queries", queries, steps=3))
    assert all(own.status == 0 for own in ended), ended
    assert journal_of("run") == journal_of("run.worker-1")
    alone, together = (Journal(f"{run}/journal.jsonl").measured for run in ("alone", "run"))
    assert alone == together
    assert len(alone) == 3
    for key in ("losses", "projected_grads"):
        assert [step[key] for step in steps_of("alone")] == [step[key] for step in steps_of("run")]


@pytest.mark.long_profile
def test_workers_whose_rewards_fail_end_alike(here: Path, crew: Crew) -> None:
    for own in crew.run(*asked("functions.py:divides")):
        assert own.status == 2, own
        assert own.line.startswith("zo2")
        assert "row on line 3 of --data: found ZeroDivisionError" in own.line
        assert "Traceback" not in own.err
    assert not list(here.glob("run*"))


def test_a_function_of_a_run_from_elsewhere_is_named_again(here: Path) -> None:
    done(*asked(CATS, steps=2))
    resumed = ("train", "--resume", "run", "--steps", "3")
    assert f"pass --reward {here / CATS} if you trust it" in refusal(*resumed)
    Path("functions.py").rename("moved.py")
    assert f"pass --reward {here / CATS} if you trust it" in refusal(*resumed)
    Path("moved.py").write_text(FUNCTIONS + "\n# changed\n")
    assert "other digests" in refusal(*resumed, "--reward", "moved.py:cats")
    Path("moved.py").write_text(FUNCTIONS)
    done(*resumed, "--reward", "moved.py:cats")


PAUSES = """
import pathlib, time

def pauses(prompt, completion, row):
    calls = pathlib.Path(__file__).with_name("calls")
    with calls.open("ab") as file:
        file.write(b".")
    # the run's last call, and the first one of its continuation
    time.sleep(calls.stat().st_size in (40, 41) and 0.8)
    return completion.split().count("cat")
"""


@pytest.mark.long_profile
def test_a_run_that_a_reward_ended_resumes_with_its_bits_and_another_limit(here: Path) -> None:
    Path("pauses.py").write_text(PAUSES)
    told = refusal(*asked("pauses.py:pauses", "--reward-seconds", "0.5"))
    assert "of --data: found TimeoutError: it takes longer than 0.5 s" in told
    assert "resume with more seconds" in told
    assert len(steps_of("run")) == 2, "18 calls a step"
    done("train", "--resume", "run", "--reward-seconds", "5", "--reward", "pauses.py:pauses")
    done(*asked("pauses.py:pauses", output="whole"))
    assert journal_of("run") == journal_of("whole")


DIES = """
import pathlib

def dies(*call):
    died = pathlib.Path(__file__).with_name("died")
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return cats(*call)
"""


def test_a_rewards_process_that_dies_once_costs_nothing(here: Path) -> None:
    Path("functions.py").write_text(FUNCTIONS + DIES)
    for output in ("run", "whole"):
        done(*asked("functions.py:dies", output=output))
        assert Path("died").exists()
    assert journal_of("run") == journal_of("whole")


@pytest.mark.parametrize(
    ("tokens", "option"), [(40, "--data"), (30, "--data"), (30, "--evaluation")]
)
def test_prompts_without_room_and_rewards_that_fail_are_told_by_their_row(
    tokens: int, option: str, here: Path
) -> None:
    write_rows(Path("long.jsonl"), [*ROWS, {"prompt": "cat " * tokens}])
    told = refusal(*asked("length", "--evaluation", "rows.jsonl", option, "long.jsonl"))
    if tokens == 40:
        assert "long.jsonl, line 5: found a prompt of 40 tokens, which leaves no token" in told
    else:
        assert (
            "--max-new-tokens: found 5; expected at most 2, with which the "
            "prompt of 30 tokens" in told
        )
        assert f"line 5 of {option}" in told
        assert "expected at most 2" in told
        assert "--too-long drop" in told
    assert not Path("run").exists()
    for name, weight in (("rows", 1), ("eval", 3)):
        write_rows(Path(f"{name}.jsonl"), [{"prompt": "cat", "weight": weight}])
    told = refusal(*asked("functions.py:divides", "--batch-size", 1, "--evaluation", "eval.jsonl"))
    assert "divides, row on line 1 of --evaluation: found ZeroDivisionError" in told
