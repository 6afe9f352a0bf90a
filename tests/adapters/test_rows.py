"""JSONL data files: what a row becomes, what is refused, and in which order rows come."""

import contextlib
import csv
import gzip
import importlib
import itertools
import json
import math
import random
import socket
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
import transformers
from command_lines import run_here, within, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from models import WORDS, small_config
from runs import data_sha256, finish, outcome, small_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from zo2adapters.tasks.rewards import RewardOptions
from zo2adapters.tasks.row_options import RowFormat, RowOptions
from zo2adapters.tasks.row_source import DataFile, parsed_rows, saved_path
from zo2adapters.tasks.row_values import Unreadable
from zo2adapters.tasks.rows import (
    RowReader,
    Rows,
    TokenizedRow,
    collate,
    file_batches,
    training_batches,
)
from zo2adapters.tasks.tokenizer import load_tokenizer, pad_token_id, render_chat
from zo2adapters.trainers.optimization import Optimization
from zo2adapters.trainers.run_directory import RunDirectory
from zo2adapters.trainers.run_inputs import RunStart, row_notices
from zo2adapters.trainers.trainer import QUIET, open_run
from zo2core import Journal
from zo2core.errors import DataError, MissingPackageError, OptionError

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown "
    "role') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|think|>",
]
ASK = {"role": "user", "content": "What colour is the sky?"}
ANSWER = {"role": "assistant", "content": "It is blue."}


def make_tokenizer(
    *, wrap: str = "$A", template: str | None = TEMPLATE, **special: str | None
) -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(
        ["The sky is blue. What colour is the sky? It is blue."] * 3, trainer
    )
    backend.post_processor = processors.TemplateProcessing(
        single=wrap, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"} | special
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = make_tokenizer()


def text_of(
    row: TokenizedRow, start: int = 0, tokenizer: PreTrainedTokenizerBase = TOKENIZER
) -> str:
    text = tokenizer.decode(list(row.input_ids)[start:])
    assert isinstance(text, str)
    return text


# Opens an answer with a token that a finished answer does not hold, as templates of reasoning
# models do.
THINKING_TEMPLATE = TEMPLATE.replace(
    "<|assistant|>{% endif %}", "<|assistant|><|think|>{% endif %}"
)
WITH_BOS = make_tokenizer(wrap="<s> $A")
WITH_BOS_AND_EOS = make_tokenizer(wrap="<s> $A </s>")
WITHOUT_EOS = make_tokenizer(eos_token=None)
WITHOUT_TEMPLATE = make_tokenizer(template=None)
THINKING = make_tokenizer(template=THINKING_TEMPLATE)
EOS = 2


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def read(
    path: Path, *rows: object, tokenizer: PreTrainedTokenizerBase = TOKENIZER, length: int = 64
) -> Rows:
    write_rows(path, rows)
    return RowReader(tokenizer, length).read(path)


def refusal(
    path: Path, content: bytes, *, tokenizer: PreTrainedTokenizerBase = TOKENIZER, length: int = 64
) -> DataError:
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        RowReader(tokenizer, length).read(path)
    return caught.value


def numbered(count: int) -> Rows:
    return Rows(tuple(TokenizedRow(array("i", [3, 4]), 0, line) for line in range(1, count + 1)))


def lines(batch: Sequence[TokenizedRow]) -> list[int]:
    return [row.line for row in batch]


BLUE = {"prompt": "The sky is", "completion": " blue."}
TALK, ASKED = {"messages": [ASK, ANSWER]}, "<|user|>What colour is the sky?<|end|><|assistant|>"
TURN = {"prompt": [ASK], "completion": [ANSWER]}
# row, prompt, and what is learned
LEARNED: dict[str, tuple[dict[str, Any], PreTrainedTokenizerBase, str, str]] = {
    "a text ends with EOS": ({"text": "The sky is blue."}, TOKENIZER, "", "The sky is blue.</s>"),
    "a text that has its EOS": ({"text": "The sky</s>"}, TOKENIZER, "", "The sky</s>"),
    "a tokenizer that adds EOS": ({"text": "The sky"}, WITH_BOS_AND_EOS, "", "<s>The sky</s>"),
    "a tokenizer without EOS": ({"text": "The sky is"}, WITHOUT_EOS, "", "The sky is"),
    "a completion": (BLUE, TOKENIZER, "The sky is", " blue.</s>"),
    "BOS counts as prompt": (BLUE, WITH_BOS, "<s>The sky is", " blue.</s>"),
    "a completion where EOS is added": (BLUE, WITH_BOS_AND_EOS, "<s>The sky is", " blue.</s>"),
    "an empty prompt": ({"prompt": "", "completion": "The sky"}, WITH_BOS, "<s>", "The sky</s>"),
    "a token that has both": (
        {"prompt": "The sky is ", "completion": "blue."},
        TOKENIZER,
        "The sky is",
        " blue.</s>",
    ),
    "EOS alone": ({"prompt": "The sky", "completion": "</s>"}, TOKENIZER, "The sky", "</s>"),
    "messages": (TALK, TOKENIZER, ASKED, "It is blue.<|end|>"),
    "messages get no second BOS": (TALK, WITH_BOS, ASKED, "It is blue.<|end|>"),
    "a completion of messages": (TURN, TOKENIZER, ASKED, "It is blue.<|end|>"),
    "a template that opens answers otherwise": (TURN, THINKING, ASKED, "It is blue.<|end|>"),
}


@pytest.mark.parametrize(("row", "tokenizer", "prompt", "learned"), LEARNED.values(), ids=LEARNED)
def test_what_a_row_becomes_and_what_of_it_is_learned(
    row: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    learned: str,
    data_file: Path,
) -> None:
    [tokenized] = read(data_file, row, tokenizer=tokenizer)
    assert tokenized.input_ids.itemsize == 4
    assert text_of(tokenized, tokenizer=tokenizer) == prompt + learned
    assert text_of(tokenized, tokenized.prompt_length, tokenizer) == learned
    if "messages" in row:
        assert list(tokenized.input_ids) == tokenizer.apply_chat_template(
            [ASK, ANSWER], return_dict=False
        )


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    "start", [b"\r\n", MARK + b"\r\n", MARK + b'{"text": "The sky"}\n'], ids=["none", "mark", "row"]
)
def test_blank_lines_and_byte_order_marks_are_skipped_and_lines_count_from_one(
    data_file: Path, start: bytes
) -> None:
    data_file.write_bytes(start + b'  \n{"text": "caf\xc3\xa9"}\r\n\n{"text": "a\xe2\x80\xa8b"}')
    rows = [(row.line, text_of(row)) for row in RowReader(TOKENIZER, 64).read(data_file)]
    first = [(1, "The sky</s>")] if b"text" in start else []
    assert rows == [*first, (3, "café</s>"), (5, "a\u2028b</s>")]


def test_kinds_are_recognised_row_by_row_and_long_rows_lose_their_end_and_are_counted(
    data_file: Path,
) -> None:
    text, completion = (
        {"text": "The sky", "id": 7, "messages": None},
        {"prompt": "The", "completion": " sky"},
    )
    dataset = read(
        data_file,
        text,
        {**completion, "source": {"url": "x"}},
        {"messages": [ASK, ANSWER], "tools": []},
    )
    assert [text_of(row) for row in dataset] == ["The sky</s>", "The sky</s>", text_of(dataset[2])]
    assert [row.prompt_length for row in dataset] == [0, 1, 10]
    rows = [
        {"text": "The sky is blue."},
        {"text": "The sky"},
        {"prompt": "The sky", "completion": " is blue."},
    ]
    dataset = read(data_file, *rows, length=3)
    assert [text_of(row) for row in dataset] == ["The sky is", "The sky</s>", "The sky is"]
    assert dataset.truncated == 2, "not the row of exactly the sequence length"


