"""Convert pickled PyTorch checkpoints to safetensors, one shard at a time and without running code of the pickle.

``torch.load(weights_only=True, mmap=True)`` runs no code, but a small file can still make it take any memory, run for ever
or crash. So it runs in a child process whose limits follow from the file's size (see ``limited_process``).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from zo2adapters.limited_process import LimitedProcess, LimitedProcessError
from zo2adapters.models.checkpoint import portable_companions, remote_code_note
from zo2core.checkpoint.shards import (
    new_directory,
    parse_index,
    require_own_file,
    require_unused,
    shard_names,
    write_companions,
    write_index,
)
from zo2core.errors import CheckpointError, system_errors_as
from zo2core.io.durable import open_regular

SINGLE_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"

_READER_SCRIPT = Path(__file__).with_name("unpickling.py")
_REMEDY = "get the checkpoint's files again"

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
    shards: dict[str, list[str]] = {}
    if (directory / INDEX_FILE).exists():
        require_own_file(directory / INDEX_FILE, directory)
        for name, shard in sorted(parse_index(directory / INDEX_FILE, suffix=".bin").items()):
            shards.setdefault(shard, []).append(name)
        if not shards:
            raise _malformed(directory / INDEX_FILE, "an empty weight_map", "the model's tensors")
    elif (directory / SINGLE_FILE).exists():
        shards[SINGLE_FILE] = []
    else:
        found, remedy = "no pickled weights", "pass a directory that holds a model in the Hugging Face layout"
        if any(directory.glob("*.safetensors")):
            found, remedy = "safetensors weights only", "use this directory as it is; there is nothing to convert"
        raise CheckpointError(directory, found=found, expected=f"{SINGLE_FILE} or {INDEX_FILE}", remedy=remedy)
    for shard in shards:
        require_own_file(directory / shard, directory)
    return dict(sorted(shards.items()))


def _convert_shard(
    reader: LimitedProcess, source: Path, target: Path, shard: str, assigned: Mapping[str, str]
) -> dict[str, int]:
    """Convert one file in the child process. Returns the bytes of each tensor written."""
    with system_errors_as(CheckpointError, source, expected="a readable file", remedy=_REMEDY), open_regular(source) as file:
        nbytes = os.fstat(file.fileno()).st_size
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


def _malformed(where: object, found: str, expected: str) -> CheckpointError:
    return CheckpointError(where, found=found, expected=expected, remedy=_REMEDY)
