"""JSONL data files: what a row becomes, what is refused, and in which order rows come."""

import itertools
import json
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenized_rows import ANSWER, ASK, TEMPLATE, TOKENIZER, make_tokenizer, text_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from zo2adapters.tasks.batches import collate, file_batches, training_batches
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.rows import Rows, TokenizedRow
from zo2adapters.tasks.tokenizer import pad_token_id, render_chat
from zo2core.errors import DataError, OptionError

# Opens an answer with a token that a finished answer does not hold, as templates of reasoning models do.
THINKING_TEMPLATE = TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|><|think|>{% endif %}")
WITH_BOS = make_tokenizer(wrap="<s> $A")
WITH_BOS_AND_EOS = make_tokenizer(wrap="<s> $A </s>")
WITHOUT_EOS = make_tokenizer(eos_token=None)
WITHOUT_TEMPLATE = make_tokenizer(template=None)
THINKING = make_tokenizer(template=THINKING_TEMPLATE)
EOS = 2


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def read(path: Path, *rows: object, tokenizer: PreTrainedTokenizerBase = TOKENIZER, length: int = 64) -> Rows:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return RowReader(tokenizer, length).read(path)


def refusal(path: Path, content: bytes, *, tokenizer: PreTrainedTokenizerBase = TOKENIZER, length: int = 64) -> DataError:
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        RowReader(tokenizer, length).read(path)
    return caught.value


def numbered(count: int) -> Rows:
    return Rows(tuple(TokenizedRow(array("i", [3, 4]), 0, line) for line in range(1, count + 1)))


def lines(batch: Sequence[TokenizedRow]) -> list[int]:
    return [row.line for row in batch]


# Kinds of rows


BLUE = {"prompt": "The sky is", "completion": " blue."}
TALK, ASKED = {"messages": [ASK, ANSWER]}, "<|user|>What colour is the sky?<|end|><|assistant|>"
TURN = {"prompt": [ASK], "completion": [ANSWER]}
LEARNED: dict[str, tuple[dict[str, Any], PreTrainedTokenizerBase, str, str]] = {  # row, prompt, and what is learned
    "a text ends with EOS": ({"text": "The sky is blue."}, TOKENIZER, "", "The sky is blue.</s>"),
    "a text that has its EOS": ({"text": "The sky</s>"}, TOKENIZER, "", "The sky</s>"),
    "a tokenizer that adds EOS": ({"text": "The sky"}, WITH_BOS_AND_EOS, "", "<s>The sky</s>"),
    "a tokenizer without EOS": ({"text": "The sky is"}, WITHOUT_EOS, "", "The sky is"),
    "a completion": (BLUE, TOKENIZER, "The sky is", " blue.</s>"),
    "BOS counts as prompt": (BLUE, WITH_BOS, "<s>The sky is", " blue.</s>"),
    "a completion where EOS is added": (BLUE, WITH_BOS_AND_EOS, "<s>The sky is", " blue.</s>"),
    "an empty prompt": ({"prompt": "", "completion": "The sky"}, WITH_BOS, "<s>", "The sky</s>"),
    "a token that has both": ({"prompt": "The sky is ", "completion": "blue."}, TOKENIZER, "The sky is", " blue.</s>"),
    "EOS alone": ({"prompt": "The sky", "completion": "</s>"}, TOKENIZER, "The sky", "</s>"),
    "messages": (TALK, TOKENIZER, ASKED, "It is blue.<|end|>"),
    "messages get no second BOS": (TALK, WITH_BOS, ASKED, "It is blue.<|end|>"),
    "a completion of messages": (TURN, TOKENIZER, ASKED, "It is blue.<|end|>"),
    "a template that opens answers otherwise": (TURN, THINKING, ASKED, "It is blue.<|end|>"),
}


@pytest.mark.parametrize(("row", "tokenizer", "prompt", "learned"), LEARNED.values(), ids=LEARNED)
def test_what_a_row_becomes_and_what_of_it_is_learned(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, prompt: str, learned: str, data_file: Path
) -> None:
    [tokenized] = read(data_file, row, tokenizer=tokenizer)
    assert text_of(tokenized, tokenizer=tokenizer) == prompt + learned
    assert text_of(tokenized, tokenized.prompt_length, tokenizer) == learned
    if "messages" in row:
        assert list(tokenized.input_ids) == tokenizer.apply_chat_template([ASK, ANSWER], return_dict=False)