MALFORMED: dict[str, tuple[bytes, str]] = {
    "broken json": (b'{"text": ', "JSON"),
    "cut string": (b'{"text": "a', "column 10"),
    "deep nesting": (b"[" * 200_000, "JSON"),
    "invalid utf-8": (b'{"text": "\xff"}', "0xff"),
    "half a surrogate pair": (b'{"text": "\\ud800"}', "surrogate"),
    "list": (b'[{"text": "a"}]', '[{"text": "a"}]'),
    "string": (b'"text"', '"text"'),
    "null": (b"null", "null"),
    "no keys": (b"{}", "none"),
    "unknown keys": (b'{"question": "a"}', "'question'"),
    "null text": (b'{"text": null}', "none"),
    "prompt alone": (b'{"prompt": "a"}', "'prompt'"),
    "completion alone": (b'{"completion": "a"}', "'completion'"),
    "two kinds": (b'{"text": "a", "messages": []}', "'text', 'messages'"),
    "kind and a half": (b'{"text": "a", "prompt": "b"}', "'text', 'prompt'"),
    "text of the wrong type": (b'{"text": 3}', "3 in the column 'text'"),
    "prompt of the wrong type": (b'{"prompt": {}, "completion": "b"}', "{} in the column 'prompt'"),
    "mixed prompt and completion": (
        b'{"prompt": "a", "completion": [{"role": "user", "content": "b"}]}',
        "'completion'",
    ),
    "mixed completion and prompt": (
        b'{"prompt": [{"role": "user", "content": "b"}], "completion": "a"}',
        '"a" in the column',
    ),
    "empty text": (b'{"text": ""}', "\"\" in the column 'text'"),
    "empty completion": (b'{"prompt": "a", "completion": ""}', "\"\" in the column 'completion'"),
    "messages as a string": (b'{"messages": "a"}', "\"a\" in the column 'messages'"),
    "no messages": (b'{"messages": []}', "[] in the column 'messages'"),
    "messages without content": (
        b'{"messages": [{"role": "user", "content": ""}]}',
        '"content": ""}] in the column',
    ),
    "message without content": (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}',
        "nothing as 'content' of message 2 of the column 'messages'",
    ),
    "message without role": (b'{"messages": [{"content": "a"}]}', "nothing as 'role' of message 1"),
    "message that is a string": (b'{"messages": ["a"]}', '"a" as message 1 of the column'),
    "content in parts": (
        b'{"messages": [{"role": "user", "content": [{"text": "a"}]}]}',
        "as 'content' of message 1",
    ),
    "role the template refuses": (
        b'{"messages": [{"role": "god", "content": "a"}]}',
        "unknown role",
    ),
    "tools": (
        b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]}',
        "'tools'",
    ),
}


