"""Files of a checkpoint: which bytes are read and written, and what is refused."""

import itertools
import json
import math
import os
import random
import re
import resource
import signal
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from zo2core import HostDevice, ParameterSpec
from zo2core.checkpoint.export import new_directory, require_unused, write_checkpoint
from zo2core.checkpoint.shards import Piece, SafetensorsReader, find_tensors, parse_header
from zo2core.errors import CheckpointError, OutputError, ZO2Warning
from zo2core.io import direct_file as ranged
from zo2core.io.direct_file import PAGE, RangedFile, byte_view, near_ranges
from zo2core.types import SavedForm


def raw(header: object, data: bytes = b"\0" * 8) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
MALFORMED: dict[str, tuple[Any, bytes]] = {
    "not JSON": (b"{", b""),
    "nested without end": (b"[" * 100_000, b""),
    "not UTF-8": (b'{"\xff": 1}', b""),
    "not an object": ([], b""),
    "entry not an object": ({"a": 3}, b""),
    "entry without shape": ({"a": {"dtype": "F32", "data_offsets": [0, 0]}}, b""),
    "unknown dtype": ({"a": {**F32, "dtype": "F3"}}, b"\0" * 8),
    "dtype of another kind": ({"a": {**F32, "dtype": [1]}}, b"\0" * 8),
    "negative size": ({"a": {**F32, "shape": [-2]}}, b"\0" * 8),
    "fractional size": ({"a": {**F32, "shape": [2.0]}}, b"\0" * 8),
    "boolean size": ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"\0" * 4),
    "huge size": ({"a": {**F32, "shape": [10**30]}}, b"\0" * 8),
    "offsets backwards": ({"a": {**F32, "data_offsets": [8, 0]}}, b"\0" * 8),
    "one offset": ({"a": {**F32, "data_offsets": [8]}}, b"\0" * 8),
    "size is not shape times dtype": ({"a": {**F32, "shape": [3]}}, b"\0" * 8),
    "outside the file": ({"a": F32}, b"\0" * 4),
    "bytes left over": ({"a": F32}, b"\0" * 9),
    "overlap": ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, b"\0" * 12),
    "hole": ({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, b"\0" * 20),
    "a name twice": (
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": {}}',
        b"",
    ),
}
TRUNCATED = [
    b"",
    b"1234567",
    *(struct.pack("<Q", length) + b"{}" for length in (0, 1, 9, 2**31, 2**63, 2**64 - 1)),
]
CONTENTS = {name: raw(*parts) for name, parts in MALFORMED.items()}
CONTENTS |= {f"truncated to {content!r}": content for content in TRUNCATED}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_malformed_headers_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as info:
        parse_header(path)
    assert "x.safetensors" in info.value.where


