"""The command line: the whole path from a checkpoint and rows to an exported model, and what it
says when it cannot.
"""

import ast
import io
import itertools
import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock, call

import pytest
import torch
from command_lines import done, leaves, refusal, run_here, write_rows
from engines import assert_equal, kernels_in
from profiles import each_choice
from runs import rows_of, weights_of
from threaded_device import ThreadedDevice, ThreadedStreams
from transformers import AutoModelForCausalLM, AutoTokenizer

import zo2adapters.commands.train
import zo2core.build
from zo2adapters.cli import COMMANDS, SIGNALS, command_class, main
from zo2adapters.commands.options import option_fields, parse_command
from zo2adapters.trainers import checked_json
from zo2adapters.trainers.optimization import Decay, LearningRate
from zo2core import Journal
from zo2core.kernels.dispatch import Kernel
from zo2core.ranges import OptimizerName
from zo2core.types import Descend, Program

pytestmark = pytest.mark.usefixtures("here")  # a base and its rows
ON_ROWS = ("train", "--method", "zeroth-order", "--model", "base", "--data", "rows.jsonl")
ROOT = Path(__file__).parents[2]
TRAIN = (*ON_ROWS, "--steps", 6, "--batch-size", 2, "--lr", 1e-2, "--seed", 3)


def test_train_evaluate_and_export_agree() -> None:
    evaluated = ("--evaluation", "rows.jsonl", "--evaluate-every", 3)
    assert "out/model" in done(*TRAIN, "--output", "out", *evaluated).out
    records = rows_of("out/metrics.jsonl")
    steps = [record for record in records if "loss" in record]
    evaluations = {
        record["step"]: record["evaluation_loss"]
        for record in records
        if "evaluation_loss" in record
    }
    assert [record["step"] for record in steps] == list(range(6))
    assert all(record["tokens_per_second"] > 0 and record["rss_bytes"] > 0 for record in steps)
    assert list(evaluations) == [0, 3, 6]
    of_journal = ("--model", "base", "--journal", "out/journal.jsonl")
    for model in (("--model", "out/model"), (*of_journal, "--no-base")):
        assert (
            f"loss {evaluations[6]:.6f}"
            in done("evaluate", *model, "--data", "rows.jsonl", "--batch-size", 2).out
        )
    done("export", *of_journal, "--output", "exported")
    assert_equal(weights_of("exported"), weights_of("out/model"))
    assert AutoTokenizer.from_pretrained("out/model")("the cat")["input_ids"] == [3, 4]


@pytest.mark.parametrize(
    ("estimator", "name", "losses"), [("mezo", "multi-query-rge", 6), ("fzoo", "fzoo", 4)]
)
def test_estimators_reach_updates(estimator: str, name: str, losses: int) -> None:
    done(*TRAIN, "--output", "run", "--estimator", estimator, "--queries", 3)
    journal = Journal("run/journal.jsonl")
    assert journal.header is not None
    assert journal.header["estimator"]["name"] == name
    for update in journal.updates:
        assert (len(set(update.seeds)), len(update.losses), update.lr) == (3, losses, 1e-2 / 3)


SAVED = """
    steps=6 seed=3 schedule_steps=null objective="auto" beta=null keep_best=false report_to="none"
    evaluation=null eval_split=null evaluate_every=null samples=0
    architecture=null head="causal-lm" dtype="auto" precision="exact" transfer_dtype="stored"
    matmul_precision="highest" base_lr=null max_grad_norm_per="all"
    adapter=null adapter_frozen=[] lora_rank=null lora_targets=[] lora_alpha=null
    prompt_template=null text_column=null
    prompt_column=null completion_column=null label_column=null
    messages_column=null labels=[] train_on="answers" too_long="auto"
    batch_size=2 micro_batch_size=null loss_chunk=null pack=false sequence_length=null
    reward=[] max_new_tokens=32 temperature=0.0 top_p=1.0 reward_seconds=5.0
    reward_memory="1GiB" max_drift=null
    method="zeroth-order" max_grad_norm=null max_grad_value=null switch_every=null
    stream_blocks=false divide_states=false loss_scaling=false
    delayed_update=false state_bits=32 betas=null momentum=null
    estimator="mezo" fitness="scaled" lr=0.01 zo_eps=0.001 weight_decay=0.0
    decay="constant" warmup_steps=0 queries=1
    noise="rademacher" rank=null period=100 stack=null per_row=false
    clip_grad=null clip_median=null guard=true
    memory="auto" device="cpu" device_memory="auto" activation_memory=null
    write_back_every="auto" write_limit_tb=null snapshot_every=null
"""