@pytest.mark.parametrize(("content", "found"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_row_is_refused_with_its_line(
    data_file: Path, content: bytes, found: str
) -> None:
    error = refusal(data_file, b'{"text": "fine"}\n\n' + content + b"\n")
    assert error.where == f"{data_file}, line 3"
    assert found in error.found
    assert "line 1" not in error.found  # json counts lines within the one it is given
    assert error.expected
    assert error.remedy


def test_what_a_tokenizer_or_a_length_cannot_take_is_told_with_what_would_fit(
    data_file: Path,
) -> None:
    assert len(read(data_file, {"text": "The sky"}, tokenizer=WITHOUT_TEMPLATE)) == 1
    for asked in ({"messages": [ASK]}, {"prompt": [ASK], "completion": [ANSWER]}):
        error = refusal(data_file, json.dumps(asked).encode(), tokenizer=WITHOUT_TEMPLATE)
        assert "with a tokenizer that has no chat template" in str(error)
        assert error.where == f"{data_file}, line 1"
    row = {"prompt": "The sky", "completion": " is blue."}
    assert read(data_file, row, length=3).truncated == 1
    error = refusal(data_file, b'{"text": "The sky is"}\n' + json.dumps(row).encode(), length=2)
    assert error.where == f"{data_file}, line 2"
    assert (
        error.found
        == "a prompt of 2 tokens, which leaves no token of the row's 2 for the completion"
    )
    assert error.expected == "a prompt of at most 1 tokens"
    assert error.remedy == (
        "shorten this row or remove it, or raise `sequence_length`, up to what the model takes; or "
        "pass --too-long drop"
    )
    # spaces are no tokens
    words = Tokenizer(models.WordLevel({"The": 0, "sky": 1}, unk_token="sky"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast  # its constructor is untyped
    error = refusal(
        data_file,
        json.dumps({**row, "completion": " "}).encode(),
        tokenizer=fast(tokenizer_object=words),
    )
    assert error.found == "a prompt of 2 tokens, and no token of a completion"
    assert "completion" in error.remedy
    error = refusal(data_file, b'{"text": "The"}', tokenizer=WITHOUT_EOS)
    assert (error.found, error.remedy) == (
        "a text of 1 token",
        "lengthen the text, or remove the row",
    )
    assert len(read(data_file, {"text": "The"}, tokenizer=TOKENIZER)) == 1


def test_a_file_without_rows_a_missing_one_and_a_directory_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"\n \r\n\t\n", MARK):
        error = refusal(tmp_path / "rows.jsonl", content)
        assert (error.where, error.found) == (str(tmp_path / "rows.jsonl"), "no rows")
    for path, found in (
        (tmp_path / "absent.jsonl", "No such file"),
        (tmp_path, "datasets has not saved"),
    ):
        with pytest.raises(DataError) as caught:
            RowReader(TOKENIZER, 8).read(path)
        assert caught.value.where == str(path)
        assert found in caught.value.found


def test_collate_pads_right_and_hides_prompts_and_padding_from_the_loss() -> None:
    rows = [TokenizedRow(array("i", [5, 0, 7, 8]), 2, 1), TokenizedRow(array("i", [9, 2]), 0, 2)]
    batch = collate(rows, pad_token_id=9)
    assert batch["input_ids"].tolist() == [[5, 0, 7, 8], [9, 2, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 8], [9, 2, -100, -100]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert pad_token_id(make_tokenizer(pad_token="<s>")) == 1
    assert pad_token_id(TOKENIZER) == 0
    assert pad_token_id(make_tokenizer(pad_token=None)) == EOS
    assert pad_token_id(make_tokenizer(pad_token=None, eos_token=None)) == 0


@settings(deadline=None)
@given(
    count=st.integers(1, 9),
    batch_size=st.integers(1, 12),
    seed=st.integers(),
    step=st.integers(0, 30),
)
def test_every_epoch_has_every_row_once_also_after_a_restart(
    count: int, batch_size: int, seed: int, step: int
) -> None:
    given: dict[str, Any] = {"batch_size": batch_size, "seed": seed}
    batches = list(
        itertools.islice(training_batches(numbered(count), **given), max(3 * count, step + 5))
    )
    assert {len(batch) for batch in batches} == {batch_size}
    visited = [line for batch in batches[: 3 * count] for line in lines(batch)]
    for start in range(0, len(visited), count):  # count * batch_size rows are whole epochs
        assert Counter(visited[start : start + count]) == Counter(range(1, count + 1))
    restarted = itertools.islice(training_batches(numbered(count), **given, first_step=step), 5)
    assert batches[step : step + 5] == list(restarted)
    # without walking there
    far = next(training_batches(numbered(count), **given, first_step=10**15))
    assert len(far) == batch_size


def test_order_follows_from_seed_and_epoch_alone_and_a_digest_from_rows_their_bounds_and_prompts(
    data_file: Path,
) -> None:
    def order(seed: int, count: int = 20) -> list[list[int]]:
        return [
            lines(batch)
            for batch in itertools.islice(
                training_batches(numbered(count), batch_size=count, seed=seed), 2
            )
        ]

    assert len({tuple(epoch) for seed in (0, 1, -1) for epoch in order(seed)}) == 6
    random.seed(1)
    before = (random.getstate(), torch.get_rng_state())
    assert order(17, 6) == [[1, 5, 6, 2, 3, 4], [3, 1, 2, 6, 5, 4]]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert [lines(batch) for batch in file_batches(numbered(5), 2)] == [[1, 2], [3, 4], [5]]
    with pytest.raises(OptionError, match="batch_size"):
        file_batches(numbered(3), 0)
    with pytest.raises(OptionError, match="batch_size"):
        training_batches(numbered(3), seed=0, batch_size=0)
    with pytest.raises(OptionError, match="first_step"):
        training_batches(numbered(3), seed=0, batch_size=1, first_step=-1)
    with pytest.raises(OptionError, match="sequence_length"):
        read(data_file, {"text": "The sky"}, length=1)

    def digest(*rows: tuple[list[int], int]) -> str:
        return Rows(
            tuple(TokenizedRow(array("i", ids), prompt, 1) for ids, prompt in rows)
        ).digest()

    first = digest(([1, 2], 0), ([3, 4], 0))
    bounds, prompts = digest(([1, 2, 3], 0), ([4], 0)), digest(([1, 2], 1), ([3, 4], 0))
    assert (
        len(
            {
                first,
                bounds,
                prompts,
                digest(([3, 4], 0), ([1, 2], 0)),
                digest(([1, 2], 0), ([3, 5], 0)),
            }
        )
        == 5
    )
    assert first == digest(([1, 2], 0), ([3, 4], 0))


# As models of the hub have them, in all that they use of the language: the first is Llama 3's, the
# second Qwen's with tools and namespaces, the third Mistral's with its checks, the fourth of a
# model that is told the date.
# fields of messages that are null: transformers 5.17 prints them
LEAVES_NULLS_OUT = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
REAL_TEMPLATES = [
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if "
    "loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if "
    "add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n{%- else %}\n    {%- if "
    "messages[0].role != 'system' %}\n"
    "        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}\n    {%- endif %}\n{%- "
    "endif %}\n"
    "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n"
    "{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - "
    "loop.index0 %}\n"
    "    {%- if ns.multi_step_tool and message.role == 'user' and not "
    "message.content.startswith('<tool_response>') %}\n"
    "        {%- set ns.multi_step_tool = false %}\n        {%- set ns.last_query_index = index "
    "%}\n    {%- endif %}\n"
    "{%- endfor %}\n{%- for message in messages %}\n    {{- '<|im_start|>' + message.role }}\n"
    "    {{- '\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' "
    "}}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}",
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{% generation %}{{ "
    "message['content'] + eos_token }}"
    "{% endgeneration %}{% endif %}{% endfor %}",
    "{%- if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}\n  {% for m in messages "
    "%}\n"
    "  {{ m | tojson }}\n{% if m.role == 'none' %}{% break %}{% endif %}\n  {% endfor %}\nü{{ "
    "eos_token }}",
]


@pytest.mark.parametrize("template", REAL_TEMPLATES)
def test_a_good_template_gives_the_text_that_the_tokenizer_gives(template: str) -> None:
    tokenizer = make_tokenizer(template=template)
    extra = {"name": "é\u2028", "thinking": "why", "nothing": None, "tool_calls": [{"a": 1.5}]}
    conversations: list[list[dict[str, Any]]] = [[ASK], [ASK, ANSWER], [ASK, {**ANSWER, **extra}]]
    for messages in conversations:
        for reply_follows in (False, True):
            # which transformers leaves out since 5.23
            named = [
                {key: value for key, value in m.items() if value is not None} for m in messages
            ]
            expected = tokenizer.apply_chat_template(
                messages if LEAVES_NULLS_OUT else named,
                tokenize=False,
                add_generation_prompt=reply_follows,
            )
            assert render_chat(messages, tokenizer, reply_follows=reply_follows) == expected


LOOP = "{% for a in range(99999) %}" * 4 + "{{ a if a < 0 }}" + "{% endfor %}" * 4
HOSTILE_TEMPLATES = {
    "loops in loops": (LOOP, "longer"),
    "a long string": ("{{ 'x' * 10**10 }}", "more memory"),
    "a long list": ("{{ ([0] * 10**10) | length }}", "more memory"),
    "a wide string": ("{{ 'x' | center(10**10) }}", "more memory"),
    "doubling": (
        "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% "
        "endfor %}",
        "more memory",
    ),
    "a large number": ("{{ 10 ** (10 ** 10) }}", "longer|more memory"),
    "a long text": ("{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}", "characters"),
    "parentheses": ("{{ " + "(" * 100_000 + " }}", "refuses"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses"),
    "no template": ("{% for %}", "refuses"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(("template", "match"), HOSTILE_TEMPLATES.values(), ids=HOSTILE_TEMPLATES)
def test_a_hostile_template_ends_in_bounded_time_and_memory(
    template: str, match: str, data_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zo2adapters.tasks.tokenizer.SECONDS", 1.0)
    data_file.write_text(json.dumps({"messages": [ASK, ANSWER]}))
    with pytest.raises(DataError, match=match) as info:
        RowReader(make_tokenizer(template=template), 64).read(data_file)
    assert "\n" not in str(info.value)
    assert len(str(info.value)) < 1000


# Data files of every kind, columns and templates, lengths, and rows that are taken from the
# training file


datasets: Any = importlib.import_module("datasets")  # these packages have no types
pa: Any = importlib.import_module("pyarrow")
pq: Any = importlib.import_module("pyarrow.parquet")

ROWS = [{"text": "The sky", "kind": "good", "n": 1}, {"text": 'a "b", c\nd', "kind": "bad", "n": 2}]


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_json(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(rows, indent=1))
    return path


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def save_dataset(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(list(rows)).save_to_disk(path)
    return path


def save_splits(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    both = {
        "train": datasets.Dataset.from_list(list(rows)),
        "test": datasets.Dataset.from_list(list(rows[:1])),
    }
    datasets.DatasetDict(both).save_to_disk(path)
    return Path(f"{path}:train")


def compressed(
    write: Callable[[Path, Sequence[dict[str, Any]]], Path],
) -> Callable[[Path, Sequence[dict[str, Any]]], Path]:
    """A writer of files that gzip has compressed, without the time of their writing."""

    def write_compressed(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
        path.write_bytes(gzip.compress(write(path, rows).read_bytes(), mtime=0))
        return path

    return write_compressed


KINDS: dict[str, Callable[[Path, Sequence[dict[str, Any]]], Path]] = {
    "rows.jsonl": write_rows,
    "rows.json": write_json,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "rows.jsonl.gz": compressed(write_rows),
    "rows.csv.gz": compressed(write_csv),
    "rows.json.gz": compressed(write_json),
    "saved": save_dataset,
    "splits": save_splits,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_has_the_same_rows_digests_and_errors(name: str, tmp_path: Path) -> None:
    for folder in ("again", "other"):
        (tmp_path / folder).mkdir()
    path = KINDS[name](tmp_path / name, ROWS)
    expected = [{**row, "n": str(row["n"])} for row in ROWS] if "csv" in name else ROWS
    assert list(parsed_rows(path)) == list(enumerate(expected, 1))
    template = RowOptions(prompt_template="{n}. {text}\\nKind:", completion_column="kind")
    dataset = RowReader(TOKENIZER, 99, template).read(path)
    assert [text_of(row) for row in dataset] == [
        "1. The sky\nKind: good</s>",
        '2. a "b", c\nd\nKind: bad</s>',
    ]
    again, other = (
        KINDS[name](tmp_path / "again" / name, ROWS),
        KINDS[name](tmp_path / "other" / name, ROWS[:1]),
    )
    assert (
        data_sha256(path)
        == data_sha256(again if name.startswith("rows") else path)
        != data_sha256(other)
    )
    with pytest.raises(DataError) as caught:
        RowReader(TOKENIZER, 99, RowOptions(text_column="txt")).read(path)
    assert caught.value.where == f"{path}, {'line' if 'jsonl' in name else 'row'} 1"
    assert "'txt'" in caught.value.found
    assert "--text-column" in caught.value.expected
    assert "'text'" in caught.value.remedy


NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 2, [None, pa.py_buffer(struct.pack("3i", 0, 1, 2)), pa.py_buffer(b"a\xff")]
)
NOON = datetime(2020, 1, 2, 12, 30)
# a column of Parquet, and its values as the cells of rows
ARROW: dict[str, tuple[Any, list[Any]]] = {
    "bytes": (pa.array([b"yes", b"\xc3\xa9"]), ["yes", "é"]),
    "bytes of a fixed size": (pa.array([b"ab", b"cd"], pa.binary(2)), ["ab", "cd"]),
    "categories": (pa.array([b"a", b"b"]).dictionary_encode(), ["a", "b"]),
    "nested bytes": (pa.array([{"a": [b"x", None]}] * 2), [{"a": ["x", None]}] * 2),
    "no UTF-8": (pa.array([b"\xff", b"a"]), ["1 bytes that are not text in UTF-8", "a"]),
    "a text that is no UTF-8": (NOT_UTF8, ["a", "text that is not UTF-8"]),
    "days": (pa.array([NOON.date()] * 2), ["2020-01-02"] * 2),
    "times": (pa.array([NOON] * 2, pa.timestamp("us", "UTC")), ["2020-01-02 12:30:00+00:00"] * 2),
    "durations": (pa.array([timedelta(1)] * 2), ["a value of type timedelta"] * 2),
    "decimals": (pa.array([Decimal("1E-8"), Decimal("1.5")]), ["0.00000001", "1.50000000"]),
    "floats of 32 bits": (pa.array([0.1, math.nan], pa.float32()), [0.1, None]),
    "floats of 16 bits": (pa.array([0.1, None], pa.float16()), [0.1, None]),
    "floats": (pa.array([0.1, 1 / 3]), [0.1, 1 / 3]),
    "large numbers": (pa.array([1 << 63, 0], pa.uint64()), [1 << 63, 0]),
    "maps": (pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64())), [{"k": 1}, []]),
    "identifiers": (pa.array([bytes(16)] * 2, pa.uuid()), [str(UUID(int=0))] * 2),
}


@pytest.mark.parametrize(("column", "values"), ARROW.values(), ids=ARROW)
def test_what_json_lacks_is_decoded_or_refused_where_it_is_read(
    column: Any, values: list[Any], tmp_path: Path
) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], "x": column}), tmp_path / "rows.parquet")
    found = [row.get("x") for _, row in parsed_rows(tmp_path / "rows.parquet")]
    assert [str(value) if isinstance(value, Unreadable) else value for value in found] == values
    assert json.loads(json.dumps(found)) == found
    refused = [(n, value) for n, value in enumerate(found, 1) if isinstance(value, Unreadable)]
    for number, value in refused[:1]:
        with pytest.raises(DataError, match=f"row {number}: found {value}"):
            RowReader(TOKENIZER, 64, RowOptions(text_column="x")).read(tmp_path / "rows.parquet")
    assert len(RowReader(TOKENIZER, 64).read(tmp_path / "rows.parquet")) == 2, "nothing reads it"


def test_a_decimal_number_is_a_label_and_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    labels = pa.array([Decimal("0.5"), Decimal("1.5")])
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a", "b"], "label": labels}), path)
    config = small_config("llama", num_labels=1)
    assert [row.label for row in RowReader(TOKENIZER, 9, labelled_for=config).read(path)] == [
        0.5,
        1.5,
    ]
    pq.write_table(pa.table([pa.array(["a"])] * 2, names=["text", "text"]), path)
    with pytest.raises(DataError, match="found the columns 'text', 'text'"):
        list(parsed_rows(path))


def test_what_rows_refer_to_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """``datasets`` would open the path or URL of an image without bytes."""
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        image = {"bytes": None, "path": f"http://127.0.0.1:{server.getsockname()[1]}/a.png"}
        held = datasets.Dataset.from_dict({"text": ["a"], "image": [image]}, features=features)
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: held)
        with within(5):
            rows = list(parsed_rows(Path("user/pictures:train")))
        assert rows == [(1, {"text": "a", "image": image})]
        with pytest.raises(BlockingIOError):  # nobody has connected
            server.accept()


@pytest.mark.parametrize("name", KINDS)
def test_an_open_file_is_read_as_often_as_needed(name: str, tmp_path: Path) -> None:
    path = KINDS[name](tmp_path / name, ROWS)
    with DataFile(path) as file:
        rows = list(file.rows())
        next(iter(file.rows()))  # not to the end, as labels are looked for
        digest = file.sha256()
        assert (list(file.rows()), file.sha256()) == (rows, digest)
    assert (list(parsed_rows(path)), data_sha256(path)) == (rows, digest)


@pytest.mark.parametrize(
    "labels", [[["4", "four"]] * 4, ["", "four", "4", "four"]], ids=["lists", "none at first"]
)
def test_rows_of_rewards_keep_their_columns_and_their_order(
    labels: list[Any], tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"q{n}", **({"label": label} if label else {}), "tests": f"t{n}"}
        for n, label in enumerate(labels)
    ]
    read = RowReader(TOKENIZER, 99, keeps_sources=True).read(
        write_rows(tmp_path / "rows.jsonl", rows)
    )
    kept = [
        (row.line, json.loads(row.source)["tests"])
        for row in read.rows
        if isinstance(row, TokenizedRow)
    ]
    assert kept == [(n + 1, f"t{n}") for n in range(4)]


def test_a_run_trains_on_each_kind_alike_and_its_provenance_has_the_digest(tmp_path: Path) -> None:
    rows = [{"prompt": "the cat", "completion": f" {word}"} for word in WORDS[5:11]]
    shared = small_run(tmp_path)
    losses = []
    for name, write in KINDS.items():
        (tmp_path / "data").mkdir(exist_ok=True)
        path = write(tmp_path / "data" / name, rows)
        options = replace(shared, data=path, output=tmp_path / f"run-{name}")
        finish(options)
        with contextlib.closing(Journal(options.output / "journal.jsonl")) as journal:
            assert journal.header is not None
            assert journal.header["provenance"]["data sha256"] == data_sha256(path)
            losses.append([update.losses for update in journal.updates])
        with open_run(
            RunStart(RunDirectory(options.output).options(), resumes=True),
            display=QUIET,
        ) as trainer:
            assert trainer.engine.version == 3
    assert len(losses[0]) == 3
    assert losses == losses[:1] * len(KINDS)


MALFORMED_FILES: dict[str, tuple[str, str, str]] = {
    "a cell too many": ("rows.csv", "a,b\n1,2,3\n", "row 1"),
    "a column twice": ("rows.csv", "a,a\n1,2\n", "'a', 'a'"),
    "an open quote": ("rows.csv", 'a,b\n1,2\n"3,4\n', "row 2"),
    "no rows of CSV": ("rows.csv", "a,b\n", "no rows"),
    "an empty file": ("rows.csv", "", "found an empty file"),
    "an empty list": ("rows.json", "[]", "no rows"),
    "a list of texts": ("rows.json", '[{"text": "a b"}, "c"]', "row 2"),
    "a list that is cut": ("rows.json", '[{"text": "a b"}', "not JSON"),
    "an object over lines": ("rows.json", '{\n"text": "a b"}', "line 1"),
    "no Parquet": ("rows.parquet", "text", "a Parquet file"),
    "tabs named as such": (
        "rows.tsv",
        "a\tb\n1\t2\n",
        "ends with .csv, .json, .jsonl, .parquet or .txt",
    ),
    "plain text": ("rows.log", "some text\n", "the ending .log"),
    "an empty text": ("rows.txt", " \n", "no rows"),
    "no gzip": ("rows.jsonl.gz", '{"text": "a"}', "damaged data"),
    "a spreadsheet": ("rows.xlsx", "PK\x03\x04", "save it as CSV"),
    "semicolons": ("rows.csv", "a;b\n1;2\n", "commas instead of semicolons"),
    "tabs": ("rows.csv", "a\tb\n1\t2\n", "commas instead of tabs"),
}


@pytest.mark.parametrize(
    ("file", "content", "named"), MALFORMED_FILES.values(), ids=MALFORMED_FILES
)
def test_a_malformed_file_is_refused(file: str, content: str, named: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError) as caught:
        list(parsed_rows(tmp_path / file))
    assert named in str(caught.value)


def test_a_compressed_file_that_is_cut_is_refused(tmp_path: Path) -> None:
    path = KINDS["rows.jsonl.gz"](tmp_path / "rows.jsonl.gz", ROWS)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="damaged data"):
        list(parsed_rows(path))


LONG = "The sky is blue. What colour is the sky? It is blue."


@pytest.mark.parametrize("choice", ["auto", "split"])
def test_a_text_becomes_rows_that_together_have_all_its_tokens(choice: Any, tmp_path: Path) -> None:
    whole = TOKENIZER(LONG + TOKENIZER.eos_token)["input_ids"]
    (tmp_path / "book.txt").write_text(LONG)
    rows = RowReader(TOKENIZER, 6, RowOptions(too_long=choice)).read(tmp_path / "book.txt")
    assert [token for row in rows for token in row.input_ids] == whole
    assert all(row.prompt_length == 0 for row in rows)
    assert (rows.longest, rows.divided, rows.truncated) == (6, 1, 0)
    assert len(rows) == math.ceil(len(whole) / 6) > 1
    assert rows.split(0.5)[1].rows, "a part of one text can be held out"
    [cut] = RowReader(TOKENIZER, 6, RowOptions(too_long="cut")).read(tmp_path / "book.txt")
    assert list(cut.input_ids) == whole[:6]


def test_a_last_token_by_itself_is_left_out(tmp_path: Path) -> None:
    whole = TOKENIZER(LONG + TOKENIZER.eos_token)["input_ids"]
    (tmp_path / "book.txt").write_text(LONG)
    [first] = RowReader(TOKENIZER, len(whole) - 1).read(tmp_path / "book.txt")
    assert list(first.input_ids) == whole[:-1]


def test_texts_of_other_files_are_split_where_this_is_asked_for(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": LONG}, {"text": "It is blue."}])
    assert len(RowReader(TOKENIZER, 6).read(path)) == 2
    assert len(RowReader(TOKENIZER, 6, RowOptions(too_long="split")).read(path)) > 2
    write_rows(path, [{"prompt": "The", "completion": LONG}])
    with pytest.raises(DataError, match="--too-long split"):
        RowReader(TOKENIZER, 6, RowOptions(too_long="split")).read(path)


def test_a_directory_of_texts_is_read_by_name(tmp_path: Path) -> None:
    texts = {"b.txt": "It is blue.", "a.txt": "The sky", "more/c.txt": "What"}
    (tmp_path / "more").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "notes.md").write_text("no row")
    names = ["a.txt", "b.txt", "more/c.txt"]
    assert list(parsed_rows(tmp_path)) == [
        (number, {"text": texts[name]}) for number, name in enumerate(names, 1)
    ]
    assert saved_path(tmp_path) == str(tmp_path)
    digest = data_sha256(tmp_path)
    (tmp_path / "more" / "c.txt").rename(tmp_path / "more" / "d.txt")
    assert data_sha256(tmp_path) != digest
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="no UTF-8") as caught:
        list(parsed_rows(tmp_path))
    assert caught.value.where == str(tmp_path / "b.txt")
    with pytest.raises(DataError) as caught:
        RowReader(TOKENIZER, 9, RowOptions(text_column="txt")).read(tmp_path)
    assert caught.value.where == str(tmp_path / "a.txt")


def test_a_missing_split_lists_the_others_and_a_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_splits(tmp_path / "splits", ROWS)
    for wrong in (path.with_name("splits"), path.with_name("splits:dev")):
        with pytest.raises(DataError, match="train, test"):
            list(parsed_rows(wrong))
    saved = save_dataset(tmp_path / "saved", ROWS)
    with pytest.raises(DataError, match="without the split"):
        list(parsed_rows(saved.with_name("saved:train")))
    path = write_parquet(tmp_path / "rows.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingPackageError, match="pip install 'pyarrow'"):
        list(parsed_rows(path))


def test_the_hub_is_asked_for_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    held = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)

    def load(name: str, configuration: str | None, split: str) -> Any:
        asked.append((name, configuration, split))
        return held

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows = [{"text": "a", "label": "good"}, {"text": "b", "label": "bad"}]
    assert [row for _, row in parsed_rows(Path("user/tweets:train"))] == rows
    assert [row for _, row in parsed_rows(Path("user/tweets:small:train[:10%]"))] == rows
    assert asked == [("user/tweets", None, "train"), ("user/tweets", "small", "train[:10%]")]
    assert saved_path(Path("user/tweets:train")) == "user/tweets:train"
    assert data_sha256(Path("user/tweets:train")) == data_sha256(Path("user/other:train"))

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError, match="ConnectionError: no route"):
        list(parsed_rows(Path("tweets:train")))


GREAT = {"prompt_template": "{text} It was", "labels": ("terrible", "great")}
# rows, options, and their labels
LABELLED: dict[str, tuple[Sequence[dict[str, Any]], dict[str, Any], list[str]]] = {
    "words": (
        ROWS,
        {"prompt_template": "{text}\\nKind:", "label_column": "kind"},
        [" bad", " good"],
    ),
    "numbers": (
        [{"text": "a", "label": 1}, {"text": "b", "label": 0}],
        GREAT,
        [" terrible", " great"],
    ),
    "their order": (
        [{"text": "a", "label": 10}, {"text": "b", "label": 9}],
        {"prompt_template": "{text}:"},
        [" 9", " 10"],
    ),
    "completions": (
        [{"prompt": "a", "completion": " good"}, {"prompt": "b", "completion": " bad"}],
        {"label_column": "completion"},
        [" bad", " good"],
    ),
}


@pytest.mark.parametrize(("rows", "options", "labels"), LABELLED.values(), ids=LABELLED)
def test_a_prompt_with_a_label_is_compared_with_all_labels(
    rows: Sequence[dict[str, Any]], options: dict[str, Any], labels: list[str], tmp_path: Path
) -> None:
    read = RowReader(TOKENIZER, 99, RowOptions(**options)).read(
        write_rows(tmp_path / "rows.jsonl", rows)
    )
    assert read.format is RowFormat.CANDIDATES
    text: Any = lambda ids: TOKENIZER.decode(list(ids))  # noqa: E731
    assert [([text(candidate) for candidate in row.candidates], row.answer) for row in read] == [
        (labels, 1),
        (labels, 0),
    ]
    if "completion" in rows[0]:
        assert [text(row.prompt) for row in read] == ["a", "b"]


CHOICE: dict[str, Any] = {"prompt": "the cat", "candidates": [" yes", " no"], "answer": " no"}
# rows, options, where, and what is told
REFUSED: list[tuple[list[dict[str, Any]], dict[str, Any], str, str]] = [
    *(
        (
            [{"prompt": "a", column: label} for label in ("good", "bad", " ")],
            {"label_column": given},
            "line 3",
            f"found \" \" in the column '{column}'.*remove the row or fill it",
        )
        for column, given in (("kind", "kind"), ("label", None))
    ),
    (
        [{"prompt": "a", "label": label} for label in (1.0, 0.0, math.nan)],
        {},
        "line 3",
        "'prompt', and NaN in the column 'label'; expected .*candidates",
    ),
    (
        [{"prompt": "a", "label": "x"}, {"prompt": "a", "completion": " b"}],
        {},
        "line 1",
        "found the keys 'prompt'",
    ),
    (
        [{"prompt": "a", "completion": " b"}, {"prompt": "a", "label": "x"}],
        {},
        "line 2",
        "found the keys 'prompt'",
    ),
    ([{"kind": "good", "review": "a"}], {"label_column": "kind"}, "", r"'\{review\} Label:'"),
    (
        ROWS[:1],
        {"prompt_template": "{text}", "label_column": "kind"},
        "",
        "the label 'good' in every row",
    ),
    (
        [{"text": ["a"], "completion": "b"}],
        {"prompt_template": "{text}"},
        "line 1",
        "found .* in the column 'text'",
    ),
    ([{"messages": [ASK]}], {}, "line 1", "'assistant'.*--train-on all"),
    ([{**CHOICE, "answer": True}], {}, "line 1", "found true in the column"),
    ([{"prompt": "the", "completion": True}], {}, "line 1", "found true in the column"),
    *(
        (
            [
                CHOICE,
                {key: value for key, value in {**CHOICE, **changes}.items() if value is not ...},
            ],
            {},
            "line 2",
            "found ",
        )
        for changes in (
            {"candidates": ...},
            {"candidates": [" yes"], "answer": 0},
            {"candidates": [" yes", ""], "answer": 0},
            {"prompt": ...},
            {"prompt": ""},
            {"answer": ...},
            {"answer": " maybe"},
            {"answer": 2},
            {"answer": -1},
        )
    ),
]


@pytest.mark.parametrize(("rows", "options", "where", "told"), REFUSED, ids=str)
def test_a_row_that_is_none_of_its_format_is_refused_by_its_line(
    rows: list[dict[str, Any]], options: dict[str, Any], where: str, told: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=told) as caught:
        RowReader(TOKENIZER, 99, RowOptions(**options)).read(path)
    assert str(path) in caught.value.where
    assert where in caught.value.where


NAMED = RowOptions(prompt_column="q", completion_column="a")
TWO_CLASSES = small_config("llama", num_labels=2)
CHAT = [ASK, {"role": "assistant", "content": None}]
# a good row, what empties it, how it is read, and what is told
EMPTY: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "a text": ({"text": "a"}, {"text": ""}, {}, "\"\" in the column 'text'"),
    "no text": (
        {"text": "a"},
        {"text": None},
        {},
        "the keys (none), and null in the column 'text'",
    ),
    "a completion": ({"q": "a", "a": "b"}, {"a": ""}, {"options": NAMED}, "\"\" in the column 'a'"),
    "no completion": (
        {"q": "a", "a": "b"},
        {"a": None},
        {"options": NAMED},
        "null in the column 'a'",
    ),
    "no completion by its key": (
        BLUE,
        {"completion": None},
        {},
        "the keys 'prompt', and null in the column 'completion'",
    ),
    "a cell of a template": (
        {"q": "a", "completion": "b"},
        {"q": math.nan},
        {"options": RowOptions(prompt_template="{q}:")},
        "NaN in the column 'q'",
    ),
    "an answer of messages": (
        TALK,
        {"messages": CHAT},
        {},
        "null as 'content' of message 2 of the column 'messages'",
    ),
    "messages of another column": (
        {"talk": [ASK, ANSWER]},
        {"talk": []},
        {"options": RowOptions(messages_column="talk")},
        "[] in the column 'talk'",
    ),
    "conversations": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": []},
        {},
        "[] in the column 'conversations'",
    ),
    "a completion of messages": (TURN, {"completion": []}, {}, "[] in the column 'completion'"),
    "a chosen text": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": ""},
        {},
        "\"\" in the column 'chosen'",
    ),
    "no rejected text": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"rejected": None},
        {},
        "the keys 'prompt', 'chosen', and null in the column 'rejected'",
    ),
    "a candidate": (
        CHOICE,
        {"candidates": [" yes", ""]},
        {},
        "\"\" as text 2 of the column 'candidates'",
    ),
    "candidates": (CHOICE, {"candidates": []}, {}, "[] in the column 'candidates'"),
    "answers": (
        {"prompt": "a", "answers": ["b"]},
        {"answers": []},
        {"new_tokens": 2},
        "[] in the column 'answers'",
    ),
    "a text with a class": (
        {"text": "a", "label": 1},
        {"text": ""},
        {"labelled_for": TWO_CLASSES},
        "\"\" in the column 'text'",
    ),
    "a class": (
        {"text": "a", "mood": 1},
        {"mood": None},
        {"labelled_for": TWO_CLASSES, "options": RowOptions(label_column="mood")},
        "null in the column 'mood'",
    ),
}