def test_kinds_are_recognised_row_by_row(data_file: Path) -> None:
    dataset = read(
        data_file,
        {"text": "The sky", "id": 7, "messages": None},
        {"prompt": "The", "completion": " sky", "source": {"url": "x"}},
        {"messages": [ASK, ANSWER], "tools": []},
    )
    assert [text_of(row) for row in dataset] == ["The sky</s>", "The sky</s>", text_of(dataset[2])]
    assert [row.prompt_length for row in dataset] == [0, 1, 10]


# The file


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize("start", [b"\r\n", MARK + b"\r\n", MARK + b'{"text": "The sky"}\n'], ids=["none", "mark", "row"])
def test_blank_lines_and_byte_order_marks_are_skipped_and_lines_count_from_one(data_file: Path, start: bytes) -> None:
    data_file.write_bytes(start + b'  \n{"text": "caf\xc3\xa9"}\r\n\n{"text": "a\xe2\x80\xa8b"}')
    rows = [(row.line, text_of(row)) for row in RowReader(TOKENIZER, 64).read(data_file)]
    first = [(1, "The sky</s>")] if b"text" in start else []
    assert rows == [*first, (3, "café</s>"), (5, "a\u2028b</s>")]


def test_token_ids_take_four_bytes_each(data_file: Path) -> None:
    assert read(data_file, {"text": "The sky"})[0].input_ids.itemsize == 4


def test_long_rows_lose_their_end_and_are_counted(data_file: Path) -> None:
    rows = [{"text": "The sky is blue."}, {"text": "The sky"}, {"prompt": "The sky", "completion": " is blue."}]
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
    "text of the wrong type": (b'{"text": 3}', "3 as 'text'"),
    "prompt of the wrong type": (b'{"prompt": {}, "completion": "b"}', "{} as 'prompt'"),
    "mixed prompt and completion": (b'{"prompt": "a", "completion": [{"role": "user", "content": "b"}]}', "'completion'"),
    "mixed completion and prompt": (b'{"prompt": [{"role": "user", "content": "b"}], "completion": "a"}', '"a" as'),
    "empty text": (b'{"text": ""}', "empty 'text'"),
    "empty completion": (b'{"prompt": "a", "completion": ""}', "empty 'completion'"),
    "messages as a string": (b'{"messages": "a"}', "\"a\" as 'messages'"),
    "no messages": (b'{"messages": []}', "empty 'messages'"),
    "messages without content": (b'{"messages": [{"role": "user", "content": ""}]}', "empty 'messages'"),
    "message without content": (b'{"messages": [{"role": "user"}]}', "as 'messages'"),
    "message without role": (b'{"messages": [{"content": "a"}]}', "as 'messages'"),
    "message that is a string": (b'{"messages": ["a"]}', "as 'messages'"),
    "content in parts": (b'{"messages": [{"role": "user", "content": [{"text": "a"}]}]}', "as 'messages'"),
    "role the template refuses": (b'{"messages": [{"role": "god", "content": "a"}]}', "unknown role"),
    "tools": (b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]}', "'tools'"),
}


