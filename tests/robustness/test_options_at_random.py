"""Options drawn at random for every command: a result, or one typed line; never a traceback, a hang
or a leftover.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_lines import assert_typed, done, make_place, run_here, within
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

SECONDS = 60  # a command takes a fraction of one
LONG = settings.get_profile("long").max_examples

WHOLE = [0, 1, 2, 3, 7, -1, 2**31, 2**63, "9" * 400, "9" * 5000, "1e3", "x", ""]
REAL = [1e-6, 1e-3, 0.5, 0, -1, 1e6, 1e300, "1e999", "nan", "inf", "-inf", "x", ""]
SIZES = ["auto", "4GiB", "300MB", "1MB", "8", "0", "-1", "9" * 400, "1e3", "6Gib", "much", ""]
DTYPES = ["auto", "float32", "bfloat16", "float16", "float64", "int8", ""]
DEVICES = ["cpu", "cuda:99", "gpu", ""]
FLAG = None  # an option that takes no value

PATHS = [
    "{place}/nowhere",
    "{place}/rows.jsonl",
    "{place}/base",
    "{place}/pipe",
    "{place}/" + "n" * 300,
    "/dev/full",
    "",
    ".",
]
DATA = ["{place}/rows.jsonl", "{place}/choices.jsonl", *PATHS]
MODELS = ["{place}/base", *PATHS]
OUTPUTS = ["{place}/new", "{place}/deep/new", *PATHS]

RUNS = ["{place}/run", *PATHS]
VALUES: dict[str, list[Any] | None] = {  # of an option, whichever command has it
    **dict.fromkeys(
        (
            "batch-size",
            "micro-batch-size",
            "loss-chunk",
            "sequence-length",
            "tokens",
            "max-new-tokens",
        ),
        WHOLE,
    ),
    **dict.fromkeys(
        ("at", "last", "seed", "evaluate-every", "snapshot-every", "warmup-steps"), WHOLE
    ),
    **dict.fromkeys(("lr", "zo-eps", "weight-decay", "temperature", "top-p"), REAL),
    **dict.fromkeys(("memory", "device-memory", "activation-memory", "bus"), SIZES),
    **dict.fromkeys(("json",), FLAG),
    **dict.fromkeys(("data", "evaluation"), DATA),
    **dict.fromkeys(("output", "trace"), OUTPUTS),
    **dict.fromkeys(("run", "resume", ""), RUNS),  # "": an argument that is no option's value
    "model": MODELS,
    "journal": ["{place}/run/journal.jsonl", *PATHS],
    "scratch": PATHS,
    "keep": ["{place}/base", "/dev/full"],
    "dtype": DTYPES,
    "device": DEVICES,
    "steps": [1, 2, 3, 0, -1, "1e3", "x"],
    "noise": ["mezo", "gaussian", "rademacher", "white"],
    "decay": ["constant", "linear", "cosine", "steep"],
    "method": ["zeroth-order", "mezo", "lora", "sgd", "lisa"],
    "estimator": ["mezo", "fzoo", "adam", "mezo:exact", "es:fitness=ranks,exact"],
    "fitness": ["scaled", "ranks", "odd"],
    "queries": [1, 2, 3, 0, -1, 2**63, "x"],
    "write-back-every": [*WHOLE, "auto", "never"],
    **dict.fromkeys(("max-grad-norm", "max-grad-value", "clip-grad", "clip-median"), REAL),
    "scheduler": ["serial", "overlapped", "none"],
    "prompt": ["the cat", "", "the", "nothing known", " " * 9, "\udcff"],
}
BATCHING = ["batch-size", "micro-batch-size", "loss-chunk", "sequence-length"]
STEP = ["model", "journal", "run", "at", "dtype", "memory", "device", "device-memory"]
STEPS = ["steps", "seed", "lr", "zo-eps", "weight-decay"]
RUN = [
    "evaluate-every",
    "decay",
    "warmup-steps",
    "write-back-every",
    "snapshot-every",
    "max-grad-norm",
    "max-grad-value",
    "clip-grad",
    "clip-median",
    "method",
    "fitness",
    "trace",
]
MODEL = ["model", "dtype", "noise", "estimator", "queries", "memory", "device-memory"]
OPTIONS = {
    "train": [
        *BATCHING,
        *STEPS,
        *RUN,
        *MODEL,
        "data",
        "evaluation",
        "output",
        "device",
        "scheduler",
        "resume",
    ],
    "evaluate": [*STEP, *BATCHING, "data", "activation-memory", "trace"],
    "generate": [*STEP, "prompt", "max-new-tokens", "temperature", "top-p", "seed"],
    "export": [*STEP, "output"],
    "verify": [*STEPS, "model", "dtype", "batch-size", "tokens"],
    "plan": [*BATCHING, *MODEL, "scratch", "bus", "json"],
    "journal": ["last", ""],
    "convert": ["model", "output"],
    "demo": ["keep", "seed"],
}

# What a command line holds unless something else was drawn: most draws should come as far as the
# model.
DEFAULTS: dict[str, dict[str, str]] = {
    "train": {
        "method": "zeroth-order",
        "model": "{place}/base",
        "data": "{place}/rows.jsonl",
        "output": "{place}/new",
        "steps": "2",
    },
    "evaluate": {"model": "{place}/base", "data": "{place}/rows.jsonl"},
    "generate": {"model": "{place}/base", "prompt": "the cat", "max-new-tokens": "2"},
    "export": {"run": "{place}/run", "output": "{place}/new"},
    "verify": {"model": "{place}/base", "tokens": "5", "steps": "1"},
    "plan": {"model": "{place}/base", "batch-size": "3"},
    "journal": {"": "{place}/run"},
    "convert": {"model": "{place}/base", "output": "{place}/new"},
    "demo": {"keep": "{place}/base"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("random"))
    given = (
        "--method",
        "zeroth-order",
        "--model",
        folder / "base",
        "--data",
        folder / "rows.jsonl",
        "--output",
        folder / "run",
    )
    done(
        "train",
        "--method",
        "zeroth-order",
        *given,
        "--steps",
        4,
        "--batch-size",
        3,
        "--trace",
        folder / "trace.json",
    )
    os.mkfifo(folder / "pipe")
    shutil.copytree(folder / "run", folder / "kept run")
    return folder


@st.composite
def command_lines(draw: st.DrawFn, name: str) -> list[str]:
    chosen = draw(st.lists(st.sampled_from(OPTIONS[name]), max_size=3, unique=True))
    values: dict[str, str | None] = dict(DEFAULTS[name])
    if name == "train" and "resume" in chosen:
        values = {}
    for option in chosen:
        of_option = VALUES[option]
        values[option] = None if of_option is None else str(draw(st.sampled_from(of_option)))
    words: list[str] = []
    for option, value in values.items():
        words += [*([f"--{option}"] if option else []), *([] if value is None else [value])]
    return [name, *words]


def snapshot(place: Path) -> dict[str, int]:
    return {str(path.relative_to(place)): path.lstat().st_size for path in place.rglob("*")}


def restore(place: Path) -> None:
    """Take away what a command was asked to make."""
    for name in ("new", "deep", "nowhere", "run"):
        shutil.rmtree(place / name, ignore_errors=True)
        (place / name).unlink(missing_ok=True)
    (place / "picture.png").unlink(missing_ok=True)
    shutil.copytree(place / "kept run", place / "run")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_at_random_give_a_result_or_one_typed_line(
    place: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # which a relative path may fill
    most = {"train": 20, "demo": 2, "journal": 5, "convert": 4}.get(name, 9)

    @examples(short=most, long=most if name == "demo" else LONG // 4)
    @given(line=command_lines(name))
    def check(line: list[str]) -> None:
        restore(place)
        before = snapshot(place)
        arguments = [word.replace("{place}", str(place)) for word in line]
        with within(SECONDS):
            ended = run_here(*arguments)
        assert ended.status in (0, 2), (json.dumps(arguments), ended)
        if ended.status == 2:
            assert_typed(ended)
            after = snapshot(place)
            if name != "train" or "--resume" not in line:
                assert after == before, sorted(set(after) ^ set(before))

    check()