@pytest.mark.parametrize(("good", "changes", "reading", "found"), EMPTY.values(), ids=EMPTY)
def test_an_empty_value_is_refused_with_its_row_and_column(
    good: dict[str, Any],
    changes: dict[str, Any],
    reading: dict[str, Any],
    found: str,
    data_file: Path,
) -> None:
    write_rows(data_file, [good, {**good, **changes}])
    with pytest.raises(DataError) as caught:
        RowReader(TOKENIZER, 99, **reading).read(data_file)
    assert (caught.value.where, caught.value.found) == (f"{data_file}, line 2", found)


PREFERENCE = {"prompt": "a", "chosen": "b", "rejected": "c"}
EXACT = RewardOptions(reward=("exact-match", "length")).columns
OWN = RewardOptions(reward=("length", "f.py:g")).columns
# columns of a row, those of which nothing is read, and how it is read
UNREAD: dict[str, tuple[dict[str, Any], list[str], dict[str, Any]]] = {
    "texts": ({"id": 1, "text": "a", "score": 0.5}, ["score", "id"], {}),
    "completions": ({"prompt": "a", "completion": "b", "id": 1, "label": "x"}, ["label", "id"], {}),
    "named columns": ({"q": "a", "a": "b", "prompt": "c"}, ["prompt"], {"options": NAMED}),
    "a template": (
        {"q": "a", "r": "b", "completion": "c", "s": "d"},
        ["s"],
        {"options": RowOptions(prompt_template="{q} {r}")},
    ),
    "labels": ({"prompt": "a", "label": "x", "source": "b"}, ["source"], {}),
    "classes": (
        {"text": "a", "text_pair": "b", "label": 1, "prompt": "c"},
        ["prompt"],
        {"labelled_for": TWO_CLASSES},
    ),
    "messages": ({**TALK, "is_good": "yes", "id": 1}, ["is_good", "id"], {}),
    "conversations": (
        {"conversations": [{"from": "gpt", "value": "b"}], "system": "c"},
        ["system"],
        {},
    ),
    "preferences": ({**PREFERENCE, "score_chosen": 2, "id": 3}, ["score_chosen", "id"], {}),
    "candidates": ({**CHOICE, "id": 3}, ["id"], {}),
    "answers": ({"prompt": "a", "answers": ["b"], "title": "c"}, ["title"], {"new_tokens": 2}),
    "rewards": (
        {"prompt": "a", "answer": "b", "pattern": "c"},
        ["pattern"],
        {"keeps_sources": True, "rewards_read": EXACT},
    ),
    "rewards of one's own": (
        {"prompt": "a", "tests": "b"},
        [],
        {"keeps_sources": True, "rewards_read": OWN},
    ),
    "empty columns": ({"text": "a", "url": None}, [], {}),
}


