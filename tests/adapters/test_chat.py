"""Chatting on a pipe: what is answered, which adapter answers, and what the commands do."""

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from command_lines import (
    SECONDS,
    Ended,
    command,
    done,
    environment,
    refusal,
    run_here,
    write_rows,
)
from models import WORDS, mean_log_likelihood, save_model, save_tokenizer, small_config
from runs import finish, small_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from zo2adapters.commands.generate import _Stop, _TextStream
from zo2adapters.trainers.options import TrainOptions
from zo2core import Engine

peft: Any = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it

TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def give_template(base: Path) -> None:
    path = base / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model and two adapters whose answers differ from it and from each other."""
    folder = tmp_path_factory.mktemp("chat")
    config = small_config("llama", vocab_size=len(WORDS), max_position_embeddings=24)
    base = save_model(folder / "base", config)
    save_tokenizer(base)
    give_template(base)
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        whole = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(base),
            peft.LoraConfig(r=4, target_modules="all-linear", lora_alpha=400),
        )
        with torch.no_grad():
            for parameter_name, parameter in whole.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.normal_()
        whole.save_pretrained(folder / name)
    return folder


def chat(*arguments: object, lines: str) -> Ended:
    with patch.object(sys, "stdin", io.StringIO(lines)):
        return run_here("chat", *arguments)


def expected(place: Path, text: str, new: int, adapter: str | None = None) -> str:
    """What transformers answers with the whole model."""
    tokenizer: Any = AutoTokenizer.from_pretrained(place / "base")
    model: Any = AutoModelForCausalLM.from_pretrained(place / "base")
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, place / adapter)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    ends = [tokenizer.eos_token_id, model.generation_config.eos_token_id]
    made = model.generate(
        input_ids=ids, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=ends
    )
    answer = [token for token in made[0, ids.shape[1] :].tolist() if token not in ends]
    return str(tokenizer.decode(answer, skip_special_tokens=True))


def test_answers_are_those_of_the_whole_model_and_the_conversation_goes_on_until_a_reset(
    place: Path,
) -> None:
    lines = "/adaptor first\n/adapter\nthe cat\n\n  \nthe dog\n/reset\nthe cat\n/quit\nthe dog\n"
    ended = chat("--model", place / "base", "--max-new-tokens", 4, lines=lines)
    first = expected(place, "the cat ", 4)
    assert ended.out.splitlines() == [first, expected(place, f"the cat {first} the dog ", 4), first]
    assert ended.status == 0
    assert ended.err.startswith("base answers; /reset forgets")
    assert "NAME switches" not in ended.err
    assert "/adaptor is not a command" in ended.err
    limits = ("--max-new-tokens", 2, "--sequence-length", 6)
    ended = chat(
        "--model",
        place / "base",
        *limits,
        lines="the cat sat on the mat the dog\n/reset\nthe cat\n",
    )
    assert "/reset" in ended.err, "a conversation that is too long can be reset"
    assert ended.out.splitlines() == [expected(place, "the cat ", 2)]


def test_adapters_are_switched_by_name_which_for_a_run_is_its_own(
    place: Path, tmp_path: Path
) -> None:
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "journal.jsonl").touch()
    shutil.copytree(place / "second", tmp_path / "tuned" / "model")
    lines = (
        "the cat\n/reset\n/adapter tuned\nthe cat\n/reset\n/adapter none\nthe "
        "cat\n/adapter\n/adapter third\n"
    )
    adapters = ("--adapter", place / "first", tmp_path / "tuned" / "model")
    ended = chat("--model", place / "base", *adapters, "--max-new-tokens", 4, lines=lines)
    answers = [expected(place, "the cat ", 4, adapter) for adapter in ("first", "second", None)]
    assert len(set(answers)) == 3
    assert ended.out.splitlines() == answers
    assert ended.err.count("none answers; there are first, tuned, none") == 2


def test_a_run_answers_with_its_weights_and_none_with_its_base(tmp_path: Path) -> None:
    options = small_run(tmp_path)
    give_template(Path(options.model))
    finish(options)
    ended = chat(
        options.output, "--max-new-tokens", 2, lines="the cat\n/reset\n/adapter none\nthe cat\n"
    )
    assert len(ended.out.splitlines()) == 2
    assert ended.out.splitlines()[1] == expected(tmp_path, "the cat ", 2)
    assert "run answers" in ended.err


def test_the_base_is_the_one_that_the_adapters_name(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "first", tmp_path / "named")
    config = tmp_path / "named" / "adapter_config.json"
    config.write_text(
        json.dumps(
            {**json.loads(config.read_bytes()), "base_model_name_or_path": str(place / "base")}
        )
    )
    ended = chat(
        "--adapter",
        tmp_path / "named",
        "--max-new-tokens",
        4,
        lines="the cat\n/reset\n/adapter none\nthe cat\n",
    )
    assert ended.out.splitlines() == [
        expected(place, "the cat ", 4, "first"),
        expected(place, "the cat ", 4),
    ]


def test_text_appears_token_by_token_and_an_interrupt_ends_the_answer_and_the_next_one_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream, printed = _TextStream(lambda tokens: bytes(tokens).decode(errors="replace")), []
    for byte in "grün".encode():
        stream.add(byte)
        printed.append(capsys.readouterr().out)
    assert printed == ["g", "r", "", "ü", "n"], "half a character waits for its other half"
    assert stream.end() == "grün"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with _Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_an_answer_that_is_stopped_stays_in_the_conversation(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after its first token."""

    def ask(stop: _Stop) -> _Stop:
        stop.is_asked = True
        return stop

    monkeypatch.setattr(_Stop, "__enter__", ask)
    ended = chat("--model", place / "base", "--max-new-tokens", 4, lines="the cat\nthe dog\n")
    first = expected(place, "the cat ", 1)
    assert ended.out.splitlines() == [first, expected(place, f"the cat {first} the dog ", 1)]