def test_options_of_a_run_are_kept_and_none_may_be_missing() -> None:
    done(*TRAIN, "--output", "whole")
    record = json.loads(Path("whole/options.json").read_text())
    saved = leaves(record["options"])
    assert [saved.pop("model"), saved.pop("data")] == [
        str(Path(name).resolve()) for name in ("base", "rows.jsonl")
    ]
    del saved["rendered_at"]
    assert {f"{name}={json.dumps(value)}" for name, value in saved.items()} == set(SAVED.split())
    del record["sha256"]
    del record["options"]["batching"]  # a format that is not this version's
    Path("whole/options.json").write_text(checked_json.to_text(record))
    assert "options.json: found no value for the key 'micro_batch_size'" in refusal(
        "train", "--resume", "whole"
    )


def test_a_device_of_its_own_memory_gives_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    behind_a_bus = MagicMock(
        side_effect=lambda _: ThreadedDevice(ThreadedStreams(lambda lane, nbytes: 0.0))
    )
    done(*TRAIN, "--output", "here")
    monkeypatch.setattr(zo2core.build, "choose_device", behind_a_bus)
    monkeypatch.setattr(zo2adapters.commands.train, "require_device", lambda device: None)
    done(*TRAIN, "--output", "there", "--device", "cuda:1", "--device-memory", "1GB")
    Path("resumed").mkdir()
    shutil.copy("there/options.json", "resumed")
    done("train", "--resume", "resumed")
    assert behind_a_bus.call_args_list == [call("cuda:1")] * 2
    for other in ("there", "resumed"):
        assert list(Journal(f"{other}/journal.jsonl").updates) == list(
            Journal("here/journal.jsonl").updates
        )
        assert_equal(weights_of(f"{other}/model"), weights_of("here/model"))


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_schedules_reach_the_updates(decay: str) -> None:
    done(*TRAIN, "--output", "out", "--decay", decay, "--warmup-steps", 2)
    rates = [row["lr"] for row in rows_of("out/metrics.jsonl")]
    expected = LearningRate(peak=1e-2, decay=Decay(decay), warmup_steps=2, steps=6)
    assert rates == [expected(step) for step in range(6)]
    assert rates[:3] == [0.005, 0.01, 0.01]
    assert rates[-1] == {"constant": 0.01, "linear": 0.0025, "cosine": expected(5)}[decay]


LORA = "--lora-rank 2"
VERIFIED = [
    "",
    LORA,
    f"{LORA} --lora-targets q_proj down_proj",
    f"{LORA} --method adamw",
    f"{LORA} --method sgd",
    f"{LORA} --adapter-frozen lora_A",
]
POSTED = re.compile(
    r"zo2 verify: (?P<found>EQUAL|DIFFERENT), digest (?P<digest>[0-9a-f]{16}); zo2core [\d.]+, "
    r"torch [^,;]+, transformers [^,;]+(?:, peft [^,;]+)?; Python [\d.]+, \w+ \w+; .+, \d+ cores?"
)
VERIFIED += [f"--method {method}" for method in get_args(OptimizerName)]


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        *each_choice(VERIFIED, ["--precision exact", "--precision mixed --dtype bfloat16"]),
        ("", "--dtype float16"),
    ],
)
def test_verify_tells_equal_from_different(
    method: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("verify", "--model", "base", "--tokens", 9, *method.split(), *precision.split())
    told = done(*command).out
    assert told.startswith("EQUAL over 3 steps")
    assert not method or "bit for bit" in told
    assert "--method" not in method or "bit for bit: losses, gradient norms" in told
    if LORA in method:
        counts = {"q_proj down_proj": 8, "lora_A": 14}
        trained = next((count for words, count in counts.items() if words in method), 28)
        of_loras = f"all {trained} trained parameters\n"
        assert of_loras in told
    assert POSTED.fullmatch(told.splitlines()[-1])
    loads = AutoModelForCausalLM.from_pretrained

    def changed(*arguments: Any, **options: Any) -> Any:
        model: Any = loads(*arguments, **options)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.01)
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", changed)
    ended = run_here(*command)
    assert ended.status == 1
    assert ended.out.startswith("DIFFERENT: ")
    posted = POSTED.fullmatch(ended.out.splitlines()[-1])
    assert posted is not None
    assert posted["found"] == "DIFFERENT"


def test_the_digest_of_verify_is_that_of_the_bits() -> None:
    def digest(*options: object) -> str:
        out = run_here("verify", "--model", "base", "--tokens", 9, *options).out
        posted = POSTED.fullmatch(out.splitlines()[-1])
        assert posted is not None
        return posted["digest"]

    def nudge(kernel: Kernel, theta: torch.Tensor, program: Program, *arguments: Any) -> None:
        kernel(theta, program, *arguments)
        if theta.numel() == 12 * 20:
            theta[7] = torch.nextafter(theta[7], torch.tensor(1e9))

    first = digest()
    assert first == digest()
    assert first != digest("--seed", 1)
    with kernels_in(nudge):
        assert first != digest()