@pytest.mark.parametrize(("row", "unread", "reading"), UNREAD.values(), ids=UNREAD)
def test_columns_that_nothing_reads_are_named_those_that_may_judge_first(
    row: dict[str, Any], unread: list[str], reading: dict[str, Any], data_file: Path
) -> None:
    rows = [row, {**row, "label": "y"} if row.get("label") == "x" else row]
    use = RowReader(TOKENIZER, 99, **reading).read(write_rows(data_file, rows)).use
    assert use.unread == unread
    assert {*use.read} | {*use.unread} >= {key for key, value in row.items() if value is not None}
    first, *others = use.notices("trained on") or [""]
    assert first.endswith(f"; not used: {', '.join(unread)}" if unread else "")
    judging = [name for name in unread if {"score", "label", "good"} & {*name.split("_")}]
    assert [line.partition(" ")[0] for line in others] == judging


def test_a_column_of_true_and_false_is_told_with_its_numbers_and_rows_for_kto_are_refused(
    tmp_path: Path,
) -> None:
    def written(name: str, row: dict[str, Any], column: str, *values: bool) -> Path:
        return KINDS[name](tmp_path / name, [{**row, column: value} for value in values])

    for name in ("rows.jsonl", "rows.csv", "rows.parquet"):
        path = written(name, {"text": "a"}, "kept", True, False, True)
        [_, told] = RowReader(TOKENIZER, 99).read(path).use.notices("trained on")
        assert told.startswith("kept (true in 2 rows, false in 1 row) may say which rows are good")
        path = written(name, BLUE, "label", True, True)
        assert RowReader(TOKENIZER, 99).read(path).use.unread == ["label"], "all are good"
        path = written(name, BLUE, "label", True, False)
        told = "found the column 'label', true in 1 row, false in 1 row, beside completions"
        with pytest.raises(DataError, match=f"{name}: {told}.*--completion-column completion"):
            RowReader(TOKENIZER, 99).read(path)
        every = RowOptions(completion_column="completion")
        assert len(RowReader(TOKENIZER, 99, every).read(path)) == 2
        assert len(RowReader(TOKENIZER, 99, keeps_sources=True, rewards_read=EXACT).read(path)) == 2


