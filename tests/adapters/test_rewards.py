"""Rewards of what the model writes: their process, a step as a plain loop, and runs from the command line."""

from __future__ import annotations

import json
import re
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
from command_lines import refusal, run_here
from continuations import by_hugging_face
from crews import Crew
from models import WORDS, save_model, save_tokenizer, small_config
from parity import assert_same_weights
from stacked_loop import StackedLoop
from transformers import AutoModelForCausalLM, AutoTokenizer

from zo2adapters import limited_process, open_checkpoint
from zo2adapters.cli import main
from zo2adapters.tasks import reward_program
from zo2adapters.tasks.rewards import Completion, RewardName, RewardOptions, Rewards
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.task import RewardTask, TaskOptions
from zo2adapters.trainers.option_table import SETTING_OF, flag
from zo2core import Distribution, Engine, EvolutionStrategies, LowRankPerturbation, PhiloxNoise, ZerothOrder
from zo2core.errors import DataError, DivergenceError, OptionError
from zo2core.names import Fitness

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

def divides(prompt, completion, row):
    return 1 / (row["weight"] - 3)

def infinite(prompt, completion, row):
    return float("inf")

def text(prompt, completion, row):
    return "good"

def sleeps(prompt, completion, row):
    time.sleep(row["weight"] == 3 and 60)
    return True

def computes(prompt, completion, row):
    return sum(range(10**12)) if row["weight"] == 3 else 0.5

def allocates(prompt, completion, row):
    return len(bytearray(10**10)) if row["weight"] == 3 else 0.5

def number(prompt, completion, row):
    return {"0": 0.5, "1": float("nan"), "2": None, "3": "0.5", "4": [1]}[completion]

def prints(prompt, completion, row):
    if os.fork() == 0:
        return 7.0
    print("found", file=sys.stderr)
    print('{"answer": [7.0]}', flush=True)
    os.write(1, b'{"answer": [7.0]}\\n')
    return float(sys.stdin.read() == "")

def leaves(prompt, completion, row):
    return sys.exit(3) if row["weight"] == 3 else 0.5

def exits(prompt, completion, row):
    if row["weight"] == 3:
        if os.fork() == 0:
            time.sleep(600)
        os._exit(3)
    return 0.5

def kills(prompt, completion, row):
    return os.kill(os.getpid(), signal.SIGKILL) if row["weight"] == 3 else 0.5

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

def loops(prompt, completion, row):
    return Endless() if row["weight"] == 3 else 0.5

def raises(prompt, completion, row):
    if row["weight"] == 3:
        raise Unreadable
    return 0.5

def huge(prompt, completion, row):
    return 1e308

def starts(prompt, completion, row):
    started = subprocess.Popen(["sleep", "600"])
    away = subprocess.Popen(["sleep", "600"], start_new_session=True)
    orphan = subprocess.check_output("setsid sleep 600 > /dev/null & echo $!", shell=True, text=True).strip()
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


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.parametrize(
    ("name", "fields", "texts", "values"),
    [
        ("exact-match", {"completion": " yes "}, ["yes", "yes\n", "yes.", ""], [1, 1, 0, 0]),
        ("exact-match", {"answers": ["a b", 3], "completion": "c"}, ["a b", "3", "c"], [1, 1, 0]),
        ("arithmetic", {"completion": "so 1,200"}, ["3 + 4 is 1200", "1200.0", "12", "none", "1200 or 5"], [1, 1, 0, 0, 0]),
        ("arithmetic", {"answer": -7}, ["it is -7.", "7"], [1, 0]),
        ("arithmetic", {"answer": "1" * 400}, ["1" * 400, "2" * 400], [1, 0]),  # both are beyond the largest float
        ("regex", {"pattern": r"\d+ cats"}, ["12 cats ", "cats", "12 cats\nand"], [1, 0, 0]),
        ("length", {}, ["", "x" * 50], [0, -0.5]),
        (
            "json-schema",
            {"schema": '{"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}'},
            ['{"n": 3}', '{"n": "x"}', "[1]", "{n: 3}", "[" * 10000],
            [1, 0.5, 0.5, 0, 0],
        ),
    ],
)
def test_ready_rewards(name: str, fields: dict[str, Any], texts: list[str], values: list[float]) -> None:
    with closing(rewards(name)) as judge:
        assert judge.of(completions(*texts, **fields)) == [values]