def test_verify_names_the_first_difference() -> None:
    def miscompute(kernel: Kernel, theta: torch.Tensor, program: Program, *arguments: Any) -> None:
        kernel(theta, program, *arguments)
        if theta.numel() == 12 * 20 and any(
            isinstance(one, Descend) for one in program.instructions
        ):
            theta[7] += 1e-3

    with kernels_in(miscompute):
        ended = run_here("verify", "--model", "base", "--tokens", 9, "--steps", 1)
    assert ended.status == 1
    assert "mlp.gate_proj.weight, element 7 of 240 (1 differ)" in ended.out


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_all_help_has_one_layout_and_fills_its_lines(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for option in ("--help", "--help-all"):
        usage, empty, *lines = run_here(*command.split(), option).out.splitlines()
        assert (usage.split()[:2], empty) == (["usage:", "zo2"], "")
        assert ("Options" if command else "Commands") in lines
        assert max(map(len, lines)) <= 100
        assert not set("".join(lines)) & set("│╭"), "boxes of another layout"
        for line, following in itertools.pairwise(lines):
            is_name = line.startswith("  ") and not line.startswith("   ")
            assert not is_name or (following.startswith(" " * 6) and following[6] != " "), (
                "a text stands below each name"
            )
            if command and line.startswith(" " * 6) and following.startswith(" " * 6):
                # one text over both lines
                assert len(f"{line} {following.split()[0]}") > 100, (
                    f"a break before the line's end: {line}"
                )


def test_help_says_what_an_option_takes_and_what_it_is_by_default() -> None:
    assert run_here("help") == run_here("--help")
    assert run_here("--version").out.startswith("zo2core ")
    lines = run_here("plan", "--help-all").out.splitlines()
    assert lines[0] == "usage: zo2 plan [RECIPE.yaml] [OPTIONS]"
    for expected in (
        "  --model TEXT",
        "  --steps INT",
        "  --method lora|lora+lomo|adamw|sgd|lomo|adalomo|badam|mezo|zeroth-order",
        "  --write-limit-tb FLOAT",
    ):
        assert expected in lines
    assert "Training steps. Each takes the time of three or four forward passes" in " ".join(
        " ".join(lines).split()
    )
    report = run_here("report", "--help").out.splitlines()
    assert report[0] == "usage: zo2 report RUNS ... --output PATH [OPTIONS]"
    assert "  --output, -o PATH" in report
    assert "  --base, --no-base" in run_here("evaluate", "--help").out.splitlines()
    train = run_here("train", "--help-all").out
    assert re.findall("^  --.*", train, re.MULTILINE)[:4] == [
        "  --model TEXT",
        "  --data PATH",
        "  --output PATH",
        "  --method lora|lora+lomo|adamw|sgd|lomo|adalomo|badam|mezo|zeroth-order",
    ]
    assert "(LoRA, DoRA, prefix tuning)" in " ".join(train.split())
    assert "VeRA" not in train
    for name in COMMANDS:
        options = command_class(name)
        assert set(options.first_options.split()) <= {
            option.field for option in option_fields(options)
        }


def test_what_one_does_first_are_commands_and_a_refusal_names_options_as_their_command_does() -> (
    None
):
    steps = re.findall(r"^  zo2 (\w+) ?(.*?)  ", run_here().out, re.MULTILINE)
    assert [name for name, _ in steps] == ["demo", "init", "train", "chat"]
    for name, words in steps:
        if name != "train":  # whose recipe would be read
            parse_command(name, command_class(name), words.split())
    line = refusal("chat", "--nonsense")
    assert "--temperature" in line
    assert "--reward-seconds" not in line


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals_as_before")
def test_control_characters_never_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw: dict[str, Any] = {
        name: io.TextIOWrapper(io.BytesIO(), write_through=True) for name in ("stdout", "stderr")
    }
    for name, stream in raw.items():
        monkeypatch.setattr(sys, name, stream)
    evil = "a\x1b[2Jb\rc\x9bd\x07e\u202eexe.txt\u2066\u2028"
    monkeypatch.setattr(sys, "argv", ["zo2", "push", str(tmp_path / evil), "--to", "user/mine"])
    with pytest.raises(SystemExit):
        main()
    print(f"first {evil}\n\tsecond\r\n\x1b[A")
    print("\x1b[A", end="")
    sys.stdout.writelines(["\u202e", "\n"])
    for text in ("\r 50%", "\n", "\x1b[A", f"\r{evil}"):
        sys.stderr.write(text)
    out, err = (stream.buffer.getvalue().decode() for stream in raw.values())
    shown = r"a\x1b[2Jb\rc\x9bd\x07e\u202eexe.txt\u2066\u2028"
    assert out == f"first {shown}\n\tsecond\r\n\\x1b[A\n\\x1b[A\\u202e\n"
    refused, bars = err.split("\n", 1)
    one_line = shown.replace(r"\r", " ").removesuffix(r"\u2028")
    assert one_line in refused
    assert bars == f"\r 50%\n\x1b[A\r{shown}", "a progress bar moves the cursor"


# What a newcomer types


REWARD = (
    "--reward",
    "rewards.py:short",
    "--estimator",
    "es",
    "--rank",
    2,
    "--max-new-tokens",
    "2",
)


@pytest.mark.parametrize(
    "text", ["from math import sqrt as short\n", "short = 3\n", "if True:\n    short = len\n"]
)
def test_a_name_may_be_defined_in_any_way(text: str) -> None:
    Path("rewards.py").write_text(text)
    assert "without short" not in run_here(*ON_ROWS, "--steps", 1, "--output", "run", *REWARD).err


def test_columns_that_a_run_or_an_evaluation_does_not_use_are_told() -> None:
    Path("tweets.csv").write_text("text,mood,score\nthe cat,good,1\nthe dog,bad,2\n")
    write_rows(Path("held.jsonl"), [{"text": "the cat", "page": 3}])
    tweets = (
        "train",
        "--method",
        "zeroth-order",
        "--model",
        "base",
        "--data",
        "tweets.csv",
        "--steps",
        1,
    )
    told = done(*tweets, "--output", "run", "--evaluation", "held.jsonl").err
    assert "trained on: the column text; not used: score, mood. --prompt-template" in told
    assert "\nscore may say which rows are good, and is not used" in told
    assert "evaluated on: the column text; not used: page" in told
    template = ("--prompt-template", "{text} is", "--label-column", "mood")
    told = done(*tweets, "--output", "labels", *template, "--evaluation", "tweets.csv").err
    assert "trained on: the columns text and mood; not used: score\n" in told
    assert "evaluated on" not in told, "the same columns"
    told = done("evaluate", "--run", "labels", "--data", "tweets.csv").err
    assert "evaluated on: the columns text and mood; not used: score\n" in told
    assert "not used" not in done(*ON_ROWS, "--steps", 1, "--output", "rows").err


def test_a_directory_of_runs_has_a_report_of_each_and_generations_have_their_names() -> None:
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        done(*ON_ROWS, "--steps", 1, "--output", f"many/{name}", "--rank", 2)
    for directory, title in (("many", "one, two"), ("many/one", "one")):
        done("report", directory, "-o", "page.html")
        assert f"<title>{title}</title>" in Path("page.html").read_text()
    Path("empty").mkdir()
    assert "no journal" in refusal("report", "empty", "-o", "none.html")
    generate = ("generate", "--run", "many/one", "--prompt", "the cat", "--max-new-tokens", 2)
    lines = done(*generate, "--others", "many/two").out.splitlines()
    assert [line for line in lines if line.endswith(":")] == ["one:", "two:"]
    assert not done(*generate).out.startswith("one:")


def test_an_evaluation_of_one_row_counts_one_row_and_a_model_without_steps_counts_none() -> None:
    Path("one.jsonl").write_text(json.dumps({"prompt": "the cat", "completion": " sat"}) + "\n")
    assert "1 row, 1 sweep" in done("evaluate", "--model", "base", "--data", "one.jsonl").out
    assert done("export", "--model", "base", "--output", "copy").out == "copy: the model\n"


def is_text_of_unnamed_encoding(node: ast.AST) -> bool:
    """Whether a call opens, reads or writes text in the encoding of the locale."""
    if not isinstance(node, ast.Call) or {"encoding"} & {word.arg for word in node.keywords}:
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    given = [*node.args, *(word.value for word in node.keywords)]
    constants = [one.value for one in given if isinstance(one, ast.Constant)]
    if name in ("Popen", "run", "check_output"):
        return any(word.arg in ("text", "universal_newlines") for word in node.keywords)
    is_binary = any(isinstance(one, str) and set("rwxab+") >= {*one} > {"b"} for one in constants)
    return name in ("read_text", "write_text", "TextIOWrapper") or (
        ast.unparse(node.func) in ("open", "os.fdopen") and not is_binary
    )


def test_text_is_read_and_written_in_an_encoding_that_is_named() -> None:
    sources = [*ROOT.glob("src/**/*.py")]
    assert len(sources) > 100
    assert [
        f"{path.name}:{node.lineno}"
        for path in sources
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call) and is_text_of_unnamed_encoding(node)
    ] == []