def test_tensors_are_read_bit_for_bit_and_converted_on_request(tmp_path: Path) -> None:
    value = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    save_file({"a": value, "b": value.to(torch.float16)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(find_tensors(tmp_path))
    for name, source in (("a", value), ("b", value.to(torch.float16))):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            out = torch.empty(value.numel(), dtype=dtype)
            reader.read_into(name, out)
            assert torch.equal(out, source.to(dtype))
    reader.close()
    reader.close()
    again = torch.empty(value.numel())
    reader.read_into("a", again)  # opens the file anew
    assert torch.equal(again, value)
    reader.close()


def overwrite_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")


def replace_by_rename(path: Path) -> None:
    save_file({"a": torch.full((PAGE,), 2.0)}, path.with_name("new"))
    path.with_name("new").replace(path)


REWRITTEN = "that another process has written into the file meanwhile"


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("change", "found", "found_anew"),
    [
        (overwrite_in_place, REWRITTEN, REWRITTEN),
        (lambda path: os.truncate(path, 9000), "9000 bytes", "9000 bytes"),
        (
            replace_by_rename,
            None,
            "another file in its place",
        ),  # what is open is the file as it was
        (Path.unlink, None, "No such file"),
    ],
    ids=["in place", "truncated", "replaced", "removed"],
)
def test_a_base_that_changes_while_it_is_open_is_refused(
    change: Callable[[Path], object],
    found: str | None,
    found_anew: str,
    direct: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, out = tmp_path / "model.safetensors", torch.empty(PAGE)
    save_file({"a": torch.ones(PAGE)}, path)
    with closing(SafetensorsReader(find_tensors(tmp_path))) as reader:
        reader.read_into("a", out)
        if not direct:
            monkeypatch.setattr(reader._files[path], "_supports_direct", False)
        change(path)
        if found is None:
            reader.read_into("a", out.zero_())
            assert torch.equal(out, torch.ones(PAGE))
        else:
            with pytest.raises(CheckpointError, match=found) as info:
                reader.read_into("a", out)
            assert info.value.where == str(path)
            assert "resumes" in info.value.remedy
        reader.close()
        with pytest.raises(CheckpointError, match=found_anew):
            reader.read_into("a", out)


@contextmanager
def descriptors(count: int) -> Iterator[None]:
    """A context in which this process can open so many more files."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    filling = [os.open(os.devnull, os.O_RDONLY)]
    while filling[-1] < highest:
        filling.append(os.open(os.devnull, os.O_RDONLY))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (filling[-1] + 1 + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in filling:
            os.close(descriptor)


@pytest.mark.parametrize("spare", [0, 1])
def test_too_many_open_files_are_no_missing_or_damaged_file(spare: int, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, path := tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as refused, descriptors(spare):
        parse_header(path)
    assert refused.value.found == "Too many open files"
    assert refused.value.remedy == "raise the limit of open files (ulimit -n)"
    with descriptors(2):
        assert list(parse_header(path)) == ["w"]


def test_integer_tensors_are_refused_as_quantised(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="quantised"):
        SafetensorsReader(find_tensors(tmp_path)).read_into("a", torch.empty(3))


def test_the_fingerprint_is_of_the_weights_not_of_their_files(tmp_path: Path) -> None:
    values = {"a": torch.arange(5.0), "b": torch.ones(3)}
    prints = []
    for tensors in (values, {"b": values["b"], "a": values["a"]}, {**values, "a": values["a"] + 1}):
        save_file(tensors, tmp_path / "x")
        with closing(SafetensorsReader(parse_header(tmp_path / "x"))) as reader:
            prints.append(reader.fingerprint)
    assert prints[0] == prints[1] != prints[2]


def sharded(folder: Path) -> dict[str, str]:
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.zeros(2)}, folder / "two.safetensors")
    return {"a": "one.safetensors", "b": "two.safetensors"}


def write_index(folder: Path, index: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "shard", ["../two.safetensors", "/etc/passwd", "sub/two.safetensors", "..", "", 3, None, "a\0b"]
)
def test_an_index_that_leaves_its_directory_is_refused(shard: object, tmp_path: Path) -> None:
    write_index(tmp_path, {"weight_map": {**sharded(tmp_path), "b": shard}})
    with pytest.raises(CheckpointError, match="directory"):
        find_tensors(tmp_path)


def test_what_is_missing_or_malformed_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(CheckpointError):
            parse_header(path)
    with pytest.raises(CheckpointError, match="no safetensors"):
        find_tensors(tmp_path)
    weight_map = sharded(tmp_path)
    malformed: list[Any] = [[], {}, {"weight_map": 3}, {"weight_map": []}, "x"]
    for index in ({"weight_map": {**weight_map, "c": "two.safetensors"}}, *malformed):
        write_index(tmp_path, index)
        with pytest.raises(CheckpointError, match="index" if index in malformed else "no tensor c"):
            find_tensors(tmp_path)
    write_index(tmp_path, {"weight_map": weight_map})
    assert {name: entry.path.name for name, entry in find_tensors(tmp_path).items()} == weight_map
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors"):
        find_tensors(tmp_path)
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="more than"):
        find_tensors(tmp_path)


SPECS = [ParameterSpec(f"p{i}", (i + 1, 3), torch.float32, i, True) for i in range(4)]


def values() -> Iterator[tuple[str, torch.Tensor]]:
    for spec in SPECS:
        yield spec.name, torch.full(spec.shape, float(spec.index))


@pytest.mark.parametrize("max_shard", [10**9, 40, 1])
def test_written_checkpoints_load(max_shard: int, tmp_path: Path) -> None:
    (tmp_path / "extra").write_bytes(b"copied")
    write_checkpoint(
        tmp_path / "out",
        SPECS,
        values(),
        {"a.json": b"{}", "b.txt": tmp_path / "extra"},
        max_shard=max_shard,
    )
    entries = find_tensors(tmp_path / "out")
    reader = SafetensorsReader(entries)
    for name, value in values():
        out = torch.empty(value.numel())
        reader.read_into(name, out)
        assert torch.equal(out, value.flatten())
        assert torch.equal(load_file(entries[name].path)[name], value)
    assert (tmp_path / "out" / "b.txt").read_bytes() == b"copied"
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) == {10**9: 1, 40: 3, 1: 4}[max_shard]


@pytest.mark.parametrize(
    ("dtype", "value", "told"),
    [
        (None, float("nan"), "shard: p2: found nan; expected finite weights"),
        (torch.float16, 7e4, "shard: p2: found 70000, which float16 cannot hold"),
        (torch.bfloat16, float("-inf"), "shard: p2: found -inf"),
        (torch.float8_e5m2, 7e4, "shard: p2: found 70000, which float8_e5m2 cannot hold"),
    ],
)
def test_numbers_that_are_not_finite_in_their_file_are_not_written(
    dtype: torch.dtype | None, value: float, told: str, tmp_path: Path
) -> None:
    def spoilt() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in values():
            if name == "p2":
                tensor.view(-1)[-1] = value
            yield name, tensor

    with pytest.raises(CheckpointError, match=told):
        write_checkpoint(
            tmp_path / "out", SPECS, spoilt(), {}, dtype=dtype, origin=lambda name: "shard"
        )
    assert not list(tmp_path.iterdir())
    masks = SavedForm(constants={"mask": torch.tensor([0.0, float("-inf")])})
    write_checkpoint(tmp_path / "out", SPECS, values(), {}, form=masks)
    assert load_file(tmp_path / "out" / "model.safetensors")["mask"].tolist() == [0, -math.inf]


def test_a_write_that_fails_leaves_nothing_and_what_is_there(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "p0", torch.zeros(1, 3)
        raise ZeroDivisionError

    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):
        write_checkpoint(out, SPECS, failing(), {})
    with pytest.raises(CheckpointError, match=r"base/tokenizer\.json: found No such file"):
        write_checkpoint(
            out, SPECS, values(), {"tokenizer.json": tmp_path / "base" / "tokenizer.json"}
        )
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    (out / "file").write_text("mine")
    for taken in (out, out / "file"):
        with pytest.raises(OutputError):
            write_checkpoint(taken, SPECS, values(), {})
        assert (out / "file").read_text() == "mine"


def test_a_link_planted_while_shards_are_written_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")

    def planting() -> Iterator[tuple[str, torch.Tensor]]:
        (partial,) = (path for path in tmp_path.rglob("*.partial-*/out") if path.is_dir())
        for number in range(2, 5):
            (partial / f"model-0000{number}-of-00004.safetensors").symlink_to(tmp_path / "victim")
        yield from values()

    with pytest.raises(OutputError, match="File exists"):
        write_checkpoint(tmp_path / "out", SPECS, planting(), {}, max_shard=1)
    assert (tmp_path / "victim").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


def test_what_stands_beside_an_output_is_neither_used_nor_removed(tmp_path: Path) -> None:
    """Under the name of a temporary directory, too: of another process, or planted."""
    planted = tmp_path / f".out.partial-{os.getpid()}"
    planted.mkdir()
    (planted / "config.json").symlink_to(tmp_path / "victim")
    linked = tmp_path / ".out.partial-link"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "out.lock").touch()
    linked.symlink_to(tmp_path / "elsewhere")
    write_checkpoint(tmp_path / "out", SPECS, values(), {"config.json": b"{}"})
    assert not (tmp_path / "victim").exists()
    assert (planted / "config.json").is_symlink()
    assert (linked / "out.lock").exists()
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == stat.S_IMODE(
        planted.stat().st_mode
    ), "the usual rights"


def killed_while_it_writes(out: Path) -> Path:
    """What a process leaves that is killed while it writes a directory."""
    child = os.fork()
    if not child:
        with new_directory(out) as partial:
            (partial / "model.safetensors").write_bytes(bytes(5000))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (left,) = out.parent.glob(".out.partial-*")
    return left


def test_what_a_killed_process_has_left_is_removed_by_name_and_what_another_one_writes_is_not(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    left = killed_while_it_writes(out)
    with pytest.warns(ZO2Warning, match=re.escape(f"{left} is removed")) as warned:
        require_unused(out)
    assert "5.00 kB" in str(warned[0].message)
    assert not list(tmp_path.iterdir())
    with new_directory(tmp_path / "other") as writing:  # a name that begins alike is another one
        killed_while_it_writes(out)
        with pytest.warns(ZO2Warning, match="is removed"):
            write_checkpoint(out, SPECS, values(), {})
        assert writing.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "other"}
    with new_directory(tmp_path / "third") as writing:
        require_unused(tmp_path / "third")
        assert writing.exists()
    killed_after_its_end = tmp_path / ".out.partial-abcd"
    killed_after_its_end.mkdir()
    with pytest.raises(OutputError, match="something at this path"):
        require_unused(out)
    assert not killed_after_its_end.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_fifo_or_a_device_is_refused_without_waiting(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="no regular file"):
        find_tensors(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="a link to /dev/zero"):
        find_tensors(tmp_path)


def test_the_later_one_of_two_that_write_a_directory_is_told_what_happened(tmp_path: Path) -> None:
    """And not to free space: there is enough of it."""

    def write_both() -> None:
        with new_directory(tmp_path / "out") as later, new_directory(tmp_path / "out") as earlier:
            (later / "file").write_text("later")
            (earlier / "file").write_text("earlier")

    with pytest.raises(
        OutputError, match=r"another process put there in the meantime.*use what is there now"
    ) as info:
        write_both()
    assert "space" not in str(info.value)
    assert (tmp_path / "out" / "file").read_text() == "earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


SIZE = 9 * PAGE + 123


@pytest.fixture(scope="module")
def content() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> Path:
    path = tmp_path_factory.mktemp("ranged") / "file"
    path.write_bytes(content)
    return path


@given(data=st.data())
@pytest.mark.parametrize("least", [PAGE, 1 << 20], ids=["in place", "by way of the buffer"])
def test_ranges_arrive_whole_and_change_nothing_else(
    path: Path, content: bytes, least: int, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, SIZE))
    length = data.draw(st.integers(0, SIZE - offset))
    askew = data.draw(st.sampled_from([0, 0, 1, 64]))  # of the address against the offset
    memory = HostDevice().host_memory(SIZE + 3 * PAGE)
    memory.fill_(7)
    at = PAGE + offset % PAGE + askew
    file = RangedFile(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranged, "IN_PLACE", least)
        file.read_into(offset, byte_view(memory[at : at + length]))
    file.close()
    assert memory[at : at + length].numpy().tobytes() == content[offset : offset + length]
    assert torch.all(memory[:at] == 7)
    assert torch.all(memory[at + length :] == 7)


@given(
    cuts=st.lists(st.integers(0, SIZE), min_size=2, max_size=12, unique=True),
    seed=st.integers(0, 9),
    near=st.sampled_from([0, PAGE, 1 << 16]),
    staging=st.sampled_from([3 * PAGE, 1 << 20]),
)
def test_ranges_that_are_near_to_one_another_arrive_by_fewer_reads(
    path: Path, content: bytes, cuts: list[int], seed: int, near: int, staging: int
) -> None:
    bounds = sorted(cuts)
    # some of the ranges between the cuts, in any order
    pairs = [pair for pair in itertools.pairwise(bounds) if (pair[0] + seed) % 3]
    random.Random(seed).shuffle(pairs)
    memories = [bytearray(stop - start) for start, stop in pairs]
    ranges = [(start, stop - start) for start, stop in pairs]
    file = RangedFile(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranged, "NEAR", near)
        patch.setattr(ranged, "STAGING", staging)
        patch.setattr(ranged, "_thread", threading.local())
        groups = list(near_ranges(ranges))
        assert sorted(itertools.chain(*groups)) == list(range(len(ranges)))
        for group in groups:
            parts = [(pairs[number][0], memoryview(memories[number])) for number in group]
            if len(group) == 1 or not file.read_together(parts):
                for offset, memory in parts:
                    file.read_into(offset, memory)
    file.close()
    assert [bytes(memory) for memory in memories] == [content[a:b] for a, b in pairs]


def test_a_range_within_another_is_read_together_with_it(path: Path, content: bytes) -> None:
    outer = bytearray(2 * PAGE)
    inner = bytearray(10)
    file = RangedFile(path)
    parts = [(1, memoryview(outer)), (5, memoryview(inner))]
    if not file.read_together(parts):
        pytest.skip("no direct I/O here")
    file.close()
    assert bytes(outer) == content[1 : 1 + 2 * PAGE]
    assert bytes(inner) == content[5:15]


def test_parts_of_an_encoded_matrix_are_read_together_and_a_missing_one_is_told_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = {
        f"part {i:02}": torch.randint(0, 255, (1000 + i,), dtype=torch.uint8, generator=generator)
        for i in range(40)
    }
    path = tmp_path / "model.safetensors"
    save_file(parts, path)
    entries = find_tensors(tmp_path)
    pieces = {"w": [Piece.whole(entries[name]) for name in reversed(parts)]}
    out = torch.empty(sum(len(part) for part in parts.values()), dtype=torch.uint8)
    reads = MagicMock(side_effect=os.preadv)
    monkeypatch.setattr(os, "preadv", reads)
    with closing(SafetensorsReader(pieces)) as reader:
        reader.read_into("w", out)
        if reader._files[path]._direct is not None:
            assert reads.call_count == 1
        assert torch.equal(out, torch.cat([parts[name] for name in reversed(parts)]))
        overwrite_in_place(path)
        with pytest.raises(CheckpointError, match=REWRITTEN):
            reader.read_into("w", out)
    os.truncate(path, path.stat().st_size - 500)
    unchecked = {
        name: [piece._replace(entry=piece.entry._replace(state=None)) for piece in of_one]
        for name, of_one in pieces.items()
    }
    with (
        closing(SafetensorsReader(unchecked)) as reader,
        pytest.raises(CheckpointError, match="end of file") as info,
    ):
        reader.read_into("w", out)
    assert info.value.where == f"{path}: part 39"


def test_only_broken_pages_are_copied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = MagicMock(side_effect=ranged._read_staged)
    monkeypatch.setattr(ranged, "_read_staged", staged)
    monkeypatch.setattr(ranged, "IN_PLACE", 4 * PAGE)
    memory = HostDevice().host_memory(8 * PAGE)
    file = RangedFile(path)
    if file._direct is None:
        pytest.skip("this file system takes no direct I/O")
    file.read_into(100, byte_view(memory[100 : 6 * PAGE + 50]))
    file.close()
    assert [len(call.args[2]) for call in staged.call_args_list] == [PAGE - 100, 50]


@pytest.mark.parametrize("offset", [0, 100, PAGE])
def test_a_file_that_ends_early_is_told(
    path: Path, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranged, "IN_PLACE", PAGE)
    memory = HostDevice().host_memory(SIZE + 3 * PAGE)
    file = RangedFile(path)
    with pytest.raises(EOFError, match=str(SIZE)):
        file.read_into(offset, byte_view(memory[offset : SIZE + PAGE]))
    file.close()
