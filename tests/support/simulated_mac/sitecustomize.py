"""A process without the calls that macOS lacks: Python imports this first if its folder is in
PYTHONPATH.

What macOS has instead is added, and counted. Its command numbers mean nothing to Linux, so they
are answered here. Libraries keep what they need: /proc is hidden from this project's files alone.
"""

import fcntl
import mmap
import os
import sys
from collections import Counter
from typing import Any

MISSING = {
    os: (
        *("O_DIRECT", "O_TMPFILE", "O_PATH", "fdatasync", "posix_fadvise", "posix_fallocate"),
        *("POSIX_FADV_DONTNEED", "POSIX_FADV_WILLNEED", "sched_getaffinity", "sched_setaffinity"),
        *("memfd_create", "copy_file_range", "splice", "eventfd", "pidfd_open", "pipe2"),
    ),
    fcntl: ("F_GETPIPE_SZ", "F_SETPIPE_SZ", "F_ADD_SEALS", "F_NOTIFY"),
    mmap: ("MADV_HUGEPAGE", "MADV_POPULATE_READ", "MAP_POPULATE"),
}
COMMANDS = {"F_NOCACHE": 48, "F_FULLFSYNC": 51}
controls: Counter[str] = Counter()  # commands of macOS that were carried out
_control = fcntl.fcntl
_library_names = ("/src/zo2core/", "/src/zo2adapters/", "/zo2core/", "/zo2adapters/")


def _control_as_on_macos(descriptor: Any, command: int, argument: Any = 0) -> Any:
    for name, number in COMMANDS.items():
        if command == number:
            os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())
            controls[name] += 1
            return 0
    return _control(descriptor, command, argument)


def _hide_proc(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not str(arguments[0]).startswith(("/proc/", "/sys/")):
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and "pathlib" in frame.f_code.co_filename:
        frame = frame.f_back
    if any(name in frame.f_code.co_filename for name in _library_names):
        raise FileNotFoundError(2, "no such file on macOS", str(arguments[0]))


for module, names in MISSING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name, number in COMMANDS.items():
    setattr(fcntl, name, number)
fcntl.fcntl = _control_as_on_macos
sys.addaudithook(_hide_proc)