def test_labels_of_the_evaluation_are_those_of_the_training_file(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    options = RowOptions(prompt_template="{text}", label_column="kind")
    evaluation = write_rows(tmp_path / "evaluation.jsonl", ROWS[:1])
    _, read = RowReader(TOKENIZER, 99, options).read_files(data, evaluation, None)
    assert read is not None
    assert read.format is RowFormat.CANDIDATES
    assert [len(row.candidates) for row in read] == [2]
    write_rows(evaluation, [{"text": "a", "kind": "goof"}])
    with pytest.raises(DataError) as caught:
        RowReader(TOKENIZER, 99, options).read_files(data, evaluation, None)
    assert caught.value.where == f"{evaluation}, line 1"
    assert "'good'" in caught.value.remedy


def test_messages_learn_the_answers_and_nothing_between_them(tmp_path: Path) -> None:
    talk = [
        ASK,
        ANSWER,
        {"role": "user", "content": "The sky?"},
        {"role": "assistant", "content": "The sky is"},
        ASK,
    ]
    path = write_rows(tmp_path / "rows.jsonl", [{"talk": talk}])
    (row,) = RowReader(TOKENIZER, 99, RowOptions(messages_column="talk")).read(path)
    labels = collate([row], pad_token_id=0)["labels"][0]
    learned = TOKENIZER.decode([token for token in labels.tolist() if token >= 0])
    assert learned == "It is blue.<|end|>The sky is<|end|>"
    assert row.sequences == [(len(row.input_ids), int((labels[1:] >= 0).sum()))]
    options = RowOptions(messages_column="talk", train_on="all")
    (everything,) = RowReader(TOKENIZER, 99, options).read(path)
    assert (everything.prompt_length, everything.later_prompts) == (0, ())
    assert Rows((row,)).digest() != Rows((replace(row, later_prompts=()),)).digest()


def test_templates_that_rewrite_earlier_answers_or_have_no_plain_columns_are_refused(
    tmp_path: Path,
) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else m.content | upper }}"
        "{% endfor %}"
    )
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [ASK, ANSWER, ASK, ANSWER]}])
    with pytest.raises(DataError, match="renders an answer otherwise"):
        RowReader(make_tokenizer(template=template), 99).read(path)
    for template in (
        "no column",
        "{}",
        "{text",
        "{text!r}",
        "{text:>9}",
        "{text.upper}",
        "{text[0]}",
    ):
        with pytest.raises(OptionError) as caught:
            RowOptions(prompt_template=template).require_valid()
        assert caught.value.where == "prompt_template"


