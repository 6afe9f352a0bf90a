"""Damaged and hostile input files: each reader uses or refuses them by a typed error, in bounded
time and memory.
"""

import contextlib
import copy
import json
import math
import random
import re
import resource
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import families
import psutil
import pytest
import torch
from command_lines import within
from damages import damaged
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, save_model, save_tokenizer, small_config
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from updates import line_of, record_of, update_of

from zo2adapters import open_checkpoint
from zo2adapters.models.quantization import Quantization
from zo2adapters.tasks.rows import RowReader
from zo2adapters.tasks.tokenizer import render_chat
from zo2core import Journal, Update, ZO2Error
from zo2core.checkpoint.shards import SafetensorsReader, find_tensors, parse_header
from zo2core.errors import CheckpointError

SECONDS = 5  # an example takes some milliseconds
MEMORY = 1 << 30  # bytes; every file here is smaller than 200 kB

NESTED = "nested \0"  # stands for lists this deep, which json.dumps cannot write
SURROGATES = ["\ud800", "\udcff", "a\ud83d"]
PATHS = [
    "",
    ".",
    "..",
    "../x.safetensors",
    "/etc/passwd",
    "/dev/zero",
    "a\0b",
    "sub/",
    "x" * 300,
    *SURROGATES,
]
FLOATS = [0.0, -0.0, 1.0, 1.5, 1e308, float("nan"), float("inf"), float("-inf")]
INTEGERS = [-1, 0, 1, 2, 3, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400]

HOSTILE: list[Any] = [
    None,
    True,
    False,
    *INTEGERS,
    *FLOATS,
    *PATHS,
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    f"{NESTED}100000",
]


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """End what takes too long; refuse memory far beyond the size of the files."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MEMORY, limits[1]))
    try:
        with within(SECONDS):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


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


def places(value: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths of all values inside a JSON value, itself included."""
    yield place
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*place, key))


def replaced(value: Any, hostile: Sequence[Any] = HOSTILE) -> Iterator[Any]:
    """A JSON value with each value inside it replaced by each hostile one in turn, or left out."""
    for *path, last in list(places(value))[1:]:
        for other in hostile:
            changed = copy.deepcopy(value)
            holder: Any = changed
            for key in path:
                holder = holder[key]
            holder[last] = other
            yield changed
        del holder[last]
        yield changed


def read_shard(path: Path) -> None:
    entries = parse_header(path)
    place = path.stat().st_size
    for entry in reversed(entries.values()):
        assert all(type(size) is int for size in (entry.start, entry.nbytes, *entry.shape))
        assert entry.start + entry.nbytes == place, "the tensors tile the file's end"
        place = entry.start
    with contextlib.closing(SafetensorsReader(entries)) as reader:
        assert reader.fingerprint


def find_inside(path: Path) -> None:
    assert all(entry.path.parent == path.parent for entry in find_tensors(path.parent).values())


def check_types(updates: Sequence[Update]) -> None:
    for step, each in enumerate(updates):
        assert each.step == step
        integers = (each.step, *each.seeds, *(evaluation.seed for evaluation in each.evaluations))
        shifts = (evaluation.shift for evaluation in each.evaluations)
        reals = (
            *each.projected_grads,
            each.lr,
            each.zo_eps,
            each.weight_decay,
            *each.losses,
            *shifts,
        )
        assert all(type(value) is int for value in integers)
        assert all(type(value) is float and math.isfinite(value) for value in reals)
        assert type(each.perturb_in_place) is bool


def go_on(path: Path) -> None:
    """Continue a journal, and read what is there then."""
    with contextlib.closing(Journal(path)) as found:
        check_types(found.updates)
        if found.header is None:
            return
        found.append(update_of(len(found.updates)))
    again = Journal(path)
    check_types(again.updates)
    assert repr(again.updates) == repr(found.updates)
    again.begin({"base": "other"})


