"""Freed memory goes back to the system where the process would exceed its plan, and is kept otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest
from command_lines import environment

BYTES = 256 << 20  # that were allocated in small blocks, of which all but a few are free again
LIMITS = {"None": False, "before + (8 << 20)": False, "before": True, "before - (200 << 20)": True}  # and what each returns
PROGRAM = f"""
import ctypes
import os
import torch
from zo2core.devices import resident_memory
from zo2core.sweep.gradient_visitor import make_room

libc = ctypes.CDLL(None)
assert libc.mallopt(-3, 1 << 25) == 1 and libc.mallopt(-1, -1) == 1  # as zo2 train: freed blocks are kept
for text in {list(LIMITS)!r}:
    if os.fork() == 0:  # a heap of its own, without importing anew
        blocks = [torch.ones(1 << 18) for _ in range({BYTES} >> 20)]
        before = resident_memory()
        del blocks[1::2], blocks[:-1]
        make_room(eval(text), 1 << 20)
        print(before - resident_memory(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="allocators of other systems have no such call")
def test_freed_memory_is_returned_if_the_process_would_exceed_its_limit() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    returned = [int(line) > BYTES * 3 // 4 for line in done.stdout.splitlines()]
    assert returned == list(LIMITS.values()), done.stdout


PLANNING = f"""
import ctypes
import torch
from zo2core import BlockLayout, SegmentKind
from zo2core.planning.memory import Machine
from zo2core.planning.memory import RunRequest, plan_host

libc = ctypes.CDLL(None)
assert libc.mallopt(-3, 1 << 25) == 1 and libc.mallopt(-1, -1) == 1  # as zo2 train: freed blocks are kept
layouts = [BlockLayout(kind.value, kind, ()) for kind in SegmentKind]
request = RunRequest(layouts=layouts, on_disk=layouts)
before = plan_host(request, Machine(), 0).nbytes
blocks = [torch.ones(1 << 18) for _ in range({BYTES} >> 20)]
del blocks[1::2], blocks[:-1]
print(plan_host(request, Machine(), 0).nbytes - before)
"""


@pytest.mark.long_profile
@pytest.mark.skipif(sys.platform != "linux", reason="allocators of other systems have no such call")
def test_what_an_earlier_run_has_freed_is_not_counted_beside_a_later_one() -> None:
    done = subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < BYTES // 4