def test_rewards_are_added_by_their_weights(functions: Path) -> None:
    with closing(rewards(f"{functions}:cats=0.5", "length=2", seconds=1e7)) as judge:  # a third of a year
        each = judge.of(completions("cat cat", "no", weight=3))
        assert each == [[6.08, 0.08], [-0.07, -0.02]]
        assert judge.total(each) == [6.08 / 2 - 0.14, 0.08 / 2 - 0.04]


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
    ],
)
def test_a_reward_that_fails_is_told_by_its_row(function: str, why: str, functions: Path) -> None:
    # Code in C ends at the limit of a whole request, which nothing else has to wait for.
    start = 1 if function == "computes" else 600
    rows = [Completion("text", None, {"weight": weight}, line) for line, weight in ((4, 1), (5, 3), (6, 1))]
    line = 4 if function in ("infinite", "huge", "text") else 5
    with closing(rewards(f"{functions}:{function}", seconds=0.3, start_seconds=start)) as judge:
        with pytest.raises(DataError, match=rf"reward .*{function}, row on line {line} of --data: found .*{why}"):
            judge.of(rows)
        if line == 5 and function != "divides":
            assert judge.of(rows[::2]) == [[1.0, 1.0] if function == "sleeps" else [0.5, 0.5]], "the next request works"


def test_a_weight_that_makes_a_reward_too_large_is_told(functions: Path) -> None:
    with (
        closing(rewards("length=1e31")) as judge,
        pytest.raises(DataError, match=r"line 2 of --data: found -1 with a weight of 1e\+31"),
    ):
        judge.of(completions("", "x" * 100))


def test_a_reward_is_a_number_and_no_text(functions: Path) -> None:
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


