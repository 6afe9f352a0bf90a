"""Pickled tensors: rewritten as safetensors by a child process.

``torch.load(weights_only=True, mmap=True)`` runs no code of a pickle, but a small file can still
make it take any memory, run for ever or crash. So it runs in a child process whose limits follow
from the file's size (see ``limited_process``).
"""

from __future__ import annotations

import os
from pathlib import Path

from zo2adapters.limited_process import LimitedProcess, LimitedProcessError
from zo2core.errors import CheckpointError, system_errors_as
from zo2core.io.durable import open_regular

_READER_SCRIPT = Path(__file__).with_name("unpickling.py")
# Limits of the child: each gigabyte of weights takes about a second and two gigabytes of memory.
SECONDS = 30.0  # CPU seconds for any file
SECONDS_PER_BYTE = 60e-9
MEMORY = 1 << 29  # bytes for any file, beyond the memory of the started child
MEMORY_PER_BYTE = 4


def new_reader() -> LimitedProcess:
    """Make a child process that reads pickled files.

    It starts, and imports torch, with the first file.
    """
    return LimitedProcess(_READER_SCRIPT)


def write_as_safetensors(reader: LimitedProcess, source: Path, target: Path) -> dict[str, int]:
    """Convert one file in the child process. Returns the bytes of each tensor written."""
    typed = system_errors_as(
        CheckpointError, source, expected="a readable file", remedy="get the file again"
    )
    with typed, open_regular(source) as file:
        nbytes = os.fstat(file.fileno()).st_size
    request = {"source": str(source), "target": str(target)}
    try:
        seconds = SECONDS + SECONDS_PER_BYTE * nbytes
        memory = MEMORY + MEMORY_PER_BYTE * nbytes
        result = reader.ask(request, seconds=seconds, memory=memory)
    except LimitedProcessError as error:
        raise CheckpointError(
            source,
            f"a file that cannot be read within limits ({error})",
            "tensors by name",
            "get the file again in case it is damaged; else ask its author for safetensors, and "
            "do not load it",
        ) from error
    if "refused" in result:
        raise CheckpointError(result["refused"].pop("where"), **result["refused"])
    if "unwritable" in result:
        # the new directory reports it, as it does every write that fails
        raise OSError(result["unwritable"])
    return dict(result["sizes"])