@pytest.mark.long_profile
def test_a_terminal_shows_a_mark_and_ends_with_the_input(place: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("chat", "--model", place / "base", "--max-new-tokens", 4),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="dumb"),
        close_fds=True,
    )
    os.close(theirs)
    # each once the mark asks for it: the terminal's mode changes with it
    told, typed = b"", [b"the cat\n", b"\x04"]
    try:
        while select.select([ours], [], [], SECONDS)[0]:
            told += os.read(ours, 1024)
            if typed and told.count(b"> ") > 2 - len(typed):
                os.write(ours, typed.pop(0))
        pytest.fail(f"it waits for something: {told!r}")
    except OSError:  # how the other end's closing is reported
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    text = told.decode().replace("\r\n", "\n")
    assert "> " in text
    assert expected(place, "the cat ", 4) in text


def test_an_engine_is_closed_before_the_next_one_opens(place: Path) -> None:
    with patch.object(Engine, "close", autospec=True, side_effect=Engine.close) as close:
        chat(
            "--model",
            place / "base",
            "--adapter",
            place / "first",
            lines="/adapter none\n/adapter first\n",
        )
    assert len({id(call.args[0]) for call in close.call_args_list}) == 3


def run_on_moods(
    folder: Path, row: dict[str, str], *given: object, template: bool = False
) -> TrainOptions:
    """A run of one step on two rows that differ in their mood."""
    options = small_run(folder, steps=1)
    if template:
        give_template(folder / "base")
    write_rows(options.data, [{**row, "mood": mood} for mood in WORDS[8:10]])
    command = (
        "train",
        "--method",
        "zeroth-order",
        "--model",
        options.model,
        "--data",
        options.data,
        "--output",
        options.output,
        "--steps",
        1,
    )
    done(*command, "--lr", 0.1, *given)
    return options


