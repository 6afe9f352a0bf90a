"""Directories and files whose names and bytes survive a power failure once a call returns."""

from __future__ import annotations

import os
from pathlib import Path


def make_directory(path: Path) -> None:
    """Make a directory, if it is not there, and what is missing above it; on return their names are durable.

    Raises:
        OSError: if the system refuses.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_path(each.parent)


def sync_path(path: Path) -> None:
    """Wait until a file's data, or a directory's names, are on disk.

    Raises:
        OSError: if the system refuses.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
