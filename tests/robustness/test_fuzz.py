"""Damaged and hostile input files: each is used or refused by a typed error, in bounded time and memory."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import re
import resource
import signal
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, save_model, save_tokenizer, small_config
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from zo2adapters import open_checkpoint
from zo2adapters.tasks.row_reader import RowReader
from zo2adapters.tasks.tokenizer import render_chat
from zo2core import Evaluation, Journal, Update, ZO2Error
from zo2core.checkpoint import SafetensorsReader, find_tensors, parse_header
from zo2core.errors import CheckpointError

SECONDS = 5  # an example takes some milliseconds
MEMORY = 1 << 30  # bytes; every file here is smaller than 200 kB

NESTED = "nested \0"  # stands for lists this deep, which json.dumps cannot write
SURROGATES = ["\ud800", "\udcff", "a\ud83d"]
PATHS = ["", ".", "..", "../x.safetensors", "/etc/passwd", "/dev/zero", "a\0b", "sub/", "x" * 300, *SURROGATES]
FLOATS = [0.0, -0.0, 1.0, 1.5, 1e308, float("nan"), float("inf"), float("-inf")]
INTEGERS = [-1, 0, 1, 2, 3, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400]

nested = st.one_of(st.integers(1, 1200), st.just(100_000)).map(lambda depth: f"{NESTED}{depth}")
scalars = st.one_of(
    st.sampled_from(INTEGERS),
    st.sampled_from(FLOATS),
    st.sampled_from([None, True, False]),
    st.sampled_from(PATHS),
    st.text(max_size=5),
    nested,
)
junk = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3))
)


HOSTILE: list[Any] = [None, True, False, *INTEGERS, *FLOATS, *PATHS, [], {}, [[]], [None], {"a": 1}, f"{NESTED}100000"]


class Exceeded(BaseException):
    """Not an Exception: no handler in the code under test may take it for bad input."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """End what takes too long; refuse memory far beyond the size of the files."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Exceeded(f"more than {SECONDS} seconds")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def used_or_refused(use: Callable[[], object]) -> None:
    with bounded():
        try:
            use()
        except ZO2Error as error:
            reason: BaseException | None = error
            while reason is not None:
                starved = isinstance(reason, MemoryError) or "allocate memory" in str(reason)
                assert not starved, "refused only because memory ran out"
                reason = reason.__cause__ or reason.__context__


def to_json(value: object) -> bytes:
    """JSON with what json.dumps cannot write put in afterwards."""
    return re.sub(
        rb'"' + re.escape(json.dumps(NESTED)[1:-1].encode()) + rb'(\d+)"',
        lambda found: b"[" * int(found[1]) + b"]" * int(found[1]),
        json.dumps(value).encode(),
    )


@st.composite
def damaged(draw: st.DrawFn, raw: bytes) -> bytes:
    """Bytes overwritten, cut off, put in, taken out or repeated."""
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(raw)))
        end = min(len(raw), begin + draw(st.integers(0, 40)))
        kind = draw(st.sampled_from(["overwrite", "cut", "insert", "remove", "repeat"]))
        middle = {
            "overwrite": draw(st.binary(min_size=1, max_size=2)),
            "insert": draw(
                st.one_of(st.binary(max_size=9), st.sampled_from([b'{"a":1,', b'"a":', b"[" * 5000, b"9" * 5000]))
            ),
            "repeat": raw[begin:end] * 2,
        }.get(kind, b"")
        after = {"overwrite": raw[begin + len(middle) :], "cut": b"", "insert": raw[begin:]}.get(kind, raw[end:])
        raw = raw[:begin] + middle + after
    return raw


