"""Freed memory goes back to the system where the process would exceed its plan, and is kept otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest
from command_lines import environment

BYTES = 256 << 20  # that were allocated in small blocks, of which all but a few are free again
PROGRAM = f"""
import ctypes
import torch
from zo2core.io.process_memory import resident_memory
from zo2core.sweep.memory_limit import MemoryLimit

libc = ctypes.CDLL(None)
assert libc.mallopt(-3, 1 << 25) == 1 and libc.mallopt(-1, -1) == 1  # as zo2 train: freed blocks are kept
blocks = [torch.ones(1 << 18) for _ in range({BYTES} >> 20)]
before = resident_memory()
del blocks[1::2], blocks[:-1]
limit = MemoryLimit(%s)
limit.make_room(1 << 20)
print(before - resident_memory())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="allocators of other systems have no such call")
@pytest.mark.parametrize(
    ("limit", "returns"), [("None", False), ("before + (8 << 20)", False), ("before", True), ("before - (200 << 20)", True)]
)
def test_freed_memory_is_returned_if_the_process_would_exceed_its_limit(limit: str, returns: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % limit], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > BYTES * 3 // 4) is returns, done.stdout
