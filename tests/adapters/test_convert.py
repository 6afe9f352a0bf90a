"""Pickled checkpoints: what becomes of them, what is refused, what a failure leaves."""

import io
import json
import math
import os
import resource
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from models import random_model, save_tokenizer, small_config
from transformers import AutoModelForCausalLM

from zo2adapters import open_checkpoint
from zo2adapters.limited_process import LimitedProcess
from zo2adapters.models import pickled, unpickling
from zo2adapters.models.conversion import INDEX_FILE, SINGLE_FILE
from zo2adapters.models.conversion import convert as plain_convert
from zo2adapters.models.pickled import new_reader
from zo2core.checkpoint.shards import find_tensors
from zo2core.errors import CheckpointError, OutputError, UnsupportedModelError

Tensors = dict[str, torch.Tensor]


def shard_name(number: int, count: int) -> str:
    return f"pytorch_model-{number:05d}-of-{count:05d}.bin"


def save_pickled(
    directory: Path, *, shards: int = 3, dtype: torch.dtype = torch.float32, legacy: bool = False
) -> Tensors:
    """A model with a tokenizer as it was laid out before safetensors; returns its tensors."""
    model = random_model(small_config("opt"), dtype)
    directory.mkdir(parents=True)
    model.config.save_pretrained(directory)
    save_tokenizer(directory)
    state: Tensors = dict(model.state_dict())
    names = sorted(state)
    pieces = [{name: state[name] for name in names[start::shards]} for start in range(shards)]
    if shards == 1:
        torch.save(pieces[0], directory / SINGLE_FILE, _use_new_zipfile_serialization=not legacy)
        return state
    weight_map: dict[str, str] = {}
    for number, piece in enumerate(pieces, start=1):
        torch.save(
            piece, directory / shard_name(number, shards), _use_new_zipfile_serialization=not legacy
        )
        weight_map |= dict.fromkeys(piece, shard_name(number, shards))
    write_index(directory, {"metadata": {}, "weight_map": weight_map})
    return state


def write_index(directory: Path, index: object) -> None:
    (directory / INDEX_FILE).write_text(json.dumps(index))


READER = new_reader()  # one child process for all tests of this file; its start takes seconds


@pytest.fixture(scope="module", autouse=True)
def _reader() -> Iterator[None]:
    with READER:
        yield


def convert(source: Path, destination: Path, **options: Any) -> Path:
    return plain_convert(source, destination, **{"reader": READER, **options})