def places(value: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all values inside a JSON value, itself included."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*place, key))


@st.composite
def altered(draw: st.DrawFn, value: Any, replacements: st.SearchStrategy[Any] = junk) -> Any:
    """A JSON value in which some values are replaced, removed or moved, and some keys are added."""
    root = {"root": copy.deepcopy(value)}
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(list(places(root))[1:]))
        holder: Any = root
        for key in path:
            holder = holder[key]
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "swap"]))
        if kind == "remove" and path:
            del holder[last]
        elif kind == "add" and isinstance(holder, dict) and path:
            holder[draw(st.one_of(st.text(max_size=4), st.sampled_from(PATHS)))] = draw(replacements)
        elif kind == "swap" and len(holder) > 1:
            other = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
            holder[last], holder[other] = holder[other], holder[last]
        else:
            holder[last] = draw(replacements)
    return root["root"]


def replaced(value: Any) -> Iterator[Any]:
    """A JSON value with each value inside it replaced by each hostile one in turn."""
    for *path, last in list(places(value))[1:]:
        for hostile in HOSTILE:
            changed = copy.deepcopy(value)
            holder: Any = changed
            for key in path:
                holder = holder[key]
            holder[last] = hostile
            yield changed


SIZES = st.one_of(
    st.lists(st.one_of(st.sampled_from(INTEGERS), st.integers(0, 24), st.booleans(), st.floats()), max_size=70), junk
)


@st.composite
def shards(draw: st.DrawFn, whole: bytes) -> bytes:
    if draw(st.booleans()):
        return draw(damaged(whole))
    (length,) = struct.unpack("<Q", whole[:8])
    header = draw(
        altered(json.loads(whole[8 : 8 + length]), st.one_of(SIZES, junk, st.sampled_from(["F64", "I8", "F8_E4M3"])))
    )
    raw = to_json(header)
    if draw(st.booleans()):
        raw = raw.replace(b"{", b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},', 1)
    length = draw(
        st.one_of(st.just(len(raw)), st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1]), st.integers(0, 2 * len(raw)))
    )
    return struct.pack("<Q", length) + raw + whole[-20:]


def read_shard(path: Path) -> None:
    entries = parse_header(path)
    place = path.stat().st_size
    for entry in reversed(entries.values()):
        assert all(type(size) is int for size in (entry.start, entry.nbytes, *entry.shape))
        assert entry.start + entry.nbytes == place, "the tensors tile the file's end"
        place = entry.start
    with contextlib.closing(SafetensorsReader(entries)) as reader:
        assert reader.fingerprint


@given(data=st.data())
def test_any_shard_is_read_inside_the_file_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("shard") / "x.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}, path, metadata={"format": "pt"})
    path.write_bytes(data.draw(shards(path.read_bytes())))

    used_or_refused(lambda: read_shard(path))


def test_any_value_in_a_header_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    save_file(tensors, path, metadata={"format": "pt"})
    whole = path.read_bytes()
    for header in replaced(json.loads(whole[8:-20])):
        raw = to_json(header)
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + whole[-20:])
        used_or_refused(lambda: read_shard(path))