def test_what_a_reward_prints_and_reads_and_its_forks_return_is_no_answer_and_no_request(
    functions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(rewards(f"{functions}:prints")) as judge:
        assert judge.of(completions("a", "b")) == judge.of(completions("c", "d")) == [[1.0, 1.0]]
    assert capfd.readouterr() == ("", "")


def test_a_reward_that_only_waits_and_takes_no_interrupt_is_ended(functions: Path) -> None:
    with (
        closing(rewards(f"{functions}:waits", seconds=0.2, start_seconds=0.5)) as judge,
        pytest.raises(DataError, match=r"waits, row on line 1 of --data: found it takes longer than allowed"),
    ):
        judge.of(completions("text", weight=3))


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
def test_a_file_that_does_not_run_is_told_before_anything_is_generated(source: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(source)
    with (
        closing(rewards("length", f"{path}:cats")) as judge,
        pytest.raises(OptionError, match=rf"reward: found {path}: .*{why}; expected a file that Python runs"),
    ):
        judge.start()
    base_of(tmp_path)
    if "while" not in source:
        assert f"--reward: found {path}: {why}" in refusal(*map(str, asked(tmp_path, f"{path}:cats")))
        assert not (tmp_path / "run").exists()


PARENT = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("limited", sys.argv[1])
limited = importlib.util.module_from_spec(spec)
spec.loader.exec_module(limited)
functions = pathlib.Path(sys.argv[3])
request = {"name": "starts", "file": str(functions), "source": functions.read_text(), "seconds": 600, "start_seconds": 600}
calls = [["a prompt", "a completion", {"weight": 3, "file": sys.argv[4]}]]
limited.LimitedProcess(pathlib.Path(sys.argv[2])).ask({**request, "calls": calls}, seconds=600, memory=1 << 28)
"""


@pytest.mark.parametrize("end", ["killed", "closed", "crashed"])
def test_a_rewards_process_ends_with_its_parent_and_with_all_that_it_has_started(
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


@pytest.mark.parametrize("text", ["exact", "exact-match=", "exact-match=nan", "f.py", "f.py:", "f.txt:g", "f.py:a-b", ""])
def test_what_names_no_reward_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"reward: found .*expected one of exact-match, arithmetic"):
        RewardName.parsed(text)


def test_names_are_written_as_they_are_read(functions: Path) -> None:
    for text in ("exact-match", "regex=0.5", f"{functions}:cats", f"{functions}:cats=-2"):
        assert str(RewardName.parsed(text)) == text
    with pytest.raises(OptionError, match="readable file"):
        rewards(f"{functions.parent / 'none.py'}:cats")


def base_of(folder: Path, **changes: Any) -> Path:
    base = save_model(folder / "base", small_config("llama", vocab_size=len(WORDS), max_position_embeddings=32, **changes))
    save_tokenizer(base)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return base


@pytest.mark.few(1)
@pytest.mark.parametrize("fitness", Fitness)
def test_a_step_is_a_plain_loop_over_members_and_rows(fitness: Fitness, functions: Path, tmp_path: Path) -> None:
    base, eps, q, new = base_of(tmp_path), 0.1, 3, 5
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = open_checkpoint(base)
    rows = RowReader(tokenizer, 32, keeps_sources=True).read(tmp_path / "rows.jsonl")
    options = RewardOptions(reward=(f"{functions}:cats", "length=0.5"), max_new_tokens=new)
    task = RewardTask(
        model, rows, TaskOptions(objective="reward", pad=0, batch_size=4, rewards=options, tokenizer=tokenizer)
    )
    task.prepare(lambda: Engine(model), list)
    whole: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loop = StackedLoop(whole, 2, 2, Distribution.RADEMACHER)
    moved = False
    estimator = EvolutionStrategies(lr=0.02, zo_eps=eps, q=q, perturb_in_place=False, fitness=fitness)
    noise, perturbation = PhiloxNoise(Distribution.RADEMACHER), LowRankPerturbation(rank=2, period=2)
    with Engine(model, ZerothOrder(estimator, noise=noise, perturbation=perturbation)) as engine:
        for step in range(3):
            seeds = [at.seed for at in engine.ask()][::2]
            result: Any = task.step(engine, rows.rows, {})
            losses = []
            for seed in seeds:
                for shift in (1.0, -1.0):
                    member: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
                    for name, weights in loop.weights().items():
                        drawn = loop.draw(name, seed, len(weights), *([2] if weights.dim() == 2 else []))
                        change = drawn if weights.dim() == 1 else drawn @ loop.shared(name, step // 2).T
                        member.get_parameter(name).data = weights + shift * eps * change
                    total = 0.0
                    for row in ROWS:
                        prompt = tokenizer(row["prompt"])["input_ids"]
                        [tokens] = by_hugging_face(member, [prompt], new, tokenizer.eos_token_id)
                        text = tokenizer.decode(tokens, skip_special_tokens=True)
                        total += row["weight"] * text.split().count("cat") + len(row["prompt"]) / 100  # type: ignore[operator, arg-type, union-attr]
                        total -= 0.5 * len(text) / 100
                    losses.append(-total / 4)
            assert result.losses == pytest.approx(losses, rel=1e-14), "sums of the same rewards"
            losses = list(result.losses)
            if fitness is Fitness.RANKS:
                order = sorted(losses)
                mean_rank = {loss: statistics.fmean(i for i, other in enumerate(order) if other == loss) for loss in losses}
                scores = [mean_rank[loss] / (2 * q - 1) - 0.5 for loss in losses]
            else:
                deviation = statistics.pstdev(losses)
                scores = [(loss - statistics.fmean(losses)) / deviation for loss in losses]
            grads = [(scores[i] - scores[i + 1]) / 2 for i in range(0, 2 * q, 2)]
            assert result.projected_grads == tuple(grads)
            moved = moved or any(grads)
            loop.updates += [(seed, grad, 0.02 / q) for seed, grad in zip(seeds, grads, strict=True)]
            loop.ends.append(len(loop.updates))
            assert task.measured["reward"] == pytest.approx(-statistics.fmean(losses))
        expected = loop.weights()
        assert_same_weights(engine.parameters_now(), expected.items())
        assert engine.version == 3
    task.close()
    assert moved


def test_drift_is_what_the_base_wrote_becoming_less_likely(tmp_path: Path) -> None:
    base = base_of(tmp_path)
    tokenizer, model = AutoTokenizer.from_pretrained(base), open_checkpoint(base)
    rows = RowReader(tokenizer, 32, keeps_sources=True).read(tmp_path / "rows.jsonl")
    options = RewardOptions(reward=("length",), max_new_tokens=4, max_drift=0.05)
    task = RewardTask(
        model, rows, TaskOptions(objective="reward", pad=0, batch_size=2, rewards=options, tokenizer=tokenizer)
    )
    task.prepare(lambda: Engine(model), list)
    estimator = EvolutionStrategies(lr=0.2, zo_eps=0.1, q=2, perturb_in_place=False)
    with Engine(model, ZerothOrder(estimator, noise=PhiloxNoise(), perturbation=LowRankPerturbation(rank=2))) as engine:
        assert task.drift(engine) == 0.0
        for _ in range(10):
            task.step(engine, rows.rows[:2], {})
        with pytest.raises(DivergenceError, match=r"step 10: found a drift of .*max_drift of the run"):
            task.step(engine, rows.rows[:2], {})
        assert engine.version == 10, "a step that is refused is not taken"
        drift = task.drift(engine)
        engine.export(tmp_path / "out")
    task.close()
    before, after = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (base, tmp_path / "out"))
    sums, count = 0.0, 0
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        [tokens] = by_hugging_face(before, [prompt], 4, tokenizer.eos_token_id)
        ids = torch.tensor([[*prompt, *tokens]])
        for sign, whole in ((1, before), (-1, after)):
            log = whole(ids).logits.detach()[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
            sums += sign * float(log.gather(1, ids[0, len(prompt) :, None]).sum())
        count += len(tokens)
    assert drift == pytest.approx(sums / count, rel=1e-4)
    assert drift > 0.05


def asked(folder: Path, reward: str, **changes: object) -> list[object]:
    given: dict[str, object] = {"model": folder / "base", "data": folder / "rows.jsonl", "output": folder / "run"}
    given |= {"reward": reward, "estimator": "es", "queries": 3, "rank": 2, "lr": 0.02, "zo_eps": 0.1, "steps": 6}
    given |= {"batch_size": 3, "max_new_tokens": 5, "temperature": 0.8, "seed": 3, **changes}
    settings = {name: f"{SETTING_OF[name][1]}={value}" for name, value in given.items() if name in SETTING_OF}
    options = [(flag(SETTING_OF.get(name, (name,))[0]), settings.get(name, value)) for name, value in given.items()]
    return ["train", *(word for option in options for word in option)]


def test_a_run_writes_rewards_and_a_resumed_one_has_its_bits(functions: Path, tmp_path: Path) -> None:
    base_of(tmp_path)
    reward = f"{functions}:cats"
    evaluated: dict[str, object] = {"evaluation": tmp_path / "rows.jsonl", "evaluate_every": 3, "samples": 2}
    whole = run_here(*asked(tmp_path, reward, output=tmp_path / "whole", **evaluated))
    assert whole.status == 0, whole
    assert run_here(*asked(tmp_path, reward, steps=3, **evaluated)).status == 0
    assert run_here("train", "--resume", tmp_path / "run", "--steps", 6, "--reward", f"{functions}:cats").status == 0
    records = [
        [json.loads(line) for line in (tmp_path / name / "journal.jsonl").read_text().splitlines()]
        for name in ("whole", "run")
    ]
    assert [line for line in records[0] if "seeds" in line] == [line for line in records[1] if "seeds" in line]
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == (
        tmp_path / "whole/model/model.safetensors"
    ).read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps, evaluations = [row for row in rows if "loss" in row], [row for row in rows if "evaluation_loss" in row]
    assert all({"reward", "best_reward", "completion_tokens", "generated_tokens"} <= row.keys() for row in steps)
    assert all(row["reward"] == pytest.approx(-statistics.fmean(row["losses"])) for row in steps)
    assert len({row["reward"] for row in steps}) > 1
    assert evaluations[0]["evaluation_drift"] == 0.0 == steps[0]["drift"]
    assert evaluations[-1]["evaluation_reward"] == -evaluations[-1]["evaluation_loss"]
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert sorted({sample["step"] for sample in samples}) == [0, 3, 6]
    main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    for words in ("<h2>Rewards</h2>", "completion tokens", "drift", "reward"):
        assert words in page


def test_two_workers_share_the_population(functions: Path, tmp_path: Path, crew: Crew) -> None:
    base_of(tmp_path)
    command = asked(tmp_path, f"{functions}:cats", steps=3)
    assert run_here(*asked(tmp_path, f"{functions}:cats", steps=3, output=tmp_path / "alone")).status == 0
    ended = crew.run(*command)
    assert all(own.status == 0 for own in ended), ended
    names = ("alone", "run", "run.worker-1")
    alone, first, second = ((tmp_path / name / "journal.jsonl").read_text().splitlines() for name in names)
    assert first == second
    grads = [[json.loads(line)["projected_grads"] for line in lines if "seeds" in line] for lines in (alone, first)]
    assert grads[0] == grads[1]


def test_a_function_of_a_run_from_elsewhere_is_named_again(functions: Path, tmp_path: Path) -> None:
    base_of(tmp_path)
    reward = f"{functions}:cats"
    assert run_here(*asked(tmp_path, reward, steps=2)).status == 0
    resumed = ["train", "--resume", str(tmp_path / "run"), "--steps", "3"]
    assert f"pass --reward {reward} if you trust it" in refusal(*resumed)
    moved = tmp_path / "moved.py"
    functions.rename(moved)
    assert f"pass --reward {reward} if you trust it" in refusal(*resumed)
    moved.write_text(FUNCTIONS + "\n# changed\n")
    assert "other digests" in refusal(*resumed, "--reward", f"{moved}:cats")
    moved.write_text(FUNCTIONS)
    assert run_here(*resumed, "--reward", f"{moved}:cats").status == 0


PAUSES = """
import pathlib, time

def pauses(prompt, completion, row):
    calls = pathlib.Path(__file__).with_name("calls")
    with calls.open("ab") as file:
        file.write(b".")
    time.sleep(calls.stat().st_size in (40, 41) and 0.8)  # the run's last call, and the first one of its continuation
    return completion.split().count("cat")
"""


@pytest.mark.long_profile
def test_a_run_that_a_reward_ended_resumes_with_its_bits_and_another_limit(tmp_path: Path) -> None:
    base_of(tmp_path)
    path = tmp_path / "pauses.py"
    path.write_text(PAUSES)
    told = refusal(*map(str, asked(tmp_path, f"{path}:pauses", reward_seconds=0.5)))
    assert "of --data: found TimeoutError: it takes longer than 0.5 s" in told
    assert "resume with more seconds" in told
    taken = (tmp_path / "run/journal.jsonl").read_bytes().count(b"projected_grads")
    assert taken == 2, "18 calls a step"
    assert (
        run_here("train", "--resume", tmp_path / "run", "--reward-options", "seconds=5", "--reward", f"{path}:pauses").status
        == 0
    )
    assert run_here(*asked(tmp_path, f"{path}:pauses", output=tmp_path / "whole")).status == 0
    journals = [(tmp_path / name / "journal.jsonl").read_bytes() for name in ("run", "whole")]
    assert journals[0] == journals[1]


def test_a_rewards_process_that_dies_once_costs_nothing(functions: Path, tmp_path: Path) -> None:
    base_of(tmp_path)
    died = tmp_path / "died"
    dies = f"""
import pathlib

def dies(*call):
    if not pathlib.Path({str(died)!r}).exists():
        pathlib.Path({str(died)!r}).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return cats(*call)
"""
    functions.write_text(FUNCTIONS + dies)
    journals = []
    for output in ("run", "whole"):
        assert run_here(*asked(tmp_path, f"{functions}:dies", output=tmp_path / output)).status == 0
        assert died.exists()
        journals.append((tmp_path / output / "journal.jsonl").read_bytes())
    assert journals[0] == journals[1]


def test_a_reward_that_fails_in_an_evaluation_is_told_by_its_row(functions: Path, tmp_path: Path) -> None:
    base_of(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "cat", "weight": 1}) + "\n")
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "cat", "weight": 3}) + "\n")
    command = asked(tmp_path, f"{functions}:divides", batch_size=1, evaluation=tmp_path / "eval.jsonl")
    assert "divides, row on line 1 of --evaluation: found ZeroDivisionError" in refusal(*command)


def test_prompts_that_leave_no_room_are_told_by_their_row(tmp_path: Path) -> None:
    base_of(tmp_path)
    for tokens, rows in ((40, "rows.jsonl"), (30, "rows.jsonl"), (30, "eval.jsonl")):
        (tmp_path / "eval.jsonl").write_text((tmp_path / "rows.jsonl").read_text())
        kept = (tmp_path / rows).read_text()
        (tmp_path / rows).write_text(kept + json.dumps({"prompt": "cat " * tokens}) + "\n")
        told = refusal(*map(str, asked(tmp_path, "length", evaluation=tmp_path / "eval.jsonl")))
        where = "--data" if rows == "rows.jsonl" else "--evaluation"
        if tokens == 40:
            assert f"{tmp_path / rows}, line 5: found a prompt of 40 tokens, which leaves no token" in told
        else:
            assert (
                f"max_new_tokens of --reward-options: found 5 after a prompt of 30 tokens, in the row on line 5 of {where}"
                in told
            )
            assert "expected at most 2" in told
        assert not (tmp_path / "run").exists()
        (tmp_path / rows).write_text(kept)


@pytest.mark.long_profile
def test_workers_whose_population_does_not_divide_and_whose_rewards_fail_end_alike(
    functions: Path, tmp_path: Path, crew: Crew
) -> None:
    base_of(tmp_path)
    assert run_here(*asked(tmp_path, f"{functions}:cats", steps=2, queries=1, output=tmp_path / "alone")).status == 0
    ended = crew.run(*asked(tmp_path, f"{functions}:cats", steps=2, queries=1))
    assert all(own.status == 0 for own in ended), ended
    names = ("alone", "run", "run.worker-1")
    records = [
        [line for line in (tmp_path / name / "journal.jsonl").read_text().splitlines() if "seeds" in line] for name in names
    ]
    assert [json.loads(line)["losses"] for line in records[0]] == [json.loads(line)["losses"] for line in records[1]]
    assert records[1] == records[2]
    for own in crew.run(*asked(tmp_path, f"{functions}:divides", output=tmp_path / "failed")):
        assert own.status == 2, own
        assert own.line.startswith("zo2")
        assert "row on line 3 of --data: found ZeroDivisionError" in own.line
        assert "Traceback" not in own.err
    assert not list(tmp_path.glob("failed*"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    base_of(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"objective": "exact-match"}, "reward"),
        ({"micro_batch_size": 1}, "micro_batch_size"),
        ({"max_new_tokens": 30}, "max_new_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"reward_seconds": 0}, "reward_seconds"),
        ({"reward_seconds": 1e308}, "reward_seconds"),
        ({"reward_memory": "much"}, "reward_memory"),
        ({"max_drift": -1}, "max_drift"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e-300}, "temperature"),
        ({"top_p": 0.5, "temperature": 0}, "top_p"),
        ({"estimator": "mezo", "fitness": "ranks"}, "fitness"),
        ({"reward": "exact"}, "reward"),
    ],
)
def test_options_that_have_no_effect_or_no_sense_are_refused(changes: dict[str, object], named: str, run: Path) -> None:
    command = asked(run, str(changes.pop("reward", "length")), **changes)
    assert refusal(*map(str, command)).startswith(f"zo2: {flag(named)}: ")
    assert not (run / "run").exists()


def test_options_of_rewards_need_a_reward(run: Path) -> None:
    command = [str(word) for word in asked(run, "length") if word not in ("--reward", "length")]
    assert "max_new_tokens of --reward-options: found 5 without --reward" in refusal(*command)