def refusal(source: Path, *, match: str, **options: Any) -> CheckpointError:
    before = sorted(source.parent.iterdir())
    with pytest.raises(CheckpointError, match=match) as info:
        convert(source, source.parent / "out", **options)
    assert sorted(source.parent.iterdir()) == before, "something is left behind"
    return info.value


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_converted_model_opens_and_has_every_bit(
    shards: int, dtype: torch.dtype, legacy: bool, tmp_path: Path
) -> None:
    state = save_pickled(tmp_path / "base", shards=shards, dtype=dtype, legacy=legacy)
    lines: list[str] = []
    assert convert(tmp_path / "base", tmp_path / "out", report=lines.append) == tmp_path / "out"
    assert len(lines) == shards
    files = {path.name for path in (tmp_path / "out").iterdir()}
    weights = (
        {"model.safetensors"}
        if shards == 1
        else {f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)}
    )
    index = set() if shards == 1 else {"model.safetensors.index.json"}
    assert files == weights | index | {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert open_checkpoint(tmp_path / "out").config.dtype is dtype
    if shards > 1:
        written = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
        assert written["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
        assert written["weight_map"].keys() == state.keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype is dtype
        assert torch.equal(loaded[name], tensor), name


def test_shared_and_partial_tensors_become_copies_and_one_in_two_shards_is_that_of_the_last(
    tmp_path: Path,
) -> None:
    whole, own = torch.arange(12.0).reshape(3, 4), tmp_path / "own"
    state = {
        "a": whole,
        "same": whole,
        "turned": whole.T,
        "row": whole[1],
        "parameter": torch.nn.Parameter(whole[:2]),
    }
    own.mkdir()
    torch.save(state, own / SINGLE_FILE)
    found = safetensors.torch.load_file(convert(own, tmp_path / "copies") / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    torch.save({"a": torch.zeros(2), "b": torch.zeros(1)}, tmp_path / "1.bin")
    torch.save({"a": torch.ones(2), "extra": torch.ones(1)}, tmp_path / "2.bin")
    write_index(tmp_path, {"weight_map": {"a": "1.bin", "b": "1.bin", "extra": "2.bin"}})
    out = convert(tmp_path, tmp_path / "out")
    entries = find_tensors(out)
    values = {
        name: torch.frombuffer(bytearray(entry.read()), dtype=torch.float32)
        for name, entry in entries.items()
    }
    assert {name: value.tolist() for name, value in values.items()} == {
        "a": [1.0, 1.0],  # as transformers reads it, in the order of the shards' names
        "b": [0.0],
        "extra": [1.0],
    }
    weight_map = json.loads((out / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert {name: entry.path.name for name, entry in entries.items()} == weight_map


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_pickled_numbers_that_are_not_finite_are_refused_by_name(
    dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    save_pickled(base, shards=1)
    numbers = torch.tensor([1.0, value]).to(dtype)
    torch.save({"a": torch.ones(2), "b": numbers}, base / SINGLE_FILE)
    refusal(
        base, match=rf"pytorch_model\.bin: b: found {value:g} among its numbers; expected finite"
    )


def test_of_pickled_and_other_weights_those_are_converted_that_transformers_loads(
    tmp_path: Path,
) -> None:
    base = tmp_path / "base"
    state = save_pickled(base, shards=3)
    torch.save({name: tensor + 1 for name, tensor in state.items()}, base / SINGLE_FILE)
    convert(base, tmp_path / "new")
    loaded = AutoModelForCausalLM.from_pretrained(base).state_dict()
    converted = safetensors.torch.load_file(tmp_path / "new" / "model.safetensors")
    assert converted.keys() == loaded.keys()
    assert all(torch.equal(converted[name], value) for name, value in loaded.items())
    safetensors.torch.save_file({"a": torch.ones(1)}, base / "model.safetensors")
    refusal(base, match=r"model\.safetensors as well, which transformers loads instead")
    (base / "model.safetensors").rename(base / "adapter_config.json")
    with pytest.raises(UnsupportedModelError, match="an adapter beside a model"):
        convert(base, tmp_path / "none")


def test_one_shard_at_a_time_is_loaded_and_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pickled(tmp_path / "base", shards=4)
    alive: list[weakref.ref[torch.Tensor]] = []
    load = torch.load
    loads = []

    def watched(path: Path, **options: Any) -> Any:
        assert not any(reference() is not None for reference in alive), (
            "an earlier shard is still in memory"
        )
        assert options == {"map_location": "cpu", "weights_only": True, "mmap": True}
        state = load(path, **options)
        alive.extend(weakref.ref(tensor) for tensor in state.values())
        loads.append(path)
        return state

    def noted(tensors: Tensors, path: Path, metadata: dict[str, str]) -> None:
        # views of the loaded ones, and copies
        alive.extend(weakref.ref(tensor) for tensor in tensors.values())
        safetensors.torch.save_file(tensors, path, metadata)

    monkeypatch.setattr(torch, "load", watched)
    monkeypatch.setattr(unpickling, "save_file", noted)
    # here, to be watched
    monkeypatch.setattr(LimitedProcess, "ask", lambda _, request, **__: unpickling.answer(request))
    convert(tmp_path / "base", tmp_path / "out")
    assert len(loads) == 4
    assert len(alive) > 4


class Code:
    """Unpickling it runs a command."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.witness}",)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_refused_and_not_run(legacy: bool, tmp_path: Path) -> None:
    source = tmp_path / "base"
    source.mkdir()
    state = {"a": torch.ones(2), "b": Code(tmp_path / "witness")}
    torch.save(state, source / SINGLE_FILE, _use_new_zipfile_serialization=not legacy)
    error = refusal(source, match="does more than build tensors")
    assert "system" in error.found
    assert "weights_only" not in str(error)
    assert "safetensors" in error.remedy


CONTENTS: dict[str, tuple[object, str]] = {
    "a list": ([torch.ones(1)], "found a list"),
    "a number": ({"a": torch.ones(1), "epoch": 3}, "epoch: found a int"),
    "a training state": ({"model": {"a": torch.ones(1)}}, "model: found a dict"),
    "a key that is no name": ({3: torch.ones(1)}, "the key '3'"),
    "the format's own key": ({"__metadata__": torch.ones(1)}, "__metadata__"),
    "a sparse tensor": ({"a": torch.eye(3).to_sparse()}, "a: found .*sparse"),
    "no data": ({"a": torch.ones(2, device="meta")}, "a: found .*meta"),
    "complex numbers": ({"a": torch.ones(2, dtype=torch.complex64)}, "a: found .*complex64"),
    "one number for all": ({"a": torch.ones(1).expand(2**50)}, "a: found 4503599627370496 bytes"),
    "nothing": ({}, "no tensors"),
}


@pytest.mark.parametrize(("state", "match"), CONTENTS.values(), ids=CONTENTS)
def test_what_is_no_tensor_by_name_is_refused(state: object, match: str, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    torch.save(state, tmp_path / "base" / SINGLE_FILE)
    assert str(tmp_path / "base") in refusal(tmp_path / "base", match=match).where


@pytest.mark.parametrize("legacy", [False, True])
def test_damaged_files_are_refused(legacy: bool, tmp_path: Path) -> None:
    save_pickled(tmp_path / "base", shards=1, legacy=legacy)
    path = tmp_path / "base" / SINGLE_FILE
    whole = path.read_bytes()
    for content in (
        b"",
        b"PK\x03\x04",
        b"hello world" * 30,
        whole[:50],
        whole[: len(whole) // 2],
        whole[:-20],
    ):
        path.write_bytes(content)
        assert refusal(tmp_path / "base", match="get the").where == str(path)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def rename_in_index(base: Path, shard: object) -> None:
    write_index(base, {"weight_map": {"a": shard_name(1, 3), "b": shard}})


def name_another_tensor(base: Path) -> None:
    index = json.loads((base / INDEX_FILE).read_bytes())
    index["weight_map"]["other.weight"] = shard_name(2, 3)
    write_index(base, index)


ELSEWHERE = [
    "../x.bin",
    "/etc/passwd",
    "sub/x.bin",
    "..",
    "",
    3,
    None,
    "a\0.bin",
    "\ud800.bin",
    [],
    "x.pt",
]
MALFORMED = [b"", b"{", b"[]", b'"x"', b"{}", b'{"weight_map": 3}', b'{"weight_map": {}}', b"\xff"]
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (
        lambda base: (base / shard_name(3, 3)).write_bytes(b"PK\x03\x04 and no more"),
        "00003-of-00003",
    ),
    (lambda base: (base / shard_name(2, 3)).unlink(), f"{shard_name(2, 3)}.*No such file"),
    (name_another_tensor, r"no tensor other\.weight"),
    (lambda base: pipe(base / shard_name(1, 3)), "no regular file"),
    (lambda base: pipe(base / INDEX_FILE), "no regular file"),
    *((partial(rename_in_index, shard=shard), "directory") for shard in ELSEWHERE),
    *(
        (lambda base, raw=raw: (base / INDEX_FILE).write_bytes(raw), "weight_map")
        for raw in MALFORMED
    ),
]


@pytest.mark.parametrize(("damage", "match"), DAMAGES)
def test_damaged_shards_and_indices_are_refused_at_once(
    damage: Callable[[Path], object], match: str, tmp_path: Path
) -> None:
    save_pickled(tmp_path / "base")
    damage(tmp_path / "base")
    refusal(tmp_path / "base", match=match)


def test_a_directory_without_pickled_weights_and_a_destination_in_use_are_refused(
    tmp_path: Path,
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    refusal(base, match="no pickled weights")
    base.mkdir()
    refusal(base, match="no pickled weights")
    safetensors.torch.save_file({"a": torch.ones(1)}, base / "model.safetensors")
    refusal(base, match="nothing to convert")
    out.mkdir()
    (out / "file").write_text("mine")
    with pytest.raises(OutputError):
        convert(tmp_path / "missing", out)
    assert (out / "file").read_text() == "mine"


def test_a_file_system_that_refuses_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100_000)}, (tmp_path / "base").with_suffix(".bin"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base.bin").rename(tmp_path / "base" / SINGLE_FILE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # the child inherits it
    try:
        with pytest.raises(OutputError, match=r"out: found .*File too large"):
            plain_convert(tmp_path / "base", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


@pytest.fixture
def _tight_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled, "SECONDS", 2.0)
    monkeypatch.setattr(pickled, "MEMORY", 1 << 28)


def archive(
    content: bytes,
    *,
    storages: Mapping[str, bytes] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """A zip archive as torch.save writes it, around a pickle of one's own."""
    entries = {"data.pkl": content, "version": b"3\n", "byteorder": b"little"}
    entries |= {f"data/{key}": value for key, value in (storages or {}).items()}
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w", compression) as written:
            for name, value in entries.items():
                written.writestr(f"x/{name}", value)
        return file.getvalue()


def instructions(state: object) -> bytes:
    with io.BytesIO() as file:
        torch.save(state, file)
        with zipfile.ZipFile(file) as saved:
            return saved.read(next(name for name in saved.namelist() if name.endswith("data.pkl")))


def as_value(value: bytes) -> bytes:
    """Instructions for a dictionary that holds a value under the name "a"."""
    return b"\x80\x02}X\x01\0\0\0a" + value + b"s."


def as_key(value: bytes) -> bytes:
    return b"\x80\x02}" + value + b"Ns."


NESTED = b")" + b"\x85" * 200_000  # a tuple in a tuple in a tuple, ...
# a pair of one tuple twice, which holds a pair, ...
SHARED = b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(100))
LOOP = b"]q\0h\0a"  # a list that holds itself
FAR = b"r\xff\xff\xff\x7f"  # noted under the number 2 ** 31 - 1


def storage_of(numel: int) -> bytes:
    """Instructions for a tensor of so many float32 in storage 0."""
    return instructions({"a": torch.ones(5)}).replace(b"K\x05", b"J" + numel.to_bytes(4, "little"))


def doubled(times: int) -> bytes:
    """Instructions for 4 bytes that are doubled again and again, by functions that torch's
    restricted reader allows.
    """
    begun = b"c_codecs\nencode\nX\4\0\0\0aaaaX\5\0\0\0ascii\x86R"
    return b"c_codecs\nencode\n" * times + begun + b"X\3\0\0\0hex\x86R" * times


FIVE = instructions({"a": torch.ones(5)})
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "tuples 200,000 deep": (partial(archive, as_value(NESTED)), "SIGSEGV|a tuple"),
    "tuples 200,000 deep as key": (partial(archive, as_key(NESTED)), "SIGSEGV"),
    "shared tuples": (partial(archive, as_value(SHARED)), "a tuple"),
    "shared tuples as key": (partial(archive, as_key(SHARED)), "takes longer"),
    "a list in itself": (partial(archive, as_value(LOOP)), "a list"),
    "a note under a large number": (partial(archive, as_value(b")" + FAR)), "a tuple"),
    "four bytes doubled 40 times": (partial(archive, as_value(doubled(40))), "more memory"),
    "6 GB of nothing": (partial(archive, as_value(b"X\xff\xff\xff\x7f")), "damaged|more memory"),
    "a storage of 6 GB": (
        partial(archive, storage_of(1_500_000_000), storages={"0": b"\0" * 20}),
        "damaged|6000000000",
    ),
    "a zip bomb": (
        partial(archive, b"\0" * (1 << 28), compression=zipfile.ZIP_DEFLATED),
        "compressed",
    ),
    "a compressed storage": (
        partial(archive, FIVE, storages={"0": b"\0" * 20}, compression=zipfile.ZIP_DEFLATED),
        "compressed",
    ),
    "a short storage": (
        partial(archive, FIVE, storages={"0": b"\0" * 12}),
        "sizes .12 bytes in all.; expected .* .20 bytes",
    ),
    "a long storage": (
        partial(archive, FIVE, storages={"0": b"\0" * 24}),
        "sizes .24 bytes in all.; expected .* .20 bytes",
    ),
    "no storage": (partial(archive, FIVE), "damaged"),
}


@pytest.mark.few(2)
@pytest.mark.usefixtures("_tight_limits")
@pytest.mark.parametrize(("write", "match"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_in_bounded_time_and_memory(
    write: Callable[[], bytes], match: str, tmp_path: Path
) -> None:
    (tmp_path / "base").mkdir()
    path = tmp_path / "base" / SINGLE_FILE
    path.write_bytes(write())
    error = refusal(tmp_path / "base", match=match)
    assert error.where.startswith(str(path))
    assert "\n" not in str(error)
    assert len(str(error)) < 1000


@pytest.mark.usefixtures("_tight_limits")
def test_a_flipped_bit_is_found_and_a_file_takes_little_more_memory_than_it_has_bytes(
    tmp_path: Path,
) -> None:
    (tmp_path / "base").mkdir()
    path = tmp_path / "base" / SINGLE_FILE
    torch.save({"a": torch.ones(1000)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.ones(4).numpy().tobytes()) + 800] ^= 1
    path.write_bytes(content)
    refusal(
        tmp_path / "base",
        match="data/0: found a damaged file; expected bytes with the archive's checksum",
    )
    torch.save({f"{i}": whole for i, whole in enumerate([torch.zeros(1 << 22)] * 100)}, path)
    refusal(tmp_path / "base", match="more memory")


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_that_a_link_takes_from_elsewhere_are_not_converted(
    shards: int, tmp_path: Path
) -> None:
    save_pickled(tmp_path / "base", shards=shards)
    (tmp_path / "others").write_text("mine")
    (tmp_path / "base" / "notes.txt").symlink_to(tmp_path / "others")  # it is not copied
    assert str(tmp_path / "others") in refusal(tmp_path / "base", match="a link to").found
    (tmp_path / "base" / "notes.txt").unlink()
    for path in sorted((tmp_path / "base").glob("pytorch_model*")):
        path.rename(tmp_path / "secret")
        path.symlink_to(tmp_path / "secret")
        assert str(tmp_path / "secret") in refusal(tmp_path / "base", match="a link to").found
        path.unlink()
        (tmp_path / "secret").rename(path)


def test_remote_code_does_not_go_along_and_that_is_said(tmp_path: Path) -> None:
    save_pickled(tmp_path / "base", shards=1)
    for name in ("config.json", "tokenizer_config.json"):
        path = tmp_path / "base" / name
        path.write_text(
            json.dumps({**json.loads(path.read_bytes()), "auto_map": {"AutoConfig": "code.Config"}})
        )
    (tmp_path / "base" / "code.py").write_text("raise SystemExit")
    lines: list[str] = []
    convert(tmp_path / "base", tmp_path / "out", report=lines.append)
    assert lines[0].startswith("config.json and tokenizer_config.json: auto_map is left out")
    assert not any(b"auto_map" in path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert not (tmp_path / "out" / "code.py").exists()
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=False) is not None
    )