TEMPLATE = (
    "{% for message in messages %}{{ message.role.strip() }} {{ message['content'] }} "
    "{% for call in message.tool_calls %}{{ call | tojson }} {{ call.function.name + ' ' }}{% "
    "endfor %}{% endfor %}"
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
ADDED = [
    "quantization_config",
    "auto_map",
    "dtype",
    "torch_dtype",
    "text_config",
    "head_dim",
    "layer_types",
    "rope_theta",
]
ADDED += [
    "architectures",
    "attn_implementation",
    "rope_scaling",
    "num_labels",
    "id2label",
    "is_encoder_decoder",
]
ADDED += [
    "use_cache",
    "_attn_implementation",
    "transformers_version",
    "model_type",
    "return_dict",
    "pruned_heads",
]
ADDED += ["sliding_window"]


class Reader(NamedTuple):
    """What reads a file, and a good one."""

    path: Path
    parts: Sequence[Any]  # JSON values in the file
    packed: Callable[[Sequence[bytes]], bytes]  # the file's bytes, from its parts
    use: Callable[[Path], object]
    hostile: Sequence[Any] = HOSTILE

    @property
    def whole(self) -> bytes:
        return self.packed([to_json(part) for part in self.parts])


def shard(folder: Path) -> Reader:
    tensors = {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    save_file(tensors, folder / "x.safetensors", metadata={"format": "pt"})
    whole = (folder / "x.safetensors").read_bytes()

    def packed(parts: Sequence[bytes]) -> bytes:
        return struct.pack("<Q", len(parts[0])) + parts[0] + whole[-20:]

    return Reader(
        folder / "x.safetensors",
        [json.loads(whole[8:-20])],
        packed,
        read_shard,
        [*HOSTILE, "C64", "F4"],
    )


def index(folder: Path) -> Reader:
    (folder / "sub").mkdir()
    for name in ("a", "b"):
        save_file({name: torch.ones(2)}, folder / f"{name}.safetensors")
    part = {
        "metadata": {"total_size": 16},
        "weight_map": {"a": "a.safetensors", "b": "b.safetensors"},
    }
    hostile = [*HOSTILE, "sub", "missing.safetensors", "model.safetensors.index.json"]
    return Reader(folder / "model.safetensors.index.json", [part], b"".join, find_inside, hostile)


def journal(folder: Path) -> Reader:
    path = folder / "journal.jsonl"
    with contextlib.closing(Journal(path)) as made:
        made.begin({"base": "b", "options": {"lr": 0.5}})
        made.append(update_of(0))
    parts = list(map(record_of, path.read_bytes().splitlines()))
    return Reader(path, parts, lambda parts: b"".join(map(line_of, parts)), go_on)


def config(model_type: str, folder: Path) -> Reader:
    save_model(folder, small_config(model_type))
    part = json.loads((folder / "config.json").read_bytes())
    part |= {field: part.get(field) for field in ADDED}
    hostile = [2**31, -1, "x", None]
    return Reader(
        folder / "config.json", [part], b"".join, lambda path: open_checkpoint(path.parent), hostile
    )


def row(number: int, folder: Path) -> Reader:
    save_tokenizer(folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    # starts the process that renders, which takes longer than an example may
    render_chat(CHAT[:1], tokenizer)

    def use(path: Path) -> None:
        dataset = RowReader(tokenizer, 8).read(path)
        assert all(0 <= each.prompt_length < len(each.input_ids) <= 8 for each in dataset)

    return Reader(folder / "rows.jsonl", [ROWS[number]], b"".join, use)


READERS: dict[str, Callable[[Path], Reader]] = {
    "shard": shard,
    "index": index,
    "journal": journal,
    **{f"row {number}": partial(row, number) for number in range(len(ROWS))},
    **{f"config of {model_type}": partial(config, model_type) for model_type in CONFIGS},
}

pytestmark = pytest.mark.usefixtures("no_power_loss")


@pytest.fixture(scope="module", params=READERS)
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return READERS[request.param](tmp_path_factory.mktemp("reader"))


@pytest.mark.filterwarnings("ignore")  # transformers warns of much that it finds odd
@given(seed=st.integers(0, 2**32))
def test_a_damaged_file_is_used_or_refused(reader: Reader, seed: int) -> None:
    reader.path.write_bytes(damaged(reader.whole, random.Random(seed)))
    used_or_refused(lambda: reader.use(reader.path))


@pytest.mark.few(7)
@pytest.mark.filterwarnings("ignore")
def test_a_file_with_any_value_is_used_or_refused(reader: Reader) -> None:
    for place, part in enumerate(reader.parts):
        others = [to_json(other) for other in reader.parts]
        for changed in replaced(part, reader.hostile):
            parts = [*others[:place], to_json(changed), *others[place + 1 :]]
            reader.path.write_bytes(reader.packed(parts))
            used_or_refused(lambda: reader.use(reader.path))


OF_BLOCKS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
QUANTISED: dict[str, dict[str, Any]] = {
    "gptq": {
        "bits": 4,
        "group_size": 64,
        "checkpoint_format": "gptq",
        "sym": True,
        "dynamic": None,
    },
    "awq": {"bits": 4, "group_size": 64, "version": "gemm", "zero_point": True, "backend": None},
    "bitsandbytes": {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"},
    "fp8": {"weight_block_size": [128, 128], "expert_dtype": "fp8"},
    "mxfp4": {},
    "compressed-tensors": {
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense"},
        "transform_config": {},
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": OF_BLOCKS, "format": None}},
        "quantization_config": None,
    },
}


@pytest.mark.parametrize("method", QUANTISED)
def test_a_quantization_config_with_any_value_is_read_or_refused(method: str) -> None:
    good = {"quant_method": method, **QUANTISED[method]}
    where = Path("config.json")
    assert Quantization.of(where, {key: v for key, v in good.items() if v is not None}).where
    for changed in [*replaced(good), *HOSTILE]:
        used_or_refused(partial(Quantization.of, where, changed))


ROUTED = [  # a family, a field of its config, its value, and what is told of it
    ("qwen3_moe", "num_experts_per_tok", 5, "5; expected 0 to 4, since num_local_experts is 4"),
    ("qwen3_moe", "num_experts_per_tok", -1, "-1; expected 0 to 4"),
    ("mixtral", "num_experts_per_tok", 5, "5; expected 0 to 4, since num_local_experts is 4"),
    ("deepseek_v3", "num_experts_per_tok", 5, "5; expected 0 to 4, since n_routed_experts is 4"),
    ("deepseek_v3", "topk_group", 3, "3; expected 0 to 1, since n_group is 1"),
]


@pytest.mark.parametrize(("family", "field", "value", "told"), ROUTED)
def test_routers_that_choose_more_than_there_are_are_refused_by_the_fields_name(
    family: str, field: str, value: int, told: str, tmp_path: Path
) -> None:
    families.small_model(families.small_config(family)).save_pretrained(tmp_path)
    open_checkpoint(tmp_path).weights.close()
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_bytes(to_json({**config, field: value}))
    with pytest.raises(CheckpointError, match=rf"config\.json: {field}: found {told}"):
        open_checkpoint(tmp_path)


def test_nesting_that_only_some_of_the_parsers_can_take_is_refused(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = {
        name: READERS[name](tmp_path_factory.mktemp(name)) for name in ("shard", "journal", "row 0")
    }
    for depth in range(100, 1000, 15):
        # the interpreter's limit is 1000; each parser and printer meets it elsewhere
        deep = f"{NESTED}{depth}"
        hostile: dict[str, list[Any]] = {
            "shard": [{"a": deep}, {"a": {"dtype": "F32", "shape": deep, "data_offsets": [0, 0]}}],
            "journal": [{"format": 1, "base": deep}],
            "row 0": [{"text": deep}, {"messages": [{**CHAT[0], "tool_calls": [deep]}]}],
        }
        for name, parts in hostile.items():
            for part in parts:
                made[name].path.write_bytes(made[name].packed([to_json(part)]))
                used_or_refused(partial(made[name].use, made[name].path))