@given(data=st.data())
def test_any_index_stays_in_its_directory_or_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("index")
    (directory / "sub").mkdir()
    for name in ("a", "b"):
        save_file({name: torch.ones(2)}, directory / f"{name}.safetensors")
    index = {"metadata": {"total_size": 16}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    names = st.one_of(st.sampled_from([*PATHS, "sub", "missing.safetensors", "model.safetensors.index.json"]), junk)
    raw = data.draw(st.one_of(damaged(to_json(index)), altered(index, names).map(to_json)))
    (directory / "model.safetensors.index.json").write_bytes(raw)

    used_or_refused(lambda: find_inside(directory))


def find_inside(directory: Path) -> None:
    assert all(entry.path.parent == directory for entry in find_tensors(directory).values())


@pytest.mark.parametrize("name", PATHS)
def test_a_shard_name_that_is_no_plain_name_is_refused(name: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": name}}
    (tmp_path / "model.safetensors.index.json").write_bytes(to_json(index))
    with pytest.raises(CheckpointError):
        find_tensors(tmp_path)


def test_any_value_in_an_index_is_used_or_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    for index in replaced({"metadata": {"total_size": 16}, "weight_map": {"a": "a.safetensors"}}):
        (tmp_path / "model.safetensors.index.json").write_bytes(to_json(index))
        used_or_refused(lambda: find_inside(tmp_path))


def update(step: int) -> Update:
    evaluations = (Evaluation(step, 1.0), Evaluation(step, -1.0))
    return Update(step, evaluations, (step,), (0.1 * step,), 1e-6, 1e-3, 0.0, True, (1.5, 1.25))


def from_line(line: bytes) -> Any:
    """The record of a line, without its checksum."""
    record = json.loads(line[9:] if not line.startswith(b"{") else line)
    if isinstance(record, dict):
        record.pop("crc32", None)
    return record


def to_line(raw: bytes) -> bytes:
    """A line whose checksum holds: of the present format, or, where the JSON is no object to add to, of the earlier one."""
    if raw.startswith(b"{") and raw.endswith(b"}") and raw != b"{}":
        return b'%s,"crc32":"%08x"}\n' % (raw[:-1], zlib.crc32(raw[:-1]))
    return b"%08x %s\n" % (zlib.crc32(raw), raw)


@st.composite
def journals(draw: st.DrawFn, whole: bytes) -> bytes:
    if draw(st.booleans()):
        return draw(damaged(whole))
    lines = whole.splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 2))):
        number, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        match draw(st.sampled_from(["remove", "repeat", "swap", "alter", "alter", "alter"])):
            case "remove" if len(lines) > 1:
                del lines[number]
            case "repeat":
                lines.insert(other, lines[number])
            case "swap":
                lines[number], lines[other] = lines[other], lines[number]
            case _:
                with contextlib.suppress(ValueError, RecursionError):  # an altered line may be altered again
                    lines[number] = to_line(to_json(draw(altered(from_line(lines[number])))))
    return b"".join(lines)


def write_journal(path: Path) -> bytes:
    with contextlib.closing(Journal(path)) as journal:
        journal.begin({"base": "b", "options": {"lr": 0.5}})
        for step in range(3):
            journal.append(update(step))
    return path.read_bytes()


def check_types(updates: Sequence[Update]) -> None:
    for step, each in enumerate(updates):
        assert each.step == step
        integers = (each.step, *each.seeds, *(evaluation.seed for evaluation in each.evaluations))
        shifts = (evaluation.shift for evaluation in each.evaluations)
        reals = (*each.projected_grads, each.lr, each.zo_eps, each.weight_decay, *each.losses, *shifts)
        assert all(type(value) is int for value in integers)
        assert all(type(value) is float and math.isfinite(value) for value in reals)
        assert type(each.perturb_in_place) is bool


@given(data=st.data())
def test_any_journal_can_be_continued_or_is_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    whole = write_journal(path)
    path.write_bytes(data.draw(journals(whole)))

    def use() -> None:
        with contextlib.closing(Journal(path)) as found:
            if found.header is None:
                return
            found.append(update(len(found.updates)))
        again = Journal(path)
        check_types(again.updates)
        assert repr(again.updates) == repr(found.updates)
        again.begin({"base": "other"})

    used_or_refused(use)


@pytest.mark.parametrize("number", [0, 1])
def test_any_value_in_a_journal_is_used_or_refused(number: int, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines = write_journal(path).splitlines(keepends=True)
    for record in replaced(from_line(lines[number])):
        path.write_bytes(b"".join([*lines[:number], to_line(to_json(record)), *lines[number + 1 :]]))
        used_or_refused(lambda: check_types(Journal(path).updates))


ADDED = [
    "quantization_config",
    "auto_map",
    "dtype",
    "torch_dtype",
    "text_config",
    "head_dim",
    "layer_types",
    "architectures",
]
ADDED += ["attn_implementation", "rope_scaling", "rope_theta", "num_labels", "id2label", "is_encoder_decoder", "use_cache"]
ADDED += ["_attn_implementation", "transformers_version", "model_type", "return_dict", "pruned_heads", "sliding_window"]


@st.composite
def configs(draw: st.DrawFn, config: dict[str, Any]) -> bytes:
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged(to_json(config)))
    config = copy.deepcopy(config)
    words = st.sampled_from(
        ["float16", "float99", "relu", "nn", "sdpa", "flash_attention_2", "default", "bert", "llama", "gptq"]
    )
    if draw(st.booleans()):
        config[draw(st.sampled_from(ADDED))] = draw(st.one_of(junk, words))
    return to_json(draw(altered(config, st.one_of(scalars, junk, words))))