# drops the thoughts of all answers but the last one, as templates of reasoning models do
FORGETFUL_TEMPLATE = TEMPLATE.replace(
    "{{ message.content }}",
    "{{ message.content if loop.last else message.content.split('<|think|>')[-1] }}",
)


def test_a_conversation_whose_thoughts_are_dropped_is_learned_turn_by_turn(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(template=FORGETFUL_TEMPLATE)
    talk = [ASK, {**ANSWER, "content": "What?<|think|>It is"}]
    talk += [ASK, {**ANSWER, "content": "The sky<|think|>It is blue."}]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": talk}, {"messages": talk[:2]}] * 2)
    rows = RowReader(tokenizer, 99).read(path)
    assert (len(rows), rows.by_turn) == (6, 2)
    first, second, alone = (
        (text_of(row, 0, tokenizer)[:-1], text_of(row, row.prompt_length, tokenizer))
        for row in rows[:3]
    )
    asked = f"<|user|>{ASK['content']}<|end|><|assistant|>"
    assert (
        first == alone == (f"{asked}What?<|think|>It is<|end|>"[:-1], "What?<|think|>It is<|end|>")
    )
    learned = "The sky<|think|>It is blue.<|end|>"
    assert second == (f"{asked}It is<|end|>{asked}{learned}"[:-1], learned)
    [notice] = row_notices(rows, "trained on")
    assert notice.endswith("since the chat template changes earlier answers: 2 rows")
    kept, held_out = rows.split(0.25)
    assert not {row.line for row in kept} & {row.line for row in held_out}


# prompts that are not named, as published data sets of preferences have them
UNNAMED_PROMPTS: dict[str, dict[str, Any]] = {
    "texts": {"chosen": "Q: The sky? A: blue", "rejected": "Q: The sky? A: What"},
    "texts that part within a word": {"chosen": "The sky is blue", "rejected": "The sky is not"},
    "conversations": {
        "chosen": [ASK, ANSWER],
        "rejected": [ASK, {**ANSWER, "content": "The sky"}],
    },
    "longer conversations": {
        "chosen": [ASK, ANSWER, ASK, ANSWER],
        "rejected": [ASK, ANSWER, ASK, {**ANSWER, "content": "The sky"}],
    },
}


@pytest.mark.parametrize("row", UNNAMED_PROMPTS.values(), ids=UNNAMED_PROMPTS)
def test_a_prompt_that_is_not_named_is_the_one_that_trl_takes(row: dict[str, Any]) -> None:
    assert RowOptions().converted(row) == importlib.import_module("trl").extract_prompt(row)


def test_a_prompt_beside_conversations_is_their_last_common_message(tmp_path: Path) -> None:
    row = UNNAMED_PROMPTS["conversations"]
    plain = write_rows(tmp_path / "plain.jsonl", [row])
    named = write_rows(tmp_path / "named.jsonl", [{"prompt": ASK["content"], **row}])
    read = RowReader(TOKENIZER, 99).read
    assert read(plain).digest() == read(named).digest()
    assert read(named).use.unread == []
    write_rows(named, [{"prompt": "The sky", **row}])
    with pytest.raises(DataError, match='line 1: found "The sky" as the prompt'):
        read(named)


FORMATS: dict[RowFormat, dict[str, Any]] = {
    RowFormat.TEXT: {"text": "The sky"},
    RowFormat.LABELS: {"text": "The sky", "label": 1},
    RowFormat.CANDIDATES: {"prompt": "The", "candidates": [" sky", " is"], "answer": 0},
    RowFormat.PREFERENCES: {"prompt": "The", "chosen": " sky", "rejected": " is"},
    RowFormat.ANSWERS: {"prompt": "The", "answers": ["sky"]},
}
every_format = pytest.mark.parametrize("form", FORMATS)


def changed(form: RowFormat, text: str) -> dict[str, Any]:
    """The row of a format with another text in place of its first word."""
    row: dict[str, Any] = json.loads(json.dumps(FORMATS[form]).replace("The", text))
    return row


def reader(form: RowFormat, length: int, tokenizer: Any = TOKENIZER, **options: Any) -> RowReader:
    config = small_config("llama", num_labels=2) if form is RowFormat.LABELS else None
    return RowReader(
        tokenizer,
        length,
        labelled_for=config,
        new_tokens=2 if form is RowFormat.ANSWERS else None,
        **options,
    )


@every_format
def test_rows_that_are_too_long_are_cut_dropped_or_refused(form: RowFormat, tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl", [FORMATS[form], changed(form, "The sky is blue. The")]
    )
    can_be_cut = form in (RowFormat.TEXT, RowFormat.LABELS)
    for choice in ("auto", "cut", "drop", "refuse"):
        reading = reader(form, 4, options=RowOptions(too_long=choice))
        if choice == "drop" or (can_be_cut and choice != "refuse"):
            rows = reading.read(path)
            assert (rows.format, len(rows)) == (form, 1 if choice == "drop" else 2)
            assert (rows.truncated, rows.dropped) == ((0, 1) if choice == "drop" else (1, 0))
            assert rows.longest <= 4
        else:
            with pytest.raises(DataError, match=r"line 2.*--too-long") as caught:
                reading.read(path)
            assert ("cannot be cut" in str(caught.value)) == (not can_be_cut)
    write_rows(path, [changed(form, "The sky is blue. The")])
    with pytest.raises(DataError, match="1 row, all of more than 4 tokens"):
        reader(form, 4, options=RowOptions(too_long="drop")).read(path)


@every_format
def test_a_token_beyond_the_embedding_is_refused_and_digests_tell_rows_apart(
    form: RowFormat, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<new>"])
    size = len(tokenizer) - 1
    path = write_rows(tmp_path / "rows.jsonl", [FORMATS[form], changed(form, "<new>")])
    reader(form, 64, tokenizer, vocabulary=size + 1).read(path)
    with pytest.raises(
        DataError,
        match=rf"line 2: found the token '<new>' with the id {size}; expected ids below {size}",
    ):
        reader(form, 64, tokenizer, vocabulary=size).read(path)
    rows = [FORMATS[form], changed(form, "What")]
    files = [rows, rows[::-1], rows[:1], [rows[0], rows[0]]]
    digests = [reader(form, 64).read(write_rows(path, file)).digest() for file in [*files, rows]]
    assert len(set(digests)) == len(files)
    assert digests[-1] == digests[0]


def test_the_number_of_rows_left_out_is_printed_and_a_directory_without_a_tokenizer_told_as_such(
    tmp_path: Path,
) -> None:
    options = small_run(tmp_path)
    write_rows(
        options.data, [{"text": "the cat"}, {"text": "the cat sat on the mat"}, {"text": "the dog"}]
    )
    arguments = (
        "--model",
        options.model,
        "--data",
        options.data,
        "--too-long",
        "drop",
        "--sequence-length",
        3,
    )
    for command in (
        (
            "train",
            "--method",
            "zeroth-order",
            *arguments,
            "--output",
            tmp_path / "out",
            "--steps",
            1,
        ),
        ("evaluate", *arguments),
    ):
        assert "left out, since longer: 1 row\n" in run_here(*command).err
    for path in Path(options.model).glob("token*"):
        path.unlink()
    with pytest.raises(DataError, match=r"no usable tokenizer \(none of its files has one\)"):
        load_tokenizer(Path(options.model))


# Rows to evaluate on that are taken from the training file


def test_a_split_takes_rows_out_of_the_training_file_and_a_run_evaluates_on_them(
    tmp_path: Path,
) -> None:
    path = write_rows(tmp_path / "eight.jsonl", [{"text": f"the {word}"} for word in "abcdefgh"])
    rows = RowReader(TOKENIZER, 9).read(path)
    train, evaluation = rows.split(0.25)
    numbers = [[row.line for row in part] for part in (train, evaluation)]
    assert sorted(numbers[0] + numbers[1]) == list(range(1, 9))
    assert len(numbers[1]) == 2
    assert numbers == [sorted(part) for part in numbers]
    assert [part.digest() for part in rows.split(0.25)] == [train.digest(), evaluation.digest()]
    options = small_run(tmp_path, eval_split=0.25, evaluate_every=2)
    finish(options)
    whole = outcome(options.output)
    assert [row["step"] for row in whole["metrics"] if "evaluation_loss" in row] == [0, 2, 3]
    record = json.loads((options.output / "options.json").read_text())
    assert record["options"]["eval_split"] == 0.25
    assert {"data sha256", "evaluation sha256"} <= record["tokens"].keys()
    with open_run(RunStart(replace(options, steps=3), resumes=True), display=QUIET) as trainer:
        assert trainer.engine.version == 3
    with pytest.raises(DataError, match="evaluation sha256"):
        open_run(RunStart(replace(options, eval_split=0.5), resumes=True), display=QUIET)


def csv_rows(path: Path, text: str) -> Path:
    path.with_suffix(".csv").write_text(text)
    return path.with_suffix(".csv")


def test_cells_are_texts_where_a_format_has_texts(tmp_path: Path) -> None:
    numbers = csv_rows(tmp_path / "numbers", "question,answer\nwhat is 0 + 2?,2\n")
    options = RowOptions(prompt_column="question", completion_column="answer")
    assert options.converted(next(parsed_rows(numbers))[1]) == {
        "prompt": "what is 0 + 2?",
        "completion": "2",
    }
    lists = csv_rows(tmp_path / "lists", 'prompt,completion\nlist,"[""Oslo"", 1, {""a"": 2}]"\n')
    assert (
        RowOptions().converted(next(parsed_rows(lists))[1])["completion"] == '["Oslo", 1, {"a": 2}]'
    )
    messages = json.dumps([{"role": "user", "content": "hi"}]).replace('"', '""')
    named = csv_rows(tmp_path / "named", f'talk\n"{messages}"\n')
    converted = RowOptions(messages_column="talk").converted(next(parsed_rows(named))[1])
    assert converted == {"messages": [{"role": "user", "content": "hi"}]}
    candidates = csv_rows(
        tmp_path / "candidates",
        'prompt,candidates,answer\nthe,"[""1"", ""2""]",1\nthe,"[""a"", ""b""]",1\n',
    )
    rows = RowReader(TOKENIZER, 64).read(candidates)
    assert rows.format is RowFormat.CANDIDATES
    assert [row.answer for row in rows] == [0, 1]
    # an index is a column without a name
    path = csv_rows(tmp_path / "rows", ",prompt,completion\n0,name a fox,red\n")
    assert next(parsed_rows(path))[1] == {
        "Unnamed: 0": "0",
        "prompt": "name a fox",
        "completion": "red",
    }
    rows = RowReader(TOKENIZER, 64).read(path)
    assert (rows.format, bool(rows[0].prompt_length)) == (RowFormat.TEXT, True)


@pytest.mark.parametrize(
    ("cells", "labels"), [("0 1", ("0", "1")), ("0.0 1.0", ("0", "1")), ("4.5 -1.0", ("-1", "4.5"))]
)
def test_numbers_as_labels_are_labels_or_their_indices(
    tmp_path: Path, cells: str, labels: tuple[str, ...]
) -> None:
    first, second = cells.split()
    path = csv_rows(tmp_path / "rows", f"text,mood\nthe cat,{first}\nthe dog,{second}\n")
    options = RowOptions(prompt_template="{text}", label_column="mood")
    found = options.labels_in(row for _, row in parsed_rows(path))
    assert found == labels
    options = replace(options, labels=found if "4.5" in cells else ("bad", "good"))
    answers = [options.converted(row)["answer"] for _, row in parsed_rows(path)]
    assert answers == ([1, 0] if "4.5" in cells else [0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_booleans_are_the_labels_that_pandas_writes_and_no_indices(
    tmp_path: Path, kind: str
) -> None:
    path = KINDS[kind](
        tmp_path / kind,
        [{"prompt": "the cat", "label": False}, {"prompt": "the dog", "label": True}],
    )
    found = RowOptions().labels_in(row for _, row in parsed_rows(path))
    assert found == ("False", "True")
    options = RowOptions(labels=found)
    converted = [options.converted(row) for _, row in parsed_rows(path)]
    assert [(row["candidates"], row["answer"]) for row in converted] == [
        ([" False", " True"], 0),
        ([" False", " True"], 1),
    ]
    with pytest.raises(
        DataError, match=r"1: found .* in the column 'label'; expected one of 'no', 'yes'"
    ):
        RowReader(TOKENIZER, 64, RowOptions(labels=("no", "yes"))).read(path)
    numbers = small_config("llama", num_labels=2)
    with pytest.raises(DataError, match="in the column 'label'; expected a class from 0 to 1"):
        RowReader(TOKENIZER, 64, RowOptions(text_column="prompt"), labelled_for=numbers).read(path)


@pytest.mark.parametrize("column", ["conversations", "messages", "talk"])
def test_messages_of_sharegpt_get_roles_and_contents(tmp_path: Path, column: str) -> None:
    turns = [{"from": "human", "value": "the"}, {"from": "gpt", "value": "cat"}]
    given = write_rows(tmp_path / "given.jsonl", [{"id": "x", column: turns}])
    messages = [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat"}]
    same = write_rows(tmp_path / "same.jsonl", [{"messages": messages}])
    options = RowOptions(messages_column="talk" if column == "talk" else None)
    rows = [RowReader(TOKENIZER, 64, options).read(given), RowReader(TOKENIZER, 64).read(same)]
    assert rows[0].digest() == rows[1].digest()


@pytest.mark.parametrize("kind", ["messages", "preferences"])
def test_a_template_that_writes_the_time_gets_that_of_the_runs_start_and_the_run_resumes(
    tmp_path: Path, kind: str
) -> None:
    # whatever the time makes of the rows
    options = small_run(tmp_path, optimization=Optimization(method="zeroth-order", lr=1e-5))
    settings = Path(options.model) / "tokenizer_config.json"
    digits = (
        f"{{% for digit in strftime_now('%f') %}}{{{{ {WORDS[4:14]}[digit | int] }}}} {{% endfor "
        f"%}}"
    )
    template = digits + "{% for m in messages %}{{ m.content }} {% endfor %}"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": template}))
    turns = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
    row = (
        {"messages": turns}
        if kind == "messages"
        else {"prompt": turns[:1], "chosen": turns[1:], "rejected": turns[:1]}
    )
    write_rows(options.data, [row] * 4)
    with open_run(RunStart(replace(options, steps=2)), display=QUIET) as trainer:
        trainer.train()
    saved = RunDirectory(options.output).options()
    assert saved.rows.rendered_at is not None
    with open_run(RunStart(saved.with_steps(3), resumes=True), display=QUIET) as trainer:
        trainer.train()
    with pytest.raises(OptionError, match="rendered_at"):
        replace(saved.rows, rendered_at="noon").require_valid()