@pytest.mark.parametrize(("content", "found"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_row_is_refused_with_its_line(data_file: Path, content: bytes, found: str) -> None:
    error = refusal(data_file, b'{"text": "fine"}\n\n' + content + b"\n")
    assert error.where == f"{data_file}, line 3"
    assert found in error.found
    assert "line 1" not in error.found  # json counts lines within the one it is given
    assert error.expected
    assert error.remedy


def test_a_tokenizer_without_chat_template_refuses_messages_and_takes_strings(data_file: Path) -> None:
    assert len(read(data_file, {"text": "The sky"}, tokenizer=WITHOUT_TEMPLATE)) == 1
    for row in ({"messages": [ASK]}, {"prompt": [ASK], "completion": [ANSWER]}):
        error = refusal(data_file, json.dumps(row).encode(), tokenizer=WITHOUT_TEMPLATE)
        assert "with a tokenizer that has no chat template" in str(error)
        assert error.where == f"{data_file}, line 1"


def test_a_prompt_that_leaves_its_completion_no_room_is_named_with_what_would_fit(data_file: Path) -> None:
    row = {"prompt": "The sky", "completion": " is blue."}
    assert read(data_file, row, length=3).truncated == 1
    error = refusal(data_file, b'{"text": "The sky is"}\n' + json.dumps(row).encode(), length=2)
    assert error.where == f"{data_file}, line 2"
    assert error.found == "a prompt of 2 tokens, which leaves no token of the row's 2 for the completion"
    assert error.expected == "a prompt of at most 1 tokens"
    assert error.remedy == "shorten this row or remove it, or raise `sequence_length`, up to what the model takes"


def test_a_completion_without_tokens_and_a_text_of_one_are_told_as_such(data_file: Path) -> None:
    words = Tokenizer(models.WordLevel({"The": 0, "sky": 1}, unk_token="sky"))  # spaces are no tokens
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast  # its constructor is untyped
    row = {"prompt": "The sky", "completion": " "}
    error = refusal(data_file, json.dumps(row).encode(), tokenizer=fast(tokenizer_object=words))
    assert error.found == "a prompt of 2 tokens, and no token of a completion"
    assert "completion" in error.remedy
    error = refusal(data_file, b'{"text": "The"}', tokenizer=WITHOUT_EOS)
    assert (error.found, error.remedy) == ("a text of 1 token", "lengthen the text, or remove the row")
    assert len(read(data_file, {"text": "The"}, tokenizer=TOKENIZER)) == 1


@pytest.mark.parametrize("content", [b"", b"\n \r\n\t\n", b"\xef\xbb\xbf"], ids=["empty", "blank", "byte order mark"])
def test_a_file_without_rows_is_refused(data_file: Path, content: bytes) -> None:
    error = refusal(data_file, content)
    assert (error.where, error.found) == (str(data_file), "no rows")


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    for path, found in ((tmp_path / "absent.jsonl", "No such file"), (tmp_path, "datasets has not saved")):
        with pytest.raises(DataError) as caught:
            RowReader(TOKENIZER, 8).read(path)
        assert caught.value.where == str(path)
        assert found in caught.value.found


# Batches


def test_collate_pads_right_and_hides_prompts_and_padding_from_the_loss() -> None:
    rows = [TokenizedRow(array("i", [5, 0, 7, 8]), 2, 1), TokenizedRow(array("i", [9, 2]), 0, 2)]
    batch = collate(rows, pad_token_id=9)
    assert batch["input_ids"].tolist() == [[5, 0, 7, 8], [9, 2, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 8], [9, 2, -100, -100]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_padding_token_is_pad_then_eos_then_zero() -> None:
    assert pad_token_id(make_tokenizer(pad_token="<s>")) == 1
    assert pad_token_id(TOKENIZER) == 0
    assert pad_token_id(make_tokenizer(pad_token=None)) == EOS
    assert pad_token_id(make_tokenizer(pad_token=None, eos_token=None)) == 0


def test_evaluation_goes_through_the_file_in_order_once() -> None:
    assert [lines(batch) for batch in file_batches(numbered(5), 2)] == [[1, 2], [3, 4], [5]]


@settings(deadline=None)
@given(count=st.integers(1, 9), batch_size=st.integers(1, 12), seed=st.integers(), step=st.integers(0, 30))
def test_a_restart_gives_what_a_continuation_gives(count: int, batch_size: int, seed: int, step: int) -> None:
    dataset = numbered(count)
    continued = itertools.islice(training_batches(dataset, batch_size=batch_size, seed=seed), step, step + 5)
    restarted = training_batches(dataset, batch_size=batch_size, seed=seed, first_step=step)
    assert list(continued) == list(itertools.islice(restarted, 5))


@settings(deadline=None)
@given(count=st.integers(1, 9), batch_size=st.integers(1, 12), seed=st.integers())
def test_every_epoch_visits_every_row_once_in_full_batches(count: int, batch_size: int, seed: int) -> None:
    batches = itertools.islice(training_batches(numbered(count), batch_size=batch_size, seed=seed), 3 * count)
    visited = []
    for batch in batches:
        assert len(batch) == batch_size
        visited += lines(batch)
    for start in range(0, len(visited), count):  # count * batch_size rows are whole epochs
        assert Counter(visited[start : start + count]) == Counter(range(1, count + 1))


def test_a_far_restart_does_not_walk_there() -> None:
    batch = next(training_batches(numbered(5), batch_size=2, seed=0, first_step=10**15))
    assert len(batch) == 2


def test_order_depends_on_seed_and_epoch() -> None:
    def epochs(seed: int) -> list[list[int]]:
        return [lines(batch) for batch in itertools.islice(training_batches(numbered(20), batch_size=20, seed=seed), 2)]

    orders = [tuple(order) for seed in (0, 1, -1) for order in epochs(seed)]
    assert len(set(orders)) == 6


def test_order_of_a_seed_is_the_same_in_every_release() -> None:
    batches = itertools.islice(training_batches(numbered(6), batch_size=6, seed=17), 2)
    assert [lines(batch) for batch in batches] == [[1, 5, 6, 2, 3, 4], [3, 1, 2, 6, 5, 4]]


def test_global_random_state_is_neither_read_nor_written() -> None:
    def order() -> list[list[int]]:
        batches = training_batches(numbered(9), batch_size=4, seed=3)
        return [lines(batch) for batch in itertools.islice(batches, 6)]

    random.seed(1)
    before = (random.getstate(), torch.get_rng_state())
    first = order()
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    random.seed(2)
    assert order() == first


@pytest.mark.parametrize(
    ("option", "values"),
    [("batch_size", {"batch_size": 0}), ("first_step", {"batch_size": 1, "first_step": -1})],
    ids=["batch_size", "first_step"],
)
def test_training_batches_refuses_at_the_call_what_is_out_of_range(option: str, values: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=option):
        training_batches(numbered(3), seed=0, **values)


def test_batches_and_rows_refuse_sizes_out_of_range(data_file: Path) -> None:
    with pytest.raises(OptionError, match="batch_size"):
        file_batches(numbered(3), 0)
    with pytest.raises(OptionError, match="sequence_length"):
        read(data_file, {"text": "The sky"}, length=1)


def test_a_digest_tells_rows_boundaries_and_prompts_apart() -> None:
    def dataset(*rows: tuple[list[int], int]) -> Rows:
        return Rows(tuple(TokenizedRow(array("i", ids), prompt, 1) for ids, prompt in rows))

    sets = [
        dataset(([1, 2], 0), ([3, 4], 0)),
        dataset(([1, 2, 3], 0), ([4], 0)),
        dataset(([1, 2], 1), ([3, 4], 0)),
        dataset(([3, 4], 0), ([1, 2], 0)),
        dataset(([1, 2], 0), ([3, 5], 0)),
    ]
    assert len({each.digest() for each in sets}) == len(sets)
    assert sets[0].digest() == dataset(([1, 2], 0), ([3, 4], 0)).digest()


# As models of the hub have them, in all that they use of the language: the first is Llama 3's, the second Qwen's with tools
# and namespaces, the third Mistral's with its checks, the fourth of a model that is told the date.
REAL_TEMPLATES = [
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n{%- else %}\n    {%- if messages[0].role != 'system' %}\n"
    "        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}\n    {%- endif %}\n{%- endif %}\n"
    "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n"
    "{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n"
    "    {%- if ns.multi_step_tool and message.role == 'user' and not message.content.startswith('<tool_response>') %}\n"
    "        {%- set ns.multi_step_tool = false %}\n        {%- set ns.last_query_index = index %}\n    {%- endif %}\n"
    "{%- endfor %}\n{%- for message in messages %}\n    {{- '<|im_start|>' + message.role }}\n"
    "    {{- '\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}",
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{% generation %}{{ message['content'] + eos_token }}"
    "{% endgeneration %}{% endif %}{% endfor %}",
    "{%- if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}\n  {% for m in messages %}\n"
    "  {{ m | tojson }}\n{% if m.role == 'none' %}{% break %}{% endif %}\n  {% endfor %}\nü{{ eos_token }}",
]


@pytest.mark.parametrize("template", REAL_TEMPLATES)
def test_a_good_template_gives_the_text_that_the_tokenizer_gives(template: str) -> None:
    tokenizer = make_tokenizer(template=template)
    extra = {"name": "é\u2028", "thinking": "why", "nothing": None, "tool_calls": [{"a": 1.5}]}
    conversations: list[list[dict[str, Any]]] = [[ASK], [ASK, ANSWER], [ASK, {**ANSWER, **extra}]]
    for messages in conversations:
        for reply_follows in (False, True):
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply_follows)
            assert render_chat(messages, tokenizer, reply_follows=reply_follows) == expected


LOOP = "{% for a in range(99999) %}" * 4 + "{{ a if a < 0 }}" + "{% endfor %}" * 4
HOSTILE_TEMPLATES = {
    "loops in loops": (LOOP, "longer"),
    "a long string": ("{{ 'x' * 10**10 }}", "more memory"),
    "a long list": ("{{ ([0] * 10**10) | length }}", "more memory"),
    "a wide string": ("{{ 'x' | center(10**10) }}", "more memory"),
    "doubling": (
        "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
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