@pytest.mark.parametrize("by", ["template", "columns"])
def test_a_run_on_labels_chooses_a_label_for_each_line(tmp_path: Path, by: str) -> None:
    template = ("--prompt-template", "{subject} is", "--label-column", "mood")
    columns = (
        template if by == "template" else ("--prompt-column", "prompt", "--label-column", "mood")
    )
    options = run_on_moods(tmp_path, {"subject": "the cat", "prompt": "the cat is"}, *columns)
    line, typed = ("the dog is", "the dog") if by == "template" else ("the dog is", "the dog is")
    ended = chat(options.output, lines=f"{typed}\n/adapter none\n{typed}\n/reset\n{'the ' * 70}\n")
    first, switched, unknown, long = ended.err.splitlines()
    labels, column = sorted(WORDS[8:10]), "subject" if by == "template" else "prompt"
    assert first.startswith(
        f"run chooses one of the labels {', '.join(labels)} for the {column} that you type; "
        "/adapter NAME"
    )
    assert switched.startswith("none chooses one of the labels")
    assert unknown.startswith("/reset is not a command; ")
    assert "at most 12 fit" in long
    answers = ended.out.splitlines()
    assert len(answers) == 2
    assert answers[0] != answers[1], "the base chooses otherwise"
    for answer, model in zip(answers, (options.output / "model", Path(options.model)), strict=True):
        shares = dict(part.split(" ") for part in answer.split(", "))
        likelihoods = {label: mean_log_likelihood(model, line, f" {label}") for label in labels}
        expected = torch.tensor(list(likelihoods.values())).softmax(0)
        for label, share in zip(labels, expected.tolist(), strict=True):
            assert float(shares[label].rstrip("%")) == pytest.approx(100 * share, abs=0.06)
        assert answer.split(" ")[0] == max(likelihoods, key=likelihoods.__getitem__), (
            "the likeliest label comes first"
        )


def test_a_run_with_a_template_continues_the_prompt_of_each_line(tmp_path: Path) -> None:
    columns = (
        "--prompt-template",
        "{subject} is",
        "--completion-column",
        "mood",
        "--lora-rank",
        2,
    )
    options = run_on_moods(tmp_path, {"subject": "the cat"}, *columns, "--method", "adamw")
    ended = chat(
        options.output, "--max-new-tokens", 1, lines="the dog\n/help\n/adapter none\nthe dog\n"
    )
    first, repeated, _ = ended.err.splitlines()
    assert first == repeated
    assert first.startswith(
        "run continues the prompt of the subject that you type; /adapter NAME switches"
    )
    assert "/reset" not in first
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    base = AutoModelForCausalLM.from_pretrained(options.model)
    logits = base(torch.tensor([tokenizer("the dog is").input_ids])).logits[0, -1]
    assert (
        ended.out.splitlines()[1].strip()
        == tokenizer.decode([int(logits.argmax())], skip_special_tokens=True).strip()
    )
    adapter = options.output / "model"
    assert json.loads((adapter / "zo2_prompt.json").read_text()) == {
        "prompt_template": "{subject} is"
    }
    assert "## Prompts" in (adapter / "README.md").read_text()
    # its file is read where the run is not named
    answer = chat("--adapter", adapter, "--max-new-tokens", 1, lines="the dog\n")
    assert answer.err.startswith("run continues the prompt of the subject that you type")
    assert answer.out.splitlines() == ended.out.splitlines()[:1]
    (adapter / "zo2_prompt.json").write_text('{"labels": [1]}')
    assert "labels [1]; expected a text, and a list of texts" in refusal(
        "chat", "--adapter", adapter
    )
    assert (
        AutoTokenizer.from_pretrained(adapter)("the dog is").input_ids
        == tokenizer("the dog is").input_ids
    )


def test_a_run_on_labels_with_two_columns_is_a_conversation(tmp_path: Path) -> None:
    columns = ("--prompt-template", "{subject} {verb}", "--label-column", "mood")
    options = run_on_moods(tmp_path, {"subject": "the cat", "verb": "is"}, *columns, template=True)
    assert chat(options.output, "--max-new-tokens", 1, lines="the cat\n").err.startswith(
        "run answers; "
    )


@pytest.mark.long_profile
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_line_that_is_no_text_is_refused_in_every_locale(place: Path, encoding: str) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run(
        command("chat", "--model", place / "base", "--max-new-tokens", 2),
        env=environment(**locale, PYTHONIOENCODING=f"{encoding}:strict"),
        input=b"the cat\nthe c\xe4t\n",
        capture_output=True,
        check=False,
    )
    said = ended.stderr.decode()
    assert (ended.returncode, "Traceback" in said) == (2, False), said
    assert "zo2: text: found '\\udce4t" in said
    assert ended.stdout, "the first line was answered"