@pytest.mark.filterwarnings("ignore")  # transformers warns of much that it finds odd
@pytest.mark.parametrize("model_type", CONFIGS)
@given(data=st.data())
def test_any_config_is_used_or_refused(
    model_type: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.getbasetemp() / f"base-{model_type}"
    if not base.exists():
        save_model(base, small_config(model_type))
    directory = tmp_path_factory.mktemp("model")
    os.link(base / "model.safetensors", directory / "model.safetensors")
    raw = data.draw(configs(json.loads((base / "config.json").read_bytes())))
    (directory / "config.json").write_bytes(raw)
    dtype = data.draw(st.sampled_from(["auto", "float32", "bfloat16"]))
    used_or_refused(lambda: open_checkpoint(directory, dtype=dtype))


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", [2**31, -1, "x", None], ids=repr)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_any_field_of_a_config_may_hold_anything(model_type: str, value: object, tmp_path: Path) -> None:
    save_model(tmp_path, small_config(model_type))
    path = tmp_path / "config.json"
    config = json.loads(path.read_bytes())
    for field in [*config, *ADDED]:
        path.write_bytes(to_json({**config, field: value}))
        used_or_refused(lambda: open_checkpoint(tmp_path))


TEMPLATE = (
    "{% for message in messages %}{{ message.role.strip() }} {{ message['content'] }} "
    "{% for call in message.tool_calls %}{{ call | tojson }} {{ call.function.name + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}the {% endif %}"
)
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "yes", "tool_calls": [{"function": {}}]},
]
ROWS: list[dict[str, Any]] = [
    {"text": "the cat sat"},
    {"prompt": "the cat ", "completion": "sat"},
    {"messages": CHAT},
    {"prompt": CHAT[:1], "completion": CHAT[1:]},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    loaded.chat_template = TEMPLATE
    render_chat(CHAT[:1], loaded)  # starts the process that renders, which takes longer than an example may
    return loaded


@given(data=st.data())
def test_any_data_file_is_read_or_refused(
    data: st.DataObject, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    row = data.draw(st.sampled_from(ROWS).flatmap(altered)) if data.draw(st.booleans()) else data.draw(st.sampled_from(ROWS))
    raw = b"".join(to_json(each) + b"\n" for each in [ROWS[0], row, ROWS[1]])
    path.write_bytes(data.draw(damaged(raw)) if data.draw(st.integers(0, 2)) == 0 else raw)

    def use() -> None:
        dataset = RowReader(tokenizer, 8).read(path)
        assert all(0 <= each.prompt_length < len(each.input_ids) <= 8 for each in dataset)

    used_or_refused(use)


def test_any_value_in_a_row_is_used_or_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for row in (changed for whole in ROWS for changed in replaced(whole)):
        path.write_bytes(to_json(row))
        used_or_refused(lambda: RowReader(tokenizer, 8).read(path))


def test_nesting_that_only_some_of_the_parsers_can_take_is_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    for depth in range(100, 1000, 15):  # the interpreter's limit is 1000; each parser and printer meets it elsewhere
        deep = f"{NESTED}{depth}"
        for header in ({"a": deep}, {"a": {"dtype": "F32", "shape": deep, "data_offsets": [0, 0]}}):
            raw = to_json(header)
            path.write_bytes(struct.pack("<Q", len(raw)) + raw)
            used_or_refused(lambda: parse_header(path))
        raw = to_json({"format": 1, "base": deep})
        path.write_bytes(to_line(raw))
        used_or_refused(lambda: Journal(path).begin({"base": "other"}))
        for row in ({"text": deep}, {"messages": [{**CHAT[0], "tool_calls": [deep]}]}):
            path.write_bytes(to_json(row))
            used_or_refused(lambda: RowReader(tokenizer, 8).read(path))
