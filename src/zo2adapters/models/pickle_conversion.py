"""Convert pickled PyTorch checkpoints to safetensors, one shard at a time and without running code of the pickle.

``torch.load(weights_only=True, mmap=True)`` runs no code, but a small file can still make it take any memory, run for ever
or crash. So it runs in a child process whose limits follow from the file's size (see ``limited_process``).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from zo2adapters.limited_process import LimitedProcess, LimitedProcessError
from zo2adapters.models.model_directory import portable_companions, remote_code_note
from zo2core.checkpoint.shards import (
    new_directory,
    require_own_file,
    require_unused,
    shard_names,
    write_companions,
    write_index,
)
from zo2core.errors import CheckpointError, reason
from zo2core.io.durable import open_regular

SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"

_READER_SCRIPT = Path(__file__).with_name("unpickling.py")
_MAX_INDEX_BYTES = 100_000_000

# Limits of the child: each gigabyte of weights takes about a second and two gigabytes of memory.
SECONDS = 30.0  # CPU seconds for any file
SECONDS_PER_BYTE = 60e-9
MEMORY = 1 << 29  # bytes for any file, beyond the memory of the started child
MEMORY_PER_BYTE = 4


def convert(
    source: Path,
    destination: Path,
    *,
    report: Callable[[str], object] = lambda line: None,
    reader: LimitedProcess | None = None,
) -> Path:
    """Convert a model directory from pickled weights to safetensors. Memory: one shard, in a child process."""
    require_unused(destination)
    expected = _find_shards(source)
    companions, changed = portable_companions(source)
    names = shard_names(len(expected))
    assigned = {name: shard for shard, tensors in expected.items() for name in tensors}
    weight_map: dict[str, str] = {}
    total_size = 0
    reading = new_reader() if reader is None else contextlib.nullcontext(reader)
    with new_directory(destination) as partial, reading as child:
        write_companions(partial, companions)
        if changed:
            report(remote_code_note(changed))
        for number, (shard, target) in enumerate(zip(expected, names, strict=True), start=1):
            report(f"{shard} ({number} of {len(expected)})")
            sizes = _convert_shard(child, source / shard, partial / target, shard, assigned)
            for name in sizes:
                if name in weight_map:
                    raise _malformed(f"{source / shard}: {name}", "a tensor of another shard", "each tensor once")
                weight_map[name] = target
            for name in expected[shard]:
                if name not in sizes:
                    raise _malformed(source / shard, f"no tensor {name}", f"the tensor, as {INDEX_FILE} says")
            total_size += sum(sizes.values())
        if not weight_map:
            raise _malformed(source, "no tensors", "a model's weights")
        write_index(partial, weight_map, total_size=total_size)
    return destination


def new_reader() -> LimitedProcess:
    """Make a child process that reads pickled files. It starts, and imports torch, with the first file."""
    return LimitedProcess(_READER_SCRIPT)


def _find_shards(directory: Path) -> dict[str, list[str]]:
    """The tensors that the index expects in each shard, by the shard's file name; a single file has no index."""
    index_path = directory / INDEX_FILE
    if index_path.exists():
        require_own_file(index_path, directory)
        shards = _read_index(index_path)
        for shard in shards:
            require_own_file(directory / shard, directory)
        return shards
    if (directory / SINGLE_FILE).exists():
        require_own_file(directory / SINGLE_FILE, directory)
        return {SINGLE_FILE: []}
    found, remedy = "no pickled weights", "pass a directory that holds a model in the Hugging Face layout"
    if any(directory.glob("*.safetensors")):
        found, remedy = "safetensors weights only", "use this directory as it is; there is nothing to convert"
    raise CheckpointError(directory, found=found, expected=f"{SINGLE_FILE} or {INDEX_FILE}", remedy=remedy)


def _read_index(path: Path) -> dict[str, list[str]]:
    try:
        with open_regular(path) as file:
            raw = file.read(_MAX_INDEX_BYTES + 1)
        if len(raw) > _MAX_INDEX_BYTES:
            raise _malformed(path, f"more than {_MAX_INDEX_BYTES} bytes", "a JSON object with a weight_map")
        pairs = list(json.loads(raw)["weight_map"].items())
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise _malformed(path, f"no usable index ({error})", "a JSON object with a weight_map") from error
    shards: dict[str, list[str]] = {}
    for name, shard in sorted(pairs, key=str):
        # Printable: a name with NUL or a lone surrogate cannot be opened.
        is_file_name = isinstance(shard, str) and shard.isprintable() and shard == os.path.basename(shard)
        if not is_file_name or not shard.endswith(".bin"):
            raise CheckpointError(
                f"{path}: {name}",
                found=f"shard {str(shard)[:200]!r}",
                expected="the name of a .bin file in the index's own directory",
                remedy="do not use this checkpoint unless you know why its index points elsewhere",
            )
        shards.setdefault(shard, []).append(name)
    if not shards:
        raise _malformed(path, "an empty weight_map", "the model's tensors")
    return dict(sorted(shards.items()))


def _convert_shard(
    reader: LimitedProcess, source: Path, target: Path, shard: str, assigned: Mapping[str, str]
) -> dict[str, int]:
    """Convert one file in the child process. Returns the bytes of each tensor written."""
    try:
        with open_regular(source) as file:
            nbytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _unreadable(source, error) from error
    request = {"source": str(source), "target": str(target), "shard": shard, "assigned": assigned}
    try:
        seconds, memory = SECONDS + SECONDS_PER_BYTE * nbytes, MEMORY + MEMORY_PER_BYTE * nbytes
        result = reader.ask(request, seconds=seconds, memory=memory)
    except LimitedProcessError as error:
        raise CheckpointError(
            source,
            found=f"a file that cannot be read within limits ({error})",
            expected="tensors by name",
            remedy="get the file again in case it is damaged; else ask its author for safetensors, and do not load it",
        ) from error
    if "refused" in result:
        raise CheckpointError(result["refused"].pop("where"), **result["refused"])
    if "unwritable" in result:
        raise OSError(result["unwritable"])  # the new directory reports it, as it does every write that fails
    return dict(result["sizes"])


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    found = reason(error)
    return CheckpointError(path, found=found, expected="a readable file", remedy="get the checkpoint's files again")


def _malformed(where: object, found: str, expected: str) -> CheckpointError:
    return CheckpointError(where, found=found, expected=expected, remedy="get the checkpoint's files again")
